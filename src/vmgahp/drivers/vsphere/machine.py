"""One VM on a vSphere server, as the daemon sees it.

A guest that powers itself off leaves its VM behind, with the disks that the job is about. So the first STATUS
that finds it off has the disks downloaded, and the VM counts as running until then: the starter ends
the job, and sends its files away, as soon as it hears of a VM that has stopped. Should a fetch fail, that
STATUS fails, and the next one has it done again; the starter gives up after some of these and runs the job
again.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

from pyVmomi import vim

from vmgahp import errors, lifecycle
from vmgahp.checkpoint.files import Unusable
from vmgahp.checkpoint.manifest import Manifest
from vmgahp.drivers.base import Deadlines, Logger
from vmgahp.drivers.lifecycle import ManagedMachine
from vmgahp.drivers.resources import Resources
from vmgahp.drivers.vsphere import annotations, faults, power
from vmgahp.drivers.vsphere.annotations import Tag
from vmgahp.drivers.vsphere.checkpoint import VsphereCheckpoints
from vmgahp.drivers.vsphere.connection import Gone, VsphereConnection
from vmgahp.drivers.vsphere.datastore import Store
from vmgahp.drivers.vsphere.deploy import Deployment
from vmgahp.drivers.vsphere.download import Download
from vmgahp.drivers.vsphere.inventory import Placement
from vmgahp.host import threads
from vmgahp.job.vmware import VmwareSpec
from vmgahp.metrics import Status, Usage

FIGURES = (
    "runtime.powerState",
    "runtime.question",
    "summary.quickStats",
    "summary.runtime.maxCpuUsage",
    "guest.ipAddress",
    "config.hardware.numCPU",
    "config.hardware.memoryMB",
)

MIB_IN_KIB = 1024

POLL = 0.5
"""Seconds between two looks at a guest that was asked to shut down."""


class VsphereContext(NamedTuple):
    """What a machine works with."""

    connection: VsphereConnection
    store: Store
    checkpoints: VsphereCheckpoints
    place: Placement
    log: Logger


class VspherePlan(NamedTuple):
    """A START as it will be carried out, as far as the job says; the server has not been asked yet."""

    deployment: Deployment
    job: str
    """Which job it is (`annotations.job_id`)."""
    manifest: Manifest | None
    """The checkpoint that came with the job."""
    end: float
    """When uploads must be done, by the monotonic clock."""
    unusable: Unusable | None = None
    """Why the checkpoint that is there is not restored."""

    @property
    def spec(self) -> VmwareSpec:
        return self.deployment.spec


class _Fetch:
    """The end of a guest, in a thread of its own: its disks are downloaded, its VM is removed."""

    def __init__(self, work: Callable[[], None], name: str) -> None:
        self.fault: errors.Fault | None = None
        self._work = work
        self._thread = threads.start(f"download of {name}", self._run)

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Wait for the end. Raises the `errors.Fault` that it met."""
        self._thread.join()
        if self.fault is not None:
            raise self.fault

    def _run(self) -> None:
        try:
            self._work()
        except errors.Fault as fault:
            self.fault = fault
        except Exception as error:  # noqa: BLE001 - a bug here must not look like a VM that runs for ever
            self.fault = errors.HypervisorFault(f"The disks cannot be downloaded: {error!r}.", "report it as a bug.")


