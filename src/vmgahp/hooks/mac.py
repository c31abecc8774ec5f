"""VM_MAC_HOOK: the administrator's program that chooses the MAC addresses of VMs.

It is called as root with two arguments, the number of the NIC (0 is the first) and the MAC address that it
has so far, mostly none; the job ad is on its standard input, as JSON. It prints an address, or nothing to
leave things as they are; the exit status 1 and a reason reject the job.
"""

import json
import re
from collections.abc import Callable

from vmgahp.config import Settings
from vmgahp.errors import MachineFault
from vmgahp.hooks.program import NAME_VARIABLE, call, standing, whose_fault
from vmgahp.host import trust
from vmgahp.job.ad import JobAd
from vmgahp.job.folded import folded
from vmgahp.text import MAC

SETTING = "VM_MAC_HOOK"
ALWAYS = "VM_MAC_HOOK_ALWAYS"


class Chosen(str):
    """A MAC address that is the hook's and not the job's."""


def choose(
    settings: Settings,
    job: JobAd,
    name: str,
    given: str,
    saved: str,
    log: Callable[[str], None],
    *,
    dry: bool = False,
    nic: int = 0,
) -> str:
    """The MAC address for a NIC of the VM called `name`; empty to leave it to the hypervisor.

    `given` is the job's own, for which the hook is asked only where VM_MAC_HOOK_ALWAYS says so. `saved` is that
    of the checkpoint that the VM is restarted from: with another one it could not be. Raises `JobFault` where the hook
    rejects the job, `MachineFault` where it does not work.
    """
    hook = settings.string(SETTING)
    if not hook or (given and not settings.boolean(ALWAYS)):
        return given
    trust.require_trustworthy(hook, SETTING, "or unset it")
    label = f"{SETTING} ({hook})"

    def ask(ad: dict[str, object], of: str, environ: dict[str, str]) -> str:
        deadline = float(settings.timeout(10, "VM_POLICY_TIMEOUT"))
        return call(label, [hook, str(nic), of], json.dumps(ad).encode() + b"\n", deadline, log, environ)

    try:
        output = ask({**folded(job, settings).values()}, given or saved, {NAME_VARIABLE: name} | standing(dry))
    except MachineFault as fault:
        raise whose_fault(fault, label, lambda: ask({}, "", {NAME_VARIABLE: "plain_1.0"} | standing(True))) from fault
    answer = output.strip().lower()
    if not answer:
        return given
    if not re.fullmatch(MAC, answer):
        raise MachineFault(
            f"{label} printed {answer[:60]!a}, which is not the MAC address of one NIC.",
            "let it print six hexadecimal numbers such as 52:54:00:12:34:56, the first of them even, or nothing.",
        )
    if answer == given:
        return given
    log(f"{label} gives {name} the MAC address {answer} for NIC {nic}")
    return Chosen(answer)
