"""A startd's tag in .job.ad does not travel with a checkpoint, and no other file is written to."""

import os
import time
from pathlib import Path

import pytest

from vmgahp.daemon import job_ad_file
from vmgahp.daemon.job_ad_file import JobAdFile
from vmgahp.host import child
from vmgahp.host.job_user import Identity

WHO = Identity(65534, 65534)


def made(directory: Path) -> Path:
    path = directory / ".job.ad"
    path.write_text("ClusterId = 1\n")
    return path


def test_a_file_that_was_put_in_its_place_is_left_alone(tmp_path: Path) -> None:
    path = made(tmp_path)
    kept = JobAdFile(str(tmp_path), WHO)
    other = tmp_path / "precious"
    other.write_text("precious")
    for replace in (path.symlink_to, path.hardlink_to):
        path.unlink()
        replace(other)
        assert not kept.restore()
    assert other.read_text() == "precious"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_file_system_of_the_job_that_never_answers_holds_up_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(tmp_path)
    monkeypatch.setattr(child, "DEADLINE", 0.1)
    for operation in ("_read", "_bar_update", "_restore"):
        monkeypatch.setattr(job_ad_file, operation, lambda *_: time.sleep(1000))
    kept = JobAdFile(str(tmp_path), WHO)
    assert not kept.restore()
    kept.release()
