"""The version of this tree: ``python3 packaging/version.py`` prints it, and hatchling asks `version`.

CHANGELOG.md says which release comes next; the count of commits tells one commit from another. So each commit of the
main branch has a version above that of the commits before it, which apt, dnf and pip take for an upgrade.
"""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

ARCHIVED = "$Format:%H %ct$"
"""The commit and its time in an archive made by git (`.gitattributes`)."""


def version(root: Path = ROOT, archived: str = ARCHIVED) -> str:
    """Return the version from the best source there is.

    - a built source package: what its PKG-INFO says
    - the commit that the tag ``v0.2.0`` names: ``0.2.0``
    - any other: ``0.2.0.dev506+g1a2b3c4d``, ``0.2.0.post512+g1a2b3c4d`` where that tag is behind it
    - with changes that are not committed: the same, and ``.d20261122225839``, the time of the newest
    - a shallow clone or an archive, where nothing can be counted: ``0.2.0.dev0+20261122225839.g1a2b3c4d``
    - a copy without git: ``0.2.0.dev0+unknown``
    """
    if (info := root / "PKG-INFO").exists():
        return re.findall(r"^Version: (\S+)$", info.read_text(), re.MULTILINE)[0]
    release = next_release((root / "CHANGELOG.md").read_text())
    commit, _, seconds = archived.partition(" ")
    if (root / ".git").exists() and (found := _git(root, "log", "-1", "--format=%H %ct")):
        commit, _, seconds = found.partition(" ")
        changed = _changed(root)
        if _git(root, "rev-parse", "--is-shallow-repository") == "false":
            if not changed and f"v{release}" in _git(root, "tag", "--points-at", "HEAD").split():
                return release
            kind = "post" if f"v{release}" in _git(root, "tag", "--merged", "HEAD").split() else "dev"
            return f"{release}.{kind}{_git(root, 'rev-list', '--count', 'HEAD')}+g{commit[:8]}{changed}"
        return f"{release}.dev0+{_stamp(int(seconds))}.g{commit[:8]}{changed}"
    if seconds.isdigit():
        return f"{release}.dev0+{_stamp(int(seconds))}.g{commit[:8]}"
    return f"{release}.dev0+unknown"


def next_release(change_log: str) -> str:
    """Return the release of the newest heading, ``## 0.2.0 (unreleased)``.

    Raises:
        ValueError: there is no such heading
    """
    if found := re.search(r"^## (\d+(?:\.\d+)*)(?= |$)", change_log, re.MULTILINE):
        return found[1]
    raise ValueError("CHANGELOG.md has no heading such as: ## 0.2.0 (unreleased)")


def _changed(root: Path) -> str:
    """Return ``.d`` and the time of the newest uncommitted change, or an empty string."""
    status = _git(root, "status", "--porcelain", "-z", "--no-renames", "--untracked-files=all")
    paths = [root / entry[3:] for entry in status.split("\0") if entry]
    # What was removed has no time any more; its directory has.
    there = (next(one for one in (path, *path.parents) if one.exists()) for path in paths)
    return f".d{_stamp(max(one.lstat().st_mtime for one in there))}" if paths else ""


def _stamp(seconds: float) -> str:
    return time.strftime("%Y%m%d%H%M%S", time.gmtime(seconds))


def _git(root: Path, *words: str) -> str:
    """Return git's output, or an empty string without git or a repository.

    The clone may be another user's: root installs from it. Whoever builds it runs its code anyhow, and git may read it;
    it writes nothing there. Git's own variables, of a hook that runs this, say nothing about this clone.
    """
    environ = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "-c", "safe.directory=*", "-C", str(root), *words]
    try:
        done = subprocess.run(
            command, env=environ | {"GIT_OPTIONAL_LOCKS": "0"}, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return ""
    return done.stdout.strip("\n") if done.returncode == 0 else ""


if __name__ == "__main__":
    sys.stdout.write(f"{version()}\n")
