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
from vmgahp.drivers.base import Logger, Machine
from vmgahp.drivers.resources import Resources
from vmgahp.drivers.vsphere import annotations, faults, power
from vmgahp.drivers.vsphere.annotations import Tag
from vmgahp.drivers.vsphere.checkpoint import VsphereCheckpoints
from vmgahp.drivers.vsphere.connection import Gone, VsphereConnection
from vmgahp.drivers.vsphere.datastore import Store
from vmgahp.drivers.vsphere.download import Download
from vmgahp.host import threads
from vmgahp.job.exit_code import DESTROYED
from vmgahp.job.vmware import VmwareSpec
from vmgahp.metrics import Status

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


class VsphereContext(NamedTuple):
    """What a machine works with."""

    connection: VsphereConnection
    store: Store
    checkpoints: VsphereCheckpoints
    datacenter: "vim.Datacenter"
    stop_timeout: float
    resources: Resources
    log: Logger
    download: Download | None = None


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


class VsphereMachine(Machine):
    """A VM that this daemon created, or took up from a checkpoint."""

    def __init__(self, ref: "vim.VirtualMachine", tag: Tag, spec: VmwareSpec, context: VsphereContext) -> None:
        self.name = tag.name
        self.uuid = tag.id
        self.cpu_seconds = 0.0
        """Seconds of CPU that the guest has used, as far as can be told: the server gives a mean load of the
        last seconds, in MHz of what the VM may have, and that is added up from STATUS to STATUS."""
        self._ref = ref
        self._tag = tag
        self._spec = spec
        self._context = context
        self._connection = context.connection
        self._log = context.log
        self._mac = ""
        self._looked: float | None = None
        self._last = Status(lifecycle.RUNNING, vcpus=spec.vcpus, max_memory_kib=spec.memory_mib * MIB_IN_KIB)
        self._fetch: _Fetch | None = None
        self._saved = False
        """The guest is in a checkpoint, and its VM is off."""
        self._question = ""
        self._downloaded = False
        """The disks are downloaded, although the VM may not have been removed yet."""
        self._over = False

    # What the server asks

    def status(self) -> Status:
        if self._over:
            return Status(lifecycle.STOPPED)
        if self._saved:
            return Status(lifecycle.SUSPENDED)
        if self._fetch is not None:
            return self._downloading()
        if self._downloaded:
            self._fetch = _Fetch(self._download, self.name)
            return self._last
        try:
            with faults.explained(f"asking for the status of {self.name}"):
                seen = self._connection.properties(self._ref, *FIGURES)
        except Gone as gone:
            # A guest that powers off leaves its VM; one that is gone was removed, and the job's disks with it.
            raise errors.HypervisorFault(
                f"The VM of {self.name} is not on the server any more, and its disks are lost.",
                "see who has removed it; the job has to run again.",
            ) from gone
        state = str(seen.get("runtime.powerState"))
        if state == power.OFF:
            self._log(f"{self.name}: the guest has powered off")
            self._fetch = _Fetch(self._download, self.name)
            return self._last
        if state == power.SUSPENDED:
            self._looked = None
            return Status(lifecycle.SUSPENDED)
        self._note_question(seen.get("runtime.question"))
        self._last = self._figures(seen)
        return self._last

    def pid(self) -> int:
        return 0  # the guest runs on another machine

    def stop(self) -> None:
        self._context.resources.to_be_stopped()
        if not (self._over or self._saved):
            if self._fetch is not None and self._fetch.ended and self._fetch.fault is not None:
                self._fetch = None  # it failed before, and nobody has asked since
            try:
                if self._fetch is None:
                    power.shut_down(self._connection, self._ref, self._context.stop_timeout, self._log)
                    self._context.resources.ended(DESTROYED)
                    self._fetch = _Fetch(self._download, self.name)
                self._fetch.wait()
            except Gone:
                self._log(f"the VM of {self.name} is not on the server any more, and its disks are lost")
                self._over = True
            except errors.Fault:
                self._fetch = None  # told now; whoever asks next has it done again
                raise
        self.release()

    def destroy(self) -> None:
        self._context.store.aborted.set()
        if self._fetch is None:
            self._context.resources.ended(DESTROYED)
        if self._fetch is not None:
            try:
                self._fetch.wait()
            except errors.Fault as fault:
                self._log(f"{self.name}: {fault.problem}")
        if not (self._over or self._saved):
            retire(self._context, self._ref, self._tag)
            self._over = True
        self.release()

    def release(self) -> None:
        if self._context.resources.begin_release():
            self._context.resources.release(kept=self._saved)

    def suspend(self) -> None:
        self._must_run("suspended")
        power.suspend(self._connection, self._ref, f"suspending {self.name}")
        self._looked = None
        self._log(f"{self.name} is suspended, its memory is on the datastore")

    def resume(self, state: str) -> None:
        if not self._saved:
            self._must_run("resumed")
            self._must_not_be_off("resumed")
            power.on(self._connection, self._ref, f"resuming {self.name}")
            return
        snapshot = self._tag.checkpoint
        self._retag(
            self._tag._replace(state=annotations.RUNS, directory=self._spec.working_dir, host=annotations.this_host())
        )
        self._context.checkpoints.go_on(self._ref, snapshot, self.name)
        self._saved = False
        self._context.checkpoints.forget_others(self._ref, snapshot)
        self._log(f"{self.name} is restored from its checkpoint")

    def checkpoint(self) -> None:
        if not self._spec.checkpoint:
            raise errors.ClientFault(
                errors.VM_NO_SUPPORT_CHECKPOINT,
                f"{self.name} cannot be checkpointed: the job does not ask for it with vm_checkpoint.",
            )
        self._must_run("checkpointed")
        self._must_not_be_off("checkpointed")
        checkpoints = self._context.checkpoints
        if power.state(self._connection, self._ref) == power.SUSPENDED:
            # The memory that is in a snapshot is that of a guest which runs.
            power.on(self._connection, self._ref, f"resuming {self.name} for its checkpoint")
        snapshot = checkpoints.make(self._ref, self.name)
        before = self._tag
        try:
            power.off(self._connection, self._ref, f"saving {self.name}")
            checkpoints.write(self._spec, self.uuid, snapshot, self.cpu_seconds)
            self._retag(checkpoints.waiting(self._tag._replace(checkpoint=snapshot)))
        except errors.Fault:
            self._tag = before
            checkpoints.used_up(self._spec.working_dir)
            checkpoints.go_on(self._ref, snapshot, self.name)
            raise
        self._saved = True
        self._looked = None
        self._log(f"{self.name} is checkpointed, in the snapshot {snapshot} on the server")

    # What helps

    def find_mac(self) -> None:
        """Find out the address of the first NIC, which no STATUS asks for again. Raises `errors.Fault`."""
        path = "config.hardware.device"
        with faults.explained(f"looking at the NIC of {self.name}"):
            found = self._connection.properties(self._ref, path).get(path)
        for device in found or ():
            if isinstance(device, vim.vm.device.VirtualEthernetCard):
                self._mac = str(device.macAddress or "").lower()
                return

    def _download(self) -> None:
        if not (self._downloaded or self._spec.no_output_vm) and self._context.download is not None:
            self._context.download.run(self._ref)
            self._log(f"{self.name}: its disks are downloaded")
        self._downloaded = True
        power.destroy(self._connection, self._ref, self._context.datacenter)
        self._context.checkpoints.used_up(self._spec.working_dir)
        self._over = True

    def _downloading(self) -> Status:
        assert self._fetch is not None
        if not self._fetch.ended:
            return self._last
        fetch, self._fetch = self._fetch, None
        fetch.wait()
        return Status(lifecycle.STOPPED)

    def _must_run(self, what: str) -> None:
        if self._over or self._fetch is not None:
            raise errors.ClientFault(
                errors.VM_INVALID_OPERATION,
                f"{self.name} cannot be {what}: its guest has powered off, and its disks are being downloaded.",
            )

    def _must_not_be_off(self, what: str) -> None:
        """To power a VM on that is off would boot it anew. Its next STATUS has its disks downloaded."""
        if power.state(self._connection, self._ref) == power.OFF:
            raise errors.ClientFault(errors.VM_INVALID_OPERATION, f"{self.name} cannot be {what}: it is switched off.")

    def _retag(self, tag: Tag) -> None:
        annotations.write(self._connection, self._ref, tag)
        self._tag = tag

    def _note_question(self, question: object) -> None:
        text = str(getattr(question, "text", "") or "")
        if text and text != self._question:
            self._log(f"{self.name} waits for an answer to a question of vSphere: {text[:500]}")
        self._question = text

    def _figures(self, seen: dict[str, object]) -> Status:
        stats = seen.get("summary.quickStats")
        vcpus = _number(seen.get("config.hardware.numCPU")) or self._spec.vcpus
        most = _number(seen.get("summary.runtime.maxCpuUsage"))
        now = time.monotonic()
        if self._looked is not None and most > 0:
            load = min(1.0, _number(getattr(stats, "overallCpuUsage", 0)) / most)
            self.cpu_seconds += load * vcpus * (now - self._looked)
        self._looked = now
        return Status(
            lifecycle.RUNNING,
            cpu_seconds=self.cpu_seconds,
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
            power.destroy(context.connection, ref, context.datacenter)
    except Gone:
        return


def _number(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0
