"""libvirt's domain XML as a job: as attributes, or the file itself (``--as-is``), trimmed.

The permitted parts are those of the list by which the execute machine reads the file (`vmgahp.domain.model`); that
reader checks the result in the rehearsal.

virt-install converts the words of its command line to a domain. It runs as the caller, and only prints
(``--print-xml``). Its other work, such as making an image or a drive for cloud-init, is done here or refused.
"""

import argparse
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from itertools import pairwise
from math import prod
from typing import Any

from lxml import etree

from vmgahp.commands.files import open_regular, write_anew
from vmgahp.commands.submit import images
from vmgahp.commands.submit.images import Locate, beside, free
from vmgahp.commands.submit.machine import Guest, GuestDisk, GuestNic, Why, card_name
from vmgahp.commands.submit.report import BOOT, SubmitError, Summary, number, os_errors_as, read_file, simple_name
from vmgahp.commands.submit.xml_input import LARGEST, Account, child, children, get, in_words, local, read, remove, text
from vmgahp.domain import model, sanitize
from vmgahp.domain.model import DOMAIN, Element
from vmgahp.host.run import run
from vmgahp.images.formats import CONVERTIBLE, FORMATS
from vmgahp.job.attributes import ARM, LOCAL_TIME, META_DATA, NETWORK_CONFIG, USER_DATA
from vmgahp.job.attributes import LIBVIRT_XML as ATTRIBUTE
from vmgahp.job.disks import device_of
from vmgahp.job.xen import HARDWARE, INCLUDED

_DECISIVE = "type", "name", "dev", "device", "mode", "model", "bus", "offset"
"""The attributes that decide the meaning of an element."""

_IN_THE_AD = "interface", "tpm", "graphics"
"""The devices, in addition to disks, that the writer of submit files reports."""

_BUSES = {"vd": "virtio", "sd": "sata", "hd": "ide", "fd": "fdc", "xvd": "xen"}
"""The bus of a device on the execute machine, by the prefix of its name."""

_QEMUS = ("", "kvm", "qemu", "kqemu", "hvf", "nvmm")
"""The types of domains whose VMs QEMU runs."""
_UNREADABLE = {"encryption": "it is encrypted, and a job has no key", "slices": "it is a part of its file"}
"""Element of a disk -> why no job can use the image."""
_WITH_KEYS = re.compile(r"secboot|[._-]ms[._-]")
"""The names of UEFI variable files in which Microsoft's keys are enrolled, as in Debian, Fedora and SUSE."""
_UEFI = re.compile(r"ovmf|edk2|aavmf", re.IGNORECASE)
"""The names of a UEFI, which some load in one piece (``-bios``)."""
_PCI = re.compile(r"0x[0-9a-f]{1,4}|0|[1-9][0-9]{0,2}", re.ASCII | re.IGNORECASE)
_IN_XML = "jobs boot from their disks; --as-is lets the XML say it"
_MISSED = {
    **dict.fromkeys(("os/kernel", "os/initrd", "os/cmdline"), _IN_XML),
    "os/dtb": "jobs bring no device tree",
    "os/loader": "jobs have BIOS or UEFI of the execute machine",
    "clock": "the XML of jobs has no such clock",
    "launchSecurity": "the memory of jobs is not encrypted",
    **dict.fromkeys(("commandline", "override"), "jobs do not say how the hypervisor is called"),
    "devices/hostdev": Why.HOST_DEVICE,
    "devices/filesystem": Why.DIRECTORY,
    "devices/shmem": "jobs have no memory of the host",
    "devices/vsock": "jobs have no socket to their machine",
    "devices/tpm": "jobs have an emulated TPM 2.0",
}
"""Path -> the reason why the guest depends on it, although it is not carried over."""


def machine(options: argparse.Namespace, summary: Summary) -> Guest:
    """Read the file, or have virt-install read its words. Raises `SubmitError`."""
    if options.kind == "virt-install":
        return _of_words(options, summary)
    return DomainReader(domain_of(read_file(options.file, LARGEST), options.file), options, summary).read()


