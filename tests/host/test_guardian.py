"""A killed server leaves no VM: the guardian fires when its server is gone, and only then."""

import contextlib
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.lab.programs import a_program
from vmgahp.host import guardian
from vmgahp.host.guardian import Guardian
from vmgahp.testing.contract import until

SOURCE = str(Path(guardian.__file__).parents[2])
DEADLINE = 20.0

SERVER = """
import os, sys
sys.path.insert(0, sys.argv[1])
from vmgahp.host.guardian import Guardian
{first}
posted = [Guardian.post(["/bin/sh", "-c", 'echo fired >"$1"', "sh", place], os.environ) for place in sys.argv[2:]]
print(*(one.session for one in posted), flush=True)
sys.stdin.read()
"""


def content(path):
    return path.read_text() if path.exists() else ""


def members(session, state=None):
    """The processes of a session, by /proc: the living, or those in one state."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) == session and (fields[0] == state if state else fields[0] != "Z"):
                    found.append(int(entry))
    return found


def gone(session):
    """Has the session no living process any more?

    The kernel knows, but counts the dead that a slow init has not reaped. Then /proc decides: a walk
    through it may miss a child forked meanwhile, but not that its parent has died meanwhile.
    """
    try:
        os.killpg(session, 0)
    except ProcessLookupError:
        return True
    dead = members(session, "Z")
    return bool(dead) and not members(session) and members(session, "Z") == dead


def end(session):
    """Leave no guardian of a failed test behind."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(session, signal.SIGKILL)


def the_watcher(session):
    """The process id of a posted guardian, once it has come to rest, with the pipe as its stdin.

    Its parent, which soon ends, has the pipe there too while it reads a word, and still as its descriptor 3.
    """

    def settled():
        for pid in members(session):
            with contextlib.suppress(OSError):
                held = os.listdir(f"/proc/{pid}/fd")
                if "3" not in held and os.readlink(f"/proc/{pid}/fd/0").startswith("pipe:"):
                    return pid
        return None

    return until(settled, "the guardian to settle")


def is_read(pipe, seconds=0):
    """Return True if somebody reads the pipe, for all of `seconds`."""
    poll = select.poll()
    poll.register(pipe, 0)
    return not poll.poll(seconds * 1000)


def fires(place):
    """Wait for the guardian that writes there."""
    until(lambda: content(place) == "fired\n", f"{place} to fire")


def is_gone(one):
    until(lambda: gone(one.session), "its processes to be gone")


def dismiss(one):
    """Dismiss it, and wait for its end."""
    pipe = os.dup(one.pipe)
    try:
        one.dismiss()
        assert not is_read(pipe, DEADLINE)
    finally:
        os.close(pipe)
    is_gone(one)


def abandon(one):
    """Close the pipe as the death of the server would."""
    os.close(one.pipe)
    one.pipe = -1


@contextlib.contextmanager
def a_server(*places, first="", **options):
    """A process that posts one guardian for each place and then waits; killed at the end if still there."""
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER.format(first=first), SOURCE, *map(str, places)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        **options,
    )
    try:
        process.sessions = [int(word) for word in process.stdout.readline().split()]
        yield process
    finally:
        process.kill()
        process.wait()
        for session in getattr(process, "sessions", []):
            end(session)
        process.stdin.close()
        process.stdout.close()


@pytest.fixture
def post(tmp_path):
    """Post a guardian in this process that writes `fired` when it fires."""
    posted = []

    def one(name="fired"):
        argv = ["/bin/sh", "-c", 'echo fired >"$1"', "sh", str(tmp_path / name)]
        posted.append(Guardian.post(argv, os.environ))
        return posted[-1]

    yield one
    for each in posted:
        each.dismiss()
        end(each.session)


def test_a_killed_server_is_avenged_by_one_for_each_vm(tmp_path):
    places = [tmp_path / name for name in ("one", "two", "three")]
    with a_server(*places) as server:
        assert not any(place.exists() for place in places)
        server.kill()
        for place in places:
            fires(place)


def test_it_survives_the_death_of_the_whole_session_of_the_server(tmp_path):
    place = tmp_path / "fired"
    with a_server(place, start_new_session=True) as server:
        assert server.sessions[0] != server.pid
        for victim in members(server.pid):
            os.kill(victim, signal.SIGKILL)
        fires(place)


def test_a_server_that_ends_without_a_dismissal_counts_as_gone(tmp_path):
    place = tmp_path / "fired"
    with a_server(place) as server:
        server.stdin.close()
        server.wait(DEADLINE)
        fires(place)


