"""Script-managed hypervisors, with one of a few lines whose VMs are files."""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import JOB_UID, as_root
from tests.drivers.support import WHO
from tests.lab.programs import a_program
from tests.peer import Peer, environment
from vmgahp import errors, findings, lifecycle
from vmgahp.checkpoint.store import MANIFEST_FILE
from vmgahp.config import Settings
from vmgahp.drivers.script import ScriptDriver, key_of
from vmgahp.drivers.script.machine import Program, ScriptFailed, ScriptMachine
from vmgahp.host.job_user import Identity
from vmgahp.job.ad import JobAd
from vmgahp.testing.contract import DriverContract, Subject, until

TOY = """\
#!/bin/sh
set -eu
vm=$STATE/$VMGAHP_KEY
printf '%s %s\\n' "$(id -u)" "$1" >>$STATE/calls
[ ! -e $STATE/odd.$1 ] || . $STATE/odd.$1
case $1 in
probe) echo '{"version": "1.0", "networking": "nat", "attributes": {"cores": 8},
    "actions": "stop,pause,unpause,suspend,resume,checkpoint"}' ;;
start)
    [ ! -e $vm ] || exit 1
    if grep -qi '^Toy_Reject = ' ; then echo 'the job wants what toys cannot'; exit 65; fi
    if [ "$VMGAHP_RESTART" ]; then cat "$VMGAHP_DIRECTORY/toy.saved" >&2; fi
    printf %s "$VMGAHP_UUID" >$vm.uuid
    echo running >$vm; echo '{"id": "number 5"}' ;;
status) [ ! -e $vm ] || state=$(cat $vm); echo "{\\"state\\": \\"${state:-stopped}\\"}" ;;
stop) ;;
destroy)
    if [ "$VMGAHP_UUID" ] && [ -e $vm.uuid ] && [ "$VMGAHP_UUID" != "$(cat $vm.uuid)" ]; then
        echo 'Existed = false'; exit
    fi
    [ "$VMGAHP_KEEP" ] || rm -f "$VMGAHP_DIRECTORY/toy.saved"
    [ -e $vm ] || echo 'Existed = false'
    rm -f $vm $vm.uuid ;;
pause) echo paused >$vm ;;
unpause | resume) echo running >$vm ;;
suspend) echo suspended >$vm ;;
checkpoint) echo suspended >$vm; echo memory >"$VMGAHP_DIRECTORY/toy.saved"; echo '{"files": "toy.saved"}' ;;
*) exit 69 ;;
esac
"""


class Toy(Subject):
    vm_type = "script"
    has_guest = False

    def __init__(self, directory: Path, **settings: str) -> None:
        self.state = directory / "state"
        self.state.mkdir()
        self.state.chmod(0o1777)
        (self.state / "calls").touch()
        (self.state / "calls").chmod(0o666)
        self.script = a_program(directory / "toy", TOY.replace("$STATE", str(self.state)))
        self.own = {"VM_MEMORY": "1024", "VM_STOP_TIMEOUT": "0", "VM_HYPERVISOR": "toy", "VM_SCRIPT": str(self.script)}
        super().__init__(directory, Settings(self.own | settings), WHO)

    def odd(self, action: str, shell: str) -> None:
        """Let the script do something else from now on at this action."""
        (self.state / f"odd.{action}").write_text(shell + "\n")

    def with_settings(self, **settings: str) -> ScriptDriver:
        return ScriptDriver("script", Settings(self.own | settings), self.identity, self.log.append)

    def calls(self) -> list[str]:
        return (self.state / "calls").read_text().splitlines()

    def prepare(self, scratch: Path, number: int, ends: bool) -> dict[str, str]:
        os.chown(scratch, self.identity.uid, self.identity.gid)
        return {}

    def of(self, job: JobAd) -> Path:
        return self.state / key_of(os.path.realpath(job.working_dir()))

    def exists(self, job: JobAd) -> bool:
        return self.of(job).exists()

    def bad_jobs(self) -> dict[str, JobAd]:
        return {"what toys cannot": self.changed(self.job(2), Toy_Reject="true")}

    def unfit(self) -> Settings:
        return Settings({"VM_MEMORY": "1024", "VM_HYPERVISOR": "toy"})

    def power_off(self, job: JobAd) -> None:
        self.of(job).unlink()


@pytest.fixture
def toy(scratch: Path) -> Iterator[Toy]:
    with Toy(scratch.parent) as subject:
        yield subject


