"""The requests of a job's XML, as the same records as those of a job ad.

They are checked by the same code as every other job: images are located and opened as the job's user, networks are
those on offer, memory and CPUs those of the machine. If the ad has the same request, both must agree: HTCondor has
matched and accounts for the ad, and the XML may request less memory and fewer CPUs.
"""

import os
from collections.abc import Iterable
from math import prod
from xml.etree import ElementTree as etree

from vmgahp.config import Settings
from vmgahp.domain import compare
from vmgahp.domain.job_xml.sanitize import refused
from vmgahp.errors import JobFault
from vmgahp.job import disks
from vmgahp.job.ad import JobAd
from vmgahp.job.disks import DISK, DiskEntry
from vmgahp.job.nics import Nic
from vmgahp.job.options import ARCH, FIRMWARE, TOPOLOGY, TPM, Options
from vmgahp.job.own_xml import OwnXml
from vmgahp.text import shown

_KINDS = {"network": "nat", "bridge": "bridge", "user": "user"}
_FIRMWARES = {"bios": "bios", "efi": "uefi"}


def of(domain: etree.Element, ad: JobAd, settings: Settings, name: str) -> OwnXml:
    """Return all requests of a sanitized domain that other jobs make in the ad. Raises `JobFault`."""
    said = _Said(ad, name)
    memory = _memory(domain, said)
    vcpus = _vcpus(domain, said)
    entries = _disks(domain, said)
    nics = _interfaces(domain, said, settings)
    vnc = domain.find("devices/graphics") is not None
    if vnc and said.has("JobVMVNCConsole") and not ad.boolean("JobVMVNCConsole"):
        raise said.declined("JobVMVNCConsole")
    tpm = domain.find("devices/tpm") is not None
    if tpm and said.options.has(TPM) and not said.options.boolean(TPM):
        raise said.declined(said.options.attribute(TPM))
    firmware, arch = _firmware(domain, said)
    return OwnXml(memory, vcpus, entries, nics, vnc, tpm, firmware, arch)


class _Said:
    """The requests of the ad about the same things."""

    def __init__(self, ad: JobAd, name: str) -> None:
        self.ad = ad
        self.name = name
        self.options = Options(ad)

    def refused(self, problem: str, hint: str) -> JobFault:
        return refused(self.name, problem, hint)

    def has(self, attribute: str) -> bool:
        return (self.ad.expression(attribute) or "undefined").lower() != "undefined"

    def declined(self, attribute: str) -> JobFault:
        """Make the fault for a request of the XML that the ad contradicts; it may make the same request or none."""
        return self.refused(
            f"it asks for what {attribute} = {shown(self.ad.expression(attribute))} declines",
            f"leave {attribute} out, or the device out of the file.",
        )

    def require_same(self, option: str, value: str) -> None:
        given = self.options.string(option)
        if given and given.lower() != value.lower():
            attribute = self.options.attribute(option)
            raise self.refused(
                f"it asks for {shown(value)}, and {attribute} = {shown(given)}", f"leave {attribute} out."
            )


def _memory(domain: etree.Element, said: _Said) -> int | None:
    memory, current = (compare.memory(domain.find(tag)) for tag in ("memory", "currentMemory"))
    if current > memory:
        raise said.refused("/domain/currentMemory is more than /domain/memory", "let it be the same, or less.")
    given = said.ad.integer("JobVMMemory")
    if given is None:
        given = said.ad.integer("RequestMemory")
    if not memory or given is None:
        return None  # the ad alone decides the amount; a missing one is refused there
    if memory > given << 20:
        raise said.refused(
            f"/domain/memory is {-(-memory >> 20)} MiB, and the job has {given} MiB (JobVMMemory)",
            "set vm_memory to as much, or lower it in the file.",
        )
    return -(-memory >> 20)


