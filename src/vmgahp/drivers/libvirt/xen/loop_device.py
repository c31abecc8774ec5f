"""Loop devices of the job's files, for hypervisors whose disks are block devices.

Xen's own scripts would make a loop device of a file by its name, as root. So the file is opened here, as the job's
user, and the kernel is given the descriptor: whatever happens to the name, the device is this file. The kernel
detaches it at its last close (``LO_FLAGS_AUTOCLEAR``), also when a server was killed or a guest was destroyed.

See loop(4), and ``struct loop_config`` in the kernel's ``linux/loop.h``.
"""

import errno
import os
import struct
from fcntl import LOCK_EX, LOCK_SH, ioctl

from vmgahp.errors import MachineFault
from vmgahp.host import wait

CONTROL = "/dev/loop-control"

_CTL_GET_FREE, _CONFIGURE = 0x4C82, 0x4C0A
_AUTOCLEAR = 4
_CONFIG = struct.Struct("=II" + "QQQQQ" + "IIII" + "64s64s32s" + "QQ" + "64s")
"""The layout: ``fd``, ``block_size``, ``loop_info64``, and reserved space.

``loop_info64`` is five numbers of 64 bits, four of 32, three texts, two numbers.
"""

_TRIES = 20

LOCK_WAIT = 10.0
"""Seconds to wait for the lock of a guest that has just ended: the kernel releases its disks a little later."""


class InUse(OSError):
    """The error for a file that another VM of this machine uses, if one of them writes to it."""


def attach(descriptor: int, *, writable: bool, shared: bool = False) -> tuple[str, int]:
    """Make a block device of an open file; return its path, and a descriptor that keeps it until it is closed.

    `descriptor` is no longer needed afterwards; the caller closes it. A file that is not `shared` is locked
    (flock(2)) as long as the device exists. Raises `InUse`, and `MachineFault` if no device can be made.
    """
    if not (shared and writable):
        _lock(descriptor, LOCK_EX if writable else LOCK_SH)
    try:
        return _attach(descriptor, os.O_RDWR if writable else os.O_RDONLY)
    except OSError as error:
        raise MachineFault(
            f"No loop device can be made of a disk image: {error}.",
            "modprobe loop; see that there is a /dev/loop-control and the kernel is 5.8 or later.",
        ) from error


def _lock(descriptor: int, kind: int) -> None:
    try:
        is_free = wait.lock(descriptor, kind, LOCK_WAIT)
    except OSError:
        return  # a file system without locks
    if not is_free:
        raise InUse(errno.EAGAIN, "it is in use by another VM of this machine")


def _attach(descriptor: int, mode: int) -> tuple[str, int]:
    """Attach the file to a free device; a device that is opened read-only is write-protected."""
    control = os.open(CONTROL, os.O_RDWR | os.O_CLOEXEC)
    try:
        for attempt in range(_TRIES):
            path = f"/dev/loop{ioctl(control, _CTL_GET_FREE)}"
            device = os.open(path, mode | os.O_CLOEXEC)
            config = _CONFIG.pack(descriptor, 0, *[0] * 8, _AUTOCLEAR, b"", b"", b"", 0, 0, b"")
            try:
                ioctl(device, _CONFIGURE, config)
                return path, device
            except OSError as error:
                os.close(device)
                # Another process was faster.
                if error.errno != errno.EBUSY or attempt == _TRIES - 1:
                    raise
    finally:
        os.close(control)
    raise AssertionError("the last attempt returns or raises")
