"""What a server of VMs under libvirt has in its memory, and what it leaves to helpers."""

import os
import subprocess
import sys

import pytest

from vmgahp import __version__, errors
from vmgahp.host.helper import Helper, in_memory
from vmgahp.host.job_user import Identity
from vmgahp.job.ad import JobAd, Odd

HEAVY = (
    *("vmgahp.job.spec", "vmgahp.domain", "vmgahp.checkpoint", "vmgahp.images", "vmgahp.hooks", "vmgahp.findings"),
    *(f"vmgahp.drivers.libvirt.{name}" for name in ("driver", "machine", "save", "describe", "survey", "disk_files")),
    *("pickle", "subprocess", "dataclasses", "inspect", "hashlib", "uuid"),
)


def test_a_server_has_nothing_of_what_starts_and_saves_a_vm() -> None:
    code = "import sys, vmgahp.daemon.server, vmgahp.daemon.sampler, vmgahp.drivers.libvirt.served; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert [name for name in HEAVY if name in found] == []


def test_an_ad_is_the_same_in_another_process() -> None:
    ad = JobAd([("User", '"alice@lab"'), ("ClusterId", "7"), ("Sum", "1 + 1"), ("Half", "0.5")], complete=False)
    changed = ad.changed({"JobVMType": "kvm", "ClusterId": None, "Odd": Odd("error")})
    again = JobAd.of_plain(changed.plain(), Identity(1, 1))
    assert again.plain() == changed.plain()
    assert again.names() == changed.names()
    assert again.string("user") == "alice@lab"
    assert again.value("ClusterId") is None
    assert isinstance(again.value("Odd"), Odd)
    assert not again.complete


@pytest.mark.parametrize(
    "fault",
    [
        errors.ClientFault(errors.VM_NOT_FOUND, "It is gone.", "ask another."),
        errors.JobFault(errors.BAD_IMAGE, "It is bad.", "mend it.", "VMPARAM_vm_Disk"),
        errors.MachineFault("It is ill."),
        errors.HypervisorFault("It hangs.", "see why.", errors.CRITICAL),
    ],
)
def test_a_fault_is_the_same_in_another_process(fault: errors.Fault) -> None:
    again = errors.of_plain(errors.plain(fault))
    assert type(again) is type(fault)
    assert (again.code, again.problem, again.hint) == (fault.code, fault.problem, fault.hint)
    assert again.render() == fault.render()


def test_a_fault_of_a_kind_of_its_own_blames_as_before() -> None:
    class Lost(errors.HypervisorFault):
        pass

    assert type(errors.of_plain(errors.plain(Lost("It is lost.")))) is errors.HypervisorFault


@pytest.mark.parametrize("version", [__version__, "0.0.9"])
def test_a_vm_that_cannot_be_taken_up_is_refused_in_words(version: str) -> None:
    """As after an upgrade of this package: the VM runs on, and what is told names both versions."""
    work = Helper("vmgahp.drivers.libvirt.worker")
    kept = in_memory(b"of another time")
    try:
        work.send("take up", {"version": version, "groups": []}, [kept])
        work.send("save", {"arguments": ("SUSPEND",), "state": "Running", "usage": 0.0})
        while (message := work.receive()).word == "log":
            pass
        assert message.word == "refused"
        fault = errors.of_plain(message.data)  # type: ignore[arg-type]
        assert (f"vmgahp {version} has started this VM" in fault.problem) == (version != __version__)
        assert isinstance(fault, errors.MachineFault)
    finally:
        os.close(kept)
        work.dismiss(10)
