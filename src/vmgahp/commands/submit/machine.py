"""A virtual machine between the front ends that read it and the writer of submit files."""

import re
from dataclasses import dataclass, field

from vmgahp.commands.submit.summary import SubmitError

PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+=-]*", re.ASCII)
"""A name that every list of HTCondor's takes as it is."""

_DEVICE = re.compile(r"(vd|sd|hd|xvd)([a-z]{1,2})|fd[ab]", re.ASCII)
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass
class GuestDisk:
    """One disk of the VM."""

    path: str
    """The full path of the image here; empty for one that only a URL names."""
    format: str
    """As `vmgahp.job.disks.FORMATS` has it."""
    device: str = ""
    writable: bool = True
    shared: bool = False
    url: str = ""
    """What the file transfer plugin makes the disk of, instead of `path`."""
    name: str = ""
    """The file's name in the scratch directory, where it is not that of `path`."""
    place: str = ""
    """Where it stands in the file that was read."""
    bus: str = ""
    """``virtio``, ``sata``, ``ide``, ``floppy``, or empty: what the device is named for where it has no name."""
    hostile: bool = False
    """Whether a stranger's file may name it: it is then beside that file, and consists of nothing but itself."""
    files: list[str] = field(default_factory=list)
    """Other files that it consists of."""


@dataclass
class GuestNic:
    """One NIC; see `vmgahp.job.nics.Nic`."""

    kind: str
    """``nat``, ``bridge``, ``user``; empty for what the execute machine has."""
    mac: str = ""
    model: str = "virtio"
    link_up: bool = True


@dataclass
class Guest:
    """The whole of it."""

    name: str
    memory_mib: int = 0
    vcpus: int = 1
    disks: list[GuestDisk] = field(default_factory=list)
    nics: list[GuestNic] = field(default_factory=list)
    vnc: bool = False
    options: dict[str, str | bool] = field(default_factory=dict)
    """What `vmgahp.job.options` knows, by its names there."""
    attributes: dict[str, str | bool] = field(default_factory=dict)
    """Other attributes of the job ad, by their full names."""
    files: list[str] = field(default_factory=list)
    """Full paths of other files that go with the job."""
    vm_type: str = "kvm"
    """The type where nobody asks for another."""
    own_disks: bool = False
    """Whether the job names its disks in a way of its own, and not by vm_disk."""


def name_devices(disks: list[GuestDisk]) -> None:
    """Give every disk without a device one that is free, on the bus that it wants.

    Raises `SubmitError` where two have the same, or a bus has no place left.
    """
    taken: dict[str, GuestDisk] = {}
    for disk in disks:
        if disk.device:
            if disk.device in taken:
                raise SubmitError(
                    f"{disk.place or disk.path}: two disks are {disk.device}.", "give every disk its own device."
                )
            taken[disk.device] = disk
    for disk in disks:
        if not disk.device:
            disk.device = _free(disk, taken)
            taken[disk.device] = disk


def is_device(name: str) -> bool:
    """Whether vm_disk knows a device of that name."""
    found = _DEVICE.fullmatch(name)
    return found is not None and (found[1] != "hd" or found[2] in ("a", "b", "c", "d"))


def _free(disk: GuestDisk, taken: dict[str, GuestDisk]) -> str:
    if disk.bus == "floppy":
        names = ["fda", "fdb"]
    else:
        prefix = {"sata": "sd", "ide": "hd"}.get(disk.bus, "vd")
        names = [prefix + letter for letter in (_LETTERS[:4] if prefix == "hd" else _LETTERS)]
        names += ["sd" + letter for letter in _LETTERS]
    for name in names:
        if name not in taken:
            return name
    raise SubmitError(f"{disk.place}: there is no device left for this disk.", "use fewer disks.")


def simple_name(text: str, otherwise: str) -> str:
    """A name for files and jobs, made of what somebody else calls it."""
    name = re.sub(r"[^A-Za-z0-9_.-]+", "_", text.strip(), flags=re.ASCII).strip("._-")[:100]
    return name or otherwise
