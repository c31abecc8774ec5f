"""What the kernel says of processes, whatever these are called."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from vmgahp.drivers.vmrun import processes
from vmgahp.host import proc


@pytest.fixture
def odd(tmp_path: Path) -> Iterator[int]:
    """A process whose name is no text: any user of a machine can have one."""
    program = os.fsencode(tmp_path) + b"/\xff\xfe (:\n"
    shutil.copy(shutil.which("sleep") or "", program)
    with subprocess.Popen([program, "600"]) as process:
        try:
            yield process.pid
        finally:
            process.kill()


def test_a_name_that_is_no_text_hides_no_owner(odd: int) -> None:
    assert proc.uid(odd) == os.getuid()
    assert proc.cpu_seconds(odd) >= 0


def test_a_name_that_is_no_text_keeps_nobody_from_finding_others(odd: int) -> None:
    assert odd not in [found.pid for found in processes.all_of(os.getuid())]


def test_there_is_no_such_process() -> None:
    assert proc.uid(2**22 + 1) is None
    assert proc.cpu_seconds(2**22 + 1) == 0.0
