"""The report on the parts of a VM, and the error of a VM of which no submit file is made.

Everything that a front end reads is reported. A loss that would make it a different VM, such as a missing disk, is
*left out* and prevents the submit file from being written; other parts that are not in the submit file are listed
unchanged.
"""

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import NamedTuple, TextIO

from vmgahp.commands.arguments import NotDone

BOOT = {"hd": "hd", "hdd": "hd", "cdrom": "cdrom", "fd": "fd", "floppy": "fd"}
"""Boot device, in lower case -> its class; all others are networks."""


class SubmitError(NotDone):
    """The reason why no submit file is written: `problem` is a sentence, and `hint` says what to do."""

    def __init__(self, problem: str, hint: str = "") -> None:
        super().__init__(f"{problem} Hint: {hint}" if hint else problem)
        self.problem = problem
        self.hint = hint


@contextmanager
def os_errors_as(problem: str, hint: str = "") -> Iterator[None]:
    """Turn an OSError into a `SubmitError` of that problem, half a sentence."""
    try:
        yield
    except OSError as error:
        raise SubmitError(f"{problem} ({error.strerror or error}).", hint) from error


def read_file(path: str, most: int) -> bytes:
    """Read a file of the user's, and at most one byte more than `most`. Raises `SubmitError`."""
    with os_errors_as(f"{path} cannot be read"), open(path, "rb") as file:
        return file.read(most + 1)


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

    def line(self) -> str:
        """Format it as a line for people."""
        told = ": ".join(filter(None, (self.what, "; ".join(filter(None, (self.became, self.why))))))
        return printable(told) + ("" if self.what.startswith(self.place) else f" [{printable(self.place)}]")


class Summary:
    """A report, collected while a file is read and shown when the submit file is written."""

    def __init__(self, *sources: str) -> None:
        self.entries: list[Told] = []
        self.notes: list[str] = []
        self.sources = {os.path.realpath(path) for path in sources}
        """The files that were read, which must not be overwritten."""
        self.made: list[str] = []
        """The intermediate files, which are removed after a failure (`unmake`)."""

    def unmake(self) -> None:
        """Remove the intermediate files that are there."""
        for path in filter(os.path.exists, self.made):
            os.unlink(path)

    def keep(self, place: str, what: str, became: str, *reasons: str) -> None:
        """Report a part that is in the submit file: as it was, or for these `reasons` in a form that serves as well."""
        outcome = Outcome.CHANGED if reasons else Outcome.CARRIED
        self.entries.append(Told(place, what, outcome, became, "; ".join(reasons)))

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

    def boot_order(self, entries: Iterable[tuple[str, str]], became: str = "") -> list[str]:
        """Return the classes of a boot order, given by its places and words; `became` is the report on each disk of it.

        A network before all disks is a loss, and one after them is not used.
        """
        classes: list[str] = []
        for place, word in entries:
            if kind := BOOT.get(word.lower()):
                classes.append(kind)
                if became:
                    self.keep(place, f"boot from {word}", became)
            elif classes:
                self.skip(place, f"boot from {word}", "jobs boot from disks, and from them first")
            else:
                self.lose(place, f"boot from {word}", "jobs boot from disks only")
        return list(dict.fromkeys(classes))

    def new_variables(self, place: str, what: str) -> None:
        """Report that the variables of UEFI are new ones."""
        why = "its boot entries stay behind: a system is found by its EFI/BOOT directory alone"
        self.keep(place, what, "new UEFI variables", why)

    @property
    def losses(self) -> int:
        """The number of parts that are left out."""
        return sum(entry.outcome is Outcome.LOST for entry in self.entries)

    def show(self, out: TextIO) -> None:
        """Print everything, a line for each entry, the most important ones at the end."""
        lines = []
        for outcome in Outcome:
            if told := [f"  {entry.line()}" for entry in self.entries if entry.outcome is outcome]:
                lines += [f"{outcome.value.capitalize()} ({len(told)}):", *told]
        if self.notes:
            lines += ["Note:", *(f"  {printable(note)}" for note in self.notes)]
        out.write("".join(f"{line}\n" for line in lines))

    def document(self, **others: object) -> dict[str, object]:
        """Return the report as an object for ``--json``, with the `others`."""
        entries = [entry._asdict() | {"outcome": entry.outcome.value} for entry in self.entries]
        return {**others, "entries": entries, "notes": self.notes}


def printable(text: str) -> str:
    """Sanitize a text of an untrusted file for a terminal: on one line, without control characters."""
    text = "".join(c if c.isprintable() else "?" for c in text[:501])
    return text if len(text) <= 500 else text[:500] + "..."


PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+=-]*", re.ASCII)
"""The form of a name that needs no quoting in any list of HTCondor's."""


def simple_name(*texts: str) -> str:
    """Make a name for files and jobs from the first of some arbitrary texts of which something is left."""
    plain = (re.sub(r"[^A-Za-z0-9_.-]+", "_", text.strip(), flags=re.ASCII).strip("._-")[:100] for text in texts)
    return next(filter(None, plain))


def number(text: str) -> int:
    """Parse a plausible whole number; 0 for any other text."""
    return int(text) if re.fullmatch("[1-9][0-9]{0,17}", text) else 0
