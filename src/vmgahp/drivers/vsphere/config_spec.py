"""What the server is told of a VM: `vmgahp.drivers.vsphere.hardware` as a ConfigSpec.

A VM is made in two steps. It is created bare, with its tags, so that it can be found from its first moment;
the server thereby chooses and makes its directory. When the files are there, the devices that use them are
added.
"""

from collections.abc import Mapping

from pyVmomi import vim

from vmgahp.drivers.vsphere import hardware
from vmgahp.drivers.vsphere.annotations import Tag
from vmgahp.drivers.vsphere.hardware import SERIAL, Device, Hardware
from vmgahp.job.vmware import VmwareSpec
from vmgahp.job.vmx_drives import CDROM, DISK, FLOPPY

_device = vim.vm.device

SCSI_KEY, SATA_KEY, NVME_KEY, IDE_KEY = 1000, 15000, 31000, 200
"""Keys that a server gives to its controllers of each kind. Those of IDE are there in every VM."""
SIO_KEY = 400

_SCSI = {
    "lsilogic": _device.VirtualLsiLogicController,
    "buslogic": _device.VirtualBusLogicController,
    "lsisas1068": _device.VirtualLsiLogicSASController,
    "pvscsi": _device.ParaVirtualSCSIController,
}
_NICS = {
    "e1000": _device.VirtualE1000,
    "e1000e": _device.VirtualE1000e,
    "vlance": _device.VirtualPCNet32,
    "vmxnet": _device.VirtualVmxnet2,
    "vmxnet2": _device.VirtualVmxnet2,
    "vmxnet3": _device.VirtualVmxnet3,
}

OTHER_GUEST = "otherGuest64"


def bare(spec: VmwareSpec, found: Hardware, entity: str, tag: Tag, datastore: str) -> "vim.vm.ConfigSpec":
    """The VM without its disks, for CreateVM_Task."""
    options = {"msg.autoAnswer": "TRUE"} | dict(found.boot)
    config = vim.vm.ConfigSpec(
        name=entity,
        annotation=tag.annotation(),
        files=vim.vm.FileInfo(vmPathName=f"[{datastore}]"),
        memoryMB=spec.memory_mib,
        numCPUs=spec.vcpus,
        guestId=guest_id(found.guest),
        firmware="efi" if found.efi else "bios",
        # A VM that waits for somebody to press a button would wait for ever.
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
    files: Mapping[str, str],
    sizes: Mapping[str, int],
    spec: VmwareSpec,
    network: "vim.vm.device.VirtualDevice.BackingInfo | None",
    keys: Mapping[tuple[str, int], int],
) -> "vim.vm.ConfigSpec":
    """What is added when the files are there, for ReconfigVM_Task.

    `files` are the paths on the datastore by the names in the ``.vmx``, `sizes` the bytes of the disks,
    `keys` those of the controllers that the VM has, by kind and number.
    """
    new = [
        _drive(device, files[device.file], sizes, keys, number)
        for number, device in enumerate(found.of_kind(DISK) + found.of_kind(CDROM))
    ]
    for device in found.of_kind(FLOPPY):
        backing = _device.VirtualFloppy.ImageBackingInfo(fileName=files[device.file])
        new.append(
            _device.VirtualFloppy(
                key=-400 - device.unit, controllerKey=SIO_KEY, unitNumber=device.unit, backing=backing
            )
        )
    for device in found.of_kind(SERIAL):
        backing = _device.VirtualSerialPort.FileBackingInfo(fileName=files[device.file])
        new.append(_device.VirtualSerialPort(key=-500 - device.unit, backing=backing, yieldOnPoll=True))
    if network is not None:
        new.append(_nic(found, spec, network))
    return vim.vm.ConfigSpec(deviceChange=_added(new))


