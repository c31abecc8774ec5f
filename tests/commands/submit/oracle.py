"""What a submit file comes to, by readers that are not ours: HTCondor's of its lines, libvirt's of the domain.

The way of a job: the lines, as HTCondor's own `Submit` has them, become the attributes that condor_submit makes of
them; the starter adds its own and brings the files; the daemon describes the VM, and libvirt, which checks it by its
schema and fills it in, says what machine that is.
"""

from __future__ import annotations

import itertools
import os
import shutil
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from xml.etree import ElementTree as etree

import htcondor2

from tests import jobs
from tests.peer import environment
from vmgahp import config
from vmgahp.daemon import transfer_plugin
from vmgahp.drivers.libvirt.start.describe import NO_UUID, ONE_TIME
from vmgahp.job.ad import JobAd

if TYPE_CHECKING:
    import libvirt

    from vmgahp.drivers.libvirt.driver import LibvirtDriver

MACHINE = {
    "VM_MEMORY": 1 << 20, "VM_ALLOW_EMULATION": True, "VM_NETWORKING": True, "VM_NETWORKING_TYPE": "nat, bridge, user",
    "VM_NETWORKING_BRIDGE_INTERFACE": "br0", "VM_ALLOW_HOST_LOOPBACK": True, "VM_ALLOW_LIBVIRT_XML": True,
}  # fmt: skip
"""Settings of an execute machine that has all that a job can ask for."""

_TEXTS = {
    "vm_type": "JobVMType", "vm_networking_type": "JobVMNetworkingType", "vm_macaddr": "JobVM_MACADDR",
    "vm_disk": "VMPARAM_vm_Disk", "xen_kernel": "VMPARAM_Xen_Kernel", "xen_initrd": "VMPARAM_Xen_Initrd",
    "xen_root": "VMPARAM_Xen_Root", "xen_kernel_params": "VMPARAM_Xen_Kernel_Params",
}  # fmt: skip
_VALUES = {
    "vm_memory": "JobVMMemory", "vm_vcpus": "JobVM_VCPUS", "request_cpus": "RequestCpus",
    "request_memory": "RequestMemory", "vm_networking": "JobVMNetworking", "vm_vnc": "JobVMVNCConsole",
    "vm_checkpoint": "JobVMCheckpoint", "vm_no_output_vm": "VMPARAM_No_Output_VM",
}  # fmt: skip
"""What condor_submit makes of its commands: strings of some, expressions of others (``SetVMParams`` in HTCondor's
``src/condor_utils/submit_utils.cpp``; test_condor_submit.py asks it)."""
_OTHERS = {"universe", "executable", "transfer_input_files", "requirements", "log", "on_exit_remove"}
_OTHERS |= {"should_transfer_files", "when_to_transfer_output", "transfer_output_files", "transfer_output_remaps"}
_OTHERS |= {"on_exit_hold", "on_exit_hold_reason", "request_disk", "priority", "periodic_release"}
"""Commands of which a VM sees nothing."""

_numbers = itertools.count(1)


def attributes(text: str) -> dict[str, str]:
    """The attributes of the ad that a schedd has of a submit file, as expressions."""
    lines = htcondor2.Submit(text)
    assert lines.expand("universe") == "vm"
    vm_type = lines.expand("vm_type").lower()
    found = {}
    for name in lines:
        key, value = name.lower(), lines.expand(name)
        if key.startswith("my."):
            found[name[3:]] = value
        elif key in _VALUES:
            found[_VALUES[key]] = value
        elif key == "vm_disk" and vm_type not in ("kvm", "xen"):
            continue  # it reads that of no other type
        elif key in _TEXTS:
            value = vm_type if key == "vm_type" else value.strip("\"'") if key == "xen_kernel_params" else value
            found[_TEXTS[key]] = _quoted(value)
        else:
            assert key in _OTHERS, f"{name} is no command that condor_submit is known to read"
    if found.get("JobVMNetworking") != "true":
        found.pop("JobVMNetworkingType", None)
    for entry in filter(str.strip, lines["vm_disk"].split(",") if "vm_disk" in lines else ()):
        assert 3 <= len(entry.split(":")) <= 4, f"condor_submit refuses {entry}"
    return found


def _quoted(value: str) -> str:
    """A string as condor_submit writes it into an ad."""
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def transferred(text: str) -> list[str]:
    """The files and URLs that go with the job."""
    lines = htcondor2.Submit(text)
    return [name.strip() for name in lines.get("transfer_input_files", "").split(",") if name.strip()]


def bring(text: str, scratch: Path) -> None:
    """Have the job's files in its scratch directory, as the file transfer does; an image of a URL is an empty one."""
    for path in dict.fromkeys(transferred(text)):
        name = transfer_plugin.parse_url(path).name if "://" in path else os.path.basename(path)
        target = scratch / name
        assert not target.exists(), f"two files of the job are called {name}"
        if "://" in path:
            target.write_bytes(bytes(4096))
        else:
            shutil.copyfile(path, target)
        jobs.own(scratch, target)


def ad_of(text: str, scratch: Path) -> JobAd:
    """The ad that a daemon gets of a starter, with an id of its own."""
    proc = {"ClusterId": str(os.getpid() * 1_000_000 + next(_numbers)), "ProcId": "0", "User": '"alice@submit"'}
    return JobAd([("VM_WORKING_DIR", f'"{scratch}"'), *(attributes(text) | proc).items()])


