"""The codec: however bytes are cut up, the same lines come out; whatever words go in, one line comes out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vmgahp.protocol import wire


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


PROTOCOL_BYTES = st.lists(st.sampled_from([b"\r", b"\n", b"\\", b" ", b"A", b"=", b"\0", b"\xff"])).map(b"".join)


@pytest.mark.parametrize(
    ("sent", "lines"),
    [
        (b"VERSION\r\n", [b"VERSION"]),
        (b"VERSION\nRESULTS\n", [b"VERSION", b"RESULTS"]),
        (b"VER\rSION\n", [b"VERSION"]),
        (b"a\\\nb\n", [b"a\\\nb"]),
        (b"a\\\\\nb\n", [b"a\\\\", b"b"]),
        (b"a\\\r\n", [b"a\\\r"]),
        (b"no end", []),
        (b"\n", [b""]),
    ],
)
def test_lines(sent: bytes, lines: list[bytes]) -> None:
    assert lines_of(sent) == lines


@given(PROTOCOL_BYTES)
def test_lines_do_not_depend_on_how_bytes_arrive(data: bytes) -> None:
    assert lines_of(*(data[i : i + 1] for i in range(len(data)))) == lines_of(data)


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
        (b"VERSION", [b"VERSION"]),
        (b"A 1  2", [b"A", b"1", b"", b"2"]),
        (b" A", [b"", b"A"]),
        (b"A\t1\r2", [b"A", b"1", b"2"]),
        (b"VER\\SION", [b"VERSION"]),
        (b"a\\ b c", [b"a b", b"c"]),
        (b"RESULTS\\ ", [b"RESULTS"]),
        (b"a\\\\ b", [b"a\\", b"b"]),
        (b"", [b""]),
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
