"""A VM between the front ends and the writer of submit files."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from string import ascii_lowercase

from vmgahp.commands.submit.report import SubmitError, Summary, number
from vmgahp.domain.build import PC, Q35
from vmgahp.job.attributes import ARM, LOCAL_TIME

BOOT_CLASSES = ("hd", "cdrom", "fd")
"""The kinds of disks in libvirt's words, in the default boot order of firmware."""

# The words of libvirt, OVF, VMware and Vagrant, and their meaning for a job. A reader passes the word and the place
# where it stands; so one fact has one outcome, whatever the format.

ARCHITECTURES = dict.fromkeys(("", "x86_64", "amd64", "i686", "i386", "unknown"), "") | {ARM: ARM, "arm64": ARM}
"""Architecture -> the option of the job; empty for x86_64."""
NETWORKS = {"user": "user"} | dict.fromkeys(("network", "nat", "vmnet8"), "nat")
NETWORKS |= dict.fromkeys(("bridge", "bridged", "vmnet0"), "bridge")
"""Network -> the kind of a job's network."""
MODELS = ("virtio", "e1000e", "e1000", "rtl8139")
"""The models of a job's NICs, by which other words for them begin; e1000 stands for all others, because most guests
have a driver for it."""


class Why(StrEnum):
    """A reason that several front ends give."""

    HOST_DEVICE = "jobs have no devices of the host"
    DIRECTORY = "jobs have directories of the execute machine's alone (VMPARAM_vm_Share_Dirs)"
    FIRST_BOOT = "the guest reads it at its first boot; a job gives cloud-init its User_Data and Meta_Data"
    NOT_DISCARDED = "what the guest writes stays on the job's own copy"


GUEST_INFO = re.compile(r"guestinfo\.(?:(?:user|meta|vendor)data|talos\.config|(?:coreos|ignition)\..*)", re.IGNORECASE)
"""The keys by which VMware hands instructions to a guest's first boot."""


@dataclass
class GuestDisk:
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
    """The bus for which a device is named: ``virtio``, ``sata``, ``scsi``, ``ide``, ``floppy``, or empty."""
    hostile: bool = False
    """True if an untrusted file may name it: it must then be beside that file, and refer to no other file."""
    is_sure: bool = False
    """True if the user gives its format, which then holds whatever its first bytes are."""
    files: list[str] = field(default_factory=list)
    """The other files that it consists of."""
    boot: int = 0
    """The place in the VM's boot order, from 1, if it was given one; the other disks come after those that were."""

    @property
    def boot_class(self) -> str:
        """The class among `BOOT_CLASSES`."""
        if self.bus == "floppy" or self.device.startswith("fd"):
            return "fd"
        return "cdrom" if self.format == "iso" else "hd"

    def put_on(self, controller: str) -> None:
        """Put it on the bus for its controller."""
        word = controller.lower()
        if "virtio" in word and "scsi" in word:  # its guest may have no driver for SATA
            self.bus = "virtio" if self.boot_class == "hd" else "sata"
            if self.bus == "virtio":
                self.changed.append("virtio, not behind virtio-scsi")
            return
        self.bus = word if word in ("", "ide", "virtio") else "floppy" if word in ("floppy", "fdc") else "sata"
        if self.bus == "sata" and word != "sata" and "ahci" not in word:
            self.changed.append(f"jobs have no controller {controller}, the disk is on SATA")


@dataclass
class GuestNic:
    """One NIC; see `vmgahp.job.vm_spec.Nic`."""

    kind: str
    """The type of the network: ``nat``, ``bridge``, ``user``; empty for the default of the execute machine."""
    mac: str = ""
    model: str = "virtio"
    """The model; empty if the XML that goes with the job defines it."""
    link_up: bool = True
    place: str = ""
    what: str = ""
    card: str = ""
    """The name that Linux gave to it before; empty if that is not known."""
    changed: list[str] = field(default_factory=list)
    """The reasons why it differs from its description there; `place` and `what` are as those of a disk."""