def domain_of(data: bytes, name: str) -> etree._Element:
    """Parse the domain in a file of that name. Raises `SubmitError`."""
    root = read(data, name)
    if local(root.tag) != "domain":
        raise SubmitError(f"{name} describes a {local(root.tag)[:40]!a}, no domain.", "write it with virsh dumpxml.")
    return root


class DomainReader:
    """A domain on its way to a `Guest`, with its images at the paths that `locate` returns."""

    def __init__(
        self, root: etree._Element, options: argparse.Namespace, summary: Summary, locate: Locate | None = None
    ) -> None:
        self._root, self._options, self._summary = root, options, summary
        self._locate = locate or partial(beside, options)
        self._account = Account(root)
        self._system, self._devices, self._cpu = (child(root, tag) for tag in ("os", "devices", "cpu"))
        self._kind = child(self._system, "type")
        stem = os.path.splitext(os.path.basename(options.file))[0]
        name = self._account.text(child(root, "name"))
        self._made = Guest(simple_name(options.name, name, stem, "vm"))

    def read(self) -> Guest:
        """Read everything, and report it. Raises `SubmitError`."""
        made, account, summary = self._made, self._account, self._summary
        domain, guest = get(self._root, "type"), text(self._kind) or "hvm"
        if domain not in (*_QEMUS, "xen"):
            hint = "export it for vmgahp submit ovf or vmx, or give its disks to vmgahp submit disk."
            raise SubmitError(f"It is a domain of the type {domain[:40]!a}, and jobs are QEMU's or Xen's.", hint)
        if guest not in (("hvm", "linux", "xen") if domain == "xen" else ("hvm",)):
            raise SubmitError(f"Its operating system is of the type {guest[:40]!a}, which jobs cannot have.")
        account.take(self._root, "type")
        if domain == "xen":
            self._xen_boot()
        for element in (self._system, self._devices, self._cpu, child(self._root, "features")):
            account.take(element)  # each element in them is reported separately
        self._sizes()
        self._firmware()
        for disk in _by_name(self._devices):
            self._disk(disk)
        for graphics in children(self._devices, "graphics"):
            if get(graphics, "type") == "vnc":
                account.take(graphics, "type")
                made.vnc, made.places["vnc"] = True, account.place(graphics)
        for tpm in children(self._devices, "tpm"):
            backend = child(tpm, "backend")
            if get(backend, "type") == "emulator" and get(backend, "version") in ("", "2.0"):
                account.take(tpm)
                account.take(backend, "type", "version")
                made.set_tpm(account.place(tpm))
        for interface in children(self._devices, "interface"):
            self._nic(interface)
        has_display = next(children(self._devices, "video", "graphics"), None) is not None
        chipset = made.chipset(get(self._kind, "machine"))
        for nic, name in zip(made.nics, made.card_names(chipset, has_display=has_display), strict=True):
            nic.card = nic.card or name
        self._boot()
        for info in children(self._root, "sysinfo"):
            if get(info, "type") == "fwcfg" or any("ds=nocloud" in text(entry) for entry in info.iter()):
                account.take_all(info)
                summary.lose(account.place(info), in_words(info), Why.FIRST_BOOT)
        if made.vm_type == "xen":
            self._fit_xen()
        if self._options.as_is:
            made.finish = self._write_own
        else:
            account.tell(summary, _MISSED)
        return made

    def _xen_boot(self) -> None:
        """Read the settings for HTCondor's xen commands."""
        account, made, summary, system = self._account, self._made, self._summary, self._system
        made.vm_type = "xen"
        kind, kernel = text(self._kind), child(system, "kernel")
        if self._options.as_is:
            raise SubmitError("--as-is is for QEMU's VMs.", "leave it out: the job becomes one of the type xen.")
        if kind in ("", "hvm") or kernel is None:
            made.commands["xen_kernel"] = HARDWARE if kind == "hvm" else INCLUDED
            if (loader := child(system, "loader")) is not None:
                account.take_all(loader)  # hvmloader, Xen's own firmware
            summary.keep(account.place(system), "how it boots", f"xen_kernel = {made.commands['xen_kernel']}")
            return
        for tag in ("kernel", "initrd"):
            if said := account.text(element := child(system, tag)):
                made.commands[f"xen_{tag}"] = self._bring(said, account.place(element))
                summary.keep(account.place(element), f"{tag} {said}", f"xen_{tag}")
        line = child(system, "cmdline")
        words = account.text(line).split()
        roots = [word.removeprefix("root=") for word in words if word.startswith("root=")]
        if not roots:
            raise SubmitError(f"{account.place(system)}: its kernel is told no root=.", "add it to the cmdline.")
        made.commands["xen_root"] = roots[-1]
        if others := " ".join(word for word in words if not word.startswith("root=")):
            made.commands["xen_kernel_params"] = others
        summary.keep(account.place(line), f"cmdline {text(line)}", "xen_root and xen_kernel_params")

    def _fit_xen(self) -> None:
        """Report the other features that Xen's guests cannot have, and remove them."""
        made, summary = self._made, self._summary
        for name in made.options:
            summary.lose(made.places.get(name, ""), name, "jobs of Xen's cannot have it")
        made.options.clear()
        if made.vnc:
            made.vnc = False
            summary.skip(made.places["vnc"], "graphics", "jobs of Xen's have a text console, vm_console.log")
        for nic in made.nics:
            nic.model, nic.card, nic.changed = "virtio", "", ["Xen's own NIC"]

    def _bring(self, said: str, place: str) -> str:
        """Return the job's name of a kernel or an initrd, which is transferred."""
        if self._options.shared and not self._options.as_is:
            return os.path.join(os.path.dirname(os.path.abspath(self._options.file)), said)
        path = beside(self._options, said, place)
        with os_errors_as(f"{place}: {path} cannot be opened", "bring it here."):
            open_regular(path).close()
        self._made.files.append(path)
        return os.path.basename(path)

    def _write_own(self) -> None:
        """Write the permitted parts of the file, corrected by the rest of the job, and add them to the job."""
        made, options, summary = self._made, self._options, self._summary
        root: Any = self._root  # lxml's elements have all methods that are used there
        sanitize.name_firmware(root)
        disks: dict[str, etree._Element] = {}
        own = self._trimmed(self._root, DOMAIN, "/domain", disks)
        self._account.tell(summary, _MISSED)
        interfaces = own.findall("devices/interface")
        if options.network == "none":
            for interface in interfaces:
                remove(interface)
        for interface, nic in zip(interfaces, made.nics, strict=False):
            if interface.find("model") is None:  # libvirt's own choice, or one that no job may say
                etree.SubElement(interface, "model", type=nic.model)
            for source in interface.findall("source"):
                remove(source)
                summary.skip("/domain/devices/interface/source", "source", "jobs get the machine's own network")
            if options.network:
                interface.set("type", "network" if options.network == "nat" else options.network)
        for amount in own.findall("memory") + own.findall("currentMemory") + own.findall("vcpu"):
            remove(amount)  # the ad has them
        topology = own.find("cpu/topology")
        if topology is not None and prod(map(int, topology.attrib.values())) != made.vcpus:
            remove(topology)
            why = f"there are {made.vcpus} CPUs"
            summary.keep(made.places.get("vcpus", ""), "CPU topology", "one socket a CPU", why)
        system, wanted = own.find("os"), made.options.get("Firmware")
        secure = own.find("os/firmware/feature[@name='secure-boot'][@enabled='yes']") is not None
        if system is not None and wanted and (system.get("firmware"), secure) != ("efi", wanted == "uefi-secure"):
            system.attrib.pop("firmware", "")  # it is given by a path, or incompletely: the ad has it then
            for part in system.findall("firmware"):
                remove(part)
        for disk in made.disks:
            if disk.place in disks:
                _correct(disks[disk.place], disk, transferred=not options.shared)
        if not any(disk.device.startswith("hd") for disk in made.disks):
            for controller in own.findall("devices/controller[@type='ide']"):  # q35 has none
                remove(controller)
        for tag in ("kernel", "initrd"):
            if (element := own.find(f"os/{tag}")) is not None:
                place, said = f"/domain/os/{tag}", element.text or ""
                element.text = self._bring(said, place)
                summary.keep(place, f"{tag} {said}", "goes with the job")
        etree.indent(own)
        name = f"{made.name}.xml"
        path = os.path.join(options.dir, name)
        free(path, summary, force=options.force)
        with os_errors_as(f"{path} cannot be written"):
            write_anew(path, etree.tostring(own, encoding="utf-8", xml_declaration=True) + b"\n")
        summary.made.append(path)
        made.attributes[ATTRIBUTE] = name
        made.files.append(path)
        # The file itself has the rest; the ad names the disks and grants the amounts.
        made.options.pop("Topology", None)
        made.own_nics = True
        summary.advise(f"{path} goes with the job. The machine must take such jobs (VM_ALLOW_LIBVIRT_XML).")

    def _trimmed(
        self, element: etree._Element, allowed: Element, path: str, disks: dict[str, etree._Element]
    ) -> etree._Element:
        """Copy the permitted parts of an element, which are marked as handled; the disks are added by their places."""
        made, account = etree.Element(local(element.tag)), self._account
        for key, value in element.items():
            form = allowed.form(str(key))
            if form and re.fullmatch(form, str(value), re.ASCII):
                made.set(key, value)
                account.take(element, local(key))
        account.take(element)
        if allowed.text is not None:
            made.text = (element.text or "").strip()
        counts = Counter[str]()
        for part in element:
            tag = str(part.tag)
            below = allowed.child(tag)
            counts[tag] += 1
            if part in account.whole or below is None or counts[tag] > below.most or not _keeps(part, below):
                continue
            made.append(self._trimmed(part, below, f"{path}/{tag}", disks))
            if tag == "disk":
                disks[account.place(part)] = made[-1]
            elif path == "/domain/devices" and tag not in _IN_THE_AD:
                self._summary.keep(account.place(part), tag, "in the job's own XML")
        return made

    def _sizes(self) -> None:
        """Read memory, CPUs and their topology."""
        account, made = self._account, self._made
        memory, vcpu, topology = child(self._root, "memory"), child(self._root, "vcpu"), child(self._cpu, "topology")
        if memory is not None:
            made.places["memory"] = account.place(memory)
            account.take(memory, "unit")
            try:
                made.memory_mib = -(-model.memory(memory) >> 20)  # type: ignore[arg-type]
            except ValueError as error:
                raise SubmitError(f"{account.place(memory)}: {error}.") from error
        if vcpu is not None:
            made.places["vcpus"] = account.place(vcpu)
            said = account.get(vcpu, "current") or text(vcpu)
            made.vcpus = number(said)
            if not made.vcpus:
                raise SubmitError(f"{account.place(vcpu)}: {said[:40]!a} is no number of CPUs.")
        if topology is not None:
            parts = [number(get(topology, name) or "1") for name in ("sockets", "cores", "threads")]
            others = {get(topology, name) or "1" for name in ("dies", "clusters")}
            if others == {"1"} and prod(parts) == made.vcpus:
                account.take(topology, "sockets", "cores", "threads", "dies", "clusters")
                made.places["Topology"] = account.place(topology)
                made.options["Topology"] = "sockets={},cores={},threads={}".format(*parts)

    def _firmware(self) -> None:
        """Read the architecture, the firmware and the clock."""
        account, made, summary, as_is = self._account, self._made, self._summary, self._options.as_is
        system, kind = self._system, self._kind
        made.set_architecture(account.get(kind, "arch"), account.place(kind), summary)
        loader, nvram = child(system, "loader"), child(system, "nvram")
        firmware = get(system, "firmware")
        account.take(system, *["firmware"] * (firmware in ("efi", "bios")))
        if firmware == "efi" or get(loader, "type") == "pflash" or _UEFI.search(text(loader)):
            listed = children(child(system, "firmware"), "feature")
            features = {account.get(feature, "name"): account.get(feature, "enabled") for feature in listed}
            account.take(loader, "type", "readonly", "secure", "format")
            variables = os.path.basename(get(nvram, "template"))
            secure = "yes" in (get(loader, "secure"), features.get("secure-boot"))
            keys = features.get("enrolled-keys") != "no" and (not variables or bool(_WITH_KEYS.search(variables)))
            if nvram is not None and not as_is:
                account.take_all(nvram)
                summary.new_variables(account.place(nvram), "nvram")
            if (secure and keys) or made.options.get("Arch") != ARM:
                made.set_firmware(account.place(system), secure=secure, keys=keys)
        clock = child(self._root, "clock")
        if clock is not None and not as_is:
            word = account.get(clock, "offset")
            if word == "timezone":
                word = account.get(clock, "timezone")
            elif word == "variable":
                is_local = account.get(clock, "basis") == LOCAL_TIME
                word = "absolute" if account.get(clock, "adjustment") not in ("", "0") else LOCAL_TIME * is_local
            made.set_clock(word, account.place(clock), in_words(clock), summary)
        ours, theirs = made.chipset(), get(kind, "machine")
        if not as_is and ours != made.chipset(theirs):
            account.take(kind, "machine")
            why = f"jobs with {'UEFI' if 'Firmware' in made.options else 'BIOS'} have it; --as-is keeps it"
            summary.keep(f"{account.place(kind)}/@machine", f"machine {theirs}", ours, why)

    def _boot(self) -> None:
        """Read the boot order: the domain's classes, or the order of each device."""
        classes = list(children(self._system, "boot"))
        found = [(place, element, get(element, "dev")) for place, element in enumerate(classes)]
        for device in children(self._devices, "disk", "interface"):
            if place := number(get(child(device, "boot"), "order")):
                kind = "hd" if local(device.tag) == "disk" else "network"
                found.append((place, next(children(device, "boot")), kind))
        if self._options.as_is:  # the XML keeps the network
            found = [each for each in found if each[2] in BOOT]
        found.sort(key=lambda each: each[0])
        for _, element, _ in found:
            self._account.take(element, "dev", "order")
        entries = [(self._account.place(element), kind) for _, element, kind in found]
        order = self._summary.boot_order(entries, "its place in vm_disk")
        disks = self._made.disks
        for turn, kind in enumerate(order if classes else [], len(disks) + 1):
            if first := next((disk for disk in disks if disk.boot_class == kind), None):  # as libvirt does
                first.boot = first.boot or turn
        if classes and order[:1] not in ([], ["hd"]) and self._made.vm_type == "xen":
            self._summary.lose("", f"boot from {order[0]}", "Xen's VMs boot from their first hard disk")

    def _disk(self, element: etree._Element) -> None:
        account, made, summary = self._account, self._made, self._summary
        place, device = account.place(element), get(element, "device") or "disk"
        source, driver, target = child(element, "source"), child(element, "driver"), child(element, "target")
        path, kind = get(source, "file"), get(element, "type") or "file"
        if get(source, "startupPolicy") == "optional" and self._is_gone(path):
            account.take_all(element)
            summary.skip(place, f"{device} {path}", "it is not here, and need not be (startupPolicy)")
            return
        if kind != "file" or device not in ("disk", "cdrom", "floppy") or not path:
            account.take_all(element)
            if source is None and device in ("cdrom", "floppy"):
                summary.skip(place, f"a {device} without an image")
            else:
                why = "jobs have images that are files; qemu-img convert makes one of other disks"
                summary.lose(place, f"a {device} on a {kind}", why)
            return
        if why := next(filter(None, (_UNREADABLE.get(local(inner.tag)) for inner in element.iter())), ""):
            account.take_all(element)
            summary.lose(place, f"{device} {path}", why)
            return
        account.take(element, "type", "device")
        account.take(source, "file", "index")
        account.take(driver, "name", "type")
        form = get(driver, "type") or "raw"
        if form not in (*FORMATS, "aio"):
            raise SubmitError(f"{place}: an image of the format {form[:40]!a} cannot be used.", "convert it.")
        if form in ("raw", "aio"):  # the latter as Xen's tap has it
            form = "iso" if device == "cdrom" else "raw"
        disk = GuestDisk(self._locate(path, place), form, place=place, hostile=not self._options.own)
        disk.boot = number(get(child(element, "boot"), "order"))
        if account.child(element, "transient") is not None:
            disk.changed.append(f"it is not transient, {Why.NOT_DISCARDED}")
        readonly, shareable = (account.child(element, flag) for flag in ("readonly", "shareable"))
        disk.writable, disk.shared = device != "cdrom" and readonly is None, shareable is not None
        disk.bus = {"floppy": "floppy", "cdrom": "sata"}.get(device, "")
        account.take(target, "dev", "bus", "tray")
        self._target(get(target, "dev"), get(target, "bus"), disk)
        made.disks.append(disk)

    def _is_gone(self, path: str) -> bool:
        """Return True if an image of the file is certainly missing, here and where the job runs."""
        is_beside = isinstance(self._locate, partial) and not self._options.shared  # not in a package
        return is_beside and _is_missing(os.path.join(os.path.dirname(os.path.abspath(self._options.file)), path))

    def _target(self, name: str, bus: str, disk: GuestDisk) -> None:
        """Set the device's name; if it implies another bus here than that of the file, keep the bus instead."""
        usual = _usual_bus(name)
        bus = bus or usual
        known = device_of(name)
        if self._made.vm_type == "xen" and known:  # a partition is a disk by itself there
            disk.device = name
            return
        if name and known != (name, ""):
            disk.changed.append(f"not as {name}, which no disk of a job is called")
        elif bus == usual or (bus == "scsi" and usual == "sata"):
            disk.device = name
        if bus == "scsi" and self._has_virtio_scsi and disk.boot_class == "hd" and disk.writable and not disk.shared:
            disk.device = ""
            disk.put_on("virtio-scsi")
        elif bus == "scsi":
            disk.bus = bus  # the report says what it becomes (`machine.fit_buses`)
        elif bus != usual:
            disk.put_on(bus)

    @cached_property  # an untrusted file may have thousands of disks
    def _has_virtio_scsi(self) -> bool:
        """Return True if SCSI disks must become virtio disks."""
        models = (get(one, "model") for one in children(self._devices, "controller") if get(one, "type") == "scsi")
        is_arm = self._made.options.get("Arch") == ARM
        return not self._options.as_is and not is_arm and any(model.startswith("virtio") for model in models)

    def _nic(self, element: etree._Element) -> None:
        account, place, kind = self._account, self._account.place(element), get(element, "type")
        if kind not in ("network", "bridge", "user"):
            account.take_all(element)
            self._summary.lose(place, f"an interface of the type {kind}", "jobs have the kinds nat, bridge and user")
            return
        account.take(element, "type")
        nic = GuestNic("", place=place, mac=account.get(account.child(element, "mac"), "address").lower())
        nic.link_up = account.get(account.child(element, "link"), "state") != "down"
        usual = "virtio" if self._made.options.get("Arch") == ARM else "rtl8139"  # libvirt's defaults
        model = account.get(account.child(element, "model"), "type") or usual
        address = child(element, "address")
        numbers = [get(address, name) or "0" for name in ("bus", "slot")]
        if get(address, "type") == "pci" and all(map(_PCI.fullmatch, numbers)):
            chipset = self._made.chipset(get(self._kind, "machine"))
            nic.card = card_name(chipset, *(int(each, 0) for each in numbers))
        self._made.add_nic(nic, kind, model)


