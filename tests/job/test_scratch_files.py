"""The files of a scratch directory: what goes home with outputs or a checkpoint, and which names are not the job's."""

import importlib.util
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

import vmgahp
from tests.job.support import spec
from tests.jobs import ad, own
from vmgahp.errors import Fault
from vmgahp.host.job_user import Identity
from vmgahp.job import scratch_files
from vmgahp.job.scratch_files import DIRECTORY, FILES, OutputDirectory, is_reserved

PROTECTED = Path("/proc/sys/fs/protected_hardlinks")
Pack = Callable[..., OutputDirectory]
OUTPUTS = {"TransferOutput": '"vm_outputs/"'}


def put(path: Path, text: str = "") -> Path:
    path.write_text(text or path.name)
    own(path.parent, path)
    return path


@pytest.fixture
def pack(scratch: Path, user: Identity) -> Pack:
    """What makes the luggage of the job's scratch directory, and logs to a list of its own."""

    def made(*left: str) -> OutputDirectory:
        return OutputDirectory(str(scratch), left, user, logged.append)

    logged: list[str] = []
    made.logged = logged  # type: ignore[attr-defined]
    return made


def names(scratch: Path) -> list[str]:
    return sorted(os.listdir(scratch / DIRECTORY))


@pytest.mark.parametrize("outputs", ['"vm_outputs/"', '"vm_outputs"', '"results.raw, vm_outputs/"'])
def test_a_job_says_by_its_outputs_what_is_left_behind(outputs: str) -> None:
    brought = '"disk.raw, /home/alice/data, fit.py, http://there/base.iso"'
    disks = '"disk.raw:vda:w:raw, catalog:debian-12:vdb:w"'
    left = scratch_files.left_behind(ad(TransferOutput=outputs, TransferInput=brought, VMPARAM_vm_Disk=disks))
    assert set(left) == {"_condor_stdout", "_condor_stderr", "data", "fit.py", "base.iso", *scratch_files.MADE_ANEW}


def test_a_job_whose_disks_are_not_known_leaves_none_behind() -> None:
    job = ad(**OUTPUTS, TransferInput='"vm.vmx, vm.vmdk"', VMPARAM_vm_Disk=None)
    assert scratch_files.left_behind(job) == (*scratch_files.ON_THEIR_OWN, *scratch_files.MADE_ANEW)


@pytest.mark.parametrize("outputs", [None, '""', '"vm_outputs.tar"', '"results/vm_outputs"'])
def test_other_jobs_are_sent_as_ever(outputs: str | None) -> None:
    assert scratch_files.left_behind(ad(TransferOutput=outputs)) is None
    assert spec(TransferOutput=outputs).vm.sent == (False, None)


def test_the_directory_is_there_from_the_start_and_no_link(scratch: Path, user: Identity, pack: Pack) -> None:
    """HTCondor holds a job that names what is not there."""
    pack()
    assert (scratch / DIRECTORY).stat().st_uid == user.uid
    assert names(scratch) == []
    pack()  # a restart may find it
    (scratch / DIRECTORY).rmdir()
    (scratch / DIRECTORY).symlink_to("/tmp")
    with pytest.raises(Fault):
        pack()


def test_what_the_server_has_written_goes_home_with_the_outputs(scratch: Path, pack: Pack) -> None:
    luggage = pack("fit.py")
    for name in ("vm_exit.json", "vm_console.log", "fit.py", "disk.raw", "vm_checkpoint.mem"):
        put(scratch / name)
    output = put(scratch / DIRECTORY / "vm_console.log", "an output")
    luggage.at_end()
    assert names(scratch) == ["vm_console.log", "vm_exit.json"]
    assert output.read_text() == "an output"
    assert pack.logged == []  # type: ignore[attr-defined]


def test_a_checkpoint_travels_whole_and_without_what_comes_anew(scratch: Path, pack: Pack) -> None:
    luggage = pack("_condor_stdout", "fit.py")
    for name in ("vm_checkpoint.json", "vm_checkpoint.mem", "disk.raw", "fit.py", "_condor_stdout", ".job.ad"):
        put(scratch / name)
    (scratch / "leads.out").symlink_to("/etc/hostname")
    (scratch / "data").mkdir()
    os.mkfifo(scratch / "fifo")
    put(scratch / DIRECTORY / "vm_checkpoint.json", "an output that is no checkpoint")
    luggage.with_checkpoint()
    assert names(scratch) == ["disk.raw", "vm_checkpoint.json", "vm_checkpoint.mem"]
    assert (scratch / DIRECTORY / "vm_checkpoint.json").read_text() == "vm_checkpoint.json"


def test_a_vm_that_goes_on_takes_its_checkpoint_out_again(scratch: Path, pack: Pack) -> None:
    luggage = pack()
    memory = put(scratch / "vm_checkpoint.mem")
    luggage.with_checkpoint()
    assert memory.stat().st_nlink == 2
    put(scratch / DIRECTORY / "results.txt")
    luggage.without_checkpoint()
    assert names(scratch) == ["results.txt"]
    assert memory.stat().st_nlink == 1
    assert pack.logged == []  # type: ignore[attr-defined]


def test_a_checkpoint_that_cannot_travel_is_none(scratch: Path, pack: Pack) -> None:
    luggage = pack()
    put(scratch / "vm_checkpoint.mem")
    (scratch / DIRECTORY).rmdir()
    (scratch / DIRECTORY).symlink_to("/tmp")
    with pytest.raises(Fault):
        luggage.with_checkpoint()
    luggage.without_checkpoint()
    luggage.at_end()
    assert len(pack.logged) == 2  # type: ignore[attr-defined]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_file_of_somebody_elses_is_not_linked(scratch: Path, pack: Pack) -> None:
    if PROTECTED.read_text() == "0\n":
        pytest.skip("needs fs.protected_hardlinks")
    luggage = pack()
    (scratch / "vm_exit.json").write_text("roots")
    (scratch / "vm_exit.json").chmod(0o600)
    with pytest.raises(Fault):
        luggage.with_checkpoint()
    assert names(scratch) == []


@pytest.mark.parametrize(
    ("names", "reserved"),
    [
        ((".job.ad", ".machine.ad", "vm_checkpoint.json.refused-1", ".vm_run.tar.7.tmp", ".update.ad"), True),
        ((".chirp.config", ".condor_creds/x", "_condor_stdout", "condor_exec.exe"), True),
        (("_condor_stderr", "docker_stderror", "vm_exit.json", "vm_run.tar", "lost+found", "vm_outputs/a"), True),
        (("fit.py", "vm_list.txt", ".netrc", "data/vm_exit.json", "data/.job.ad", "condor.sub"), False),
    ],
)
def test_which_names_are_htcondors_or_ours_and_not_the_jobs(names: tuple[str, ...], reserved: bool) -> None:
    assert {name: is_reserved(name) for name in names} == dict.fromkeys(names, reserved)


def test_every_file_that_the_code_names_is_known_and_has_a_module_that_writes_it() -> None:
    text = "".join(path.read_text() for path in Path(vmgahp.__file__).parent.rglob("*.py"))
    named = set(re.findall(r'"((?:[a-z]+_checkpoint|vm_[a-z_]+)\.[a-z]{3,5})"', text))
    assert {"vm_exit.json", "vm_suspend.mem", "vm_screenshot.png"} <= named
    assert {name for name in named if not is_reserved(name)} == set()
    writers = {file.writer.replace("/", ".") for file in FILES}
    assert [writer for writer in writers if not importlib.util.find_spec(f"vmgahp.{writer}")] == []
