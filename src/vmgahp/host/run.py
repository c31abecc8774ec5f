"""How programs are run: with a deadline, in a session of their own, their output capped."""

import os

from vmgahp.errors import MachineFault

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


LONGEST_STDERR = 64 << 10
"""Bytes of stderr that are kept; the rest is read and dropped."""


AD_DESCRIPTOR = 3
"""Where a program finds what it is given beside its standard input."""


def environment(environ: "Mapping[str, str]") -> dict[str, str]:
    """What a script of the administrator's may need: programs, and HTCondor's configuration."""
    kept = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/"}
    for name, value in environ.items():
        upper = name.upper()
        if name in ("PATH", "CONDOR_CONFIG", "CONDOR_IDS", "LD_LIBRARY_PATH") or (
            upper.startswith("_CONDOR_") and not upper.startswith("_CONDOR_ANCESTOR_")
        ):
            kept[name] = value
    return kept


DEADLINE = 10.0
"""Seconds that HTCondor's tool may take: mostly 5 ms, but it looks up the name of the machine."""
LONGEST_CONFIGURATION = 1 << 20
_SIGKILL, _SIGPIPE = 9, 13


def converse(
    setting: str,
    argv: "Sequence[str]",
    stdin: bytes,
    deadline: float,
    environ: dict[str, str],
    longest: int,
    beside: int = -1,
) -> tuple[bytes, bytes, int | None]:
    """Start the program in ``/``, write its stdin and read the rest, all at once.

    Returns stdout, stderr (cut) and the exit status, negative for a signal, None when the deadline killed it;
    one that prints more than `longest` bytes is killed, and what is returned is longer than that. `beside` is
    a descriptor that it gets as its `AD_DESCRIPTOR`. Raises `MachineFault`, which names the `setting`, where
    it cannot be started at all.
    """
    import select
    import signal
    from time import monotonic

    end = monotonic() + deadline
    descriptors: set[int] = set()

    def close(descriptor: int) -> None:
        descriptors.discard(descriptor)
        os.close(descriptor)

    try:
        pipes = []
        for _ in range(3):
            pipes.append(os.pipe2(os.O_CLOEXEC))
            descriptors.update(pipes[-1])
        (their_in, our_in), (our_out, their_out), (our_err, their_err) = pipes
        # A shell, because posix_spawn cannot change the directory; it replaces itself by the script.
        pid = os.posix_spawn(
            "/bin/sh",
            ["sh", "-c", 'cd / && exec "$@"', "sh", *argv],
            environ,
            file_actions=[
                (os.POSIX_SPAWN_DUP2, their_in, 0),
                (os.POSIX_SPAWN_DUP2, their_out, 1),
                (os.POSIX_SPAWN_DUP2, their_err, 2),
                *([(os.POSIX_SPAWN_DUP2, beside, AD_DESCRIPTOR)] if beside >= 0 else []),
            ],
            setsid=True,
            setsigmask=[],
            setsigdef=set(signal.valid_signals()) - {signal.SIGKILL, signal.SIGSTOP},
        )
    except OSError as error:
        for descriptor in list(descriptors):
            close(descriptor)
        raise MachineFault(
            f"{setting} ({argv[0]}) cannot be started: {error.strerror}.",
            "look at the limits on processes and open files.",
        ) from error
    status: int | None = None
    output, errors = bytearray(), bytearray()
    try:
        for theirs in (their_in, their_out, their_err):
            close(theirs)
        pidfd = os.pidfd_open(pid)
        descriptors.add(pidfd)
        os.set_blocking(our_in, False)
        poll = select.poll()
        poll.register(our_in, select.POLLOUT)
        for reading in (our_out, our_err, pidfd):
            poll.register(reading, select.POLLIN)
        waiting = {our_in, our_out, our_err, pidfd}
        while waiting - {our_in}:
            ready = poll.poll(max(end - monotonic(), 0) * 1000)
            if not ready or monotonic() >= end:
                break
            for descriptor, _ in ready:
                finished = True
                if descriptor == our_in:
                    try:
                        stdin = stdin[os.write(our_in, stdin[:65536]) :]
                        finished = not stdin
                    except BlockingIOError:
                        finished = False
                    except OSError:
                        pass  # a script need not read it all
                elif descriptor != pidfd:
                    chunk = os.read(descriptor, 65536)
                    finished = not chunk
                    if descriptor == our_out:
                        output += chunk
                    else:
                        errors += chunk[: LONGEST_STDERR - len(errors)]
                if finished:
                    poll.unregister(descriptor)
                    waiting.discard(descriptor)
                    if descriptor == our_in:
                        close(our_in)
            if len(output) > longest:
                status = -signal.SIGKILL
                break
        else:
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            return bytes(output), bytes(errors), status
        os.killpg(pid, signal.SIGKILL)
        last = select.poll()
        last.register(pidfd, select.POLLIN)
        if last.poll(1000):  # else it hangs in the kernel, and is left to it
            os.waitpid(pid, 0)
        return bytes(output), bytes(errors), status
    finally:
        for descriptor in list(descriptors):
            close(descriptor)


def run(command: list[str], environ: "Mapping[str, str]") -> tuple[str, str]:
    """Run a program and return what it writes to standard output and to standard error.

    Raises `MachineFault` where it cannot be run or is not done within `DEADLINE`; it is killed.
    """
    import time
    from select import POLLIN, poll

    until = time.monotonic() + DEADLINE
    ends: list[int] = []
    output: dict[int, bytes] = {}
    pid = 0
    try:
        for _ in range(2):
            ends += os.pipe()
        pid = os.posix_spawn(
            command[0],
            command,
            dict(environ),
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, ends[1], 1),
                (os.POSIX_SPAWN_DUP2, ends[3], 2),
            ],
            setsigmask=(),
            setsigdef=(_SIGPIPE,),
        )
        os.close(ends.pop(3))
        os.close(ends.pop(1))
        watch = poll()
        for fd in ends:
            watch.register(fd, POLLIN)
            output[fd] = b""
        reading = set(ends)
        while reading:
            ready = watch.poll(max(0.0, until - time.monotonic()) * 1000)
            if not ready:
                raise MachineFault(
                    f"{command[0]} did not answer within {DEADLINE:.0f} seconds and was killed.",
                    f"run {' '.join(command[:4])} by hand and see what it waits for.",
                )
            for fd, _ in ready:
                data = os.read(fd, 65536)
                output[fd] += data
                if len(output[fd]) > LONGEST_CONFIGURATION:
                    raise MachineFault(
                        f"{command[0]} wrote more than a configuration has and was killed.",
                        "mend or reinstall HTCondor.",
                    )
                if not data:
                    watch.unregister(fd)
                    reading.discard(fd)
    except OSError as error:
        raise MachineFault(
            f"{command[0]} cannot be run: {error.strerror}.", "mend or reinstall HTCondor."
        ) from error
    finally:
        for fd in ends:
            os.close(fd)
        if pid:
            _reap(pid)
    out, err = (output[fd].decode("utf-8", "surrogateescape") for fd in ends)
    return out, err


def _reap(pid: int) -> None:
    """End a child that has nothing more to say."""
    try:
        os.kill(pid, _SIGKILL)
        os.waitpid(pid, 0)
    except (ChildProcessError, ProcessLookupError):
        pass
