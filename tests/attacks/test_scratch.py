"""Attacks from the scratch directory: what is there already, what comes late, and what changes all the time."""

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from tests import jobs
from tests.attacks.fuse import BEHAVIORS, mounted
from tests.attacks.ground import CANARIES, STRANGER_UID
from tests.attacks.others import BY, STOPPING, again_and_again
from tests.attacks.site import Site
from tests.attacks.support import BOTH, Mode, Must, Who, attack, each
from tests.conftest import JOB_UID
from tests.faults.host import Scratch, until
from tests.lab import odd_files
from tests.lab.guest import make_guest
from tests.lab.odd_files import remove


def _sparse(path: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(1 << 40)


KINDS = odd_files.KINDS | {
    "a link to root's file": lambda path: path.symlink_to(CANARIES / "root"),
    "a link to a file of libvirt's": lambda path: path.symlink_to(CANARIES / "libvirt"),
    "a link to /dev/zero": lambda path: path.symlink_to("/dev/zero"),
    "a terabyte of nothing": _sparse,
}
"""What may be there in place of a file of the daemon's."""

LATE = ("a full directory", "a FIFO", "a link to root's file", "a link to nothing", "mode 0400", "a socket")

USER_DATA = 'VMPARAM_vm_User_Data = "user.yaml"'
DATA_FILES = 'VMPARAM_vm_Data_Files = "user.yaml"'
SAVE, CHECKPOINT = ("SUSPEND", "RESUME"), ("CHECKPOINT", "RESUME")

FILES: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    name: (name, more, operations)
    for name, more, operations in (
        ("vm_console.log", (), ()), ("vm_error.txt", (), ()), ("vm_exit.json", (), ()), ("vm_metrics.jsonl", (), ()),
        ("vm_vnc.json", ("JobVMVNCConsole = true",), ()), ("vm_cidata.iso", (USER_DATA,), ()),
        ("vm_data_files.iso", (DATA_FILES,), ()), ("hdb-data.qcow2", ('VMPARAM_vm_Data_Disk = "hdb:1M"',), ()),
        ("vm_suspend.mem", (), SAVE), (".vm_suspend.mem.part", (), SAVE), ("vm_checkpoint.mem", (), CHECKPOINT),
        (".vm_checkpoint.mem.part", (), CHECKPOINT), ("vm_checkpoint.json", (), CHECKPOINT),
        ("vm_checkpoint.json.restarting", (), CHECKPOINT), (".job.ad", (), CHECKPOINT),
        (".chirp.config", (), ("STATUS",)),
    )
}  # fmt: skip
"""Name, what of the ad asks for it, and the operations that use it."""
IN_BOTH = ("vm_console.log", "vm_cidata.iso", "vm_checkpoint.mem")
IN_ONE = tuple(name for name in FILES if name not in IN_BOTH)
"""Those with QEMU as both users, and as libvirt's alone."""
USED = tuple(name for name, (*_, operations) in FILES.items() if operations)
CATALOG = ("vm_catalog.json", "hda-base.qcow2")
POINTS = ("prepare.done", "prepare.guarded", "launch.made")

RACES = 12
"""Tries of each race."""


def make(site: Site, name: str, kind: str) -> None:
    """Have something of this kind in place of a file."""
    site.told.append(f"({name} is {kind})")
    remove(site.path(name))
    path = site.node(name, KINDS[kind])
    if path.is_dir() and not path.is_symlink():
        for inner in path.iterdir():
            site.own(inner)


FILE_SYSTEMS = (
    "EIO always", "EIO later", "ENOSPC later", "its process is gone", "it never answers",
    "it never answers a read or write", "files of 8 EiB", "files of no size", "reads of nothing", "noise", "links",
    "nobody else is let in, and it never answers",
)  # fmt: skip
"""Those of `BEHAVIORS` over which a whole START goes, which takes the time of its deadline where nothing answers."""


