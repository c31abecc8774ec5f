"""What a job has left in its scratch directory under the names of files that the server writes or reads."""

import os
from pathlib import Path

import pytest

from tests.drivers.libvirt.support import CONSOLE, Job, greeted
from tests.lab import odd_files
from tests.peer import Peer
from vmgahp import errors

pytestmark = pytest.mark.libvirt


KINDS = odd_files.KINDS | {
    "a link to root's": lambda path: path.symlink_to("/etc/shadow"),
    "another's": odd_files.of_mode(0o600),
}

USER_DATA = ('VMPARAM_vm_User_Data = "user-data"',)
RUN = ('VMPARAM_vm_Run = "true"', 'VMPARAM_vm_Run_Boot = "ready"')
NAMES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    CONSOLE: ((), ()),
    "vm_cidata.iso": (USER_DATA, ()),
    "vm_data_files.iso": (('VMPARAM_vm_Data_Files = "user-data"',), ()),
    "vm_run.tar": (RUN, ()),
    "vm_run.json": (RUN, ()),
    "vdb-data.qcow2": (('VMPARAM_vm_Data_Disk = "vdb:1M"',), ()),
    "vm_suspend.mem": ((), ("SUSPEND", "RESUME")),
    "vm_checkpoint.json": (("JobVMCheckpoint = true",), ("CHECKPOINT",)),
    "share": (('VMPARAM_vm_Share = "share"',), ()),
}
"""Name -> what of the ad asks for it, and the operations that use it."""


def put(job: Job, name: str, kind: str) -> None:
    path = job.scratch / name
    odd_files.remove(path)
    if kind:
        KINDS[kind](path)
        if os.getuid() == 0:
            owner = 0 if kind == "another's" else job.scratch.stat().st_uid
            os.chown(path, owner, owner, follow_symlinks=False)


def attempt(peer: Peer, job: Job, name: str) -> str:
    """What START is answered, and then each operation: nothing of it takes the machine out of service."""
    more, operations = NAMES[name]
    peer.send_ad(*job.ad(*more))
    status, said = peer.run("START", "kvm")[:2]
    if status != "0":
        return said
    words = [" ".join(peer.run(operation, said)) for operation in operations]
    peer.run("STOP", said)
    return "; ".join(["0", *words])


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_is_taken_never_takes_the_machine(job: Job, name: str) -> None:
    job.put("user-data", "#cloud-config\n")
    before = Path("/etc/shadow").stat()
    found = {}
    with greeted(job, VM_SHARE_SCRATCH="9p", VM_RUN_AS_JOB_USER=name == "share") as peer:
        for kind in KINDS:
            put(job, name, kind)
            found[kind] = attempt(peer, job, name)
        put(job, name, "")
        assert attempt(peer, job, name).startswith("0")
        log = peer.quit()
    bad = {kind: said for kind, said in found.items() if said[0] != "0" and said not in errors.HOLD_CODES}
    assert not bad, log
    assert all(name in line for line in log.splitlines() if "START of VM" in line), log
    assert Path("/etc/shadow").stat() == before
