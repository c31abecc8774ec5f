"""A whole HTCondor pool on one machine, in a namespace, with a vm-gahp of our choice in it.

The master, collector, negotiator, schedd and startd are Debian's, and so are the shadow and the starter
that really talk to the daemon under test. Jobs are submitted by an ordinary user.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self, TypeVar

from tests.lab.namespace import LAB, OUR_SERVER, LabError, Namespace, wait_until

T = TypeVar("T")

USER = "alice"
DOMAIN = "lab"
JOBS = f"{LAB}/jobs"
EXECUTE = "/var/lib/condor/execute"

LOOK = 20
"""Seconds between two questions, whether the machine is still in service."""

CONFIG = """\
# One machine is the pool; it talks to itself only.
CONDOR_HOST = 127.0.0.1
COLLECTOR_HOST = $(CONDOR_HOST)
NETWORK_INTERFACE = 127.0.0.1
BIND_ALL_INTERFACES = False
DAEMON_LIST = MASTER, COLLECTOR, NEGOTIATOR, SCHEDD, STARTD
UID_DOMAIN = {domain}
FILESYSTEM_DOMAIN = {domain}
SEC_DEFAULT_AUTHENTICATION_METHODS = FS
ALLOW_READ = *
ALLOW_WRITE = *
ALLOW_DAEMON = *
ALLOW_ADMINISTRATOR = *
ALLOW_NEGOTIATOR = *
LOG = {lab}/log

# One slot to be divided, wide enough for all the tests' jobs at once; jobs start soon and stay.
NUM_CPUS = 8
MEMORY = 4096
NUM_SLOTS = 1
NUM_SLOTS_TYPE_1 = 1
SLOT_TYPE_1 = 100%
SLOT_TYPE_1_PARTITIONABLE = True
START = True
SUSPEND = False
PREEMPT = False
KILL = False
# Nobody reads them, and they take a processor for ten seconds at each start of a startd.
RUNBENCHMARKS = False
NEGOTIATOR_INTERVAL = 5
NEGOTIATOR_CYCLE_DELAY = 2
SCHEDD_INTERVAL = 5
SCHEDD_MIN_INTERVAL = 1
UPDATE_INTERVAL = 5

# An emulated guest that boots beside those of seven other pools gets a sixth of a processor.
VM_RUN_BOOT_TIMEOUT = 2400

# 30 seconds is the least that the starter allows.
VM_STATUS_INTERVAL = 30
# A machine that was taken out of service is tried again soon.
VM_RECHECK_INTERVAL = 10
VM_TYPE = kvm
VM_MEMORY = 1024
VM_GAHP_SERVER = {server}
VM_GAHP_LOG = $(LOG)/VMGahpLog
VM_GAHP_DEBUG = D_FULLDEBUG
VM_ALLOW_EMULATION = True
# The lab's guest never listens to a shutdown request.
VM_STOP_TIMEOUT = 5
STARTER_DEBUG = D_FULLDEBUG
"""

OF_ALL = """\
universe = vm
should_transfer_files = YES
when_to_transfer_output = ON_EXIT
executable = {name}
log = job.log
"""
"""The lines of every VM job's submit file."""

SUBMIT = f"""\
{OF_ALL}vm_type = kvm
vm_memory = 64
vm_networking = false
vm_disk = guest.img:hda:w:raw
transfer_input_files = guest.img
"""

EVENTS = {
    0: "submitted", 1: "executing", 4: "evicted", 5: "terminated", 7: "shadow exception", 9: "removed", 10: "suspended",
    11: "unsuspended", 12: "held", 13: "released",
}  # fmt: skip
"""The numbers of the job event log that tests speak of."""