@attack(
    *(Who.USER, Must.SURVIVE, Mode.LIBVIRT),
    cases={f"{place}-{what}": (place, what) for place in (".", "guest.img") for what in FILE_SYSTEMS},
)
def is_mounted(site: Site, place: str, what: str) -> None:
    """Mount a file system that fails, lies or never answers over the scratch directory, or the disk, before START."""
    site.guest()
    _ = site.daemon
    with mounted(site.path(place), JOB_UID, BEHAVIORS[what]):
        result = site.answer(site.ask_start())
    site.judged(result)


@attack(Who.USER, Must.SURVIVE, *BOTH, times=len(KINDS), cases={name: FILES[name] for name in IN_BOTH})
@attack(Who.USER, Must.SURVIVE, Mode.LIBVIRT, times=len(KINDS), cases={name: FILES[name] for name in IN_ONE})
def is_there(site: Site, name: str, more: tuple[str, ...], operations: tuple[str, ...]) -> None:
    """Have each kind of thing in place of a file of the daemon's before START."""
    site.guest()
    site.plant("user.yaml", b"#cloud-config\n")
    for kind in KINDS:
        make(site, name, kind)
        if site.start(*more)[:1] == ["0"]:
            for operation in operations:
                site.ask(operation)
        site.stop()
        site.look_at_the_machine()
    remove(site.path(name))
    site.done("START")  # the daemon serves, and the directory is as good as before


@attack(Who.USER, Must.SURVIVE, Mode.LIBVIRT, times=len(KINDS), cases={name: (name,) for name in CATALOG})
def catalog(site: Site, name: str) -> None:
    """Have each kind of thing in place of a file of a job with an image of the catalog before START."""
    images = site.outer / "images"
    images.mkdir()
    make_guest(images / "base.img", seconds=None)
    (images / "catalog.toml").write_text('[base]\npath = "base.img"\nformat = "raw"\n')
    site.settings = {"VM_CATALOG": images / "catalog.toml"}
    disk = {"VMPARAM_vm_Disk": '"catalog:base:hda:w"'}
    for kind in KINDS:
        make(site, name, kind)
        site.start(**disk)
        site.stop()
        site.look_at_the_machine()
    for made in CATALOG:
        remove(site.path(made))
    result = site.start(**disk)
    assert result[:1] == ["0"], result


@attack(Who.USER, Must.SURVIVE, Mode.LIBVIRT, times=len(LATE), cases={name: FILES[name] for name in USED})
def comes_late(site: Site, name: str, _more: tuple[str, ...], operations: tuple[str, ...]) -> None:
    """Put things in place of a file of the daemon's while the guest runs."""
    site.guest()
    for kind in LATE:
        remove(site.path(name))
        site.done("START")
        make(site, name, kind)
        for operation in operations:
            site.ask(operation)
        site.stop()
        site.look_at_the_machine()
    remove(site.path(name))
    site.done("START")


@attack(Who.USER, Must.SURVIVE, *BOTH, times=4)
def linked_before_resume(site: Site) -> None:
    """Replace the disk after SUSPEND by a link to a file of root's, of libvirt's, of its group, of another user."""
    for name in ("root", "libvirt", "group", "other"):
        site.guest()
        site.done("START", "SUSPEND")
        replace_by_link(site, name)
        site.ask("RESUME")
        site.look_at_the_machine()
        site.stop()
        remove(site.path("guest.img"))


@attack(Who.USER, Must.SURVIVE, *BOTH, times=4)
def linked_before_restart(site: Site) -> None:
    """Replace the disk after CHECKPOINT and the daemon's end by such a link, and start the job again."""
    for name in ("root", "libvirt", "group", "other"):
        site.guest()
        site.done("START", "CHECKPOINT")
        site.restart()
        replace_by_link(site, name)
        site.start()
        site.look_at_the_machine()
        site.restart()
        for left in ("guest.img", "vm_checkpoint.mem", "vm_checkpoint.json"):
            remove(site.path(left))


def replace_by_link(site: Site, canary: str) -> None:
    remove(site.path("guest.img"))
    site.link("guest.img", CANARIES / canary)


