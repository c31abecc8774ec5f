"""A guest runs the job's program: what it prints, its end and its outputs reach the job's owner."""

from pathlib import Path

import pytest

from tests.drivers.libvirt.support import WANTS, Job, done, moved, run_to_its_end, running, until
from tests.lab import linux_guest

pytestmark = pytest.mark.libvirt


@pytest.fixture(scope="session")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if reason := linux_guest.why_no_disk():
        pytest.skip(reason)
    return linux_guest.make_ready_disk(tmp_path_factory.mktemp("image") / "run.img")


@pytest.fixture
def disk(job: Job, image: Path) -> Job:
    (job.scratch / "run.img").write_bytes(image.read_bytes())
    (job.scratch / "in.txt").write_text("of the job\n")
    job.own()
    return job


def asks(command: str, *more: str) -> tuple[str, ...]:
    """What the ad of such a job has."""
    return (
        "JobVMMemory = 192", 'VMPARAM_vm_Disk = "run.img:vda:w:raw"', 'TransferInput = "run.img,in.txt"',
        'TransferOutput = "vm_outputs/"', f'VMPARAM_vm_Run = "{command}"', 'VMPARAM_vm_Run_Boot = "ready"', *more,
    )  # fmt: skip


def to_its_end(job: Job, status: int, *more: str, **settings: object) -> dict[str, object]:
    """Run the job, whose server ends with `status`: the exit file."""
    with running(job, *more, **settings) as peer:
        found = run_to_its_end(peer, job)
        peer.quit(status=status)
    return found


def test_a_program_runs_and_its_outputs_come_home(disk: Job) -> None:
    found = to_its_end(disk, 7, *asks("cat in.txt; echo oops >&2; mkdir results; echo 1 >results/a; exit 7"))
    assert (found["exit_code"], found["source"], found["ended_by"]) == (7, "program", "powered off")
    assert (disk.scratch / "vm_stdout").read_text() == "of the job\n"
    assert (disk.scratch / "vm_stderr").read_text() == "oops\n"
    outputs = disk.scratch / "vm_outputs"
    assert (outputs / "results" / "a").read_text() == "1\n"
    assert sorted(path.name for path in outputs.iterdir() if not path.name.startswith("vm_")) == ["results"]
    assert not {"vm_outputs.tar", "vm_run_state.txt", "vm_run.tar"} & {path.name for path in disk.scratch.iterdir()}
    assert {path.stat().st_uid for path in outputs.rglob("*")} == {disk.scratch.stat().st_uid}


def test_a_program_that_is_killed_ends_the_server_by_its_signal(disk: Job) -> None:
    found = to_its_end(disk, -9, *asks("kill -9 $$"))
    assert (found["exit_code"], found["signal"], found["reason"]) == (None, 9, None)


def printed(job: Job) -> str:
    path = job.scratch / "vm_stdout"
    return path.read_text() if path.exists() else ""


COUNTS = "for i in $(seq 8); do echo $i; sleep 1; done; echo all >counted"
COUNTED = "".join(f"{number}\n" for number in range(1, 9))


def test_a_program_goes_on_after_a_suspend_and_a_checkpoint_elsewhere(disk: Job, elsewhere: Path) -> None:
    with running(disk, *asks(COUNTS, WANTS)) as peer:
        until(lambda: "2\n" in printed(disk), "the program counts to two")
        done(peer, "SUSPEND", "RESUME")
        until(lambda: "4\n" in printed(disk), "the program counts to four")
        done(peer, "CHECKPOINT", "STOP")
    for path in (disk.scratch / "vm_outputs").iterdir():
        path.unlink()
    (disk.scratch / "vm_outputs").rmdir()
    moved(disk, elsewhere)
    found = to_its_end(disk, 0, *asks(COUNTS, WANTS))
    assert printed(disk) == COUNTED
    assert (found["exit_code"], found["source"], found["reason"]) == (0, "program", None)
    assert (disk.scratch / "vm_outputs" / "counted").read_text() == "all\n"


def test_a_guest_that_does_not_begin_the_program_is_ended(disk: Job) -> None:
    """The guest of the counting disk has no agent."""
    found = to_its_end(
        disk, 1, *asks("true", 'VMPARAM_vm_Disk = "guest.img:hda:w:raw"', "VMPARAM_vm_Run_Boot_Timeout = 2")
    )
    assert found["ended_by"] == "guest not ready"
    assert str(found["reason"]).startswith("the guest has not begun the program within 2 s")


def test_a_guest_that_powers_off_before_its_program_has_ended_says_so(disk: Job) -> None:
    found = to_its_end(disk, 1, *asks("poweroff -f", "VMPARAM_vm_Run_As_Root = true"))
    assert (found["ended_by"], found["exit_code"]) == ("powered off", None)
    assert str(found["reason"]).startswith("the guest powered off, or rebooted, before the program had ended")