@pytest.fixture
def driver(toy: Toy) -> ScriptDriver:
    return toy.with_settings()


class TestContract(DriverContract):
    @pytest.fixture
    def subject(self, toy: Toy) -> Toy:
        return toy


GARBLED = ScriptFailed if WHO.switching else errors.MachineFault
"""The fault for a script that fails: that of the job, if processes of the job's user can have caused it."""


def refused(toy: Toy, driver: ScriptDriver, what: str, kind: type[errors.Fault] = errors.MachineFault) -> errors.Fault:
    """The fault for which the toy's job does not start, and of which nothing is left."""
    with pytest.raises(kind, match=what) as caught:
        driver.start(toy.job())
    assert not toy.exists(toy.job())
    return caught.value


def trouble(driver: ScriptDriver) -> findings.Finding:
    """Return the first bad finding of a survey."""
    bad = findings.first_bad(driver.survey(time.monotonic() + 10).findings)
    assert bad is not None
    return bad


# Outcomes


def test_a_rejection_is_the_jobs_fault_with_the_scripts_reason(toy: Toy, driver: ScriptDriver) -> None:
    toy.odd("start", "printf 'no \\033[31mred %s' \"$(head -c 2000 /dev/zero | tr '\\0' x)\"; exit 65")
    with pytest.raises(errors.JobFault) as caught:
        driver.start(toy.job())
    assert caught.value.code in errors.HOLD_CODES
    assert "\033" not in caught.value.problem
    assert "red xxx" in caught.value.problem
    assert len(caught.value.problem) < 700
    assert str(toy.script) in caught.value.hint


@pytest.mark.parametrize(
    ("shell", "what"),
    [
        ("exit 1", "exit status 1"),
        ("echo hello; exit 0", "neither JSON"),
        ("echo sad >&2; exit 7", "Its last words: sad"),
        ("head -c 100000 /dev/zero | tr '\\0' x; exit 0", "more than 64 KiB"),
        ("exit 127", "cannot be executed as uid"),
        ("exit 69", "answers start with not implemented"),
    ],
)
def test_whatever_cannot_be_understood_is_a_fault_and_leaves_nothing(toy, driver, shell, what):
    toy.odd("start", f"echo running >$vm; {shell}")
    fault = refused(toy, driver, what, GARBLED)
    assert (fault.code in errors.HOLD_CODES) is WHO.switching
    assert fault.hint


@as_root
@pytest.mark.parametrize("shell", ["kill -9 $$", "echo '{\"outcome\": 1}'", "exit 69"])
def test_only_a_script_that_the_jobs_user_cannot_reach_blames_the_machine(toy: Toy, shell: str) -> None:
    toy.odd("start", shell)
    with pytest.raises(errors.JobFault, match="VM_SCRIPT"):
        toy.with_settings().start(toy.job())
    with pytest.raises(errors.MachineFault, match="VM_SCRIPT"):
        toy.with_settings(VM_SCRIPT_USER="root").start(toy.job())


@as_root
def test_a_script_that_fails_for_htcondors_user_as_well_blames_the_machine(toy, driver, monkeypatch):
    monkeypatch.setenv("CONDOR_IDS", f"{JOB_UID + 1}.{JOB_UID + 1}")
    toy.odd("start", "exit 1")
    with pytest.raises(errors.JobFault, match="exit status 1"):
        driver.start(toy.job())
    for shell in ("exit 1", "kill -9 $$", "exit 127"):
        toy.odd("probe", f"[ $(id -u) = {JOB_UID} ] || {{ {shell}; }}")
        with pytest.raises(errors.MachineFault, match="exit status 1"):
            driver.start(toy.job())
    toy.odd("probe", f"[ $(id -u) != {JOB_UID} ] || exit 1")  # such as a process of the job's that kills it
    with pytest.raises(errors.JobFault, match="exit status 1"):
        driver.start(toy.job())


@as_root
@pytest.mark.parametrize(
    ("shell", "may_execute", "fault"),
    [
        ("#!/nonexistent/shell\n", True, errors.MachineFault),
        ("#!/bin/sh\nexit 127\n", True, errors.MachineFault),
        (f'#!/bin/sh\n[ $(id -u) != {JOB_UID} ] || exit 126\necho \'{{"version": "1"}}\'', False, errors.MachineFault),
        (f'#!/bin/sh\n[ $(id -u) != {JOB_UID} ] || exit 126\necho \'{{"version": "1"}}\'', True, errors.JobFault),
    ],
    ids=["no interpreter", "for no user", "not for the job's user", "a forged exit status"],
)
def test_a_script_that_cannot_be_executed_blames_the_machine(toy, monkeypatch, shell, may_execute, fault):
    monkeypatch.setenv("CONDOR_IDS", f"{JOB_UID + 1}.{JOB_UID + 1}")
    monkeypatch.setattr(Identity, "may_execute", lambda *_: may_execute)
    toy.script.write_text(shell)
    with pytest.raises(fault, match="cannot be executed"):
        toy.with_settings().start(toy.job())
    toy.script.write_text("#!/bin/sh\n")


