"""What the kernel says of processes, whatever these are called."""

import os
import shutil
import subprocess
from pathlib import Path
from time import monotonic

import pytest

from vmgahp.drivers.vmrun.tool import running_processes
from vmgahp.host import proc


def test_a_name_that_is_no_text_hides_no_process(tmp_path: Path) -> None:
    """Any user of a machine can have such a process."""
    program = os.fsencode(tmp_path) + b"/\xff\xfe (:\n"
    shutil.copy(shutil.which("sleep") or "", program)
    with subprocess.Popen([program, "600"]) as process:
        try:
            assert proc.uid(process.pid) == os.getuid()
            assert proc.cpu_seconds(process.pid) >= 0
            assert process.pid not in [found.pid for found in running_processes(os.getuid())]
        finally:
            process.kill()


def test_a_process_has_an_age_of_its_own_or_there_is_none() -> None:
    began = monotonic()
    with subprocess.Popen(["sh", "-c", "read line; echo; exec cat"], stdin=-1, stdout=-1) as process:
        process.stdin.write(b"\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"\n"
        tick = 1 / os.sysconf("SC_CLK_TCK")
        assert 0 <= proc.age(process.pid) <= monotonic() - began + 2 * tick
        assert proc.age(os.getpid()) >= proc.age(process.pid)
        process.stdin.close()
    assert proc.age(2**22 + 1) == 0.0
    assert proc.uid(2**22 + 1) is None
    assert proc.cpu_seconds(2**22 + 1) == 0.0


def test_the_context_of_a_process_where_there_is_selinux(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = {(7, "attr/current"): b"u:r:condor_startd_t:s0\0"}
    monkeypatch.setattr(proc, "_read", lambda *asked: told[asked])
    monkeypatch.setattr(proc, "ENFORCE", str(tmp_path / "enforce"))
    assert proc.selinux_context(7) == "", "another module's words for its profile are no context"
    (tmp_path / "enforce").write_text("0")
    assert proc.selinux_context(7) == "u:r:condor_startd_t:s0"
