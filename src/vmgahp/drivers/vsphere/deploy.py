"""A new VM for a job: created bare and tagged, its files uploaded, its devices added, powered on."""

import os
import time
from collections.abc import Callable
from typing import NamedTuple

from pyVmomi import vim

from vmgahp import errors
from vmgahp.drivers.vsphere import annotations, config_spec, disks, faults, hardware, power
from vmgahp.drivers.vsphere.annotations import Tag
from vmgahp.drivers.vsphere.connection import VsphereConnection
from vmgahp.drivers.vsphere.datastore import Store
from vmgahp.drivers.vsphere.disks import JobDisk
from vmgahp.drivers.vsphere.hardware import Device, Hardware
from vmgahp.drivers.vsphere.inventory import Placement
from vmgahp.host import scratch
from vmgahp.host.job_user import Identity
from vmgahp.job.vmware import VmwareSpec
from vmgahp.job.vmx_drives import CDROM, DISK, FLOPPY


class Deployment(NamedTuple):
    """A job's VM, looked at and checked before the server hears of it."""

    spec: VmwareSpec
    hardware: Hardware
    disks: dict[str, JobDisk]
    """By the name in the ``.vmx``."""

    @classmethod
    def of(cls, spec: VmwareSpec, identity: Identity) -> "Deployment":
        """Look at the disks of the job's ``.vmx``. Raises `errors.JobFault`."""
        found = hardware.read(spec.vmx, spec.vmx_file)
        wanted = [device.file for device in found.of_kind(DISK)]
        return cls(spec, found, {name: disks.look(name, spec, identity) for name in wanted})


def store_name(device: Device) -> str:
    """What a device's file is called in the VM's directory. None of it is the job's to choose: its name could
    otherwise be that of the VM's own files."""
    place = device.place.replace(":", "-")
    ending = {DISK: "vmdk", CDROM: "iso", FLOPPY: "flp", hardware.SERIAL: "txt"}
    return f"{device.kind}-{place}.{ending[device.kind]}"


def flat(name: str) -> str:
    """The extent that goes with a descriptor on the datastore."""
    return f"{name.removesuffix('.vmdk')}-flat.vmdk"


class Launcher(NamedTuple):
    """Makes VMs in one place of the server."""

    connection: VsphereConnection
    place: Placement
    store: Store
    identity: Identity
    log: Callable[[str], None]

    def launch(
        self, deployment: Deployment, tag: Tag, network: "vim.vm.device.VirtualDevice.BackingInfo | None", end: float
    ) -> "vim.VirtualMachine":
        """Make the VM and power it on; uploads must be done when the monotonic clock shows `end`.

        Raises `errors.Fault`; what was made by then is left to the caller, who finds it by the tag.
        """
        spec = deployment.spec
        ref = self._create(deployment, tag)
        with faults.explained(f"looking at {spec.name}"):
            seen = self.connection.properties(ref, "config.files.vmPathName", "config.hardware.device")
        directory = power.directory_of(str(seen.get("config.files.vmPathName", "")))
        if not directory:
            raise errors.HypervisorFault(
                f"vSphere gave {spec.name} no directory of its own: {seen.get('config.files.vmPathName')}.",
                "see whether VSPHERE_DATASTORE is one for virtual machines.",
            )
        folder = directory.partition("] ")[2]
        sizes = {name: self._upload_disk(deployment, name, folder, end) for name in deployment.disks}
        for device in deployment.hardware.of_kind(CDROM) + deployment.hardware.of_kind(FLOPPY):
            self._upload_image(spec, device, folder, end)
        files = {device.file: f"{directory}/{store_name(device)}" for device in deployment.hardware.devices}
        keys = config_spec.controllers_of(seen.get("config.hardware.device"))
        config = config_spec.devices(deployment.hardware, files, sizes, spec, network, keys)
        self._add(ref, config, set(files.values()), f"giving {spec.name} its devices")
        power.on(self.connection, ref, f"starting {spec.name}")
        return ref

    def _create(self, deployment: Deployment, tag: Tag) -> "vim.VirtualMachine":
        place = self.place
        entity = annotations.entity_name(tag.name, tag.id)
        config = config_spec.bare(deployment.spec, deployment.hardware, entity, tag, place.datastore_name)

        def made() -> "vim.VirtualMachine | None":
            found = annotations.find(self.connection, place.folder)
            return next((one.ref for one in found if one.tag.id == tag.id), None)

        ref = self.connection.retried_task(
            lambda _content: place.folder.CreateVM_Task(config, place.pool), f"creating {tag.name}", made
        )
        if not isinstance(ref, vim.VirtualMachine):
            raise errors.HypervisorFault(f"vSphere created {tag.name}, and does not say which VM it is.")
        return ref

    def _add(self, ref: "vim.VirtualMachine", config: "vim.vm.ConfigSpec", files: set[str], doing: str) -> None:
        """Add the devices that use `files`; once, for the same ones cannot be added twice."""
        path = "config.hardware.device"

        def added() -> bool | None:
            with faults.explained(doing):
                there = self.connection.properties(ref, path).get(path) or ()
            return files <= {getattr(device.backing, "fileName", "") for device in there} or None

        self.connection.retried_task(lambda _content: ref.ReconfigVM_Task(config), doing, added)

    def _upload_disk(self, deployment: Deployment, name: str, directory: str, end: float) -> int:
        """Upload one disk; its size in bytes."""
        disk, place = deployment.disks[name], deployment.spec.working_dir
        (device,) = (one for one in deployment.hardware.devices if one.file == name)
        raw = f".{name}.vmgahp-raw"
        try:
            if disk.extent:
                opened = disk.open(self.identity)
            else:
                self.log(f"{name} is not flat: converting it for the datastore")
                disks.unpack(disk, place, raw, self.identity, end - time.monotonic())
                opened = self._open_scratch(name, place, raw)
            try:
                target = store_name(device)
                size = self.store.upload(opened, name, f"{directory}/{flat(target)}", end)
            finally:
                os.close(opened)
        finally:
            if not disk.extent:
                scratch.forget(self.identity, place, self.log, raw)
        text = disks.descriptor(flat(target), size, config_spec.adapter(device, deployment.hardware))
        self.store.upload_bytes(text, f"{directory}/{target}")
        return size

    def _upload_image(self, spec: VmwareSpec, device: Device, directory: str, end: float) -> None:
        if spec.transfer:
            opened = self._open_scratch(device.file, spec.working_dir, device.file)
        else:
            try:
                opened = self.identity.open_named(os.path.join(spec.dir, device.file), os.O_RDONLY)
            except OSError as error:
                raise disks.bad(
                    device.file, f"it cannot be opened in {spec.dir}: {error.strerror}", "put it there."
                ) from error
        try:
            self.store.upload(opened, device.file, f"{directory}/{store_name(device)}", end)
        finally:
            os.close(opened)

    def _open_scratch(self, name: str, scratch: str, file: str) -> int:
        try:
            return self.identity.open_scratch(scratch, file, os.O_RDONLY)
        except OSError as error:
            raise disks.bad(
                name,
                f"it cannot be opened in the job's scratch directory: {error.strerror}",
                "add it to transfer_input_files: a regular file that its owner may read.",
            ) from error
