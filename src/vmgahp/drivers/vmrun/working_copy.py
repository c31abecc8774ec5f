"""The ``.vmx`` that is run, made from settings that a job may choose, and the layers of its disks.

A snapshot's disk names its parent, perhaps by a full path of another machine; that name is corrected before a start.

The settings that a job may choose are those of HTCondor's own VMware support, with today's controllers and firmware.
The devices of this machine are left out: its drives, ports, USB, disks and shared folders.
"""

import os
import re
from typing import NamedTuple

from vmgahp import errors
from vmgahp.config import Settings
from vmgahp.errors import JobFault, MachineFault
from vmgahp.host.job_user import Identity
from vmgahp.images import formats
from vmgahp.images.formats import VmdkError
from vmgahp.job.vmware import VMX_FILE, WORKING_COPY_SUFFIX, VmwareSpec, base_name
from vmgahp.job.vmx import CDROM, DISK, LARGEST, Drive, Vmx, VmxError, drives
from vmgahp.text import has_control, shown

MOST_LAYERS = 64
"""The most layers of one disk; VMware itself allows some thirty snapshots in a row."""

_CONVERT = "convert the disk with VMware or qemu-img: qemu-img convert -O vmdk OLD NEW."
_SEND = "send all files of the disk, or make them readable on this machine."


class VmdkLayer(NamedTuple):
    """A disk or a parent of one, with the files that were checked."""

    path: str
    """The name in the scratch directory, or a full path elsewhere."""
    files: tuple[str, ...]
    """The description and its extents, each as `path`."""
    parent: str = ""
    """The name to give its parent before a start (`WorkingCopy.correct_parents`); empty if the name is right."""


def look_at_layers(
    identity: Identity, directory: str, name: str, attribute: str, *, shared: bool = False
) -> list[VmdkLayer]:
    """Look at the disk `name` and its parents, the nearest first; nothing is changed.

    `name` is that of a file in the scratch directory or a full path, whose links are resolved. A parent in the scratch
    directory is to be named without a path; one elsewhere has to be a file that the job's user can read. With `shared`,
    for a job whose disks are not transferred, a full path that leads to a file comes before a file of the same name in
    the scratch directory. Raises `JobFault`, which names `attribute`.
    """
    layers: list[VmdkLayer] = []
    while name:
        try:
            if name.startswith("/"):
                layer, below = _elsewhere(identity, name)
            else:
                layer, below = _in_scratch(identity, directory, name, shared)
            if len(layers) >= MOST_LAYERS or any(known.path == layer.path for known in layers):
                raise VmdkError("its parents have no end")
        except (VmdkError, OSError) as error:
            raise _bad(attribute, name, error) from error
        except errors.MachineFault as fault:
            if not name.startswith("/"):
                raise
            problem = fault.problem.rstrip(".")  # a full path of the job's may hang
            raise _bad(attribute, name, OSError(0, problem)) from fault
        layers.append(layer)
        name = below
    return layers


def _elsewhere(identity: Identity, name: str) -> tuple[VmdkLayer, str]:
    """Return the layer of a full path, and where its parent is. Raises `VmdkError`, OSError, `errors.MachineFault`."""
    with open(identity.open_named(name, os.O_RDONLY), "rb") as opened:
        path = os.readlink(f"/proc/self/fd/{opened.fileno()}")  # VMware has trouble with symbolic links
        found = formats.read_vmdk(opened.fileno())
    if has_control(path):
        raise VmdkError("the path that it leads to is not text")
    files = [os.path.join(os.path.dirname(path), extent.file) for extent in found.extents]
    for file in files:
        os.close(identity.open_named(file, os.O_RDONLY))
    parent = os.path.join(os.path.dirname(path), found.parent) if found.parent else ""
    return VmdkLayer(path, (path, *files)), parent


