"""Memory images and checkpoints: the save of a domain to a file, and the restore.

libvirtd opens the file that it saves to as root, by its name and more than once, and follows links; in a directory of
the job's a link could then choose the file to overwrite. So the file is made here, as the job's user, and libvirtd is
given ``/proc/<pid>/fd/<n>``: whatever happens to the name, that is this file, it stays the user's, and it works on a
scratch directory that is a file system of its own.

The files of a checkpoint and their checks are in `vmgahp.checkpoint.store`; here is what is specific to libvirt.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple
from xml.etree import ElementTree as etree

import libvirt

from vmgahp import errors
from vmgahp.checkpoint import manifest, memory_image, substitute
from vmgahp.checkpoint.manifest import BACKING, DISK, MEMORY, UUID, WORD, CheckpointKind, Facts, Manifest, matching
from vmgahp.checkpoint.store import HINT, IMAGE_EXTRA, MEMORY_FILE, CheckpointStore, FileRef, Unusable
from vmgahp.checkpoint.substitute import ZSTD, Held, Substitute, Write
from vmgahp.config import Settings
from vmgahp.domain.restore import SavedMismatch
from vmgahp.drivers.libvirt.link import faults
from vmgahp.drivers.libvirt.link.connection import LibvirtConnection
from vmgahp.drivers.libvirt.start import capabilities, disks
from vmgahp.drivers.surveyor import Logger
from vmgahp.host import wait
from vmgahp.host.job_user import Identity
from vmgahp.host.runtime_dir import is_claimed
from vmgahp.job.spec import Disk, JobSpec
from vmgahp.vm_types import HTCONDORS

SUSPEND_FILE = "vm_suspend.mem"
ROOM_FACTOR, ROOM_EXTRA = 1.02, 16 << 20
"""The factor and the extra bytes for devices by which an image may exceed the guest's memory."""
RESTORE_SHARE = 2 / 3
"""The share of the client's timeout for a restore: the rest is for a guest that boots afresh in a START."""
CLAIM_WAIT = 10.0
"""The most seconds that a restart waits for the claim of the server from which the checkpoint comes."""
FORMAT_SETTING = "VM_MEMORY_IMAGE_FORMAT"
QEMU_CONF = "/etc/libvirt/qemu.conf"
"""The file in which the administrator sets libvirt's image format, used without `FORMAT_SETTING`."""


def partial_name(name: str) -> str:
    """Return the name of a memory image that is being written; it is renamed when it is complete."""
    return f".{name}.part"


LEFTOVERS = (SUSPEND_FILE, partial_name(SUSPEND_FILE), partial_name(MEMORY_FILE))
"""The files that a server that was killed may have left of a VM, and that no longer have a use."""


class MemoryFile:
    """A memory image that is being written: `keep` it, or `close` it, which removes it."""

    def __init__(self, saver: Saver, name: str, descriptor: int) -> None:
        self.name = name
        self.descriptor = descriptor
        self.path = f"/proc/{os.getpid()}/fd/{descriptor}"  # the path that libvirtd is given
        self._saver = saver

    def is_whole(self) -> bool:
        """Return True if libvirt has written it completely: it writes the first word last."""
        try:
            self._saver.inspect(self.descriptor)
        except (OSError, memory_image.Damaged):
            return False
        return True

    def keep(self) -> None:
        """Give it its name. Raises OSError and `errors.MachineFault`."""
        os.fsync(self.descriptor)
        self._saver.identity.rename_scratch(self._saver.directory, partial_name(self.name), self.name)

    def to_restore(self) -> int:
        """Return its descriptor, read-only if possible: a sparse one is restored only if it is not open for writing."""
        try:
            reading = os.open(f"/proc/self/fd/{self.descriptor}", os.O_RDONLY)
        except OSError:
            return self.descriptor
        os.close(self.descriptor)
        self.descriptor = reading
        return reading

    def leave(self) -> str:
        """Close a complete image that cannot get its name; return the name under which it stays."""
        os.close(self.descriptor)
        self.descriptor = -1
        return partial_name(self.name)

    def close(self) -> None:
        """Close it, and remove it unless it was kept; may be called again."""
        if self.descriptor >= 0:
            self._saver.forget(self.leave())


