"""The retries for a guest that an error of a disk has paused, until it runs or is given up.

QEMU pauses a guest whose disk has no space left instead of passing the error on, and repeats the failed request when
the guest is resumed (libvirt's ``error_policy``): so it continues without any loss as soon as there is space. Whether
there will be is known only to the machine's users, and free space is best detected by trying, so the guest is resumed
periodically.

A guest that is paused before its disk is full (`vmgahp.drivers.libvirt.disk_limits`) waits in the same way.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import libvirt

from vmgahp import errors
from vmgahp.drivers.base import Logger
from vmgahp.drivers.libvirt.guest import EVENT_WAIT, LibvirtGuest
from vmgahp.host import threads

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0
"""Seconds before a guest is resumed, the first time and at most; each wait is twice the one before."""

SETTLED = 5.0
"""Seconds after which the error of a guest that was resumed, and still runs, is considered to be over."""

_KINDS = {libvirt.VIR_DOMAIN_DISK_ERROR_NO_SPACE: "no space left"}

STALLED = (libvirt.VIR_DOMAIN_PAUSED, libvirt.VIR_DOMAIN_PAUSED_IOERROR)
"""The state and the reason of a domain that an error of a disk has paused."""


class IoErrors:
    """The retries of one domain, by a thread that exists while an error of a disk keeps the guest from running."""

    def __init__(self, guest: LibvirtGuest, give_up: Callable[[str], None], log: Logger) -> None:
        """Watch a guest; `give_up` ends the VM, and raises `errors.Fault` if it cannot."""
        self.patience = 0.0
        """Seconds after which the guest is given up; 0 for never."""
        self.at_first: Callable[[], None] = lambda: None
        """A callback for an error that has been seen, before the first attempt."""
        self.has_room: Callable[[], bool] = lambda: True
        """A function that returns True if a guest that was stopped may write again."""
        self.paused: Callable[[str | None], None] = lambda _: None
        """A callback with the reason why the guest is paused, and with None when it runs again."""
        guest.watch.disk_error = self.seen
        self._guest = guest
        self._name = guest.name
        self._give_up = give_up
        self._log = log
        self._changed = threading.Condition()
        self._attempt = threading.Lock()
        """A lock that is held while the guest is resumed."""
        self._seen = 0
        self._held = False
        self._ended = False
        self._thread: threading.Thread | None = None
        self._is_stopped = False
        """True if it was paused by `stop`."""
        self._problem = "an error of a disk"

    @property
    def under_way(self) -> bool:
        """Return True if the guest is, or was until just now, paused by an error or by `stop`."""
        return self._thread is not None or self._is_stopped

    def look(self) -> bool:
        """Return True if an error has paused the guest, which was found paused: the event may have been missed."""
        if not self.under_way:
            try:
                if self._guest.call(lambda domain: tuple(domain.state()) == STALLED):
                    self.seen()
            except (errors.Fault, libvirt.libvirtError):
                return False
        return self.under_way

    def seen(self) -> None:
        """Start retries, since an error has paused the guest.

        It is also called from the event thread: it makes no call to libvirt.
        """
        with self._changed:
            self._seen += 1
            if self._thread is None and not self._ended:
                try:
                    self._thread = threads.start(f"io-error-{self._name}", self._run)
                except errors.MachineFault as fault:  # the next STATUS detects the error, too
                    self._log(f"{self._name} is not tried again yet after an error of a disk: {fault.problem}")
            self._changed.notify_all()

    def stop(self, problem: str) -> bool:
        """Pause the guest for a problem of a disk; return False if it is held, or over. Raises `errors.Fault`.

        After `seen` it continues when there is space; without, the caller gives it up.
        """
        with self._attempt:
            if self._held or self._ended:
                return False
            with self._changed:
                self._is_stopped, self._problem = True, problem
                self._changed.notify_all()
            self._guest.operate("pausing", lambda domain: domain.suspend())
        return True

    @contextmanager
    def held(self) -> Iterator[None]:
        """Prevent resumes while an operation pauses the guest, and until `let_go` if that succeeds."""
        with self._changed:
            before, self._held = self._held, True
        with self._attempt:
            pass
        try:
            yield
        except BaseException:
            if not before:
                self.let_go()
            raise

    def let_go(self) -> None:
        """Allow the guest to run again."""
        with self._changed:
            self._held = self._is_stopped = False
            self._changed.notify_all()

    def end(self) -> None:
        """Stop retrying, since the VM is over."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    # The thread

    def _run(self) -> None:
        problem = self._problem if self._is_stopped else "an error of a disk"
        self._log(f"{self._name}: it was paused by {problem}, and is tried again")
        if self._is_stopped:
            self.paused(problem)
        self.at_first()
        pause, since = FIRST_PAUSE, time.monotonic()
        while self._wait(pause):
            if self._held:
                self._wait_until_let_go()
                pause, since = FIRST_PAUSE, time.monotonic()
                continue
            before = self._seen
            if self._try() and self._is_over(before):
                return
            left = since + self.patience - time.monotonic()
            if self.patience and left <= 0 and self._end():
                return
            pause = min(2 * pause, LONGEST_PAUSE, max(left, FIRST_PAUSE) if self.patience else LONGEST_PAUSE)
        self._thread = None

    def _wait(self, seconds: float) -> bool:
        """Wait for `seconds`; return False if the VM is over by then."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended, seconds)
            return not self._ended

    def _wait_until_let_go(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._ended or not self._held)

    def _try(self) -> bool:
        """Resume the guest if the error still pauses it; return False if it may not be, or cannot be, resumed."""
        with self._attempt:
            if self._held or self._ended or (self._is_stopped and not self.has_room()):
                return False
            watch = self._guest.watch
            watch.resumed.clear()
            watch.ours = True
            try:
                if self._guest.call(self._resume):
                    watch.resumed.wait(EVENT_WAIT)  # the event may come later than the answer, and is our own
            except (errors.Fault, libvirt.libvirtError) as error:
                self._log(f"{self._name} cannot be resumed after an error of a disk: {error}")
                return False
            finally:
                watch.ours = False
            return True

    def _resume(self, domain: libvirt.virDomain) -> bool:
        state = tuple(domain.state())
        if state == STALLED:
            self._problem = _problem(domain)
            self.paused(self._problem)
        elif not self._is_stopped or state[0] != libvirt.VIR_DOMAIN_PAUSED:
            self._is_stopped = False
            return False  # it was resumed by others, or is gone
        domain.resume()
        self._is_stopped = False
        return True

    def _is_over(self, before: int) -> bool:
        """Return True if the guest, resumed when `before` errors had been seen, meets no further error."""
        with self._changed:
            if self._changed.wait_for(lambda: self._is_again(before), SETTLED):
                return False
            self._thread = None
        self.paused(None)
        self._log(f"{self._name} runs on: the error of its disk is over")
        return True

    def _is_again(self, before: int) -> bool:
        return self._ended or self._held or self._is_stopped or self._seen != before

    def _end(self) -> bool:
        """Give the VM up for its error; return True if it was ended."""
        if self._held:
            return False
        try:
            self._give_up(f"{self._problem} has kept the guest from running for {self.patience:g} s")
        except errors.Fault as fault:
            self._log(f"{self._name} cannot be ended after an error of a disk: {fault.problem}")
            return False
        self._thread = None
        return True


def _problem(domain: libvirt.virDomain) -> str:
    """Return a description of the error and its disk, as far as libvirt knows."""
    try:
        found = domain.diskErrors()
    except libvirt.libvirtError:
        found = {}
    said = [f"{disk} ({_KINDS.get(kind, 'an I/O error')})" for disk, kind in sorted(found.items())]
    return f"an error of the disk {', '.join(said)}" if said else "an error of a disk"
