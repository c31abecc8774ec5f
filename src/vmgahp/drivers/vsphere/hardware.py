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
from vmgahp.job.vmx_drives import CDROM, DISK, FLOPPY, Drive, drives
from vmgahp.text import has_control, shown

BUSES = {"scsi": (4, 16), "sata": (4, 30), "nvme": (4, 15), "ide": (2, 2)}
"""Kinds of controllers: how many a VM can have, and how many devices each."""

WIDE_UNITS, WIDE_VERSION = 65, 14
"""Of a paravirtual SCSI controller, and the version of the virtual hardware since which it has them."""
SCSI_ID_OF_THE_CONTROLLER = 7
MOST_FLOPPIES = 2
MOST_SERIAL_PORTS = 4
NICS = ("e1000", "e1000e", "vmxnet", "vmxnet2", "vmxnet3", "vlance")
SCSI_CONTROLLERS = ("lsilogic", "buslogic", "lsisas1068", "pvscsi")

_SERIAL = re.compile(r"serial([0-9])\.present", re.IGNORECASE | re.ASCII)
_ORDER = re.compile(r"[A-Za-z0-9:, ]{1,200}", re.ASCII)
_GUEST = re.compile(r"[A-Za-z0-9_-]{1,60}", re.ASCII)

SERIAL = "serial"

BOOT_OPTIONS = ("bios.bootOrder", "bios.hddOrder")
"""Options of a VM that say what it boots from, in a ``.vmx`` and on a server."""


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
    secure_boot: bool
    boot: tuple[tuple[str, str], ...]
    """What it says of the order of its boot devices, by the names of `BOOT_OPTIONS`."""
    left_out: tuple[str, ...]
    """What was not taken over although it is present, for the log."""

    def of_kind(self, kind: str) -> list[Device]:
        """The devices of one kind."""
        return [device for device in self.devices if device.kind == kind]


def read(vmx: Vmx, file: str) -> Hardware:
    """The hardware in a ``.vmx`` called `file`. Raises `errors.JobFault`."""
    scsi = _scsi(vmx, file)
    text = vmx.get("virtualHW.version", "").strip()
    version = int(text) if text.isascii() and text.isdigit() and len(text) < 4 else 0
    wide = {number for number, model in scsi.items() if model == "pvscsi" and (version or WIDE_VERSION) >= WIDE_VERSION}
    devices: list[Device] = []
    left_out: list[str] = []
    for drive in drives(vmx):
        if drive.no_image:
            left_out.append(f"{drive.place} ({drive.no_image})")
        else:
            devices.append(_drive(drive, vmx, wide, file))
    for name in list(vmx):
        if not vmx.boolean(name):
            continue
        if found := _SERIAL.fullmatch(name):
            _serial(vmx, int(found[1]), file, devices, left_out)
        elif re.match(r"(parallel|usb|sound|pciPassthru|ehci|hpet|vmci|sharedFolder|vtpm)", name, re.IGNORECASE):
            left_out.append(name.rpartition(".")[0])
    efi = vmx.get("firmware", "").strip().lower() == "efi"
    if vmx.get("nvram"):
        left_out.append("nvram (the server makes a new one)")
    found_disks = [device for device in devices if device.kind == DISK]
    if not found_disks:
        raise errors.JobFault(
            errors.NO_DISK_PARAM,
            f"{VMX_FILE} = {shown(file)}: this virtual machine has no disk.",
            "give it a disk (scsi0:0.present, scsi0:0.fileName) in VMware, and send its .vmx.",
        )
    names = [device.file for device in devices if device.kind != CDROM]
    if len(set(names)) != len(names):
        raise _bad(file, "two of its devices use the same file", "give every device a file of its own")
    return Hardware(
        tuple(sorted(devices, key=lambda device: (device.bus, device.controller, device.unit))),
        scsi,
        _word(vmx, "ethernet0.virtualDev", NICS, "e1000", file),
        guest if _GUEST.fullmatch(guest := vmx.get("guestOS", "").strip()) else "",
        version,
        efi,
        efi and vmx.boolean("uefi.secureBoot.enabled"),
        tuple((name, value) for name in BOOT_OPTIONS if _ORDER.fullmatch(value := vmx.get(name, ""))),
        tuple(dict.fromkeys(left_out)),
    )


def _drive(drive: Drive, vmx: Vmx, wide: set[int], file: str) -> Device:
    kind, bus, place = drive.kind, drive.bus, drive.place
    if bus == FLOPPY:
        controllers, units = 1, MOST_FLOPPIES
    else:
        controllers, units = BUSES[bus]
        if bus == "scsi" and drive.controller in wide:
            units = WIDE_UNITS
    if (
        drive.controller >= controllers
        or drive.unit >= units
        or (bus == "scsi" and drive.unit == SCSI_ID_OF_THE_CONTROLLER)
    ):
        raise _bad(file, f"{place} is not a place for a device", "use another")
    mode = vmx.get(f"{place}.mode", "").strip().lower()
    persistent = kind != DISK or mode != "independent-nonpersistent"
    return Device(kind, bus, drive.controller, drive.unit, _file(drive.file, place, file), persistent)


def _serial(vmx: Vmx, unit: int, file: str, devices: list[Device], left_out: list[str]) -> None:
    place = f"serial{unit}"
    if vmx.get(f"{place}.fileType", "").strip().lower() != "file" or unit >= MOST_SERIAL_PORTS:
        left_out.append(place)
    else:
        name = _file(vmx.get(f"{place}.fileName", "").strip(), place, file)
        devices.append(Device(SERIAL, SERIAL, 0, unit, name))


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
