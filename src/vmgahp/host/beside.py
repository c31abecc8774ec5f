"""A program that runs beside one QEMU, on a socket in a directory that this process made for it.

The directory, the `room`, is `runtime_dir.runtime_dir`'s. It keeps the process id, so that whoever is told of the end
of the VM can end the program, in whichever process.
"""

import os
import select

from vmgahp.host.light import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    import subprocess
    from collections.abc import Callable, Iterable

    from vmgahp.host.job_user import Identity

END_WAIT = 5.0
"""Seconds for a program to end when it is told to; then it is killed."""


def listen(listener: "socket.socket", path: str, owner: tuple[int, int]) -> None:
    """Listen at a path for one user and group alone. Raises OSError."""
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


def remember(process: "subprocess.Popen[bytes]", room: str) -> None:
    """Leave a program to `end`, and not to the object that started it. Raises OSError."""
    process.returncode = 0
    with open(_note(room), "w") as file:
        file.write(str(process.pid))


def end(room: str, mark: str) -> None:
    """End the program of a room, if it still runs; `mark` is in its command line: another's process is not ended."""
    try:
        with open(_note(room)) as file:
            pid = int(file.read(32))
        process = os.pidfd_open(pid)
    except (OSError, ValueError):
        return
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            is_ours = mark.encode() in file.read()
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


def clear(room: str, files: "Iterable[str]") -> None:
    """Remove a room with its files. Raises nothing."""
    for path in (*files, _note(room)):
        try:
            os.unlink(path)
        except OSError:
            pass
    try:
        os.rmdir(room)
    except OSError:
        pass


def over(_identity: "Identity", _log: "Callable[[str], None]", room: str, *files: str) -> None:
    """The VM is gone, and what ran beside it, with the room in its command line, is to go. Raises nothing."""
    end(room, room)
    clear(room, (f"{room}/{name}" for name in files))


def _note(room: str) -> str:
    """Where its process id is; only this daemon writes there."""
    return f"{room}/pid"
