"""Whose fault an error is: one table, for libvirt's errors and our own checks.

libvirt's error codes say little (most of what a bad disk does to QEMU is ``VIR_ERR_INTERNAL_ERROR``), so the
message decides where it must, and the code where no message is known. `RULES` is read from the top, and the
first rule that an error fits is its own:

1. what no job can bring about: the domain is gone, libvirtd is away, or the operating system's own last word
   is that room or memory ran out;
2. what the job chose, disks above all. It comes before the machine's messages, because a job chooses the
   names in them, and a name that reads like a machine's trouble must not take the machine out of service;
3. what the machine's keeper chose or has to look after;
4. libvirt's codes, every one of them;
5. whatever is left, such as a code of a later libvirt: the hypervisor's.

Who must act is the class of the fault, and only a job's rule has a word that holds the job.
"""

from typing import NamedTuple

from vmgahp import errors
from vmgahp.errors import ClientFault, Fault, HypervisorFault, JobFault, MachineFault


class Rule(NamedTuple):
    """One row: which errors it takes, and what becomes of them."""

    name: str
    fault: type[Fault]
    code: str
    hint: str
    message: str = ""
    """A regular expression that is found in the message; empty takes any."""
    codes: tuple[str, ...] = ()
    """libvirt's error codes without ``VIR_ERR_``; none takes any."""
    origins: tuple[str, ...] = ()
    """The parts of libvirt that may report it, without ``VIR_FROM_``; none takes any."""
    example: tuple[str, str, str] = ("", "", "")
    """Code, origin and message, shortened, with ``*`` for what the job chose; empty where a message decides first."""


_QEMU = ("INTERNAL_ERROR", "QEMU")
_EXIT = "internal error: qemu unexpectedly closed the monitor: qemu-system-x86_64: "
_FORMAT = '-blockdev {"node-name":"libvirt-1-format","driver":"qcow2","file":"libvirt-1-storage"}: '
_STORAGE = '-blockdev {"driver":"file","filename":"*","node-name":"libvirt-1-storage"}: '
_DISK_HINT = (
    "see that the image exists, that its format is the one in vm_disk, and that the job's owner may use it."
)
_FORMAT_HINT = "see what qemu-img check says about the image, and that vm_disk names its true format."
_DEVICE_HINT = "choose another device name in vm_disk, such as vda."
_RAM_HINT = "give VMs less memory (VM_MEMORY), or the machine more."
_LIBVIRTD_HINT = "see that libvirtd runs, and look into its log."
_LOG_HINT = "look into libvirt's log and QEMU's (/var/log/libvirt/qemu)."
_SETUP_HINT = f"see what libvirt's set-up on this machine lacks; {_LOG_HINT}"
_DISK, _IMAGE = errors.INVALID_DISK_PARAM, errors.BAD_IMAGE
_OFF, _INTERNAL = errors.CRITICAL, errors.INTERNAL

DESCRIPTION = Rule(
    "the description of the VM",
    JobFault,
    _DISK,
    "change the attribute of the job that the message is about.",
    codes=(
        *("CONFIG_UNSUPPORTED", "XML_ERROR", "XML_DETAIL", "XML_INVALID_SCHEMA", "INVALID_ARG"),
        *("OS_TYPE", "NO_NAME", "NO_OS", "NO_ROOT", "NO_DEVICE", "NO_SOURCE", "NO_TARGET", "NO_KERNEL"),
    ),
    example=("CONFIG_UNSUPPORTED", "DOMAIN", "unsupported configuration: unknown driver format value '*'"),
)
"""What libvirt does not take, and no message says of what: the job's, unless a script wrote the XML."""

UNKNOWN = Rule("anything else", HypervisorFault, _INTERNAL, _LOG_HINT)

