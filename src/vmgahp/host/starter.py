"""Where a starter has put what it made for a job: by its environment, else by the names of old.

HTCondor's starters make a directory for each job in EXECUTE, ``dir_<pid>``. It is the scratch directory up to 25.3;
since 25.4 that is ``scratch`` in it, and what the starter keeps for the job beside it: since 25.10 ``.chirp.config``
is in ``user``, which is the job's user's as well (``Starter::Init`` and ``JICShadow::initIOProxy`` in HTCondor's
``src/condor_starter.V6.1``).
"""

import os
from stat import S_ISDIR

from vmgahp.host.light import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

_SCRATCH = "scratch"
_OF_A_JOB = "dir_"


class Places(NamedTuple):
    """The full paths of what a starter gives to the server of one job's VM."""

    scratch: str
    machine_ad: str
    """The ad of the slot. It lies in the scratch directory, where an input file may have replaced it."""
    job_ad: str
    """Likewise."""
    chirp_config: str
    """How the starter is reached by chirp; to be opened as the job's user, whose it is wherever it lies."""
    says_chirp: bool
    """Whether the starter has said that it can be reached by chirp."""


def places(scratch: str, environ: "Mapping[str, str]" = os.environ) -> Places:
    """What was made for the job of the scratch directory.

    The environment is the starter's word, which no job can change. It is about one job: of a server that a person has
    started, or that serves a VM elsewhere, it says nothing.
    """
    said = environ if os.path.normpath(environ.get("_CONDOR_SCRATCH_DIR", "")) == os.path.normpath(scratch) else {}

    def place(name: str, of_old: str) -> str:
        path = said.get(name, "")
        return path if path.startswith("/") else os.path.join(scratch, of_old)

    return Places(
        scratch,
        place("_CONDOR_MACHINE_AD", ".machine.ad"),
        place("_CONDOR_JOB_AD", ".job.ad"),
        place("_CONDOR_CHIRP_CONFIG", ".chirp.config"),
        bool(said.get("_CONDOR_CHIRP_CONFIG")),
    )


def directory_of(path: str) -> str:
    """The directory in EXECUTE that a starter has made, of a job that is known by that or by its scratch directory."""
    path = os.path.normpath(path)
    above, name = os.path.split(path)
    return above if name == _SCRATCH and os.path.basename(above).startswith(_OF_A_JOB) else path


def is_one_job(one: str, other: str) -> bool:
    """Whether two directories, by which HTCondor speaks of a job, are one job's."""
    return directory_of(one) == directory_of(other)


def scratch_in(path: str) -> str:
    """The scratch directory of a job that is known by the directory in EXECUTE, or by the scratch directory itself.

    Whose scratch directory is the one in EXECUTE may have anything in it that is called so, a link to another job's.
    """
    inside = os.path.join(path, _SCRATCH)
    if not os.path.basename(os.path.normpath(path)).startswith(_OF_A_JOB):
        return path
    try:
        outer, inner = os.lstat(path), os.lstat(inside)
    except OSError:
        return path
    # Where HTCondor runs as an ordinary user both are that user's.
    is_not_the_jobs = outer.st_uid != inner.st_uid or outer.st_uid == os.geteuid() != 0
    return inside if S_ISDIR(inner.st_mode) and is_not_the_jobs else path