class Saver:
    """The save and the restore of one job's domains."""

    takes_xml = True
    """True if libvirt's driver restores a domain by an XML of the caller, and not by the one in the image."""

    def __init__(self, directory: str, identity: Identity, settings: Settings, log: Callable[[str], None]) -> None:
        self.directory = directory
        self.identity = identity
        self.cannot = ""  # the reason why the VM's memory cannot be saved, in the form of "because …"; empty if it can
        self.before_restore: list[Callable[[], None]] = []  # they make anew what ended with the QEMU that was saved
        self.memory_mib = 0
        self.may_travel = False
        """True if a suspended VM may be checkpointed: the file transfer fills the holes of a sparse image."""
        self.seconds = 0.0  # the client's timeout for calls that read or write the memory
        self._log = log
        self._settings = settings
        self.not_removed: set[str] = set()
        self._may_seek = False

    def begin(self, name: str, memory_kib: int) -> MemoryFile:
        """Make a file for the memory image `name`. Raises `errors.MachineFault`, as without space for it."""
        self._require_free_space(int(memory_kib * 1024 * ROOM_FACTOR) + ROOM_EXTRA)
        partial = partial_name(name)
        try:
            self.identity.unlink_scratch(self.directory, partial)
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
            descriptor = self.identity.open_scratch(self.directory, partial, flags, 0o600)
        except OSError as error:
            raise self.fault(f"{partial} cannot be made in {self.directory}: {error.strerror}") from error
        self._may_seek = substitute.can_be_held(descriptor)
        return MemoryFile(self, name, descriptor)

    def open(self, name: str) -> int:
        """Open a memory image and return a descriptor for libvirtd. Raises `errors.MachineFault`."""
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

    def restore(self, connection: libvirt.virConnect, descriptor: int, xml: str) -> None:
        """Restore a domain from an open memory image, described by `xml` instead of the XML in the image.

        Its CPUs are paused, as the image's record is not trusted. Raises `libvirt.libvirtError`, `errors.MachineFault`.
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
                    connection.restoreFlags(image.path, xml if self.takes_xml else None, libvirt.VIR_DOMAIN_SAVE_PAUSED)
                return
            except libvirt.libvirtError as error:
                again = image.with_another_head(str(error))
                if again is None:
                    raise
                image = again

    def substitute(self, descriptor: int, xml: str) -> Substitute | Held:
        """Return the file that libvirtd reads in place of an image. Raises OSError, `memory_image.Damaged`."""

        def unpack(fd: int, head: memory_image.Head, write: Write, reader: int) -> None:
            most = (self.memory_mib << 20) + IMAGE_EXTRA
            # libvirt 12 reads ahead, and waits for it when there is no QEMU yet that could be ended.
            seconds = self.seconds * RESTORE_SHARE
            substitute.unpack_image(fd, head.end, head.format, write, self.identity, seconds, most, reader)

        return memory_image.substitute(descriptor, xml, self.formats(), unpack)

    def forget(self, name: str) -> None:
        """Remove a memory image that is no longer used."""
        try:
            self.identity.unlink_scratch(self.directory, name)
        except (OSError, errors.Fault) as error:
            self._log(f"could not remove {name} from {self.directory}: {error}")
            self.not_removed.add(name)

    def forget_the_rest(self) -> None:
        """Try once more to remove the images that could not be removed."""
        for name in self.not_removed.copy():
            self.forget(name)

    def rename(self, old: str, new: str) -> None:
        """Rename a suspended VM's memory image to one that travels. Raises `errors.MachineFault`."""
        if old == new:
            return
        try:
            self.identity.unlink_scratch(self.directory, new)
            self.identity.rename_scratch(self.directory, old, new)
        except OSError as error:
            raise self.fault(f"{old} cannot be renamed to {new}: {error.strerror}") from error

    def inspect(self, descriptor: int) -> None:
        """Check an image before libvirtd gets it. Raises OSError, `memory_image.Damaged`."""
        memory_image.inspect(descriptor)

    def write(self, domain: libvirt.virDomain, path: str, *, checkpoint: bool) -> None:
        """Have libvirt write the domain's memory, which ends the domain. Raises `libvirt.libvirtError`."""
        wanted = self._settings.string(FORMAT_SETTING)
        can_be_told = hasattr(libvirt, "VIR_DOMAIN_SAVE_PARAM_IMAGE_FORMAT")
        told = wanted if can_be_told else ""
        if can_be_told and not (wanted or checkpoint or self.may_travel or not self._may_seek or _of_qemu_conf()):
            told = memory_image.SPARSE
        if told == memory_image.SPARSE:
            here = domain.connect()
            if not substitute.has_sparse(here.getLibVersion(), here.getVersion(), here.getCapabilities()):
                told = ""
        if told:
            domain.saveParams({"file": path, libvirt.VIR_DOMAIN_SAVE_PARAM_IMAGE_FORMAT: told}, 0)
            return
        if wanted not in ("", _of_qemu_conf() or memory_image.RAW):
            self._log(f"the memory image is not {wanted}: this libvirt cannot be told, or could not restore it")
        domain.saveFlags(path, None, 0)

    def formats(self) -> list[str]:
        """Return the formats that are restored here: raw, zstd, that of the settings, and sparse where possible."""
        ours = {memory_image.RAW, ZSTD, _of_qemu_conf(), self._settings.string(FORMAT_SETTING)}
        if hasattr(libvirt, "VIR_DOMAIN_SAVE_PARAM_IMAGE_FORMAT"):
            ours.add(memory_image.SPARSE)
        return sorted(ours - {""})

    def _require_free_space(self, needed: int) -> None:
        try:
            free = disks.unreserved(self._settings, self.directory, self.identity)
        except errors.Fault as error:
            raise self.fault(error.problem.rstrip(".")) from error
        if free < needed:
            raise self.fault(
                f"the guest's memory needs up to {needed >> 20} MiB in {self.directory}, and {free >> 20} MiB are free"
            )

    @staticmethod
    def fault(problem: str) -> errors.MachineFault:
        hint = "see that the file system of EXECUTE is well and has free space; the VM still runs."
        return errors.MachineFault(f"The VM cannot be saved: {problem}.", hint, errors.CANNOT_SAVE)


