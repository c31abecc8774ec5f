"""The way to libvirtd: opened when first needed, opened again when the daemon was restarted.

A transient domain and its QEMU live on while libvirtd restarts, so a lost connection says nothing about
the VM: the call is made again on a new connection, for as long as `RECONNECT_DEADLINE`.
"""

import threading
import time
from collections.abc import Callable
from typing import TypeVar

import libvirt

from vmgahp import errors
from vmgahp.drivers.libvirt import faults
from vmgahp.job import exit_code

Result = TypeVar("Result")

RECONNECT_DEADLINE = 15.0
"""Seconds, unless a connection says otherwise; a restart of libvirtd takes one or two."""

RETRY_INTERVAL = 0.25

KEEPALIVE_INTERVAL, KEEPALIVE_COUNT = 5, 3
"""libvirt closes a connection whose daemon has not answered a ping for 15 s, so that a hung libvirtd
fails calls instead of keeping them for ever (``virConnectSetKeepAlive``)."""

_CAUSES = {
    (libvirt.VIR_DOMAIN_EVENT_STOPPED, libvirt.VIR_DOMAIN_EVENT_STOPPED_SHUTDOWN): "the guest has powered off",
    (libvirt.VIR_DOMAIN_EVENT_STOPPED, libvirt.VIR_DOMAIN_EVENT_STOPPED_DESTROYED): "it was destroyed",
    (libvirt.VIR_DOMAIN_EVENT_STOPPED, libvirt.VIR_DOMAIN_EVENT_STOPPED_CRASHED): "the guest has crashed",
    (libvirt.VIR_DOMAIN_EVENT_STOPPED, libvirt.VIR_DOMAIN_EVENT_STOPPED_MIGRATED): "it was migrated away",
    (libvirt.VIR_DOMAIN_EVENT_STOPPED, libvirt.VIR_DOMAIN_EVENT_STOPPED_SAVED): "it was saved",
    (
        libvirt.VIR_DOMAIN_EVENT_STOPPED,
        libvirt.VIR_DOMAIN_EVENT_STOPPED_FAILED,
    ): "QEMU has crashed, or somebody has killed it",
    (libvirt.VIR_DOMAIN_EVENT_CRASHED, libvirt.VIR_DOMAIN_EVENT_CRASHED_PANICKED): "the guest has panicked",
    (libvirt.VIR_DOMAIN_EVENT_SUSPENDED, libvirt.VIR_DOMAIN_EVENT_SUSPENDED_PAUSED): "it was paused",
    (libvirt.VIR_DOMAIN_EVENT_SUSPENDED, libvirt.VIR_DOMAIN_EVENT_SUSPENDED_IOERROR): (
        "it was paused by an error of a disk: see whether the file system is full, then virsh resume"
    ),
    (libvirt.VIR_DOMAIN_EVENT_SUSPENDED, libvirt.VIR_DOMAIN_EVENT_SUSPENDED_WATCHDOG): "its watchdog paused it",
    (libvirt.VIR_DOMAIN_EVENT_RESUMED, libvirt.VIR_DOMAIN_EVENT_RESUMED_UNPAUSED): "it was resumed",
}
"""What libvirt's life-cycle events mean (``virDomainEventType`` and the details of each)."""

_HOW = {
    (libvirt.VIR_DOMAIN_EVENT_STOPPED, libvirt.VIR_DOMAIN_EVENT_STOPPED_SHUTDOWN): exit_code.POWERED_OFF,
    (libvirt.VIR_DOMAIN_EVENT_STOPPED, libvirt.VIR_DOMAIN_EVENT_STOPPED_DESTROYED): (exit_code.DESTROYED_BY_OTHERS),
    (libvirt.VIR_DOMAIN_EVENT_STOPPED, libvirt.VIR_DOMAIN_EVENT_STOPPED_CRASHED): exit_code.CRASHED,
    (libvirt.VIR_DOMAIN_EVENT_STOPPED, libvirt.VIR_DOMAIN_EVENT_STOPPED_FAILED): exit_code.CRASHED,
    (libvirt.VIR_DOMAIN_EVENT_CRASHED, libvirt.VIR_DOMAIN_EVENT_CRASHED_PANICKED): exit_code.CRASHED,
}
"""How a VM has ended, by the event that says that it is gone."""