def _in_scratch(identity: Identity, directory: str, name: str, shared: bool) -> tuple[VmdkLayer, str]:
    """Return the layer of the scratch directory, and where its parent is. Raises the same as `_elsewhere`."""
    with open(identity.open_scratch(directory, name, os.O_RDONLY), "rb") as opened:
        found = formats.read_vmdk(opened.fileno())
    files = (name, *(extent.file for extent in found.extents))
    for file in files[1:]:
        os.close(identity.open_scratch(directory, file, os.O_RDONLY))
    if not found.parent:
        return VmdkLayer(name, files), ""
    is_path, near = found.parent.startswith("/"), base_name(found.parent)
    away = shared and is_path and os.path.dirname(found.parent) != directory
    if away and identity.check_access(found.parent, write=False) is None:
        return VmdkLayer(name, files), found.parent
    if near and _is_there(identity, directory, near):
        formats.with_parent(found, near)  # raises if the description has no room for it
        return VmdkLayer(name, files, "" if found.parent == near else near), near
    if not is_path:
        raise OSError(0, f"its parent {shown(found.parent)} is not in the scratch directory")
    return VmdkLayer(name, files), found.parent


def _is_there(identity: Identity, directory: str, name: str) -> bool:
    try:
        os.close(identity.open_scratch(directory, name, os.O_RDONLY))
    except (FileNotFoundError, IsADirectoryError):
        return False
    return True


def _write_parent(identity: Identity, directory: str, name: str, parent: str) -> None:
    """Replace the parent's path by `parent`: inside a disk in the room that its description has."""
    with open(identity.open_scratch(directory, name, os.O_RDWR), "r+b") as opened:
        found = formats.read_vmdk(opened.fileno())
        text = formats.with_parent(found, parent)
        if found.room:
            os.pwrite(opened.fileno(), text.ljust(found.room, b"\0"), found.offset)
    if not found.room:
        identity.write_scratch(directory, name, text)


def _bad(attribute: str, name: str, error: VmdkError | OSError) -> JobFault:
    code, problem, hint = errors.BAD_IMAGE, str(error), _CONVERT
    if isinstance(error, OSError):
        code, problem, hint = errors.INVALID_DISK_PARAM, error.strerror or str(error), _SEND
    return JobFault(code, f"{attribute}: the disk {shown(name)} cannot be used: {problem}.", hint)


UUID_KEY = "vmgahp.uuid"
"""The name of our line, which identifies the VM among those of one directory; VMware keeps unknown lines."""

MEMORY_STEP = 4
"""The step of the memory size in MiB: VMware accepts multiples of it only."""

_PLAIN = re.compile(
    r"config\.[a-z0-9.]+|virtualhw\.[a-z0-9.]+|guestos|firmware|uefi\.secureboot\.enabled|bios\.(?:boot|hdd)order|ethernet0\.virtualdev"
    r"|pcibridge\d+\.(?:present|virtualdev|functions|pcislotnumber)"
    r"|(?:scsi|ide|sata|nvme)\d+\.(?:present|virtualdev|pcislotnumber)",
    re.IGNORECASE,
)

_PORT = re.compile(r"((?:serial|parallel)[0-9]+)\.present", re.IGNORECASE)
_MOST_DEVICES = 500
_GENERATED = re.compile(
    r"uuid\.(?:bios|location)|ethernet0\.generatedaddress(?:offset)?|[a-z0-9]+(?::\d+)?\.pcislotnumber"
    r"|vmotion\.checkpoint[a-z]+|monitor\.phys_bits_used|vmci0\.(?:id|present)|cleanshutdown|softpoweroff",
    re.IGNORECASE,
)
"""The names of the lines that VMware adds to a ``.vmx``, and that a suspended VM needs again."""
_OF_VMWARE = (".vmx", ".vmdk", ".vmss", ".vmem", ".vmsd", ".nvram")
"""The suffixes of files with a meaning to VMware, which a port's output cannot have."""


