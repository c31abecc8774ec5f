r"""The wire: bytes to lines, lines to words, words to lines. No I/O, no knowledge of the commands.

A request is a line of words separated by one unescaped space, tab or CR; a backslash makes the next
character plain. ``\r`` unescaped is dropped and ``\n`` unescaped ends the line, as in ``PBuffer`` and
``parse_vmgahp_command`` of HTCondor's ``src/condor_vm-gahp``. The client reads a reply into a buffer of
10 KiB a line and dies of a longer one (``VMGahpServer::read_argv``), so no line leaves here above 8 KiB.
"""

from vmgahp import GREETING as GREETING

MAX_REQUEST = 1 << 20
"""Bytes of one request line. An attribute of a job ad (its environment, say) may be long; a line beyond
this is thrown away as it arrives and reported as `TOO_LONG`."""

MAX_REPLY = 8192
"""Bytes of one reply line, the newline included."""

TOO_LONG = b"\0too long"
"""Stands for a line that was thrown away; a NUL is in no good line, so nothing else can equal it."""


class LineReader:
    """Collects bytes and gives them back as lines, however they were cut up on the way."""

    __slots__ = ("_buffer", "_discarding", "_ready", "_searched")

    def __init__(self) -> None:
        self._ready: list[bytes] = []
        """Whole lines that come before what is in the buffer, the next one last."""
        self._buffer = bytearray()
        self._searched = 0
        self._discarding = False

    def is_empty(self) -> bool:
        """Whether nothing is kept of what has come."""
        return not (self._buffer or self._ready or self._discarding)

    def receive(self, data: bytes) -> bool:
        """Whether `next_line` has anything to do now."""
        if self._ready or self._discarding or len(self._buffer) + len(data) > MAX_REQUEST:
            self._buffer += data
            return True
        if data.find(b"\n") < 0:  # which is found out three times sooner than by `in`
            self._buffer += data
            return False
        whole = bytes(self._buffer) + data if self._buffer else data
        if whole.find(b"\\\n") >= 0:
            self._buffer += data
            return True
        # What clients mostly send: lines none of which is too long, no end of them escaped.
        head, _, tail = whole.rpartition(b"\n")
        if head.find(b"\\\r") < 0:
            self._ready = head.replace(b"\r", b"").split(b"\n")
        else:
            self._ready = [_without_returns(line) for line in head.split(b"\n")]
        self._ready.reverse()
        self._buffer[:] = tail
        self._searched = 0
        return True

    def whole_lines(self) -> list[bytes]:
        """All the lines that `next_line` would give, one after another."""
        lines, self._ready = self._ready[::-1], []
        while (line := self.next_line()) is not None:
            lines.append(line)
        return lines

    def give_back(self, lines: list[bytes]) -> None:
        """The last of what `whole_lines` gave is to be given again."""
        self._ready = lines[::-1]

    def next_line(self) -> bytes | None:
        """The next whole line without its end, `TOO_LONG` for one that was not kept, or None for now."""
        if self._ready:
            return self._ready.pop()
        buffer = self._buffer
        while True:
            end = buffer.find(b"\n", self._searched)
            if end < 0:
                break
            self._searched = end + 1
            if is_escaped(buffer, end):
                continue
            line = bytes(buffer[:end])
            del buffer[: end + 1]
            self._searched = 0
            if self._discarding or len(line) > MAX_REQUEST:
                self._discarding = False
                return TOO_LONG
            return _without_returns(line)
        self._searched = len(buffer)
        if len(buffer) > MAX_REQUEST:
            # Keep a last backslash: whether the newline to come is escaped hangs on it.
            keep = 1 if is_escaped(buffer, len(buffer)) else 0
            del buffer[: len(buffer) - keep]
            self._searched = 0
            self._discarding = True
        return None


def is_escaped(buffer: bytes | bytearray, position: int) -> bool:
    """Whether an odd number of backslashes stands right before `position`."""
    start = position
    while start and buffer[start - 1] == 0x5C:
        start -= 1
    return (position - start) % 2 == 1


def _without_returns(line: bytes) -> bytes:
    if b"\r" not in line:
        return line
    if b"\\" not in line:
        return line.replace(b"\r", b"")
    if line.find(b"\r") == len(line) - 1 and line[-2:-1] != b"\\":
        return line[:-1]
    kept = bytearray()
    escaped = False
    for byte in line:
        if byte == 0x0D and not escaped:
            continue
        kept.append(byte)
        escaped = byte == 0x5C and not escaped
    return bytes(kept)


def split(line: bytes) -> list[bytes]:
    r"""The words of a request line.

    Two separators in a row make an empty word. An escaped *last* character of a line is dropped, as the
    reference does it: ``RESULTS\ `` is RESULTS.
    """
    if line.find(b"\\") < 0:
        return line.replace(b"\t", b" ").replace(b"\r", b" ").split(b" ")
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
    """One word of a reply, safe against being split by the client."""
    if not word:
        return word
    word = word.replace("\\", "\\\\")
    for special in " \r\n":
        if special in word:
            word = word.replace(special, "\\" + special)
    return word


def words(line: str) -> list[str]:
    r"""The words of a reply or result line, as the client takes it apart: split at unescaped spaces.

    The other way round of `reply`; two spaces in a row make an empty word.
    """
    if "\\" not in line:
        return line.split(" ")
    found = [""]
    letters = iter(line)
    for letter in letters:
        if letter == " ":
            found.append("")
        else:
            found[-1] += next(letters, "") if letter == "\\" else letter
    return found


def reply(*words: str) -> bytes:
    """A reply or result line of escaped words, its newline included, never above `MAX_REPLY`.

    Words that would make it longer are left out, and a single word that is too long is cut: a short
    answer is one that the client survives.
    """
    whole = " ".join(words)
    if len(whole) < MAX_REPLY - 2 and _is_plain(whole) and whole.count(" ") == len(words) - 1 and words[0]:
        return whole.encode() + b"\n"
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
    line += b"\n"
    return bytes(line)


def _is_plain(text: str) -> bool:
    """Whether nothing in it is escaped or replaced on its way to the client, but for blanks."""
    return text.isascii() and text.isprintable() and "\\" not in text
