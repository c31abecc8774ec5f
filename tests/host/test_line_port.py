"""A guest and its server tell each other lines, whatever else the guest says."""

import socket
import tempfile
from collections.abc import Iterator

import pytest

from vmgahp.host.runtime_dir import runtime_dir
from vmgahp.host.serial_capture import LONGEST_LINE, MOST_LINES, MOST_WAITING, LinePort

DEADLINE = 20.0


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def port(told: list[str]) -> Iterator[LinePort]:
    with tempfile.TemporaryDirectory(prefix="vc", dir="/tmp") as base:
        made = LinePort(f"{runtime_dir(base)}/run", told.append)
        yield made
        made.close()


def connect(port: LinePort) -> socket.socket:
    guest = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    guest.settimeout(DEADLINE)
    guest.connect(port.path)
    return guest


def lines(port: LinePort) -> list[str | None]:
    """What has come until now, when the port is closed."""
    port.close()
    return [port.lines.get() for _ in range(port.lines.qsize())]


@pytest.mark.parametrize(
    ("said", "heard"),
    [
        pytest.param(b"hello 1\nstarted\n", ["hello 1", "started"], id="lines"),
        pytest.param(b"hello 1\r\n", ["hello 1"], id="of a terminal"),
        pytest.param(b"hello 1", [], id="no end"),
        pytest.param(b"x" * (LONGEST_LINE + 1) + b"\nhello 1\n", ["hello 1"], id="too long"),
        pytest.param(b"x" * 10 * LONGEST_LINE + b" hello\nended exit 0\n", ["ended exit 0"], id="much too long"),
        pytest.param(b"a\0b\n\x1b[2J\n\xff\nhello 1\n", ["\ufffd", "hello 1"], id="no text"),
        pytest.param(
            b"".join(b"%d\n" % n for n in range(MOST_LINES + 5)), [str(n) for n in range(MOST_LINES)], id="many"
        ),
        pytest.param(b"\n \n\nhello 1\n", ["hello 1"], id="nothing"),
        pytest.param(b"outputs 3\n" * (MOST_WAITING + 5), ["outputs 3"] * MOST_WAITING, id="nobody takes them"),
        pytest.param(b"outputs 3\n" * (MOST_LINES + 5), ["outputs 3"] * (MOST_LINES + 5), id="one line repeated"),
    ],
)
def test_what_is_heard(port: LinePort, told: list[str], said: bytes, heard: list[str]) -> None:
    with connect(port) as guest:
        guest.sendall(said)
    assert lines(port) == heard
    assert len(told) == (len(said.splitlines()) > MOST_LINES and heard[0] == "0")


def test_a_line_is_whole_although_the_guest_was_saved_in_its_middle(port: LinePort) -> None:
    with connect(port) as guest:
        guest.sendall(b"ended ")
    with connect(port) as guest:
        guest.sendall(b"exit 3\n")
        assert port.lines.get(timeout=DEADLINE) == "ended exit 3"


def test_the_guest_hears_the_server(port: LinePort) -> None:
    port.say("taken")  # nobody is there
    with connect(port) as guest:
        guest.sendall(b"outputs 3\n")
        assert port.lines.get(timeout=DEADLINE) == "outputs 3"
        port.say("taken")
        assert guest.recv(100) == b"taken\n"
    port.say("again")
