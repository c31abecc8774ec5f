"""The lines of one job ad as they come in: with limits, without secrets, read by its START alone.

Until then they stay as they are; a line that says a secret is dropped at once.
"""

from _collections_abc import Callable  # collections.abc brings all of collections
from itertools import repeat

from vmgahp.protocol.wire import TOO_LONG
from vmgahp.text import PRIVATE_ATTRIBUTES, PRIVATE_PREFIX, is_private

MAX_AD, MAX_AD_LINES = 16 << 20, 1 << 14
"""Bytes and lines of one job ad, which has a few hundred lines; what comes beyond is skipped. Each line costs some
hundred bytes, however short it is."""

END = b"CLASSAD_END"

_PRIVATE = {name.encode() for name in (*PRIVATE_ATTRIBUTES, PRIVATE_PREFIX)}
_SIGNS = tuple(sorted(name for name in _PRIVATE if not any(other in name for other in _PRIVATE - {name})))
"""In the name of each attribute that is a secret there is one of these."""


FEW = 4
"""Fewer lines are sooner looked at one by one."""


class AdLines:
    """What is kept of an ad, and what is left out of it."""

    __slots__ = ("_bad", "_beyond", "_size", "complete", "lines")

    def __init__(self) -> None:
        self.lines: list[bytes] = []
        self.complete = True
        """Nothing of it was too long."""
        self._size = 0
        self._bad = self._beyond = 0
        """How many are skipped as malformed, and for want of room."""

    def take(self, lines: list[bytes]) -> int | None:
        """Take what has come of the ad: the number of lines up to its end, that one included; None where it goes on."""
        taken = None
        for number, line in enumerate(lines, start=1):
            if len(line) == len(END) and line.upper() == END:
                taken = number
                lines = lines[: number - 1]
                break
        if len(lines) < FEW or not self._take_all(lines):
            for line in lines:
                self._take(line)
        return taken

    def _take_all(self, lines: list[bytes]) -> bool:
        """Take lines that are all good and have room, looking at all of them at once; else False."""
        text = b"\n".join(lines)
        size = self._size + sum(map(len, lines))
        if size > MAX_AD or len(self.lines) + len(lines) > MAX_AD_LINES or not text.isascii():
            return False
        if b"\0" in text or text.count(b"\n") != len(lines) - 1:
            return False  # an end of line can be escaped
        if min(map(bytes.find, lines, repeat(b"="))) < 1 or min(lines)[0] <= 0x20:
            return False  # one has no name, or a blank before it
        lower = text.lower()
        secrets = set()
        for sign in _SIGNS:
            at = lower.find(sign)
            while at >= 0:
                number = lower.count(b"\n", 0, at)
                if _is_secret(lines[number]):
                    secrets.add(number)
                at = lower.find(sign, at + 1)
        if secrets:
            lines = [line for number, line in enumerate(lines) if number not in secrets]
        self._size = size
        self.lines += lines
        return True

    def _take(self, line: bytes) -> None:
        self._size += len(line)
        name, equals, _ = line.partition(b"=")
        if line is TOO_LONG or b"\0" in line or not equals or not name.strip():
            self._bad += 1
            self.complete &= line is not TOO_LONG
        elif self._size > MAX_AD or len(self.lines) >= MAX_AD_LINES:
            self._beyond += 1
            self.complete = False
        elif not _is_secret(line):
            self.lines.append(line)

    def pairs(self, parse: Callable[[str], tuple[str, str] | None]) -> list[tuple[str, str]]:
        """The ad by what reads a line, which gives None for a bad one."""
        pairs = [pair for line in self.lines if (pair := parse(line.decode("utf-8", "surrogateescape"))) is not None]
        self._bad = len(self.lines) - len(pairs)
        return pairs

    def tell_skipped(self, log: Callable[[str], None]) -> None:
        """One line of the log for all that were skipped; they themselves are not shown: they may be damaged secrets."""
        if self._bad:
            log(f"skipped {self._bad} bad lines of the job ad")
        if self._beyond:
            most = f"{MAX_AD_LINES} lines or {MAX_AD} bytes"
            log(f"skipped {self._beyond} attributes of the job ad: it has more than {most}")
        self._bad = self._beyond = 0


def _is_secret(line: bytes) -> bool:
    return is_private(line.partition(b"=")[0].strip().decode("utf-8", "surrogateescape"))
