"""The faults for libvirt's errors: a table of rules, and the classification by it.

libvirt's error codes say little (most errors of QEMU about a bad disk are ``VIR_ERR_INTERNAL_ERROR``), so the
message decides if it is known, and the code otherwise. The first rule in `RULES` that matches an error applies:

1. errors that a job cannot cause: the domain is gone, libvirtd is away, or the operating system has run out of disk
   space or memory;
2. errors about the job's choices, above all disks. They come before the machine's messages, because a job chooses the
   names in them, and a name that reads like a problem of the machine must not take the machine out of service;
3. errors about the administrator's choices and duties; if a job may be the cause all the same, the machine is checked
   once more (`second_look`);
4. libvirt's codes, every one of them;
5. the rest, such as a code of a later libvirt: errors of the hypervisor.
"""

from collections.abc import Iterable
from typing import Any

import libvirt

from vmgahp import errors
from vmgahp.drivers import fault_rules
from vmgahp.drivers.fault_rules import Rule
from vmgahp.errors import ClientFault, Fault, HypervisorFault, JobFault, MachineFault
from vmgahp.host import libvirt_daemons

_QEMU = "INTERNAL_ERROR QEMU "
_EXIT = "internal error: qemu unexpectedly closed the monitor: qemu-system-x86_64: "
_FORMAT = '-blockdev {"node-name":"libvirt-1-format","driver":"qcow2","file":"libvirt-1-storage"}: '
_STORAGE = '-blockdev {"driver":"file","filename":"*","node-name":"libvirt-1-storage"}: '
_DISK_HINT = "see that the image exists, that its format is the one in vm_disk, and that the job's owner may use it."
_FORMAT_HINT = "see what qemu-img check says about the image, and that vm_disk names its true format."
_RAM_HINT = "give VMs less memory (VM_MEMORY), or the machine more."
_LIBVIRTD_HINT = f"see that {libvirt_daemons.of_qemu()} runs, and look into its log."
_LOG_HINT = "look into libvirt's log and QEMU's (/var/log/libvirt/qemu)."
_DISK, _IMAGE = errors.INVALID_DISK_PARAM, errors.BAD_IMAGE


def _rule(
    name: str,
    fault: type[Fault],
    code: str,
    hint: str,
    message: str = "",
    *,
    kinds: str = "",
    origins: str = "",
    example: str = "",
    job_may_cause: bool = False,
) -> Rule:
    """Return a row: `kinds` and `origins` separated by blanks, and an example with its kind and its origin in front."""
    kind, origin, said = example.split(" ", 2) if example else ("", "", "")
    names = tuple(kinds.split()), tuple(origins.split())
    return Rule(name, fault, code, hint, message, *names, job_may_cause, (kind, origin, said))


def _job(name: str, code: str, hint: str, message: str = "", **more: Any) -> Rule:
    return _rule(name, JobFault, code, hint, message, **more)


def _machine(name: str, hint: str, message: str = "", **more: Any) -> Rule:
    return _rule(name, MachineFault, errors.CRITICAL, hint, message, **more)


# fmt: off
DESCRIPTION = _job("the description of the VM", _DISK, "change the attribute of the job that the message is about.",
    kinds="CONFIG_UNSUPPORTED XML_ERROR XML_DETAIL XML_INVALID_SCHEMA INVALID_ARG OS_TYPE NO_NAME NO_OS NO_ROOT "
    "NO_DEVICE NO_SOURCE NO_TARGET NO_KERNEL", job_may_cause=True,
    example="CONFIG_UNSUPPORTED DOMAIN unsupported configuration: unknown driver format value '*'")
"""The rule for a description that libvirt rejects without a known message: the job's, unless a script wrote the XML."""
UNKNOWN = _rule("anything else", HypervisorFault, errors.INTERNAL, _LOG_HINT, job_may_cause=True)

NO_CONNECTION = _machine("the connection to libvirtd", _LIBVIRTD_HINT, kinds="RPC NO_CONNECT INVALID_CONN",
    example="RPC RPC internal error: received hangup event on socket")
HUNG_UP = _machine("libvirtd hung up", _LIBVIRTD_HINT, kinds="INTERNAL_ERROR SYSTEM_ERROR", origins="RPC REMOTE",
    example="INTERNAL_ERROR RPC internal error: client socket is closed")