def _by_name(devices: etree._Element | None) -> list[etree._Element]:
    """Return the disks in libvirt's order: those of a bus sorted by name, at the place of the first one of the bus."""
    first: dict[str, int] = {}

    def key(disk: etree._Element) -> tuple[int, int, str]:
        name, bus = (get(child(disk, "target"), word) for word in ("dev", "bus"))
        return first.setdefault(bus or _usual_bus(name), len(first)), len(name), name

    return sorted(children(devices, "disk"), key=key)


def _usual_bus(name: str) -> str:
    return next((bus for prefix, bus in _BUSES.items() if name.startswith(prefix)), "")


def _correct(element: etree._Element, disk: GuestDisk, *, transferred: bool) -> None:
    """Correct a disk of the file to match vm_disk."""
    driver, source, target = (
        etree.SubElement(element, tag) if (part := element.find(tag)) is None else part
        for tag in ("driver", "source", "target")
    )
    source.set("file", disk.name or (os.path.basename(disk.path) if transferred else disk.path))
    driver.set("type", "raw" if disk.format == "iso" else disk.format)
    if target.get("dev") != disk.device:
        target.attrib.clear()
        target.set("dev", disk.device)
        for address in element.findall("address"):
            remove(address)


def _keeps(element: etree._Element, allowed: Element) -> bool:
    """Return True if the rest of an element still has the same meaning."""
    said = [(allowed.text, text(element))]
    said += [(allowed.form(name), value) for name in _DECISIVE if (value := element.get(name)) is not None]
    return all(not form or re.fullmatch(form, value, re.ASCII) for form, value in said)


