"""What another process of a user does to every process of that user: signals, limits, ptrace, forged answers."""

import contextlib
import ctypes
import os
import platform
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path

By = Callable[[Callable[[], None]], None]
"""What it does again and again; it calls the argument when it has met a process."""

LIBC = ctypes.CDLL(None, use_errno=True)
SEIZE, INTERRUPT, ATTACH, GETREGS, SETREGS, POKE, DETACH = 0x4206, 0x4207, 16, 12, 13, 4, 17
EXIT_GROUP, SYSCALL, PIDFD_GETFD = 231, 0x050F, 438
"""exit_group(2) of x86-64, its instruction of a system call, and pidfd_getfd(2)."""


def again_and_again(by: By, hit: Callable[[], None] = lambda: None) -> Callable[[], None]:
    """Make what such a process does until it is ended."""

    def work() -> None:
        while True:
            by(hit)
            time.sleep(0.001)

    return work


def to_each(do: Callable[[int], object]) -> By:
    """Do something to every process that lets it happen."""

    def do_all(hit: Callable[[], None]) -> None:
        for name in os.listdir("/proc"):
            if name.isdigit() and int(name) != os.getpid():
                with contextlib.suppress(OSError):
                    do(int(name))
                    hit()

    return do_all


def signals(*numbers: int) -> By:
    def send(pid: int) -> None:
        for number in numbers:
            os.kill(pid, number)
            time.sleep(0.01 * (len(numbers) > 1))

    return to_each(send)


def limits(limit: int) -> By:
    return to_each(lambda pid: resource.prlimit(pid, limit, (0, 0)))


def limits_at_once(limit: int) -> By:
    """Limit each of the server's helpers, a Python that is isolated, the moment that it becomes the user's."""
    tried: set[int] = set()

    def limit_next(hit: Callable[[], None]) -> None:
        for pid in {int(name) for name in os.listdir("/proc") if name.isdigit()} - tried:
            with contextlib.suppress(OSError):  # it is gone
                if Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[1:2] != [b"-I"]:
                    continue
                tried.add(pid)
                end = time.monotonic() + 1  # others' never become it
                while time.monotonic() < end:
                    with contextlib.suppress(PermissionError):
                        resource.prlimit(pid, limit, (0, 0))
                        hit()
                        break

    return limit_next


def ptrace(request: int, pid: int, address: object = None, data: object = None) -> None:
    if LIBC.ptrace(request, pid, ctypes.c_void_p(address), data) < 0:  # type: ignore[arg-type]
        raise OSError(ctypes.get_errno(), "ptrace")


def hold(pid: int) -> None:
    ptrace(SEIZE, pid)
    ptrace(INTERRUPT, pid)


def end(pid: int) -> None:
    """Have a process exit with 0, as if it had done its work."""
    ptrace(ATTACH, pid)
    os.waitpid(pid, 0)
    registers = (ctypes.c_ulonglong * 27)()
    ptrace(GETREGS, pid, None, registers)
    ptrace(POKE, pid, registers[16], ctypes.c_void_p(SYSCALL))
    registers[10], registers[14], registers[15] = EXIT_GROUP, 0, (1 << 64) - 1
    ptrace(SETREGS, pid, None, registers)
    ptrace(DETACH, pid)


def answers(text: bytes) -> By:
    """Answer in a process's place, and end it."""

    def answer(pid: int) -> None:
        if Path(f"/proc/{pid}/comm").read_text() == "sleep\n":  # a child of the one that is to be answered for
            return
        process = os.pidfd_open(pid)
        try:
            output = LIBC.syscall(PIDFD_GETFD, process, 1, 0)
            if output < 0:
                raise OSError(ctypes.get_errno(), "pidfd_getfd")
            os.write(output, text)
            os.close(output)
        finally:
            os.close(process)
        end(pid)

    return to_each(answer)


TRACING = ("held by ptrace", "exit 0 by ptrace")
_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
_TRACES = platform.machine() == "x86_64" and not (_SCOPE.exists() and _SCOPE.read_text() != "0\n")
"""True where a process may trace others of its user, and these lines can."""

STOPPING = {"SIGSTOP": signals(signal.SIGSTOP)} | ({"held by ptrace": to_each(hold)} if _TRACES else {})
"""What leaves a process where it is."""
BY = STOPPING | {
    "SIGKILL": signals(signal.SIGKILL),
    "SIGTERM": signals(signal.SIGTERM),
    "SIGSTOP and SIGCONT in turn": signals(signal.SIGSTOP, signal.SIGCONT),
    **{f"RLIMIT_{name} = 0": limits(getattr(resource, f"RLIMIT_{name}"))
       for name in ("AS", "DATA", "NOFILE", "FSIZE", "CPU", "NPROC", "STACK")},
    **({"exit 0 by ptrace": to_each(end)} if _TRACES else {}),
}  # fmt: skip
FORGED = {
    f"{what!r:.100} in its place": answers(what)
    for what in _TRACES * (
        b"yes", b"[]", b"{}", b"1", b"null", b"\xff", b"[" * 60_000, b"x" * 60_000, b'{"virtual-size": "1"}',
        b'{"virtual-size": -1}', b'{"virtual-size": 1e999}', b'{"virtual-size": [1]}',
        b'{"virtual-size": 1, "full-backing-filename": ["/a"]}', b'{"virtual-size": 1, "backing-filename": {}}',
        b'{"virtual-size": 1, "full-backing-filename": "/etc/shadow", "backing-filename-format": "raw"}',
        b'{"virtual-size": 1, "backing-filename": "/a", "backing-filename-format": []}',
        b'{"virtual-size": 1, "backing-filename": "/a", "backing-filename-format": "\\ud800"}',
    )
}  # fmt: skip
"""What is said in the place of a program whose answer is read."""
