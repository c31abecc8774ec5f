"""Memory images: a domain into a file of the scratch directory, and back.

libvirtd opens the file that it saves to as root, by its name and more than once, and follows links; in a
directory of the job's that would let a link choose what is overwritten. So the file is made here, as the
job's user, and libvirtd is given ``/proc/<pid>/fd/<n>``: whatever happens to the name, it is this file, it
stays the user's, and it works on a scratch directory that is a file system of its own.
"""

import os
import re
from collections.abc import Callable

from vmgahp import errors
from vmgahp.checkpoint import memory_image
from vmgahp.checkpoint.store import CANNOT_SAVE, MEMORY_FILE
from vmgahp.checkpoint.substitute import Held, Substitute
from vmgahp.config import Settings
from vmgahp.drivers.libvirt import binding as libvirt
from vmgahp.host.job_user import Identity

SUSPEND_FILE = "vm_suspend.mem"

PARTIAL_SUFFIX = ".part"
"""Of an image that is being written; it is renamed when it is whole."""

ROOM_FACTOR, ROOM_EXTRA = 1.02, 16 << 20
"""An image may be as large as all of the guest's memory, and a little for the devices."""

FORMAT_SETTINGS = "VM_MEMORY_IMAGE_FORMAT", "VM_SUSPEND_IMAGE_FORMAT", "VM_CHECKPOINT_IMAGE_FORMAT"
QEMU_CONF = "/etc/libvirt/qemu.conf"
"""Where the administrator tells libvirt the format that it is not told by `FORMAT_SETTINGS`."""


def partial_name(name: str) -> str:
    """The name of a memory image that is not whole yet."""
    return "." + name + PARTIAL_SUFFIX


LEFTOVERS = (SUSPEND_FILE, partial_name(SUSPEND_FILE), partial_name(MEMORY_FILE))
"""What a server that was killed may have left of a VM, and which is of use to nobody."""


class MemoryFile:
    """A memory image that is being written; to be kept, or closed without, which removes it."""

    def __init__(self, saver: "Saver", name: str, descriptor: int) -> None:
        self.name = name
        self.descriptor = descriptor
        self.path = f"/proc/{os.getpid()}/fd/{descriptor}"
        """By which libvirtd is to know it."""
        self._saver = saver

    def is_whole(self) -> bool:
        """Whether libvirt has written all of it: what it writes last is its first word."""
        try:
            self._saver.inspect(self.descriptor)
        except (OSError, memory_image.Damaged):
            return False
        return True

    def keep(self) -> None:
        """Give it its name. Raises OSError and `errors.MachineFault`."""
        os.fsync(self.descriptor)
        self._saver.identity.rename_scratch(self._saver.directory, partial_name(self.name), self.name)

    def leave(self) -> str:
        """Let go of one that is whole and cannot have its name; the name under which it stays."""
        os.close(self.descriptor)
        self.descriptor = -1
        return partial_name(self.name)

    def close(self) -> None:
        """Let go of it, whether it was kept or not; may be called again."""
        if self.descriptor < 0:
            return
        os.close(self.descriptor)
        self.descriptor = -1
        self._saver.forget(partial_name(self.name))