_BEFORE_ALL = (
    _rule("the domain is gone", ClientFault, errors.VM_NOT_FOUND, "", kinds="NO_DOMAIN",
        example="NO_DOMAIN QEMU Domain not found: no domain with matching name 'alice_lab_7.0'"),
    _machine("another daemon of libvirt's",
        "start the daemon whose socket the message names, such as by systemctl enable --now virtnetworkd.socket.",
        r"^Failed to connect socket to '.*/virt\w+-sock'",
        example="SYSTEM_ERROR RPC Failed to connect socket to '/run/libvirt/virtnetworkd-sock': No such file or "
        "directory"),
    NO_CONNECTION,
    HUNG_UP,
    _machine("a full file system", "free space on the file system that the message names.",
        r"No space left on device$", job_may_cause=True,
        example="SYSTEM_ERROR QEMU cannot write data to file '*': No space left on device"),
    _machine("no memory", _RAM_HINT, r"Cannot allocate memory$", job_may_cause=True,
        example=_QEMU + _EXIT + "cannot set up guest memory 'pc.ram': Cannot allocate memory"),
)

_OF_THE_JOB = (
    _job("a locked image", _DISK,
        "let no other VM use the image at the same time, or give it the permission r in all of them.",
        r"[Ff]ailed to get .*lock",
        example=_QEMU + _EXIT + '-device {"id":"virtio-disk0"}: Failed to get "write" lock'),
    _job("a backing file", _DISK, _DISK_HINT, r"[Bb]acking (file|store)",
        example=_QEMU + _EXIT + _FORMAT + "Could not open backing file: No such file or directory"),
    _job("an image that cannot be opened", _DISK, _DISK_HINT,
        r"Could not (open|read|refresh|reopen) '|Cannot access storage file|Failed to open file '"
        r"|^Path '.*' is not accessible|\"node-name\":\"libvirt-\d+-storage\".*\}: ",
        example=_QEMU + _EXIT + _STORAGE + "Could not open '*': Permission denied"),
    _job("an image that is damaged or of another format", _IMAGE, _FORMAT_HINT,
        r"not in \w+ format|[Ii]mage is corrupt|[Ii]nvalid (\w+ )?(image|footer|header|magic)"
        r"|Unsupported qcow|\"node-name\":\"libvirt-\d+-format\".*\}: ",
        example=_QEMU + _EXIT + _FORMAT + "Active L1 table offset invalid"),
    _job("a device name", _DISK, "choose another device name in vm_disk, such as vda.",
        r"[Dd]isk (target|bus|device|type|name)|target '.*' duplicated|[Ii]nvalid (harddisk )?device name"
        r"|IDE controllers? .*unsupported|Only 1 \w+ controller is supported",
        example=_QEMU + "internal error: Only 1 IDE controller is supported"),
    _job("the number of CPUs", errors.MISMATCHED, "ask for fewer CPUs (vm_vcpus).",
        r"[Mm]aximum CPUs|vcpus|vCPUs|CPU topology|-smp configuration",
        example="CONFIG_UNSUPPORTED QEMU unsupported configuration: Maximum CPUs greater than specified "
        "machine type limit 255"),
    _job("more devices than there are places for", _DISK,
        "ask for fewer devices, or for disks such as sda, of which many share one place.",
        r"PCI slot is needed|No more available PCI|PCI (slots|addresses)|USB ports?\b|No free (slot|port)",
        example="INTERNAL_ERROR QEMU internal error: a PCI slot is needed to connect a PCI controller "
        "model='pci-bridge', but none is available, and it cannot be automatically added"),
    _job("a shared directory", errors.MISMATCHED,
        "see that VMPARAM_vm_Share is a directory that the job's user can read.",
        r"fsdev",
        example=_QEMU + _EXIT + "-fsdev local,id=fsdev-fs0,path=*: failed to open '*': Permission denied"),
    _job("a MAC address", errors.MISMATCHED,
        "leave vm_macaddr out, or choose a unicast address that nobody uses.", r"MAC address|mac address",
        example="XML_ERROR DOMAIN XML error: expected unicast mac address, found multicast '*'"),
    _job("the amount of memory", errors.NO_MEMORY_PARAM, "ask for another vm_memory.",
        r"[Mm]emory size|minimum memory|RAM size|phys-bits too low|value too large: \d+[KMGTP]iB",
        example="OVERFLOW NONE numerical overflow: value too large: 17179869183PiB"),
)

