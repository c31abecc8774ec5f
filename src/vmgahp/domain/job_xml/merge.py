"""The merge of a job's sanitized XML into the description that this package makes of the job.

Ours is the frame: name, UUID, memory, CPUs, images with their backing files, networks, the console, the display, the
user of the hypervisor. The job's XML contributes the guest's side of these, and devices that do not use the host: the
rows of `vmgahp.domain.model` name the `Author` of each.
"""

from collections.abc import Mapping
from copy import deepcopy
from xml.etree import ElementTree as etree

from vmgahp.domain.compare import value
from vmgahp.domain.model import AGENT, DEVICES, DOMAIN, Author, Element, Side

_KEPT = ("topology", "smm", "tcg")
"""The parts of our CPU and features that stay: the topology of VMPARAM_vm_Topology, TCG's cache, and the smm that UEFI
has with secure boot only."""

_ORDER = (
    *("name", "uuid", "title", "description", "maxMemory", "memory", "currentMemory", "memoryBacking"),
    *("vcpu", "iothreads", "os", "features", "cpu", "clock", "on_poweroff", "on_reboot", "on_crash"),
    *("pm", "devices", "seclabel"),
)
"""The usual order of the elements, for readers; libvirt accepts any."""


def merge(ours: str, job: etree.Element, boot_files: Mapping[str, str]) -> str:
    """Merge the job's XML into our domain XML.

    `boot_files` are the paths of the job's kernel and initrd, by their elements' names, if it has them.
    """
    domain = etree.fromstring(ours)
    uefi = domain.find("os[@firmware='efi']") is not None
    for element in job:
        if DOMAIN.children[element.tag].author is Author.EITHER:
            tag = element.tag
            kept = [part for part in domain.iterfind(f"{tag}/*") if part.tag in _KEPT]
            taken = _replace(domain, element)
            if uefi:
                _drop(taken, "smm")
            taken.extend(part for part in kept if taken.find(part.tag) is None)
    _operating_system(domain, job, boot_files)
    devices = domain.find("devices")
    assert devices is not None
    explicit = job.find("os/boot") is not None or job.find("devices/*/boot") is not None
    if explicit:
        for device in devices:
            _drop(device, "boot")
    for asked in job.iterfind("devices/disk"):
        name = value(asked, "target", "dev").lower()
        for disk in devices.iterfind("disk"):
            if value(disk, "target", "dev") == name:
                _take(disk, asked, DEVICES["disk"])
                if asked.get("device") in ("disk", "cdrom"):
                    disk.set("device", asked.get("device", ""))
    # Both are in the order of the job's XML; there is one serial port and one TPM.
    for tag in ("interface", "serial", "tpm"):
        for device, asked in zip(devices.iterfind(tag), job.iterfind(f"devices/{tag}"), strict=False):
            _take(device, asked, DEVICES[tag])
    added = [asked for asked in job.iterfind("devices/*") if DEVICES[asked.tag].author is not Author.DAEMON]
    for asked in added:
        if DEVICES[asked.tag].author is Author.EITHER:
            _drop(devices, asked.tag)
    if job.find("devices/controller[@type='usb'][@model='none']") is not None:
        for device in devices.findall("input[@bus='usb']"):
            devices.remove(device)
    for port in devices.findall("channel"):
        if value(port, "target", "name") == AGENT and job.find(f"devices/channel/target[@name='{AGENT}']") is not None:
            devices.remove(port)
    # Several of its controllers may have one identity: the companions of a USB 2 controller share its index.
    theirs = {_known_by(controller) for controller in job.iterfind("devices/controller")}
    for controller in devices.findall("controller"):
        if _known_by(controller) in theirs:
            devices.remove(controller)
    devices.extend(deepcopy(asked) for asked in added)
    domain[:] = sorted(domain, key=lambda child: _ORDER.index(child.tag) if child.tag in _ORDER else len(_ORDER))
    etree.indent(domain)
    return etree.tostring(domain, encoding="unicode")


def _known_by(controller: etree.Element) -> tuple[str | None, str]:
    return controller.get("type"), controller.get("index", "0")


def _replace(parent: etree.Element, element: etree.Element) -> etree.Element:
    _drop(parent, element.tag)
    made = deepcopy(element)
    parent.append(made)
    return made


def _drop(parent: etree.Element, tag: str) -> None:
    for old in parent.findall(tag):
        parent.remove(old)


def _operating_system(domain: etree.Element, job: etree.Element, boot_files: Mapping[str, str]) -> None:
    ours, theirs = domain.find("os"), job.find("os")
    if ours is None or theirs is None:
        return
    kind, wanted = ours.find("type"), theirs.find("type")
    if kind is not None and wanted is not None:
        for name, said in wanted.items():
            kind.set(name, said)
    for element in theirs:
        if element.tag in ("type", "firmware"):
            continue  # ours has the firmware that `requests` has read
        if element.tag != "boot" or element is theirs.find("boot"):
            _drop(ours, element.tag)
        made = deepcopy(element)
        if element.tag in ("kernel", "initrd"):
            made.text = boot_files[element.tag]
        ours.append(made)


def _take(ours: etree.Element, asked: etree.Element, row: Element) -> None:
    """Copy the guest's side of a job's device, or of a part of it, to ours; the host's side stays ours."""
    for name, said in asked.items():
        if Side.GUEST in row.attributes[name].side and Side.HOST not in row.attributes[name].side:
            ours.set(name, said)
    for part in asked:
        below, mine = row.children[part.tag], ours.find(part.tag)
        if below.side is Side.GUEST and all(each.side is not Side.HOST for each in below.attributes.values()):
            _replace(ours, part)
        elif mine is not None:
            _take(mine, part, below)
