"""VM_MAC_HOOK: the administrator's program that chooses the MAC addresses of VMs.

It is called as root with two arguments, the number of the NIC (0 is the first) and the MAC address that it has so far,
usually none; the job ad is on its standard input, as JSON. It prints an address, or nothing to keep the present one;
the exit status 1 and a reason reject the job. After the MAC address it may print the IP address for the guest: then it
is called again when the VM has ended, with the third argument ``release``.
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
RELEASE = "release"


class Chosen(str):
    """A MAC address that the hook has chosen, not the job: the hook is at fault if another VM has it."""


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
    """Choose the MAC address for a NIC of the VM `name`, and the settings that go with it: see `vmgahp.job.nics.Nic`.

    `given` is the job's own address, for which the hook is not asked. `saved` is that of the checkpoint that the VM is
    restarted from, which requires the same address. Raises `JobFault` if the hook rejects the job, `MachineFault` if it
    does not work.
    """
    hook = settings.string(SETTING)
    if not hook or given:
        return given, ""
    trust.require_trustworthy(hook, SETTING, "or unset it")
    label = f"{SETTING} ({hook})"

    def ask(ad: dict[str, object], of: str, environ: dict[str, str]) -> str:
        data = json.dumps(ad).encode() + b"\n"
        return call(label, [hook, str(nic), of], data, settings.call_timeout(), log, environ)

    try:
        output = ask({**folded(job, settings).values()}, saved, {NAME_VARIABLE: name} | standing(dry))
    except MachineFault as fault:
        raise whose_fault(fault, label, lambda: ask({}, "", {NAME_VARIABLE: "plain_1.0"} | standing(True))) from fault
    answer, *more = output.lower().split() or [""]
    if not answer and not more:
        return "", ""
    if not re.fullmatch(MAC, answer) or not _is_address(*more):
        raise MachineFault(
            f"{label} printed {output.strip()[:60]!a}, which is not the MAC address of one NIC, and an IP address.",
            "let it print six hexadecimal numbers such as 52:54:00:12:34:56, the first of them even, or nothing; after "
            "them the guest's address, such as 10.0.0.7/24, then its router's and its name server's, if anything.",
        )
    address = " ".join(more)
    log(f"{label} gives {name} the MAC address {answer}{address and f' and {address}'} for NIC {nic}")
    return Chosen(answer), address


def release(hook: str, name: str, nic: int, mac: str, deadline: float, log: Callable[[str], None]) -> None:
    """Tell the hook that the IP address of a NIC is free again. Raises `errors.Fault`."""
    trust.require_trustworthy(hook, SETTING, "or unset it")
    call(f"{SETTING} ({hook})", [hook, str(nic), mac, RELEASE], b"{}\n", deadline, log, {NAME_VARIABLE: name})


def take_back(settings: Settings, name: str, nic: int, mac: str, log: Callable[[str], None]) -> None:
    """Call `release` for a VM that is not started after all; a failure is logged, and nothing is raised."""
    try:
        release(settings.string(SETTING), name, nic, mac, settings.call_timeout(), log)
    except Fault as fault:
        log(f"{SETTING} cannot take {mac} back: {fault.problem}")


def _is_address(guest: str = "", router: str = "", resolver: str = "", *more: str) -> bool:
    """Return True if the words after the MAC address are absent, or are a valid network configuration of a guest."""
    try:
        at = [ipaddress.ip_interface(guest).ip, *map(ipaddress.ip_address, filter(None, (router, resolver)))]
    except ValueError:
        return not guest
    return not more and not any(each.is_multicast or each.is_loopback or each.is_unspecified for each in at)
