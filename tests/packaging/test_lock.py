"""What scripts/check asks of packaging/requirements.lock."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import REPOSITORY

LOCK = REPOSITORY / "packaging/requirements.lock"


def ask(*words: str | Path, path: Path | None = None) -> tuple[int, str]:
    environ = os.environ | ({"PATH": f"{path}:{os.environ['PATH']}"} if path else {})
    done = subprocess.run(
        [sys.executable, REPOSITORY / "scripts/lib/lock.py", *words],
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert not done.stderr
    return done.returncode, done.stdout


def test_the_lock_fits() -> None:
    assert ask("fits") == (0, "")


def test_it_names_no_place() -> None:
    assert "://" not in LOCK.read_text()


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("lxml==", "lxml-html-clean==", "lxml>=4.9 is not in it"),
        ("pycdlib==1.", "pycdlib==0.", "is not pycdlib>=1.12"),
        ("wcwidth==", "wcwidth-of-another==", "nothing needs wcwidth-of-another"),
        ("--hash=sha256:", "--hash=md5:", "no SHA-256"),
        ("htcondor==", "--extra-index-url x\nhtcondor==", "more than pins"),
        ("htcondor==", "htcondor @ file:///x\nhtcondor==", "more than pins"),
    ],
)
def test_one_that_does_not_fit_is_told(tmp_path: Path, old: str, new: str, said: str) -> None:
    changed = tmp_path / "requirements.lock"
    text = LOCK.read_text()
    assert old in text
    changed.write_text(text.replace(old, new))
    status, out = ask("fits", changed)
    assert status == 1
    assert said in out


@pytest.mark.parametrize(
    ("program", "status", "said"),
    [
        ("echo '{\"dependencies\": []}'", 0, ""),
        ("echo 'ConnectionError: no route' >&2; exit 1", 0, "cannot be reached: ConnectionError: no route"),
        ('echo \'{"dependencies": [{"name": "a", "skip_reason": "b"}]}\'', 0, "nothing about 1 of 1"),
        (
            'echo \'{"dependencies": [{"name": "a", "version": "1", "vulns": '
            '[{"id": "X-1", "fix_versions": ["2"]}]}]}\'; exit 1',
            1,
            "a 1: X-1, mended in 2",
        ),
    ],
)
def test_only_a_known_vulnerability_fails(tmp_path: Path, program: str, status: int, said: str) -> None:
    fake = tmp_path / "pip-audit"
    fake.write_text(f"#!/bin/sh\n{program}\n")
    fake.chmod(0o755)
    found, out = ask("audit", path=tmp_path)
    assert found == status
    assert said in out
