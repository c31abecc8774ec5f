"""Disks made before a VM's start: overlays, data disks, cloud-init's drive.

A writable disk of the catalog is an overlay of the job's own: an empty qcow2 image whose backing file is the
administrator's. It is returned like any disk of the job's, with `RECORD`, which names the image of which it is an
overlay: on another backing file its content is useless. So a job that comes back with its overlay, with a checkpoint or
without, is started on a machine whose catalog has the same image under that name, at any path. The backing file in the
overlay's own header is ignored: the job can have written it, and libvirt gets the chain from here.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import NamedTuple

from vmgahp import errors
from vmgahp.checkpoint import files, manifest
from vmgahp.config import Settings
from vmgahp.drivers.libvirt.link import domains
from vmgahp.drivers.libvirt.start.disks import refused
from vmgahp.errors import JobFault, MachineFault
from vmgahp.host import job_user, packages
from vmgahp.host.job_user import Identity
from vmgahp.images import iso, qemu_img
from vmgahp.images.catalog import Image
from vmgahp.images.formats import require_whole
from vmgahp.images.qemu_img import TooSlow
from vmgahp.job import cloud_init, look, run
from vmgahp.job.attributes import DATA_DISK, DATA_FILES, DISK_SIZE, OPTION_PREFIX, RUN, USER_DATA
from vmgahp.job.disks import DISK, LABEL, LARGEST_FILES, Disk
from vmgahp.job.look import is_there
from vmgahp.job.spec import JobSpec
from vmgahp.text import shown

RECORD = "vm_catalog.json"
"""The file in the scratch directory that names the catalog image of each overlay."""
FORMAT = 1
MOST_DISKS = 1024


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
    for option, value in asked.items():
        if value and not domains.is_qemu(domain_type):
            problem = f"domains of type {domain_type} run no program of a job's here, and get no drive for cloud-init"
            hint = "leave it out, or require a machine with kvm or qemu in VM_HYPERVISORS."
            raise _not_granted(f"{option} = {value}", problem, hint)
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

    def __init__(self, directory: str, identity: Identity) -> None:
        self._directory = directory
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
                self._files(disk)
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
            base = files.describe(self._identity, self._directory, files.FileRef(manifest.BACKING, image.path))
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
            overlays = files.find(self._identity, self._directory, RECORD, _parse_record) or []
        except files.Unusable as unusable:
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
            raise MachineFault(f"{error}.", "install qemu-utils and util-linux.") from error
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

    def _files(self, disk: Disk) -> None:
        name = os.path.basename(disk.path)
        contents: dict[str, int] = {}
        try:
            for file in disk.files:
                try:
                    contents[file] = self._identity.open_scratch(self._directory, file, os.O_RDONLY)
                except OSError as error:
                    problem = f"{file!a} cannot be opened ({error.strerror})"
                    raise _not_granted(DATA_FILES, problem, "see that it is a regular file.") from error
            total = sum(os.fstat(each).st_size for each in contents.values())
            free = job_user.free_bytes(self._directory, self._identity)
            if total + iso.OVERHEAD > free:
                problem = f"the files have {total >> 20} MiB, and {free >> 20} MiB are free for their image"
                hint = "raise request_disk, or transfer a disk image with the files on it."
                raise _not_granted(DATA_FILES, problem, hint)
            iso.write(self._directory, name, LABEL, contents, self._identity, most_bytes=LARGEST_FILES)
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
        except qemu_img.NotInstalled as error:
            raise MachineFault(f"{error}.", "install qemu-utils and util-linux.") from error
        except qemu_img.Trouble as error:
            raise job_user.unwritable(name, _as_of_the_system(error), self._directory, self._identity) from error
        except OSError as error:
            raise job_user.unwritable(name, error, self._directory, self._identity) from error
        self.made.append(name)


def _as_of_the_system(trouble: qemu_img.Trouble) -> OSError:
    """Return an OSError for a failure of qemu-img, by the system's error text at the end of its message."""
    said = str(trouble)
    known = (number for number in errno.errorcode if said.endswith(os.strerror(number)))
    return OSError(errno.ETIMEDOUT if isinstance(trouble, TooSlow) else next(known, errno.EINVAL), said)


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
