"""What the tests of several commands stand in."""

from collections.abc import Iterator

import pytest

from tests.lab.namespace import Namespace, require_namespace


@pytest.fixture(scope="module")
def namespace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Namespace]:
    """The pool's root, with HTCondor's own tools, for a module's tests."""
    require_namespace()
    with Namespace(tmp_path_factory.mktemp("exchange")) as made:
        yield made
