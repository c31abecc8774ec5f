"""What a guest says on its console and its line port: all of it arrives, whatever it is, and nothing is left behind."""

import contextlib
import errno
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from vmgahp.errors import MachineFault
from vmgahp.host import serial_capture
from vmgahp.host.runtime_dir import LONGEST_PATH, runtime_dir, sweep
from vmgahp.host.serial_capture import CUT, LONGEST_LINE, MOST_LINES, MOST_WAITING, TAIL, ConsoleCapture, LinePort
from vmgahp.testing.contract import until

DEADLINE = 20.0


@pytest.fixture
def base():
    """A directory with a short name, as sockets need it."""
    with tempfile.TemporaryDirectory(prefix="vc", dir="/tmp") as place:
        yield place


class Console:
    """A capture with its file, and a QEMU that connects to it."""

    def __init__(self, base, log):
        self.base = base
        self.log = log
        self.told = []
        self.captures = []

    def open_output(self):
        return os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def start(self, limit=1 << 20, **options):
        directory = runtime_dir(self.base)
        capture = ConsoleCapture(
            f"{directory}/console", options.pop("open_output", self.open_output), limit, self.told.append, **options
        )
        self.captures.append(capture)
        return capture

    @property
    def text(self):
        return self.log.read_bytes()


@pytest.fixture
def console(base, tmp_path):
    one = Console(base, tmp_path / "vm_console.log")
    yield one
    for capture in one.captures:
        capture.close()


@pytest.mark.parametrize(
    ("limit", "runs", "kept", "told"),
    [
        pytest.param(1 << 20, [[bytes(range(256)) * 16]], bytes(range(256)) * 16, 0, id="bytes as they are"),
        pytest.param(1 << 20, [[b"before it\n"], [b"after it\n"]], b"before it\nafter it\n", 0, id="restarts"),
        pytest.param(10, [[b"0123456", b"789abcdef", b"more"]], b"0123456789" + CUT % 10, 1, id="too much"),
        pytest.param(10, [[b"0123456789"]], b"0123456789", 0, id="exactly the limit"),
        pytest.param(10, [[b"01234567"]] * 3, b"0123456701" + CUT % 10, 1, id="too much over restarts"),
        pytest.param(0, [[b"x"]], CUT % 0, 1, id="nothing"),
    ],
)
def test_what_is_kept(console, limit, runs, kept, told):
    for pieces in runs:
        capture = console.start(limit=limit)
        with connect(capture) as guest:
            for piece in pieces:
                guest.sendall(piece)
        capture.close()
    assert console.text == kept
    assert len(console.told) == told


