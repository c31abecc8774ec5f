"""Facts from the kernel: about a process, the memory, the mounted file systems, the control groups."""

import os
from collections.abc import Iterator
from time import CLOCK_BOOTTIME, clock_gettime
from typing import NamedTuple

MEMINFO = "/proc/meminfo"
ENFORCE = "/sys/fs/selinux/enforce"
"""A file that is there where the kernel has SELinux's policy; it holds 1 if that is enforced."""


def _read(pid: int, name: str) -> bytes:
    """Return a file of a process, its first 64 KiB; empty if there is no such process."""
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:
            return file.read(1 << 16)
    except OSError:
        return b""


def uid(pid: int) -> int | None:
    """Return the real user id of a process, which /proc/<pid>'s owner need not be; None if there is no process."""
    lines = _read(pid, "status").split(b"\n")  # its name is in it, which may be any bytes
    return next((int(line.split()[1]) for line in lines if line.startswith(b"Uid:")), None)


def name(pid: int) -> str:
    """Return the name of the program that a process runs, 15 characters at most; "" if there is no such process."""
    return _read(pid, "comm").decode(errors="replace").removesuffix("\n")


def selinux_context(pid: int) -> str:
    """Return the SELinux context of a process; empty if there is no such process, or no SELinux."""
    return _read(pid, "attr/current").decode().rstrip("\0\n") if os.path.exists(ENFORCE) else ""


def command_line(pid: int) -> bytes:
    """Return the words of a process's command line, each ended by a NUL, 64 KiB at most; empty if there is none."""
    return _read(pid, "cmdline")


def awaited_file(thread: int) -> str:
    """Return the file for which a thread of this process waits, if its system call began with that file's descriptor.

    Empty for none (``/proc/PID/syscall``, proc_pid_syscall(5)).
    """
    try:
        with open(f"/proc/self/task/{thread}/syscall") as file:
            return os.readlink(f"/proc/self/fd/{int(file.read().split()[1], 16)}")
    except (OSError, IndexError, ValueError):
        return ""


def _stat(pid: int) -> list[bytes]:
    """Return the fields of proc_pid_stat(5) from the third, the state; none if there is no such process."""
    # The second field is the program's name in brackets, and may hold anything.
    return _read(pid, "stat").rpartition(b")")[2].split()


def birth(pid: int) -> str:
    """Return a process's start in ticks since boot (field 22 of proc_pid_stat(5)); "" for a zombie or none."""
    fields = _stat(pid)
    return fields[19].decode() if fields and fields[0] not in (b"Z", b"X") else ""


def age(pid: int) -> float:
    """Return the seconds since a process was started; 0 if there is none. An exec does not restart the count."""
    ticks = birth(pid)
    return max(0.0, clock_gettime(CLOCK_BOOTTIME) - int(ticks) / os.sysconf("SC_CLK_TCK")) if ticks else 0.0


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of all threads of a process; 0 if there is no such process."""
    return sum(map(int, _stat(pid)[11:13])) / os.sysconf("SC_CLK_TCK")  # in user mode and in the kernel


def memory_kib(pid: int) -> tuple[int, int] | None:
    """Return the resident memory and its maximum so far in KiB, huge pages included; None without a process."""
    try:
        with open(f"/proc/{pid}/status", "rb", buffering=0) as file:
            text = file.read(1 << 14)
        # Called for each STATUS; splitting the lines would cost ten times as much.
        most, now, huge = (
            int(text[text.index(name) + len(name) :].split(None, 1)[0])
            for name in (b"\nVmHWM:", b"\nVmRSS:", b"\nHugetlbPages:")
        )
        return now + huge, most + huge
    except (OSError, ValueError, IndexError):
        return None


def meminfo(*names: str) -> list[int]:
    """Return fields of proc_meminfo(5), in KiB or as the counts that they are; 0 for one that is not there."""
    with open(MEMINFO) as file:
        rows = dict(line.split(":", 1) for line in file)
    return [int(rows[name].split()[0]) if name in rows else 0 for name in names]


def physical_memory_mib() -> int:
    """Return the memory of this machine in MiB."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20


_ESCAPED = ((b"\\040", b" "), (b"\\011", b"\t"), (b"\\012", b"\n"), (b"\\134", b"\\"))


class Mount(NamedTuple):
    """A line of ``/proc/self/mountinfo`` (proc(5)); the last of several at one place hides the others."""

    id: str
    place: str
    kind: str
    options: tuple[str, ...]


def mounts() -> Iterator[Mount]:
    """Yield all mounts that this process sees, in the kernel's order."""
    with open("/proc/self/mountinfo", "rb") as lines:
        for line in lines:
            before, _, after = line.rstrip(b"\n").partition(b" - ")
            fields, (kind, _, more) = before.split(b" "), after.split(b" ", 2)
            place = fields[4]
            for escaped, plain in _ESCAPED:
                place = place.replace(escaped, plain)
            options = os.fsdecode(fields[5] + b"," + more).split(",")
            yield Mount(fields[0].decode(), os.fsdecode(place), os.fsdecode(kind), tuple(options))


CGROUP_LIMITS = ("cpu", "memory")


def cgroup_version(controller: str, pid: int | str = "self") -> int:
    """Return the version (1 or 2) of the mounted control groups with a controller for a process; 0 for none."""
    try:
        with open(f"/proc/{pid}/cgroup", "rb") as file:
            lines = file.read(1 << 16).decode(errors="replace").splitlines()
        is_v1 = any(controller in line.split(":", 2)[1].split(",") for line in lines if line.count(":") >= 2)
        if is_v1 and any(mount.kind == "cgroup" and controller in mount.options for mount in mounts()):
            return 1
    except OSError:
        return 0
    return 2 if any(line.startswith("0::") for line in lines) and controller in _unified() else 0


def cgroup_controllers() -> list[str]:
    """Return the controllers of `CGROUP_LIMITS` that are mounted for this process."""
    return [controller for controller in CGROUP_LIMITS if cgroup_version(controller)]


def _unified() -> list[str]:
    try:
        place = next((mount.place for mount in mounts() if mount.kind == "cgroup2"), "")
        with open(os.path.join(place, "cgroup.controllers"), "rb") as file:
            return file.read(4096).decode(errors="replace").split() if place else []
    except OSError:
        return []
