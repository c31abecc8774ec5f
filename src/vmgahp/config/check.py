"""A check of the settings for invalid values and for misspelled, retired and HTCondor's own names.

The names that HTCondor reads itself are from its ``src/condor_utils/param_info.in``, and from its startd and starter.

It is used by the probe, the doctor and ``vmgahp config``; the server itself checks only the values that it
needs. A finding is bad only if jobs of the VM type would fail for it.
"""

import re
from collections.abc import Sequence
from functools import partial

from vmgahp import errors
from vmgahp.config import FALSE_WORDS, SETTINGS, TRUE_WORDS, Settings
from vmgahp.config.sources import Entries, Entry
from vmgahp.config.table import BY_NAME, PLUGIN, SERVER, SHARE_DIR, STARTD, STARTER, Setting
from vmgahp.findings import BAD, OFF, Finding
from vmgahp.text import nearest
from vmgahp.vm_types import ANY, VMWARE

_startd, _starter = (partial(Setting, ours=False, readers=(reader,)) for reader in (STARTD, STARTER))

# fmt: off
ELSEWHERE = (
    Setting("VM_GAHP_SERVER", "path", "$(SBIN)/condor_vm-gahp",
        "The program that runs VMs: this daemon's condor_vm-gahp, by its full path.",
        ours=False, readers=(STARTD, STARTER)),
    _startd("VM_MAX_NUMBER", "integer", "", "The number of VMs that may run at once; empty: no limit."),
    _startd("VM_RECHECK_INTERVAL", "integer", "600",
        "How long the startd waits to probe again after a failed probe.", unit="seconds"),
    _startd("VM_KILLING_TIMEOUT", "integer", "60",
        "How long the startd waits for VM_GAHP_SERVER to kill a leftover VM.", unit="seconds"),
    _starter("VM_STATUS_INTERVAL", "integer", "60",
        "How often the starter asks for the STATUS of a VM; the minimum is 30.", unit="seconds", least=30),
    _starter("VM_STATUS_MAX_ERROR", "integer", "5",
        "The number of consecutive failures of STATUS after which the starter gives up the VM."),
    _starter("VM_GAHP_SEND_ALL_CLASSAD", "bool", "true",
        "True to pass on the whole job ad. Otherwise VM_POLICY_REQUIREMENTS and LIBVIRT_XML_SCRIPT see a few "
        "attributes only."),
    _starter("STARTER_DEFAULT_JOB_HOOK_KEYWORD", "string", "",
        "The prefix of the names of the hooks of jobs without +HookKeyword: VMGAHP."),
    _starter("VMGAHP_HOOK_PREPARE_JOB", "path", "",
        "The program that holds a VM job that its START would hold, with the reason in HoldReason."),
    _starter("MEMORY_USAGE_METRIC_VM", "expression", "((ImageSize+1023)/1024)",
        "The expression for MemoryUsage of a VM job."),
)
# fmt: on