_OF_THE_MACHINE = (
    _machine("memory for the guest", _RAM_HINT,
        r"[Cc]annot allocate memory|[Oo]ut of memory|set up guest memory|hugetlbfs", job_may_cause=True,
        example="INTERNAL_ERROR QEMU internal error: hugetlbfs filesystem is not mounted or disabled"),
    _machine("a network that is not active",
        "start the network: virsh net-start NAME; virsh net-autostart NAME.", r"network '.*' is not active",
        example="OPERATION_INVALID NETWORK Requested operation is not valid: network 'default' is not active"),
    _machine("a network that is not there",
        "define the libvirt network, or set VM_NAT_NETWORK to the one to use.",
        r"[Nn]etwork not found|no network with matching name",
        example="NO_NETWORK NETWORK Network not found: no network with matching name 'nowhere'"),
    _machine("a bridge", "make the bridge of VM_NETWORKING_BRIDGE_INTERFACE, or name another.",
        r"Cannot get interface MTU|bridge .* not exist|[Nn]o such device",
        example="SYSTEM_ERROR NONE Cannot get interface MTU on 'br0': No such device"),
    _machine("KVM", "see whether KVM works here: vmgahp probe.",
        r"[Kk][Vv][Mm] kernel module|KVM is not available|domain type '?kvm'?|invalid domaintype"
        r"|failed to set MSR|failed to initialize kvm", job_may_cause=True,
        example=_QEMU + _EXIT + "Could not access KVM kernel module: No such file or directory"),
    _machine("the CPU of guests", "set VM_CPU_MODE to one that virsh domcapabilities shows as supported.",
        r"CPU mode '.*' .*not supported|[Uu]nknown CPU model|[Gg]uest CPU", job_may_cause=True,
        example="CONFIG_UNSUPPORTED QEMU unsupported configuration: CPU mode 'host-passthrough' for x86_64 qemu "
        "domain on x86_64 host is not supported by hypervisor"),
    _machine("QEMU itself",
        "install QEMU for this machine's architecture (qemu-system-x86), and see that it starts.",
        r"QEMU binary|No emulator found|suitable emulator|does not support (virt|machine) type"
        r"|unsupported machine type",
        job_may_cause=True,
        example="SYSTEM_ERROR QEMU Cannot check QEMU binary /nope: No such file or directory"),
    _machine("libvirt's own directory",
        "let the job's user pass /var/lib/libvirt/qemu (chmod o+x), or set VM_RUN_AS_JOB_USER = False.",
        r"(\.aes|monitor\.sock|/var/lib/libvirt/qemu|/run/libvirt).*Permission denied",
        example=_QEMU
        + _EXIT
        + "-object secret: Unable to read /var/lib/libvirt/qemu/domain-1-x/master-key.aes: "
        "Permission denied"),
    _machine("passt", "install passt, or leave user out of VM_NETWORKING_TYPE.", r"\bpasst\b",
        example="XML_ERROR DOMAIN XML error: Invalid value for attribute 'type' in 'backend': 'passt'."),
    _machine("the console's socket",
        "see who may enter the directory of the socket, or set VM_CONSOLE_LOG_MAX = 0.",
        r"-chardev |^unable to stat: ", job_may_cause=True,
        example="SYSTEM_ERROR SECURITY unable to stat: /run/vmgahp/console: No such file or directory"),
    _machine("a VM that has the name or the UUID already",
        "see whose domain it is (virsh list --all), and remove it.",
        r"already exists with uuid|is already (active|defined|being started)", job_may_cause=True,
        example="OPERATION_FAILED QEMU operation failed: domain 'alice_lab_7.0' already exists with uuid c7a5fdbd"),
)

