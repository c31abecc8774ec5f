"""What was seen to work on this machine in this boot, shared by the probe and all servers.

That KVM runs a guest, or that QEMU comes up, takes longer to see than all else that a probe or a START looks at,
and it stays so until something changes. Each fact has a file of its own in ``/run/vmgahp``, or without root
in $XDG_RUNTIME_DIR. The file begins with what the fact stands on (the boot, the kernel, the microcode, KVM's modules
and parameters, its device): where anything of that differs from what is here now, the file says nothing, and the
fact is seen to anew. So it does after `LASTS` seconds, or where anybody but root, or this user, could have written it.

What can change without leaving a trace in what a fact stands on is no fact, and has no file: whether libvirt answers,
whether a network is up, whether there is room.
"""

import os
from stat import S_ISREG

from vmgahp import __version__
from vmgahp.host import kvm, runtime_dir
from vmgahp.host.trust import trouble_with_directory

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

FACTS = KVM, QEMU, TPM, VIRTIOFS = "kvm", "qemu", "tpm", "virtiofs"
"""That KVM runs a guest, that QEMU comes up with the CPU that jobs get, that swtpm makes a TPM, that virtiofsd
serves a directory. Those of containers (`vmgahp.daemon.containers`) no VM stands on."""

LASTS = 3600.0
"""Seconds for which what works is believed: to see it again costs 20 ms."""
FAILURE_LASTS = 50.0
"""The same for what does not work, and may have been mended where nothing shows it: less than the startd waits before
it probes again (VM_RECHECK_INTERVAL, for which vmgahp setup writes 60)."""

LONGEST = 1 << 16
"""Bytes of a file."""

_END = "end"
"""The last line: a file without it was not written to its end."""
_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_MODULES = "/sys/module"
_MICROCODE = "/sys/devices/system/cpu/cpu0/microcode/version"
_CPUINFO = "/proc/cpuinfo"
_LIBRARIES = "/etc/ld.so.cache"
"""Made anew whenever a library is installed."""
_OF_A_CPU = ("vendor_id", "cpu family", "model", "stepping", "microcode", "CPU implementer", "CPU part", "CPU revision")


class Proof:
    """What came of looking: `reason` is why it does not work, empty where it does."""

    __slots__ = ("age", "path", "reason")

    def __init__(self, reason: str, age: float = 0.0, path: str = "") -> None:
        self.reason = reason
        self.age = age
        """Seconds since it was seen."""
        self.path = path
        """The file that says so; empty where it was seen just now."""

    def told(self, seen: str) -> str:
        """A sentence about it, which may end with a full stop, and where it is from."""
        if not self.path:
            return seen
        stop = "." if seen.endswith(".") else ""
        return f"{seen.removesuffix('.')} (as seen {self.age:.0f} s ago, by {self.path}){stop}"


class LookAnew:
    """A context in which this process believes no file and writes none: the doctor sees to everything itself."""

    depth = 0

    def __enter__(self) -> None:
        LookAnew.depth += 1

    def __exit__(self, *_of_an_error: object) -> None:
        LookAnew.depth -= 1


def of_kvm(deadline: float = kvm.DEADLINE) -> Proof:
    """That KVM runs guests. That the device opens is tried each time. Raises nothing."""
    if reason := kvm.unopenable():
        return Proof(reason)
    return shared(KVM, machine(), lambda: kvm.prove(deadline))


def shared(name: str, stands_on: str, look: "Callable[[], tuple[str | None, bool]]") -> Proof:
    """The fact `name`: what its file says, else what `look` finds, which is written down then.

    `look` returns why it does not work, None where it does, and whether the next look would find the same.
    """
    if found := recall(name, stands_on):
        return found
    reason, stays = look()
    # What it stands on must not have changed meanwhile; what is looked at after that, the next one looks at anew.
    return keep(name, stands_on, reason or "") if stays else Proof(reason or "")


def asked(name: str, path: str, user: tuple[int, int], trouble: "Callable[[], str]") -> Proof:
    """Whether a program answers as this user, whose other processes could keep it from that: no failure is kept."""

    def look() -> tuple[str, bool]:
        wrong = trouble()
        return wrong, not wrong

    return shared(name, f"{machine()}\n{program(path)}\nasked {user[0]}:{user[1]}", look)


def recall(name: str, stands_on: str) -> Proof | None:
    """What a file says of a fact; None where there is none that can be believed."""
    return None if LookAnew.depth else kept(name, stands_on)


def kept(name: str, stands_on: str) -> Proof | None:
    """As `recall`, for whoever only wants to know what others believe."""
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
    """Let others believe what was seen just now; where that cannot be written down, the next one looks again."""
    if not LookAnew.depth:
        _write(name, stands_on, reason)
    return Proof(reason)


def forget() -> None:
    """A VM did not start, and that was not the job's doing: let the next one look anew. Raises nothing."""
    for place in _places():
        for name in FACTS:
            try:
                os.unlink(f"{place}/{_file(name)}")
            except OSError:
                continue


def machine() -> str:
    """What KVM, and QEMU with it, stand on: one line a thing, as a file of this boot has it."""
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
        # The number of its directory is another one each time that a module is loaded.
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
    """What a program stands on beside the machine: itself, and the libraries that it loads."""
    return f"program {path} {identity(path)}\nlibraries {identity(_LIBRARIES)}"


def identity(path: str) -> str:
    """What tells a file, a program or a device from another one of its name; empty where there is none."""
    try:
        there = os.stat(path)
    except OSError:
        return ""
    return (
        f"{there.st_dev}:{there.st_ino} {there.st_mode:o} {there.st_uid}:{there.st_gid} {there.st_rdev} "
        f"{there.st_size} {there.st_ctime_ns}"
    )


def _processor() -> str:
    """Its model and its microcode; in a virtual machine only the second file has them."""
    if version := _line(_MICROCODE):
        return version
    told: dict[str, str] = {}
    for line in _head(_CPUINFO).split("\n"):
        name, _, value = line.partition(":")
        if name.strip() in _OF_A_CPU:
            told.setdefault(name.strip(), value.strip())
    return ", ".join(f"{name} {value}" for name, value in told.items())


def _line(path: str) -> str:
    """A small file of the kernel's, as one line; empty where it cannot be read."""
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
    """Seconds since the boot, those asleep included: no clock that anybody sets."""
    from time import CLOCK_BOOTTIME, clock_gettime

    return clock_gettime(CLOCK_BOOTTIME)


def _file(name: str) -> str:
    return f"proof-{name}"


def _places() -> list[str]:
    """Where files may be, the one to write to last: a user believes root, and root nobody else."""
    own = os.environ.get("XDG_RUNTIME_DIR", "")
    return [runtime_dir.ROOT_BASE, own] if os.geteuid() != 0 and own.startswith("/") else [runtime_dir.ROOT_BASE]


def _read(place: str, name: str) -> str:
    """The file, where only root or this user can have written it; else nothing."""
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
    """All or nothing."""
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
        pass  # no room, or no right: then there is no file
    finally:
        os.close(descriptor)
    try:
        os.unlink(temporary)
    except OSError:
        pass
