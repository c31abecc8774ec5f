"""The way into a guest: ports of the machine that lead to ports of the guest's, and what becomes of them."""

import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock
from xml.etree import ElementTree as etree

import libvirt
import pytest

from tests.domain.support import host, spec
from tests.drivers.libvirt import support
from tests.drivers.libvirt.support import LINUX, NAT, ON_VIRTIO, USER_NETWORK, Job, done, running, until
from tests.drivers.support import WHO
from tests.lab import linux_guest
from tests.lab.ports import free_port
from vmgahp.config import Settings
from vmgahp.domain import build
from vmgahp.drivers.libvirt.start import capabilities, forwarding
from vmgahp.drivers.libvirt.start.forwarding import Relay
from vmgahp.drivers.resources import PASST, RELAY, PortForwards
from vmgahp.errors import MISMATCHED, MachineFault
from vmgahp.findings import OFF, OK
from vmgahp.host.runtime_dir import remove
from vmgahp.job.vm_spec import Nic

LISTENS = f"""{support.DHCP}
nc -ll -p 22 -e echo inside &
echo listens at 22
while :; do sleep 1; done
"""


def way(job: Job) -> dict[str, object]:
    """The one that the job's owner is told of."""
    path = job.scratch / forwarding.ACCESS_FILE
    assert path.stat().st_uid == job.scratch.stat().st_uid
    assert path.stat().st_mode & 0o077 == 0
    [found] = json.loads(path.read_text())["ssh"]
    assert isinstance(found, dict)
    return found