def test_the_end_is_remembered_although_the_file_has_reached_its_limit(console):
    console.log.write_bytes(b"of an earlier run\n")
    capture = console.start(limit=30)
    assert capture.tail() == b""
    with connect(capture) as guest:
        for number in range(3 * TAIL // 1024):
            guest.sendall(b"%d".ljust(1024) % number)
        guest.sendall(b"the last words\n")
    capture.close()
    assert capture.tail().endswith(b"the last words\n")
    assert len(capture.tail()) == TAIL
    assert b"last words" not in console.text


def test_the_hypervisor_may_connect_again(console):
    """As it does when a saved VM is restored."""
    capture = console.start()
    for number in range(5):
        with connect(capture) as guest:
            guest.sendall(b"%d\n" % number)
    until(lambda: console.text == b"0\n1\n2\n3\n4\n", "all five")


def test_what_the_guest_prints_arrives_while_it_runs_and_a_connection_that_breaks_is_no_error(console):
    capture = console.start()
    guest = connect(capture)
    guest.sendall(b"a")
    until(lambda: console.text == b"a", "the byte")
    guest.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    guest.close()
    with connect(capture) as guest:
        guest.sendall(b"b")
        until(lambda: console.text == b"ab", "the next")
    assert console.told == []


def test_close_keeps_what_still_waits(console, monkeypatch):
    """Even from a QEMU that nobody has accepted yet: a guest's last words matter most."""
    served = threading.Event()
    monkeypatch.setattr(ConsoleCapture, "_serve", lambda self: served.wait(DEADLINE) and None)
    capture = console.start()
    with connect(capture) as first:
        first.sendall(b"Kernel panic\n")
    with connect(capture) as second:
        second.sendall(b"rebooted\n")
    served.set()
    capture.close()
    assert console.text == b"Kernel panic\nrebooted\n"


def test_close_takes_the_rest_of_a_live_connection(console):
    capture = console.start()
    with connect(capture) as guest:
        guest.sendall(b"x" * 100_000)
        capture.close()
        assert console.text == b"x" * 100_000


def test_close_does_not_wait_for_a_flood_to_end(console):
    capture = console.start(limit=1000)
    stop = threading.Event()

    def flood():
        with connect(capture) as guest, contextlib.suppress(OSError):
            while not stop.is_set():
                guest.sendall(b"y" * 65536)

    thread = threading.Thread(target=flood)
    thread.start()
    try:
        until(lambda: capture.written >= 1000, "the flood")
        capture.close()  # the flood continues until after this
        until(lambda: not capture._thread.is_alive(), "its thread to end")
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize(("size", "seconds"), [(1 << 60, 0.2), (1000, 1e9)])
def test_close_is_bounded_by_time_and_by_bytes(console, monkeypatch, size, seconds):
    """Each bound alone ends it, also where the other end always has more."""
    taken = []
    monkeypatch.setattr(serial_capture, "CLOSE_BYTES", size)
    monkeypatch.setattr(serial_capture, "CLOSE_SECONDS", seconds)
    monkeypatch.setattr(ConsoleCapture, "_receive", lambda self, connection: taken.append(1) or 1)
    capture = console.start()
    with connect(capture):
        capture._thread.join = lambda _timeout: threading.Thread.join(capture._thread)
        capture.close()
        assert not capture._thread.is_alive()
    assert 0 < len(taken) <= size


def test_a_full_disk_loses_output_and_not_the_guest(console, monkeypatch):
    capture = console.start()
    full = threading.Event()
    refused = threading.Event()
    real = os.write

    def write(descriptor, data):
        if descriptor == capture._output and full.is_set():
            refused.set()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, data)

    monkeypatch.setattr(os, "write", write)
    with connect(capture) as guest:
        guest.sendall(b"kept ")
        until(lambda: console.text == b"kept ", "what is kept")
        full.set()
        for _ in range(3):
            refused.clear()
            guest.sendall(b"lost ")
            assert refused.wait(DEADLINE)
        full.clear()
        guest.sendall(b"kept again")
        until(lambda: console.text == b"kept kept again", "what comes after")
    assert len(console.told) == 1
    assert "No space left" in console.told[0]


def test_out_of_descriptors_is_told_and_survived(console, monkeypatch):
    capture = console.start()
    real = ConsoleCapture._accept
    failing = [True]

    def accept(self):
        if failing:
            failing.pop()
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return real(self)

    monkeypatch.setattr(ConsoleCapture, "_accept", accept)
    with connect(capture) as guest:
        guest.sendall(b"patience")
        until(lambda: console.text == b"patience", "the second try")
    assert len(console.told) == 1


def test_close_leaves_nothing_and_may_be_called_again(console):
    before = os.listdir("/proc/self/fd")
    capture = console.start()
    guest = connect(capture)
    guest.sendall(b"x")
    capture.close()
    capture.close()
    guest.close()
    assert os.listdir(console.base) == []
    assert os.listdir("/proc/self/fd") == before
    assert not capture._thread.is_alive()


