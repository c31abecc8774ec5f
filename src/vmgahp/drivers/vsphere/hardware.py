"""The virtual hardware of the job's ``.vmx``, and its description for the server. Pure.

Devices of the host, PCI pass-through, and settings of the desktop products are left out: they mean nothing on a server,
or a job may not have them.

A VM is made in two steps. It is created bare, with its tags, so that it can be found from its first moment, and the
server chooses and makes its directory. When the files are there, the devices that use them are added.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import NamedTuple

from pyVmomi import vim

from vmgahp import errors
from vmgahp.drivers.vsphere.inventory import Tag
from vmgahp.job.vmware import VMX_FILE, VmwareSpec, base_name
from vmgahp.job.vmx import CDROM, DISK, FLOPPY, Drive, Vmx, drives
from vmgahp.text import shown


class Bus(NamedTuple):
    """A kind of controller."""

    most: int
    units: int
    key: int
    """The key that a server gives to the first one."""
    kind: str


BUSES = {
    "scsi": Bus(4, 16, 1000, "VirtualSCSIController"),
    "sata": Bus(4, 30, 15000, "VirtualAHCIController"),
    "nvme": Bus(4, 15, 31000, "VirtualNVMEController"),
    "ide": Bus(2, 2, 200, "VirtualIDEController"),
}

WIDE_UNITS, WIDE_VERSION = 65, 14
"""The most devices of a paravirtual SCSI controller, and the first hardware version that has them."""
SCSI_ID_OF_THE_CONTROLLER = 7
MOST_FLOPPIES = 2
MOST_SERIAL_PORTS = 4
NICS = {
    "e1000": "VirtualE1000",
    "e1000e": "VirtualE1000e",
    "vlance": "VirtualPCNet32",
    "vmxnet": "VirtualVmxnet2",
    "vmxnet2": "VirtualVmxnet2",
    "vmxnet3": "VirtualVmxnet3",
}
SCSI_CONTROLLERS = {
    "lsilogic": "VirtualLsiLogicController",
    "buslogic": "VirtualBusLogicController",
    "lsisas1068": "VirtualLsiLogicSASController",
    "pvscsi": "ParaVirtualSCSIController",
}

_SERIAL = re.compile(r"serial([0-9])\.present", re.IGNORECASE | re.ASCII)
_LEFT_OUT = re.compile(r"(parallel|usb|sound|pciPassthru|ehci|hpet|vmci|sharedFolder|vtpm)[^.]*\.", re.IGNORECASE)
_ORDER = re.compile(r"[A-Za-z0-9:, ]{1,200}", re.ASCII)
_GUEST = re.compile(r"[A-Za-z0-9_-]{1,60}", re.ASCII)

SERIAL = "serial"

BOOT_OPTIONS = ("bios.bootOrder", "bios.hddOrder")
"""The options of a VM that set its boot devices, in a ``.vmx`` and on a server."""


class Device(NamedTuple):
    """One device with a file."""

    kind: str
    bus: str
    """The kind of its controller, a key of `BUSES`; the kind itself for floppies and serial ports."""
    controller: int
    unit: int
    file: str
    persistent: bool = True
    """False for a disk that is independent-nonpersistent: it discards the guest's writes."""

    @property
    def place(self) -> str:
        """The name of the device in the ``.vmx``, such as ``scsi0:0``."""
        return f"{self.bus}{self.controller}:{self.unit}" if self.bus in BUSES else f"{self.bus}{self.unit}"

    @property
    def stored_as(self) -> str:
        """The name of its file in the VM's directory, no part of which the job can choose: others are the VM's own."""
        ending = {DISK: "vmdk", CDROM: "iso", FLOPPY: "flp", SERIAL: "txt"}[self.kind]
        return f"{self.kind}-{self.place.replace(':', '-')}.{ending}"

    @property
    def extent(self) -> str:
        """The name of the file with a disk's content in the VM's directory, where `stored_as` is its descriptor."""
        return f"{self.stored_as.removesuffix('.vmdk')}-flat.vmdk"


class Hardware(NamedTuple):
    """The virtual hardware that the job's ``.vmx`` asks for."""

    devices: tuple[Device, ...]
    scsi: dict[int, str]
    nic: str
    guest: str
    version: int
    efi: bool
    secure_boot: bool
    boot: dict[str, str]
    left_out: tuple[str, ...]
    """The devices that were not taken over although they are present, for the log."""

    def of_kind(self, *kinds: str) -> list[Device]:
        return [device for device in self.devices if device.kind in kinds]


