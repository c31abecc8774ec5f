"""File leases on images, to keep them unchanged between our check of the header and QEMU's.

QEMU gets a job's image as an open file (`vmgahp.drivers.libvirt.start.disks`), but another process of the job's user
could change its content: a header that names further files (`vmgahp.images.formats.unfit`) makes QEMU, which runs as
the user of all guests' QEMUs, open those by their names. So a lease on the file (fcntl(2), ``F_SETLEASE``) is held
while its header is checked and QEMU reads it. The kernel grants one only if no other process has the file open for
writing, and blocks every other open for at most ``/proc/sys/fs/lease-break-time``. Later changes of the header have no
effect: QEMU opens files when it opens the image, and when a restored guest begins to run.
"""

import errno
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from fcntl import F_GETFL, F_GETLEASE, F_RDLCK, F_SETLEASE, F_UNLCK, F_WRLCK, fcntl
from signal import SIGURG
from time import monotonic
from typing import NamedTuple

from vmgahp.errors import INVALID_DISK_PARAM, JobFault
from vmgahp.host import wait
from vmgahp.host.proc import mounts
from vmgahp.host.system_calls import Opened
from vmgahp.images.formats import HEADER, WITH_UNFIT, unfit

PATIENCE = 5.0
"""The seconds to wait for other processes that have files of a VM open, such as a backup."""
INTERVAL = 0.1

_F_SETSIG = 10
"""The command of fcntl; Python has no name for it."""

LOCAL = frozenset(("ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "bcachefs", "zfs", "tmpfs", "ramfs", "overlay"))
"""The file systems that are written through this machine's kernel only."""
WITH_SERVERS_WORD = frozenset(("nfs4",))
"""The file systems whose lease holds on every machine: the client grants one only with the server's (a delegation)."""

_NO_LEASES = "on a file system ({}) where others could change it while the VM starts"


class OpenImage(NamedTuple):
    """An image that will be passed to QEMU."""

    path: str
    format: str
    descriptor: int


def head(image: OpenImage) -> bytes:
    """Return the first `HEADER` bytes, read as a whole page, as a descriptor with O_DIRECT needs it."""
    from mmap import PAGESIZE, mmap

    with mmap(-1, PAGESIZE) as page:
        return page[: min(os.preadv(image.descriptor, [page], 0), HEADER)]


@contextmanager
def leased(images: Iterable[OpenImage], *, needed: bool) -> Iterator[Callable[[], None]]:
    """Hold leases on the images; the function that it yields checks that they still hold, before the guest runs.

    With `needed` false images on file systems without leases are skipped: QEMU has the rights of the job's user then,
    and gains nothing by opening a file of that user's choice. Raises `JobFault`, and so does the function.
    """
    leases: list[_Lease] = []
    end = monotonic() + PATIENCE
    with ExitStack() as held:
        for image in images:
            status = os.fstat(image.descriptor)
            is_roots = status.st_uid == 0 and not status.st_mode & 0o022  # as an image of the catalog is
            if image.format not in WITH_UNFIT or is_roots:
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
        """Take the lease and return True; return False if the file system has none and it is not `needed`.

        Processes that have the file open are waited for until the monotonic clock shows `end`. Raises `JobFault`.
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
            hint = (
                "transfer the image with the job, convert it to raw, or ask the administrator to let QEMU run as the "
            )
            hint += "job's user (vmgahp doctor, with VM_RUN_AS_JOB_USER = True, says what that takes)."
            raise _refused(self._image, f"is {why}", hint)
        return False

    def _wait(self, end: float) -> None:
        # An open by another process sends a signal here; the default, SIGIO, would end this process.
        fcntl(self._image.descriptor, _F_SETSIG, SIGURG)

        def attempt() -> bool:
            self._taken = monotonic()
            try:
                fcntl(self._image.descriptor, F_SETLEASE, self._kind)
            except BlockingIOError:
                return False
            return True

        if not wait.until(attempt, end - monotonic(), INTERVAL):
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    def require(self) -> None:
        """Raise `JobFault` if the lease is lost, unless the open that broke it must still be blocked."""
        if fcntl(self._image.descriptor, F_GETLEASE) == self._kind:
            return
        allowed = _break_time()
        if allowed and monotonic() - self._taken >= allowed / 2:
            problem = "was opened by another process, which could change it while the VM started"
            raise _refused(self._image, problem, "let no process use it while the VM starts.")

    def release(self) -> None:
        """Release the lease."""
        with suppress(OSError):  # the kernel has revoked it
            fcntl(self._image.descriptor, F_SETLEASE, F_UNLCK)


def file_system(descriptor: int) -> str:
    """Return the file system type of an open file, as mount(8) names it; empty if it is no longer mounted."""
    with open(f"/proc/self/fdinfo/{descriptor}") as about:
        mount = next((line.split()[1] for line in about if line.startswith("mnt_id:")), "")
    return next((each.kind for each in mounts() if each.id == mount), "")


def can_be_leased(path: str, image_format: str) -> bool:
    """Guess by the file system of its path if an image can have a lease; nothing is opened."""
    if image_format not in WITH_UNFIT:
        return True
    above = [mount for mount in mounts() if f"{path}/".startswith(f"{mount.place.rstrip('/')}/")]
    above.sort(key=lambda mount: len(mount.place))  # of several at one place the last one counts
    return bool(above) and above[-1].kind in (*LOCAL, *WITH_SERVERS_WORD)


def why_no_lease(directory: str, uid: int) -> str:
    """Return why that user's images in a directory can have no lease; empty if they can. Raises OSError."""
    with Opened(os.open(directory, os.O_RDONLY | os.O_DIRECTORY)) as place:
        kind = file_system(place)
    if kind not in LOCAL:
        return "" if kind in WITH_SERVERS_WORD else f"it is {_NO_LEASES.format(kind or 'unknown')}"
    with Opened(os.open(directory, os.O_TMPFILE | os.O_RDWR, 0o600)) as unnamed:
        try:
            os.fchown(unnamed, uid, -1)
            fcntl(unnamed, F_SETLEASE, F_WRLCK)
        except OSError as error:
            return f"the kernel gives no lease ({error.strerror})"
    return ""


def _break_time() -> int:
    """Return the seconds for which a lease blocks an open; 0 for no limit."""
    try:
        with open("/proc/sys/fs/lease-break-time") as file:
            return int(file.read())
    except (OSError, ValueError):
        return 1


def _refused(image: OpenImage, problem: str, hint: str) -> JobFault:
    return JobFault(INVALID_DISK_PARAM, f"{image.path} {problem}.", hint, "VMPARAM_vm_Disk")
