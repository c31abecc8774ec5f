"""The connection to libvirtd: opened when first needed, reopened after the daemon was restarted.

A transient domain and its QEMU survive a restart of libvirtd, so a lost connection says nothing about the VM: the
call is retried on a new connection, for as long as `RECONNECT_DEADLINE`.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

import libvirt

from vmgahp import errors
from vmgahp.config import Settings
from vmgahp.drivers.libvirt.link import faults
from vmgahp.host import proc
from vmgahp.host.wait import Task, start_thread
from vmgahp.job import exit_code

Result = TypeVar("Result")

RECONNECT_DEADLINE = 15.0
"""Seconds during which a call is retried, by default; a restart of libvirtd takes one or two."""
RETRY_INTERVAL = 0.25
HANGING_DEADLINE = 1.0
"""Seconds for a call with its own timeout, which has a fallback, once libvirtd was seen to hang."""
CLOSE_WAIT = 2.0
"""Seconds that the end of a server waits for its connections to close."""
KEEPALIVE_INTERVAL, KEEPALIVE_COUNT = 6, 2
"""The interval in seconds, and the number, of pings to libvirtd (``virConnectSetKeepAlive``).

A call to a libvirtd that hangs fails after 12 s. A live one sends a ping itself after 5 s, so that one is enough.
"""
SURPLUS_SECONDS = 90.0
"""Seconds that a surplus connection, opened for calls in parallel, is kept: it serves calls that recur every minute."""
_EVENTS = {
    "STOPPED_SHUTDOWN": ("the guest has powered off", exit_code.POWERED_OFF),
    "STOPPED_DESTROYED": ("it was destroyed", exit_code.DESTROYED_BY_OTHERS),
    "STOPPED_CRASHED": ("the guest has crashed", exit_code.CRASHED),
    "STOPPED_MIGRATED": ("it was migrated away", ""),
    "STOPPED_SAVED": ("it was saved", ""),
    "STOPPED_FAILED": ("QEMU has crashed, or somebody has killed it", exit_code.CRASHED),
    "CRASHED_PANICKED": ("the guest has panicked", exit_code.CRASHED),
    "SUSPENDED_PAUSED": ("it was paused", ""),
    "SUSPENDED_WATCHDOG": ("its watchdog paused it", ""),
    "RESUMED_UNPAUSED": ("it was resumed", ""),
}
"""The meaning of libvirt's life-cycle events, and how a VM has ended that is gone by one."""


def _detail(name: str) -> tuple[int, int]:
    """Return the numbers of an event (``virDomainEventType``) and of its detail."""
    event = name.partition("_")[0]
    return getattr(libvirt, f"VIR_DOMAIN_EVENT_{event}"), getattr(libvirt, f"VIR_DOMAIN_EVENT_{name}")


_MEANINGS = {_detail(name): meaning for name, meaning in _EVENTS.items()}
_GONE_EVENTS = (libvirt.VIR_DOMAIN_EVENT_STOPPED, libvirt.VIR_DOMAIN_EVENT_CRASHED)
_DISK_ERROR, _SAVED = _detail("SUSPENDED_IOERROR"), _detail("STOPPED_SAVED")
_EVENTS_THREAD = "libvirt-events"


class Watch:
    """The state of one domain as seen through libvirt's events."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.gone = threading.Event()  # a flag set when the domain stops; cleared by whoever starts it again
        self.resumed = threading.Event()
        """A flag set when its CPUs begin to run, or when it stops instead; cleared by whoever lets it run."""
        self.was_saved = False  # True if it stopped because its memory was written to a file
        self.how = ""  # the way in which it stopped, a word of `vmgahp.job.exit_code`; empty without an event
        self.ended_at = 0.0  # the time at which it stopped, in seconds since 1970; 0 without an event
        self.ending: Callable[[], None] = lambda: None
        """A callback for a guest that has powered off or crashed; it and the next two make no call to libvirt."""
        self.disk_error: Callable[[], None] = lambda: None
        """A callback for an error of a disk that has paused the guest."""
        self.has_agent = False
        """True if a program in the guest has opened the port of the guest agent; a guess if events were missed."""
        self.agent_came: Callable[[], None] = lambda: None  # a callback for the opening of that port
        self.ours = False  # True if the current events are caused by this machine and need no line in the log


_events_lock = threading.Lock()


def _start_events() -> None:
    """Start the one thread of libvirt's default event loop, which keep-alive and events need."""
    with _events_lock:
        if any(thread.name == _EVENTS_THREAD for thread in threading.enumerate()):
            return
        # libvirt prints every error on stderr by default; ours are logged where they are understood.
        libvirt.registerErrorHandler(lambda _context, _error: None, None)
        libvirt.virEventRegisterDefaultImpl()
        start_thread(_EVENTS_THREAD, _run_events)