_BEFORE_ALL = (
    Rule(
        "the domain is gone",
        ClientFault,
        errors.VM_NOT_FOUND,
        "",
        codes=("NO_DOMAIN",),
        example=("NO_DOMAIN", "QEMU", "Domain not found: no domain with matching name 'alice_lab_7.0'"),
    ),
    Rule(
        "the way to libvirtd",
        MachineFault,
        _OFF,
        _LIBVIRTD_HINT,
        codes=("RPC", "NO_CONNECT", "INVALID_CONN"),
        example=("RPC", "RPC", "internal error: received hangup event on socket"),
    ),
    Rule(
        "libvirtd hung up",
        MachineFault,
        _OFF,
        _LIBVIRTD_HINT,
        codes=("INTERNAL_ERROR", "SYSTEM_ERROR"),
        origins=("RPC", "REMOTE"),
        example=("INTERNAL_ERROR", "RPC", "internal error: client socket is closed"),
    ),
    Rule(
        "no room on a file system",
        MachineFault,
        _OFF,
        "make room on the file system that the message names.",
        r"No space left on device$",
        example=("SYSTEM_ERROR", "QEMU", "cannot write data to file '*': No space left on device"),
    ),
    Rule(
        "no memory",
        MachineFault,
        _OFF,
        _RAM_HINT,
        r"Cannot allocate memory$",
        example=(*_QEMU, _EXIT + "cannot set up guest memory 'pc.ram': Cannot allocate memory"),
    ),
)

_OF_THE_JOB = (
    Rule(
        "a locked image",
        JobFault,
        _DISK,
        "let no other VM use the image at the same time, or give it the permission r in all of them.",
        r"[Ff]ailed to get .*lock",
        example=(*_QEMU, _EXIT + '-device {"id":"virtio-disk0"}: Failed to get "write" lock'),
    ),
    Rule(
        "a backing file",
        JobFault,
        _DISK,
        _DISK_HINT,
        r"[Bb]acking (file|store)",
        example=(*_QEMU, _EXIT + _FORMAT + "Could not open backing file: No such file or directory"),
    ),
    Rule(
        "an image that cannot be opened",
        JobFault,
        _DISK,
        _DISK_HINT,
        r"Could not (open|read|refresh|reopen) '|Cannot access storage file|Failed to open file '"
        r"|^Path '.*' is not accessible|\"node-name\":\"libvirt-\d+-storage\".*\}: ",
        example=(*_QEMU, _EXIT + _STORAGE + "Could not open '*': Permission denied"),
    ),
    Rule(
        "an image that is damaged or of another format",
        JobFault,
        _IMAGE,
        _FORMAT_HINT,
        r"not in \w+ format|[Ii]mage is corrupt|[Ii]nvalid (\w+ )?(image|footer|header|magic)"
        r"|Unsupported qcow|\"node-name\":\"libvirt-\d+-format\".*\}: ",
        example=(*_QEMU, _EXIT + _FORMAT + "Active L1 table offset invalid"),
    ),
    Rule(
        "a device name",
        JobFault,
        _DISK,
        _DEVICE_HINT,
        r"[Dd]isk (target|bus|device|type|name)|target '.*' duplicated|[Ii]nvalid (harddisk )?device name"
        r"|IDE controllers? .*unsupported|Only 1 \w+ controller is supported",
        example=(*_QEMU, "internal error: Only 1 IDE controller is supported"),
    ),
    Rule(
        "the number of CPUs",
        JobFault,
        errors.MISMATCHED,
        "ask for fewer CPUs (vm_vcpus).",
        r"[Mm]aximum CPUs|vcpus|vCPUs|CPU topology",
        example=(
            *("CONFIG_UNSUPPORTED", "QEMU"),
            "unsupported configuration: Maximum CPUs greater than specified machine type limit 255",
        ),
    ),
    Rule(
        "a MAC address",
        JobFault,
        errors.MISMATCHED,
        "leave vm_macaddr out, or choose a unicast address that nobody uses.",
        r"MAC address|mac address",
        example=("XML_ERROR", "DOMAIN", "XML error: expected unicast mac address, found multicast '*'"),
    ),
    Rule(
        "the amount of memory",
        JobFault,
        errors.NO_MEMORY_PARAM,
        "ask for another vm_memory.",
        r"[Mm]emory size|minimum memory|RAM size|phys-bits too low|value too large: \d+[KMGTP]iB",
        example=("OVERFLOW", "NONE", "numerical overflow: value too large: 17179869183PiB"),
    ),
)

