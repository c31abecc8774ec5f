"""The driver for hypervisors that a program of the administrator's controls."""

import os
import uuid as uuids
from collections.abc import Callable
from hashlib import sha256
from time import monotonic

from vmgahp import errors, findings
from vmgahp.checkpoint.store import CheckpointStore, FileRef, Unusable
from vmgahp.config import Settings
from vmgahp.drivers.base import Survey, Value
from vmgahp.drivers.managed import ManagedDriver, reached
from vmgahp.drivers.resources import Resources
from vmgahp.drivers.script import protocol
from vmgahp.drivers.script.machine import (
    FAILED,
    JOB,
    KIND,
    SETTING,
    USER,
    Program,
    ScriptFailed,
    ScriptMachine,
    ScriptPlan,
)
from vmgahp.drivers.script.protocol import LONGEST_TEXT, Answer, Malformed, ScriptRequest
from vmgahp.findings import OFF, OK, Finding
from vmgahp.hooks import clean
from vmgahp.host.job_user import Identity
from vmgahp.job import vm_spec
from vmgahp.job.ad import JobAd

ABILITIES = {
    "soft_suspend": (protocol.PAUSE, protocol.UNPAUSE),
    "suspend": (protocol.SUSPEND, protocol.RESUME),
    "checkpoint": (protocol.CHECKPOINT, protocol.RESUME),
}
"""The abilities that the machine advertises, and the actions that each needs."""