_GONE_EVENTS = (libvirt.VIR_DOMAIN_EVENT_STOPPED, libvirt.VIR_DOMAIN_EVENT_CRASHED)
_DISK_ERROR = (libvirt.VIR_DOMAIN_EVENT_SUSPENDED, libvirt.VIR_DOMAIN_EVENT_SUSPENDED_IOERROR)
_SAVED = (libvirt.VIR_DOMAIN_EVENT_STOPPED, libvirt.VIR_DOMAIN_EVENT_STOPPED_SAVED)


class Watch:
    """What was seen of one domain through libvirt's events."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.gone = threading.Event()
        """Set when the domain stops; cleared by who starts it again."""
        self.resumed = threading.Event()
        """Set when its CPUs begin to run, or when it stops instead; cleared by who lets it run."""
        self.was_saved = False
        """It stopped because its memory was written to a file."""
        self.how = ""
        """How it stopped, by itself or by others: a word of `vmgahp.job.exit_code`; empty where no event said so."""
        self.ended_at = 0.0
        """When it stopped, in seconds since 1970; 0 where no event said so."""
        self.ending: Callable[[], None] = lambda: None
        """Called as soon as the guest is known to have powered off or crashed, when its process may still be there.
        It makes no call to libvirt."""
        self.disk_error = False
        """An error of a disk has paused it; cleared by who looks at what it shows."""
        self.ours = False
        """What happens now is the machine's own doing and needs no line in the log."""


class _EventLoop:
    """libvirt's default event loop in one thread of this process; keep-alive and events need it."""

    _lock = threading.Lock()
    _running = False

    @classmethod
    def start(cls) -> None:
        with cls._lock:
            if cls._running:
                return
            # libvirt prints every error on stderr by default; ours are logged where they are understood.
            libvirt.registerErrorHandler(lambda _context, _error: None, None)
            libvirt.virEventRegisterDefaultImpl()
            threading.Thread(target=cls._run, name="libvirt-events", daemon=True).start()
            cls._running = True

    @staticmethod
    def _run() -> None:
        while True:
            libvirt.virEventRunDefaultImpl()


class _Opening:
    """One attempt to connect, in a thread of its own: a libvirtd that hangs accepts and never answers, and
    no keep-alive watches a connection that is being made. One thread waits then, and not all workers."""

    def __init__(self, connection: "LibvirtConnection") -> None:
        self.ended = threading.Event()
        self.error: libvirt.libvirtError | None = None
        threading.Thread(target=self._run, args=(connection,), name="libvirt-open", daemon=True).start()

    def _run(self, connection: "LibvirtConnection") -> None:
        _EventLoop.start()
        opened = None
        try:
            connect = libvirt.openReadOnly if connection.read_only else libvirt.open
            opened = connection.prepare(connect(connection.uri))
        except libvirt.libvirtError as error:
            self.error = error
        connection.opened(self, opened)


