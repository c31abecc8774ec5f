"""What a VM's disks may occupy: what the job has asked for, and never the last of EXECUTE."""

import os
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import libvirt
import pytest

from tests import jobs
from tests.domain import support as domain
from tests.drivers.libvirt.support import Job, done, mounted, refused, run_to_its_end, running, until
from tests.lab import guest
from vmgahp import errors
from vmgahp.config import Settings
from vmgahp.drivers.libvirt.driver import LibvirtDriver
from vmgahp.drivers.libvirt.life.pauses import AGAIN, LONGEST, SHORTEST, DiskLimits, IoErrors
from vmgahp.drivers.libvirt.link.connection import Watch
from vmgahp.drivers.libvirt.program import drive
from vmgahp.drivers.libvirt.program import monitor as program
from vmgahp.drivers.libvirt.start import disks
from vmgahp.drivers.libvirt.start.disks import occupied
from vmgahp.drivers.resources import Resources
from vmgahp.host.job_user import Identity
from vmgahp.host.serial_capture import CHUNK, ConsoleCapture
from vmgahp.images import iso
from vmgahp.images.leases import OpenImage
from vmgahp.job.exit_code import DISK_LIMIT
from vmgahp.job.vm_spec import Slot

MIB = 1 << 20
FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND


class Machine:
    """One that runs, with one disk; it stands in for its guest, too."""

    def __init__(self, disk: Path) -> None:
        self.disk = disk
        self.name = "vm"
        self.said: list[str] = []
        self.log = self.said.append
        self.did: list[str] = []
        self.resources = Resources(self.log)
        self.watch = Watch("vm")
        self.guest: object = self
        self.io_errors = IoErrors(self, self.give_up, self.log)  # type: ignore[arg-type]
        self.io_errors.at_first = self.screenshot
        self.fails: set[str] = set()

    def operate(self, doing: str, _function: object) -> None:
        self._do(doing)

    def screenshot(self) -> None:
        self._do("screenshot")

    def give_up(self, how: str, why: str) -> None:
        self._do(f"{how}: {why}")

    def _do(self, what: str) -> None:
        self.did.append(what)
        if what.split(":")[0] in self.fails:
            raise errors.HypervisorFault(f"{what} fails.")


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    disk = tmp_path / "disk.raw"
    disk.write_bytes(b"")
    os.truncate(disk, 1 << 40)
    made = Machine(disk)
    yield made
    made.io_errors.end()


@pytest.fixture
def limits(machine: Machine) -> Iterator[Callable[..., DiskLimits]]:
    opened: list[int] = []

    def limits_of(asked: int = 0, kept_free: int = 0) -> DiskLimits:
        opened.append(os.open(machine.disk, os.O_RDWR))
        return DiskLimits(machine.io_errors, opened[-1:], asked, kept_free, machine.log)

    yield limits_of
    for each in opened:
        os.close(each)


def write(disk: Path, mib: int, at: int = 0) -> None:
    with open(disk, "r+b") as file:
        file.seek(at * MIB)
        for _ in range(mib):
            file.write(os.urandom(MIB))
        file.flush()
        os.fsync(file.fileno())


def test_a_hole_is_nobodys_room(machine: Machine, limits: Callable[..., DiskLimits]) -> None:
    watch = limits(4 * MIB)
    assert watch.look() == SHORTEST
    write(machine.disk, 4, at=1000)
    watch.look()
    assert machine.did == []
    os.truncate(machine.disk, 0)
    write(machine.disk, 4)
    watch.look()
    assert machine.did == [], "what the guest has discarded is free again"


def test_a_guest_that_has_powered_off_before_it_is_paused_is_no_failure(machine, limits):
    watch = limits(MIB)
    write(machine.disk, 4)
    machine.fails = {"pausing"}
    machine.watch.gone.set()
    assert watch.look() == AGAIN
    assert machine.did == ["pausing"]