def _unusable(name: str, directory: str, reason: str) -> errors.MachineFault:
    problem = f"The memory image {name} in {directory} cannot be used: {reason.rstrip('.')}."
    hint = "see who has changed the job's scratch directory."
    return errors.MachineFault(problem, hint, errors.INVALID_SUSPEND_FILE)


def _of_qemu_conf() -> str:
    """Return the format in libvirt's own settings; empty if it is not set."""
    try:
        with open(QEMU_CONF, encoding="utf-8", errors="replace") as file:
            found = re.findall(r'^\s*save_image_format\s*=\s*"(\w+)"', file.read(1 << 20), re.MULTILINE)
    except OSError:  # a user's own libvirtd has no such file
        return ""
    return str(found[-1]) if found else ""


# Checkpoints


_HYPERVISORS = {"kvm": "KVM", "qemu": "emulation (TCG)", "xen": "Xen"}


def _differences(then: Facts, now: Facts) -> Iterator[str]:
    if then["domain_type"] != now["domain_type"]:
        made, here = (_HYPERVISORS.get(each["domain_type"], each["domain_type"]) for each in (then, now))
        yield f"it was made under {made}, and VMs here run under {here}"
    if then["host_cpu"] and now["host_cpu"] and then["host_cpu"] != now["host_cpu"]:
        yield f"it was made on another CPU ({then['host_cpu']!a}; here: {now['host_cpu']})"
    # The stable releases of one series understand each other's images, both ways. An older libvirt is not refused:
    # libvirt itself reports what it cannot read.
    if then["qemu_version"] // 1000 > now["qemu_version"] // 1000:
        hypervisor = "Xen" if now["domain_type"] == "xen" else "QEMU"
        made, here = (capabilities.version(each["qemu_version"]) for each in (then, now))
        yield f"it was made by {hypervisor} {made}, and here is {here}"