@attack(Who.USER, Must.SURVIVE, *BOTH, times=RACES, cases={name: (name,) for name in ("root", "libvirt", "group")})
def swapped_during_start(site: Site, canary: str) -> None:
    """Exchange the disk and a link to a file of this owner's all the time during START."""
    site.guest()
    site.link("evil", CANARIES / canary)
    with site.swapping("guest.img", "evil"):
        for _ in range(RACES):
            site.start()
            site.stop()
            site.look_at_the_machine()


@attack(Who.USER, Must.SURVIVE, *BOTH, times=6, cases={"save-and-resume": SAVE, "checkpoint": CHECKPOINT})
def swapped_during(site: Site, *operations: str) -> None:
    """Exchange the disk and a link to a file of root's during these operations."""
    site.guest()
    site.link("evil", CANARIES / "root")
    site.done("START")
    with site.swapping("guest.img", "evil"):
        for operation in 3 * operations:
            site.ask(operation)
            site.look_at_the_machine()


@attack(Who.USER, Must.SURVIVE, *BOTH, cases={point: (point,) for point in POINTS})
def swapped_at(site: Site, point: str) -> None:
    """Make the disk a link to a file of root's when START has come to this point."""
    site.guest()
    daemon = site.daemon
    daemon.points.hold(point)
    request = site.ask_start()
    assert until(lambda: daemon.take() or daemon.points.came.is_set(), 45), daemon.points.trace
    os.rename(site.path("guest.img"), site.path("kept"))
    site.link("guest.img", CANARIES / "root")
    daemon.points.release()
    site.started(request)


@attack(Who.USER, Must.HOLD, Mode.NONE, times=11, daily=True)
def disk_of_another(site: Site) -> None:
    """Name files of others in `vm_disk`, by path, by `..`, by a link, in /proc and in /dev."""
    site.guest()
    site.link("link", CANARIES / "root")
    site.link("out", CANARIES)
    names = [
        *(f"{CANARIES}/{name}" for name in ("root", "libvirt", "group", "other")), "../../../canary/root", "link",
        "out/root", "/proc/1/root/run/canary/root", "/proc/self/mem", "/dev/zero", "/dev/loop-control",
    ]  # fmt: skip
    assert len(names) == site.attack.times
    for name in names:
        site.start(VMPARAM_vm_Disk=f'"{name}:hda:w:raw"')
        if site.vm:
            site.breach(f"{name} is a disk")
            site.stop()


@attack(Who.USER, Must.HOLD, Mode.NONE, times=2 * 5)
def share_is_no_directory(site: Site) -> None:
    """Name a file, a FIFO, a dangling link, a link out, a directory of another by `VMPARAM_vm_Share`."""
    site.guest()
    site.plant("file")
    site.node("fifo", os.mkfifo)
    site.link("dangling", "nothing")
    site.link("out", "/etc")
    site.path("closed").mkdir(mode=0o700)
    os.chown(site.path("closed"), STRANGER_UID, STRANGER_UID)
    site.foreign.add("closed")
    for kind in ("9p", "virtiofs"):
        site.restart()  # a daemon reads its settings once
        site.settings = {"VM_SHARE_SCRATCH": kind}
        for name in ("file", "fifo", "dangling", "out", "closed"):
            site.start(f'VMPARAM_vm_Share = "{name}"', JobVMCheckpoint="false")
            if site.vm:
                site.breach(f"{name} is shared by {kind}")
                site.stop()


@attack(Who.USER, Must.SURVIVE, *BOTH, times=4)
def directory_is_closed(site: Site) -> None:
    """Have the scratch directory closed, by the modes 000, 0100, 0400 and 0500."""
    site.guest()
    for mode in (0, 0o100, 0o400, 0o500):
        site.directory.chmod(mode)
        site.start()
        site.stop()
        site.directory.chmod(0o755)
    site.done("START")


@contextlib.contextmanager
def small(site: Site, options: str = "") -> Iterator[Scratch]:
    """The scratch directory as a small file system of its own."""
    site.directory.rmdir()
    mounted = Scratch(site.directory)
    if options:
        subprocess.run(["mount", "-o", f"remount,{options}", site.directory], check=True)
    try:
        yield mounted
    finally:
        site.end()
        mounted.close()
        site.directory.mkdir()
        site.own(site.directory)


