"""The settings: one table of all that this daemon reads, and where their values come from.

In a pool they are HTCondor's own configuration, read by HTCondor's own tool, so that everything its files
can do works here too. Without an HTCondor they are a file of ``NAME = value`` lines. `load` says in which
order; `SETTINGS` is the only list of names, and ``config/vmgahp.conf.example`` is made from it.
"""

import os

from vmgahp.errors import MachineFault

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

TRUE_WORDS = ("true", "1", "yes", "t")
FALSE_WORDS = ("false", "0", "no", "f")
NETWORKING_TYPES = ("nat", "bridge", "user")


class Setting:
    """A row of `SETTINGS`.

    `kind` is string, integer, bool, path, list, arguments, expression or size; `default` is written as in a file; `ours` tells our
    own settings from HTCondor's; `example` is the value in the example file, where it is to be set.
    """

    __slots__ = ("default", "example", "kind", "meaning", "name", "ours", "unit")

    def __init__(
        self,
        name: str,
        kind: str,
        default: str,
        meaning: str,
        unit: str = "",
        ours: bool = False,
        example: str = "",
    ) -> None:
        self.name = name
        self.kind = kind
        self.default = default
        self.meaning = meaning
        self.unit = unit
        self.ours = ours
        self.example = example


def _ours(name: str, kind: str, default: str, meaning: str, unit: str = "") -> Setting:
    return Setting(name, kind, default, meaning, unit, ours=True)


