"""The way to libvirtd, tried on libvirt's own test driver, which is in the library, and on a libvirtd that hangs."""

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from unittest.mock import Mock
from uuid import uuid4

import libvirt
import pytest

from tests.drivers.libvirt.support import another_vm, libvirt_error, no_thread
from tests.lab.namespace import LAB, Namespace, require_namespace
from tests.peer import DEADLINE
from vmgahp import errors
from vmgahp.drivers.libvirt.link import connection as connections
from vmgahp.drivers.libvirt.link import faults
from vmgahp.drivers.libvirt.link.connection import LibvirtConnection

CALLS = 1000
"""Of which about five had to wait."""


@pytest.fixture
def way() -> Iterator[LibvirtConnection]:
    with closing(LibvirtConnection("test:///default", lambda _line: None)) as made:
        yield made


def a_vm(way: LibvirtConnection) -> str:
    """The UUID of a domain of the test's own: what one connection does to the driver's domain all others see."""
    number = uuid4()
    named = f"<name>{number}</name><uuid>{number}</uuid>"
    xml = f"<domain type='test'>{named}<memory>1024</memory><os><type>hvm</type></os></domain>"
    return way.call(lambda opened: opened.createXML(xml).UUIDString())


def away() -> libvirt.libvirtError:
    """What libvirt raises when libvirtd has hung up."""
    return libvirt_error(libvirt.VIR_ERR_INTERNAL_ERROR, libvirt.VIR_FROM_RPC, "client socket is closed")


def lose(_connection: libvirt.virConnect) -> None:
    """Ask what libvirtd hangs up at."""
    raise away()


class Inside:
    """A call that stays inside of libvirt until it is told to leave."""

    def __init__(self, run: Callable[[Callable[[libvirt.virConnect], None]], None]) -> None:
        self.entered, self.leave, self.left = threading.Event(), threading.Event(), threading.Event()
        self.connection: libvirt.virConnect | None = None
        self.alive_at_the_end = False
        self.times = 0
        self.thread = threading.Thread(target=run, args=(self._stay,), daemon=True)
        self.thread.start()
        assert self.entered.wait(DEADLINE)

    def _stay(self, connection: libvirt.virConnect) -> None:
        self.connection = connection
        self.times += 1
        self.entered.set()
        assert self.leave.wait(DEADLINE)
        self.alive_at_the_end = bool(connection.isAlive())
        self.left.set()

    def end(self) -> None:
        self.leave.set()
        assert self.left.wait(DEADLINE)
        self.thread.join(DEADLINE)


def test_a_connection_in_use_is_not_closed_by_another_call_that_loses_its_own(way: LibvirtConnection) -> None:
    inside = Inside(way.call)
    lost: list[libvirt.virConnect] = []

    def lose_once(connection: libvirt.virConnect) -> str:
        if not lost:
            lost.append(connection)
            raise away()
        return str(connection.getType())

    assert way.call(lose_once) == "TEST"
    inside.end()
    assert (inside.alive_at_the_end, inside.times) == (True, 1)


def test_a_connection_in_use_is_not_closed_by_the_end_of_the_server(way: LibvirtConnection) -> None:
    inside = Inside(way.call)
    way.close()
    inside.end()
    assert inside.alive_at_the_end
    assert inside.connection is not None
    with pytest.raises(libvirt.libvirtError):
        inside.connection.getType()  # it is closed by whoever was the last to need it
    with pytest.raises(errors.HypervisorFault, match="is closed"):
        way.call(lambda opened: opened.getType())


@pytest.mark.parametrize("kind", ["call", "once"])
@pytest.mark.parametrize("error", [SystemError("a result with an exception set"), b"\xff".decode])
def test_an_error_that_is_not_text_is_one_of_libvirts(way, kind, error):
    """QEMU's messages have names of the job's in them, as of the sections of a memory image."""

    def fail(_opened: libvirt.virConnect) -> str:
        if isinstance(error, SystemError):
            raise error
        return error()

    with pytest.raises(libvirt.libvirtError, match="no text") as raised:
        getattr(way, kind)(fail)
    assert raised.value.get_error_code() == libvirt.VIR_ERR_INTERNAL_ERROR


@pytest.mark.parametrize("kind", ["call", "once"])
def test_a_call_that_hangs_holds_up_no_other(way: LibvirtConnection, kind: str) -> None:
    """Nor is it in the same connection: libvirt before 10.4 may die by two threads in one."""
    inside = Inside(getattr(way, kind))
    used = way.call(lambda opened: opened)
    assert used is not inside.connection
    assert way.call(lambda opened: opened) is used, "and no more are opened than are needed"
    inside.end()


def test_a_call_with_a_deadline_is_left_to_itself(way: LibvirtConnection) -> None:
    way.call(lambda opened: opened.getType())  # what opens it has no such deadline
    entered, leave = threading.Event(), threading.Event()
    with pytest.raises(errors.MachineFault, match="has not answered within") as raised:
        way.call(lambda _opened: (entered.set(), leave.wait(DEADLINE)), seconds=0.2)
    assert raised.value.hint
    assert entered.wait(DEADLINE), "it was made all the same"
    assert way.call(lambda opened: opened.getType(), seconds=DEADLINE) == "TEST"
    leave.set()