_OF_THE_MACHINE = (
    Rule(
        "memory for the guest",
        MachineFault,
        _OFF,
        _RAM_HINT,
        r"[Cc]annot allocate memory|[Oo]ut of memory|set up guest memory|hugetlbfs",
        example=("INTERNAL_ERROR", "QEMU", "internal error: hugetlbfs filesystem is not mounted or disabled"),
    ),
    Rule(
        "a network that is not active",
        MachineFault,
        _OFF,
        "start the network: virsh net-start NAME; virsh net-autostart NAME.",
        r"network '.*' is not active",
        example=(
            *("OPERATION_INVALID", "NETWORK"),
            "Requested operation is not valid: network 'default' is not active",
        ),
    ),
    Rule(
        "a network that is not there",
        MachineFault,
        _OFF,
        "define the libvirt network, or set VM_NAT_NETWORK to the one to use.",
        r"[Nn]etwork not found|no network with matching name",
        example=("NO_NETWORK", "NETWORK", "Network not found: no network with matching name 'nowhere'"),
    ),
    Rule(
        "a bridge",
        MachineFault,
        _OFF,
        "make the bridge of VM_NETWORKING_BRIDGE_INTERFACE, or name another.",
        r"Cannot get interface MTU|bridge .* not exist|[Nn]o such device",
        example=("SYSTEM_ERROR", "NONE", "Cannot get interface MTU on 'br0': No such device"),
    ),
    Rule(
        "KVM",
        MachineFault,
        _OFF,
        "see whether KVM works here: vmgahp probe.",
        r"[Kk][Vv][Mm] kernel module|KVM is not available|domain type '?kvm'?|invalid domaintype"
        r"|failed to set MSR",
        example=(*_QEMU, _EXIT + "Could not access KVM kernel module: No such file or directory"),
    ),
    Rule(
        "the CPU of guests",
        MachineFault,
        _OFF,
        "set VM_CPU_MODE to one that virsh domcapabilities shows as supported.",
        r"CPU mode '.*' .*not supported|[Uu]nknown CPU model|[Gg]uest CPU",
        example=(
            *("CONFIG_UNSUPPORTED", "QEMU"),
            "unsupported configuration: CPU mode 'host-passthrough' for x86_64 qemu domain on x86_64 host is "
            "not supported by hypervisor",
        ),
    ),
    Rule(
        "QEMU itself",
        MachineFault,
        _OFF,
        "install QEMU for this machine's architecture (qemu-system-x86), and see that it starts.",
        r"QEMU binary|No emulator found|does not support (virt|machine) type|unsupported machine type",
        example=("SYSTEM_ERROR", "QEMU", "Cannot check QEMU binary /nope: No such file or directory"),
    ),
    Rule(
        "libvirt's own directory",
        MachineFault,
        _OFF,
        "let the job's user pass /var/lib/libvirt/qemu (chmod o+x), or set VM_RUN_AS_JOB_USER = False.",
        r"\.aes|monitor\.sock|/var/lib/libvirt/qemu|/run/libvirt",
        example=(
            *_QEMU,
            _EXIT + "-object secret: Unable to read /var/lib/libvirt/qemu/domain-1-x/master-key.aes: "
            "Permission denied",
        ),
    ),
    Rule(
        "passt",
        MachineFault,
        _OFF,
        "install passt, or leave user out of VM_NETWORKING_TYPE.",
        r"passt",
        example=(
            "XML_ERROR",
            "DOMAIN",
            "XML error: Invalid value for attribute 'type' in 'backend': 'passt'.",
        ),
    ),
    Rule(
        "the console's socket",
        MachineFault,
        _OFF,
        "see who may enter the directory of the socket, or set VM_CONSOLE_LOG_MAX = 0.",
        r"-chardev |^unable to stat: ",
        example=(
            "SYSTEM_ERROR",
            "SECURITY",
            "unable to stat: /run/vmgahp/console: No such file or directory",
        ),
    ),
    Rule(
        "a VM that has the name or the UUID already",
        MachineFault,
        _OFF,
        "see whose domain it is (virsh list --all), and remove it.",
        r"already exists with uuid|is already (active|defined|being started)",
        example=(
            *("OPERATION_FAILED", "QEMU"),
            "operation failed: domain 'alice_lab_7.0' already exists with uuid c7a5fdbd",
        ),
    ),
)