class Job:
    """A submitted job: its directory on this side, and what HTCondor says of it."""

    def __init__(self, pool: Pool, cluster: int, directory: Path) -> None:
        self.pool = pool
        self.cluster = cluster
        self.directory = directory

    @property
    def domain(self) -> str:
        """The name of its virtual machine, by HTCondor's own rule."""
        return f"{USER}_{DOMAIN}_{self.cluster}.0"

    def events(self) -> list[str]:
        """The job event log, as words in their order."""
        log = self.directory / "job.log"
        numbers = re.findall(r"^(\d{3}) \(", log.read_text() if log.exists() else "", re.MULTILINE)
        return [EVENTS.get(int(number), number) for number in numbers]

    def ad(self) -> dict[str, Any]:
        """Its ad, from the queue while it is there and from the history afterwards."""
        for command in (["condor_q"], ["condor_history", "-limit", "1"]):
            out = self.pool.run(*command, str(self.cluster), "-json", user=USER).stdout.strip()
            if out:
                return dict(json.loads(out)[0])
        return {}

    def is_running(self) -> bool:
        """Whether its virtual machine runs now."""
        return self.domain in self.pool.namespace.domains()

    def wait_for_event(self, event: str, timeout: float) -> None:
        """Wait for an event; one that ends the job, or holds it, ends the waiting as well."""
        final = {"terminated", "removed", "held"}
        self.pool.wait_until(f"job {self.cluster} to be {event}", lambda: {event, *final} & set(self.events()), timeout)
        if event not in self.events():
            raise LabError(f"job {self.cluster} is not {event}, but has: {', '.join(self.events())}\n{self.reason()}")

    def reason(self) -> str:
        """What HTCondor gives as reasons for where the job is."""
        ad = self.ad()
        said = {name: ad[name] for name in ("HoldReason", "RemoveReason", "LastVacateReason") if name in ad}
        return "\n".join(f"{name}: {text}" for name, text in said.items())

    def command(self, name: str) -> None:
        """condor_rm, condor_suspend and the like, as its owner."""
        self.pool.run(name, str(self.cluster), user=USER)