class VsphereMachine(ManagedMachine):
    """A VM that this daemon creates, or takes up from a checkpoint."""

    def __init__(
        self, plan: VspherePlan, tag: Tag, context: VsphereContext, resources: Resources, deadlines: Deadlines
    ) -> None:
        super().__init__(plan.spec.name, resources, deadlines, context.log)
        self.uuid = tag.id
        if plan.spec.checkpoint:
            self.no_checkpoint = ""
        self.tag = tag
        self.ref: vim.VirtualMachine = None
        """The VM, once the start has made or found it."""
        self._deployment = plan.deployment
        self._spec = plan.spec
        self.context = context
        self._connection = context.connection
        self._snapshot = ""
        """Which snapshot has the guest's memory; empty where a suspended VM has it, or none."""
        self._raw_seconds = 0.0
        """Seconds of CPU that the guest has used here, as far as can be told: the server gives a mean load of the
        last seconds, in MHz of what the VM may have, and that is added up from STATUS to STATUS."""
        self._looked: float | None = None
        spec = plan.spec
        self._last = Status(lifecycle.RUNNING, vcpus=spec.vcpus, max_memory_kib=spec.memory_mib * MIB_IN_KIB)
        self._fetch: _Fetch | None = None
        self._question = ""
        self._mac = ""
        self._download = Download(
            self._connection, context.store, plan.deployment, context.checkpoints.identity, self.log
        )

    # What the server asks

    def pid(self) -> int:
        return 0  # the guest runs on another machine

    def cpu_seconds(self) -> float:
        """What the guest had used when it was last looked at."""
        return self.usage.seconds

    # The life

    def look(self) -> Status:
        if self._fetch is not None:
            return self._downloading()
        if self._download.done:  # and the VM could not be removed
            return self._begin_download()
        try:
            with faults.explained(f"asking for the status of {self.name}"):
                seen = self._connection.properties(self.ref, *FIGURES)
        except Gone as gone:
            # A guest that powers off leaves its VM; one that is gone was removed, and the job's disks with it.
            raise errors.HypervisorFault(
                f"The VM of {self.name} is not on the server any more, and its disks are lost.",
                "see who has removed it; the job has to run again.",
            ) from gone
        state = str(seen.get("runtime.powerState"))
        if state == power.OFF:
            self.log(f"{self.name}: the guest has powered off")
            return self._begin_download()
        if state == power.SUSPENDED:
            self._looked = None
            return Status(lifecycle.SUSPENDED)
        self._note_question(seen.get("runtime.question"))
        self._last = self._figures(seen)
        return self._last

    def look_at_saved(self) -> None:
        try:
            if self._snapshot:
                there = self._snapshot in self.context.checkpoints.snapshots(self.ref)
            else:
                there = power.state(self._connection, self.ref) != power.OFF
        except Gone:
            there = False
        if not there:
            raise self.report_lost(
                f"The memory of {self.name} is not on the server any more.",
                "see who has powered the VM off or removed it; the job has to run again.",
            )

    def ask_to_power_off(self) -> None:
        if self._fetch is not None or not power.ask_to_shut_down(self._connection, self.ref):
            raise errors.HypervisorFault("VMware Tools do not run in it.")

    def wait_until_off(self, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while on := power.state(self._connection, self.ref) == power.ON:
            if self.overruled or time.monotonic() >= end:
                break
            time.sleep(POLL)
        return not on

    def collect_output(self) -> None:
        if self._fetch is not None and self._fetch.ended and self._fetch.fault is not None:
            self._fetch = None  # it failed before, and nobody has asked since
        try:
            if self._fetch is None:
                power.off(self._connection, self.ref, f"powering {self.name} off")
                self._begin_download()
            self._fetched()
        except Gone:
            self.log(f"the VM of {self.name} is not on the server any more, and its disks are lost")

    def interrupt(self) -> None:
        """A task of the server's cannot be hurried, and a VM not removed in the middle of one."""
        self.context.store.aborted.set()

    def end_guest(self) -> None:
        self.context.store.aborted.set()
        if self.state is lifecycle.STARTING:
            for found in annotations.find(self._connection, self.context.place.folder):
                if (found.tag.id, found.tag.host) == (self.tag.id, self.tag.host):
                    retire(self.context, found.ref, found.tag)
            return
        if self._fetch is not None:
            try:
                self._fetched()
                return
            except errors.Fault as fault:
                self.log(f"{self.name}: {fault.problem}")
        if not (self.state is lifecycle.CHECKPOINTED and self.tag.state == annotations.SAVED):
            retire(self.context, self.ref, self.tag)

    def unpause(self) -> None:
        """Somebody else has suspended it."""
        self._must_not_be_off("resumed")
        power.on(self._connection, self.ref, f"resuming {self.name}")

    def save(self, operation: str) -> None:
        if operation == lifecycle.CHECKPOINT:
            self._must_not_be_off("checkpointed")
            self._take_snapshot()
        else:
            self._must_run("suspended")
            power.suspend(self._connection, self.ref, f"suspending {self.name}")
            self.log(f"{self.name} is suspended, its memory is on the datastore")
        self._looked = None
        self.step("save.written")

    def keep_saved(self) -> None:
        if self._snapshot:
            return
        self._must_not_be_off("checkpointed")
        try:
            self._take_snapshot()
        except errors.Fault:
            power.suspend(self._connection, self.ref, f"suspending {self.name} again")
            raise

    def write_manifest(self) -> None:
        checkpoints = self.context.checkpoints
        try:
            checkpoints.write(self._spec, self.uuid, self._snapshot, self.usage.seconds)
            self._retag(checkpoints.waiting(self.tag._replace(checkpoint=self._snapshot)))
        except errors.Fault:
            checkpoints.used_up(self._spec.working_dir)
            raise
        self.log(f"{self.name} is checkpointed, in the snapshot {self._snapshot} on the server")

    def restore(self, before_it_runs: Callable[[], None]) -> None:
        before_it_runs()
        if not self._snapshot:
            self.unpause()
            return
        try:
            self._retag(
                self.tag._replace(
                    state=annotations.RUNS, directory=self._spec.working_dir, host=annotations.this_host()
                )
            )
            self.context.checkpoints.go_on(self.ref, self._snapshot, self.name)
        except errors.Fault:
            self._put_away()
            raise
        self.log(f"{self.name} is restored from its checkpoint")

    def forget_saved(self) -> None:
        """Of the checkpoints only the last that was written down is kept, for the job's spool directory has it."""
        if self._snapshot and self.state is lifecycle.RUNNING:
            self.context.checkpoints.forget_others(self.ref, self.tag.checkpoint)
        self._snapshot = ""

    # What the driver asks

    def take_up(self, manifest: Manifest) -> None:
        """Restore the guest of a checkpoint. Where that fails the checkpoint stays, for another day or machine."""
        snapshot = manifest.facts["snapshot"]
        self._retag(self.tag._replace(checkpoint=snapshot))
        power.off(self._connection, self.ref, f"powering {self.name} off")
        self.context.checkpoints.go_on(self.ref, snapshot, self.name)
        self.usage = Usage(manifest.cpu_seconds)
        self.log(f"{self.name} is restored from its checkpoint {snapshot}")

    def find_mac(self) -> None:
        """Find out the address of the first NIC, which no STATUS asks for again. Raises `errors.Fault`."""
        path = "config.hardware.device"
        with faults.explained(f"looking at the NIC of {self.name}"):
            found = self._connection.properties(self.ref, path).get(path)
        for device in found or ():
            if isinstance(device, vim.vm.device.VirtualEthernetCard):
                self._mac = str(device.macAddress or "").lower()
                return

    # What helps

    def _begin_download(self) -> Status:
        if not self.overruled:
            self._fetch = _Fetch(self._bring_home, self.name)
        return self._last

    def _bring_home(self) -> None:
        if not (self._download.done or self._spec.no_output_vm):
            self._download.run(self.ref)
            self.log(f"{self.name}: its disks are downloaded")
        power.destroy(self._connection, self.ref, self.context.place.datacenter)
        self.context.checkpoints.used_up(self._spec.working_dir)

    def _downloading(self) -> Status:
        assert self._fetch is not None
        if not self._fetch.ended:
            return self._last
        self._fetched()
        return Status(lifecycle.STOPPED)

    def _fetched(self) -> None:
        """Wait until the VM's disks are here, and the VM is gone. Raises `errors.Fault`: then the next one tries."""
        if self._fetch is None:
            return
        try:
            self._fetch.wait()
        except errors.Fault:
            self._fetch = None
            raise

    def _take_snapshot(self) -> None:
        """Have the guest's memory in a snapshot, and the VM off; on any exception the guest runs."""
        if power.state(self._connection, self.ref) == power.SUSPENDED:
            # The memory that is in a snapshot is that of a guest which runs.
            power.on(self._connection, self.ref, f"resuming {self.name} for its checkpoint")
        self._snapshot = self.context.checkpoints.make(self.ref, self.name)
        try:
            power.off(self._connection, self.ref, f"saving {self.name}")
        except errors.Fault:
            self.context.checkpoints.go_on(self.ref, self._snapshot, self.name)
            self._snapshot = ""
            raise

    def _put_away(self) -> None:
        """The guest has not continued: its VM is to be off, and to wait if it did. What fails is done at the end."""
        try:
            power.off(self._connection, self.ref, f"powering {self.name} off")
            if self.state is lifecycle.CHECKPOINTED:
                self._retag(self.context.checkpoints.waiting(self.tag))
        except errors.Fault as fault:
            self.log(f"{self.name} cannot be put away: {fault.problem}")

    def _must_run(self, what: str) -> None:
        if self._fetch is not None:
            raise errors.ClientFault(
                errors.VM_INVALID_OPERATION,
                f"{self.name} cannot be {what}: its guest has powered off, and its disks are being downloaded.",
            )

    def _must_not_be_off(self, what: str) -> None:
        """To power a VM on that is off would boot it anew. Its next STATUS has its disks downloaded."""
        self._must_run(what)
        if power.state(self._connection, self.ref) == power.OFF:
            raise errors.ClientFault(errors.VM_INVALID_OPERATION, f"{self.name} cannot be {what}: it is switched off.")

    def _retag(self, tag: Tag) -> None:
        annotations.write(self._connection, self.ref, tag)
        self.tag = tag

    def _note_question(self, question: object) -> None:
        text = str(getattr(question, "text", "") or "")
        if text and text != self._question:
            self.log(f"{self.name} waits for an answer to a question of vSphere: {text[:500]}")
        self._question = text

    def _figures(self, seen: dict[str, object]) -> Status:
        stats = seen.get("summary.quickStats")
        vcpus = _number(seen.get("config.hardware.numCPU")) or self._spec.vcpus
        most = _number(seen.get("summary.runtime.maxCpuUsage"))
        now = time.monotonic()
        if self._looked is not None and most > 0:
            load = min(1.0, _number(getattr(stats, "overallCpuUsage", 0)) / most)
            self._raw_seconds += load * vcpus * (now - self._looked)
        self._looked = now
        return Status(
            lifecycle.RUNNING,
            cpu_seconds=self.usage.read(self._raw_seconds),
            vcpus=vcpus,
            memory_kib=_number(getattr(stats, "hostMemoryUsage", 0)) * MIB_IN_KIB,
            max_memory_kib=(_number(seen.get("config.hardware.memoryMB")) or self._spec.memory_mib) * MIB_IN_KIB,
            mac=self._mac,
            ip=str(seen.get("guest.ipAddress") or ""),
        )


def retire(context: VsphereContext, ref: "vim.VirtualMachine", tag: Tag) -> None:
    """End a VM at once. One that has a checkpoint is kept as that, switched off; every other one is removed.

    The job may have continued without its disks, but its spool directory still has the manifest of its last
    checkpoint. Raises `errors.Fault`.
    """
    try:
        if tag.checkpoint:
            power.off(context.connection, ref, f"powering {tag.name} off")
            annotations.write(context.connection, ref, context.checkpoints.waiting(tag))
            context.log(f"{tag.name} is off; its last checkpoint stays on the server")
        else:
            power.destroy(context.connection, ref, context.place.datacenter)
    except Gone:
        return


def _number(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0
