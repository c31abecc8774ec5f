"""The transport of a job's VM to the server and back: its disks' formats, and its checkpoints.

A datastore wants a disk as two files: a descriptor, and an extent with the disk's plain content (``-flat``). What the
desktop products write by default, one growing file or pieces of 2 GB, an ESXi host does not run. So only the plain
content travels. The descriptor on the datastore is ours; a disk that is not flat is converted by ``qemu-img``, there
and back, with the rights of the job's user.

The disks and the memory of a VM on a server stay there; what travels with the job is a manifest that says which VM and
which snapshot. Any execute host that uses the same server and folder can restore the guest. A checkpoint whose job
never comes back is destroyed when its time is over, by whichever host next starts a job.

The manifest is the job's to change. It is believed only where the VM's own tag, which the job cannot write, says that
the VM is this very job's.

A VM is created bare and tagged, its files are uploaded, its devices added, and it is powered on. When the guest has
powered off, a disk is downloaded under a temporary name and replaces the job's only when it is complete, so a
download that breaks off leaves the job's disk as it was.
"""

from __future__ import annotations

import errno
import os
import secrets
import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from pyVmomi import vim

from vmgahp import errors
from vmgahp.checkpoint.files import Unusable
from vmgahp.checkpoint.manifest import UUID, CheckpointKind, Facts, Manifest, matching, text
from vmgahp.checkpoint.store import CheckpointStore
from vmgahp.drivers.base import Logger
from vmgahp.drivers.vsphere.connection import VsphereConnection
from vmgahp.drivers.vsphere.datastore import Placement, Store
from vmgahp.drivers.vsphere.hardware import SERIAL, Device, Hardware, adapter_word, bare_spec, devices_spec
from vmgahp.drivers.vsphere.vm import (
    ON,
    SAVED,
    SNAPSHOT,
    Tag,
    Tagged,
    VsphereVm,
    directory_of,
    entity_name,
    find_tagged,
)
from vmgahp.host import execute, scratch
from vmgahp.host.job_user import Identity
from vmgahp.images import qemu_img, vmdk
from vmgahp.images.formats import backing_chain
from vmgahp.job.vmware import VMDK_FILES, VmwareSpec
from vmgahp.job.vmx_drives import CDROM, DISK, FLOPPY
from vmgahp.text import shown

CONVERT_DEADLINE = 3600.0
_FLAT_TYPES = ("monolithicflat", "vmfs", "vmfspreallocated", "vmfseagerzeroedthick", "vmfsthin")
_HINT = "convert the disk with qemu-img convert -O vmdk, and transfer all of its files."
_SEND = "add the file to transfer_input_files (or vmware_dir): a regular file that its owner may read."


def flat_extent(name: str, spec: VmwareSpec, identity: Identity) -> str:
    """Look at the disk `name`, and return the file with its plain content; empty where it has to be converted first.

    Raises `errors.JobFault` where no VM could use it.
    """
    descriptor = open_disk(name, name, spec, identity)
    try:
        found = vmdk.read(descriptor)
    except vmdk.VmdkError as error:
        raise bad_disk(name, str(error), _HINT, errors.BAD_IMAGE) from error
    finally:
        os.close(descriptor)
    if found.parent:
        raise bad_disk(name, "it is the snapshot of another disk", "send a disk without snapshots.")
    if found.kind not in _FLAT_TYPES or len(found.extents) != 1:
        return ""
    (extent,) = found.extents
    if extent.access != "RW" or extent.kind == "SPARSE" or extent.offset:
        return ""
    descriptor = open_disk(name, extent.file, spec, identity)
    size, wanted = os.fstat(descriptor).st_size, extent.sectors * vmdk.SECTOR
    os.close(descriptor)
    if size != wanted or not size:
        problem = f"it is to have {wanted} bytes, and {shown(extent.file)} has {size}"
        raise bad_disk(name, problem, "send the files as VMware wrote them.", errors.BAD_IMAGE)
    return extent.file


def open_disk(disk: str, name: str, spec: VmwareSpec, identity: Identity) -> int:
    """Open a file of a disk or drive, in the scratch directory or a shared one, as the job's user. Raises `JobFault`.

    `disk` is the name that the job's owner knows.
    """
    try:
        if spec.transfer:
            return identity.open_scratch(spec.working_dir, name, os.O_RDONLY)
        return identity.open_named(os.path.join(spec.dir, name), os.O_RDONLY)
    except OSError as error:
        where = "the job's scratch directory" if spec.transfer else shown(spec.dir)
        raise bad_disk(disk, f"{shown(name)} cannot be opened in {where}: {error.strerror}", _SEND) from error


