"""The driver for VMware's desktop products (Workstation, Player, Fusion), by vmrun."""

import os
import re
import shutil
import tempfile
import uuid as uuids
from collections.abc import Callable
from time import monotonic

from vmgahp import errors, findings
from vmgahp.checkpoint.store import CheckpointStore, Unusable
from vmgahp.config import Settings
from vmgahp.drivers.base import Survey
from vmgahp.drivers.managed import ManagedDriver, reached
from vmgahp.drivers.resources import Resources
from vmgahp.drivers.vmrun import tool, working_copy
from vmgahp.drivers.vmrun.machine import KIND, VmrunMachine, VmrunPlan
from vmgahp.drivers.vmrun.tool import Process, Tool, VmrunError, explained, from_vmrun, running_processes
from vmgahp.findings import BAD, OFF, OK, UNKNOWN, Finding
from vmgahp.host import job_user
from vmgahp.host.job_user import Identity
from vmgahp.host.runtime_dir import is_claimed
from vmgahp.job.ad import JobAd
from vmgahp.job.vmware import NETWORKING_TYPES, SNAPSHOT_DISK, WORKING_COPY_SUFFIX, VmwareSpec, look, read_vmx
from vmgahp.vm_types import VMRUN

INSTALLED = "/etc/vmware"

DEVICES = "/dev"
"""The directory with the devices of the kernel modules: vmmon, which every VM needs, and a vmnet for each network."""

NETWORKS = {"bridge": "vmnet0", "nat": "vmnet8"}

_VERSION = re.compile(r"vmrun version ([0-9.]+)")

SNAPSHOT = "condor"