class WorkingCopy(NamedTuple):
    """The ``.vmx`` to be run."""

    name: str
    vmx: Vmx
    disks: dict[str, tuple[VmdkLayer, ...]]
    """The disks by their devices, such as ``scsi0:0``, each with its parents."""
    nvram: str = ""
    """The job's own file with the variables of its firmware; empty if VMware makes one."""
    left_out: tuple[str, ...] = ()
    """The drives and files that are not taken over, for the log."""

    @property
    def files(self) -> list[str]:
        """Return all files of the disks: names in the scratch directory, or full paths elsewhere."""
        return list(dict.fromkeys(name for chain in self.disks.values() for layer in chain for name in layer.files))

    def correct_parents(self, directory: str, identity: Identity) -> None:
        """Correct the names of the disks' parents (`VmdkLayer.parent`). Raises `JobFault`."""
        for device, chain in self.disks.items():
            for layer in chain:
                try:
                    if layer.parent:
                        _write_parent(identity, directory, layer.path, layer.parent)
                except (VmdkError, OSError) as error:
                    raise _bad(f"{self.name}, {device}.fileName", layer.path, error) from error


def build(
    source: Vmx, spec: VmwareSpec, directory: str, uuid: str, settings: Settings, identity: Identity
) -> WorkingCopy:
    """Make the working copy of the job's ``.vmx`` (`source`), for the scratch directory, a path without links.

    Nothing is written. Raises `JobFault` for what the job's owner must change, `MachineFault` for
    VMWARE_LOCAL_SETTINGS_FILE.
    """
    found = drives(source)
    ports = [match[1] for name in source if source.boolean(name) and (match := _PORT.fullmatch(name))]
    vmx_file, number = f"{VMX_FILE} = {shown(spec.vmx_file)}", len(found) + len(ports)
    if number > _MOST_DEVICES:
        problem = f"{vmx_file}: it has {number} drives and ports, and VMware takes some {_MOST_DEVICES} at most."
        hint = "open the virtual machine in VMware, and send the .vmx that it writes."
        raise JobFault(errors.BAD_IMAGE, problem, hint)
    builder = _Builder(source, spec, directory, identity)
    left_out = [f"{drive.place} ({drive.no_image})" for drive in found if drive.no_image]
    disks = {drive.place: builder.disk(drive) for drive in found if drive.kind == DISK and not drive.no_image}
    if not disks:
        problem = f"{vmx_file}: the virtual machine has no disk that can be used here."
        raise JobFault(errors.NO_DISK_PARAM, problem, "give it a disk that is a .vmdk file.")
    for drive in found:
        if drive.kind != DISK and not drive.no_image:
            builder.image(drive)
    for port in ports:
        builder.port(port)
    nvram, reason = builder.nvram()
    if reason:
        left_out.append(f"nvram = {shown(source['nvram'])} ({reason}): VMware makes a new one")
    builder.machine(uuid)
    builder.network(settings)
    builder.vmx.update(_local_settings(settings))
    return WorkingCopy(name_for(spec.vmx_file), builder.vmx, disks, nvram, tuple(left_out))


def restored(
    fresh: WorkingCopy, saved: Vmx, state: str, spec: VmwareSpec, directory: str, identity: Identity
) -> WorkingCopy:
    """Make the working copy for a restart from a checkpoint, whose memory is in the file `state`.

    `saved` is the working copy of the checkpoint, which the job can change: only the lines that VMware generates are
    copied from it, and the names of the snapshot's disks, which are checked as the job's own are. Raises `JobFault`.
    """
    vmx = Vmx(dict(fresh.vmx))
    vmx.update({name: value for name, value in saved.items() if _GENERATED.fullmatch(name)})
    disks = {}
    for device, chain in fresh.disks.items():
        value = saved.get(f"{device}.fileName", "")
        if value != chain[0].path:
            where, name = f"{fresh.name}, {device}.fileName", base_name(value)
            chain = tuple(look_at_layers(identity, directory, name, where, shared=not spec.transfer))
            if not chain:
                problem = f"{where} = {shown(value)} is not the name of a disk."
                raise JobFault(errors.MISMATCHED_CHECKPOINT, problem, "submit the job anew.")
            vmx[f"{device}.fileName"] = chain[0].path
        disks[device] = chain
    vmx["checkpoint.vmState"] = state
    nvram = fresh.nvram
    if nvram and base_name(saved.get("nvram", "")) != nvram:
        nvram = ""  # the VM that was saved had one of VMware's own
        del vmx["nvram"]
    return fresh._replace(vmx=vmx, disks=disks, nvram=nvram)


