"""Suspend, vacate, periodic checkpoints and a recorder under a real starter: the guest is resumed, and counts on."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.lab.guest import counts, make_guest, read_count
from tests.lab.namespace import LAB, OUR_SERVER
from tests.lab.pool import JOBS, Job, Pool
from tests.lab.programs import a_program
from tests.protocol.recordings import STARTER, for_everybody, outline
from tests.system.pool import outcomes
from tests.system.pool.outcomes import CHECKPOINT, END, START, assert_counted, end_after_eviction, own_pool

from vmgahp.protocol import transcript

pytestmark = pytest.mark.pool

SECONDS = 90
"""How long the guests count: long enough to be interrupted after the starter's sleep."""

SOFT = "/etc/condor/config.d/99-soft-suspend.config"

PERIOD = 45
"""Seconds between periodic checkpoints: the first comes when the starter listens, the second when the test
has killed it."""

SETTINGS = f"PERIODIC_CHECKPOINT = TARGET.Periodic =?= True && (time() - LastPeriodicCheckpoint) > {PERIOD}\n"

PERIODIC = (
    CHECKPOINT
    + """vm_type = libvirt
+VMPARAM_vm_Disk = "guest.img:hda:w:raw"
requirements = TARGET.VM_Type == "kvm"
+Periodic = true
job_lease_duration = 20
"""
)
"""Of another VM type than the machine's, for HTCondor has no periodic checkpoints of kvm."""

PLACE = "/var/log/vmgahp"
SERVER = f"""\
#!/bin/sh
case "$*" in
*"-M 3"*)
    ! grep -q '^Periodic = true' .job.ad || export _CONDOR_VM_TYPE=libvirt
    grep -q '^Recorded = true' .job.ad || exec {OUR_SERVER} "$@"
    ;;
esac
exec /opt/vmgahp/bin/vmgahp record -o {PLACE} -- {OUR_SERVER} "$@"
"""
"""The pool's VM_GAHP_SERVER: it records the startd's probes and the conversation about one job, and lets another have a
VM type that the machine does not offer."""


def guest(home: Path) -> None:
    make_guest(home / "guest.img", SECONDS)


def install(pool: Pool) -> None:
    pool.run("install", "-d", "-m", "700", PLACE)
    a_program(pool.directory / "server", SERVER)


pool = own_pool("checkpoints", SETTINGS, install, f"{LAB}/server")


@pytest.fixture(scope="module")
def jobs(pool: Pool) -> Mapping[str, Job]:
    """Jobs side by side, each of which meets with something as soon as its starter listens."""
    pool.offering()
    shared = f"vm_disk = {JOBS}/shared/guest.img:hda:w:raw\ntransfer_input_files =\n"
    pool.namespace.path(SOFT).write_text("VM_SOFT_SUSPEND = True\n")
    submitted = {"paused": pool.submit("paused", guest)}
    pool.wait_until("its guest", submitted["paused"].is_running, START)
    pool.namespace.path(SOFT).unlink()
    submitted |= {
        "transferred": pool.submit("transferred", guest, CHECKPOINT),
        "shared": pool.submit("shared", guest, CHECKPOINT + shared),
        "chosen": pool.submit("chosen", guest, CHECKPOINT + "transfer_output_files = vm_outputs/\n"),
        "recorded": pool.submit("recorded", guest, '+Recorded = true\nenvironment = "TOKEN=hush"'),
        "periodic": pool.submit("periodic", guest, PERIODIC),
    }
    suspended, vacated = ("paused", "recorded"), ("transferred", "shared", "chosen")
    commands = dict.fromkeys(suspended, "condor_suspend") | dict.fromkeys(vacated, "condor_vacate_job")
    for name, command in commands.items():
        outcomes.settle(pool, submitted[name])
        submitted[name].command(command)
    return submitted