def test_a_file_that_blocks_does_not_block_close(console):
    """Such as one on a network file system whose server is gone; here a pipe that nobody reads."""
    reading, writing = os.pipe()
    capture = console.start(open_output=lambda: writing)
    guest = connect(capture)
    try:
        guest.sendall(b"x" * 200_000)
        until(lambda: capture.written, "the pipe to be written to")
        capture.close()
        assert capture._thread.is_alive(), "it was not waited for"
        assert os.listdir(console.base) == []
        assert len(console.told) == 1
    finally:
        guest.close()
        os.close(reading)  # the thread ends by an error
    capture._thread.join(DEADLINE)
    assert not capture._thread.is_alive()


@pytest.mark.parametrize("kind", [ConsoleCapture, LinePort])
def test_a_guest_that_floods_a_port_has_its_reader_rest(base, tmp_path, monkeypatch, kind):
    """Each read is followed by a pause, which the guest has to wait for as well."""
    counted = []
    receive = kind._receive
    monkeypatch.setattr(kind, "_receive", lambda *them: counted.append(1) or receive(*them))
    path = f"{runtime_dir(base)}/port"
    output = os.open(os.devnull, os.O_WRONLY)
    port = LinePort(path, print) if kind is LinePort else ConsoleCapture(path, lambda: output, 1 << 20, print)
    began = time.monotonic()
    flood = "import socket, sys; s = socket.socket(1); s.connect(sys.argv[1])\nwhile True: s.send(b'y\\n')"
    with subprocess.Popen([sys.executable, "-c", flood, path]) as guest:
        until(lambda: len(counted) >= 30, "some reads")
        reads, took = len(counted), time.monotonic() - began
        guest.kill()
    port.close()
    assert reads <= took / kind.pause + 3


def test_two_captures_do_not_disturb_each_other(console, tmp_path):
    first, other = console.start(), tmp_path / "other.log"
    second = console.start(open_output=lambda: os.open(other, os.O_WRONLY | os.O_CREAT | os.O_APPEND))
    with connect(first) as one, connect(second) as two:
        one.sendall(b"one")
        two.sendall(b"two")
        first.close()
        two.sendall(b"two")
        until(lambda: other.read_bytes() == b"twotwo", "the second")
    assert console.text == b"one"


def test_only_the_owner_may_connect_and_what_is_in_use_is_not_swept(console):
    capture = console.start()
    assert stat.S_IMODE(os.stat(capture.path).st_mode) == 0o600
    assert sweep(console.base) == []
    with connect(capture) as guest:
        guest.sendall(b"still here")
        until(lambda: console.text == b"still here", "the text")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
@pytest.mark.parametrize(("uid", "allowed"), [(12345, True), (12346, False)])
def test_as_root_the_socket_is_the_owners(console, uid, allowed):
    os.chmod(console.base, 0o711)
    capture = console.start(owner=(12345, 12345))
    child = os.fork()
    if child == 0:
        code = 2
        try:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
            try:
                connect(capture).close()
                code = 0
            except PermissionError:
                code = 1
            # The owner of the socket may not put another in its place.
            try:
                os.unlink(capture.path)
                code = 3
            except PermissionError:
                pass
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == (0 if allowed else 1)


def test_a_path_that_is_too_long_is_a_fault_with_a_cure(base, tmp_path):
    directory = Path(base, "d" * 90)
    directory.mkdir()
    with pytest.raises(MachineFault, match="longer than 99 bytes") as caught:
        ConsoleCapture(f"{directory}/console", lambda: pytest.fail("too late"), 1, print)
    assert caught.value.hint
    assert not directory.exists()


def test_what_cannot_be_opened_is_a_fault_and_leaves_nothing(console, monkeypatch):
    with pytest.raises(MachineFault, match="scratch directory is gone"):
        console.start(open_output=Mock(side_effect=MachineFault("the scratch directory is gone")))
    assert os.listdir(console.base) == []
    before = os.listdir("/proc/self/fd")
    opened = []
    monkeypatch.setattr(os, "chmod", lambda *_: (_ for _ in ()).throw(PermissionError(1, "no chmod today")))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)

    def open_output():
        opened.append(console.open_output())
        return opened[0]

    with pytest.raises(MachineFault, match="no chmod today"):
        console.start(open_output=open_output)
    assert opened
    assert os.listdir(console.base) == []
    assert os.listdir("/proc/self/fd") == before