def _run_events() -> None:
    while True:
        libvirt.virEventRunDefaultImpl()


class _Connection:
    """One open connection, used by one thread at a time."""

    def __init__(self, connection: libvirt.virConnect) -> None:
        self.connection = connection
        self.idle_since = 0.0  # the time at which its last call ended, by the monotonic clock
        self._callbacks: list[int] = []
        self._is_lost = False

    def listen(self, event: int, events: Callable[..., None]) -> None:
        """Register `events` as the callback for one kind of event of all domains."""
        self._callbacks.append(self.connection.domainEventRegisterAny(None, event, events, None))

    def is_lost(self, error: libvirt.libvirtError | None = None) -> bool:
        """Return True if the connection to libvirtd is lost, which `error` may say."""
        if error is not None and faults.is_connection_loss(error):
            self._is_lost = True
        if not self._is_lost:
            try:
                self._is_lost = not self.connection.isAlive()
            except libvirt.libvirtError:
                self._is_lost = True
        return self._is_lost

    def close(self) -> None:
        """Close the connection, and with it its descriptors: a registered callback would keep them."""
        with suppress(libvirt.libvirtError):  # the connection is dead already
            try:
                for callback in self._callbacks:
                    self.connection.domainEventDeregisterAny(callback)
            finally:
                self.connection.close()


