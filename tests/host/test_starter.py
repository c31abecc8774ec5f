"""Where a starter has put what it made for a job, in the layouts of HTCondor's releases."""

import os
from pathlib import Path
from unittest import mock

import pytest

from tests.conftest import as_root
from vmgahp.config import Settings
from vmgahp.daemon import kill as kill_mode
from vmgahp.host import starter
from vmgahp.host.starter import is_one_job, places, scratch_in


def test_what_the_starter_says_is_taken() -> None:
    given = places("/e/dir_7", {})
    assert given.chirp_config == "/e/dir_7/.chirp.config"
    assert given.machine_ad == "/e/dir_7/.machine.ad"
    said = {
        "_CONDOR_SCRATCH_DIR": "/e/dir_7/scratch/",
        "_CONDOR_CHIRP_CONFIG": "/e/dir_7/user/.chirp.config",
        "_CONDOR_MACHINE_AD": "/e/dir_7/.machine.ad",
    }
    given = places("/e/dir_7/scratch", said)
    assert given.chirp_config == "/e/dir_7/user/.chirp.config"
    assert given.machine_ad == "/e/dir_7/.machine.ad"
    short = said | {"_CONDOR_MACHINE_AD": ".machine.ad"}
    assert places("/e/dir_7/scratch", short).machine_ad == "/e/dir_7/scratch/.machine.ad", "a path that is not full"
    assert places("/e/dir_8/scratch", said).chirp_config == "/e/dir_8/scratch/.chirp.config", "said of another job"


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        *(("/e/dir_7", "/e/dir_7/", True), ("/e/dir_7", "/e/dir_7/scratch", True), ("/e/dir_7", "/e/dir_77", False)),
        *(("/e/dir_7", "/e/dir_8/scratch", False), ("/e/dir_7", "/e/dir_7/user", False)),
        *(("/e/other", "/e/other/scratch", False), ("", "/", False)),
    ],
)
def test_a_job_is_known_by_either_directory(one: str, other: str, same: bool) -> None:
    assert is_one_job(one, other) == is_one_job(other, one) == same


@as_root
def test_the_scratch_directory_is_in_the_one_that_is_not_the_jobs(tmp_path: Path) -> None:
    outer, victim = tmp_path / "dir_7", tmp_path / "dir_8"
    inner = outer / "scratch"
    for directory in (outer, victim, inner):
        directory.mkdir()
    os.chown(inner, 54321, 54321)
    assert scratch_in(str(outer)) == str(inner)
    assert scratch_in(str(inner)) == str(inner)
    assert scratch_in(str(victim)) == str(victim)
    assert scratch_in(str(tmp_path)) == str(tmp_path)
    os.chown(outer, 54321, 54321)
    assert scratch_in(str(outer)) == str(outer), "it is the job's own, in which it has made another"
    inner.rmdir()
    inner.symlink_to(victim)
    os.chown(outer, 0, 0)
    os.chown(inner, 54321, 54321, follow_symlinks=False)
    assert scratch_in(str(outer)) == str(outer), "no link leads to another job's"


def test_the_startds_word_leads_a_kill_to_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    user = {"VMGAHP_USER_UID": "54321", "VMGAHP_USER_GID": "54321"}
    killer = mock.Mock()
    inner = tmp_path / "dir_7" / "scratch"
    inner.mkdir(parents=True)
    if os.geteuid() == 0:
        os.chown(inner, 54321, 54321)
    monkeypatch.setattr(kill_mode.base, "find", lambda _: killer)
    monkeypatch.setattr(kill_mode.config, "load", lambda _: Settings({}))
    for match in (inner.parent, inner, "alice_lab_7.0"):
        assert kill_mode.kill("script", str(match), "", user, to_stderr=False) == 0
    asked = [call.args[0] for call in killer.return_value.kill.call_args_list]
    assert asked == [str(inner), str(inner), "alice_lab_7.0"]
    assert starter.directory_of(asked[0]) == str(inner.parent)