def test_dismissed_it_does_not_fire_be_it_gone_killed_or_stopped(post, tmp_path):
    one = post()
    assert is_read(one.pipe)
    dismiss(one)
    assert not (tmp_path / "fired").exists()
    assert one.pipe < 0
    # The dismissal may arrive before the shell has begun to listen.
    for number in range(20):
        dismiss(post(str(number)))
        assert not (tmp_path / str(number)).exists()
    one = post()
    one.dismiss()
    taken = os.open("/dev/null", os.O_RDONLY)  # the number that the pipe had, if the second closed it again
    one.dismiss()
    os.close(taken)
    one = post()
    os.kill(the_watcher(one.session), signal.SIGKILL)
    assert not is_read(one.pipe, DEADLINE)
    one.dismiss()
    assert not (tmp_path / "fired").exists()
    one = post()
    watcher = the_watcher(one.session)
    os.kill(watcher, signal.SIGSTOP)
    until(lambda: members(one.session, "T") == [watcher], "it to stand still")
    one.dismiss()
    assert members(one.session, "T") == [watcher], "nothing but the test lets it continue"
    os.kill(watcher, signal.SIGCONT)
    is_gone(one)


def test_signals_to_its_group_do_not_kill_it(post, tmp_path):
    one = post()
    the_watcher(one.session)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        os.killpg(one.session, number)
    abandon(one)
    fires(tmp_path / "fired")


def test_nobody_else_holds_the_pipe(post, tmp_path):
    first, second = post("first"), post("second")
    abandon(first)
    fires(tmp_path / "first")
    assert is_read(second.pipe)
    assert not (tmp_path / "second").exists()
    one = post()
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, close_fds=False) as other:
        abandon(one)
        fires(tmp_path / "fired")
        other.stdin.close()


def test_it_is_an_orphan_with_a_session_environment_and_directory_of_its_own(post, monkeypatch):
    one = post()
    watcher = the_watcher(one.session)
    assert os.getsid(watcher) == one.session != os.getsid(0)
    parent = int(Path(f"/proc/{watcher}/stat").read_text().rpartition(")")[2].split()[1])
    assert parent not in (os.getpid(), one.session)
    with pytest.raises(ChildProcessError):
        os.waitpid(one.session, os.WNOHANG)
    monkeypatch.setenv("_CONDOR_VM_MEMORY", "512")
    monkeypatch.setenv("_CONDOR_ANCESTOR_123", "123:456:789")
    monkeypatch.setenv("CONDOR_PRIVATE_INHERIT", "SessionKey:secret")
    watcher = the_watcher(post().session)
    names = {entry.partition("=")[0] for entry in Path(f"/proc/{watcher}/environ").read_text().split("\0")}
    assert "_CONDOR_VM_MEMORY" in names
    assert not names & {"_CONDOR_ANCESTOR_123", "CONDOR_PRIVATE_INHERIT"}
    assert os.readlink(f"/proc/{watcher}/cwd") == "/"


def test_it_holds_nothing_of_the_server_and_has_signals_of_its_own(post):
    """Neither stdio nor a descriptor that somebody made inheritable: the starter would never see the end."""
    reading, writing = os.pipe()
    high = os.open("/dev/zero", os.O_RDONLY)
    ours = os.fstat(writing).st_ino
    os.set_inheritable(writing, True)
    os.set_inheritable(high, True)
    try:
        watcher = the_watcher(post().session)
        held = {entry.name: os.readlink(entry) for entry in Path(f"/proc/{watcher}/fd").iterdir()}
    finally:
        for number in (reading, writing, high):
            os.close(number)
    assert held.pop("0") != f"pipe:[{ours}]"
    assert held == {"1": "/dev/null", "2": "/dev/null"}
    # Only what it ignores on purpose is ignored, and nothing that this thread has blocked is blocked.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGTERM})
    try:
        watcher = the_watcher(post().session)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    lines = Path(f"/proc/{watcher}/status").read_text().splitlines()
    status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    assert int(status["SigBlk"], 16) == 0
    ignored = {number for number in range(1, 32) if int(status["SigIgn"], 16) >> number - 1 & 1}
    assert ignored == {signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM}


