"""The job's disks as open files, which is how QEMU gets them, and the space that they may occupy.

libvirt, which is root, would open each file by its name, change its owner to QEMU's user if that cannot use it, and do
both again at every restore; the job can change at any moment which file a name stands for. So each file is opened
once, as the job's user, and libvirt passes the descriptor on (``virDomainFDAssociate``): the name is not opened again,
the owner stays the same, and QEMU needs no rights of its own in the scratch directory. The descriptors are kept until
the VM is gone: a saved guest continues with the same files, on which its locks stay.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from fcntl import F_GETFL, F_OFD_SETLK, F_UNLCK, fcntl
from struct import pack
from xml.etree import ElementTree as etree

import libvirt

from vmgahp import errors
from vmgahp.config import Settings
from vmgahp.domain.build import add_chain
from vmgahp.domain.model import value
from vmgahp.drivers.libvirt.link import domains
from vmgahp.errors import INVALID_DISK_PARAM, MISMATCHED, JobFault
from vmgahp.host import job_user
from vmgahp.host.job_user import Identity
from vmgahp.images.formats import backing_chain
from vmgahp.images.leases import OpenImage, head
from vmgahp.images.leases import leased as held_still
from vmgahp.job.disks import DISK, NO_FILE
from vmgahp.job.spec import JobSpec

MOST_FILES = 64
"""The most files of one VM, with all backing files: libvirtd keeps them open for all VMs, and has a limit (8192)."""
_PAST_CACHE = ("none", "directsync")
"""The cache modes of a disk for which QEMU opens its files with O_DIRECT."""


class DiskFiles:
    """The open files of one VM's disks, by libvirt's groups; closed when the VM is gone."""

    def __init__(self, spec: JobSpec, identity: Identity, *, may_chown: bool = True) -> None:
        """Prepare the files of a job; without `may_chown`, leave out the labels that such a libvirt does not know."""
        self._may_chown = may_chown
        self._directory = spec.vm.working_dir
        self._identity = identity
        self._chains = {(disk.path, disk.format): disk.backing for disk in spec.disks}
        self._paths = {disk.path for disk in spec.disks} | {layer.path for disk in spec.disks for layer in disk.backing}
        self._asked = {
            os.path.normpath(os.path.join(spec.vm.working_dir, request.file)): disk.path
            for request, disk in zip(spec.requests, spec.disks, strict=False)
            if request.file
        }
        self._images: dict[str, OpenImage] = {}
        self._is_another_user = True

    def open(self, xml: str) -> str:
        """Open all files of the job that a domain names as disks; return the domain XML that uses them.

        Other files are the choice of the XML's author, the administrator, and stay as they are. Raises `errors.Fault`.
        """
        domain = etree.fromstring(xml)
        domains.mark(domain)
        label = domain.findtext("seclabel[@model='dac']/label") or ""
        self._is_another_user = self._identity.switching and not label.startswith(f"+{self._identity.uid}:")
        for disk in domain.iterfind("devices/disk"):
            source = disk.find("source")
            if source is None or not self._is_jobs(self._meant(source)):
                continue
            if disk.find("backingStore") is None:
                self._say_chain(disk, source.get("file", ""))
            writable = disk.find("readonly") is None and disk.get("device") != "cdrom"
            # QEMU 9.1 and later reject a descriptor without O_DIRECT if they would have opened the file with it.
            past_cache = os.O_DIRECT if value(disk, "driver", "cache") in _PAST_CACHE else 0
            for layer, image_format in _sources(disk):
                if self._is_jobs(layer.get("file", "")):
                    flags = os.O_RDWR if writable and layer is source else os.O_RDONLY
                    self._hand_over(layer, image_format, flags | past_cache)
        return etree.tostring(domain, encoding="unicode")

    def require_no_links(self, xml: str) -> None:
        """Make sure that no name in the scratch directory leads libvirt, which is root, out of it.

        A script may have the VM write to a file there, or keep its firmware's memory in one; the job can replace
        these files. Raises `JobFault`.
        """
        for element in etree.fromstring(xml).iter():
            for path in ((element.text or "").strip(), *element.attrib.values()):
                name = self._below(path)
                if not name or "fdgroup" in element.attrib:
                    continue
                try:
                    os.close(self._identity.open_scratch(self._directory, name, os.O_RDONLY))
                except OSError as error:
                    if error.errno in (errno.ELOOP, errno.ENOTDIR):
                        problem = f"{path} is a link, or reached by one, and the description of the VM names it."
                        hint = "leave that name in the scratch directory to the VM."
                        raise JobFault(MISMATCHED, problem, hint) from error

    def in_scratch(self) -> dict[str, OpenImage]:
        """Return the image of each group, if it is in the scratch directory."""
        return {group: image for group, image in self._images.items() if self._below(image.path)}

    def files(self) -> dict[str, int]:
        """Return the descriptor of each group."""
        return {group: image.descriptor for group, image in self._images.items()}

    def associate(self, domain: libvirt.virDomain) -> None:
        """Pass them to libvirt for a domain that is about to be made. Raises `libvirt.libvirtError`."""
        for group, descriptor in self.files().items():
            domain.FDAssociate(group, [descriptor], libvirt.VIR_DOMAIN_FD_ASSOCIATE_SECLABEL_RESTORE)  # SELinux's

    def leased(self) -> AbstractContextManager[Callable[[], None]]:
        """Prevent writes to them while QEMU detects their formats (`vmgahp.images.leases`)."""
        return held_still(self._images.values(), needed=self._is_another_user)

    def close(self) -> None:
        """Close them all, with the locks that QEMU has left on them; may be called again."""
        descriptors, self._images = self.files().values(), {}
        for descriptor in descriptors:
            with suppress(OSError):  # a file system without locks
                # All of a file (struct flock in fcntl(2)); libvirtd closes its copy a little later.
                fcntl(descriptor, F_OFD_SETLK, pack("hhqqi0q", F_UNLCK, os.SEEK_SET, 0, 0, 0))
            os.close(descriptor)

    def _meant(self, source: etree.Element) -> str:
        """Return the file to open, empty for none; for a name in the job's ad the file that was found by it."""
        if (device := source.get("dev", "")) and (os.path.normpath(device) in self._asked or self._is_jobs(device)):
            raise refused(f"{device} is no device that a job can have", "name an image.")
        path = source.get("file", "")
        if NO_FILE in map(os.path.normpath, (path, device)):  # libvirt would give it to QEMU's user
            raise refused(f"{NO_FILE} is no image", "name one, or let the script give the VM no disk for it.")
        if not self._is_jobs(path) and os.path.normpath(path) in self._asked:
            path = self._asked[os.path.normpath(path)]
            source.set("file", path)
        return path

    def _is_jobs(self, path: str) -> bool:
        return path in self._paths or self._below(path) != ""

    def _below(self, path: str) -> str:
        """Return the name of a file below the scratch directory; empty for any other."""
        inside = os.path.normpath(path).removeprefix(os.path.normpath(self._directory) + "/")
        return "" if inside.startswith("/") or not path.startswith("/") else inside

    def _say_chain(self, disk: etree.Element, path: str) -> None:
        """Add the backing files if the domain's author left it to libvirt, as root, to find them."""
        image_format = value(disk, "driver", "type", "raw")
        chain = self._chains.get((path, image_format))
        if chain is None:
            chain = backing_chain(path, image_format, self._identity)
        self._paths |= {layer.path for layer in chain}
        add_chain(disk, chain)

    def _hand_over(self, source: etree.Element, image_format: str, flags: int) -> None:
        path, group = source.get("file", ""), f"disk{len(self._images)}"
        if len(self._images) == MOST_FILES:
            raise refused(f"the disks are more than {MOST_FILES} files, with all backing files", "use fewer.")
        self._images[group] = OpenImage(path, image_format, self._open(path, flags))
        source.set("fdgroup", group)
        for old in source.findall("seclabel[@model='dac']"):
            source.remove(old)
        if self._may_chown:  # after a restart libvirtd has forgotten the former owner of the file
            etree.SubElement(source, "seclabel", model="dac", relabel="no")

    def _open(self, path: str, flags: int) -> int:
        try:
            if name := self._below(path):
                return self._identity.open_scratch(self._directory, name, flags)
            return self._identity.open_named(path, flags)
        except OSError as error:
            if error.errno == errno.EINVAL and flags & os.O_DIRECT:  # a file system without O_DIRECT
                return self._open(path, flags & ~os.O_DIRECT)
            problem = f"{path} cannot be opened any more ({error.strerror})"
            raise refused(problem, "see that it stays as it is while the VM starts, and is no link.") from error


