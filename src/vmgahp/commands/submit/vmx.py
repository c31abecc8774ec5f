"""VMware's .vmx as a job: as attributes for libvirt, or the file itself (``--as-is``)."""

import argparse
import os
import re

from vmgahp.commands.submit.images import Locate, beside, check
from vmgahp.commands.submit.machine import BOOT_CLASSES, GUEST_INFO, Guest, GuestDisk, GuestNic, Why, vmware_card_name
from vmgahp.commands.submit.report import SubmitError, Summary, number, read_file, simple_name
from vmgahp.images.formats import BY_ENDING
from vmgahp.job.attributes import LOCAL_TIME
from vmgahp.job.vmware import DECRYPT_HINT, DIR, TRANSFER, VMDK_FILES, VMX_FILE
from vmgahp.job.vmx import CDROM, DRIVE_NAME, FLOPPY, LARGEST, Drive, Vmx, VmxError, drives

_NIC = re.compile(r"ethernet([0-9]{1,2})")
_READ = (
    *("present", "filename", "devicetype", "filetype", "mode", "startconnected", "clientdevice", "autodetect"),
    *("connectiontype", "virtualdev", "addresstype", "address", "networkname", "vnet"),
)
"""The entries of drives and NICs that are read."""
_BUSES = ("ide", "scsi", "sata", "nvme", FLOPPY)
"""The buses in the order in which a BIOS finds hard disks, which begins with IDE for historical reasons."""

_MISSED = (
    (re.compile(r"pcipassthru\d+\.present|usb\.autoconnect\..*"), Why.HOST_DEVICE),
    (re.compile(r"sharedfolder\d+\.present"), Why.DIRECTORY),
    (re.compile(r"\w+(?::\d+)?\.(?:sharedbus|sharing)"), "a disk of a job is no other VM's"),
    (GUEST_INFO, Why.FIRST_BOOT),
)
"""The entries on which the guest depends, in lower case, and why they are not carried over."""
_NOTHING = ("", "none", "sharing-none", "nosharing")
"""The values with which such an entry has no effect."""


def machine(options: argparse.Namespace, summary: Summary) -> Guest:
    """Read the file. Raises `SubmitError`."""

    def locate(name: str, place: str) -> str:
        directory, plain = os.path.dirname(os.path.abspath(options.file)), name.replace("\\", "/")
        base = os.path.basename(plain)
        # The path of another machine may stand for a file in this directory.
        is_moved = not os.path.lexists(os.path.join(directory, plain)) and os.path.lexists(f"{directory}/{base}")
        return beside(options, base if is_moved else plain, place)

    made, vmx = read(read_file(options.file, LARGEST), options.file, locate, options, summary)
    if options.as_is:
        _as_is(vmx, made, options, summary)
    return made


def read(data: bytes, file: str, locate: Locate, options: argparse.Namespace, summary: Summary) -> tuple[Guest, Vmx]:
    """Read the VM of a .vmx with the content `data` and the name `file`, with images at the paths from `locate`."""
    try:
        vmx = Vmx.decode(data)
    except VmxError as error:
        hint = "open the VM in VMware, and take the file it writes."
        raise SubmitError(f"VMware could not read {file}: {error}.", hint) from error
    if vmx.is_encrypted:
        raise SubmitError(f"{file} is encrypted: nothing of the VM can be read without its password.", DECRYPT_HINT)
    stem = os.path.splitext(os.path.basename(file))[0]
    made = Guest(simple_name(options.name, vmx.get("displayName", ""), stem, "vm"))
    made.places |= {"memory": "memsize", "vcpus": "numvcpus", "Topology": "cpuid.coresPerSocket"}
    used = {"memsize", "numvcpus", "firmware", "displayname", *_options(vmx, made, summary)}
    for drive in sorted(drives(vmx), key=lambda drive: _BUSES.index(drive.bus)):
        _drive(drive, vmx, made, summary, locate, hostile=not options.own)
    for name in sorted({name.lower().partition(".")[0] for name in vmx}, key=lambda name: (len(name), name)):
        if _NIC.fullmatch(name) and vmx.boolean(f"{name}.present"):
            _nic(vmx, name, made, options)
    used |= _boot(vmx, made, summary)
    _others(vmx, made, used, summary, as_is=options.as_is)
    return made, vmx