# The directories.


def test_each_vm_has_a_directory_of_its_own_or_a_fault(base):
    one, two = runtime_dir(base), runtime_dir(base)
    assert one != two
    expected = 0o711 if os.geteuid() == 0 else 0o700
    for path in (one, two):
        assert stat.S_IMODE(os.stat(path).st_mode) == expected
        assert str(os.getpid()) in path
        assert len(f"{path}/console") < LONGEST_PATH
    with pytest.raises(MachineFault, match="is too long") as caught:
        runtime_dir(f"{base}/{'d' * 90}")
    assert "XDG_RUNTIME_DIR" in caught.value.hint
    with pytest.raises(MachineFault, match="No such file"):
        runtime_dir(f"{base}/none")


def test_without_root_it_is_where_the_user_may_write_and_the_path_is_not_too_long(base, monkeypatch):
    long = f"{base}/{'d' * 90}"
    os.mkdir(long)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("TMPDIR", base)
    for passed_over in (f"{base}/is/not/there", "relative", long):
        monkeypatch.setenv("XDG_RUNTIME_DIR", passed_over)
        path = runtime_dir()
        assert os.path.dirname(path) == base
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_as_root_the_directory_above_is_made_and_checked(base, monkeypatch):
    place = f"{base}/vmgahp"
    monkeypatch.setattr("vmgahp.host.runtime_dir.ROOT_BASE", place)
    mask = os.umask(0o077)
    try:
        assert os.path.dirname(runtime_dir()) == place
    finally:
        os.umask(mask)
    assert stat.S_IMODE(os.stat(place).st_mode) == 0o711
    os.chmod(place, 0o777)
    with pytest.raises(MachineFault, match="others than root"):
        runtime_dir()
    os.rename(place, f"{place}.real")
    os.symlink(f"{place}.real", place)
    os.chmod(f"{place}.real", 0o711)
    with pytest.raises(MachineFault, match="others than root"):
        runtime_dir()


@pytest.fixture
def left(base):
    """A directory with a socket in it that a process left behind when it was killed."""
    program = """
import os, sys
sys.path.insert(0, sys.argv[1])
from vmgahp.host.runtime_dir import runtime_dir
from vmgahp.host.serial_capture import ConsoleCapture
ConsoleCapture(runtime_dir(sys.argv[2]) + "/console", lambda: os.open("/dev/null", 1), 1, print)
os.kill(os.getpid(), 9)
"""
    source = str(Path(serial_capture.__file__).parents[2])
    subprocess.run([sys.executable, "-c", program, source, base], check=False)
    (name,) = os.listdir(base)
    assert os.listdir(f"{base}/{name}") == ["console"]
    return f"{base}/{name}"


def test_what_a_killed_server_left_is_swept(base, left):
    assert sweep(base) == [left]
    assert os.listdir(base) == []


def test_a_process_id_that_was_used_again_does_not_protect(base, left):
    birth = left.rpartition("/")[2].split("-")[2]
    disguised = f"{base}/vmgahp-{os.getpid()}-{birth}-0"
    os.rename(left, disguised)
    assert sweep(base) == [disguised]


def test_a_process_that_has_ended_and_whose_parent_has_not_asked_does_not_protect(base):
    code = "import sys; from vmgahp.host.runtime_dir import runtime_dir; print(runtime_dir(sys.argv[1]))"
    with subprocess.Popen([sys.executable, "-c", code, base], stdout=subprocess.PIPE, text=True) as ended:
        left = ended.stdout.read().strip()
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
        assert sweep(base) == [left]


