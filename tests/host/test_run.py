"""Programs are run with nothing of this process's that they were not given, and ended with all their children."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.lab.programs import a_program
from vmgahp.host.job_user import Identity
from vmgahp.host.run import LONGEST_STDERR, Finished, plain_environment, run
from vmgahp.host.wait import Task
from vmgahp.testing.contract import until


def sh(script: str, **options: object) -> Finished:
    return run(["sh", "-c", script], **{"deadline": 60.0} | options)  # type: ignore[arg-type]


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.mark.parametrize(("script", "status"), [("true", 0), ("exit 3", 3), ("kill -9 $$", -9)])
def test_how_it_ends(script: str, status: int) -> None:
    assert sh(script).status == status


def test_stdin_and_both_outputs_do_not_wait_for_each_other() -> None:
    text = b"y" * 3_000_000
    done = sh("head -c 1000000 /dev/zero >&2; cat; echo end >&2", stdin=text)
    assert (done.status, done.out, len(done.err)) == (0, text, LONGEST_STDERR)
    assert sh("exec <&-; echo no", stdin=text).out == b"no\n", "it need not read"


def test_signals_are_as_for_any_program() -> None:
    """Although a server ignores some and may block others."""
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR1})
    ignored = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        lines = sh("grep -E 'SigBlk|SigIgn' /proc/self/status").out.split()
    finally:
        signal.signal(signal.SIGINT, ignored)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    assert [int(mask, 16) & 0x7FFFFFFF for mask in lines[1::2]] == [0, 0]


TRACED = """
import ctypes, os, sys
libc, (told, tell) = ctypes.CDLL(None), os.pipe()
libc.prctl(0x59616D61, ctypes.c_ulong(-1), 0, 0, 0)  # PR_SET_PTRACER
if os.fork():
    sys.exit(not os.read(told, 1))
