"""Targets: what a job says in its ad, and in the files that come with it. None of it may blame the machine."""

import errno
import json
import math
import os
from collections.abc import Sequence
from contextlib import suppress
from unittest import mock

from tests import jobs
from tests.fuzz.target import target
from vmgahp import errors
from vmgahp.config import Settings
from vmgahp.domain import model, sanitize
from vmgahp.domain.job_xml import completed, merge
from vmgahp.drivers.vmrun import working_copy
from vmgahp.drivers.vsphere import hardware
from vmgahp.host.run import Finished
from vmgahp.job import chirp, cloud_init, devices, engine, exit_code, look, published, vmware, vmx, xen
from vmgahp.job.ad import JobAd, accepted_types, require_accepted
from vmgahp.job.attributes import Options
from vmgahp.job.disks import refuse_made
from vmgahp.job.policy_view import PolicyView
from vmgahp.job.spec import JobSpec
from vmgahp.job.vmware import VmwareSpec
from vmgahp.text import has_control, is_private

SETTINGS = Settings(
    {
        "VM_MEMORY": "1024", "VM_NETWORKING": "true", "VM_NETWORKING_TYPE": "nat, bridge, user",
        "VM_NETWORKING_BRIDGE_INTERFACE": "br0", "VM_HARDWARE_VT": "true", "VM_SHARE_SCRATCH": "9p",
        "XEN_BOOTLOADER": "/usr/bin/pygrub",
    }
)  # fmt: skip

HELD = (errors.JobFault, errors.ClientFault)
"""What a job may come to."""

VMWARE = VmwareSpec.parse(
    jobs.ad(JobVMType='"vmware"', JobVMMemory="64", VMPARAM_VMware_VMX_File='"vm.vmx"', VMPARAM_vm_Disk=None), SETTINGS
)
DISK = b'# Disk DescriptorFile\ncreateType="monolithicFlat"\nRW 2048 FLAT "disk-flat.vmdk" 0\n'
"""What VMware says of a disk."""

# fmt: off
VALUES = (
    None, 64, -1, 2**62, 1.5, math.nan, -math.inf, "", "disk.img:vda:w", "nat", "a\nb\0", True, ["error"], ["a list"],
)
# fmt: on

OURS = "<domain type='kvm'><name>vm</name><memory>65536</memory><os><type>hvm</type></os><devices/></domain>"


class _Scratch(jobs.Files):
    """A scratch directory in which every file has the same content."""

    switching = False

    def becoming(self) -> None:
        return None

    def __init__(self, content: bytes) -> None:
        super().__init__()
        self._content = content

    def open_scratch(self, directory: str, name: str, flags: int, mode: int = 0o600) -> int:
        if "/" in name or name in ("", ".", ".."):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return _file(self._content)


def _file(content: bytes) -> int:
    descriptor = os.memfd_create("fuzz")
    os.pwrite(descriptor, content, 0)
    return descriptor


def _ad(data: bytes) -> JobAd:
    """An ad of a job that could run, and the lines of the input after it."""
    lines = data.decode("utf-8", "surrogateescape").split("\n")
    plain = {name: text for name, text in jobs.GOOD.items() if name not in ("VMPARAM_vm_Disk", "JobVMMemory")}
    return JobAd([*plain.items(), *(pair for line in lines if (pair := JobAd.parse_line(line)))])


def _evaluate(pairs: Sequence[tuple[str, str]], wanted: Sequence[str], user: object) -> dict[str, engine.Found]:
    """In place of HTCondor's engine, which has a process of its own: any value."""
    return {name: VALUES[len(text) % len(VALUES)] for name, text in pairs if name in wanted}


def _read_yaml(_argv: Sequence[str], *, stdin: bytes, **_how: object) -> Finished:
    """In place of the reader of meta-data, which has a process of its own: any exit status of a reader."""
    return Finished(len(stdin) % 5, b"", b"a complaint")


@target
@mock.patch.object(engine, "evaluate", _evaluate)
def job_ad(data: bytes) -> None:
    """Every line is an attribute or none, and every attribute has a value of its kind or none."""
    ad = _ad(data)
    for name in ad.names():
        assert not is_private(name)
        for value, kind in ((ad.string(name), str), (ad.integer(name), int), (ad.boolean(name), bool)):
            assert value is None or type(value) is kind, (name, value)
    json.dumps(ad.values(), allow_nan=False)
    for line in ad.lines({"Extra": 'a "b\n'}):
        assert "\n" not in line
        pair = JobAd.parse_line(line)
        assert pair is not None
        assert not is_private(pair[0])
    for read in (ad.vm_name, ad.working_dir, ad.vm_type):
        with suppress(*HELD):
            read()


