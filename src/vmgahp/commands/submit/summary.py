"""The report of a front end: which parts of a file are carried over, changed, not used, or left out.

Everything is reported. A loss that would make it a different VM, such as a missing disk, is *left out* and prevents the
submit file from being written; other parts that are not in the submit file are listed unchanged.
"""

import json
import os
import shutil
import textwrap
from enum import Enum
from typing import NamedTuple, TextIO

MOST_LINES = 200
"""The maximum number of lines of one outcome that are shown; an untrusted file may have tens of thousands of
elements."""


class SubmitError(Exception):
    """The reason why no submit file is written; the text is a sentence, and `hint` says what to do."""

    def __init__(self, problem: str, hint: str = "") -> None:
        super().__init__(problem)
        self.problem = problem
        self.hint = hint


class Outcome(Enum):
    """The outcome of one part, in the words of the report, in increasing order of importance."""

    NOT_USED = "not used"
    CARRIED = "carried over"
    CHANGED = "changed"
    LOST = "left out"


class Told(NamedTuple):
    """One device, or another part, of the file that was read."""

    place: str
    """The line and element, or the key; empty for an option of the command line."""
    what: str
    outcome: Outcome
    became: str
    """The words for it in the submit file."""
    why: str

    def line(self, more: int) -> str:
        """Format it as a line for people, with the number of further entries that differ only in their places."""
        told = ": ".join(filter(None, (self.what, "; ".join(filter(None, (self.became, self.why))))))
        place = "" if self.what.startswith(self.place) else self.place
        places = printable(place) + f"{', and' * bool(place)} {more} more like it" * bool(more)
        return f"{printable(told)} [{places.strip()}]" if places else printable(told)


class Summary:
    """A report, collected while a file is read and shown when the submit file is written."""

    def __init__(self, *sources: str) -> None:
        self.entries: list[Told] = []
        self.notes: list[str] = []
        self.sources = {os.path.realpath(path) for path in sources}
        """The files that were read, which must not be overwritten."""
        self.made: list[str] = []
        """The intermediate files, which are removed after a failure."""

    def carry(self, place: str, what: str, became: str) -> None:
        """Report a part that is in the submit file."""
        self.entries.append(Told(place, what, Outcome.CARRIED, became, ""))

    def change(self, place: str, what: str, became: str, why: str) -> None:
        """Report a part that is in the submit file in another form, which serves the guest as well."""
        self.entries.append(Told(place, what, Outcome.CHANGED, became, why))

    def skip(self, place: str, what: str, why: str = "") -> None:
        """Report a part, unchanged, that is not in the submit file."""
        self.entries.append(Told(place, what, Outcome.NOT_USED, "", why))

    def lose(self, place: str, what: str, why: str) -> None:
        """Report a part that is not in the submit file, and without which the VM would be a different one."""
        self.entries.append(Told(place, what, Outcome.LOST, "", why))

    def advise(self, text: str) -> None:
        """Report a requirement for the execute machine, or other advice for the user."""
        if text not in self.notes:
            self.notes.append(text)

    def of(self, outcome: Outcome) -> list[Told]:
        """Return the entries with this outcome."""
        return [entry for entry in self.entries if entry.outcome is outcome]

    @property
    def losses(self) -> int:
        """The number of parts that are left out."""
        return len(self.of(Outcome.LOST))

    def show(self, out: TextIO) -> None:
        """Print everything: a line for each entry, or for several similar unused ones, folded on a terminal."""
        lines = []
        for outcome in Outcome:
            entries = self.of(outcome)
            alike: dict[Told, list[Told]] = {}
            for entry in entries:
                alike.setdefault(entry._replace(place="") if outcome is Outcome.NOT_USED else entry, []).append(entry)
            told = [f"  {same[0].line(len(same) - 1)}" for same in alike.values()]
            if entries:
                lines += [f"{outcome.value.capitalize()} ({len(entries)}):", *told[:MOST_LINES]]
            if len(told) > MOST_LINES:
                lines.append(f"  ... and {len(told) - MOST_LINES} lines more; --json has them all")
        if self.notes:
            lines += ["Note:", *(f"  {printable(note)}" for note in self.notes)]
        if out.isatty():
            lines = _folded(lines)
        out.write("".join(f"{line}\n" for line in lines))

    def as_json(self, **others: object) -> str:
        """Format the report for programs, with the `others`; in ASCII."""
        entries = [entry._asdict() | {"outcome": entry.outcome.value} for entry in self.entries]
        return json.dumps({**others, "entries": entries, "notes": self.notes}, indent=2)


def _folded(lines: list[str]) -> list[str]:
    """Fold the lines to the width of the terminal, the further ones of an entry indented."""
    fold = textwrap.TextWrapper(
        width=max(shutil.get_terminal_size().columns, 40), subsequent_indent="      ", break_on_hyphens=False
    )
    return [part for line in lines for part in fold.wrap(line)]


def printable(text: str) -> str:
    """Sanitize a text of an untrusted file for a terminal: on one line, without control characters."""
    if not text.isprintable():
        text = "".join(c if c.isprintable() else "?" for c in text)
    return text if len(text) <= 500 else text[:500] + "..."
