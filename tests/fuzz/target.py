"""A target: a function that takes any bytes and fails where a promise of the module behind it is broken."""

import re
from collections.abc import Callable
from pathlib import Path
from time import thread_time
from typing import NamedTuple

CORPUS = Path(__file__).parent / "corpus"

CPU_SECONDS = 2.0
"""That one input may take."""

_WORD = re.compile(rb"[A-Za-z_][A-Za-z0-9_:.+-]{1,40}|[0-9]{1,20}")
_MOST_WORDS = 600

# fmt: off
NUMBERS = (
    b"", b"0", b"-1", b"1.5", b"00", b"255", b"256", b"65536", b"2147483648", b"4294967295", b"18446744073709551616",
    b"1e999", b"-1e-9", b"NaN", b"Infinity", b"0x10", b"1_0", b"\xc2\xb2", b"\xd9\xa3", b"9" * 400, b"9" * 4400,
)
"""What stands in place of a number: too large, too small, in other digits, no number at all."""
ODD = (
    *NUMBERS, b"\0", b"\n", b"\r\n", b"\\", b'"', b"'", b"\\\n", b"|", b"=", b":", b",", b";", b"..", b"/", b"$(A)",
    b"\xff\xff\xff\xff", b"\0\0\0\0", b"\xff\xfe", b"\xef\xbb\xbf", b"\x80", b"\xc3\x9f" * 9, b"\xe2\x80\xa8",
    b"\xed\xa0\x80", b"\xc4\xb0", b"[" * 990, b"{" * 600, b"(" * 300, b"a" * 5000, b"../" * 20, b"undefined", b"error",
    b"<!DOCTYPE a [<!ENTITY b 'c'>]>", b"<a>", b"</a>", b"&lt;", b"&#0;", b"null",
)
"""What readers have stumbled over: ends, signs, letters that are not ASCII, depth."""
# fmt: on


class Target(NamedTuple):
    """One of them."""

    name: str
    function: Callable[[bytes], None]

    def samples(self) -> list[Path]:
        """The files of its corpus, in a fixed order."""
        return sorted((CORPUS / self.name).iterdir())

    def words(self) -> list[bytes]:
        """The words of its samples, of which an input can be made anew."""
        found = dict.fromkeys(word for path in self.samples() for word in _WORD.findall(path.read_bytes()))
        return list(found)[:_MOST_WORDS]

    def run(self, data: bytes) -> None:
        """Try one input. Raises whatever says that a promise is broken."""
        began = thread_time()
        self.function(data)
        taken = thread_time() - began
        assert taken < CPU_SECONDS, f"{len(data)} bytes took {taken:.1f} s"


TARGETS: dict[str, Target] = {}


def target(function: Callable[[bytes], None]) -> Callable[[bytes], None]:
    """Makes a target of a function, by its name."""
    name = function.__name__.replace("_", "-")
    TARGETS[name] = Target(name, function)
    return function
