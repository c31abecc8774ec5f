"""What of the job's ``.vmx`` a server is asked for; the rest of it is left out.

Taken over are the disks, CD-ROM and floppy images, serial ports that are files, the kind of the NIC, the
guest's operating system, the firmware and the version of the virtual hardware. Devices of the host, PCI
pass-through, and settings of the desktop products mean nothing on a server, or are nothing that a job may have.
Pure.
"""

import re
from typing import NamedTuple

from vmgahp import errors
from vmgahp.job.vmware import VMX_FILE
from vmgahp.job.vmx import Vmx
from vmgahp.text import has_control, shown

BUSES = {"scsi": (4, 16), "sata": (4, 30), "nvme": (4, 15), "ide": (2, 2)}
"""Kinds of controllers: how many a VM can have, and how many devices each."""

SCSI_ID_OF_THE_CONTROLLER = 7
MOST_SERIAL_PORTS = 4
NICS = ("e1000", "e1000e", "vmxnet", "vmxnet2", "vmxnet3", "vlance")
SCSI_CONTROLLERS = ("lsilogic", "buslogic", "lsisas1068", "pvscsi")

_PLACE = re.compile(r"(scsi|sata|nvme|ide)([0-9]):([0-9]{1,2})\.present", re.IGNORECASE | re.ASCII)
_FLOPPY = re.compile(r"floppy([01])\.present", re.IGNORECASE | re.ASCII)
_SERIAL = re.compile(r"serial([0-9])\.present", re.IGNORECASE | re.ASCII)
_GUEST = re.compile(r"[A-Za-z0-9_-]{1,60}", re.ASCII)

DISK, CDROM, FLOPPY, SERIAL = "disk", "cdrom", "floppy", "serial"


class Device(NamedTuple):
    """One device with a file."""

    kind: str
    bus: str
    """A key of `BUSES`; the kind itself for floppies and serial ports."""
    controller: int
    unit: int
    file: str
    """Its name in the ``.vmx``."""
    persistent: bool = True
    """Whether what the guest writes stays; false for a disk that is independent-nonpersistent."""

    @property
    def place(self) -> str:
        """As the ``.vmx`` calls it, such as ``scsi0:0``."""
        return f"{self.bus}{self.controller}:{self.unit}" if self.bus in BUSES else f"{self.bus}{self.unit}"


class Hardware(NamedTuple):
    """The virtual hardware that the job's ``.vmx`` asks for."""

    devices: tuple[Device, ...]
    scsi: dict[int, str]
    """Controller number to its model, a word of `SCSI_CONTROLLERS`."""
    nic: str
    """A word of `NICS`."""
    guest: str
    """guestOS, empty where there is none."""
    version: int
    """virtualHW.version, 0 where there is none."""
    efi: bool
    left_out: tuple[str, ...]
    """What was not taken over although it is present, for the log."""

    def of_kind(self, kind: str) -> list[Device]:
        """The devices of one kind."""
        return [device for device in self.devices if device.kind == kind]


