"""The words of libvirt, OVF, VMware and Vagrant, and what they mean for a job: one table for all.

A reader passes the word and the place where it stands; so one fact has one outcome, whatever the format.
"""

import re
from collections.abc import Iterable

from vmgahp.commands.submit.machine import BOOT_CLASSES, Guest, GuestDisk, GuestNic, SubmitError, Summary
from vmgahp.job.kinds import ARM, LOCAL_TIME

ARCHITECTURES = {**dict.fromkeys(("", "x86_64", "amd64", "i686", "unknown"), ""), **dict.fromkeys((ARM, "arm64"), ARM)}
"""Architecture -> the option of the job; empty for x86_64."""

NETWORKS = {
    **dict.fromkeys(("network", "nat", "vmnet8"), "nat"),
    **dict.fromkeys(("bridge", "bridged", "vmnet0"), "bridge"),
    "user": "user",
}
"""Network -> the kind of a job's network."""

MODELS = {
    **dict.fromkeys(("virtio", "virtio-net", "3"), "virtio"),  # oVirt has numbers
    **dict.fromkeys(("e1000", "82540em", "82543gc", "82545em", "2"), "e1000"),
    **dict.fromkeys(("e1000e", "82583v"), "e1000e"),
    **dict.fromkeys(("rtl8139", "1"), "rtl8139"),
}
"""Model of a NIC, in lower case -> the model of a job's NIC."""
_USUAL_MODEL = "e1000"
"""The model in place of one that jobs do not have: most guests have a driver for it."""

BUSES = {
    **dict.fromkeys(("ide", "piix3", "piix4", "ich6"), "ide"),
    **dict.fromkeys(("sata", "ahci", "sata.ahci", "vmware.sata.ahci"), "sata"),
    **dict.fromkeys(("floppy", "fdc"), "floppy"),
    "virtio": "virtio",
    "": "",
}
"""Controller, in lower case -> the bus of its disks; those of all others are on SATA."""

BOOT = {
    **dict.fromkeys(("hd", "hdd", "disk", "harddisk", "c"), "hd"),
    **dict.fromkeys(("cdrom", "cd", "dvd", "d"), "cdrom"),
    **dict.fromkeys(("fd", "floppy"), "fd"),
}
"""Boot device, in lower case -> its class; all others are networks."""

HOST_DEVICE = "jobs have no devices of the host"
DIRECTORY = "jobs have directories of the execute machine's alone (VMPARAM_vm_Share_Dirs)"


def set_architecture(word: str, place: str, made: Guest, summary: Summary) -> None:
    """Set the architecture. Raises `SubmitError` for one that no execute machine has."""
    if word not in ARCHITECTURES:
        raise SubmitError(f"It is a VM of the architecture {word[:40]!a}.", "jobs have x86_64 and aarch64.")
    if word == "i686":
        summary.change(place, word, "x86_64", "its processors run the same programs")
    if ARCHITECTURES[word]:
        made.options["Arch"], made.places["Arch"] = ARCHITECTURES[word], place


def set_firmware(place: str, made: Guest, *, secure: bool, keys: bool = True) -> None:
    """Set UEFI, with Secure Boot if it is `secure` and has Microsoft's `keys` enrolled, as that of jobs has."""
    if secure and not keys:
        made.changed["Firmware"] = "its Secure Boot has no keys and starts any system, that of uefi-secure has some"
    made.options["Firmware"], made.places["Firmware"] = "uefi-secure" if secure and keys else "uefi", place


def set_tpm(place: str, made: Guest) -> None:
    """Set a TPM 2.0."""
    made.options["TPM"], made.places["TPM"] = True, place
    made.changed["TPM"] = "it is a new one, without what the old one keeps"


def tell_new_variables(place: str, what: str, summary: Summary) -> None:
    """Report that the variables of UEFI are new ones."""
    why = "its boot entries stay behind: a system is found by its EFI/BOOT directory alone"
    summary.change(place, what, "new UEFI variables", why)


