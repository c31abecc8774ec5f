"""A job's own libvirt XML (``--as-is``): the file without the parts that jobs may not have.

The permitted parts are those of the list by which the execute machine reads the file
(`vmgahp.domain.job_xml.allow_list`); that reader checks the result in the rehearsal.
"""

import argparse
import os
import re
from collections.abc import Callable
from math import prod
from typing import Any

from lxml import etree

from vmgahp.commands.files import open_regular, write_anew
from vmgahp.commands.submit.images import free, require_beside
from vmgahp.commands.submit.machine import Guest, GuestDisk
from vmgahp.commands.submit.summary import SubmitError, Summary
from vmgahp.commands.submit.xml_input import Account, get, in_words, local
from vmgahp.domain.job_xml import ATTRIBUTE, host_made
from vmgahp.domain.job_xml.allow_list import DOMAIN, Allowed

_DECISIVE = "type", "name", "dev", "device", "mode", "model", "bus", "offset"
"""The attributes that decide the meaning of an element."""

_IN_THE_AD = "interface", "tpm", "graphics"
"""The devices, in addition to disks, that the writer of submit files reports."""


def bring(
    root: etree._Element,
    account: Account,
    made: Guest,
    summary: Summary,
    missed: Callable[[str, etree._Element], str],
    options: argparse.Namespace,
) -> None:
    """Write the trimmed file, and add it to the job. Raises `SubmitError`.

    The `account` has the parts that are reported already, and `missed` is as for `Account.tell`. The disks are those of
    vm_disk, by which the file is corrected.
    """
    read: Any = root  # lxml's elements have all methods that are used there
    host_made.name_firmware(read)
    trimmer = _Trimmer(account, summary, missed)
    trimmed = trimmer.trim(root, DOMAIN, "/domain")
    _correct_networks(trimmed, summary, options.network)
    _correct_amounts(trimmed, made, summary)
    _correct_firmware(trimmed, made)
    for disk in made.disks:
        if (element := trimmer.disks.get(disk.place)) is not None:
            _correct(element, disk, transferred=not options.shared)
    if not any(disk.device.startswith("hd") for disk in made.disks):
        for controller in trimmed.findall("devices/controller[@type='ide']"):  # q35 has none
            _remove(controller)
    for tag in ("kernel", "initrd"):
        if (element := trimmed.find(f"os/{tag}")) is not None:
            _take_along(element, made, summary, options)
    etree.indent(trimmed)
    data = etree.tostring(trimmed, encoding="utf-8", xml_declaration=True) + b"\n"
    name = f"{made.name}.xml"
    path = os.path.join(options.dir, name)
    free(path, summary, force=options.force)
    try:
        write_anew(path, data)
    except OSError as error:
        raise SubmitError(f"{path} cannot be written ({error.strerror}).") from error
    summary.made.append(path)
    made.attributes[ATTRIBUTE] = name
    made.files.append(path)
    # The file itself has the rest; the ad names the disks and grants the amounts.
    made.options.pop("Topology", None)
    made.own_nics = True
    summary.advise(f"{path} goes with the job. The machine must take such jobs (VM_ALLOW_LIBVIRT_XML).")


def _correct_networks(trimmed: etree._Element, summary: Summary, wanted: str) -> None:
    """Remove the source of each network, which the machine chooses, and set its kind to the `wanted` one, if any."""
    for interface in trimmed.findall("devices/interface"):
        for source in interface.findall("source"):
            interface.remove(source)
            why = "jobs get the machine's own network of that kind"
            summary.skip("/domain/devices/interface/source", "source", why)
        if wanted == "none":
            _remove(interface)
        elif wanted:
            interface.set("type", "network" if wanted == "nat" else wanted)


def _correct_amounts(trimmed: etree._Element, made: Guest, summary: Summary) -> None:
    """Set memory and CPUs to those of the ad."""
    for tag in ("memory", "currentMemory") if "memory" in made.changed else ():
        if (memory := trimmed.find(tag)) is not None:
            memory.set("unit", "MiB")
            memory.text = str(made.memory_mib)
    if (vcpu := trimmed.find("vcpu")) is not None:
        vcpu.text = str(made.vcpus)
    topology = trimmed.find("cpu/topology")
    if topology is not None and prod(int(number) for number in topology.attrib.values()) != made.vcpus:
        _remove(topology)
        summary.change(made.places.get("vcpus", ""), "CPU topology", "one socket a CPU", f"there are {made.vcpus} CPUs")


