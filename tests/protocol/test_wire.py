"""The codec: bytes, however cut up, make the same lines; words make one line; and of an ad, what is kept."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vmgahp.protocol import wire
from vmgahp.protocol.session import Session
from vmgahp.protocol.wire import MAX_AD, MAX_AD_LINES, TOO_LONG, AdLines
from vmgahp.text import PRIVATE_ATTRIBUTES, PRIVATE_PREFIX


def lines_of(*chunks: bytes) -> list[bytes]:
    reader = wire.LineReader()
    lines = []
    for chunk in chunks:
        reader.receive(chunk)
        while (line := reader.next_line()) is not None:
            lines.append(line)
    return lines


def client_words(line: bytes) -> list[bytes]:
    """How condor_starter splits a reply (VMGahpServer::read_argv), written anew for the test."""
    words, word, escaped = [], bytearray(), False
    for byte in line:
        if escaped:
            word.append(byte)
            escaped = False
        elif byte == 0x5C:
            escaped = True
        elif byte == 0x0D:
            continue
        elif byte == 0x20:
            words.append(bytes(word))
            word.clear()
        elif byte == 0x0A:
            words.append(bytes(word))
            return words
        else:
            word.append(byte)
    raise AssertionError("no end of line")


@pytest.mark.parametrize(
    ("sent", "lines"),
    [
        (b"VERSION\r\n", [b"VERSION"]),
        (b"VERSION\nRESULTS\n", [b"VERSION", b"RESULTS"]),
        *((b"VER\rSION\n", [b"VERSION"]), (b"a\\\nb\n", [b"a\\\nb"]), (b"a\\\\\nb\n", [b"a\\\\", b"b"])),
        *((b"a\\\r\n", [b"a\\\r"]), (b"no end", []), (b"\n", [b""])),
    ],
)
def test_lines(sent: bytes, lines: list[bytes]) -> None:
    assert lines_of(sent) == lines


@given(st.lists(st.text("a\\\r\n").map(str.encode)))
def test_raw_lines_are_the_bytes_that_came(chunks: list[bytes]) -> None:
    reader, lines = wire.LineReader(), []
    for chunk in chunks:
        reader.receive(chunk)
        lines += iter(reader.next_raw, None)
    assert b"".join([*lines, reader.rest()]) == b"".join(chunks)
    assert len(lines) == len(lines_of(*chunks))


@pytest.mark.parametrize(
    ("chunks", "rest"),
    [([b"x" * (1 << 20)] * 10, b"x\n"), ([b"x" * wire.MAX_REQUEST + b"\\"], b"\nstill the same line\n")],
    ids=["endless", "with an escaped newline"],
)
def test_too_long_a_line_is_thrown_away_and_the_next_one_is_read(chunks: list[bytes], rest: bytes) -> None:
    reader = wire.LineReader()
    for chunk in chunks:
        reader.receive(chunk)
        assert reader.next_line() is None
        assert len(reader._buffer) <= wire.MAX_REQUEST
    reader.receive(rest + b"VERSION\n")
    assert reader.next_line() is wire.TOO_LONG
    assert reader.next_line() == b"VERSION"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        *((b"VERSION", [b"VERSION"]), (b"A 1  2", [b"A", b"1", b"", b"2"]), (b" A", [b"", b"A"])),
        *((b"A\t1\r2", [b"A", b"1", b"2"]), (b"VER\\SION", [b"VERSION"]), (b"a\\ b c", [b"a b", b"c"])),
        *((b"RESULTS\\ ", [b"RESULTS"]), (b"a\\\\ b", [b"a\\", b"b"]), (b"", [b""])),
    ],
)
def test_split(line: bytes, words: list[bytes]) -> None:
    assert wire.split(line) == words


@given(st.lists(st.text(min_size=1).filter(lambda t: "\0" not in t), min_size=1, max_size=5))
def test_the_client_reads_back_the_words_of_a_reply(words: list[str]) -> None:
    assert client_words(wire.reply(*words)) == [word.encode("utf-8", "replace") for word in words]


@given(st.lists(st.text(alphabet="a \\\r\n\0é", max_size=6000), min_size=1, max_size=5))
def test_a_reply_is_one_short_line_whatever_it_is_made_of(words: list[str]) -> None:
    line = wire.reply(*words)
    assert len(line) <= wire.MAX_REPLY
    assert line.endswith(b"\n")
    assert b"\0" not in line
    client_words(line)
    assert len(lines_of(line)) == 1


# --- the lines of a job ad

LINES = [b"A = 1", b'B = "x = y"', b"C=3", b'Args = "CLASSAD_END"', b'Owner = "nobody"']
ODD = [
    *(b"", b"no equals sign", b"= nothing", b" \t= nothing", b" Led = 1", b"Nul = \0"),
    "Umlaut = ä".encode(),
    *(b"\xff = 1", b'ClaimId = "secret"', b' cLaImId="secret"', b'_Condor_PrivX = "secret"'),
    "trans\N{LATIN SMALL LETTER F}er\N{KELVIN SIGN}ey = secret".encode(),
    *(b"Claim = 1", b"Two = \\\nclaimid = 1", b"ClaimId = \\\nsecret", b'Text = "ClaimId = 5"', TOO_LONG),
]


def taken(lines: list[bytes]) -> tuple[list[bytes], bool, list[str]]:
    """Return the lines that an ad keeps, True if those are all, and the log about the others."""
    ad, said = AdLines(), list[str]()
    for line in lines:
        ad.take(line)
    ad.tell_skipped(said.append)
    return ad.lines, ad.complete, said


@pytest.mark.parametrize("odd", ODD, ids=repr)
def test_an_odd_line_is_kept_as_it_is_or_not_at_all(odd: bytes) -> None:
    lines = [*LINES, odd, *LINES]
    assert taken(lines)[0] in ([*LINES, *LINES], lines)
    assert b"secret" not in b"".join(taken(lines)[0])


@pytest.mark.parametrize("name", [*sorted(PRIVATE_ATTRIBUTES), PRIVATE_PREFIX, PRIVATE_PREFIX + "ate"])
@pytest.mark.parametrize("change", [str.lower, str.upper, str.title])
def test_no_secret_is_kept(name: str, change: "type[str]") -> None:
    assert taken([*LINES, f"{change(name)} = 1".encode()])[0] == LINES


def test_the_limits_of_an_ad() -> None:
    kept, complete, said = taken([b"bad", *[b"A = 1"] * (MAX_AD_LINES + 1)])
    assert (len(kept), complete) == (MAX_AD_LINES, False)
    assert [line.split(" of ")[0] for line in said] == ["skipped 1 bad lines", "skipped 1 attributes"]
    long = b"A = " + b"x" * (1 << 20)
    kept, complete, _ = taken([long] * 20)
    assert (sum(map(len, kept)) <= MAX_AD, complete) == (True, False)
    assert len(kept) == MAX_AD // len(long)


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_what_follows_the_ad_in_the_same_bytes_is_read_too(size: int) -> None:
    made = Session("kvm", lambda _text: None, lambda _text: None)
    data = b"VERSION\r\nCLASSAD\r\n" + b"\r\n".join([*LINES, b'ClaimId = "x"', b"classad_end", b"VERSION", b"SUPP"])
    for start in range(0, len(data), size):
        made.receive(data[start : start + size], 0.0)
    made.receive(b"ORT_VMS\r\nVERSION\r\n", 0.0)
    version, *lines = made.take_output().split(b"\n")
    assert lines == [b"S", b"S", version, b"S xen kvm", version, b""]
    assert made._ad.lines == LINES
