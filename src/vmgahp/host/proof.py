"""A cache of checks that took place in this boot, shared by the probe and all servers.

The checks that KVM runs a guest, or that QEMU starts, take longer than all others of a probe or a START, and their
results stay valid until something changes. Each result has a file of its own in ``/run/vmgahp``, or without root
in $XDG_RUNTIME_DIR. The file begins with the preconditions of the result (the boot, the kernel, the microcode, KVM's
modules and parameters, its device): if any of them differs from the present state, the result is stale, and the check
is repeated. So it is after `LASTS` seconds, or if another user than root, or this one, could have written the file.

Results that can change while all preconditions stay the same are not cached: whether libvirt answers, a network is
up, or there is room.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from stat import S_ISREG

from vmgahp import __version__
from vmgahp.host import kvm, runtime_dir
from vmgahp.host.trust import trouble_with_directory

FACTS = KVM, QEMU, TPM, VIRTIOFS = "kvm", "qemu", "tpm", "virtiofs"
"""The checks: KVM runs a guest, QEMU starts with the CPU that jobs get, swtpm makes a TPM, virtiofsd serves a
directory. Those of containers (`vmgahp.daemon.containers`) do not matter to VMs."""

LASTS = 3600.0
"""The seconds for which a success is valid: to repeat the check costs 20 ms."""
FAILURE_LASTS = 50.0
"""The same for a failure, whose cause may have been removed without a trace: less than the startd waits before it
probes again (VM_RECHECK_INTERVAL, for which vmgahp setup writes 60)."""

LONGEST = 1 << 16
"""The most bytes of a file."""

_END = "end"
"""The last line; a file without it is incomplete."""
_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_MODULES = "/sys/module"
_MICROCODE = "/sys/devices/system/cpu/cpu0/microcode/version"
_CPUINFO = "/proc/cpuinfo"
_LIBRARIES = "/etc/ld.so.cache"
"""A file that is rewritten whenever a library is installed."""
_OF_A_CPU = ("vendor_id", "cpu family", "model", "stepping", "microcode", "CPU implementer", "CPU part", "CPU revision")


class Proof:
    """The result of a check; `reason` is empty on success."""

    __slots__ = ("age", "path", "reason")

    def __init__(self, reason: str, age: float = 0.0, path: str = "") -> None:
        self.reason = reason
        self.age = age
        """The seconds since the check."""
        self.path = path
        """The file that it was read from; empty if the check ran just now."""

    def told(self, seen: str) -> str:
        """Add its age and source to a sentence, which may end with a full stop."""
        if not self.path:
            return seen
        stop = "." if seen.endswith(".") else ""
        return f"{seen.removesuffix('.')} (as seen {self.age:.0f} s ago, by {self.path}){stop}"


class LookAnew:
    """A context in which this process neither reads nor writes the cache: the doctor checks everything itself."""

    depth = 0

    def __enter__(self) -> None:
        LookAnew.depth += 1

    def __exit__(self, *_of_an_error: object) -> None:
        LookAnew.depth -= 1


def of_kvm(deadline: float = kvm.DEADLINE) -> Proof:
    """Check that KVM runs guests; the device is opened each time. Raises nothing."""
    if reason := kvm.unopenable():
        return Proof(reason)
    return shared(KVM, machine(), lambda: kvm.prove(deadline))


def shared(name: str, stands_on: str, look: Callable[[], tuple[str | None, bool]]) -> Proof:
    """Return the result of the check `name`: the cached one, else that of `look`, which is cached then.

    `look` returns the reason of a failure, None on success, and whether the result may be cached.
    """
    if found := recall(name, stands_on):
        return found
    reason, stays = look()
    # `stands_on` was read before the check, so a change during the check makes the result stale.
    return keep(name, stands_on, reason or "") if stays else Proof(reason or "")


def asked(name: str, path: str, user: tuple[int, int], trouble: Callable[[], str]) -> Proof:
    """Check that a program answers as this user, without caching failures, which the user's processes can cause."""

    def look() -> tuple[str, bool]:
        wrong = trouble()
        return wrong, not wrong

    return shared(name, f"{machine()}\n{program(path)}\nasked {user[0]}:{user[1]}", look)


def recall(name: str, stands_on: str) -> Proof | None:
    """Return the cached result of a check; None if there is no valid one."""
    return None if LookAnew.depth else kept(name, stands_on)


def kept(name: str, stands_on: str) -> Proof | None:
    """Return the cached result as `recall` does, even within `LookAnew`."""
    for place in _places():
        text = _read(place, name)
        head, _, tail = text.rpartition("\nmade ")
        lines = tail.split("\n")
        if head != f"vmgahp {__version__}\n{stands_on}" or len(lines) != 4 or lines[2:] != [_END, ""]:
            continue
        try:
            age = _now() - float(lines[0])
        except ValueError:
            continue
        if 0 <= age < (FAILURE_LASTS if lines[1] else LASTS):
            return Proof(lines[1], age, f"{place}/{_file(name)}")
    return None