RETIRED = {
    "VM_GAHP_CONFIG": "Settings of the VM universe are in the configuration itself since HTCondor 7.4.",
    "VM_MAX_MEMORY": "VM_MEMORY says how much memory VMs may have.",
    "VM_VERSION": "",
    "VM_BRIDGE_SCRIPT": "libvirt makes the network; VM_NETWORKING_BRIDGE_INTERFACE names the bridge.",
    "VM_NETWORKING_MAC_PREFIX": "VM_MAC_HOOK gives VMs their MAC addresses.",
    **dict.fromkeys(("VM_UNIV_NOBODY_USER", "ALWAYS_VM_UNIV_USE_NOBODY"), "VM_RUN_AS_JOB_USER says as whom VMs run."),
    **dict.fromkeys(("VMWARE_PERL", "VMWARE_SCRIPT"), "VMWARE_VMRUN names VMware's own program."),
    **dict.fromkeys(("XEN_SCRIPT", "XEN_CONTROLLER"), "Xen's VMs are run by libvirt."),
    "XEN_BRIDGE_SCRIPT": "libvirt makes the network; VM_NETWORKING_BRIDGE_INTERFACE names the bridge.",
    "XEN_DEFAULT_KERNEL": "The job names its kernel (xen_kernel), or its disk has one (XEN_BOOTLOADER).",
    "XEN_DEFAULT_INITRD": "The job names its own (xen_initrd).",
    "XEN_VIF_PARAMETER": "libvirt makes the network; VM_NETWORKING_BRIDGE_INTERFACE names the bridge.",
    "XEN_NAT_VIF_PARAMETER": "libvirt makes the network; VM_NAT_NETWORK names it.",
    "XEN_BRIDGE_VIF_PARAMETER": "libvirt makes the network; VM_NETWORKING_BRIDGE_INTERFACE names the bridge.",
    "XEN_IMAGE_IO_TYPE": "libvirt chooses how disks are read.",
    "XEN_LOCAL_SETTINGS_FILE": "VM_POLICY changes what libvirt is told.",
}
"""The settings that HTCondor has retired, with their replacements: neither it nor this daemon reads them."""

ELSEWHERE_BY_NAME = {setting.name: setting for setting in ELSEWHERE}

INTERNAL = frozenset(("USE_SCRIPT_TO_CREATE_CONFIG", "VMU_TESTING"))
"""The settings of HTCondor's own tests, which are never reported."""

CHECK = "settings"
LOOKED_AT = "all settings of this daemon"

_LIKE_OURS = ("VM_", "VMGAHP", "MAX_VM", "LIBVIRT_", "VMWARE_", "VSPHERE_", "XEN_")
_CLOSE, _CLOSEST = 0.6, 0.8
"""The similarity above which a name may be a misspelling of another: in our own file, and among a site's own names."""

_COMMENT = "put the comment on a line of its own: behind a value it is a part of the value."

_DAEMONS = {"STARTD": STARTD, "STARTER": STARTER, "VM_GAHP": SERVER, "MASTER": "", "SCHEDD": ""}
"""The prefixes of names, before a dot, that limit a setting to one daemon of HTCondor."""


def check(settings: Settings, vm_type: str, entries: Entries | None = None) -> list[Finding]:
    """Return all findings, those that keep jobs from running first; `networking` checks networks."""
    found = values(settings, vm_type)
    if entries is not None:
        found += [*names(entries), *elsewhere(entries)]
    found += [Finding(CHECK, OFF, LOOKED_AT, one, "see what it is about.") for one in settings.warnings]
    return sorted(found, key=lambda finding: finding.verdict != BAD)


# Values


def values(settings: Settings, vm_type: str) -> list[Finding]:
    """Find invalid values: of another kind, an unknown word, too small a number."""
    found = []
    for setting in SETTINGS:
        if settings.where(setting.name) != "default":
            matters = SERVER in setting.readers and is_read(setting.name, settings, vm_type)
            if wrong := _wrong_value(setting, settings):
                is_bad, seen, hint = wrong
                found.append(Finding(CHECK, BAD if matters and is_bad else OFF, LOOKED_AT, seen, hint))
    return found


def _wrong_value(setting: Setting, settings: Settings) -> tuple[bool, str, str] | None:
    """Return None for a valid value, else whether jobs that read the setting fail, a sentence, and a hint."""
    text = settings.string(setting.name)
    said = f"{setting.name} = {text} ({settings.where(setting.name)})"
    converted = {"integer": settings.integer, "bool": settings.boolean, "size": settings.size}
    try:
        value = converted.get(setting.kind, settings.string)(setting.name)
    except errors.MachineFault as fault:
        hint = fault.hint
        if " #" in text:
            hint = _COMMENT
        elif setting.kind == "bool":
            hint = _meant(text.lower(), (*TRUE_WORDS, *FALSE_WORDS)) + hint
        return True, fault.problem, hint
    if " #" in text and setting.kind not in ("arguments", "expression"):
        return False, f"{said} has a # in it, and what follows it.", _COMMENT
    if isinstance(value, int) and value < setting.least:
        hint = f"set it to {setting.least} or more, or remove it for the default, {setting.default}."
        return False, f"{said} is less than {setting.least}.", hint
    if unknown := _unknown_words(setting, settings):
        words = _either(setting.words, "or")
        return setting.fatal, f"{said} is not {words}.", f"{_meant(unknown[0], setting.words)}use {words}."
    return None