_BY_CODE = (
    DESCRIPTION,
    _job("a number that is too large", errors.NO_MEMORY_PARAM, "ask for another vm_memory.", kinds="OVERFLOW",
        example="OVERFLOW NONE numerical overflow: value too large"),
    _job("a malformed MAC address", errors.MISMATCHED, "leave vm_macaddr out.", kinds="INVALID_MAC"),
    _machine("memory of libvirtd", _RAM_HINT, kinds="NO_MEMORY", job_may_cause=True),
    _machine("what libvirt lets this daemon do",
        "let root use libvirt: see its access rules, and auth_unix_rw in libvirtd.conf.",
        kinds="OPERATION_DENIED ACCESS_DENIED AUTH_FAILED AUTH_CANCELLED AUTH_UNAVAILABLE GNUTLS_ERROR SSH "
        "LIBSSH UNKNOWN_HOST NO_HOSTNAME",
        example="AUTH_UNAVAILABLE RPC authentication unavailable: no polkit agent available to authenticate action"),
    _machine("the machine's networks",
        "see virsh net-list --all, VM_NAT_NETWORK and VM_NETWORKING_BRIDGE_INTERFACE.",
        kinds="NO_NETWORK INVALID_NETWORK NETWORK_EXIST NO_NETWORK_PORT INVALID_NETWORK_PORT NETWORK_PORT_EXIST "
        "NO_INTERFACE INVALID_INTERFACE MULTIPLE_INTERFACES BUILD_FIREWALL NO_NWFILTER INVALID_NWFILTER "
        "NO_NWFILTER_BINDING INVALID_NWFILTER_BINDING",
        example="NO_INTERFACE INTERFACE Interface not found: br0"),
    _machine("libvirt's set-up", f"see what libvirt's set-up on this machine lacks; {_LOG_HINT}",
        kinds="HOOK_SCRIPT_FAILED CONF_SYNTAX DBUS_SERVICE NO_SECURITY_MODEL CPU_INCOMPATIBLE NO_SECRET "
        "INVALID_SECRET INVALID_ENCR_KEY_SECRET NO_SERVER NO_CLIENT DRIVER_FULL DOM_EXIST NO_STORAGE_POOL "
        "NO_STORAGE_VOL INVALID_STORAGE_POOL INVALID_STORAGE_VOL STORAGE_PROBE_FAILED STORAGE_POOL_BUILT "
        "STORAGE_VOL_EXIST NO_NODE_DEVICE INVALID_NODE_DEVICE DEVICE_MISSING NO_SUPPORT",
        job_may_cause=True,
        example="HOOK_SCRIPT_FAILED HOOK Hook script execution failed: /etc/libvirt/hooks/qemu: 1"),
    _rule("what QEMU or libvirt could not do", HypervisorFault, errors.INTERNAL, _LOG_HINT,
        kinds="OK INTERNAL_ERROR SYSTEM_ERROR OPERATION_FAILED OPERATION_INVALID OPERATION_TIMEOUT "
        "OPERATION_ABORTED OPERATION_UNSUPPORTED ARGUMENT_UNSUPPORTED CALL_FAILED OPEN_FAILED READ_FAILED "
        "WRITE_FAILED PARSE_FAILED RESOURCE_BUSY INVALID_DOMAIN MULTIPLE_DOMAINS INVALID_STREAM "
        "NO_DOMAIN_METADATA NO_NETWORK_METADATA AGENT_UNRESPONSIVE AGENT_UNSYNCED AGENT_COMMAND_FAILED "
        "AGENT_COMMAND_TIMEOUT BLOCK_COPY_ACTIVE NO_DOMAIN_BACKUP "
        "NO_DOMAIN_SNAPSHOT INVALID_DOMAIN_SNAPSHOT SNAPSHOT_REVERT_RISKY NO_DOMAIN_CHECKPOINT "
        "INVALID_DOMAIN_CHECKPOINT CHECKPOINT_INCONSISTENT MIGRATE_PERSIST_FAILED MIGRATE_UNSAFE "
        "MIGRATE_FINISH_OK GET_FAILED POST_FAILED HTTP_ERROR SEXPR_SERIAL NO_XEN XEN_CALL NO_XENSTORE",
        job_may_cause=True,
        example="OPERATION_TIMEOUT QEMU Timed out during operation: cannot acquire state change lock"),
)
# fmt: on

RULES = (*_BEFORE_ALL, *_OF_THE_JOB, *_OF_THE_MACHINE, *_BY_CODE, UNKNOWN)


# The classification


class NoDomain(libvirt.libvirtError):  # type: ignore[misc]
    """The error for a domain that does not exist, or if another one has its UUID or its name."""

    def get_error_code(self) -> int:
        return int(libvirt.VIR_ERR_NO_DOMAIN)


class Garbled(libvirt.libvirtError):  # type: ignore[misc]
    """An error of libvirt whose message its bindings cannot decode: QEMU quotes bytes that are not text."""

    def __init__(self) -> None:
        # libvirtError's own would ask for the message.
        Exception.__init__(self, "an error whose message is no text")
        self.err = (libvirt.VIR_ERR_INTERNAL_ERROR, libvirt.VIR_FROM_QEMU, str(self), 2, None, None, None, 0, 0)


class ConnectionLost(libvirt.libvirtError):  # type: ignore[misc]
    """A loss of the connection during a call that is not retried: the outcome of the call is unknown."""

    def __init__(self, error: libvirt.libvirtError) -> None:
        super().__init__(str(error))
        self.err = error.err

    def get_error_code(self) -> int:
        return int(libvirt.VIR_ERR_NO_CONNECT)


def is_connection_loss(error: libvirt.libvirtError) -> bool:
    """Return True if the error concerns the connection to libvirtd and not the request."""
    return not is_of_another_daemon(error) and (_takes(NO_CONNECTION, error) or _takes(HUNG_UP, error))