class Saver:
    """Saves and restores the domains of one job."""

    def __init__(self, directory: str, identity: Identity, settings: Settings, log: Callable[[str], None]) -> None:
        self.directory = directory
        self.identity = identity
        self.cannot = ""
        """Why the VM's memory cannot be saved, in the form of "because …"; empty where it can."""
        self.before_restore: list[Callable[[], None]] = []
        """Makes anew what ended with the QEMU that was saved."""
        self._log = log
        self._settings = settings
        self._not_removed: set[str] = set()

    def begin(self, name: str, memory_kib: int) -> "MemoryFile":
        """A file for the memory image `name`, under a name that says that it is not whole yet.

        Raises `errors.MachineFault` where there is no room for that much memory, or the file cannot be made.
        """
        self._require_free_space(int(memory_kib * 1024 * ROOM_FACTOR) + ROOM_EXTRA)
        partial = partial_name(name)
        try:
            self.identity.unlink_scratch(self.directory, partial)
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
            descriptor = self.identity.open_scratch(self.directory, partial, flags, 0o600)
        except OSError as error:
            raise self.fault(f"{partial} cannot be made in {self.directory}: {error.strerror}") from error
        return MemoryFile(self, name, descriptor)

    def open(self, name: str) -> int:
        """A descriptor of a memory image that libvirtd may see. Raises `errors.MachineFault`."""
        try:
            descriptor = self.identity.open_scratch(self.directory, name, os.O_RDONLY)
        except OSError as error:
            raise _unusable(name, self.directory, str(error.strerror)) from error
        try:
            self.inspect(descriptor)
        except (OSError, memory_image.Damaged) as error:
            os.close(descriptor)
            raise _unusable(name, self.directory, str(error)) from error
        return descriptor

    def size(self, name: str) -> int:
        """Bytes that a memory image occupies, 0 where that cannot be seen."""
        try:
            descriptor = self.identity.open_scratch(self.directory, name, os.O_RDONLY)
        except (OSError, errors.Fault):
            return 0
        try:
            return os.fstat(descriptor).st_blocks * 512
        finally:
            os.close(descriptor)

    def restore(self, connection: libvirt.virConnect, descriptor: int, xml: str) -> None:
        """Restore a domain from an open memory image, described by `xml` and not by what the image says.

        Its CPUs stand still: whether the guest was running is the image's word too. Raises `libvirt.libvirtError`,
        and `errors.MachineFault` for what is no memory image of this machine's settings.
        """
        for action in self.before_restore:
            action()
        try:
            image = self.substitute(descriptor, xml)
        except (OSError, memory_image.Damaged) as error:
            raise _unusable("that is to be restored", self.directory, str(error)) from error
        while True:
            try:
                with image:
                    connection.restoreFlags(image.path, self.described_by(xml), libvirt.VIR_DOMAIN_SAVE_PAUSED)
                return
            except libvirt.libvirtError:
                again = image.with_another_head()
                if again is None:
                    raise
                image = again

    def substitute(self, descriptor: int, xml: str) -> Substitute | Held:
        """What libvirtd is to read in the place of an image. Raises OSError, `memory_image.Damaged`."""
        return memory_image.substitute(descriptor, xml, self._formats())

    def described_by(self, xml: str) -> str | None:
        """The domain XML that a restore is called with."""
        return xml

    def forget(self, name: str) -> None:
        """Remove a memory image that is no longer used."""
        try:
            self.identity.unlink_scratch(self.directory, name)
        except (OSError, errors.Fault) as error:
            self._log(f"could not remove {name} from {self.directory}: {error}")
            self._not_removed.add(name)

    def forget_the_rest(self) -> None:
        """Try once more to remove what could not be removed."""
        for name in self._not_removed.copy():
            self.forget(name)

    def rename(self, old: str, new: str) -> None:
        """Give a memory image another name. Raises `errors.MachineFault`."""
        if old == new:
            return
        try:
            self.identity.unlink_scratch(self.directory, new)
            self.identity.rename_scratch(self.directory, old, new)
        except OSError as error:
            raise self.fault(f"{old} cannot be renamed to {new}: {error.strerror}") from error

    def inspect(self, descriptor: int) -> None:
        """Look at an image before libvirtd does. Raises OSError, `memory_image.Damaged`."""
        memory_image.inspect(descriptor)

    def write(self, domain: libvirt.virDomain, path: str, *, checkpoint: bool) -> None:
        """Have libvirt write the domain's memory, which ends the domain. Raises `libvirt.libvirtError`."""
        kind = "CHECKPOINT" if checkpoint else "SUSPEND"
        flags = 0
        if not checkpoint and self._settings.boolean("VM_SUSPEND_BYPASS_CACHE"):
            flags = libvirt.VIR_DOMAIN_SAVE_BYPASS_CACHE
        name = "VM_MEMORY_IMAGE_FORMAT"
        if self._settings.string(f"VM_{kind}_IMAGE_FORMAT"):
            name = f"VM_{kind}_IMAGE_FORMAT"
        image_format = self._settings.string(name)
        parameter = getattr(libvirt, "VIR_DOMAIN_SAVE_PARAM_IMAGE_FORMAT", None)
        if image_format and parameter is None:
            self._log(f"{name} = {image_format} is ignored: this libvirt cannot be told")
        if image_format and parameter is not None:
            domain.saveParams({"file": path, parameter: image_format}, flags)
        else:
            domain.saveFlags(path, None, flags)

    def _formats(self) -> list[str]:
        """The formats that images are written in here, by the settings or by libvirt's own for what they leave open."""
        wanted = {memory_image.RAW, *(self._settings.string(name) for name in FORMAT_SETTINGS)} - {""}
        try:
            with open(QEMU_CONF, encoding="utf-8", errors="replace") as file:
                wanted.update(re.findall(r'^\s*save_image_format\s*=\s*"(\w+)"', file.read(1 << 20), re.MULTILINE))
        except OSError:
            pass  # a libvirtd of a user's own has none
        return sorted(wanted)

    def _require_free_space(self, needed: int) -> None:
        try:
            status = os.statvfs(self.directory)
        except OSError as error:
            raise self.fault(f"{self.directory} cannot be examined: {error.strerror}") from error
        free = status.f_bavail * status.f_frsize
        if free < needed:
            raise self.fault(
                f"the guest's memory needs up to {needed >> 20} MiB in {self.directory}, and {free >> 20} MiB are free"
            )

    @staticmethod
    def fault(problem: str) -> errors.MachineFault:
        return errors.MachineFault(
            f"The VM cannot be saved: {problem}.",
            "free space on the file system of EXECUTE; the VM still runs.",
            CANNOT_SAVE,
        )


def _unusable(name: str, directory: str, reason: str) -> errors.MachineFault:
    return errors.MachineFault(
        f"The memory image {name} in {directory} cannot be used: {reason.rstrip('.')}.",
        "see who has changed the job's scratch directory.",
        errors.PREFIX + "VM_INVALID_SUSPEND_FILE",
    )
