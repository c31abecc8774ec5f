"""The ``.vmx`` that is run: made of those settings of the job's that a job may choose.

The list of what is taken is that of HTCondor's own VMware support, with the controllers and the firmware
that virtual machines have today. Left out are above all the devices of this machine: its CD-ROM and floppy
drives, serial and parallel ports, USB, disks and shared folders.
"""

import os
import re
from typing import NamedTuple

from vmgahp import errors
from vmgahp.config import Settings
from vmgahp.drivers.vmrun import vmdk
from vmgahp.drivers.vmrun.vmdk import VmdkLayer
from vmgahp.errors import JobFault, MachineFault
from vmgahp.host.job_user import Identity
from vmgahp.job.vmware import VMX_FILE, WORKING_COPY_SUFFIX, VmwareSpec
from vmgahp.job.vmx import LARGEST, Vmx, VmxError
from vmgahp.job.vmx_drives import CDROM, DISK, Drive, drives
from vmgahp.text import has_control, shown

UUID = "vmgahp.uuid"
"""Ours, to tell this VM from the next one in the same directory; VMware keeps what it does not know."""

MEMORY_STEP = 4
"""MiB: VMware takes multiples of it only."""

_PLAIN = re.compile(
    r"config\.[a-z0-9.]+|virtualhw\.[a-z0-9.]+|guestos|firmware|uefi\.secureboot\.enabled|bios\.(?:boot|hdd)order|ethernet0\.virtualdev"
    r"|pcibridge\d+\.(?:present|virtualdev|functions|pcislotnumber)"
    r"|(?:scsi|ide|sata|nvme)\d+\.(?:present|virtualdev|pcislotnumber)",
    re.IGNORECASE,
)
"""What is taken over as it is."""

_PORT = re.compile(r"((?:serial|parallel)[0-9]+)\.present", re.IGNORECASE)
_MOST_DEVICES = 500
GENERATED = re.compile(
    r"uuid\.(?:bios|location)|ethernet0\.generatedaddress(?:offset)?|[a-z0-9]+(?::\d+)?\.pcislotnumber"
    r"|vmotion\.checkpoint[a-z]+|monitor\.phys_bits_used|vmci0\.(?:id|present)|cleanshutdown|softpoweroff",
    re.IGNORECASE,
)
"""What VMware adds to a ``.vmx`` and a suspended VM wants to find again."""


class WorkingCopy(NamedTuple):
    """The ``.vmx`` to be run."""

    name: str
    """Its file name, in the scratch directory."""
    vmx: Vmx
    disks: dict[str, tuple[VmdkLayer, ...]]
    """The disks by their devices, such as ``scsi0:0``, each with its parents."""
    nvram: str = ""
    """The job's own file with what its firmware keeps; empty where VMware makes one."""
    left_out: tuple[str, ...] = ()
    """Drives and files that are not taken over, for the log."""

    def encode(self) -> bytes:
        """The content of the file."""
        return self.vmx.encode()

    def correct_parents(self, directory: str, identity: Identity) -> None:
        """Have the disks name their parents without the path of another machine's. Raises `JobFault`."""
        for device, layers in self.disks.items():
            vmdk.correct(identity, directory, layers, f"{self.name}, {device}.fileName")


def name_for(vmx_file: str) -> str:
    """The working copy's name, by which a checkpoint is found again too."""
    return vmx_file[: -len(".vmx")] + WORKING_COPY_SUFFIX


def build(
    source: Vmx, spec: VmwareSpec, directory: str, uuid: str, settings: Settings, identity: Identity
) -> WorkingCopy:
    """The working copy of the job's ``.vmx`` (`source`), for the scratch directory `directory`, without links.

    Nothing is written. Raises `JobFault` for what the job's owner must change, `MachineFault` for
    VMWARE_LOCAL_SETTINGS_FILE.
    """
    vmx = Vmx()
    for name, value in source.items():
        if _PLAIN.fullmatch(name):
            vmx[name] = value
    disks: dict[str, tuple[VmdkLayer, ...]] = {}
    places = _Places(spec, directory, identity)
    found = drives(source)
    ports = [match[1] for name in source if source.boolean(name) and (match := _PORT.fullmatch(name))]
    if len(found) + len(ports) > _MOST_DEVICES:
        raise JobFault(
            errors.BAD_IMAGE,
            f"{VMX_FILE} = {shown(spec.vmx_file)}: it has {len(found) + len(ports)} drives and ports, and VMware takes "
            f"some {_MOST_DEVICES} at most.",
            "open the virtual machine in VMware, and send the .vmx that it writes.",
        )
    left_out = [f"{drive.place} ({drive.no_image})" for drive in found if drive.no_image]
    for drive in found:
        if drive.no_image:
            continue
        if drive.kind == DISK:
            disks[drive.place] = _disk(source, drive, vmx, spec, places)
        else:
            kind = ("deviceType", "cdrom-image") if drive.kind == CDROM else ("fileType", "file")
            vmx[f"{drive.place}.{kind[0]}"] = kind[1]
            vmx[f"{drive.place}.fileName"] = places.image(drive)
        vmx[f"{drive.place}.present"] = "TRUE"
    for port in ports:
        _port(source, port, vmx)
    nvram = _nvram(source, vmx, places, left_out)
    if not disks:
        raise JobFault(
            errors.NO_DISK_PARAM,
            f"{VMX_FILE} = {shown(spec.vmx_file)}: the virtual machine has no disk that can be used here.",
            "give it a disk that is a .vmdk file.",
        )
    _machine(source, vmx, spec, uuid)
    _network(vmx, spec, settings)
    _add_local_settings(vmx, settings)
    return WorkingCopy(name_for(spec.vmx_file), vmx, disks, nvram, tuple(left_out))


