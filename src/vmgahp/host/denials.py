"""Denials of SELinux and AppArmor to libvirt, QEMU and their helpers, by the audit log."""

import os
import re
import time

from vmgahp import errors
from vmgahp.host import oom, wait

AUDIT_LOG = "/var/log/audit/audit.log"
"""The log that auditd writes; without auditd the kernel's own log has the same lines."""
TAIL = 1 << 18
"""The bytes at its end that are read."""
LONGEST = 400
"""The characters of a denial that are shown."""
_SETTLES = 0.3
"""Seconds that auditd may take to write a line."""

_DENIAL = re.compile(r"avc:\s+denied\b(?!.*permissive=1)|apparmor=\"DENIED\"")
_CONFINED = re.compile(
    r"scontext=[^:\s]*:[^:\s]*:(svirt|virt|swtpm|passt)|profile=\"(libvirt|virt|swtpm|passt|/usr/sbin/libvirtd)"
)
_WHEN = re.compile(r"audit\((\d+)\.\d+:\d+\)")


def since(moment: float, audit: str = AUDIT_LOG, kernel: str = oom.LOG) -> str:
    """Return the last denial since `moment`, in seconds since 1970; empty if none is known.

    Only root may read the logs. Nothing is raised.
    """
    boot = time.time() - time.clock_gettime(time.CLOCK_MONOTONIC)

    def attempt() -> str:
        lines = [text.decode(errors="replace") for when, text in oom.records(kernel) if boot + when >= moment]
        for line in reversed([*lines, *_tail(audit)]):
            when = _WHEN.search(line)
            if when and int(when[1]) >= int(moment) and _DENIAL.search(line) and _CONFINED.search(line):
                return " ".join(line.split())[:LONGEST]
        return ""

    return wait.until(attempt, _SETTLES if os.access(audit, os.R_OK) else 0, 0.05)


def told(fault: errors.Fault, denial: str) -> errors.Fault:
    """Return the fault with a denial in its hint, if there is one.

    A file that the server has opened as the job's user, and that QEMU may not open, is denied by the machine: a
    job's fault for "Permission denied" becomes the machine's.
    """
    if not denial:
        return fault
    hint = f"a security module has denied it: {denial}"
    if isinstance(fault, errors.JobFault) and "Permission denied" in fault.problem:
        return errors.MachineFault(fault.problem, hint)
    fault.hint = f"{fault.hint} And {hint}" if fault.hint else hint
    return fault


def _tail(path: str) -> list[str]:
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL))
            return file.read(TAIL).decode(errors="replace").splitlines()
    except OSError:
        return []
