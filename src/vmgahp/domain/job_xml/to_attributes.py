"""What the job's XML asks for, said once more in the attributes of the job ad.

There it is checked by the very code that checks every other job: images are looked for and opened as the job's
user, networks are those on offer, memory and CPUs those of the machine. Where the ad says it too, both must
agree: the ad is what HTCondor has matched and accounts for, and of memory and CPUs the XML may have less.
"""

import os
from xml.etree import ElementTree as etree

from vmgahp.config import Settings
from vmgahp.domain import compare
from vmgahp.domain.job_xml.sanitize import refused
from vmgahp.job import disks
from vmgahp.job.ad import JobAd, quote
from vmgahp.text import shown

DISK, NICS = "VMPARAM_vm_Disk", "VMPARAM_vm_NICs"

_KINDS = {"network": "nat", "bridge": "bridge", "user": "user"}
_FIRMWARES = {"bios": "bios", "efi": "uefi"}


def attributes(domain: etree.Element, ad: JobAd, settings: Settings, name: str) -> dict[str, str]:
    """Attribute -> expression, for all that a sanitized domain says and the ad does not. Raises `JobFault`."""
    said = _Said(ad, name)
    _memory(domain, said)
    _cpus(domain, said)
    _disks(domain, said)
    _interfaces(domain, said, settings)
    if domain.find("devices/graphics") is not None:
        said.boolean("JobVMVNCConsole")
    if domain.find("devices/tpm") is not None:
        said.boolean("VMPARAM_vm_TPM")
    _firmware(domain, said)
    return said.added


class _Said:
    """The ad, and what the XML adds to it."""

    def __init__(self, ad: JobAd, name: str) -> None:
        self.ad = ad
        self.name = name
        self.added: dict[str, str] = {}

    def refused(self, problem: str, hint: str) -> Exception:
        return refused(self.name, problem, hint)

    def has(self, attribute: str) -> bool:
        return (self.ad.expression(attribute) or "undefined").lower() != "undefined"

    def boolean(self, attribute: str) -> None:
        """The XML wants something that the ad may want too, but must not forbid."""
        if self.has(attribute) and not self.ad.boolean(attribute):
            raise self.refused(
                f"it asks for what {attribute} = {shown(self.ad.expression(attribute))} declines",
                f"leave {attribute} out, or the device out of the file.",
            )
        self.added[attribute] = "true"

    def text(self, attribute: str, value: str) -> None:
        given = (self.ad.string(attribute) or "").strip()
        if given and given.lower() != value.lower():
            raise self.refused(
                f"it asks for {shown(value)}, and {attribute} = {shown(given)}", f"leave {attribute} out."
            )
        self.added[attribute] = quote(value)


def _memory(domain: etree.Element, said: _Said) -> None:
    memory, current = (compare.memory(domain.find(tag)) for tag in ("memory", "currentMemory"))
    if current > memory:
        raise said.refused("/domain/currentMemory is more than /domain/memory", "let it be the same, or less.")
    given = said.ad.integer("JobVMMemory")
    if given is None:
        given = said.ad.integer("RequestMemory")
    if not memory or given is None:
        return  # the ad alone says how much; one that does not is refused there
    if memory > given << 20:
        raise said.refused(
            f"/domain/memory is {-(-memory >> 20)} MiB, and the job has {given} MiB (JobVMMemory)",
            "set vm_memory to as much, or lower it in the file.",
        )
    said.added["JobVMMemory"] = str(-(-memory >> 20))


def _cpus(domain: etree.Element, said: _Said) -> None:
    number = int(domain.findtext("vcpu") or 0)
    ours = said.ad.integer("JobVM_VCPUS")
    if ours is None:
        ours = said.ad.integer("RequestCpus")
    if number > max(ours or 1, 1):
        raise said.refused(
            f"/domain/vcpu is {number}, and the job has {max(ours or 1, 1)} (JobVM_VCPUS)",
            "set vm_vcpus to as many, or lower it in the file.",
        )
    if number:
        said.added["JobVM_VCPUS"] = str(number)
    topology = domain.find("cpu/topology")
    if topology is None:
        return
    if said.has("VMPARAM_vm_Topology"):
        raise said.refused("it has a CPU topology, and the job has VMPARAM_vm_Topology too", "leave one of them out.")
    product = 1
    for value in topology.attrib.values():
        product *= int(value)
    number = number or max(ours or 1, 1)
    if product != number:
        raise said.refused(f"/domain/cpu/topology has {product} CPUs, and the VM has {number}", "let them be the same.")