def _sources(disk: etree.Element) -> Iterator[tuple[etree.Element, str]]:
    """Yield the file of a disk and those of its backing files, each with its format."""
    store: etree.Element | None = disk
    has_format = "driver"
    while store is not None:
        if (source := store.find("source")) is not None:
            yield source, value(store, has_format, "type", "raw")
        store, has_format = store.find("backingStore"), "format"


def refused(problem: str, hint: str) -> JobFault:
    """Make the fault for the disks of a job; `problem` is a sentence without its end."""
    return JobFault(INVALID_DISK_PARAM, f"{DISK}: {problem}.", hint)


# Space


LEAST_KEPT, LEAST_SHARE = 64 << 20, 64
"""The space kept free in EXECUTE without RESERVED_DISK: so many bytes, or one part in so many of the file system."""


def kept_free(settings: Settings, directory: str, identity: Identity) -> int:
    """Return the bytes to leave free in EXECUTE's file system; 0 if the scratch directory has one of its own."""
    execute = settings.string("EXECUTE") or os.path.dirname(os.path.normpath(directory))
    try:
        room = os.statvfs(execute)
        if job_user.device_of(directory, identity) != os.stat(execute).st_dev:
            return 0
    except (OSError, errors.Fault):
        return 0  # the user of the directory reports the error
    reserved = settings.integer("RESERVED_DISK") << 20
    return reserved or min(LEAST_KEPT, room.f_blocks * room.f_frsize // LEAST_SHARE)


def require_space(spec: JobSpec, files: DiskFiles, settings: Settings) -> None:
    """Make sure that a VM's disks are not too large before it has written anything. Raises `JobFault`."""
    limit, found = limit_of(spec, settings), 0
    if limit:
        with suppress(OSError):  # an error of the job's own file system does not concern the machine
            found = occupied(image.descriptor for image in files.in_scratch().values())
    if found > allowed(limit):
        mib = found >> 20
        problem = f"The VM's disks occupy {mib} MiB already, and the job has asked for {limit >> 20} MiB (RequestDisk)."
        hint = f"set request_disk = {mib + 1}MB at least, with room for what the guest writes."
        raise JobFault(errors.MISMATCHED, problem, hint)


def allowed(asked: int) -> int:
    """Return the bytes that disks may occupy if a job asks for `asked` bytes of guest data: images have tables."""
    return asked + asked // 32 + (1 << 20)


def occupied(files: Iterable[int]) -> int:
    """Return the bytes of the file system that open files occupy; one that is open twice counts once."""
    found = {(status.st_dev, status.st_ino): status.st_blocks << 9 for status in map(os.fstat, files)}
    return sum(found.values())


def limit_of(spec: JobSpec, settings: Settings) -> int:
    """Return the bytes that the job's submit file asks for; 0 if it does not, or if they are no limit."""
    slot = spec.vm.slot
    is_limit = slot.disk_is_asked and settings.boolean("VM_DISK_LIMIT")
    return max(slot.disk_kib or 0, 0) << 10 if is_limit else 0


def largest_size(image: OpenImage) -> int:
    """Return the bytes that an image can occupy, as far as its header tells."""
    now = occupied([image.descriptor])
    if fcntl(image.descriptor, F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
        return now
    if image.format == "raw":
        return os.fstat(image.descriptor).st_size
    # The guest's size is at a fixed place there.
    return int.from_bytes(head(image)[24:32]) if image.format == "qcow2" else now