def read_hardware(vmx: Vmx, file: str) -> Hardware:
    """Read the hardware in a ``.vmx`` called `file`. Raises `errors.JobFault`."""
    scsi = {
        number: _word(vmx, f"scsi{number}.virtualDev", SCSI_CONTROLLERS, "lsilogic", file)
        for number in range(BUSES["scsi"].most)
    }
    text = vmx.get("virtualHW.version", "").strip()
    version = int(text) if text.isascii() and text.isdigit() and len(text) < 4 else 0
    wide = {number for number, model in scsi.items() if model == "pvscsi" and (version or WIDE_VERSION) >= WIDE_VERSION}
    found = drives(vmx)
    devices = [_drive(drive, vmx, wide, file) for drive in found if not drive.no_image]
    left_out = [f"{drive.place} ({drive.no_image})" for drive in found if drive.no_image]
    for name in list(vmx):
        place = name.rpartition(".")[0]
        if port := _SERIAL.fullmatch(name) if vmx.boolean(name) else None:
            unit, kind = int(port[1]), vmx.get(f"{place}.fileType", "").strip().lower()
            if kind == "file" and unit < MOST_SERIAL_PORTS:
                devices.append(Device(SERIAL, SERIAL, 0, unit, _file(vmx.get(f"{place}.fileName", ""), place, file)))
            else:
                left_out.append(place)
        elif vmx.boolean(name) and _LEFT_OUT.match(name):
            left_out.append(place)
    if vmx.get("nvram"):
        left_out.append("nvram (the server makes a new one)")
    if not any(device.kind == DISK for device in devices):
        problem = f"{VMX_FILE} = {shown(file)}: this virtual machine has no disk."
        hint = "give it a disk (scsi0:0.present, scsi0:0.fileName) in VMware, and send its .vmx."
        raise errors.JobFault(errors.NO_DISK_PARAM, problem, hint)
    names = [device.file for device in devices if device.kind != CDROM]
    if len(set(names)) != len(names):
        raise _bad(file, "two of its devices use the same file", "give every device a file of its own")
    guest, efi = vmx.get("guestOS", "").strip(), vmx.get("firmware", "").strip().lower() == "efi"
    return Hardware(
        tuple(sorted(devices, key=lambda device: (device.bus, device.controller, device.unit))),
        scsi,
        _word(vmx, "ethernet0.virtualDev", NICS, "e1000", file),
        guest if _GUEST.fullmatch(guest) else "",
        version,
        efi,
        efi and vmx.boolean("uefi.secureBoot.enabled"),
        {name: vmx[name] for name in BOOT_OPTIONS if _ORDER.fullmatch(vmx.get(name, ""))},
        tuple(dict.fromkeys(left_out)),
    )


def _drive(drive: Drive, vmx: Vmx, wide: set[int], file: str) -> Device:
    bus, is_scsi = BUSES.get(drive.bus), drive.bus == "scsi"
    most, units = (bus.most, bus.units) if bus else (1, MOST_FLOPPIES)
    units = WIDE_UNITS if is_scsi and drive.controller in wide else units
    is_taken = is_scsi and drive.unit == SCSI_ID_OF_THE_CONTROLLER
    if drive.controller >= most or drive.unit >= units or is_taken:
        raise _bad(file, f"{drive.place} is not a place for a device", "use another")
    mode = vmx.get(f"{drive.place}.mode", "").strip().lower()
    persistent = drive.kind != DISK or mode != "independent-nonpersistent"
    name = _file(drive.file, drive.place, file)
    return Device(drive.kind, drive.bus, drive.controller, drive.unit, name, persistent)


def _file(name: str, place: str, vmx_file: str) -> str:
    """Return a device's file: a plain name, since on the server all of the VM's files are in one directory."""
    plain = base_name(name.strip())
    if not plain or len(plain.encode()) > 200 or set(plain) & set('[]"%'):
        raise _bad(vmx_file, f"{place}.fileName = {shown(name)} is not a name for a file", "rename the file")
    return plain


def _word(vmx: Vmx, name: str, words: Iterable[str], default: str, file: str) -> str:
    value = vmx.get(name, "").strip().lower()
    if value and value not in words:
        raise _bad(file, f"{name} = {shown(value)} is not known", f"use one of: {', '.join(words)}")
    return value or default


def _bad(file: str, problem: str, hint: str) -> errors.JobFault:
    return errors.JobFault(errors.MISMATCHED, f"{VMX_FILE} = {shown(file)}: {problem}.", f"{hint}.")


_device = vim.vm.device

SIO_KEY = 400


def bare_spec(spec: VmwareSpec, found: Hardware, entity: str, tag: Tag, datastore: str) -> vim.vm.ConfigSpec:
    """Describe the VM without its disks, for CreateVM_Task."""
    options = {"msg.autoAnswer": "TRUE"} | found.boot  # a VM that waits for a key press would wait for ever
    config = vim.vm.ConfigSpec(
        name=entity,
        annotation=tag.annotation(),
        files=vim.vm.FileInfo(vmPathName=f"[{datastore}]"),
        memoryMB=spec.vm.memory_mib,
        numCPUs=spec.vm.vcpus,
        guestId=guest_id(found.guest),
        firmware="efi" if found.efi else "bios",
        extraConfig=[*tag.options(), *(vim.option.OptionValue(key=key, value=value) for key, value in options.items())],
        deviceChange=_added(_controllers(found)),
    )
    if cores := spec.vmx.cores_per_socket(spec.vm.vcpus):
        config.numCoresPerSocket = cores
    if found.secure_boot:
        config.bootOptions = vim.vm.BootOptions(efiSecureBootEnabled=True)
    if found.version:
        config.version = f"vmx-{found.version:02d}"
    return config


