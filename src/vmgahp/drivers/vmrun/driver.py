"""Starts, finds and kills VMs by vmrun."""

import os
import uuid as uuids
from collections.abc import Callable

from vmgahp import errors
from vmgahp.checkpoint.files import Unusable
from vmgahp.drivers.base import Survey
from vmgahp.drivers.lifecycle import reached
from vmgahp.drivers.managed import ManagedDriver
from vmgahp.drivers.resources import Resources
from vmgahp.drivers.vmrun import faults, processes, tool, working_copy
from vmgahp.drivers.vmrun.checkpoint import VmrunCheckpoints, VmrunRestart, state_files
from vmgahp.drivers.vmrun.machine import VmrunMachine, VmrunPlan
from vmgahp.drivers.vmrun.tool import Tool, VmrunError, find_product
from vmgahp.drivers.vmrun.working_copy import WorkingCopy
from vmgahp.host import execute
from vmgahp.host.job_user import Identity
from vmgahp.host.runtime_dir import is_claimed
from vmgahp.job.ad import JobAd
from vmgahp.job.vmware import SNAPSHOT_DISK, WORKING_COPY_SUFFIX, VmwareSpec, look, read_vmx

SNAPSHOT = "condor"
"""The name of the snapshot whose disks the guest writes to."""