def test_a_job_restarts_from_a_periodic_checkpoint(pool: Pool, jobs: Mapping[str, Job]) -> None:
    """The execute side is killed after one: the job restarts from there, with its disk as it was then."""
    job = jobs["periodic"]
    pool.wait_until("its guest", job.is_running, START)  # whose first STATUS may come amid a checkpoint
    pool.wait_until("the checkpoint", lambda: "CONDOR_VM_CHECKPOINT" in pool.told(job), END)
    pool.wait_until("its QEMU to go", lambda: pool.qemu_of(job) is None, 60)
    pool.wait_until("its QEMU to be back", lambda: pool.qemu_of(job), END)
    counted = len(counts(pool.console(job)))
    pool.wait_until("the guest to count on", lambda: len(counts(pool.console(job))) > counted + 5, 60)
    server, starter = pool.wait_until("the job's daemon", lambda: pool.server_of(job), 10)
    # At once, as when the machine dies: a daemon that sees its starter go ends by itself.
    pool.namespace.kill(starter, "STOP")
    pool.namespace.kill(server, "KILL")
    pool.namespace.kill(starter, "KILL")
    pool.wait_until("it to start again", lambda: job.events().count("executing") >= 2, END)
    assert_counted(job, SECONDS)
    assert read_count(job.directory / "guest.img") == SECONDS


@pytest.mark.parametrize("name", ["transferred", "shared", "chosen"])
def test_a_vacated_job_goes_on_from_its_checkpoint(pool: Pool, jobs: Mapping[str, Job], name: str) -> None:
    job = jobs[name]
    end_after_eviction(pool, job)
    ad = job.ad()
    assert (ad["JobStatus"], ad["ExitCode"]) == (4, 0)
    assert_counted(job, SECONDS)
    # What is not among the outputs that are chosen is needed by the restart, and does not come home.
    assert read_count(job.directory / "guest.img") == (0 if name == "chosen" else SECONDS)
    assert (job.directory / "vm_exit.json").exists()
    assert not [path.name for path in job.directory.iterdir() if path.name.startswith("vm_checkpoint")]


def test_a_job_that_is_paused_in_ram_goes_on(pool: Pool, jobs: Mapping[str, Job]) -> None:
    job = jobs["paused"]
    pool.wait_until("STATUS=SoftSuspended", lambda: pool.told(job).count("STATUS=SoftSuspended") >= 2, END)
    assert job.is_running(), "the domain is there, and paused"
    before = counts(pool.console(job))
    job.command("condor_continue")
    pool.wait_until("the guest to count", lambda: len(counts(pool.console(job))) > len(before) + 1, END)
    assert_counted(job, SECONDS)


def recorded(pool: Pool, mode: int) -> list[Path]:
    """The finished transcripts of the daemon's runs in one mode."""
    return [
        path
        for path in sorted(pool.namespace.path(PLACE).iterdir())
        if (rows := path.read_text().split("\n")) and f" -M {mode}" in rows[0] and rows[-2].startswith("exit ")
    ]


def test_a_real_starter_is_recorded(pool: Pool, jobs: Mapping[str, Job], request: pytest.FixtureRequest) -> None:
    """And neither it nor the daemon notices."""
    probe = transcript.load(str(recorded(pool, 0)[0]))
    assert 'VM_Type = "kvm"' in probe.texts("<")
    assert probe.exit_status == 0

    job = jobs["recorded"]
    pool.wait_until("a STATUS=Suspended", lambda: "STATUS=Suspended" in pool.told(job), END)
    job.command("condor_continue")
    assert_counted(job, SECONDS)

    [file] = pool.wait_until("the transcript's end", lambda: recorded(pool, 3), END)
    text = file.read_text()
    assert "hush" not in text
    for name in ("ClaimId", "TransferKey", "Environment"):
        assert f'> {name} = "<hidden>"\n' in text
    if request.config.getoption("--update-golden"):
        STARTER.write_text(for_everybody(text))
    assert outline(transcript.parse(text)) == outline(transcript.load(str(STARTER)))
