"""The daemon at work: started, driven and ended by HTCondor's own startd and starter."""

import re
from collections.abc import Mapping

import pytest
from tests.lab.guest import counts, make_guest, read_count
from tests.lab.namespace import OUR_SERVER
from tests.lab.pool import Job, Pool
from tests.system.pool.outcomes import END, START, assert_counted, assert_ended_with_its_guest, ended

from vmgahp import cli

pytestmark = pytest.mark.pool

SECONDS = 8
"""How long the guest of the job that ends by itself counts."""
LONGER = 75
"""How long the guest of the job counts that is suspended when the starter has slept."""
AGAIN = "on_exit_remove = ExitBySignal == False"
"""What the manual advises: a killed daemon's signal may be taken for the job's, and then it shall run again."""


@pytest.fixture(scope="module")
def running(pool: Pool) -> Mapping[str, Job]:
    """Four jobs that run side by side: one ends by itself, the others would run for ever.

    Two are told at once what their tests are about, since a starter hears of nothing in the 30 seconds that
    it sleeps after START.
    """
    pool.offering()
    jobs = {
        "finishing": pool.submit("finishing", lambda home: make_guest(home / "guest.img", SECONDS)),
        "removed": pool.submit("removed", lambda home: make_guest(home / "guest.img", None)),
        "suspended": pool.submit("suspended", lambda home: make_guest(home / "guest.img", LONGER)),
        "orphaned": pool.submit("orphaned", lambda home: make_guest(home / "guest.img", None), AGAIN),
    }
    for job in jobs.values():
        pool.wait_until(f"the guest of job {job.cluster}", job.is_running, START)
    jobs["removed"].command("condor_rm")
    jobs["suspended"].command("condor_suspend")
    return jobs


def test_the_startd_advertises_what_the_probe_prints(pool: Pool) -> None:
    machine = pool.advertised
    probe = pool.run(
        "sh",
        "-c",
        'VMGAHP_USER_UID=$(id -u condor) VMGAHP_USER_GID=$(id -g condor) exec "$0" -f -t -M 0 vmtype kvm',
        OUR_SERVER,
    )
    printed = dict(line.split(" = ", 1) for line in probe.stdout.splitlines())
    assert {"VM_GAHP_VERSION", "VM_Type", "VM_Memory", "VM_Networking"} <= set(printed)
    assert machine["VM_Type"] == "kvm"
    assert machine["VM_Memory"] == 1024
    values = {"true": True, "false": False}
    for name, expression in printed.items():
        if re.fullmatch(r'"[^"\\]*"|-?\d+|true|false', expression, re.IGNORECASE):
            value = values.get(expression.lower(), expression.strip('"'))
            assert str(machine.get(name)) == str(value), name
        else:
            assert name in machine


def test_a_removed_job_leaves_no_machine(pool: Pool, running: Mapping[str, Job]) -> None:
    job = running["removed"]
    pool.wait_until(f"the machine of job {job.cluster} to go", lambda: not job.is_running(), END)
    job.wait_for_event("removed", END)
    assert job.domain not in pool.namespace.domains()
    pool.wait_until("QEMU to go", lambda: pool.qemu_of(job) is None, 10)


def test_an_unreadable_disk_holds_the_job_and_leaves_the_machine(pool: Pool, running: Mapping[str, Job]) -> None:
    """HTCondor's own server answers NULL here, and the machine runs no VM for anybody any more."""
    commands = "vm_disk = /etc/shadow:hda:r:raw\ntransfer_input_files =\n"
    job = pool.submit("unreadable", lambda home: None, commands)
    job.wait_for_event("held", START)
    ad = job.ad()
    assert (ad["HoldReasonCode"], ad["HoldReasonSubCode"]) == (6, 10)
    assert "VMGAHP_ERR_JOBCLASSAD_KVM_INVALID_DISK_PARAM" in ad["HoldReason"]
    assert "'/etc/shadow' cannot be opened" in pool.daemon_log()
    assert pool.machine()["HasVM"]
    next_job = pool.submit("next", lambda home: make_guest(home / "guest.img", 1))
    next_job.wait_for_event("terminated", START + END)
    assert read_count(next_job.directory / "guest.img") == 1


