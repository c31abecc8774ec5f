"""The lines of one job ad as they arrive: bounded, without secrets, parsed only by its START.

Until then the lines are kept unparsed; a line with a secret is dropped at once.
"""

from _collections_abc import Callable  # collections.abc brings all of collections
from itertools import repeat

from vmgahp.protocol.wire import TOO_LONG
from vmgahp.text import PRIVATE_ATTRIBUTES, PRIVATE_PREFIX, is_private

MAX_AD, MAX_AD_LINES = 16 << 20, 1 << 14
"""The most bytes and lines of one job ad, which usually has a few hundred lines; the rest is skipped. Each line costs
some hundred bytes, however short it is."""

END = b"CLASSAD_END"

_PRIVATE = {name.encode() for name in (*PRIVATE_ATTRIBUTES, PRIVATE_PREFIX)}
_SIGNS = tuple(sorted(name for name in _PRIVATE if not any(other in name for other in _PRIVATE - {name})))
"""The substrings of secret names: the name of every secret attribute contains at least one of them."""


FEW = 4
"""The least number of lines for which checking all at once is faster than one by one."""


class AdLines:
    """The lines of an ad that are kept, and counts of those that are skipped."""

    __slots__ = ("_bad", "_beyond", "_size", "complete", "lines")

    def __init__(self) -> None:
        self.lines: list[bytes] = []
        self.complete = True
        """True unless a line or the whole ad was too long."""
        self._size = 0
        self._bad = self._beyond = 0
        """The numbers of lines skipped as malformed, and because the ad is too large."""

    def take(self, lines: list[bytes]) -> int | None:
        """Take lines of the ad; return the number of lines up to and with its end, or None if it goes on."""
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
        """Take all lines in one go and return True, or return False if one of them needs a closer look."""
        text = b"\n".join(lines)
        size = self._size + sum(map(len, lines))
        if size > MAX_AD or len(self.lines) + len(lines) > MAX_AD_LINES or not text.isascii():
            return False
        if b"\0" in text or text.count(b"\n") != len(lines) - 1:
            return False  # an end of line can be escaped
        if min(map(bytes.find, lines, repeat(b"="))) < 1 or min(lines)[0] <= 0x20:
            return False  # one has no name, or begins with a blank
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
        """Parse each line; skip and count those for which `parse` returns None."""
        pairs = [pair for line in self.lines if (pair := parse(line.decode("utf-8", "surrogateescape"))) is not None]
        self._bad = len(self.lines) - len(pairs)
        return pairs

    def tell_skipped(self, log: Callable[[str], None]) -> None:
        """Log how many lines were skipped, without their text, which may be a damaged secret."""
        if self._bad:
            log(f"skipped {self._bad} bad lines of the job ad")
        if self._beyond:
            most = f"{MAX_AD_LINES} lines or {MAX_AD} bytes"
            log(f"skipped {self._beyond} attributes of the job ad: it has more than {most}")
        self._bad = self._beyond = 0


def _is_secret(line: bytes) -> bool:
    return is_private(line.partition(b"=")[0].strip().decode("utf-8", "surrogateescape"))
