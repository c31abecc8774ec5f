"""Transcripts are read and written without loss of a byte, and without a secret."""

import errno
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vmgahp import errors
from vmgahp.protocol import transcript, wire
from vmgahp.protocol.transcript import CLIENT, SERVER, STDERR, Line, TranscriptError, Writer, create_file

TEXT = "< hello\n> A\n< S\n< R\n>   B\n> \n< E\nexit 0\n"
LINES = st.binary(min_size=1).map(lambda data: data.replace(b"\n", b"") + b"\n") | st.sampled_from(
    [b"VERSION\r\n", b"S\n", b"\n", b"\r\n", b'"\n', b"\\\n", b"a\tb\r\n", "ünïcode\r\n".encode(), b"partial", b" \n"]
)


def written(lines: list[Line]) -> str:
    return "".join(transcript.written(line.mark, line.data) for line in lines)


def test_parsing_and_writing_are_inverse_and_spaces_that_were_sent_are_kept() -> None:
    read = transcript.parse(TEXT)
    assert written(read.lines) + "exit 0\n" == TEXT
    assert (read.texts(">"), read.exit_status) == (["A", "  B", ""], 0)


def test_comments_and_empty_lines_are_left_out_and_tabs_and_backslashes_are_as_they_are() -> None:
    read = transcript.parse("# a comment\n> CONDOR\tVM\\ \n\n# < no\n< S\n \r\nexit 3")
    assert (read.texts(">"), read.texts("<"), read.exit_status) == (["CONDOR\tVM\\ "], ["S"], 3)


@given(st.lists(st.builds(Line, st.sampled_from([CLIENT, SERVER, STDERR]), LINES)))
def test_any_bytes_come_back(lines: list[Line]) -> None:
    text = written(lines)
    assert transcript.parse(text).lines == lines
    assert all(letter.isprintable() or letter in "\n\t" for letter in text)


def test_the_end_and_other_bytes_are_seen_in_a_literal() -> None:
    assert transcript.written(CLIENT, b"VERSION\n") == ">b'VERSION\\n'\n"
    assert transcript.written(SERVER, b"\x1b[31m\xff\n") == "<b'\\x1b[31m\\xff\\n'\n"
    assert transcript.written(SERVER, b"S") == "<b'S'\n"
    assert transcript.written(SERVER, b'"S"\n') == '< "S"\n'


@pytest.mark.parametrize(
    "row",
    [
        *(">VERSION", ">b'VERSION", "<b'a'b'", "<b'ü'", "<b'\\x1'", "<b'\\", "<b'", "<b'' + b''", "@ soon", "exit x"),
        *("root:x:0:0:root:/root:/bin/bash", "  > VERSION", "exit", "\0\0", "x" * 5000),
    ],
)
def test_what_cannot_be_read_is_refused_by_its_number(row: str) -> None:
    with pytest.raises(TranscriptError, match=r"^line 2: "):
        transcript.parse(f"> A\n{row}\n")


SECRETS = [
    b'ClaimId = "<127.0.0.1:9618?a=b>#17#4#hush"\r\n', b"claimid=hush\r\n", b'Capability = "hush\\\n hush"\r\n',
    b'TransferKey = "a\\"hush"\r\n', b'_condor_privKey = "hush"\r\n', b'Environment = "TOKEN=hush OTHER=hush"\r\n',
    b"Env = hush\r\n", b'PublicClaims = "<127.0.0.1:9618>#17#4#hush"\r\n',
]  # fmt: skip


@pytest.mark.parametrize("data", SECRETS)
def test_no_secret_is_written(tmp_path: Path, data: bytes) -> None:
    path = str(tmp_path / "talk.txt")
    writer = Writer(create_file(path))
    for mark in (CLIENT, SERVER, STDERR):
        writer.line(mark, data)
    writer.comment(data.decode())
    text = Path(path).read_text()
    assert "hush" not in text
    name = data.partition(b"=")[0].decode().strip()
    assert all(line.startswith(name) for line in transcript.parse(text).texts(">")), "the attribute is still there"


