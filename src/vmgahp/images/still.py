"""Images that stand still: nobody writes to one between the look at its header and QEMU's.

QEMU gets a job's image as an open file (`vmgahp.drivers.libvirt.disk_files`), but what is in it another process of the
job's user could change: a header that names further files (`vmgahp.images.formats.unfit`) has QEMU, which runs as the
user of all guests' QEMUs, open those by their names. So the file has a lease (fcntl(2), ``F_SETLEASE``) while
its header is looked at and QEMU reads it. The kernel gives one only where nobody else has the file open to write to
it, and lets everybody wait who wants to open it, for ``/proc/sys/fs/lease-break-time`` at most. What QEMU reads of a
header later it does not act on: it opens files when it opens the image, and when a restored guest begins to run.
"""

import errno
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from fcntl import F_GETFL, F_GETLEASE, F_RDLCK, F_SETLEASE, F_UNLCK, F_WRLCK, fcntl
from signal import SIGURG
from time import monotonic, sleep

from vmgahp.errors import INVALID_DISK_PARAM, JobFault
from vmgahp.host.light import NamedTuple
from vmgahp.host.mounts import mounts
from vmgahp.images.formats import HEADER, WITH_UNFIT, unfit

PATIENCE = 5.0
"""Seconds to wait for others that have files of a VM open, such as a backup."""
INTERVAL = 0.1

_F_SETSIG = 10
"""Of fcntl; Python has no name for it."""

_BREAK_TIME = "/proc/sys/fs/lease-break-time"

