"""The driver for hypervisors that a program of the administrator's controls."""

import os
import time
import uuid as uuids
from collections.abc import Callable
from hashlib import sha256
from time import monotonic

from vmgahp import errors, findings
from vmgahp.checkpoint.files import Unusable
from vmgahp.checkpoint.manifest import Manifest
from vmgahp.config import Settings
from vmgahp.drivers.base import Logger, Survey
from vmgahp.drivers.lifecycle import reached
from vmgahp.drivers.managed import ManagedDriver
from vmgahp.drivers.resources import Resources
from vmgahp.drivers.script import program, protocol
from vmgahp.drivers.script.machine import KIND, ScriptCheckpoints, ScriptMachine, ScriptPlan, refused
from vmgahp.drivers.script.program import SETTING, Program
from vmgahp.drivers.script.protocol import Answer, Malformed, ScriptRequest, Value
from vmgahp.findings import OFF, OK, Finding
from vmgahp.hooks.program import clean
from vmgahp.host.job_user import Identity
from vmgahp.job import slot, vm_spec
from vmgahp.job.ad import JobAd
from vmgahp.job.vm_spec import VmSpec

ABILITIES = {
    "soft_suspend": (protocol.PAUSE, protocol.UNPAUSE),
    "suspend": (protocol.SUSPEND, protocol.RESUME),
    "checkpoint": (protocol.CHECKPOINT, protocol.RESUME),
}
"""The abilities that the machine advertises, and the actions that each needs."""


def survey(vm_type: str, settings: Settings, identity: Identity, log: Logger, end: float) -> Survey:
    """Run all checks; see `vmgahp.drivers.base.Driver.survey`."""
    looked_at = f"{SETTING} = {settings.string(SETTING) or '(not set)'}, asked to probe"
    try:
        user = program.named_user(settings, identity)
        if os.geteuid() != 0:
            user = identity  # the startd probes as its own user, who cannot switch to another
        script = Program(settings, user, log)
        answer = script.call(
            ScriptRequest(protocol.PROBE, script.hypervisor, uid=identity.uid, gid=identity.gid),
            None,
            max(0.1, end - monotonic()),
        )
        if answer.outcome == protocol.REJECTED:
            raise errors.MachineFault(
                f"{script.path} says that {script.hypervisor} runs no VMs here: {answer.reason or 'no reason'}",
                "see to what it says.",
            )
        if answer.outcome != protocol.DONE:
            raise refused(answer, script, protocol.PROBE)
    except errors.Fault as fault:
        return Survey([findings.judge("script", looked_at, fault, "")])
    found: list[Finding] = []
    actions = _actions(answer, found)
    version = answer.get("version")
    seen = f"{script.hypervisor} {version or 'of no version'} answers; it has {', '.join(actions)}"
    found.insert(0, Finding("script", OK, looked_at, seen))
    networking = _networking(answer, settings, found)
    attributes: dict[str, Value] = {"hypervisor": script.hypervisor, "version": version}
    attributes |= {name: all(action in actions for action in needed) for name, needed in ABILITIES.items()}
    attributes["networking"] = ",".join(networking)
    return Survey(
        found,
        attributes=attributes,
        # The script's own attributes, under the name of its hypervisor.
        machine_attributes={
            f"VM_{script.hypervisor}_ATTR_{name}": value
            for name, value in ({"version": version} | answer.attributes).items()
        },
        networking=networking,
        hypervisors=[script.hypervisor],
        vm_types=[vm_type],
    )


def _actions(answer: Answer, found: list[Finding]) -> list[str]:
    """Return the actions that the script has; an unknown one is a mistake in the script."""
    told = [word.lower() for word in answer.get("actions", [])]
    unknown = [word for word in told if word not in protocol.ACTIONS]
    if unknown:
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