class _Places(NamedTuple):
    """Where the files are that the job's ``.vmx`` names."""

    spec: VmwareSpec
    directory: str
    identity: Identity

    def in_scratch(self, value: str) -> str:
        """The name in the scratch directory for a name in the job's ``.vmx``; empty for what can be none."""
        name = value.replace("\\", "/").rpartition("/")[2]
        return "" if name in (".", "..") or has_control(name) else name

    def elsewhere(self, value: str) -> str:
        """The full path of what is not transferred."""
        path = value if value.startswith("/") else os.path.join(self.spec.dir, value.replace("\\", "/"))
        return "" if has_control(path) or not path.startswith("/") else path

    def image(self, drive: Drive) -> str:
        """The image of a CD-ROM or floppy: in the scratch directory, or a full path. Raises `JobFault`."""
        value = drive.file
        name = self.in_scratch(value)
        reason = "it is not a file name"
        if name and self.spec.transfer:
            try:
                os.close(self.identity.open_scratch(self.directory, name, os.O_RDONLY))
                return name
            except OSError as error:
                reason = f"{error.strerror}, in the scratch directory"
        path = self.elsewhere(value)
        if path and (not self.spec.transfer or value.startswith("/")):
            problem = self.identity.check_access(path, write=False)
            if problem is None:
                return os.path.realpath(path)
            reason = problem
        raise JobFault(
            errors.INVALID_DISK_PARAM,
            f"{_line(self.spec, drive.place)} = {shown(value)}: the image cannot be used: {reason}.",
            "send the image with the job, or take the drive out of the virtual machine.",
        )


def _disk(source: Vmx, drive: Drive, vmx: Vmx, spec: VmwareSpec, places: _Places) -> tuple[VmdkLayer, ...]:
    value, device = drive.file, drive.place
    where = _line(spec, device)
    layers: list[VmdkLayer] = []
    if spec.transfer:
        name = places.in_scratch(value)
        if name:
            layers = vmdk.in_scratch(places.identity, places.directory, name, where)
    else:
        path = places.elsewhere(value)
        if path:
            layers = vmdk.elsewhere(places.identity, path, where)
    if not layers:
        raise JobFault(
            errors.INVALID_DISK_PARAM,
            f"{where} = {shown(value)} is not the name of a disk.",
            "give the virtual machine disks that are .vmdk files.",
        )
    vmx[f"{device}.fileName"] = layers[0].path
    kind = source.get(f"{device}.deviceType", "")
    if kind:
        vmx[f"{device}.deviceType"] = kind
    mode = source.get(f"{device}.mode", "").lower()
    # No snapshot takes an independent disk along: the guest would write to the shared one.
    if mode in ("persistent", "independent-persistent", "independent-nonpersistent"):
        vmx[f"{device}.mode"] = mode if spec.transfer else "persistent"
    # What the guest believes to be written is in the file, should the machine or the job be stopped.
    vmx[f"{device}.writeThrough"] = "TRUE"
    return tuple(layers)


def _port(source: Vmx, device: str, vmx: Vmx) -> None:
    """A serial or parallel port whose output goes to a file, which is made in the scratch directory."""
    name = source.get(f"{device}.fileName", "").replace("\\", "/").rpartition("/")[2]
    if source.get(f"{device}.fileType", "").lower() != "file" or not name or has_control(name):
        return
    # A name that VMware itself gives a meaning to is not a port's to write.
    if name in (".", "..") or name.lower().endswith((".vmx", ".vmdk", ".vmss", ".vmem", ".vmsd", ".nvram")):
        return
    vmx[f"{device}.fileType"] = "file"
    vmx[f"{device}.fileName"] = name
    vmx[f"{device}.present"] = "TRUE"


def _nvram(source: Vmx, vmx: Vmx, places: _Places, left_out: list[str]) -> str:
    """The job's file with what its firmware keeps (boot entries, keys), where it was transferred; empty for none."""
    value = source.get("nvram", "")
    if not value:
        return ""
    name = places.in_scratch(value)
    # What begins as the working copy does is VMware's, and goes when a guest begins anew.
    own = name_for(places.spec.vmx_file).removesuffix(".vmx").lower()
    reason = "the name is VMware's own" if name.lower().startswith(own) else "it is no .nvram file"
    if name.lower().endswith(".nvram") and not name.lower().startswith(own):
        try:
            os.close(places.identity.open_scratch(places.directory, name, os.O_RDWR))
            vmx["nvram"] = name
            return name
        except OSError as error:
            reason = f"{error.strerror}, in the scratch directory"
    left_out.append(f"nvram = {shown(value)} ({reason}): VMware makes a new one")
    return ""