def is_of_another_daemon(error: libvirt.libvirtError) -> bool:
    """Return True if libvirtd cannot reach another daemon, for which no connection needs to be opened again."""
    return message_of(error).startswith("Failed to connect socket to ")


def is_no_domain(error: libvirt.libvirtError) -> bool:
    return bool(error.get_error_code() == libvirt.VIR_ERR_NO_DOMAIN)


def is_unsupported(error: libvirt.libvirtError) -> bool:
    return error.get_error_code() in numbers(("NO_SUPPORT", "OPERATION_UNSUPPORTED"))


CLOSED = (
    "libvirtd cannot open this process's files, as for a save: the process is in a container with pids of its own, "
    "root may not use the file system (NFS with root_squash), or SELinux or AppArmor denies it"
)


def is_closed(error: libvirt.libvirtError) -> bool:
    """Return True if libvirtd, which is root, could not open a file that this process has opened as another user."""
    doing = ("Failed to open file '/proc/", "Failed to create file '/proc/", "Error from child process ")
    return error.get_error_code() == libvirt.VIR_ERR_SYSTEM_ERROR and message_of(error).startswith(doing)


def is_blocked(error: libvirt.libvirtError) -> bool:
    """Return True if QEMU cannot save such a VM, which runs on; libvirt asks QEMU for its blockers since 8.5."""
    words = ("cannot migrate", "live migration", "igration is disabled", "igration with ", "blocked by", "non-USB host")
    return any(each in message_of(error) for each in words)


def is_unknown_flag(error: libvirt.libvirtError) -> bool:
    """Return True if libvirt's driver of the hypervisor does not know a flag, and so has done nothing."""
    return error.get_error_code() == libvirt.VIR_ERR_INVALID_ARG and message_of(error).startswith("unsupported flags")


def unreachable(uri: str, error: BaseException) -> errors.MachineFault:
    """Return the fault for a libvirtd that cannot be reached."""
    daemon = libvirt_daemons.of_qemu()
    hint = f"start {daemon} (systemctl start {daemon}), and look into its log."
    return errors.MachineFault(f"libvirt cannot be reached at {uri}: {error}.", hint)


def hanging(uri: str) -> errors.MachineFault:
    """Return the fault for a libvirtd that accepts connections and does not answer."""
    daemon = libvirt_daemons.of_qemu()
    hint = f"see what {daemon} hangs on, or restart {daemon}; guests survive that."
    return errors.MachineFault(f"libvirt at {uri} does not answer.", hint)


def late(uri: str, seconds: float) -> errors.MachineFault:
    """Return the fault for a call that timed out: libvirtd hangs, or the hypervisor that it asks."""
    hint = f"see what {libvirt_daemons.of_qemu()} or the VM's hypervisor hangs on."
    return errors.MachineFault(f"libvirt at {uri} has not answered within {seconds:g} s.", hint)


def numbers(names: Iterable[str], prefix: str = "VIR_ERR_") -> frozenset[int]:
    """Return the numbers of libvirt's constants; an older libvirt lacks some, and never reports them."""
    return frozenset(getattr(libvirt, prefix + name, -1) for name in names)


def classify(error: libvirt.libvirtError, job_values: Iterable[str] = (), more: str = "") -> Rule:
    """Return the rule for an error of libvirt, with the parameters of `from_libvirt`."""
    return fault_rules.classify(RULES, message_of(error, more), job_values, lambda rule: _takes(rule, error))


def _takes(rule: Rule, error: libvirt.libvirtError) -> bool:
    """Return True if the rule is for errors of this code and this origin."""
    is_of_code = not rule.kinds or error.get_error_code() in numbers(rule.kinds)
    return is_of_code and (not rule.origins or error.get_error_domain() in numbers(rule.origins, "VIR_FROM_"))


def from_libvirt(
    error: libvirt.libvirtError, doing: str, job_values: Iterable[str] = (), more: str = ""
) -> errors.Fault:
    """Return the fault for an error while `doing` something ("starting alice_lab_7.0"), with QEMU's words as `more`.

    `job_values` are texts that the job chose (`fault_rules.classify`).
    """
    rule = classify(error, job_values, more)
    return rule.make(f"libvirt failed while {doing}: {message_of(error, more)}.")


def message_of(error: libvirt.libvirtError, more: str = "") -> str:
    """Return libvirt's message in one line, with what else is known of the error."""
    message = " ".join(str(error.get_error_message() or error).split())
    return f"{message.rstrip(' :')}: {more}" if more else message