def test_the_starter_sees_the_end_of_the_servers_output_while_the_guardian_works(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with a_server(fifo) as server:  # to open the FIFO for writing waits for us
        server.kill()
        assert server.stdout.read() == ""
        assert not gone(server.sessions[0])
        assert fifo.read_text() == "fired\n"


def test_the_command_is_never_read_by_a_shell(tmp_path):
    words = ["a b", "", "$(touch pwned)", "`id`", '"', "'", "new\nline", "*", ";", "\\", "-n", "üß"]
    place = tmp_path / "argv"
    program = a_program(tmp_path / "program", 'printf "%s\\0" "$#" "$@" >"$1.new"\nmv "$1.new" "$1"')
    one = Guardian.post([str(program), str(place), *words], os.environ)
    abandon(one)
    until(place.exists, "the command to have run")
    assert place.read_text().split("\0")[:-1] == [str(len(words) + 1), str(place), *words]


@pytest.mark.parametrize(
    ("last", "options", "tries"),
    [
        pytest.param('[ "$(wc -l <"$1")" = 3 ]', {}, 3, id="until it succeeds"),
        pytest.param("false", {"tries": 4}, 4, id="until it is given up"),
    ],
)
def test_the_command_is_run_again(tmp_path, last, options, tries):
    command = ["/bin/sh", "-c", f'echo try >>"$1"; {last}', "sh", str(tmp_path / "counted")]
    one = Guardian.post(command, os.environ, pause=0, **options)
    abandon(one)
    is_gone(one)
    assert content(tmp_path / "counted").count("try") == tries


def test_its_pauses_grow_to_a_minute(tmp_path):
    """libvirtd may be away for hours: it neither gives up nor keeps a processor busy."""
    a_program(tmp_path / "sleep", f'echo "$1" >>{tmp_path}/pauses')
    command = ["/bin/sh", "-c", '[ "$(/usr/bin/wc -l <"$1")" = 8 ]', "sh", str(tmp_path / "pauses")]
    one = Guardian.post(command, {"PATH": str(tmp_path)})
    abandon(one)
    is_gone(one)
    assert content(tmp_path / "pauses").split() == ["2", "4", "8", "16", "32", "60", "60", "60"]


def test_nothing_leaks_and_a_shell_that_cannot_start_is_told(post, monkeypatch):
    before = os.listdir("/proc/self/fd")
    post().dismiss()
    assert os.listdir("/proc/self/fd") == before
    monkeypatch.setattr(os, "posix_spawn", Mock(side_effect=BlockingIOError(11, "no processes left")))
    with pytest.raises(OSError, match="no processes left"):
        Guardian.post(["/bin/true"], os.environ)
    assert os.listdir("/proc/self/fd") == before


def test_what_of_the_environment_is_kept():
    kept = {
        "PATH": "/condor/bin", "CONDOR_CONFIG": "/etc/condor/condor_config", "_CONDOR_VM_TYPE": "kvm",
        "_condor_LOG": "/log", "VMGAHP_USER_UID": "1000", "VMGAHP_USER_GID": "1000", "VMGAHP_CONFIG": "/etc/vmgahp",
        "XDG_RUNTIME_DIR": "/run/user/1000",
    }  # fmt: skip
    dropped = {
        "_CONDOR_ANCESTOR_1": "1:2:3", "_condor_ancestor_2": "1:2:3", "CONDOR_INHERIT": "1 <127.0.0.1:9618> …",
        "CONDOR_PRIVATE_INHERIT": "SessionKey:…", "VMGAHP_WORKING_DIR": "/scratch", "PYTHONPATH": "/scratch",
        "ENV": "/scratch/rc",
    }  # fmt: skip
    assert guardian.environment(kept | dropped) == kept
    assert "/usr/bin" in guardian.environment({})["PATH"]


def cgroups(pid):
    """The cgroups in the hierarchies by which processes are killed: v2's, and systemd's of v1."""
    lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    return {line for line in lines if line.startswith("0::") or ":name=systemd:" in line}


def test_it_leaves_the_cgroup_of_its_server(tmp_path):
    """As a starter's cgroup is emptied by SIGKILL when the starter ends."""
    roots = [Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified")]
    root = next((place for place in roots if os.access(place / "cgroup.procs", os.W_OK)), None)
    if root is None:
        pytest.skip("needs a cgroup v2 of one's own")
    branch = root / f"vmgahp-test-{os.getpid()}"
    try:
        branch.mkdir()
    except OSError:
        pytest.skip("needs a cgroup v2 of one's own")
    try:
        enter = f"open({str(branch / 'cgroup.procs')!r}, 'w').write('0')"
        place = tmp_path / "fired"
        with a_server(place, first=enter) as server:
            watcher = the_watcher(server.sessions[0])
            assert any(line.endswith(branch.name) for line in cgroups(server.pid))
            assert not any(line.endswith(branch.name) for line in cgroups(watcher))
            for line in (branch / "cgroup.procs").read_text().split():
                os.kill(int(line), signal.SIGKILL)
            fires(place)
    finally:
        until(lambda: not (branch / "cgroup.procs").read_text(), "the branch to be empty")
        branch.rmdir()


SHUTDOWN = """
import glob, os, signal, sys, time
sys.path.insert(0, sys.argv[1])
from vmgahp.host.guardian import Guardian
open("/proc/self/comm", "w").write("systemd-shutdown")
os.close(Guardian.post(["/bin/sleep", "1000"], os.environ).pipe)
while "sleep\\n" not in [open(path).read() for path in glob.glob("/proc/[0-9]*/comm")]:
    time.sleep(0.05)
os.kill(-1, signal.SIGTERM)
try:
    while True:
        os.wait()
except ChildProcessError:
    pass
"""
"""The first process at the end of the machine, which waits for all others that it has told to end."""


@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
def test_the_end_of_the_machine_does_not_wait_for_it():
    command = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", sys.executable, "-c", SHUTDOWN, SOURCE]
    subprocess.run(command, timeout=DEADLINE, check=True)
