"""The description of a VM for the server: `vmgahp.drivers.vsphere.hardware` as a ConfigSpec.

A VM is made in two steps. It is created bare, with its tags, so that it can be found from its first moment; the
server thereby chooses and makes its directory. When the files are there, the devices that use them are added.
"""

from collections.abc import Iterable, Mapping
from functools import cache

from pyVmomi import vim

from vmgahp.drivers.vsphere.annotations import Tag
from vmgahp.drivers.vsphere.hardware import BUSES, NICS, SCSI_CONTROLLERS, SERIAL, Device, Hardware
from vmgahp.job.vmware import VmwareSpec
from vmgahp.job.vmx_drives import CDROM, DISK, FLOPPY

_device = vim.vm.device

SIO_KEY = 400
OTHER_GUEST = "otherGuest64"


def bare(spec: VmwareSpec, found: Hardware, entity: str, tag: Tag, datastore: str) -> "vim.vm.ConfigSpec":
    """Describe the VM without its disks, for CreateVM_Task."""
    # A VM that waits for a key press would wait for ever.
    options = {"msg.autoAnswer": "TRUE"} | found.boot
    config = vim.vm.ConfigSpec(
        name=entity,
        annotation=tag.annotation(),
        files=vim.vm.FileInfo(vmPathName=f"[{datastore}]"),
        memoryMB=spec.memory_mib,
        numCPUs=spec.vcpus,
        guestId=guest_id(found.guest),
        firmware="efi" if found.efi else "bios",
        extraConfig=[*tag.options(), *(vim.option.OptionValue(key=key, value=value) for key, value in options.items())],
        deviceChange=_added(_controllers(found)),
    )
    if cores := spec.vmx.cores_per_socket(spec.vcpus):
        config.numCoresPerSocket = cores
    if found.secure_boot:
        config.bootOptions = vim.vm.BootOptions(efiSecureBootEnabled=True)
    if found.version:
        config.version = f"vmx-{found.version:02d}"
    return config


def devices(
    found: Hardware,
    directory: str,
    sizes: Mapping[str, int],
    spec: VmwareSpec,
    network: "vim.vm.device.VirtualDevice.BackingInfo | None",
    present: "Iterable[vim.vm.device.VirtualDevice]",
) -> "vim.vm.ConfigSpec":
    """Describe the devices that are added when the files are there, for ReconfigVM_Task.

    The files are in `directory` (``[datastore] name``), `sizes` are the bytes of the disks by their names in the
    ``.vmx``, `present` are the devices that the VM has, its controllers among them.
    """
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
        nic.connectable = _device.VirtualDevice.ConnectInfo(
            startConnected=True, connected=True, allowGuestControl=False
        )
        if spec.mac:
            nic.addressType, nic.macAddress = "manual", spec.mac
        new.append(nic)
    return vim.vm.ConfigSpec(deviceChange=_added(new))


def guest_id(name: str) -> str:
    """Return vSphere's name for a guestOS of a ``.vmx``: ``ubuntu-64`` is ``ubuntu64Guest`` there."""
    return _guests().get(_plain(name), OTHER_GUEST)


def adapter(device: Device, found: Hardware) -> str:
    """Return the word for a disk's controller in its descriptor."""
    if device.bus == "scsi":
        return "buslogic" if found.scsi[device.controller] == "buslogic" else "lsilogic"
    return "ide" if device.bus == "ide" else "lsilogic"


@cache
def _guests() -> dict[str, str]:
    names = [str(name) for name in vim.vm.GuestOsDescriptor.GuestOsIdentifier.values]
    return {_plain(name.removesuffix("Guest")): name for name in reversed(names)}  # the first of a name wins


def _plain(name: str) -> str:
    return "".join(character for character in name.lower() if character.isalnum())


def _added(new: "list[vim.vm.device.VirtualDevice]") -> "list[vim.vm.device.VirtualDeviceSpec]":
    add = _device.VirtualDeviceSpec.Operation.add
    return [_device.VirtualDeviceSpec(operation=add, device=device) for device in new]


def _controllers(found: Hardware) -> "list[vim.vm.device.VirtualDevice]":
    """Describe the controllers of the devices, but for those of IDE, which are in every VM."""
    new = []
    for name, number in sorted({(device.bus, device.controller) for device in found.devices}):
        if name in BUSES and name != "ide":
            bus = BUSES[name]
            kind = SCSI_CONTROLLERS[found.scsi[number]] if name == "scsi" else bus.kind
            new.append(getattr(_device, kind)(key=bus.key + number, busNumber=number))
        if name == "scsi":
            new[-1].sharedBus = _device.VirtualSCSIController.Sharing.noSharing
    return new


def _with_file(device: Device, path: str, size: int) -> "vim.vm.device.VirtualDevice":
    """Describe a device whose file is at this path of the datastore; its place on a controller is set later."""
    if device.kind == DISK:
        mode = "persistent" if device.persistent else "independent_nonpersistent"
        backing = _device.VirtualDisk.FlatVer2BackingInfo(fileName=path, diskMode=mode, writeThrough=True)
        return _device.VirtualDisk(capacityInKB=-(-size // 1024), backing=backing)
    if device.kind == CDROM:
        backing = _device.VirtualCdrom.IsoBackingInfo(fileName=path)
        plugged = _device.VirtualDevice.ConnectInfo(startConnected=True, connected=True, allowGuestControl=True)
        return _device.VirtualCdrom(backing=backing, connectable=plugged)
    if device.kind == FLOPPY:
        backing = _device.VirtualFloppy.ImageBackingInfo(fileName=path)
        return _device.VirtualFloppy(backing=backing, controllerKey=SIO_KEY)
    backing = _device.VirtualSerialPort.FileBackingInfo(fileName=path)
    return _device.VirtualSerialPort(backing=backing, yieldOnPoll=True)
