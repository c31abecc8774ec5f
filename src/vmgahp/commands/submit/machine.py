"""A virtual machine between the front ends that read it and the writer of submit files."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from vmgahp.commands.submit.summary import SubmitError, Summary

PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+=-]*", re.ASCII)
"""The form of a name that needs no quoting in any list of HTCondor's."""

_DEVICE = re.compile(r"(vd|sd|hd|xvd)([a-z]{1,2})|fd[ab]", re.ASCII)
_LETTERS = "abcdefghijklmnopqrstuvwxyz"

BOOT_CLASSES = ("hd", "cdrom", "fd")
"""The kinds of disks in libvirt's words, in the default boot order of firmware."""


@dataclass
class GuestDisk:
    """One disk of the VM."""

    path: str
    """The full path of the image here; empty for one that only a URL names."""
    format: str
    """A format of `vmgahp.job.disks.FORMATS`."""
    device: str = ""
    writable: bool = True
    shared: bool = False
    url: str = ""
    """The URL from which a file transfer plugin makes the disk, in place of `path`."""
    image: str = ""
    """The name of an image of the execute machines' catalog, in place of both."""
    name: str = ""
    """The file's name in the scratch directory, if it is not that of `path`."""
    place: str = ""
    """The place of the disk in the file that was read."""
    what: str = ""
    """The description of the disk in that file, if it says more than the name of its image."""
    changed: list[str] = field(default_factory=list)
    """The reasons why the disk differs from its description there."""
    steps: list[str] = field(default_factory=list)
    """The steps by which the image was made, such as a conversion."""
    bus: str = ""
    """The bus: ``virtio``, ``sata``, ``scsi``, ``ide``, ``floppy``, or empty; it selects the name of a device without
    one."""
    hostile: bool = False
    """True if an untrusted file may name it: it must then be beside that file, and refer to no other file."""
    is_sure: bool = False
    """True if the user gives its format, which then holds whatever its first bytes are."""
    files: list[str] = field(default_factory=list)
    """The other files that it consists of."""
    boot: int = 0
    """The place in the VM's boot order, from 1, if it was given one."""

    @property
    def boot_class(self) -> str:
        """The class among `BOOT_CLASSES`."""
        if self.bus == "floppy" or self.device.startswith("fd"):
            return "fd"
        return "cdrom" if self.format == "iso" else "hd"


@dataclass
class GuestNic:
    """One NIC; see `vmgahp.job.nics.Nic`."""

    kind: str
    """The type of the network: ``nat``, ``bridge``, ``user``; empty for the default of the execute machine."""
    mac: str = ""
    model: str = "virtio"
    """The model; empty if the XML that goes with the job defines it."""
    link_up: bool = True
    place: str = ""
    what: str = ""
    changed: list[str] = field(default_factory=list)
    """The reasons why it differs from its description there; `place` and `what` are as those of a disk."""


@dataclass
class Guest:
    """A virtual machine."""

    name: str
    memory_mib: int = 0
    vcpus: int = 1
    disks: list[GuestDisk] = field(default_factory=list)
    nics: list[GuestNic] = field(default_factory=list)
    boot: Sequence[str] = ()
    """The classes from which it boots, the first one first; see `in_boot_order`."""
    vnc: bool = False
    options: dict[str, str | bool | int] = field(default_factory=dict)
    """The options of the VM, by the names of `vmgahp.job.options`."""
    attributes: dict[str, str | bool] = field(default_factory=dict)
    """The other attributes of the job ad, by their full names."""
    commands: dict[str, str] = field(default_factory=dict)
    """The commands that only jobs of its type have, such as ``xen_kernel``."""
    files: list[str] = field(default_factory=list)
    """The full paths of other files that go with the job."""
    inputs: list[str] = field(default_factory=list)
    """The further input files, also directories and URLs, as they are written in a list of HTCondor's."""
    lines: list[str] = field(default_factory=list)
    """The further lines of the submit file, each of which replaces the usual line of its name."""
    number: int = 1
    """The number of jobs."""
    vm_type: str = "kvm"
    """The VM type unless the user chooses another."""
    own_disks: bool = False
    """True if the job names its disks in a way of its own instead of vm_disk."""
    own_nics: bool = False
    """True if the job's own XML defines its NICs, and the ad only says that there are some."""
    places: dict[str, str] = field(default_factory=dict)
    """The places of ``memory``, ``vcpus``, ``vnc`` and the options, by their names, in the file that was read."""
    changed: dict[str, str] = field(default_factory=dict)
    """The reasons why one of these differs from that place."""
    finish: Callable[[], None] | None = None
    """The rest of the front end's work, once the disks are named and converted."""


def fit_buses(made: Guest, summary: Summary) -> None:
    """Put every disk on a bus that the machine of its firmware and architecture has (`vmgahp.domain.devices`)."""
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
            if was != now and made.finish is None and made.vm_type != "xen":  # --as-is and Xen have buses of their own
                disk.changed.append(f"behind a {now} controller, and no {was} controller")


def _controller(disk: GuestDisk, arm: bool) -> str:
    """Return the controller for a device name such as sda."""
    return "SCSI" if arm or disk.shared or (disk.boot_class == "hd" and not disk.writable) else "SATA"


def name_devices(disks: list[GuestDisk]) -> None:
    """Give every disk without a device name a free one, on its preferred bus.

    Raises `SubmitError` if two have the same, or a bus is full.
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
    """Return the disks in the order for vm_disk, which is also the boot order.

    Those with a place of their own come first, then the first one of each of the `classes`, as in libvirt, then the
    others, hard disks before CDs before floppies. Otherwise the order of `disks` is kept, which is that of the
    machine's controllers; devices must be named by it before (`name_devices`).
    """
    first = [next((disk for disk in disks if disk.boot_class == one), None) for one in classes]

    def place(disk: GuestDisk) -> tuple[float, int, int]:
        chosen = next((number for number, one in enumerate(first) if one is disk), len(first))
        return disk.boot or float("inf"), chosen, BOOT_CLASSES.index(disk.boot_class)

    return sorted(disks, key=place)


def is_device(name: str) -> bool:
    """Return True if vm_disk accepts a device of that name."""
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
    """Make a name for files and jobs from an arbitrary text."""
    name = re.sub(r"[^A-Za-z0-9_.-]+", "_", text.strip(), flags=re.ASCII).strip("._-")[:100]
    return name or otherwise
