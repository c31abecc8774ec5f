"""Submit files as pools have had them since long before this daemon: what HTCondor's own server runs, runs.

By the shapes of those in HTCondor's manual and tests, of test suites that boot images, and of clouds on top of it.
HTCondor's own reader reads the lines; what libvirt's QEMU driver would refuse is refused here too, with a reason.
"""

from pathlib import Path
from typing import NamedTuple

import pytest

from tests import jobs
from tests.commands.submit import oracle
from vmgahp.config import Settings
from vmgahp.domain.build import Host, build
from vmgahp.job.look import look
from vmgahp.job.spec import JobSpec
from vmgahp.job.xen import XenBoot

HOST = Host("00000000-0000-4000-8000-000000000000", "qemu", "", nat_network="default", bridge="br0")
COMMON = "universe = vm\nexecutable = a machine\nlog = machine.log\n"
TRANSFER = "should_transfer_files = YES\nwhen_to_transfer_output = ON_EXIT\n"
NETWORKS = {"VM_NETWORKING": "true", "VM_NETWORKING_TYPE": "nat"}


class Pool(NamedTuple):
    """A submit file, and what the guest is to have."""

    lines: str
    drives: tuple[tuple[str, str, str], ...]
    """File, device and format."""
    memory_mib: int
    vcpus: int = 1
    networks: tuple[str, ...] = ()


RUN = {
    "an image of a system, and a disk that brings the work and takes the results back": Pool(
        """vm_type = kvm
        vm_memory = 2048
        vm_networking = true
        vm_no_output_vm = false
        vm_vnc = true
        vm_disk = system.img:vda:w:raw,data.img:vdb:w:raw
        request_disk = 5.5GB
        transfer_output_files = data.img
        transfer_output_remaps = "data.img = results-$(CLUSTER).img"
        """,
        (("system.img", "vda", "raw"), ("data.img", "vdb", "raw")),
        2048,
        networks=("nat",),
    ),
    "capitals, blanks, a comma at the end, IDE disks and a path of the submit machine": Pool(
        """Vm_Type = KVM
        VM_MEMORY = 512
        request_cpus = 2
        vm_vcpus = 2
        vm_networking = false
        vm_disk = /home/alice/system.img : HDA : W : RAW , data.img:hdb:rw,
        """,
        (("system.img", "hda", "raw"), ("data.img", "hdb", "raw")),
        512,
        2,
    ),
    "NAT in capitals, a MAC address, a checkpoint, and attributes for others than the VM": Pool(
        """vm_type = kvm
        vm_memory = 256
        vm_networking = true
        vm_networking_type = NAT
        vm_macaddr = 02:16:3E:00:00:01
        vm_checkpoint = true
        vm_disk = system.img:vda:w
        periodic_release = (HoldReasonCode == 6) && regexp("VMGAHP_ERR_INTERNAL", HoldReason)
        priority = 5
        +vm_ipaddr = "192.0.2.9"
        +VM_XML = "<domain type='kvm'><name>{NAME}</name></domain>"
        """,
        (("system.img", "vda", "raw"),),
        256,
        networks=("nat",),
    ),
}


def read(lines: str, scratch: Path, files: tuple[str, ...], **settings: str) -> tuple[JobSpec, Settings]:
    for name in files:
        (scratch / name).write_bytes(bytes(1 << 16))
        jobs.own(scratch, scratch / name)
    text = COMMON + TRANSFER + (f"transfer_input_files = {','.join(files)}\n" if files else "") + lines
    ad = oracle.ad_of("\n".join(line.strip() for line in text.splitlines()), scratch)
    made = Settings({"VM_MEMORY": "4096", "VM_HARDWARE_VT": "true"} | settings)
    spec = JobSpec.parse(ad, made)
    return (spec._replace(xen=XenBoot.parse(ad, made)) if ad.vm_type() == "xen" else spec), made


@pytest.mark.parametrize("pool", RUN.values(), ids=list(RUN))
def test_it_runs(pool: Pool, scratch: Path) -> None:
    spec, settings = read(pool.lines, scratch, ("system.img", "data.img"), **NETWORKS)
    made = oracle.seen(build(look(spec, settings, jobs.owner(scratch)), HOST))
    assert tuple((drive.file, drive.device, drive.form) for drive in made.drives) == pool.drives
    assert (made.memory_mib, made.vcpus) == (pool.memory_mib, pool.vcpus)
    assert tuple(card.network for card in made.cards) == pool.networks


def test_one_vm_on_partitions_of_one_disk_is_xens(scratch: Path) -> None:
    lines = """vm_type = xen
    vm_memory = 128
    xen_kernel = /boot/vmlinuz-of-the-guest
    xen_initrd = /boot/initrd-of-the-guest
    xen_root = /dev/sda1
    xen_kernel_params = "3 console=hvc0"
    vm_disk = system.img:sda1:w,data.img:sda2:w
    """
    spec, settings = read(lines, scratch, ("system.img", "data.img"))
    found = look(spec._replace(xen=None), settings, jobs.owner(scratch)).disks
    assert [(disk.device, disk.partition) for disk in found] == [("sda", "1"), ("sda", "2")]
    assert spec.xen.kernel.path == "/boot/vmlinuz-of-the-guest"
    assert spec.xen.command_line == "root=/dev/sda1 3 console=hvc0"


def test_a_cloud_whose_script_describes_the_vm(scratch: Path) -> None:
    """Its jobs name no disk that is one, and say to the script what they like."""
    lines = """vm_type = kvm
    vm_memory = 512
    vm_disk = /dev/null:null:null
    +VMPARAM_vm_Image = "debian"
    +VM_XML = "<domain type='kvm'><name>{NAME}</name></domain>"
    """
    spec, settings = read(lines, scratch, (), LIBVIRT_XML_SCRIPT="/etc/condor/make-xml")
    assert look(spec, settings, jobs.owner(scratch)).disks == ()
