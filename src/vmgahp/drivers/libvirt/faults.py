"""The classification of libvirt's errors, by the rules of `fault_table`."""

from __future__ import annotations

from collections.abc import Iterable

import libvirt

from vmgahp import errors
from vmgahp.drivers import fault_rules
from vmgahp.drivers.fault_rules import Rule
from vmgahp.drivers.libvirt.fault_table import HUNG_UP, NO_CONNECTION, RULES
from vmgahp.host import libvirt_daemons


class NoDomain(libvirt.libvirtError):  # type: ignore[misc]
    """The error for a domain that does not exist, or if another one has its UUID or its name."""

    def get_error_code(self) -> int:
        """Return libvirt's code for an unknown domain."""
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
        """Return libvirt's code for a missing connection."""
        return int(libvirt.VIR_ERR_NO_CONNECT)


def find(connection: libvirt.virConnect, name: str, uuid: str) -> libvirt.virDomain:
    """Return the domain that has both the name and the UUID.

    A checkpoint contains its UUID, and a forged one could have that of another's VM: a domain must never be selected
    by its UUID alone. Raises `libvirt.libvirtError`, in particular `NoDomain`.
    """
    domain = connection.lookupByUUIDString(uuid)
    if domain.name() != name:
        raise NoDomain(f"no domain has the name {name} and the UUID {uuid}")
    return domain


def is_connection_loss(error: libvirt.libvirtError) -> bool:
    """Tell whether the error concerns the connection to libvirtd and not the request."""
    if is_of_another_daemon(error):
        return False
    code, origin = error.get_error_code(), error.get_error_domain()
    return code in _LOST or (code in _LOST_FROM[0] and origin in _LOST_FROM[1])


def is_of_another_daemon(error: libvirt.libvirtError) -> bool:
    """Tell whether libvirtd reports that it cannot reach another daemon of libvirt's, such as virtnetworkd.

    The error has the code of a lost connection, but a connection that is open does not connect again.
    """
    return message_of(error).startswith("Failed to connect socket to ")


def is_no_domain(error: libvirt.libvirtError) -> bool:
    """Return True if the requested domain does not exist (any more)."""
    return bool(error.get_error_code() == libvirt.VIR_ERR_NO_DOMAIN)


def is_unsupported(error: libvirt.libvirtError) -> bool:
    """Return True if libvirt's driver of the hypervisor does not support the call."""
    return error.get_error_code() in numbers(("NO_SUPPORT", "OPERATION_UNSUPPORTED"))


def is_blocked(error: libvirt.libvirtError) -> bool:
    """Return True if a save failed because QEMU, or libvirt for it, cannot save such a VM; its guest runs on.

    libvirt asks QEMU for its migration blockers since 8.5, and passes on its words before.
    """
    words = ("cannot migrate", "live migration", "igration is disabled", "igration with ", "blocked by", "non-USB host")
    return any(each in message_of(error) for each in words)


def is_unknown_flag(error: libvirt.libvirtError) -> bool:
    """Return True if libvirt's driver of the hypervisor does not know a flag, and so has done nothing."""
    return error.get_error_code() == libvirt.VIR_ERR_INVALID_ARG and message_of(error).startswith("unsupported flags")


def unreachable(uri: str, error: BaseException) -> errors.MachineFault:
    """Return the fault for a libvirtd that cannot be reached."""
    daemon = libvirt_daemons.of_qemu()
    return errors.MachineFault(
        f"libvirt cannot be reached at {uri}: {error}.",
        f"start {daemon} (systemctl start {daemon}), and look into its log.",
    )


def hanging(uri: str) -> errors.MachineFault:
    """Return the fault for a libvirtd that accepts connections and does not answer."""
    daemon = libvirt_daemons.of_qemu()
    return errors.MachineFault(
        f"libvirt at {uri} does not answer.", f"see what {daemon} hangs on, or restart {daemon}; guests survive that."
    )


def late(uri: str, seconds: float) -> errors.MachineFault:
    """Return the fault for a call that timed out: libvirtd hangs, or the hypervisor that it asks."""
    return errors.MachineFault(
        f"libvirt at {uri} has not answered within {seconds:g} s.",
        f"see what {libvirt_daemons.of_qemu()} or the VM's hypervisor hangs on.",
    )


def numbers(names: Iterable[str], prefix: str = "VIR_ERR_") -> frozenset[int]:
    """Return the numbers of libvirt's constants; an older libvirt lacks some, and never reports them."""
    return frozenset(getattr(libvirt, prefix + name, -1) for name in names)


def classify(error: libvirt.libvirtError, job_values: Iterable[str] = (), more: str = "") -> Rule:
    """Return the rule for an error of libvirt; see `from_libvirt` for the parameters."""
    return rule_of(error.get_error_code(), error.get_error_domain(), message_of(error, more), job_values)


def rule_of(code: int | None, origin: int | None, message: str, job_values: Iterable[str] = ()) -> Rule:
    """Return the first rule of the table that matches an error; the last one matches any."""

    def takes(rule: Rule) -> bool:
        return (not rule.kinds or code in numbers(rule.kinds)) and (
            not rule.origins or origin in numbers(rule.origins, "VIR_FROM_")
        )

    return fault_rules.classify(RULES, message, job_values, takes)


def from_libvirt(
    error: libvirt.libvirtError, doing: str, job_values: Iterable[str] = (), more: str = ""
) -> errors.Fault:
    """Return the fault for an error of libvirt met while `doing` something ("starting alice_lab_7.0").

    `job_values` are texts that the job chose (`fault_rules.classify`). `more` is what else is known of the error
    (`qemu_log`).
    """
    rule = classify(error, job_values, more)
    return rule.make(f"libvirt failed while {doing}: {message_of(error, more)}.")


def message_of(error: libvirt.libvirtError, more: str = "") -> str:
    """Return libvirt's message in one line, with what else is known of the error."""
    message = " ".join(str(error.get_error_message() or error).split())
    return f"{message.rstrip(' :')}: {more}" if more else message


_LOST = numbers(NO_CONNECTION.kinds)
_LOST_FROM = numbers(HUNG_UP.kinds), numbers(HUNG_UP.origins, "VIR_FROM_")
