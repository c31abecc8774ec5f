"""Starts, finds and kills VMs by vmrun."""

import os
import uuid as uuids

from vmgahp import errors
from vmgahp.checkpoint.files import Unusable
from vmgahp.drivers.base import Driver, Machine, Survey
from vmgahp.drivers.vmrun import faults, processes, tool, working_copy
from vmgahp.drivers.vmrun.checkpoint import VmrunCheckpoints, VmrunRestart, state_files
from vmgahp.drivers.vmrun.machine import VmrunMachine
from vmgahp.drivers.vmrun.tool import Tool, VmrunError, find_product
from vmgahp.drivers.vmrun.working_copy import WorkingCopy
from vmgahp.host.job_user import Identity
from vmgahp.job.ad import JobAd
from vmgahp.job.vmware import SNAPSHOT_DISK, WORKING_COPY_SUFFIX, VmwareSpec, read_vmx

SNAPSHOT = "condor"
"""The name of the snapshot whose disks the guest writes to."""


class VmrunDriver(Driver):
    """VM types vmware and vmrun: VMware Workstation, Player or Fusion on this machine."""

    # The contract

    def start(self, job: JobAd) -> Machine:
        spec = VmwareSpec.from_ad(job, self.settings, self.identity)
        # VMware has trouble with a .vmx whose path has a symbolic link in it.
        directory = os.path.realpath(spec.working_dir)
        vmrun = self._tool(directory)
        self._clear_leftovers(vmrun, directory, spec.name)
        checkpoints = VmrunCheckpoints(self.identity, directory, self.log)
        restart = checkpoints.find(spec, working_copy.name_for(spec.vmx_file))
        if restart is not None:
            try:
                machine = self._launch(spec, vmrun, checkpoints, restart)
            except Unusable as unusable:
                checkpoints.refuse(spec, unusable)
            else:
                checkpoints.discard()
                return machine
        return self._launch(spec, vmrun, checkpoints, None)

    def describe(self, job: JobAd) -> str:
        spec = VmwareSpec.from_ad(job, self.settings, self.identity)
        directory = os.path.realpath(spec.working_dir)
        source = spec.read_vmx(self.identity)
        copy = working_copy.build(source, spec, directory, "", self.settings, self.identity, dry=True)
        return copy.encode().decode()

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

    # A start

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

    def _clear_leftovers(self, vmrun: Tool, directory: str, name: str) -> None:
        """Destroy what an earlier server left behind, in this directory or under the name of this job."""
        seconds, uid = self._seconds(), self.identity.uid
        try:
            found = {os.path.realpath(vmx) for vmx in tool.running(vmrun.run("list", seconds=seconds))}
        except VmrunError as error:
            raise faults.from_vmrun(error, "looking for leftover VMs") from error
        found |= {process.vmx for process in processes.all_of(uid)}
        for vmx in sorted(found):
            if not vmx.endswith(WORKING_COPY_SUFFIX):
                continue
            place = os.path.dirname(vmx)
            if place == directory or self._value_of(place, vmx, "displayName", self.identity) == name:
                self.log(f"{vmx} still runs from an earlier start: destroying it")
                processes.end(vmrun, vmx, uid, seconds, self.log)

    def _launch(
        self, spec: VmwareSpec, vmrun: Tool, checkpoints: VmrunCheckpoints, restart: VmrunRestart | None
    ) -> VmrunMachine:
        """Boot the job's guest, or restore its checkpoint; on any exception nothing of it is left.

        Raises `errors.Fault`, and `Unusable` where it is the checkpoint that does not work.
        """
        copy = self._working_copy(spec, checkpoints, restart)
        machine = VmrunMachine(spec, vmrun, checkpoints, copy.name, self.deadlines(self._seconds()), self.log)
        machine.uuid = copy.vmx[working_copy.UUID]
        if restart:
            machine.cpu_before = restart.manifest.cpu_seconds
        else:
            checkpoints.forget(*state_files(checkpoints.directory, copy.name))
        before = set(os.listdir(checkpoints.directory))
        try:
            machine.resources.guardian = self.post_guardian(spec.working_dir, machine.uuid)
            self._write(checkpoints.directory, copy)
            if spec.snapshot_disk and not restart:
                self._take_snapshot(machine, vmrun, copy)
            self._power_on(machine, spec, copy, restart)
        except OSError as error:
            self._undo(machine, checkpoints, before)
            raise errors.MachineFault(f"The machine is out of resources: {error}.") from error
        except BaseException:
            self._undo(machine, checkpoints, before)
            raise
        if spec.checkpoint:
            machine.write_manifest = lambda saved: self._write_manifest(saved, checkpoints, copy)
        self.record_end(machine.resources, spec.name, checkpoints.directory, machine.cpu_seconds, spec.no_output_vm)
        self.log(f"started {spec.name} ({machine.uuid}) by vmrun -T {vmrun.product}")
        return machine

    def _working_copy(
        self, spec: VmwareSpec, checkpoints: VmrunCheckpoints, restart: VmrunRestart | None
    ) -> WorkingCopy:
        source = spec.read_vmx(self.identity)
        directory = checkpoints.directory
        uuid = str(uuids.uuid4())
        copy = working_copy.build(source, spec, directory, uuid, self.settings, self.identity)
        if restart is None:
            return copy
        try:
            return working_copy.restored(copy, restart.saved, restart.manifest.state, spec, directory, self.identity)
        except errors.JobFault as fault:
            raise Unusable(fault.problem, True) from fault

    def _write(self, directory: str, copy: WorkingCopy) -> None:
        try:
            self.identity.write_scratch(directory, copy.name, copy.encode())
        except OSError as error:
            raise errors.MachineFault(
                f"{copy.name} cannot be written in {directory} as uid {self.identity.uid}: {error.strerror}.",
                "see that the job's user can write to its scratch directory, and that there is room.",
            ) from error

    def _take_snapshot(self, machine: VmrunMachine, vmrun: Tool, copy: WorkingCopy) -> None:
        """Give the guest disks of its own over the job's, and make sure that it has them."""
        try:
            vmrun.run("snapshot", machine.vmx, SNAPSHOT, seconds=self.deadlines(self._seconds()).memory)
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

    def _power_on(
        self, machine: VmrunMachine, spec: VmwareSpec, copy: WorkingCopy, restart: VmrunRestart | None
    ) -> None:
        doing = f"{'resuming' if restart else 'starting'} {spec.name}"
        try:
            machine.start()
        except VmrunError as error:
            fault = faults.from_vmrun(error, doing, [machine.vmx, *_paths(copy)])
            if isinstance(fault, errors.ClientFault):  # the VM was made a moment ago
                fault = errors.HypervisorFault(fault.problem, "see who changes the job's scratch directory.")
            # Where the machine is unfit the checkpoint stays, for another machine or a better day.
            if restart and type(fault) is not errors.MachineFault:
                raise Unusable(fault.problem, True) from error
            raise fault from error

    def _undo(self, machine: VmrunMachine, checkpoints: VmrunCheckpoints, before: set[str]) -> None:
        """Nothing of a start that failed is left: no VM, no file."""
        try:
            machine.destroy()
        except errors.Fault as fault:
            self.log(f"a start failed, and its VM cannot be cleared: {fault.problem}")
        else:
            made = set(os.listdir(checkpoints.directory)) - before
            checkpoints.forget(*sorted(name for name in made if not name.endswith((".lck", ".log"))))

    def _write_manifest(self, machine: VmrunMachine, checkpoints: VmrunCheckpoints, copy: WorkingCopy) -> None:
        """Write down what the suspended VM consists of, with the disks that it has now."""
        saved = machine.current()
        now = working_copy.restored(copy, saved, machine.saved_in, machine.spec, checkpoints.directory, self.identity)
        checkpoints.write(
            machine.spec, machine.vmx_name, machine.uuid, machine.saved_in, machine.cpu_before, now.disks.values()
        )

    def _value_of(self, directory: str, vmx: str, name: str, user: Identity) -> str:
        """A value of a ``.vmx``, read as a user; empty where it cannot be read."""
        try:
            return read_vmx(user, directory, os.path.basename(vmx)).get(name, "")
        except errors.Fault:
            return ""


def _paths(copy: WorkingCopy) -> list[str]:
    """What the job chose, in an error of vmrun's."""
    return [name for layers in copy.disks.values() for layer in layers for name in layer.files]
