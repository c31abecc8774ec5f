"""Faults that need more than a point: each a story that was once a loss."""

import signal
import time
from collections.abc import Callable
from contextlib import suppress

from tests import jobs
from tests.faults.host import PATIENCE, until
from tests.faults.story import CONSOLE, ERROR, SUSPEND_IMAGE, TICKS, Story
from tests.lab.guest import make_guest, read_count
from vmgahp import errors, lifecycle

WHOLE = b"LibvirtQemudSave"
"""How a memory image begins once libvirt has written all of it."""

Row = Callable[[Story], bool]


def libvirtd_ends_when_the_image_is_whole(fault: str, operation: str) -> Row:
    """libvirtd has written the memory image, and dies before it says so."""

    def play(story: Story) -> bool:
        story.begin_for(operation)
        seen: list[bool] = []
        story.act(operation, "", fault, lambda: seen.append(_sees_the_image(story)))
        story.comes_back_or_stays()
        story.finish()
        story.next_start()
        return seen == [True]

    return play


def _sees_the_image(story: Story) -> bool:
    """Wait until the memory image is whole; False where it had its name already when it was looked at next."""

    def is_whole() -> bool:
        for path in story.directory.glob(".vm_*.mem.part"):
            with suppress(FileNotFoundError), open(path, "rb") as image:
                return image.read(len(WHOLE)) == WHOLE
        return False

    seen: list[bool] = []

    def look() -> bool:
        seen.append(is_whole())
        return seen[-1] or any(story.directory.glob("vm_*.mem"))

    assert until(look, PATIENCE, pause=0.0002), "no image is written"
    return seen[-1]


def killed_during_resume(point: str) -> Row:
    """The daemon is killed while a checkpointed guest comes back, which counts on where it can: nobody is held."""

    def play(story: Story) -> bool:
        story.begin_for("RESUME of a checkpointed VM")
        saved = story.count()
        tried = story.act("RESUME", point, "daemon: SIGKILL", lambda: until(lambda: story.count() > saved + 1, 1.0))
        story.next_start()
        return tried

    return play


def libvirtd_dies_by_itself(story: Story) -> bool:
    """Nobody has ended libvirtd, and systemd starts it again: the guest runs on."""
    story.begin_for("SUSPEND")
    story.host.signal_libvirtd(signal.SIGSEGV)
    if story.judge_status() != lifecycle.RUNNING:
        story.lose("the guest is not told as running")
    story.done("SUSPEND")
    story.comes_back_or_stays()
    story.finish()
    story.next_start()
    return True


def second_start_of_a_live_job(story: Story) -> bool:
    """Two jobs of one name, from two schedds: the second START leaves the first's guest alone."""
    other = Story(story.host, 999)
    try:
        story.begin_for("STATUS")
        before = story.guests()
        other.begin()
        request = other.ask_start()
        other.daemon.answer(request)
        other.granted(request)
        story.lost += other.lost
        if not set(before) <= set(story.guests()):
            story.lose("the second START has destroyed the first one's guest")
        elif story.judge_status() != lifecycle.RUNNING:
            story.lose("the first one no longer runs")
        other.daemon.send_quietly("QUIT")
        other.daemon.exit_status(PATIENCE)
        if not set(before) <= set(story.guests()):
            story.lose("the second daemon's end has destroyed the first one's guest")
        story.finish()
    finally:
        if other.daemon is not None:
            other.daemon.discard()
        other.scratch.close()
    return True


def read_only_start(story: Story) -> bool:
    """The scratch file system is read-only while a job starts: the job is not held."""
    story.begin()
    story.act("START", "", "")
    story.finish()
    story.scratch.make_read_only()
    story.begin()
    request = story.ask_start()
    story.daemon.answer(request)
    if story.granted(request):
        story.lose("it starts on a read-only disk")
    story.scratch.heal()
    story.finish()
    story.next_start()
    return True


def stop_of_a_hung_guest(story: Story) -> bool:
    """A QEMU that hangs is destroyed by STOP, and STOP is answered."""
    story.begin_for("STOP")
    assert story.fail("QEMU: SIGSTOP")
    began = time.monotonic()
    story.finish()
    story.told.append(f"it took {time.monotonic() - began:.0f} s")
    if story.guests():
        story.lose("the guest that hung is there")
    story.next_start()
    return True


def leftovers_of_a_killed_daemon(story: Story) -> bool:
    """What a daemon could not remove does not go home with the job."""
    story.begin_for("RESUME of a saved VM")
    story.daemon.process.send_signal(signal.SIGKILL)
    story.judge_end(in_order=False)
    for name in (f".{SUSPEND_IMAGE}.part", ".vm_checkpoint.mem.part"):
        (story.directory / name).write_bytes(b"torn")
    (story.directory / ERROR).write_text(f"{errors.PREFIX}BAD_IMAGE: of an earlier try\n")
    jobs.own(story.directory)
    story.begin()
    story.done("START")
    if left := story.files() & {SUSPEND_IMAGE, f".{SUSPEND_IMAGE}.part", ".vm_checkpoint.mem.part", ERROR}:
        story.lose(f"leftovers of an earlier start: {', '.join(sorted(left))}")
    story.finish()
    return True


def two_in_one_directory(story: Story) -> bool:
    """Two VMs of one daemon in one scratch directory keep out of each other's files, or the second is refused."""
    story.begin_for("SUSPEND")
    first, first_disk, first_name = story.vm, story.disk, story.name
    story.process, story.name, story.disk = 1, "alice_lab_7.1", story.directory / "second.img"
    make_guest(story.disk, seconds=None, ticks=TICKS)
    jobs.own(story.directory)
    request = story.ask_start()
    story.daemon.answer(request)
    if not story.granted(request):  # which is a good answer too
        story.vm, story.disk, story.name = first, first_disk, first_name
        story.finish()
        return True
    second = story.vm
    assert until(lambda: read_count(story.disk) > 2, PATIENCE)
    for vm in (first, second):
        story.vm = vm
        story.done("SUSPEND")
    for vm, disk, name in ((first, first_disk, first_name), (second, story.disk, story.name)):
        story.vm, story.disk, story.name, story.saved_at = vm, disk, name, None
        before = story.count()
        resumed = story.ask("RESUME")
        story.daemon.answer(resumed)
        if not story.granted(resumed):
            story.lose(f"VM {vm} does not continue: another's memory has its place")
        elif not until(lambda before=before: story.count() > before, PATIENCE):  # type: ignore[misc]
            story.lose(f"VM {vm} stands still")
    assert (story.directory / CONSOLE).exists()
    story.finish()
    return True


ROWS: dict[str, Row] = {
    **{
        f"{fault} when the image of a {operation} is whole": libvirtd_ends_when_the_image_is_whole(fault, operation)
        for fault in ("libvirtd: SIGTERM", "libvirtd: SIGKILL")
        for operation in ("SUSPEND", "CHECKPOINT")
    },
    **{
        f"daemon: SIGKILL at {point} during the RESUME of a checkpointed VM": killed_during_resume(point)
        for point in ("restore.made", "restore.set_aside", "restore.runs")
    },
    "libvirtd: SIGSEGV": libvirtd_dies_by_itself,
    "the second START of a live job": second_start_of_a_live_job,
    "a START on a read-only scratch directory": read_only_start,
    "the STOP of a guest that hangs": stop_of_a_hung_guest,
    "leftovers of a killed daemon": leftovers_of_a_killed_daemon,
    "two VMs in one scratch directory": two_in_one_directory,
}