def is_read(name: str, settings: Settings, vm_type: str) -> bool:
    """Return True if a job of the VM type can read the setting."""
    setting = BY_NAME.get(name)
    if setting is None:
        return True
    if setting.needs and not any(settings.string(other) for other in setting.needs):
        return False
    if name == "VM_CPU_MODE" and settings.xml_script():  # the script defines the CPU itself
        return False
    wanted = vm_type.replace(",", " ").split()
    return not setting.types or ANY in wanted or any(one in setting.types for one in wanted)


def _unknown_words(setting: Setting, settings: Settings) -> list[str]:
    if not setting.words or setting.name.startswith("VM_NETWORKING"):  # see `networking`
        return []
    given = settings.strings(setting.name) if setting.kind == "list" else [settings.string(setting.name)]
    given = [word.strip("\"'").lower() for word in given]
    return [word for word in given if word and word not in setting.words]


def networking(settings: Settings, vm_type: str) -> Finding | None:
    """Check the settings of networks; return None if they are consistent, or off."""
    if not _is(settings, "VM_NETWORKING") or _is(settings, "VM_ALLOW_HOST_LOOPBACK") is None:
        return None
    kinds = BY_NAME["VM_NETWORKING_TYPE"].words
    given = [word.strip("\"'").lower() for word in settings.strings("VM_NETWORKING_TYPE")]
    offered = settings.networking_types(own_bridge=vm_type in VMWARE)
    unknown = [word for word in given if word not in kinds]
    default = settings.string("VM_NETWORKING_DEFAULT_TYPE").lower()
    if not given:
        seen = "VM_NETWORKING is on, and VM_NETWORKING_TYPE names no kind: jobs get no network."
        hint = "set VM_NETWORKING_TYPE = nat (or bridge, user, or several with commas)."
    elif unknown:
        seen = f"VM_NETWORKING_TYPE names {', '.join(unknown)}, which is no kind of network."
        hint = f"{_meant(unknown[0], kinds)}use {', '.join(kinds)}."
    elif "bridge" in given and "bridge" not in offered:
        seen = "VM_NETWORKING_TYPE names bridge, and VM_NETWORKING_BRIDGE_INTERFACE is not set."
        hint = "set VM_NETWORKING_BRIDGE_INTERFACE to the name of the bridge, such as br0."
    elif "user" in given and "user" not in offered:
        seen = (
            "VM_NETWORKING_TYPE names user, which is not offered: by it a guest reaches what listens on this machine's "
            "loopback address (VM_ALLOW_HOST_LOOPBACK)."
        )
        hint = "use nat, or set VM_ALLOW_HOST_LOOPBACK = True where nothing there is to be kept from jobs."
    elif default and default not in offered:
        seen = f"VM_NETWORKING_DEFAULT_TYPE = {default}, which VM_NETWORKING_TYPE does not offer."
        hint = f"set it to one of {', '.join(offered)}, or leave it out."
    else:
        return None
    return Finding("VM_NETWORKING", OFF, "VM_NETWORKING, VM_NETWORKING_TYPE, VM_NETWORKING_DEFAULT_TYPE", seen, hint)


def _is(settings: Settings, name: str) -> bool | None:
    try:
        return settings.boolean(name)
    except errors.MachineFault:
        return None


# Names


