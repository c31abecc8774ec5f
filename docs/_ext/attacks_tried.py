"""The attacks that were tried, as the record of the newest full run counts them (``tests/tried.json``)."""

import ast
import json
from pathlib import Path

from command_line import plain

TESTS = Path(__file__).resolve().parents[2] / "tests"
NOT_RECORDED = "Not recorded yet.\n"


def tables(record: Path = TESTS / "tried.json") -> str:
    """Render what was tried, by what is attacked, by the attacker, and by QEMU's user."""
    parts = json.loads(record.read_text())["parts"] if record.exists() else {}
    if "attacks" not in parts:
        return NOT_RECORDED
    part = parts["attacks"]
    counts = part.get("counts", {})
    surfaces = {_subject(surface): numbers for surface, numbers in counts.get("attacks by surface", {}).items()}
    outcomes = ", ".join(f"{part.get(word, 0)} {word}" for word in ("passed", "failed", "skipped"))
    return "\n".join(
        (
            f"Tried on {part['date']} at commit `{part['commit'][:12]}`, on {plain(part['system'])}, in "
            f"{part['seconds'] / 60:.0f} minutes: of the tests {outcomes}, {part.get('rerun', 0)} run again.\n",
            _table("what is attacked", surfaces),
            _table("attacker", counts.get("attacks by attacker", {})),
            _table("QEMU", counts.get("attacks by mode", {})),
        )
    )


def _table(title: str, counts: dict[str, list[int]]) -> str:
    total = [sum(numbers) for numbers in zip(*counts.values(), strict=True)] or [0, 0]
    rows = [*sorted(counts.items()), ("all", total)]
    lines = [f"| {key} | {tried} | {tried - breached} | {breached} |\n" for key, (tried, breached) in rows]
    return f"| {title} | tried | stopped | breached |\n|---|---|---|---|\n" + "".join(lines)


def _subject(surface: str) -> str:
    """Link a surface to its module, by the subject in that module's docstring."""
    path = TESTS / "attacks" / f"test_{surface}.py"
    if not path.exists():  # it was there at the commit of the record
        return surface
    subject = (ast.get_docstring(ast.parse(path.read_text())) or "").partition(":")[0]
    return f"[{subject.rstrip('.')}](../../tests/attacks/{path.name})"