LIBVIRT = CheckpointKind(
    "libvirt",
    {
        "domain_type": matching(WORD),  # kvm or qemu: a guest saved under the one cannot be resumed under the other
        "uuid": matching(UUID),
        "libvirt_version": manifest.integer(0, 10**10),  # as libvirt counts: 9.1.2 is 9001002
        "qemu_version": manifest.integer(0, 10**10),
        # The identification of the host's CPU; empty if the guest does not see that CPU.
        "host_cpu": manifest.text(500, may_be_empty=True),
        "machine_type": matching(WORD),
        "architecture": matching(WORD),
        "xml": manifest.Fields.xml,  # the domain as it was saved
    },
    differences=_differences,
    memory=MEMORY_FILE,
    inspect=memory_image.inspect,
)
XEN = LIBVIRT._replace(driver="xen", inspect=memory_image.inspect_xen)


def disk_refs(disks: Iterable[Disk]) -> list[FileRef]:
    """Return the disks, each with its backing files."""
    refs = []
    for disk in disks:
        known_as = disk.image.known_as if disk.image and not disk.writable else ""
        refs.append(FileRef(DISK, disk.path, disk.device, disk.writable, disk.format, known_as))
        for layer in disk.backing:
            refs.append(FileRef(BACKING, layer.path, disk.device, False, layer.format, layer.known_as))
    return refs


class LibvirtRestart(NamedTuple):
    """A checkpoint from which a VM may be restarted, and its open memory image; the caller closes it."""

    manifest: Manifest
    descriptor: int
    overlay: int = -1
    """The open disk of a guest that waits for any job (`vmgahp.drivers.libvirt.program.warm`); -1 for the job's own."""

    @property
    def is_warm(self) -> bool:
        """True if the guest is one that waits for any job."""
        return self.overlay >= 0

    def close(self) -> None:
        os.close(self.descriptor)
        if self.is_warm:
            os.close(self.overlay)

    def description(self, ours: str, uri: str, reconcile: Callable[[str, str], str]) -> str:
        """Return the domain XML to restore with. Raises `Unusable` if the saved domain is another than `ours`."""
        saved = self.manifest.facts["xml"]
        try:
            return capabilities.firmware_of_a_restore(reconcile(saved, ours), saved, uri)
        except (SavedMismatch, LookupError) as mismatch:
            problem = f"the VM that was saved is not the one that the job asks for: {mismatch}"
            raise Unusable(problem, True) from mismatch


