"""One VM on a vSphere server, as the daemon sees it.

A guest that powers itself off leaves its VM behind, with the disks that the job is about. So the first STATUS that
finds it off has the disks downloaded, and the VM counts as running until then: the starter ends the job, and sends its
files away, as soon as it hears of a VM that has stopped. Should a download fail, that STATUS fails, and the next one
has it done again; the starter gives up after some of these and runs the job again.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from pyVmomi import vim

from vmgahp import errors, lifecycle
from vmgahp.checkpoint.manifest import Manifest
from vmgahp.drivers.base import Deadlines
from vmgahp.drivers.lifecycle import ManagedMachine
from vmgahp.drivers.resources import Resources
from vmgahp.drivers.vsphere.connection import Gone
from vmgahp.drivers.vsphere.transport import Transport, VsphereContext, VspherePlan
from vmgahp.drivers.vsphere.vm import OFF, ON, RUNS, SAVED, SUSPENDED, Tag, VsphereVm, find_tagged, this_host
from vmgahp.metrics import Status, Usage

FIGURES = ("runtime.powerState", "summary.quickStats", "summary.runtime.maxCpuUsage", "guest.ipAddress")

MIB_IN_KIB = 1024

POLL = 0.5
"""Seconds between two queries of a guest that was asked to shut down."""


class VsphereMachine(ManagedMachine):
    """A VM that this daemon creates, or takes up from a checkpoint."""

    vm: VsphereVm
    """The VM, once the start has made or found it."""

    def __init__(
        self, plan: VspherePlan, tag: Tag, context: VsphereContext, resources: Resources, deadlines: Deadlines
    ) -> None:
        super().__init__(plan.spec.name, resources, deadlines, context.log)
        self.uuid = tag.id
        if plan.spec.checkpoint:
            self.no_checkpoint = ""
        self.tag = tag
        self.context = context
        self.transport = Transport(plan, context)
        self._spec = plan.spec
        self._snapshot = ""
        """The snapshot with the guest's memory; empty if a suspended VM has it, or if there is none."""
        self._raw_seconds = 0.0
        """The CPU time of the guest here in seconds, an estimate.

        The server gives a mean load of the last seconds, in MHz of what the VM may have, and that is added up from
        STATUS to STATUS.
        """
        self._looked: float | None = None
        spec = plan.spec
        self._last = Status(lifecycle.RUNNING, vcpus=spec.vcpus, max_memory_kib=spec.memory_mib * MIB_IN_KIB)
        self._download: Future[None] | None = None
        """The download of the disks and the removal of the VM, under way or over."""
        self._mac = ""

    # What the server asks

    def pid(self) -> int:
        return 0  # the guest runs on another machine

    def cpu_seconds(self) -> float:
        """Return the CPU time of the guest at the last STATUS, in seconds."""
        return self.usage.seconds

    # The life

    def look(self) -> Status:
        if self._download is not None:
            if not self._download.done():
                return self._last
            self._wait_for_download()
            return Status(lifecycle.STOPPED)
        if self.transport.fetched:  # the VM could not be removed
            return self._begin_download()
        try:
            seen = self.context.connection.properties(self.vm.ref, *FIGURES)
        except Gone as gone:
            # A guest that powers off leaves its VM; a VM that is gone was removed by others, with the job's disks.
            raise errors.HypervisorFault(
                f"The VM of {self.name} is not on the server any more, and its disks are lost.",
                "see who has removed it; the job has to run again.",
            ) from gone
        if seen.get("runtime.powerState") == OFF:
            self.log(f"{self.name}: the guest has powered off")
            return self._begin_download()
        if seen.get("runtime.powerState") == SUSPENDED:
            self._looked = None
            return Status(lifecycle.SUSPENDED)
        self._last = self._figures(seen)
        return self._last

    def look_at_saved(self) -> None:
        try:
            there = self._snapshot in self.vm.snapshots() if self._snapshot else self.vm.power_state() != OFF
        except Gone:
            there = False
        if not there:
            raise self.report_lost(
                f"The memory of {self.name} is not on the server any more.",
                "see who has powered the VM off or removed it; the job has to run again.",
            )

    def ask_to_power_off(self) -> None:
        if self._download is not None or not self.vm.ask_to_shut_down():
            raise errors.HypervisorFault("VMware Tools do not run in it.")

    def wait_until_off(self, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while on := self.vm.power_state() == ON:
            if self.overruled or time.monotonic() >= end:
                break
            time.sleep(POLL)
        return not on

    def collect_output(self) -> None:
        if self._download is not None and self._download.done() and self._download.exception():
            self._download = None  # it has failed: try again
        try:
            if self._download is None:
                self.vm.power(OFF, f"powering {self.name} off")
                self._begin_download()
            self._wait_for_download()
        except Gone:
            self.log(f"the VM of {self.name} is not on the server any more, and its disks are lost")

    def interrupt(self) -> None:
        """Stop transfers; a task of the server's cannot be interrupted, and a VM not removed during one."""
        self.context.store.aborted.set()

    def end_guest(self) -> None:
        self.context.store.aborted.set()
        if self.state is lifecycle.STARTING:
            for vm, tag in find_tagged(self.context.connection, self.context.place.folder):
                if (tag.id, tag.host) == (self.tag.id, self.tag.host):
                    retire(self.context, vm, tag)
            return
        if self._download is not None:
            try:
                self._wait_for_download()
                return
            except errors.Fault as fault:
                self.log(f"{self.name}: {fault.problem}")
        if not (self.state is lifecycle.CHECKPOINTED and self.tag.state == SAVED):
            retire(self.context, self.vm, self.tag)

    def unpause(self) -> None:
        """Resume a VM that was suspended by others."""
        self._must_not_be_off("resumed")
        self.vm.power(ON, f"resuming {self.name}")

    def save(self, operation: str) -> None:
        if operation == lifecycle.CHECKPOINT:
            self._must_not_be_off("checkpointed")
            self._take_snapshot()
        else:
            self._must_run("suspended")
            self.vm.power(SUSPENDED, f"suspending {self.name}")
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
            self.vm.power(SUSPENDED, f"suspending {self.name} again")
            raise

    def write_manifest(self) -> None:
        checkpoints, access = self.context.checkpoints, self.context.connection.access
        facts = {"id": self.uuid, "snapshot": self._snapshot, "server": str(access)}
        try:
            checkpoints.write(self._spec, facts, self.usage.seconds)
            self._retag(checkpoints.waiting(self.tag._replace(checkpoint=self._snapshot)))
        except errors.Fault:
            self._discard_manifest()
            raise
        self.log(f"{self.name} is checkpointed, in the snapshot {self._snapshot} on the server")

    def restore(self, before_it_runs: Callable[[], None]) -> None:
        before_it_runs()
        if not self._snapshot:
            self.unpause()
            return
        try:
            self._retag(self.tag._replace(state=RUNS, directory=self._spec.working_dir, host=this_host()))
            self.vm.go_back_to(self._snapshot, self.name)
        except errors.Fault:
            self._put_away()
            raise
        self.log(f"{self.name} is restored from its checkpoint")

    def forget_saved(self) -> None:
        """Keep the last checkpoint with a manifest, which is in the job's spool directory; remove the others."""
        if self._snapshot and self.state is lifecycle.RUNNING:
            self.vm.forget_snapshots(self.tag.checkpoint, self.log)
        self._snapshot = ""

    # What the driver asks

    def take_up(self, manifest: Manifest) -> None:
        """Restore the guest of a checkpoint. On a failure the checkpoint stays, for a later try or another machine."""
        snapshot = manifest.facts["snapshot"]
        self._retag(self.tag._replace(checkpoint=snapshot))
        self.vm.power(OFF, f"powering {self.name} off")
        self.vm.go_back_to(snapshot, self.name)
        self.usage = Usage(manifest.cpu_seconds)
        self.log(f"{self.name} is restored from its checkpoint {snapshot}")

    def find_mac(self) -> None:
        """Query the address of the first NIC, which later STATUSes do not query again. Raises `errors.Fault`."""
        devices = self.context.connection.get(self.vm.ref, "config.hardware.device") or ()
        nics = (device for device in devices if isinstance(device, vim.vm.device.VirtualEthernetCard))
        self._mac = next((str(nic.macAddress or "").lower() for nic in nics), "")

    # What helps

    def _begin_download(self) -> Status:
        if not self.overruled:
            self._download = _in_thread(self._bring_home)
        return self._last

    def _bring_home(self) -> None:
        if not (self.transport.fetched or self._spec.no_output_vm):
            self.transport.fetch(self.vm)
            self.log(f"{self.name}: its disks are downloaded")
        self.vm.destroy(self.context.place.datacenter)
        self._discard_manifest()

    def _wait_for_download(self) -> None:
        """Wait until the VM's disks are here, and the VM is gone. Raises `errors.Fault`; the next call retries."""
        if self._download is None:
            return
        try:
            self._download.result()
        except errors.Fault:
            self._download = None
            raise

    def _discard_manifest(self) -> None:
        self.context.checkpoints.store(self._spec.working_dir).discard()

    def _take_snapshot(self) -> None:
        """Take a snapshot with the guest's memory, and power the VM off; on any exception the guest runs."""
        if self.vm.power_state() == SUSPENDED:
            # Only a running guest's memory is included in a snapshot.
            self.vm.power(ON, f"resuming {self.name} for its checkpoint")
        self._snapshot = self.vm.take_snapshot(self.name)
        try:
            self.vm.power(OFF, f"saving {self.name}")
        except errors.Fault:
            self.vm.go_back_to(self._snapshot, self.name)
            self._snapshot = ""
            raise

    def _put_away(self) -> None:
        """Power off a VM whose guest has not continued, and mark it again as a checkpoint if it was one.

        Errors are logged.
        """
        try:
            self.vm.power(OFF, f"powering {self.name} off")
            if self.state is lifecycle.CHECKPOINTED:
                self._retag(self.context.checkpoints.waiting(self.tag))
        except errors.Fault as fault:
            self.log(f"{self.name} cannot be put away: {fault.problem}")

    def _must_run(self, what: str) -> None:
        if self._download is not None:
            raise errors.ClientFault(
                errors.VM_INVALID_OPERATION,
                f"{self.name} cannot be {what}: its guest has powered off, and its disks are being downloaded.",
            )

    def _must_not_be_off(self, what: str) -> None:
        """Refuse a VM that is off: a power-on would boot it anew. Its next STATUS downloads its disks."""
        self._must_run(what)
        if self.vm.power_state() == OFF:
            raise errors.ClientFault(errors.VM_INVALID_OPERATION, f"{self.name} cannot be {what}: it is switched off.")

    def _retag(self, tag: Tag) -> None:
        self.vm.retag(tag)
        self.tag = tag

    def _figures(self, seen: dict[str, Any]) -> Status:
        stats = seen.get("summary.quickStats")
        most = seen.get("summary.runtime.maxCpuUsage") or 0
        now = time.monotonic()
        if self._looked is not None and most:
            load = min(1.0, (getattr(stats, "overallCpuUsage", 0) or 0) / most)
            self._raw_seconds += load * self._spec.vcpus * (now - self._looked)
        self._looked = now
        return Status(
            lifecycle.RUNNING,
            cpu_seconds=self.usage.read(self._raw_seconds),
            vcpus=self._spec.vcpus,
            memory_kib=(getattr(stats, "hostMemoryUsage", 0) or 0) * MIB_IN_KIB,
            max_memory_kib=self._spec.memory_mib * MIB_IN_KIB,
            mac=self._mac,
            ip=str(seen.get("guest.ipAddress") or ""),
        )


def _in_thread(work: Callable[[], None]) -> Future[None]:
    """Begin a download in a thread of its own; the future raises nothing but `errors.Fault`."""
    future: Future[None] = Future()

    def run() -> None:
        try:
            work()
            future.set_result(None)
        except errors.Fault as fault:
            future.set_exception(fault)
        except Exception as error:  # noqa: BLE001 - a bug here must not look like a VM that runs for ever
            problem = f"The disks cannot be downloaded: {error!r}."
            future.set_exception(errors.HypervisorFault(problem, "report it as a bug."))

    threading.Thread(target=run, name="download", daemon=True).start()
    return future


def retire(context: VsphereContext, vm: VsphereVm, tag: Tag) -> None:
    """End a VM at once. One with a checkpoint is kept as that, powered off; any other is removed.

    The job may have continued without its disks, but its spool directory still has the manifest of its last
    checkpoint. Raises `errors.Fault`.
    """
    if not tag.checkpoint:
        vm.destroy(context.place.datacenter)
        return
    try:
        vm.power(OFF, f"powering {tag.name} off")
        vm.retag(context.checkpoints.waiting(tag))
        context.log(f"{tag.name} is off; its last checkpoint stays on the server")
    except Gone:
        return
