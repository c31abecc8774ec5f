"""VMware's .vmx as a job: as attributes for libvirt, or the file itself (``--as-is``)."""

import argparse
import os
import re

from vmgahp.commands.submit.images import check, require_beside
from vmgahp.commands.submit.machine import Guest, GuestDisk, GuestNic, simple_name
from vmgahp.commands.submit.summary import SubmitError, Summary
from vmgahp.images.formats import BY_ENDING
from vmgahp.job.vmware import DIR, TRANSFER, VMDK_FILES, VMX_FILE
from vmgahp.job.vmx import LARGEST, Vmx, VmxError

_DRIVE = re.compile(r"(scsi|sata|nvme|ide)(\d{1,2}):(\d{1,2})|(floppy)(\d)")
_NIC = re.compile(r"ethernet(\d{1,2})")
_DEVICE = (
    *("present", "filename", "devicetype", "filetype", "mode", "startconnected"),
    *("connectiontype", "virtualdev", "addresstype", "address", "networkname", "vnet"),
)
"""What is read of drives and NICs."""
_KINDS = {"nat": "nat", "bridged": "bridge"}
_MODELS = {"e1000": "e1000", "e1000e": "e1000e"}

_SETTLED = re.compile(
    r"(?:\.encoding|config\.version|virtualhw\..*|displayname|annotation|guestos(?:\..*|altname)?|extendedconfigfile|uuid\..*"
    r"|vc\.uuid|vm\.genidx?|pcibridge\d+\..*|vmci0\..*|hpet0\..*|tools\..*|toolsinstallmanager\..*|toolscripts\..*"
    r"|cleanshutdown|softpoweroff|powertype\..*|gui\..*|policy\..*|sched\..*|numa\..*|monitor\..*|migrate\..*|hgfs\..*"
    r"|isolation\..*|remotedisplay\..*|replay\..*|vmotion\..*|msg\.autoanswer|proxyapps\..*|unity\..*|log\..*|logging"
    r"|checkpoint\..*|snapshot\..*|evcCompatibilityMode|mem\.hotadd|vcpu\.hotadd|memallowautoscaledown|memtrimrate"
    r"|mainmem\..*|prefvmx\..*|bios\.bootorder|bios\.bootdelay|floppy\d\..*|mks\..*|svga\..*|vmxstats\..*|cpuid\..*"
    r"|(?:scsi|sata|ide|nvme)\d+\.(?:present|pcislotnumber|saswwid|sharedbus)|usb(?:_xhci)?(?:\.|:).*|ehci(?:\.|:).*"
    r"|ethernet\d+\..*|(?:scsi|sata|ide|nvme)\d+:\d+\..*|vmx\.buildtype|virtual\w+\..*|nvram|workingdir|rtc\..*"
    r"|inmemory\w*|viv\..*|acpi\..*|sound\.(?:filename|autodetect|pcislotnumber)|time\..*|ulm\..*|keyboard.*|mouse.*)",
    re.IGNORECASE,
)
"""Names that say nothing of the VM that a job would miss. What belongs to a device is here too: the device itself is
told where it is not carried over."""


def machine(options: argparse.Namespace, summary: Summary) -> Guest:
    """Read the file. Raises `SubmitError`."""
    try:
        with open(options.file, "rb") as file:
            vmx = Vmx.decode(file.read(LARGEST + 1))
    except OSError as error:
        raise SubmitError(f"{options.file} cannot be read ({error.strerror}).") from error
    except VmxError as error:
        raise SubmitError(
            f"VMware could not read {options.file}: {error}.", "open the VM in VMware, and take the file it writes."
        ) from error
    stem = os.path.splitext(os.path.basename(options.file))[0]
    made = Guest(name=simple_name(options.name or vmx.get("displayName", ""), simple_name(stem, "vm")))
    used = {"memsize", "numvcpus", "firmware", "uefi.secureboot.enabled", "displayname"}
    made.memory_mib = _number(vmx, "memsize")
    made.vcpus = _number(vmx, "numvcpus") or 1
    cores = _number(vmx, "cpuid.coresPerSocket")
    if cores > 1 and made.vcpus % cores == 0:
        made.options["Topology"] = f"sockets={made.vcpus // cores},cores={cores},threads=1"
        used.add("cpuid.corespersocket")
    if vmx.get("firmware", "").lower() == "efi":
        made.options["Firmware"] = "uefi-secure" if vmx.boolean("uefi.secureBoot.enabled") else "uefi"
    if vmx.boolean("vtpm.present"):
        made.options["TPM"] = True
        used.add("vtpm.present")
    names = sorted({name.lower().partition(".")[0] for name in vmx})
    for name in names:
        if _DRIVE.fullmatch(name):
            _drive(vmx, name, made, summary, options)
        elif found := _NIC.fullmatch(name):
            _nic(vmx, name, int(found[1]), made, summary)
    if options.as_is:
        _as_is(made, options, summary)
        return made
    for name, value in vmx.items():
        device, _, what = name.lower().partition(".")
        if name.lower() in used or _is_nothing(vmx, name):
            continue
        if (_DRIVE.fullmatch(device) or _NIC.fullmatch(device)) and what in _DEVICE:
            continue  # the device has been told of
        if _SETTLED.fullmatch(name) and not (name.lower() == "nvram" and "Firmware" in made.options):
            summary.settle(f"{name} = {value}", "VMware's own, or the machine's to settle")
        elif what == "present":
            summary.lose(f"{name} = {value}", f"the device {device} {vmx.get(device + '.virtualDev', '')}".rstrip())
        elif not vmx.boolean(f"{device}.present"):
            summary.lose(f"{name} = {value}", "nothing here corresponds to it")
    return made