PROGRAM = "virt-install"
DEADLINE = 120.0
"""The deadline in seconds for virt-install, whose libvirt may first have to query a dozen QEMUs."""

_REFUSED = ("--location", "-l", "--install", "--unattended", "--initrd-inject")
"""The options after which the printed domain only has names of temporary files."""
_OWN = ("--autostart", "--transient", "--destroy-on-exit", "--noreboot", "--wait", "--autoconsole", "--noautoconsole")
"""The options about how virt-install runs the VM."""
_DEALT_WITH = (*_REFUSED, *_OWN, "--cloud-init", "--disk")
_CLOUD_INIT = {"user-data": USER_DATA, "meta-data": META_DATA, "network-config": NETWORK_CONFIG}


def _of_words(options: argparse.Namespace, summary: Summary) -> Guest:
    """Have virt-install read the words. Raises `SubmitError`."""
    words = _taken(options.file, made := Guest(""), summary)
    domain, installs = _printed(words)
    read_so = argparse.Namespace(**vars(options) | {"file": PROGRAM, "own": True})
    to_make = [*_to_make(words)]
    if installs:
        _boot_what_is_installed(domain, summary)
    if not any("mac=" in word for word in words):
        for mac in domain.findall("devices/interface/mac"):
            remove(mac)  # generated for one VM, and the file may be used for many
    guest = DomainReader(domain, read_so, summary).read()
    guest.options |= made.options
    guest.files += made.files
    for nic in guest.nics:
        nic.card = ""  # there was no guest yet
    for disk in guest.disks:
        if _is_missing(disk.path):
            names = "", os.path.basename(disk.path)
            new = next((one for one in to_make if os.path.basename(one["path"]) in names), None)
            if new is None or options.shared:
                raise SubmitError(f"{disk.path} is not there.", "make it by qemu-img create, or bring it here.")
            to_make.remove(new)
            size, base = int(float(new["size"]) * (1 << 30)), _base(new, summary)
            images.create(disk, size, options.dir, summary, force=options.force, base=base)
    if any(disk.path in summary.made for disk in guest.disks):
        # The largest sizes of all disks; by default HTCondor requests space only for the transferred bytes.
        room = sum(map(images.largest, guest.disks))
        guest.commands["request_disk"] = str(-(-room >> 10))
        summary.keep("", "room for what is written to new disks", f"request_disk = {guest.commands['request_disk']}")
    return guest


