"""Attacks by FUSE file systems of the job's user: over its directory, its files, and what the server writes there."""

import os
import socket

from tests.attacks.fuse import BEHAVIORS, mounted
from tests.attacks.here import MACHINE, PARTS, Here, Part
from tests.attacks.support import Mode, Must, Who, attack, each_here
from vmgahp.checkpoint import store
from vmgahp.checkpoint.store import MANIFEST_FILE
from vmgahp.drivers.libvirt.program import monitor
from vmgahp.host import job_user
from vmgahp.host.serial_capture import ConsoleCapture
from vmgahp.job.scratch_files import OutputDirectory


def measure(here: Here) -> None:
    job_user.require_entry(str(here.directory), here.user)
    job_user.require_room(str(here.directory), here.user)
    monitor.most_outputs(here.spec(), MACHINE, here.user)


def write(here: Here) -> None:
    here.write(lambda: here.user.write_scratch(str(here.directory), "vm_error.txt", b"x"))
    here.write(lambda: here.user.rename_scratch(str(here.directory), "vm_error.txt", "b"))
    here.write(lambda: here.user.unlink_scratch(str(here.directory), "b"))


def end(here: Here) -> None:
    links = OutputDirectory(str(here.directory), (), here.user, here.told.append)
    links.at_end()
    links.without_checkpoint()
    job_user.forget(here.user, str(here.directory), here.told.append, "vm_run_state.txt")


def print_(here: Here) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    capture = ConsoleCapture(
        f"{here.execute}/port",
        lambda: here.write(lambda: here.user.open_scratch(str(here.directory), "vm_stdout", flags)),
        1 << 16,
        here.told.append,
    )
    with socket.socket(socket.AF_UNIX) as guest:
        guest.connect(capture.path)
        guest.sendall(b"x" * 4096)
    capture.close()


WHOLE = PARTS | {"a-disk": Part(Here.provide), "the-room": Part(measure)}
WHOLE |= {"an-error-file": Part(write), "the-end": Part(end)}
"""What is done in a scratch directory over which something is mounted."""
PLACES = {
    "disk.img": WHOLE["a-disk"], "disk.qcow2": PARTS["an-image"], "data": PARTS["a-drive"], "input": PARTS["inputs"],
    "user-data": PARTS["cloud-init"], "vm_outputs.tar": PARTS["outputs"], ".job.ad": PARTS["the-job-ad"],
    "vm_stdout": Part(print_, lambda: {"vm_stdout": b""}),
    "vm_checkpoint.json": Part(lambda here: store.find_record(here.user, str(here.directory), MANIFEST_FILE, len),
                               lambda: {"vm_checkpoint.json": b"{}"}, (store.Unusable,)),
}  # fmt: skip
"""A file or directory over which something is mounted, and what is done with it."""
DAILY = {"vm_stdout": ("vm_stdout", PLACES.pop("vm_stdout"))}
CASES = {f"directory-{name}": (".", part) for name, part in WHOLE.items()}
CASES |= {name: (name, part) for name, part in PLACES.items()}


@attack(Who.USER, Must.RUN, Mode.NONE, times=len(BEHAVIORS), cases=CASES)
@attack(Who.USER, Must.RUN, Mode.NONE, times=len(BEHAVIORS), cases=DAILY, daily=True)
def over(here: Here, place: str, part: Part) -> None:
    """Mount each kind of file system over a place during a part of a START; the last try is without one."""
    here.plant_for(part)
    uid = here.user.uid
    attacks = {what: (mounted(here.directory / place, uid, behavior), None) for what, behavior in BEHAVIORS.items()}
    here.attack_all(part, attacks)


test_nothing_comes_of_it = each_here(__name__)