def _vcpus(domain: etree.Element, said: _Said) -> int | None:
    number = int(domain.findtext("vcpu") or 0)
    ours = said.ad.integer("JobVM_VCPUS")
    if ours is None:
        ours = said.ad.integer("RequestCpus")
    if number > max(ours or 1, 1):
        raise said.refused(
            f"/domain/vcpu is {number}, and the job has {max(ours or 1, 1)} (JobVM_VCPUS)",
            "set vm_vcpus to as many, or lower it in the file.",
        )
    topology = domain.find("cpu/topology")
    if topology is not None:
        if said.options.has(TOPOLOGY):
            attribute = said.options.attribute(TOPOLOGY)
            raise said.refused(f"it has a CPU topology, and the job has {attribute} too", "leave one of them out.")
        product, granted = prod(map(int, topology.attrib.values())), number or max(ours or 1, 1)
        if product != granted:
            raise said.refused(
                f"/domain/cpu/topology has {product} CPUs, and the VM has {granted}", "let them be the same."
            )
    return number or None


def _disks(domain: etree.Element, said: _Said) -> tuple[DiskEntry, ...]:
    """Return the disks; none if vm_disk names them, which takes precedence."""
    found: dict[str, DiskEntry] = {}
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
        if device in found:
            raise said.refused(f"{path}/target/@dev = {device} is used twice", "give every disk its own device.")
        driver = disk.find("driver")
        image_format = "raw" if driver is None else driver.get("type", "raw").lower()
        if disk.get("device") == "cdrom" and image_format == "raw":
            image_format = "iso"
        written = disk.find("readonly") is None and disk.get("device") != "cdrom"
        permission = ("w" if written else "r") + ("s" if disk.find("shareable") is not None else "")
        fields = (file, device, permission, image_format)
        found[device] = DiskEntry(":".join(fields), fields)
    if not said.has(DISK):
        return tuple(found.values())
    _require_agreement(found.values(), said)
    return ()


def _require_agreement(asked: Iterable[DiskEntry], said: _Said) -> None:
    """Make sure that vm_disk has every disk of the XML, with the same file, permission and format.

    condor_submit requires vm_disk of jobs of type kvm, so it takes precedence; the XML may add details.
    """
    text = said.ad.string(DISK) or ""
    given = {}
    for entry in disks.entries(text):
        if entry.is_well_formed and not entry.is_of_catalog:
            file, device, permission, form = (*entry.fields, "raw")[:4]
            mode = ("w" if "w" in permission.lower() else "r") + ("s" if "s" in permission.lower() else "")
            given[device.lower()] = (os.path.basename(file), mode, "raw" if form.lower() == "iso" else form.lower())
    for entry in asked:
        file, device, mode, form = entry.fields
        same = (os.path.basename(file), mode, "raw" if form == "iso" else form)
        if given.get(device) != same:
            raise said.refused(
                f"its disk {device} is {':'.join(same)}, and {DISK} = {shown(text)}",
                "let vm_disk name every disk of the file with its device, permission and format.",
            )


def _interfaces(domain: etree.Element, said: _Said, settings: Settings) -> tuple[Nic, ...]:
    """Return the interfaces; only networks that the machine offers are accepted, as for any job."""
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
        address = compare.value(interface, "mac", "address").replace("-", ":").lower()
        nic = Nic(_KINDS[kind], address, link_up=compare.value(interface, "link", "state") != "down")
        model = compare.value(interface, "model", "type")
        interfaces.append(nic._replace(model=model) if model else nic)
    if interfaces and said.has("JobVMNetworking") and not said.ad.boolean("JobVMNetworking"):
        raise said.declined("JobVMNetworking")
    return tuple(interfaces)


def _firmware(domain: etree.Element, said: _Said) -> tuple[str, str]:
    """Return the firmware and the architecture."""
    element = domain.find("os")
    if element is None:
        return "", ""
    secure = any(
        feature.get("name") == "secure-boot" and feature.get("enabled") == "yes"
        for feature in element.iterfind("firmware/feature")
    )
    firmware = _FIRMWARES.get(element.get("firmware", ""), "")
    if element.find("firmware") is not None and firmware != "uefi":
        raise said.refused("/domain/os/firmware is for <os firmware='efi'>", "set the attribute too.")
    if firmware:
        firmware = "uefi-secure" if secure else firmware
        said.require_same(FIRMWARE, firmware)
    arch = compare.value(element, "type", "arch")
    if arch == os.uname().machine:
        arch = ""
    if arch:
        said.require_same(ARCH, arch)
    if element.find("kernel") is None and any(element.find(tag) is not None for tag in ("initrd", "cmdline")):
        raise said.refused("/domain/os has an initrd or a cmdline and no kernel", "add the kernel.")
    return firmware, arch
