"""Attacks from the scratch directory: what is there already, what comes late, and what changes all the time."""

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.attacks.ground import CANARIES, STRANGER_UID
from tests.attacks.site import Site
from tests.attacks.support import BOTH, NO_QEMU, Attack, Battleground, Mode, Must, Who, each, stopped
from tests.faults.host import Scratch, until
from tests.lab.guest import make_guest


def _unix_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


def _of_mode(mode: int) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        path.write_bytes(b"mine")
        path.chmod(mode)

    return make


def _full_directory(path: Path) -> None:
    path.mkdir()
    (path / "kept").write_bytes(b"mine")


def _sparse(path: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(1 << 40)


KINDS: dict[str, Callable[[Path], None]] = {
    "a directory": os.mkdir,
    "a full directory": _full_directory,
    "a FIFO": os.mkfifo,
    "a socket": _unix_socket,
    "a link to root's file": lambda path: path.symlink_to(CANARIES / "root"),
    "a link to a file of libvirt's": lambda path: path.symlink_to(CANARIES / "libvirt"),
    "a link to nothing": lambda path: path.symlink_to("nothing"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a link to /dev/zero": lambda path: path.symlink_to("/dev/zero"),
    "mode 0400": _of_mode(0o400),
    "mode 0000": _of_mode(0),
    "a terabyte of nothing": _sparse,
}
"""What may be there in place of a file of the daemon's."""

LATE = ("a full directory", "a FIFO", "a link to root's file", "a link to nothing", "mode 0400", "a socket")

USER_DATA = 'VMPARAM_vm_User_Data = "user.yaml"'
DATA_FILES = 'VMPARAM_vm_Data_Files = "user.yaml"'
SAVE, CHECKPOINT = ("SUSPEND", "RESUME"), ("CHECKPOINT", "RESUME")
LIBVIRT = (Mode.LIBVIRT,)

FILES: list[tuple[str, tuple[str, ...], tuple[str, ...]]] = [
    ("vm_console.log", (), ()),
    ("vm_error.txt", (), ()),
    ("vm_exit.json", (), ()),
    ("vm_metrics.jsonl", (), ()),
    ("vm_vnc.json", ("JobVMVNCConsole = true",), ()),
    ("vm_cidata.iso", (USER_DATA,), ()),
    ("vm_data_files.iso", (DATA_FILES,), ()),
    ("hdb-data.qcow2", ('VMPARAM_vm_Data_Disk = "hdb:1M"',), ()),
    ("vm_suspend.mem", (), SAVE),
    ("vm_suspend.mem.part", (), SAVE),
    ("vm_checkpoint.mem", (), CHECKPOINT),
    ("vm_checkpoint.mem.part", (), CHECKPOINT),
    ("vm_checkpoint.json", (), CHECKPOINT),
    ("vm_checkpoint.json.restarting", (), CHECKPOINT),
    (".job.ad", (), CHECKPOINT),
    (".chirp.config", (), ("STATUS",)),
]
"""Name, what of the ad asks for it, and the operations that use it."""

RACES = 12
"""Tries of each race."""

ATTACKS = [
    *(
        Attack(
            f"{name}-is-there",
            Who.USER,
            f"`{name}` is there before START, as {len(KINDS)} kinds of thing",
            Must.SURVIVE,
            "is_there",
            (name, more, operations),
            modes=BOTH if name in ("vm_console.log", "vm_cidata.iso", "vm_checkpoint.mem") else LIBVIRT,
            times=len(KINDS),
        )
        for name, more, operations in FILES
    ),
    *(
        Attack(
            f"{name}-comes-late",
            Who.USER,
            f"`{name}` becomes {len(LATE)} kinds of thing while the guest runs",
            Must.SURVIVE,
            "comes_late",
            (name, operations),
            modes=LIBVIRT,
            times=len(LATE),
        )
        for name, _, operations in FILES
        if operations
    ),
    *(
        Attack(
            f"catalog-{name}-is-there",
            Who.USER,
            f"`{name}` of a job with an image of the catalog is there before START, as {len(KINDS)} kinds of thing",
            Must.SURVIVE,
            "catalog",
            (name,),
            modes=LIBVIRT,
            times=len(KINDS),
        )
        for name in ("vm_catalog.json", "hda-base.qcow2")
    ),
    Attack(
        "disk-is-a-link-before-resume",
        Who.USER,
        "after SUSPEND the disk is replaced by a link to a file of root's, of libvirt's, of its group, of another user",
        Must.SURVIVE,
        "linked_before_resume",
        times=4,
    ),
    Attack(
        "disk-is-a-link-before-restart",
        Who.USER,
        "after CHECKPOINT and the daemon's end the disk is replaced by such a link, and the job starts again",
        Must.SURVIVE,
        "linked_before_restart",
        times=4,
    ),
    Attack(
        "disk-swapped-during-start",
        Who.USER,
        "the disk and a link to a file of root's change places all the time during START",
        Must.SURVIVE,
        "swapped_during_start",
        ("root",),
        times=RACES,
    ),
    Attack(
        "disk-swapped-for-libvirts-during-start",
        Who.USER,
        "the disk and a link to a file of libvirt's own user change places all the time during START",
        Must.SURVIVE,
        "swapped_during_start",
        ("libvirt",),
        times=RACES,
    ),
    Attack(
        "disk-swapped-for-the-groups-during-start",
        Who.USER,
        "the disk and a link to a file of the group libvirt-qemu change places all the time during START",
        Must.SURVIVE,
        "swapped_during_start",
        ("group",),
        times=RACES,
    ),
    Attack(
        "disk-swapped-during-save-and-resume",
        Who.USER,
        "the disk and a link to a file of root's change places during SUSPEND and RESUME",
        Must.SURVIVE,
        "swapped_during",
        ("SUSPEND", "RESUME"),
        times=6,
    ),
    Attack(
        "disk-swapped-during-checkpoint",
        Who.USER,
        "the disk and a link to a file of root's change places during CHECKPOINT and RESUME",
        Must.SURVIVE,
        "swapped_during",
        ("CHECKPOINT", "RESUME"),
        times=6,
    ),
    *(
        Attack(
            f"disk-swapped-at-{point}",
            Who.USER,
            f"the disk becomes a link to a file of root's when START has come to `{point}`",
            Must.SURVIVE,
            "swapped_at",
            (point,),
        )
        for point in ("prepare.done", "prepare.guarded", "launch.made")
    ),
    Attack(
        "disk-of-another",
        Who.USER,
        "`vm_disk` names files of others by path, by `..`, by a link, in /proc and in /dev",
        Must.HOLD,
        "disk_of_another",
        modes=NO_QEMU,
        times=11,
        daily=True,
    ),
    Attack(
        "share-is-no-directory",
        Who.USER,
        "`VMPARAM_vm_Share` names a file, a FIFO, a dangling link, a link out, a directory of another",
        Must.HOLD,
        "share_is_no_directory",
        modes=NO_QEMU,
        times=2 * 5,
    ),
    Attack(
        "directory-is-closed",
        Who.USER,
        "the scratch directory has the mode 000, 0100, 0400 or 0500",
        Must.SURVIVE,
        "directory_is_closed",
        times=4,
    ),
    Attack(
        "nearly-full",
        Who.USER,
        "a scratch file system of its own is full before START",
        Must.HOLD,
        "full",
        modes=LIBVIRT,
        times=5,
    ),
    Attack(
        "full-while-it-runs",
        Who.USER,
        "a scratch file system of its own becomes full while the guest runs, before SUSPEND, CHECKPOINT and STOP",
        Must.SURVIVE,
        "full_while_it_runs",
        times=3,
    ),
    Attack(
        "no-inodes",
        Who.USER,
        "a scratch file system of its own has no inodes left",
        Must.HOLD,
        "no_inodes",
        modes=LIBVIRT,
    ),
    Attack(
        "qemu-killed-during-start",
        Who.OTHER,
        "every process of the job's uid is killed again and again during START",
        Must.SURVIVE,
        "killed_during_start",
        times=4,
    ),
    Attack(
        "sources-of-drives",
        Who.USER,
        "what goes on a drive for the guest is a FIFO, a link to a file of root's, a directory, `/proc/self/mem` …",
        Must.SURVIVE,
        "sources_of_drives",
        modes=LIBVIRT,
        times=2 * 9,
    ),
    Attack(
        "a-hundred-thousand-files",
        Who.USER,
        "the scratch directory has 20,000 files and 500 nested directories",
        Must.RUN,
        "many_files",
        modes=LIBVIRT,
    ),
]


@each(ATTACKS)
def test_nothing_comes_of_it(ground: Battleground, request: pytest.FixtureRequest, attack: Attack, mode: Mode) -> None:
    stopped(ground, request, attack, mode)


# What is done


def remove(path: Path) -> None:
    """Whatever it is."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def make(site: Site, name: str, kind: str) -> None:
    """Have something of this kind in place of a file."""
    path = site.path(name)
    remove(path)
    KINDS[kind](path)
    site.own(path)
    if path.is_dir() and not path.is_symlink():
        for inner in path.iterdir():
            site.own(inner)


def stop(site: Site) -> None:
    """End the guest of one try, where there is one."""
    if site.vm:
        site.ask("STOP")
        site.vm = ""


def is_there(site: Site, name: str, more: tuple[str, ...], operations: tuple[str, ...]) -> None:
    site.guest()
    site.plant("user.yaml", b"#cloud-config\n")
    for kind in KINDS:
        site.told.append(f"({name} is {kind})")
        make(site, name, kind)
        if site.start(*more)[:1] == ["0"]:
            for operation in operations:
                site.ask(operation)
        stop(site)
        site.look_at_the_machine()
    remove(site.path(name))
    site.done("START")  # the daemon serves, and the directory is as good as before


def catalog(site: Site, name: str) -> None:
    images = site.outer / "images"
    images.mkdir()
    make_guest(images / "base.img", seconds=None)
    (images / "catalog.toml").write_text('[base]\npath = "base.img"\nformat = "raw"\n')
    site.settings = {"VM_CATALOG": images / "catalog.toml"}
    disk = {"VMPARAM_vm_Disk": '"catalog:base:hda:w"'}
    for kind in KINDS:
        site.told.append(f"({name} is {kind})")
        make(site, name, kind)
        site.start(**disk)
        stop(site)
        site.look_at_the_machine()
    for made in ("vm_catalog.json", "hda-base.qcow2"):
        remove(site.path(made))
    result = site.start(**disk)
    assert result[:1] == ["0"], result


def comes_late(site: Site, name: str, operations: tuple[str, ...]) -> None:
    site.guest()
    for kind in LATE:
        site.told.append(f"({name} becomes {kind})")
        remove(site.path(name))
        site.done("START")
        make(site, name, kind)
        for operation in operations:
            site.ask(operation)
        stop(site)
        site.look_at_the_machine()
    remove(site.path(name))
    site.done("START")


def linked_before_resume(site: Site) -> None:
    for name in ("root", "libvirt", "group", "other"):
        site.guest()
        site.done("START", "SUSPEND")
        replace_by_link(site, name)
        site.ask("RESUME")
        site.look_at_the_machine()
        stop(site)
        remove(site.path("guest.img"))


def linked_before_restart(site: Site) -> None:
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


def swapped_during_start(site: Site, canary: str) -> None:
    site.guest()
    site.link("evil", CANARIES / canary)
    with site.swapping("guest.img", "evil"):
        for _ in range(RACES):
            site.start()
            stop(site)
            site.look_at_the_machine()


def swapped_during(site: Site, *operations: str) -> None:
    site.guest()
    site.link("evil", CANARIES / "root")
    site.done("START")
    with site.swapping("guest.img", "evil"):
        for operation in 3 * operations:
            site.ask(operation)
            site.look_at_the_machine()


def swapped_at(site: Site, point: str) -> None:
    site.guest()
    daemon = site.daemon
    daemon.points.hold(point)
    request = site.ask_start()
    assert until(lambda: daemon.take() or daemon.points.came.is_set(), 45), daemon.points.trace
    os.rename(site.path("guest.img"), site.path("kept"))
    site.link("guest.img", CANARIES / "root")
    daemon.points.release()
    site.started(request)


def disk_of_another(site: Site) -> None:
    site.guest()
    site.link("link", CANARIES / "root")
    site.link("out", CANARIES)
    names = [
        *(f"{CANARIES}/{name}" for name in ("root", "libvirt", "group", "other")),
        "../../../canary/root",
        "link",
        "out/root",
        "/proc/1/root/run/canary/root",
        "/proc/self/mem",
        "/dev/zero",
        "/dev/loop-control",
    ]
    assert len(names) == site.attack.times
    for name in names:
        site.start(VMPARAM_vm_Disk=f'"{name}:hda:w:raw"')
        if site.vm:
            site.breach(f"{name} is a disk")
            stop(site)


def share_is_no_directory(site: Site) -> None:
    site.guest()
    site.plant("file")
    os.mkfifo(site.path("fifo"))
    site.own(site.path("fifo"))
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
                stop(site)


def directory_is_closed(site: Site) -> None:
    site.guest()
    for mode in (0, 0o100, 0o400, 0o500):
        site.directory.chmod(mode)
        site.start()
        stop(site)
        site.directory.chmod(0o755)
    site.done("START")


@contextlib.contextmanager
def small(site: Site, options: str = "") -> "object":
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


def full(site: Site) -> None:
    with small(site) as mounted:
        site.guest()
        site.plant("user.yaml", b"#cloud-config\n")
        mounted.fill()  # type: ignore[attr-defined]
        for more in ((), (USER_DATA,), (DATA_FILES,), ('VMPARAM_vm_Data_Disk = "hdb:64M"',), (USER_DATA, DATA_FILES)):
            site.start(*more)
            stop(site)
        held = site.start(USER_DATA)
        stop(site)
    site.answered = held


def full_while_it_runs(site: Site) -> None:
    with small(site) as mounted:
        site.guest()
        for operation in ("SUSPEND", "CHECKPOINT", "STOP"):
            site.done("START")
            mounted.fill()  # type: ignore[attr-defined]
            site.ask(operation)
            mounted.heal()  # type: ignore[attr-defined]
            if operation != "STOP":
                stop(site)
            site.vm = ""
        answered = site.start()
        stop(site)
    site.answered = answered


def no_inodes(site: Site) -> None:
    with small(site, "nr_inodes=40"):
        site.guest()
        site.plant("user.yaml", b"#cloud-config\n")
        with contextlib.suppress(OSError):
            for number in range(100):
                site.plant(f"filler.{number}")
        held = site.start(USER_DATA)
        stop(site)
    site.answered = held


def killed_during_start(site: Site) -> None:
    site.guest()
    for _ in range(4):
        request = site.ask_start()
        end = time.monotonic() + 10
        while not request.result and time.monotonic() < end:
            # As any process of that user's: itself it spares.
            site.as_user("/bin/sh", "-c", "kill -KILL -1 2>/dev/null", check=False)
            site.daemon.take(0.02)
        site.started(request)
        stop(site)


def sources_of_drives(site: Site) -> None:
    site.guest()
    os.mkfifo(site.path("fifo"))
    site.link("link", CANARIES / "root")
    site.path("directory").mkdir()
    site.link("loop", "loop")
    site.plant("huge").open("r+b").truncate(1 << 40)
    site.plant("closed", b"x", 0)
    for path in ("fifo", "directory"):
        site.own(site.path(path))
    names = ["fifo", "link", "directory", "loop", "huge", "closed", "/proc/self/mem", "../../../canary/root", "missing"]
    assert 2 * len(names) == site.attack.times
    for name in names:
        for option in ("User_Data", "Data_Files"):
            site.start(f'VMPARAM_vm_{option} = "{name}"')
            stop(site)


def many_files(site: Site) -> None:
    site.guest()
    inner = site.path("deep")
    for _ in range(500):
        inner.mkdir()
        site.own(inner)
        inner = inner / "d"
    for number in range(20_000):
        os.close(os.open(site.path(f"file.{number}"), os.O_CREAT, 0o644))
        os.chown(site.path(f"file.{number}"), os.stat(site.directory).st_uid, os.stat(site.directory).st_gid)
    site.start()