class VmrunDriver(ManagedDriver[VmrunPlan, VmrunMachine]):
    """The driver of the VM types vmware and vmrun: VMware Workstation, Player or Fusion on this machine."""

    def plan(self, job: JobAd) -> VmrunPlan:
        spec = look(VmwareSpec.parse(job, self.settings), self.settings, self.identity)
        # VMware has trouble with a .vmx whose path has a symbolic link in it.
        directory = os.path.realpath(spec.vm.working_dir)
        vmrun = Tool(tool.find_tool(self.settings), "", self.identity, directory, self.log)
        with explained("asking which VMware product is installed"):
            vmrun.find_product(self.settings, self.settings.call_timeout())
        copy = working_copy.build(spec.vmx, spec, directory, str(uuids.uuid4()), self.settings, self.identity)
        for text in copy.left_out:
            self.log(f"{spec.vm.name} is without {text}")
        store = CheckpointStore(KIND, self.identity, directory, self.log)
        plan = VmrunPlan(spec, vmrun, directory, store, copy, copy)
        try:
            return plan.with_checkpoint()
        except Unusable as unusable:
            return plan._replace(unusable=unusable)

    def show(self, plan: VmrunPlan) -> str:
        return plan.copy.vmx.encode().decode()

    def clear(self, plan: VmrunPlan) -> None:
        for vmx in self._leftovers(plan):
            self.log(f"{vmx} still runs from an earlier start: destroying it")
            plan.vmrun.end(vmx, self.settings.call_timeout())
        plan.checkpoint.forget_interrupted()
        if plan.restart is None and plan.unusable is None:
            plan.forget(*plan.state_files())

    def prepare(self, plan: VmrunPlan, resources: Resources) -> VmrunMachine:
        if plan.unusable is not None:
            raise plan.unusable
        machine = VmrunMachine(plan, resources, self.deadlines(self.settings.call_timeout()), self.log)
        self.claim(resources, plan.spec.vm.working_dir, machine.uuid)
        reached("prepare.guarded")
        plan.copy.correct_parents(plan.directory, self.identity)
        return machine

    def launch(self, machine: VmrunMachine, plan: VmrunPlan) -> None:
        """Start or resume the guest; VMware does both in the same way, and it runs at once."""
        try:
            self.identity.write_scratch(plan.directory, plan.copy.name, plan.copy.vmx.encode())
        except OSError as error:
            raise job_user.unwritable(plan.copy.name, error, plan.directory, self.identity) from error
        if plan.restart is not None:
            machine.set_aside()
        elif plan.spec.snapshot_disk:
            self._take_snapshot(machine, plan)
        self._power_on(machine, plan)
        if plan.restart is not None:
            plan.checkpoint.discard()

    def keep(self, machine: VmrunMachine, plan: VmrunPlan) -> None:
        spec = plan.spec
        self.record_end(machine.resources, spec.vm.name, plan.directory, machine.cpu_seconds, spec.vm.sent)
        self.log(f"started {spec.vm.name} ({machine.uuid}) by vmrun -T {plan.vmrun.product}")

    def without_checkpoint(self, plan: VmrunPlan, unusable: Unusable) -> tuple[VmrunPlan, Callable[[], None]]:
        own, fresh_disks = plan.state_files(), plan.spec.snapshot_disk
        take_back = plan.checkpoint.refuse(plan.spec.vm.name, unusable, own, fresh_disks=fresh_disks)
        return plan._replace(copy=plan.fresh, restart=None, unusable=None), take_back

    def explain(self, job: JobAd, fault: errors.Fault) -> errors.Fault:
        """Hold the job for a vmrun that processes of its user can end or answer for, unless the machine is unfit."""
        cause = fault.__cause__
        is_said = isinstance(cause, VmrunError) and not isinstance(cause.__cause__, OSError)  # else it has not begun
        if not (is_said and isinstance(fault, errors.MachineFault) and self.identity.switching):
            return fault
        found = [_kernel_module()]
        if (condor := Identity.of_condor()) and condor.uid != self.identity.uid:
            prober = VmrunDriver(self.vm_type, self.settings, condor, self.log)
            found = list(prober.survey(monotonic() + self.settings.call_timeout()).findings)
        if bad := findings.first_bad(found):
            return errors.MachineFault(f"{fault.problem} {bad.seen}", bad.hint)
        hint = f"ask the administrator of this machine: {fault.hint or 'see its log.'}"
        return errors.JobFault(errors.MISMATCHED, fault.problem, hint)

    def kill(self, match: str, uuid: str = "") -> bool:
        directory, seconds = os.path.realpath(match), self.settings.call_timeout()

        def inside(uid: int | None = None) -> list[Process]:
            return [process for process in running_processes(uid) if os.path.dirname(process.vmx) == directory]

        # The startd names its own user instead of the job's.
        owner = Identity.of_owner(directory) or self.identity
        if not os.path.exists(directory) and os.geteuid() == 0 and (running := inside()):
            owner = Identity(running[0].uid, running[0].uid)
        found = {process.vmx for process in inside(owner.uid)}
        vmrun = Tool(tool.find_tool(self.settings), "", owner, directory, self.log)
        try:
            with explained(f"looking for the VM in {match}"):
                vmrun.find_product(self.settings, seconds)
                found |= {vmx for vmx in vmrun.running(seconds) if os.path.dirname(vmx) == directory}
        except errors.Fault as fault:
            if not found:
                raise
            self.log(f"{fault.problem} The processes of {match} are ended all the same")
        killed = False
        for vmx in sorted(found):
            if not uuid or self._value_of(vmx, working_copy.UUID_KEY, owner) in ("", uuid):
                killed = vmrun.end(vmx, seconds) or killed
        return killed

    def survey(self, end: float) -> Survey:
        settings, identity = self.settings, self.identity
        checked = "the vmrun of VMWARE_VMRUN or the PATH"
        try:
            path = tool.find_tool(settings)
            checked = f"{path} list, as uid {identity.uid}"
            home = tempfile.mkdtemp(prefix="vmgahp-vmrun-")
            try:
                if identity.switching:
                    os.chown(home, identity.uid, identity.gid)
                product, version = _ask(Tool(path, "", identity, home, self.log), settings, end)
            finally:  # a TemporaryDirectory changes modes, by names that processes of the user can make lead anywhere
                shutil.rmtree(home, ignore_errors=True)
        except errors.Fault as fault:
            return Survey([findings.judge("vmrun", checked, fault, "")])
        name = tool.PRODUCTS[product]
        found = [Finding("vmrun", OK, checked, f"vmrun {version or '?'} answers for VMware {name}")]
        able = product != "player"  # which has neither snapshots nor a pause
        seen = "this product makes snapshots" if able else "it makes no snapshots: jobs with snapshot disks do not run."
        hint = "" if able else "use VMware Workstation, or send only jobs with vmware_snapshot_disk = False here."
        found.append(Finding("snapshots", OK if able else OFF, f"VMware {name}", seen, hint))
        found.append(_kernel_module())
        networking = []
        for kind in settings.networking_types(NETWORKING_TYPES, own_bridge=True):
            device = os.path.join(DEVICES, NETWORKS[kind])
            if there := os.path.exists(device):
                networking.append(kind)
            said = (OK, device, "VMware's network is there") if there else (OFF, device, "VMware's network is missing.")
            found.append(Finding(f"network {kind}", *said, "" if there else "vmware-networks --start"))
        return Survey(
            found,
            attributes={
                "version": version,
                "product": product,
                "snapshot": able,
                "suspend": True,
                "soft_suspend": able,
                "checkpoint": True,
                "networking": ",".join(networking),
            },
            networking=networking,
            hypervisors=["vmware"],
            vm_types=list(dict.fromkeys((self.vm_type, *VMRUN))),
        )

    def _leftovers(self, plan: VmrunPlan) -> list[str]:
        """List leftover VMs: all in this directory, and this job's elsewhere that no server has claimed."""
        with explained("looking for leftover VMs"):
            found = plan.vmrun.running(self.settings.call_timeout())
        found |= {process.vmx for process in running_processes(self.identity.uid)}

        def is_ours(vmx: str) -> bool:
            if os.path.dirname(vmx) == plan.directory:
                return True
            if self._value_of(vmx, "displayName", self.identity) != plan.spec.vm.name:
                return False
            return not is_claimed(self._value_of(vmx, working_copy.UUID_KEY, self.identity))

        return sorted(vmx for vmx in found if vmx.endswith(WORKING_COPY_SUFFIX) and is_ours(vmx))

    def _take_snapshot(self, machine: VmrunMachine, plan: VmrunPlan) -> None:
        """Give the guest disks of its own on top of the job's, and check that it has them."""
        vmrun, copy = plan.vmrun, plan.copy
        try:
            vmrun.run("snapshot", machine.vmx, SNAPSHOT, seconds=machine.deadlines.memory)
        except VmrunError as error:
            if tool.is_not_supported(error):
                problem = f"{SNAPSHOT_DISK} = true, and this machine's VMware ({vmrun.product}) makes no snapshots."
                hint = f"set vmware_snapshot_disk = False, or require VM_{self.vm_type}_ATTR_snapshot of the machine."
                raise errors.JobFault(errors.MISMATCHED, problem, hint) from error
            raise from_vmrun(error, f"making a snapshot of {machine.name}", copy.files) from error
        now = machine.current()
        for device, layers in copy.disks.items():
            independent = copy.vmx.get(f"{device}.mode", "").startswith("independent")
            if not independent and now.get(f"{device}.fileName") in (None, "", layers[0].path):
                problem = f"vmrun made no snapshot of {machine.name}: the guest would write to {layers[0].path} itself."
                hint = "read vmware.log in the job's scratch directory."
                raise errors.HypervisorFault(problem, hint) from VmrunError("snapshot", "there is none")

    def _power_on(self, machine: VmrunMachine, plan: VmrunPlan) -> None:
        doing = f"{'resuming' if plan.restart else 'starting'} {plan.spec.vm.name}"
        try:
            machine.power_on()
        except VmrunError as error:
            fault = from_vmrun(error, doing, [machine.vmx, *plan.copy.files])
            if plan.restart:
                raise Unusable(fault.problem, True) from error
            if isinstance(fault, errors.ClientFault):  # the VM was made a moment ago
                fault = errors.HypervisorFault(fault.problem, "see who changes the job's scratch directory.")
            raise fault from error

    @staticmethod
    def _value_of(vmx: str, name: str, user: Identity) -> str:
        """Read a value of a ``.vmx`` as a user; empty if it cannot be read."""
        try:
            return read_vmx(user, os.path.dirname(vmx), os.path.basename(vmx)).get(name, "")
        except errors.Fault:
            return ""


def _ask(vmrun: Tool, settings: Settings, end: float) -> tuple[str, str]:
    def left() -> float:
        return max(0.1, end - monotonic())

    with explained("asking which VMs run"):
        vmrun.find_product(settings, left())
        vmrun.running(left())
        # Without a command it prints its version and its usage.
        told = _VERSION.search(tool.text_of(vmrun.call([], "without a command", left()).out))
    return vmrun.product, told[1] if told else ""


def _kernel_module() -> Finding:
    device = os.path.join(DEVICES, "vmmon")
    if os.path.exists(device):
        return Finding("vmmon", OK, device, "VMware's kernel module is loaded")
    if os.path.isdir(INSTALLED):
        hint = "build and load it: vmware-modconfig --console --install-all."
        return Finding("vmmon", BAD, device, "VMware's kernel module is not loaded.", hint)
    seen = f"There is neither {device} nor {INSTALLED}: this VMware is not one of Linux."
    return Finding("vmmon", UNKNOWN, device, seen)
