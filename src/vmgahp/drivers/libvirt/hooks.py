"""The effect of the administrator's own programs on a job's domain, and the faults that are theirs.

These are LIBVIRT_XML_SCRIPT, VM_POLICY and VM_MAC_HOOK. If one of them has written the XML that libvirt gets, a fault
in it is not the job's.
"""

from typing import NamedTuple
from xml.etree import ElementTree as etree

import libvirt

from vmgahp import errors, log
from vmgahp.config import Settings
from vmgahp.domain.restore import macs
from vmgahp.drivers.base import Logger, Machine
from vmgahp.drivers.libvirt import faults
from vmgahp.drivers.libvirt.connection import LibvirtConnection
from vmgahp.drivers.libvirt.fault_table import DESCRIPTION
from vmgahp.host.job_user import Identity
from vmgahp.job import published
from vmgahp.job.policy_view import PolicyView
from vmgahp.job.spec import JobSpec, Nic

POLICY_FILE = "vm_policy.txt"
"""The file in the scratch directory that tells the owner what VM_POLICY has changed in the job's machine."""
LONGEST_POLICY_FILE = 64 << 10


class Described(NamedTuple):
    """A domain XML, and its authors beside this package."""

    xml: str
    authors: str = ""
    """The settings that have changed it, each with its value; empty for unchanged XML of our own."""
    macs: tuple[tuple[str, str], ...] = ()
    """The requested MAC addresses, in lower case, each with the setting that requested it; empty for the job."""
    before_policy: str = ""
    """The XML of our own before VM_POLICY changed it; empty if it did not."""
    changes: tuple[str, ...] = ()
    """The changes by VM_POLICY, as the lines of a diff without secrets."""


def described(view: PolicyView, log_line: Logger, spec: JobSpec, written: str, *, dry: bool) -> Described:
    """Apply VM_POLICY to a domain XML that was `written` by us or by the script. Raises `errors.Fault`."""
    settings = view.settings
    xml, script, policy = written, settings.xml_script(), settings.string("VM_POLICY")
    changes: tuple[str, ...] = ()
    authors = [f"LIBVIRT_XML_SCRIPT = {script}"] if script else []
    if policy:
        from vmgahp.hooks.policy import Policy  # a server without a policy does without the module

        flags = settings.string("VM_GAHP_DEBUG") or settings.string("DEFAULT_DEBUG")
        wordy = dry or log.wants_debug(f"{settings.string('ALL_DEBUG')} {flags}")
        xml, changes = Policy(view, log_line, log_line if wordy else _say_nothing, dry=dry).apply(written)
        if changes:
            authors.append(f"VM_POLICY = {policy}")
    from_job = {nic.mac for nic in spec.nics if type(nic.mac) is str}  # the hook's are of `policy.ChosenMac`
    if not authors and from_job.issuperset(spec.macs):
        return Described(xml, macs=tuple((mac, "") for mac in spec.macs))
    hook = f"VM_MAC_HOOK = {settings.string('VM_MAC_HOOK')}"
    origins = dict.fromkeys(spec.macs, hook) | dict.fromkeys(from_job, "")
    macs = tuple((mac, origins.get(mac, " and ".join(authors))) for mac in macs_of(xml))
    ours = written if authors and not script else ""
    return Described(xml, " and ".join(authors), macs, ours, changes)


def tell_owner(machine: Machine, changes: tuple[str, ...], directory: str, identity: Identity, log: Logger) -> None:
    """Tell the owner what VM_POLICY has changed: in a file that is sent back, and a line in the job's log.

    Errors are logged.
    """
    changed = sum(line[:1] in ("+", "-") for line in changes)
    text = "\n".join(("What the administrator of the machine (VM_POLICY) has changed in the VM:", *changes, ""))
    try:
        identity.write_scratch(directory, POLICY_FILE, text.encode(errors="replace")[:LONGEST_POLICY_FILE])
    except (OSError, errors.Fault) as error:
        log(f"{machine.name}: {POLICY_FILE} cannot be written: {error}")
    machine.news.publish(
        published.POLICY, f"The machine's administrator has changed the VM ({changed} lines, {POLICY_FILE})"
    )


