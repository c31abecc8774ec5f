"""The control groups that limit the processes of this machine: version 1, version 2, or both."""

import os

from vmgahp.host.mounts import mounts

LIMITS = ("cpu", "memory")
"""The controllers that limits on a VM need."""


def version(controller: str, pid: int | str = "self") -> int:
    """Return the version (1 or 2) of the mounted control groups with a controller for a process; 0 for none."""
    try:
        with open(f"/proc/{pid}/cgroup", "rb") as file:
            lines = file.read(1 << 16).decode(errors="replace").splitlines()
    except OSError:
        return 0
    if any(controller in line.split(":", 2)[1].split(",") for line in lines if line.count(":") >= 2):
        try:
            if any(mount.kind == "cgroup" and controller in mount.options for mount in mounts()):
                return 1
        except OSError:
            return 0
    return 2 if any(line.startswith("0::") for line in lines) and controller in _unified() else 0


def controllers() -> list[str]:
    """Return the controllers of `LIMITS` that are mounted for this process."""
    return [controller for controller in LIMITS if version(controller)]


def _unified() -> list[str]:
    """List the controllers of version 2."""
    try:
        place = next((mount.place for mount in mounts() if mount.kind == "cgroup2"), "")
        with open(os.path.join(place, "cgroup.controllers"), "rb") as file:
            return file.read(4096).decode(errors="replace").split() if place else []
    except OSError:
        return []
