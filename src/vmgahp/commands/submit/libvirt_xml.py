"""libvirt's domain XML as a job: as attributes, or the file itself (``--as-is``).

`libvirt_as_is` is the other way.
"""

import argparse
import os

from lxml import etree

from vmgahp.commands.submit.images import require_beside
from vmgahp.commands.submit.machine import Guest, GuestDisk, GuestNic, is_device, simple_name
from vmgahp.commands.submit.summary import SubmitError, Summary
from vmgahp.commands.submit.xml_input import LARGEST, Account, child, children, get, local, read, text
from vmgahp.images.formats import FORMATS

UNITS = {
    "b": 1,
    "bytes": 1,
    **{
        letter.lower() + ending: factor**power
        for power, letter in enumerate("KMGT", 1)
        for ending, factor in (("", 1024), ("ib", 1024), ("b", 1000))
    },
}
"""libvirt's units of memory, in lower case; it takes KiB where none is said."""

KINDS = {"network": "nat", "bridge": "bridge", "user": "user"}
_MODELS = {"virtio": "virtio", "e1000": "e1000", "e1000e": "e1000e", "rtl8139": "rtl8139"}
_MODELS |= dict.fromkeys(("virtio-transitional", "virtio-non-transitional"), "virtio")

_BUSES = {"vd": "virtio", "sd": "sata", "hd": "ide", "fd": "fdc"}
"""What a device's name stands for on the execute machine, by its beginning."""

_SETTLED = {
    f"/domain/{path}": reason
    for reason, paths in (
        ("a number of the moment", "@id"),
        ("VM_TYPE and VM_ALLOW_EMULATION", "@type"),
        ("HTCondor names the VM", "uuid genid title description"),
        ("of the program that wrote the file", "metadata"),
        ("its own control groups", "resource"),
        ("its own security", "seclabel"),
        ("its own tuning", "cputune memtune numatune blkiotune iothreads vcpu/@placement vcpu/@cpuset"),
        (
            "VM_CPU_MODE",
            "cpu/@mode cpu/@match cpu/@check cpu/@migratable cpu/model cpu/vendor cpu/feature cpu/cache "
            "cpu/maxphysaddr",
        ),
        ("the job ends with the guest", "on_poweroff on_reboot on_crash on_lockfailure"),
        ("HTCondor suspends the job", "pm"),
        ("every VM has it", "features/acpi features/apic features/pae"),
        ("it comes with the firmware", "features/smm"),
        ("it goes with architecture and firmware", "os/type/@machine"),
        ("its own QEMU", "devices/emulator"),
        ("it goes with the disks", "devices/controller"),
        ("it goes with the console", "devices/input devices/video"),
        ("its own, which goes to vm_console.log", "devices/serial devices/console"),
        ("every VM has one", "devices/memballoon devices/rng"),
        ("nothing is heard", "devices/audio"),
        (
            "libvirt's own",
            "devices/disk/alias devices/disk/address devices/interface/alias devices/interface/address "
            "devices/interface/target devices/tpm/alias",
        ),
        ("found in the image", "devices/disk/backingStore"),
        ("of the moment", "devices/disk/mirror"),
        ("the disks' order", "devices/disk/boot"),
        ("the image is there, or the job is held", "devices/disk/source/@startupPolicy"),
        ("VMs boot from disks first", "devices/interface/boot"),
        ("its own network of that kind", "devices/interface/source"),
        ("its own VNC on loopback, with a password", "devices/graphics"),
    )
    for path in paths.split()
}
"""Path -> why what is there is left to the execute machine."""


def machine(options: argparse.Namespace, summary: Summary) -> Guest:
    """Read the file. Raises `SubmitError`."""
    try:
        with open(options.file, "rb") as file:
            data = file.read(LARGEST + 1)
    except OSError as error:
        raise SubmitError(f"{options.file} cannot be read ({error.strerror}).") from error
    root = read(data, options.file)
    if local(root.tag) == "domstatus":  # the file of a VM that runs
        inner = child(root, "domain")
        root = root if inner is None else inner
    if local(root.tag) != "domain":
        raise SubmitError(
            f"{options.file} describes a {local(root.tag)[:40]!a}, no domain.", "write it with virsh dumpxml."
        )
    account = Account(root)
    account.take(root)
    made = Guest(name=_name(root, account, options))
    for tag in ("features", "cpu"):  # each of what is in them is told by itself
        if (element := child(root, tag)) is not None:
            account.take(element)
    _sizes(root, account, made)
    _system(root, account, made)
    devices = child(root, "devices")
    if devices is not None:
        account.take(devices)
        for disk in children(devices, "disk"):
            _disk(disk, account, made, summary, options)
        for interface in children(devices, "interface"):
            _nic(interface, account, made, summary)
        _others(devices, account, made)
    if options.as_is:
        from vmgahp.commands.submit.trim import bring

        bring(root, account.whole, made, summary, _settled, options.dir, force=options.force)
    else:
        account.tell(summary, _settled)
    return made