def _is_nothing(vmx: Vmx, name: str) -> bool:
    """Whether the entry belongs to a device that is not there."""
    device, dot, what = name.partition(".")
    if not dot:
        return False
    if what.lower() == "present":
        return not vmx.boolean(name)
    return f"{device}.present" in vmx and not vmx.boolean(f"{device}.present")


def _number(vmx: Vmx, name: str) -> int:
    text = vmx.get(name, "").strip()
    if text and not (text.isascii() and text.isdigit() and len(text) < 10):
        raise SubmitError(f"{name} = {text[:40]!a} is not a number.", "correct it in the .vmx.")
    return int(text or 0)


def _drive(vmx: Vmx, name: str, made: Guest, summary: Summary, options: argparse.Namespace) -> None:
    kind = name.partition(":")[0].rstrip("0123456789")
    present = vmx.boolean(f"{name}.present", default=kind == "floppy" and f"{name}.fileName" in vmx)
    if not present:
        return
    path, what = vmx.get(f"{name}.fileName", ""), vmx.get(f"{name}.deviceType", "").lower()
    place = f"{name}.fileName = {path}"
    images = ("", "disk", "ata-harddisk", "scsi-harddisk", "nvme", "plaindisk", "cdrom-image", "file")
    what = vmx.get(f"{name}.fileType", what).lower() if kind == "floppy" else what
    if what not in images or not path or path.lower() in ("auto detect", "emptybackingstring"):
        summary.lose(place, f"a drive of the host, or without an image ({what or 'no type'})")
        return
    is_cd = what == "cdrom-image"
    plain = path.replace("\\", "/")
    full = os.path.join(os.path.dirname(os.path.abspath(options.file)), plain)
    if not options.own:
        require_beside(full, place, options.file)
    form = "iso" if is_cd else "raw" if kind == "floppy" else BY_ENDING.get(os.path.splitext(full)[1].lower(), "vmdk")
    if vmx.get(f"{name}.mode", "").lower().endswith("nonpersistent"):
        summary.lose(f"{name}.mode = {vmx[f'{name}.mode']}", "what the guest writes stays on the disk")
    disk = GuestDisk(full, form, place=place, hostile=not options.own)
    disk.bus = {"ide": "ide", "floppy": "floppy"}.get(kind, "sata")
    disk.writable = not is_cd and kind != "floppy"
    if kind in ("scsi", "nvme") and not is_cd:
        summary.lose(
            place, f"the controller {vmx.get(name.partition(':')[0] + '.virtualDev', kind)}: the disk is on SATA"
        )
    made.disks.append(disk)


def _nic(vmx: Vmx, name: str, number: int, made: Guest, summary: Summary) -> None:
    if not vmx.boolean(f"{name}.present"):
        return
    kind = vmx.get(f"{name}.connectionType", "bridged").lower()
    model = vmx.get(f"{name}.virtualDev", "e1000").lower()
    if kind not in _KINDS:
        network = vmx.get(f"{name}.networkName", vmx.get(f"{name}.vnet", kind))
        summary.lose(f"{name}.connectionType = {kind}", f"the network {network}: the execute machine's own")
    if model not in _MODELS:
        summary.lose(f"{name}.virtualDev = {model}", "it is an e1000")
    chosen = vmx.get(f"{name}.addressType", "").lower() == "static"
    address = vmx.get(f"{name}.address", "").strip().lower() if chosen else ""
    up = vmx.boolean(f"{name}.startConnected", default=True)
    made.nics.append(GuestNic(_KINDS.get(kind, ""), address, _MODELS.get(model, "e1000"), up))


def _as_is(made: Guest, options: argparse.Namespace, summary: Summary) -> None:
    """A job for a machine with VMware: the .vmx and its disks go with it."""
    name = os.path.basename(options.file)
    if any(char in name for char in ',"\\') or not name.lower().endswith(".vmx"):
        raise SubmitError(f"{name!a} cannot be the name of a job's .vmx.", "rename it.")
    made.own_disks = True
    made.attributes[VMX_FILE] = name
    made.files.append(os.path.abspath(options.file))
    made.options.clear()
    if len(made.nics) > 1:
        summary.lose("ethernet1", "VMware jobs have one NIC")
    made.nics = [GuestNic(nic.kind, nic.mac) for nic in made.nics[:1]]
    made.vm_type = "vmrun"
    if options.shared:
        made.attributes[TRANSFER] = False
        made.attributes[DIR] = os.path.dirname(os.path.abspath(options.file))
    disks = made.disks
    for disk in disks:
        if not options.shared:
            check(disk, summary)
            made.files += [disk.path, *disk.files]
        summary.carry(
            f"disk {os.path.basename(disk.path)}, {'stays where it is' if options.shared else 'goes with the job'}"
        )
    names = [os.path.basename(path) for disk in disks if disk.format == "vmdk" for path in (disk.path, *disk.files)]
    if names:
        made.attributes[VMDK_FILES] = ",".join(names)
    summary.advise("The machine must have VMware: --type vmrun or vsphere (docs/how-to/vmware.md).")
