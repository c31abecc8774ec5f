"""The administrator's policy sees what a job gets, by whatever name, and of whatever kind, the job asks for it."""

import pytest

from tests.jobs import MACHINE, ad
from vmgahp.config import Settings
from vmgahp.errors import JobFault
from vmgahp.hooks import policy
from vmgahp.job.attributes import GENERAL, NAMES, OPTIONS
from vmgahp.job.attributes import OPTION_PREFIX as PREFIX
from vmgahp.job.policy_view import PolicyView
from vmgahp.job.vm_spec import parse

ROUND = {
    "memory by an attribute MY": ("MY.JobVMMemory <= 64", {"MY": "[JobVMMemory = 1]"}),
    "memory by request_memory": ("JobVMMemory <= 64", {"JobVMMemory": None, "RequestMemory": "96"}),
    "memory that is refused as too little": ("JobVMMemory =!= 32", {"JobVMMemory": "8"}),
    "memory with a fraction": ("JobVMMemory =!= 96", {"JobVMMemory": "96.5"}),
    "CPUs by request_cpus": ("JobVM_VCPUS <= 2", {"RequestCpus": "4"}),
    "CPUs that nobody names": ("JobVM_VCPUS > 1", {}),
    "a share by its general name": ("VMPARAM_vm_Share =!= true", {"VM_ATTR_Share": "true"}),
    "a share by its usual name": ("VM_ATTR_Share =!= true", {"VMPARAM_vm_Share": "true"}),
    "a share by that of the type": ("VMPARAM_vm_Share =!= true", {"VM_kvm_ATTR_share": "true"}),
    "a share in capitals": ("VMPARAM_vm_Share =!= true", {"VM_KVM_ATTR_SHARE": "TRUE"}),
    "a share by a number": ("VMPARAM_vm_Share =!= true", {"VMPARAM_vm_Share": "7"}),
    "a network by a number": ("JobVMNetworking =!= true", {"JobVMNetworking": "1"}),
    "a network by a list of NICs": ("JobVMNetworking =!= true", {"VMPARAM_vm_NICs": '"nat"'}),
    "its kind by a list of NICs": ('JobVMNetworkingType =!= "bridge"', {"VM_ATTR_NICs": '" BRIDGE"'}),
    "a default": ('VMPARAM_vm_NICs =!= "bridge" && JobVMNetworkingType =!= "bridge"', {"JobVMNetworking": "true"}),
    "an address in other words": (
        'JobVM_MACADDR =!= "52:54:00:0a:00:01"',
        {"JobVMNetworking": "true", "JobVM_MACADDR": '"52-54-0-A-0-1 "'},
    ),
    "an address by NICs": ('JobVM_MACADDR =!= "52:54:00:0a:00:01"', {"VMPARAM_vm_NICs": '"nat:52:54:0:A:0:1"'}),
    "a firmware in capitals": ('VMPARAM_vm_Firmware =!= "uefi"', {"VM_ATTR_Firmware": '" UEFI "'}),
    "an architecture by its other name": ('VMPARAM_vm_Arch =!= "aarch64"', {"VM_ATTR_Arch": '"ARM64"'}),
    "a disk with blanks": (
        '!regexp("(^|,)/shared/", VMPARAM_vm_Disk)',
        {"VMPARAM_vm_Disk": '"disk.img:vda:w,  /shared/x : vdb : r"'},
    ),
    "hardware virtualization by a kernel": ("JobVMHardwareVT =!= true", {"VMPARAM_Xen_Kernel": '"VMX "'}),
    "a type in capitals": ('JobVMType =!= "kvm"', {"JobVMType": '" KVM"'}),
    "types as a list": ('!regexp("xen", VMPARAM_vm_Types)', {"JobVMType": '"kvm,xen"'}),
}

NETWORKS = {
    "VM_NETWORKING": "true", "VM_NETWORKING_TYPE": "nat, bridge", "VM_NETWORKING_DEFAULT_TYPE": "bridge",
    "VM_NETWORKING_BRIDGE_INTERFACE": "br0",
}  # fmt: skip


@pytest.mark.parametrize(("condition", "asked"), ROUND.values(), ids=ROUND.keys())
def test_no_job_gets_round_the_policy_by_another_name(condition, asked):
    settings = Settings(NETWORKS | {"VM_POLICY_REQUIREMENTS": condition})
    with pytest.raises(JobFault, match="VM_POLICY_REQUIREMENTS"):
        policy.require(PolicyView(ad(**{"JobVMMemory": "96"} | asked), settings))


@pytest.mark.parametrize("option", NAMES)
def test_an_option_has_one_value_under_all_its_names(option):
    row = next(row for row in OPTIONS if row.name == PREFIX + option)
    value = "true" if "bool" in row.kind else "600" if row.kind == "integer" else '"one"'
    forms = [PREFIX + option, GENERAL + option, f"VM_kvm_ATTR_{option}"]
    for form in forms:
        seen = PolicyView(ad(**{form: value}), MACHINE).ad
        assert {seen.expression(name) for name in forms} == {value}


def test_the_policy_sees_what_the_vm_gets_and_what_htcondor_has_reserved():
    for asked in (
        {"JobVMMemory": None, "RequestMemory": "MY.Half * 2", "Half": "48"},
        {"JobVMMemory": "5"},
        {"JobVMMemory": "ifThenElse(isUndefined(ClaimId), 64, 96)", "ClaimId": '"secret"'},
        {"JobVMMemory": "random(900) + 64", "JobVM_VCPUS": "random(200) + 1"},
    ):
        job = ad(**asked)
        spec, seen = parse(job, MACHINE), PolicyView(job, MACHINE).ad
        assert (seen.integer("JobVMMemory"), seen.integer("JobVM_VCPUS")) == (spec.memory_mib, spec.vcpus)
    seen = PolicyView(ad(JobVMMemory="96", RequestMemory="64", RequestCpus="2", JobVM_VCPUS="4"), MACHINE).ad
    assert (seen.integer("RequestMemory"), seen.integer("RequestCpus")) == (64, 2)


@pytest.mark.parametrize("value", ["{1}", "[a = 1]", "error", "undefined", '"x', "1 / 0", "NoSuch(1)"])
def test_what_is_no_value_meets_no_condition_on_one(value):
    names = ("JobVMMemory", "VMPARAM_vm_Share", "JobVMNetworking")
    seen = PolicyView(ad(**dict.fromkeys(names, value)), MACHINE).ad
    assert seen.judge(" || ".join(f"{name} =?= true || {name} >= 0" for name in names)) is not True
