"""The parts of Xen's control domain for a guest: its console, libxl's log, and loop devices.

Xen's own scripts would make a loop device of a file by its name, as root. So the file is opened here, as the job's
user, and the kernel is given the descriptor: whatever happens to the name, the device is this file. The kernel
detaches it at its last close (``LO_FLAGS_AUTOCLEAR``), also when a server was killed or a guest was destroyed. See
loop(4), and ``struct loop_config`` in the kernel's ``linux/loop.h``.
"""

from __future__ import annotations

import errno
import os
import re
import select
import socket
import struct
import threading
from collections.abc import Callable
from fcntl import LOCK_EX, LOCK_SH, ioctl

from vmgahp import errors
from vmgahp.errors import HypervisorFault, JobFault, MachineFault
from vmgahp.host import wait
from vmgahp.host.serial_capture import CHUNK, CLOSE_SECONDS, ConsoleCapture


class PtyCapture(ConsoleCapture):
    """A capture that reads one terminal after the other: a guest that is restored or reboots gets another one."""

    def __init__(self, path: str, open_output: Callable[[], int], limit: int, on_error: Callable[[str], None]) -> None:
        """Listen as `ConsoleCapture` does, for this process's own use."""
        super().__init__(path, open_output, limit, on_error)
        self._reader: threading.Thread | None = None
        self._stop = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._terminal = ""

    def is_reading(self, terminal: str) -> bool:
        """Return True if it reads this terminal, and the terminal has not ended."""
        reader = self._reader
        return reader is not None and reader.is_alive() and self._terminal == terminal

    def follow(self, terminal: str) -> None:
        """Read this terminal, such as ``/dev/pts/3``, from now on. Raises OSError if it does not exist."""
        if not terminal or self.is_reading(terminal):
            return
        self._leave()
        descriptor = os.open(terminal, os.O_RDONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC)
        sink = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sink.connect(self.path)
            self._reader = wait.start_thread(f"console {terminal}", self._read, descriptor, sink, self._stop)
        except BaseException:
            os.close(descriptor)
            sink.close()
            raise
        self._terminal = terminal

    def close(self) -> None:
        """Close the capture as `ConsoleCapture.close` does, after reading what is left in the terminal."""
        self._leave()
        super().close()
        if self._stop >= 0:
            os.close(self._stop)
            self._stop = -1

    def _leave(self) -> None:
        if self._reader is not None:
            os.eventfd_write(self._stop, 1)
            self._reader.join(CLOSE_SECONDS + 1)
            if self._reader.is_alive():  # the console's file does not answer: it keeps its signal
                self._stop = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            else:
                os.eventfd_read(self._stop)
            self._reader = None

    def _read(self, descriptor: int, sink: socket.socket, stop: int) -> None:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        poll.register(stop, select.POLLIN)
        try:
            # Until it is asked to stop, and everything is read.
            while descriptor in dict(poll.poll()) and (chunk := os.read(descriptor, CHUNK)):
                sink.sendall(chunk)
        except OSError:
            return  # the terminal has ended, or the capture has
        finally:
            os.close(descriptor)
            sink.close()


# libxl's log


PATH = "/var/log/libvirt/libxl/libxl-driver.log"
MOST = 64 << 10
"""The most bytes that are read of the new lines, from the end."""
_STAMP = re.compile(r"^\d{4}-\d\d-\d\d [\d:.+ ]+(?:libxl: |xc: )?")

_KERNEL = re.compile(
    r"no loader found|xc_dom_(?:parse|find_loader|boot_image)|kernel image|panic: xc_dom_core|not a Xen-compatible"
    r"|bootloader (?:failed|process)|bootloader_callback|domain_build_kernel"
)
"""The messages about a kernel that libxl cannot boot."""
_MEMORY = re.compile(r"[Nn]ot enough (?:free )?memory|[Cc]annot allocate memory|populate_physmap|failed to free memory")


