"""The administrator's policy: programs that change a VM's XML, or choose its MAC addresses.

There are three independent settings. VM_POLICY_REQUIREMENTS is a ClassAd expression over the job ad (`require`).
VM_POLICY lists stylesheets (``*.xsl``, ``*.xslt``) and programs, which process the finished domain XML in that order
(`Policy`), whoever wrote it. VM_MAC_HOOK is a program that may choose MAC addresses (`choose_mac`).

All of them have the same interface: the domain XML (or the job ad) on standard input, its replacement on standard
output. A rejection has a reason and blames the job: exit status 1, and the reason on standard output. Every other
failure is the machine's fault. In many languages a crash has that status too: without a reason it counts as a crash.

The program of VM_MAC_HOOK is called as root with two arguments, the number of the NIC (0 is the first) and the MAC
address that it has so far, usually none; the job ad is on its standard input, as JSON. It prints an address, or
nothing to keep the present one; the exit status 1 and a reason reject the job. After the MAC address it may print the
IP address for the guest: then it is called again when the VM has ended, with the third argument ``release``.

This module is imported only if a policy is set.
"""

import ipaddress
import json
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from difflib import unified_diff
from typing import NamedTuple
from xml.etree import ElementTree as etree

from vmgahp.config import Settings
from vmgahp.errors import MISMATCHED, Fault, JobFault, MachineFault
from vmgahp.hooks import NAME_VARIABLE, call, for_job, standing
from vmgahp.host import trust
from vmgahp.job.ad import JobAd
from vmgahp.job.policy_view import PolicyView
from vmgahp.text import MAC, shown

MAC_SETTING = "VM_MAC_HOOK"
RELEASE = "release"


class ChosenMac(str):
    """A MAC address that the hook has chosen, not the job: the hook is at fault if another VM has it."""


def choose_mac(
    view: PolicyView, name: str, given: str, saved: str, log: Callable[[str], None], *, dry: bool = False, nic: int = 0
) -> tuple[str, str]:
    """Choose the MAC address for a NIC of the VM `name`, and its addresses: see `vmgahp.job.vm_spec.Nic`.

    `given` is the job's own address, for which the hook is not asked. `saved` is that of the checkpoint that the VM is
    restarted from, which requires the same. Raises `JobFault` if the hook rejects the job, `MachineFault` if it fails.
    """
    settings = view.settings
    hook = settings.string(MAC_SETTING)
    if not hook or given:
        return given, ""
    trust.require_trustworthy(hook, MAC_SETTING, "or unset it")
    label = f"{MAC_SETTING} ({hook})"

    def ask(ad: dict[str, object], of: str, environ: dict[str, str]) -> str:
        return call(label, [hook, str(nic), of], json.dumps(ad).encode() + b"\n", settings.call_timeout(), log, environ)

    output = for_job(
        label,
        lambda: ask({**view.ad.values()}, saved, {NAME_VARIABLE: name} | standing(dry)),
        lambda: ask({}, "", {NAME_VARIABLE: "plain_1.0"} | standing(True)),
    )
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
    return ChosenMac(answer), address


def release_mac(hook: str, name: str, nic: int, mac: str, deadline: float, log: Callable[[str], None]) -> None:
    """Tell the hook that the IP address of a NIC is free again. Raises `errors.Fault`."""
    trust.require_trustworthy(hook, MAC_SETTING, "or unset it")
    call(f"{MAC_SETTING} ({hook})", [hook, str(nic), mac, RELEASE], b"{}\n", deadline, log, {NAME_VARIABLE: name})


def take_back_mac(settings: Settings, name: str, nic: int, mac: str, log: Callable[[str], None]) -> None:
    """Call `release_mac` for a VM that is not started after all; a failure is logged, and nothing is raised."""
    try:
        release_mac(settings.string(MAC_SETTING), name, nic, mac, settings.call_timeout(), log)
    except Fault as fault:
        log(f"{MAC_SETTING} cannot take {mac} back: {fault.problem}")


