"""VM_MAC_HOOK: the administrator's program that chooses the MAC addresses of VMs.

It is called as root with two arguments, the number of the NIC (0 is the first) and the MAC address that it
has so far, mostly none; the job ad is on its standard input, as JSON. It prints an address, or nothing to
leave things as they are; the exit status 1 and a reason reject the job. After the MAC address it may print the IP
address that the guest is to have: then it is called once more when the VM is over, with the third argument ``release``.
"""

import ipaddress
import json
import re
from collections.abc import Callable

from vmgahp.config import Settings
from vmgahp.errors import Fault, MachineFault
from vmgahp.hooks.program import NAME_VARIABLE, call, standing, whose_fault
from vmgahp.host import trust
from vmgahp.job.ad import JobAd
from vmgahp.job.folded import folded
from vmgahp.text import MAC

SETTING = "VM_MAC_HOOK"
ALWAYS = "VM_MAC_HOOK_ALWAYS"


RELEASE = "release"


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
) -> tuple[str, str]:
    """The MAC address for a NIC of the VM called `name`, and what goes with it: see `vmgahp.job.nics.Nic`.

    `given` is the job's own, for which the hook is asked only where VM_MAC_HOOK_ALWAYS says so. `saved` is that
    of the checkpoint that the VM is restarted from: with another one it could not be. Raises `JobFault` where the hook
    rejects the job, `MachineFault` where it does not work.
    """
    hook = settings.string(SETTING)
    if not hook or (given and not settings.boolean(ALWAYS)):
        return given, ""
    trust.require_trustworthy(hook, SETTING, "or unset it")
    label = f"{SETTING} ({hook})"

    def ask(ad: dict[str, object], of: str, environ: dict[str, str]) -> str:
        deadline = float(settings.timeout(10, "VM_POLICY_TIMEOUT"))
        return call(label, [hook, str(nic), of], json.dumps(ad).encode() + b"\n", deadline, log, environ)

    try:
        output = ask({**folded(job, settings).values()}, given or saved, {NAME_VARIABLE: name} | standing(dry))
    except MachineFault as fault:
        raise whose_fault(fault, label, lambda: ask({}, "", {NAME_VARIABLE: "plain_1.0"} | standing(True))) from fault
    answer, *more = output.lower().split() or [""]
    if not answer and not more:
        return given, ""
    if not re.fullmatch(MAC, answer) or not _is_address(*more):
        raise MachineFault(
            f"{label} printed {output.strip()[:60]!a}, which is not the MAC address of one NIC, and an IP address.",
            "let it print six hexadecimal numbers such as 52:54:00:12:34:56, the first of them even, or nothing; after "
            "them the guest's address, such as 10.0.0.7/24, then its router's and its name server's, if anything.",
        )
    address = " ".join(more)
    if answer != given or address:
        log(f"{label} gives {name} the MAC address {answer}{address and f' and {address}'} for NIC {nic}")
    return given if answer == given else Chosen(answer), address


def release(hook: str, name: str, nic: int, mac: str, deadline: float, log: Callable[[str], None]) -> None:
    """Tell the hook that an IP address of its is free again. Raises `errors.Fault`."""
    trust.require_trustworthy(hook, SETTING, "or unset it")
    call(f"{SETTING} ({hook})", [hook, str(nic), mac, RELEASE], b"{}\n", deadline, log, {NAME_VARIABLE: name})


def take_back(settings: Settings, name: str, nic: int, mac: str, log: Callable[[str], None]) -> None:
    """As `release`, of a VM that is not started. Raises nothing."""
    try:
        release(settings.string(SETTING), name, nic, mac, float(settings.timeout(10, "VM_POLICY_TIMEOUT")), log)
    except Fault as fault:
        log(f"{SETTING} cannot take {mac} back: {fault.problem}")


def _is_address(guest: str = "", router: str = "", resolver: str = "", *more: str) -> bool:
    """Whether an answer has, after the MAC address, nothing or what a guest's network consists of."""
    try:
        at = [ipaddress.ip_interface(guest).ip, *map(ipaddress.ip_address, filter(None, (router, resolver)))]
    except ValueError:
        return not guest
    return not more and not any(each.is_multicast or each.is_loopback or each.is_unspecified for each in at)
