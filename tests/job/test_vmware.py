"""What a VMware job may ask for: every refusal holds the job, names its attribute and leaves the machine."""

import errno
import os

import pytest

from tests.jobs import BASE, Files, ad, own
from vmgahp import errors
from vmgahp.config import Settings
from vmgahp.errors import JobFault, MachineFault
from vmgahp.job.vm_spec import VmSpec
from vmgahp.job.vmware import LARGEST, VmwareSpec, look
from vmgahp.job.vmx import Vmx

LOOPBACK = {"VM_ALLOW_HOST_LOOPBACK": "true"}
MACHINE = Settings({"VM_MEMORY": "1024", "VM_NETWORKING": "true", "VM_NETWORKING_TYPE": "user, bridge, nat"} | LOOPBACK)
GOOD = BASE | {
    "JobVMType": '"VMware"', "JobVMMemory": "512", "User": '"alice@example.org"', "ClusterId": "17",
    "VMPARAM_VMware_Dir": r'"C:\vms\dos"', "VMPARAM_VMware_Transfer": "true", "VMPARAM_VMware_SnapshotDisk": "true",
    "VMPARAM_VMware_VMX_File": '"dos.vmx"', "VMPARAM_VMware_VMDK_Files": '"dos.vmdk,dos-s001.vmdk"',
}  # fmt: skip
FILES = ("dos.vmx", "dos.vmdk", "dos-s001.vmdk")
SHARED = {"VMPARAM_VMware_Transfer": "false"}


def spec(settings=MACHINE, **changes):
    return VmwareSpec.parse(ad(GOOD, **changes), settings)


def refusal(word, part, **changes):
    with pytest.raises(JobFault) as caught:
        look(spec(**changes), MACHINE, Files(FILES))
    assert caught.value.code == word
    assert caught.value.hint
    assert part in caught.value.problem


def test_what_a_job_says_and_may_leave_out():
    assert spec(JobVMCheckpoint="true", JobVM_VCPUS="2") == VmwareSpec(
        VmSpec(
            name="alice_example.org_17.0", vm_type="vmware", working_dir="/scratch", memory_mib=512, vcpus=2, nics=(),
            checkpoint=True, no_output_vm=False,
        ),
        dir=r"C:\vms\dos", transfer=True, snapshot_disk=True, vmx_file="dos.vmx",
        vmdk_files=("dos.vmdk", "dos-s001.vmdk"), vmx=Vmx(),
    )  # fmt: skip
    found = spec(**{f"VMPARAM_VMware_{name}": None for name in ("Dir", "Transfer", "SnapshotDisk", "VMDK_Files")})
    assert (found.dir, found.transfer, found.snapshot_disk, found.vmdk_files) == ("", True, True, ())
    found = spec(VMPARAM_VMware_VMX_File=r'"C:\vms\dos.vmx"', VMPARAM_VMware_VMDK_Files='"/vms/dos.vmdk, dos.vmdk,"')
    assert (found.vmx_file, found.vmdk_files) == ("dos.vmx", ("dos.vmdk",))
    found = look(spec(VMPARAM_VMware_Transfer="false", VMPARAM_VMware_Dir='"/net/vms"'), MACHINE, Files(("dos.vmx",)))
    assert (found.dir, found.transfer, found.snapshot_disk) == ("/net/vms", False, True)
    assert found.vmdk_files == ("dos.vmdk", "dos-s001.vmdk")


@pytest.mark.parametrize(
    ("wanted", "kind"),
    [({}, "nat"), ({"JobVMNetworkingType": '"bridge"'}, "bridge"), ({"JobVMNetworkingType": '"NAT"'}, "nat")],
)
def test_vmware_has_nat_and_a_bridge_of_its_own(wanted, kind):
    found = spec(JobVMNetworking="true", **wanted)
    assert (found.vm.networking_type, found.vm.networking) == (kind, True)


def test_user_networking_is_not_vmwares_and_settings_are_the_machines():
    with pytest.raises(JobFault, match="this machine offers: bridge, nat"):
        spec(JobVMNetworking="true", JobVMNetworkingType='"user"')
    with pytest.raises(MachineFault, match="VM_MEMORY"):
        spec(settings=Settings())


@pytest.mark.parametrize("mac", ["00:50:56:00:00:00", "00-50-56-3F-FF-FF", "0:50:56:1:2:3"])
def test_static_addresses(mac):
    found = spec(JobVMNetworking="true", JobVM_MACADDR=f'"{mac}"').vm.mac
    assert (found[:9], len(found)) == ("00:50:56:", 17)