def driver_at(scratch: Path) -> LibvirtDriver:
    """The daemon's driver, for jobs in a scratch directory."""
    from vmgahp.drivers.libvirt.driver import LibvirtDriver

    made = config.load(environment("kvm", scratch, **MACHINE))
    return LibvirtDriver("kvm", made, jobs.owner(scratch), lambda _line: None)


def defined(connection: libvirt.virConnect, domain: str) -> str:
    """A domain as libvirt has it after it was checked by its schema and filled in; none is left."""
    import libvirt

    domain = domain.replace(f'passwd="{ONE_TIME}"', "")  # which is longer than any
    domain = domain.replace(NO_UUID, str(uuid.uuid4()))
    made = connection.defineXMLFlags(domain, libvirt.VIR_DOMAIN_DEFINE_VALIDATE)
    try:
        return str(made.XMLDesc(libvirt.VIR_DOMAIN_XML_INACTIVE))
    finally:
        made.undefineFlags(libvirt.VIR_DOMAIN_UNDEFINE_NVRAM)


# ---- a second reader of libvirt's XML


class Drive(NamedTuple):
    """A drive of a machine, as somebody sees it who opens the case."""

    file: str
    """The name of its image."""
    kind: str
    """``disk``, ``cdrom`` or ``floppy``."""
    bus: str
    form: str
    """QEMU's name of the format."""
    read_only: bool = False
    device: str = ""


class Card(NamedTuple):
    """A NIC."""

    network: str
    model: str
    mac: str
    up: bool = True


class Seen(NamedTuple):
    """A machine."""

    memory_mib: int
    vcpus: int
    topology: tuple[int, ...] = ()
    """Sockets, cores and threads; none where nobody says."""
    arch: str = "x86_64"
    firmware: str = "bios"
    """``bios``, ``uefi`` or ``uefi-secure``."""
    drives: tuple[Drive, ...] = ()
    """In the order in which they are tried for something to boot, then as they come."""
    cards: tuple[Card, ...] = ()
    tpm: bool = False
    display: bool = False


_NETWORKS = {"network": "nat", "bridge": "bridge", "user": "user"}
_UNITS = {"b": 0, "bytes": 0, "kib": 10, "k": 10, "mib": 20, "m": 20, "gib": 30, "g": 30, "tib": 40, "t": 40}


def seen(domain: str) -> Seen:
    """The machine that a domain's XML describes."""
    root = etree.fromstring(domain)
    memory = root.find("memory")
    assert memory is not None
    size = int(memory.text or 0) << _UNITS[memory.get("unit", "KiB").lower()]
    vcpu = root.find("vcpu")
    topology = root.find("cpu/topology")
    kind = root.find("os/type")
    found = [_drive(disk, place, root) for place, disk in enumerate(root.iterfind("devices/disk"))]
    return Seen(
        -(-size >> 20),
        1 if vcpu is None else int(vcpu.get("current") or vcpu.text or 1),
        () if topology is None else tuple(int(topology.get(word, "1")) for word in ("sockets", "cores", "threads")),
        "x86_64" if kind is None else kind.get("arch", "x86_64"),
        _firmware(root),
        tuple(drive for _, drive in sorted(found)),
        tuple(map(_card, root.iterfind("devices/interface"))),
        root.find("devices/tpm") is not None,
        any(one.get("type") == "vnc" for one in root.iterfind("devices/graphics")),
    )


def _firmware(root: etree.Element) -> str:
    system, loader = root.find("os"), root.find("os/loader")
    efi = system is not None and system.get("firmware") == "efi"
    if not efi and (loader is None or loader.get("type") != "pflash"):
        return "bios"
    secure = loader is not None and loader.get("secure") == "yes"
    for feature in root.iterfind("os/firmware/feature"):
        secure |= feature.get("name") == "secure-boot" and feature.get("enabled") == "yes"
    return "uefi-secure" if secure else "uefi"


def _drive(disk: etree.Element, place: int, root: etree.Element) -> tuple[tuple[int, int], Drive]:
    kind, driver, target = disk.get("device", "disk"), disk.find("driver"), disk.find("target")
    source, boot = disk.find("source"), disk.find("boot")
    classes = [one.get("dev") for one in root.iterfind("os/boot")]
    order = 1000
    if boot is not None:
        order = int(boot.get("order", 0))
    elif (word := {"disk": "hd", "cdrom": "cdrom", "floppy": "fd"}.get(kind)) in classes:
        order = classes.index(word)
    assert target is not None
    drive = Drive(
        os.path.basename("" if source is None else source.get("file", "")),
        kind,
        target.get("bus", ""),
        "raw" if driver is None else driver.get("type", "raw"),
        disk.find("readonly") is not None,
        target.get("dev", ""),
    )
    return (order, place), drive


def _card(interface: etree.Element) -> Card:
    mac, model, link = interface.find("mac"), interface.find("model"), interface.find("link")
    return Card(
        _NETWORKS.get(interface.get("type", ""), interface.get("type", "")),
        "rtl8139" if model is None else model.get("type", ""),
        "" if mac is None else mac.get("address", "").lower(),
        link is None or link.get("state") != "down",
    )
