"""The contract of `vmgahp.drivers.base` as tests, for any driver, also of another package.

In your own tests say what your driver is like in a `Subject`, and subclass `DriverContract`:

    from vmgahp.testing.contract import DriverContract, Subject

    class MyHypervisor(Subject):
        vm_type = "mine"
        ...

    class TestMyDriver(DriverContract):
        @pytest.fixture
        def subject(self, tmp_path):
            with MyHypervisor(tmp_path) as subject:
                yield subject

A driver that is installed under the entry-point group ``vmgahp.drivers`` is found by its VM type. Every case runs on a
subject of its own. A feature that a driver lacks is skipped only if its subject says so.
"""

import time
from pathlib import Path

import pytest

from vmgahp import errors, findings, lifecycle
from vmgahp.drivers.base import Driver, Machine
from vmgahp.job.ad import JobAd
from vmgahp.testing.endings import EndingContract
from vmgahp.testing.subject import DEADLINE, POLL, Subject, can_be_saved, goes_on, until

__all__ = ["DEADLINE", "POLL", "DriverContract", "Subject", "goes_on", "until"]


class DriverContract(EndingContract):
    """The tests of the contract. Subclass it with a name that begins with Test, and a fixture `subject`."""

    # The life of a VM

    def test_a_started_vm_runs(self, subject: Subject, job: JobAd, machine: Machine) -> None:
        assert machine.name == job.vm_name()
        assert subject.exists(job)
        report = machine.status()
        assert report.state == lifecycle.RUNNING
        assert report.vcpus >= 1
        assert report.cpu_seconds >= 0
        assert report.memory_kib >= 0
        if subject.has_guest:
            goes_on(subject, job)

    def test_its_pid_is_that_of_a_living_process(self, machine: Machine) -> None:
        pid = machine.pid()
        assert pid == 0 or Path(f"/proc/{pid}").exists()

    def test_what_it_uses_is_known(self, subject: Subject, job: JobAd, machine: Machine) -> None:
        readings = []
        for _ in range(2):
            if subject.has_guest:
                goes_on(subject, job)
            machine.found = time.time(), machine.status()  # as the server does
            readings.append(machine.metrics())
        first, second = readings
        assert first is not None
        assert second is not None
        assert (first.state, first.vcpus >= 1, second.time >= first.time) == (lifecycle.RUNNING, True, True)
        grown = dict(second.counters())
        assert all(0 <= value <= grown[key] for key, value in first.counters())
        machine.destroy()
        machine.found = time.time(), machine.status()
        assert machine.metrics() is None

    def test_destroyed_it_is_gone_and_once_is_as_good_as_twice(
        self, subject: Subject, job: JobAd, machine: Machine
    ) -> None:
        machine.destroy()
        assert not subject.exists(job)
        assert machine.status().state == lifecycle.STOPPED
        machine.destroy()
        machine.release()

    def test_stopped_it_is_gone(self, subject: Subject, job: JobAd, machine: Machine) -> None:
        machine.stop()
        assert not subject.exists(job)
        assert machine.status().state == lifecycle.STOPPED

    def test_a_guest_that_powers_itself_off_is_seen(self, subject: Subject, driver: Driver) -> None:
        job = subject.job(ends=True)
        machine = driver.start(job)
        subject.power_off(job)
        until(lambda: machine.status().state == lifecycle.STOPPED, "STOPPED is reported")
        machine.release()
        machine.release()
        assert not subject.exists(job)

    def test_the_jobs_files_are_there_at_the_end_and_nothing_of_the_drivers(
        self, subject: Subject, job: JobAd, driver: Driver
    ) -> None:
        scratch = Path(job.working_dir())
        before = {path.name for path in scratch.iterdir()}
        machine = driver.start(job)
        if subject.suspend:
            can_be_saved(subject, job)
            machine.suspend()
        machine.destroy()
        after = {path.name for path in scratch.iterdir()}
        assert before <= after
        assert not [name for name in after - before if name.endswith((".tmp", ".mem", ".vmss", ".vmem"))]

    def test_two_vms_do_not_disturb_each_other(self, subject: Subject, driver: Driver) -> None:
        one, two = subject.job(1), subject.job(2)
        first, second = driver.start(one), driver.start(two)
        first.destroy()
        assert not subject.exists(one)
        assert second.status().state == lifecycle.RUNNING
        if subject.has_guest:
            goes_on(subject, two)

    # Suspends and checkpoints

    def test_paused_and_resumed(self, subject: Subject, job: JobAd, machine: Machine) -> None:
        if not subject.soft_suspend:
            with pytest.raises(errors.ClientFault) as caught:
                machine.soft_suspend()
            assert caught.value.code == errors.VM_NO_SUPPORT_SUSPEND
            assert machine.status().state == lifecycle.RUNNING
            return
        machine.soft_suspend()
        assert machine.status().state == lifecycle.SOFT_SUSPENDED
        assert subject.exists(job)
        machine.resume(lifecycle.SOFT_SUSPENDED)
        assert machine.status().state == lifecycle.RUNNING
        if subject.has_guest:
            goes_on(subject, job)

    def test_suspended_and_resumed(self, subject: Subject, job: JobAd, machine: Machine) -> None:
        if not subject.suspend:
            with pytest.raises(errors.ClientFault) as caught:
                machine.suspend()
            assert caught.value.code == errors.VM_NO_SUPPORT_SUSPEND
            return
        before = goes_on(subject, job) if subject.has_guest else 0
        machine.suspend()
        assert machine.status().state == lifecycle.SUSPENDED
        machine.resume(lifecycle.SUSPENDED)
        assert machine.status().state == lifecycle.RUNNING
        if subject.has_guest:
            assert goes_on(subject, job) >= before, "it resumed and did not begin anew"

    def test_a_suspended_vm_that_is_destroyed_leaves_nothing(
        self, subject: Subject, job: JobAd, machine: Machine
    ) -> None:
        if subject.suspend:
            can_be_saved(subject, job)
            machine.suspend()
        machine.destroy()
        assert not subject.exists(job)
        assert machine.status().state == lifecycle.STOPPED

    def test_a_restart_goes_on_from_the_checkpoint(self, subject: Subject, job: JobAd, driver: Driver) -> None:
        if not subject.checkpoint:
            with pytest.raises(errors.ClientFault) as caught:
                driver.start(job).checkpoint()
            assert caught.value.code == errors.VM_NO_SUPPORT_CHECKPOINT
            return
        # vm_no_output_vm keeps files from being transferred back when the job is over, and here it is not.
        wanted = subject.changed(job, JobVMCheckpoint="true", VMPARAM_No_Output_VM="true")
        machine = driver.start(wanted)
        before = goes_on(subject, job) if subject.has_guest else 0
        machine.checkpoint()
        assert machine.status().state == lifecycle.SUSPENDED
        # As after an eviction: the client stops the VM, and another daemon starts it again.
        machine.stop()
        again = subject.driver().start(wanted)
        assert again.status().state == lifecycle.RUNNING
        if subject.has_guest:
            assert goes_on(subject, job) >= before, "it resumed and did not begin anew"
        again.destroy()
        assert not subject.exists(job)

    # Clearing up

    def test_a_start_clears_what_an_earlier_one_left(self, subject: Subject, job: JobAd) -> None:
        subject.server_dies(subject.driver().start(job))
        again = subject.driver().start(job)
        assert again.status().state == lifecycle.RUNNING
        again.destroy()
        assert not subject.exists(job)

    def test_kill_mode_finds_the_vm_that_it_is_told_of_and_no_other(self, subject: Subject) -> None:
        one, two = subject.job(1), subject.job(2)
        driver = subject.driver()
        driver.start(one)
        second = driver.start(two)
        assert subject.driver().kill(subject.match(one)) is True
        assert not subject.exists(one)
        assert second.status().state == lifecycle.RUNNING

    def test_to_kill_what_is_not_there_is_no_error(self, subject: Subject, job: JobAd, driver: Driver) -> None:
        assert driver.kill(subject.match(job)) is False
        assert driver.kill("/nonexistent/dir_7" if subject.match(job).startswith("/") else "no_such_1.0") is False

    def test_a_driver_is_closed_with_its_vms_running(self, subject: Subject, job: JobAd, driver: Driver) -> None:
        driver.start(job)
        driver.close()
        driver.close()
        assert subject.exists(job)

    # Faults

    def test_a_bad_job_is_held_leaves_nothing_and_the_next_one_runs(self, subject: Subject, driver: Driver) -> None:
        bad = subject.bad_jobs()
        assert bad, "there is always something that a job can get wrong"
        for what, job in bad.items():
            with pytest.raises(errors.JobFault) as caught:
                driver.start(job)
            assert caught.value.code in errors.HOLD_CODES, what
            assert caught.value.problem, what
            assert caught.value.hint, what
            assert not subject.exists(job), what
        assert driver.start(subject.job(3)).status().state == lifecycle.RUNNING

    @pytest.mark.parametrize("attribute", ["JobVMMemory"])
    def test_a_job_without_what_every_job_needs_is_held(
        self, subject: Subject, job: JobAd, driver: Driver, attribute: str
    ) -> None:
        with pytest.raises(errors.JobFault, match=attribute):
            driver.start(subject.changed(job, **{attribute: None}))
        assert not subject.exists(job)

    def test_an_unfit_machine_is_blamed_and_not_the_job(self, subject: Subject, job: JobAd) -> None:
        with pytest.raises(errors.MachineFault) as caught:
            subject.driver(subject.unfit()).start(job)
        assert caught.value.code not in errors.HOLD_CODES
        assert caught.value.hint

    def test_a_vm_that_is_gone_answers_with_faults_and_nothing_else(self, machine: Machine) -> None:
        machine.destroy()
        for operation in (machine.soft_suspend, machine.suspend, machine.checkpoint):
            with pytest.raises(errors.Fault):
                operation()
        with pytest.raises(errors.Fault):
            machine.resume(lifecycle.SOFT_SUSPENDED)
        assert machine.pid() == 0

    # The probe

    def test_the_survey_of_a_machine_that_works(self, subject: Subject, driver: Driver) -> None:
        survey = driver.survey(time.monotonic() + DEADLINE)
        assert findings.first_bad(survey.findings) is None, survey.findings
        assert survey.findings
        for finding in survey.findings:
            assert finding.check
            assert finding.verdict in findings.VERDICTS
            assert finding.looked_at
            assert finding.seen
            assert finding.hint or finding.verdict in (findings.OK, findings.UNKNOWN), finding
        assert subject.vm_type in survey.vm_types
        assert survey.hypervisors
        assert set(survey.networking) <= set(subject.settings.networking_types())
        for name, value in survey.attributes.items():
            assert name.replace("_", "").isalnum(), name
            assert isinstance(value, str | int | float | bool), name

    def test_the_survey_of_an_unfit_machine_says_why(self, subject: Subject) -> None:
        survey = subject.driver(subject.unfit()).survey(time.monotonic() + DEADLINE)
        bad = findings.first_bad(survey.findings)
        assert bad is not None
        assert bad.hint

    def test_a_survey_changes_nothing(self, subject: Subject, job: JobAd, driver: Driver) -> None:
        machine = driver.start(job)
        before = sorted(path.name for path in Path(job.working_dir()).iterdir())
        subject.driver().survey(time.monotonic() + DEADLINE)
        assert machine.status().state == lifecycle.RUNNING
        assert sorted(path.name for path in Path(job.working_dir()).iterdir()) == before