def _is_address(guest: str = "", router: str = "", resolver: str = "", *more: str) -> bool:
    """Return True if the words after the MAC address are absent, or are a valid network configuration of a guest."""
    try:
        at = [ipaddress.ip_interface(guest).ip, *map(ipaddress.ip_address, filter(None, (router, resolver)))]
    except ValueError:
        return not guest
    return not more and not any(each.is_multicast or each.is_loopback or each.is_unspecified for each in at)


SETTING = "VM_POLICY"
REQUIREMENTS = "VM_POLICY_REQUIREMENTS"

STYLESHEETS = (".xsl", ".xslt")

_DECLARATION = re.compile(r"\s*<\?xml\s[^>]*\?>\s*")
_TAKE_OUT = f"take it out of {SETTING}"
HIDDEN = "***"
_SECRET_ATTRIBUTES = ("passwd", "password")

_PLAIN = """<domain type="qemu"><name/><uuid/><description>/scratch</description><memory unit="MiB">64</memory>
<vcpu>1</vcpu><os><type>hvm</type></os><devices><disk type="file" device="disk"><source file="/scratch/disk.img"/>
<target dev="vda"/></disk></devices></domain>"""
"""A domain of a plain job, to which a policy cannot object; it gets the job's name."""

CONTEXT = 1
"""The number of unchanged lines around a change."""
MOST_LINES = 200
_KEPT = ("name", "uuid", "description")
"""The elements by which the startd, the guardian and the kill mode identify a domain; a stage must keep them."""


def require(view: PolicyView) -> None:
    """Make sure that the job meets VM_POLICY_REQUIREMENTS.

    Names in it mean the job's attributes, with MY, with TARGET or without either, and secret attributes are undefined.
    Raises `JobFault` and `MachineFault`.
    """
    text = view.settings.string(REQUIREMENTS)
    if not text or view.meets(REQUIREMENTS):
        return
    words = {word.lower() for word in re.findall(r"[A-Za-z_][A-Za-z0-9_]*", text)}
    has = [f"{name} = {shown(str(value))}" for name, value in view.ad.values().items() if name.lower() in words]
    of_job = f" The job has {', '.join(has)[:300]}." if has else ""
    problem = f"This machine takes VM jobs only where {text} ({REQUIREMENTS}).{of_job}"
    hint = "change the job, add this to its requirements, or ask the administrator of this machine."
    raise JobFault(MISMATCHED, problem, hint)


def inspect(settings: Settings) -> str:
    """Check the policy settings without a job and describe them; empty if none is set. Raises `MachineFault`."""
    said = []
    if settings.string(REQUIREMENTS):
        with suppress(JobFault):  # an empty ad need not meet them
            require(PolicyView(JobAd(()), settings))
        said.append(f"{REQUIREMENTS} is an expression")
    stages = _stages(settings)
    for stage in stages:
        _require_trustworthy(stage)
    if stages:
        said.append(f"the {len(stages)} stages of {SETTING} are there" if stages[1:] else f"{stages[0]} is there")
    if hook := settings.string(MAC_SETTING):
        trust.require_trustworthy(hook, MAC_SETTING, "or unset it")
        said.append(f"{MAC_SETTING} is there")
    return "; ".join(said)


class Stage(NamedTuple):
    """One stylesheet or program of VM_POLICY."""

    number: int
    path: str

    @property
    def is_stylesheet(self) -> bool:
        return self.path.endswith(STYLESHEETS)

    def __str__(self) -> str:
        return f"{SETTING}, stage {self.number} ({self.path})"


