"""What scripts/check asks of packaging/requirements.lock, which scripts/lock makes: ``lock.py fits|audit [FILE]``.

`fits` says what of pyproject.toml is not in it; `audit` asks pip-audit whether anything in it is known to be
vulnerable. The exit status is 0 where nothing is wrong, 1 where something is, and `NOT_CHECKED` where the registry
cannot be asked or knows none of the packages. The reasons are printed, and the packages that it does not know.
"""

import json
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
LOCK = ROOT / "packaging/requirements.lock"

EXTRAS = ("vsphere",)
"""Those that are used at run time."""

AUDIT_SECONDS = 15

NOT_CHECKED = os.EX_TEMPFAIL
"""The exit status for neither good nor bad, which scripts/lib/setup.sh knows."""

_PIN = re.compile(r"^([A-Za-z0-9._-]+)==(\S+)(?: ; [^\\\n]+)? \\\n((?:    --hash=\S+(?: \\)?\n)+)", re.MULTILINE)
_HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}")


def wanted() -> list[Requirement]:
    """What pyproject.toml asks for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = (text for extra in EXTRAS for text in project["optional-dependencies"][extra])
    return [Requirement(text) for text in (*project["dependencies"], *extras)]


def fits(text: str) -> list[str]:
    """What is wrong with a lock file: a sentence each."""
    found = {canonicalize_name(name): (version, hashes) for name, version, hashes in _PIN.findall(text)}
    problems = [f"{name}: no SHA-256" for name, (_, hashes) in found.items() if not _HASH.search(hashes)]
    if left := _PIN.sub("", "".join(line for line in text.splitlines(True) if not line.startswith("#"))).strip():
        problems.append(f"it has more than pins with hashes: {left.splitlines()[0][:80]}")
    waiting, needed = wanted(), set()
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        if name not in found:
            problems.append(f"{requirement} is not in it")
        elif not requirement.specifier.contains(found[name][0], prereleases=True):
            problems.append(f"{name}=={found[name][0]} is not {requirement}")
        if name not in needed:
            needed.add(name)
            try:
                waiting += [Requirement(text) for text in distribution(name).requires or ()]
            except PackageNotFoundError:
                problems.append(f"{name} is not installed here")
    return problems + [f"nothing needs {name}" for name in sorted(found.keys() - needed)]


def audit(path: Path) -> tuple[int, list[str]]:
    """Ask pip-audit about the packages of a file; the exit status, and what there is to say of it."""
    command = ["pip-audit", "--disable-pip", "--require-hashes", "--progress-spinner=off", "--timeout=5"]
    command += ["--format=json", f"--requirement={path}"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=AUDIT_SECONDS, check=False)
        answer = json.loads(done.stdout)["dependencies"]
    except (OSError, subprocess.TimeoutExpired) as error:
        return NOT_CHECKED, [str(error)]
    except (ValueError, KeyError, TypeError):
        said = done.stderr.decode("utf-8", "replace").strip().splitlines() or ["pip-audit said nothing"]
        return NOT_CHECKED, [f"the registry cannot be reached: {said[-1][:100]}"]
    wrong = [
        f"{one['name']} {one['version']}: {flaw['id']}, mended in {', '.join(flaw['fix_versions']) or 'no release'}"
        for one in answer
        for flaw in one.get("vulns", ())
    ]
    unknown = [one["name"] for one in answer if "skip_reason" in one]
    if len(unknown) == len(answer):
        return NOT_CHECKED, [f"the registry knows none of the {len(answer)} packages"]
    remarks = [f"the registry does not know {', '.join(unknown)}"] if unknown else []
    return int(bool(wrong)), wrong + remarks


def main(words: list[str]) -> int:
    """Print what there is to say, and return the exit status: 0 where nothing is wrong."""
    path = Path(words[1]) if len(words) > 1 else LOCK
    if words[0] == "audit":
        status, lines = audit(path)
    else:
        lines = fits(path.read_text())
        status = int(bool(lines))
    for line in lines:
        sys.stdout.write(f"{line}\n")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
