"""The lines of one job ad as they arrive: bounded, without secrets, parsed only by its START.

Until then the lines are kept unparsed; a line with a secret is dropped at once.
"""

from _collections_abc import Callable  # collections.abc brings all of collections

from vmgahp.protocol.wire import TOO_LONG
from vmgahp.text import is_private

MAX_AD, MAX_AD_LINES = 16 << 20, 1 << 14
"""The most bytes and lines of one job ad, which usually has a few hundred lines; the rest is skipped. Each line costs
some hundred bytes, however short it is."""

END = b"CLASSAD_END"


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

    def take(self, line: bytes) -> None:
        """Keep a line of the ad, unless it is malformed, a secret, or more than an ad may have."""
        self._size += len(line)
        name, equals, _ = line.partition(b"=")
        if line is TOO_LONG or b"\0" in line or not equals or not name.strip():
            self._bad += 1
            self.complete &= line is not TOO_LONG
        elif self._size > MAX_AD or len(self.lines) >= MAX_AD_LINES:
            self._beyond += 1
            self.complete = False
        elif not is_private(name.strip().decode("utf-8", "surrogateescape")):
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