@target
@mock.patch.object(engine, "evaluate", _evaluate)
@mock.patch.object(cloud_init, "run", _read_yaml)
def job(data: bytes) -> None:
    """Whatever attributes a job has, it can run or is held."""
    ad = _ad(data)
    with suppress(*HELD):
        spec = JobSpec.parse(ad, SETTINGS)
        assert 32 <= spec.vm.memory_mib <= 1024
        assert 0 < spec.vm.vcpus <= 255
        assert spec.vm.working_dir.startswith("/")
        found = look.find(spec, SETTINGS, _Scratch(b"#cloud-config\ninstance-id: a"))
        assert all(disk.path.startswith("/") and not has_control(disk.path) for disk in found.disks)
    with suppress(*HELD):
        assert not any(is_private(name) for name in PolicyView(ad, SETTINGS).ad.names())
    with suppress(*HELD):
        devices.devices(Options(ad), SETTINGS, 4, "/scratch")
    with suppress(*HELD):
        require_accepted(ad)
        accepted_types(ad)
    with suppress(*HELD):
        vmware.look(VmwareSpec.parse(ad, SETTINGS), SETTINGS, _Scratch(b'memsize = "64"'))
    with suppress(*HELD):
        boot = xen.XenBoot.parse(ad, SETTINGS)
        assert len(boot.command_line.encode("utf-8", "surrogateescape")) <= xen.LONGEST_COMMAND_LINE
    with suppress(*HELD):
        refuse_made(ad)


@target
def job_xml(data: bytes) -> None:
    """Of a job's own XML nothing comes through but what is allowed, and that fits into a description of ours."""
    ad = jobs.ad(JobVM_VCPUS="4", VMPARAM_vm_Disk=None)
    with suppress(*HELD):
        text = sanitize.read("domain.xml", "/scratch", _Scratch(data))
        domain, dropped = sanitize.sanitized(text, "domain.xml")
        assert len(dropped) <= len(sanitize.ROWS) + len(model.DEVICES)
        for element in domain.iter():
            assert isinstance(element.tag, str)
            assert element.tag.isascii()
            assert not {element.tag, *element.keys()} & {"hostdev", "commandline", "emulator", "seclabel", "filesystem"}
        JobSpec.parse(completed(ad, domain, SETTINGS, "domain.xml"), SETTINGS, diskless=True)
        merge(OURS, domain, {"kernel": "/k", "initrd": "/i"})


@target
def vmx_file(data: bytes) -> None:
    """A .vmx is read or refused; what is read is written such that it reads the same."""
    with suppress(vmx.VmxError):
        read = vmx.Vmx.decode(data)
        for name in read:
            read.boolean(name)
        written = read.encode()
        again = vmx.Vmx.decode(written)
        assert again == read
        assert again.encode() == written


@target
def vmware_machine(data: bytes) -> None:
    """Of a job's .vmx no more is taken than a job may choose, for VMware and for vSphere."""
    with suppress(vmx.VmxError, *HELD):
        read = vmx.Vmx.decode(data)
        with suppress(*HELD):
            hardware.read_hardware(read, "vm.vmx")
        copy = working_copy.build(read, VMWARE, "/scratch", "1-2-3", SETTINGS, _Scratch(DISK)).vmx
        assert copy["memsize"] == "64"
        for name, value in vmx.Vmx.decode(copy.encode()).items():
            assert not name.lower().startswith(("pcipassthru", "sharedfolder", "usb", "monitor.", "debug"))
            assert "/" not in value or name.lower().endswith("filename") or value == read.get(name), name


@target
def seed(data: bytes) -> None:
    """What a guest is told, and what it says at its end."""
    told = cloud_init.Seed("user-data", "", "", "i", "h", ("a", "b", "c"), is_checked=False)
    with suppress(*HELD):
        cloud_init.look(told, "/scratch", _Scratch(data))
    cloud_init.judge("Meta_Data", data[: 1 << 16])
    for option in ("User_Data", "Network_Config"):
        cloud_init.judge(option, data[: 1 << 12])
    text = data.decode("utf-8", "surrogateescape")
    with suppress(cloud_init.iso.Unfit):
        cloud_init.iso.check_names(text.split("\n"))
    for code in (exit_code.from_console(data), exit_code.from_port(data)):
        assert code is None or 0 <= code <= 255


@target
def starter(data: bytes) -> None:
    """Where a job says that its starter is, and what a guest would have the pool told."""
    if found := chirp.parse(data):
        address, port, password = found
        assert address == "::1" or address.startswith("127.")
        assert 0 < port < 65536
        assert password.isalnum()
    made = published.expression(data.decode("utf-8", "surrogateescape"))
    assert made.isprintable()
    assert len(made.encode()) <= published.LONGEST_VALUE
    assert made[0] == made[-1] == '"'
    assert not made[1:-1].replace("\\\\", "").replace('\\"', "").count('"')
    assert "\n" not in chirp.escaped(made)