class ScriptDriver(ManagedDriver[ScriptPlan, ScriptMachine]):
    """The driver of the VM type script: VMs that VM_SCRIPT controls."""

    def plan(self, job: JobAd) -> ScriptPlan:
        spec = vm_spec.settle_slot(vm_spec.parse(job, self.settings), self.settings, self.identity)
        script = Program(self.settings, self.identity, self.log)
        store = CheckpointStore(KIND, self.identity, spec.working_dir, self.log)
        request = _request(protocol.START, script, os.path.realpath(spec.working_dir), self.identity)._replace(
            name=spec.name,
            uuid=str(uuids.uuid4()),
            memory_mib=spec.memory_mib,
            vcpus=spec.vcpus,
            networking=spec.networking_type,
            mac=spec.mac,
        )
        plan = ScriptPlan(spec, job, script, request, store)
        try:
            found = store.load() if spec.checkpoint else None
            if found is None:
                return plan
            store.check(found, store.now(spec, {"hypervisor": script.hypervisor}), map(FileRef.of, found.files))
        except Unusable as unusable:
            return plan._replace(unusable=unusable)
        return plan._replace(restart=found, request=plan.request._replace(restart=True, note=found.facts["note"]))

    def show(self, plan: ScriptPlan) -> str:
        return plan.request._replace(uuid="").document(plan.job).decode()

    def clear(self, plan: ScriptPlan) -> None:
        if plan.unusable is not None:
            plan.checkpoint.refuse(plan.spec.name, plan.unusable)
        plan.checkpoint.forget_interrupted()
        leftover = plan.request._replace(action=protocol.DESTROY, uuid="", keep=plan.request.restart)
        if self._destroy(plan.script, leftover, plan.job):
            self.log(f"{plan.request.key} still ran from an earlier start: it was destroyed")
        if plan.restart is None:
            plan.checkpoint.discard()

    def prepare(self, plan: ScriptPlan, resources: Resources) -> ScriptMachine:
        resources.guardian = self.post_guardian(plan.spec.working_dir, plan.request.uuid)
        reached("prepare.guarded")
        return ScriptMachine(plan, resources, self.deadlines(self.settings.call_timeout()), self.log)

    def launch(self, machine: ScriptMachine, plan: ScriptPlan) -> None:
        """Start or restore the VM; a script does both in the same way, and the guest runs at once."""
        if plan.restart is not None:
            machine.set_aside()
        try:
            self._power_on(machine, plan)
        except FAILED as fault:
            if plan.restart is None or self._is_unfit():
                raise
            raise Unusable(fault.problem, KIND.knows_disks) from fault
        if plan.restart is not None:
            plan.checkpoint.discard()

    def without_checkpoint(self, plan: ScriptPlan, unusable: Unusable) -> tuple[ScriptPlan, Callable[[], None]]:
        afresh = plan._replace(restart=None, request=plan.request._replace(restart=False, note=""))
        return afresh, plan.checkpoint.refuse(plan.spec.name, unusable)

    def explain(self, job: JobAd, fault: errors.Fault) -> errors.Fault:
        """Blame the machine for a script that fails without the job as well."""
        if isinstance(fault, ScriptFailed) and self._is_unfit():
            return errors.MachineFault(fault.problem, fault.hint)
        return fault

    def _is_unfit(self) -> bool:
        """Return True if the script reports that VMs cannot run here.

        Its answer to a start does not prove that, since the job may have forged the cause; nor does any answer to a
        user whose processes may be the job's, so that HTCondor's user asks, as at the probe of this machine.
        """
        prober = self
        if self.identity.switching and self.settings.string(USER) == JOB:
            condor = Identity.of_condor()
            if condor is None or condor.uid == self.identity.uid:
                return False
            prober = ScriptDriver(self.vm_type, self.settings, condor, self.log)
        return findings.first_bad(prober.survey(monotonic() + self.settings.call_timeout()).findings) is not None

    def keep(self, machine: ScriptMachine, plan: ScriptPlan) -> None:
        spec = plan.spec
        self.record_end(machine.resources, spec.name, spec.working_dir, machine.cpu_seconds, spec.sent)
        self.log(f"started {spec.name} ({plan.request.key}) by {plan.script.path}")

    def kill(self, match: str, uuid: str = "") -> bool:
        directory = os.path.realpath(match)
        # The startd names its own user instead of the job's; a directory that is gone has no owner.
        owner = Identity.of_owner(directory) or self.identity
        script = Program(self.settings, owner, self.log)
        # A VM with a manifest does not run: the checkpoint waits for its job, which restarts where its files are.
        keep = CheckpointStore(KIND, owner, directory, self.log).exists()
        request = _request(protocol.DESTROY, script, directory, owner)._replace(uuid=uuid, keep=keep)
        return self._destroy(script, request, None)

    def survey(self, end: float) -> Survey:
        subject = f"{SETTING} = {self.settings.string(SETTING) or '(not set)'}, asked to probe"
        try:
            script = Program(self.settings, self.identity, self.log, probes=True)
            request = ScriptRequest(protocol.PROBE, script.hypervisor, uid=self.identity.uid, gid=self.identity.gid)
            answer = script.call(request, None, max(0.1, end - monotonic()))
            if answer.outcome == protocol.REJECTED:
                said = answer.reason or "no reason"
                problem = f"{script.path} says that {script.hypervisor} runs no VMs here: {said}"
                raise errors.MachineFault(problem, "see to what it says.")
            if answer.outcome != protocol.DONE:
                raise script.refused(answer, protocol.PROBE)
        except errors.Fault as fault:
            return Survey([findings.judge("script", subject, fault, "")])
        found: list[Finding] = []
        actions = _actions(answer, found)
        version = answer.get("version")
        seen = f"{script.hypervisor} {version or 'of no version'} answers; it has {', '.join(actions)}"
        found.insert(0, Finding("script", OK, subject, seen))
        networking = _networking(answer, self.settings, found)
        attributes: dict[str, Value] = {"hypervisor": script.hypervisor, "version": version}
        attributes |= {name: all(action in actions for action in needed) for name, needed in ABILITIES.items()}
        attributes["networking"] = ",".join(networking)
        own = {"version": version} | answer.attributes
        return Survey(
            found,
            attributes=attributes,
            # The script's own attributes, under the name of its hypervisor.
            machine_attributes={f"VM_{script.hypervisor}_ATTR_{name}": value for name, value in own.items()},
            networking=networking,
            hypervisors=[script.hypervisor],
            vm_types=[self.vm_type],
        )

    def _destroy(self, script: Program, request: ScriptRequest, job: JobAd | None) -> bool:
        answer = script.call(request, job, self.settings.call_timeout())
        if answer.outcome != protocol.DONE:
            raise script.refused(answer, request.action)
        return answer.get("existed") is not False

    def _power_on(self, machine: ScriptMachine, plan: ScriptPlan) -> None:
        """Start the VM by the script, and put its modifications into the machine's ad. Raises `errors.Fault`."""
        script, request = plan.script, plan.request
        answer = script.call(request, plan.job, machine.deadlines.memory)
        if answer.outcome == protocol.REJECTED:
            reason = answer.reason or "it gives no reason"
            problem = f"{script.hypervisor} on this machine rejects the job: {reason}{'.' * (reason[-1] not in '.!?')}"
            hint = f"change the job, or ask the administrator of this machine about {SETTING} ({script.path})."
            raise errors.JobFault(errors.MISMATCHED, problem, hint)
        if answer.outcome == protocol.NOT_IMPLEMENTED:
            raise script.refused(answer, request.action)
        machine.powered_on(answer)
        if answer.outcome == protocol.MODIFIED:
            self._accept(machine, script, plan.job, answer)

    def _accept(self, machine: ScriptMachine, script: Program, job: JobAd, answer: Answer) -> None:
        """Accept the script's modifications. A VM may become smaller, but not larger than HTCondor reserved."""
        try:
            ad = protocol.changed(job, answer.attributes)
            spec = vm_spec.parse(ad, self.settings)
        except (Malformed, errors.JobFault) as error:
            raise _odd(script, str(error)) from error
        before = machine.spec
        if spec.memory_mib > before.memory_mib or spec.vcpus > before.vcpus:
            given, asked = (f"{one.memory_mib} MiB and {one.vcpus} CPUs" for one in (spec, before))
            raise _odd(script, f"it gives the VM {given}, and the job has {asked}")
        self.log(f"{script.path} has modified {before.name}:")
        for line in protocol.difference(job, answer.attributes):
            self.log(f"{before.name}: {clean(line)[:LONGEST_TEXT]}")
        machine.change(spec, ad)


