"""A virtual machine between the front ends that read it and the writer of submit files."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from vmgahp.commands.submit.summary import SubmitError, Summary

PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+=-]*", re.ASCII)
"""A name that every list of HTCondor's takes as it is."""

_DEVICE = re.compile(r"(vd|sd|hd|xvd)([a-z]{1,2})|fd[ab]", re.ASCII)
_LETTERS = "abcdefghijklmnopqrstuvwxyz"

BOOT_CLASSES = ("hd", "cdrom", "fd")
"""The kinds of disks in libvirt's words, as firmware boots from them where nobody says otherwise."""


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
    """A URL of which the file transfer plugin makes the disk, in place of `path`."""
    image: str = ""
    """The name of an image of the execute machines' catalog, instead of both."""
    name: str = ""
    """The file's name in the scratch directory, where it is not that of `path`."""
    place: str = ""
    """Its place in the file that was read."""
    what: str = ""
    """The words of that file for it, where they say more than the name of its image."""
    changed: list[str] = field(default_factory=list)
    """Reasons why it is not quite what stands there."""
    steps: list[str] = field(default_factory=list)
    """The steps by which the image came here, such as a conversion."""
    bus: str = ""
    """``virtio``, ``sata``, ``scsi``, ``ide``, ``floppy``, or empty: what a device without a name is named for."""
    hostile: bool = False
    """True where a stranger's file may name it: it is then beside that file, and consists of nothing but itself."""
    is_sure: bool = False
    """True where the user says what format it has, whatever it begins like."""
    files: list[str] = field(default_factory=list)
    """Other files that it consists of."""
    boot: int = 0
    """Its place among what the VM boots from, from 1, where it has been given one."""

    @property
    def boot_class(self) -> str:
        """Its class among `BOOT_CLASSES`."""
        if self.bus == "floppy" or self.device.startswith("fd"):
            return "fd"
        return "cdrom" if self.format == "iso" else "hd"


@dataclass
class GuestNic:
    """One NIC; see `vmgahp.job.nics.Nic`."""

    kind: str
    """``nat``, ``bridge``, ``user``; empty for what the execute machine has."""
    mac: str = ""
    model: str = "virtio"
    """Empty for what a description says that goes with the job."""
    link_up: bool = True
    place: str = ""
    what: str = ""
    changed: list[str] = field(default_factory=list)
    """The last three are as those of a disk."""


@dataclass
class Guest:
    """The whole of it."""

    name: str
    memory_mib: int = 0
    vcpus: int = 1
    disks: list[GuestDisk] = field(default_factory=list)
    nics: list[GuestNic] = field(default_factory=list)
    boot: Sequence[str] = ()
    """The classes from which it boots, the first one first; see `in_boot_order`."""
    vnc: bool = False
    options: dict[str, str | bool | int] = field(default_factory=dict)
    """Options of the VM, by the names of `vmgahp.job.options`."""
    attributes: dict[str, str | bool] = field(default_factory=dict)
    """Other attributes of the job ad, by their full names."""
    commands: dict[str, str] = field(default_factory=dict)
    """Commands that only jobs of its type have, such as ``xen_kernel``."""
    files: list[str] = field(default_factory=list)
    """Full paths of other files that go with the job."""
    inputs: list[str] = field(default_factory=list)
    """More of them, directories and URLs too, as they stand in a list of HTCondor's."""
    lines: list[str] = field(default_factory=list)
    """Further lines of the submit file, each in place of one that there would be of its name."""
    number: int = 1
    """How many jobs of it there are."""
    vm_type: str = "kvm"
    """The type where nobody asks for another."""
    own_disks: bool = False
    """True where the job names its disks in a way of its own, and not by vm_disk."""
    own_nics: bool = False
    """True where the job's own XML says what its NICs are, and the ad no more than that there are some."""
    places: dict[str, str] = field(default_factory=dict)
    """Places of ``memory``, ``vcpus``, ``vnc`` and the options, by their names, in the file that was read."""
    changed: dict[str, str] = field(default_factory=dict)
    """Reasons why one of these is not what stands there."""
    finish: Callable[[], None] | None = None
    """The rest of the front end's work, once the disks have their names and are as they go with the job."""