def _options(vmx: Vmx, made: Guest, summary: Summary) -> set[str]:
    """Read the entries that belong to no device; return the names, in lower case, that are reported with them."""
    used = set()
    made.memory_mib, made.vcpus = (number(vmx.get(name, "").strip()) for name in ("memsize", "numvcpus"))
    made.vcpus = made.vcpus if vmx.get("numvcpus") else 1
    if (cores := vmx.cores_per_socket(made.vcpus)) > 1:
        made.options["Topology"] = f"sockets={made.vcpus // cores},cores={cores},threads=1"
        used.add("cpuid.corespersocket")
    if vmx.get("firmware", "").strip().lower() == "efi":
        made.set_firmware("firmware", secure=vmx.boolean("uefi.secureBoot.enabled"))
        used.add("uefi.secureboot.enabled")
    if vmx.boolean("vtpm.present") or vmx.get("managedVM.autoAddVTPM", "").lower() == "software":
        made.set_tpm("vtpm.present")
        used |= {"vtpm.present", "managedvm.autoaddvtpm"}
    guest = vmx.get("guestOS", "").lower()
    if guest.startswith("arm"):
        made.set_architecture("arm64", "guestOS", summary)
        used.add("guestos")
    offset = vmx.get("rtc.diffFromUTC", "").strip()
    if offset not in ("", "0") or (not offset and guest.startswith("win")):  # VMware gives Windows local time
        place = "rtc.diffFromUTC" if offset else "guestOS"
        made.set_clock(LOCAL_TIME, place, f"{place} = {vmx[place]}", summary)
        used.add(place.lower())
    return used


def _boot(vmx: Vmx, made: Guest, summary: Summary) -> set[str]:
    """Set the boot order of the disks, if the file has one; return the names that are reported with it."""
    entries = {name: vmx.get(name, "").lower() for name in ("bios.bootOrder", "bios.hddOrder")}
    names = [name for name, value in entries.items() if value.strip()]
    order, first = ([word.strip() for word in value.split(",") if word.strip()] for value in entries.values())
    classes = summary.boot_order(("bios.bootOrder", word) for word in order)
    by_class = list(dict.fromkeys([*classes, *BOOT_CLASSES]))
    turns = {word: turn for turn, word in enumerate(dict.fromkeys(first))}

    def key(disk: GuestDisk) -> tuple[int, int]:
        return by_class.index(disk.boot_class), turns.get(disk.place.partition(".")[0], len(turns))

    for turn, disk in enumerate(sorted(made.disks, key=key), 1) if names else ():
        disk.boot = turn
    for name in names:
        summary.keep(name, f"{name} = {vmx[name]}", "the order of the disks")
    if not names and len({disk.bus for disk in made.disks if disk.boot_class == "hd"}) > 1:
        summary.advise("Hard disks are on more than one kind of controller: bios.hddOrder says which one is to boot.")
    return {name.lower() for name in names}


def _others(vmx: Vmx, made: Guest, used: set[str], summary: Summary, *, as_is: bool) -> None:
    """Report the entries that are unused and belong to no drive or NIC; with `as_is` only those that are missed."""
    for name, value in vmx.items():
        device, _, what = name.lower().partition(".")
        is_absent = not vmx.boolean(f"{device}.present", default=True) if what else False
        # The device has been reported.
        is_told = what in _READ and (DRIVE_NAME.fullmatch(device) or _NIC.fullmatch(device))
        if name.lower() in used or is_absent or is_told:
            continue
        said = f"{name} = {value}"
        why = next((reason for names, reason in _MISSED if names.fullmatch(name.lower())), "")
        if why and value.strip().lower() not in _NOTHING:
            summary.lose(name, said, why)
        elif name.lower() == "nvram" and "Firmware" in made.options and not as_is:
            summary.new_variables(name, said)
        elif not as_is:
            summary.skip(name, said)