LOCAL = frozenset(("ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "bcachefs", "zfs", "tmpfs", "ramfs", "overlay"))
"""File systems to which nobody writes but by this machine's kernel."""
WITH_SERVERS_WORD = frozenset(("nfs4",))
"""File systems whose lease holds on every machine: the client gives none without the server's (a delegation)."""

_NO_LEASES = "on a file system ({}) where others could change it while the VM starts"


class OpenImage(NamedTuple):
    """An image that QEMU is to get."""

    path: str
    format: str
    descriptor: int


def head(image: OpenImage) -> bytes:
    """The first `HEADER` bytes. Of a descriptor that goes past the page cache only whole pages can be read."""
    from mmap import PAGESIZE, mmap

    with mmap(-1, PAGESIZE) as page:
        return page[: min(os.preadv(image.descriptor, [page], 0), HEADER)]


@contextmanager
def held_still(images: Iterable[OpenImage], *, needed: bool) -> Iterator[Callable[[], None]]:
    """Keep everybody from writing to the images; what it returns makes sure that nobody has, before the guest runs.

    With `needed` false those stay as they are whose file system knows no lease: QEMU has the rights of the job's user
    then, and gets nothing by opening a file of that user's choice. Raises `JobFault`, as does what it returns.
    """
    leases: list[_Lease] = []
    end = monotonic() + PATIENCE
    with ExitStack() as held:
        for image in images:
            if image.format not in WITH_UNFIT or _is_roots(image):
                continue
            lease = _Lease(image)
            if lease.take(end, needed=needed):
                held.callback(lease.release)
                leases.append(lease)
                if reason := unfit(image.format, head(image)):
                    hint = "let no process write to it while the VM starts."
                    raise _refused(image, f"{reason}, since it was looked at", hint)

        def require() -> None:
            for lease in leases:
                lease.require()

        yield require


class _Lease:
    """The lease of one file."""

    def __init__(self, image: OpenImage) -> None:
        self._image = image
        reads_only = fcntl(image.descriptor, F_GETFL) & os.O_ACCMODE == os.O_RDONLY
        self._kind = F_RDLCK if reads_only else F_WRLCK
        self._taken = 0.0

    def take(self, end: float, *, needed: bool) -> bool:
        """Whether it was given; where it is not `needed` a file system need not know any.

        Others that have the file open are waited for until the monotonic clock shows `end`. Raises `JobFault`.
        """
        kind = file_system(self._image.descriptor)
        why = _NO_LEASES.format(kind or "unknown")
        if kind in (*LOCAL, *WITH_SERVERS_WORD):
            try:
                self._wait(end)
            except OSError as error:
                why = f"{why}: {error.strerror}"
                if error.errno == errno.EAGAIN and (needed or kind in LOCAL):
                    problem = "is open in another process, which could change it while the VM starts"
                    raise _refused(self._image, problem, "see that nobody else uses it, or use a copy.") from error
            else:
                return True
        if needed:
            raise _refused(
                self._image,
                f"is {why}",
                "transfer the image with the job, convert it to raw, or ask the administrator to let QEMU run as the "
                "job's user (vmgahp doctor, with VM_RUN_AS_JOB_USER = True, says what that takes).",
            )
        return False

    def _wait(self, end: float) -> None:
        # Whoever opens the file has a signal sent here; SIGIO, which it is by default, would end this process.
        fcntl(self._image.descriptor, _F_SETSIG, SIGURG)
        while True:
            self._taken = monotonic()
            try:
                fcntl(self._image.descriptor, F_SETLEASE, self._kind)
            except OSError as error:
                if error.errno != errno.EAGAIN or monotonic() >= end:
                    raise
            else:
                return
            sleep(INTERVAL)

    def require(self) -> None:
        """Has nobody opened the file? Who tries still waits, for half of the time at least. Raises `JobFault`."""
        if fcntl(self._image.descriptor, F_GETLEASE) == self._kind:
            return
        allowed = _break_time()
        if allowed and monotonic() - self._taken >= allowed / 2:
            problem = "was opened by another process, which could change it while the VM started"
            raise _refused(self._image, problem, "let no process use it while the VM starts.")

    def release(self) -> None:
        """Let everybody have the file again."""
        with suppress(OSError):  # it was taken away
            fcntl(self._image.descriptor, F_SETLEASE, F_UNLCK)


def file_system(descriptor: int) -> str:
    """The type of the file system that an open file is on, as mount(8) names it; empty where it is mounted no more."""
    with open(f"/proc/self/fdinfo/{descriptor}") as about:
        mount = next((line.split()[1] for line in about if line.startswith("mnt_id:")), "")
    return next((each.kind for each in mounts() if each.id == mount), "")


def can_be_held(path: str, image_format: str) -> bool:
    """Whether an image is likely to be, by the file system that its path leads to; none is looked at or opened."""
    if image_format not in WITH_UNFIT:
        return True
    longest, kind = 0, ""
    for mount in mounts():
        place = mount.place.rstrip("/")
        if f"{path}/".startswith(f"{place}/") and len(place) >= longest:
            longest, kind = len(place), mount.kind
    return kind in (*LOCAL, *WITH_SERVERS_WORD)


def why_none(directory: str, uid: int) -> str:
    """Why this process could hold no image of that user's in a directory, in half a sentence; empty where it could.

    Raises OSError.
    """
    place = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        kind = file_system(place)
    finally:
        os.close(place)
    if kind not in LOCAL:
        return "" if kind in WITH_SERVERS_WORD else f"it is {_NO_LEASES.format(kind or 'unknown')}"
    unnamed = os.open(directory, os.O_TMPFILE | os.O_RDWR, 0o600)
    try:
        os.fchown(unnamed, uid, -1)
        fcntl(unnamed, F_SETLEASE, F_WRLCK)
    except OSError as error:
        return f"the kernel gives no lease ({error.strerror})"
    finally:
        os.close(unnamed)
    return ""


def _is_roots(image: OpenImage) -> bool:
    """Whether only root can write to it, such as to an image of the administrator's catalog."""
    status = os.fstat(image.descriptor)
    return status.st_uid == 0 and not status.st_mode & 0o022


def _break_time() -> int:
    """Seconds that who opens a file with a lease has to wait; 0 for without end."""
    try:
        with open(_BREAK_TIME) as file:
            return int(file.read())
    except (OSError, ValueError):
        return 1


def _refused(image: OpenImage, problem: str, hint: str) -> JobFault:
    return JobFault(INVALID_DISK_PARAM, f"{image.path} {problem}.", hint, "VMPARAM_vm_Disk")