def fit_buses(made: Guest, summary: Summary) -> None:
    """Let every disk be on a bus that the machine of its firmware and architecture has (`vmgahp.domain.devices`)."""
    arm = made.options.get("Arch") == "aarch64"
    firmware = made.options.get("Firmware", "")
    for disk in [*made.disks]:
        if arm and disk.boot_class == "fd":
            summary.lose(disk.place, disk.what or f"floppy {disk.path}", "machines of aarch64 have no floppy drive")
            made.disks.remove(disk)
        elif disk.device.startswith("hd") or (disk.bus == "ide" and not disk.device):
            if arm or firmware in ("uefi", "uefi-secure"):
                why = f"machines {'of aarch64' if arm else 'with UEFI'} have no IDE"
            elif disk.boot_class == "hd" and not disk.writable:
                why = "an IDE disk can be written"
            elif disk.shared:
                why = "an IDE disk belongs to one VM"
            else:
                continue
            disk.device, disk.bus = "", "sata"
            disk.changed.append(f"{why}, the disk is on {_controller(disk, arm)}")
        elif disk.bus in ("sata", "scsi") or disk.device.startswith("sd"):
            was, now = "SCSI" if disk.bus == "scsi" else "SATA", _controller(disk, arm)
            if was != now and made.finish is None and made.vm_type != "xen":  # whose XML, or Xen, has its own
                disk.changed.append(f"behind a {now} controller, and no {was} controller")


def _controller(disk: GuestDisk, arm: bool) -> str:
    """Name the controller behind a device such as sda."""
    return "SCSI" if arm or disk.shared or (disk.boot_class == "hd" and not disk.writable) else "SATA"


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


def in_boot_order(disks: Sequence[GuestDisk], classes: Sequence[str] = ()) -> list[GuestDisk]:
    """Return the disks as vm_disk has them, from which a VM boots in their order.

    Those with a place of their own come first, then the first one of each of the `classes`, as libvirt takes them, then
    the others, hard disks before CDs before floppies. Else the order of `disks` stays, which is that of the machine's
    controllers; devices are to be named by it before (`name_devices`).
    """
    first = [next((disk for disk in disks if disk.boot_class == one), None) for one in classes]

    def place(disk: GuestDisk) -> tuple[float, int, int]:
        chosen = next((number for number, one in enumerate(first) if one is disk), len(first))
        return disk.boot or float("inf"), chosen, BOOT_CLASSES.index(disk.boot_class)

    return sorted(disks, key=place)


def is_device(name: str) -> bool:
    """Say if vm_disk knows a device of that name."""
    found = _DEVICE.fullmatch(name)
    return found is not None and (found[1] != "hd" or found[2] in ("a", "b", "c", "d"))


def _free(disk: GuestDisk, taken: dict[str, GuestDisk]) -> str:
    if disk.bus == "floppy":
        names = ["fda", "fdb"]
    else:
        prefix = {"sata": "sd", "scsi": "sd", "ide": "hd"}.get(disk.bus, "vd")
        names = [prefix + letter for letter in (_LETTERS[:4] if prefix == "hd" else _LETTERS)]
        names += ["sd" + letter for letter in _LETTERS]
    for name in names:
        if name not in taken:
            return name
    raise SubmitError(f"{disk.place}: there is no device left for this disk.", "use fewer disks.")


def simple_name(text: str, otherwise: str) -> str:
    """Return a name for files and jobs, made of what somebody else calls it."""
    name = re.sub(r"[^A-Za-z0-9_.-]+", "_", text.strip(), flags=re.ASCII).strip("._-")[:100]
    return name or otherwise