def test_a_libvirtd_that_hangs_is_not_waited_for_again(way: LibvirtConnection, monkeypatch: pytest.MonkeyPatch) -> None:
    """By whoever has another way, such as to kill the VM's QEMU."""
    way.deadline, answer = 0.01, threading.Event()
    monkeypatch.setattr(libvirt, "open", lambda _uri: answer.wait(10 * DEADLINE))
    monkeypatch.setattr(connections, "HANGING_DEADLINE", 0.01)
    with pytest.raises(errors.MachineFault, match="does not answer"):
        way.call(lambda opened: opened.getType())
    way.deadline = 10 * DEADLINE
    try:
        with pytest.raises(errors.MachineFault, match="does not answer"):
            way.call(lambda opened: opened.getType(), seconds=10 * DEADLINE)
    finally:
        answer.set()


def test_where_no_thread_can_start_a_call_with_a_deadline_is_made_without(way, monkeypatch):
    assert way.call(lambda opened: opened.getType()) == "TEST"
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    assert way.call(lambda opened: opened.getType(), seconds=DEADLINE) == "TEST"


def test_where_no_thread_can_start_to_open_a_connection_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    with pytest.raises(errors.MachineFault, match="out of resources"):
        LibvirtConnection("test:///default", pytest.fail).call(lambda opened: opened.getType())


def test_what_may_be_done_twice_is_done_again_on_another_connection(way: LibvirtConnection) -> None:
    seen: list[libvirt.virConnect] = []

    def ask(connection: libvirt.virConnect) -> str:
        seen.append(connection)
        if len(seen) < 3:
            raise away()
        return "answer"

    assert way.call(ask) == "answer"
    assert len({id(connection) for connection in seen}) == 3


def test_it_is_not_done_again_for_ever(way: LibvirtConnection) -> None:
    way.deadline = 1
    with pytest.raises(errors.MachineFault, match=r"cannot be reached|does not answer"):
        way.call(lose)


def test_a_daemon_that_libvirtd_does_not_reach_is_no_lost_connection(way: LibvirtConnection) -> None:
    """virtqemud passes on that virtnetworkd does not listen, with the code of a connection that is lost."""
    asked: list[libvirt.virConnect] = []
    said = "Failed to connect socket to '/run/libvirt/virtnetworkd-sock': No such file or directory"

    def ask(connection: libvirt.virConnect) -> None:
        asked.append(connection)
        raise libvirt_error(libvirt.VIR_ERR_SYSTEM_ERROR, libvirt.VIR_FROM_RPC, said)

    for call in (way.call, way.once):
        with pytest.raises(libvirt.libvirtError) as raised:
            call(ask)
        assert raised.value.get_error_message() == said
        assert not isinstance(raised.value, faults.ConnectionLost)
    assert asked == [way._listener.connection] * 2, "asked once each, on the connection that goes on"


def test_where_nobody_listens_is_given_up_before_one_that_is_slow_to_answer(way, monkeypatch):
    way.deadline, way.refused_deadline = 10 * DEADLINE, 0.01
    slow, real = threading.Event(), libvirt.open

    def answer_late(uri: str) -> libvirt.virConnect:
        slow.wait(0.1)
        return real(uri)

    monkeypatch.setattr(libvirt, "open", Mock(side_effect=libvirt.libvirtError("nobody listens")))
    with pytest.raises(errors.MachineFault, match="cannot be reached"):
        way.call(lambda opened: opened.getType())
    monkeypatch.setattr(libvirt, "open", answer_late)
    assert way.call(lambda opened: opened.getType()) == "TEST"


def test_what_must_not_be_done_twice_is_lost(way: LibvirtConnection) -> None:
    with pytest.raises(faults.ConnectionLost) as raised:
        way.once(lose)
    assert faults.is_connection_loss(raised.value)
    assert type(faults.from_libvirt(raised.value, "saving it")) is errors.MachineFault
    assert way.once(lambda opened: opened.getType()) == "TEST"


def test_events_are_heard_once_however_many_connections_there_are(way: LibvirtConnection) -> None:
    inside = [Inside(way.call), Inside(way.call)]
    said: list[str] = []
    way._log = said.append
    uuid = a_vm(way)
    watch = way.watch(uuid, "test")
    way.call(lambda opened: opened.lookupByUUIDString(uuid).suspend())
    way.call(lambda opened: opened.lookupByUUIDString(uuid).destroy())
    assert watch.gone.wait(DEADLINE)
    for one in inside:
        one.end()
    assert said.count("test: it was destroyed") == 1