def heard(port: int) -> str:
    """What whoever connects there reads."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=5) as connected:
            return connected.recv(100).decode()
    except OSError:
        return ""


def listening(linux: Job, nic: str) -> tuple[str, ...]:
    """The lines of a job whose guest listens."""
    linux.own(*linux_guest.make(linux.scratch, nic))
    linux.put("user-data", LISTENS)
    return (*LINUX, ON_VIRTIO, support.USER_DATA, "JobVMNetworking = true", "VMPARAM_vm_SSH = true")


@pytest.mark.libvirt
def test_a_port_leads_into_a_guest_also_after_a_suspend(linux: Job, connection: "libvirt.virConnect") -> None:
    if not capabilities.has_passt(capabilities.domain_capabilities(connection, "qemu")):
        pytest.skip("needs a libvirt with passt")
    lines, port = listening(linux, "<interface type='user'/>"), free_port()
    with running(linux, *lines, **USER_NETWORK, VM_SSH_PORTS=port) as peer:
        assert way(linux) == {"guest_port": 22, "address": "127.0.0.1", "port": port}
        until(lambda: "listens at 22" in linux.console(), "the guest listens")
        until(lambda: heard(port) == "inside\n", "the way to be open")
        done(peer, "SUSPEND")
        assert heard(port) == ""
        done(peer, "RESUME")
        until(lambda: heard(port) == "inside\n", "the way to be open again")
        done(peer, "STOP")
        assert heard(port) == ""


@pytest.mark.libvirt
@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
def test_a_relay_of_the_jobs_user_leads_into_a_guest_with_nat(linux: Job, network: "libvirt.virNetwork") -> None:
    lines, port = listening(linux, "<interface type='network'/>"), free_port()
    with running(linux, *lines, **NAT, VM_SSH_PORTS=port) as peer:
        until(lambda: "listens at 22" in linux.console(), "the guest listens")
        until(lambda: any(word.startswith("IP=") for word in peer.run("STATUS", 1)) or relays(port), "its address")
        until(lambda: heard(port) == "inside\n", "the way to be open")
        [pid] = [each for each in relays(port) if os.getsid(each) == each]
        assert Path(f"/proc/{pid}").stat().st_uid == linux.scratch.stat().st_uid
        os.kill(pid, signal.SIGKILL)
        until(lambda: peer.run("STATUS", 1) and heard(port) == "inside\n", "another relay")
        done(peer, "STOP")
        assert not relays(port)


@pytest.mark.libvirt
@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
def test_a_relay_does_not_outlive_a_server_that_is_killed(linux: Job, network: "libvirt.virNetwork") -> None:
    lines, port = listening(linux, "<interface type='network'/>"), free_port()
    with running(linux, *lines, **NAT, VM_SSH_PORTS=port) as peer:
        until(lambda: peer.run("STATUS", 1) and relays(port), "the relay")
        peer.process.kill()
        until(lambda: not relays(port), "the relay to end")
        peer.process.wait()
        until(lambda: linux.domain() is None, "the guardian to end the VM")


def relays(port: int) -> list[int]:
    """The processes of relays of a port."""
    return list(support.processes(f"LISTEN:{port},"))


@pytest.mark.libvirt
def test_without_the_administrator_no_way_leads_in(job: Job) -> None:
    said = support.refused(job, MISMATCHED, "JobVMNetworking = true", "VMPARAM_vm_SSH = true", **USER_NETWORK)
    assert "VM_SSH_PORTS" in said


@pytest.mark.libvirt
def test_a_guest_runs_without_a_way_in_where_all_ports_are_taken(job: Job) -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = stranger.getsockname()[1]
        with running(job, "JobVMNetworking = true", "VMPARAM_vm_SSH = true", **USER_NETWORK, VM_SSH_PORTS=port):
            assert json.loads((job.scratch / forwarding.ACCESS_FILE).read_text()) == {"ssh": []}


@pytest.mark.libvirt
def test_nobody_is_told_of_a_port_that_a_stranger_took_meanwhile(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    once, really = iter([True]), forwarding.is_free
    monkeypatch.setattr(forwarding, "is_free", lambda *where: next(once, False) or really(*where))
    log: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        lines = "JobVMNetworking = true", "VMPARAM_vm_SSH = true"
        with support.started(job, log, *lines, **USER_NETWORK, VM_SSH_PORTS=stranger.getsockname()[1]):
            pass
    # QEMU's own network forwards none, and passt starts no VM whose ports are taken.
    assert any("no port leads to its guest" in line or "another process listens there" in line for line in log)
    assert json.loads((job.scratch / forwarding.ACCESS_FILE).read_text()) == {"ssh": []}


# Which ports


def test_the_probe_says_whether_jobs_can_have_a_way_in(monkeypatch: pytest.MonkeyPatch) -> None:
    without = forwarding.judge(settings_of("22000"), ["user"], passt=False)
    assert "forwards no ports" in without.seen
    good = forwarding.judge(settings_of("22000-22009"), ["user"], passt=True)
    assert (good.verdict, good.seen) == (OK, "10 ports at 127.0.0.1 lead to those of guests")
    monkeypatch.setenv("PATH", "/nowhere")
    for settings, networks, why in (
        (settings_of("x"), ["user"], "VM_SSH_PORTS"),
        (settings_of("22000", "198.51.100.7"), ["user"], "not an address of this machine"),
        (settings_of("22000"), [], "no network"),
        (settings_of("22000"), ["nat", "user"], "socat is not installed"),
    ):
        bad = forwarding.judge(settings, networks, passt=True)
        assert bad
        assert bad.verdict == OFF
        assert why in bad.seen


def settings_of(ports: str, address: str = "127.0.0.1") -> Settings:
    return Settings({"VM_MEMORY": "64", "VM_SSH_PORTS": ports, "VM_SSH_ADDRESS": address})


def test_ports_are_those_of_the_setting_and_what_is_no_list_or_address_is_the_administrators_fault() -> None:
    assert forwarding.ports_of(settings_of("2201-2203, 22000 2202")) == [2201, 2202, 2203, 22000]
    for ports in ("ssh", "0", "1-", "-9", "70000", "9-8", "22,٣٣"):
        with pytest.raises(MachineFault, match="VM_SSH_PORTS"):
            forwarding.ports_of(settings_of(ports))
    for address in ("localhost", "127.0.0.1,fork", "::%lo"):
        with pytest.raises(MachineFault, match="VM_SSH_ADDRESS"):
            forwarding.address_of(settings_of("22000", address))


def test_no_port_is_given_twice_and_each_is_free_again_at_the_end() -> None:
    log: list[str] = []
    port = free_port()
    settings = settings_of(str(port))
    first = forwarding.claim(settings, (22,), RELAY, log.append)
    try:
        assert first.ports == ((22, port),)
        second = forwarding.claim(settings, (22, 80), RELAY, log.append)
        remove(second.directory)
        assert second.ports == ()
        assert "22, 80" in log[0]
    finally:
        remove(first.directory)
    third = forwarding.claim(settings, (22,), RELAY, log.append)
    remove(third.directory)
    assert third.ports == first.ports


def test_the_words_for_others() -> None:
    assert PortForwards(RELAY, "127.0.0.1", ((22, 2201), (80, 2202))).words == "22=127.0.0.1:2201 80=127.0.0.1:2202"
    assert PortForwards(RELAY, "::", ((22, 2201),)).words == "22=[::]:2201"


# How


def test_passt_is_told_by_the_first_interface_alone() -> None:
    forwards = host(passt=True, ssh_address="127.0.0.1", ssh_ports=((22, 2201), (80, 2202)))
    made = etree.fromstring(build.build(spec(nics=(Nic("user"), Nic("user"))), forwards))
    first, second = made.findall("devices/interface")
    found = [(each.attrib, each.find("range").attrib) for each in first.findall("portForward")]
    assert found == [
        ({"proto": "tcp", "address": "127.0.0.1"}, {"start": "2201", "to": "22"}),
        ({"proto": "tcp", "address": "127.0.0.1"}, {"start": "2202", "to": "80"}),
    ]
    assert second.find("portForward") is None


def test_a_guest_that_is_restored_is_not_kept_by_who_has_taken_its_port() -> None:
    log: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        taken, free = stranger.getsockname()[1], free_port()
        forwards = "".join(
            f"<portForward proto='tcp' address='127.0.0.1'><range start='{port}' to='22'/></portForward>"
            for port in (taken, free)
        )
        xml = f"<domain><name>vm</name><devices><interface type='user'>{forwards}</interface></devices></domain>"
        left = etree.fromstring(forwarding.without_taken(xml, log.append))
        ways = PortForwards(PASST, "127.0.0.1", ((22, taken), (80, free)), "")
        assert forwarding.as_free(ways).ports == ((80, free),), "and nobody is told of the other"
    assert [each.get("start") for each in left.iter("range")] == [str(free)]
    assert str(taken) in log[0]
    assert forwarding.without_taken(xml, log.append) is xml, "the stranger has gone"


@pytest.fixture
def relay() -> Iterator[tuple[Relay, list[str]]]:
    log: list[str] = []
    made = Relay(WHO, log.append, "vm", "127.0.0.1", [(22, free_port())])
    yield made, log
    made.end()


@pytest.mark.libvirt  # with which socat is installed
def test_no_stranger_answers_at_a_port_of_a_guest_at_any_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told before the guest has an address."""
    log: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as taken, socket.create_server(("127.0.0.1", 0)) as guest:
        inside, (theirs, ours) = guest.getsockname()[1], (taken.getsockname()[1], free_port())
        made = Relay(WHO, log.append, "vm", "127.0.0.1", [(22, theirs), (inside, ours)])
        assert made.ports == [(inside, ours)]
        assert f"port {theirs} does not lead" in log[0]
        with pytest.raises(OSError, match="in use"):
            socket.create_server(("127.0.0.1", ours))
        monkeypatch.setattr(Relay, "_why_not", staticmethod(lambda _: ""))
        assert heard(ours) == ""
        made.lead_to("127.0.0.1")
        threading.Thread(target=lambda: guest.accept()[0].sendall(b"inside"), daemon=True).start()
        until(lambda: heard(ours) == "inside", "the relay")
        assert relays(ours)
        made.end()
        until(lambda: not relays(ours), "their end")
        assert forwarding.is_free("127.0.0.1", ours)


def test_a_relay_that_its_tracer_keeps_does_not_hold_up_the_end(relay: tuple[Relay, list[str]], monkeypatch) -> None:
    traced = Mock(pid=1 << 22, wait=Mock(side_effect=forwarding.subprocess.TimeoutExpired("socat", 1.0)))
    monkeypatch.setattr(forwarding.run, "begin", lambda *_: traced)
    relay[0].lead_to("192.0.2.1")
    relay[0].end()
    assert traced.wait.call_args.args, "it has a timeout"


@pytest.mark.parametrize(
    "address", ["127.0.0.1", "0.0.0.0", "224.0.0.1", "169.254.169.254", "::1", "fe80::1", "x,fork"]
)
def test_a_guest_cannot_have_others_led_to_this_machine(relay: tuple[Relay, list[str]], address: str) -> None:
    made, log = relay
    made.lead_to(address)
    made.lead_to(address)
    assert len(log) == 1, "it is said once"
    assert not made._running
