"""The disks of a VM: those that are made for it, and all as open files, which is how QEMU gets them.

A writable disk of the catalog is an overlay of the job's own: an empty qcow2 image whose backing file is the
administrator's. It is returned like any disk of the job's, with `RECORD`, which names the image of which it is an
overlay: on another backing file its content is useless. So a job that comes back with its overlay, with a checkpoint or
without, is started on a machine whose catalog has the same image under that name, at any path. The backing file in the
overlay's own header is ignored: the job can have written it, and libvirt gets the chain from here.

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
from typing import NamedTuple
from xml.etree import ElementTree as etree

import libvirt

from vmgahp import errors
from vmgahp.checkpoint import manifest, store
from vmgahp.config import Settings
from vmgahp.domain.build import add_chain
from vmgahp.domain.model import value
from vmgahp.drivers.libvirt.link import domains
from vmgahp.errors import INVALID_DISK_PARAM, MISMATCHED, JobFault, MachineFault
from vmgahp.host import job_user, packages
from vmgahp.host.job_user import Identity
from vmgahp.images import iso, qemu_img
from vmgahp.images.catalog import Image
from vmgahp.images.formats import backing_chain, require_whole
from vmgahp.images.leases import OpenImage, head
from vmgahp.images.leases import leased as held_still
from vmgahp.job import cloud_init, look, run
from vmgahp.job.attributes import DATA_DISK, DATA_FILES, DISK_SIZE, OPTION_PREFIX, RUN, USER_DATA
from vmgahp.job.disks import DISK, LABEL, LARGEST_FILES, NO_FILE, Disk
from vmgahp.job.look import is_there
from vmgahp.job.spec import MOST_FILES, JobSpec
from vmgahp.text import shown

RECORD = "vm_catalog.json"
"""The file in the scratch directory that names the catalog image of each overlay."""
FORMAT = 1
MOST_DISKS = 1024
_PAST_CACHE = ("none", "directsync")
"""The cache modes of a disk for which QEMU opens its files with O_DIRECT."""


# Disks that are made: overlays, data disks, files on a disk, the drive of cloud-init


class _Overlay(NamedTuple):
    """A line of the record."""

    file: str  # the name of the overlay in the scratch directory
    image: str  # the name of the image in the catalog
    size: int  # the size of the image, and the digest of samples of it, when the overlay was made
    sample: str


class _Record(NamedTuple):
    layers: tuple[_Overlay, ...]


def require_possible(spec: JobSpec, domain_type: str, settings: Settings) -> None:
    """Check that this machine can make the disks that the job asks for. Raises `JobFault` if not."""
    seed, program = spec.devices.user_data, spec.devices.run
    asked = {RUN: program and shown(program.command), USER_DATA: seed and ascii(seed.user_data)}
    for option, said in asked.items():
        if said and not domains.is_qemu(domain_type):
            problem = f"domains of type {domain_type} run no program of a job's here, and get no drive for cloud-init"
            hint = "leave it out, or require a machine with kvm or qemu in VM_HYPERVISORS."
            raise _not_granted(f"{option} = {said}", problem, hint)
    if (spec.devices.user_data or any(request.files for request in spec.requests)) and not iso.can_write():
        options = ", ".join(OPTION_PREFIX + option for option in (USER_DATA, DATA_FILES, RUN))
        problem = f"The job wants a drive that pycdlib writes ({options}), which is not installed on this machine."
        hint = f"require a machine that has it (VM_kvm_ATTR_iso); here: {packages.of_python('pycdlib', '1.12')}."
        raise JobFault(errors.MISMATCHED, problem, hint)
    if not any(request.size or request.files or request.image or request.grow for request in spec.requests):
        return
    script = settings.xml_script()
    if not script and domains.is_qemu(domain_type):
        return
    why = f"its domains are of type {domain_type}" if not script else "a script describes its VMs"
    options = ", ".join((DISK, *(OPTION_PREFIX + option for option in (DATA_DISK, DATA_FILES, DISK_SIZE))))
    problem = f"The job wants a catalog image or a new disk ({options}), which this machine cannot give it: {why}."
    raise JobFault(errors.INVALID_DISK_PARAM, problem, "require a machine that has VM_Images, or transfer the disks.")


def files_made(spec: JobSpec) -> list[str]:
    """Return the names of the images with the job's files, which are in the scratch directory themselves."""
    made = [os.path.basename(disk.path) for disk in spec.disks if disk.files]
    seed = [cloud_init.SEED_FILE] if spec.devices.user_data else []
    return [*made, *seed, *([run.DRIVE_FILE] if spec.devices.run else [])]


