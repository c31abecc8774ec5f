"""The usual policies of pools, on the same jobs under HTCondor's own server and under this one: what becomes of each.

Two pools run side by side, in which all is alike but VM_GAHP_SERVER and, since HTCondor's own emulates only where a
script describes the VM, its LIBVIRT_XML_SCRIPT. docs/how-to/htcondor.md has the fates that are found here.
"""

import re
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack

import pytest
from tests.lab import reference
from tests.lab.guest import make_guest, read_count
from tests.lab.namespace import LAB, OUR_SERVER, REFERENCE_SERVER, REPOSITORY, require_namespace, wheel_of
from tests.lab.pool import Job, Pool
from tests.system.pool.outcomes import CHECKPOINT, START

pytestmark = pytest.mark.pool

PAGE = REPOSITORY / "docs/how-to/htcondor.md"
END = 300
SECONDS = 90
"""How long the guest counts that is suspended: longer than the starter sleeps after its START."""

CONFIG = """\
NUM_CPUS = 16
PERIODIC_EXPR_INTERVAL = 10
STARTER_UPDATE_INTERVAL = 20
VM_NETWORKING = True
VM_NETWORKING_TYPE = bridge
VM_NETWORKING_BRIDGE_INTERFACE = lab0
SYSTEM_PERIODIC_HOLD_NAMES = MEMORY DISK TIME
SYSTEM_PERIODIC_HOLD_MEMORY = Policy =?= "memory" && MemoryUsage > RequestMemory
SYSTEM_PERIODIC_HOLD_DISK = Policy =?= "disk" && DiskUsage > RequestDisk
SYSTEM_PERIODIC_HOLD_TIME = Policy =?= "time" && JobStatus == 2 && time() - JobCurrentStartDate > 60
MAXJOBRETIREMENTTIME = 0
OVER = TotalJobRunTime > 60
WANT_SUSPEND = TARGET.Policy =?= "suspend"
SUSPEND = TARGET.Policy =?= "suspend" && $(OVER) && (TotalJobSuspendTime ?: 0) < 10
CONTINUE = time() - EnteredCurrentActivity > 20
WANT_VACATE = True
FIRST = TARGET.NumJobStarts =?= 0
PREEMPT = $(OVER) && $(FIRST) && TARGET.Policy =?= "preempt" || TARGET.Policy =?= "machine" && MemoryUsage > Memory
"""

COMMANDS = {
    "memory": '+Policy = "memory"\nrequest_memory = 64',
    "memory with room": '+Policy = "memory"\nrequest_memory = 100',
    "memory of the slot": '+Policy = "machine"\nrequest_memory = 64',
    "disk": '+Policy = "disk"',
    "disk with room": '+Policy = "disk"\nrequest_disk = 100 MB',
    "wall time": '+Policy = "time"',
    "preempt": '+Policy = "preempt"',
    "preempt a VM with checkpoints": f'+Policy = "preempt"\n{CHECKPOINT}',
    "suspend": '+Policy = "suspend"\nvm_networking = true\nvm_networking_type = bridge',
}
"""By the names that the page has for them; each has 64 MiB."""

RUNS_ON, HELD, ANEW, GOES_ON, LOST = "runs on", "is held", "begins anew", "goes on", "is done, with its work lost"


class Fates:
    """A pool with a server, in which the jobs run."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        pool.offering()
        self.jobs = {name: self._submit(name, commands) for name, commands in COMMANDS.items()}

    def _submit(self, name: str, commands: str) -> Job:
        seconds = SECONDS if name == "suspend" else None
        return self.pool.submit(name.replace(" ", "-"), lambda home: make_guest(home / "guest.img", seconds), commands)

    def of(self, name: str) -> str:
        """What becomes of a job, once that is clear."""
        job = self.jobs[name]
        if name == "suspend":
            self.pool.wait_until("the suspended job's end", lambda: "terminated" in job.events(), START + END)
            assert "suspended" in job.events()
            return GOES_ON if read_count(job.directory / "guest.img") == SECONDS else LOST
        if name.startswith("preempt"):
            self.pool.wait_until(
                f"{name}: its next run",
                lambda: job.events().count("executing") > 1 or "held" in job.events(),
                START + END,
            )
            assert "evicted" in job.events()
            if "held" in job.events():
                return HELD
            self.pool.wait_until(f"{name}: its guest", job.is_running, START)
            count = self._count(job)
            # One that began anew cannot have counted for longer than this run, however late it is looked at.
            return GOES_ON if count > time.time() - job.ad()["JobCurrentStartDate"] else ANEW
        if name in ("memory", "wall time"):
            job.wait_for_event("held", START + END)
            self.pool.wait_until(f"{name}: its VM to go", lambda: not job.is_running(), 60)
            return HELD
        assert job.is_running()
        return RUNS_ON if job.events().count("executing") == 1 else ANEW

    def _count(self, job: Job) -> int:
        """The first number that a guest that was started again leaves on its disk."""
        scratch = self.pool.wait_until("its scratch directory", lambda: self.pool.scratch(job), 60)
        disk = self.pool.namespace.path(f"{scratch}/guest.img")
        return self.pool.wait_until("its guest to count", lambda: read_count(disk), 60)


def prepare(pool: Pool) -> None:
    for words in ("add lab0 type bridge", "set lab0 up"):
        pool.run("ip", "link", *words.split())
    reference.describe(pool.directory)


@pytest.fixture(scope="module")
def fates(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, Fates]]:
    """All jobs in both pools, submitted at once."""
    require_namespace()
    script = f"LIBVIRT_XML_SCRIPT = {LAB}/describe-vm\n"
    with ExitStack() as stack:
        found = {}
        for name, server, more in (("reference", REFERENCE_SERVER, script), ("ours", OUR_SERVER, "")):
            pool = Pool(tmp_path_factory.mktemp(f"policies-{name}"), server, CONFIG + more)
            found[name] = Fates(stack.enter_context(pool.running(wheel_of(tmp_path_factory), prepare)))
        yield found


def test_the_fates_are_those_of_the_page(fates: Mapping[str, Fates]) -> None:
    """Those that have no event of theirs are looked at last, when each policy has found its job."""
    order = sorted(COMMANDS, key=lambda name: name.startswith(("disk", "memory ")))
    found = {name: tuple(fates[server].of(name) for server in ("reference", "ours")) for name in order}
    rows = re.findall(r"^\| ([\w ]+) \|.*\| ([^|]+) \| ([^|]+) \|$", PAGE.read_text(), re.MULTILINE)
    assert {name: (theirs, ours) for name, theirs, ours in rows if name in COMMANDS} == found