_BY_CODE = (
    DESCRIPTION,
    Rule(
        "a number that is too large",
        JobFault,
        errors.NO_MEMORY_PARAM,
        "ask for another vm_memory.",
        codes=("OVERFLOW",),
        example=("OVERFLOW", "NONE", "numerical overflow: value too large"),
    ),
    Rule(
        "a malformed MAC address",
        JobFault,
        errors.MISMATCHED,
        "leave vm_macaddr out.",
        codes=("INVALID_MAC",),
    ),
    Rule(
        "memory of libvirtd",
        MachineFault,
        _OFF,
        _RAM_HINT,
        codes=("NO_MEMORY",),
    ),
    Rule(
        "what libvirt lets this daemon do",
        MachineFault,
        _OFF,
        "let root use libvirt: see its access rules, and auth_unix_rw in libvirtd.conf.",
        codes=(
            *("OPERATION_DENIED", "ACCESS_DENIED", "AUTH_FAILED", "AUTH_CANCELLED", "AUTH_UNAVAILABLE"),
            *("GNUTLS_ERROR", "SSH", "LIBSSH", "UNKNOWN_HOST", "NO_HOSTNAME"),
        ),
        example=(
            "AUTH_UNAVAILABLE",
            "RPC",
            "authentication unavailable: no polkit agent available to authenticate action",
        ),
    ),
    Rule(
        "the machine's networks",
        MachineFault,
        _OFF,
        "see virsh net-list --all, VM_NAT_NETWORK and VM_NETWORKING_BRIDGE_INTERFACE.",
        codes=(
            *("NO_NETWORK", "INVALID_NETWORK", "NETWORK_EXIST", "NO_NETWORK_PORT", "INVALID_NETWORK_PORT"),
            *("NETWORK_PORT_EXIST", "NO_INTERFACE", "INVALID_INTERFACE", "MULTIPLE_INTERFACES"),
            *("BUILD_FIREWALL", "NO_NWFILTER", "INVALID_NWFILTER", "NO_NWFILTER_BINDING"),
            "INVALID_NWFILTER_BINDING",
        ),
        example=("NO_INTERFACE", "INTERFACE", "Interface not found: br0"),
    ),
    Rule(
        "libvirt's set-up",
        MachineFault,
        _OFF,
        _SETUP_HINT,
        codes=(
            *("HOOK_SCRIPT_FAILED", "CONF_SYNTAX", "DBUS_SERVICE", "NO_SECURITY_MODEL", "CPU_INCOMPATIBLE"),
            *("NO_SECRET", "INVALID_SECRET", "NO_SERVER", "NO_CLIENT", "DRIVER_FULL", "DOM_EXIST"),
            *("NO_STORAGE_POOL", "NO_STORAGE_VOL", "INVALID_STORAGE_POOL", "INVALID_STORAGE_VOL"),
            *("STORAGE_PROBE_FAILED", "STORAGE_POOL_BUILT", "STORAGE_VOL_EXIST"),
            *("NO_NODE_DEVICE", "INVALID_NODE_DEVICE", "DEVICE_MISSING", "NO_SUPPORT"),
        ),
        example=("HOOK_SCRIPT_FAILED", "HOOK", "Hook script execution failed: /etc/libvirt/hooks/qemu: 1"),
    ),
    Rule(
        "what QEMU or libvirt could not do",
        HypervisorFault,
        _INTERNAL,
        _LOG_HINT,
        codes=(
            *("OK", "INTERNAL_ERROR", "SYSTEM_ERROR", "OPERATION_FAILED", "OPERATION_INVALID"),
            *("OPERATION_TIMEOUT", "OPERATION_ABORTED", "OPERATION_UNSUPPORTED", "ARGUMENT_UNSUPPORTED"),
            *("CALL_FAILED", "OPEN_FAILED", "READ_FAILED", "WRITE_FAILED", "PARSE_FAILED", "RESOURCE_BUSY"),
            *("INVALID_DOMAIN", "MULTIPLE_DOMAINS", "INVALID_STREAM", "NO_DOMAIN_METADATA"),
            *("AGENT_UNRESPONSIVE", "AGENT_UNSYNCED", "BLOCK_COPY_ACTIVE", "NO_DOMAIN_BACKUP"),
            *("NO_DOMAIN_SNAPSHOT", "INVALID_DOMAIN_SNAPSHOT", "SNAPSHOT_REVERT_RISKY"),
            *("NO_DOMAIN_CHECKPOINT", "INVALID_DOMAIN_CHECKPOINT", "CHECKPOINT_INCONSISTENT"),
            *("MIGRATE_PERSIST_FAILED", "MIGRATE_UNSAFE", "MIGRATE_FINISH_OK"),
            *("GET_FAILED", "POST_FAILED", "HTTP_ERROR", "SEXPR_SERIAL", "NO_XEN", "XEN_CALL", "NO_XENSTORE"),
        ),
        example=("OPERATION_TIMEOUT", "QEMU", "Timed out during operation: cannot acquire state change lock"),
    ),
)

RULES = (*_BEFORE_ALL, *_OF_THE_JOB, *_OF_THE_MACHINE, *_BY_CODE, UNKNOWN)