def keep(name: str, stands_on: str, reason: str = "") -> Proof:
    """Cache a result; if it cannot be written, the next check is repeated."""
    if not LookAnew.depth:
        _write(name, stands_on, reason)
    return Proof(reason)


def forget() -> None:
    """Clear the cache, since a VM did not start and it was not the job's fault. Raises nothing."""
    for place in _places():
        for name in FACTS:
            try:
                os.unlink(f"{place}/{_file(name)}")
            except OSError:
                continue


def machine() -> str:
    """Return the preconditions of KVM and QEMU, one a line, as a file of this boot has them."""
    system = os.uname()
    lines = [
        f"boot {_line(_BOOT_ID)}",
        f"kernel {system.release} {system.version} {system.machine}",
        f"processor {_processor()}",
        f"device {kvm.DEVICE} {identity(kvm.DEVICE)}",
    ]
    try:
        modules = sorted(name for name in os.listdir(_MODULES) if name.startswith("kvm"))
    except OSError:
        modules = []
    for name in modules:
        place = f"{_MODULES}/{name}"
        # The inode of its directory changes each time that a module is loaded.
        lines.append(
            f"module {name} {_inode(place)} {_line(f'{place}/srcversion')} {_line(f'{place}/version')}".rstrip()
        )
        try:
            parameters = sorted(os.listdir(f"{place}/parameters"))
        except OSError:
            continue
        lines += [f"parameter {name}.{one} {_line(f'{place}/parameters/{one}')}" for one in parameters]
    return "\n".join(lines)


def program(path: str) -> str:
    """Return the preconditions of a program besides the machine: its file and the libraries that it loads."""
    return f"program {path} {identity(path)}\nlibraries {identity(_LIBRARIES)}"


def identity(path: str) -> str:
    """Return a text that identifies this version of a file, a program or a device; empty if there is none."""
    try:
        there = os.stat(path)
    except OSError:
        return ""
    return (
        f"{there.st_dev}:{there.st_ino} {there.st_mode:o} {there.st_uid}:{there.st_gid} {there.st_rdev} "
        f"{there.st_size} {there.st_ctime_ns}"
    )


def _processor() -> str:
    """Return the processor's model and microcode; in a virtual machine only /proc/cpuinfo has them."""
    if version := _line(_MICROCODE):
        return version
    told: dict[str, str] = {}
    for line in _head(_CPUINFO).split("\n"):
        name, _, value = line.partition(":")
        if name.strip() in _OF_A_CPU:
            told.setdefault(name.strip(), value.strip())
    return ", ".join(f"{name} {value}" for name, value in told.items())


def _line(path: str) -> str:
    """Read a small file of the kernel's as one line; empty if it cannot be read."""
    return " ".join(_head(path).split())


def _head(path: str) -> str:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        return os.read(descriptor, 4096).decode("utf-8", "replace")
    except OSError:
        return ""
    finally:
        os.close(descriptor)


def _inode(path: str) -> int:
    try:
        return os.stat(path).st_ino
    except OSError:
        return 0


def _now() -> float:
    """Return the seconds since the boot, including those asleep, from a clock that cannot be set."""
    from time import CLOCK_BOOTTIME, clock_gettime

    return clock_gettime(CLOCK_BOOTTIME)


def _file(name: str) -> str:
    return f"proof-{name}"


def _places() -> list[str]:
    """Return the directories of the files, the one to write to last: a user trusts root's, and root only its own."""
    own = os.environ.get("XDG_RUNTIME_DIR", "")
    return [runtime_dir.ROOT_BASE, own] if os.geteuid() != 0 and own.startswith("/") else [runtime_dir.ROOT_BASE]


def _read(place: str, name: str) -> str:
    """Read the file if only root or this user can have written it; else return an empty string."""
    try:
        if trouble_with_directory(place):
            return ""
        descriptor = os.open(
            f"{place}/{_file(name)}", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
        )
    except OSError:
        return ""
    try:
        there = os.fstat(descriptor)
        own = there.st_uid in (0, os.geteuid()) and not there.st_mode & 0o022 and there.st_nlink < 2
        if not (S_ISREG(there.st_mode) and own and there.st_size <= LONGEST):
            return ""
        return os.read(descriptor, LONGEST).decode()
    except (OSError, UnicodeDecodeError):
        return ""
    finally:
        os.close(descriptor)


def _write(name: str, stands_on: str, reason: str) -> None:
    """Write the file, all or nothing."""
    place = _places()[-1]
    if os.geteuid() != 0 and place == runtime_dir.ROOT_BASE:
        return
    data = f"vmgahp {__version__}\n{stands_on}\nmade {_now()}\n{' '.join(reason.split())}\n{_END}\n".encode()
    temporary = f"{place}/.{_file(name)}.{os.getpid()}"
    try:
        if place == runtime_dir.ROOT_BASE:
            runtime_dir.make_root_base()
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    except OSError:
        return
    try:
        written = os.write(descriptor, data)
        if written == len(data):
            os.rename(temporary, f"{place}/{_file(name)}")
            return
    except OSError:
        pass  # no room, or no permission: the result is not cached
    finally:
        os.close(descriptor)
    try:
        os.unlink(temporary)
    except OSError:
        pass
