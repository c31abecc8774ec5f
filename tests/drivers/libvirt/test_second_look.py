"""Starts that fail by what the job asks for or does, and never by the machine: a plain guest starts there."""

import os
import signal
from pathlib import Path

import libvirt
import pytest

from tests.drivers.libvirt import support
from tests.drivers.libvirt.support import Job, driving, greeted, libvirt_error, refused_cleanly, runs, started
from tests.lab.programs import a_program
from vmgahp import errors, lifecycle
from vmgahp.drivers.libvirt.life.machine import LibvirtMachine
from vmgahp.drivers.libvirt.life.save import Saver
from vmgahp.drivers.libvirt.start import second_look
from vmgahp.drivers.libvirt.start.hooks import Described
from vmgahp.host import system_logs
from vmgahp.host.budget import Budget

pytestmark = pytest.mark.libvirt


def signalled(job: Job, monkeypatch: pytest.MonkeyPatch, number: signal.Signals) -> None:
    """Send QEMU a signal, as processes of its user can, when libvirt has made the domain and its guest has not run."""

    def step(self: LibvirtMachine, name: str) -> None:
        if name == "launch.made":
            for pid in support.processes(f"guest={job.name},"):
                os.kill(pid, number)

    monkeypatch.setattr(LibvirtMachine, "step", step)


def test_a_qemu_that_is_stopped_during_its_start_ends_in_time_and_is_the_jobs(job: Job, monkeypatch) -> None:
    signalled(job, monkeypatch, signal.SIGSTOP)
    is_the_jobs = pytest.raises(errors.JobFault, match="A plain VM starts on this machine")
    with driving(job, []) as (driver, ad), is_the_jobs, Budget(6.0):
        driver.start(ad)
    assert job.domain() is None