@attack(Who.USER, Must.HOLD, Mode.LIBVIRT, times=5)
def full(site: Site) -> None:
    """Fill a scratch file system of its own before START."""
    with small(site) as mounted:
        site.guest()
        site.plant("user.yaml", b"#cloud-config\n")
        mounted.fill()
        for more in ((), (USER_DATA,), (DATA_FILES,), ('VMPARAM_vm_Data_Disk = "hdb:64M"',), (USER_DATA, DATA_FILES)):
            site.start(*more)
            site.stop()
        held = site.start(USER_DATA)
        site.stop()
    site.answered = held


@attack(Who.USER, Must.SURVIVE, *BOTH, times=3)
def full_while_it_runs(site: Site) -> None:
    """Fill a scratch file system of its own while the guest runs, before SUSPEND, CHECKPOINT and STOP."""
    with small(site) as mounted:
        site.guest()
        for operation in ("SUSPEND", "CHECKPOINT", "STOP"):
            site.done("START")
            mounted.fill()
            site.ask(operation)
            mounted.heal()
            if operation != "STOP":
                site.stop()
            site.vm = ""
        answered = site.start()
        site.stop()
    site.answered = answered


@attack(Who.USER, Must.HOLD, Mode.LIBVIRT)
def no_inodes(site: Site) -> None:
    """Leave a scratch file system of its own no inodes."""
    with small(site, "nr_inodes=40"):
        site.guest()
        site.plant("user.yaml", b"#cloud-config\n")
        with contextlib.suppress(OSError):
            for number in range(100):
                site.plant(f"filler.{number}")
        held = site.start(USER_DATA)
        site.stop()
    site.answered = held


@attack(Who.OTHER, Must.SURVIVE, *BOTH, times=4)
def killed_during_start(site: Site) -> None:
    """Kill every process of the job's uid again and again during START."""
    site.guest()
    for _ in range(4):
        request = site.ask_start()
        end = time.monotonic() + 10
        while not request.result and time.monotonic() < end:
            # As any process of that user's: itself it spares.
            site.as_user("/bin/sh", "-c", "kill -KILL -1 2>/dev/null", check=False)
            site.daemon.take(0.02)
        site.started(request)
        site.stop()


@attack(Who.OTHER, Must.SURVIVE, Mode.LIBVIRT, times=len(BY) - len(STOPPING))
def met_during_start(site: Site) -> None:
    """Limit, kill, trace and delay every process of the job's uid during START, with drives and a network."""
    site.settings = dict(jobs.NETWORKS)
    site.guest()
    site.plant("user.yaml", b"#cloud-config\n")
    for what, by in BY.items():
        if what not in STOPPING:
            with site.naming(what), site.beside(again_and_again(by)):
                site.start(USER_DATA, DATA_FILES, 'VMPARAM_vm_NICs = "user"')
                site.stop()
    site.done("START")


@attack(Who.USER, Must.SURVIVE, Mode.LIBVIRT, times=2 * 9)
def sources_of_drives(site: Site) -> None:
    """Put a FIFO, a link to a file of root's, a directory, `/proc/self/mem` and others on a drive for the guest."""
    site.guest()
    site.node("fifo", os.mkfifo)
    site.link("link", CANARIES / "root")
    site.node("directory", os.mkdir)
    site.link("loop", "loop")
    site.plant("huge").open("r+b").truncate(1 << 40)
    site.plant("closed", b"x", 0)
    names = ["fifo", "link", "directory", "loop", "huge", "closed", "/proc/self/mem", "../../../canary/root", "missing"]
    assert 2 * len(names) == site.attack.times
    for name in names:
        for option in ("User_Data", "Data_Files"):
            site.start(f'VMPARAM_vm_{option} = "{name}"')
            site.stop()


@attack(Who.USER, Must.RUN, Mode.LIBVIRT)
def many_files(site: Site) -> None:
    """Have 20,000 files and 500 nested directories in the scratch directory."""
    site.guest()
    for depth in range(500):
        site.node("deep" + "/d" * depth, os.mkdir)
    for number in range(20_000):
        site.plant(f"file.{number}")
    site.start()


test_nothing_comes_of_it = each(__name__)
