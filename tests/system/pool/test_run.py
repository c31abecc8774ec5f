"""A program in a guest as a job in a real pool: its files, its end, and what befalls it on the way.

The guest is a small Linux that boots in seconds and has the agent, from the machine's catalog; all jobs run side by
side on that one image.
"""

import json
import random
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from tests.lab import cloud_image, linux_guest
from tests.lab.namespace import LAB, VMGAHP
from tests.lab.pool import JOBS, USER, Job, Pool
from tests.lab.programs import a_program
from tests.system.pool.outcomes import CHECKPOINT, END, START, ended, own_pool, settle

WHY_NOT = linux_guest.why_no_disk() or cloud_image.why_none()
pytestmark = [pytest.mark.pool, pytest.mark.skipif(WHY_NOT != "", reason=WHY_NOT)]

SECONDS = 100
"""How long those programs count that something befalls: a starter does not listen in the first 40."""
TEN = 10

CATALOG = """\
[small]
path = "small.raw"
format = "raw"

[debian-12]
path = "debian-12.qcow2"
format = "qcow2"
"""

SETTINGS = f"""
VM_CATALOG = {LAB}/images/catalog.toml
NUM_CPUS = 30
MEMORY = 16384
VM_MEMORY = 8192
VM_NETWORKING = True
VM_NETWORKING_TYPE = nat
"""

SUBMIT = """\
universe = vm
executable = {name}
vm_type = kvm
vm_memory = 192
vm_networking = false
vm_disk = catalog:small:vda:w
+VMPARAM_vm_Run_Boot = "ready"
should_transfer_files = YES
when_to_transfer_output = ON_EXIT
transfer_output_files = vm_outputs/
+Out = "{name}.out"
+StreamOut = false
+TransferOut = true
+Err = "{name}.err"
+StreamErr = false
+TransferErr = true
log = job.log
"""

FIRMWARE = ("/usr/share/OVMF", "/usr/share/qemu/firmware")
"""Debian's ovmf."""

FIT = """\
#!/bin/sh
# fit WORD: copies its data to results, and says what it has been given.
mkdir -p results/deep/er results/empty
cat data/sub/noise >results/deep/er/copy
echo "$1 in $(pwd | sed 's,.*/,,') as $(id -un): $WORDS"
echo "a word of warning" >&2
ls -l data >results/list
chmod 755 results/list
echo changed >>notes
"""

COUNT = """\
i=0
while [ $i -lt {seconds} ]; do
    i=$((i + 1))
    echo $i
    sleep 1
done
mkdir results
echo counted to $i >results/sum
"""

NOISE = random.Random(1).randbytes(3_000_001)


def runs(command: str) -> str:
    """The line of a submit file."""
    return f'+VMPARAM_vm_Run = "{command}"\n'


def prepare(pool: Pool) -> None:
    images = pool.directory / "images"
    images.mkdir()
    linux_guest.make_ready_disk(images / "small.raw")
    shutil.copy(cloud_image.IMAGE, images / "debian-12.qcow2")
    (images / "catalog.toml").write_text(CATALOG)
    pool.namespace.virsh("net-start", "default")
    # The pool's root has no firmware but a BIOS.
    for place in FIRMWARE:
        shutil.copytree(place, pool.namespace.path(place), dirs_exist_ok=True, symlinks=True)


pool = own_pool("run", SETTINGS, prepare)


def with_files(directory: Path) -> None:
    """What a program is given."""
    (directory / "data" / "sub").mkdir(parents=True)
    (directory / "data" / "sub" / "noise").write_bytes(NOISE)
    (directory / "data" / "a b,c").write_text("blanks\n")
    a_program(directory / "fit", FIT)
    (directory / "notes").write_text("old\n")


def counting(directory: Path) -> None:
    (directory / "count").write_text(COUNT.format(seconds=SECONDS))


def has_counted(pool: Pool, job: Job) -> bool:
    """Whether its program has printed anything so far."""
    printed = pool.namespace.path(f"{pool.scratch(job)}/_condor_stdout")
    return printed.exists() and printed.stat().st_size > 0


# All jobs run at the same time, whichever of them the first test is about.