def _settled(path: str, element: etree._Element) -> str:
    if path == "/domain/currentMemory":
        return "the VM has all of its memory"
    if path == "/domain/os/boot" and get(element, "dev") == "hd":
        return "every VM boots from its disks"
    if path == "/domain/clock" and get(element, "offset") == "utc":
        return "every VM's clock is UTC's"
    while path:
        if path in _SETTLED:
            return _SETTLED[path]
        path = path.rpartition("/")[0]
    return ""


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
        unit = (get(memory, "unit") or "KiB").lower()
        amount = _digits(text(memory), 18)
        if not amount or unit not in UNITS:
            raise SubmitError(f"{account.place(memory)}: {text(memory)[:40]!a} {unit!a} is no amount of memory.")
        made.memory_mib = -(-amount * UNITS[unit] // (1 << 20))
    if vcpu is not None:
        account.take(vcpu)
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
        made.options["Topology"] = "sockets={},cores={},threads={}".format(*numbers)


def _digits(text: str, longest: int) -> int:
    """A whole number of so many digits at most, 0 for anything else."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= longest else 0


def _system(root: etree._Element, account: Account, made: Guest) -> None:
    """Architecture and firmware."""
    system = child(root, "os")
    if system is None:
        return
    account.take(system)
    kind = child(system, "type")
    if kind is not None and text(kind) == "hvm":
        account.take(kind)
        if get(kind, "arch") in ("x86_64", "aarch64"):
            account.take(kind, "arch")
            if get(kind, "arch") != "x86_64":
                made.options["Arch"] = get(kind, "arch")
    loader = child(system, "loader")
    by_path = loader is not None and get(loader, "type") == "pflash"
    secure = loader is not None and get(loader, "secure") == "yes"
    if get(system, "firmware") in ("efi", "bios"):
        account.take(system, "firmware")
    if get(system, "firmware") == "efi" or by_path:
        features = child(system, "firmware")
        for feature in () if features is None else children(features, "feature"):
            if get(feature, "name") in ("secure-boot", "enrolled-keys"):
                account.take(feature, "name", "enabled")
                secure |= get(feature, "name") == "secure-boot" and get(feature, "enabled") == "yes"
        if loader is not None:
            account.take(loader, "type", "readonly", "secure", "format")
        if secure or made.options.get("Arch") != "aarch64":
            made.options["Firmware"] = "uefi-secure" if secure else "uefi"


def _disk(
    element: etree._Element, account: Account, made: Guest, summary: Summary, options: argparse.Namespace
) -> None:
    place = account.place(element)
    device = get(element, "device") or "disk"
    source, driver, target = child(element, "source"), child(element, "driver"), child(element, "target")
    path = "" if source is None else get(source, "file")
    if get(element, "type") not in ("file", "") or device not in ("disk", "cdrom", "floppy") or not path:
        account.take_all(element)
        kind = get(element, "type") or "file"
        what = f"a {device} without an image" if not path and kind == "file" else f"a {device} on a {kind}"
        summary.lose(place, f"{what}: jobs have images that are files")
        return
    account.take(element, "type", "device", "snapshot", "model")
    assert source is not None
    account.take(source, "file", "index")
    form = "raw"
    if driver is not None:
        account.take(driver, "name")
        form = get(driver, "type") or "raw"
        if form in FORMATS:
            account.take(driver, "type")
    if form not in FORMATS:
        raise SubmitError(f"{place}: an image of the format {form[:40]!a} cannot be used.", "convert it.")
    if device == "cdrom" and form == "raw":
        form = "iso"
    full = os.path.join(os.path.dirname(os.path.abspath(options.file)), path)
    if not options.own:
        require_beside(full, place, options.file)
    disk = GuestDisk(full, form, place=place, hostile=not options.own)
    for flag in ("readonly", "shareable"):
        found = child(element, flag)
        if found is not None:
            account.take(found)
    disk.writable = device != "cdrom" and child(element, "readonly") is None
    disk.shared = child(element, "shareable") is not None
    disk.bus = "floppy" if device == "floppy" else "sata" if device == "cdrom" else ""
    if target is not None:
        account.take(target, "dev", "tray")
        _target(target, disk, account)
    made.disks.append(disk)


def _target(target: etree._Element, disk: GuestDisk, account: Account) -> None:
    """The device's name, which stands for a bus here: that of the file if it is the same."""
    name, bus = get(target, "dev"), get(target, "bus")
    usual = next((bus for prefix, bus in _BUSES.items() if name.startswith(prefix)), "")
    if is_device(name):
        disk.device = name
    if not bus or bus == usual:
        account.take(target, "bus")
    elif bus in ("virtio", "sata", "ide"):
        account.take(target, "bus")
        disk.device, disk.bus = "", bus


def _nic(element: etree._Element, account: Account, made: Guest, summary: Summary) -> None:
    kind = KINDS.get(get(element, "type"))
    if kind is None:
        account.take_all(element)
        summary.lose(account.place(element), f"an interface of the type {get(element, 'type')}")
        return
    account.take(element, "type")
    nic = GuestNic(kind)
    mac, model, link = child(element, "mac"), child(element, "model"), child(element, "link")
    if mac is not None:
        account.take(mac, "address")
        nic.mac = get(mac, "address").lower()
    nic.model = "rtl8139"  # what libvirt gives to an interface without one
    if model is not None:
        account.take(model)
        nic.model = _MODELS.get(get(model, "type"), "e1000")
        if get(model, "type") in _MODELS:
            account.take(model, "type")
    if link is not None:
        account.take(link, "state")
        nic.link_up = get(link, "state") != "down"
    made.nics.append(nic)


def _others(devices: etree._Element, account: Account, made: Guest) -> None:
    for graphics in children(devices, "graphics"):
        if get(graphics, "type") == "vnc":
            account.take(graphics, "type")
            made.vnc = True
    for tpm in children(devices, "tpm"):
        backend = child(tpm, "backend")
        if backend is not None and get(backend, "type") == "emulator" and get(backend, "version") in ("", "2.0"):
            account.take(tpm)
            account.take(backend, "type", "version")
            made.options["TPM"] = True
