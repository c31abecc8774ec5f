"""When a guest's address is asked for: no STATUS waits for libvirt's daemon for networks."""

import threading
from collections.abc import Callable
from typing import Any

import libvirt
import pytest

from tests.drivers.libvirt.support import no_thread, until
from tests.peer import DEADLINE
from vmgahp.drivers.libvirt.life import guest as agent
from vmgahp.drivers.libvirt.life.guest import GuestAddress

LEASE = {"vnet0": {"hwaddr": "52:54:00:00:00:01", "addrs": [{"addr": "192.0.2.7", "prefix": 24, "type": 0}]}}


class Domain:
    """A domain whose leases are told when a test lets them be; the ARP table has nothing."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.tells = threading.Event()
        self.leases: dict[str, Any] = LEASE

    def interfaceAddresses(self, source: int, _flags: int) -> dict[str, Any]:
        self.asked.append(source)
        assert self.tells.wait(DEADLINE)
        return self.leases if source == libvirt.VIR_DOMAIN_INTERFACE_ADDRESSES_SRC_LEASE else {}

    def call(self, function: Callable[["Domain"], dict[str, Any]]) -> dict[str, Any]:
        return function(self)


@pytest.fixture
def domain() -> Domain:
    return Domain()


def test_a_daemon_that_hangs_is_asked_once_and_believed_when_it_answers(domain, monkeypatch):
    """Each question would occupy one more of the workers of libvirt's daemon for QEMU, until it has none left."""
    monkeypatch.setattr(agent, "PATIENCE", 0.01)
    found = GuestAddress()
    for _ in range(3):
        assert found.find(domain.call) == ()
        monkeypatch.setattr(agent, "monotonic", lambda: float("inf"))  # long after
    assert len(domain.asked) == 1
    domain.tells.set()
    until(lambda: found.found, "the answer comes")
    assert found.find(domain.call) == ("192.0.2.7",)


def test_a_daemon_that_was_late_is_not_asked_again_for_a_while(domain: Domain, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "PATIENCE", 0.01)
    domain.leases = {}
    found = GuestAddress()
    assert found.find(domain.call) == ()
    domain.tells.set()
    until(lambda: len(domain.asked) == 2 and not found._asking.locked(), "it has answered")
    assert found.find(domain.call) == ()
    assert len(domain.asked) == 2
    monkeypatch.setattr(agent, "monotonic", lambda: float("inf"))
    found.find(domain.call)
    assert len(domain.asked) == 4


def test_where_no_thread_can_start_the_next_look_asks(domain: Domain, monkeypatch: pytest.MonkeyPatch) -> None:
    domain.tells.set()
    found = GuestAddress()
    with monkeypatch.context() as broken:
        broken.setattr(threading.Thread, "start", no_thread)
        assert found.find(domain.call) == ()
    assert found.find(domain.call) == ("192.0.2.7",)
