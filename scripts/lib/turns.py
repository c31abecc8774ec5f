"""The tests of a run: the turn's group, the groups that a change forces, the core, and what a change touches.

    turns.py groups [BASE]      what this run takes of the groups: the turn's, those whose sources have changed since
                                BASE, and modules that have changed themselves, by their paths
    turns.py groups all         all groups
    turns.py packages GROUP…    what tests/turns.toml says of groups, a word a line; as well: setup, roots
    turns.py modules GROUP…     their modules that need no pool; without a group, those of the core
    turns.py pool GROUP…        the pool's modules of the core and of these groups
    turns.py half               every second test module, these or the others by the number of commits
    turns.py changed BASE       the tests beside what has changed since BASE

The standard library alone: it runs before the virtual environment is there.
"""

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
POOL = "tests/system/pool/"
REAL = re.compile(
    r"\bmark\.(?:libvirt|qemu|podman|vsphere)\b|^from tests\.attacks\.support import .*\beach(?:_here)?\b", re.MULTILINE
)
"""The text of a module with tests of real parts, beside those of the pool, of Xen, and of the matrix of faults."""
IN_POOL = re.compile(r"\bmark\.pool\b")


def git(*words: str) -> list[str]:
    done = subprocess.run(
        ["git", "-c", "safe.directory=*", "-C", ROOT, *words], capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()


def table() -> tuple[dict[str, list[str]], dict[str, dict[str, list[str]]]]:
    """Read tests/turns.toml: the core's row, and name -> row of each group."""
    rows: dict[str, Any] = tomllib.loads((ROOT / "tests/turns.toml").read_text())
    return rows.pop("core"), rows


def below(path: str, places: list[str]) -> bool:
    """Return True if a file is one of these, or in one of these directories."""
    return any(path == place or path.startswith(place.rstrip("/") + "/") for place in places)


def with_text(pattern: re.Pattern[str]) -> list[str]:
    """List the test modules whose text matches."""
    found = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(path.relative_to(ROOT)) for path in found if pattern.search(path.read_text())]


def real_modules() -> list[str]:
    """List the modules with tests of real parts that need neither a pool nor Xen."""
    return [path for path in with_text(REAL) if not path.startswith("tests/system/")]


def changed_since(base: str) -> list[str]:
    """List the files that were changed since a commit, in commits and in the work tree, new ones too."""
    return sorted({*git("diff", "--name-only", base), *git("ls-files", "--others", "--exclude-standard")})


def last_base() -> str:
    """Return the commit from which a submission is counted: the newest that is six hours older than HEAD."""
    [newest] = git("log", "-1", "--format=%ct")
    older = git("rev-list", "-1", f"--before={int(newest) - 6 * 3600}", "HEAD")
    return older[0] if older else git("rev-list", "--max-parents=0", "HEAD")[-1]


def groups(base: str | None = None, turn: int | None = None) -> list[str]:
    """Choose the groups of a run, and the modules of others that have changed themselves."""
    _, rows = table()
    turn = int(git("rev-list", "--count", "HEAD")[0]) if turn is None else turn
    changed = changed_since(base or last_base())
    forced = {name for name, row in rows.items() for path in changed if below(path, row.get("sources", []))}
    chosen = [name for number, name in enumerate(rows) if number == turn % len(rows) or name in forced]
    others = [place for name, row in rows.items() if name not in chosen for place in row["modules"]]
    modules = [path for path in changed if below(path, others) and Path(path).name.startswith("test_")]
    return [*chosen, *(path for path in modules if (ROOT / path).exists())]


def of_groups(names: list[str], key: str) -> list[str]:
    """Join a column of several groups. A module by its path needs what its group needs.

    Raises `SystemExit` for a name that is neither.
    """
    _, rows = table()
    for path in [name for name in names if "/" in name]:
        for row in [row for row in rows.values() if below(path, row["modules"])]:
            rows[path] = row | {"modules": [path]}
    if unknown := [name for name in names if name not in rows]:
        sys.exit(f"{unknown[0]} is not a group of tests/turns.toml: {', '.join(table()[1])}")
    return list(dict.fromkeys(word for name in names for word in rows[name].get(key, [])))


def modules(names: list[str]) -> list[str]:
    """List the modules of groups that need no pool; without a name, those of the core."""
    _, rows = table()
    places = of_groups(names or list(rows), "modules")
    return [path for path in real_modules() if below(path, places) == bool(names)]


def pool_modules(names: list[str]) -> list[str]:
    """List the modules of the core and of groups that run in a pool."""
    mine = [f"{POOL}{name}.py" for name in table()[0]["pool"]]
    # What needs a pool for one test of its module, such as condor_submit, is short.
    others = [path for path in with_text(IN_POOL) if not path.startswith(POOL)]
    places = of_groups(names, "modules")
    return [path for path in with_text(IN_POOL) if path in mine or path in others or below(path, places)]


def streets(changed: list[str]) -> list[str]:
    """Find the tests of changed files: a test itself, and the deepest directory or module of tests for a source."""
    found: dict[str, None] = {}
    for path in changed:
        parts = Path(path).parts
        if parts[0] == "tests" and Path(path).name.startswith("test_") and (ROOT / path).exists():
            found[path] = None
        elif parts[:2] == ("src", "vmgahp") and path.endswith(".py"):
            inside = Path(*parts[2:])
            module = Path("tests") / inside.with_name(f"test_{inside.name}")
            if (ROOT / module).exists():
                found[str(module)] = None
            elif directories := [up for up in (Path("tests") / inside).parents if up != Path("tests")]:
                deepest = next((up for up in directories if (ROOT / up).is_dir()), None)
                if deepest and str(deepest) != ".":
                    found[str(deepest)] = None
        elif parts[0] in ("docs", "config", "packaging", "scripts"):
            street = {"docs": "tests/docs", "config": "tests/config", "packaging": "tests/packaging"}.get(parts[0])
            found[street or "tests/test_contributing.py"] = None
    directories = [path for path in found if (ROOT / path).is_dir()]
    whole = [path for path in found if not any(path != up and below(path, [up]) for up in directories)]
    return [*whole, *(["tests/test_house_rules.py"] if whole else [])]


def main(words: list[str]) -> None:
    match words:
        case ["groups", "all"]:
            lines = list(table()[1])
        case ["groups", *base]:
            lines = groups(*base[:1])
        case ["packages" | "setup" | "roots" as key, *names]:
            lines = of_groups(names, key)
        case ["modules", *names]:
            lines = modules(names)
        case ["pool", *names]:
            lines = pool_modules(names)
        case ["half"]:
            lines = with_text(re.compile(""))[int(git("rev-list", "--count", "HEAD")[0]) % 2 :: 2]
        case ["changed", base]:
            lines = streets(changed_since(base))
        case _:
            sys.exit(__doc__)
    print(*lines, sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
