"""What a front end carried over, what it did not, and where that stands.

Nothing is dropped in silence. What would make another VM of it, such as a missing sound device, is told apart
from what the execute machine settles by itself, such as a PCI address.
"""

from typing import TextIO


class SubmitError(Exception):
    """No submit file can be written; the text is a sentence, and `hint` one of what to do."""

    def __init__(self, problem: str, hint: str = "") -> None:
        super().__init__(problem)
        self.problem = problem
        self.hint = hint


class Summary:
    """Collected while a file is read, shown when the submit file is written."""

    def __init__(self) -> None:
        self.carried_over: list[str] = []
        self.lost: list[tuple[str, str]] = []
        """Place and what stands there, of what the VM will not have."""
        self.settled: list[tuple[str, str]] = []
        """The same of what the execute machine or HTCondor settles."""
        self.advice: list[str] = []
        self.made: list[str] = []
        """Files that were written on the way, to be removed where nothing comes of it."""

    def carry(self, text: str) -> None:
        """Something is in the submit file."""
        self.carried_over.append(text)

    def lose(self, place: str, what: str) -> None:
        """Something is not in the submit file, and the VM will be another for it."""
        self.lost.append((place, what))

    def settle(self, place: str, what: str) -> None:
        """Something is not in the submit file because it is not the job's to say."""
        self.settled.append((place, what))

    def advise(self, text: str) -> None:
        """Something that the execute machine must have, or that the person should know."""
        if text not in self.advice:
            self.advice.append(text)

    def show(self, out: TextIO) -> None:
        """Print everything."""
        lines = [f"  {text}" for text in self.carried_over]
        lines.insert(0, "Carried over:")
        for heading, entries in (
            (f"NOT carried over ({len(self.lost)}):", self.lost),
            (f"Left to the execute machine ({len(self.settled)}):", self.settled),
        ):
            if entries:
                lines.append(heading)
                lines += [f"  {printable(place)}: {printable(what)}" for place, what in entries]
        if self.advice:
            lines += ["Note:", *(f"  {text}" for text in self.advice)]
        out.write("\n".join(printable(line) for line in lines) + "\n")


def printable(text: str) -> str:
    """A text of a stranger's file as it goes to a terminal: on one line, without control characters."""
    if not text.isprintable():
        text = "".join(c if c.isprintable() else "?" for c in text)
    return text if len(text) <= 500 else text[:500] + "..."
