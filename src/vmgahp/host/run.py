"""The common way to run a program: in a session of its own, with a deadline and a limit on its output.

A program must not inherit the signals that this process ignores or blocks, so it is started by env, which resets
them. util-linux's prlimit and setpriv limit it and make it another user, in this order: a process of that user can
then neither change its limits nor gain root's.
"""

import atexit
import contextlib
import errno
import os
import select
import signal
import subprocess
from collections.abc import Callable, Collection, Mapping, Sequence
from time import monotonic
from typing import Any, NamedTuple

from vmgahp.host import budget, guardian, wait
from vmgahp.host.job_user import Identity

LONGEST_STDERR = 64 << 10
"""The most bytes of stderr that are kept; the rest is read and dropped."""

_ENV = ("/usr/bin/env", "--default-signal")
"""The command that starts a program with the default actions of all signals, and with no signal blocked."""

_REAP = 1.0
"""The seconds to reap a program; one in a hung file system never ends, one that is traced is its tracer's to reap."""

INTERRUPTING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The signals by which a person, or a shutdown, ends a command."""

_running: set[int] = set()
"""The programs that a caller waits for; they are killed when this process exits."""
_starting: list[None] = []
"""An element for each program that is about to be one of them."""


class Finished(NamedTuple):
    """The exit status and the output of a program."""

    status: int | None
    """The exit status, negative for the signal that ended it, None if it was killed at its deadline."""
    out: bytes
    err: bytes
    """The beginning of stderr, at most `LONGEST_STDERR` bytes."""

    @property
    def complaints(self) -> list[str]:
        """Return the lines of stderr that are not blank."""
        return [line for line in self.err.decode(errors="replace").splitlines() if line.strip()]


def plain_environment() -> dict[str, str]:
    """Return an environment of PATH and the C locale, for callers that parse a tool's output."""
    return {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C", "HOME": "/"}


def condor_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a program of the administrator's: PATH and HTCondor's configuration."""
    return guardian.environment(environ, guardian.CONDORS) | {"HOME": "/"}


def run(
    argv: Sequence[str],
    *,
    deadline: float,
    stdin: bytes | int = b"",
    stdout: int = subprocess.PIPE,
    environ: Mapping[str, str] | None = None,
    user: Identity | None = None,
    becomes: Identity | None = None,
    groups: Sequence[int] | None = None,
    limits: Sequence[str] = (),
    umask: int = -1,
    directory: str = "/",
    pass_fds: Collection[int] = (),
    longest: int = 16 << 20,
    until: Callable[[bytearray, bytearray], bool] | None = None,
    grace: float | None = None,
    reader: int = -1,
) -> Finished:
    """Run a program until it has ended and its stdout and stderr are closed, or for `deadline` seconds.

    It is killed with its process group at the deadline, and when it has printed more than `longest` bytes; then
    `out` is longer than that. The callback `until` gets all output whenever there is more, may remove it, and
    ends the program by returning true, which counts as success. With `grace` the program's own exit is enough,
    even if other processes hold its pipes: these are read for `grace` seconds, and no process is killed. The program
    is killed when the pipe that `reader` writes to has no reader any more.

    `environ` is `plain_environment` by default. As root it runs as `user`, with all groups of that user or with
    `groups`; `becomes` is the user that it makes itself. The time of both counts as the job's. `limits` are options of
    prlimit. An empty `directory` is this process's own. It has the descriptors `pass_fds` by the same numbers; `stdin`
    may be a descriptor, too, and so may `stdout`, which is not read then. Raises OSError if it cannot be started, with
    the program's name as the file name, and `Fault` if a START has no time left for it (`vmgahp.host.budget`).
    """
    began, start = monotonic(), budget.current()
    end = began + start.left(deadline)
    environ = plain_environment() if environ is None else environ
    words = [*_ENV]
    if limits:
        words += [_find("prlimit", environ), *limits]
    if user is not None and user.switching:
        # It does not outlive this server, even if a process of the user has stopped it.
        words += [_find("setpriv", environ), "--pdeathsig=KILL", *_as_user(user, groups)]
    program = _find(argv[0], environ)
    if "=" in program:  # env would take it for a variable
        words += ["/bin/sh", "-c", 'exec "$0" "$@"']
    words += [program, *argv[1:]]
    input_ = stdin if isinstance(stdin, int) else subprocess.PIPE if stdin else subprocess.DEVNULL
    # The exception of such a signal must not come between the start of the program and its registration.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, INTERRUPTING)
    child = None
    try:
        child = _Child(
            words,
            bufsize=0,
            stdin=input_,
            stdout=stdout,
            stderr=subprocess.PIPE,
            env=environ,
            cwd=directory or None,
            umask=umask,
            pass_fds=pass_fds,
            start_new_session=True,
        )
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        status = child.listen(b"" if isinstance(stdin, int) else stdin, end, longest, until, grace, reader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if child is not None:
            child.close()
        whose = user or becomes
        if whose is not None and whose.switching:
            start.spend(began)
    return Finished(status, bytes(child.out), bytes(child.err))


ENDS_WITH_THREAD = ("--pdeathsig=KILL", "--no-new-privs")


def begin(
    argv: Sequence[str],
    user: Identity,
    options: Sequence[str] = ENDS_WITH_THREAD,
    *,
    stderr: int = subprocess.DEVNULL,
    pass_fds: Collection[int] = (),
) -> subprocess.Popen[bytes]:
    """Start a background program as `user` without other groups, by default until the thread that starts it ends.

    `options` are of setpriv. It has a session of its own and of this process's descriptors only `pass_fds`, and its
    output is dropped, `stderr` too by default. Raises OSError if it cannot be started, with the program's name as the
    file name, but not for what befalls it as the user.
    """
    environ = plain_environment()
    words = [*_ENV, _find("setpriv", environ), *options]
    words += _as_user(user, ()) if user.switching else []
    words += [_find(argv[0], environ), *argv[1:]]
    return subprocess.Popen(
        words,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=stderr,
        cwd="/",
        pass_fds=pass_fds,
        start_new_session=True,
    )


def which(program: str) -> str | None:
    """Find the full path of a program by this process's PATH; return None if there is none."""
    try:
        return _find(program, os.environ)
    except OSError:
        return None


def _find(program: str, environ: Mapping[str, str]) -> str:
    """Find the full path of a program, by the PATH that it will have. Raises OSError."""
    if program.startswith("/"):
        places = [program]
    else:
        places = [os.path.join(place, program) for place in environ.get("PATH", os.defpath).split(":")]
    number = errno.ENOENT
    for path in places:
        if path.startswith("/") and os.path.isfile(path):
            if os.access(path, os.X_OK):
                return path
            number = errno.EACCES
    raise OSError(number, os.strerror(number), program)


def _as_user(user: Identity, groups: Sequence[int] | None) -> list[str]:
    """Return the options of setpriv that make a program run as the user."""
    numbers = ",".join(map(str, user.groups() if groups is None else groups))
    return [
        f"--reuid={user.uid}",
        f"--regid={user.gid}",
        f"--groups={numbers}" if numbers else "--clear-groups",
        "--inh-caps=-all",
    ]


class _Child(subprocess.Popen[bytes]):
    def __init__(self, words: Sequence[str], **how: Any) -> None:
        self.out, self.err = bytearray(), bytearray()
        self._ended = -1
        _starting.append(None)
        try:
            super().__init__(words, **how)
            _running.add(self.pid)
        finally:
            _starting.pop()

    def listen(
        self,
        stdin: bytes,
        end: float,
        longest: int,
        until: Callable[[bytearray, bytearray], bool] | None,
        grace: float | None,
        reader: int,
    ) -> int | None:
        """Write its stdin and read its output at the same time; return its exit status, or None at the `end`."""
        watch, self._ended = select.poll(), os.pidfd_open(self.pid)
        outputs = {pipe.fileno(): kept for pipe, kept in ((self.stdout, self.out), (self.stderr, self.err)) if pipe}
        waiting = {self._ended, *outputs}
        for descriptor in waiting:
            watch.register(descriptor, select.POLLIN)
        if self.stdin is not None:
            os.set_blocking(self.stdin.fileno(), False)
            watch.register(self.stdin, select.POLLOUT)
        if reader >= 0:
            watch.register(reader, 0)  # errors are always reported
        while waiting:
            ready = watch.poll(max(end - monotonic(), 0) * 1000)
            if not ready or monotonic() >= end:
                if self._ended not in waiting and grace is not None:
                    break
                return None
            for descriptor, _ in ready:
                if descriptor == reader:
                    return -signal.SIGKILL
                if descriptor == self._ended:
                    end = end if grace is None else monotonic() + grace
                elif descriptor in outputs:
                    data = os.read(descriptor, 1 << 16)
                    outputs[descriptor] += data
                    if data:
                        continue
                elif stdin := _write(descriptor, stdin):
                    continue
                watch.unregister(descriptor)
                waiting.discard(descriptor)
                if self.stdin is not None and descriptor == self.stdin.fileno():
                    self.stdin.close()
                    self.stdin = None
            del self.err[LONGEST_STDERR:]
            if until is not None and until(self.out, self.err):
                return 0
            if len(self.out) > longest:
                return -signal.SIGKILL
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(_REAP)
        return None  # another process of its user traces it, and keeps its exit status

    def close(self) -> None:
        """Kill it with its process group unless it was reaped, and close our ends of its pipes."""
        if self.returncode is None:
            _kill(self.pid)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.wait(_REAP)
        _running.discard(self.pid)
        for pipe in (self.stdin, self.stdout, self.stderr):
            if pipe is not None:
                pipe.close()
        if self._ended >= 0:
            os.close(self._ended)


def _write(descriptor: int, data: bytes) -> bytes:
    """Write as much as there is room for, and return the rest; return nothing if the program no longer reads."""
    try:
        return data[os.write(descriptor, data[: 1 << 16]) :] if data else b""
    except BlockingIOError:
        return data
    except OSError:
        return b""


@atexit.register
def _kill_all() -> None:
    """Kill all programs at exit, for one left behind could go on writing into the scratch directory."""
    wait.until(lambda: not _starting, _REAP, 0.01)
    for pid in list(_running):
        _kill(pid)


def _kill(pid: int) -> None:
    with contextlib.suppress(OSError):  # it is gone, or has changed its user
        os.killpg(pid, signal.SIGKILL)
