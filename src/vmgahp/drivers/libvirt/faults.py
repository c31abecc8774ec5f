"""Whose fault an error of libvirt is.

libvirt's error codes say little (most of what a bad disk does to QEMU is ``VIR_ERR_INTERNAL_ERROR``), so the
message decides where it must. The job's side is asked first: the name of a backing file is the job's to
choose, and one that reads like a machine's trouble must not take the machine out of service. An error that
nothing here knows is the hypervisor's.
"""

import re

import libvirt

from vmgahp import errors

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

_CONNECTION_CODES = {
    libvirt.VIR_ERR_RPC,
    libvirt.VIR_ERR_NO_CONNECT,
    libvirt.VIR_ERR_INVALID_CONN,
}
_CONNECTION_DOMAINS = {libvirt.VIR_FROM_RPC, libvirt.VIR_FROM_REMOTE}

_DISK_CURE = (
    "see that the image exists, that its format is the one in vm_disk, and that the job's owner may use it."
)

_JOB_MESSAGES: tuple[tuple[str, str, str], ...] = (
    (
        r"not in \w+ format|[Ii]mage is corrupt|[Ii]nvalid (image|footer|header|magic)|Unsupported qcow",
        errors.BAD_IMAGE,
        _DISK_CURE,
    ),
    (r"backing (file|store)|[Ff]ailed to get .*lock", errors.INVALID_DISK_PARAM, _DISK_CURE),
    (
        r"Could not (open|read|refresh|reopen) '|Cannot access (storage|backing) file|Failed to open file '",
        errors.INVALID_DISK_PARAM,
        _DISK_CURE,
    ),
    (
        r"[Dd]isk (target|bus|device|type)|target '.*' duplicated|[Ii]nvalid (harddisk )?device name"
        r"|IDE controllers? .*unsupported",
        errors.INVALID_DISK_PARAM,
        "choose another device name in vm_disk, such as vda.",
    ),
    (r"[Mm]aximum CPUs|vcpus|vCPUs|CPU topology", errors.MISMATCHED, "ask for fewer CPUs (vm_vcpus)."),
    (
        r"MAC address|mac address",
        errors.MISMATCHED,
        "leave vm_macaddr out, or choose a unicast address that nobody uses.",
    ),
    (r"memory size|minimum memory", errors.NO_MEMORY_PARAM, "ask for another vm_memory."),
)

_MACHINE_ENDINGS: tuple[tuple[str, str], ...] = (
    (r"No space left on device$", "make room on the file system that the message names."),
    (r"Cannot allocate memory$", "give VMs less memory (VM_MEMORY), or the machine more."),
)
"""The operating system's own word, which QEMU puts last, behind whatever the job may have chosen."""

_MACHINE_MESSAGES: tuple[tuple[str, str], ...] = (
    (
        r"[Cc]annot allocate memory|[Oo]ut of memory|set up guest memory",
        "give VMs less memory (VM_MEMORY), or the machine more.",
    ),
    (r"network '.*' is not active", "start the network: virsh net-start NAME; virsh net-autostart NAME."),
    (
        r"[Nn]etwork not found|no network with matching name",
        "define the libvirt network, or set VM_NAT_NETWORK to the one to use.",
    ),
    (
        r"Cannot get interface MTU|bridge .* not exist|[Nn]o such device",
        "make the bridge of VM_NETWORKING_BRIDGE_INTERFACE, or name another.",
    ),
    (
        r"[Kk][Vv][Mm] kernel module|KVM is not available|domain type '?kvm'?|invalid domaintype|failed to set MSR",
        "see whether KVM works here: vmgahp probe.",
    ),
    (
        r"\.aes|monitor\.sock|/var/lib/libvirt/qemu|/run/libvirt",
        "let the job's user pass /var/lib/libvirt/qemu (chmod o+x), or set VM_RUN_AS_JOB_USER = False.",
    ),
    (r"passt", "install passt, or leave user out of VM_NETWORKING_TYPE."),
)