class Provision:
    """The disks that are made for one job at its start."""

    def __init__(self, directory: str, settings: Settings, identity: Identity) -> None:
        self._directory = directory
        self._settings = settings
        self._identity = identity
        self.made: list[str] = []
        """The names of the new files, which `undo` removes."""

    def make(self, spec: JobSpec, write: Callable[[int], None] | None = None) -> None:
        """Make every disk that does not exist yet; check one that has come back with the job. Raises `errors.Fault`.

        A new overlay is what `write` writes to an open file, if that is not an empty one.
        """
        overlays: list[_Overlay] = []
        for disk in spec.disks:
            if disk.image is not None and disk.writable:
                overlays.append(self._overlay(disk, disk.image, write))
            elif disk.size:
                self._empty(disk)
            elif disk.files:
                self._files(disk, spec)
            if disk.grow:
                self._enlarge(disk)
        if overlays:
            self._write_record(overlays)
        if spec.devices.user_data:
            cloud_init.write(spec.devices.user_data, spec.vm.working_dir, self._identity)
            self.made.append(cloud_init.SEED_FILE)

    def undo(self) -> None:
        """Remove what was made, since the VM did not start."""
        # The directory may be gone or full; the start reports its own fault.
        job_user.forget(self._identity, self._directory, lambda _failure: None, *self.made)
        self.made = []

    # Overlays of images of the catalog

    def _overlay(self, disk: Disk, image: Image, write: Callable[[int], None] | None) -> _Overlay:
        name = os.path.basename(disk.path)
        try:
            base = store.describe(self._identity, self._directory, store.FileRef(manifest.BACKING, image.path))
        except OSError as error:
            raise look.unusable_image(image.name, MachineFault(f"{image.path}: {error.strerror}.")) from error
        ours = _Overlay(name, image.name, base.size, base.digest)
        if is_there(self._directory, disk, self._identity):
            self._require_same(ours, image)
            require_whole(disk.path, disk.format, self._identity)
        elif write is not None:
            self._identity.make_scratch(self._directory, name, write)
            self.made.append(name)
        else:
            self._create(name, lambda path: qemu_img.create_overlay(image.path, image.format, path, self._identity))
        return ours

    def _require_same(self, ours: _Overlay, image: Image) -> None:
        """Check that an existing overlay is one of this image. Raises `JobFault` if not."""
        try:
            overlays = store.find_record(self._identity, self._directory, RECORD, _parse_record) or []
        except store.Unusable as unusable:
            hint = "transfer it as it was returned, or leave it and the overlays out."
            raise refused(unusable.reason.rstrip("."), hint) from unusable
        recorded = {overlay.file: overlay for overlay in overlays}.get(ours.file)
        if recorded is None:
            problem = f"{ours.file} is there, and {RECORD} does not say which image is its backing file"
            hint = f"transfer {RECORD}, which was returned with it, too, or leave {ours.file} out to start afresh."
            raise refused(problem, hint)
        if recorded != ours:
            problem = f"{ours.file} is an overlay of another image than the one that this machine has as {image.name}"
            raise refused(problem, "let the job run where that image is, or leave the file out to start afresh.")

    def _write_record(self, overlays: list[_Overlay]) -> None:
        data = manifest.encode(FORMAT, _Record(tuple(overlays)))
        try:
            fresh = not self._identity.has_scratch(self._directory, RECORD)
            self._identity.write_scratch(self._directory, RECORD, data)
        except OSError as error:
            raise job_user.unwritable(RECORD, error, self._directory, self._identity) from error
        if fresh:
            self.made.append(RECORD)

    def _enlarge(self, disk: Disk) -> None:
        """Enlarge an image of the job's own to the size that the job asks for."""
        name, option = os.path.basename(disk.path), f"{DISK_SIZE} = {disk.grow >> 20} MiB"
        try:
            size = int(qemu_img.info(disk.path, disk.format, self._identity)["virtual-size"])
            if size == disk.grow:
                return
            if size > disk.grow:
                problem = f"{disk.device} has {size >> 20} MiB already, and none is made smaller"
                raise _not_granted(option, problem, "leave it out.")
            free = job_user.free_bytes(self._directory, self._identity)
            needed = disk.grow - self._identity.occupied_scratch(self._directory, name)
            if needed > free:
                problem = f"{disk.device} may take {needed >> 20} MiB more, and {free >> 20} MiB are free for this job"
                raise _not_granted(option, problem, "make it smaller, or raise request_disk.")
            qemu_img.enlarge(disk.path, disk.format, disk.grow, self._identity)
        except qemu_img.CannotRun as error:
            raise error.fault() from error
        except qemu_img.Trouble as error:
            problem = f"{disk.device} cannot be enlarged ({error})"
            raise _not_granted(option, problem, "see that it is a sound image of its format.") from error

    # Empty disks, and files on a disk

    def _empty(self, disk: Disk) -> None:
        name = os.path.basename(disk.path)
        if is_there(self._directory, disk, self._identity):
            return
        free = job_user.free_bytes(self._directory, self._identity)
        if disk.size > free:
            problem = f"{disk.device} is to have {disk.size >> 20} MiB, and {free >> 20} MiB are free for this job"
            raise _not_granted(DATA_DISK, problem, "make it smaller, or raise request_disk.")
        self._create(name, lambda path: qemu_img.create_empty(path, disk.format, disk.size, self._identity))

    def _files(self, disk: Disk, spec: JobSpec) -> None:
        name = os.path.basename(disk.path)
        contents: dict[str, int] = {}
        try:
            for file in disk.files:
                try:
                    contents[file] = self._identity.open_scratch(self._directory, file, os.O_RDONLY)
                except OSError as error:
                    problem = f"{file!a} cannot be opened ({error.strerror})"
                    raise _not_granted(DATA_FILES, problem, "see that it is a regular file.") from error
            needed = sum(os.fstat(each).st_size for each in contents.values()) + iso.OVERHEAD
            left = room_for(name, spec, self._settings, self._identity)
            if needed > left:
                problem = f"the image of the files may take {needed >> 20} MiB, and {left >> 20} MiB are left for it"
                hint = "raise request_disk, or transfer a disk image with the files on it."
                raise _not_granted(DATA_FILES, problem, hint)
            most = min(left - iso.OVERHEAD, LARGEST_FILES)  # even if the files grow now
            iso.write(self._directory, name, LABEL, contents, self._identity, most_bytes=most)
        except iso.Unfit as unfit:
            raise _not_granted(DATA_FILES, str(unfit), "transfer a disk image with the files on it.") from unfit
        finally:
            for each in contents.values():
                os.close(each)
        self.made.append(name)

    def _create(self, name: str, make: Callable[[str], None]) -> None:
        """Make a file under a temporary name, so that an incomplete image is never mistaken for a complete one."""
        temporary = f".{name}.{os.getpid()}.new"
        try:
            try:
                make(os.path.join(self._directory, temporary))
                self._identity.rename_scratch(self._directory, temporary, name, replace=False)
            except BaseException:
                self._identity.unlink_scratch(self._directory, temporary)
                raise
        except qemu_img.CannotRun as error:
            raise error.fault() from error
        except qemu_img.Trouble as error:
            seen = qemu_img.as_of_the_system(error)
            raise job_user.unwritable(name, seen, self._directory, self._identity) from error
        except OSError as error:
            raise job_user.unwritable(name, error, self._directory, self._identity) from error
        self.made.append(name)


