"""Whose a VM on the server is: what is written into its configuration, and how it is found again.

The tags are extraConfig of the VM, under names that a guest cannot reach (it may change what begins with
``guestinfo.``). Other execute hosts use the same server and the same folder, so every tag says which host
the VM is of, and nothing is ever done to a VM that is another's.
"""

import hashlib
import os
import re
import time
from typing import NamedTuple

from pyVmomi import vim

from vmgahp import errors
from vmgahp.drivers.vsphere import faults
from vmgahp.drivers.vsphere.connection import Gone, VsphereConnection
from vmgahp.job.ad import JobAd

PREFIX = "vmgahp."

RUNS, SAVED = "runs", "saved"
"""`Tag.state`: a server of this daemon looks after it; it is a checkpoint and waits for its job."""

LONGEST_NAME = 80
"""Characters of a VM's name with vSphere."""

_OURS = re.compile(r".+-[0-9a-f]{8}", re.DOTALL)


class Tag(NamedTuple):
    """What is known of a VM of ours."""

    id: str
    """A UUID of this one VM."""
    name: str
    """The VM's name with HTCondor, `JobAd.vm_name`."""
    job: str
    """GlobalJobId where the starter sends it, else the name: which job's it is."""
    directory: str
    """The job's scratch directory; empty for a checkpoint."""
    host: str
    """Which execute host looks after it (`this_host`); empty for a checkpoint."""
    state: str
    checkpoint: str = ""
    """The name of the snapshot that is the job's last checkpoint; empty where there is none."""
    expires: float = 0.0
    """When a checkpoint that nobody takes up may be destroyed, in seconds since 1970."""

    def options(self) -> "list[vim.option.OptionValue]":
        """As extraConfig."""
        values = self._replace(expires=f"{self.expires:.0f}")._asdict()  # type: ignore[arg-type]
        return [vim.option.OptionValue(key=PREFIX + key, value=value) for key, value in values.items()]

    def annotation(self) -> str:
        """For people who look at the VM in vSphere."""
        where = f"on {os.uname().nodename}, in {self.directory}" if self.directory else "waits as a checkpoint"
        return f"HTCondor job {self.name} ({self.job}), {where}. Looked after by vmgahp; do not change."

    @classmethod
    def read(cls, options: object) -> "Tag | None":
        """The tag in a VM's extraConfig; None for a VM that is not ours. Of a key that comes twice the last counts."""
        values: dict[str, str] = {}
        for option in options or ():  # type: ignore[attr-defined]
            if isinstance(option.key, str) and option.key.startswith(PREFIX):
                values[option.key.removeprefix(PREFIX)] = str(option.value)
        expires = values.pop("expires", "0")
        if not all(values.get(name) for name in ("id", "name", "job", "state")):
            return None
        known = {name: values.get(name, "") for name in cls._fields if name != "expires"}
        return cls(**known, expires=float(expires) if expires.isdecimal() else 0.0)


class Tagged(NamedTuple):
    """A VM of ours on the server."""

    ref: "vim.VirtualMachine"
    tag: Tag


def job_id(job: JobAd) -> str:
    """Which job: HTCondor's GlobalJobId, which no other job has, or the VM's name where that is not sent."""
    return (job.string("GlobalJobId") or job.vm_name())[:500]


def entity_name(name: str, uuid: str) -> str:
    """The VM's name with vSphere: the job's, without what a path or a datastore could stumble on, and unique."""
    plain = re.sub(r"[^A-Za-z0-9_.@+-]", "_", name).lstrip(".-")
    return f"{plain[: LONGEST_NAME - 9] or 'job'}-{uuid[:8]}"


def this_host() -> str:
    """What tells this execute host from others: a digest of its name and of /etc/machine-id, which is no
    public name itself."""
    try:
        with open("/etc/machine-id", encoding="ascii") as file:
            machine = file.read(64).strip()
    except (OSError, UnicodeDecodeError):
        machine = ""
    name = os.uname().nodename
    return f"{name} {hashlib.sha256(f'vmgahp {name} {machine}'.encode()).hexdigest()[:16]}"


def find(connection: VsphereConnection, folder: "vim.Folder") -> list[Tagged]:
    """All VMs of ours in the folder, other hosts' included. Raises `errors.Fault`."""
    with faults.explained("looking for VMs of jobs"):
        children = connection.properties(folder, "childEntity").get("childEntity") or ()
        named = connection.of_each([ref for ref in children if isinstance(ref, vim.VirtualMachine)], "name")
        # extraConfig is long, so it is asked for only where the name may be one of ours.
        likely = [ref for ref, found in named if _OURS.fullmatch(str(found.get("name", "")))]
        answer = []
        for ref, found in connection.of_each(likely, "config.extraConfig"):
            tag = Tag.read(found.get("config.extraConfig"))
            if tag is not None:
                answer.append(Tagged(ref, tag))
    return answer


def write(connection: VsphereConnection, ref: "vim.VirtualMachine", tag: Tag) -> None:
    """Tag a VM anew. Raises `errors.Fault`."""
    spec = vim.vm.ConfigSpec(extraConfig=tag.options(), annotation=tag.annotation())
    # To set a tag twice does no harm.
    connection.retried_task(lambda _content: ref.ReconfigVM_Task(spec), f"tagging {tag.name}")


def expired(tag: Tag) -> bool:
    """Whether a checkpoint has waited for its job for too long."""
    return tag.state == SAVED and 0 < tag.expires < time.time()


def read(connection: VsphereConnection, ref: "vim.VirtualMachine") -> Tag | None:
    """The tag of one VM; None where it is gone or not ours."""
    try:
        with faults.explained("reading a VM's tags"):
            return Tag.read(connection.properties(ref, "config.extraConfig").get("config.extraConfig"))
    except (Gone, errors.ClientFault):
        return None
