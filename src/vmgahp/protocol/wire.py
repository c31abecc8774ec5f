r"""The wire: bytes to lines, lines to words, words to lines, and the lines of one job ad.

No I/O, no knowledge of the commands. A request is a line of words separated by one unescaped space, tab or CR; a
backslash makes the next character plain. ``\r`` unescaped is dropped and ``\n`` unescaped ends the line, as in
``PBuffer`` and ``parse_vmgahp_command`` of HTCondor's ``src/condor_vm-gahp``. The client reads a reply into a buffer of
10 KiB a line and dies of a longer one (``VMGahpServer::read_argv``), so no line leaves here above 8 KiB.

The lines of a job ad are bounded and kept unparsed until its START; a line with a secret is dropped at once.
"""

from collections.abc import Callable

from vmgahp import GREETING as GREETING
from vmgahp.text import is_private

MAX_REQUEST = 1 << 20
"""The most bytes of one request line. An attribute of a job ad (its environment, say) may be long; a line beyond
this is thrown away as it arrives and reported as `TOO_LONG`."""

MAX_REPLY = 8192
"""The most bytes of one reply line, the newline included."""

TOO_LONG = b"\0too long"
"""The stand-in for a line that was thrown away; a NUL is in no valid line, so nothing else equals it."""


class LineReader:
    """A reader that turns bytes, however they were cut up on the way, into lines."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._searched = 0
        self._discarding = False

    def receive(self, data: bytes) -> None:
        """Buffer bytes, for `next_line` to find lines in."""
        self._buffer += data

    def next_line(self) -> bytes | None:
        """Return the next whole line without its end, `TOO_LONG` for one that was dropped, or None for now."""
        line = self.next_raw()
        return line if line is None or line is TOO_LONG else _without_returns(line[:-1])

    def next_raw(self) -> bytes | None:
        """Return the next whole line with its end, else as `next_line`."""
        buffer = self._buffer
        while (end := buffer.find(b"\n", self._searched)) >= 0:
            self._searched = end + 1
            if not is_escaped(buffer, end):
                return self._take(end + 1)
        self._searched = len(buffer)
        if len(buffer) > MAX_REQUEST:
            # Keep a last backslash: it decides whether the next newline is escaped.
            keep = 1 if is_escaped(buffer, len(buffer)) else 0
            del buffer[: len(buffer) - keep]
            self._searched = 0
            self._discarding = True
        return None

    def rest(self) -> bytes:
        """Return the bytes since the last whole line, and forget them."""
        return self._take(len(self._buffer))

    def _take(self, size: int) -> bytes:
        line = TOO_LONG if self._discarding or size > MAX_REQUEST + 1 else bytes(self._buffer[:size])
        del self._buffer[:size]
        self._searched = 0
        self._discarding = False
        return line


def is_escaped(buffer: bytes | bytearray, position: int) -> bool:
    """Return True if an odd number of backslashes stands right before `position`."""
    start = position
    while start and buffer[start - 1] == 0x5C:
        start -= 1
    return (position - start) % 2 == 1


def _without_returns(line: bytes) -> bytes:
    if b"\\" not in line:
        return line.replace(b"\r", b"")
    kept = bytearray()
    escaped = False
    for byte in line:
        if byte == 0x0D and not escaped:
            continue
        kept.append(byte)
        escaped = byte == 0x5C and not escaped
    return bytes(kept)


_SEPARATORS_TO_BLANKS = bytes.maketrans(b"\t\r\n", b"   ")


def split(line: bytes) -> list[bytes]:
    r"""Split a request line into its words.

    Two separators in a row make an empty word. An escaped *last* character of a line is dropped, as in the
    reference: ``RESULTS\ `` is RESULTS.
    """
    if b"\\" not in line:
        return line.translate(_SEPARATORS_TO_BLANKS).split(b" ")
    words = [bytearray()]
    position, last = 0, len(line) - 1
    while position <= last:
        byte = line[position]
        if byte == 0x5C:
            position += 1
            if position < last:
                words[-1].append(line[position])
        elif byte in b" \t\r\n":
            words.append(bytearray())
        else:
            words[-1].append(byte)
        position += 1
    return [bytes(word) for word in words]


def escape(word: str) -> str:
    """Escape one word of a reply, so that the client does not split it."""
    for special in "\\ \r\n":
        word = word.replace(special, "\\" + special)
    return word


def words(line: str) -> list[str]:
    r"""Split a reply or result line into words as the client does: at unescaped spaces.

    This is the inverse of `reply`; two spaces in a row make an empty word.
    """
    found: list[list[str]] = [[]]
    letters = iter(line)
    for letter in letters:
        if letter == " ":
            found.append([])
        else:
            found[-1].append(next(letters, "") if letter == "\\" else letter)
    return ["".join(word) for word in found]


def reply(*words: str) -> bytes:
    """Return an escaped line of at most `MAX_REPLY` bytes; words beyond are left out, a single one is cut."""
    line = bytearray()
    for word in words:
        encoded = escape(word).encode("utf-8", "replace").replace(b"\0", b"?")
        room = MAX_REPLY - len(line) - 2
        if len(encoded) > room:
            if line:
                break
            encoded = encoded[:room]
            if is_escaped(encoded, len(encoded)):
                encoded = encoded[:-1]
        if line:
            line += b" "
        line += encoded
    return bytes(line) + b"\n"


MAX_AD, MAX_AD_LINES = 16 << 20, 1 << 14
"""The most bytes and lines of one job ad, which usually has a few hundred lines; the rest is skipped. Each line costs
some hundred bytes, however short it is."""

END = b"CLASSAD_END"


class AdLines:
    """The lines of an ad that are kept, and counts of those that are skipped."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []
        self.complete = True
        self._size = 0
        self._bad = self._beyond = 0
        """The numbers of lines skipped as malformed, and because the ad is too large."""

    def take(self, line: bytes) -> None:
        """Keep a line of the ad, unless it is malformed, a secret, or more than an ad may have."""
        self._size += len(line)
        name, equals, _ = line.partition(b"=")
        name = name.strip()
        if line is TOO_LONG or b"\0" in line or not equals or not name:
            self._bad += 1
            self.complete &= line is not TOO_LONG
        elif self._size > MAX_AD or len(self.lines) >= MAX_AD_LINES:
            self._beyond += 1
            self.complete = False
        elif not is_private(name.decode("utf-8", "surrogateescape")):
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
