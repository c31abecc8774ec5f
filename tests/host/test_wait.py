"""Waiting ends with what was waited for, and at the deadline."""

import fcntl
import os
import subprocess
from pathlib import Path

from vmgahp.host import wait


def test_an_attempt_is_repeated_until_it_succeeds_and_made_once_at_least() -> None:
    results = iter([0, 0, 17])
    assert wait.until(lambda: next(results), 60, 0.001) == 17
    results = iter(["", "never"])
    assert wait.until(lambda: next(results), 0, 60) == ""


def test_a_descriptor_that_is_readable_and_a_process_that_has_exited() -> None:
    reading, writing = os.pipe()
    program = subprocess.Popen(["sleep", "1000"])
    process = os.pidfd_open(program.pid)
    try:
        assert not wait.ready(reading, -1)
        os.write(writing, b"x")
        assert wait.ready(reading, 60)
        assert not wait.ready(process, 0)
        program.kill()
        assert wait.ready(process, 60)
    finally:
        program.kill()
        program.wait()
        for descriptor in (reading, writing, process):
            os.close(descriptor)


def test_a_lock_that_another_has(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (tmp_path / "file").open() as one, (tmp_path / "file").open() as another:
        assert wait.lock(one.fileno(), fcntl.LOCK_EX, 0)
        assert not wait.lock(another.fileno(), fcntl.LOCK_SH, 0.05)
        fcntl.flock(one, fcntl.LOCK_UN)
        assert wait.lock(another.fileno(), fcntl.LOCK_SH, 60)
