"""Dropping privileges before a process of ours reads anything of a job's.

The process must have loaded all its code by then: the job's user may not be allowed to read the installation.
"""

from __future__ import annotations

import os
import resource


def restrict(user: tuple[int, int] | None, *, memory: int, cpu_seconds: int, file_bytes: int) -> None:
    """Become the user (uid and gid, without other groups; None: no change) and set limits, irrevocably."""
    for limit, least in (
        (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CPU, cpu_seconds),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(limit)[1]
        value = least if hard == resource.RLIM_INFINITY else min(least, hard)
        resource.setrlimit(limit, (value, value))
    if user is not None:  # after the limits, which other processes of that user could change meanwhile
        uid, gid = user
        os.setgroups([])
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
