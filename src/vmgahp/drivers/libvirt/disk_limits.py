"""The limits of a VM's disks: the space that its job has asked for, and the free space in EXECUTE.

Occupied space counts, not the size of a file, which may have holes. The process that has the VM looks at the open
files of the disks, which QEMU writes to whatever happens to their names. A look needs no query and takes microseconds,
and the next one comes before a guest can have written what is left.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from vmgahp import errors
from vmgahp.host import threads
from vmgahp.job.exit_code import DISK_LIMIT

if TYPE_CHECKING:
    from vmgahp.drivers.libvirt.machine import LibvirtMachine

SHORTEST, LONGEST = 1.0, 30.0
"""The shortest and the longest time between two looks, in seconds."""

RATE = 2 << 30
"""Bytes that a guest is assumed to write in a second at most."""

AGAIN = 5.0
"""Seconds until another attempt to end a guest whose end has failed."""

SLACK = 8
"""The fraction, one part in so many, of the kept space that must be free beyond it before a paused guest runs again."""


def allowed(asked: int) -> int:
    """Return the bytes that disks may occupy if a job asks for `asked` bytes of guest data: images have tables."""
    return asked + asked // 32 + (1 << 20)


def occupied(files: Iterable[int]) -> int:
    """Return the bytes of the file system that open files occupy; one that is open twice counts once."""
    found = {(status.st_dev, status.st_ino): status.st_blocks << 9 for status in map(os.fstat, files)}
    return sum(found.values())


def begin(machine: LibvirtMachine, asked: int, kept_free: int, groups: Iterable[str]) -> None:
    """Watch the disks of a VM that runs, until its end.

    `asked` is the space that the job has asked for, `kept_free` the space to leave free in the file system, both in
    bytes, and 0 for no limit; `groups` are those of the machine's files that count. Raises `errors.MachineFault` and
    OSError.
    """
    assert machine.guest.files is not None
    files = machine.guest.files.files()
    limits = DiskLimits(machine, [os.dup(files[group]) for group in groups], asked, kept_free)
    machine.resources.at_end.append(limits.end)
    threads.start(f"disks-{machine.name}", limits.run)


class DiskLimits:
    """A watch on the disks of one VM."""

    def __init__(self, machine: LibvirtMachine, files: Sequence[int], asked: int, kept_free: int) -> None:
        """Watch the files with the descriptors `files`, which are closed when the VM is over."""
        self._machine = machine
        self._files = files
        self._asked = asked
        self._kept_free = kept_free
        self._occupied = occupied(files)
        self._over = threading.Event()
        machine.io_errors.has_room = self._has_room

    def run(self) -> None:
        """Look until the VM is over."""
        wait, problem = SHORTEST, ""
        while not self._over.wait(wait):
            try:
                wait, problem = self.look(), ""
            except OSError as error:
                wait, before, problem = LONGEST, problem, str(error)
                if problem != before:
                    self._machine.log(f"the space of the disks of {self._machine.name} cannot be measured: {problem}")
        for file in self._files:
            os.close(file)

    def end(self) -> None:
        """Stop watching, since the VM is over."""
        self._over.set()

    def look(self) -> float:
        """Check the occupied space, and act on it; return the seconds until the next look."""
        before, self._occupied = self._occupied, occupied(self._files)
        room = allowed(self._asked) - self._occupied if self._asked else LONGEST * RATE
        if room < 0:
            return self._give_up()
        if self._kept_free:
            left = self._free() - self._kept_free
            if left < 0 and self._occupied > before:
                self._wait_for_room()
            room = min(room, left)
        return min(max(room / RATE, SHORTEST), LONGEST)

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
            f"the disks of the VM occupy {self._occupied >> 20} MiB, and request_disk is {self._asked >> 20} MiB: "
            "raise it in the submit file, or have the guest write less"
        )
        machine = self._machine
        # A guest that ended meanwhile keeps its own way of ending.
        if self._stop(why) and not machine.guest.watch.gone.is_set():
            machine.screenshot()
            try:
                machine.give_up(DISK_LIMIT, why)
                self.end()
            except errors.Fault as fault:
                machine.log(f"{machine.name}, whose disks exceed request_disk, cannot be ended: {fault.problem}")
        return AGAIN

    def _wait_for_room(self) -> None:
        """Pause the guest until there is space on the machine again, as QEMU does when a disk is full."""
        if self._stop(f"a file system of which the last {self._kept_free >> 20} MiB are kept free"):
            self._machine.io_errors.seen()

    def _stop(self, why: str) -> bool:
        """Pause the guest at once; return False if an operation has paused it, as it is checked again when it runs."""
        machine = self._machine
        try:
            return machine.io_errors.stop(why)
        except errors.Fault as fault:
            machine.log(f"{machine.name}, whose disks are to stop growing, cannot be paused: {fault.problem}")
            return True
