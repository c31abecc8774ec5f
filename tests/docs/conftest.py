"""Surroundings of all tests of the documents."""

import pytest

from tests import REPOSITORY


@pytest.fixture(autouse=True)
def _extensions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the Sphinx extensions in docs/_ext importable."""
    monkeypatch.syspath_prepend(REPOSITORY / "docs/_ext")