def names(entries: Entries) -> list[Finding]:
    """Find names similar to one of ours, retired by HTCondor, or set for the wrong daemon."""
    known = {entry.name for entry in entries.all if entry.is_default} | INTERNAL
    known |= set(BY_NAME) | set(ELSEWHERE_BY_NAME)
    # Any of these names is valid, even if VM_SHARE_DIRS does not list the directory.
    known |= {name for name in (entry.name.rpartition(".")[2] for entry in entries.all) if name.startswith(SHARE_DIR)}
    known -= set(RETIRED)
    used: set[str] | None = None
    found = []
    for entry in entries.all:
        daemon, _, name = entry.name.rpartition(".")
        if entry.is_default or not entry.value or not (name.startswith(_LIKE_OURS) or name in RETIRED):
            continue
        if name in known:
            sentence = _wrong_daemon(entry, daemon, name)
            hint = f"write {name} without {daemon}."
        elif name in RETIRED:
            sentence = f"{entry.name} ({entry.where}): HTCondor no longer reads {name}, and this daemon does not."
            hint = f"take it out. {RETIRED[name]}".rstrip()
        else:
            if used is None:
                # A word in a value is a name of the site's own, and not a misspelling.
                used = {word.upper() for each in entries.all for word in re.findall(r"\w+", each.value)}
            sentence, hint = ("", "") if name in used else _misspelled(entry, name, known, entries.of_htcondor)
        if sentence:
            found.append(Finding(CHECK, OFF, LOOKED_AT, sentence, hint))
    return found


def elsewhere(entries: Entries) -> list[Finding]:
    """Find values below the minimum in settings of HTCondor's own daemons, which HTCondor replaces."""
    found = []
    for entry in entries.all:
        setting = ELSEWHERE_BY_NAME.get(entry.name)
        if setting is None or setting.kind != "integer" or entry.is_default:
            continue
        if entry.value.isidentifier():
            seen = f"{entry.name} = {entry.value} ({entry.where}) is not a whole number."
            found.append(Finding(CHECK, OFF, LOOKED_AT, seen, f"set it to {setting.least} or more, or take it out."))
        if entry.value.isdecimal() and int(entry.value[:19]) < setting.least:
            seen = f"{entry.name} = {entry.value} ({entry.where}) is less than {setting.least}, which HTCondor takes."
            found.append(Finding(CHECK, OFF, LOOKED_AT, seen, f"set it to {setting.least} or more."))
    return found


def _misspelled(entry: Entry, name: str, known: set[str], of_htcondor: bool) -> tuple[str, str]:
    """Word a finding for a misspelled name; a site's own configuration needs a closer match: it has other names too."""
    near = nearest(name, known, _CLOSEST if of_htcondor else _CLOSE)
    if not near and of_htcondor:
        return "", ""
    hint = f"; did you mean {near}?" if near else "."
    seen = f"{entry.name} ({entry.where}) is not a setting of this daemon{hint}"
    return seen, f"write {near}, or take it out." if near else "take it out."


def _wrong_daemon(entry: Entry, daemon: str, name: str) -> str:
    """Word a finding if a name is set for a daemon of HTCondor's that does not read it; otherwise return nothing."""
    setting = BY_NAME.get(name) or ELSEWHERE_BY_NAME.get(name)
    if setting is None or daemon not in _DAEMONS or _DAEMONS[daemon] in setting.readers:
        return ""
    readers = _either([reader for reader in setting.readers if reader != PLUGIN] or [PLUGIN], "and")
    return f"{entry.name} ({entry.where}) is for the {daemon.lower()} alone, and {name} is read by: {readers}."


def _meant(word: str, words: Sequence[str]) -> str:
    near = nearest(word, words, _CLOSE)
    return f"did you mean {near}? Else " if near else ""


def _either(words: Sequence[str], last: str) -> str:
    return f"{', '.join(words[:-1])} {last} {words[-1]}" if len(words) > 1 else words[0]
