"""The place of the administrator's programs."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that nobody but this user may write to, all the way up."""
    with tempfile.TemporaryDirectory(prefix="vmgahp-hooks-", dir="/tmp") as directory:
        yield Path(directory)
