"""The download of the job's disks, after the guest has powered off.

A disk is written under a name of its own and takes the place of the job's only when all of it is there, so
what breaks off leaves the job's disk as it was.
"""

import os
from collections.abc import Callable

from pyVmomi import vim

from vmgahp import errors
from vmgahp.drivers.vsphere import config_spec, disks, faults, hardware, power
from vmgahp.drivers.vsphere.connection import VsphereConnection
from vmgahp.drivers.vsphere.datastore import Store
from vmgahp.drivers.vsphere.deploy import Deployment, flat, store_name
from vmgahp.drivers.vsphere.hardware import Device
from vmgahp.host import scratch
from vmgahp.host.job_user import Identity
from vmgahp.job.vmx_drives import DISK, FLOPPY


class Download:
    """Brings the disks, floppies and serial ports' files of one powered-off VM into the scratch directory."""

    def __init__(
        self,
        connection: VsphereConnection,
        store: Store,
        deployment: Deployment,
        identity: Identity,
        log: Callable[[str], None],
    ) -> None:
        self._connection = connection
        self._store = store
        self._deployment = deployment
        self._identity = identity
        self._log = log
        self._scratch = deployment.spec.working_dir
        self._parts: list[str] = []
        self.done = False
        """Whether all of it is here, although the VM may not have been removed yet."""

    def run(self, ref: "vim.VirtualMachine") -> None:
        """All of it. Raises `errors.Fault`; then every file of the job is as it was or whole."""
        name = self._deployment.spec.name
        with faults.explained(f"looking at the disks of {name}"):
            seen = self._connection.properties(ref, "snapshot", "config.files.vmPathName")
        if seen.get("snapshot") is not None:
            # What the guest wrote since its checkpoint is in a disk of its own until then.
            self._connection.task(lambda _content: ref.RemoveAllSnapshots_Task(), f"merging the snapshots of {name}")
        directory = power.directory_of(str(seen.get("config.files.vmPathName", "")))
        self._check(ref, directory)
        folder = directory.partition("] ")[2]
        try:
            for device in self._deployment.hardware.devices:
                if device.kind == DISK and device.persistent:
                    self._disk(device, f"{folder}/{flat(store_name(device))}")
                elif device.kind in (FLOPPY, hardware.SERIAL):
                    self._file(device, f"{folder}/{store_name(device)}")
        except OSError as error:
            raise errors.MachineFault(
                f"The disks of {name} cannot be written into the scratch directory: {error.strerror or error}.",
                "check the file system of EXECUTE.",
            ) from error
        finally:
            for part in self._parts:
                self._forget(part)
        self.done = True

    def _check(self, ref: "vim.VirtualMachine", directory: str) -> None:
        """Make sure that what the VM has written to are the files that are fetched."""
        with faults.explained("looking at the disks of a VM"):
            found = self._connection.properties(ref, "config.hardware.device").get("config.hardware.device")
        files = {device.backing.fileName for device in found or () if isinstance(device, vim.vm.device.VirtualDisk)}
        for device in self._deployment.hardware.of_kind(DISK):
            if f"{directory}/{store_name(device)}" not in files:
                raise errors.HypervisorFault(
                    f"The guest of {self._deployment.spec.name} has written to another file than the one that was "
                    f"uploaded for {device.place}: there is {', '.join(sorted(files)) or 'none'}.",
                    "see who has changed the VM, or made snapshots of it.",
                )

    def _disk(self, device: Device, source: str) -> None:
        disk = self._deployment.disks[device.file]
        part = self._part(device.file)
        size = self._fetch(source, device.file, part)
        assert size is not None
        if not disk.extent:
            packed = self._part(f"{device.file}.packed")
            disks.pack(disk, self._scratch, part, packed, self._identity)
            self._forget(part)
            self._rename(packed, device.file)
        elif disk.transferred:
            self._rename(part, disk.extent)
        else:
            extent = f"{device.file.removesuffix('.vmdk')}-flat.vmdk"
            text = disks.descriptor(
                extent, size, config_spec.adapter(device, self._deployment.hardware), create_type="monolithicFlat"
            )
            self._rename(part, extent)
            self._identity.write_scratch(self._scratch, device.file, text)

    def _file(self, device: Device, source: str) -> None:
        part = self._part(device.file)
        if self._fetch(source, device.file, part, missing_is_fine=device.kind == hardware.SERIAL) is None:
            self._forget(part)
        else:
            self._rename(part, device.file)

    def _part(self, name: str) -> str:
        part = f".{name}.vmgahp-part"
        self._parts.append(part)
        return part

    def _fetch(self, source: str, name: str, part: str, missing_is_fine: bool = False) -> int | None:
        self._identity.unlink_scratch(self._scratch, part)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
        descriptor = self._identity.open_scratch(self._scratch, part, flags, 0o600)
        try:
            return self._store.download(source, name, descriptor, missing_is_fine)
        finally:
            os.close(descriptor)

    def _rename(self, part: str, name: str) -> None:
        self._identity.rename_scratch(self._scratch, part, name)
        self._parts.remove(part)

    def _forget(self, name: str) -> None:
        scratch.forget(self._identity, self._scratch, self._log, name)
