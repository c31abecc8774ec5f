"""The way to libvirtd: opened when first needed, opened again when the daemon was restarted.

A transient domain and its QEMU live on while libvirtd restarts, so a lost connection says nothing about
the VM: the call is made again on a new connection, for as long as `RECONNECT_DEADLINE`.
"""

import threading
import time
from typing import TypeVar

import libvirt

from vmgahp import errors
from vmgahp.drivers.libvirt import faults

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

Result = TypeVar("Result")

RECONNECT_DEADLINE = 15.0
"""Seconds that a call goes on trying to reach libvirtd; a restart of the daemon takes one or two."""

RETRY_INTERVAL = 0.25

KEEPALIVE_INTERVAL, KEEPALIVE_COUNT = 5, 3
"""libvirt closes a connection whose daemon has not answered a ping for 15 s, so that a hung libvirtd
fails calls instead of keeping them for ever (``virConnectSetKeepAlive``)."""

_GONE_EVENTS = (libvirt.VIR_DOMAIN_EVENT_STOPPED, libvirt.VIR_DOMAIN_EVENT_CRASHED)


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


class Connection:
    """A connection to one libvirt URI, shared by all machines of a driver; safe from any thread."""

    def __init__(self, uri: str, log: "Callable[[str], None]") -> None:
        self.uri = uri
        self._log = log
        self._lock = threading.Lock()
        self._connection: libvirt.virConnect | None = None
        self._gone: dict[str, threading.Event] = {}
        self._closed = False

    def call(self, function: "Callable[[libvirt.virConnect], Result]") -> "Result":
        """Call `function` with a live connection, and again on a new one when libvirtd went away.

        Only for what may be done twice. Raises `libvirt.libvirtError` for what libvirt answers, and
        `errors.MachineFault` when libvirtd cannot be reached.
        """
        end = time.monotonic() + RECONNECT_DEADLINE
        while True:
            connection = self._open(end)
            try:
                return function(connection)
            except libvirt.libvirtError as error:
                if not self._lost(connection, error):
                    raise
                self._log(f"the connection to libvirt was lost, opening it again: {error}")
                self._drop(connection)

    def once(self, function: "Callable[[libvirt.virConnect], Result]") -> "Result":
        """Call `function` with a live connection, once: for what must not be done twice, such as a start."""
        return function(self._open(time.monotonic() + RECONNECT_DEADLINE))

    def watch(self, uuid: str) -> threading.Event:
        """An event that is set when the domain `uuid` is seen to stop. Forget it with `unwatch`."""
        return self._gone.setdefault(uuid, threading.Event())

    def unwatch(self, uuid: str) -> None:
        self._gone.pop(uuid, None)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            connection, self._connection = self._connection, None
        if connection is not None:
            try:
                connection.close()
            except libvirt.libvirtError as error:
                self._log(f"closing the connection to libvirt: {error}")

    def _open(self, end: float) -> "libvirt.virConnect":
        _EventLoop.start()
        waiting = threading.Event()
        while True:
            with self._lock:
                if self._closed:
                    raise errors.HypervisorFault("The connection to libvirt is closed: the server is ending.")
                if self._connection is not None:
                    return self._connection
                try:
                    self._connection = self._prepare(libvirt.open(self.uri))
                except libvirt.libvirtError as error:
                    refused = error
                else:
                    return self._connection
            if time.monotonic() >= end:
                raise faults.unreachable(self.uri, refused) from refused
            waiting.wait(RETRY_INTERVAL)

    def _prepare(self, connection: "libvirt.virConnect") -> "libvirt.virConnect":
        try:
            connection.setKeepAlive(KEEPALIVE_INTERVAL, KEEPALIVE_COUNT)
            connection.domainEventRegisterAny(
                None, libvirt.VIR_DOMAIN_EVENT_ID_LIFECYCLE, self._lifecycle, None
            )
        except libvirt.libvirtError as error:
            # The test driver has no keep-alive; nothing depends on it there.
            if error.get_error_code() != libvirt.VIR_ERR_NO_SUPPORT:
                raise
        return connection

    def _lifecycle(
        self,
        _connection: "libvirt.virConnect",
        domain: "libvirt.virDomain",
        event: int,
        _detail: int,
        _data: object,
    ) -> None:
        # Runs in libvirt's event thread, where no call to libvirt may be made that waits for an answer.
        if event in _GONE_EVENTS:
            gone = self._gone.get(domain.UUIDString())
            if gone is not None:
                gone.set()

    def _lost(self, connection: "libvirt.virConnect", error: "libvirt.libvirtError") -> bool:
        if faults.is_connection_loss(error):
            return True
        try:
            return not connection.isAlive()
        except libvirt.libvirtError:
            return True

    def _drop(self, connection: "libvirt.virConnect") -> None:
        with self._lock:
            if self._connection is connection:
                self._connection = None
        try:
            connection.close()
        except libvirt.libvirtError:
            pass  # it is dead already