SETTINGS = (
    Setting("VM_TYPE", "string", "", "The VM type that this machine offers, such as kvm.", example="kvm"),
    Setting(
        "VM_MEMORY", "integer", "0", "Memory of this machine for all VMs; must be set.", "MiB", example="1024"
    ),
    Setting("VM_NETWORKING", "bool", "false", "Whether VMs may have a network."),
    Setting("VM_NETWORKING_TYPE", "list", "", "The kinds of network on offer: nat, bridge, user."),
    Setting(
        "VM_NETWORKING_DEFAULT_TYPE",
        "string",
        "",
        "The kind for a job that names none; empty: user where it is on offer, else nat.",
    ),
    Setting("VM_NETWORKING_BRIDGE_INTERFACE", "string", "", "The bridge for networks of type bridge."),
    Setting("VM_HARDWARE_VT", "bool", "false", "Whether to advertise hardware virtualisation to jobs."),
    Setting(
        "LIBVIRT_XML_SCRIPT",
        "path",
        "",
        "A program, run as root, that reads the job ad on standard input and writes the domain XML. Empty, "
        "or HTCondor's own libvirt_simple_script.awk: the daemon builds the XML itself.",
    ),
    Setting("LIBVIRT_XML_SCRIPT_ARGS", "arguments", "", "Arguments for LIBVIRT_XML_SCRIPT."),
    Setting("VM_GAHP_LOG", "path", "", "The log file, by its full path; empty or /dev/null: no log."),
    Setting("VM_GAHP_DEBUG", "string", "", "What to log; D_FULLDEBUG adds the details."),
    Setting("DEFAULT_DEBUG", "string", "", "Stands in for VM_GAHP_DEBUG where that is not set."),
    Setting("ALL_DEBUG", "string", "", "Added to VM_GAHP_DEBUG."),
    Setting(
        "MAX_VM_GAHP_LOG", "size", "10 Mb", "The log is renamed to .old when it grows to this; 0: never."
    ),
    Setting(
        "VM_GAHP_REQ_TIMEOUT", "integer", "300", "How long condor_starter waits for an answer.", "seconds"
    ),
    Setting("VM_SOFT_SUSPEND", "bool", "false", "Whether condor_starter suspends a VM by pausing it in RAM."),
    Setting(
        "VMWARE_NETWORKING_TYPE",
        "string",
        "",
        "VMware's own word for the network of its VMs (ethernet0.connectionType), such as nat, bridged or "
        "hostonly; empty: nat or bridged, as the job asks.",
    ),
    Setting(
        "VMWARE_NAT_NETWORKING_TYPE", "string", "", "The same, for jobs whose network is of the type nat."
    ),
    Setting(
        "VMWARE_BRIDGE_NETWORKING_TYPE",
        "string",
        "",
        "The same, for jobs whose network is of the type bridge.",
    ),
    Setting(
        "VMWARE_LOCAL_SETTINGS_FILE",
        "path",
        "",
        'A file of lines name = "value" that every VMware VM of this machine gets in its .vmx.',
    ),
    Setting("EXECUTE", "path", "", "The directory that has the jobs' scratch directories."),
    Setting("LOG", "path", "", "HTCondor's log directory."),
    Setting("LIBEXEC", "path", "", "HTCondor's directory of helper programs."),
    _ours(
        "VM_ALLOW_EMULATION",
        "bool",
        "false",
        "Whether to run jobs of type kvm by emulation (TCG, many times slower) where KVM does not work.",
    ),
    _ours(
        "VM_LIBVIRT_URI",
        "string",
        "",
        "The libvirt connection; empty: qemu:///system as root, qemu:///session otherwise.",
    ),
    _ours(
        "VM_LIBVIRT_DOMAIN_TYPE",
        "string",
        "",
        "The domain type of VMs of type libvirt, as the libvirt of VM_LIBVIRT_URI names it, such as kvm, qemu, "
        "xen, lxc or test; empty: KVM, or TCG as VM_ALLOW_EMULATION says.",
    ),
    _ours(
        "VM_ALLOW_LIBVIRT_XML",
        "bool",
        "true",
        "Whether jobs may bring libvirt XML of their own, of which they may say what docs/job-xml.md lists.",
    ),
    _ours(
        "VM_STOP_TIMEOUT", "integer", "30", "How long a guest may take to shut down when asked to.", "seconds"
    ),
    _ours("VM_NAT_NETWORK", "string", "default", "The libvirt network for VMs with networking of type nat."),
    _ours(
        "VM_CPU_MODE", "string", "", "libvirt's CPU mode; empty: host-passthrough for KVM, maximum for TCG."
    ),
    _ours("VM_CONSOLE_LOG", "bool", "true", "Whether the serial console goes to vm_console.log and home."),
    _ours("VM_CONSOLE_LOG_MAX", "size", "16 Mb", "How much of the serial console is kept."),
    _ours("VM_RUN_AS_JOB_USER", "bool", "true", "Whether QEMU runs with the job user's uid and gid."),
    _ours(
        "VM_REPORT_PID",
        "bool",
        "true",
        "Whether HTCondor is told which process runs the guest. It then measures QEMU's memory, which is more "
        "than the guest's.",
    ),
    _ours(
        "VM_SUSPEND_IMAGE_FORMAT",
        "string",
        "",
        "How libvirt writes the memory of a suspended VM: raw, sparse, zstd, lzop, gzip and so on, where its "
        "version (11.2 and later) can be told; empty: as /etc/libvirt/qemu.conf says.",
    ),
    _ours(
        "VM_CHECKPOINT_IMAGE_FORMAT",
        "string",
        "",
        "The same for a checkpoint. HTCondor's file transfer fills the holes of a sparse file; a compressed "
        "format such as zstd travels better.",
    ),
    _ours(
        "VM_SUSPEND_BYPASS_CACHE",
        "bool",
        "false",
        "Whether the memory of a suspended VM is written past the page cache, which spares the cache. A "
        "checkpoint is read again at once for its checksum and always goes through the cache.",
    ),
    _ours(
        "VM_POLICY",
        "list",
        "",
        "Stylesheets (*.xsl, *.xslt) and programs, run as root, through which the domain XML of every job that "
        "libvirt runs goes in this order; each may change it or reject the job.",
    ),
    _ours(
        "VM_POLICY_REQUIREMENTS",
        "expression",
        "",
        "A ClassAd expression over the job ad; a job for which it is not true is put on hold.",
    ),
    _ours(
        "VM_POLICY_TIMEOUT",
        "integer",
        "30",
        "How long each stage of VM_POLICY, and VM_MAC_HOOK, may take.",
        "seconds",
    ),
    _ours(
        "VM_MAC_HOOK",
        "path",
        "",
        "A program, run as root, that is given the job ad and may print a MAC address for the network card of a "
        "VM that libvirt runs.",
    ),
    _ours(
        "VM_MAC_HOOK_ALWAYS",
        "bool",
        "false",
        "Whether VM_MAC_HOOK is also asked where the job names a MAC address itself.",
    ),
    _ours(
        "VM_SHARE_SCRATCH",
        "string",
        "none",
        "How a guest may mount a directory of its job's, where the job asks for it: none or 9p. It takes "
        "VM_RUN_AS_JOB_USER, so that the guest can reach no more than its user can.",
    ),
    _ours("VMWARE_VMRUN", "path", "", "VMware's vmrun; empty: the one on the PATH."),
    _ours(
        "VMWARE_PRODUCT",
        "string",
        "",
        "The VMware product that vmrun drives: ws, player or fusion; empty: the first of them that answers.",
    ),
    _ours(
        "VMWARE_TIMEOUT",
        "integer",
        "30",
        "How long vmrun may take to answer a question; what moves a guest's memory may take VM_GAHP_REQ_TIMEOUT.",
        "seconds",
    ),
    _ours(
        "VSPHERE_HOST", "string", "", "The ESXi host or vCenter for VM type vsphere, with :port if not 443."
    ),
    _ours("VSPHERE_USER", "string", "", "The account there for this machine's jobs."),
    _ours(
        "VSPHERE_PASSWORD_FILE",
        "path",
        "",
        "The file whose first line is the account's password. It belongs to HTCondor's user, with the mode 0600.",
    ),
    _ours(
        "VSPHERE_TLS_PIN",
        "path",
        "",
        "A PEM file with the server's own certificate: that one is accepted and no other. Empty: one that an "
        "authority vouches for whom this machine trusts.",
    ),
    _ours(
        "VSPHERE_TLS_VERIFY",
        "bool",
        "true",
        "Whether the server must prove who it is, where VSPHERE_TLS_PIN is empty. Without that whoever answers "
        "in its place gets the password.",
    ),
    _ours("VSPHERE_DATACENTER", "string", "", "The data centre for VMs; empty: the only one."),
    _ours("VSPHERE_DATASTORE", "string", "", "The datastore for VMs and their disks; empty: the only one."),
    _ours(
        "VSPHERE_RESOURCE_POOL",
        "string",
        "",
        "The host or cluster that runs VMs, or a pool of it, as in cluster/pool; empty: the only host or cluster.",
    ),
    _ours("VSPHERE_FOLDER", "string", "", "The folder for VMs; empty: that of all VMs of the data centre."),
    _ours(
        "VSPHERE_NETWORK_MAP",
        "string",
        "nat = VM Network, bridge = VM Network",
        "The network of the server for each kind of network in VM_NETWORKING_TYPE.",
    ),
    _ours(
        "VSPHERE_RECONNECT_TIMEOUT",
        "integer",
        "60",
        "How long the daemon goes on trying to reach a vSphere server that is away, such as one that restarts.",
        "seconds",
    ),
    _ours(
        "VSPHERE_TASK_TIMEOUT",
        "integer",
        "240",
        "How long the server may take for one task, such as to start a VM; less than VM_GAHP_REQ_TIMEOUT.",
        "seconds",
    ),
    _ours(
        "VSPHERE_CHECKPOINT_DAYS",
        "integer",
        "7",
        "How long the server keeps a checkpoint whose job does not come back; 0: for ever.",
        "days",
    ),
)
BY_NAME = {setting.name: setting for setting in SETTINGS}

