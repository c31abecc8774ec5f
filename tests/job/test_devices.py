"""What a job may ask of its devices, in every way of writing it; what makes no sense is refused by name."""

import pytest

from tests.job.support import found, refusal, spec
from tests.jobs import Files
from vmgahp import errors
from vmgahp.config import Settings
from vmgahp.errors import JobFault, MachineFault
from vmgahp.job.devices import Share
from vmgahp.job.disks import DiskRequest
from vmgahp.job.spec import Devices, Disk, Nic, Topology

MISMATCHED, BAD_DISK = errors.MISMATCHED, errors.INVALID_DISK_PARAM
OFFER = {"VM_NETWORKING_TYPE": "nat, bridge, user", "VM_NETWORKING_BRIDGE_INTERFACE": "br0"}
NETWORKS = Settings({"VM_MEMORY": "1024", "VM_NETWORKING": "true", "VM_ALLOW_HOST_LOOPBACK": "true", **OFFER})
SHARING = Settings({"VM_MEMORY": "1024", "VM_SHARE_SCRATCH": "9p"})


# --- NICs


def nics(text: str, **more: str) -> tuple[Nic, ...]:
    return spec(NETWORKS, VMPARAM_vm_NICs=f'"{text}"', **more).nics


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("nat", Nic("nat")),
        (" USER ", Nic("user")),
        ("bridge:e1000", Nic("bridge", model="e1000")),
        ("nat:52:54:00:12:34:56", Nic("nat", "52:54:00:12:34:56")),
        ("nat:52-54-0-12-34-AB", Nic("nat", "52:54:00:12:34:ab")),
        ("nat:down", Nic("nat", link_up=False)),
        ("nat:up", Nic("nat")),
        ("nat:52:54:00:12:34:56:down:rtl8139", Nic("nat", "52:54:00:12:34:56", "rtl8139", False)),
        ("nat:e1000e:52:54:00:12:34:56", Nic("nat", "52:54:00:12:34:56", "e1000e")),
    ],
)
def test_a_nic(text: str, expected: Nic) -> None:
    assert nics(text) == (expected,)


def test_nics_keep_their_order() -> None:
    assert nics("") == ()
    found = nics("nat:52:54:00:12:34:56, bridge,user,,nat:down")
    assert [nic.networking_type for nic in found] == ["nat", "bridge", "user", "nat"]
    assert [nic.link_up for nic in found] == [True, True, True, False]


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("wifi", "wifi"),
        ("nat:vmxnet3", "vmxnet3"),
        ("nat:52:54:00:12:34", "52:54:00:12:34"),
        ("nat:01:00:5e:00:00:01", "multicast"),
        ("nat:00:00:00:00:00:00", "zero"),
        ("nat:up:down", "twice"),
        ("nat:e1000:virtio", "twice"),
        ("nat:52:54:00:12:34:56:52:54:00:12:34:57", "52:54:00:12:34:57"),
        ("nat:52:54:00:12:34:56,user:52-54-0-12-34-56", "two NICs"),
        (", ,", "no NIC"),
        ("nat:'/><hostdev/>", "hostdev"),
        (",".join(["nat"] * 17), "17"),
    ],
)
def test_a_list_of_nics_that_makes_no_sense(text: str, part: str) -> None:
    refusal(MISMATCHED, "VMPARAM_vm_NICs", part, settings=NETWORKS, VMPARAM_vm_NICs=f'"{text}"')


def test_a_nic_needs_a_network_that_is_on_offer() -> None:
    refusal(MISMATCHED, "bridge", "nat, user", VMPARAM_vm_NICs='"nat, bridge"')
    none = Settings({"VM_MEMORY": "1024"})
    refusal(MISMATCHED, "VM_NETWORKING", settings=none, VMPARAM_vm_NICs='"nat"')


def test_the_classic_attributes_are_the_first_nics_or_contradict_it() -> None:
    mac = "52:54:00:12:34:56"
    agreed = {"JobVMNetworking": "true", "JobVMNetworkingType": '"nat"', "JobVM_MACADDR": f'"{mac}"'}
    assert nics(f"nat:{mac},user", **agreed) == (Nic("nat", mac), Nic("user"))
    option = {"VMPARAM_vm_NICs": f'"user:{mac}"'}
    refusal(MISMATCHED, "JobVMNetworkingType", "nat", settings=NETWORKS, JobVMNetworkingType='"nat"', **option)
    other = '"52:54:00:00:00:01"'
    refusal(MISMATCHED, "JobVM_MACADDR", "52:54:00:00:00:01", settings=NETWORKS, JobVM_MACADDR=other, **option)


def test_without_a_list_there_is_the_classic_nic() -> None:
    found = spec(NETWORKS, JobVMNetworking="true", JobVM_MACADDR='"52:54:00:12:34:56"')
    assert found.nics == (Nic("user", "52:54:00:12:34:56"),)
    assert (found.networking, found.networking_type, found.macs) == (True, "user", ("52:54:00:12:34:56",))


# --- disks that several VMs use


