"""The devices of the machine that a job gets: those of its slot, by the starter's word, and no other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.commands.doctor.support import Condor, pool
from tests.lab.sysfs import GPU, LONE, VGPU, Sysfs
from vmgahp.config import Settings
from vmgahp.drivers.libvirt.start import machine_devices
from vmgahp.errors import Fault, JobFault, MachineFault
from vmgahp.job.ad import JobAd

__all__ = ["pool"]

SETTINGS = Settings({"VM_DEVICES": "GPUs, fpga"})
SLOT = "slot1_2"


def ad(**attributes: object) -> JobAd:
    lines = {"JobVMType": '"kvm"'} | {name: json.dumps(value) for name, value in attributes.items()}
    return JobAd(lines.items())


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sysfs:
    """A machine with two GPUs, each in a group of its own, and a starter of `SLOT` that has none of them."""
    sysfs = Sysfs(tmp_path, monkeypatch)
    for address in (GPU, LONE):
        sysfs.add(address, "0x030200", group=[address], driver="nvidia")
    monkeypatch.setenv("_CONDOR_SLOT", SLOT)
    monkeypatch.setenv("_CONDOR_AssignedGPUs", "10000")
    return sysfs


def refused(kind: type[Fault], words: str, settings: Settings = SETTINGS, **attributes: object) -> None:
    with pytest.raises(kind, match=words):
        machine_devices.assigned(ad(**attributes), settings)


def test_a_job_that_requests_none_gets_none(machine: Sysfs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_CONDOR_AssignedFPGA", LONE)  # of a static slot, which has it for every job
    assert machine_devices.assigned(ad(RequestFpga=0), SETTINGS) == ()


def test_the_words_of_the_job_are_not_asked(machine: Sysfs) -> None:
    refused(MachineFault, "says of none", RequestFpga=1, AssignedFpga=GPU)


def test_the_slots_devices(machine: Sysfs, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.write(f"bus/mdev/devices/{VGPU}/name", "")
    monkeypatch.setenv("_CONDOR_AssignedFPGA", f"{LONE.upper()}, {VGPU}")
    assert machine_devices.assigned(ad(RequestFpga=2), SETTINGS) == (LONE, VGPU)
    refused(JobFault, "JobVMCheckpoint = true contradicts Requestfpga", RequestFpga=2, JobVMCheckpoint=True)
    refused(JobFault, "RequestGPUs = 1, and VMs get no GPUs", Settings({"VM_DEVICES": "fpga"}), RequestGPUs=1)
    monkeypatch.delenv("_CONDOR_SLOT")
    assert machine_devices.assigned(ad(RequestFpga=2), SETTINGS) == (), "no starter, no devices"


@pytest.mark.parametrize(
    "properties",
    [
        {"GPUs_GPU_c4a646d7": {"DevicePciBusId": "00000000:3B:00.0"}, "GPUs_GPU_0": {"DevicePciBusId": LONE}},
        {"GPU_c4a646d7": {"Id": "GPU-c4a646d7", "DevicePciBusId": GPU}},
        {"GPUs_DevicePciBusId": GPU},
    ],
)
def test_a_gpu_is_that_of_the_slots_ad(
    machine: Sysfs, monkeypatch: pytest.MonkeyPatch, pool: Condor, properties: dict[str, object]
) -> None:
    for name, value in pool.environ().items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("VMGAHP_CONFIG", raising=False)
    monkeypatch.setenv("_CONDOR_AssignedGPUs", "GPU-c4a646d7")
    text = json.dumps([{"Name": f"{SLOT}@lab", **properties}])
    pool.script("condor_status", f"import sys\nassert {SLOT!r} in sys.argv[-1]\nprint({text!r})")
    assert machine_devices.assigned(ad(RequestGPUs=1), SETTINGS) == (GPU,)
    pool.script("condor_status", f"print({json.dumps([{}])!r})")
    refused(MachineFault, "does not say which PCI device GPU-c4a646d7", RequestGPUs=1)
    pool.script("condor_status", "raise SystemExit('no startd')")
    refused(MachineFault, "no startd", RequestGPUs=1)


def test_the_machine_tells_which_can_be_given(machine: Sysfs, monkeypatch: pytest.MonkeyPatch, pool: Condor) -> None:
    environ = pool.environ(MACHINE_RESOURCE_fpga=f"{GPU}, 0000:77:00.0", MACHINE_RESOURCE_gone="0000:77:00.0")
    settings = Settings({"VM_DEVICES": "GPUs, fpga, gone, other"})
    told = {name: str(fault or number) for name, number, fault in machine_devices.offered(settings, environ)}
    assert told.pop("gone") == "This machine has no PCI device 0000:77:00.0."
    assert "names other, by which no device" in told.pop("other")
    assert told == {"GPUs": "2", "fpga": "1"}