def name_for(vmx_file: str) -> str:
    """Return the working copy's name, by which a checkpoint is found again too."""
    return vmx_file[: -len(".vmx")] + WORKING_COPY_SUFFIX


class _Builder:
    """The ``.vmx`` in the making, and the files of the job that it names."""

    def __init__(self, source: Vmx, spec: VmwareSpec, directory: str, identity: Identity) -> None:
        self.source = source
        self.spec = spec
        self.directory = directory
        self.identity = identity
        self.vmx = Vmx({name: value for name, value in source.items() if _PLAIN.fullmatch(name)})

    def disk(self, drive: Drive) -> tuple[VmdkLayer, ...]:
        """Add a disk, and return it with its parents. Raises `JobFault`."""
        device, where = drive.place, self._line(drive)
        name = base_name(drive.file) if self.spec.transfer else self._elsewhere(drive.file)
        chain = look_at_layers(self.identity, self.directory, name, where)
        if not chain:
            problem = f"{where} = {shown(drive.file)} is not the name of a disk."
            raise JobFault(errors.INVALID_DISK_PARAM, problem, "give the virtual machine disks that are .vmdk files.")
        self.vmx[f"{device}.fileName"] = chain[0].path
        if kind := self.source.get(f"{device}.deviceType", ""):
            self.vmx[f"{device}.deviceType"] = kind
        mode = self.source.get(f"{device}.mode", "").lower()
        # Snapshots do not include independent disks: the guest would write to the shared one.
        if mode in ("persistent", "independent-persistent", "independent-nonpersistent"):
            self.vmx[f"{device}.mode"] = mode if self.spec.transfer else "persistent"
        # Data that the guest has flushed must be in the file, even if the machine or the job is stopped.
        self.vmx.update({f"{device}.writeThrough": "TRUE", f"{device}.present": "TRUE"})
        return tuple(chain)

    def image(self, drive: Drive) -> None:
        """Add a CD-ROM or floppy whose image is in the scratch directory, or has a full path. Raises `JobFault`."""
        name, transferred = base_name(drive.file), self.spec.transfer
        path = self._elsewhere(drive.file) if drive.file.startswith("/") or not transferred else ""
        reason = self._cannot_open(name, os.O_RDONLY) if name and transferred else "it is not a file name"
        if reason and path:
            reason = self.identity.check_access(path, write=False) or ""
            name = name if reason else os.path.realpath(path)  # root asks only a file system that has answered
            reason = reason or ("its path is not text" if has_control(name) else "")
        if reason:
            problem = f"{self._line(drive)} = {shown(drive.file)}: the image cannot be used: {reason}."
            hint = "send the image with the job, or take the drive out of the virtual machine."
            raise JobFault(errors.INVALID_DISK_PARAM, problem, hint)
        kind, word = ("deviceType", "cdrom-image") if drive.kind == CDROM else ("fileType", "file")
        for line, value in ((kind, word), ("fileName", name), ("present", "TRUE")):
            self.vmx[f"{drive.place}.{line}"] = value

    def port(self, device: str) -> None:
        """Add a serial or parallel port whose output goes to a file, which is made in the scratch directory."""
        name = base_name(self.source.get(f"{device}.fileName", ""))
        is_file = self.source.get(f"{device}.fileType", "").lower() == "file"
        if is_file and name and not name.lower().endswith(_OF_VMWARE):
            for line, value in (("fileType", "file"), ("fileName", name), ("present", "TRUE")):
                self.vmx[f"{device}.{line}"] = value

    def nvram(self) -> tuple[str, str]:
        """Add the job's file with the variables of its firmware, if it was transferred; return the name, or why not."""
        value = self.source.get("nvram", "")
        if not value:
            return "", ""
        name = base_name(value)
        # Files whose names begin as the working copy's are VMware's, and are removed when a guest boots afresh.
        if name.lower().startswith(name_for(self.spec.vmx_file).removesuffix(".vmx").lower()):
            return "", "the name is VMware's own"
        if not name.lower().endswith(".nvram"):
            return "", "it is no .nvram file"
        if reason := self._cannot_open(name, os.O_RDWR):
            return "", reason
        self.vmx["nvram"] = name
        return name, ""

    def machine(self, uuid: str) -> None:
        """Add the lines that this daemon decides."""
        if cores := self.source.cores_per_socket(self.spec.vm.vcpus):
            self.vmx["cpuid.coresPerSocket"] = str(cores)
        memory = self.spec.vm.memory_mib // MEMORY_STEP * MEMORY_STEP
        self.vmx.update({"memsize": str(memory), "numvcpus": str(self.spec.vm.vcpus), "displayName": self.spec.vm.name})
        self.vmx.update({"uuid.action": "keep", "disk.locking": "FALSE", "msg.autoAnswer": "TRUE", "workingDir": "."})
        # The disks of a snapshot are made beside the working copy, also where the disk itself is elsewhere.
        self.vmx.update({"snapshot.redoNotWithParent": "TRUE", UUID_KEY: uuid})

    def network(self, settings: Settings) -> None:
        """Add the NIC, if the job has one."""
        if not self.spec.vm.networking:
            self.vmx.pop("ethernet0.virtualDev", None)
            self.vmx["ethernet0.present"] = "FALSE"
            return
        bridge = self.spec.vm.networking_type == "bridge"
        setting = "VMWARE_BRIDGE_NETWORKING_TYPE" if bridge else "VMWARE_NAT_NETWORKING_TYPE"
        own = settings.string(setting) or settings.string("VMWARE_NETWORKING_TYPE")
        nic = {"present": "TRUE", "startConnected": "TRUE", "connectionType": own or ("bridged" if bridge else "nat")}
        mac = self.spec.vm.mac
        nic |= {"addressType": "static", "address": mac} if mac else {"addressType": "generated"}
        self.vmx.update({f"ethernet0.{line}": value for line, value in nic.items()})

    def _line(self, drive: Drive) -> str:
        return f"{VMX_FILE} = {shown(self.spec.vmx_file)}, {drive.place}.fileName"

    def _elsewhere(self, value: str) -> str:
        """Return the full path of a file that is not transferred; empty if there is none."""
        path = value if value.startswith("/") else os.path.join(self.spec.dir, value.replace("\\", "/"))
        return "" if has_control(path) or not path.startswith("/") else path

    def _cannot_open(self, name: str, flags: int) -> str:
        try:
            os.close(self.identity.open_scratch(self.directory, name, flags))
        except OSError as error:
            return f"{error.strerror}, in the scratch directory"
        return ""


def _local_settings(settings: Settings) -> Vmx:
    path = settings.string("VMWARE_LOCAL_SETTINGS_FILE")
    if not path:
        return Vmx()
    try:
        with open(path, "rb") as file:
            return Vmx.decode(file.read(LARGEST + 1))
    except (OSError, VmxError) as error:
        problem = f"VMWARE_LOCAL_SETTINGS_FILE = {path} cannot be used: {error}."
        raise MachineFault(problem, 'write lines of the form name = "value" into it, or remove the setting.') from error