def with_macs(view: PolicyView, log_line: Logger, spec: JobSpec, saved: str = "", *, dry: bool) -> JobSpec:
    """Return the job with the MAC addresses of VM_MAC_HOOK, if it is set; `saved` is the XML of its checkpoint.

    Raises `errors.Fault`, after the hook's IP addresses were given back.
    """
    settings = view.settings
    if not spec.nics or not settings.string("VM_MAC_HOOK"):
        return spec
    from vmgahp.hooks.policy import choose_mac, take_back_mac

    found = macs(saved) if saved else []
    nics: list[Nic] = []
    try:
        for number, nic in enumerate(spec.nics):
            had = found[number] if number < len(found) else ""
            mac, address = choose_mac(view, spec.name, nic.mac, had, log_line, dry=dry, nic=number)
            nics.append(nic._replace(mac=mac, address=address))
        _require_different(nics, settings, spec.name)
    except errors.Fault:
        for number, nic in enumerate(nics):
            if nic.address and not dry:
                take_back_mac(settings, spec.name, number, nic.mac, log_line)
        raise
    return spec._replace(nics=tuple(nics))


def _require_different(nics: list[Nic], settings: Settings, name: str) -> None:
    chosen = [nic.mac for nic in nics if nic.mac]
    if len(set(chosen)) < len(chosen):
        raise errors.MachineFault(
            f"VM_MAC_HOOK = {settings.string('VM_MAC_HOOK')} gave two NICs of {name} one MAC address.",
            "let it give each NIC, whose number is its first argument, an address of its own.",
        )


def require(view: PolicyView) -> None:
    """Check that the job meets VM_POLICY_REQUIREMENTS. Raises `errors.Fault`."""
    if view.settings.string("VM_POLICY_REQUIREMENTS"):
        from vmgahp.hooks import policy

        policy.require(view)


def mismatch_fault(name: str, authors: str, mismatch: Exception) -> errors.Fault:
    """Return the fault for a VM that differs from its description: the author's of that, or libvirt's."""
    problem = f"{name} is not the VM that was asked for: {mismatch}. It was destroyed before it ran."
    if authors:
        return errors.MachineFault(f"{authors}: {problem}", f"correct {authors}, or unset it.")
    return errors.HypervisorFault(problem, "see what libvirt's hooks or its version change; report it.")


def hooks_are_to_blame(made: Described, connection: LibvirtConnection) -> bool:
    """Return True if libvirt rejected XML of the administrator's programs, and not what the job asks for.

    Our XML as it was before VM_POLICY is passed to libvirt once more, to be parsed and not started: a job must not be
    able to take a machine out of service by a part that the policy has not changed.
    """
    if not made.authors or not made.before_policy:
        return bool(made.authors)

    def look(opened: libvirt.virConnect) -> None:
        form = "xen-xl" if opened.getType() == "Xen" else "qemu-argv"
        opened.domainXMLToNative(form, made.before_policy, 0)

    try:
        connection.call(look)
    except libvirt.libvirtError as error:
        return faults.classify(error) is not DESCRIPTION
    return True


def refused(problem: str, authors: str) -> errors.MachineFault:
    """Return the fault for a description by others that libvirt rejects."""
    return errors.MachineFault(f"{problem} The description of the VM was written by {authors}.", f"correct {authors}.")


def macs_of(xml: str) -> list[str]:
    """Return the MAC addresses of a domain, in lower case."""
    found = etree.fromstring(xml).iterfind("devices/interface/mac")
    return [mac.get("address", "").lower() for mac in found if mac.get("address")]


def _say_nothing(_: str) -> None:
    pass