_JOB_CODES = {
    libvirt.VIR_ERR_CONFIG_UNSUPPORTED,
    libvirt.VIR_ERR_XML_ERROR,
    libvirt.VIR_ERR_XML_DETAIL,
    libvirt.VIR_ERR_XML_INVALID_SCHEMA,
    libvirt.VIR_ERR_INVALID_ARG,
}


class NoDomain(libvirt.libvirtError):  # type: ignore[misc]
    """The domain does not exist, or another one has its UUID or its name."""

    def get_error_code(self) -> int:
        """As libvirt says it of a domain that it does not know."""
        code: int = libvirt.VIR_ERR_NO_DOMAIN
        return code


def find(connection: "libvirt.virConnect", name: str, uuid: str) -> "libvirt.virDomain":
    """The domain that has both the name and the UUID.

    A checkpoint brings its UUID with it, and whoever crafts one could choose that of another's VM: nothing
    may ever be done to a domain by its UUID alone. Raises `libvirt.libvirtError`, `NoDomain` above all.
    """
    domain = connection.lookupByUUIDString(uuid)
    if domain.name() != name:
        raise NoDomain(f"no domain has the name {name} and the UUID {uuid}")
    return domain


def is_connection_loss(error: "libvirt.libvirtError") -> bool:
    """Whether the error is about the way to libvirtd and not about what was asked of it."""
    code, domain = error.get_error_code(), error.get_error_domain()
    return bool(
        code in _CONNECTION_CODES
        or (
            domain in _CONNECTION_DOMAINS
            and code in (libvirt.VIR_ERR_INTERNAL_ERROR, libvirt.VIR_ERR_SYSTEM_ERROR)
        )
    )


def is_no_domain(error: "libvirt.libvirtError") -> bool:
    """Whether the domain that was asked for does not exist (any more)."""
    return bool(error.get_error_code() == libvirt.VIR_ERR_NO_DOMAIN)


def unreachable(uri: str, error: "libvirt.libvirtError") -> errors.MachineFault:
    """libvirtd does not answer at all."""
    return errors.MachineFault(
        f"libvirt cannot be reached at {uri}: {error}.",
        "start libvirtd (systemctl start libvirtd, or virtqemud), and look into its log.",
    )


def hanging(uri: str) -> errors.MachineFault:
    """libvirtd takes connections and answers nothing."""
    return errors.MachineFault(
        f"libvirt at {uri} does not answer.",
        "see what libvirtd hangs on, or restart it; guests survive that.",
    )


def from_libvirt(error: "libvirt.libvirtError", doing: str, job_values: "Iterable[str]" = ()) -> errors.Fault:
    """The fault for an error of libvirt met while `doing` something ("starting alice_lab_7.0").

    `job_values` are texts that the job chose, its paths above all. They are cut out before the message is
    judged, or a disk called "No space left on device" would take the machine out of service.
    """
    message = " ".join(str(error.get_error_message() or error).split())
    problem = f"libvirt failed while {doing}: {message}."
    for value in sorted(job_values, key=len, reverse=True):
        message = message.replace(value, "*")
    if is_no_domain(error):
        return errors.ClientFault(errors.VM_NOT_FOUND, problem)
    if is_connection_loss(error):
        return errors.MachineFault(problem, "see that libvirtd runs, and look into its log.")
    for pattern, cure in _MACHINE_ENDINGS:
        if re.search(pattern, message):
            return errors.MachineFault(problem, cure)
    for pattern, word, cure in _JOB_MESSAGES:
        if re.search(pattern, message):
            return errors.JobFault(word, problem, cure)
    for pattern, cure in _MACHINE_MESSAGES:
        if re.search(pattern, message):
            return errors.MachineFault(problem, cure)
    if error.get_error_code() in _JOB_CODES:
        return errors.JobFault(
            errors.INVALID_DISK_PARAM, problem, "change the attribute of the job that the message is about."
        )
    return errors.HypervisorFault(problem, "look into libvirt's log and QEMU's (/var/log/libvirt/qemu).")