class Pool:
    """A pool, while it is `running`; `directory` keeps its logs (``log``) and the jobs' files (``jobs``)."""

    def __init__(
        self, directory: str | Path, server: str = OUR_SERVER, settings: str = "", root: str | Path | None = None
    ) -> None:
        self.directory = Path(directory)
        self.namespace = Namespace(self.directory, root)
        self.config = CONFIG.format(lab=LAB, domain=DOMAIN, server=server) + settings
        self.log = self.directory / "log"
        self.advertised: dict[str, Any] = {}
        """The machine's ad before the first job: HTCondor 23.9.6 was seen to keep publishing what a VM had left of
        VM_Memory after that VM was gone."""
        self.dead = ""
        """The reason why no job can run in the pool any more: each later wait and submission fails with it at once."""
        self.watched = True
        """The switch for a test which itself breaks what `assert_alive` looks at."""
        self._looked = time.monotonic()

    @contextmanager
    def running(self, wheel: Path | None = None, prepare: Callable[[Pool], None] | None = None) -> Iterator[Self]:
        """The namespace, our package in it where a wheel is given, libvirt, and HTCondor up to a slot, until the end.

        `prepare` puts into the namespace what must be there before HTCondor starts.
        """
        with self.namespace:
            if wheel:
                self.namespace.install(wheel)
            self.namespace.start_libvirt()
            if prepare:
                prepare(self)
            for name, owner in (("log", "condor"), ("jobs", USER)):
                self.run("install", "-d", "-o", owner, f"{LAB}/{name}")
            self.namespace.path("/etc/condor/config.d/99-lab.config").write_text(self.config)
            self.run("condor_master")
            self.wait_until("the schedd", lambda: not self.run("condor_q", user=USER, check=False).returncode, 120)
            self.wait_until("the startd's slot", lambda: self.machine(), 120)
            yield self

    # ---- asking ---------------------------------------------------------------------------------

    def run(self, *argv: str, **options: Any) -> Any:
        return self.namespace.run(*argv, **options)

    def machine(self) -> dict[str, Any]:
        """The ad of the machine's partitionable slot; empty while there is none."""
        command = ["condor_status", "-constraint", "PartitionableSlot", "-json"]
        out = self.run(*command, user=USER, check=False).stdout.strip()
        ads = json.loads(out) if out.startswith("[") else []
        return dict(ads[0]) if ads else {}

    def offering(self) -> dict[str, Any]:
        """The machine's ad, once it offers VMs: a startd that is kept waiting by its first probe tries again."""
        return self.wait_until("the machine to have VMs", lambda: (ad := self.machine()).get("HasVM") and ad, 120)

    def server_of(self, job: Job) -> tuple[int, int] | None:
        """The pids (as seen inside) of the daemon that serves a job and of its parent, the job's starter."""
        scratch = self.scratch(job)
        processes = self.namespace.processes()
        for pid, words in processes.items():
            parent = self._parent(pid)
            if "vm-gahp" in words and processes.get(parent, "").startswith("condor_starter"):
                directory = os.readlink(self.namespace.path(f"/proc/{pid}/cwd"))
                if scratch and directory.endswith(scratch):
                    return pid, parent
        return None

    def qemu_of(self, job: Job) -> int | None:
        """The pid (as seen inside) of the QEMU that runs a job's machine."""
        for pid, words in self.namespace.processes().items():
            if "qemu-system" in words and f"guest={job.domain}," in words:
                return pid
        return None

    def scratch(self, job: Job) -> str | None:
        """The job's scratch directory as seen inside, while it runs: what the starter has made, or is in that."""
        execute = self.namespace.path(EXECUTE)
        for ad in (*execute.glob("dir_*/.job.ad"), *execute.glob("dir_*/scratch/.job.ad")):
            if ad.exists() and re.search(rf"^ClusterId = {job.cluster}$", ad.read_text(), re.MULTILINE):
                return f"{EXECUTE}/{ad.parent.relative_to(execute)}"
        return None

    def _parent(self, pid: int) -> int:
        try:
            status = self.namespace.path(f"/proc/{pid}/status").read_text()
        except OSError:  # it is gone
            return 0
        parent = re.search(r"^PPid:\t(\d+)", status, re.MULTILINE)
        return int(parent[1]) if parent else 0

    def console(self, job: Job) -> str:
        """The console of a running job's machine, so far."""
        scratch = self.scratch(job)
        if scratch is None:
            return ""
        path = self.namespace.path(f"{scratch}/vm_console.log")
        return path.read_text("ascii", "replace") if path.exists() else ""

    def told(self, job: Job) -> str:
        """The log of the starter that runs a job now: every line of its conversation with the daemon."""
        scratch = self.scratch(job)
        for log in self.log.glob("StarterLog.slot*"):
            text = log.read_text(errors="replace")
            if scratch and (begin := text.find(f'{scratch}"')) >= 0:
                return text[begin:]
        return ""

    def daemon_log(self) -> str:
        """What the daemons of all jobs have logged."""
        return "".join(path.read_text(errors="replace") for path in self.log.glob("VMGahpLog*"))

    # ---- doing ----------------------------------------------------------------------------------

    def submit(
        self,
        name: str,
        make_files: Callable[[Path], object],
        commands: str = "",
        template: str = SUBMIT,
        options: Sequence[str] = (),
    ) -> Job:
        """Submit a job from a directory of its own, which `make_files` fills; `commands` go on top.

        `options` are condor_submit's.
        """
        self.assert_alive()
        directory = self.directory / "jobs" / name
        while directory.exists():  # a test runs again
            directory = directory.with_name(f"{directory.name}-again")
        directory.mkdir()
        make_files(directory)
        (directory / "job.sub").write_text(template.format(name=name) + commands + "\nqueue\n")
        inside = f"{JOBS}/{directory.name}"
        self.run("chown", "-R", USER, inside)
        out = self.run("condor_submit", "-terse", *options, "job.sub", user=USER, cwd=inside).stdout
        return Job(self, int(out.split(".")[0]), directory)

    def wait_until(self, what: str, condition: Callable[[], T | None], timeout: float) -> T:
        """As `namespace.wait_until`, with the pool's logs in the error; one that is dead is not waited for."""

        def alive() -> T | None:
            self.assert_alive()
            return condition()

        try:
            return wait_until(what, alive, timeout, interval=1)
        except LabError as error:
            raise LabError(f"{error}\n{self.diagnosis()}") from None

    def assert_alive(self) -> None:
        """Raise `LabError` where no job can run any more, with the reason that was seen first."""
        if self.watched and not self.dead:
            self.dead = self._why_dead()
        if self.dead:
            raise LabError(f"the pool is dead: {self.dead}")

    def _why_dead(self) -> str:
        """Name what is gone and nothing starts again, or the reason why a starter has given up on VMs."""
        running = {Path(words.split(" ")[0]).name for words in self.namespace.processes().values()}
        if gone := {"condor_master", "libvirtd"} - running:
            return f"{min(gone)} is gone"
        if time.monotonic() - self._looked > LOOK:
            self._looked = time.monotonic()
            if reason := self.machine().get("VMOfflineReason"):  # it is there without a value as long as all is well
                return f"a starter took the machine out of service: {reason}"
        return ""

    def diagnosis(self) -> str:
        """The ends of the logs that tell most, for a test that failed."""
        shown = []
        for pattern in ("VMGahpLog*", "StarterLog.slot*", "StartLog", "ShadowLog"):
            for log in sorted(self.log.glob(pattern)):
                tail = log.read_text(errors="replace").splitlines()[-40:]
                shown.append(f"---- the end of {log} ----\n" + "\n".join(tail))
        return "\n".join(shown)
