"""The record of runs: ``build/times.json`` of one run, ``tests/tried.json`` of the last full one.

Run by the scripts, by Debian's Python 3.11 and the standard library alone:

    record.py run DIRECTORY OUT      one run of scripts/test: DIRECTORY has `parts` and `steps` (written by the script)
                                     and a JSON file of each part of pytest (tests/lab/record.py); printed, kept in OUT
    record.py join OUT MACHINE=FILE…  several runs on several machines as one, printed
    record.py tried TIMES            the parts of a full run into tests/tried.json
    record.py age                    which parts of tests/tried.json are so old that a full run is due

The exit status is 1 where a run has too many retries (`run`, `join`), or where the record is too old (`age`).
"""

import json
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TRIED = ROOT / "tests/tried.json"

TOO_MANY = 3
"""Retries that fail a run."""
SHOWN = 50
"""Slowest tests that are printed."""
WARNED, TOO_OLD = 60, 150
"""Commits without a full run."""
RECORDED = (
    *("unit", "user", "smoke on trixie", "smoke on sid"),  # bare machines: not the root of the pool
    *("libvirt", "attacks", "faults", "pool", "xen", "fuzz", "node", "selinux", "modular", "modular-faults"),
)
"""The parts of a full run: a name of scripts/test's, on Debian 12 where nothing else is said."""


def git(*words: str) -> str:
    done = subprocess.run(["git", "-c", "safe.directory=*", "-C", ROOT, *words], capture_output=True, text=True)
    return done.stdout.strip()


def read_run(directory: Path) -> dict[str, Any]:
    """Read what scripts/test and pytest have left of one run."""
    parts: dict[str, Any] = {}
    for line in (directory / "parts").read_text().splitlines():
        name, seconds, outcome = line.split("\t")
        parts[name] = {"seconds": int(seconds), "outcome": outcome}
        if (record := directory / f"{name}.json").exists():
            parts[name] |= {key: value for key, value in json.loads(record.read_text()).items() if key != "seconds"}
    steps = [line.split("\t") for line in (directory / "steps").read_text().splitlines()]
    release = platform.freedesktop_os_release()
    return {
        "commit": git("rev-parse", "HEAD"),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "system": release["PRETTY_NAME"],
        # Debian's next release has the code name of testing, and sid no release file of its own.
        "suite": "sid" if "/sid" in release["PRETTY_NAME"] else release.get("VERSION_CODENAME", ""),
        "setup": [[float(seconds), what] for seconds, what in steps],
        "parts": parts,
    }


def lines_of(run: dict[str, Any], prefix: str = "") -> list[str]:
    """Render the parts of a run, and the steps of its set-up that took a second or more."""
    lines = []
    if slow := [(seconds, what) for seconds, what in run["setup"] if seconds >= 1]:
        lines.append(f"{prefix}set-up  {sum(seconds for seconds, _ in slow):7.0f} s")
        lines += [f"{prefix}        {seconds:7.0f} s  {what}" for seconds, what in slow]
    for name, part in run["parts"].items():
        counts = ", ".join(f"{part[key]} {key}" for key in ("passed", "failed", "skipped") if part.get(key))
        if part.get("rerun"):
            counts += f", {len(part['rerun'])} rerun"
        lines.append(f"{prefix}{name:9} {part['seconds']:5d} s  {part['outcome']}{f'  ({counts})' if counts else ''}")
    return lines


def slowest(runs: dict[str, dict[str, Any]]) -> list[str]:
    """Render the slowest tests of all parts."""
    taken = [
        (seconds, f"{prefix}{part}: {name}")
        for prefix, run in runs.items()
        for part, record in run["parts"].items()
        for seconds, name in record.get("slowest", [])
    ]
    return [f"{seconds:8.1f} s  {name}" for seconds, name in sorted(taken, reverse=True)[:SHOWN]]


def show(runs: dict[str, dict[str, Any]]) -> int:
    """Print what came of runs, and return the exit status: 1 for too many retries."""
    reran = [name for run in runs.values() for part in run["parts"].values() for name in part.get("rerun", [])]
    print(f"\nThe {SHOWN} slowest tests:", *slowest(runs), "\nThe parts:", sep="\n")
    for prefix, run in runs.items():
        print(*lines_of(run, prefix), sep="\n")
    for name in reran:
        print(f"RERAN {name}")
    if len(reran) < TOO_MANY:
        return 0
    print(f"FAILED: {len(reran)} tests had to be run again, {TOO_MANY} are too many. Look at each: it may be a defect.")
    return 1


def write(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


def join(out: Path, named: list[str]) -> int:
    """Join the runs of several machines. Their parts are known as `machine: part`."""
    runs: dict[str, dict[str, Any]] = {}
    for one in named:
        machine, _, path = one.partition("=")
        if Path(path).exists():
            runs[f"{machine}: "] = json.loads(Path(path).read_text())
    write(out, {name.removesuffix(": "): run for name, run in runs.items()})
    return show(runs)


def tried(times: Path) -> int:
    """Take the parts of a full run over into the record. A part that failed is recorded as it is."""
    record = json.loads(TRIED.read_text())
    for run in json.loads(times.read_text()).values():
        for name, part in run["parts"].items():
            key = name if run["suite"] == "bookworm" else f"{name} on {run['suite']}"
            if key in RECORDED:
                taken = ("seconds", "passed", "failed", "skipped", "counts", "ran on")
                kept = {key: part[key] for key in taken if key in part}
                kept |= {"outcome": part["outcome"], "rerun": len(part.get("rerun", []))}
                record["parts"][key] = {"commit": run["commit"], "date": run["date"], "system": run["system"]} | kept
    record["parts"] = dict(sorted(record["parts"].items()))
    write(TRIED, record)
    return 0


def age() -> int:
    """Print which parts were last run whole so long ago that a full run is due."""
    record = json.loads(TRIED.read_text())
    late: dict[str, int] = {}
    for name in RECORDED:
        part = record["parts"].get(name, {"commit": record["since"]})
        if (behind := git("rev-list", "--count", f"{part['commit']}..HEAD")) and int(behind) >= WARNED:
            late[name] = int(behind)
    if late:
        print(f".ci/run full is due, at {TOO_OLD} commits at the latest. Commits since the last whole run:")
        print(*[f"{name}: {behind}" for name, behind in late.items()], sep=", ")
    return int(max(late.values(), default=0) >= TOO_OLD)


def main(words: list[str]) -> int:
    match words:
        case ["run", directory, out]:
            run = read_run(Path(directory))
            write(Path(out), run)
            return show({"": run})
        case ["join", out, *named]:
            return join(Path(out), named)
        case ["tried", times]:
            return tried(Path(times))
        case ["age"]:
            return age()
    sys.exit(__doc__)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