def _taken(words: Sequence[str], made: Guest, summary: Summary) -> list[str]:
    """Return the words for virt-install, without those that are handled here. Raises `SubmitError`."""
    kept: list[str] = []
    given = iter(words)
    for word in given:
        name, (_, equals, value) = _option(word), word.partition("=")
        if name in _REFUSED:
            hint = "start from an image that is installed (--import), or from an installer on a CD (--cdrom)."
            raise SubmitError(f"{name} fetches or makes files for an installer, which is no job.", hint)
        if name == "--cloud-init":
            _cloud_init(value if equals else next(given, ""), made)
            kept += [] if "--import" in words else ["--import"]
            continue
        if name in _OWN:
            summary.skip(name, word)
        kept.append(word)
    return kept


def _option(word: str) -> str:
    """Return the full name of an option that is handled here; virt-install accepts abbreviations."""
    name = word.partition("=")[0]
    if name in _DEALT_WITH or not name.startswith("--"):
        return "-l" if name.startswith("-l") else name
    return next((option for option in _DEALT_WITH if option.startswith(name)), name)


def _cloud_init(value: str, made: Guest) -> None:
    """Use the given files for cloud-init. Raises `SubmitError`."""
    for part in filter(None, value.split(",")):
        name, _, path = part.partition("=")
        if name not in _CLOUD_INIT or not os.path.isfile(path):
            why = "there is no such file" if name in _CLOUD_INIT else "it is for installing"
            hint = "write what is wanted into a file for cloud-init, and say --cloud-init user-data=FILE."
            raise SubmitError(f"--cloud-init {part}: {why}.", hint)
        made.options[_CLOUD_INIT[name]] = os.path.basename(path)
        made.files.append(os.path.abspath(path))
    if USER_DATA not in made.options:
        raise SubmitError("--cloud-init without user data makes a password of its own.", "add user-data=FILE.")


