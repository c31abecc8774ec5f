"""Xen jobs that several tests describe."""

from tests.domain.support import disk, spec
from vmgahp.domain import build as domain_xen
from vmgahp.job.spec import JobSpec, Nic
from vmgahp.job.xen import BootFile, XenBoot

UUID = "c7a5fdbd-edaf-9455-926a-d65c16db1809"

HOST = domain_xen.XenHost(
    UUID,
    {"xvda": "/dev/loop0", "xvda1": "/dev/loop0", "xvda2": "/dev/loop1", "hda": "/dev/loop0", "sdb": "/dev/loop7"},
    "/proc/4711/fd/20",
    "/proc/4711/fd/21",
    bridge="xenbr0",
)
KERNEL = XenBoot(
    kernel=BootFile("/scratch/vmlinuz", True),
    initrd=BootFile("/scratch/initrd.img", True),
    command_line="root=/dev/xvda1 ro <'\"&> console=hvc0",
)
CASES: dict[str, tuple[JobSpec, XenBoot]] = {
    "kernel": (spec(vm_type="xen", disks=(disk(device="xvda"),)), KERNEL),
    "kernel-without-initrd": (
        spec(
            vm_type="xen",
            vcpus=2,
            disks=(disk(device="xvda1"), disk("/shared/swap.img", "xvda2", transferred=False)),
            nics=(Nic("nat", "00:16:3e:12:34:56"),),
        ),
        KERNEL._replace(initrd=None),
    ),
    "included": (
        spec(
            vm_type="xen",
            disks=(
                disk(device="xvda"),
                disk("/shared/data.img", "sdb", writable=False, shared=True, transferred=False),
            ),
            nics=(Nic("bridge"),),
        ),
        XenBoot(bootloader="/usr/lib/xen-4.17/bin/pygrub"),
    ),
    "vmx": (spec(vm_type="xen", disks=(disk(device="hda"),)), XenBoot(hardware=True)),
}
