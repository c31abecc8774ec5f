"""A software TPM for one guest: swtpm as the job's user, on a socket that this process makes for it.

libvirt can start swtpm too, but as a user of its own and for its own user of QEMU: a QEMU that runs as the job's
user cannot reach that socket (libvirt 9.0). The TPM is empty when the guest boots, without the certificates of a
manufacturer, and what it keeps ends with the VM. swtpm ends with its QEMU; a restored guest gets another one,
and brings the TPM's state in its memory image.
"""

import os
import select
import signal

from vmgahp import errors
from vmgahp.drivers.base import Logger
from vmgahp.host.job_user import Identity

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket

PROGRAM = "swtpm"

END_WAIT = 5.0
"""Seconds for swtpm to end when it is told to; then it is killed."""


def socket_in(room: str) -> str:
    """The socket that QEMU connects to."""
    return f"{room}/tpm"


def make(identity: Identity, room: str) -> None:
    """Make an empty TPM in a directory of its own, which `end` removes. Raises `errors.MachineFault`."""
    try:
        os.close(os.open(_state(room), os.O_CREAT | os.O_EXCL, 0o600))
        if os.geteuid() == 0:
            os.chown(_state(room), identity.uid, identity.gid)
    except OSError as error:
        raise _no_room(room, error) from error


def begin(identity: Identity, log: Logger, room: str, uid: int, gid: int) -> None:
    """Run swtpm for a QEMU that is about to start, as this user and group. Raises `errors.MachineFault`."""
    import socket
    import subprocess

    _end_program(room)
    # Only swtpm keeps it: where that ends, QEMU hears so at once and does not wait for an answer.
    with socket.socket(socket.AF_UNIX) as listener:
        try:
            _listen(listener, room, (uid, gid))
        except OSError as error:
            raise _no_room(room, error) from error
        descriptor = listener.fileno()
        command = [PROGRAM, "socket", "--tpm2", "--terminate"]
        command += ["--ctrl", f"type=unixio,fd={descriptor}"]
        command += ["--tpmstate", f"backend-uri=file://{_state(room)}"]
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                pass_fds=(descriptor,),
                **identity.of_process(groups=[]),
            )
        except OSError as error:
            raise errors.MachineFault(
                f"{PROGRAM}, the software TPM, cannot be run: {error.strerror}.", "see that it is installed and whole."
            ) from error
    process.returncode = 0  # `end` looks after it, in whichever process
    try:
        with open(_note(room), "w") as file:
            file.write(str(process.pid))
    except OSError as error:
        log(f"{PROGRAM} ends with its QEMU and not before: {error}")


def end(_identity: Identity, _log: Logger, room: str) -> None:
    """End swtpm and forget what it kept. Raises nothing."""
    _end_program(room)
    for name in (socket_in(room), _state(room), _note(room)):
        try:
            os.unlink(name)
        except OSError:
            pass
    try:
        os.rmdir(room)
    except OSError:
        pass


def _state(room: str) -> str:
    return f"{room}/state"


def _note(room: str) -> str:
    """Where its process id is; only this daemon writes there."""
    return f"{room}/pid"


def _listen(listener: "socket.socket", room: str, owner: tuple[int, int]) -> None:
    path = socket_in(room)
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
    listener.bind(path)
    # Nobody can connect before listen().
    os.chmod(path, 0o600)
    if os.geteuid() == 0:
        os.chown(path, *owner)
    listener.listen(1)


def _no_room(room: str, error: OSError) -> errors.MachineFault:
    return errors.MachineFault(
        f"No socket can be made for the TPM in {room}: {error.strerror}.", "see that /run has room."
    )


def _end_program(room: str) -> None:
    """End the swtpm of a directory, if it still runs: whoever has its process id now is not ended."""
    try:
        with open(_note(room)) as file:
            pid = int(file.read(32))
        process = os.pidfd_open(pid)
    except (OSError, ValueError):
        return
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            is_ours = _state(room).encode() in file.read()
        for number in (signal.SIGTERM, signal.SIGKILL) if is_ours else ():
            signal.pidfd_send_signal(process, number)
            poll = select.poll()
            poll.register(process, select.POLLIN)
            if poll.poll(END_WAIT * 1000):
                break
    except OSError:
        pass  # it has ended meanwhile
    finally:
        os.close(process)
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        pass  # another process has started it