class LibvirtConnection:
    """A connection to one libvirt URI, shared by all machines of a driver; safe from any thread."""

    def __init__(self, uri: str, log: Callable[[str], None], *, read_only: bool = False) -> None:
        self.uri = uri
        self.read_only = read_only
        """Asks only; libvirt grants that to every user of the machine."""
        self.deadline = RECONNECT_DEADLINE
        """Seconds for which a call keeps trying to reach libvirtd."""
        self._log = log
        self._lock = threading.Lock()
        self._connection: libvirt.virConnect | None = None
        self._opening: _Opening | None = None
        self._callback = -1
        self._watches: dict[str, Watch] = {}
        self._closed = False

    def call(self, function: Callable[[libvirt.virConnect], Result]) -> Result:
        """Call `function` with a live connection, and again on a new one when libvirtd went away.

        Only for what may be done twice. Raises `libvirt.libvirtError` for what libvirt answers, and
        `errors.MachineFault` when libvirtd cannot be reached.
        """
        end = time.monotonic() + self.deadline
        while True:
            connection = self._open(end)
            try:
                return function(connection)
            except libvirt.libvirtError as error:
                if not self._lost(connection, error):
                    raise
                self._log(f"the connection to libvirt was lost, opening it again: {error}")
                self._drop(connection)

    def once(self, function: Callable[[libvirt.virConnect], Result]) -> Result:
        """Call `function` with a live connection, once: for what must not be done twice, such as a start."""
        end = time.monotonic() + self.deadline
        connection = self._open(end)
        if not connection.isAlive():
            self._drop(connection)
            connection = self._open(end)
        return function(connection)

    def watch(self, uuid: str, name: str) -> Watch:
        """Watch the domain `uuid` from now on, until `unwatch`."""
        return self._watches.setdefault(uuid, Watch(name))

    def unwatch(self, uuid: str) -> None:
        """No longer look out for the domain `uuid`."""
        self._watches.pop(uuid, None)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            connection, self._connection = self._connection, None
        if connection is not None:
            try:
                self._end(connection)
            except libvirt.libvirtError as error:
                self._log(f"closing the connection to libvirt: {error}")

    def _open(self, end: float) -> libvirt.virConnect:
        waiting = threading.Event()
        refused: libvirt.libvirtError | None = None
        while True:
            with self._lock:
                if self._closed:
                    raise errors.HypervisorFault("The connection to libvirt is closed: the server is ending.")
                if self._connection is not None:
                    return self._connection
                if self._opening is None:
                    self._opening = _Opening(self)
                opening = self._opening
            if not opening.ended.wait(max(0.0, end - time.monotonic())):
                raise faults.hanging(self.uri) if refused is None else faults.unreachable(self.uri, refused)
            if opening.error is not None:
                refused = opening.error
                if time.monotonic() >= end:
                    raise faults.unreachable(self.uri, refused) from refused
                waiting.wait(RETRY_INTERVAL)

    def opened(self, opening: _Opening, connection: libvirt.virConnect | None) -> None:
        """An attempt has ended, with a connection or without."""
        with self._lock:
            self._opening = None
            if not self._closed:
                self._connection = connection
        opening.ended.set()

    def prepare(self, connection: libvirt.virConnect) -> libvirt.virConnect:
        """Have events and a keep-alive on a new connection."""
        try:
            connection.setKeepAlive(KEEPALIVE_INTERVAL, KEEPALIVE_COUNT)
        except libvirt.libvirtError as error:
            # A driver within this process, such as the test driver, has none and needs none.
            if error.get_error_code() != libvirt.VIR_ERR_NO_SUPPORT:
                raise
        self._callback = connection.domainEventRegisterAny(
            None, libvirt.VIR_DOMAIN_EVENT_ID_LIFECYCLE, self._lifecycle, None
        )
        return connection

    def _end(self, connection: libvirt.virConnect) -> None:
        """Close a connection, and with it its descriptors: a callback that is registered would keep them."""
        try:
            connection.domainEventDeregisterAny(self._callback)
        finally:
            connection.close()

    def _lifecycle(
        self, _connection: libvirt.virConnect, domain: libvirt.virDomain, event: int, detail: int, _data: object
    ) -> None:
        # Runs in libvirt's event thread, where no call to libvirt may be made that waits for an answer.
        watch = self._watches.get(domain.UUIDString())
        if watch is None:
            return
        if event == libvirt.VIR_DOMAIN_EVENT_SHUTDOWN or event in _GONE_EVENTS:
            watch.ending()
        if not watch.ours or event == libvirt.VIR_DOMAIN_EVENT_CRASHED:
            cause = _CAUSES.get((event, detail))
            if cause is not None:
                self._log(f"{watch.name}: {cause}")
        if event == libvirt.VIR_DOMAIN_EVENT_RESUMED or event in _GONE_EVENTS:
            watch.resumed.set()
        if event == libvirt.VIR_DOMAIN_EVENT_STARTED:
            watch.gone.clear()
            watch.was_saved = False
            watch.how = ""
            watch.ended_at = 0.0
        elif (event, detail) == _DISK_ERROR:
            watch.disk_error = True
        elif event in _GONE_EVENTS:
            watch.was_saved = (event, detail) == _SAVED
            # A crash comes before the stop that follows from it.
            watch.how = watch.how or _HOW.get((event, detail), "")
            watch.ended_at = watch.ended_at or time.time()
            watch.gone.set()

    def _lost(self, connection: libvirt.virConnect, error: libvirt.libvirtError) -> bool:
        if faults.is_connection_loss(error):
            return True
        try:
            return not connection.isAlive()
        except libvirt.libvirtError:
            return True

    def _drop(self, connection: libvirt.virConnect) -> None:
        with self._lock:
            if self._connection is connection:
                self._connection = None
        try:
            self._end(connection)
        except libvirt.libvirtError:
            pass  # it is dead already
