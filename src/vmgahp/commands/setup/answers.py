"""The values for the file of ``vmgahp setup``: from options, from answers, or suggested."""

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence

from vmgahp import errors
from vmgahp.commands.arguments import UsageError, vm_type
from vmgahp.commands.doctor import condor
from vmgahp.commands.setup import file
from vmgahp.commands.submit import memory
from vmgahp.drivers import base
from vmgahp.findings import BAD, OK, Finding
from vmgahp.text import escape
from vmgahp.vm_types import ANY, QEMU

NONE = "none"

ANY_TYPES, TYPE, MEMORY, SERVER = "VM_ANY_TYPES", "VM_TYPE", "VM_MEMORY", "VM_GAHP_SERVER"
NETWORKING, KINDS, BRIDGE = "VM_NETWORKING", "VM_NETWORKING_TYPE", "VM_NETWORKING_BRIDGE_INTERFACE"
EMULATION = "VM_ALLOW_EMULATION"

BY_OPTIONS = (ANY_TYPES, TYPE, MEMORY, SERVER, NETWORKING, KINDS, BRIDGE, EMULATION)
"""The settings with options of their own."""

LEAST_MEMORY = 256
"""The least MiB that are suggested, and the step between suggestions."""


def values(
    options: argparse.Namespace,
    before: Mapping[str, str],
    look: Callable[[Mapping[str, str]], Sequence[Finding]],
    *,
    asking: bool,
) -> dict[str, str]:
    """Find the settings by name, in the order of the file; `before` has those of the present file.

    `look` asks the doctor about this machine with some values. After a wrong answer the question is repeated. Raises
    `UsageError` for a wrong option, and EOFError at the end of the input.
    """
    extra = dict(map(_pair, options.set))
    found = {SERVER: options.server or condor.our_launcher()}

    def choose(given: str, question: str, suggested: str, read: Callable[[str], dict[str, str]]) -> None:
        while True:
            try:
                found.update(read(given or (ask(question, suggested) if asking else suggested)))
                return
            except UsageError as error:
                if given or not asking:
                    raise
                sys.stdout.write(f"{escape(str(error))}\n")

    was = before.get(ANY_TYPES, before.get(TYPE, "kvm"))
    choose(options.type, "VM type (kvm, xen, vmware, vsphere, any, ...)", was, _types)
    have = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20
    was = before.get(MEMORY) or str(max(have * 3 // 4 // LEAST_MEMORY * LEAST_MEMORY, LEAST_MEMORY))
    question = f"MiB for all VMs together, of the {have} MiB of this machine"
    choose(options.memory, question, was, lambda text: _memory(text, have))
    found.update({name: before.get(name, value) for name, value in file.USUAL.items()})
    seen = look(found) if asking or not (before or options.network) else ()
    nat = any(one.check == "network nat" and one.verdict == OK for one in seen)
    was = before.get(KINDS, NONE) if before or not nat else "nat"
    given = options.network or ("bridge" if options.bridge else "")
    choose(given, "Networks that jobs may have (nat, bridge, user, none)", was, lambda text: _kinds(text, found, extra))
    if "bridge" in found.get(KINDS, "") and (options.bridge or before.get(BRIDGE) or asking):
        known = before.get(BRIDGE, "br0")
        choose(options.bridge, "The bridge of this machine for them", known, lambda text: _plain(BRIDGE, text))
    elif options.bridge:
        raise UsageError(f"--bridge {options.bridge} is for the network bridge, and the networks are without it.")
    emulates = options.emulation
    if emulates is None:
        emulates = _emulates(found, before, seen, asking)
    if emulates or options.emulation is not None or EMULATION in before:
        found[EMULATION] = str(emulates)
    kept = {name: value for name, value in before.items() if file.is_known(name) and name not in BY_OPTIONS}
    return {name: value for name, value in {**found, **kept, **extra}.items() if value}


def words(found: Mapping[str, str]) -> list[str]:
    """List the options that set these values, except for the server, by default that of the vmgahp called."""
    said = ["--type", found.get(ANY_TYPES, found[TYPE]).replace(" ", ""), "--memory", found[MEMORY]]
    said += ["--network", found.get(KINDS, NONE).replace(" ", "")]
    if BRIDGE in found:
        said += ["--bridge", found[BRIDGE]]
    if EMULATION in found:
        said.append("--emulation" if found[EMULATION] == "True" else "--no-emulation")
    for name, value in found.items():
        if name not in BY_OPTIONS and value != file.USUAL.get(name):
            said += ["--set", f"{name}={value}"]
    return said


def ask(question: str, suggested: str) -> str:
    """Ask for a value; an empty answer takes the suggested one. Raises EOFError at the end of the input."""
    return input(f"{question} [{suggested}]: ").strip() or suggested


def yes(question: str, suggested: str = "n") -> bool:
    """Ask for yes or no; the end of the input counts as no."""
    try:
        return ask(f"{question} y or n", suggested).lower() in ("y", "yes")
    except EOFError:
        return False


def _pair(word: str) -> tuple[str, str]:
    name, equals, value = word.partition("=")
    if not equals:
        raise UsageError(f"--set {word}: it has no =; write NAME=VALUE.")
    name, value = name.strip().upper(), value.strip(" \t")
    file.require_plain(name, value or "-")
    return name, value


def _plain(name: str, value: str) -> dict[str, str]:
    file.require_plain(name, value)
    return {name: value}


def _types(text: str) -> dict[str, str]:
    try:
        named = list(dict.fromkeys(vm_type(word) for word in text.replace(",", " ").split()))
        for one in named:
            base.find(one)
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"{error}") from error
    except errors.Fault as fault:
        raise UsageError(f"{fault.problem} {fault.hint}") from fault
    if not named or (ANY in named and len(named) > 1):
        raise UsageError(
            f"{text!a} names no VM type, or any beside others; name one, any alone, or several without it."
        )
    return {TYPE: named[0]} if len(named) == 1 else {TYPE: ANY, ANY_TYPES: ", ".join(named)}


def _memory(text: str, have: int) -> dict[str, str]:
    try:
        amount = memory(text)
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"{error}.") from error
    if amount > have:
        raise UsageError(f"VM_MEMORY = {amount} MiB is more than this machine has, {have} MiB.")
    return {MEMORY: str(amount)}


def _kinds(text: str, found: Mapping[str, str], extra: Mapping[str, str]) -> dict[str, str]:
    text = ", ".join(text.lower().replace(",", " ").split())
    if text == NONE:
        return {NETWORKING: "False"}  # explicit, because a file that is read earlier may have them on
    said = {NETWORKING: "True", KINDS: text}
    file.require_valid({TYPE: found[TYPE], BRIDGE: "br0", **said, **extra})
    return said


def _emulates(found: Mapping[str, str], before: Mapping[str, str], seen: Sequence[Finding], asking: bool) -> bool:
    was = before.get(EMULATION, "").lower() == "true"
    kvm = next((one for one in seen if one.check == "kvm" and one.verdict == BAD), None)
    if not asking or kvm is None or found[TYPE] not in QEMU:
        return was
    return yes(f"{escape(kvm.seen)} Run guests by emulation, many times slower?", "y" if was else "n")