def test_a_qemu_that_is_killed_during_its_start_is_the_jobs(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    signalled(job, monkeypatch, signal.SIGKILL)
    with driving(job, []) as (driver, ad), pytest.raises(errors.JobFault, match="A plain VM starts on this machine"):
        driver.start(ad)
    assert job.domain() is None


def test_it_is_the_machines_where_no_plain_guest_starts_either(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    signalled(job, monkeypatch, signal.SIGKILL)
    log: list[str] = []
    broken = "<domain type='qemu'><name>x</name><memory>1</memory><os><type>nonsense</type></os></domain>"
    monkeypatch.setattr(second_look, "described", lambda *_, **__: Described(broken))
    with driving(job, log) as (driver, ad), pytest.raises(errors.HypervisorFault):
        driver.start(ad)
    assert any("A plain VM does not start here either" in line for line in log)


def test_it_is_the_machines_where_libvirt_can_define_no_domain(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where its directory in /etc cannot be written: the second look meets that too."""

    def fail(_self: libvirt.virConnect, _xml: str) -> None:
        said = "cannot create config file: Read-only file system"
        raise libvirt_error(libvirt.VIR_ERR_SYSTEM_ERROR, libvirt.VIR_FROM_QEMU, said)

    monkeypatch.setattr(libvirt.virConnect, "defineXML", fail)
    with driving(job, []) as (driver, ad), pytest.raises(errors.MachineFault, match="Read-only file system"):
        driver.start(ad)


def test_a_share_that_its_user_has_closed_meanwhile_holds_the_job(job: Job) -> None:
    (job.scratch / "share").mkdir(mode=0)
    job.own(job.scratch / "share")
    with greeted(job, VM_SHARE_SCRATCH="9p") as peer:
        peer.send_ad(*job.ad('VMPARAM_vm_Share = "share"'))
        assert peer.run("START", "kvm")[1] in errors.HOLD_CODES


OBEDIENT = """exec awk -F ' = ' '{ gsub(/"/, "", $2); ad[$1] = $2 }
END { print "<domain type=\\047qemu\\047><name>" ad["VMPARAM_VM_NAME"] ad["VMPARAM_suffix"] "</name>"
      print "<memory>65536</memory><vcpu>" ad["VMPARAM_cpus"] 1 "</vcpu><os><type>hvm</type></os>"
      print "<devices><graphics type=\\047" (ad["VMPARAM_display"] ? ad["VMPARAM_display"] : "vnc") "\\047/>"
      print "<interface type=\\047user\\047/></devices></domain>" }'"""
"""A script that believes whatever a job says."""


@pytest.mark.parametrize(
    "said", ['VMPARAM_display = "nonsense"', 'VMPARAM_cpus = "-"', "VMPARAM_cpus = 1", 'VMPARAM_suffix = "x"']
)
def test_what_a_script_makes_of_one_jobs_words_holds_that_job(job: Job, tools: Path, said: str) -> None:
    """Else a job could take one machine after the other out of service."""
    with greeted(job, LIBVIRT_XML_SCRIPT=a_program(tools / "script", OBEDIENT)) as peer:
        refused_cleanly(peer, job, errors.MISMATCHED, said)
        runs(peer, job)


def test_a_script_that_fails_for_every_job_is_the_machines(job: Job, tools: Path) -> None:
    script = a_program(tools / "script", OBEDIENT.replace('"vnc"', '"nonsense"'))
    with greeted(job, LIBVIRT_XML_SCRIPT=script) as peer:
        assert str(script) in refused_cleanly(peer, job, errors.CRITICAL)


def fail(*_: object, **__: object) -> None:
    text = "internal error: process exited while connecting to monitor: Could not open 'x': Permission denied"
    raise libvirt_error(libvirt.VIR_ERR_INTERNAL_ERROR, libvirt.VIR_FROM_QEMU, text)


@pytest.fixture
def denied(monkeypatch: pytest.MonkeyPatch) -> None:
    """QEMU may not open the job's disk, by the kernel's log, whatever its mode says."""
    monkeypatch.setattr(LibvirtMachine, "make", fail)
    monkeypatch.setattr(system_logs, "denial_since", lambda _: "avc: denied { open } for x")


@pytest.mark.usefixtures("denied")
def test_a_disk_that_only_this_job_is_denied_is_its_own(job: Job) -> None:
    log: list[str] = []
    with driving(job, log) as (driver, ad), pytest.raises(errors.Fault) as refused:
        driver.start(ad)
    assert isinstance(refused.value, errors.JobFault), log
    assert "A plain VM starts on this machine" in refused.value.problem
    assert not list(job.scratch.parent.glob("vmgahp-look-*"))


@pytest.mark.usefixtures("denied")
def test_a_disk_that_every_guest_is_denied_is_the_machines(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    real = second_look.described

    def described(*words: object, **more: object) -> Described:
        made = real(*words, **more)
        assert "vmgahp-look-" in made.xml
        assert "<disk " in made.xml
        return made._replace(xml="<domain type='qemu'><name>x</name><os><type>nonsense</type></os></domain>")

    monkeypatch.setattr(second_look, "described", described)
    with driving(job, []) as (driver, ad), pytest.raises(errors.MachineFault, match="Permission denied") as refused:
        driver.start(ad)
    assert "avc: denied { open } for x" in refused.value.hint


def test_a_save_and_a_restore_that_are_denied_tell_by_what(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    with started(job, []) as machine:
        monkeypatch.setattr(system_logs, "denial_since", lambda _: "avc: denied { execute_no_trans } for x")
        with monkeypatch.context() as patched:
            patched.setattr(Saver, "write", fail)
            with pytest.raises(errors.MachineFault) as refused:
                machine.suspend()
        assert "denied { execute_no_trans }" in refused.value.hint
        assert machine.status().state == "Running"
        machine.suspend()
        with monkeypatch.context() as patched:
            patched.setattr(Saver, "restore", fail)
            with pytest.raises(errors.MachineFault) as refused:
                machine.resume(lifecycle.SUSPENDED)
        assert "denied { execute_no_trans }" in refused.value.hint
        machine.resume(lifecycle.SUSPENDED)
        assert machine.status().state == "Running"
