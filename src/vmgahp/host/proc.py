"""What the kernel says of a process: whose it is, how old it is, and the CPU time that it has used."""

import os


def uid(pid: int) -> int | None:
    """The real user id: whose process it is, whatever rights it has; None where there is no such process.

    Not the owner of /proc/<pid>, which is root for a set-uid program.
    """
    try:
        with open(f"/proc/{pid}/status", "rb") as file:  # its name is in it, which may be any bytes
            return next(int(line.split()[1]) for line in file if line.startswith(b"Uid:"))
    except (OSError, ValueError, StopIteration):
        return None


def age(pid: int) -> float:
    """Return the seconds since a process was started; 0 where there is none. A program that it became counts on."""
    from time import CLOCK_BOOTTIME, clock_gettime

    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            ticks = int(file.read().rpartition(b")")[2].split()[19])
        return max(0.0, clock_gettime(CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return 0.0


def cpu_seconds(pid: int) -> float:
    """The CPU time of all its threads; 0 where there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            user, system = file.read().rpartition(b")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        return 0.0


def memory_kib(pid: int) -> tuple[int, int] | None:
    """What a process occupies of the machine's memory, and the most that it has; None where there is no such one.

    The kernel counts huge pages apart from both.
    """
    try:
        said = os.open(f"/proc/{pid}/status", os.O_RDONLY | os.O_CLOEXEC)
        try:
            text = os.read(said, 1 << 14)
        finally:
            os.close(said)
        # Each STATUS asks; to take the lines apart costs ten times as much.
        most, now, huge = (
            int(text[text.index(name) + len(name) :].split(None, 1)[0])
            for name in (b"\nVmHWM:", b"\nVmRSS:", b"\nHugetlbPages:")
        )
        return now + huge, most + huge
    except (OSError, ValueError, IndexError):
        return None
