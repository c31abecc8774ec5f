"""The QEMU process of a VM on this machine, found without libvirtd, which may hang or be gone."""

import os
import signal
from collections.abc import Iterator

from vmgahp.host import wait

PID_FILES = "{run}/libvirt/qemu/{name}.pid", "{run}/libvirt/qemu/run/{name}.pid"
"""The files in which libvirt's QEMU driver notes the pid of a domain: the system's daemon, then a user's own."""

KILL_WAIT = 10.0
"""Seconds to wait for a killed QEMU to exit; it has to free the guest's memory, and to wait for disks."""

MOST_BYTES = 1 << 16
"""The number of bytes to read of a command line; libvirt puts the name first, and the UUID not far behind."""


def is_qemu(domain_type: str) -> bool:
    """Return True if domains of a type are run by QEMU."""
    return domain_type in ("", "kvm", "qemu")


def noted(name: str) -> Iterator[int]:
    """Yield the pids that libvirt has noted for the domain of that name; other processes may have them by now."""
    runs = ["/run", "/var/run"]
    if os.environ.get("XDG_RUNTIME_DIR"):
        runs.append(os.environ["XDG_RUNTIME_DIR"])
    runs.append(f"/run/user/{os.getuid()}")
    runs.append(os.path.expanduser("~/.cache"))
    for run in runs:
        for pattern in PID_FILES:
            try:
                with open(pattern.format(run=run, name=name)) as file:
                    pid = int(file.read(32))
            except (OSError, ValueError):
                continue
            if pid > 0:
                yield pid


def is_qemu_of(pid: int, name: str, uuid: str) -> bool:
    """Return True if the process is a QEMU whose command line has both the name and the UUID, as libvirt writes them.

    Both are needed, as for `faults.find`: a checkpoint contains its UUID, which could be that of another's VM.
    """
    try:
        program = os.path.basename(os.readlink(f"/proc/{pid}/exe")).removesuffix(" (deleted)")
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read(MOST_BYTES).decode(errors="surrogateescape").split("\0")
    except OSError:
        return False
    guest = f"guest={name.replace(',', ',,')},"
    return (
        program.startswith("qemu")
        and _option(words, "-uuid") == uuid
        and (_option(words, "-name") + ",").startswith(guest)
    )


def _option(words: list[str], name: str) -> str:
    """Return the first value of an option; values that a job asks for come later."""
    return words[words.index(name) + 1] if name in words[:-1] else ""


def kill(name: str, uuid: str, seconds: float = KILL_WAIT) -> bool:
    """Kill the QEMU of a VM and wait for its exit; return False if it is not found, or has not ended in time.

    The process is opened as a pidfd before it is checked: another one that gets its number later is never hit.
    """
    for pid in noted(name):
        try:
            descriptor = os.pidfd_open(pid)
        except (OSError, OverflowError):
            continue  # there is no such process
        try:
            if is_qemu_of(pid, name, uuid):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                return wait.ready(descriptor, seconds)
        except ProcessLookupError:
            return True  # it ended during the check
        except PermissionError:
            continue  # another user's
        finally:
            os.close(descriptor)
    return False