def _drive(drive: Drive, vmx: Vmx, made: Guest, summary: Summary, locate: Locate, *, hostile: bool) -> None:
    place, said = f"{drive.place}.fileName", f"{drive.place}.fileName = {drive.file}"
    if drive.of_host:
        summary.lose(place, said, Why.HOST_DEVICE)
        return
    if drive.no_image or not drive.file:
        summary.skip(place, said, drive.no_image or "a disk without an image")
        return
    full = locate(drive.file, said)
    form = {CDROM: "iso", FLOPPY: "raw"}.get(drive.kind) or BY_ENDING.get(os.path.splitext(full)[1].lower(), "vmdk")
    disk = GuestDisk(full, form, place=place, what=said, hostile=hostile, writable=drive.kind != CDROM)
    if vmx.get(f"{drive.place}.mode", "").lower().endswith("nonpersistent"):
        disk.changed.append(f"it is not nonpersistent, {Why.NOT_DISCARDED}")
    is_model = drive.bus in ("scsi", "nvme")
    disk.put_on(vmx.get(f"{drive.bus}{drive.controller}.virtualDev", drive.bus) if is_model else drive.bus)
    made.disks.append(disk)


def _nic(vmx: Vmx, name: str, made: Guest, options: argparse.Namespace) -> None:
    kind = vmx.get(f"{name}.connectionType", "bridged").lower()
    if kind == "custom":
        kind = vmx.get(f"{name}.vnet", kind).lower().removeprefix("/dev/")
    model = vmx.get(f"{name}.virtualDev", "e1000").lower()
    network = vmx.get(f"{name}.networkName", "")
    nic = GuestNic("", place=name, what=f"NIC {kind}{f' ({network})' if network else ''}, {model}")
    if vmx.get(f"{name}.addressType", "").lower() == "static":
        nic.mac = vmx.get(f"{name}.address", "").strip().lower()
    nic.link_up = vmx.boolean(f"{name}.startConnected", default=True)
    nic.card = vmware_card_name(vmx.get(f"{name}.pciSlotNumber", "").strip())
    made.add_nic(nic, kind, model, asked=options.network, called=network)


def _as_is(vmx: Vmx, made: Guest, options: argparse.Namespace, summary: Summary) -> None:
    """Make a job for a machine with VMware: the .vmx and its disks are transferred."""
    name = os.path.basename(options.file)
    if any(char in name for char in ',"\\') or not name.lower().endswith(".vmx"):
        raise SubmitError(f"{name!a} cannot be the name of a job's .vmx.", "rename it.")
    made.own_disks = True
    made.attributes[VMX_FILE] = name
    made.files.append(os.path.abspath(options.file))
    if made.options.pop("TPM", None):
        summary.lose("vtpm.present", "a vTPM", "VMware encrypts a VM that has one, and a job's has none")
    for option in [name for name in ("Topology", "Firmware") if name in made.options]:
        summary.keep(made.places[option], option, str(made.options[option]))
    made.options.clear()
    if len(made.nics) > 1:
        summary.lose(made.nics[1].place, made.nics[1].what, "VMware jobs have one NIC")
    made.nics = [GuestNic(nic.kind, nic.mac, "", place=nic.place, what=nic.what) for nic in made.nics[:1]]
    made.vm_type = "vmrun"
    if options.shared:
        made.attributes[TRANSFER] = False
        made.attributes[DIR] = os.path.dirname(os.path.abspath(options.file))
    disks = made.disks
    for disk in disks:
        if not options.shared:
            if (reason := check(disk, summary, by_qemu=False)) and not disk.files:
                raise SubmitError(f"{disk.place}: {disk.path}: {reason}.", "leave --as-is out, which converts it.")
            made.files += [disk.path, *disk.files]
        summary.keep(disk.place, disk.what, "stays where it is" if options.shared else "goes with the job")
    names = [os.path.basename(path) for disk in disks if disk.format == "vmdk" for path in (disk.path, *disk.files)]
    if names:
        made.attributes[VMDK_FILES] = ",".join(names)
    _bring_nvram(vmx, made, options, summary)
    summary.advise("The machine must have VMware: --type vmrun or vsphere (docs/how-to/vmware.md).")


def _bring_nvram(vmx: Vmx, made: Guest, options: argparse.Namespace, summary: Summary) -> None:
    """Transfer the firmware's variables if they are beside the .vmx; otherwise VMware makes new ones."""
    if not (value := vmx.get("nvram", "")):
        return
    name = value.replace("\\", "/")
    path = os.path.join(os.path.dirname(os.path.abspath(options.file)), name)
    if not path.lower().endswith(".nvram") or not os.path.isfile(path):
        summary.skip("nvram", f"nvram = {value}", "the file is not here: VMware makes a new one")
        return
    made.files.append(beside(options, name, f"nvram = {value}"))
    summary.keep("nvram", f"nvram = {value}", "goes with the job")