def controllers_of(present: object) -> dict[tuple[str, int], int]:
    """The keys of a VM's controllers, by kind and number, from its config.hardware.device."""
    answer = {}
    for device in present or ():  # type: ignore[attr-defined]
        for kind, bus in (
            (_device.VirtualSCSIController, "scsi"),
            (_device.VirtualIDEController, "ide"),
            (_device.VirtualAHCIController, "sata"),
            (_device.VirtualNVMEController, "nvme"),
        ):
            if isinstance(device, kind):
                answer[bus, device.busNumber] = device.key
    return answer


def guest_id(name: str) -> str:
    """vSphere's name for a guestOS of a ``.vmx``: ``ubuntu-64`` is ``ubuntu64Guest`` there."""
    return _guests().get(_plain(name), OTHER_GUEST)


def adapter(device: Device, found: Hardware) -> str:
    """What a disk's descriptor says of its controller."""
    if device.bus == "scsi":
        return "buslogic" if found.scsi[device.controller] == "buslogic" else "lsilogic"
    return "ide" if device.bus == "ide" else "lsilogic"


_guest_names: dict[str, str] = {}


def _guests() -> dict[str, str]:
    if not _guest_names:
        for name in vim.vm.GuestOsDescriptor.GuestOsIdentifier.values:
            _guest_names.setdefault(_plain(str(name).removesuffix("Guest")), str(name))
    return _guest_names


def _plain(name: str) -> str:
    return "".join(character for character in name.lower() if character.isalnum())


def _added(new: "list[vim.vm.device.VirtualDevice]") -> "list[vim.vm.device.VirtualDeviceSpec]":
    add = _device.VirtualDeviceSpec.Operation.add
    return [_device.VirtualDeviceSpec(operation=add, device=device) for device in new]


def _controllers(found: Hardware) -> "list[vim.vm.device.VirtualDevice]":
    used = sorted({(device.bus, device.controller) for device in found.devices if device.bus in hardware.BUSES})
    new = []
    for bus, number in used:
        if bus == "scsi":
            shared = _device.VirtualSCSIController.Sharing.noSharing
            kind = _SCSI[found.scsi[number]]
            new.append(kind(key=SCSI_KEY + number, busNumber=number, sharedBus=shared))
        elif bus == "sata":
            new.append(_device.VirtualAHCIController(key=SATA_KEY + number, busNumber=number))
        elif bus == "nvme":
            new.append(_device.VirtualNVMEController(key=NVME_KEY + number, busNumber=number))
    return new


def _drive(
    device: Device, path: str, sizes: Mapping[str, int], keys: Mapping[tuple[str, int], int], number: int
) -> "vim.vm.device.VirtualDevice":
    defaults = {"scsi": SCSI_KEY, "sata": SATA_KEY, "nvme": NVME_KEY, "ide": IDE_KEY}
    controller = keys.get((device.bus, device.controller), defaults[device.bus] + device.controller)
    if device.kind == CDROM:
        backing = _device.VirtualCdrom.IsoBackingInfo(fileName=path)
        plugged = _device.VirtualDevice.ConnectInfo(startConnected=True, connected=True, allowGuestControl=True)
        return _device.VirtualCdrom(
            key=-200 - number, controllerKey=controller, unitNumber=device.unit, backing=backing, connectable=plugged
        )
    mode = "persistent" if device.persistent else "independent_nonpersistent"
    size = sizes[device.file]
    return _device.VirtualDisk(
        key=-100 - number,
        controllerKey=controller,
        unitNumber=device.unit,
        capacityInKB=-(-size // 1024),
        backing=_device.VirtualDisk.FlatVer2BackingInfo(fileName=path, diskMode=mode, writeThrough=True),
    )


def _nic(
    found: Hardware, spec: VmwareSpec, network: "vim.vm.device.VirtualDevice.BackingInfo"
) -> "vim.vm.device.VirtualDevice":
    nic = _NICS[found.nic](key=-4000, backing=network, addressType="generated", wakeOnLanEnabled=False)
    nic.connectable = _device.VirtualDevice.ConnectInfo(startConnected=True, connected=True, allowGuestControl=False)
    if spec.mac:
        nic.addressType, nic.macAddress = "manual", spec.mac
    return nic
