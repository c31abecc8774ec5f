"""Xen jobs: how they boot, what is refused and with which word, and the domain XML."""

import errno
import os

import pytest

from tests import REPOSITORY
from tests.domain.support import assert_golden, assert_of_libvirts_schema, disk, spec
from tests.job.xen_jobs import CASES, HOST
from tests.jobs import NETWORKS, Files, ad
from vmgahp.config import Settings
from vmgahp.domain import build as domain_xen
from vmgahp.errors import JobFault, MachineFault
from vmgahp.job.disks import DiskRequest
from vmgahp.job.spec import JobSpec, Nic
from vmgahp.job.xen import LONGEST_COMMAND_LINE, BootFile, XenBoot, look

GOLDEN = REPOSITORY / "tests" / "domain" / "golden" / "xen"

OWN = {
    "JobVMType": '"xen"', "VMPARAM_Xen_Kernel": '"/submit/vmlinuz"', "VMPARAM_Xen_Initrd": '"initrd.img"',
    "VMPARAM_Xen_Root": '"/dev/xvda1 ro"', "VMPARAM_Xen_Kernel_Params": '"console=hvc0"',
}  # fmt: skip
FILES = ("disk.img", "vmlinuz", "initrd.img")


def boot(settings: dict[str, str] | None = None, **changes: str | None) -> XenBoot:
    return XenBoot.parse(ad(**{**OWN, **changes}), Settings(settings or {}))


def looked(files: object = None, **changes: str | None) -> XenBoot:
    return look(boot(**changes), "/scratch", files or Files(FILES))  # type: ignore[arg-type]


def refused(word: str, *parts: str, **changes: object) -> None:
    with pytest.raises(JobFault) as caught:
        looked(**changes)  # type: ignore[arg-type]
    assert caught.value.code == f"VMGAHP_ERR_JOBCLASSAD_{word}"
    assert caught.value.hint
    for part in parts:
        assert part in caught.value.problem


# --- how a job boots


def test_a_kernel_of_the_jobs_or_of_the_machines() -> None:
    """By its base name, which condor_submit's path of the submit machine ends with."""
    kernel, initrd = BootFile("/scratch/vmlinuz", True), BootFile("/scratch/initrd.img", True)
    assert looked() == XenBoot(kernel=kernel, initrd=initrd, command_line="root=/dev/xvda1 ro console=hvc0")
    of_the_machine = {"VMPARAM_Xen_Kernel": '" /boot/vmlinuz "', "VMPARAM_Xen_Root": '"root=/dev/sda1"'}
    none = {"VMPARAM_Xen_Initrd": None, "VMPARAM_Xen_Kernel_Params": None}
    found = looked(files=Files((), ("/boot/vmlinuz",)), **of_the_machine, **none)
    assert found == XenBoot(kernel=BootFile("/boot/vmlinuz", False), command_line="root=/dev/sda1")


def test_a_bootloader_and_hardware_virtualization_are_the_machines() -> None:
    only = {"VMPARAM_Xen_Kernel": '"Included"', "VMPARAM_Xen_Root": None}
    assert boot({"XEN_BOOTLOADER": '"/bin/sh"'}, **only) == XenBoot(bootloader="/bin/sh")
    refused("XEN_KERNEL_NOT_FOUND", "XEN_BOOTLOADER", **only)
    with pytest.raises(MachineFault, match="not a program"):
        look(boot({"XEN_BOOTLOADER": "/etc/passwd"}, **only), "/scratch", Files())  # type: ignore[arg-type]
    only = {"VMPARAM_Xen_Kernel": '"vmx"', "VMPARAM_Xen_Root": None}
    assert boot({"VM_HARDWARE_VT": "true"}, **only) == XenBoot(hardware=True)
    refused("MISMATCHED_HARDWARE_VT", "VM_HARDWARE_VT", **only)


@pytest.mark.parametrize("value", [None, '""', "7", "undefined"])
def test_a_job_must_say_what_it_boots_and_from_where(value: str | None) -> None:
    refused("XEN_NO_KERNEL_PARAM", "VMPARAM_Xen_Kernel", VMPARAM_Xen_Kernel=value)
    refused("XEN_NO_ROOT_DEVICE_PARAM", "VMPARAM_Xen_Root", VMPARAM_Xen_Root=value)


