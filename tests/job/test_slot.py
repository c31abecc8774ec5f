"""What a job's slot has of its machine: who is believed, and the VM that is larger than that."""

import os

import pytest

from tests import jobs
from tests.jobs import Files, ad, owner
from vmgahp import errors
from vmgahp.config import Settings
from vmgahp.errors import JobFault
from vmgahp.job import vm_spec
from vmgahp.job.look import find
from vmgahp.job.spec import JobSpec
from vmgahp.job.vm_spec import Slot

MACHINE = Settings({"VM_MEMORY": "4096"})
OVERCOMMIT = Settings({"VM_MEMORY": "4096", "VM_OVERCOMMIT": "true"})
STARTER = {"_CONDOR_SLOT": "slot1_1@node"}


def settled(settings=MACHINE, scratch=None, **changes):
    user = owner(scratch) if scratch else Files()
    return vm_spec.settle_slot(vm_spec.parse(ad(jobs.BASE, scratch, **changes), settings), settings, user)


# --- what the ad and the environment say


@pytest.mark.parametrize(
    ("said", "environ", "cpus"),
    [
        ({"RequestCpus": "2"}, {}, 2),
        ({}, {}, None),
        ({"RequestCpus": "0"}, {}, 0),
        ({"RequestCpus": "2"}, {**STARTER, "OMP_NUM_THREADS": "8"}, 8),
        ({"RequestCpus": "8"}, {**STARTER, "OMP_NUM_THREADS": "2"}, 8),
        ({}, {**STARTER, "OMP_NUM_THREADS": "4"}, 4),
        ({"RequestCpus": "2"}, {"OMP_NUM_THREADS": "8"}, 2),
        ({"RequestCpus": "2"}, {**STARTER, "OMP_NUM_THREADS": "8,4"}, 2),
        ({"RequestCpus": "2"}, {**STARTER, "OMP_NUM_THREADS": "9" * 5000}, 2),
    ],
)
def test_cpus(said, environ, cpus):
    assert vm_spec.asked_slot(ad(**said), environ).cpus == cpus


@pytest.mark.parametrize(
    ("said", "disk", "asked"),
    [
        ({}, None, False),
        ({"RequestDisk": "75000", "DiskUsage": "75000"}, 75000, False),
        ({"RequestDisk": "DiskUsage", "DiskUsage": "75000"}, 75000, False),
        ({"RequestDisk": "1048576", "DiskUsage": "75000"}, 1048576, True),
    ],
)
def test_disk(said, disk, asked):
    found = vm_spec.asked_slot(ad(**said), {})
    assert (found.disk_kib, found.disk_is_asked) == (disk, asked)


@pytest.mark.parametrize(
    ("text", "cores"),
    [("0 , 1", (0, 1)), ("3", (3,)), ("2,0 2", (0, 2)), ("", ()), ("a", ()), ("-1", ()), ("99999", ()), ("0-3", ())],
)
def test_cores(text, cores):
    assert vm_spec.assigned_cores({vm_spec.CORES: text}) == cores


# --- the check


def test_a_vm_larger_than_its_slot_holds_the_job():
    assert settled(JobVM_VCPUS="200", JobVMMemory="4000").vcpus == 200
    whole = {"RequestCpus": "2", "RequestMemory": "64", "RequestDisk": "100", "DiskUsage": "75"}
    assert settled(JobVM_VCPUS="2", **whole).slot == Slot(2, 64, 100, True)
    assert settled(**whole).vcpus == 2
    assert settled(JobVM_VCPUS="1", JobVMMemory="32", **whole).memory_mib == 32
    with pytest.raises(JobFault) as caught:
        settled(JobVM_VCPUS="8", RequestCpus="1")
    assert caught.value.code == errors.MISMATCHED
    assert caught.value.problem == "The VM is to have 8 CPUs, and the job's slot has 1 (RequestCpus)."
    assert "request_cpus = 8" in caught.value.hint
    assert settled(OVERCOMMIT, JobVM_VCPUS="8", RequestCpus="1").vcpus == 8
    with pytest.raises(JobFault) as caught:
        settled(JobVMMemory="200", RequestMemory="64")
    assert caught.value.code == errors.NO_MEMORY_PARAM
    assert "200 MiB" in caught.value.problem
    assert "64 MiB" in caught.value.problem
    assert "request_memory = 200" in caught.value.hint
    assert settled(OVERCOMMIT, JobVMMemory="200", RequestMemory="64").memory_mib == 200
    assert settled(JobVMMemory="16", RequestMemory="16").memory_mib == 32
    with pytest.raises(JobFault):
        settled(JobVMMemory="33", RequestMemory="16")
    assert settled(JobVM_VCPUS="1", RequestCpus="0").vcpus == 1
    with pytest.raises(JobFault, match="slot has 0"):
        settled(JobVM_VCPUS="2", RequestCpus="0")


