"""Every attribute of the ad with every kind of value: the job is refused or taken, the machine stays in service."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.jobs import BASE, DISK, Files, JobAd, ad
from vmgahp.config import Settings
from vmgahp.drivers.any import NoFit, find_fit, read_disks
from vmgahp.drivers.base import type_for
from vmgahp.errors import JobFault
from vmgahp.hooks import policy
from vmgahp.job import vm_spec
from vmgahp.job.ad import Odd, accepted_types
from vmgahp.job.attributes import ATTRIBUTES, GENERAL, OPTIONS, Options
from vmgahp.job.attributes import OPTION_PREFIX as PREFIX
from vmgahp.job.policy_view import PolicyView
from vmgahp.job.spec import JobSpec
from vmgahp.job.vmware import VmwareSpec
from vmgahp.job.xen import XenBoot

HEALTHY = Settings(
    {
        "VM_TYPE": "kvm", "VM_MEMORY": "1024", "VM_NETWORKING": "true", "VM_NETWORKING_TYPE": "nat, bridge, user",
        "VM_NETWORKING_BRIDGE_INTERFACE": "br0", "VM_ALLOW_HOST_LOOPBACK": "true", "VM_SHARE_SCRATCH": "9p",
        "VM_HARDWARE_VT": "true", "VM_ALLOW_LIBVIRT_XML": "true", "XEN_BOOTLOADER": "/bin/true",
    }
)  # fmt: skip
"""A machine on which everything is on offer."""

JOB = ad(
    BASE
    | DISK
    | {
        "VMPARAM_Xen_Kernel": '"/boot/vmlinuz"', "VMPARAM_Xen_Root": '"/dev/xvda"',
        "VMPARAM_VMware_VMX_File": '"vm.vmx"', "GlobalJobId": '"lab#7.0#1"',
    }
)  # fmt: skip

names = st.sampled_from(
    [
        *(row.name for row in ATTRIBUTES),
        *(form + row.name[len(PREFIX) :] for row in OPTIONS for form in (GENERAL, "VM_kvm_ATTR_", "vm_KVM_attr_")),
        *("User", "ClusterId", "ProcId", "GlobalJobId", "RequestDisk", "JobUniverse", "TransferInput", "Owner"),
        *("VMPARAM_vm_Nothing", "VM_ATTR_", "VM_kvm_ATTR_Disk", "VMPARAM_vm_Name", "Simulated_Fault"),
    ]
)
words = st.sampled_from(
    [
        *("disk.img:vda:w", "disk.img", ":::", ",", ",,", "a:vda:w:qcow2", "catalog:x:vda:w", "catalog:::"),
        "a:vda1:w:raw",
        *("/etc/shadow:vdb:w", "../x:vda:r", "a:fda:w", "nbd://1.2.3.4:vda:r", "a" * 300 + ":vda:w", "\ud800:vda:w"),
        *("vdb:1G", "vdb:9999999T", "vdb:0M", "vdb:1G:a.raw", "vda:1G", "vdb:\u0661G", "nat", "user:up:down"),
        *("nat:::::", "x"),
        *("nat:52:54:00:00:00:01:e1000", "ff:ff:ff:ff:ff:ff", "00-00-00-00-00-00", "sockets=1,cores=\u0661"),
        "cores=9999",
        *("sockets=9,cores=9,threads=9", "=", "uefi-secure", "aarch64", "kvm", "kvm,xen", "any", "," * 50),
        ",".join("abc" * 20),
        *("included", "vmx", "vm.vmx", "..vmx", "a_condor.vmx", "a.vmdk,b.vmdk", "true", "user-data", ".", "..", "/"),
        "a\nb = 1",
    ]
)
values = st.one_of(
    words,
    st.text(max_size=50),
    st.text("0123456789:,/.= \0\t\n\"'\\\u2028\ud800", max_size=40),
    st.sampled_from(["", " ", "x" * 100_000, "," * 100_000, "a:" * 50_000, "\u0663", "\x1b[2J", "%s%n", "$(x)"]),
    st.sampled_from([0, 1, -1, 31, 32, 255, 256, 2**31, 2**32, 2**63 - 1, -(2**63)]),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(),
    st.sampled_from([True, False, None, Odd("error"), Odd("a list"), Odd("an ad")]),
)


def _any(job: JobAd) -> None:
    accepted_types(job)
    Options(job)
    nobody = Files(scratch=())
    found = read_disks(job, {}, nobody)
    for vm_type in ("kvm", "xen", "vmrun", "vsphere", "script"):
        with suppress(NoFit):
            find_fit(vm_type, job, found, nobody)


def _xen(job: JobAd) -> None:
    job = job.changed({"JobVMType": "xen"})
    JobSpec.parse(job, HEALTHY)
    XenBoot.parse(job, HEALTHY)


READERS = {
    "the type": lambda job: type_for(job, "kvm", HEALTHY),
    "the type of a machine that has several": lambda job: type_for(
        job, job.vm_type(), Settings({"VM_TYPE": "any", "VM_ANY_TYPES": "kvm, vmrun"})
    ),
    "libvirt": lambda job: JobSpec.parse(job, HEALTHY),
    "libvirt without disks": lambda job: JobSpec.parse(job, HEALTHY, diskless=True),
    "xen": _xen,
    "VMware": lambda job: VmwareSpec.parse(job, HEALTHY),
    "a script": lambda job: vm_spec.parse(job, HEALTHY),
    "any": _any,
    "the policy's ad": lambda job: (PolicyView(job, HEALTHY).ad.values(), PolicyView(job, HEALTHY).ad.lines()),
}


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS.keys())
@given(st.dictionaries(names, values, min_size=1, max_size=3))
def test_no_value_of_an_attribute_is_the_machines_fault(reader, changes):
    try:
        reader(JOB.changed(changes))
    except JobFault as fault:
        said = fault.render()
    else:
        said = ""
    assert said.isprintable()


EXPRESSIONS = [
    *("undefined", "error", "{1, 2}", "[a = 1]", "random()", 'real("NaN")', 'real("INF")', "1 / 0"),
    *('"unterminated', "((("),
    *("9223372036854775808", "-9223372036854775808", "ClaimId", "TARGET.Memory", "MY", "MY.MY", 'eval("ClaimId")'),
    "x" * 9999,
    *('strcat("a", "b")', "!", "?:", "A.B.C", "1 2", "'quoted'", "// comment", "/* open", "true && undefined", "2e308"),
]


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS.keys())
def test_no_expression_is_the_machines_fault(reader):
    rows = [row.name for row in ATTRIBUTES]
    for offset in range(0, len(EXPRESSIONS), 7):
        said = {name: EXPRESSIONS[(number + offset) % len(EXPRESSIONS)] for number, name in enumerate(rows)}
        evaluated = ad(BASE | said | {"ClaimId": '"secret"'}).values()
        for name in rows:
            told = ""
            try:
                reader(JOB.changed({name: evaluated[name]}))
            except JobFault as fault:
                told = fault.render()
            assert "secret" not in told, (name, said[name])


def test_conditions_of_the_policy_are_met_or_not_whatever_the_ad_says():
    condition = " && ".join(f"{row.name} =!= 7.5" for row in ATTRIBUTES)
    with_policy = Settings({"VM_MEMORY": "64", "VM_POLICY_REQUIREMENTS": condition})
    numbers = (float("nan"), float("inf"), 2**63 - 1, -(2**63))
    for value in (*numbers, "\ud800", "x" * 100_000, Odd("a list"), "\0", None, ""):
        job = JOB.changed(dict.fromkeys((row.name for row in ATTRIBUTES), value))
        policy.require(PolicyView(job, with_policy))
