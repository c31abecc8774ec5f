"""The requests of a job's XML, as the attributes with which other jobs make them.

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
from vmgahp.job.ad import JobAd, Plain
from vmgahp.job.disks import DISK
from vmgahp.job.nics import Nic, nics
from vmgahp.job.options import ARCH, FIRMWARE, NICS, TOPOLOGY, TPM, Options
from vmgahp.text import shown

_KINDS = {"network": "nat", "bridge": "bridge", "user": "user"}
_FIRMWARES = {"bios": "bios", "efi": "uefi"}


def completed(ad: JobAd, domain: etree.Element, settings: Settings, name: str) -> JobAd:
    """Return the ad with all requests of a sanitized domain as attributes, so that nothing else reads the XML for them.

    Raises `JobFault`.
    """
    reader = _Reader(ad, name)
    reader.memory(domain)
    reader.vcpus(domain)
    reader.disks(domain)
    reader.interfaces(domain, settings)
    reader.devices(domain)
    reader.firmware(domain)
    return ad.changed(reader.found)


class _Reader:
    """A reader of requests, which knows those of the ad about the same things."""

    def __init__(self, ad: JobAd, name: str) -> None:
        self.ad = ad
        self.name = name
        self.options = Options(ad)
        self.found: dict[str, Plain | None] = {}

    def memory(self, domain: etree.Element) -> None:
        memory, current = (compare.memory(domain.find(tag)) for tag in ("memory", "currentMemory"))
        if current > memory:
            raise self._refused("/domain/currentMemory is more than /domain/memory", "let it be the same, or less.")
        given = self.ad.integer("JobVMMemory")
        if given is None:
            given = self.ad.integer("RequestMemory")
        if not memory or given is None:
            return  # the ad alone decides the amount; a missing one is refused there
        if memory > given << 20:
            raise self._refused(
                f"/domain/memory is {-(-memory >> 20)} MiB, and the job has {given} MiB (JobVMMemory)",
                "set vm_memory to as much, or lower it in the file.",
            )
        self.found["JobVMMemory"] = -(-memory >> 20)

    def vcpus(self, domain: etree.Element) -> None:
        number = int(domain.findtext("vcpu") or 0)
        ours = self.ad.integer("JobVM_VCPUS")
        if ours is None:
            ours = self.ad.integer("RequestCpus")
        granted = max(ours or 1, 1)
        if number > granted:
            raise self._refused(
                f"/domain/vcpu is {number}, and the job has {granted} (JobVM_VCPUS)",
                "set vm_vcpus to as many, or lower it in the file.",
            )
        topology = domain.find("cpu/topology")
        if topology is not None:
            if self.options.has(TOPOLOGY):
                attribute = self.options.attribute(TOPOLOGY)
                raise self._refused(f"it has a CPU topology, and the job has {attribute} too", "leave one of them out.")
            product, has = prod(map(int, topology.attrib.values())), number or granted
            if product != has:
                raise self._refused(
                    f"/domain/cpu/topology has {product} CPUs, and the VM has {has}", "let them be the same."
                )
        if number:
            self.found["JobVM_VCPUS"] = number

    def disks(self, domain: etree.Element) -> None:
        """Read the disks, which must be among those of vm_disk if the job has it."""
        found: dict[str, tuple[str, ...]] = {}
        for number, disk in enumerate(domain.iterfind("devices/disk"), start=1):
            path = f"/domain/devices/disk[{number}]"
            file, device = compare.value(disk, "source", "file"), compare.value(disk, "target", "dev").lower()
            if disk.get("type", "file") != "file" or not file or not device:
                raise self._refused(f"{path} has no source file or no target dev", "give it both.")
            if "," in file or ":" in file or file != file.strip():
                raise self._refused(
                    f"{path}/source/@file = {shown(file)} has a comma, a colon or a blank at its end",
                    "give the image another name.",
                )
            if device in found:
                raise self._refused(f"{path}/target/@dev = {device} is used twice", "give every disk its own device.")
            form = compare.value(disk, "driver", "type", "raw").lower()
            if disk.get("device") == "cdrom" and form == "raw":
                form = "iso"
            written = disk.find("readonly") is None and disk.get("device") != "cdrom"
            permission = ("w" if written else "r") + ("s" if disk.find("shareable") is not None else "")
            found[device] = (file, device, permission, form)
        if self._has(DISK):
            self._require_same_disks(found.values())
        elif found:
            self.found[DISK] = ",".join(map(":".join, found.values()))

    def interfaces(self, domain: etree.Element, settings: Settings) -> None:
        """Read the interfaces; only networks that the machine offers are accepted, as for any job."""
        ours = {
            "network": ("network", settings.string("VM_NAT_NETWORK"), "VM_NAT_NETWORK"),
            "bridge": ("bridge", settings.string("VM_NETWORKING_BRIDGE_INTERFACE"), "VM_NETWORKING_BRIDGE_INTERFACE"),
        }
        found = []
        for number, interface in enumerate(domain.iterfind("devices/interface"), start=1):
            path = f"/domain/devices/interface[{number}]"
            kind = interface.get("type", "")
            if kind not in _KINDS:
                raise self._refused(f"{path} has no type", "write network, bridge or user.")
            source = interface.find("source")
            for attribute, value in () if source is None else source.items():
                wanted, mine, setting = ours.get(kind, ("", "", ""))
                if attribute != wanted or value != mine:
                    raise self._refused(
                        f"{path}/source/@{attribute} = {shown(value)} is not a network that jobs get here"
                        + (f" ({setting} = {mine})" if setting else ""),
                        "leave the source out: jobs get this machine's own.",
                    )
            address = compare.value(interface, "mac", "address").replace("-", ":")
            link_up = compare.value(interface, "link", "state") != "down"
            found.append(Nic(_KINDS[kind], address, compare.value(interface, "model", "type", "virtio"), link_up))
        if not found:
            return
        if self._has("JobVMNetworking") and not self.ad.boolean("JobVMNetworking"):
            raise self._declined("JobVMNetworking")
        text = ", ".join(map(str, found))
        asked: dict[str, Plain | None] = {"JobVMNetworking": True, self.options.attribute(NICS): text}
        if self.options.string(NICS):
            changed = self.ad.changed(asked)
            if nics(self.ad, settings, self.options) != nics(changed, settings, Options(changed)):
                raise self.options.refused(NICS, f"the job's own XML asks for {shown(text)}", "keep one of them.")
        self.found |= asked

    def devices(self, domain: etree.Element) -> None:
        if domain.find("devices/graphics") is not None:
            if self._has("JobVMVNCConsole") and not self.ad.boolean("JobVMVNCConsole"):
                raise self._declined("JobVMVNCConsole")
            self.found["JobVMVNCConsole"] = True
        if domain.find("devices/tpm") is not None:
            attribute = self.options.attribute(TPM)
            if self.options.has(TPM) and not self.options.boolean(TPM):
                raise self._declined(attribute)
            self.found[attribute] = True

    def firmware(self, domain: etree.Element) -> None:
        """Read the firmware and the architecture."""
        element = domain.find("os")
        if element is None:
            return
        features = {each.get("name"): each.get("enabled") for each in element.iterfind("firmware/feature")}
        # Without enrolled keys the firmware starts unsigned systems, too: that is plain UEFI, and ours enrolls keys.
        secure = features.get("secure-boot") == "yes" and features.get("enrolled-keys") != "no"
        firmware = _FIRMWARES.get(element.get("firmware", ""), "")
        if element.find("firmware") is not None and firmware != "uefi":
            raise self._refused("/domain/os/firmware is for <os firmware='efi'>", "set the attribute too.")
        self._take(FIRMWARE, "uefi-secure" if firmware and secure else firmware)
        arch = compare.value(element, "type", "arch")
        self._take(ARCH, "" if arch == os.uname().machine else arch)
        if element.find("kernel") is None and any(element.find(tag) is not None for tag in ("initrd", "cmdline")):
            raise self._refused("/domain/os has an initrd or a cmdline and no kernel", "add the kernel.")

    def _take(self, option: str, value: str) -> None:
        """Take a value for an option, which must be the ad's if the ad has one."""
        attribute, given = self.options.attribute(option), self.options.string(option)
        if value and given and given.lower() != value:
            raise self._refused(
                f"it asks for {shown(value)}, and {attribute} = {shown(given)}", f"leave {attribute} out."
            )
        if value:
            self.found[attribute] = value

    def _require_same_disks(self, asked: Iterable[tuple[str, ...]]) -> None:
        """Make sure that vm_disk has every disk of the XML, with the same file, permission and format.

        condor_submit requires vm_disk of jobs of type kvm, so it takes precedence; the XML may add details.
        """
        text = self.ad.string(DISK) or ""
        given = {}
        for entry in disks.entries(text):
            if entry.is_well_formed and not entry.is_of_catalog:
                file, device, permission, form = (*entry.fields, "raw")[:4]
                mode = ("w" if "w" in permission.lower() else "r") + ("s" if "s" in permission.lower() else "")
                form = form.lower()
                given[device.lower()] = os.path.basename(file), mode, "raw" if form == "iso" else form
        for file, device, mode, form in asked:
            same = os.path.basename(file), mode, "raw" if form == "iso" else form
            if given.get(device) != same:
                raise self._refused(
                    f"its disk {device} is {':'.join(same)}, and {DISK} = {shown(text)}",
                    "let vm_disk name every disk of the file with its device, permission and format.",
                )

    def _has(self, attribute: str) -> bool:
        return self.ad.value(attribute) is not None

    def _refused(self, problem: str, hint: str) -> JobFault:
        return refused(self.name, problem, hint)

    def _declined(self, attribute: str) -> JobFault:
        """Make the fault for a request of the XML that the ad contradicts; it may make the same request or none."""
        return self._refused(
            f"it asks for what {attribute} = {shown(self.ad.expression(attribute))} declines",
            f"leave {attribute} out, or the device out of the file.",
        )