class VmrunDriver(ManagedDriver[VmrunPlan, VmrunMachine]):
    """VM types vmware and vmrun: VMware Workstation, Player or Fusion on this machine."""

    # A start

    def plan(self, job: JobAd) -> VmrunPlan:
        spec = look(VmwareSpec.parse(job, self.settings), self.settings, self.identity)
        # VMware has trouble with a .vmx whose path has a symbolic link in it.
        directory = os.path.realpath(spec.working_dir)
        vmrun = self._tool(directory)
        copy = working_copy.build(spec.vmx, spec, directory, str(uuids.uuid4()), self.settings, self.identity)
        for text in copy.left_out:
            self.log(f"{spec.name} is without {text}")
        checkpoints = VmrunCheckpoints(self.identity, directory, self.log)
        plan = VmrunPlan(spec, directory, vmrun, copy, checkpoints)
        try:
            restart = checkpoints.find(spec, copy.name)
            if restart is None:
                return plan
            return plan._replace(copy=self._restored(plan, restart), fresh=copy, restart=restart)
        except Unusable as unusable:
            return plan._replace(unusable=unusable)

    def show(self, plan: VmrunPlan) -> str:
        return plan.copy.encode().decode()

    def clear(self, plan: VmrunPlan) -> None:
        for vmx in self._leftovers(plan):
            self.log(f"{vmx} still runs from an earlier start: destroying it")
            processes.end(plan.vmrun, vmx, self.identity.uid, self._seconds(), self.log)
        plan.checkpoints.store.forget_interrupted()
        if plan.restart is None and plan.unusable is None:
            plan.checkpoints.forget(*state_files(plan.directory, plan.copy.name))

    def prepare(self, plan: VmrunPlan, resources: Resources) -> VmrunMachine:
        if plan.unusable is not None:
            raise plan.unusable
        machine = VmrunMachine(plan, resources, self.deadlines(self._seconds()), self.log)
        self.claim(resources, plan.spec.working_dir, machine.uuid)
        reached("prepare.guarded")
        plan.copy.correct_parents(plan.directory, self.identity)
        return machine

    def launch(self, machine: VmrunMachine, plan: VmrunPlan) -> None:
        """VMware starts a guest and resumes one in the same way: it runs at once."""
        self._write(plan.directory, plan.copy)
        if plan.restart is not None:
            machine.set_aside()
        elif plan.spec.snapshot_disk:
            self._take_snapshot(machine, plan)
        self._power_on(machine, plan)
        if plan.restart is not None:
            plan.checkpoints.store.discard()

    def keep(self, machine: VmrunMachine, plan: VmrunPlan) -> None:
        spec = plan.spec
        self.record_end(machine.resources, spec.name, plan.directory, machine.cpu_seconds, spec.sent)
        self.log(f"started {spec.name} ({machine.uuid}) by vmrun -T {plan.vmrun.product}")

    def without_checkpoint(self, plan: VmrunPlan, unusable: Unusable) -> tuple[VmrunPlan, Callable[[], None]]:
        take_back = plan.checkpoints.refuse(plan.spec, unusable)
        return plan._replace(copy=plan.fresh or plan.copy, fresh=None, restart=None, unusable=None), take_back

    # The contract

    def kill(self, match: str, uuid: str = "") -> bool:
        directory = os.path.realpath(match)
        # The startd names its own user instead of the job's.
        owner = Identity.of_owner(directory) or self.identity
        if not os.path.exists(directory) and os.geteuid() == 0 and (running := processes.inside(directory)):
            owner = Identity(running[0].uid, running[0].uid)
        found = {process.vmx for process in processes.inside(directory, owner.uid)}
        vmrun = Tool(tool.find(self.settings), "", owner, directory, self.log)
        try:
            vmrun.product = find_product(vmrun, self.settings, self._seconds())
            listed = tool.running(vmrun.run("list", seconds=self._seconds()))
            found |= {vmx for vmx in map(os.path.realpath, listed) if os.path.dirname(vmx) == directory}
        except (VmrunError, errors.MachineFault) as error:
            if not found:
                if isinstance(error, VmrunError):
                    raise faults.from_vmrun(error, f"looking for the VM in {match}") from error
                raise
            self.log(f"{error}; the processes of {match} are ended all the same")
        killed = False
        for vmx in sorted(found):
            if uuid and self._value_of(directory, vmx, working_copy.UUID, owner) not in ("", uuid):
                continue
            killed = processes.end(vmrun, vmx, owner.uid, self._seconds(), self.log) or killed
        return killed

    def survey(self, end: float) -> Survey:
        from vmgahp.drivers.vmrun.survey import VmrunSurveyor

        return VmrunSurveyor(self.vm_type, self.settings, self.identity, self.log).survey(end)

    # How it is done

    def _seconds(self) -> float:
        return self.settings.timeout(10, "VMWARE_TIMEOUT")

    def _tool(self, home: str) -> Tool:
        """vmrun for the job's user, with the scratch directory for a home.

        The user may have no home, and what VMware keeps in one, such as the list of its VMs, is no business
        of other jobs of the same user.
        """
        vmrun = Tool(tool.find(self.settings), "", self.identity, home, self.log)
        vmrun.product = find_product(vmrun, self.settings, self._seconds())
        return vmrun

    def _leftovers(self, plan: VmrunPlan) -> list[str]:
        """What runs from an earlier start: all in this directory, and elsewhere this job's that nobody looks after.

        A job of the same name in another directory may be another pool's.
        """
        try:
            listed = plan.vmrun.run("list", seconds=self._seconds())
        except VmrunError as error:
            raise faults.from_vmrun(error, "looking for leftover VMs") from error
        found = {os.path.realpath(vmx) for vmx in tool.running(listed)}
        found |= {process.vmx for process in processes.all_of(self.identity.uid)}

        def is_ours(vmx: str) -> bool:
            place = os.path.dirname(vmx)
            if place == plan.directory:
                return True
            if self._value_of(place, vmx, "displayName", self.identity) != plan.spec.name:
                return False
            return not is_claimed(self._value_of(place, vmx, working_copy.UUID, self.identity))

        return sorted(vmx for vmx in found if vmx.endswith(WORKING_COPY_SUFFIX) and is_ours(vmx))

    def _restored(self, plan: VmrunPlan, restart: VmrunRestart) -> WorkingCopy:
        """Raises `Unusable`."""
        try:
            return working_copy.restored(
                plan.copy, restart.saved, restart.manifest.facts["state"], plan.spec, plan.directory, self.identity
            )
        except errors.JobFault as fault:
            raise Unusable(fault.problem, True) from fault

    def _write(self, directory: str, copy: WorkingCopy) -> None:
        try:
            self.identity.write_scratch(directory, copy.name, copy.encode())
        except OSError as error:
            raise execute.unwritable(copy.name, error, directory, self.identity) from error

    def _take_snapshot(self, machine: VmrunMachine, plan: VmrunPlan) -> None:
        """Give the guest disks of its own over the job's, and make sure that it has them."""
        vmrun, copy = plan.vmrun, plan.copy
        try:
            vmrun.run("snapshot", machine.vmx, SNAPSHOT, seconds=machine.deadlines.memory)
        except VmrunError as error:
            if faults.is_not_supported(error):
                raise errors.JobFault(
                    errors.MISMATCHED,
                    f"{SNAPSHOT_DISK} = true, and the VMware product of this machine ({vmrun.product}) makes no "
                    "snapshots.",
                    f"set vmware_snapshot_disk = False, or require VM_{self.vm_type}_ATTR_snapshot of the machine.",
                ) from error
            raise faults.from_vmrun(error, f"making a snapshot of {machine.name}", _paths(copy)) from error
        now = machine.current()
        for device, layers in copy.disks.items():
            independent = copy.vmx.get(f"{device}.mode", "").startswith("independent")
            if not independent and now.get(f"{device}.fileName") in (None, "", layers[0].path):
                raise errors.HypervisorFault(
                    f"vmrun says that it has made a snapshot of {machine.name}, and the guest would write to "
                    f"{layers[0].path} itself.",
                    "read vmware.log in the job's scratch directory.",
                )

    def _power_on(self, machine: VmrunMachine, plan: VmrunPlan) -> None:
        """Raises `errors.Fault`, and `Unusable` where it is the checkpoint that does not work."""
        doing = f"{'resuming' if plan.restart else 'starting'} {plan.spec.name}"
        try:
            machine.power_on()
        except VmrunError as error:
            fault = faults.from_vmrun(error, doing, [machine.vmx, *_paths(plan.copy)])
            if isinstance(fault, errors.ClientFault):  # the VM was made a moment ago
                fault = errors.HypervisorFault(fault.problem, "see who changes the job's scratch directory.")
            if plan.restart:
                raise Unusable(fault.problem, True) from error
            raise fault from error

    def _value_of(self, directory: str, vmx: str, name: str, user: Identity) -> str:
        """A value of a ``.vmx``, read as a user; empty where it cannot be read."""
        try:
            return read_vmx(user, directory, os.path.basename(vmx)).get(name, "")
        except errors.Fault:
            return ""


def _paths(copy: WorkingCopy) -> list[str]:
    """What the job chose, in an error of vmrun's."""
    return [name for layers in copy.disks.values() for layer in layers for name in layer.files]