@pytest.mark.parametrize("what", ["pausing", DISK_LIMIT])
def test_what_fails_is_retried_without_waiting(machine: Machine, limits: Callable[..., DiskLimits], what: str) -> None:
    watch = limits(MIB)
    write(machine.disk, 4)
    machine.fails = {what}
    assert watch.look() == AGAIN
    assert machine.did[-1].startswith(DISK_LIMIT)
    assert watch._over.is_set() == (what == "pausing")
    machine.fails.clear()
    watch.look()
    assert watch._over.is_set()


def test_one_that_is_held_is_looked_at_again_when_it_runs(machine: Machine, limits: Callable[..., DiskLimits]) -> None:
    watch = limits(MIB)
    with machine.io_errors.held():  # such as for a save
        write(machine.disk, 4)
        assert watch.look() == AGAIN
        assert machine.did == []
    machine.io_errors.let_go()
    watch.look()
    assert machine.did[-1].startswith(DISK_LIMIT)


def test_the_less_room_there_is_the_sooner_comes_the_next_look(limits: Callable[..., DiskLimits]) -> None:
    assert limits(1 << 40).look() == LONGEST
    assert SHORTEST < limits(8 << 30).look() < LONGEST
    assert limits(MIB).look() == SHORTEST
    assert limits().look() == LONGEST


def test_a_file_that_is_two_disks_is_there_once(machine: Machine, tmp_path: Path) -> None:
    write(machine.disk, 2)
    link = tmp_path / "link"
    os.link(machine.disk, link)
    files = [os.open(each, os.O_RDONLY) for each in (machine.disk, link, machine.disk)]
    try:
        assert 2 * MIB <= occupied(files) < 3 * MIB
    finally:
        for each in files:
            os.close(each)


@pytest.mark.parametrize("kept", [0, 1 << 62])
def test_what_a_program_prints_takes_no_more_than_the_disks_have_left(
    machine: Machine, tmp_path: Path, kept: int
) -> None:
    """Three ports that a guest floods: they are cut, and only a disk that grows beyond it ends the VM."""
    ports = [ConsoleCapture(f"{tmp_path}/{name}", partial(os.open, tmp_path / f"{name}.txt", FLAGS), 4 * MIB, print)
             for name in "abc"]  # fmt: skip
    write(machine.disk, 1)
    files = [os.open(machine.disk, os.O_RDWR), *(port.file() for port in ports)]
    watch = DiskLimits(machine.io_errors, files, 6 * MIB, kept, machine.log)
    for port in ports:
        port.left = watch.left
        with socket.socket(socket.AF_UNIX) as guest:
            guest.connect(port.path)
            guest.sendall(b"x" * 4 * MIB)
    for port in ports:
        port.close()
    took = occupied(files)
    assert took < (6 * MIB + len(ports) * CHUNK if not kept else 2 * MIB)
    assert [port.is_cut for port in ports] == ([False, True, True] if not kept else [True] * 3)
    if not kept:
        assert watch.look() == SHORTEST
        assert machine.did == []
    for file in files:
        os.close(file)
    assert watch.left() == 0


# What is granted


def test_what_is_kept_free_is_reserved_disk_or_a_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def of(total: int, **settings: str) -> int:
        found = SimpleNamespace(f_blocks=total >> 12, f_frsize=4096, f_bavail=0, f_favail=0, f_files=0)
        monkeypatch.setattr(disks.os, "statvfs", lambda _: found)
        return disks.kept_free(Settings(settings), str(tmp_path), Identity(0, 0))

    assert of(1 << 40) == 64 * MIB
    assert of(1 << 30) == 16 * MIB
    assert of(1 << 40, RESERVED_DISK="1000") == 1000 * MIB
    assert of(1 << 40, EXECUTE="/nowhere") == 0


class Started(Machine):
    """One whose disk is `image`."""

    def __init__(self, disk: Path, image: OpenImage, cannot_save: str = "") -> None:
        super().__init__(disk)
        self.guest = SimpleNamespace(files=self)
        self.in_scratch = lambda: {"disk0": image}
        self.saver = SimpleNamespace(cannot=cannot_save)


def spec_of(directory: Path, asked_mib: int) -> SimpleNamespace:
    slot = Slot(disk_kib=asked_mib << 10, disk_is_asked=True)
    devices = SimpleNamespace(run=SimpleNamespace(stdout="out", stderr="err"), shares=())
    vm = SimpleNamespace(slot=slot, working_dir=str(directory), memory_mib=64)
    return SimpleNamespace(vm=vm, devices=devices)