def test_an_attribute_with_a_hidden_value_is_one_that_classads_know() -> None:
    assert transcript.redacted(SECRETS[0]) == b'ClaimId = "<hidden>"\r\n'
    assert transcript.redacted(b'Cmd = "/bin/true"\r\n') == b'Cmd = "/bin/true"\r\n'


def test_the_writer_says_when(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([100.0, 100.0, 100.0004, 101.25])
    monkeypatch.setattr(transcript.time, "monotonic", lambda: next(times))
    path = str(tmp_path / "talk.txt")
    writer = Writer(create_file(path))
    writer.line(CLIENT, b"VERSION\r\n")
    writer.line(SERVER, b"S\n")
    writer.line(SERVER, wire.TOO_LONG)
    writer.line(SERVER, b"")
    writer.line(SERVER, b"R\n")
    writer.exit(0)
    text = Path(path).read_text()
    assert text == "@ 0.000\n> VERSION\n< S\n# < a line of more than 1048576 bytes is left out\n@ 1.250\n< R\nexit 0\n"
    assert transcript.parse(text).texts(">") == ["VERSION"]


# ---- the file ---------------------------------------------------------------------------------------


def test_the_file_is_new_and_nobody_elses(tmp_path: Path) -> None:
    path = str(tmp_path / "new.txt")
    os.close(create_file(path))
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    with pytest.raises(errors.MachineFault, match="exists"):
        create_file(path)


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with pytest.raises(errors.MachineFault):
        create_file(str(tmp_path / "link"))
    assert not (tmp_path / "target").exists()


def test_in_a_directory_each_gets_a_name_of_its_own(tmp_path: Path) -> None:
    os.close(create_file(str(tmp_path)))
    [path] = tmp_path.iterdir()
    assert path.name.endswith(f"-{os.getpid()}.txt")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
@pytest.mark.parametrize("how", ["owner", "mode", "above"])
def test_root_writes_where_nobody_else_can(tmp_path: Path, how: str) -> None:
    place = tmp_path / "above" / "place"
    place.mkdir(parents=True)
    if how == "mode":
        place.chmod(0o777)
    else:
        os.chown(place if how == "owner" else place.parent, 54321, 54321)
    with pytest.raises(errors.MachineFault, match="reached by"):
        create_file(str(place))
    assert list(place.iterdir()) == []


def test_lines_of_several_threads_are_written_whole(tmp_path: Path) -> None:
    path = str(tmp_path / "talk.txt")
    writer = Writer(create_file(path))

    def write(mark: str) -> None:
        for number in range(500):
            writer.line(mark, f"{number}\n".encode())

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(write, (CLIENT, SERVER)))
    read = transcript.load(path)
    assert read.texts(">") == read.texts("<") == [str(number) for number in range(500)]


def test_a_full_disk_loses_lines_and_says_so_once() -> None:
    complaints: list[str] = []
    writer = Writer(os.open("/dev/full", os.O_WRONLY), complaints.append)
    writer.line(CLIENT, b"A\r\n")
    writer.line(CLIENT, b"B\r\n")
    assert complaints == [f"The transcript has gaps: {os.strerror(errno.ENOSPC)}."]


def test_a_gap_is_told_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transcript.time, "monotonic", lambda: 0.0)
    path = str(tmp_path / "talk.txt")
    writer = Writer(create_file(path))
    writer.line(CLIENT, b"A\r\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "write", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
        writer.line(CLIENT, b"B\r\n")
        writer.line(SERVER, b"S\n")
    writer.line(CLIENT, b"D\r\n")
    assert Path(path).read_text() == "@ 0.000\n> A\n\n# 2 lines were lost here\n> D\n"
    assert transcript.load(path).texts(">") == ["A", "D"]