def test_a_script_that_hangs_is_ended(toy: Toy) -> None:
    machine = toy.with_settings(VM_GAHP_REQ_TIMEOUT="10").start(toy.job())
    toy.odd("status", "sleep 1000")
    with pytest.raises(GARBLED, match="did not end within 1 s"):
        machine.status()
    (toy.state / "odd.status").unlink()


def test_not_implemented_is_the_clients_to_know(toy: Toy, driver: ScriptDriver) -> None:
    machine = driver.start(toy.changed(toy.job(), JobVMCheckpoint="true"))
    for action, call, word in (
        ("pause", machine.soft_suspend, errors.VM_NO_SUPPORT_SUSPEND),
        ("suspend", machine.suspend, errors.VM_NO_SUPPORT_SUSPEND),
        ("checkpoint", machine.checkpoint, errors.VM_NO_SUPPORT_CHECKPOINT),
    ):
        toy.odd(action, "exit 69")
        with pytest.raises(errors.ClientFault, match="not implemented") as caught:
            call()
        assert caught.value.code == word
        toy.odd(action, "echo 'not just now'; exit 65")
        with pytest.raises(errors.ClientFault, match="not just now"):
            call()
    assert machine.status().state == lifecycle.RUNNING


def test_no_pid_is_asked_for_twice_and_an_end_meanwhile_is_nobodys_fault(toy: Toy, driver: ScriptDriver) -> None:
    machine = driver.start(toy.job())
    assert (machine.pid(), machine.pid()) == (0, 0)
    assert [line.split()[1] for line in toy.calls()].count("pid") == 1
    toy.odd("suspend", "exit 1")
    with pytest.raises(GARBLED, match="exit status 1"):
        machine.suspend()
    toy.odd("suspend", "[ -e $vm ] || exit 1")
    toy.power_off(toy.job())
    with pytest.raises(errors.ClientFault, match="is gone") as caught:
        machine.suspend()
    assert caught.value.code == errors.VM_NOT_FOUND


def test_a_modified_vm_runs_as_the_script_has_it_and_the_log_says_so(toy: Toy, driver: ScriptDriver) -> None:
    answer = '{"outcome": "modified", "attributes": {"JobVMMemory": 48, "Toy": "a"}}'
    toy.odd("start", f"echo running >$vm; echo '{answer}'; exit")
    machine = driver.start(toy.job())
    assert machine.status().memory_kib == 48 << 10
    for change in ("- JobVMMemory = 64", "+ JobVMMemory = 48"):
        assert any(change in line for line in toy.log)
    toy.odd("pause", f'cat "$VMGAHP_REQUEST" >{toy.state}/request; exit 0')
    machine.soft_suspend()
    request = json.loads((toy.state / "request").read_text())
    assert (request["memory_mib"], request["ad"]["JobVMMemory"], request["ad"]["Toy"]) == (48, 48, "a")


@pytest.mark.parametrize(
    ("attributes", "what"),
    [
        ({"JobVMMemory": 65}, "it gives the VM 65 MiB"), ({"JobVM_VCPUS": 2}, "2 CPUs"),
        ({"JobVMMemory": 4096}, "JobVMMemory = 4096"), ({"User": "root@lab"}, "it changes User"),
    ],
)  # fmt: skip
def test_a_script_makes_no_vm_larger_and_nobody_elses(toy, driver, attributes, what):
    answer = json.dumps({"outcome": "modified", "attributes": attributes})
    toy.odd("start", f"echo running >$vm; echo '{answer}'; exit")
    refused(toy, driver, what, GARBLED)


def test_a_vm_that_is_said_to_be_destroyed_and_runs_is_not_believed_gone(toy: Toy, driver: ScriptDriver) -> None:
    machine = driver.start(toy.job())
    toy.odd("destroy", "exit 0")
    with pytest.raises(GARBLED, match="says that it has destroyed"):
        machine.destroy()
    (toy.state / "odd.destroy").unlink()
    machine.destroy()
    assert not toy.exists(toy.job())