def watch(machine: Started, spec: SimpleNamespace, reserved: str = "0") -> None:
    driver = SimpleNamespace(settings=Settings({"RESERVED_DISK": reserved}), log=machine.log, identity=Identity(0, 0))
    LibvirtDriver._watch_disks(driver, machine, spec)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("asked", "cannot", "said"),
    [
        (20, "", "its disks may come to 32 MiB, and it ends where they occupy more than the 20 MiB"),
        (50, "", "its disks and its memory, where that is saved, may come to 96 MiB, and the job has asked for 50 MiB"),
        (50, "it has a share", ""),
        (200, "", ""),
    ],
)
def test_what_a_vm_may_take_is_said_at_once(tmp_path: Path, user: Identity, asked: int, cannot: str, said: str) -> None:
    disk = tmp_path / "disk.raw"
    with open(disk, "w+b") as file:
        file.truncate(32 * MIB)
        machine = Started(disk, OpenImage(str(disk), "raw", file.fileno()), cannot)
        watch(machine, spec_of(tmp_path, asked))
    assert len(machine.resources.while_running) == 1
    assert [said in line for line in machine.said] == [True] * bool(said)


def test_outputs_that_were_unpacked_leave_less_to_the_disks(tmp_path: Path, user: Identity) -> None:
    disk = tmp_path / "disk.raw"
    disk.write_bytes(b"x" * 4 * MIB)
    with open(disk, "r+b") as file:
        machine = Started(disk, OpenImage(str(disk), "raw", file.fileno()))
        machine.files = lambda: {"disk0": file.fileno()}  # type: ignore[attr-defined]
        watch(machine, spec_of(tmp_path, 5))
        machine.resources.unpacked = 3 * MIB
        [begin] = machine.resources.while_running
        begin()
        until(lambda: len(machine.did) == 3, "the VM is ended")
    assert machine.did[-1].startswith(f"{DISK_LIMIT}: the disks and outputs of the VM occupy 7 MiB")


@pytest.mark.parametrize(("setting", "did"), [("", ["pausing"]), ("VM_SHARE_DIR_data", [])])
def test_a_guest_that_shares_its_jobs_directory_waits_though_its_disks_do_not_grow(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str, did: list[str]
) -> None:
    watches: list[DiskLimits] = []
    with open(machine.disk, "r+b") as file:
        started = Started(machine.disk, OpenImage(str(machine.disk), "raw", file.fileno()))
        started.files, started.io_errors = lambda: {"disk0": file.fileno()}, machine.io_errors  # type: ignore[attr-defined]
        spec = spec_of(tmp_path, 0)
        spec.devices.shares = [SimpleNamespace(setting=setting)]
        monkeypatch.setattr("vmgahp.drivers.libvirt.driver.start_thread", lambda _, run: watches.append(run.__self__))
        watch(started, spec, reserved=str(1 << 40))
        started.resources.while_running[0]()
    [limits] = watches
    limits.look()
    assert machine.did[:1] == did
    limits.end()
    limits.run()  # closes its files