def test_a_job_ends_with_its_guest(pool: Pool, running: Mapping[str, Job]) -> None:
    assert_ended_with_its_guest(pool, running["finishing"])


def test_a_suspended_job_goes_on_where_it_was(pool: Pool, running: Mapping[str, Job]) -> None:
    """A STATUS while it is suspended must not say Stopped: the starter would end the job."""
    job = running["suspended"]
    pool.wait_until(f"QEMU of job {job.cluster} to go", lambda: pool.qemu_of(job) is None, END)
    pool.wait_until("two STATUS=Suspended", lambda: pool.told(job).count("STATUS=Suspended") >= 2, END)
    assert "suspended" in job.events()
    assert {"terminated", "evicted"}.isdisjoint(job.events())
    before = counts(pool.console(job))
    job.command("condor_continue")
    pool.wait_until("QEMU to be back", lambda: pool.qemu_of(job), END)
    pool.wait_until("the guest to count", lambda: len(counts(pool.console(job))) > len(before) + 2, 30)
    assert ended(job)["ExitCode"] == 0
    assert_counted(job, LONGER)
    page = job.directory.parent / f"{job.cluster}.html"
    assert cli.main(["vmgahp", "report", str(job.directory), "-o", str(page)]) == 0
    text = page.read_text()
    for words in (job.domain, "suspended to disk", "<b>suspend, ", "<b>resume, "):
        assert words in text, words


def test_a_job_runs_to_its_end_and_its_files_come_home(running: Mapping[str, Job]) -> None:
    """Nothing of the daemon's own business (XML, locks, sockets) lands in the user's directory."""
    job = running["finishing"]
    ad = ended(job)
    assert (ad["JobStatus"], ad["ExitCode"], ad["ExitBySignal"]) == (4, 0, False)
    assert read_count(job.directory / "guest.img") == SECONDS
    assert_counted(job, SECONDS)
    ours = {"guest.img", "job.sub", "job.log", "vm_console.log", "vm_exit.json", "vm_metrics.jsonl"}
    assert {path.name for path in job.directory.iterdir()} == ours


def test_the_machine_stays_in_service(pool: Pool, running: Mapping[str, Job]) -> None:
    running["finishing"].wait_for_event("terminated", END)
    running["removed"].wait_for_event("removed", END)
    machine = pool.machine()
    assert machine["HasVM"]
    assert machine.get("VMOfflineReason") is None


def test_no_secret_of_a_job_is_in_the_log(pool: Pool, running: Mapping[str, Job]) -> None:
    """The starter's own log, at D_FULLDEBUG, shows what the daemon was told."""
    told = "".join(log.read_text(errors="replace") for log in pool.log.glob("StarterLog.slot*"))
    secrets = set(re.findall(r"<- 'ClaimId = \".*\](\w+)\"'", told))
    secrets |= set(re.findall(r"<- 'TransferKey = \"\d+#(\w+)\"'", told))
    assert len(secrets) >= 2 * len(running)
    text = pool.daemon_log()
    assert running["finishing"].domain in text, "the log is there and speaks of the job"
    assert [secret for secret in secrets if secret in text] == []


def test_a_killed_daemon_leaves_no_machine(pool: Pool, running: Mapping[str, Job]) -> None:
    """The daemon's own guardian clears up: the starter, which might do it too, is stopped meanwhile."""
    job = running["orphaned"]
    server, starter = pool.wait_until("the job's daemon", lambda: pool.server_of(job), 10)
    qemu = pool.wait_until("the job's QEMU", lambda: pool.qemu_of(job), 10)
    pool.namespace.kill(starter, "STOP")
    pool.namespace.kill(server, "KILL")
    try:
        pool.wait_until("its QEMU to go", lambda: qemu not in pool.namespace.processes(), 20)
        pool.wait_until("its domain to go", lambda: not job.is_running(), 10)
    finally:
        pool.namespace.kill(starter, "CONT")
    # HTCondor starts the job again, and its machine of the same name comes up anew.
    pool.wait_until("the job to be started again", lambda: job.events().count("executing") >= 2, END)
    pool.wait_until("its new machine", lambda: pool.qemu_of(job) not in (None, qemu), START)