def test_a_guest_that_powers_off_when_asked_is_waited_for(toy: Toy) -> None:
    machine = toy.with_settings(VM_STOP_TIMEOUT="30").start(toy.job())
    toy.odd("stop", "rm $vm; exit 0")
    machine.stop()
    assert not toy.exists(toy.job())
    words = [line.split()[1] for line in toy.calls()]
    assert words[words.index("stop") + 1] == "status"


def test_what_a_guest_says_breaks_no_line_and_only_a_living_pid_counts(toy: Toy, driver: ScriptDriver) -> None:
    machine = driver.start(toy.job())
    toy.odd("status", 'echo \'{"state": "running", "ip": "1.2.3.4 STATUS=Stopped", "mac": "x y"}\'; exit 0')
    report = machine.status()
    assert (report.mac, report.ip) == ("", "")
    toy.odd("status", 'echo \'{"state": "running", "ip": "10.0.2.15", "mac": "52:54:00:AA:00:01"}\'; exit 0')
    report = machine.status()
    assert (report.mac, report.ip) == ("52:54:00:aa:00:01", "10.0.2.15")
    (toy.state / "odd.status").unlink()
    for said, known in (("999999999", 0), (str(os.getpid()), 0 if os.getuid() == 0 else os.getpid()), ("1", 0)):
        toy.odd("status", f'echo \'{{"state": "running", "pid": {said}}}\'; exit 0')
        machine.status()
        assert machine.pid() == known
    (toy.state / "odd.status").unlink()


# Who runs it, and what it is given


@as_root
def test_it_runs_as_the_user_that_the_settings_say(toy: Toy) -> None:
    for word, uid in (("job", JOB_UID), ("root", 0), ("nobody", 65534)):
        (toy.state / "calls").unlink(missing_ok=True)
        toy.state.chmod(0o1777)
        toy.with_settings(VM_SCRIPT_USER=word).start(toy.job()).destroy()
        assert {line.split()[0] for line in toy.calls()} == {str(uid)}
        for left in toy.state.iterdir():
            left.unlink()


