"""The doctor's word on what HTCondor's slots and VM_MEMORY promise."""

import os

import pytest

from tests.commands.doctor.support import judged, pool
from vmgahp.commands.doctor.condor import slots
from vmgahp.daemon.probe import Probe
from vmgahp.findings import OFF, OK

__all__ = ["pool"]

WHOLE = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20
CPUS = os.cpu_count() or 1


def look(pool, overhead=200, **settings):
    context = pool.context(VM_TYPE="kvm", **settings)
    context.probe = Probe("kvm")
    context.probe.attributes["VM_kvm_ATTR_overhead"] = overhead
    return slots(context)


def test_memory_of_guests_alone_is_no_more_than_the_machines_and_with_qemu_it_is(pool):
    judged(look(pool, overhead=1, VM_MEMORY=64, NUM_CPUS=1), OK, "1 VMs", f"need 65 of {WHOLE} MiB")
    found = judged(look(pool, VM_MEMORY=WHOLE - 100, NUM_CPUS=1), OFF, "200 MiB beside", f"{WHOLE} MiB")
    assert f"VM_MEMORY to {WHOLE - 200}" in found.hint
    judged(look(pool, VM_MEMORY=WHOLE - 300, NUM_CPUS=1), OK)


def test_no_more_vms_count_than_may_run_at_once_nor_cpus_than_there_are(pool):
    memory = WHOLE - CPUS * 200 + 1
    judged(look(pool, VM_MEMORY=memory), OFF, f"each of {CPUS} VMs")
    if CPUS > 1:
        judged(look(pool, VM_MEMORY=memory, VM_MAX_NUMBER=CPUS - 1), OK)
    judged(look(pool, NUM_CPUS=CPUS + 1), OFF, f"NUM_CPUS = {CPUS + 1}", hint=str(CPUS))


@pytest.mark.parametrize("settings", [{"VM_MEMORY": None}, {"VM_MEMORY": "lots"}, {"overhead": None}])
def test_nothing_is_said_where_there_is_nothing_to_compare(pool, settings):
    assert look(pool, **settings) is None


@pytest.mark.parametrize("value", ["many", "", "-3", "9" * 40])
def test_a_number_of_cpus_that_is_none(pool, value):
    judged(look(pool, overhead=1, NUM_CPUS=value), OK, f"{CPUS} VMs")