def _printed(words: Sequence[str]) -> tuple[etree._Element, bool]:
    """Return the domain that virt-install would start first, and True if it would start another one after it."""
    argv = [PROGRAM, *words, "--print-xml", "--dry-run"]
    with os_errors_as(f"{PROGRAM} cannot be run", "install the package virtinst."):
        done = run(argv, deadline=DEADLINE, environ={**os.environ, "LC_ALL": "C.UTF-8"}, directory=os.getcwd())
    if done.status is None:
        raise SubmitError(f"{PROGRAM} had not ended after {DEADLINE:g} s.", "try it with --print-xml --dry-run.")
    if done.status != 0:
        said = done.err.decode(errors="replace").rpartition("ERROR")[2].strip().partition("\n\n")[0]
        problem = " ".join(said.split()) or f"nothing, and ends with {done.status}"
        raise SubmitError(f"{PROGRAM} says: {problem.rstrip('.')}.", "see virt-install --help.")
    first, end, rest = done.out.partition(b"</domain>")
    return domain_of(first + end, f"what {PROGRAM} prints"), bool(rest.strip())


def _boot_what_is_installed(domain: etree._Element, summary: Summary) -> None:
    """Boot from the new disk of an installation once it is bootable."""
    summary.advise("The job ends when the guest powers off, not when it reboots: let the installer power it off.")
    disks = [disk for disk in domain.iterfind("devices/disk") if disk.get("device", "disk") == "disk"]
    if not disks or not all(_is_missing(str(disk.xpath("string(source/@file)"))) for disk in disks):
        return
    for boot in domain.findall("os/boot"):
        remove(boot)
    summary.keep("", "boot from the CD", "boot from the CD while the disk is empty", "reboots run what is installed")


