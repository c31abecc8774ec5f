"""The recorder stands between a client and a server, and neither notices."""

import os
import resource
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.client import Client
from tests.commands.support import absent
from tests.conftest import simulated_ad
from tests.peer import DAEMON, DEADLINE, VMGAHP, environment
from vmgahp.protocol import transcript

RECORD = (*VMGAHP, "record")
ECHO = (sys.executable, "-c", "import os\nwhile data := os.read(0, 9): os.write(1, data)")


def recorded(directory: Path) -> str:
    """The only transcript in a directory."""
    [path] = directory.glob("vmgahp-*.txt")
    return path.read_text()


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def record(directory: Path, *command: str, **options: object) -> "subprocess.CompletedProcess[bytes]":
    argv = [*RECORD, "-o", str(directory), "--", *command]
    return subprocess.run(argv, capture_output=True, timeout=DEADLINE, check=False, **options)  # type: ignore[call-overload,no-any-return]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory for transcripts, such as root has for itself."""
    directory = tmp_path / "transcripts"
    directory.mkdir(mode=0o700)
    return directory


@pytest.fixture
def peer(scratch: Path, place: Path) -> Iterator[Client]:
    """A client of the daemon, past the greeting, with the recorder in between."""
    command = [*RECORD, "-o", str(place), "--", *DAEMON, "-f", "-t", "-M", "3"]
    with Client(command, environment("simulated", scratch), scratch) as client:
        client.greeting()
        yield client


def test_a_job_goes_as_ever_and_is_written_down_without_its_secrets(peer: Client, scratch: Path, place: Path) -> None:
    peer.send_ad(*simulated_ad(scratch, 'ClaimId = "<127.0.0.1:9618>#1#1#hush"', 'TransferKey = "hush"'))
    assert peer.run("START", "simulated") == ["0", "1"]
    assert peer.run("STATUS", 1)[1] == "STATUS=Running"
    log = peer.quit()
    assert "Traceback" not in log
    assert "QUIT received" in log, "the daemon's standard error passes"
    text = recorded(place)
    assert absent(text, "# VMGAHP_VMTYPE=simulated\n", "-f -t -M 3\n", "hush") == ["hush"]
    heard = transcript.parse(text)
    assert 'ClaimId = "<hidden>"' in heard.texts(">")
    assert (heard.texts(">")[0], heard.texts(">")[-1]) == ("CLASSAD", "QUIT")
    assert heard.texts("<")[0].startswith("$VMGahpVersion")
    assert (heard.texts("<")[-1], heard.exit_status) == ("S", 0)
    times = [float(row[2:]) for row in text.splitlines() if row.startswith("@ ")]
    assert times
    assert times == sorted(times)


@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.binary(min_size=1, max_size=40), max_size=12))
def test_bytes_pass_unchanged_however_they_are_cut_up(place: Path, pieces: list[bytes]) -> None:
    """Each piece comes back before the next is sent: nothing waits for the end of a line."""
    for old in place.iterdir():
        old.unlink()
    argv = [*RECORD, "-o", str(place), "--", *ECHO]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for piece in pieces:
            process.stdin.write(piece)
            back = b""
            while len(back) < len(piece):
                back += process.stdout.read(len(piece) - len(back))
            assert back == piece
        process.stdin.close()
        assert process.stdout.read() == b""
    assert process.returncode == 0
    lines = transcript.parse(recorded(place)).lines
    whole = b"".join(pieces)
    if b"=" not in whole and b":" not in whole and b">#" not in whole:  # which may be a secret
        for mark in (transcript.CLIENT, transcript.SERVER):
            assert b"".join(line.data for line in lines if line.mark == mark) == whole


def test_much_passes_both_ways_at_once(place: Path) -> None:
    data = bytes(range(256)) * 1000  # many times what pipes hold
    assert record(place, "cat", input=data).stdout == data


def test_a_server_that_does_not_read_is_not_read_for(place: Path) -> None:
    """What a client can write ahead stays bounded, as with a pipe of its own."""
    code = "import os, time; os.write(1, b'up\\n'); time.sleep(600)"
    with Client([*RECORD, "-o", str(place), "--", *python(code)]) as client:
        client.read_line()
        assert client.process.stdin is not None
        sent = 0
        while select.select([], [client.process.stdin], [], 1.0)[1]:
            sent += os.write(client.process.stdin.fileno(), b"x" * 4096)
            assert sent < 1 << 20


