"""QEMU's guest agent: Debian's own in a guest, one that means ill, and none."""

import threading
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import libvirt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.drivers.libvirt.support import LINUX, ON_VIRTIO, USER_DATA, USER_NETWORK, Job, done, running, started, until
from tests.lab import linux_guest
from vmgahp import lifecycle
from vmgahp.drivers.libvirt.life import guest as agent
from vmgahp.drivers.libvirt.life.guest import ASK_INTERVAL, MOST_ADDRESSES, MOST_SAID, RAREST, GuestAgent, believed
from vmgahp.drivers.libvirt.link.connection import LibvirtConnection, Watch

MINE = "52:54:00:12:34:56"

# What is believed


def said(*addresses: str, mac: str = MINE) -> dict[str, Any]:
    return {"eth0": {"hwaddr": mac, "addrs": [{"addr": each, "prefix": 24, "type": 0} for each in addresses]}}


@pytest.mark.parametrize(
    ("addresses", "kept"),
    [
        (("fd00::1", "192.0.2.1"), ("192.0.2.1", "fd00::1")),
        (("192.0.2.1", "192.0.2.1"), ("192.0.2.1",)),
        (("2001:DB8:0::1",), ("2001:db8::1",)),
        (("127.0.0.1", "::1", "0.0.0.0", "::", "169.254.1.2", "fe80::1", "224.0.0.1", "ff02::1"), ()),
        (("", "192.0.2", "192.0.2.1\n", "\x1b[31m", "0x7f.1", "192.0.2.1\0", "fe80::1%eth0", "9" * 99), ()),
    ],
)
def test_addresses_are_those_by_which_it_may_be_reached(addresses: tuple[str, ...], kept: tuple[str, ...]) -> None:
    assert believed(said(*addresses)) == kept


def test_addresses_are_those_of_its_own_nics_and_what_is_said_at_length_is_not_believed() -> None:
    docker = {"docker0": said("172.17.0.1", mac="02:42:00:00:00:01")["eth0"]}
    assert believed(docker | said("192.0.2.1", mac=MINE.upper()), {MINE}) == ("192.0.2.1",)
    assert believed({"lo": {"hwaddr": None, "addrs": None}}, {MINE}) == ()
    assert len(believed(said(*(f"192.0.2.{number}" for number in range(200))))) == MOST_ADDRESSES
    assert believed(said(*["192.0.2.1"] * (MOST_SAID + 1))) == ()
    assert believed({f"eth{number}": said("192.0.2.1")["eth0"] for number in range(MOST_SAID + 1)}) == ()


@given(
    st.dictionaries(st.text(), st.fixed_dictionaries({"addrs": st.lists(st.fixed_dictionaries({"addr": st.text()}))}))
)
def test_nothing_else_is_believed(found: dict[str, Any]) -> None:
    for address in believed(found):
        assert address.isascii()
        assert address.isprintable()
        assert len(address) < 40


# Whom it is asked of