def test_outputs_that_came_with_a_checkpoint_have_their_limit(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    user = jobs.owner(scratch)
    monkeypatch.setattr(program.job_user, "free_bytes", lambda *_: 3 * MIB)
    monkeypatch.setattr(disks, "kept_free", lambda *_: MIB)
    spec = spec_of(scratch, 0)
    assert program.most_outputs(spec, Settings(), user) == 2 * MIB  # type: ignore[arg-type]
    (scratch / "vm_outputs.tar").write_bytes(b"x" * 4 * MIB)
    jobs.own(scratch, scratch / "vm_outputs.tar")
    assert 6 * MIB <= program.most_outputs(spec, Settings(), user) < 7 * MIB  # type: ignore[arg-type]


@pytest.mark.parametrize(("asked", "occupied_mib", "most"), [(0, 3, 8), (6, 3, 4), (6, 5, 2), (2, 4, None)])
def test_the_drive_of_a_program_leaves_what_others_keep_and_the_disks_occupy(
    scratch: Path, monkeypatch: pytest.MonkeyPatch, asked: int, occupied_mib: int, most: int | None
) -> None:
    """It is made while old outputs are still there, and replaces that of a server that was killed."""
    for name, mib in {"disk.raw": occupied_mib, "vm_run.tar": 9, "vm_outputs.tar": 9}.items():
        (scratch / name).write_bytes(b"x" * mib * MIB)
    jobs.own(scratch)
    spec = spec_of(scratch, asked)
    spec.disks = [SimpleNamespace(path=str(scratch / name), backing=()) for name in ("disk.raw", "vm_run.tar")]
    monkeypatch.setattr(disks.job_user, "free_bytes", lambda *_: 9 * MIB)
    monkeypatch.setattr(disks, "Provision", lambda *_: SimpleNamespace(make=lambda *_: None, undo=None, made=[]))
    made: list[int] = []

    def make(_spec: object, _run: object, most: int, _identity: object) -> None:
        made.append(most)
        raise errors.JobFault(errors.MISMATCHED, "It ends here.", "none.")

    monkeypatch.setattr(drive, "make", make)
    driver = SimpleNamespace(settings=Settings({"RESERVED_DISK": "1"}), identity=jobs.owner(scratch), log=print)
    plan = SimpleNamespace(spec=spec, may_restart=False)
    with pytest.raises(errors.JobFault, match="It ends here" if most else "disks occupy 4 MiB already"):
        LibvirtDriver.prepare(driver, plan, Resources(print))  # type: ignore[arg-type]
    assert [each >> 20 for each in made] == ([most] if most else [])


@pytest.mark.parametrize(("asked", "most"), [(0, 8), (40, 8), (30, 5), (22, None)])
def test_an_image_of_files_leaves_what_others_keep_and_the_disks_occupy(
    scratch: Path, monkeypatch: pytest.MonkeyPatch, asked: int, most: int | None
) -> None:
    """Of files that occupy nothing, since an image has no holes."""
    (scratch / "disk.raw").write_bytes(b"x" * 10 * MIB)
    (scratch / "data").touch()
    os.truncate(scratch / "data", 4 * MIB)
    jobs.own(scratch)
    drive = domain.disk(str(scratch / "vm_data_files.iso"), kind="cdrom", files=("data",))
    slot = Slot(disk_kib=asked << 10, disk_is_asked=asked > 0)
    spec = domain.spec(working_dir=str(scratch), slot=slot, disks=(domain.disk(str(scratch / "disk.raw")), drive))
    monkeypatch.setattr(disks.job_user, "free_bytes", lambda *_: iso.OVERHEAD + 9 * MIB)
    written: list[int] = []
    monkeypatch.setattr(disks.iso, "write", lambda *_, most_bytes: written.append(most_bytes >> 20))
    provision = disks.Provision(str(scratch), Settings({"RESERVED_DISK": "1"}), jobs.owner(scratch))
    with pytest.raises(errors.JobFault, match="may take 20 MiB, and 13 MiB are left") if not most else nullcontext():
        provision.make(spec)
    assert written == ([most] if most else [])


def test_a_file_system_of_the_jobs_own_that_fails_is_no_fault_of_the_machines(tmp_path: Path, user: Identity) -> None:
    file = os.open(tmp_path, os.O_RDONLY)
    os.close(file)  # such as one that lets root in nowhere
    machine = Started(tmp_path, OpenImage("disk.qcow2", "qcow2", file))
    disks.require_space(spec_of(tmp_path, 1), machine, Settings())  # type: ignore[arg-type]
    watch(machine, spec_of(tmp_path, 1))
    assert machine.said == []


# Real guests


def growing(job: Job, mib: int) -> None:
    """Have the job's guest write that much."""
    with open(job.disk, "wb") as disk:
        disk.write(guest.growing_sector(mib))
        disk.truncate(1 << 30)
    job.own(job.disk)


@pytest.mark.libvirt
def test_a_vm_that_passes_what_its_job_asks_for_ends(job: Job) -> None:
    growing(job, 12)
    with running(job, "RequestDisk = 4096", "DiskUsage = 1000") as peer:
        found = run_to_its_end(peer, job)
        assert found["ended_by"] == DISK_LIMIT
        assert "and request_disk is 4 MiB: raise it" in str(found["reason"])
        log = peer.quit(status=1)
    assert str(found["reason"]) in log
    assert "its disks may come to 1024 MiB, and it ends where they occupy more than the 4 MiB" in log
    assert job.disk.stat().st_blocks << 9 > 4 * MIB, "what it has written comes home"


@pytest.mark.libvirt
@pytest.mark.parametrize(
    ("lines", "is_limited", "is_elsewhere"),
    [
        pytest.param([], True, False, id="no request"),
        pytest.param(["RequestDisk = 70000"], True, False, id="a large request"),
        pytest.param(["RequestDisk = 4096"], False, False, id="no limits"),
        pytest.param(["RequestDisk = 4096"], True, True, id="a disk elsewhere, which is not the slot's"),
    ],
)
def test_any_other_writes_what_it_wants(job: Job, lines: list[str], is_limited: bool, is_elsewhere: bool) -> None:
    growing(job, 12)
    if is_elsewhere:
        other = job.disk.rename(job.scratch.parent / "elsewhere.img")
        lines = [*lines, f'VMPARAM_vm_Disk = "{other}:hda:w:raw"']
    with running(job, *lines, VM_DISK_LIMIT=is_limited) as peer:
        until(lambda: guest.DONE in job.console(), "it has written all")
        assert peer.run("STATUS", 1)[1] == "STATUS=Running"
        done(peer, "STOP")
        peer.quit()


@pytest.mark.libvirt
def test_disks_that_are_too_large_already_are_refused_with_both_numbers(job: Job) -> None:
    write(job.disk, 4)
    said = refused(job, errors.MISMATCHED, "RequestDisk = 2048")
    assert "disks occupy 4 MiB already, and the job has asked for 2 MiB (RequestDisk)" in said
    assert "request_disk = 5MB" in said


@pytest.fixture
def small(job: Job) -> Iterator[Path]:
    """An EXECUTE of 64 MiB with the job's scratch directory in it, and 24 MiB that somebody else has."""
    with mounted(job.scratch.parent / "execute", "size=64m,mode=755") as execute:
        scratch = execute / "dir_1"
        scratch.mkdir()
        jobs.own(job.scratch, scratch)
        shutil.move(job.disk, scratch)
        job.scratch, job.disk = scratch, scratch / job.disk.name
        (execute / "ballast").touch()
        write(execute / "ballast", 24)
        yield execute


@pytest.mark.libvirt
def test_the_last_of_execute_is_left_alone_and_the_guest_waits(job: Job, small: Path) -> None:
    growing(job, 12)
    with running(job, RESERVED_DISK=32, EXECUTE=small) as peer:

        def is_paused() -> bool:
            domain = job.domain()
            return domain is not None and domain.state()[0] == libvirt.VIR_DOMAIN_PAUSED

        until(is_paused, "it waits")
        assert peer.run("STATUS", 1)[1] == "STATUS=Running", "HTCondor has suspended nothing"
        (small / "ballast").unlink()
        until(lambda: not is_paused() and guest.DONE in job.console(), "it goes on")
        assert peer.run("STATUS", 1)[1] == "STATUS=Running"
        done(peer, "STOP")
        log = peer.quit()
    assert "paused by a file system of which the last 32 MiB are kept free" in log
    assert job.exit_file()["reason"] is None


@pytest.mark.libvirt
def test_a_guest_for_which_no_room_comes_ends_as_with_a_full_disk(job: Job, small: Path) -> None:
    growing(job, 12)
    with running(job, RESERVED_DISK=32, EXECUTE=small, VM_IO_ERROR_TIMEOUT=2) as peer:
        found = run_to_its_end(peer, job)
        peer.quit(status=1)
    assert found["ended_by"] == "disk error"
    assert found["reason"] == (
        "a file system of which the last 32 MiB are kept free has kept the guest from running for 2 s"
    )