OTHERS = frozenset(
    (
        "VM_GAHP_SERVER",
        "VM_MAX_NUMBER",
        "VM_STATUS_INTERVAL",
        "VM_STATUS_MAX_ERROR",
        "VM_RECHECK_INTERVAL",
        "VM_KILLING_TIMEOUT",
        "VM_GAHP_SEND_ALL_CLASSAD",
        "VM_NETWORKING_MAC_PREFIX",
        "VM_GAHP_CONFIG",
        "VM_MAX_MEMORY",
        "XEN_BOOTLOADER",
        "VMWARE_PERL",
        "VMWARE_SCRIPT",
    )
)
"""Names that HTCondor knows and this daemon does not read: no misspelling."""


class Settings:
    """The values of all settings, as text until they are asked for.

    A getter raises `MachineFault`, with the setting, the value, where it came from and what to write
    instead, where the text is not of the setting's kind; KeyError where `SETTINGS` has no such name.
    """

    __slots__ = ("_values", "_where", "warnings")

    def __init__(
        self,
        values: "Mapping[str, str] | None" = None,
        where: "Mapping[str, str] | str" = "given",
        warnings: "Iterable[str]" = (),
    ) -> None:
        self._values: dict[str, str] = {}
        self._where: dict[str, str] = {}
        self.warnings = list(warnings)
        """Sentences for the log, such as about a misspelt name in a file."""
        for name, value in (values or {}).items():
            setting = BY_NAME[name.upper()]
            if value.strip():  # HTCondor takes an empty value for none
                self._values[setting.name] = value.strip()
                self._where[setting.name] = where if isinstance(where, str) else where[name]

    def where(self, name: str) -> str:
        """Where a setting's value came from, for people; ``default`` where it is not set."""
        return self._where.get(BY_NAME[name].name, "default")

    def string(self, name: str) -> str:
        """A setting as text, without quotes around it (but arguments and an expression as they are written)."""
        setting = BY_NAME[name]
        value = self._values.get(name, setting.default)
        if setting.kind not in ("arguments", "expression"):  # as delete_quotation_marks in HTCondor's vm_univ_utils.cpp
            value = value.strip("\"'").strip()
        return value

    def strings(self, name: str) -> list[str]:
        """The words of a list, separated by commas or spaces."""
        return self.string(name).replace(",", " ").split()

    def integer(self, name: str) -> int:
        """A whole number that is not negative; also as a ClassAd expression, such as ``4 * 1024``."""
        text = self.string(name)
        digits = text[1:] if text[:1] in "+-" else text
        if digits.isascii() and digits.isdigit():
            # The ClassAd engine makes 0 of a number that is too large for it.
            value: object = int(text) if len(digits) < 19 else None
        else:
            value = self._evaluate(name, text)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 2**63:
            raise self._bad(name, "a whole number that is not negative")
        return int(value)

    def boolean(self, name: str) -> bool:
        """True or false; may be written as a ClassAd expression."""
        text = self.string(name)
        if text.lower() in TRUE_WORDS:
            return True
        if text.lower() in FALSE_WORDS:
            return False
        value = self._evaluate(name, text)
        if not isinstance(value, bool | int | float):
            raise self._bad(name, "true or false")
        return bool(value)

    def size(self, name: str) -> int:
        """Bytes, from HTCondor's syntax for the sizes of logs: ``4096``, ``10 Mb``, ``1 GiB``.

        That syntax also has times, such as ``7 days``, to rotate by age; it does not work for logs that
        several processes write, and stands for the default here (with a sentence in `warnings`). See
        ``dprintf_parse_log_size`` in HTCondor's ``src/condor_utils/dprintf_config.cpp``.
        """
        text = self.string(name)
        digits = len(text) - len(text.lstrip("0123456789"))
        unit = text[digits:].strip()
        if not digits or digits > 18 or not (unit.isascii() and (unit.isalpha() or not unit)):
            raise self._bad(name, "a size such as 10 Mb")
        power: int = _UNITS.get(unit.lower(), -1) if unit != "m" else -1
        if power < 0:
            if unit[0].lower() not in "shdwm":
                raise self._bad(name, "a size such as 10 Mb")
            default = BY_NAME[name].default
            warning = (
                f"{name} = {text} ({self.where(name)}) is a time, not a size; {default} is taken instead."
            )
            if warning not in self.warnings:
                self.warnings.append(warning)
            return Settings({name: default}).size(name)
        factor: int = 1024**power
        return int(text[:digits]) * factor

    def networking_types(
        self, kinds: "Sequence[str]" = NETWORKING_TYPES, own_bridge: bool = False
    ) -> list[str]:
        """The kinds of network that jobs may have, in the administrator's order; none without VM_NETWORKING.

        As in the C++ daemon, bridge needs VM_NETWORKING_BRIDGE_INTERFACE, but not for a hypervisor that has a
        bridge of its own (`own_bridge`); what is none of the `kinds` is left out.
        """
        if not self.boolean("VM_NETWORKING"):
            return []
        bridge = self.string("VM_NETWORKING_BRIDGE_INTERFACE")
        found = [word.strip("\"'").lower() for word in self.strings("VM_NETWORKING_TYPE")]
        return [
            kind
            for kind in dict.fromkeys(found)
            if kind in kinds and (kind != "bridge" or bridge or own_bridge)
        ]

    def xml_script(self) -> str:
        """LIBVIRT_XML_SCRIPT, or an empty string where it is not set or is HTCondor's own awk script."""
        path = self.string("LIBVIRT_XML_SCRIPT")
        directory, name = os.path.split(os.path.normpath(path)) if path else ("", "")
        libexec = self.string("LIBEXEC")
        if name == "libvirt_simple_script.awk" and (not libexec or directory == os.path.normpath(libexec)):
            return ""
        return path

    def _bad(self, name: str, wanted: str) -> MachineFault:
        return MachineFault(
            f"{name} = {self.string(name)} ({self.where(name)}) is not {wanted}.",
            f"set {name} to {wanted}, or remove it for the default, {BY_NAME[name].default or 'none'}.",
        )

    def _evaluate(self, name: str, text: str) -> object:
        try:
            import classad2
        except ImportError as error:
            raise MachineFault(
                f"{name} = {text} ({self.where(name)}) needs HTCondor's ClassAd module, which is missing.",
                f"write the value itself in {name}, or install the Python package htcondor.",
            ) from error
        try:
            value: object = classad2.ExprTree(text).eval()
        except Exception:  # noqa: BLE001 - classad2 has no common class for what a bad expression raises
            return None
        # The values undefined and error are members of an IntEnum: 2 and 1, if one does not look.
        return None if isinstance(value, classad2.Value) else value


