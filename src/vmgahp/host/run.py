"""The common way to run a program: in a session of its own, with a deadline and a limit on its output.

It uses posix_spawn rather than `subprocess`: the server asks HTCondor's tool for its settings before its first
reply, when that import costs more than the answer; and a program must not inherit the signals that the server
ignores or blocks, which `subprocess` leaves unchanged. posix_spawn can change neither the user, nor the limits,
nor the directory, so util-linux's setpriv and prlimit and the shell do that, and exec the program.
"""

from __future__ import annotations

import atexit
import errno
import os
import signal
from collections.abc import Callable, Mapping, Sequence

from vmgahp.host.job_user import Identity

LONGEST_STDERR = 64 << 10
"""The most bytes of stderr that are kept; the rest is read and dropped."""

FIRST_PASSED = 3
"""The lowest of the program's `pass_fds` has this number there."""

SAFE_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

_REAP = 1.0
"""The seconds to wait for a killed program to exit; one in a hung file system never does."""

INTERRUPTING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The signals by which a person, or a shutdown, ends a command."""

_running: set[int] = set()
"""The programs that a caller waits for; they are killed when this process exits."""


class Finished:
    """The exit status and the output of a program."""

    __slots__ = ("err", "out", "status")

    def __init__(self, status: int | None, out: bytes, err: bytes) -> None:
        self.status = status
        """The exit status, negative for the signal that ended it, None if it was killed at its deadline."""
        self.out = out
        self.err = err
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
    kept = {"PATH": SAFE_PATH, "HOME": "/"}
    for name, value in environ.items():
        upper = name.upper()
        if name in ("PATH", "CONDOR_CONFIG", "CONDOR_IDS", "LD_LIBRARY_PATH") or (
            upper.startswith("_CONDOR_") and not upper.startswith("_CONDOR_ANCESTOR_")
        ):
            kept[name] = value
    return kept


def run(
    argv: Sequence[str],
    *,
    deadline: float,
    stdin: bytes | int = b"",
    environ: Mapping[str, str] | None = None,
    user: Identity | None = None,
    groups: Sequence[int] | None = None,
    limits: Sequence[str] = (),
    umask: int = -1,
    directory: str = "/",
    pass_fds: Sequence[int] = (),
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
    `groups`. `limits` are options of prlimit. An empty `directory` is this process's own. `pass_fds` become its
    descriptors from `FIRST_PASSED` on, in ascending order; `stdin` may be a descriptor, too. Raises OSError if it
    cannot be started, with the program's name as the file name.
    """
    from time import monotonic

    end = monotonic() + deadline
    environ = plain_environment() if environ is None else environ
    words = [_find("prlimit", environ), *limits] if limits else []
    if user is not None and user.switching:
        words += [_find("setpriv", environ), *_as_user(user, groups)]
    words += [_find(argv[0], environ), *argv[1:]]
    if directory:
        # The directory is an argument of the shell and never a part of its script.
        mask = f"umask {umask:o} && " if umask >= 0 else ""
        words = ["/bin/sh", "-c", f'cd -- "$1" && shift && {mask}exec "$@"', "sh", directory, *words]
    child = _Child(words, environ, pass_fds, stdin if isinstance(stdin, int) else -1)
    try:
        status = child.listen(b"" if isinstance(stdin, int) else stdin, end, longest, until, grace, reader)
    finally:
        child.close()
    return Finished(status, bytes(child.out), bytes(child.err))


def begin(argv: Sequence[str], user: Identity) -> int:
    """Start a background program, as `user` without other groups, and return its pid, which is its process group's.

    It has a session of its own and none of this process's descriptors, its output is dropped, and it is killed when the
    thread that starts it ends. Raises OSError if it cannot be started, with the program's name as the file name.
    """
    environ = plain_environment()
    words = [_find("setpriv", environ), "--pdeathsig=KILL", "--no-new-privs"]
    words += _as_user(user, ()) if user.switching else []
    words += [_find(argv[0], environ), *argv[1:]]
    nowhere = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDWR, 0) for number in range(3)]
    return os.posix_spawn(
        words[0],
        words,
        environ,
        file_actions=nowhere + [(os.POSIX_SPAWN_CLOSE, number) for number in open_descriptors() if number > 2],
        setsid=True,
        setsigmask=(),
        setsigdef=signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP},
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


