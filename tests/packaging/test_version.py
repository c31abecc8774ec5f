"""The version of a commit, of a work tree, and of copies that have no git."""

import itertools
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.version import Version

import vmgahp
from tests import REPOSITORY

SCRIPT = "packaging/version.py"
NEXT = "0.2.0"


def git(tree: Path, *words: str) -> str:
    identity = ("-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "init.defaultBranch=main")
    done = subprocess.run(["git", *identity, "-C", str(tree), *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def version(tree: Path, **environ: str) -> str:
    """What the tree's own script prints, as the user that a build runs as."""
    command = [sys.executable, "-B", str(tree / SCRIPT)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environ)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def commit(tree: Path, title: str = "x") -> str:
    git(tree, "add", "-A")
    git(tree, "commit", "-q", "--allow-empty", "-m", title)
    return git(tree, "rev-parse", "HEAD")[:8]


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A repository with two commits."""
    tree = tmp_path / "clone"
    (tree / "packaging").mkdir(parents=True)
    (tree / SCRIPT).write_text((REPOSITORY / SCRIPT).read_text())
    (tree / ".gitattributes").write_text((REPOSITORY / ".gitattributes").read_text())
    (tree / "CHANGELOG.md").write_text(f"# Changelog\n\n## {NEXT} (unreleased)\n\n- A line.\n")
    git(tree.parent, "init", "-q", str(tree))
    commit(tree)
    commit(tree)
    return tree


def test_each_commit_has_a_higher_one_for_pip_and_for_debian(clone: Path) -> None:
    versions = ["0.1.0"]
    for _ in range(12):
        node = commit(clone)
        versions.append(version(clone))
        count = git(clone, "rev-list", "--count", "HEAD")
        assert versions[-1] == f"{NEXT}.dev{count}+g{node}"
    versions.append(NEXT)
    assert versions == sorted(versions, key=Version)
    for old, new in itertools.pairwise(versions):
        old, new = old.replace(".dev", "~dev"), new.replace(".dev", "~dev")
        assert subprocess.run(["dpkg", "--compare-versions", f"{old}-1", "lt", f"{new}-1"], check=False).returncode == 0


def test_a_tag_is_a_release_and_what_follows_is_above_it(clone: Path) -> None:
    before = version(clone)
    git(clone, "tag", f"v{NEXT}")
    assert version(clone) == NEXT
    (clone / "CHANGELOG.md").write_text(f"# Changelog\n\n## {NEXT} (2026-12-24)\n")
    commit(clone)
    after = version(clone)
    assert after.startswith(f"{NEXT}.post3+g")
    assert Version(before) < Version(NEXT) < Version(after) < Version("0.2.1.dev4")
    (clone / "CHANGELOG.md").write_text(f"# Changelog\n\n## 0.2.1 (unreleased)\n\n## {NEXT} (2026-12-24)\n")
    commit(clone)
    assert version(clone).startswith("0.2.1.dev4+g")


def test_changes_that_are_not_committed_are_newer_than_the_commit(clone: Path) -> None:
    clean = version(clone)
    (clone / "a file").write_text("")
    os.utime(clone / "a file", (1_700_000_000, 1_700_000_000))
    assert version(clone) == f"{clean}.d20231114221320"
    os.utime(clone / "CHANGELOG.md", (1_800_000_000, 1_800_000_000))
    assert version(clone) == f"{clean}.d20231114221320", "only the time of that changed"
    (clone / "CHANGELOG.md").write_text(f"## {NEXT} (unreleased)\n")
    os.utime(clone / "CHANGELOG.md", (1_800_000_000, 1_800_000_000))
    changed = version(clone)
    assert changed == f"{clean}.d20270115080000"
    assert Version(clean) < Version(changed)
    git(clone, "tag", f"v{NEXT}")
    assert version(clone) != NEXT
    (clone / "a file").unlink()
    (clone / "CHANGELOG.md").write_text("")
    git(clone, "checkout", "-q", ".")
    (clone / ".gitattributes").unlink()
    assert version(clone) != NEXT, "something was removed"


def test_a_shallow_clone_and_an_archive_cannot_be_counted_and_say_so(clone: Path, tmp_path: Path) -> None:
    shallow = tmp_path / "shallow"
    git(tmp_path, "clone", "-q", "--depth=1", f"file://{clone}", str(shallow))
    node = git(clone, "rev-parse", "HEAD")[:8]
    assert re.fullmatch(rf"{re.escape(NEXT)}\.dev0\+20\d{{12}}\.g{node}", version(shallow))
    archive, unpacked = tmp_path / "archive.tar", tmp_path / "unpacked"
    git(clone, "archive", "-o", str(archive), "HEAD")
    unpacked.mkdir()
    subprocess.run(["tar", "-xf", str(archive), "-C", str(unpacked)], check=True)
    assert version(unpacked) == version(shallow)
    assert Version(version(unpacked)) < Version(version(clone))


def test_other_repositories_mean_nothing_and_an_sdist_knows_its_commit(clone: Path, tmp_path: Path) -> None:
    """Such as those of a hook of git's that builds."""
    other = tmp_path / "other"
    git(tmp_path, "init", "-q", str(other))
    assert version(clone, GIT_DIR=str(other / ".git"), GIT_WORK_TREE=str(other)) == version(clone)
    assert version(clone, PATH="/nowhere") == f"{NEXT}.dev0+unknown", "git need not be installed"
    subprocess.run(["rm", "-rf", str(clone / ".git")], check=True)
    assert version(clone) == f"{NEXT}.dev0+unknown"
    (clone / "PKG-INFO").write_text("Metadata-Version: 2.4\nName: vmgahp\nVersion: 0.2.0.dev7+g12345678\n\nVersion: 1")
    assert version(clone) == "0.2.0.dev7+g12345678"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_root_sees_the_version_of_another_users_clone_and_leaves_nothing_in_it(clone: Path) -> None:
    clean = version(clone)
    for path in (clone, *clone.rglob("*")):
        os.chown(path, 54321, 54321, follow_symlinks=False)
    os.utime(clone / "CHANGELOG.md")  # git would write down that it looked
    assert version(clone, HOME="/nonexistent") == clean
    assert [str(path) for path in clone.rglob("*") if path.stat().st_uid != 54321] == []


def test_here_it_is_the_release_of_the_change_log_and_a_running_clone_has_none() -> None:
    script = runpy.run_path(str(REPOSITORY / SCRIPT))
    with pytest.raises(ValueError, match=r"CHANGELOG.md has no heading such as: ## 0.2.0 \(unreleased\)"):
        script["next_release"]("# Changelog\n\n## Unreleased\n")
    release = script["next_release"]((REPOSITORY / "CHANGELOG.md").read_text())
    assert Version(script["version"]()).base_version == release
    assert Version(release) > Version("0.1.0"), "which every commit was, for long"
    assert vmgahp.__version__ == "0+checkout"