class LibvirtConnection:
    """The connections to one libvirt URI, shared by all machines of a driver; thread-safe.

    Each call has a connection to itself, and one of them receives the domains' events. So no thread closes a
    connection that another one uses, and no call waits for another, such as one that saves a domain or hangs; libvirt
    below 10.4 would crash where two threads use a connection that is lost (CVE-2024-4418).
    """

    def __init__(self, uri: str, log: Callable[[str], None], *, read_only: bool = False) -> None:
        self.uri = uri
        self.read_only = read_only  # True if it makes queries only; libvirt allows these to every user of the machine
        self.hears_agents = False  # True if it receives events of guest agents as well; to be set before the first call
        self.deadline = RECONNECT_DEADLINE  # seconds during which a call keeps trying to reach libvirtd
        self.refused_deadline = RECONNECT_DEADLINE
        """Seconds of these during which it retries if the connection is refused."""
        self._log = log
        self._lock = threading.Lock()
        self._idle: list[_Connection] = []
        self._listener: _Connection | None = None  # the connection that receives events, idle or not
        self._opening: Task[None] | None = None
        self._watches: dict[str, Watch] = {}
        self._is_silent = False  # True if libvirtd was seen to hang, and has not answered since
        self._closed = False

    def call(self, function: Callable[[libvirt.virConnect], Result], *, seconds: float = 0) -> Result:
        """Call `function`, which may be done twice, with a live connection, and retry if libvirtd went away.

        Raises `libvirt.libvirtError`, and `errors.MachineFault` if libvirtd cannot be reached, or has not answered
        within `seconds`, where they are given: `function` is then abandoned, and may still take effect.
        """
        now = time.monotonic()
        if not seconds:
            return self._repeat(function, now + self.deadline)
        end = now + min(seconds, HANGING_DEADLINE if self._is_silent else self.deadline)
        try:
            task = Task("libvirt-call", lambda: self._repeat(function, end))
        except errors.MachineFault:
            return self._repeat(function, end)  # without a thread, call it without a timeout
        if not task.wait(seconds):
            self._is_silent = True
            raise faults.late(self.uri, seconds)
        return task.result()

    def ask(self, function: Callable[[libvirt.virConnect], Result], doing: str, *, seconds: float = 0) -> Result:
        """Call `function` as `call` does, and raise the fault for an error of libvirt's (`faults.from_libvirt`)."""
        try:
            return self.call(function, seconds=seconds)
        except libvirt.libvirtError as error:
            raise faults.from_libvirt(error, doing) from error

    def once(self, function: Callable[[libvirt.virConnect], Result]) -> Result:
        """Call `function`, which must not be done twice, such as a start; its events may come after the answer.

        Raises `faults.ConnectionLost` if libvirtd went away meanwhile, so that the outcome is unknown; else as `call`.
        """
        with self._borrow(time.monotonic() + self.deadline) as own:
            try:
                return function(own.connection)
            except libvirt.libvirtError as error:
                if own.is_lost(error):
                    raise faults.ConnectionLost(error) from error
                raise

    def watch(self, uuid: str, name: str) -> Watch:
        """Watch the events of the domain `uuid` from now on, until `unwatch`."""
        return self._watches.setdefault(uuid, Watch(name))

    def unwatch(self, uuid: str) -> None:
        self._watches.pop(uuid, None)

    def close(self) -> None:
        """Refuse new calls, and close the idle connections; those in use are closed by their users."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        if idle and not self._close(idle, CLOSE_WAIT):
            self._log(f"closing the connection to libvirt: {faults.hanging(self.uri).problem}")

    @staticmethod
    def _close(unused: list[_Connection], seconds: float) -> bool:
        """Close unused connections, to which libvirtd has to reply; return True if it has within `seconds`."""

        def close() -> None:
            for own in unused:
                own.close()

        with suppress(errors.MachineFault):  # without a thread they are closed with the process
            return Task("libvirt-close", close).wait(seconds)
        return True

    def _repeat(self, function: Callable[[libvirt.virConnect], Result], end: float) -> Result:
        while True:
            with self._borrow(end) as own:
                try:
                    answer = function(own.connection)
                    self._is_silent = False
                    return answer
                except libvirt.libvirtError as error:
                    if not own.is_lost(error):
                        raise
                    if time.monotonic() + RETRY_INTERVAL >= end:
                        raise faults.unreachable(self.uri, error) from error
                    self._log(f"the connection to libvirt was lost, opening it again: {error}")
            time.sleep(RETRY_INTERVAL)

    @contextmanager
    def _borrow(self, end: float) -> Iterator[_Connection]:
        """Lend a live connection exclusively, opened first if there is none idle. Raises `errors.MachineFault`."""
        own = self._take(end)
        try:
            yield own
        except (SystemError, UnicodeDecodeError) as error:
            raise faults.Garbled() from error
        finally:
            self._put_back(own)

    def _take(self, end: float) -> _Connection:
        refused: BaseException | None = None
        refused_end = min(end, time.monotonic() + self.refused_deadline)
        while True:
            with self._lock:
                if self._closed:
                    raise errors.HypervisorFault("The connection to libvirt is closed: the server is ending.")
                self._sort_out()
                if self._idle and self._listener is not None:
                    return self._idle.pop(self._idle.index(self._listener) if self._listener in self._idle else -1)
                # A libvirtd that hangs accepts and never answers, and no keep-alive watches a connection that is
                # being made. One thread waits then, and not all workers.
                if self._opening is None:
                    self._opening = Task("libvirt-open", self._open)
                opening = self._opening
            if not opening.wait(end - time.monotonic()):
                self._is_silent = refused is None
                raise faults.hanging(self.uri) if refused is None else faults.unreachable(self.uri, refused)
            if opening.error is not None:
                refused = opening.error
                if time.monotonic() >= refused_end:
                    raise faults.unreachable(self.uri, refused) from refused
                time.sleep(RETRY_INTERVAL)

    def _put_back(self, own: _Connection) -> None:
        with self._lock:
            is_closed = self._closed
            if not is_closed:
                own.idle_since = time.monotonic()
                self._idle.append(own)
                self._sort_out()
                oldest = own.idle_since - SURPLUS_SECONDS
                surplus = [kept for kept in self._idle if kept is not self._listener and kept.idle_since < oldest]
                self._idle = [kept for kept in self._idle if kept not in surplus]
        if is_closed:
            own.close()
        elif surplus:
            self._close(surplus, 0.0)

    def _sort_out(self) -> None:
        """Close the idle connections that are dead, for which no answer is awaited."""
        for own in [own for own in self._idle if own.is_lost()]:
            self._idle.remove(own)
            if self._listener is own:
                self._listener = None
            own.close()

    def _open(self) -> None:
        """Open one more connection; one thread at a time does so."""
        own = None
        try:
            own = _Connection(self._connect())
            if is_first := self._listener is None:
                own.listen(libvirt.VIR_DOMAIN_EVENT_ID_LIFECYCLE, self._lifecycle)
                if self.hears_agents:
                    with suppress(libvirt.libvirtError):  # libvirt's drivers for other hypervisors have no agents
                        own.listen(libvirt.VIR_DOMAIN_EVENT_ID_AGENT_LIFECYCLE, self._agent)
                    for watch in self._watches.copy().values():
                        watch.has_agent = True  # assumed, since events may have been missed
        finally:
            with self._lock:
                self._opening = None
                if own is not None and not self._closed:
                    if is_first:
                        self._listener = own
                    self._idle.append(own)
                    own = None
            if own is not None:
                own.close()

    def _connect(self) -> libvirt.virConnect:
        _start_events()
        connection = (libvirt.openReadOnly if self.read_only else libvirt.open)(self.uri)
        try:
            connection.setKeepAlive(KEEPALIVE_INTERVAL, KEEPALIVE_COUNT)
        except libvirt.libvirtError as error:
            # A driver within this process, such as the test driver, neither has nor needs keep-alive.
            if error.get_error_code() != libvirt.VIR_ERR_NO_SUPPORT:
                raise
        return connection

    def _lifecycle(
        self, _connection: libvirt.virConnect, domain: libvirt.virDomain, event: int, detail: int, _data: object
    ) -> None:
        # Runs in libvirt's event thread, where no call to libvirt may be made that waits for an answer.
        watch = self._watches.get(domain.UUIDString())
        if watch is None:
            return
        if event in (libvirt.VIR_DOMAIN_EVENT_SHUTDOWN, libvirt.VIR_DOMAIN_EVENT_CRASHED):
            watch.ending()
        cause, how = _MEANINGS.get((event, detail), ("", ""))
        if cause and (not watch.ours or event == libvirt.VIR_DOMAIN_EVENT_CRASHED):
            self._log(f"{watch.name}: {cause}")
        if event == libvirt.VIR_DOMAIN_EVENT_RESUMED or event in _GONE_EVENTS:
            watch.resumed.set()
        if event == libvirt.VIR_DOMAIN_EVENT_STARTED:
            watch.gone.clear()
            watch.was_saved = False
            watch.how = ""
            watch.ended_at = 0.0
        elif (event, detail) == _DISK_ERROR:
            watch.disk_error()
        elif event in _GONE_EVENTS:
            watch.was_saved = (event, detail) == _SAVED
            # A crash comes before the stop that follows from it.
            watch.how = watch.how or how
            watch.ended_at = watch.ended_at or time.time()
            watch.gone.set()

    def _agent(
        self, _connection: libvirt.virConnect, domain: libvirt.virDomain, state: int, _reason: int, _data: object
    ) -> None:
        # As above.
        watch = self._watches.get(domain.UUIDString())
        if watch is not None:
            watch.has_agent = state == libvirt.VIR_CONNECT_DOMAIN_EVENT_AGENT_LIFECYCLE_STATE_CONNECTED
            if watch.has_agent:
                watch.agent_came()


# The usual libvirt


SYSTEM_URI, SESSION_URI = "qemu:///system", "qemu:///session"


def connection_for(settings: Settings, log: Callable[[str], None], usual: str = "") -> LibvirtConnection:
    """Return a connection for VM_LIBVIRT_URI, or else `usual`, by default this user's QEMU. It is not opened yet."""
    uri = settings.string("VM_LIBVIRT_URI") or usual or (SYSTEM_URI if os.getuid() == 0 else SESSION_URI)
    # Root's startd runs the probe as its own user, of all types but kvm and xen.
    read_only = uri == SESSION_URI and os.getuid() != 0 and proc.name(os.getppid()) == "condor_startd"
    return LibvirtConnection(SYSTEM_URI if read_only else uri, log, read_only=read_only)