@dataclass
class Guest:
    name: str
    memory_mib: int = 0
    vcpus: int = 1
    disks: list[GuestDisk] = field(default_factory=list)
    nics: list[GuestNic] = field(default_factory=list)
    vnc: bool = False
    options: dict[str, str | bool | int] = field(default_factory=dict)
    """The options of the VM, by the names of `vmgahp.job.attributes`."""
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

    def set_architecture(self, word: str, place: str, summary: Summary) -> None:
        """Set the architecture. Raises `SubmitError` for one that no execute machine has."""
        if word not in ARCHITECTURES:
            raise SubmitError(f"It is a VM of the architecture {word[:40]!a}.", "jobs have x86_64 and aarch64.")
        if word in ("i686", "i386"):
            summary.keep(place, word, "x86_64", "its processors run the same programs")
        if ARCHITECTURES[word]:
            self.options["Arch"], self.places["Arch"] = ARCHITECTURES[word], place

    def set_firmware(self, place: str, *, secure: bool, keys: bool = True) -> None:
        """Set UEFI, with Secure Boot if it is `secure` and has Microsoft's `keys` enrolled, as that of jobs has."""
        if secure and not keys:
            self.changed["Firmware"] = "its Secure Boot has no keys and starts any system, that of uefi-secure has some"
        self.options["Firmware"], self.places["Firmware"] = "uefi-secure" if secure and keys else "uefi", place

    def set_tpm(self, place: str) -> None:
        self.options["TPM"], self.places["TPM"] = True, place
        self.changed["TPM"] = "it is a new one, without what the old one keeps"

    def set_clock(self, word: str, place: str, what: str, summary: Summary) -> None:
        """Set the time of the hardware clock: ``utc``, ``localtime``, or the name of a time zone."""
        if word.lower() in ("", "utc", "gmt", "etc/gmt", "etc/utc"):
            summary.skip(place, what)
        elif word == "absolute":
            summary.lose(place, what, "the clock of a job shows the present")
        else:
            self.options["Clock"], self.places["Clock"] = LOCAL_TIME, place
            if word.lower() not in ("local", LOCAL_TIME):
                self.changed["Clock"] = f"the time zone of the execute machine, in place of {word}"

    def add_nic(self, nic: GuestNic, network: str, model: str, *, asked: str = "", called: str = "") -> None:
        """Add a NIC of that network and model, either of which may be empty if the file does not say it.

        The network is called `called`, and does not matter if another one is `asked` for.
        """
        nic.kind = NETWORKS.get(network.lower(), "")
        if network and not nic.kind and not asked:
            nic.changed.append(f"the network {called or network} is the execute machine's own")
        # Some list several models, separated by blanks or commas; the guest must support each.
        said = model.lower().replace(",", " ").split()
        nic.model = next((ours for word in said for ours in MODELS if word.startswith(ours)), "e1000")
        if said and nic.model not in said:
            nic.changed.append(f"{nic.model}, not {model}")
        self.nics.append(nic)

    def chipset(self, machine: str = "") -> str:
        """Return the chipset of a machine of libvirt's; that of the job if `machine` leaves it open."""
        # The machine of aarch64 has its devices where q35 has them.
        ours = Q35 if self.options.get("Firmware") or self.options.get("Arch") else PC
        return Q35 if "q35" in machine else PC if machine.startswith("pc") else ours

    def card_names(self, chipset: str, *, has_display: bool) -> list[str]:
        """Return the name that Linux gives to each NIC where libvirt places it; empty for one that is not known."""
        if chipset == PC:
            return [card_name(PC, 0, slot) for slot, _ in enumerate(self.nics, 3 if has_display else 2)]
        # Any other model is behind a bridge, whose place depends on the rest of the machine.
        is_known = all(nic.model in ("virtio", "e1000e") for nic in self.nics)
        return [card_name(Q35, bus, 0) if is_known else "" for bus, _ in enumerate(self.nics, 1)]


def card_name(chipset: str, bus: int, slot: int) -> str:
    """Return the name that Linux gives to a NIC at a PCI address of libvirt's."""
    return f"ens{slot}" if chipset == PC and bus == 0 else f"enp{bus}s{slot}"


def vmware_card_name(slot: str) -> str:
    """Return the name that Linux gives to a NIC in a PCI slot of VMware's; empty for one that is not known."""
    return f"ens{number(slot)}" if 0 < number(slot) < 1024 else ""  # a larger one is a function of a bridge


def fit_buses(made: Guest, summary: Summary) -> None:
    """Put every disk on a bus that the machine of its firmware and architecture has (`vmgahp.domain.build`)."""
    arm, is_uefi = made.options.get("Arch") == ARM, made.options.get("Firmware") in ("uefi", "uefi-secure")
    is_ours = made.finish is None and made.vm_type != "xen"  # --as-is and Xen have buses of their own
    disks, made.disks = made.disks, []
    for disk in disks:
        is_scsi = arm or disk.shared or (disk.boot_class == "hd" and not disk.writable)
        was, now = "SCSI" if disk.bus == "scsi" else "SATA", "SCSI" if is_scsi else "SATA"  # of a device such as sda
        if arm and disk.boot_class == "fd":
            summary.lose(disk.place, disk.what or f"floppy {disk.path}", "machines of aarch64 have no floppy drive")
            continue
        made.disks.append(disk)
        if disk.device.startswith("hd") or (disk.bus == "ide" and not disk.device):
            if arm or is_uefi:
                why = f"machines {'of aarch64' if arm else 'with UEFI'} have no IDE"
            elif disk.boot_class == "hd" and not disk.writable:
                why = "an IDE disk can be written"
            elif disk.shared:
                why = "an IDE disk belongs to one VM"
            else:
                continue
            disk.device, disk.bus = "", "sata"
            disk.changed.append(f"{why}, the disk is on {now}")
        elif was != now and is_ours and (disk.bus in ("sata", "scsi") or disk.device.startswith("sd")):
            disk.changed.append(f"behind a {now} controller, and no {was} controller")


def name_devices(disks: list[GuestDisk]) -> None:
    """Give every disk without a device name a free one, on its preferred bus. Raises `SubmitError` if none is left."""
    taken = {disk.device for disk in disks}
    for disk in disks:
        if not disk.device:
            prefix = {"sata": "sd", "scsi": "sd", "ide": "hd", "floppy": "fd"}.get(disk.bus, "vd")
            names = [prefix + letter for letter in ascii_lowercase[: {"hd": 4, "fd": 2}.get(prefix)]]
            names += ["sd" + letter for letter in ascii_lowercase] if prefix != "fd" else []
            disk.device = next((name for name in names if name not in taken), "")
            if not disk.device:
                raise SubmitError(f"{disk.place}: there is no device left for this disk.", "use fewer disks.")
            taken.add(disk.device)