@as_root
def test_the_jobs_user_gets_no_rights_of_roots(toy: Toy, driver: ScriptDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    look = "id -G; grep Cap /proc/self/status; ulimit -c; env"
    toy.odd("start", f"{{ {look}; }} >{toy.state}/seen; echo running >$vm; exit")
    monkeypatch.setenv("_CONDOR_TOY_SECRET", "hush")
    driver.start(toy.job())
    seen = (toy.state / "seen").read_text()
    groups, inherited, _, effective = (line.split() for line in seen.splitlines()[:4])
    assert groups == [str(JOB_UID)]
    assert int(inherited[1], 16) == int(effective[1], 16) == 0
    assert seen.splitlines()[6] == "0", "no core files, by VM_SCRIPT_LIMITS"
    assert "hush" not in seen


def test_who_it_is_when_the_settings_name_condor(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = f"{os.getuid()}.{os.getgid()}"
    monkeypatch.setenv("CONDOR_IDS", mine)

    def user_for(word: str) -> Identity:
        settings = Settings({"VM_SCRIPT_USER": word, "VM_SCRIPT": "/bin/sh", "VM_HYPERVISOR": "toy"})
        return Program(settings, Identity(JOB_UID, JOB_UID), print).user

    found = user_for("condor")
    assert f"{found.uid}.{found.gid}" == mine
    with pytest.raises(errors.MachineFault, match="no such user"):
        user_for("nobody-of-this-name")
    monkeypatch.setattr(os, "geteuid", lambda: JOB_UID)
    with pytest.raises(errors.MachineFault, match="not root"):
        user_for("root")


@as_root
def test_a_script_that_others_can_write_is_not_run(toy: Toy, driver: ScriptDriver) -> None:
    toy.script.chmod(0o775)
    refused(toy, driver, "VM_SCRIPT = ")
    trouble(driver)
    assert not toy.calls()
    toy._jobs.clear()


@pytest.mark.parametrize(
    "settings",
    [
        {"VM_HYPERVISOR": ""}, {"VM_HYPERVISOR": "a b"}, {"VM_HYPERVISOR": "9toy"}, {"VM_SCRIPT_LIMITS": "memory=5"},
        {"VM_SCRIPT_LIMITS": "as=lots"}, {"VM_SCRIPT_USER": "nobody-of-this-name"},
    ],
)  # fmt: skip
def test_settings_that_are_none_are_the_machines_fault(toy: Toy, settings: dict[str, str]) -> None:
    driver, name = toy.with_settings(**settings), next(iter(settings))
    refused(toy, driver, name)
    assert name in trouble(driver).seen
    assert not toy.calls()


def test_limits_hold(toy: Toy) -> None:
    toy.odd("probe", f"ulimit -n >{toy.state}/limit; ulimit -Hn >>{toy.state}/limit")
    toy.with_settings(VM_SCRIPT_LIMITS="core=0, nofile=77").survey(time.monotonic() + 10)
    assert (toy.state / "limit").read_text().split() == ["77", "77"]


def test_a_dry_run_says_what_the_script_would_be_told(toy: Toy, driver: ScriptDriver) -> None:
    job = toy.changed(toy.job(), ClaimId='"<1.2.3.4:5>#1#2#secret"')
    described = json.loads(driver.describe(job))
    assert described["memory_mib"] == 64
    assert described["key"] == key_of(os.path.realpath(job.working_dir()))
    assert "secret" not in json.dumps(described)
    assert not toy.calls()


# The probe


def test_the_machine_advertises_what_the_script_says(toy: Toy) -> None:
    driver = toy.with_settings(VM_NETWORKING="true", VM_NETWORKING_TYPE="nat, user", VM_ALLOW_HOST_LOOPBACK="true")
    survey = driver.survey(time.monotonic() + 10)
    assert (survey.hypervisors, survey.networking) == (["toy"], ["nat"])
    assert survey.machine_attributes == {"VM_toy_ATTR_version": "1.0", "VM_toy_ATTR_cores": 8}
    expected = {"hypervisor": "toy", "soft_suspend": True, "suspend": True, "checkpoint": True, "networking": "nat"}
    assert expected.items() <= survey.attributes.items()
    toy.odd("probe", "echo 'Actions = \"suspend, pause, fly\"'; exit")
    survey = driver.survey(time.monotonic() + 10)
    assert not survey.attributes["suspend"], "without resume that is of no use"
    assert not survey.attributes["soft_suspend"]
    assert "actions" in [finding.check for finding in survey.findings if finding.verdict == findings.OFF]
    toy.odd("probe", "echo 'the module is not loaded'; exit 65")
    assert trouble(driver).seen.endswith("runs no VMs here: the module is not loaded")


# Checkpoints


@pytest.fixture
def saved(toy: Toy, driver: ScriptDriver) -> JobAd:
    """A job whose VM was checkpointed and stopped."""
    job = toy.changed(toy.job(), JobVMCheckpoint="true")
    machine = driver.start(job)
    machine.checkpoint()
    machine.stop()
    assert Path(job.working_dir(), MANIFEST_FILE).exists()
    return job


@pytest.mark.parametrize("change", ["its content", "another job"])
def test_a_checkpoint_that_cannot_fit_holds_the_job(toy: Toy, driver: ScriptDriver, saved: JobAd, change: str) -> None:
    if change == "its content":
        Path(saved.working_dir(), "toy.saved").write_text("MEMORY\n")
    else:
        saved = toy.changed(saved, ClusterId="1")
    calls = len(toy.calls())
    with pytest.raises(errors.JobFault, match="cannot be used") as caught:
        driver.start(saved)
    assert caught.value.code == errors.MISMATCHED_CHECKPOINT
    assert len(toy.calls()) == calls, "the script is not even asked"


def test_a_start_that_fails_keeps_the_checkpoint(toy, driver, saved, monkeypatch):
    monkeypatch.setenv("CONDOR_IDS", f"{JOB_UID + 1}.{JOB_UID + 1}")
    toy.odd("start", "exit 1")
    toy.odd("probe", "exit 1")
    with pytest.raises(errors.MachineFault):
        driver.start(saved)
    (toy.state / "odd.start").unlink()
    (toy.state / "odd.probe").unlink()
    driver.start(saved).destroy()


def test_a_restore_that_fails_on_a_good_machine_holds_the_job(toy: Toy, driver: ScriptDriver, saved: JobAd) -> None:
    """The job can have written any memory into its files, and a manifest that fits."""
    toy.odd("start", "exit 1")
    with pytest.raises(errors.JobFault, match="cannot be used") as caught:
        driver.start(saved)
    assert caught.value.code == errors.MISMATCHED_CHECKPOINT
    assert Path(saved.working_dir(), MANIFEST_FILE + ".refused-1").exists()


def test_a_checkpoint_that_cannot_be_written_down_lets_the_vm_run_on(toy: Toy, driver: ScriptDriver) -> None:
    machine = driver.start(toy.changed(toy.job(), JobVMCheckpoint="true"))
    toy.odd("checkpoint", 'echo suspended >$vm; echo \'{"files": "nothing"}\'; exit')
    with pytest.raises(errors.MachineFault, match="cannot be completed"):
        machine.checkpoint()
    assert machine.status().state == lifecycle.RUNNING
    toy.odd("checkpoint", "echo suspended >$vm; exit")
    with pytest.raises(errors.MachineFault, match="names no files"):
        machine.checkpoint()


def test_the_script_goes_on_from_one_that_is_none_meanwhile(toy: Toy, driver: ScriptDriver, saved: JobAd) -> None:
    """A server that dies meanwhile leaves disks that have moved on, and no checkpoint that says otherwise."""
    seen = toy.state / "seen"
    toy.odd("start", f'ls -A "$VMGAHP_DIRECTORY" >{seen}')
    driver.start(saved)
    assert any("memory" in line for line in toy.log), "it has read the saved file"
    assert MANIFEST_FILE not in seen.read_text().split()
    assert not list(Path(saved.working_dir()).glob(f"{MANIFEST_FILE}*"))


@pytest.mark.parametrize("operation", ["status", "resume"])
def test_a_suspended_vm_that_has_vanished_has_not_done_its_job(toy: Toy, driver: ScriptDriver, operation: str) -> None:
    machine = driver.start(toy.job())
    machine.suspend()
    toy.power_off(toy.job())
    toy.odd("resume", "[ -e $vm ] || exit 1")
    with pytest.raises(errors.HypervisorFault, match="there is no such VM now"):
        machine.status() if operation == "status" else machine.resume(lifecycle.SUSPENDED)
    with pytest.raises(errors.HypervisorFault):
        machine.status()
    machine.stop()
    assert machine.status().state == lifecycle.STOPPED


@pytest.mark.parametrize(("state", "action"), [("suspended", "resume"), ("paused", "unpause")])
def test_what_somebody_else_did_to_a_vm_is_undone(toy: Toy, driver: ScriptDriver, state: str, action: str) -> None:
    machine = driver.start(toy.job())
    toy.of(toy.job()).write_text(state)
    seen = machine.status().state
    assert seen in (lifecycle.SUSPENDED, lifecycle.SOFT_SUSPENDED)
    machine.resume(seen)
    assert toy.calls()[-1].endswith(f" {action}")
    assert machine.status().state == lifecycle.RUNNING


def test_what_was_not_answered_and_done_is_done(toy: Toy, driver: ScriptDriver) -> None:
    job = toy.changed(toy.job(), JobVMCheckpoint="true")
    machine = driver.start(job)
    toy.odd("suspend", "echo suspended >$vm; exit 1")
    machine.suspend()
    assert machine.status().state == lifecycle.SUSPENDED
    machine.checkpoint()
    toy.odd("resume", "echo running >$vm; exit 1")
    machine.resume(lifecycle.SUSPENDED)
    assert machine.status().state == lifecycle.RUNNING
    assert not list(Path(job.working_dir()).glob(f"{MANIFEST_FILE}*"))


def test_the_kill_mode_keeps_a_checkpoint(toy: Toy, driver: ScriptDriver, saved: JobAd) -> None:
    """The server of a checkpointed VM may be killed, and then its guardian ends the VM."""
    driver.start(saved).checkpoint()
    driver.kill(saved.working_dir())
    assert Path(saved.working_dir(), "toy.saved").exists()
    driver.start(saved).destroy()


# The end of a server


def test_a_late_clean_up_hits_no_next_vm_and_a_killed_servers_is_destroyed(toy: Toy, driver: ScriptDriver) -> None:
    job = toy.job()
    first, second = driver.start(job), driver.start(job)
    assert isinstance(first, ScriptMachine)
    assert isinstance(second, ScriptMachine)
    assert driver.kill(job.working_dir(), first.request.uuid) is False
    assert second.status().state == lifecycle.RUNNING
    assert driver.kill(job.working_dir(), second.request.uuid) is True
    with Peer(environment("script", Path(job.working_dir()), **toy.own)) as peer:
        assert peer.line().startswith("$VMGahpVersion")
        peer.send_ad(*job.lines())
        assert peer.run("START", "script")[0] == "0"
        assert toy.exists(job)
        peer.process.kill()
        peer.finish()
    until(lambda: not toy.exists(job), "it is destroyed")