class Domain:
    """A domain whose agent answers once it is `let`."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, object]] = []
        self.let = threading.Event()
        self.let.set()
        self.mute = False
        self.why = "Guest agent not available for now"
        self.sets_no_clock = False
        self.run = 1

    def ID(self) -> int:
        return self.run

    def agentSetResponseTimeout(self, seconds: int) -> None:
        self.calls.append(("limit", seconds))

    def setTime(self, time: dict[str, int]) -> None:
        assert 0 <= time["nseconds"] < 10**9
        self._answer("time", time["seconds"])
        if self.sets_no_clock:
            raise libvirt.libvirtError("unable to execute QEMU agent command 'guest-set-time': it is disabled")

    def interfaceAddresses(self, source: int) -> dict[str, Any]:
        assert source == libvirt.VIR_DOMAIN_INTERFACE_ADDRESSES_SRC_AGENT
        self._answer("addresses", None)
        return said("192.0.2.1")

    def shutdownFlags(self, flags: int) -> None:
        self._answer("shutdown", flags)

    def _answer(self, what: str, detail: object) -> None:
        self.calls.append((what, detail))
        assert self.let.wait(60)
        if self.mute:
            raise libvirt.libvirtError(self.why)

    def asked(self) -> list[str]:
        return [what for what, _ in self.calls]


class Scene:
    """A guest (`vmgahp.drivers.libvirt.life.guest.LibvirtGuest`) with an agent that has come."""

    def __init__(self) -> None:
        self.domain = Domain()
        self.name = "vm"
        self.watch = Watch("vm")
        self.watch.has_agent = True
        self.log: list[str] = []
        self.agent = GuestAgent(self, [MINE], self.log.append)  # type: ignore[arg-type]

    def call(self, function: Callable[[Domain], None]) -> None:
        function(self.domain)

    def look(self) -> None:
        """As a STATUS does, and wait until nothing is asked any more."""
        self.agent.look()
        until(lambda: not self.agent._is_asked, "it has been asked")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(agent, "monotonic", lambda: now[0])
    return now


def test_it_is_asked_now_and_then_and_with_a_limit(clock: list[float]) -> None:
    scene = Scene()
    for _ in range(3):
        scene.look()
    assert scene.domain.asked() == ["limit", "addresses"]
    assert scene.agent.addresses == ("192.0.2.1",)
    clock[0] += ASK_INTERVAL
    scene.look()
    assert scene.domain.asked() == ["limit", "addresses", "addresses"]


def test_where_there_is_none_nothing_is_asked() -> None:
    scene = Scene()
    scene.watch.has_agent = False
    scene.look()
    scene.agent.resumed()
    assert not scene.agent.power_off(60)
    assert scene.domain.calls == []


def test_one_that_does_not_answer_is_asked_ever_more_rarely(clock: list[float]) -> None:
    scene = Scene()
    scene.domain.mute = True
    times = []
    for _ in range(int(4 * RAREST)):
        before = len(scene.domain.calls)
        scene.look()
        times += [clock[0]] if len(scene.domain.calls) > before else []
        clock[0] += 1
    waits = [then - now for now, then in pairwise(times)]
    assert waits[0] == 2 * ASK_INTERVAL
    assert waits[-1] == RAREST
    assert waits == sorted(waits)
    assert len(scene.log) == 1
    assert not scene.agent.power_off(60), "nor to power off"
    scene.domain.mute = False
    clock[0] += RAREST
    scene.look()
    assert scene.agent.addresses, "and believed when it does"


def test_where_there_is_none_after_all_nobody_speaks_of_it(clock: list[float]) -> None:
    """libvirtd was restarted, and nobody knows which guests have one."""
    scene = Scene()
    scene.domain.mute, scene.domain.why = True, "Guest agent is not responding: QEMU guest agent is not connected"
    scene.look()
    clock[0] += RAREST
    scene.look()
    assert scene.domain.asked().count("addresses") == 1
    assert scene.log == []


def test_one_question_at_a_time_and_nobody_waits_for_it() -> None:
    scene = Scene()
    scene.domain.let.clear()
    for _ in range(50):
        scene.agent.look()
        scene.agent.resumed()
    until(lambda: "addresses" in scene.domain.asked() or "time" in scene.domain.asked(), "it is asked")
    scene.domain.let.set()
    until(lambda: not scene.agent._is_asked, "it has answered")
    assert scene.domain.asked().count("addresses") == 1


def test_a_clock_that_stood_still_is_set_once(clock: list[float]) -> None:
    scene = Scene()
    scene.look()
    scene.domain.run = 2
    scene.agent.resumed()
    until(lambda: not scene.agent._is_asked, "it has been asked")
    assert scene.domain.asked() == ["limit", "addresses", "limit", "time", "addresses"], "a restored one has no limit"
    clock[0] += ASK_INTERVAL
    scene.look()
    assert scene.domain.asked().count("time") == 1


def test_one_that_sets_no_clock_is_asked_for_all_else(clock: list[float]) -> None:
    scene = Scene()
    scene.domain.sets_no_clock = True
    scene.agent.resumed()
    until(lambda: not scene.agent._is_asked, "it has been asked")
    clock[0] += ASK_INTERVAL
    scene.look()
    assert scene.domain.asked() == ["limit", "time", "addresses", "addresses"]
    assert scene.agent.addresses == ("192.0.2.1",)
    assert "does not set its clock" in scene.log.pop()
    assert not scene.log
    assert scene.agent.power_off(60)


def test_to_power_off_by_it_has_its_limit() -> None:
    scene = Scene()
    assert scene.agent.power_off(60)
    assert scene.domain.calls[-1] == ("shutdown", libvirt.VIR_DOMAIN_SHUTDOWN_GUEST_AGENT)
    scene.domain.let.clear()
    assert not scene.agent.power_off(0), "it is asked by ACPI then"
    scene.domain.let.set()


def test_a_libvirt_that_tells_of_no_agents_is_used_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    heard = []

    def register(_connection: object, _domain: object, event: int, *_more: object) -> int:
        heard.append(event)
        if event == libvirt.VIR_DOMAIN_EVENT_ID_AGENT_LIFECYCLE:
            raise libvirt.libvirtError("unsupported")
        return 1

    monkeypatch.setattr(libvirt.virConnect, "domainEventRegisterAny", register)
    monkeypatch.setattr(libvirt.virConnect, "domainEventDeregisterAny", lambda *_: None)
    connection = LibvirtConnection("test:///default", print)
    connection.hears_agents = True
    watch = connection.watch("no such UUID", "vm")
    assert connection.call(lambda opened: opened.getType()) == "TEST"
    connection.close()
    assert watch.has_agent, "nobody says whether, so it is tried"
    assert heard == [libvirt.VIR_DOMAIN_EVENT_ID_LIFECYCLE, libvirt.VIR_DOMAIN_EVENT_ID_AGENT_LIFECYCLE]


# Real ones

WITH_NIC = ("JobVMNetworking = true",)

BEGIN = """#!/bin/sh
ip link set lo up; ip link set eth0 up
ip addr add 198.51.100.7/24 dev eth0; ip addr add fd00::7/64 dev eth0
date -s '2001-02-03 04:05:06'
"""
AGENT = """
ln -s /bin/hwclock /sbin/hwclock
/usr/sbin/qemu-ga -m virtio-serial -p /dev/virtio-ports/org.qemu.guest_agent.0 -t /dev &
while true; do
    year=$(date +%Y)
    echo "in the year $year"
    [ "$year" -gt 2001 ] && date -s '2001-02-03 04:05:06'
    sleep 1
