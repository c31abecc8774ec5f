"""The machines of namespaces: what of this one can be seen there."""

import pytest

from tests.lab import namespace
from tests.lab.namespace import Namespace, require_namespace

pytestmark = pytest.mark.libvirt


def test_a_clone_below_tmp_is_seen_where_this_systems_own_root_is_the_machines(tmp_path, monkeypatch):
    require_namespace(pool=False)
    clone = tmp_path / "clone"
    clone.mkdir()
    (clone / "pyproject.toml").write_text("[project]\n")
    monkeypatch.setattr(namespace, "REPOSITORY", clone)
    with Namespace(tmp_path / "exchange", root="/") as made:
        assert made.run("cat", str(clone / "pyproject.toml")).stdout == "[project]\n"
        assert made.run("touch", str(clone / "written"), check=False).returncode != 0
