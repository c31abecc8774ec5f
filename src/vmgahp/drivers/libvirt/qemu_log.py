"""QEMU's last words, from the log that libvirt keeps of each VM.

When QEMU ends before its VM runs, libvirt reads that log and makes what it finds part of its error. But the log is
written by another daemon (virtlogd), which may not have finished by then; the error then says that QEMU closed the
monitor without the reason, and a disk that two jobs use at once would be blamed on the machine.
"""

import os
import re
from collections.abc import Sequence

from vmgahp.host import wait

PATIENCE = 2.0
"""Seconds to wait for the log; it is usually there at once."""

LOOKED_AT = 1 << 16
"""The number of bytes to read at the end of the log."""

_SILENT = re.compile(r"(unexpectedly closed the monitor( \(vm='.*'\))?|exited while connecting to monitor)(: *)?$")
_START = re.compile(rb"^[0-9-]+ [0-9:.]+\+0000: starting up ", re.MULTILINE)
_WORDS = re.compile(rb"^[0-9-]+T[0-9:.]+Z qemu[^ :]*: (.*)$", re.MULTILINE)


def says_nothing(message: str) -> bool:
    """Return True if an error of libvirt says that QEMU has ended, without the reason."""
    return _SILENT.search(message.rstrip()) is not None


def last_words(name: str, uuid: str, directories: Sequence[str] | None = None) -> str:
    """Return QEMU's message at the last start of a VM, as libvirt would word it; empty if unknown.

    A log has all starts under one name: only the last one counts, and only if it is that of `uuid`.
    """

    def attempt() -> str:
        places = _directories() if directories is None else directories
        found = (_search(os.path.join(directory, f"{name}.log"), uuid.encode()) for directory in places)
        return next(filter(None, found), "")

    return wait.until(attempt, PATIENCE, 0.05)


def _search(path: str, uuid: bytes) -> str:
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - LOOKED_AT))
            text = file.read(LOOKED_AT)
    except OSError:
        return ""
    starts = [found.start() for found in _START.finditer(text)]
    last = text[starts[-1] :] if starts else text
    if uuid not in last:
        return ""
    said = [words.decode("utf-8", "replace").strip() for words in _WORDS.findall(last)]
    return "qemu: " + said[-1] if said else ""


def _directories() -> list[str]:
    """Return the directories of the logs of the system's libvirtd, or of the user's own."""
    if os.getuid() == 0:
        return ["/var/log/libvirt/qemu"]
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return [f"{cache}/libvirt/qemu/log"]