class LibvirtCheckpoints:
    """The checkpoints of one driver's jobs: finds them and writes them."""

    def __init__(self, kind: CheckpointKind, identity: Identity, connection: LibvirtConnection, log: Logger) -> None:
        self._kind = kind
        self._identity = identity
        self._connection = connection
        self._log = log

    def store(self, spec: JobSpec) -> CheckpointStore:
        return CheckpointStore(self._kind, self._identity, spec.vm.working_dir, self._log)

    def find(self, spec: JobSpec, domain_type: str) -> LibvirtRestart | None:
        """Return the checkpoint in the scratch directory, or None. Raises `Unusable` and `errors.MachineFault`."""
        store = self.store(spec)
        store.forget_interrupted()
        saved = store.load()
        if saved is None:
            return None
        store.check(saved, store.now(spec.vm, self.here(domain_type)), disk_refs(spec.disks))
        uuid = saved.facts["uuid"]
        # libvirt knows no domain of a VM that is suspended; the server from which this one comes may end just now.
        if not wait.until(lambda: not is_claimed(uuid), CLAIM_WAIT, 0.1):
            raise Unusable(f"another VM on this machine has its UUID, {uuid}", True)
        try:
            self._connection.call(lambda connection: connection.lookupByUUIDString(uuid))
        except libvirt.libvirtError as error:
            if not faults.is_no_domain(error):
                raise faults.from_libvirt(error, "looking for a domain") from error
        else:
            raise Unusable(f"a domain with its UUID, {uuid}, runs on this machine", True)
        restart = LibvirtRestart(saved, store.open_memory(saved, spec.vm.memory_mib))
        try:
            self._require_program(restart.descriptor)
        except BaseException:
            restart.close()
            raise
        return restart

    def here(self, domain_type: str) -> Facts:
        """Return the facts of this machine that a checkpoint depends on. Raises `errors.MachineFault`."""
        return {
            "domain_type": domain_type,
            "host_cpu": self._host_cpu(domain_type),
            "qemu_version": self._connection.call(lambda connection: connection.getVersion()),
        }

    def _require_program(self, descriptor: int) -> None:
        """Check that this machine can decompress the image. Raises `errors.JobFault` if not: another machine may."""
        form = getattr(self._kind.inspect(descriptor), "format", memory_image.RAW)
        if form == ZSTD and not substitute.has_program(form):
            raise errors.JobFault(
                errors.MISMATCHED_CHECKPOINT,
                f"The checkpoint's memory is compressed by {form}, which is not installed on this machine.",
                f'ask for stringListMember("{form}", VM_<type>_ATTR_memory_formats) in the job\'s requirements, or '
                f"install {form}; the checkpoint stays as it is.",
            )

    def write(self, spec: JobSpec, domain_type: str, uuid: str, description: str, cpu_seconds: float) -> None:
        """Write the manifest of the memory image that is in its place. Raises `errors.MachineFault`."""
        kind = etree.fromstring(description).find("os/type")
        assert kind is not None
        store = self.store(spec)
        try:
            versions = self._connection.call(lambda connection: (connection.getLibVersion(), connection.getVersion()))
            host_cpu = self._host_cpu(domain_type)
        except libvirt.libvirtError as error:
            problem = f"The checkpoint of {spec.vm.name} cannot be completed: {error}."
            raise errors.MachineFault(problem, HINT, errors.CANNOT_SAVE) from error
        facts = {
            "domain_type": domain_type,
            "uuid": uuid,
            "libvirt_version": versions[0],
            "qemu_version": versions[1],
            "host_cpu": host_cpu,
            "machine_type": kind.get("machine", ""),
            "architecture": kind.get("arch", ""),
            "xml": description,
        }
        refs = [FileRef(MEMORY, MEMORY_FILE), *disk_refs(spec.disks)]
        store.write(store.now(spec.vm, facts, cpu_seconds), refs)

    @staticmethod
    def why_not(spec: JobSpec) -> str:
        """Return the reason why a job's VM cannot be checkpointed; empty if it can."""
        if not spec.vm.checkpoint:
            return "the job does not ask for it with vm_checkpoint"
        shared = [disk.path for disk in spec.disks if disk.writable and not disk.transferred]
        if not shared or spec.vm.vm_type in HTCONDORS:
            return ""
        # The VM may continue after a checkpoint of this type, and its memory would no longer fit the disk.
        return (
            f"{shared[0]} is not transferred with the job, and would change after a periodic checkpoint; "
            "transfer it, or use vm_type = kvm, which has no periodic ones"
        )

    def _host_cpu(self, domain_type: str) -> str:
        """Return the host CPU that a guest of KVM depends on; empty for TCG, which emulates the same CPU everywhere."""
        if domain_type != "kvm":
            return ""
        capabilities = etree.fromstring(self._connection.call(lambda connection: connection.getCapabilities()))
        parts = [capabilities.findtext(f"host/cpu/{name}") or "" for name in ("arch", "vendor", "model")]
        features = sorted(element.get("name", "") for element in capabilities.iterfind("host/cpu/feature"))
        return " ".join([*parts, hashlib.sha256(" ".join(features).encode()).hexdigest()[:16]])
