"""What a job may ask of its devices, in every way of writing it; what makes no sense is refused by name."""

import pytest

from tests.job.support import found, refusal, spec
from tests.jobs import Files, ad
from vmgahp import config, errors
from vmgahp.config import Settings
from vmgahp.errors import JobFault, MachineFault
from vmgahp.job.attributes import Share
from vmgahp.job.devices import inspect_shares, offered_shares, require_shares_allowed
from vmgahp.job.disks import DiskRequest
from vmgahp.job.policy_view import PolicyView
from vmgahp.job.spec import Devices, Disk, Nic, Topology

MISMATCHED, BAD_DISK = errors.MISMATCHED, errors.INVALID_DISK_PARAM
OFFER = {"VM_NETWORKING_TYPE": "nat, bridge, user", "VM_NETWORKING_BRIDGE_INTERFACE": "br0"}
NETWORKS = Settings({"VM_MEMORY": "1024", "VM_NETWORKING": "true", "VM_ALLOW_HOST_LOOPBACK": "true", **OFFER})
SHARING = Settings({"VM_MEMORY": "1024", "VM_SHARE_SCRATCH": "9p"})


# --- NICs


def nics(text: str, **more: str) -> tuple[Nic, ...]:
    return spec(NETWORKS, VMPARAM_vm_NICs=f'"{text}"', **more).vm.nics


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("nat", Nic("nat")),
        (" USER ", Nic("user")),
        ("bridge:e1000", Nic("bridge", model="e1000")),
        ("nat:52:54:00:12:34:56", Nic("nat", "52:54:00:12:34:56")),
        ("nat:52-54-0-12-34-AB", Nic("nat", "52:54:00:12:34:ab")),
        *(("nat:down", Nic("nat", link_up=False)), ("nat:up", Nic("nat"))),
        ("nat:52:54:00:12:34:56:down:rtl8139", Nic("nat", "52:54:00:12:34:56", "rtl8139", False)),
        ("nat:e1000e:52:54:00:12:34:56", Nic("nat", "52:54:00:12:34:56", "e1000e")),
    ],
)
def test_a_nic(text: str, expected: Nic) -> None:
    assert nics(text) == (expected,)


def test_nics_keep_their_order_and_the_classic_one_needs_no_list() -> None:
    assert nics("") == ()
    found = nics("nat:52:54:00:12:34:56, bridge,user,,nat:down")
    assert [nic.networking_type for nic in found] == ["nat", "bridge", "user", "nat"]
    assert [nic.link_up for nic in found] == [True, True, True, False]
    found = spec(NETWORKS, JobVMNetworking="true", JobVM_MACADDR='"52:54:00:12:34:56"')
    assert found.vm.nics == (Nic("user", "52:54:00:12:34:56"),)
    assert (found.vm.networking, found.vm.networking_type, found.macs) == (True, "user", ("52:54:00:12:34:56",))


@pytest.mark.parametrize(
    ("text", "part"),
    [
        *(("wifi", "wifi"), ("nat:vmxnet3", "vmxnet3"), ("nat:52:54:00:12:34", "52:54:00:12:34")),
        *(("nat:01:00:5e:00:00:01", "multicast"), ("nat:00:00:00:00:00:00", "zero"), ("nat:up:down", "twice")),
        ("nat:e1000:virtio", "twice"),
        ("nat:52:54:00:12:34:56:52:54:00:12:34:57", "52:54:00:12:34:57"),
        ("nat:52:54:00:12:34:56,user:52-54-0-12-34-56", "two NICs"),
        (", ,", "no NIC"),
        ("nat:'/><hostdev/>", "hostdev"),
        *((",".join(["nat"] * 17), "17"), ("nat" + ":up" * 5_000_000 + ":wifi", "wifi")),
    ],
    ids=range(13),
)
def test_a_list_of_nics_that_makes_no_sense(text: str, part: str) -> None:
    refusal(MISMATCHED, "VMPARAM_vm_NICs", part, settings=NETWORKS, VMPARAM_vm_NICs=f'"{text}"')


