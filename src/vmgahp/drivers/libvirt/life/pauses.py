"""The pauses of a guest by errors and limits of its disks, and the retries until it runs.

QEMU pauses a guest whose disk has no space left instead of passing the error on, and repeats the failed request when
the guest is resumed (libvirt's ``error_policy``): so it continues without any loss as soon as there is space. Free
space cannot be observed for all causes, so the guest is resumed periodically.

A guest that would fill the machine's disk is paused by `DiskLimits` before that, and waits in the same way; one that
exceeds what its job has asked for is ended. Occupied space counts, not the size of a file, which may have holes; the
open files are measured, which QEMU writes to whatever happens to their names. That takes microseconds, and the next
time comes before a guest can have written what is left. What a guest's program prints and sends is written to files of
the same account by this process, which asks before each write; outputs that are unpacked count beside their archive.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import libvirt

from vmgahp import errors
from vmgahp.drivers.libvirt.life.guest import EVENT_WAIT, LibvirtGuest
from vmgahp.drivers.libvirt.start.disks import allowed, occupied
from vmgahp.drivers.surveyor import Logger
from vmgahp.host.wait import start_thread
from vmgahp.job.exit_code import DISK_ERROR, DISK_LIMIT

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0
"""Seconds before a guest is resumed, the first time and at most; each wait is twice the one before."""
SETTLED = 5.0
"""Seconds after which the error of a guest that was resumed, and still runs, is considered to be over."""
_KINDS = {libvirt.VIR_DOMAIN_DISK_ERROR_NO_SPACE: "no space left"}

STALLED = (libvirt.VIR_DOMAIN_PAUSED, libvirt.VIR_DOMAIN_PAUSED_IOERROR)
"""The state and the reason of a domain that an error of a disk has paused."""


class IoErrors:
    """The retries of one domain, by a thread that exists while an error of a disk keeps the guest from running."""

    def __init__(self, guest: LibvirtGuest, give_up: Callable[[str, str], None], log: Logger) -> None:
        """Watch a guest; `give_up` ends the VM for a word of `exit_code` and a reason, or raises `errors.Fault`."""
        self.name = guest.name
        self.watch = guest.watch
        self.give_up = give_up
        self.patience = 0.0  # seconds after which the guest is given up; 0 for never
        self.at_first: Callable[[], None] = lambda: None
        """A callback for an error that has been seen, before the first attempt."""
        self.has_room: Callable[[], bool] = lambda: True
        """A function that returns True if a guest that was stopped may write again."""
        self.paused: Callable[[str | None], None] = lambda _: None
        """A callback with the reason why the guest is paused, and with None when it runs again."""
        guest.watch.disk_error = self.seen
        self._guest = guest
        self._log = log
        self._changed = threading.Condition()
        self._attempt = threading.Lock()  # a lock that is held while the guest is resumed
        self._seen = 0
        self._held = False
        self._ended = False
        self._thread: threading.Thread | None = None
        self._is_stopped = False  # True if it was paused by `stop`
        self._problem = "an error of a disk"

    @property
    def under_way(self) -> bool:
        """Return True if the guest is, or was until just now, paused by an error or by `stop`."""
        return self._thread is not None or self._is_stopped

    def look(self) -> bool:
        """Return True if an error has paused the guest, which was found paused: the event may have been missed."""
        if not self.under_way:
            with suppress(errors.Fault, libvirt.libvirtError):
                if self._guest.call(lambda domain: tuple(domain.state()) == STALLED):
                    self.seen()
        return self.under_way

    def seen(self) -> None:
        """Start retries after an error. It makes no call to libvirt, as the event thread calls it, too."""
        with self._changed:
            self._seen += 1
            if self._thread is None and not self._ended:
                try:
                    self._thread = start_thread(f"io-error-{self.name}", self._run)
                except errors.MachineFault as fault:  # the next STATUS detects the error, too
                    self._log(f"{self.name} is not tried again yet after an error of a disk: {fault.problem}")
            self._changed.notify_all()

    def stop(self, problem: str) -> bool:
        """Pause the guest; return False if it is held, or over. It stays so without `seen`. Raises `errors.Fault`."""
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
            with self._changed:  # one that was stopped still is
                self._held = before
                self._changed.notify_all()
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
        self._log(f"{self.name}: it was paused by {problem}, and is tried again")
        if self._is_stopped:
            self.paused(problem)
        self.at_first()
        pause, since = FIRST_PAUSE, time.monotonic()
        while self._wait(pause):
            if self._held:
                with self._changed:
                    self._changed.wait_for(lambda: self._ended or not self._held)
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

    def _try(self) -> bool:
        """Resume the guest if the error still pauses it; return False if it may not be, or cannot be, resumed."""
        with self._attempt:
            if self._held or self._ended or (self._is_stopped and not self.has_room()):
                return False
            self.watch.resumed.clear()
            self.watch.ours = True
            try:
                if self._guest.call(self._resume):
                    self.watch.resumed.wait(EVENT_WAIT)  # the event may come later than the answer, and is our own
            except (errors.Fault, libvirt.libvirtError) as error:
                self._log(f"{self.name} cannot be resumed after an error of a disk: {error}")
                return False
            finally:
                self.watch.ours = False
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

        def is_again() -> bool:
            return self._ended or self._held or self._is_stopped or self._seen != before

        with self._changed:
            if self._changed.wait_for(is_again, SETTLED):
                return False
            self._thread = None
        self.paused(None)
        self._log(f"{self.name} runs on: the error of its disk is over")
        return True

    def _end(self) -> bool:
        """Give the VM up for its error; return True if it was ended."""
        if self._held:
            return False
        try:
            self.give_up(DISK_ERROR, f"{self._problem} has kept the guest from running for {self.patience:g} s")
        except errors.Fault as fault:
            self._log(f"{self.name} cannot be ended after an error of a disk: {fault.problem}")
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


# Limits of the disks


SHORTEST, LONGEST = 1.0, 30.0
"""The shortest and the longest time between two looks, in seconds."""
RATE = 2 << 30
"""Bytes that a guest is assumed to write in a second at most."""
AGAIN = 5.0
"""Seconds until another attempt to end a guest whose end has failed."""
SLACK = 8
"""The fraction, one part in so many, of the kept space that must be free beyond it before a paused guest runs again."""


class DiskLimits:
    """A watch on what one VM writes to EXECUTE: its disks, and what its program prints and sends."""

    def __init__(self, pauses: IoErrors, files: Sequence[int], asked: int, kept_free: int, log: Logger) -> None:
        """Watch open files, closed at the end; `asked` and `kept_free` are bytes, 0 for no limit. Raises OSError."""
        self._pauses = pauses
        self._log = log
        self._files = files
        self._asked = asked
        self._kept_free = kept_free
        self.unpacked: Callable[[], int] = lambda: 0
        """A function that returns the bytes of the outputs that have been unpacked, which no open file is."""
        self.is_shared = False
        """True if the guest can write to the scratch directory itself, which is not measured, by a share."""
        self._occupied = self._measure()
        self._over = threading.Event()
        pauses.has_room = self._has_room

    def run(self) -> None:
        """Watch until `end`, in a thread of its own."""
        wait, problem = SHORTEST, ""
        while not self._over.wait(wait):
            try:
                wait, problem = self.look(), ""
            except OSError as error:
                wait, before, problem = LONGEST, problem, str(error)
                if problem != before:
                    self._log(f"the space of the disks of {self._pauses.name} cannot be measured: {problem}")
        for file in self._files:
            with suppress(OSError):  # the file system of the job's is gone, and the descriptor is closed all the same
                os.close(file)

    def end(self) -> None:
        """Stop watching, since the VM is over."""
        self._over.set()

    def look(self) -> float:
        """Check the occupied space, and act on it; return the seconds until the next look."""
        before, self._occupied = self._occupied, self._measure()
        room = allowed(self._asked) - self._occupied if self._asked else LONGEST * RATE
        if room < 0:
            return self._give_up()
        if self._kept_free:
            left = self._free() - self._kept_free
            why = f"a file system of which the last {self._kept_free >> 20} MiB are kept free"
            if left < 0 and (self.is_shared or self._occupied > before) and self._stop(why):
                self._pauses.seen()  # it waits until there is space again, as QEMU does when a disk is full
            room = min(room, left)
        return min(max(room / RATE, SHORTEST), LONGEST)

    def left(self) -> float:
        """Return the bytes that may be written to further files of the account; 0 if that is not known."""
        try:
            left = self._free() - self._kept_free if self._kept_free else float("inf")
            return min(left, self._asked - self._measure()) if self._asked else left
        except OSError:
            return 0

    def _measure(self) -> int:
        return occupied(self._files) + self.unpacked()

    def _free(self) -> int:
        found = os.fstatvfs(self._files[0])
        return found.f_bavail * found.f_frsize

    def _has_room(self) -> bool:
        try:
            return self._free() >= self._kept_free + self._kept_free // SLACK
        except OSError:
            return False

    def _give_up(self) -> float:
        """End the VM, which has exceeded its share and cannot give space back."""
        why = (
            f"the disks and outputs of the VM occupy {self._occupied >> 20} MiB, and request_disk is "
            f"{self._asked >> 20} MiB: raise it in the submit file, or have the guest write less"
        )
        # A guest that ended meanwhile keeps its own way of ending.
        if self._stop(why) and not self._pauses.watch.gone.is_set():
            self._pauses.at_first()
            try:
                self._pauses.give_up(DISK_LIMIT, why)
                self.end()
            except errors.Fault as fault:
                self._log(f"{self._pauses.name}, whose disks exceed request_disk, cannot be ended: {fault.problem}")
        return AGAIN

    def _stop(self, why: str) -> bool:
        """Pause the guest at once; return False if an operation has paused it, as it is checked again when it runs."""
        try:
            return self._pauses.stop(why)
        except errors.Fault as fault:
            self._log(f"{self._pauses.name}, whose disks are to stop growing, cannot be paused: {fault.problem}")
            return True