class ScriptDriver(ManagedDriver[ScriptPlan, ScriptMachine]):
    """The driver of the VM type script: VMs that VM_SCRIPT controls."""

    # A start

    def plan(self, job: JobAd) -> ScriptPlan:
        spec = slot.settle(vm_spec.parse(job, self.settings), self.settings, self.identity)
        script = self._program(self.identity)
        checkpoints = ScriptCheckpoints(self.identity, spec.working_dir, self.log)
        restart, unusable = None, None
        try:
            restart = checkpoints.find(spec, script.hypervisor) if spec.checkpoint else None
        except Unusable as found:
            unusable = found
        return ScriptPlan(spec, job, script, self._request(spec, script, restart), restart, checkpoints, unusable)

    def show(self, plan: ScriptPlan) -> str:
        return plan.request._replace(uuid="").document(plan.job).decode()

    def clear(self, plan: ScriptPlan) -> None:
        if plan.unusable is not None:
            plan.checkpoints.store.refuse(plan.spec.name, plan.unusable)
        plan.checkpoints.store.forget_interrupted()
        leftover = plan.request._replace(action=protocol.DESTROY, uuid="", keep=plan.request.restart)
        if self._destroy(plan.script, leftover, plan.job):
            self.log(f"{plan.request.key} still ran from an earlier start: it was destroyed")
        if plan.restart is None:
            plan.checkpoints.store.discard()

    def prepare(self, plan: ScriptPlan, resources: Resources) -> ScriptMachine:
        resources.guardian = self.post_guardian(plan.spec.working_dir, plan.request.uuid)
        reached("prepare.guarded")
        return ScriptMachine(plan, resources, self.deadlines(self._seconds()), self.log)

    def launch(self, machine: ScriptMachine, plan: ScriptPlan) -> None:
        """Start or restore the VM; a script does both in the same way, and the guest runs at once."""
        if plan.restart is not None:
            machine.set_aside()
        try:
            self._power_on(machine, plan)
        except errors.MachineFault as fault:
            if plan.restart is None or self._is_unfit():
                raise
            raise Unusable(fault.problem, KIND.knows_disks) from fault
        if plan.restart is not None:
            plan.checkpoints.store.discard()

    def without_checkpoint(self, plan: ScriptPlan, unusable: Unusable) -> tuple[ScriptPlan, Callable[[], None]]:
        afresh = plan._replace(restart=None, request=plan.request._replace(restart=False, note=""))
        return afresh, plan.checkpoints.store.refuse(plan.spec.name, unusable)

    def _is_unfit(self) -> bool:
        """Return True if the script reports that VMs cannot run here.

        Its answer to a restore does not prove that, since the job may have forged the cause.
        """
        return findings.first_bad(self.survey(time.monotonic() + self._seconds()).findings) is not None

    def keep(self, machine: ScriptMachine, plan: ScriptPlan) -> None:
        spec = plan.spec
        self.record_end(machine.resources, spec.name, spec.working_dir, machine.cpu_seconds, spec.sent)
        self.log(f"started {spec.name} ({plan.request.key}) by {plan.script.path}")

    # The contract

    def kill(self, match: str, uuid: str = "") -> bool:
        directory = os.path.realpath(match)
        # The startd names its own user instead of the job's; a directory that is gone has no owner.
        owner = Identity.of_owner(directory) or self.identity
        script = self._program(owner)
        request = ScriptRequest(
            protocol.DESTROY,
            script.hypervisor,
            key=key_of(directory),
            uuid=uuid,
            directory=directory,
            uid=owner.uid,
            gid=owner.gid,
            # A VM with a manifest does not run: the checkpoint waits for its job, which restarts where its files are.
            keep=ScriptCheckpoints(owner, directory, self.log).store.exists(),
        )
        return self._destroy(script, request, None)

    def survey(self, end: float) -> Survey:

        return survey(self.vm_type, self.settings, self.identity, self.log, end)

    # How it is done

    def _seconds(self) -> float:
        return self.settings.call_timeout()

    def _program(self, job_user: Identity) -> Program:
        return Program(self.settings, program.user_for(self.settings, job_user), self.log)

    def _request(self, spec: VmSpec, script: Program, restart: Manifest | None) -> ScriptRequest:
        directory = os.path.realpath(spec.working_dir)
        return ScriptRequest(
            protocol.START,
            script.hypervisor,
            name=spec.name,
            key=key_of(directory),
            uuid=str(uuids.uuid4()),
            directory=directory,
            uid=self.identity.uid,
            gid=self.identity.gid,
            memory_mib=spec.memory_mib,
            vcpus=spec.vcpus,
            networking=spec.networking_type,
            mac=spec.mac,
            restart=restart is not None,
            note=restart.facts["note"] if restart else "",
        )

    def _destroy(self, script: Program, request: ScriptRequest, job: JobAd | None) -> bool:
        answer = script.call(request, job, self._seconds())
        if answer.outcome != protocol.DONE:
            raise refused(answer, script, request.action)
        return answer.get("existed") is not False

    def _power_on(self, machine: ScriptMachine, plan: ScriptPlan) -> None:
        """Start the VM by the script, and put the script's modifications into the machine's ad.

        Raises `errors.Fault`.
        """
        script, request = plan.script, plan.request
        answer = script.call(request, plan.job, machine.deadlines.memory)
        if answer.outcome == protocol.REJECTED:
            reason = answer.reason or "it gives no reason"
            raise errors.JobFault(
                errors.MISMATCHED,
                f"{script.hypervisor} on this machine rejects the job: {reason}{'' if reason[-1] in '.!?' else '.'}",
                f"change the job, or ask the administrator of this machine about {program.SETTING} ({script.path}).",
            )
        if answer.outcome == protocol.NOT_IMPLEMENTED:
            raise refused(answer, script, request.action)
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
            raise _odd(
                script,
                f"it gives the VM {spec.memory_mib} MiB and {spec.vcpus} CPUs, and the job has "
                f"{before.memory_mib} MiB and {before.vcpus}",
            )
        self.log(f"{script.path} has modified {before.name}:")
        for line in protocol.difference(job, answer.attributes):
            self.log(f"{before.name}: {clean(line)[: protocol.LONGEST_TEXT]}")
        machine.change(spec, ad)


def key_of(directory: str) -> str:
    """Return the key of the VM in a scratch directory; the kill mode knows only the directory."""
    return f"vmgahp-{sha256(os.fsencode(directory)).hexdigest()[:16]}"


def _odd(script: Program, problem: str) -> errors.MachineFault:
    return errors.MachineFault(
        f"{program.SETTING} ({script.path}) has modified the job as it may not: {problem.rstrip('.')}.",
        "let the script make VMs smaller only, and reject what it cannot run.",
    )