class LibxlLog:
    """The log from now on. It has the lines of all guests of this machine, also of simultaneous starts."""

    def __init__(self, path: str = PATH) -> None:
        self._path = path
        try:
            self._begin = os.stat(path).st_size
        except OSError:
            self._begin = 0

    def _new(self) -> list[str]:
        try:
            with open(self._path, "rb") as log:
                end = log.seek(0, 2)
                start = self._begin if self._begin <= end else 0  # it was rotated
                log.seek(max(start, end - MOST))
                text = log.read(MOST).decode("utf-8", "replace")
        except OSError:
            return []
        return [_STAMP.sub("", line).strip() for line in text.splitlines()]

    def last_words(self) -> str:
        """Return the first few errors since the beginning, in one line; empty if there is none, or no log."""
        lines = [line for line in self._new() if re.search(r"error|panic|fail", line, re.IGNORECASE)]
        return "; ".join(dict.fromkeys(lines[:4]))[:600]

    def judge(self, problem: str, *, own_kernel: bool) -> errors.Fault:
        """Return the fault for a failure of libxl, a sentence; with `own_kernel` the job chose the kernel."""
        text = "\n".join(self._new())
        if _MEMORY.search(text) or "free memory for domain" in problem:
            return MachineFault(problem, "give VMs less memory (VM_MEMORY), or dom0 (dom0_mem of Xen).")
        if own_kernel and _KERNEL.search(text):
            hint = "see that xen_kernel is the image of a kernel for paravirtual guests, or that the disk has one."
            return JobFault(errors.XEN_KERNEL_NOT_FOUND, problem, hint)
        return HypervisorFault(problem, f"look into {self._path}.")


# Loop devices


CONTROL = "/dev/loop-control"
_CTL_GET_FREE, _CONFIGURE = 0x4C82, 0x4C0A
_AUTOCLEAR = 4
_CONFIG = struct.Struct("=II" + "QQQQQ" + "IIII" + "64s64s32s" + "QQ" + "64s")
"""The layout: ``fd``, ``block_size``, ``loop_info64`` (numbers: 5 of 64 bits, 4 of 32; 3 texts; 2 numbers), a rest."""
LOCK_WAIT = 10.0
"""Seconds to wait for the lock of a guest that has just ended: the kernel releases its disks a little later."""


def attach(descriptor: int, *, writable: bool, shared: bool = False) -> tuple[str, int]:
    """Make a block device of an open file; return its path, and a descriptor that keeps it until it is closed.

    `descriptor` is no longer needed afterwards; the caller closes it. A file that is not `shared` is locked
    (flock(2)) as long as the device exists. Raises OSError if another VM uses it, and `MachineFault` without a device.
    """
    if not (shared and writable):
        try:
            is_free = wait.lock(descriptor, LOCK_EX if writable else LOCK_SH, LOCK_WAIT)
        except OSError:
            is_free = True  # a file system without locks
        if not is_free:
            raise OSError(errno.EAGAIN, "it is in use by another VM of this machine")
    tries = 20
    try:
        with open(CONTROL, "r+b", buffering=0) as control:
            while True:
                tries -= 1
                path = f"/dev/loop{ioctl(control, _CTL_GET_FREE)}"
                # A device that is opened read-only is write-protected.
                device = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
                config = _CONFIG.pack(descriptor, 0, *[0] * 8, _AUTOCLEAR, b"", b"", b"", 0, 0, b"")
                try:
                    ioctl(device, _CONFIGURE, config)
                    return path, device
                except OSError as error:
                    os.close(device)
                    # Another process was faster.
                    if error.errno != errno.EBUSY or not tries:
                        raise
    except OSError as error:
        problem = f"No loop device can be made of a disk image: {error}."
        hint = "modprobe loop; see that there is a /dev/loop-control and the kernel is 5.8 or later."
        raise MachineFault(problem, hint) from error
