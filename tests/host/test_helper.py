"""A helper process: messages with descriptors both ways, and what either hears of the other's end."""

import os
import signal
import sys
import textwrap
from pathlib import Path

import pytest

from vmgahp.errors import MachineFault
from vmgahp.host import helper
from vmgahp.host.helper import Helper, HungUp

SECONDS = 20.0

ECHO = """\
    import os, sys
    from vmgahp.host.helper import CHANNEL, Channel, HungUp

    def main():
        channel = Channel(CHANNEL)
        try:
            while True:
                message = channel.receive()
                channel.send(message.word, message.data, message.descriptors)
        except HungUp:
            os._exit(7)

    main()
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A helper that says again what it hears."""
    path = tmp_path / "echo.py"
    path.write_text(textwrap.dedent(ECHO))
    monkeypatch.setattr(helper, "COMMAND", (sys.executable,))
    return str(path)


@pytest.mark.parametrize("length", [0, 100, helper.LARGEST, 3 << 20])
def test_a_message_of_any_length_arrives_with_its_descriptors(module: str, length: int, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("its content")
    open_file = os.open(tmp_path / "file", os.O_RDONLY)
    work = Helper(module)
    data = {"text": "x" * length, "number": 1, "list": [None, True, ("a", 2.5)]}
    work.send("word", data, [open_file, open_file])
    message = work.receive()
    assert (message.word, message.data) == ("word", data)
    assert [os.pread(each, 100, 0) for each in message.descriptors] == [b"its content"] * 2
    assert not any(os.get_inheritable(each) for each in message.descriptors)
    helper.close([open_file, *message.descriptors])
    work.dismiss(SECONDS)


def test_no_descriptor_but_its_own_reaches_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "count.py"
    path.write_text(
        "import os\nfrom vmgahp.host.helper import CHANNEL, Channel\n"
        "there = [number for number in range(100) if os.path.exists(f'/proc/self/fd/{number}')]\n"
        "Channel(CHANNEL).send('there', [there, os.readlink('/proc/self/fd/1'), os.getsid(0) == os.getpid()])\n"
    )
    monkeypatch.setattr(helper, "COMMAND", (sys.executable,))
    low, high = os.pipe()
    os.set_inheritable(low, True)
    work = Helper(str(path))
    assert work.receive().data == [[0, 1, 2, 3], "/dev/null", True]
    helper.close([low, high])
    work.dismiss(SECONDS)


def test_it_hears_the_end_of_its_server(module: str) -> None:
    work = Helper(module)
    work.send("word")
    work.receive()
    work.close()
    assert work.has_ended(SECONDS)
    work.dismiss(0)


def test_the_server_hears_its_end(module: str) -> None:
    work = Helper(module)
    work.kill()
    with pytest.raises(HungUp):
        work.receive()
    work.dismiss(SECONDS)
    with pytest.raises(HungUp):
        work.send("word")
    work.kill()  # one that is gone


def test_one_that_does_not_end_is_ended(module: str) -> None:
    work = Helper(module)
    work.send("word")
    work.receive()
    os.kill(work._pid, signal.SIGSTOP)
    work.dismiss(0.1)
    with pytest.raises(ProcessLookupError):
        os.kill(work._pid, 0)


def test_a_helper_that_cannot_be_started_is_the_machines_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(helper, "COMMAND", ("/nonexistent/python",))
    before = os.listdir("/proc/self/fd")
    with pytest.raises(MachineFault, match="No helper process can be started"):
        Helper("module")
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_a_spare_is_taken_once_and_one_that_has_ended_is_not(module: str) -> None:
    spare = helper.Spare(module)
    spare.get_ready()
    spare.get_ready()
    first, second = spare.take(), spare.take()
    assert first._pid != second._pid
    first.dismiss(0)
    second.dismiss(0)
    spare.get_ready()
    ready = spare._helper
    assert ready is not None
    ready.kill()
    assert ready.has_ended(10)
    taken = spare.take()
    assert taken is not ready
    taken.dismiss(0)


def test_a_spare_that_nobody_takes_is_gone_with_its_server(module: str) -> None:
    spare = helper.Spare(module)
    spare.get_ready()
    ready = spare._helper
    assert ready is not None
    spare.close()
    assert not os.path.exists(f"/proc/{ready._pid}")
    spare.get_ready()
    assert spare._helper is None