@pytest.mark.parametrize(
    ("permission", "writable", "shared"),
    [("rs", False, True), ("ws", True, True), ("rws", True, True), ("RWS", True, True), ("w", True, False)],
)
def test_a_shared_disk(permission: str, writable: bool, shared: bool) -> None:
    (disk,) = found(VMPARAM_vm_Disk=f'"disk.img:vda:{permission}:raw"').disks
    assert disk == Disk("/scratch/disk.img", "vda", "", writable, "raw", True, "disk", shared)


def test_only_a_raw_image_can_have_several_writers() -> None:
    refusal(BAD_DISK, "qcow2", "several writers", VMPARAM_vm_Disk='"disk.img:vda:ws:qcow2"')
    assert spec(VMPARAM_vm_Disk='"disk.img:vda:rs:qcow2"').requests[0].shared


@pytest.mark.parametrize("permission", ["s", "sw", "wss", "x"])
def test_no_permission(permission: str) -> None:
    refusal(BAD_DISK, permission, VMPARAM_vm_Disk=f'"disk.img:vda:{permission}"')


def test_a_checkpoint_and_other_writers_contradict_each_other() -> None:
    files = Files(shared=("/nfs/book.img",))
    disk = '"disk.img:vda:w,/nfs/book.img:vdb:ws"'
    assert found(files=files, VMPARAM_vm_Disk=disk).disks[1].shared
    refusal(BAD_DISK, "/nfs/book.img", "JobVMCheckpoint", files=files, VMPARAM_vm_Disk=disk, JobVMCheckpoint="true")
    own = '"disk.img:vda:ws,/nfs/book.img:vdb:rs"'
    assert found(files=files, VMPARAM_vm_Disk=own, JobVMCheckpoint="true").checkpoint


# --- firmware, architecture, topology, TPM, share


def test_a_job_that_asks_for_nothing_gets_the_usual() -> None:
    assert spec().devices == Devices(arch="", firmware="", topology=None, tpm=False, shares=())


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"VMPARAM_vm_Firmware": '"UEFI"'}, Devices(firmware="uefi")),
        ({"VMPARAM_vm_Firmware": '"uefi-secure"'}, Devices(firmware="uefi-secure")),
        ({"VMPARAM_vm_Arch": '"arm64"'}, Devices(arch="aarch64")),
        ({"VMPARAM_vm_Arch": '"X86_64"'}, Devices(arch="x86_64")),
        ({"VMPARAM_vm_Arch": '"aarch64"', "VMPARAM_vm_Firmware": '"uefi"'}, Devices("aarch64", "uefi")),
        ({"VMPARAM_vm_Arch": '"aarch64"', "VMPARAM_vm_Firmware": '"uefi-secure"'}, Devices("aarch64", "uefi-secure")),
        ({"VMPARAM_vm_TPM": "true"}, Devices(tpm=True)),
        ({"VMPARAM_vm_TPM": "false"}, Devices()),
        ({"VMPARAM_vm_TPM": "undefined"}, Devices()),
        (
            {"JobVM_VCPUS": "8", "VMPARAM_vm_Topology": '"sockets=2, cores=2,threads=2"'},
            Devices(topology=Topology(2, 2, 2)),
        ),
        ({"RequestCpus": "6", "VMPARAM_vm_Topology": '"Cores = 6"'}, Devices(topology=Topology(1, 6, 1))),
    ],
)
def test_a_wish(changes: dict[str, str], expected: Devices) -> None:
    assert spec(**changes).devices == expected


@pytest.mark.parametrize(
    ("name", "value", "part"),
    [
        ("VMPARAM_vm_Firmware", '"coreboot"', "coreboot"),
        ("VMPARAM_vm_Firmware", "true", "not a string"),
        ("VMPARAM_vm_Arch", '"vax"', "vax"),
        ("VMPARAM_vm_TPM", '"yes"', "neither true nor false"),
        ("VMPARAM_vm_Topology", '"cores=2"', "2 CPUs, and the job has 1"),
        ("VMPARAM_vm_Topology", '"cores=0"', "cores=0"),
        ("VMPARAM_vm_Topology", '"cores=-1,threads=-1"', "cores=-1"),
        ("VMPARAM_vm_Topology", '"cores=1,cores=1"', "cores=1"),
        ("VMPARAM_vm_Topology", '"dies=1"', "dies=1"),
        ("VMPARAM_vm_Topology", '"1,1,1"', "sockets, cores or threads"),
        ("VMPARAM_vm_Share", '"a/b"', "a/b"),
        ("VMPARAM_vm_Share", '".."', ".."),
        ("VMPARAM_vm_Share", "true", "VM_SHARE_SCRATCH"),
    ],
)
def test_a_wish_that_makes_no_sense(name: str, value: str, part: str) -> None:
    refusal(MISMATCHED, name, part, **{name: value})


def test_aarch64_has_no_bios() -> None:
    option = {"VMPARAM_vm_Arch": '"aarch64"', "VMPARAM_vm_Firmware": '"bios"'}
    refusal(MISMATCHED, "VMPARAM_vm_Firmware", "VMPARAM_vm_Arch", **option)