def test_nics_are_of_networks_on_offer_and_agree_with_the_classic_one() -> None:
    refusal(MISMATCHED, "bridge", "nat, user", VMPARAM_vm_NICs='"nat, bridge"')
    refusal(MISMATCHED, "VM_NETWORKING", settings=Settings({"VM_MEMORY": "1024"}), VMPARAM_vm_NICs='"nat"')
    mac = "52:54:00:12:34:56"
    agreed = {"JobVMNetworking": "true", "JobVMNetworkingType": '"nat"', "JobVM_MACADDR": f'"{mac}"'}
    assert nics(f"nat:{mac},user", **agreed) == (Nic("nat", mac), Nic("user"))
    option = {"VMPARAM_vm_NICs": f'"user:{mac}"'}
    refusal(MISMATCHED, "JobVMNetworkingType", "nat", settings=NETWORKS, JobVMNetworkingType='"nat"', **option)
    other = '"52:54:00:00:00:01"'
    refusal(MISMATCHED, "JobVM_MACADDR", "52:54:00:00:00:01", settings=NETWORKS, JobVM_MACADDR=other, **option)


# --- disks that several VMs use


@pytest.mark.parametrize(
    ("permission", "writable", "shared"),
    [("rs", False, True), ("ws", True, True), ("rws", True, True), ("RWS", True, True), ("w", True, False)],
)
def test_a_shared_disk(permission: str, writable: bool, shared: bool) -> None:
    (disk,) = found(VMPARAM_vm_Disk=f'"disk.img:vda:{permission}:raw"').disks
    assert disk == Disk("/scratch/disk.img", "vda", "", writable, "raw", True, "disk", shared)


def test_several_writers_contradict_formats_and_checkpoints() -> None:
    refusal(BAD_DISK, "qcow2", "several writers", VMPARAM_vm_Disk='"disk.img:vda:ws:qcow2"')
    assert spec(VMPARAM_vm_Disk='"disk.img:vda:rs:qcow2"').requests[0].shared
    files = Files(shared=("/nfs/book.img",))
    disk = '"disk.img:vda:w,/nfs/book.img:vdb:ws"'
    assert found(files=files, VMPARAM_vm_Disk=disk).disks[1].shared
    refusal(BAD_DISK, "/nfs/book.img", "JobVMCheckpoint", files=files, VMPARAM_vm_Disk=disk, JobVMCheckpoint="true")
    own = '"disk.img:vda:ws,/nfs/book.img:vdb:rs"'
    assert found(files=files, VMPARAM_vm_Disk=own, JobVMCheckpoint="true").vm.checkpoint


# --- firmware, architecture, topology, TPM, share


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, Devices(arch="", firmware="", topology=None, tpm=False, shares=())),
        ({"VMPARAM_vm_Firmware": '"UEFI"'}, Devices(firmware="uefi")),
        ({"VMPARAM_vm_Firmware": '"uefi-secure"'}, Devices(firmware="uefi-secure")),
        ({"VMPARAM_vm_Arch": '"arm64"'}, Devices(arch="aarch64")),
        ({"VMPARAM_vm_Arch": '"X86_64"'}, Devices(arch="x86_64")),
        ({"VMPARAM_vm_Arch": '"aarch64"', "VMPARAM_vm_Firmware": '"uefi"'}, Devices("aarch64", "uefi")),
        ({"VMPARAM_vm_Arch": '"aarch64"', "VMPARAM_vm_Firmware": '"uefi-secure"'}, Devices("aarch64", "uefi-secure")),
        ({"VMPARAM_vm_TPM": "true"}, Devices(tpm=True)),
        ({"VMPARAM_vm_TPM": "undefined"}, Devices()),
        ({"JobVM_VCPUS": "4", "VMPARAM_vm_Topology": '"sockets=2, threads=2"'}, Devices(topology=Topology(2, 1, 2))),
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
        *(("VMPARAM_vm_Topology", f'"cores={none},threads={none}"', f"cores={none}") for none in (0, -1)),
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
    option = {"VMPARAM_vm_Share": "true", "JobVMCheckpoint": "true"}
    refusal(MISMATCHED, "VMPARAM_vm_Share", "JobVMCheckpoint", settings=SHARING, **option)
    with pytest.raises(MachineFault, match="VM_SHARE_SCRATCH = nfs"):
        spec(Settings({"VM_MEMORY": "1024", "VM_SHARE_SCRATCH": "nfs"}), VMPARAM_vm_Share="true")


