"""A directory of samples, and the command in it."""

import shutil
from collections.abc import Callable
from pathlib import Path

import htcondor2
import pytest

from tests.commands.submit import samples
from vmgahp.cli import main


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with samples, which is the current one."""
    if shutil.which("qemu-img") is None:
        pytest.skip("needs qemu-img")
    monkeypatch.chdir(tmp_path)
    samples.write_sources(tmp_path)
    return tmp_path


@pytest.fixture
def submit(home: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[object, str]]:
    """Runs the command: the submit file as HTCondor's own reader has it (None for none), and what was said.

    What is left out lets the file be written all the same, where nobody says otherwise.
    """

    def run(*words: str, status: int = 0, lax: bool = True) -> tuple[object, str]:
        got = main(["vmgahp", "submit", words[0], "-o", "-", *["--lax"] * lax, *words[1:]])
        out, err = capsys.readouterr()
        assert got == status, err
        return (htcondor2.Submit(out) if out else None), err

    return run


@pytest.fixture
def refused(submit: Callable[..., tuple[object, str]]) -> Callable[..., str]:
    """Runs the command, of which nothing comes: what was said."""
    return lambda *words, lax=True: submit(*words, status=1, lax=lax)[1]
