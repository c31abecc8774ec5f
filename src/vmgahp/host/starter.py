"""The paths of a starter's files for a job, from its environment, or else by the older names.

HTCondor's starters make a directory for each job in EXECUTE, ``dir_<pid>``. It is the scratch directory up to 25.3;
since 25.4 that is ``scratch`` in it, and the starter's own files for the job are beside it: since 25.10
``.chirp.config`` is in ``user``, which the job's user owns as well (``Starter::Init`` and
``JICShadow::initIOProxy`` in HTCondor's ``src/condor_starter.V6.1``).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from stat import S_ISDIR
from typing import NamedTuple

SLOT = "_CONDOR_SLOT"
"""The variable with the slot's name, which only a starter sets: a shell may have set others of its variables itself."""
_SCRATCH = "scratch"
_OF_A_JOB = "dir_"


class Places(NamedTuple):
    """The full paths of a starter's files for the server of one job's VM."""

    machine_ad: str
    """The ad of the slot. It is in the scratch directory, where an input file may have replaced it."""
    chirp_config: str
    """The file that says how to reach the starter by chirp. It belongs to the job's user: open it as that user."""


def places(scratch: str, environ: Mapping[str, str] = os.environ) -> Places:
    """Find a starter's files for the job of a scratch directory.

    The environment is set by the starter, and no job can change it. It is about one job: it is ignored if a person has
    started this server, or if the server serves a VM in another directory.
    """
    said = environ if os.path.normpath(environ.get("_CONDOR_SCRATCH_DIR", "")) == os.path.normpath(scratch) else {}

    def place(name: str, of_old: str) -> str:
        path = said.get(name, "")
        return path if path.startswith("/") else os.path.join(scratch, of_old)

    return Places(place("_CONDOR_MACHINE_AD", ".machine.ad"), place("_CONDOR_CHIRP_CONFIG", ".chirp.config"))


def directory_of(path: str) -> str:
    """Return the directory in EXECUTE of a job, from that directory or from the job's scratch directory."""
    path = os.path.normpath(path)
    above, name = os.path.split(path)
    return above if name == _SCRATCH and os.path.basename(above).startswith(_OF_A_JOB) else path


def is_one_job(one: str, other: str) -> bool:
    """Return True if two directories, each either the one in EXECUTE or the scratch directory, are one job's."""
    return directory_of(one) == directory_of(other)


def scratch_in(path: str) -> str:
    """Return the scratch directory of a job, from its directory in EXECUTE or from the scratch directory itself.

    If the directory in EXECUTE is the scratch directory, the name in it may be the job's: a link to another job's.
    """
    inside = os.path.join(path, _SCRATCH)
    if not os.path.basename(os.path.normpath(path)).startswith(_OF_A_JOB):
        return path
    try:
        outer, inner = os.lstat(path), os.lstat(inside)
    except OSError:
        return path
    # If HTCondor runs as an ordinary user, both belong to that user.
    is_not_the_jobs = outer.st_uid != inner.st_uid or outer.st_uid == os.geteuid() != 0
    return inside if S_ISDIR(inner.st_mode) and is_not_the_jobs else path