# --- the three ways of writing it


def test_a_wish_may_be_general_or_for_one_type() -> None:
    assert spec(VM_ATTR_firmware='"uefi"').devices.firmware == "uefi"
    assert spec(VM_kvm_ATTR_FIRMWARE='"uefi"').devices.firmware == "uefi"
    both = {"VMPARAM_vm_Firmware": '"bios"', "VM_KVM_ATTR_firmware": '"uefi"'}
    assert spec(**both).devices.firmware == "uefi", "that of the type counts"
    assert spec(VM_xen_ATTR_firmware='"uefi"').devices.firmware == "", "it is for another type"
    option = {"VMPARAM_vm_Firmware": '"bios"', "VM_ATTR_firmware": '"uefi"'}
    refusal(MISMATCHED, "VMPARAM_vm_Firmware", "VM_ATTR_firmware", "contradict", **option)
    assert spec(VMPARAM_vm_Firmware='"uefi"', VM_ATTR_firmware='"uefi"').devices.firmware == "uefi"


@pytest.mark.parametrize("name", ["VMPARAM_vm_Firmwear", "VM_kvm_ATTR_colour", "VM_ATTR_disk", "vmparam_VM_x"])
def test_an_unknown_wish_is_refused_by_its_name(name: str) -> None:
    assert "VMPARAM_vm_Firmware" in refusal(MISMATCHED, name, "blue", **{name: '"blue"'}).hint
    assert spec(**{name: '"blue"', "VMPARAM_vm_Ignore_Unknown": "true"}).ignored == (name,)


def test_what_is_for_others_or_for_a_script_is_no_unknown_wish() -> None:
    others = {"VMPARAM_VM_NAME": '"x"', "VMPARAM_No_Output_VM": "false", "VMPARAM_Xen_Kernel": '"included"'}
    assert spec(**others, VM_xen_ATTR_colour='"blue"').ignored == ()
    assert spec(SCRIPTED, VMPARAM_vm_Colour='"blue"').ignored == ()


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


BASE = {"VM_MEMORY": "1024", "VM_SHARE_DIRS": "ref, Data"}
DIRS = {"VM_SHARE_DIR_REF": "/srv/ref", "VM_SHARE_DIR_DATA": "/srv/data:rw"}
SETTINGS = Settings(BASE | DIRS)
REF = Share("ref", "/srv/ref", "virtiofs", writable=False, setting="VM_SHARE_DIR_REF")
DATA = Share("Data", "/srv/data", "virtiofs", writable=True, setting="VM_SHARE_DIR_DATA")


def test_a_job_has_the_directories_that_it_asks_for() -> None:
    assert spec(SETTINGS).devices.shares == ()
    assert spec(SETTINGS, VMPARAM_vm_Share_Dirs='"DATA"').devices.shares == (DATA,)
    assert spec(SETTINGS, VMPARAM_vm_Share_Dirs='" ref,data, ref"').devices.shares == (REF, DATA)
    both = SETTINGS._values | {"VM_SHARE_SCRATCH": "9p"}
    found = spec(Settings(both), VMPARAM_vm_Share="true", VM_ATTR_share_dirs='"ref"').devices.shares
    assert found == (Share("share", "/scratch", "9p"), REF)


def test_a_directory_that_there_is_not_is_refused_by_name() -> None:
    fault = refusal(errors.MISMATCHED, "vm_Share_Dirs", "'other'", settings=SETTINGS, VMPARAM_vm_Share_Dirs='"other"')
    assert 'stringListIMember("other", VM_kvm_ATTR_share_dirs)' in fault.hint
    odd = refusal(errors.MISMATCHED, "'\\x08'", settings=SETTINGS, VMPARAM_vm_Share_Dirs='"\x08"')
    assert odd.hint.isprintable(), "a name that no directory can have is not to be copied"
    refusal(errors.MISMATCHED, "VMPARAM_vm_Share_Dirs", VMPARAM_vm_Share_Dirs='"ref"')
    refusal(errors.MISMATCHED, "not a string", settings=SETTINGS, VMPARAM_vm_Share_Dirs="true")
    asks = {"VMPARAM_vm_Share_Dirs": '"ref"', "JobVMCheckpoint": "true"}
    refusal(errors.MISMATCHED, "VMPARAM_vm_Share_Dirs", "JobVMCheckpoint", settings=SETTINGS, **asks)
    scripted = Settings(SETTINGS._values | {"LIBVIRT_XML_SCRIPT": "/opt/script"})
    refusal(errors.MISMATCHED, "LIBVIRT_XML_SCRIPT", settings=scripted, VMPARAM_vm_Share_Dirs='"ref"')