def _parse_record(data: bytes) -> list[_Overlay]:
    found = []
    top = manifest.read(data, FORMAT, _Record._fields)
    for number, item in enumerate(top.items("layers", MOST_DISKS)):
        fields = manifest.Fields(item, f"layers[{number}].", _Overlay._fields)
        size, sample = fields.integer("size", 0, manifest.LARGEST_FILE), fields.form("sample", manifest.SHA256)
        found.append(_Overlay(fields.text("file", 300), fields.text("image", 100), size, sample))
    return found


def _not_granted(option: str, problem: str, hint: str) -> JobFault:
    return JobFault(errors.MISMATCHED, f"{OPTION_PREFIX}{option}: {problem}.", hint)


# Open files


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
        *_, device = job_user.free_room(directory, identity)
        if device != os.stat(execute).st_dev:
            return 0
    except (OSError, errors.Fault):
        return 0  # the user of the directory reports the error
    reserved = settings.integer("RESERVED_DISK") << 20
    return reserved or min(LEAST_KEPT, room.f_blocks * room.f_frsize // LEAST_SHARE)


def unreserved(settings: Settings, directory: str, identity: Identity) -> int:
    """Return the free bytes of the scratch directory beside those that are kept free. Raises `errors.Fault`."""
    return max(job_user.free_bytes(directory, identity) - kept_free(settings, directory, identity), 0)


def require_space(spec: JobSpec, files: DiskFiles, settings: Settings) -> None:
    """Make sure that a VM's disks are not too large before it has written anything. Raises `JobFault`."""
    if limit := limit_of(spec, settings):
        with suppress(OSError):  # an error of the job's own file system does not concern the machine
            _rest(limit, occupied(image.descriptor for image in files.in_scratch().values()))


def room_for(name: str, spec: JobSpec, settings: Settings, identity: Identity) -> int:
    """Return the bytes that a new file `name` may take beside the job's disks and other jobs. Raises `errors.Fault`."""
    directory, limit = spec.vm.working_dir, limit_of(spec, settings)
    left = unreserved(settings, directory, identity)
    if limit:
        others = {*names_in_scratch(spec)} - {name}
        left = min(left, _rest(limit, sum(identity.occupied_scratch(directory, other) for other in others)))
    return left


def names_in_scratch(spec: JobSpec) -> list[str]:
    """Return the names of the disks in the scratch directory, and of their backing files there."""
    paths = [disk.path for disk in spec.disks] + [layer.path for disk in spec.disks for layer in disk.backing]
    scratch = os.path.normpath(spec.vm.working_dir)
    return [os.path.basename(path) for path in paths if os.path.normpath(os.path.dirname(path)) == scratch]


def _rest(limit: int, found: int) -> int:
    """Return the bytes of a job's limit that its disks, which occupy `found` bytes, have left. Raises `JobFault`."""
    if found > allowed(limit):
        mib = found >> 20
        problem = f"The VM's disks occupy {mib} MiB already, and the job has asked for {limit >> 20} MiB (RequestDisk)."
        hint = f"set request_disk = {mib + 1}MB at least, with room for what the guest writes."
        raise JobFault(errors.MISMATCHED, problem, hint)
    return allowed(limit) - found


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
