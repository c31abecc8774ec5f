"""libvirt's domain XML as a job: as attributes, or the file itself (``--as-is``), trimmed.

The permitted parts are those of the list by which the execute machine reads the file
(`vmgahp.domain.job_xml.allow_list`); that reader checks the result in the rehearsal.
"""

import argparse
import os
import re
from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

from lxml import etree

from vmgahp.commands.files import open_regular, write_anew
from vmgahp.commands.submit.images import Locate, free, require_beside
from vmgahp.commands.submit.machine import (
    BOOT_CLASSES,
    Guest,
    GuestDisk,
    GuestNic,
    SubmitError,
    Summary,
    is_device,
    simple_name,
)
from vmgahp.commands.submit.xml_input import LARGEST, Account, child, children, get, in_words, local, read, text
from vmgahp.domain.job_xml import ATTRIBUTE, host_made
from vmgahp.domain.job_xml.allow_list import DOMAIN, Allowed
from vmgahp.images.formats import FORMATS
from vmgahp.job.xen import HARDWARE, INCLUDED

_DEVICE = re.compile(r"(?:xvd|sd|hd)[a-z]{1,2}[0-9]{0,2}", re.ASCII)


def is_xen_device(name: str) -> bool:
    """Return True if a Xen guest can have a disk, or a partition that is a disk by itself, of that name."""
    return _DEVICE.fullmatch(name) is not None


def xen_boot(
    system: etree._Element | None, account: Account, made: Guest, summary: Summary, options: argparse.Namespace
) -> None:
    """Read the settings for HTCondor's xen commands. Raises `SubmitError`."""
    made.vm_type = "xen"
    kind = child(system, "type") if system is not None else None
    if options.as_is:
        raise SubmitError("--as-is is for QEMU's VMs.", "leave it out: the job becomes one of the type xen.")
    if text(kind) not in ("", "hvm", "linux", "xen"):
        raise SubmitError(f"Its operating system is of the type {text(kind)[:40]!a}, which jobs cannot have.")
    kernel = None if system is None else child(system, "kernel")
    if text(kind) in ("", "hvm") or kernel is None or system is None:
        way = HARDWARE if text(kind) == "hvm" else INCLUDED
        if system is not None and (loader := child(system, "loader")) is not None:
            account.take_all(loader)  # hvmloader, Xen's own firmware
        made.commands["xen_kernel"] = way
        summary.carry(account.place(system) if system is not None else "", "how it boots", f"xen_kernel = {way}")
        return
    for tag in ("kernel", "initrd"):
        if (element := child(system, tag)) is not None and text(element):
            account.take(element)
            made.commands[f"xen_{tag}"] = _file(element, account, made, options)
            summary.carry(account.place(element), f"{tag} {text(element)}", f"xen_{tag}")
    line = child(system, "cmdline")
    words = text(line).split()
    roots = [word.removeprefix("root=") for word in words if word.startswith("root=")]
    if line is None or not roots:
        raise SubmitError(f"{account.place(system)}: its kernel is told no root=.", "add it to the cmdline.")
    account.take(line)
    made.commands["xen_root"] = roots[-1]
    if others := [word for word in words if not word.startswith("root=")]:
        made.commands["xen_kernel_params"] = " ".join(others)
    summary.carry(account.place(line), f"cmdline {text(line)}", "xen_root and xen_kernel_params")


def _file(element: etree._Element, account: Account, made: Guest, options: argparse.Namespace) -> str:
    """Return the job's name of a kernel or an initrd, which is transferred. Raises `SubmitError`."""
    path = os.path.join(os.path.dirname(os.path.abspath(options.file)), text(element))
    if options.shared:
        return path
    place = account.place(element)
    if not options.own:
        require_beside(path, place, options.file)
    try:
        open_regular(path).close()
    except OSError as error:
        raise SubmitError(f"{place}: {path} cannot be opened ({error.strerror}).", "bring it here.") from error
    made.files.append(path)
    return os.path.basename(path)