@pytest.fixture(scope="module", autouse=True)
def jobs(pool: Pool) -> Mapping[str, Job]:
    """Most of them, submitted at once, and what befalls some."""
    pool.offering()

    def submit(name: str, commands: str, files: Callable[[Path], None] = lambda _: None) -> Job:
        return pool.submit(name, files, commands, template=SUBMIT)

    given = "transfer_input_files = data, fit, notes\nenvironment = \"WORDS='two words' OTHER='it''s'\"\n"
    count = runs("sh count") + "transfer_input_files = count\n"
    made = {
        "fit": submit("fit", runs("./fit 17") + given, with_files),
        "code": submit("code", runs("echo no; exit 3")),
        "signal": submit("signal", runs("kill -SEGV $$")),
        "suspended": submit("suspended", count, counting),
        "vacated": submit("vacated", count + CHECKPOINT, counting),
        "evicted": submit("evicted", count, counting),
    }
    for name, command in {"suspended": "suspend", "vacated": "vacate_job", "evicted": "vacate_job"}.items():
        settle(pool, made[name])
        pool.wait_until(f"the program of {name}", lambda job=made[name]: has_counted(pool, job), START)
        made[name].command(f"condor_{command}")
    return made


@pytest.fixture(scope="module", autouse=True)
def ten(pool: Pool, jobs: Mapping[str, Job]) -> Path:
    """Jobs of one submit file, on one image."""
    home = pool.directory / "jobs" / "ten"
    home.mkdir()
    lines = SUBMIT.format(name="ten").replace("ten.", "$(Process).")
    lines += runs("echo $(Process) >result.$(Process); exit $(Process)")
    (home / "ten.sub").write_text(f"{lines}queue {TEN}\n")
    pool.run("chown", "-R", USER, f"{JOBS}/ten")
    pool.run("condor_submit", "ten.sub", user=USER, cwd=f"{JOBS}/ten")
    return home


def by_vmgahp_run(pool: Pool, name: str, options: str, *words: str) -> Job:
    """A job that `vmgahp run` has submitted."""
    home = pool.directory / "jobs" / name
    home.mkdir()
    with_files(home)
    (home / "job.log").symlink_to(f"{name}.log")
    pool.run("chown", "-R", USER, f"{JOBS}/{name}")
    command = [VMGAHP, "run", *options.split(), "--input", "data", "--input", "fit", "--name", name]
    done = pool.run(*command, "--submit", *words, user=USER, cwd=f"{JOBS}/{name}")
    return Job(pool, int(done.stdout.split(".")[0]), home)


@pytest.fixture(scope="module", autouse=True)
def by_command(pool: Pool, jobs: Mapping[str, Job]) -> Job:
    options = "--image catalog:small --memory 192 --boot ready --input notes --output results"
    words = ("--env", "WORDS=it's $(all) $$(one)", "--", "./fit", "a  b")
    return by_vmgahp_run(pool, "command", options, *words)


@pytest.fixture(scope="module", autouse=True)
def debian(pool: Pool, jobs: Mapping[str, Job]) -> Mapping[str, Job]:
    """Jobs of a real image, whose cloud-init begins the program."""
    image = f"--image catalog:debian-12 --memory {cloud_image.MEMORY_MIB} --env WORDS=real "
    return {name: by_vmgahp_run(pool, name, image + more, "--", "sh", "-c", LOOK) for name, more in DEBIAN.items()}


DEBIAN = {"bios": "--network nat", "uefi": "--network none --firmware uefi"}
"""By the options of each."""
LOOK = "./fit 12; . /etc/os-release; echo $ID; ls -d /sys/firmware/efi /sys/class/net/*/device; exit 4"


def counted(job: Job) -> list[int]:
    name = job.directory.name
    return [int(line) for line in (job.directory / f"{name}.out").read_text().split()]


def test_a_program_has_its_files_and_its_outputs_come_home(jobs: Mapping[str, Job]) -> None:
    job = jobs["fit"]
    ad = ended(job)
    home = job.directory
    assert (ad["ExitCode"], ad["ExitBySignal"]) == (0, False), (home / "fit.err").read_text()
    assert (home / "results/deep/er/copy").read_bytes() == NOISE
    assert (home / "results/list").stat().st_mode & 0o777 == 0o755
    assert "a b,c" in (home / "results/list").read_text()
    assert (home / "results/empty").is_dir()
    assert (home / "notes").read_text() == "old\nchanged\n"
    assert (home / "fit.out").read_text() == "17 in inputs as job: two words\n"
    assert (home / "fit.err").read_text() == "a word of warning\n"
    assert json.loads((home / "vm_exit.json").read_text())["exit_code"] == 0
    came = {path.name for path in home.iterdir()}
    assert came - {"fit", "data", "notes", "results", "fit.out", "fit.err", "job.sub", "job.log"} == {
        "vm_exit.json",
        "vm_console.log",
        "vm_metrics.jsonl",
    }


