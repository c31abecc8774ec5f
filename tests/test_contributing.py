"""What contributors start from: the titles of commits, the hooks, the forge's workflow, the story of a START."""

import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import REPOSITORY

COMMIT_TITLE = REPOSITORY / "scripts/commit-title"


def read(path: str) -> Any:
    return yaml.safe_load((REPOSITORY / path).read_text())


def git(*words: str) -> str:
    done = subprocess.run(["git", "-C", REPOSITORY, *words], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("needs a clone with its history")
    return done.stdout


def commit_title(*words: str | Path, typed: str = "") -> "subprocess.CompletedProcess[str]":
    return subprocess.run([COMMIT_TITLE, *words], input=typed, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("message", "why"),
    [
        ("doctor: ask libvirt once\n", ""),
        ("scripts/test: name what failed\n\nIt was far above.\n", ""),
        ("# a comment\n\nconsole, replay: é\n# another\n\nbody\n", ""),
        (f"a: {'é' * 69}\n", ""),
        (f"a: {'é' * 70}\n", "it has 73 characters"),
        ("Mend the doctor\n", "does not begin with a scope"),
        ("Doctor: ask once\n", "does not begin with a scope"),
        ("doctor:ask once\n", "does not begin with a scope"),
        ("doctor: ask once.\n", "ends with a full stop"),
        ("doctor: ask once\nand again\n", "No empty line"),
        ('Revert "Doctor: ask."\n', ""),
        ("fixup! Doctor.\n", ""),
        ("# git says what it would commit\n", ""),
        ("doctor: ask once\n\n# ------------------------ >8 ------------------------\nx\n", ""),
    ],
)
def test_a_title_has_a_scope_and_72_characters_at_most(tmp_path: Path, message: str, why: str) -> None:
    (tmp_path / "message").write_text(message)
    done = commit_title(tmp_path / "message")
    assert (done.returncode, why in done.stderr) == (bool(why), True), done.stderr


def test_the_titles_of_all_commits_since_the_check_is_what_it_is() -> None:
    """Earlier ones had other forms. Where the clone is shallow, those that it has."""
    first = git("log", "-1", "--format=%H", "--", "scripts/commit-title").split()
    log = git("log", "--no-merges", "--format=%H %s").splitlines()
    hashes, titles = zip(*(line.split(" ", 1) for line in log), strict=True)
    done = commit_title("-", typed="".join(f"{title}\n" for title in titles[: hashes.index(first[0]) + 1]))
    assert done.returncode == 0, done.stderr


def test_a_title_that_cannot_be_looked_at_is_named() -> None:
    for words, why in ((["/nonexistent"], "there is no file /nonexistent"), ([], "message is missing")):
        done = commit_title(*words)
        assert (done.returncode, why in done.stderr) == (1, True)


def test_the_hooks_are_scripts_of_the_project_and_nothing_is_fetched_for_them() -> None:
    config = read(".pre-commit-config.yaml")
    assert [repo["repo"] for repo in config["repos"]] == ["local"]
    hooks = config["repos"][0]["hooks"]
    assert sorted(stage for hook in hooks for stage in hook["stages"]) == sorted(config["default_install_hook_types"])
    for hook in hooks:
        assert hook["language"] == "script"
        assert os.access(REPOSITORY / hook["entry"], os.X_OK)


def test_the_forge_runs_the_projects_own_scripts_with_the_whole_history() -> None:
    [job] = read(".github/workflows/ci.yml")["jobs"].values()
    steps = job["steps"]
    ran = [shlex.split(step["run"]) for step in steps if "run" in step]
    scripts = [f"scripts/{name}" for name in job["strategy"]["matrix"]["script"]]
    assert ran[-1] == shlex.split("scripts/${{ matrix.script }}")
    assert scripts == ["scripts/check", "scripts/test"]
    assert all(os.access(REPOSITORY / script, os.X_OK) for script in scripts)
    [checkout] = [step for step in steps if step.get("uses", "").startswith("actions/checkout@")]
    assert checkout["with"]["fetch-depth"] == 0


def test_the_story_of_a_start_names_what_is_in_the_code() -> None:
    """Each module, class and function of it, so that a newcomer finds them."""
    story = (REPOSITORY / "CONTRIBUTING.md").read_text().partition("## How a START")[2].partition("\n## ")[0]
    sources = list((REPOSITORY / "src/vmgahp").rglob("*.py"))
    known = {part for path in sources for part in path.relative_to(REPOSITORY / "src").with_suffix("").parts}
    known |= set(
        re.findall(r"^ *(?:def |class |(?=[A-Z_]+ ?[:=]))(\w+)", "\n".join(map(Path.read_text, sources)), re.M)
    )
    named = re.findall(r"`([a-z]\w*(?:[/.]\w+)*|_\w+|[A-Z][a-z]\w+(?:\.\w+)*)`", story)
    assert len(named) > 40
    missing = {name for each in named if not each.endswith(".txt") for name in re.split("[/.]", each)} - known
    assert missing == set()


BYTES = re.compile(r"tests/(?:.*/)?(?:corpus|golden|transcripts|samples)/|\.(?:png|svg)$")
"""What `.editorconfig` says nothing of."""


def test_files_are_as_editors_are_told_to_leave_them() -> None:
    wrong = []
    for name in filter(None, git("ls-files", "-z").split("\0")):
        path = REPOSITORY / name
        if BYTES.search(name) or path.is_symlink() or not path.exists():
            continue
        text = path.read_bytes().decode()
        if (text and not text.endswith("\n")) or "\r" in text or re.search(r"[ \t]$", text, re.MULTILINE):
            wrong.append(name)
    assert wrong == []