def devices_spec(
    found: Hardware,
    directory: str,
    sizes: Mapping[str, int],
    spec: VmwareSpec,
    network: vim.vm.device.VirtualDevice.BackingInfo | None,
    present: Iterable[vim.vm.device.VirtualDevice],
) -> vim.vm.ConfigSpec:
    """Describe the devices to add, with the `sizes` of the disks by their names, beside those `present`."""
    keys = {
        (name, there.busNumber): there.key
        for there in present
        for name, bus in BUSES.items()
        if isinstance(there, getattr(_device, bus.kind))
    }
    new = []
    for number, device in enumerate(found.devices):
        made = _with_file(device, f"{directory}/{device.stored_as}", sizes.get(device.file, 0))
        made.key = -100 - number
        if device.bus in BUSES:
            default = BUSES[device.bus].key + device.controller
            made.controllerKey = keys.get((device.bus, device.controller), default)
        if device.kind != SERIAL:
            made.unitNumber = device.unit
        new.append(made)
    if network is not None:
        kind = getattr(_device, NICS[found.nic])
        nic = kind(key=-4000, backing=network, addressType="generated", wakeOnLanEnabled=False)
        nic.connectable = _plugged(by_guest=False)
        if spec.vm.mac:
            nic.addressType, nic.macAddress = "manual", spec.vm.mac
        new.append(nic)
    return vim.vm.ConfigSpec(deviceChange=_added(new))


def guest_id(name: str) -> str:
    """Return vSphere's name for a guestOS of a ``.vmx``: ``ubuntu-64`` is ``ubuntu64Guest`` there."""
    return _guests().get(_plain(name), "otherGuest64")


def adapter_word(device: Device, found: Hardware) -> str:
    """Return the word for a disk's controller in its descriptor."""
    word = found.scsi[device.controller] if device.bus == "scsi" else device.bus
    return word if word in ("buslogic", "ide") else "lsilogic"


@cache
def _guests() -> dict[str, str]:
    names = [str(name) for name in vim.vm.GuestOsDescriptor.GuestOsIdentifier.values]
    return {_plain(name.removesuffix("Guest")): name for name in reversed(names)}  # the first of a name wins


def _plain(name: str) -> str:
    return "".join(character for character in name.lower() if character.isalnum())


def _added(new: list[vim.vm.device.VirtualDevice]) -> list[vim.vm.device.VirtualDeviceSpec]:
    add = _device.VirtualDeviceSpec.Operation.add
    return [_device.VirtualDeviceSpec(operation=add, device=device) for device in new]


def _controllers(found: Hardware) -> list[vim.vm.device.VirtualDevice]:
    new = []
    for name, number in sorted({(device.bus, device.controller) for device in found.devices}):
        if name in BUSES and name != "ide":
            bus = BUSES[name]
            kind = SCSI_CONTROLLERS[found.scsi[number]] if name == "scsi" else bus.kind
            new.append(getattr(_device, kind)(key=bus.key + number, busNumber=number))
        if name == "scsi":
            new[-1].sharedBus = _device.VirtualSCSIController.Sharing.noSharing
    return new


def _plugged(by_guest: bool) -> vim.vm.device.VirtualDevice.ConnectInfo:
    return _device.VirtualDevice.ConnectInfo(startConnected=True, connected=True, allowGuestControl=by_guest)


def _with_file(device: Device, path: str, size: int) -> vim.vm.device.VirtualDevice:
    if device.kind == DISK:
        mode = "persistent" if device.persistent else "independent_nonpersistent"
        backing = _device.VirtualDisk.FlatVer2BackingInfo(fileName=path, diskMode=mode, writeThrough=True)
        return _device.VirtualDisk(capacityInKB=-(-size // 1024), backing=backing)
    if device.kind == CDROM:
        backing = _device.VirtualCdrom.IsoBackingInfo(fileName=path)
        return _device.VirtualCdrom(backing=backing, connectable=_plugged(by_guest=True))
    if device.kind == FLOPPY:
        backing = _device.VirtualFloppy.ImageBackingInfo(fileName=path)
        return _device.VirtualFloppy(backing=backing, controllerKey=SIO_KEY)
    backing = _device.VirtualSerialPort.FileBackingInfo(fileName=path)
    return _device.VirtualSerialPort(backing=backing, yieldOnPoll=True)