def test_sweeping_ends_the_program_of_a_dead_process(base: str) -> None:
    """Stopped by another process of its user, it would not end with the peer that it waits for."""
    left = f"{base}/vmgahp-{os.getpid()}-1-0"
    os.mkdir(left)
    with subprocess.Popen(["sleep", "1000"], executable="/usr/bin/sleep") as other:
        Path(left, "pid").write_text(str(other.pid))
        program = subprocess.Popen(["sh", "-c", f"kill -STOP $$; cat {left}/socket"])
        until(lambda: "T" in Path(f"/proc/{program.pid}/stat").read_text(), "it is stopped")
        os.rename(left, later := f"{base}/vmgahp-{os.getpid()}-2-0")
        os.mkdir(left)
        Path(left, "pid").write_text(str(program.pid))
        assert sorted(sweep(base)) == [left, later]
        assert program.wait(10) in (0, -signal.SIGKILL)  # 0 if the sweep has collected it
        assert other.poll() is None
        other.kill()


def test_sweeping_lets_go_who_waits_for_a_dead_process_to_write(base):
    """libvirtd would wait for ever."""
    left = runtime_dir(base)
    os.mkfifo(f"{left}/memory")
    waiting = subprocess.Popen(["cat", f"{left}/memory"], stdout=subprocess.PIPE)
    try:
        until(lambda: "wait_for_partner" in Path(f"/proc/{waiting.pid}/wchan").read_text(), "the reader to wait")
        disguised = f"{base}/vmgahp-{os.getpid()}-1-0"
        os.rename(left, disguised)
        assert sweep(base) == [disguised]
        assert waiting.communicate(timeout=10) == (b"", None)
    finally:
        waiting.kill()
        waiting.wait()


def test_sweeping_touches_nothing_else(base, tmp_path):
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("x")
    os.symlink(precious, f"{base}/vmgahp-4999999-1-0")
    for name in ("vmgahp-notes", "vmgahp-4999999-2", "vmgahp-4999999-x-0", "other", "vmgahp-²-1-0"):
        os.mkdir(f"{base}/{name}")
    (Path(base, "vmgahp-4999999-1-1") / "directory").mkdir(parents=True)
    before = sorted(os.listdir(base))
    assert sweep(base) == []
    assert sorted(os.listdir(base)) == before
    assert (precious / "file").read_text() == "x"
    assert sweep(f"{base}/none") == []


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_another_users_directory_is_not_swept(base):
    path = f"{base}/vmgahp-4999999-1-0"
    os.mkdir(path)
    os.chown(path, 12345, 12345)
    assert sweep(base) == []
    os.chown(path, 0, 0)
    assert sweep(base) == [path]


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def port(base: str, told: list[str]) -> Iterator[LinePort]:
    made = LinePort(f"{runtime_dir(base)}/run", told.append)
    yield made
    made.close()


def connect(port: LinePort | ConsoleCapture) -> socket.socket:
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


def test_a_line_is_whole_although_the_guest_was_saved_in_its_middle_and_it_hears_the_server(port: LinePort) -> None:
    with connect(port) as guest:
        guest.sendall(b"ended ")
    with connect(port) as guest:
        guest.sendall(b"exit 3\n")
        assert port.lines.get(timeout=DEADLINE) == "ended exit 3"
    port.say("taken")  # nobody is there
    with connect(port) as guest:
        guest.sendall(b"outputs 3\n")
        assert port.lines.get(timeout=DEADLINE) == "outputs 3"
        port.say("taken")
        assert guest.recv(100) == b"taken\n"
    port.say("again")


def test_a_file_of_a_file_system_that_fails_is_no_fault_of_the_machine(console, monkeypatch):
    """The job can have mounted one there."""
    fails = Mock(side_effect=OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN)))
    with monkeypatch.context() as patch:  # pytest calls it as well
        patch.setattr(serial_capture.os, "fstat", fails)
        assert console.start().written == 0