def _correct_firmware(trimmed: etree._Element, made: Guest) -> None:
    """Remove a firmware that is given by a path, or incompletely; the ad has it then."""
    system, wanted = trimmed.find("os"), made.options.get("Firmware")
    if system is None or not wanted:
        return
    features = {str(one.get("name")): one.get("enabled") for one in system.iterfind("firmware/feature")}
    secure = features.get("secure-boot") == "yes"
    if system.get("firmware") != "efi" or secure != (wanted == "uefi-secure"):
        system.attrib.pop("firmware", "")
        for part in system.findall("firmware"):
            _remove(part)


def _correct(element: etree._Element, disk: GuestDisk, *, transferred: bool) -> None:
    """Correct a disk of the file to match vm_disk."""
    part = {tag: _part(element, tag) for tag in ("driver", "source", "target")}
    part["source"].set("file", disk.name or (os.path.basename(disk.path) if transferred else disk.path))
    part["driver"].set("type", "raw" if disk.format == "iso" else disk.format)
    if part["target"].get("dev") != disk.device:
        part["target"].attrib.clear()
        part["target"].set("dev", disk.device)
        for address in element.findall("address"):
            element.remove(address)


def _remove(element: etree._Element) -> None:
    parent = element.getparent()
    assert parent is not None
    parent.remove(element)


def _part(element: etree._Element, tag: str) -> etree._Element:
    found = element.find(tag)
    return etree.SubElement(element, tag) if found is None else found


def _take_along(element: etree._Element, made: Guest, summary: Summary, options: argparse.Namespace) -> None:
    """Add a kernel or an initrd to the job's files. Raises `SubmitError`."""
    tag, said = str(element.tag), element.text or ""
    path = os.path.join(os.path.dirname(os.path.abspath(options.file)), said)
    if not options.own:
        require_beside(path, f"/domain/os/{tag}", options.file)
    try:
        open_regular(path).close()
    except OSError as error:
        raise SubmitError(f"/domain/os/{tag}: {path} cannot be opened ({error.strerror}).", "bring it here.") from error
    element.text = os.path.basename(path)
    made.files.append(path)
    summary.carry(f"/domain/os/{tag}", f"{tag} {said}", "goes with the job")


class _Trimmer:
    """A copier of the permitted parts; the others are reported to the summary."""

    def __init__(self, account: Account, summary: Summary, missed: Callable[[str, etree._Element], str]) -> None:
        self._account = account
        self._left_out = set(account.whole)
        self._summary = summary
        self._missed = missed
        self.disks: dict[str, etree._Element] = {}
        """The disks that were made, by their places."""

    def trim(self, element: etree._Element, allowed: Allowed, path: str) -> etree._Element:
        made = etree.Element(local(element.tag))
        for key, value in element.items():
            form = allowed.attributes.get(str(key))
            if form is not None and re.fullmatch(form, str(value), re.ASCII):
                made.set(key, value)
            else:
                self._tell(path, element, local(key))
        if allowed.text is not None:
            made.text = (element.text or "").strip()
        counts: dict[str, int] = {}
        for child in element:
            tag = str(child.tag)
            below = allowed.children.get(tag)
            counts[tag] = counts.get(tag, 0) + 1
            if child in self._left_out:
                continue
            if below is None or counts[tag] > below.most or not _keeps(child, below):
                self._tell(f"{path}/{local(tag)}", child)
            else:
                made.append(self.trim(child, below, f"{path}/{local(tag)}"))
                if tag == "disk":
                    self.disks[self._account.place(child)] = made[-1]
                elif path == "/domain/devices" and tag not in _IN_THE_AD:
                    self._summary.carry(self._account.place(child), tag, "in the job's own XML")
        return made

    def _tell(self, path: str, element: etree._Element, attribute: str = "") -> None:
        if self._account.took(element, attribute):
            return
        place, what = self._account.place(element), in_words(element)
        if attribute:
            place, what = f"{place}/@{attribute}", f"{local(element.tag)} {attribute}={get(element, attribute)}"
        elif reason := self._missed(path, element):
            self._summary.lose(place, what, reason)
            return
        self._summary.skip(place, what)


def _keeps(element: etree._Element, allowed: Allowed) -> bool:
    """Return True if the rest of an element still has the same meaning."""
    text = (element.text or "").strip()
    if allowed.text is not None and not re.fullmatch(allowed.text, text, re.ASCII):
        return False
    for name in _DECISIVE:
        value, form = element.get(name), allowed.attributes.get(name)
        if value is not None and form is not None and not re.fullmatch(form, value, re.ASCII):
            return False
    return True
