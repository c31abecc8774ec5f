"""The transport of a job's VM to the server, and of its disks back.

A VM is created bare and tagged, its files are uploaded, its devices added, and it is powered on. When the guest has
powered off, a disk is downloaded under a temporary name and replaces the job's only when it is complete, so a
download that breaks off leaves the job's disk as it was.
"""

import os
import time
from typing import NamedTuple

from pyVmomi import vim

from vmgahp import errors
from vmgahp.checkpoint.files import Unusable
from vmgahp.checkpoint.manifest import Manifest
from vmgahp.drivers.base import Logger
from vmgahp.drivers.vsphere import config_spec, disks
from vmgahp.drivers.vsphere.annotations import Tag, entity_name
from vmgahp.drivers.vsphere.checkpoint import VsphereCheckpoints
from vmgahp.drivers.vsphere.connection import VsphereConnection
from vmgahp.drivers.vsphere.datastore import Store
from vmgahp.drivers.vsphere.hardware import SERIAL, Device, Hardware
from vmgahp.drivers.vsphere.inventory import Placement
from vmgahp.drivers.vsphere.vm import ON, VsphereVm, directory_of, find
from vmgahp.host import scratch
from vmgahp.job.vmware import VmwareSpec
from vmgahp.job.vmx_drives import CDROM, DISK, FLOPPY


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
    """The identity of the job (`annotations.job_id`)."""
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

    def deploy(self, tag: Tag, network: "vim.vm.device.VirtualDevice.BackingInfo | None") -> VsphereVm:
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
            opened = disks.open_file(device.file, device.file, spec, self._identity)
            self._upload(opened, device.file, f"{folder}/{device.stored_as}")
        config = config_spec.devices(self._hardware, directory, sizes, spec, network, seen.get(present) or ())
        files = {f"{directory}/{device.stored_as}" for device in self._hardware.devices}

        def added() -> bool | None:
            there = connection.get(vm.ref, present) or ()
            return files <= {getattr(device.backing, "fileName", "") for device in there} or None

        connection.task(lambda _content: vm.ref.ReconfigVM_Task(config), f"giving {spec.name} its devices", added)
        vm.power(ON, f"starting {spec.name}")
        return vm

    def _create(self, tag: Tag) -> "vim.VirtualMachine":
        connection, place = self._context.connection, self._context.place
        entity = entity_name(tag.name, tag.id)
        config = config_spec.bare(self._spec, self._hardware, entity, tag, place.datastore_name)

        def made() -> "vim.VirtualMachine | None":
            return next((vm.ref for vm, found in find(connection, place.folder) if found.id == tag.id), None)

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
                opened = disks.open_file(name, extent, spec, self._identity)
            else:
                self._context.log(f"{name} is not flat: converting it for the datastore")
                disks.unpack(name, spec, raw, self._identity, self._end - time.monotonic())
                opened = disks.open_file(name, raw, spec._replace(transfer=True), self._identity)
            size = self._upload(opened, name, f"{folder}/{device.extent}")
        finally:
            if not extent:
                self._forget(raw)
        text = disks.descriptor(device.extent, size, config_spec.adapter(device, self._hardware))
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
                disks.pack(name, directory, part, packed, self._identity)
                self._identity.rename_scratch(directory, packed, name)
            else:  # a shared disk is sent back under another name
                extent, adapter = f"{name.removesuffix('.vmdk')}-flat.vmdk", config_spec.adapter(device, self._hardware)
                self._identity.rename_scratch(directory, part, extent)
                text = disks.descriptor(extent, size, adapter, create_type="monolithicFlat")
                self._identity.write_scratch(directory, name, text)
        finally:
            self._forget(part, packed)

    def _forget(self, *names: str) -> None:
        scratch.forget(self._identity, self._spec.working_dir, self._context.log, *names)