os.setsid()
libc.ptrace(0x4206, os.getppid(), None, None)  # PTRACE_SEIZE
os.write(tell, b"x"), os.closerange(0, 3)
os.read(int(sys.argv[1]), 1)
"""


def test_a_tracer_that_keeps_its_exit_status_holds_nothing_up() -> None:
    reading, writing = os.pipe()
    with open(reading, "rb"):
        task = Task(
            "traced", lambda: run([sys.executable, "-c", TRACED, f"{reading}"], deadline=60, pass_fds=[reading])
        )
        is_done = task.wait(30.0)
        os.close(writing)
        assert (task.result().status, is_done) == (None, True)


def test_only_the_files_that_it_is_given(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("first")
    (tmp_path / "b").write_text("second")
    numbers = [70, 60]
    for number, name in zip(numbers, "ba", strict=True):
        opened = os.open(tmp_path / name, os.O_RDONLY)
        os.dup2(opened, number, inheritable=True)
        os.close(opened)
    leaked = os.dup2(0, 77, inheritable=True)
    try:
        done = sh("cat /dev/fd/60 /dev/fd/70; ls /proc/self/fd", pass_fds=numbers)
        assert done.out.startswith(b"firstsecond")
        assert b"77" not in done.out.split()
    finally:
        for descriptor in (leaked, *numbers):
            os.close(descriptor)
    with (tmp_path / "out").open("wb") as file:
        done = sh("echo here; echo there >&2", stdout=file.fileno())
    assert done == Finished(0, b"", b"there\n")
    assert (tmp_path / "out").read_bytes() == b"here\n"


def test_nothing_is_left_open() -> None:
    before = os.listdir("/proc/self/fd")
    sh("true")
    assert sh("sleep 100", deadline=0.1).status is None
    with pytest.raises(FileNotFoundError):
        run(["/nowhere"], deadline=1)
    assert os.listdir("/proc/self/fd") == before


def test_the_deadline_and_the_end_of_its_parent_kill_the_whole_group(tmp_path: Path) -> None:
    """Of processes that nothing else would end, with our pipes open."""
    assert sh(f"sleep infinity & echo $! $$ >{tmp_path}/pids; wait", deadline=5).status is None
    child, itself = map(int, (tmp_path / "pids").read_text().split())
    with pytest.raises(ProcessLookupError):
        os.kill(itself, 0)
    until(lambda: is_gone(child), "its own child is gone")
    # It ends while a thread of it waits.
    fifo = tmp_path / "began"
    os.mkfifo(fifo)
    code = (
        "import threading; from vmgahp.host.run import run\n"
        f"words = ['sh', '-c', 'echo $$ > {fifo}; exec sleep 1000']\n"
        "threading.Thread(target=run, args=(words,), kwargs={'deadline': 600}, daemon=True).start()\n"
        f"print(open('{fifo}').read())\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    until(lambda: is_gone(int(ended.stdout)), "the one that was killed is gone")


def test_it_is_ended_when_it_has_said_enough_or_too_much() -> None:
    done = sh("yes", longest=1 << 20)
    assert (done.status, len(done.out) > 1 << 20) == (-signal.SIGKILL, True)
    done = sh("echo ready >&2; exec sleep 1000", until=lambda _, err: b"ready" in err)
    assert (done.status, done.err) == (0, b"ready\n")


def test_a_child_that_holds_the_pipes() -> None:
    began = time.monotonic()
    done = sh("sleep 100 & echo $!", grace=0.1)
    assert (done.status, time.monotonic() - began < 50) == (0, True)
    os.kill(int(done.out), signal.SIGKILL)


def test_where_and_with_what_it_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LD_PRELOAD_OF_THE_JOB", "x")
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    monkeypatch.chdir(tmp_path)
    assert sh("pwd; umask; ulimit -t", umask=0o077, limits=["--cpu=7"]).out == b"/\n0077\n7\n"
    assert sh("pwd", directory="").out.decode().strip() == str(tmp_path)
    told = sh("env").out.decode()
    assert "LC_ALL=C\n" in told
    assert "OF_THE_JOB" not in told
    assert plain_environment()["PATH"] == os.environ["PATH"]
    odd = tmp_path / "-a; touch owned; $(touch owned) 'b\" c"
    odd.mkdir()
    assert sh("pwd; umask", directory=str(odd), umask=0o27).out.decode() == f"{odd}\n0027\n"
    assert not list(odd.iterdir())


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_as_another_user() -> None:
    user = Identity(12345, 12346)
    assert sh("id -u; id -g; id -G; grep CapInh /proc/self/status", user=user).out.split() == [
        b"12345", b"12346", b"12346", b"CapInh:", b"0" * 16,
    ]  # fmt: skip
    assert sh("id -G", user=user, groups=[7, 8]).out == b"12346 7 8\n"


def test_a_program_of_any_name_that_may_be_executed(tmp_path: Path) -> None:
    program = a_program(tmp_path / "a=b c", 'echo "$@"')
    assert run([str(program), "x=y", "z"], deadline=60).out == b"x=y z\n"
    (tmp_path / "x").write_text("#!/bin/sh\n")
    with pytest.raises(PermissionError):
        run([str(tmp_path / "x")], deadline=1)


@pytest.mark.parametrize("name", ["nowhere", "/nowhere", "relative/path"])
def test_one_that_is_not_there(name: str) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        run([name], deadline=1)
    assert caught.value.filename == name


def test_an_interrupt_right_after_its_start_leaves_none_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[int] = []
    really = subprocess.Popen.__init__

    def interrupted(program: subprocess.Popen[bytes], *words: object, **how: object) -> None:
        really(program, *words, **how)  # type: ignore[call-overload]
        begun.append(program.pid)
        signal.raise_signal(signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    monkeypatch.setattr(subprocess.Popen, "__init__", interrupted)
    try:
        with pytest.raises(KeyboardInterrupt):
            run(["sleep", "60"], deadline=60)
        assert is_gone(begun[0])
    finally:
        signal.signal(signal.SIGTERM, before)
        for pid in begun:
            if not is_gone(pid):
                os.kill(pid, signal.SIGKILL)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()


HELPER = """
import json, os, sys
from vmgahp.host.system_calls import restrict
restrict(json.loads(sys.argv[1]), memory=1 << 30, cpu_seconds=60, file_bytes=1 << 20)
os.execv("/bin/sh", ["sh", "-c", sys.argv[2]])
"""


def helper(script: str, of: tuple[int, int, int] | None, user: Identity) -> Finished:
    words = [sys.executable, "-c", HELPER, json.dumps(of), script]
    return run(words, deadline=60, becomes=user, environ=dict(os.environ))


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
@pytest.mark.parametrize("by", ["setpriv", "itself"])
def test_a_program_that_its_user_has_stopped_does_not_outlive_this_process(
    user: Identity, scratch: Path, by: str
) -> None:
    """A server that is killed cannot kill it."""
    note = scratch / "pid"
    note.touch()
    os.chown(note, user.uid, user.gid)
    script = f"id -u > {note}; echo $$ >> {note}; kill -STOP $$"
    server = os.fork()
    if server == 0:
        try:
            sh(script, user=user) if by == "setpriv" else helper(script, user.becoming(), user)
        finally:
            os._exit(1)
    until(lambda: note.read_text().count("\n") == 2, "the program begins")
    os.kill(server, signal.SIGKILL)
    os.waitpid(server, 0)
    uid, pid = map(int, note.read_text().split())
    assert uid == user.uid
    until(lambda: is_gone(pid), "it is ended")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_helper_whose_server_was_killed_before_it_became_the_user_does_nothing(user: Identity) -> None:
    assert helper("echo done", user.becoming(), user).out == b"done\n"
    gone = (user.uid, user.gid, 0)
    assert helper("echo done", gone, user) == Finished(1, b"", b"")
