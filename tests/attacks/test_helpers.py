"""Attacks on the helpers of a START by other processes of the job's user: signals, limits, ptrace, forged answers."""

import contextlib
import os
import resource
import shutil
import subprocess
import time

from tests import jobs
from tests.attacks.here import MACHINE, PARTS, Here, Part
from tests.attacks.others import BY, FORGED, TRACING, limits_at_once
from tests.attacks.support import Mode, Must, Who, attack, each_here
from tests.lab.programs import a_program
from vmgahp.checkpoint.substitute import NotPacked, unpack_image
from vmgahp.config import Settings
from vmgahp.drivers.libvirt.start import virtiofs
from vmgahp.drivers.script.machine import Program
from vmgahp.drivers.script.protocol import ScriptRequest
from vmgahp.host.budget import Budget
from vmgahp.host.runtime_dir import remove, runtime_dir
from vmgahp.job import scratch_files
from vmgahp.job.devices import Share
from vmgahp.job.spec import JobSpec


def evaluate(here: Here) -> None:
    doubled = {f"E{n}": f"0 * (E{n + 1} + E{n + 1})" for n in range(17)}
    ad = jobs.ad(scratch=here.directory, JobVMMemory="64 + E0", E17="1", **doubled)
    ad.evaluate_as(here.user)
    JobSpec.parse(ad, MACHINE)


def unpack(here: Here) -> None:
    with (here.directory / "packed").open("rb") as file:
        unpack_image(file.fileno(), 0, "zstd", lambda _: time.sleep(0.001), here.user, 20, 1 << 30)


def share(here: Here) -> None:
    room = runtime_dir()
    try:
        of_the_machine = Share("data", "/usr", "virtiofs", writable=False, setting="VM_SHARE_DIRS")
        virtiofs.begin(here.user, room, of_the_machine, (0, 0))
    finally:
        remove(room)


def run_script(here: Here) -> None:
    path = a_program(here.execute / "script", 'sleep 0.3\necho \'{"state": "running"}\'')
    settings = Settings({"VM_HYPERVISOR": "toy", "VM_SCRIPT": str(path)})
    Program(settings, here.user, here.told.append).call(ScriptRequest("status", "toy"), None, 20)


def use_files(here: Here) -> None:
    for context in (here.user.at_hand(), contextlib.nullcontext()):
        with context:
            for _ in range(10):
                here.user.write_scratch(str(here.directory), "file", b"x")
                here.user.read_scratch(str(here.directory), "file", 1)


HELPERS = PARTS | {
    "expressions": Part(evaluate),
    "a-memory-image": Part(unpack, lambda: {"packed": subprocess.check_output(ZEROES)}, (NotPacked,)),
    "a-share": Part(share),
    "a-script": Part(run_script),
    "a-search": Part(
        lambda here: scratch_files.files_below(str(here.directory), ".", here.user, 9), harmless=(OSError,)
    ),
    "files": Part(use_files),
}
ZEROES = ("sh", "-c", "head -c 64M /dev/zero | zstd -q")
SPOKEN = ("an-image", "a-script")
"""Those with a program of the job's user whose answer is read."""
UNTRACED = ("cloud-init", "expressions", "outputs")
"""Those whose helpers become the user without another program, so that no process can trace them."""
OURS = ("files", "the-job-ad")
"""Those of a child that acts as the user for too short a time to be met each time."""


def slowly(here: Here) -> None:
    """Give the attacker time to meet each program: it begins a moment later."""
    place = here.execute / "bin"
    place.mkdir()
    for name in ("qemu-img", "tar", "find", "zstd"):
        a_program(place / name, f'sleep 0.2\nexec {shutil.which(name)} "$@"')
    os.environ["PATH"] = f"{place}:{os.environ['PATH']}"


@attack(Who.USER, Must.RUN, Mode.NONE, times=len(BY), cases={name: (name,) for name in HELPERS if name not in SPOKEN})
@attack(Who.USER, Must.RUN, Mode.NONE, times=len(BY | FORGED), daily=True, cases={name: (name,) for name in SPOKEN})
def other_processes(here: Here, name: str) -> None:
    """Stop, kill, limit, trace and answer for every process of the user during a part of a START; then leave it."""
    path, part = os.environ["PATH"], HELPERS[name]
    here.plant_for(part)
    try:
        slowly(here)
        attacks = BY | (FORGED if name in SPOKEN else {})
        unmet = TRACING if name in UNTRACED else ()
        is_met = {what: None if name in OURS else what not in unmet for what in attacks}
        here.attack_all(part, {what: (here.attacked(by), is_met[what]) for what, by in attacks.items()})
    finally:
        os.environ["PATH"] = path


AT_ONCE = {f"RLIMIT_NOFILE = 0 at once, {time}": limits_at_once(resource.RLIMIT_NOFILE) for time in range(20)}


@attack(Who.USER, Must.RUN, Mode.NONE, times=len(AT_ONCE), cases={name: (name,) for name in UNTRACED})
def limited_at_once(here: Here, name: str) -> None:
    """Take a helper's descriptors before it has done anything as the user; then leave it."""
    here.plant_for(HELPERS[name])
    here.attack_all(HELPERS[name], {what: (here.attacked(by), True) for what, by in AT_ONCE.items()})


HELD = tuple(name for name in HELPERS if name not in (*OURS, "outputs", "a-memory-image"))


@attack(Who.USER, Must.RUN, Mode.NONE, cases={name: (name,) for name in HELD})
def held_up(here: Here, name: str) -> None:
    """Stop the processes of a part until all the time of a START is over: the next operation blames the job."""
    here.plant_for(HELPERS[name])
    with here.attacked(BY["SIGSTOP"]), Budget(3.0):
        here.start(name, HELPERS[name])
        while here.outcome == "done":
            here.start(name, HELPERS[name])
        here.start("what follows", Part(use_files))
        if here.outcome == "done":
            here.breach("there is still time")
    here.start("at last", HELPERS[name])


test_nothing_comes_of_it = each_here(__name__)