class _Child:
    """A running program, and our ends of its pipes."""

    def __init__(self, words: list[str], environ: Mapping[str, str], pass_fds: Sequence[int], stdin: int = -1) -> None:
        """Start the program. Raises OSError."""
        self.out, self.err = bytearray(), bytearray()
        self._ours: list[int] = []
        self._pid = 0
        theirs: list[int] = []
        # The exception of such a signal must not come between the start of the program and its registration.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, INTERRUPTING)
        try:
            for of_program in (0, 1, 1):
                pipe = os.pipe2(os.O_CLOEXEC)
                theirs.append(pipe[of_program])
                self._ours.append(pipe[1 - of_program])
            moves = list(enumerate(theirs))
            if stdin >= 0:
                moves[0] = 0, stdin
            # In this order no descriptor is overwritten before its turn. On older systems the exec would close one that
            # already has its number.
            for number, descriptor in enumerate(sorted(pass_fds), FIRST_PASSED):
                if number == descriptor:
                    from fcntl import F_DUPFD_CLOEXEC, fcntl

                    descriptor = fcntl(descriptor, F_DUPFD_CLOEXEC, number + 1)
                    theirs.append(descriptor)
                moves.append((number, descriptor))
            self._pid = os.posix_spawn(
                words[0],
                words,
                environ,
                file_actions=[
                    *((os.POSIX_SPAWN_DUP2, end, number) for number, end in moves),
                    *((os.POSIX_SPAWN_CLOSE, number) for number in open_descriptors() if number >= len(moves)),
                ],
                setsid=True,
                setsigmask=(),
                setsigdef=signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP},
            )
            _running.add(self._pid)
            self._ours.append(os.pidfd_open(self._pid))
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        except BaseException:
            self.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            for end in theirs:
                os.close(end)

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
        from select import POLLIN, POLLOUT, poll
        from time import monotonic

        to_program, stdout, stderr, ended = self._ours
        os.set_blocking(to_program, False)
        watch = poll()
        for descriptor in (stdout, stderr, ended):
            watch.register(descriptor, POLLIN)
        watch.register(to_program, POLLOUT)
        if reader >= 0:
            watch.register(reader, 0)  # errors are always reported
        waiting = {stdout, stderr, ended}
        while waiting:
            ready = watch.poll(max(end - monotonic(), 0) * 1000)
            if not ready or monotonic() >= end:
                if ended not in waiting and grace is not None:
                    break
                return None
            for descriptor, _ in ready:
                data = b""
                if descriptor == reader:
                    return -signal.SIGKILL
                if descriptor == to_program:
                    stdin = _write(to_program, stdin)
                    if stdin:
                        continue
                    os.close(to_program)
                    self._ours.remove(to_program)
                elif descriptor == ended:
                    end = end if grace is None else monotonic() + grace
                else:
                    data = os.read(descriptor, 1 << 16)
                    if descriptor == stdout:
                        self.out += data
                    else:
                        self.err += data[: LONGEST_STDERR - len(self.err)]
                if not data:
                    watch.unregister(descriptor)
                    waiting.discard(descriptor)
            if until is not None and until(self.out, self.err):
                return 0
            if len(self.out) > longest:
                return -signal.SIGKILL
        return self._reap(0)

    def close(self) -> None:
        """Kill it with its process group unless it was reaped, and close our ends of its pipes."""
        if self._pid:
            _kill(self._pid)
            from select import POLLIN, poll

            last = poll()
            last.register(self._ours[-1], POLLIN)
            self._reap(0 if last.poll(_REAP * 1000) else os.WNOHANG)
        for descriptor in self._ours:
            os.close(descriptor)
        self._ours.clear()

    def _reap(self, options: int) -> int:
        _running.discard(self._pid)
        pid, self._pid = self._pid, 0
        return os.waitstatus_to_exitcode(os.waitpid(pid, options)[1])


def open_descriptors() -> list[int]:
    """List all descriptors of this process, including those that were left open across our own exec.

    The one that listed them is included, and closed by now; posix_spawn accepts the closing of a number that is not
    open.
    """
    return [int(name) for name in os.listdir("/proc/self/fd")]


def _write(descriptor: int, data: bytes) -> bytes:
    """Write as much as there is room for, and return the rest; return nothing if the program no longer reads."""
    try:
        return data[os.write(descriptor, data[: 1 << 16]) :] if data else b""
    except BlockingIOError:
        return data
    except OSError:
        return b""


def _kill_all() -> None:
    """Kill all programs at exit, for one left behind could go on writing into the scratch directory."""
    for pid in list(_running):
        _kill(pid)


atexit.register(_kill_all)


def _kill(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except OSError:
        pass  # it is gone, or has changed its user