@pytest.mark.parametrize("mac", ["00:50:55:ff:ff:ff", "00:50:56:40:00:00", "00:0c:29:00:00:01", 'x"\n'])
def test_other_addresses_hold_the_job(mac):
    text = '"' + mac.replace('"', '\\"') + '"'
    refusal(errors.MISMATCHED, "JobVM_MACADDR = ", JobVMNetworking="true", JobVM_MACADDR=text)


@pytest.mark.parametrize(
    ("changes", "word", "part"),
    [
        ({"VMPARAM_VMware_VMX_File": None}, errors.NO_DISK_PARAM, "VMPARAM_VMware_VMX_File = undefined"),
        ({"VMPARAM_VMware_VMX_File": '""'}, errors.NO_DISK_PARAM, "VMPARAM_VMware_VMX_File"),
        *(({"VMPARAM_VMware_VMX_File": f'"{x}"'}, errors.INVALID_DISK_PARAM, f"'{x}'") for x in ("dos.txt", "/")),
        ({"VMPARAM_VMware_VMX_File": '"dos_condor.vmx"'}, errors.INVALID_DISK_PARAM, "dos_condor.vmx"),
        ({"VMPARAM_VMware_VMX_File": '"other.vmx"'}, errors.INVALID_DISK_PARAM, "'other.vmx'"),
        ({"VMPARAM_VMware_VMDK_Files": "17"}, errors.INVALID_DISK_PARAM, "VMPARAM_VMware_VMDK_Files = '17'"),
        ({"VMPARAM_VMware_VMDK_Files": '"dos.img"'}, errors.INVALID_DISK_PARAM, "'dos.img'"),
        ({"VMPARAM_VMware_VMDK_Files": '"gone.vmdk"'}, errors.INVALID_DISK_PARAM, "'gone.vmdk'"),
        ({"VMPARAM_VMware_Transfer": '"yes"'}, errors.INVALID_DISK_PARAM, "VMPARAM_VMware_Transfer"),
        (SHARED | {"VMPARAM_VMware_SnapshotDisk": "false"}, errors.INVALID_DISK_PARAM, "VMware_SnapshotDisk = false"),
        (SHARED | {"VMPARAM_VMware_Dir": None}, errors.NO_DISK_PARAM, "_Dir = undefined"),
        (SHARED, errors.INVALID_DISK_PARAM, "VMPARAM_VMware_Dir = "),
        ({"JobVMMemory": "2048"}, errors.NO_MEMORY_PARAM, "JobVMMemory = 2048"),
    ],
)
def test_a_jobs_mistake_holds_the_job(changes, word, part):
    refusal(word, part, **changes)


@pytest.mark.parametrize("name", ["dos.vmx", "dos.vmdk"])
@pytest.mark.parametrize("error", [errno.ELOOP, errno.EACCES, errno.EPERM, errno.EISDIR])
def test_a_link_or_a_file_of_somebody_else_holds_the_job(name, error):
    with pytest.raises(JobFault, match=name) as caught:
        look(spec(), MACHINE, Files(FILES, bad={name: error}))
    assert os.strerror(error) in caught.value.problem


# --- the .vmx itself, with the real thing for a user


def read_in(scratch, user):
    return look(spec(VM_WORKING_DIR=f'"{scratch}"', VMPARAM_VMware_VMDK_Files='""'), MACHINE, user)


def test_the_vmx_is_read_as_the_jobs_user(scratch, user):
    (scratch / "dos.vmx").write_bytes(b'memsize = "4"\r\n')
    own(scratch)
    assert read_in(scratch, user).vmx["memsize"] == "4"


@pytest.mark.parametrize("content", [b"no vmx", b'a = "\n', b"\xff\xfe", b"#" * (LARGEST + 1)])
def test_one_that_vmware_could_not_read_holds_the_job(scratch, user, content):
    (scratch / "dos.vmx").write_bytes(content)
    own(scratch)
    with pytest.raises(JobFault, match=r"VMPARAM_VMware_VMX_File = 'dos\.vmx'") as caught:
        read_in(scratch, user)
    assert caught.value.code == errors.BAD_IMAGE


def test_a_vmx_that_is_a_link_is_not_followed(scratch, user):
    (scratch / "dos.vmx").symlink_to("/etc/hostname")
    with pytest.raises(JobFault, match="cannot be opened"):
        read_in(scratch, user)
