"""The faults that are tried, and their results in the last recorded run (``tests/tried.json``)."""

import json
import runpy
from collections.abc import Iterable
from datetime import date
from pathlib import Path
from typing import NamedTuple

_TESTS = Path(__file__).parents[2] / "tests"
_CASES = runpy.run_path(str(_TESTS / "faults" / "cases.py"))
_FAULTS: dict[str, str] = _CASES["FAULTS"]
_OPERATIONS: dict[str, tuple[str, ...]] = _CASES["OPERATIONS"]


class _Count(NamedTuple):
    """The results of one fault at all points of one operation."""

    operation: str
    fault: str
    tried: int
    lost: int


def kinds() -> str:
    """Return the table of the faults."""
    return "| fault | what it is |\n|---|---|\n" + "".join(f"| {fault} | {what} |\n" for fault, what in _FAULTS.items())


def tried(record: Path = _TESTS / "tried.json") -> str:
    """Return tables of the faults tried and survived, and a list of the losses."""
    part = json.loads(record.read_text())["parts"].get("faults") if record.exists() else None
    if part is None:
        return "Not recorded yet.\n"
    counts = [_Count(*name.split(" | "), *numbers) for name, numbers in part["counts"]["faults"].items()]
    stories = part["counts"]["random sequences"]
    number = sum(count.tried for count in counts)
    groups = list(dict.fromkeys(fault.split(": ")[0] for fault in _FAULTS))
    lines = [
        f"On {date.fromisoformat(part['date']):%-d %B %Y} {number} faults were tried, in {part['seconds'] / 60:.0f} "
        f"minutes, on {part['system']} (commit `{part['commit'][:12]}`); {number - _lost(counts)} survived.",
        "",
        "| during | points | " + " | ".join(f"{group} fails" for group in groups) + " |",
        "|---" * (len(groups) + 2) + "|",
    ]
    for operation, points in _OPERATIONS.items():
        during = [count for count in counts if count.operation == operation]
        cells = [_survived(count for count in during if count.fault.startswith(f"{group}: ")) for group in groups]
        lines.append(f"| {operation} | {len(points)} | {' | '.join(cells)} |")
    lines += ["", "| fault | survived |", "|---|---|"]
    lines += [f"| {fault} | {_survived(count for count in counts if count.fault == fault)} |" for fault in _FAULTS]
    lines += ["", "Lost:", ""]
    lines += [f"- {each.operation}, {each.fault}: {each.lost} of {each.tried}" for each in counts if each.lost]
    lines += [] if _lost(counts) else ["- nothing."]
    lines += [
        "",
        f"{len(stories)} random sequences had {sum(steps for steps, _ in stories.values())} operations, half of them "
        f"with a fault; {sum(lost for _, lost in stories.values())} sequences ended in a loss.",
    ]
    return "\n".join(lines) + "\n"


def _lost(counts: Iterable[_Count]) -> int:
    return sum(count.lost for count in counts)


def _survived(counts: Iterable[_Count]) -> str:
    found = list(counts)
    number = sum(count.tried for count in found)
    return f"{number - _lost(found)} of {number}" if number else "-"