def _disks(domain: etree.Element, said: _Said) -> None:
    entries: dict[str, tuple[str, str, str]] = {}
    for number, disk in enumerate(domain.iterfind("devices/disk"), start=1):
        path = f"/domain/devices/disk[{number}]"
        source, target = disk.find("source"), disk.find("target")
        file = "" if source is None else source.get("file", "")
        device = "" if target is None else target.get("dev", "").lower()
        if disk.get("type", "file") != "file" or not file or not device:
            raise said.refused(f"{path} has no source file or no target dev", "give it both.")
        if "," in file or ":" in file or file != file.strip():
            raise said.refused(
                f"{path}/source/@file = {shown(file)} has a comma, a colon or a blank at its end",
                "give the image another name.",
            )
        if device in entries:
            raise said.refused(f"{path}/target/@dev = {device} is used twice", "give every disk its own device.")
        driver = disk.find("driver")
        image_format = "raw" if driver is None else driver.get("type", "raw").lower()
        if disk.get("device") == "cdrom" and image_format == "raw":
            image_format = "iso"
        written = disk.find("readonly") is None and disk.get("device") != "cdrom"
        permission = ("w" if written else "r") + ("s" if disk.find("shareable") is not None else "")
        entries[device] = (file, permission, image_format)
    if said.has(DISK):
        _agree(entries, said)
    elif entries:
        said.added[DISK] = quote(
            ",".join(f"{file}:{device}:{mode}:{form}" for device, (file, mode, form) in entries.items())
        )


def _agree(entries: dict[str, tuple[str, str, str]], said: _Said) -> None:
    """vm_disk, which condor_submit demands of jobs of type kvm, counts: the XML may tell more of the same disks."""
    text = said.ad.string(DISK) or ""
    given = {}
    for entry in disks.entries(text):
        if entry.is_well_formed and not entry.is_of_catalog:
            file, device, permission, form = (*entry.fields, "raw")[:4]
            mode = ("w" if "w" in permission.lower() else "r") + ("s" if "s" in permission.lower() else "")
            given[device.lower()] = (os.path.basename(file), mode, "raw" if form.lower() == "iso" else form.lower())
    for device, (file, mode, form) in entries.items():
        same = (os.path.basename(file), mode, "raw" if form == "iso" else form)
        if given.get(device) != same:
            raise said.refused(
                f"its disk {device} is {':'.join(same)}, and {DISK} = {shown(text)}",
                "let vm_disk name every disk of the file with its device, permission and format.",
            )


def _interfaces(domain: etree.Element, said: _Said, settings: Settings) -> None:
    """The interfaces: only of networks that the machine offers, as for any job."""
    ours = {
        "network": ("network", settings.string("VM_NAT_NETWORK"), "VM_NAT_NETWORK"),
        "bridge": ("bridge", settings.string("VM_NETWORKING_BRIDGE_INTERFACE"), "VM_NETWORKING_BRIDGE_INTERFACE"),
    }
    interfaces = []
    for number, interface in enumerate(domain.iterfind("devices/interface"), start=1):
        path = f"/domain/devices/interface[{number}]"
        kind = interface.get("type", "")
        if kind not in _KINDS:
            raise said.refused(f"{path} has no type", "write network, bridge or user.")
        source = interface.find("source")
        for attribute, value in () if source is None else source.items():
            wanted, mine, setting = ours.get(kind, ("", "", ""))
            if attribute != wanted or value != mine:
                raise said.refused(
                    f"{path}/source/@{attribute} = {shown(value)} is not a network that jobs get here"
                    + (f" ({setting} = {mine})" if setting else ""),
                    "leave the source out: jobs get this machine's own.",
                )
        words = [_KINDS[kind], compare.value(interface, "mac", "address").replace("-", ":").lower()]
        words += [compare.value(interface, "model", "type"), compare.value(interface, "link", "state")]
        interfaces.append([word for word in words if word])
    if not interfaces:
        return
    said.boolean("JobVMNetworking")
    said.text(NICS, ", ".join(":".join(interface) for interface in interfaces))


def _firmware(domain: etree.Element, said: _Said) -> None:
    element = domain.find("os")
    if element is None:
        return
    secure = any(
        feature.get("name") == "secure-boot" and feature.get("enabled") == "yes"
        for feature in element.iterfind("firmware/feature")
    )
    firmware = _FIRMWARES.get(element.get("firmware", ""), "")
    if element.find("firmware") is not None and firmware != "uefi":
        raise said.refused("/domain/os/firmware is for <os firmware='efi'>", "set the attribute too.")
    if firmware:
        said.text("VMPARAM_vm_Firmware", "uefi-secure" if secure else firmware)
    arch = compare.value(element, "type", "arch")
    if arch and arch != os.uname().machine:
        said.text("VMPARAM_vm_Arch", arch)
    if element.find("kernel") is None and any(element.find(tag) is not None for tag in ("initrd", "cmdline")):
        raise said.refused("/domain/os has an initrd or a cmdline and no kernel", "add the kernel.")