def test_a_share_is_the_scratch_directory_or_one_in_it() -> None:
    own = Share("share", "/scratch", "9p")
    assert spec(SHARING, VMPARAM_vm_Share="true").devices.shares == (own,)
    named = own._replace(directory="/scratch/results")
    assert spec(SHARING, VMPARAM_vm_Share='"results"').devices.shares == (named,)
    assert spec(SHARING, VMPARAM_vm_Share="false").devices.shares == ()


def test_a_share_contradicts_a_checkpoint() -> None:
    option = {"VMPARAM_vm_Share": "true", "JobVMCheckpoint": "true"}
    refusal(MISMATCHED, "VMPARAM_vm_Share", "JobVMCheckpoint", settings=SHARING, **option)


def test_a_share_of_an_unknown_kind_is_the_administrators_fault() -> None:
    with pytest.raises(MachineFault, match="VM_SHARE_SCRATCH = nfs"):
        spec(Settings({"VM_MEMORY": "1024", "VM_SHARE_SCRATCH": "nfs"}), VMPARAM_vm_Share="true")


# --- the three ways of writing it


def test_a_wish_may_be_general_or_for_one_type() -> None:
    assert spec(VM_ATTR_firmware='"uefi"').devices.firmware == "uefi"
    assert spec(VM_kvm_ATTR_FIRMWARE='"uefi"').devices.firmware == "uefi"
    both = {"VMPARAM_vm_Firmware": '"bios"', "VM_KVM_ATTR_firmware": '"uefi"'}
    assert spec(**both).devices.firmware == "uefi", "that of the type counts"
    assert spec(VM_xen_ATTR_firmware='"uefi"').devices.firmware == "", "it is for another type"


def test_two_wishes_contradict_each_other() -> None:
    option = {"VMPARAM_vm_Firmware": '"bios"', "VM_ATTR_firmware": '"uefi"'}
    refusal(MISMATCHED, "VMPARAM_vm_Firmware", "VM_ATTR_firmware", "contradict", **option)
    assert spec(VMPARAM_vm_Firmware='"uefi"', VM_ATTR_firmware='"uefi"').devices.firmware == "uefi"


@pytest.mark.parametrize(
    "name", ["VMPARAM_vm_Firmwear", "VM_ATTR_colour", "VM_kvm_ATTR_colour", "VM_ATTR_disk", "vmparam_VM_x"]
)
def test_an_unknown_wish_is_refused_by_its_name(name: str) -> None:
    fault = refusal(MISMATCHED, name, "blue", **{name: '"blue"'})
    assert "VMPARAM_vm_Firmware" in fault.hint
    found = spec(**{name: '"blue"', "VMPARAM_vm_Ignore_Unknown": "true"})
    assert found.ignored == (name,)


def test_what_is_for_others_is_no_unknown_wish() -> None:
    others = {"VMPARAM_VM_NAME": '"x"', "VMPARAM_No_Output_VM": "false", "VMPARAM_Xen_Kernel": '"included"'}
    assert spec(**others, VM_xen_ATTR_colour='"blue"').ignored == ()


def test_an_administrators_script_may_know_other_wishes() -> None:
    scripted = Settings({"VM_MEMORY": "1024", "LIBVIRT_XML_SCRIPT": "/usr/local/libexec/describe"})
    assert spec(scripted, VMPARAM_vm_Colour='"blue"').ignored == ()


SCRIPTED = Settings({"VM_MEMORY": "1024", "LIBVIRT_XML_SCRIPT": "/usr/local/libexec/describe"})


@pytest.mark.parametrize("text", ["/dev/null:null:null", "/dev//null:vda:r", "/dev/null:null:null,/dev/null:null:null"])
def test_a_job_whose_vm_a_script_describes_may_bring_no_disk(text: str) -> None:
    """As the submit files of clouds have it, whose images the script knows."""
    refusal(BAD_DISK, "null", VMPARAM_vm_Disk='"/dev/null:null:null"')
    assert spec(SCRIPTED, VMPARAM_vm_Disk=f'"{text}"').requests == ()
    (request,) = spec(SCRIPTED, VMPARAM_vm_Disk=f'"{text},disk.img:root:ro"').requests
    assert request == DiskRequest("disk.img:root:ro", "disk.img", "root", "", True, "raw", "disk")


@pytest.mark.parametrize("text", ["/dev/null", ":null:null", "disk.img:'/>:w", "disk.img:vda:<x", "d:null:w,e:null:w"])
def test_not_every_text_is_a_word_for_a_script(text: str) -> None:
    refusal(BAD_DISK, text.split(",")[-1], settings=SCRIPTED, VMPARAM_vm_Disk=f'"{text}"')


def test_a_device_of_the_machines_is_no_disk_for_a_script_either() -> None:
    with pytest.raises(JobFault, match="/dev/zero"):
        found(SCRIPTED, VMPARAM_vm_Disk='"/dev/zero:null:null"')