def key_of(directory: str) -> str:
    """Return the key of the VM in a scratch directory; the kill mode knows only the directory."""
    return f"vmgahp-{sha256(os.fsencode(directory)).hexdigest()[:16]}"


def _request(action: str, script: Program, directory: str, user: Identity) -> ScriptRequest:
    key = key_of(directory)
    return ScriptRequest(action, script.hypervisor, key=key, directory=directory, uid=user.uid, gid=user.gid)


def _odd(script: Program, problem: str) -> errors.Fault:
    problem = f"{SETTING} ({script.path}) has modified the job as it may not: {problem.rstrip('.')}."
    return script.fault(problem, "let the script make VMs smaller only, and reject what it cannot run.")


def _actions(answer: Answer, found: list[Finding]) -> list[str]:
    """Return the actions that the script has; an unknown one is a mistake in the script."""
    told = [word.lower() for word in answer.get("actions", [])]
    if unknown := [word for word in told if word not in protocol.ACTIONS]:
        seen = f"It names actions that there are not: {', '.join(unknown)[:200]!a}."
        hint = f"write them as they are called: {', '.join(protocol.ACTIONS)}."
        found.append(Finding("actions", OFF, "the actions that the script names", seen, hint))
    return [action for action in protocol.ACTIONS if action in (*protocol.NEEDED, *told)]


def _networking(answer: Answer, settings: Settings, found: list[Finding]) -> list[str]:
    told = [word.lower() for word in answer.get("networking", [])]
    offered = []
    for kind in settings.networking_types():
        if kind in told:
            offered.append(kind)
        else:
            seen = f"The script has no network of the type {kind}."
            hint = f"take {kind} out of VM_NETWORKING_TYPE, or teach the script."
            found.append(Finding(f"network {kind}", OFF, "the networks that the script names", seen, hint))
    return offered
