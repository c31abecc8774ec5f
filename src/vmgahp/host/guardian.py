"""A process that outlives the server and ends the VM if the server was killed.

A server that exits normally destroys its VMs. One that is killed cannot, and nothing else does it: condor_starter dies
with it, the job is rescheduled, and the guest runs on without a job. So each VM has a guardian: a shell of less than a
MiB that waits on a pipe whose other end only the server holds. The word ``done`` dismisses it; the end of the pipe
without that word means that the server is gone, and the guardian runs the kill mode for this one VM.

It must survive the events that kill the server. HTCondor's actions at a starter's end, and the measures against them
(``src/condor_procd``, ``src/condor_startd.V6/Starter.cpp`` and ``proc_family_direct_cgroup_v2.cpp``):

- *Process families by parent*: a process that has a parent in the family when a snapshot of the processes is
  taken is a member for good. The shell is orphaned twice, the second time only after its first parent has
  exited, so that no snapshot can find a chain of living parents from the server to it.
- *By environment*: ``_CONDOR_ANCESTOR_*`` is not passed on.
- *By login*: only with a dedicated account, which is the job's user; the server and its guardian are root.
- *By group id* (USE_GID_PROCESS_TRACKING): condor_starter uses it for vanilla jobs and not for VMs.
- *By cgroup*: a VM job gets none of its own, but with CGROUP_ALL_DAEMONS the starter has one, which is
  emptied by SIGKILL when the starter ends; and systemd empties that of condor.service when condor_master
  dies (``KillMode=mixed``). So as root the guardian moves to the root cgroup, where only the shutdown of the
  machine kills it. It stays where it is if that is refused: without root, or inside a container
  whose root cgroup is a branch of the real one.
- *By session or process group*: it has a session of its own, and ignores HUP, INT, QUIT and TERM.

The end of the machine ends it as well: systemd-shutdown, in the place of init, would wait 90 seconds for a process that
ignores its SIGTERM.

A child that the server forks *without* exec holds a copy of the pipe, and the guardian waits for its end
too: such children must be short-lived.
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Collection, Mapping, Sequence
from fcntl import F_DUPFD_CLOEXEC, fcntl
from threading import Lock

SAFE_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

CONDORS = ("PATH", "CONDOR_CONFIG", "CONDOR_IDS", "LD_LIBRARY_PATH")
"""The configuration of HTCondor, and the variables that its tools need to read it."""
_OUR_OWN = ("VMGAHP_USER_UID", "VMGAHP_USER_GID", "VMGAHP_CONFIG")
_USERS = ("HOME", "USER", "LOGNAME", "XDG_RUNTIME_DIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME")
"""The variables that locate a user's own libvirtd."""

KEPT = (*CONDORS, *_OUR_OWN, *_USERS)
"""The environment variables that the guardian passes on, besides the settings called ``_CONDOR_<NAME>``."""

TRIES = 43_200
"""The most attempts of the kill mode until it succeeds: a month's worth, with pauses of a minute at most. libvirtd may
be restarting, or be away for days, while the guest runs on. There is a limit only because the command fails for ever
on a machine from which vmgahp was removed."""

SCRIPT = """\
cd / || exit
trap '' HUP INT QUIT TERM
for branch in . unified systemd
do
    procs=/sys/fs/cgroup/$branch/cgroup.procs
    [ -w "$procs" ] && echo 0 >"$procs"
done
pause=$1 tries=$2
shift 2
{
    read -r word <&3
    {
        exec <&3 3<&-
        read -r word
        [ "$word" = done ] && exit
        exec </dev/null
        until (trap - TERM && exec "$@")
        do
            read -r first </proc/1/comm
            [ "$first" = systemd-shutdow ] && exit
            tries=$((tries - 1))
            [ "$tries" -gt 0 ] || exit
            (trap - TERM && exec sleep "$pause")
            pause=$((pause < 30 ? pause * 2 : 60))
        done
    } &
} &
"""
"""The guardian's shell script. Its arguments: seconds before the second try, the number of tries, the command.

The first word that it reads means that its first parent has exited. ``0`` stands for the writer itself in
``cgroup.procs``; the three names are those of cgroup v2, of v2 beside v1, and of systemd's own v1 hierarchy."""


class Guardian:
    """The server's handle on one guardian: post it before the VM exists, dismiss it when the VM is gone."""

    def __init__(self, pipe: int, session: int) -> None:
        self.pipe = pipe
        self._lock = Lock()
        self.session = session

    @classmethod
    def post(cls, argv: Sequence[str], environ: Mapping[str, str], *, pause: int = 2, tries: int = TRIES) -> Guardian:
        """Start the guardian that will run `argv`, whose first word is an absolute path.

        `environ` is the server's environment, of which it keeps the part that `environment` returns. The command is run
        with cwd ``/`` and stdio on ``/dev/null``, and again while it fails: `tries` times in all, `pause`
        seconds after the first failure and twice as long after each next, up to a minute. Raises OSError when
        there are no processes or descriptors left to start it with.
        """
        reading, writing = os.pipe2(os.O_CLOEXEC)
        try:
            # The number must differ from those of the shell's own descriptors.
            low, reading = reading, fcntl(reading, F_DUPFD_CLOEXEC, 10)
            os.close(low)
            pid = os.posix_spawn(
                "/bin/sh",
                ["sh", "-c", SCRIPT, "vmgahp-guardian", str(pause), str(tries), *argv],
                environment(environ),
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
                    (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
                    (os.POSIX_SPAWN_DUP2, reading, 3),
                    # The one that lists them is among them, and closed by then, which is no error.
                    *((os.POSIX_SPAWN_CLOSE, number) for number in map(int, os.listdir("/proc/self/fd")) if number > 3),
                ],
                setsid=True,
                setsigmask=[],
                setsigdef=set(signal.valid_signals()) - {signal.SIGKILL, signal.SIGSTOP},
            )
        except BaseException:
            os.close(writing)
            raise
        finally:
            os.close(reading)
        try:
            _, status = os.waitpid(pid, 0)
        except ChildProcessError:
            status = 0  # other code has reaped it: it has exited all the same
        if status != 0:
            os.close(writing)
            raise OSError(errno.EAGAIN, "the guardian's shell could not go to the background")
        guardian = cls(writing, pid)
        guardian._say(b"orphaned\n")
        return guardian

    def _say(self, word: bytes) -> None:
        try:
            os.write(self.pipe, word)  # never waits: the pipe has room for both words
        except OSError:
            return  # the guardian is gone, and needs no message

    def dismiss(self) -> None:
        """End the guardian without an action, since the VM is gone. May be called again."""
        with self._lock:
            if self.pipe < 0:
                return
            self._say(b"done\n")
            os.close(self.pipe)
            self.pipe = -1


def environment(environ: Mapping[str, str], names: Collection[str] = KEPT) -> dict[str, str]:
    """Return the variables `names` of `environ`, and HTCondor's settings without its bookkeeping.

    HTCondor takes ``_CONDOR_`` in upper or lower case (``condor_config.cpp``); by the ``_CONDOR_ANCESTOR_``
    variables it finds its processes again (``condor_pidenvid.h``).
    """
    kept = {"PATH": SAFE_PATH}
    for name, value in environ.items():
        upper = name.upper()
        if name in names or (upper.startswith("_CONDOR_") and not upper.startswith("_CONDOR_ANCESTOR_")):
            kept[name] = value
    return kept