def read(vmx: Vmx, file: str) -> Hardware:
    """The hardware in a ``.vmx`` called `file`. Raises `errors.JobFault`."""
    devices: dict[tuple[str, int, int], Device] = {}
    left_out: list[str] = []
    for name in list(vmx):
        if not vmx.boolean(name):
            continue
        if found := _PLACE.fullmatch(name):
            device = _drive(vmx, found, file, left_out)
        elif found := _FLOPPY.fullmatch(name):
            device = _image(vmx, f"floppy{found[1]}", FLOPPY, int(found[1]), file, left_out)
        elif found := _SERIAL.fullmatch(name):
            device = _image(vmx, f"serial{found[1]}", SERIAL, int(found[1]), file, left_out)
        else:
            if re.match(r"(parallel|usb|sound|pciPassthru|ehci|hpet|vmci|sharedFolder)", name, re.IGNORECASE):
                left_out.append(name.rpartition(".")[0])
            continue
        if device is not None:
            devices[device.bus, device.controller, device.unit] = device
    found_disks = [device for device in devices.values() if device.kind == DISK]
    if not found_disks:
        raise errors.JobFault(
            errors.NO_DISK_PARAM,
            f"{VMX_FILE} = {shown(file)}: this virtual machine has no disk.",
            "give it a disk (scsi0:0.present, scsi0:0.fileName) in VMware, and send its .vmx.",
        )
    names = [device.file for device in devices.values() if device.kind != CDROM]
    if len(set(names)) != len(names):
        raise _bad(file, "two of its devices use the same file", "give every device a file of its own")
    version = vmx.get("virtualHW.version", "").strip()
    return Hardware(
        tuple(sorted(devices.values(), key=lambda device: (device.bus, device.controller, device.unit))),
        _scsi(vmx, file),
        _word(vmx, "ethernet0.virtualDev", NICS, "e1000", file),
        guest if _GUEST.fullmatch(guest := vmx.get("guestOS", "").strip()) else "",
        int(version) if version.isascii() and version.isdigit() and len(version) < 4 else 0,
        vmx.get("firmware", "").strip().lower() == "efi",
        tuple(dict.fromkeys(left_out)),
    )


def _drive(vmx: Vmx, found: re.Match[str], file: str, left_out: list[str]) -> Device | None:
    bus, controller, unit = found[1].lower(), int(found[2]), int(found[3])
    place = f"{bus}{controller}:{unit}"
    controllers, units = BUSES[bus]
    if controller >= controllers or unit >= units or (bus == "scsi" and unit == SCSI_ID_OF_THE_CONTROLLER):
        raise _bad(file, f"{place} is not a place for a device", "use another")
    kind = vmx.get(f"{place}.deviceType", "").strip().lower()
    name = vmx.get(f"{place}.fileName", "").strip()
    if kind == "cdrom-image" or (not kind and name.lower().endswith(".iso")):
        return Device(CDROM, bus, controller, unit, _file(name, place, file))
    if kind and kind not in ("disk", f"{bus}-harddisk", "scsi-harddisk", "ata-harddisk"):
        left_out.append(place)
        return None
    mode = vmx.get(f"{place}.mode", "").strip().lower()
    return Device(DISK, bus, controller, unit, _file(name, place, file), mode != "independent-nonpersistent")


def _image(vmx: Vmx, place: str, kind: str, unit: int, file: str, left_out: list[str]) -> Device | None:
    if vmx.get(f"{place}.fileType", "").strip().lower() != "file" or (kind == SERIAL and unit >= MOST_SERIAL_PORTS):
        left_out.append(place)
        return None
    return Device(kind, kind, 0, unit, _file(vmx.get(f"{place}.fileName", "").strip(), place, file))


def _file(name: str, place: str, vmx_file: str) -> str:
    """A device's file: a plain name, for on the server all of the VM's files are in one directory."""
    name = name.replace("\\", "/").rpartition("/")[2]
    if name in ("", ".", "..") or has_control(name) or len(name.encode()) > 200 or re.search(r'[\[\]"%]', name):
        raise _bad(vmx_file, f"{place}.fileName = {shown(name)} is not a name for a file", "rename the file")
    return name


def _scsi(vmx: Vmx, file: str) -> dict[int, str]:
    return {
        number: _word(vmx, f"scsi{number}.virtualDev", SCSI_CONTROLLERS, "lsilogic", file)
        for number in range(BUSES["scsi"][0])
    }


def _word(vmx: Vmx, name: str, words: tuple[str, ...], default: str, file: str) -> str:
    value = vmx.get(name, "").strip().lower()
    if value and value not in words:
        raise _bad(file, f"{name} = {shown(value)} is not known", f"use one of: {', '.join(words)}")
    return value or default


def _bad(file: str, problem: str, hint: str) -> errors.JobFault:
    return errors.JobFault(errors.MISMATCHED, f"{VMX_FILE} = {shown(file)}: {problem}.", f"{hint}.")