@pytest.mark.parametrize(
    ("value", "kind", "writable"),
    [
        *(("/srv/ref:ro", "virtiofs", False), ("/srv/ref:9p", "9p", False), ("/srv/ref:rw:9p", "9p", True)),
        *(("/srv/ref:9p,rw", "9p", True), ("/srv/ref:rw,ro", "virtiofs", False)),
    ],
)
def test_how_a_directory_is_shared(value: str, kind: str, writable: bool) -> None:
    [found] = offered_shares(Settings({"VM_SHARE_DIRS": "ref", "VM_SHARE_DIR_REF": value}))
    assert found == REF._replace(kind=kind, writable=writable)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("VM_SHARE_DIR_REF", value) for value in ("", "srv/ref", "/srv/a:b", "/srv/ref:rx", "ref:rw")),
        *(("VM_SHARE_DIRS", value) for value in ("share", "Share", "a/b", "ref_if", "x" * 32, "é")),
    ],
)
def test_a_directory_that_is_not_rightly_set(name: str, value: str) -> None:
    with pytest.raises(MachineFault, match=name):
        offered_shares(Settings(BASE | {name: value}))


@pytest.mark.parametrize(
    ("condition", "allowed"),
    [
        ("", True), ('Owner == "alice"', True), ('TARGET.Owner == "alice" && MY.JobVMMemory < 100000', True),
        ('stringListMember("ref", VMPARAM_vm_Share_Dirs)', True), ('Owner == "bob"', False), ("NoSuchAttribute", False),
        ('"a string"', False),
    ],
)  # fmt: skip
def test_for_whom_a_directory_is(condition: str, allowed: bool) -> None:
    settings = Settings(SETTINGS._values | {"VM_SHARE_DIR_REF_IF": condition})
    view = PolicyView(ad(Owner='"alice"', VMPARAM_vm_Share_Dirs='"ref"'), settings)
    require_shares_allowed(view, (DATA,))
    if allowed:
        require_shares_allowed(view, (DATA, REF))
        return
    with pytest.raises(JobFault, match="VM_SHARE_DIR_REF_IF"):
        require_shares_allowed(view, (DATA, REF))


def test_a_condition_that_is_no_expression_is_the_machines_fault() -> None:
    settings = Settings(SETTINGS._values | {"VM_SHARE_DIR_REF_IF": "Owner =="})
    with pytest.raises(MachineFault, match="VM_SHARE_DIR_REF_IF"):
        require_shares_allowed(PolicyView(ad(), settings), (REF,))
    with pytest.raises(MachineFault, match="VM_SHARE_DIR_REF_IF"):
        inspect_shares(settings)
    behind = Settings(SETTINGS._values | {"VM_SHARE_DIR_REF_IF": "false", "VM_SHARE_DIR_DATA_IF": "Owner =="})
    with pytest.raises(MachineFault, match="VM_SHARE_DIR_DATA_IF"):
        inspect_shares(behind)
    assert inspect_shares(SETTINGS) == [REF, DATA]


def test_settings_of_directories_are_read_from_the_same_source(tmp_path: "object") -> None:
    environ = {f"_CONDOR_{name}": value for name, value in (BASE | DIRS).items()}
    environ["_CONDOR_VM_SHARE_DIR_OTHER"] = "/etc"
    settings = config.load(environ | {"HOME": str(tmp_path)})
    assert settings.string("VM_SHARE_DIR_DATA") == "/srv/data:rw"
    assert settings.where("VM_SHARE_DIR_REF") == "the environment"
    assert settings.where("VM_SHARE_DIR_REF_IF") == "default"
    assert "VM_SHARE_DIR_OTHER" not in settings._values, "nobody has named it"
