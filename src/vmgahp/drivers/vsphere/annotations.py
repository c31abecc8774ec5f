"""The owner of a VM on the server: the tags in its configuration, and the search for VMs by them.

The tags are extraConfig of the VM, under names that a guest cannot reach (it may change those that begin with
``guestinfo.``). Other execute hosts use the same server and the same folder, so every tag has the host of the VM, and
a VM of another host is never touched.
"""

import hashlib
import os
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from pyVmomi import vim

from vmgahp.job.ad import JobAd

PREFIX = "vmgahp."

RUNS, SAVED = "runs", "saved"
"""The values of `Tag.state`: a server of this daemon serves the VM; it is a checkpoint and waits for its job."""

LONGEST_NAME = 80
"""The most characters of a VM's name with vSphere."""

OURS = re.compile(r".+-[0-9a-f]{8}", re.DOTALL)
"""The form of our VMs' names with vSphere (`entity_name`)."""


class Tag(NamedTuple):
    """The tags of a VM of ours."""

    id: str
    """The UUID of this one VM."""
    name: str
    """The VM's name with HTCondor, `JobAd.vm_name`."""
    job: str
    """The job's GlobalJobId if the starter sends it, else the name."""
    directory: str
    """The job's scratch directory; empty for a checkpoint."""
    host: str
    """The execute host that serves it (`this_host`); empty for a checkpoint."""
    state: str
    checkpoint: str = ""
    """The name of the snapshot that is the job's last checkpoint; empty if there is none."""
    expires: str = "0"
    """The time after which the checkpoint of a missing job may be destroyed, in seconds since 1970; 0 for never."""

    @property
    def has_expired(self) -> bool:
        """True if a checkpoint has waited for its job for too long."""
        return self.state == SAVED and self.expires.isdecimal() and 0 < int(self.expires[:20]) < time.time()

    def options(self) -> "list[vim.option.OptionValue]":
        """Return the tags as extraConfig."""
        return [vim.option.OptionValue(key=PREFIX + key, value=value) for key, value in self._asdict().items()]

    def annotation(self) -> str:
        """Return the note for people who look at the VM in vSphere."""
        where = f"on {os.uname().nodename}, in {self.directory}" if self.directory else "waits as a checkpoint"
        return f"HTCondor job {self.name} ({self.job}), {where}. Looked after by vmgahp; do not change."

    @classmethod
    def read(cls, options: Any) -> "Tag | None":
        """Read a VM's extraConfig; None for a VM that is not ours. The last value of a duplicate key counts."""
        values = {str(option.key).removeprefix(PREFIX): option.value for option in options or () if _is_tag(option.key)}
        if not all(values.get(name) for name in ("id", "name", "job", "state")):
            return None
        return cls(**{name: str(values.get(name, "")) for name in cls._fields})


def _is_tag(key: object) -> bool:
    return isinstance(key, str) and key.startswith(PREFIX)


def job_id(job: JobAd) -> str:
    """Return HTCondor's unique GlobalJobId, or the VM's name if that is not sent."""
    return (job.string("GlobalJobId") or job.vm_name())[:500]


def entity_name(name: str, uuid: str) -> str:
    """Return the VM's name with vSphere: the job's, without characters special to paths or datastores, and unique."""
    plain = re.sub(r"[^A-Za-z0-9_.@+-]", "_", name).lstrip(".-")
    return f"{plain[: LONGEST_NAME - 9] or 'job'}-{uuid[:8]}"


def this_host() -> str:
    """Return a name that tells this execute host from others.

    It has a digest of /etc/machine-id, which is not public itself.
    """
    machine, name = "", os.uname().nodename
    with suppress(OSError, UnicodeDecodeError):
        machine = Path("/etc/machine-id").read_text(encoding="ascii").strip()
    return f"{name} {hashlib.sha256(f'vmgahp {name} {machine}'.encode()).hexdigest()[:16]}"
