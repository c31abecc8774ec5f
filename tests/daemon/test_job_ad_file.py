"""A startd's tag in .job.ad does not travel with a checkpoint, and no other file is written to."""

from pathlib import Path

import pytest

from vmgahp.daemon.job_ad_file import JobAdFile


def made(directory: Path) -> Path:
    path = directory / ".job.ad"
    path.write_text("ClusterId = 1\n")
    return path


def test_what_was_appended_goes_and_the_time_is_as_before(tmp_path: Path) -> None:
    path = made(tmp_path)
    before = path.stat()
    kept = JobAdFile(str(tmp_path))
    with path.open("a") as file:
        file.write("ToE = []\n")
    assert kept.restore()
    assert path.read_text() == "ClusterId = 1\n"
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    assert not kept.restore(), "it is as it was"


def test_a_file_that_was_put_in_its_place_is_left_alone(tmp_path: Path) -> None:
    path = made(tmp_path)
    kept = JobAdFile(str(tmp_path))
    other = tmp_path / "precious"
    other.write_text("precious")
    for replace in (path.symlink_to, path.hardlink_to):
        path.unlink()
        replace(other)
        assert not kept.restore()
    assert other.read_text() == "precious"


def test_no_file_is_no_trouble(tmp_path: Path) -> None:
    assert not JobAdFile(str(tmp_path)).restore()
    assert not JobAdFile(str(tmp_path / "nowhere")).restore()


def update(directory: Path) -> None:
    """Write the file as the startd does at each of its updates while a job runs."""
    temporary = directory / ".update.ad.tmp"
    temporary.write_text("x")
    temporary.rename(directory / ".update.ad")


def files(directory: Path) -> list[str]:
    """List the files that the starter sends; it leaves out directories."""
    return [path.name for path in directory.iterdir() if path.is_file()]


def test_what_the_startd_writes_for_jobs_does_not_travel(tmp_path: Path) -> None:
    (tmp_path / "output.dat").write_text("x")
    update(tmp_path)
    kept = JobAdFile(str(tmp_path))
    for _ in range(2):
        kept.restore()
        assert files(tmp_path) == ["output.dat"]
        with pytest.raises(IsADirectoryError):  # while the starter sends the checkpoint
            update(tmp_path)
        assert files(tmp_path) == ["output.dat"]
    kept.release()
    kept.restore()  # the startd has not come in between
    with pytest.raises(IsADirectoryError):
        update(tmp_path)
    kept.release()
    update(tmp_path)
    assert sorted(files(tmp_path)) == [".update.ad", "output.dat"]


def test_nothing_is_made_where_no_startd_writes(tmp_path: Path) -> None:
    JobAdFile(str(tmp_path)).restore()
    assert not list(tmp_path.iterdir())


def test_a_temporary_file_that_is_there_already_does_not_travel_either(tmp_path: Path) -> None:
    update(tmp_path)
    (tmp_path / ".update.ad.tmp").write_text("x")
    JobAdFile(str(tmp_path)).restore()
    assert files(tmp_path) == []