def test_a_vm_of_libvirts_is_checked_with_its_files():
    said = ad(**jobs.DISK, JobVM_VCPUS="8", RequestCpus="1")
    with pytest.raises(JobFault, match="slot has 1"):
        find(JobSpec.parse(said, MACHINE), MACHINE, Files())
    assert find(JobSpec.parse(said, OVERCOMMIT), OVERCOMMIT, Files()).vm.vcpus == 8


# --- the machine ad


@pytest.mark.parametrize(
    ("machine", "said", "part", "slot"),
    [
        (
            ("Cpus = 4", "Memory = 2048"),
            {"JobVM_VCPUS": "4", "JobVMMemory": "2048", "RequestCpus": "1", "RequestMemory": "64", "RequestDisk": "100"}
            | {"TransferInput": '"a.img,sub/b.img"'},
            slice(2),
            (4, 2048),
        ),
        (("Cpus = 4", "Disk = 5000000"), {"RequestDisk": "100", "DiskUsage": "75"}, slice(2, 4), (100, True)),
        (("Cpus = 2", "Memory = 128"), {"JobVM_VCPUS": "2"}, slice(2), (2, 128)),
        (("Cpus = 1", "Memory = 2048"), {"RequestCpus": "2", "RequestMemory": "32"}, slice(2), (2, 2048)),
    ],
    ids=["larger", "but for the disk that was asked for", "without a request", "never smaller"],
)
def test_the_machine_ad_makes_a_slot_larger(scratch, machine, said, part, slot):
    (scratch / vm_spec.MACHINE_AD).write_text("\n".join(machine))
    jobs.own(scratch)
    assert settled(scratch=scratch, **said).slot[part] == slot


@pytest.mark.parametrize(
    "said",
    [
        *({"TransferInput": f'"guest.img,{path}.machine.ad"'} for path in (" ", "/home/alice/")),
        {"TransferInput": '"inputs/"'},
        {"TransferInput": '"."'},
        {"TransferInput": '"https://example.org/all.tar?pack=auto"'},
        {"TransferInput": 'strcat("guest", ".img")'},
        {"TransferInput": "17"},
        {"TransferInputRemaps": '"guest.img=.machine.ad"'},
        {"x509userproxy": '"/tmp/.machine.ad"'},
    ],
)
def test_a_machine_ad_that_the_job_may_have_sent_is_not_believed(scratch, said):
    (scratch / vm_spec.MACHINE_AD).write_text("Cpus = 64\nMemory = 2048\n")
    jobs.own(scratch)
    with pytest.raises(JobFault, match="slot has 1"):
        settled(scratch=scratch, JobVM_VCPUS="4", RequestCpus="1", **said)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda place: place.symlink_to("other"), id="link"),
        pytest.param(os.mkfifo, id="fifo"),
        pytest.param(os.mkdir, id="directory"),
        pytest.param(lambda place: place.write_text("A" * vm_spec.LARGEST_MACHINE_AD + "\nCpus = 64\n"), id="huge"),
        pytest.param(lambda place: place.write_bytes(bytes(range(256)) * 16), id="binary"),
        pytest.param(lambda place: place.write_text('Cpus = 60 + 4\nMemory = "2048"\n'), id="expressions"),
        pytest.param(lambda place: place.write_text("Cpus = -64\nMemory = undefined\n"), id="negative"),
    ],
)
def test_a_machine_ad_that_is_none(scratch, make):
    (scratch / "other").write_text("Cpus = 64\n")
    make(scratch / vm_spec.MACHINE_AD)
    with pytest.raises(JobFault, match="slot has 1"):
        settled(scratch=scratch, JobVM_VCPUS="4", RequestCpus="1")