_UNITS = {"": 0, "b": 0, "byte": 0, "bytes": 0} | {
    letter + rest: power for power, letter in enumerate("kmgt", 1) for rest in ("", "b", "ib", "bytes")
}


def load(environ: "Mapping[str, str]") -> Settings:
    """Read the settings from where `vmgahp.config_sources.read` finds them, in a pool from HTCondor.

    Raises `MachineFault` for a source that is there and cannot be read.
    """
    from vmgahp import config_sources

    values, where, warnings = config_sources.read(tuple(BY_NAME), OTHERS, environ)
    return Settings(values, where, warnings)


def example() -> str:
    """The example file: every setting with its meaning and default, those that must be set as examples."""
    from textwrap import wrap

    text = _EXAMPLE_HEAD
    for ours, heading in ((False, "HTCondor's own settings"), (True, "Settings of this daemon alone")):
        text += f"\n## {heading}\n"
        for setting in SETTINGS:
            if setting.ours is not ours:
                continue
            kind = f"{setting.kind}, {setting.unit}" if setting.unit else setting.kind
            text += "\n" + "\n".join("# " + line for line in wrap(f"{setting.meaning} ({kind})", 98)) + "\n"
            if setting.example:
                text += f"{setting.name} = {setting.example}\n"
            else:
                text += f"#{setting.name} = {setting.default}".rstrip() + "\n"
    return text


_EXAMPLE_HEAD = """\
# Settings for the VM daemon on a machine without HTCondor, such as a laptop. In a pool write the same
# lines into HTCondor's configuration: this file is not read where there is one.
#
# Copy it to ~/.config/vmgahp/vmgahp.conf or /etc/vmgahp.conf, or name it in the environment variable
# VMGAHP_CONFIG. A line is NAME = value; a backslash at its end continues it; $(NAME) stands for another
# value of this file, $(NAME:other) for "other" where that is not set. What is commented out is the
# default. _CONDOR_NAME in the environment overrides NAME.
"""
