"""The QEMU of a VM on this machine, by the kernel alone: what is left where libvirtd hangs or is gone."""

import os
import select
from _collections_abc import Iterator

from vmgahp.host.light import signal

PID_FILES = "{run}/libvirt/qemu/{name}.pid", "{run}/libvirt/qemu/run/{name}.pid"
"""Where the QEMU driver of libvirt notes the pid of a domain: the system's daemon, then a user's own."""

KILL_WAIT = 10.0
"""Seconds for which a killed QEMU may take to end; it has the guest's memory to give back, and disks to wait for."""

MOST_BYTES = 1 << 16
"""Of a command line; libvirt begins QEMU's with the name, and the UUID is not far from it."""


def is_qemu(domain_type: str) -> bool:
    """Whether domains of a type are QEMU's."""
    return domain_type in ("", "kvm", "qemu")


def noted(name: str) -> Iterator[int]:
    """The process ids that libvirt has noted for the domain of that name, whoever has them now."""
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
    """Is the process a QEMU whose command line says both, as libvirt writes it?

    Both, as for `faults.find`: a checkpoint brings its UUID with it, and could name another's VM by that.
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
    """The value that an option has first; what a job asks for comes later."""
    return words[words.index(name) + 1] if name in words[:-1] else ""


def kill(name: str, uuid: str, seconds: float = KILL_WAIT) -> bool:
    """Kill the QEMU of a VM and wait for its end; False where it is not found, or has not ended in time.

    The process is held by a descriptor before it is looked at: one that gets its number later is never hit.
    """
    for pid in noted(name):
        try:
            descriptor = os.pidfd_open(pid)
        except (OSError, OverflowError):
            continue  # there is no such process
        try:
            if is_qemu_of(pid, name, uuid):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                poll = select.poll()
                poll.register(descriptor, select.POLLIN)
                return bool(poll.poll(seconds * 1000))
        except ProcessLookupError:
            return True  # it ended while it was looked at
        except PermissionError:
            continue  # another user's
        finally:
            os.close(descriptor)
    return False
