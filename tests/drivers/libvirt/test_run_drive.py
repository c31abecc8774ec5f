"""The drive with the program of a job, and what is written down of its inputs."""

import json
import os
import tarfile
from pathlib import Path

import pytest

from tests.drivers.libvirt.support import CHECKPOINT, WANTS, Job, done, moved, run_to_its_end, running, until
from tests.job import support
from tests.jobs import own, owner
from tests.lab.guest import copying_sector, counts, make_guest
from vmgahp.config import Settings
from vmgahp.drivers.libvirt.program import drive
from vmgahp.drivers.libvirt.start.disks import Provision, files_made
from vmgahp.errors import JobFault
from vmgahp.job.spec import JobSpec

MACHINE = Settings({"VM_MEMORY": "1024"})


class Scratch:
    """A job with a program, in a scratch directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.user = owner(path)
        self.options = {"Run": '"sh go.sh"', "Run_Boot": '"ready"'}
        self.put("disk.img")
        self.put("go.sh", "echo 17\n")

    def put(self, name: str, content: str = "") -> None:
        path = self.path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
        own(self.path, path.parent, path)

    def spec(self, **changes: str) -> JobSpec:
        options = {f"VMPARAM_vm_{name}": text for name, text in self.options.items()}
        return support.found(MACHINE, self.user, VM_WORKING_DIR=f'"{self.path}"', QDate="5", **(options | changes))

    def make(self, most: int = 1 << 30, **changes: str) -> Provision:
        made, spec = Provision(str(self.path), MACHINE, self.user), self.spec(**changes)
        made.make(spec)
        made.made += drive.make(spec, spec.devices.run, most, self.user)  # type: ignore[arg-type]
        return made

    def drive(self) -> dict[str, str]:
        with tarfile.open(self.path / "vm_run.tar") as archive:
            found = {each.name: archive.extractfile(each) for each in archive.getmembers()}
            return {name: file.read().decode() if file else "" for name, file in found.items()}

    def inputs(self) -> list[str]:
        return [name.removeprefix("inputs/") for name in self.drive() if name.startswith("inputs/")]

    @property
    def record(self) -> dict[str, object]:
        return dict(json.loads((self.path / "vm_run.json").read_text()))


@pytest.fixture
def place(scratch: Path) -> Scratch:
    return Scratch(scratch)


def test_what_the_guest_is_told(place: Scratch) -> None:
    place.make(
        VMPARAM_vm_Run="\"echo 'it's' $HOME\"",
        VMPARAM_vm_Run_As_Root="true",
        VMPARAM_vm_Run_Time_Limit="60",
        VMPARAM_vm_Run_Outputs='"a b, *.csv"',
        Environment="\"B=x' 'y A=it''''s\"",
    )
    found = place.drive()
    assert found["vmgahp-run/version"] == "1\n"
    assert found["vmgahp-run/run"].startswith("#!/bin/sh\n")
    assert found["vmgahp-run/settings"].split() == [
        "RUN_AS_ROOT=1", "RUN_BOOT=ready", "RUN_TIME_LIMIT=60", "RUN_OUTPUTS_SET=1",
        "RUN_WAITS=0", "RUN_HOST_NAME=alice-example-org-17-0", "RUN_NICS=0",
    ]  # fmt: skip
    assert found["vmgahp-run/command"] == "echo 'it's' $HOME\n"
    assert found["vmgahp-run/outputs"] == "a b\n*.csv\n"
    assert found["vmgahp-run/environment"] == "export A='it'\"'\"'s'\nexport B='x y'\n"


def test_without_a_word_all_that_came_with_the_job_is_an_input(place: Scratch) -> None:
    place.put("data/x", "1")
    place.make()
    assert place.inputs() == ["data", "data/x", "go.sh"]
    assert "\nRUN_TIME_LIMIT=''\nRUN_OUTPUTS_SET=0\n" in place.drive()["vmgahp-run/settings"]
    assert place.record == {"format": 1, "job": "alice_example.org_17.0", "names": ["data", "go.sh"]}
    assert files_made(place.spec()) == ["vm_run.tar"]


def test_a_restart_has_the_very_drive(place: Scratch) -> None:
    place.make()
    first = (place.path / "vm_run.tar").read_bytes()
    place.put("came-up-since")
    place.put("vm_console.log")
    place.make()
    assert (place.path / "vm_run.tar").read_bytes() == first


def test_what_another_job_has_written_down_says_nothing(place: Scratch) -> None:
    place.make()
    place.put("more")
    place.make(ProcId="1")
    assert place.inputs() == ["go.sh", "more"]
    assert place.record["job"] == "alice_example.org_17.1"


def test_an_input_that_is_gone_at_a_restart(place: Scratch) -> None:
    place.make()
    (place.path / "go.sh").unlink()
    with pytest.raises(JobFault, match=r"VMPARAM_vm_Run: the inputs cannot be packed \(tar: go.sh: "):
        place.make()


@pytest.mark.parametrize(
    "record",
    [
        "", '{"format": 2, "job": "a", "names": []}', '{"format": 1, "job": "a", "names": ["../x"]}',
        r'{"format": 1, "job": "a", "names": ["\ud800"]}',
    ],
)  # fmt: skip
def test_a_record_that_is_none(place: Scratch, record: str) -> None:
    place.put("vm_run.json", record)
    with pytest.raises(JobFault, match=r"vm_run\.json") as caught:
        place.make()
    assert "vm_run.json" in caught.value.hint


def test_named_inputs_are_named_and_not_written_down(place: Scratch) -> None:
    place.put("more")
    place.make(VMPARAM_vm_Run_Inputs='"more"')
    assert place.inputs() == ["more"]
    assert not (place.path / "vm_run.json").exists()
    with pytest.raises(JobFault, match=r"VMPARAM_vm_Run_Inputs: .*nothing"):
        place.make(VMPARAM_vm_Run_Inputs='"nothing"')


def test_the_vms_disks_and_what_cloud_init_is_told_are_no_inputs(place: Scratch) -> None:
    place.put("seed", "#cloud-config\n")
    place.make(VMPARAM_vm_User_Data='"seed"')
    assert place.inputs() == ["go.sh"]


@pytest.mark.parametrize(("attribute", "name"), [("Out", "disk.img"), ("Err", "seed")])
def test_what_the_program_prints_replaces_nothing_of_the_vms(place: Scratch, attribute: str, name: str) -> None:
    place.put("seed", "#cloud-config\n")
    with pytest.raises(JobFault, match=f"VMPARAM_vm_Run: .*'{name}'"):
        place.make(VMPARAM_vm_User_Data='"seed"', **{attribute: f'"{name}"'})
    assert not (place.path / "vm_run.tar").exists()


def test_inputs_take_no_more_than_the_job_may_have_on_disk(place: Scratch) -> None:
    """A file of holes takes nothing, and a drive of it all."""
    with (place.path / "holes").open("wb") as file:
        file.truncate(1 << 32)
    own(place.path)
    with pytest.raises(JobFault, match="more than the 8 MiB that are left"):
        place.make(8 << 20)
    assert sorted(os.listdir(place.path)) == ["disk.img", "go.sh", "holes"]


def test_a_link_where_the_drive_is_to_be(place: Scratch, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("untouched")
    for name in ("vm_run.tar", "vm_run.json", f".vm_run.tar.{os.getpid()}.tmp"):
        (place.path / name).symlink_to(outside)
    (place.path / "vm_run.json").unlink()
    place.make()
    assert outside.read_text() == "untouched"
    assert place.inputs() == ["go.sh"]


def test_a_start_that_fails_leaves_nothing(place: Scratch) -> None:
    place.make().undo()
    assert sorted(os.listdir(place.path)) == ["disk.img", "go.sh"]


def test_the_drive_has_its_disk_before_that_of_cloud_init(place: Scratch) -> None:
    place.options.pop("Run_Boot")
    disks = place.spec().disks
    assert [(os.path.basename(disk.path), disk.device, disk.writable) for disk in disks] == [
        ("disk.img", "vda", True),
        ("vm_run.tar", "vdb", False),
        ("vm_cidata.iso", "vdc", False),
    ]


RUN = ('VMPARAM_vm_Run = "sh go.sh"', 'VMPARAM_vm_Run_Boot = "ready"')


@pytest.mark.libvirt
def test_a_guest_knows_the_drive_by_its_first_bytes(job: Job) -> None:
    """It is the disk behind the job's own, on the same bus; this guest prints the first sector of it."""
    job.disk.write_bytes(copying_sector(0x81, 0, 0x80).ljust(1 << 20, b"\0"))
    with running(job, *RUN, 'VMPARAM_vm_Disk = "guest.img:vda:w:raw"') as peer:
        run_to_its_end(peer, job)
        peer.quit(status=1)  # as ever where a guest ends of which no program was heard
    assert "vmgahp-run/version" in job.console()
    assert not {"vm_run.tar", "vm_run.json"} & set(os.listdir(job.scratch))


@pytest.mark.libvirt
def test_a_checkpoint_goes_on_with_the_drive_made_anew(job: Job, elsewhere: Path) -> None:
    """On another machine, where files have come up that were no inputs; these are inputs of no restart."""
    make_guest(job.disk, seconds=5)
    job.put("go.sh", "true\n")
    with running(job, WANTS, *RUN) as peer:
        until(lambda: "2\n" in job.console(), "the guest counts to two")
        done(peer, "CHECKPOINT", "STOP")
    left = set(os.listdir(job.scratch))
    assert left >= {*CHECKPOINT, "vm_run.json", "go.sh"}
    assert "vm_run.tar" not in left
    moved(job, elsewhere)
    job.put("came-up-since", "x" * (3 << 20))
    with running(job, WANTS, *RUN) as peer:
        run_to_its_end(peer, job)
        peer.quit(status=1)  # as ever where a guest ends of which no program was heard
    assert job.console().count("vmgahp guest up") == 1, "it was not booted again"
    assert counts(job.console()) == [1, 2, 3, 4, 5]
