"""virtiofsd for the directories that a guest can mount, as the job's user and on sockets of ours.

libvirt's own would run as root. QEMU connects to this one as its VM starts, and virtiofsd ends with that connection;
`vmgahp.host.file_server` confines it. A VM that has one cannot be saved, so it is never restarted.
"""

import os
import socket
import subprocess
import sys
from time import monotonic

from vmgahp import errors
from vmgahp.host import budget, job_user, packages, runtime_dir, wait
from vmgahp.host.file_server import OF_QEMU
from vmgahp.host.job_user import Identity
from vmgahp.host.run import plain_environment
from vmgahp.host.system_calls import Opened
from vmgahp.job.attributes import Share

PLACES = ("/usr/libexec/virtiofsd", "/usr/lib/virtiofsd", "/usr/bin/virtiofsd", OF_QEMU)
"""The paths of virtiofsd in distributions, on no PATH."""


def hint() -> str:
    return f"To have it here: {packages.of_system('virtiofsd')} (before Debian 13 it is in qemu-system-common)."


USER_NAMESPACES = "let unprivileged users make user namespaces (sysctl kernel.unprivileged_userns_clone=1, AppArmor)."

TRIAL_WAIT = 5.0
"""Seconds for it to answer; it takes 0.1 s."""
_GET_FEATURES = b"".join(number.to_bytes(4, sys.byteorder) for number in (1, 1, 0))
"""The first request of QEMU (``docs/interop/vhost-user.rst`` in its source)."""
_ANSWER = 20
"""The size of the answer in bytes."""


def program() -> str:
    """Return the full path of virtiofsd; empty if it is not installed."""
    return next((path for path in PLACES if os.access(path, os.X_OK)), "")


def trouble(identity: Identity, seconds: float) -> str:
    """Send QEMU's first request to a trial virtiofsd; return the error, empty if it answers. Raises nothing."""
    if not program():
        return "virtiofsd is not installed"
    room = ""
    try:
        room = runtime_dir.runtime_dir()
        begin(identity, room, Share("trial", "/usr", "", writable=False), (os.geteuid(), os.getegid()), seconds)
        with socket.socket(socket.AF_UNIX) as control:
            control.settimeout(max(0.05, seconds))
            control.connect(socket_in(room))
            control.sendall(_GET_FEATURES)
            with control.makefile("rb") as answer:  # the header and the rest arrive separately
                is_whole = len(answer.read(_ANSWER)) == _ANSWER
            return "" if is_whole else "virtiofsd ends where it is asked for its features"
    except errors.Fault as fault:
        return fault.problem.removesuffix(".")
    except OSError as error:
        return f"virtiofsd does not answer: {error.strerror or error}"
    finally:
        if room:
            runtime_dir.remove(room)


def socket_in(room: str) -> str:
    return f"{room}/fs"


def begin(identity: Identity, room: str, share: Share, owner: tuple[int, int], seconds: float = TRIAL_WAIT) -> None:
    """Start virtiofsd for the QEMU of this user and group. Raises `errors.Fault`."""
    path = program()
    if not path:
        raise errors.MachineFault("virtiofsd is not installed.", hint())
    began, start = monotonic(), budget.current()
    seconds = start.left(seconds)
    said, status = os.pipe()
    # Only virtiofsd keeps the listener: if it ends, QEMU gets an error at once instead of waiting for an answer.
    try:
        with Opened(status), socket.socket(socket.AF_UNIX) as listener:
            runtime_dir.listen(listener, socket_in(room), owner)
            passed = (listener.fileno(), status)
            server = [sys.executable, "-I", "-m", "vmgahp.host.file_server", *map(str, passed)]
            server += map(str, (identity.uid, identity.gid, os.getpid()))
            server += ["rw" if share.writable else "ro", share.directory, room]
            process = subprocess.Popen(
                [*server, path],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env=plain_environment(),
                pass_fds=passed,
                start_new_session=True,
            )
        runtime_dir.remember(process, room)
        words = os.read(said, 4096).decode("utf-8", "replace") if wait.ready(said, max(seconds, 0.05)) else ""
    except OSError as error:
        problem = f"virtiofsd cannot be run for {share.directory}: {error.strerror}."
        raise errors.MachineFault(problem, "see that /run has room.") from error
    finally:
        start.spend(began)
        os.close(said)
    if words != "ok":
        raise _refused(share, words, identity)


def _refused(share: Share, words: str, identity: Identity) -> errors.Fault:
    """Return the fault for a directory that cannot be served: the job's or the machine's.

    Processes of the job's user can limit and trace the program, so root looks at the administrator's directory itself.
    """
    what, _, reason = words.partition("\n")
    problem = f"{share.directory} cannot be served by virtiofsd: {what}: {reason or 'it does not begin'}."
    if what == share.directory and share.setting and reason == "Permission denied":
        return errors.JobFault(
            errors.MISMATCHED,
            f"This machine's directory {share.tag} ({share.setting}) cannot be read by the job's user.",
            "leave it out of VMPARAM_vm_Share_Dirs, or ask the administrator of this machine to open it to that user.",
        )
    if what == share.directory:
        try:
            if share.setting:
                job_user.as_root(identity, job_user.open_directory, os.fsencode(share.directory))
        except OSError as error:
            problem = f"{share.directory} cannot be opened: {error.strerror}."
            return errors.MachineFault(problem, f"make the directory, or correct {share.setting}.")
        hint = "see what the job's files, or its user's processes, make of that directory."
        return errors.JobFault(errors.MISMATCHED, problem, hint)
    # It has worked as this user (`trouble`): the cause now may be that user's other processes.
    hint = f"see what the processes of the job's user do, or require another machine; of this one, {USER_NAMESPACES}"
    return errors.JobFault(errors.MISMATCHED, problem, hint)
