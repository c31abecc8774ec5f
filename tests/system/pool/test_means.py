"""HTCondor's own means round a job, with VM jobs: docs/how-to/htcondor.md says of each whether it works.

One pool, in which all jobs run side by side.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path

import pytest
from tests.lab.guest import BANNER, make_guest, read_count
from tests.lab.namespace import LAB
from tests.lab.pool import JOBS, SUBMIT, USER, Job, Pool
from tests.lab.programs import a_program
from tests.system.pool.outcomes import END, START, ended, own_pool

from vmgahp.commands.setup import HOOK_TEXT

pytestmark = pytest.mark.pool

SECONDS = 4
CODE = 3
"""The exit code of a guest that has failed."""

SETTINGS = f"""
NUM_CPUS = 24
VM_MEMORY = 2048
USER_JOB_WRAPPER = {LAB}/means/wrapper
MEANS_HOOK_PREPARE_JOB = {LAB}/means/prepare
MEANS_HOOK_JOB_EXIT = {LAB}/means/job-exit
STARTER_DEFAULT_JOB_HOOK_KEYWORD = VMGAHP
VMGAHP_HOOK_PREPARE_JOB = {LAB}/means/ours
DAGMAN_USER_LOG_SCAN_INTERVAL = 1
"""

WRAPPER = """\
#!/bin/sh
touch "$_CONDOR_SCRATCH_DIR/wrapped"
exec "$@"
"""

PREPARE = """\
#!/bin/sh
ad=$(cat)
case $ad in
*'HookRefuses = true'*)
    echo 'HookStatusCode = 7'
    echo 'HookStatusMessage = "not on a Sunday, and not with 64 MiB"' ;;
*)
    echo 'VMPARAM_vm_Exit_Port = true'
    id -un > prepared ;;