def _machine(source: Vmx, vmx: Vmx, spec: VmwareSpec, uuid: str) -> None:
    """What this daemon decides."""
    vmx["memsize"] = str(spec.memory_mib // MEMORY_STEP * MEMORY_STEP)
    vmx["numvcpus"] = str(spec.vcpus)
    if cores := source.cores_per_socket(spec.vcpus):
        vmx["cpuid.coresPerSocket"] = str(cores)
    vmx["displayName"] = spec.name
    vmx["uuid.action"] = "keep"
    vmx["disk.locking"] = "FALSE"
    vmx["msg.autoAnswer"] = "TRUE"
    vmx["workingDir"] = "."
    # A snapshot's disks beside the working copy, also where the disk itself is elsewhere.
    vmx["snapshot.redoNotWithParent"] = "TRUE"
    vmx[UUID] = uuid


def _network(vmx: Vmx, spec: VmwareSpec, settings: Settings) -> None:
    if not spec.networking:
        vmx.pop("ethernet0.virtualDev", None)
        vmx["ethernet0.present"] = "FALSE"
        return
    vmx["ethernet0.present"] = "TRUE"
    vmx["ethernet0.startConnected"] = "TRUE"
    vmx["ethernet0.connectionType"] = connection_type(spec.networking_type, settings)
    if spec.mac:
        vmx["ethernet0.addressType"] = "static"
        vmx["ethernet0.address"] = spec.mac
    else:
        vmx["ethernet0.addressType"] = "generated"


def connection_type(kind: str, settings: Settings) -> str:
    """VMware's word for a kind of network: the settings', else ``nat`` or ``bridged``."""
    setting = "VMWARE_BRIDGE_NETWORKING_TYPE" if kind == "bridge" else "VMWARE_NAT_NETWORKING_TYPE"
    own = settings.string(setting) or settings.string("VMWARE_NETWORKING_TYPE")
    return own or ("bridged" if kind == "bridge" else "nat")


def _add_local_settings(vmx: Vmx, settings: Settings) -> None:
    """The lines of the administrator's VMWARE_LOCAL_SETTINGS_FILE, which win. Raises `MachineFault`."""
    path = settings.string("VMWARE_LOCAL_SETTINGS_FILE")
    if not path:
        return
    try:
        with open(path, "rb") as file:
            local = Vmx.decode(file.read(LARGEST + 1))
    except (OSError, VmxError) as error:
        raise MachineFault(
            f"VMWARE_LOCAL_SETTINGS_FILE = {path} cannot be used: {error}.",
            'write lines of the form name = "value" into it, or remove the setting.',
        ) from error
    vmx.update(local)


def _line(spec: VmwareSpec, device: str) -> str:
    return f"{VMX_FILE} = {shown(spec.vmx_file)}, {device}.fileName"


def restored(
    fresh: WorkingCopy, saved: Vmx, state: str, spec: VmwareSpec, directory: str, identity: Identity
) -> WorkingCopy:
    """The working copy for a restart from a checkpoint, whose memory is in the file `state`.

    `saved` is the working copy that came with the checkpoint, which is the job's to change: of it only what
    VMware generates is taken over, and the names of the snapshot's disks, which are looked at as the job's
    own are. Raises `JobFault`.
    """
    vmx = Vmx(dict(fresh.vmx))
    for name, value in saved.items():
        if GENERATED.fullmatch(name):
            vmx[name] = value
    places = _Places(spec, directory, identity)
    disks: dict[str, tuple[VmdkLayer, ...]] = {}
    for device, layers in fresh.disks.items():
        value = saved.get(f"{device}.fileName", "")
        if value == layers[0].path:
            disks[device] = layers
            continue
        where = f"{fresh.name}, {device}.fileName"
        name = value.replace("\\", "/").rpartition("/")[2]
        found = (
            vmdk.in_scratch(identity, directory, name, where, shared=not spec.transfer)
            if name and not has_control(name)
            else []
        )
        if not found:
            raise JobFault(
                errors.MISMATCHED_CHECKPOINT,
                f"{where} = {shown(value)} is not the name of a disk.",
                "submit the job anew.",
            )
        vmx[f"{device}.fileName"] = found[0].path
        disks[device] = tuple(found)
    vmx["checkpoint.vmState"] = state
    nvram = fresh.nvram
    if nvram and places.in_scratch(saved.get("nvram", "")) != nvram:
        nvram = ""  # the VM that was saved had one of VMware's own
        del vmx["nvram"]
    return fresh._replace(vmx=vmx, disks=disks, nvram=nvram)