done
"""


def with_agent(linux: Job, script: str, **options: bool) -> None:
    linux.own(*linux_guest.make(linux.scratch, "<interface type='user'/>", **options))
    linux.put("user-data", script)


@pytest.mark.libvirt
def test_debians_agent_tells_addresses_sets_the_clock_and_powers_off(linux: Job) -> None:
    if reason := linux_guest.why_no_agent():
        pytest.skip(reason)
    with_agent(linux, BEGIN + AGENT, agent=True)
    more = (*LINUX, ON_VIRTIO, USER_DATA, *WITH_NIC)
    with running(linux, *more, VM_STOP_TIMEOUT=120, **USER_NETWORK) as peer:
        until(lambda: "IP=198.51.100.7" in peer.run("STATUS", 1), "its address is known")
        assert "in the year 2001" in linux.console()
        assert "in the year 202" not in linux.console()
        done(peer, "SOFT_SUSPEND", "RESUME")
        until(lambda: "in the year 202" in linux.console(), "its clock is right")
        done(peer, "SUSPEND")
        times = linux.console().count("in the year 202")
        done(peer, "RESUME")
        until(lambda: linux.console().count("in the year 202") > times, "its clock is right again")
        done(peer, "STOP")
        assert "powered off by its agent" in linux.console()
        assert linux.exit_file()["ended_by"] == "powered off when asked"


ILL = r"""
exec 3<>/dev/virtio-ports/org.qemu.guest_agent.0
asked=0
mac=$(cat /sys/class/net/eth0/address)
one() { echo "{\"name\":\"$1\",\"hardware-address\":\"$mac\",\"ip-addresses\":[$2]}"; }
ip() { echo "{\"ip-address-type\":\"ipv4\",\"ip-address\":\"$1\",\"prefix\":24}"; }
again() { sleep 3; exec 3>&-; sleep 1; exec 3<>/dev/virtio-ports/org.qemu.guest_agent.0; }
while true; do
    read -r line <&3 || { sleep 1; continue; }
    case $line in
    *guest-sync*) id=${line#*\"id\":}; echo "{\"return\":${id%%\}*}}" >&3 ;;
    *guest-network*)
        asked=$((asked + 1))
        echo "asked $asked"
        case $asked in
        1) echo '{"return":7}' >&3 ;;
        2) echo "{\"return\":[$(one '\u001b[31m' "$(ip '\u001b]0;x'),$(ip 198.51.100.7)")]}" >&3 ;;
        3) { echo -n '{"return":['; for n in $(seq 999); do one $n "$(ip 198.51.100.9)"; echo ,; done
             one last "$(ip 198.51.100.9)"; echo ']}'; } | tr -d '\n' >&3; echo >&3 ;;
        4) echo ']]]{' >&3; again ;;
        5) again ;;
        6) head -c 12000000 /dev/zero | tr '\0' x >&3 ;;
        esac ;;
    esac
done
"""
"""One that answers whether it is there, and then means ill. libvirt talks to it again when it has come again."""


@pytest.mark.libvirt
def test_one_that_means_ill_is_waited_for_by_nobody(linux: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nonsense, ANSI, a thousand interfaces, megabytes, and at last silence."""
    monkeypatch.setattr(agent, "ASK_INTERVAL", 0.0)
    with_agent(linux, BEGIN + ILL)
    log: list[str] = []
    ad = (*LINUX, ON_VIRTIO, USER_DATA, *WITH_NIC)
    with started(linux, log, *ad, VM_STOP_TIMEOUT=1, **USER_NETWORK) as machine:
        believed_of_it = set()

        def asked() -> bool:
            assert machine.status().state is lifecycle.RUNNING
            believed_of_it.update(machine.addresses())
            return "asked 6" in linux.console()

        until(asked, "it has said all")
        assert believed_of_it == {"198.51.100.7"}
        assert [line for line in log if "guest agent does not answer" in line]
        assert not [line for line in log if "\x1b" in line]
        machine.soft_suspend()
        machine.resume(lifecycle.SOFT_SUSPENDED)
        machine.stop()
        assert linux.exit_file()["ended_by"] == "destroyed"