esac
"""

JOB_EXIT = """\
#!/bin/sh
cat > /dev/null
echo "$1 $(id -un)" > ended
"""

OURS = HOOK_TEXT.replace(sys.executable, "/opt/vmgahp/bin/python3")

FILES = {"wrapper": WRAPPER, "prepare": PREPARE, "job-exit": JOB_EXIT, "ours": OURS}


def ending(code: int | None = None, seconds: int | None = SECONDS) -> Callable[[Path], object]:
    """What makes a guest that ends with an exit code."""
    says = "" if code is None else f"vmgahp-exit-code: {code}"
    return lambda home: make_guest(home / "guest.img", seconds, last_words=says)


def prepare(pool: Pool) -> None:
    place = pool.directory / "means"
    place.mkdir()
    for name, text in FILES.items():
        a_program(place / name, text)


pool = own_pool("means", SETTINGS, prepare)


DEFERRED = 45
"""Seconds from the submission to the time for which a job is deferred."""

DAG = """\
JOB failing failing.sub
RETRY failing 1
JOB judged judged.sub
SCRIPT POST judged post $RETURN
"""

POST = """\
#!/bin/sh
echo "$1" > returned
"""


# All of them run at the same time, whichever the first test is about.


@pytest.fixture(scope="module", autouse=True)
def jobs(pool: Pool) -> Mapping[str, Job]:
    pool.offering()
    later = int(time.time()) + DEFERRED
    failing = {
        "plain": "",
        "retried": "max_retries = 1",
        "success": f"max_retries = 1\nsuccess_exit_code = {CODE}",
        "renamed": 'transfer_output_remaps = "vm_console.log = console of the guest; vm_exit.json = end.json"',
        "hooked": '+HookKeyword = "MEANS"',
    }
    made = {name: pool.submit(name, ending(CODE), commands) for name, commands in failing.items()}
    made["refused"] = pool.submit("refused", ending(), '+HookKeyword = "MEANS"\n+HookRefuses = true')
    made["larger"] = pool.submit("larger", ending(), "vm_vcpus = 2\nrequest_cpus = 1")
    made["fitting"] = pool.submit("fitting", ending(CODE), "vm_vcpus = 2\nrequest_cpus = 2")
    made["deferred"] = pool.submit("deferred", ending(), f"deferral_time = {later}\ndeferral_window = 600")
    made["cron"] = pool.submit("cron", ending(), "cron_minute = *\ncron_window = 600\non_exit_remove = false")
    commands = "transfer_output_files = vm_console.log, guest.img\nvm_vnc = true"
    made["watched"] = pool.submit("watched", ending(seconds=None), commands)
    return made


@pytest.fixture(scope="module", autouse=True)
def spooled(pool: Pool, jobs: Mapping[str, Job]) -> Job:
    return pool.submit("spooled", ending(CODE), options=["-spool"])


@pytest.fixture(scope="module", autouse=True)
def dag(pool: Pool, jobs: Mapping[str, Job]) -> Path:
    home = pool.directory / "jobs" / "dag"
    home.mkdir()
    for node in ("failing", "judged"):
        (home / node).mkdir()
        ending(CODE)(home / node)
        (home / f"{node}.sub").write_text(SUBMIT.format(name=node) + f"initialdir = {node}\nqueue\n")
    (home / "jobs.dag").write_text(DAG)
    a_program(home / "post", POST)
    pool.run("chown", "-R", USER, f"{JOBS}/dag")
    pool.run("condor_submit_dag", "-usedagdir", "jobs.dag", user=USER, cwd=f"{JOBS}/dag")
    return home


def test_the_exit_code_is_the_jobs(pool: Pool, jobs: Mapping[str, Job]) -> None:
    job = jobs["plain"]
    ad = ended(job)
    assert (ad["JobStatus"], ad["ExitCode"], ad["ExitBySignal"], ad["NumJobCompletions"]) == (4, CODE, False, 1)
    assert f"return value {CODE}" in (job.directory / "job.log").read_text()


def test_a_job_that_has_failed_is_retried(pool: Pool, jobs: Mapping[str, Job]) -> None:
    job = jobs["retried"]
    job.wait_for_event("terminated", 2 * (START + END))
    pool.wait_until("it to leave the queue", lambda: job.ad().get("JobStatus") == 4, 60)
    ad = job.ad()
    assert (ad["ExitCode"], ad["NumJobCompletions"], job.events().count("executing")) == (CODE, 2, 2)
    assert "vm_console.log" in os.listdir(job.directory)


def test_a_code_that_means_success_is_success(pool: Pool, jobs: Mapping[str, Job]) -> None:
    ad = ended(jobs["success"])
    assert (ad["ExitCode"], ad["NumJobCompletions"]) == (CODE, 1)


def test_output_is_renamed(pool: Pool, jobs: Mapping[str, Job]) -> None:
    job = jobs["renamed"]
    job.wait_for_event("terminated", START + END)
    assert (job.directory / "console of the guest").read_text().startswith(BANNER)
    assert json.loads((job.directory / "end.json").read_text())["exit_code"] == CODE
    assert not (job.directory / "vm_console.log").exists()


def test_hooks_of_the_starter_run_and_the_wrapper_does_not(pool: Pool, jobs: Mapping[str, Job]) -> None:
    job = jobs["hooked"]
    job.wait_for_event("terminated", START + END)
    assert (job.directory / "prepared").read_text() == f"{USER}\n"
    assert (job.directory / "ended").read_text() == f"exit {USER}\n"
    assert not (job.directory / "wrapped").exists()
    assert read_count(job.directory / "guest.img") == SECONDS


def test_a_hook_holds_a_job_with_a_sentence(pool: Pool, jobs: Mapping[str, Job]) -> None:
    job = jobs["refused"]
    job.wait_for_event("held", START)
    ad = job.ad()
    assert "not on a Sunday, and not with 64 MiB" in ad["HoldReason"]
    assert (ad["HoldReasonCode"], ad["HoldReasonSubCode"]) == (19, 7)


def test_our_hook_holds_a_job_with_the_reason_of_a_start(pool: Pool, jobs: Mapping[str, Job]) -> None:
    """It is the sentence of vm_error.txt, where a START that holds a job has a word alone."""
    job = jobs["larger"]
    job.wait_for_event("held", START)
    reason = job.ad()["HoldReason"]
    assert "The VM is to have 2 CPUs, and the job's slot has 1" in reason
    assert "set request_cpus = 2 in the submit file" in reason
    assert ended(jobs["fitting"])["ExitCode"] == CODE


def test_a_vm_waits_for_its_time(pool: Pool, jobs: Mapping[str, Job]) -> None:
    job = jobs["deferred"]
    job.wait_for_event("terminated", START + END)
    began = json.loads((job.directory / "vm_exit.json").read_text())["started"]
    assert datetime.fromisoformat(began).timestamp() >= job.ad()["DeferralTime"]


def test_a_vm_runs_by_a_calendar(pool: Pool, jobs: Mapping[str, Job]) -> None:
    job = jobs["cron"]
    pool.wait_until("its second run", lambda: job.events().count("executing") >= 2, 2 * (START + END))
    job.command("condor_rm")


def test_a_running_guests_console_is_seen(pool: Pool, jobs: Mapping[str, Job]) -> None:
    job = jobs["watched"]

    def tail(*words: str) -> str:
        return str(pool.run("condor_tail", *words, user=USER, check=False).stdout)

    pool.wait_until("its console", lambda: BANNER in tail("-no-stdout", f"{job.cluster}.0", "vm_console.log"), END)
    assert BANNER not in tail(str(job.cluster))


def test_a_shell_on_the_node_leads_to_the_guests_display(pool: Pool, jobs: Mapping[str, Job]) -> None:
    if not pool.namespace.path("/usr/sbin/sshd").exists():
        pytest.skip("the pool's root has no sshd: scripts/pool-root builds it anew")
    job = jobs["watched"]
    pool.wait_until("a STATUS", lambda: "STATUS=Running" in pool.told(job), START + END)

    def ssh(*words: str) -> str:
        return str(pool.run("condor_ssh_to_job", *words, user=USER, timeout=90).stdout)

    user, directory, display = ssh(str(job.cluster), "id -un; pwd; cat vm_vnc.json").split("\n")[:3]
    assert (user, directory) == (USER, pool.scratch(job))
    through = f"ssh -W 127.0.0.1:{json.loads(display)['port']}"
    command = f"sleep 10 | condor_ssh_to_job -ssh '{through}' {job.cluster} | head -c 3"
    assert pool.run("sh", "-c", command, user=USER).stdout == "RFB"


def test_a_spooled_job_comes_back(pool: Pool, spooled: Job) -> None:
    pool.wait_until("its end", lambda: spooled.ad().get("JobStatus") == 4, START + END)
    assert spooled.ad()["ExitCode"] == CODE
    assert not (spooled.directory / "vm_console.log").exists()
    pool.run("condor_transfer_data", str(spooled.cluster), user=USER)
    assert (spooled.directory / "vm_console.log").read_text().startswith(BANNER)
    assert read_count(spooled.directory / "guest.img") == SECONDS


def test_a_dag_goes_by_the_exit_code(pool: Pool, dag: Path) -> None:
    """A node that fails is tried again, and a POST script judges by the guest's code."""
    log = dag / "jobs.dag.dagman.out"
    pool.wait_until("its end", lambda: log.exists() and "EXITING WITH STATUS" in log.read_text(), 2 * (START + END))
    text = log.read_text()
    assert text.count("Node failing job proc") + text.count("ULOG_EXECUTE for HTCondor Node failing") >= 2
    assert (dag / "returned").read_text() == f"{CODE}\n"
    assert "EXITING WITH STATUS 1" in text
    rescue = (dag / "jobs.dag.rescue001").read_text()
    assert "DONE judged" in rescue
    assert "DONE failing" not in rescue