def unpack_disk(name: str, spec: VmwareSpec, raw: str, identity: Identity, seconds: float) -> None:
    """Write the plain content of a disk that is not flat into the file `raw` of the scratch directory.

    Raises `errors.Fault`: `errors.JobFault` for a disk that qemu-img cannot read, or not within `seconds`.
    """
    path = os.path.join(spec.working_dir if spec.transfer else spec.dir, name)
    try:
        chain = backing_chain(path, "vmdk", identity, parts=True)
    except errors.JobFault as fault:
        raise fault.of(VMDK_FILES) from fault
    if chain:
        raise bad_disk(name, "it is the snapshot of another disk", "send a disk without snapshots.")
    _convert(path, os.path.join(spec.working_dir, raw), ("vmdk", "raw"), name, identity, seconds)


def pack_disk(name: str, scratch: str, raw: str, target: str, identity: Identity) -> None:
    """Make `target` in the scratch directory, one growing file, from the content in `raw`. Raises as `unpack_disk`."""
    source, made = os.path.join(scratch, raw), os.path.join(scratch, target)
    _convert(source, made, ("raw", "vmdk"), name, identity, CONVERT_DEADLINE, ("subformat=monolithicSparse",))


def disk_descriptor(extent: str, size: int, adapter: str, *, create_type: str = "vmfs") -> bytes:
    """Return the descriptor of a disk whose plain content of `size` bytes is the file `extent`.

    With ``vmfs`` as a datastore wants it, with ``monolithicFlat`` as the desktop products do.
    """
    heads = 16 if adapter == "ide" else 255
    cylinders = max(1, size // (heads * 63 * vmdk.SECTOR))
    kind, offset = ("VMFS", "") if create_type == "vmfs" else ("FLAT", " 0")
    return (
        "# Disk DescriptorFile\n"
        "version=1\n"
        f"CID={secrets.randbelow(0xFFFFFFFE):08x}\n"
        "parentCID=ffffffff\n"
        f'createType="{create_type}"\n'
        "\n# Extent description\n"
        f'RW {size // vmdk.SECTOR} {kind} "{extent}"{offset}\n'
        "\n# The Disk Data Base\n#DDB\n\n"
        f'ddb.adapterType = "{adapter}"\n'
        f'ddb.geometry.cylinders = "{cylinders}"\n'
        f'ddb.geometry.heads = "{heads}"\n'
        'ddb.geometry.sectors = "63"\n'
        'ddb.virtualHWVersion = "4"\n'
    ).encode()


def bad_disk(name: str, problem: str, hint: str, word: str = errors.INVALID_DISK_PARAM) -> errors.JobFault:
    """Return the fault about the job's disk `name`."""
    return errors.JobFault(word, f"{VMDK_FILES}, disk {shown(name)}: {problem}.", hint)


def _convert(
    source: str,
    target: str,
    formats: tuple[str, str],
    name: str,
    identity: Identity,
    seconds: float,
    options: tuple[str, ...] = (),
) -> None:
    try:
        qemu_img.convert(source, formats[0], target, formats[1], identity, seconds=max(1.0, seconds), options=options)
    except qemu_img.NotInstalled as error:
        raise errors.MachineFault(
            f"{error.program} is not installed, and {name} has to be converted.", "install qemu-utils and util-linux."
        ) from error
    except qemu_img.TooSlow as error:
        raise bad_disk(name, f"it could not be converted within {seconds:.0f} s", "send it as a flat disk.") from error
    except qemu_img.Trouble as error:
        if isinstance(error, qemu_img.Refused) and error.no_space:
            full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            problem = f"{name} cannot be converted: {error}."
            raise execute.blame(full, os.path.dirname(target), identity, problem) from error
        raise bad_disk(name, f"qemu-img cannot convert it ({error})", _HINT, errors.BAD_IMAGE) from error


DAY = 86400


def _differences(then: Facts, now: Facts) -> Iterator[str]:
    if then["snapshot"] != now["snapshot"]:
        yield "the VM on the server has another one"


KIND = CheckpointKind(
    "vsphere",
    {
        "id": matching(UUID),  # that of the VM's tag
        "snapshot": matching(SNAPSHOT),
        # VSPHERE_HOST where it was made; for people, because a server has several names.
        "server": text(300, may_be_empty=True),
    },
    most_files=0,
    differences=_differences,
)


class VsphereCheckpoints(NamedTuple):
    """The checkpoints of one driver's jobs."""

    identity: Identity
    days: int
    """The days for which a checkpoint waits for its job; 0 for ever."""
    log: Logger

    def store(self, directory: str) -> CheckpointStore:
        """Return the checkpoint of the job in this scratch directory."""
        return CheckpointStore(KIND, self.identity, directory, self.log)

    def write(self, spec: VmwareSpec, facts: Facts, cpu_seconds: float) -> None:
        """Write the manifest to the scratch directory. Raises `errors.MachineFault`."""
        store = self.store(spec.working_dir)
        store.write(store.now(spec, facts, cpu_seconds), ())

    def waiting(self, tag: Tag) -> Tag:
        """Return the tag of a VM that from now on is a checkpoint and no host's."""
        expires = int(time.time()) + self.days * DAY if self.days else 0
        return tag._replace(state=SAVED, directory="", host="", expires=str(expires))

    def match(self, manifest: Manifest, spec: VmwareSpec, job: str, vms: Iterable[Tagged]) -> Tagged:
        """Return the VM of the manifest. Raises `Unusable`."""
        found = next((vm for vm in vms if vm.tag.id == manifest.facts["id"]), None)
        if found is None:
            where = manifest.facts["server"]
            raise Unusable(f"its VM is not on this server; it was made on {where}, and may have expired.", True)
        if found.tag.job != job or found.tag.name != spec.name:
            raise Unusable("it is another job's.", True)
        store = self.store(spec.working_dir)
        store.check(manifest, store.now(spec, {"snapshot": found.tag.checkpoint}), ())
        return found


class VsphereContext(NamedTuple):
    """The server, the place of VMs there, and the checkpoints."""

    connection: VsphereConnection
    store: Store
    checkpoints: VsphereCheckpoints
    place: Placement
    log: Logger


class VspherePlan(NamedTuple):
    """The plan of a START, as far as the job determines it; the server has not been queried yet."""

    spec: VmwareSpec
    hardware: Hardware
    extents: dict[str, str]
    """The file with the plain content of each disk, by its name in the ``.vmx``; empty for one to convert."""
    job: str
    """The identity of the job (`vm.job_id`)."""
    end: float
    """The time by which uploads must be done, by the monotonic clock."""
    manifest: Manifest | None = None
    """The checkpoint that came with the job."""
    unusable: Unusable | None = None
    """The reason why an existing checkpoint is not restored."""


class Transport:
    """The transport of one job's files."""

    def __init__(self, plan: VspherePlan, context: VsphereContext) -> None:
        self._spec, self._hardware, self._extents, self._end = plan.spec, plan.hardware, plan.extents, plan.end
        self._context = context
        self._identity = context.checkpoints.identity
        self.fetched = False
        """True if all files are here, although the VM may not have been removed yet."""

    def deploy(self, tag: Tag, network: vim.vm.device.VirtualDevice.BackingInfo | None) -> VsphereVm:
        """Make the VM and power it on.

        Raises `errors.Fault`; what was made by then is left to the caller, who finds it by the tag.
        """
        connection, spec, present = self._context.connection, self._spec, "config.hardware.device"
        vm = VsphereVm(connection, self._create(tag))
        seen = connection.properties(vm.ref, "config.files.vmPathName", present)
        directory = directory_of(seen.get("config.files.vmPathName"))
        if not directory:
            raise errors.HypervisorFault(
                f"vSphere gave {spec.name} no directory of its own: {seen.get('config.files.vmPathName')}.",
                "see whether VSPHERE_DATASTORE is one for virtual machines.",
            )
        folder = directory.partition("] ")[2]
        sizes = {device.file: self._upload_disk(device, folder) for device in self._hardware.of_kind(DISK)}
        for device in self._hardware.of_kind(CDROM, FLOPPY):
            opened = open_disk(device.file, device.file, spec, self._identity)
            self._upload(opened, device.file, f"{folder}/{device.stored_as}")
        config = devices_spec(self._hardware, directory, sizes, spec, network, seen.get(present) or ())
        files = {f"{directory}/{device.stored_as}" for device in self._hardware.devices}

        def added() -> bool | None:
            there = connection.get(vm.ref, present) or ()
            return files <= {getattr(device.backing, "fileName", "") for device in there} or None

        connection.task(lambda _content: vm.ref.ReconfigVM_Task(config), f"giving {spec.name} its devices", added)
        vm.power(ON, f"starting {spec.name}")
        return vm

    def _create(self, tag: Tag) -> vim.VirtualMachine:
        connection, place = self._context.connection, self._context.place
        entity = entity_name(tag.name, tag.id)
        config = bare_spec(self._spec, self._hardware, entity, tag, place.datastore_name)

        def made() -> vim.VirtualMachine | None:
            return next((vm.ref for vm, found in find_tagged(connection, place.folder) if found.id == tag.id), None)

        ref = connection.task(
            lambda _content: place.folder.CreateVM_Task(config, place.pool), f"creating {tag.name}", made
        )
        if not isinstance(ref, vim.VirtualMachine):
            raise errors.HypervisorFault(f"vSphere created {tag.name}, and does not say which VM it is.")
        return ref

    def _upload_disk(self, device: Device, folder: str) -> int:
        """Upload one disk; return its size in bytes."""
        name, extent, spec = device.file, self._extents[device.file], self._spec
        raw = f".{name}.vmgahp-raw"
        try:
            if extent:
                opened = open_disk(name, extent, spec, self._identity)
            else:
                self._context.log(f"{name} is not flat: converting it for the datastore")
                unpack_disk(name, spec, raw, self._identity, self._end - time.monotonic())
                opened = open_disk(name, raw, spec._replace(transfer=True), self._identity)
            size = self._upload(opened, name, f"{folder}/{device.extent}")
        finally:
            if not extent:
                self._forget(raw)
        text = disk_descriptor(device.extent, size, adapter_word(device, self._hardware))
        self._context.store.upload_bytes(text, f"{folder}/{device.stored_as}")
        return size

    def _upload(self, opened: int, name: str, target: str) -> int:
        try:
            return self._context.store.upload(opened, name, target, self._end)
        finally:
            os.close(opened)

    # The way back

    def fetch(self, vm: VsphereVm) -> None:
        """Download the disks, floppies and serial ports' files of a VM that is off.

        Raises `errors.Fault`; then every file of the job is as it was or whole.
        """
        connection, name = self._context.connection, self._spec.name
        if connection.get(vm.ref, "snapshot") is not None:
            # The guest's writes since its checkpoint are in a separate disk until the snapshots are removed.
            connection.task(lambda _content: vm.ref.RemoveAllSnapshots_Task(), f"merging the snapshots of {name}")
        seen = connection.properties(vm.ref, "config.files.vmPathName", "config.hardware.device")
        directory = directory_of(seen.get("config.files.vmPathName"))
        used = [
            device.backing.fileName
            for device in seen.get("config.hardware.device") or ()
            if isinstance(device, vim.vm.device.VirtualDisk)
        ]
        for device in self._hardware.of_kind(DISK):
            if f"{directory}/{device.stored_as}" not in used:
                raise errors.HypervisorFault(
                    f"The guest of {name} has written to another file than the one that was uploaded for "
                    f"{device.place}: there is {', '.join(sorted(used)) or 'none'}.",
                    "see who has changed the VM, or made snapshots of it.",
                )
        try:
            for device in self._hardware.of_kind(DISK, FLOPPY, SERIAL):
                if device.persistent:
                    self._fetch(device, directory.partition("] ")[2])
        except OSError as error:
            raise errors.MachineFault(
                f"The disks of {name} cannot be written into the scratch directory: {error.strerror or error}.",
                "check the file system of EXECUTE.",
            ) from error
        self.fetched = True

    def _fetch(self, device: Device, folder: str) -> None:
        name, directory, extent = device.file, self._spec.working_dir, self._extents.get(device.file)
        part, packed = f".{name}.vmgahp-part", f".{name}.vmgahp-packed"
        source = device.stored_as if extent is None else device.extent
        self._identity.unlink_scratch(directory, part)
        try:
            opened = self._identity.open_scratch(directory, part, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(opened, "r+b") as file:
                size = self._context.store.download(f"{folder}/{source}", name, file, device.kind == SERIAL)
            if size is None:
                return
            if extent is None or (extent and self._spec.transfer):
                self._identity.rename_scratch(directory, part, extent or name)
            elif not extent:
                pack_disk(name, directory, part, packed, self._identity)
                self._identity.rename_scratch(directory, packed, name)
            else:  # a shared disk is sent back under another name
                extent, adapter = f"{name.removesuffix('.vmdk')}-flat.vmdk", adapter_word(device, self._hardware)
                self._identity.rename_scratch(directory, part, extent)
                text = disk_descriptor(extent, size, adapter, create_type="monolithicFlat")
                self._identity.write_scratch(directory, name, text)
        finally:
            self._forget(part, packed)

    def _forget(self, *names: str) -> None:
        scratch.forget(self._identity, self._spec.working_dir, self._context.log, *names)
