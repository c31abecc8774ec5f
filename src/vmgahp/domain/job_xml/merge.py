"""The job's sanitized XML put into the description that this package makes of the job.

Ours is the frame: name, UUID, memory, CPUs, images with their backing files, networks, the console, the display,
as whom the hypervisor works. From the job's come the guest's side of these, and devices that touch nothing of the
host.
"""

from collections.abc import Mapping
from copy import deepcopy
from xml.etree import ElementTree as etree

from vmgahp.domain.job_xml.allow_list import KEPT, OUR_DEVICES, WHOLE

_OF_A_DISK = ("serial", "wwn", "vendor", "product", "blockio", "address")
_OF_A_CARD = ("address",)

_ORDER = (
    *("name", "uuid", "title", "description", "maxMemory", "memory", "currentMemory", "memoryBacking"),
    *("vcpu", "iothreads", "os", "features", "cpu", "clock", "on_poweroff", "on_reboot", "on_crash"),
    *("pm", "devices", "seclabel"),
)
"""libvirt takes them in any order; people like the usual one."""


def merge(ours: str, job: etree.Element, boot_files: Mapping[str, str]) -> str:
    """Our domain XML with what the job's has to say.

    `boot_files` are the paths of the job's kernel and initrd, by their elements' names, where it has them.
    """
    domain = etree.fromstring(ours)
    for tag in WHOLE:
        element = job.find(tag)
        if element is not None:
            kept = [part for part in domain.iterfind(f"{tag}/*") if part.tag in KEPT]
            taken = _replace(domain, element)
            taken.extend(part for part in kept if taken.find(part.tag) is None)
    _operating_system(domain, job, boot_files)
    devices = domain.find("devices")
    assert devices is not None
    explicit = job.find("os/boot") is not None or job.find("devices/*/boot") is not None
    if explicit:
        for device in devices:
            _drop(device, "boot")
    for asked in job.iterfind("devices/disk"):
        target = asked.find("target")
        name = "" if target is None else target.get("dev", "").lower()
        for disk in devices.iterfind("disk"):
            made = disk.find("target")
            if made is not None and made.get("dev") == name:
                _disk(disk, asked)
    # Both are in the order of the job's XML.
    for interface, asked in zip(devices.iterfind("interface"), job.iterfind("devices/interface"), strict=False):
        _interface(interface, asked)
    _serial(devices, job)
    _tpm(devices, job)
    if job.find("devices/panic") is not None:
        _drop(devices, "panic")
    for asked in job.iterfind("devices/*"):
        if asked.tag in OUR_DEVICES:
            continue
        for same in devices.findall(asked.tag):
            if asked.tag == "controller" and _known_by(same) == _known_by(asked):
                devices.remove(same)
        devices.append(deepcopy(asked))
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
    for name, value in theirs.items():
        ours.set(name, value)
    kind, wanted = ours.find("type"), theirs.find("type")
    if kind is not None and wanted is not None:
        for name, value in wanted.items():
            kind.set(name, value)
    for element in theirs:
        if element.tag == "type":
            continue
        if element.tag != "boot" or element is theirs.find("boot"):
            _drop(ours, element.tag)
        made = deepcopy(element)
        if element.tag in ("kernel", "initrd"):
            made.text = boot_files[element.tag]
        ours.append(made)


def _disk(disk: etree.Element, asked: etree.Element) -> None:
    """The guest's side of a disk; the image, its format and whether it can be written stay ours."""
    if asked.get("device") in ("disk", "cdrom"):
        disk.set("device", asked.get("device", ""))
    driver, wanted = disk.find("driver"), asked.find("driver")
    if driver is not None and wanted is not None:
        for name, value in wanted.items():
            if name not in ("name", "type"):
                driver.set(name, value)
    target, place = disk.find("target"), asked.find("target")
    if target is not None and place is not None:
        for name, value in place.items():
            if name != "dev":
                target.set(name, value)
    boot = asked.find("boot")
    if boot is not None:
        _replace(disk, boot)
    for element in asked:
        if element.tag in _OF_A_DISK:
            _replace(disk, element)


def _interface(interface: etree.Element, asked: etree.Element) -> None:
    for element in asked:
        if element.tag in ("model", "link", "boot", *_OF_A_CARD):
            _replace(interface, element)


def _tpm(devices: etree.Element, job: etree.Element) -> None:
    """The guest's side of a TPM; which program emulates it is ours to say."""
    ours, asked = devices.find("tpm"), job.find("devices/tpm")
    if ours is None or asked is None:
        return
    for name, value in asked.items():
        ours.set(name, value)
    for element in asked:
        if element.tag == "address":
            _replace(ours, element)


def _serial(devices: etree.Element, job: etree.Element) -> None:
    """The guest's side of the serial port; whereto it writes is ours."""
    ours, asked = devices.find("serial"), job.find("devices/serial")
    if ours is None or asked is None:
        return
    for element in asked:
        _replace(ours, element)
