"""A job that says nothing of VMware and gets a vSphere server all the same."""

import shutil
import subprocess

import pytest

from tests.drivers.vsphere.simulator import Lab, powers_off, settings
from tests.peer import DEADLINE, Peer, environment

pytestmark = [pytest.mark.vsphere, pytest.mark.skipif(shutil.which("qemu-img") is None, reason="needs qemu-img")]


@pytest.mark.parametrize(("image_format", "home"), [("qcow2", "disk.qcow2.vmdk"), ("vmdk", "disk.vmdk")])
def test_a_disk_and_no_vmx(lab: Lab, image_format: str, home: str) -> None:
    content = lab.job.content
    for old in lab.scratch.iterdir():
        old.unlink()
    raw, disk = lab.scratch.parent / "disk.raw", lab.scratch / f"disk.{image_format}"
    raw.write_bytes(content)
    options = ["-o", "subformat=streamOptimized"] if image_format == "vmdk" else []
    convert = ["qemu-img", "convert", "-f", "raw", "-O", image_format, *options, raw, disk]
    subprocess.run(convert, check=True, timeout=DEADLINE)
    lab.job.own()
    ad = [line for line in lab.job.ad() if "VMware" not in line and "JobVMType" not in line]
    disks = f'VMPARAM_vm_Disk = "{disk.name}:sda:w:{image_format}"'
    values = settings(lab.sim, lab.password, VM_ANY_TYPES="vmrun, vsphere")
    with Peer(environment("any", lab.scratch, **values)) as peer:
        assert peer.line().startswith("$VMGahpVersion")
        peer.send_ad(*ad, 'JobVMType = "any"', disks)
        assert peer.run("START", "any") == ["0", "1"]
        server = lab.server()
        vm = server.job()
        assert [server.get(vm, f"config.{name}") for name in ("hardware.memoryMB", "guestId")] == [64, "otherGuest64"]
        (extent,) = server.directory(vm).glob("disk-*-flat.vmdk")
        assert extent.read_bytes() == content
        extent.write_bytes(b"g" * len(content))
        powers_off(peer, server, vm)
        peer.quit()
    back = ["qemu-img", "convert", "-f", "vmdk", "-O", "raw", lab.scratch / home, raw]
    subprocess.run(back, check=True, timeout=DEADLINE)
    assert raw.read_bytes() == b"g" * len(content)
