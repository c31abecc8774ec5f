"""The reports of a server about its VMs by chirp, and their times."""

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.conftest import simulated_ad
from tests.jobs import ad
from tests.lab.starter import ANY, FakeStarter, elsewhere
from tests.peer import Peer, environment
from vmgahp import errors, lifecycle
from vmgahp.config import Settings
from vmgahp.daemon import collector
from vmgahp.daemon.collector import Collector, Outcome
from vmgahp.drivers.simulated import SimulatedMachine
from vmgahp.host import wait
from vmgahp.host.job_user import Identity
from vmgahp.job import published
from vmgahp.lifecycle import CHECKPOINT, RESUME, RUNNING, START, STATUS, STOP, STOPPED, SUSPEND
from vmgahp.metrics import Status
from vmgahp.protocol.session import Call, Vm


class Life:
    """One VM as a server has it, whose operations come to what a test says."""

    def __init__(self, scratch: Path, user: Identity) -> None:
        self.said: list[str] = []
        log = SimpleNamespace(always=self.said.append, debug=lambda _line: None)
        self.collector = Collector(Settings({"VM_METRICS_INTERVAL": "0"}), user, log)
        self.vm = Vm(1)
        self.job = ad(scratch=scratch, ChirpVMVNC='"127.0.0.1:5900"', ChirpVMState='"Stopped"')
        self.machine = SimulatedMachine(self.job, {})

    def did(self, operation: str, outcome: Outcome = None, state: lifecycle.State = RUNNING) -> None:
        call = Call(self.vm, operation, 1, 0.0)
        call.job, call.state = self.job, lifecycle.STARTING if operation == START else state
        self.collector.done(call, outcome, time.monotonic() - 2, self.machine)

    def status(self, state: lifecycle.State = RUNNING) -> None:
        self.did(STATUS, Status(state))


@pytest.fixture
def life(scratch: Path, user: Identity) -> Life:
    return Life(scratch, user)


def test_nothing_is_said_after_a_failed_start_nor_before_the_first_status(starter: FakeStarter, life: Life) -> None:
    life.did(START, errors.MachineFault("no"))
    life.status()
    assert starter.visits == 0
    life.did(START)
    assert starter.visits == 0
    life.status()
    starter.wait_for("set_job_attr_delayed", "ChirpVMState", '"Running"')
    starter.wait_for("set_job_attr_delayed", "ChirpVMVNC", "undefined")
    assert life.said == []


def test_without_a_starter_there_is_no_thread(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector.wait, "start_thread", pytest.fail)
    life.did(START)
    life.status()
    assert len(life.said) == 1
    assert "no starter can be reached by chirp" in life.said[0]


def test_for_nothing_new_there_is_no_thread(starter: FakeStarter, life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    life.did(START)
    life.status()
    starter.wait_for("set_job_attr_delayed", "ChirpVMVNC", "undefined")
    until(lambda: not life.machine.updates.unsaid())
    monkeypatch.setattr(collector.wait, "start_thread", pytest.fail)
    life.status()
    life.machine.updates.publish(published.MEMORY, 7)
    life.status()
    assert life.machine.updates.unsaid() == [(published.MEMORY, 7)], "figures alone wait"


def test_what_is_done_to_it_is_told_with_the_next_status(starter: FakeStarter, life: Life) -> None:
    life.did(START)
    life.did(SUSPEND)
    life.status(lifecycle.SUSPENDED)
    starter.wait_for("set_job_attr_delayed", "ChirpVMState", '"Suspended"')
    life.did(RESUME, errors.HypervisorFault("The disk is gone.", "look for it."), lifecycle.SUSPENDED)
    round_is_over(life)
    life.status(lifecycle.SUSPENDED)
    starter.wait_for("set_job_attr_delayed", "ChirpVMError", '"The disk is gone. Hint: look for it."')


def test_each_checkpoint_is_told(starter: FakeStarter, life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(life.machine, "saved_bytes", lambda: 4096)
    life.did(START)
    life.did(CHECKPOINT)
    life.did(CHECKPOINT, errors.HypervisorFault("no"), lifecycle.CHECKPOINTED)
    life.did(CHECKPOINT)
    life.status()
    starter.wait_for("set_job_attr_delayed", "ChirpVMCheckpoints", "2")
    round_is_over(life)
    ad = starter.ad()
    assert ad["ChirpVMCheckpointBytes"] == "4096"
    assert abs(int(ad["ChirpVMCheckpointTime"]) - time.time()) < 100
    assert float(ad["ChirpVMCheckpointSeconds"]) >= 2


def test_a_silent_starter_is_given_up(starter: FakeStarter, life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector, "ROUND_SECONDS", 0.05)
    starter.answer = b""
    life.did(START)
    for number in range(collector.MOST_FAILURES + 3):
        life.machine.updates.publish(published.ADDRESSES, f"10.0.0.{number}")
        life.status()
        round_is_over(life)
    until(lambda: starter.visits == collector.MOST_FAILURES)
    assert life.said == [f"{life.machine.name}: the starter has not answered in time"]


def test_a_round_that_goes_on_is_not_joined_by_another(starter: FakeStarter, life: Life) -> None:
    starter.answer = b""
    life.did(START)
    life.status()
    until(lambda: starter.visits == 1)
    for _ in range(3):
        life.status()
    assert starter.visits == 1


def test_a_vm_that_is_over_is_forgotten(starter: FakeStarter, life: Life) -> None:
    for last in (lambda: life.did(STOP), lambda: life.status(STOPPED)):
        life.did(START)
        last()
        life.machine.updates.publish(published.ADDRESSES, "10.0.0.7")
        life.status()
    assert starter.visits == 0


def round_is_over(life: Life) -> None:
    assert life.machine.updates.turn.acquire(True, 30)
    life.machine.updates.turn.release()


def until(is_so: Callable[[], bool]) -> None:
    assert wait.until(is_so, 30, 0.01)


@pytest.mark.parametrize("operation", [STOP, STATUS])
def test_a_vm_is_forgotten(starter: FakeStarter, life: Life, monkeypatch: pytest.MonkeyPatch, operation: str) -> None:
    class Overtaken(dict[int, object]):
        """Another thread forgets a VM as soon as it was found."""

        def get(self, key: int, default: object = None) -> object:
            return self.pop(key, default)

    life.did(START)
    monkeypatch.setattr(life.collector, "_vms", Overtaken(life.collector._vms))
    life.did(operation, Status(STOPPED) if operation == STATUS else None)
    assert life.said == []


def test_a_server_tells_the_starter_of_its_environment(scratch: Path) -> None:
    config = elsewhere(scratch) / ".chirp.config"
    with FakeStarter(scratch, ANY, config=config) as starter:
        said = {"_CONDOR_SCRATCH_DIR": str(scratch), "_CONDOR_CHIRP_CONFIG": str(config)}
        with Peer(environment("simulated", scratch) | said) as peer:
            peer.line()
            peer.send_ad(*simulated_ad(scratch))
            assert peer.run("START", "simulated") == ["0", "1"]
            assert peer.run("STATUS", 1)[0] == "0"
            starter.wait_for("set_job_attr_delayed", "ChirpVMState", '"Running"')
            assert peer.run("SUSPEND", 1)[0] == "0"
            until(lambda: peer.run("STATUS", 1)[0] == "0" and starter.ad()["ChirpVMState"] == '"Suspended"')
            assert peer.run("STOP", 1)[0] == "0"
            assert "chirp" not in peer.quit()