class Policy:
    """The stages of VM_POLICY, for one job."""

    def __init__(
        self, view: PolicyView, log: Callable[[str], None], debug: Callable[[str], None], *, dry: bool = False
    ) -> None:
        """Prepare the stages; `debug` logs those that change nothing. In a `dry` run programs must keep nothing."""
        self.stages = _stages(view.settings)
        self._deadline = view.settings.call_timeout()
        self._view = view
        self._log = log
        self._debug = debug
        self._dry = dry

    def apply(self, xml: str) -> tuple[str, tuple[str, ...]]:
        """Return the domain XML after the last stage, and all changes as a diff; without any it is `xml` itself.

        Each change is logged as a diff. Raises `JobFault` for a rejection, `MachineFault` for a broken stage.
        """
        ad = json.dumps(self._view.ad.values()).encode()
        first = xml
        for stage in self.stages:
            made = self._through(stage, xml, ad)
            if lines := difference(xml, made):
                self._log(f"{stage} changes the domain:")
                for line in lines:
                    self._log(f"{SETTING}, stage {stage.number}: {line}")
            else:
                self._debug(f"{stage} changes nothing")
            xml = made
        changes = tuple(difference(first, xml))
        return (xml if changes else first), changes

    def _through(self, stage: Stage, xml: str, ad: bytes) -> str:
        _require_trustworthy(stage)
        return for_job(str(stage), lambda: self._made(stage, xml, ad), lambda: self._made(stage, _plain(xml), b"{}"))

    def _made(self, stage: Stage, xml: str, ad: bytes) -> str:
        argv = [stage.path]
        if stage.is_stylesheet:
            # In a process of its own: a stylesheet may loop forever or use up all memory.
            argv = [sys.executable, "-I", "-m", "vmgahp.hooks.stylesheet", stage.path]
        environ = {NAME_VARIABLE: etree.fromstring(xml).findtext("name") or ""} | standing(self._dry)
        output = call(str(stage), argv, xml.encode(), self._deadline, self._log, environ, ad)
        made = _DECLARATION.sub("", output, count=1) if _DECLARATION.match(output) else output
        if wrong := _what_is_wrong(xml, made):
            raise MachineFault(f"{stage} {wrong}.", f"correct it, or {_TAKE_OUT}.")
        return made


def _plain(xml: str) -> str:
    """Make a plain domain with the same name and UUID."""
    domain, plain = etree.fromstring(xml), etree.fromstring(_PLAIN)
    for path in ("name", "uuid"):
        for element in plain.iter(path):
            element.text = domain.findtext(path)
    return etree.tostring(plain, encoding="unicode")


def _stages(settings: Settings) -> list[Stage]:
    return [Stage(number, path) for number, path in enumerate(settings.strings(SETTING), start=1)]


def _require_trustworthy(stage: Stage) -> None:
    trust.require_trustworthy(stage.path, SETTING, f"or {_TAKE_OUT}", executable=not stage.is_stylesheet)


def _what_is_wrong(before: str, after: str) -> str:
    """Describe what a stage must not have done to the XML; empty if it is acceptable."""
    if "\0" in after or "<!DOCTYPE" in after:
        return "printed no domain XML: it has a NUL or a document type"
    try:
        domain = etree.fromstring(after)
    except etree.ParseError as error:
        return f"made what is not XML: {error}"
    if domain.tag != "domain":
        return f"made a {domain.tag[:40]!a} of the domain"
    had = etree.fromstring(before)
    for path in _KEPT:
        now, then = ([one.text for one in each.iterfind(path)] for each in (domain, had))
        if now != then:
            return f"changed the {path} of the domain, by which this daemon knows it"
    return ""


def difference(before: str, after: str) -> list[str]:
    """Return the lines of a unified diff; none if both documents are equivalent.

    The order of attributes, indentation and white space around texts are ignored. Raises `ParseError` for invalid XML.
    """
    if _lines(before, hide=False) == _lines(after, hide=False):
        return []
    lines = list(unified_diff(_lines(before), _lines(after), lineterm="", n=CONTEXT))[2:]
    if not lines:
        return [f"(only what is hidden here as {HIDDEN})"]
    if len(lines) > MOST_LINES:
        lines = [*lines[:MOST_LINES], f"({len(lines) - MOST_LINES} more lines)"]
    return lines


def _lines(xml: str, *, hide: bool = True) -> list[str]:
    domain = etree.fromstring(etree.canonicalize(xml, strip_text=True, with_comments=True))
    if hide:
        for element in domain.iter():
            for name in element.attrib.keys() & _SECRET_ATTRIBUTES:
                element.set(name, HIDDEN)
    etree.indent(domain)
    return etree.tostring(domain, encoding="unicode").splitlines()