def test_the_programs_exit_code_or_signal_is_the_jobs(jobs: Mapping[str, Job]) -> None:
    ad = ended(jobs["code"])
    assert (ad["ExitCode"], ad["ExitBySignal"], ad["NumJobStarts"]) == (3, False, 1)
    assert (jobs["code"].directory / "code.out").read_text() == "no\n"
    ad = ended(jobs["signal"])
    assert (ad["ExitBySignal"], ad["ExitSignal"], ad["NumJobStarts"]) == (True, 11, 1)
    assert "Abnormal termination (signal 11)" in (jobs["signal"].directory / "job.log").read_text()


def test_a_suspended_programs_output_is_seen_and_it_goes_on_where_it_was(pool: Pool, jobs: Mapping[str, Job]) -> None:
    job = jobs["suspended"]
    pool.wait_until("two STATUS=Suspended", lambda: pool.told(job).count("STATUS=Suspended") >= 2, END)
    numbers = [int(line) for line in str(pool.run("condor_tail", str(job.cluster), user=USER).stdout).split()]
    assert numbers == list(range(1, len(numbers) + 1))
    assert 0 < len(numbers) < SECONDS, "while it is suspended it says no more"
    job.command("condor_continue")
    assert ended(job)["ExitCode"] == 0
    assert counted(job) == list(range(1, SECONDS + 1))


def test_a_vacated_program_goes_on_from_its_checkpoint(jobs: Mapping[str, Job]) -> None:
    job = jobs["vacated"]
    assert (ended(job)["ExitCode"], job.events().count("executing")) == (0, 2)
    assert counted(job) == list(range(1, SECONDS + 1))
    assert (job.directory / "results/sum").read_text() == f"counted to {SECONDS}\n"
    console = (job.directory / "vm_console.log").read_text()
    assert console.count(linux_guest.UP) == 1, "it was resumed, and not booted again"
    assert not list(job.directory.glob("vm_checkpoint*"))


def test_an_evicted_program_begins_anew(jobs: Mapping[str, Job]) -> None:
    job = jobs["evicted"]
    assert (ended(job)["ExitCode"], job.events().count("executing")) == (0, 2)
    assert counted(job) == list(range(1, SECONDS + 1))


def test_ten_jobs_run_on_one_image(pool: Pool, ten: Path) -> None:
    log = ten / "job.log"
    pool.wait_until("their ends", lambda: log.exists() and log.read_text().count("\n005 (") == TEN, START + END)
    status = re.findall(r"return value (\d+)\)", log.read_text())
    assert sorted(status) == [str(process) for process in range(TEN)], log.read_text()
    came = {path.name: path.read_text(errors="replace") for path in ten.glob("*.*")}
    assert {f"result.{process}": f"{process}\n" for process in range(TEN)}.items() <= came.items(), came


def test_a_job_of_vmgahp_run_is_one_of_them(by_command: Job) -> None:
    assert ended(by_command)["ExitCode"] == 0
    home = by_command.directory
    assert (home / "command.out").read_text() == "a  b in inputs as job: it's $(all) $$(one)\n"
    assert (home / "results/deep/er/copy").read_bytes() == NOISE


@pytest.mark.parametrize("name", DEBIAN)
def test_debian_runs_the_program_when_cloud_init_is_done(debian: Mapping[str, Job], name: str) -> None:
    job = debian[name]
    assert ended(job, cloud_image.BOOT + END)["ExitCode"] == 4
    assert (job.directory / "results/deep/er/copy").read_bytes() == NOISE
    words = (job.directory / f"{name}.out").read_text().split()
    assert words[:7] == ["12", "in", "inputs", "as", "job:", "real", "debian"]
    assert ("/sys/firmware/efi" in words) == (name == "uefi")
    assert any(word.startswith("/sys/class/net/") for word in words) == (name == "bios")
