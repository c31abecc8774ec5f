"""Programs and files of the administrator's: that nobody else can have written them, and how programs are run.

`vmgahp.xml_script` and `vmgahp.policy` share this. What runs here has the server's rights, mostly root's.
"""

import os

from vmgahp.errors import MachineFault

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

LONGEST_STDERR = 64 << 10
"""Bytes of stderr that are kept; the rest is read and dropped."""

AD_DESCRIPTOR = 3
"""Where a program finds what it is given beside its standard input."""


def require_trustworthy(path: str, setting: str, otherwise: str, *, executable: bool = True) -> None:
    """Make sure that a file is one that only root, or the caller, can have written.

    That goes for the file and for every directory and link on the way to it: whoever may write to one of
    them could put another file in its place. A directory with the sticky bit, such as ``/tmp``, protects
    what is in it. `setting` names the file, `otherwise` is what else can be done than to give a good one.
    Raises `MachineFault`.
    """
    from stat import S_ISREG

    what = "an executable" if executable else "a file"
    cure = f"give {setting} {what} that belongs to root, in directories that only root may write to"

    def refuse(problem: str) -> MachineFault:
        return MachineFault(f"{setting} = {path} {problem}.", f"{cure}; {otherwise}.")

    if not path.startswith("/"):
        raise refuse("is not an absolute path")
    trusted = {0, os.geteuid()}
    try:
        way = _way(path)
        if trouble := _trouble(way[:-1], trusted):
            raise refuse(f"is reached by {trouble}")
        file = os.lstat(way[-1])
        if not S_ISREG(file.st_mode):
            raise refuse("is not a regular file")
        if file.st_uid not in trusted:
            raise refuse(f"belongs to user id {file.st_uid}")
        if file.st_mode & 0o022:
            raise refuse(f"may be written to by others (mode {file.st_mode & 0o7777:04o})")
        mode = os.X_OK if executable else os.R_OK
        if not os.access(way[-1], mode, effective_ids=os.access in os.supports_effective_ids):
            raise refuse(f"may not be {'executed' if executable else 'read'} by this server")
    except OSError as error:
        raise refuse(f"cannot be used: {error.strerror}") from error


def trouble_with_directory(path: str) -> str:
    """Who else can have put something into a directory, or another in its place; "" for nobody.

    By the rules of `require_trustworthy`. Raises OSError.
    """
    return _trouble(_way(os.path.join(os.getcwd(), path)), {0, os.geteuid()})


def _trouble(way: "Sequence[str]", trusted: set[int]) -> str:
    from stat import S_ISDIR, S_ISVTX

    for passed in way:
        there = os.lstat(passed)
        if there.st_uid not in trusted:
            return f"{passed}, which belongs to user id {there.st_uid}"
        if S_ISDIR(there.st_mode) and there.st_mode & 0o022 and not there.st_mode & S_ISVTX:
            return f"{passed}, to which others may write"
    return ""


def _way(path: str) -> list[str]:
    """Every directory and link that the kernel passes on its way to `path`, and at last the file itself."""
    import errno

    passed = ["/"]
    here = "/"
    links = 0
    names = path.split("/")
    while names:
        name = names.pop(0)
        if name in ("", "."):
            continue
        if name == "..":
            here = os.path.dirname(here)
            continue
        there = os.path.join(here, name)
        passed.append(there)
        try:
            target = os.readlink(there)
        except OSError as error:
            if error.errno != errno.EINVAL:  # which says that it is no link
                raise
            here = there
            continue
        links += 1
        if links > 40:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        names[:0] = target.split("/")
        if target.startswith("/"):
            here = "/"
    return [*passed, here]


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
