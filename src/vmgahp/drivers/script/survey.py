"""The survey of a machine whose VMs a script controls: the script is asked what jobs get."""

import os
from time import monotonic

from vmgahp import errors, findings
from vmgahp.config import Settings
from vmgahp.drivers.base import Logger, Survey
from vmgahp.drivers.script import program, protocol
from vmgahp.drivers.script.machine import refused
from vmgahp.drivers.script.program import SETTING, Program
from vmgahp.drivers.script.protocol import Answer, ScriptRequest, Value
from vmgahp.findings import OFF, OK, Finding
from vmgahp.host.job_user import Identity

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
    version = answer.text("version")
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
    told = [word.lower() for word in answer.words("actions")]
    unknown = [word for word in told if word not in protocol.ACTIONS]
    if unknown:
        seen = f"It names actions that there are not: {', '.join(unknown)[:200]!a}."
        hint = f"write them as they are called: {', '.join(protocol.ACTIONS)}."
        found.append(Finding("actions", OFF, "the actions that the script names", seen, hint))
    return [action for action in protocol.ACTIONS if action in (*protocol.NEEDED, *told)]


def _networking(answer: Answer, settings: Settings, found: list[Finding]) -> list[str]:
    told = [word.lower() for word in answer.words("networking")]
    offered = []
    for kind in settings.networking_types():
        if kind in told:
            offered.append(kind)
        else:
            seen = f"The script has no network of the type {kind}."
            hint = f"take {kind} out of VM_NETWORKING_TYPE, or teach the script."
            found.append(Finding(f"network {kind}", OFF, "the networks that the script names", seen, hint))
    return offered
