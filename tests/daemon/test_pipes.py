"""How the daemon reads and writes, and what it leaves of others' pipes as it is."""

import fcntl
import os
import subprocess
from pathlib import Path

import pytest

from tests.conftest import simulated_ad
from tests.peer import DAEMON, Peer, environment
from vmgahp.daemon import server
from vmgahp.protocol import wire


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """The client's ends of a server's pipes, of which the server within this process has the others."""
    theirs, to = os.pipe()
    came, ours = os.pipe()
    monkeypatch.setattr(server, "STDIN", theirs)
    monkeypatch.setattr(server, "STDOUT", ours)
    return to, came


def test_what_the_client_does_not_read_waits_until_it_does(ends: tuple[int, int]) -> None:
    made = server.ClientPipes()
    sent = b"".join(b"%d\n" % number for number in range(100_000))
    made.write(sent)
    got = b""
    while len(got) < len(sent):
        got += os.read(ends[1], 1 << 16)
        made.wait(0.0)
    assert got == sent


def test_an_interval_of_years_is_waited_for(ends: tuple[int, int]) -> None:
    os.write(ends[0], b"VERSION\r\n")
    assert server.ClientPipes().wait(1e12) == (b"VERSION\r\n", False)


def test_a_process_that_ends_wakes_once(ends: tuple[int, int]) -> None:
    made = server.ClientPipes()
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        watched = os.pidfd_open(process.pid)
        made.watched.add(watched)
        assert made.wait(0.0) == (b"", False)
        process.kill()
        assert made.wait(None) == (b"", True)
        assert made.watched == set()
        assert made.wait(0.0) == (b"", False)
    os.close(watched)


def test_what_others_have_in_common_with_the_daemon_stays_as_it_is(scratch: Path) -> None:
    """A client that writes to the same pipe, or a shell behind us, would be told to try again later."""
    read, write = os.pipe()
    environ = environment("simulated", scratch)
    command = [*DAEMON, "-f", "-M", "3"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=write, stderr=write, env=environ, cwd=scratch
    ) as daemon:
        assert daemon.stdin is not None
        daemon.stdin.write(b"VERSION\r\n")
        daemon.stdin.flush()
        found = b""
        while found.count(b"\n") < 2:
            found += os.read(read, 4096)
        assert found == wire.GREETING + b"\nS " + wire.GREETING + b"\n"
        assert not fcntl.fcntl(write, fcntl.F_GETFL) & os.O_NONBLOCK
        daemon.stdin.write(b"QUIT\r\n")
    os.close(read)
    os.close(write)


def test_a_vm_has_one_worker_for_all_its_requests(scratch: Path) -> None:
    with Peer(environment("simulated", scratch, VM_METRICS_INTERVAL=0)) as peer:
        peer.line()
        peer.send_ad(*simulated_ad(scratch))
        assert peer.run("START", "simulated") == ["0", "1"]
        tasks = Path(f"/proc/{peer.process.pid}/task")
        threads = sorted(tasks.iterdir())
        for command in ("STATUS", "SUSPEND", "RESUME", "STATUS", "GETPID"):
            assert peer.run(command, 1)[0] == "0"
        assert sorted(tasks.iterdir()) == threads
        assert len(threads) == 2
        assert peer.run("STOP", 1) == ["0", "NULL"]
        peer.quit()
