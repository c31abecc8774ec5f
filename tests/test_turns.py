"""What a run of CI tests of the real parts: the core, the turn's group, and what a change forces."""

import importlib.util
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests import REPOSITORY


def load() -> Any:
    spec = importlib.util.spec_from_file_location("turns", REPOSITORY / "scripts/lib/turns.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


turns = load()
CORE, GROUPS = turns.table()


def test_what_is_named_is_there() -> None:
    named = [path for row in GROUPS.values() for key in ("modules", "sources") for path in row.get(key, [])]
    named += [f"{turns.POOL}{name}.py" for name in CORE["pool"]]
    assert [path for path in named if not (REPOSITORY / path).exists()] == []
    setup = (REPOSITORY / "scripts/lib/setup.sh").read_text()
    assert [name for row in GROUPS.values() for name in row.get("packages", []) if f"\n{name}=(" not in setup] == []
    assert [name for row in GROUPS.values() for name in row.get("setup", []) if f"\n{name}() " not in setup] == []


def test_every_module_of_the_real_parts_and_of_the_pool_runs_once_in_a_whole_turn() -> None:
    ran = Counter(turns.modules([]))
    for name in GROUPS:
        ran.update(turns.modules([name]))
    assert ran == Counter(turns.real_modules())
    core = set(turns.pool_modules([]))
    ran = Counter(path for name in GROUPS for path in turns.pool_modules([name]) if path not in core)
    ran.update(core)
    assert ran == Counter(turns.with_text(turns.IN_POOL))


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with the table, an old commit, and nothing else yet."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/turns.toml").write_text((REPOSITORY / "tests/turns.toml").read_text())
    monkeypatch.setattr(turns, "ROOT", tmp_path)
    for key, value in {"NAME": "a", "EMAIL": "a@b"}.items():
        for who in ("AUTHOR", "COMMITTER"):
            monkeypatch.setenv(f"GIT_{who}_{key}", value)
    git(tmp_path, "init", "-q")
    commit(tmp_path, monkeypatch, "1000000000")
    return tmp_path


def git(clone: Path, *words: str) -> None:
    subprocess.run(["git", "-C", clone, *words], check=True)


def commit(clone: Path, monkeypatch: pytest.MonkeyPatch, seconds: str) -> None:
    monkeypatch.setenv("GIT_COMMITTER_DATE", f"{seconds} +0000")
    git(clone, "add", "-A")
    git(clone, "commit", "-q", "--allow-empty", "-m", "x")


def change(clone: Path, path: str) -> None:
    (clone / path).parent.mkdir(parents=True, exist_ok=True)
    (clone / path).write_text("changed\n")


def test_a_turn_is_one_group_after_the_other(clone: Path) -> None:
    assert [turns.groups(turn=number) for number in range(2 * len(GROUPS))] == [[name] for name in [*GROUPS, *GROUPS]]


def test_what_a_submission_changes_forces_its_group(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change(clone, "src/vmgahp/drivers/vsphere/soap.py")
    commit(clone, monkeypatch, "1000090000")
    change(clone, "packaging/rpm/vmgahp.spec")
    commit(clone, monkeypatch, "1000093000")
    change(clone, "tests/guest/test_real.py")  # not even committed
    ad = list(GROUPS).index("ad")
    assert turns.groups(turn=ad) == ["vsphere", "ad", "rpm", "tests/guest/test_real.py"]
    commit(clone, monkeypatch, "1000200000")
    commit(clone, monkeypatch, "1000300000")
    assert turns.groups(turn=ad) == ["ad"], "what landed before is not tested again"


def test_the_tests_of_a_change_are_those_beside_it() -> None:
    found = turns.streets(["src/vmgahp/protocol/wire.py", "src/vmgahp/host/kvm.py", "src/vmgahp/drivers/any/pick.py"])
    assert found == [
        "tests/protocol/test_wire.py", "tests/host/test_kvm.py", "tests/drivers/any", "tests/test_house_rules.py",
    ]  # fmt: skip
    assert turns.streets(["docs/index.md", "docs/how-to/x.md"]) == ["tests/docs", "tests/test_house_rules.py"]
    assert turns.streets(["LICENSE"]) == []


def test_a_module_needs_what_its_group_needs() -> None:
    assert turns.of_groups(["tests/commands/image/test_boot.py"], "packages") == ["IMAGE_PACKAGES"]
    assert turns.modules(["tests/commands/image/test_boot.py"]) == ["tests/commands/image/test_boot.py"]
    with pytest.raises(SystemExit, match="any-hypervisor is not a group"):
        turns.of_groups(["any-hypervisor"], "packages")