def _to_make(words: Sequence[str]) -> Iterator[dict[str, str]]:
    """Yield the values of the disks that do not exist and must be made, in the order of the words."""
    for word, following in pairwise([*words, ""]):
        if _option(word) != "--disk":
            continue
        given = (word.partition("=")[2] if "=" in word else following).split(",")
        parts = {"path": given[0] if "=" not in given[0] else "", "size": ""}
        parts |= dict(part.split("=", 1) for part in given if "=" in part)
        is_new = not parts["path"] or _is_missing(parts["path"])  # without a path virt-install chooses one
        if is_new and re.fullmatch(r"\d{1,6}(?:\.\d{1,3})?", parts["size"]):
            yield parts


def _base(new: dict[str, str], summary: Summary) -> GuestDisk | None:
    """Check the image with whose content a new disk begins, None for an empty disk. Raises `SubmitError`.

    The disk becomes a copy, because an overlay only works on a machine that has its backing file at the same path.
    """
    backing, form = new.get("backing_store", ""), new.get("backing_format", "")
    if not backing:
        return None
    if form and form not in CONVERTIBLE:
        raise SubmitError(f"backing_format={form} is none of {', '.join(CONVERTIBLE)}.", "name one of them.")
    base = GuestDisk(os.path.abspath(backing), form, place=f"backing_store={backing}", is_sure=bool(form))
    if not form:
        images.find_format(base)
    images.check(base, summary, flatten=True)
    return base


def _is_missing(path: str) -> bool:
    """Return True if a file certainly does not exist: in an inaccessible directory it may exist."""
    try:
        os.lstat(path)
    except OSError as error:
        return isinstance(error, FileNotFoundError)
    return False