def fit_xen(made: Guest, summary: Summary) -> None:
    """Report the other features that Xen's guests cannot have, and remove them."""
    for name in made.options:
        summary.lose(made.places.get(name, ""), name, "jobs of Xen's cannot have it")
    made.options.clear()
    if made.vnc:
        made.vnc = False
        summary.skip(made.places.get("vnc", ""), "graphics", "jobs of Xen's have a text console, vm_console.log")
    for nic in made.nics:
        nic.model, nic.changed = "virtio", ["Xen's own NIC"]
    if made.boot and made.boot[0] != "hd":
        summary.lose("", f"boot from {made.boot[0]}", "Xen's VMs boot from their first hard disk")
    for disk in made.disks:
        if disk.format == "iso":
            disk.changed.append("a disk that is read only, and no drive")


_DECISIVE = "type", "name", "dev", "device", "mode", "model", "bus", "offset"
"""The attributes that decide the meaning of an element."""

_IN_THE_AD = "interface", "tpm", "graphics"
"""The devices, in addition to disks, that the writer of submit files reports."""


def bring_trimmed(
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
        for part in element:
            tag = str(part.tag)
            below = allowed.children.get(tag)
            counts[tag] = counts.get(tag, 0) + 1
            if part in self._left_out:
                continue
            if below is None or counts[tag] > below.most or not _keeps(part, below):
                self._tell(f"{path}/{local(tag)}", part)
            else:
                made.append(self.trim(part, below, f"{path}/{local(tag)}"))
                if tag == "disk":
                    self.disks[self._account.place(part)] = made[-1]
                elif path == "/domain/devices" and tag not in _IN_THE_AD:
                    self._summary.carry(self._account.place(part), tag, "in the job's own XML")
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


UNITS = {
    "b": 1,
    "bytes": 1,
    **{
        letter.lower() + ending: factor**power
        for power, letter in enumerate("KMGT", 1)
        for ending, factor in (("", 1024), ("ib", 1024), ("b", 1000))
    },
}
"""The units of memory in libvirt, in lower case; the default is KiB."""

KINDS = {"network": "nat", "bridge": "bridge", "user": "user"}
_MODELS = {"virtio": "virtio", "e1000": "e1000", "e1000e": "e1000e", "rtl8139": "rtl8139"}
_MODELS |= dict.fromkeys(("virtio-transitional", "virtio-non-transitional"), "virtio")

_BUSES = {"vd": "virtio", "sd": "sata", "hd": "ide", "fd": "fdc", "xvd": "xen"}
"""The bus of a device on the execute machine, by the prefix of its name."""

_QEMUS = ("", "kvm", "qemu", "kqemu", "hvf", "nvmm")
"""The types of domains whose VMs QEMU runs."""
_ARCHITECTURES = {"": "", "x86_64": "x86_64", "i686": "x86_64", "aarch64": "aarch64"}
"""Architecture -> the corresponding one of execute machines."""
_OTHERS = {
    "lxc": "containers are jobs of HTCondor's container universe.",
    "openvz": "containers are jobs of HTCondor's container universe.",
    "vmware": "give the VM's .vmx to vmgahp submit vmx, or export the VM to vmgahp submit ovf.",
    "vbox": "export the VM, and give the appliance to vmgahp submit ovf.",
}
"""Type of an unsupported domain -> what to do with it."""
_UNREADABLE = {"encryption": "it is encrypted, and a job has no key", "slices": "it is a part of its file"}
"""Element of a disk -> why no job can use the image."""
_WITH_KEYS = re.compile(r"secboot|[._-]ms[._-]")
"""The names of UEFI variable files in which Microsoft's keys are enrolled, as in Debian, Fedora and SUSE."""
_CARDS = {"pc": "enp1s0 becomes ens3", "q35": "ens3 becomes enp1s0"}
"""Chipset of a job -> an example of the names that udev gives to network cards."""
_IN_XML = "jobs boot from their disks; --as-is lets the XML say it"
_MISSED = {
    **dict.fromkeys(("os/kernel", "os/initrd", "os/cmdline"), _IN_XML),
    "os/dtb": "jobs bring no device tree",
    "os/loader": "jobs have BIOS or UEFI of the execute machine",
    **dict.fromkeys(("os/boot", "devices/interface/boot"), "jobs do not boot from the network"),
    "clock": "the clock of every job is UTC's; --as-is keeps one of local time",
    "launchSecurity": "the memory of jobs is not encrypted",
    **dict.fromkeys(("commandline", "override"), "jobs do not say how the hypervisor is called"),
    "devices/hostdev": "jobs have no devices of the host",
    "devices/filesystem": "jobs have directories of the execute machine's alone (VMPARAM_vm_Share_Dirs)",
    "devices/shmem": "jobs have no memory of the host",
    "devices/vsock": "jobs have no socket to their machine",
    "devices/tpm": "jobs have an emulated TPM 2.0",
}
"""Path -> the reason why the guest depends on it, although it is not carried over."""


def machine(options: argparse.Namespace, summary: Summary) -> Guest:
    """Read the file. Raises `SubmitError`."""
    try:
        with open(options.file, "rb") as file:
            data = file.read(LARGEST + 1)
    except OSError as error:
        raise SubmitError(f"{options.file} cannot be read ({error.strerror}).") from error
    return of_domain(domain_of(data, options.file), options, summary)


def domain_of(data: bytes, name: str) -> etree._Element:
    """Parse the domain in a file of that name. Raises `SubmitError`."""
    root = read(data, name)
    if local(root.tag) == "domstatus":  # the file of a running VM
        inner = child(root, "domain")
        root = root if inner is None else inner
    if local(root.tag) != "domain":
        raise SubmitError(f"{name} describes a {local(root.tag)[:40]!a}, no domain.", "write it with virsh dumpxml.")
    return root


def of_domain(
    root: etree._Element, options: argparse.Namespace, summary: Summary, locate: Locate | None = None
) -> Guest:
    """Convert a domain to a machine, with its images at the paths that `locate` returns. Raises `SubmitError`."""
    _require_ours(root)
    account = Account(root)
    account.take(root, "type")
    made = Guest(name=_name(root, account, options))
    if get(root, "type") == "xen":
        xen_boot(child(root, "os"), account, made, summary, options)
    for tag in ("features", "cpu"):  # each element in them is reported separately
        if (element := child(root, tag)) is not None:
            account.take(element)
    _sizes(root, account, made)
    _system(root, account, made, summary, as_is=options.as_is)
    devices = child(root, "devices")
    if devices is not None:
        account.take(devices)
        for disk in _by_name(devices):
            _disk(disk, account, made, summary, locate or partial(_beside, options), hostile=not options.own)
        if not options.as_is:
            _prefer_virtio(devices, made)
        for interface in children(devices, "interface"):
            _nic(interface, account, made, summary)
        _others(devices, account, made)
    _boot(root, account, made, summary)
    if made.vm_type == "xen":
        fit_xen(made, summary)
    if options.as_is:
        made.finish = partial(bring_trimmed, root, account, made, summary, _missed, options)
    else:
        account.tell(summary, _missed)
    return made


def _missed(path: str, element: etree._Element) -> str:
    """Return why a guest would miss an element that is not carried over; empty if it would not."""
    if path == "/domain/clock":
        offset, is_local = get(element, "offset"), get(element, "basis") == "localtime"
        if offset in ("", "utc") or (offset == "variable" and get(element, "adjustment") in ("", "0") and not is_local):
            return ""
    return _MISSED.get(path.removeprefix("/domain/"), "")


def _beside(options: argparse.Namespace, name: str, place: str) -> str:
    """Locate an image by its path in the file; that of an untrusted file must be beside it. Raises `SubmitError`."""
    full = os.path.join(os.path.dirname(os.path.abspath(options.file)), name)
    if not options.own:
        require_beside(full, place, options.file)
    return full


def _require_ours(root: etree._Element) -> None:
    """Refuse a VM other than QEMU's or Xen's on a processor that execute machines have. Raises `SubmitError`."""
    system = child(root, "os")
    kind = None if system is None else child(system, "type")
    domain, guest = get(root, "type"), text(kind) or "hvm"
    if domain not in (*_QEMUS, "xen"):
        hint = _OTHERS.get(domain, "convert its disks with qemu-img, and give them to vmgahp submit disk.")
        raise SubmitError(f"It is a domain of the type {domain[:40]!a}, and jobs are QEMU's or Xen's.", hint)
    if guest != "hvm" and domain != "xen":
        raise SubmitError(f"Its operating system is of the type {guest[:40]!a}, and jobs are whole machines (hvm).")
    arch = "" if kind is None else get(kind, "arch")
    if arch not in _ARCHITECTURES:
        raise SubmitError(f"It is a machine of {arch[:40]!a}, and jobs are VMs of x86_64 or aarch64.")


def _name(root: etree._Element, account: Account, options: argparse.Namespace) -> str:
    name = child(root, "name")
    if name is not None:
        account.take(name)
    stem = os.path.splitext(os.path.basename(options.file))[0]
    return simple_name(options.name or text(name), simple_name(stem, "vm"))


def _sizes(root: etree._Element, account: Account, made: Guest) -> None:
    memory, vcpu, cpu = child(root, "memory"), child(root, "vcpu"), child(root, "cpu")
    if memory is not None:
        account.take(memory, "unit")
        made.places["memory"] = account.place(memory)
        unit = (get(memory, "unit") or "KiB").lower()
        amount = _digits(text(memory), 18)
        if not amount or unit not in UNITS:
            raise SubmitError(f"{account.place(memory)}: {text(memory)[:40]!a} {unit!a} is no amount of memory.")
        made.memory_mib = -(-amount * UNITS[unit] // (1 << 20))
    if vcpu is not None:
        account.take(vcpu)
        made.places["vcpus"] = account.place(vcpu)
        number = text(vcpu)
        if get(vcpu, "current"):
            account.take(vcpu, "current")
            number = get(vcpu, "current")
        made.vcpus = _digits(number, 4)
        if not made.vcpus:
            raise SubmitError(f"{account.place(vcpu)}: {number[:40]!a} is no number of CPUs.")
    topology = None if cpu is None else child(cpu, "topology")
    if topology is None:
        return
    numbers = [get(topology, name) or "1" for name in ("sockets", "cores", "threads")]
    parts = [_digits(number, 4) for number in numbers]
    extra = {get(topology, name) or "1" for name in ("dies", "clusters")}
    if extra == {"1"} and parts[0] * parts[1] * parts[2] == made.vcpus:
        account.take(topology, "sockets", "cores", "threads", "dies", "clusters")
        made.places["Topology"] = account.place(topology)
        made.options["Topology"] = "sockets={},cores={},threads={}".format(*numbers)


def _digits(text: str, longest: int) -> int:
    """Parse a whole number with so many digits at most; 0 for anything else."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= longest else 0


def _system(root: etree._Element, account: Account, made: Guest, summary: Summary, *, as_is: bool) -> None:
    """Read the architecture and the firmware."""
    system = child(root, "os")
    if system is None:
        return
    account.take(system)
    kind = child(system, "type")
    if kind is not None:
        account.take(kind, "arch")
        arch = _ARCHITECTURES[get(kind, "arch")]
        if arch != get(kind, "arch"):
            summary.change(account.place(kind), get(kind, "arch"), arch, "its processors run the same programs")
        if arch == "aarch64":
            made.places["Arch"] = account.place(kind)
            made.options["Arch"] = arch
    loader = child(system, "loader")
    by_path = loader is not None and get(loader, "type") == "pflash"
    secure = loader is not None and get(loader, "secure") == "yes"
    if get(system, "firmware") in ("efi", "bios"):
        account.take(system, "firmware")
    if get(system, "firmware") == "efi" or by_path:
        features: dict[str, str] = {}
        if (section := child(system, "firmware")) is not None:
            for feature in children(section, "feature"):
                account.take(feature, "name", "enabled")
                features[get(feature, "name")] = get(feature, "enabled")
        if loader is not None:
            account.take(loader, "type", "readonly", "secure", "format")
        nvram = child(system, "nvram")
        variables = "" if nvram is None else os.path.basename(get(nvram, "template"))
        secure |= features.get("secure-boot") == "yes"
        if secure and (features.get("enrolled-keys") == "no" or (variables and not _WITH_KEYS.search(variables))):
            secure = False
            made.changed["Firmware"] = "its Secure Boot has no keys and starts any system, that of uefi-secure has some"
        if nvram is not None and not as_is:
            account.take_all(nvram)
            why = "its boot entries stay behind: a system is found by its EFI/BOOT directory alone"
            summary.change(account.place(nvram), "nvram", "new UEFI variables", why)
        if secure or made.options.get("Arch") != "aarch64":
            made.places["Firmware"] = account.place(system)
            made.options["Firmware"] = "uefi-secure" if secure else "uefi"
    if kind is not None and not as_is:
        _chipset(kind, account, made, summary)


def _chipset(kind: etree._Element, account: Account, made: Guest, summary: Summary) -> None:
    """Report a PC that gets another chipset, on which devices have other addresses."""
    machine, ours = get(kind, "machine"), "q35" if "Firmware" in made.options else "pc"
    theirs = "q35" if "q35" in machine else "pc" if machine.startswith("pc") else ours
    if "Arch" not in made.options and theirs != ours:
        account.take(kind, "machine")
        firmware = "UEFI" if ours == "q35" else "BIOS"
        why = f"jobs with {firmware} have it; network cards may have other names in the guest ({_CARDS[ours]})"
        summary.change(f"{account.place(kind)}/@machine", f"machine {machine}", ours, f"{why}; --as-is keeps it")


def _boot(root: etree._Element, account: Account, made: Guest, summary: Summary) -> None:
    """Read the boot order: the domain's classes, or the order of each device."""
    system, devices = child(root, "os"), child(root, "devices")
    classes = [] if system is None else list(children(system, "boot"))
    made.boot = [name for element in classes if (name := get(element, "dev")) in BOOT_CLASSES]
    order = [(number, element, get(element, "dev")) for number, element in enumerate(classes)]
    for device in () if devices is None else devices:
        kind = local(device.tag)
        if kind in ("disk", "interface") and (number := _boot_order(device)):
            order.append((number, next(children(device, "boot")), "hd" if kind == "disk" else kind))
    from_disk = False
    for _, element, kind in sorted(order, key=lambda each: each[0]):
        if kind in BOOT_CLASSES:
            from_disk = True
            account.take(element, "dev", "order")
            summary.carry(account.place(element), f"boot from {kind}", "its place in vm_disk")
        elif from_disk:
            account.take(element, "dev", "order")
            summary.skip(account.place(element), f"boot from {kind}", "jobs boot from disks, and from them first")


def _boot_order(device: etree._Element) -> int:
    """Return the place of a device in the boot order, 0 for none."""
    boot = child(device, "boot")
    return 0 if boot is None else _digits(get(boot, "order"), 9)


def _by_name(devices: etree._Element) -> list[etree._Element]:
    """Return the disks in libvirt's order: those of a bus sorted by name, at the place of the first one of the bus."""
    first: dict[str, int] = {}

    def key(disk: etree._Element) -> tuple[int, int, str]:
        target = child(disk, "target")
        name = "" if target is None else get(target, "dev")
        bus = "" if target is None else get(target, "bus")
        return first.setdefault(bus or _usual_bus(name), len(first)), len(name), name

    return sorted(children(devices, "disk"), key=key)


def _usual_bus(name: str) -> str:
    return next((bus for prefix, bus in _BUSES.items() if name.startswith(prefix)), "")


def _disk(
    element: etree._Element, account: Account, made: Guest, summary: Summary, locate: Locate, *, hostile: bool
) -> None:
    place = account.place(element)
    device = get(element, "device") or "disk"
    source, driver, target = child(element, "source"), child(element, "driver"), child(element, "target")
    path = "" if source is None else get(source, "file")
    kind = get(element, "type") or "file"
    if kind != "file" or device not in ("disk", "cdrom", "floppy") or not path:
        account.take_all(element)
        if source is None and device in ("cdrom", "floppy"):
            summary.skip(place, f"a {device} without an image")
            return
        what = f"a {device} without an image" if not path and kind == "file" else f"a {device} on a {kind}"
        more = "; qemu-img convert makes one of it" if kind in ("block", "network", "volume") else ""
        summary.lose(place, what, f"jobs have images that are files{more}")
        return
    assert source is not None
    if why := next(filter(None, (_UNREADABLE.get(local(inner.tag)) for inner in element.iter())), None):
        account.take_all(element)
        summary.lose(place, f"{device} {path}", why)
        return
    account.take(element, "type", "device")
    account.take(source, "file", "index")
    form = "raw"
    if driver is not None:
        account.take(driver, "name")
        form = get(driver, "type") or "raw"
        form = {"aio": "raw"}.get(form, form)  # as Xen's tap has it
        if form in FORMATS:
            account.take(driver, "type")
    if form not in FORMATS:
        raise SubmitError(f"{place}: an image of the format {form[:40]!a} cannot be used.", "convert it.")
    if device == "cdrom" and form == "raw":
        form = "iso"
    disk = GuestDisk(locate(path, place), form, place=place, hostile=hostile)
    for flag in ("readonly", "shareable"):
        found = child(element, flag)
        if found is not None:
            account.take(found)
    disk.boot = _boot_order(element)
    disk.writable = device != "cdrom" and child(element, "readonly") is None
    disk.shared = child(element, "shareable") is not None
    disk.bus = "floppy" if device == "floppy" else "sata" if device == "cdrom" else ""
    if target is not None:
        account.take(target, "dev", "tray")
        if made.vm_type == "xen" and is_xen_device(get(target, "dev")):
            account.take(target, "bus")
            disk.device = get(target, "dev")
        else:
            _target(target, disk, account)
    made.disks.append(disk)


def _prefer_virtio(devices: etree._Element, made: Guest) -> None:
    """Convert disks on a virtio SCSI controller to virtio disks, because their guests may lack a driver for SATA."""
    scsi = [get(one, "model") for one in children(devices, "controller") if get(one, "type") == "scsi"]
    if made.options.get("Arch") == "aarch64" or not any(model.startswith("virtio") for model in scsi):
        return
    for disk in made.disks:
        if disk.bus == "scsi" and disk.boot_class == "hd" and disk.writable and not disk.shared:
            disk.device, disk.bus = "", "virtio"
            disk.changed.append("virtio, not behind virtio-scsi, which --as-is keeps")


def _target(target: etree._Element, disk: GuestDisk, account: Account) -> None:
    """Read the device's name; if it implies another bus here than that of the file, keep the bus instead."""
    name, bus = get(target, "dev"), get(target, "bus")
    if is_device(name):
        disk.device = name
    elif name:
        disk.changed.append(f"not as {name}, which no disk of a job is called")
    if not bus or bus == _usual_bus(name):
        account.take(target, "bus")
    elif bus == "scsi" and _usual_bus(name) == "sata":
        account.take(target, "bus")
        disk.bus = bus
    elif bus in ("virtio", "sata", "ide"):
        account.take(target, "bus")
        disk.device, disk.bus = "", bus
    else:
        account.take(target, "bus")
        disk.changed.append(f"not on {bus}, which jobs do not have")


def _nic(element: etree._Element, account: Account, made: Guest, summary: Summary) -> None:
    kind = KINDS.get(get(element, "type"))
    if kind is None:
        account.take_all(element)
        what = f"an interface of the type {get(element, 'type')}"
        summary.lose(account.place(element), what, "jobs have networks of the kinds nat, bridge and user")
        return
    account.take(element, "type")
    nic = GuestNic(kind, place=account.place(element))
    mac, model, link = child(element, "mac"), child(element, "model"), child(element, "link")
    if mac is not None:
        account.take(mac, "address")
        nic.mac = get(mac, "address").lower()
    nic.model = "rtl8139"  # libvirt's default model for an interface
    if model is not None:
        account.take(model)
        account.take(model, "type")
        wanted = get(model, "type")
        nic.model = _MODELS.get(wanted, "e1000")
        if wanted != nic.model:
            nic.changed.append(f"not {wanted}, which jobs cannot have")
    if link is not None:
        account.take(link, "state")
        nic.link_up = get(link, "state") != "down"
    made.nics.append(nic)


def _others(devices: etree._Element, account: Account, made: Guest) -> None:
    for graphics in children(devices, "graphics"):
        if get(graphics, "type") == "vnc":
            account.take(graphics, "type")
            made.vnc, made.places["vnc"] = True, account.place(graphics)
    for tpm in children(devices, "tpm"):
        backend = child(tpm, "backend")
        if backend is not None and get(backend, "type") == "emulator" and get(backend, "version") in ("", "2.0"):
            account.take(tpm)
            account.take(backend, "type", "version")
            made.options["TPM"], made.places["TPM"] = True, account.place(tpm)