@pytest.mark.parametrize(
    ("attribute", "word"),
    [("VMPARAM_Xen_Kernel", "XEN_KERNEL_NOT_FOUND"), ("VMPARAM_Xen_Initrd", "XEN_INITRD_NOT_FOUND")],
)
def test_a_file_that_the_jobs_user_cannot_open(attribute: str, word: str) -> None:
    refused(word, attribute, "none.img", **{attribute: '"none.img"'})
    refused(word, attribute, "/boot/none", **{attribute: '"/boot/none"'})
    refused(word, attribute, "control", **{attribute: '"a\tb"'})
    link = Files(FILES, bad={"link": errno.ELOOP})
    refused(word, os.strerror(errno.ELOOP), files=link, **{attribute: '"link"'})


def test_the_kernels_command_line() -> None:
    refused("XEN_NO_ROOT_DEVICE_PARAM", "control", VMPARAM_Xen_Kernel_Params='"a\tb"')
    assert LONGEST_COMMAND_LINE == 1023  # and a NUL, in the 1024 of Xen's start info page
    room = LONGEST_COMMAND_LINE - len("root=/dev/xvda1 ro ")
    assert len(boot(VMPARAM_Xen_Kernel_Params=f'"{"x" * room}"').command_line) == LONGEST_COMMAND_LINE
    refused("MISMATCHED_HARDWARE_VT", "1024", VMPARAM_Xen_Kernel_Params=f'"{"x" * (room + 1)}"')


# --- what Xen has no such thing of


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"disks": (disk(device="vda"),)}, "vda"),
        ({"disks": (disk(device="fda", kind="floppy"),)}, "fda"),
        ({"disks": (disk("/scratch/a.qcow2", "xvda", format="qcow2"),)}, "qcow2"),
        ({"nics": (Nic("nat", model="e1000"),)}, "e1000"),
        ({"nics": (Nic("nat", link_up=False),)}, "cable"),
        ({"vnc": True}, "JobVMVNCConsole"),
    ],
)
def test_what_a_guest_cannot_have(changes: dict[str, object], part: str) -> None:
    with pytest.raises(JobFault, match=part):
        domain_xen.require_xen(spec(**{"disks": (disk(device="xvda"),), **changes}), XenBoot(hardware=True))


@pytest.mark.parametrize("character", ["\ufffe", "\ud800", "\x01"])
def test_what_xml_cannot_say_is_refused(character: str) -> None:
    job, kernel = CASES["kernel"]
    with pytest.raises(JobFault, match="no character of XML"):
        domain_xen.build_xen(job, kernel._replace(command_line=f"root={character}"), HOST)


def test_partitions_are_disks_and_user_networking_is_not_on_offer() -> None:
    def disks(text: str) -> tuple[DiskRequest, ...]:
        return JobSpec.parse(ad(**OWN, VMPARAM_vm_Disk=f'"{text}"'), Settings({"VM_MEMORY": "1024"})).requests

    found = disks("disk.img:xvda1:w,vmlinuz:xvda2:r")
    assert [(each.device, each.partition) for each in found] == [("xvda", "1"), ("xvda", "2")]
    with pytest.raises(JobFault, match="twice"):
        disks("disk.img:xvda1:w,vmlinuz:xvda1:r")
    settings = Settings(NETWORKS | {"VM_MEMORY": "1024", "VM_NETWORKING_TYPE": "user, nat"})
    networks = settings.networking_types(domain_xen.XEN_NETWORKS)

    def networking_of(**changes: str) -> str:
        return JobSpec.parse(ad(**changes), settings, networks=networks).vm.networking_type

    assert networking_of(JobVMNetworking="true") == "nat"
    with pytest.raises(JobFault, match="JobVMNetworkingType"):
        networking_of(JobVMNetworking="true", JobVMNetworkingType='"user"')


# --- the domain XML


@pytest.mark.parametrize("name", CASES)
def test_golden(name: str, request: pytest.FixtureRequest) -> None:
    assert_golden(domain_xen.build_xen(*CASES[name], HOST), GOLDEN / f"{name}.xml", request)
    assert {path.stem for path in GOLDEN.glob("*.xml")} == set(CASES)


@pytest.mark.libvirt
@pytest.mark.parametrize("name", CASES)
def test_libvirts_schema_accepts_it(name: str) -> None:
    assert_of_libvirts_schema(domain_xen.build_xen(*CASES[name], HOST))
