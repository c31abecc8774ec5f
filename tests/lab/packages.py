"""Packages of this clone, for the tests that install them.

All are of the sdist and the wheel that the run's other tests have, and what is downloaded for them is so once.
"""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.lab.namespace import REPOSITORY, LabError, shared_by_workers, wheel_of


def kept_of(factory: pytest.TempPathFactory) -> Path:
    """What the scripts are to take by ``--keep``, and leave what they make in."""
    wheel = wheel_of(factory)
    with shared_by_workers(factory, "kept") as directory:
        place = directory / f"dist-{wheel.name.split('-')[1]}"
        if not place.exists():
            shutil.copytree(wheel.parent, place)
        return directory


def build(script: str, directory: Path, *words: str) -> list[Path]:
    """The packages that ``scripts/build-deb`` or ``scripts/build-rpm`` makes; `LabError` with what it says."""
    command = [str(REPOSITORY / "scripts" / script), str(directory), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LabError(f"{script} fails:\n{done.stderr}")
    return [Path(line) for line in done.stdout.splitlines()]


def git(clone: Path, *words: str) -> None:
    identity = ("-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "safe.directory=*")
    subprocess.run(["git", *identity, "-C", str(clone), *words], check=True)


def later_clone_of(factory: pytest.TempPathFactory) -> Path:
    """A clone with a commit more, in which the package has a module more."""
    if not (REPOSITORY / ".git").exists():
        pytest.skip("needs a clone with its history")
    with shared_by_workers(factory, "later") as directory:
        clone = directory / "clone"
        if not clone.exists():
            git(directory, "clone", "-q", str(REPOSITORY), str(clone))
            (clone / "src/vmgahp/later.py").write_text('"""A module of the later one alone."""\n')
            git(clone, "add", "-A")
            git(clone, "commit", "-q", "-m", "later: add a module")
        return clone