def set_clock(word: str, place: str, what: str, made: Guest, summary: Summary) -> None:
    """Set the time of the hardware clock: ``utc``, ``localtime``, or the name of a time zone."""
    if word.lower() in ("", "utc", "gmt", "etc/gmt", "etc/utc"):
        summary.skip(place, what)
    elif word == "absolute":
        summary.lose(place, what, "the clock of a job shows the present")
    else:
        made.options["Clock"], made.places["Clock"] = LOCAL_TIME, place
        if word.lower() not in ("local", LOCAL_TIME):
            made.changed["Clock"] = f"the time zone of the execute machine, in place of {word}"


def add_nic(made: Guest, nic: GuestNic, network: str, model: str, *, asked: str = "", called: str = "") -> None:
    """Add a NIC of that network and model, either of which may be empty if the file does not say it.

    The network is called `called`, and does not matter if another one is `asked` for.
    """
    nic.kind = NETWORKS.get(network.lower(), "")
    if network and not nic.kind and not asked:
        nic.changed.append(f"the network {called or network} is the execute machine's own")
    # Some list several models, separated by blanks or commas; the guest must support each.
    words = model.lower().replace(",", " ").split()
    nic.model = next((MODELS[word] for word in words if word in MODELS), "")
    if words and not nic.model:
        nic.model = _USUAL_MODEL
        nic.changed.append(f"jobs have no {model}")
    made.nics.append(nic)


def add_usual_models(made: Guest) -> None:
    """Give every NIC a model."""
    for nic in made.nics:
        nic.model = nic.model or _USUAL_MODEL


def put_on(disk: GuestDisk, controller: str) -> None:
    """Put a disk on the bus for its controller."""
    word = controller.lower()
    if "virtio" in word and "scsi" in word:  # its guest may have no driver for SATA
        disk.bus = "virtio" if disk.boot_class == "hd" else "sata"
        if disk.bus == "virtio":
            disk.changed.append("virtio, not behind virtio-scsi")
        return
    disk.bus = BUSES.get(word, "sata")
    if word and word not in BUSES:
        disk.changed.append(f"jobs have no controller {controller}, the disk is on SATA")


def boot_order(entries: Iterable[tuple[str, str]], summary: Summary, became: str = "") -> list[str]:
    """Return the classes of a boot order, given by its places and words; `became` is the report on each disk of it.

    A network before all disks is a loss, and one after them is not used.
    """
    classes: list[str] = []
    for place, word in entries:
        kind = BOOT.get(word.lower(), "")
        if kind:
            classes.append(kind)
            if became:
                summary.carry(place, f"boot from {word}", became)
        elif classes:
            summary.skip(place, f"boot from {word}", "jobs boot from disks, and from them first")
        else:
            summary.lose(place, f"boot from {word}", "jobs boot from disks only")
    return [kind for kind in dict.fromkeys(classes) if kind in BOOT_CLASSES]


PC, Q35 = "pc", "q35"


def chipset(made: Guest, machine: str = "") -> str:
    """Return the chipset of a machine of libvirt's; that of the job if `machine` leaves it open.

    The machine of aarch64 has its devices where q35 has them.
    """
    ours = Q35 if made.options.get("Firmware") or made.options.get("Arch") else PC
    return Q35 if "q35" in machine else PC if machine.startswith("pc") else ours


def card_name(machine: str, number: int, model: str, *, has_display: bool) -> str:
    """Return the name that Linux gives to a NIC where libvirt places it; empty if that is not known."""
    if machine == PC:
        return f"ens{number + (3 if has_display else 2)}"
    return f"enp{number + 1}s0" if model in ("virtio", "e1000e") else ""


def card_at(machine: str, bus: int, slot: int) -> str:
    """Return the name that Linux gives to a NIC at a PCI address of libvirt's."""
    return f"ens{slot}" if machine == PC and bus == 0 else f"enp{bus}s{slot}"


def tell_card_names(made: Guest, advice: str = "") -> None:
    """Report each NIC that a guest with Linux will call otherwise, by which a fixed network configuration breaks."""
    for number, nic in enumerate(made.nics):
        now = card_name(chipset(made), number, nic.model, has_display=made.vnc)
        if nic.card and nic.card != now:
            nic.changed.append(f"Linux may call it {now or 'otherwise'}, in place of {nic.card}{advice}")


_AMOUNT = re.compile(r"[1-9][0-9]{0,17}", re.ASCII)


def number(text: str) -> int:
    """Parse a plausible whole number; 0 for any other text."""
    return int(text) if _AMOUNT.fullmatch(text) else 0