def test_events_are_heard_again_after_a_loss(way: LibvirtConnection) -> None:
    with pytest.raises(faults.ConnectionLost):
        way.once(lose)
    uuid = a_vm(way)
    watch = way.watch(uuid, "test")
    way.call(lambda opened: opened.lookupByUUIDString(uuid).destroy())
    assert watch.gone.wait(DEADLINE)


def test_a_connection_that_only_calls_side_by_side_needed_is_closed_after_a_while(way, monkeypatch):
    def both() -> None:
        way.call(lambda _opened: way.call(lambda opened: opened.getType()))

    both()
    both()
    assert len(way._idle) == 2, "it is used again"
    monkeypatch.setattr(connections, "SURPLUS_SECONDS", 0.0)
    way.call(lambda opened: opened.getType())
    assert way._idle == [way._listener], "events are still heard"
    both()


BESET = """
import sys, threading
from vmgahp import errors
from vmgahp.drivers.libvirt.link import connection

connection.KEEPALIVE_INTERVAL, connection.KEEPALIVE_COUNT = 1, 2
lost, over = threading.Semaphore(0), threading.Event()
way = connection.LibvirtConnection(sys.argv[1], lambda line: lost.release())
way.deadline = 4

def ask():
    while not over.is_set():
        try:
            way.call(lambda opened: (opened.getVersion(), opened.listAllDomains(), opened.getCapabilities()))
        except errors.MachineFault:
            lost.release()

threads = [threading.Thread(target=ask) for _ in range(4)]
for thread in threads:
    thread.start()
for word in sys.stdin:
    while lost.acquire(blocking=False):
        pass
    for _ in threads:
        assert lost.acquire(timeout=60)
    print("lost", flush=True)
over.set()
for thread in threads:
    thread.join()
way.deadline = 60
print(way.call(lambda opened: opened.getType()))
way.close()
"""
"""Asks libvirtd from four threads at once; for each line that it reads it waits until all have lost it."""


@contextmanager
def a_libvirtd(tmp_path: Path, settings: str = "") -> Iterator[Namespace]:
    """A libvirtd of our own, in a namespace."""
    require_namespace()
    with Namespace(tmp_path) as made:
        with made.path("/etc/libvirt/libvirtd.conf").open("a") as file:
            file.write(settings)
        made.start_libvirt()
        yield made


def uri_of(namespace: Namespace) -> str:
    return f"qemu+unix:///system?socket={namespace.path('/run/libvirt/libvirt-sock')}"


def process(namespace: Namespace, words: str) -> int:
    [pid] = [pid for pid, command in namespace.processes().items() if words in command]
    return pid


@pytest.mark.pool
def test_a_libvirtd_that_hangs_and_comes_back_does_not_kill_its_clients(tmp_path: Path) -> None:
    """Each thread sees its connection fail while the others are inside of theirs."""
    with a_libvirtd(tmp_path) as namespace:
        libvirtd = process(namespace, "libvirtd -d")
        command = [sys.executable, "-c", BESET, uri_of(namespace)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
            assert client.stdin
            assert client.stdout
            for _ in range(3):
                namespace.kill(libvirtd, "STOP")
                client.stdin.write("\n")
                client.stdin.flush()
                assert client.stdout.readline() == "lost\n", f"it ended with {client.wait()}"
                namespace.kill(libvirtd, "CONT")
            client.stdin.close()
            assert client.stdout.read() == "QEMU\n"
        assert client.returncode == 0


@pytest.mark.pool
def test_while_a_domain_is_saved_no_call_about_another_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one connection libvirt at times leaves a second call lying until the first is answered or a ping is due.

    The save lasts for as long as the test wants: the QEMU that is to write its memory stands still.
    """
    monkeypatch.setattr(connections, "KEEPALIVE_INTERVAL", 100 * int(DEADLINE))
    begun, saved, answered = threading.Event(), threading.Event(), threading.Event()

    def save(opened: libvirt.virConnect) -> None:
        found = opened.lookupByUUIDString(saved_domain.UUIDString())
        begun.set()
        found.save(f"{LAB}/saved")

    def save_it() -> None:
        way.once(save)
        saved.set()

    def ask() -> None:
        for _ in range(CALLS):
            way.call(lambda opened: opened.lookupByUUIDString(asked.UUIDString()).interfaceAddresses(0))
        answered.set()

    with (
        a_libvirtd(tmp_path, "keepalive_interval = -1\n") as namespace,
        closing(LibvirtConnection(uri_of(namespace), lambda _line: None)) as way,
        closing(libvirt.open(uri_of(namespace))) as opened,
        another_vm(opened, "saved") as saved_domain,
        another_vm(opened, "asked") as asked,
    ):
        qemu = process(namespace, "guest=saved,")
        namespace.kill(qemu, "STOP")
        threading.Thread(target=save_it, daemon=True).start()
        assert begun.wait(DEADLINE)
        threading.Thread(target=ask, daemon=True).start()
        assert answered.wait(DEADLINE)
        assert not saved.is_set()
        namespace.kill(qemu, "CONT")
        assert saved.wait(DEADLINE)