@pytest.mark.parametrize("status", [7, -signal.SIGKILL, -signal.SIGSEGV])
def test_the_exit_status_is_the_servers(place: Path, status: int) -> None:
    """A server that a signal ends looks so to its client."""
    script = f"exit {status}" if status >= 0 else f"kill {status} $$"
    no_core = partial(resource.setrlimit, resource.RLIMIT_CORE, (0, 0))
    assert record(place, "sh", "-c", script, preexec_fn=no_core).returncode == status
    assert transcript.parse(recorded(place)).exit_status == status


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGQUIT])
def test_signals_reach_the_server(peer: Client, scratch: Path, place: Path, number: signal.Signals) -> None:
    peer.send_ad(*simulated_ad(scratch))
    assert peer.run("START", "simulated") == ["0", "1"]
    assert number.name in peer.end_by(number)
    assert peer.process.returncode == transcript.parse(recorded(place)).exit_status == 0


def test_a_signal_that_is_ignored_stays_so_and_closed_descriptors_are_no_trouble(place: Path) -> None:
    done = record(
        place, "sh", "-c", "kill -HUP $$; echo alive", preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)
    )
    assert done.stdout == b"alive\n"
    assert record(place, "sh", "-c", "exit 3", preexec_fn=lambda: os.closerange(0, 3)).returncode == 3


def test_a_recorder_that_is_killed_takes_the_server_with_it(peer: Client) -> None:
    children = Path(f"/proc/{peer.process.pid}/task/{peer.process.pid}/children").read_text().split()
    server = os.pidfd_open(int(children[0]))
    peer.process.kill()
    assert select.select([server], [], [], DEADLINE)[0]
    os.close(server)


def test_the_end_of_input_and_of_output_pass(place: Path) -> None:
    code = "import os; os.close(1); assert os.read(0, 9) == b''"
    with Client([*RECORD, "-o", str(place), "--", *python(code)]) as client:
        while not client.ended:
            client.pump(DEADLINE)
        assert client.process.poll() is None
        client.finish()
        assert client.process.returncode == 0


def test_a_client_that_no_longer_reads_is_seen_by_the_server(place: Path) -> None:
    code = "import os, sys\ntry:\n    while True: os.write(1, b'x' * 4096)\nexcept BrokenPipeError: sys.exit(5)"
    with Client([*RECORD, "-o", str(place), "--", *python(code)]) as client:
        client.pump(DEADLINE)
        assert client.process.stdout is not None
        client.process.stdout.close()
        assert client.process.wait(DEADLINE) == 5


def test_a_client_that_no_longer_listens_is_seen_by_a_silent_server(peer: Client) -> None:
    assert peer.process.stdout is not None
    peer.process.stdout.close()
    assert peer.process.wait(DEADLINE) == 0


def test_what_a_child_of_the_server_holds_open_keeps_nobody(place: Path) -> None:
    code = "import subprocess; p = subprocess.Popen(['sleep', '600'], stderr=subprocess.DEVNULL); print(p.pid)"
    done = record(place, *python(code))
    assert done.returncode == 0
    os.kill(int(done.stdout), signal.SIGKILL)


def test_standard_error_is_written_down_where_it_is_wished(place: Path) -> None:
    command = ["sh", "-c", "echo 'TransferKey = \"hush\"' >&2; echo log >&2"]
    argv = [*RECORD, "--stderr", "-o", str(place), "--", *command]
    done = subprocess.run(argv, capture_output=True, timeout=DEADLINE, check=True)
    assert done.stderr == b'TransferKey = "hush"\nlog\n', "it passes as it is"
    lines = [line.text for line in transcript.parse(recorded(place)).lines if line.mark == transcript.STDERR]
    assert lines == ['TransferKey = "<hidden>"', "log"]


@pytest.mark.parametrize(("command", "status"), [("/nonexistent", 127), ("/etc/passwd", 126)])
def test_a_command_that_cannot_be_started(place: Path, command: str, status: int) -> None:
    done = record(place, command)
    assert done.returncode == status
    assert command.encode() in done.stderr
    assert "it cannot be started" in recorded(place)


def test_nothing_that_happens_to_the_transcript_disturbs(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("precious")
    for output in (tmp_path / "there", tmp_path / "no" / "directory", Path("/dev/full")):
        done = record(output, *ECHO, input=b"VERSION\r\n")
        assert (done.returncode, done.stdout) == (0, b"VERSION\r\n")
        assert b"No transcript is written to" in done.stderr
    assert (tmp_path / "there").read_text() == "precious"


def test_a_full_disk_disturbs_nobody(place: Path) -> None:
    """The size that a file may have stands for the disk."""

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (300, 300))

    data = b"VERSION\r\n" * 1000
    done = record(place, *ECHO, input=data, preexec_fn=limit)
    assert (done.returncode, done.stdout) == (0, data)
    assert b"The transcript has gaps" in done.stderr
    [path] = place.iterdir()
    assert path.stat().st_size == 300
