"""Facts about a process from the kernel: its user, its age, its CPU time and memory."""

import os
from time import CLOCK_BOOTTIME, clock_gettime


def uid(pid: int) -> int | None:
    """Return the real user id of a process, even if it runs with other rights; None if there is no such process.

    The owner of /proc/<pid> is something else: root, for a set-uid program.
    """
    try:
        with open(f"/proc/{pid}/status", "rb") as file:  # its name is in it, which may be any bytes
            return next(int(line.split()[1]) for line in file if line.startswith(b"Uid:"))
    except (OSError, ValueError, StopIteration):
        return None


def birth(pid: int) -> str:
    """Return the start of a process in ticks since boot (field 22 of proc_pid_stat(5)); "" if it is not alive.

    A zombie is not alive: its entry stays until its parent reaps it.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            # The second field is the program's name in brackets, and may hold anything.
            fields = stat.read().rpartition(b")")[2].split()
            return "" if fields[0] in (b"Z", b"X") else fields[19].decode()
    except (OSError, IndexError):
        return ""


def age(pid: int) -> float:
    """Return the seconds since a process was started; 0 if there is none. An exec does not restart the count."""
    ticks = birth(pid)
    return max(0.0, clock_gettime(CLOCK_BOOTTIME) - int(ticks) / os.sysconf("SC_CLK_TCK")) if ticks else 0.0


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of all threads of a process; 0 if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            user, system = file.read().rpartition(b")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        return 0.0


def memory_kib(pid: int) -> tuple[int, int] | None:
    """Return a process's resident memory and its maximum so far, in KiB; None if there is no such process.

    Huge pages are added, since the kernel counts them separately.
    """
    try:
        said = os.open(f"/proc/{pid}/status", os.O_RDONLY | os.O_CLOEXEC)
        try:
            text = os.read(said, 1 << 14)
        finally:
            os.close(said)
        # Called for each STATUS; splitting the lines would cost ten times as much.
        most, now, huge = (
            int(text[text.index(name) + len(name) :].split(None, 1)[0])
            for name in (b"\nVmHWM:", b"\nVmRSS:", b"\nHugetlbPages:")
        )
        return now + huge, most + huge
    except (OSError, ValueError, IndexError):
        return None
