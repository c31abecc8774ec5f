"""Whose fault an error of libvirt is, by the rules of `fault_table`."""

from _collections_abc import Iterable

from vmgahp import errors
from vmgahp.drivers.libvirt import binding as libvirt
from vmgahp.host import libvirt_daemons

TYPE_CHECKING = False
if TYPE_CHECKING:
    from vmgahp.drivers.fault_rules import Rule

NO_CONNECTION = "RPC NO_CONNECT INVALID_CONN"
"""The kinds of error that say that libvirtd is not there."""
HUNG_UP, HUNG_UP_ORIGINS = "INTERNAL_ERROR SYSTEM_ERROR", "RPC REMOTE"
"""Those that say so where they come from these parts of libvirt."""


class NoDomain(libvirt.libvirtError):
    """The domain does not exist, or another one has its UUID or its name."""

    def get_error_code(self) -> int:
        """As libvirt says it of a domain that it does not know."""
        return libvirt.VIR_ERR_NO_DOMAIN


class Garbled(libvirt.libvirtError):
    """libvirt has failed, and its bindings cannot say why: QEMU quotes bytes that are no text."""

    def __init__(self) -> None:
        # libvirtError's own would ask for the message.
        Exception.__init__(self, "an error whose message is no text")
        self.err = (libvirt.VIR_ERR_INTERNAL_ERROR, libvirt.VIR_FROM_QEMU, str(self), 2, None, None, None, 0, 0)


class ConnectionLost(libvirt.libvirtError):
    """The connection was lost during a call that is not made again: whether libvirt has done it is unknown."""

    def __init__(self, error: libvirt.libvirtError) -> None:
        super().__init__(str(error))
        self.err = error.err

    def get_error_code(self) -> int:
        """As libvirt says it of a connection that it has not."""
        return libvirt.VIR_ERR_NO_CONNECT


def find(connection: libvirt.virConnect, name: str, uuid: str) -> libvirt.virDomain:
    """The domain that has both the name and the UUID.

    A checkpoint brings its UUID with it, and whoever crafts one could choose that of another's VM: nothing
    may ever be done to a domain by its UUID alone. Raises `libvirt.libvirtError`, `NoDomain` above all.
    """
    domain = connection.lookupByUUIDString(uuid)
    if domain.name() != name:
        raise NoDomain(f"no domain has the name {name} and the UUID {uuid}")
    return domain


def is_connection_loss(error: libvirt.libvirtError) -> bool:
    """Tell whether the error is about the way to libvirtd and not about what was asked of it."""
    if is_of_another_daemon(error):
        return False
    code, origin = error.get_error_code(), error.get_error_domain()
    return code in _LOST or (code in _LOST_FROM[0] and origin in _LOST_FROM[1])


def is_of_another_daemon(error: libvirt.libvirtError) -> bool:
    """Tell whether libvirtd has not reached another daemon of libvirt's, such as virtnetworkd, and passes that on.

    It has the code of a lost connection, but a connection that is open does not connect again.
    """
    return message_of(error).startswith("Failed to connect socket to ")


def is_no_domain(error: libvirt.libvirtError) -> bool:
    """Whether the domain that was asked for does not exist (any more)."""
    return error.get_error_code() == libvirt.VIR_ERR_NO_DOMAIN


def is_unsupported(error: libvirt.libvirtError) -> bool:
    """Whether libvirt's driver of the hypervisor has no such call."""
    return error.get_error_code() in numbers(("NO_SUPPORT", "OPERATION_UNSUPPORTED"))


def is_unknown_flag(error: libvirt.libvirtError) -> bool:
    """Whether libvirt's driver of the hypervisor does not know a flag, and so has done nothing."""
    return error.get_error_code() == libvirt.VIR_ERR_INVALID_ARG and message_of(error).startswith("unsupported flags")


def unreachable(uri: str, error: BaseException) -> errors.MachineFault:
    """libvirtd does not answer at all."""
    daemon = libvirt_daemons.of_qemu()
    return errors.MachineFault(
        f"libvirt cannot be reached at {uri}: {error}.",
        f"start {daemon} (systemctl start {daemon}), and look into its log.",
    )


def hanging(uri: str) -> errors.MachineFault:
    """libvirtd takes connections and answers nothing."""
    daemon = libvirt_daemons.of_qemu()
    return errors.MachineFault(
        f"libvirt at {uri} does not answer.", f"see what {daemon} hangs on, or restart {daemon}; guests survive that."
    )


def late(uri: str, seconds: float) -> errors.MachineFault:
    """libvirtd has not answered a call in time: it hangs, or the hypervisor does that it asks."""
    return errors.MachineFault(
        f"libvirt at {uri} has not answered within {seconds:g} s.",
        f"see what {libvirt_daemons.of_qemu()} or the VM's hypervisor hangs on.",
    )


def numbers(names: Iterable[str], table: dict[str, int] = libvirt.CODES) -> frozenset[int]:
    """The numbers of libvirt's constants."""
    return frozenset(table[name] for name in names)


def classify(error: libvirt.libvirtError, job_values: Iterable[str] = (), more: str = "") -> "Rule":
    """The rule of an error of libvirt; see `from_libvirt` for the rest."""
    return rule_of(error.get_error_code(), error.get_error_domain(), message_of(error, more), job_values)


def rule_of(code: int | None, origin: int | None, message: str, job_values: Iterable[str] = ()) -> "Rule":
    """The first rule of the table that an error fits; the last one takes any."""
    from vmgahp.drivers import fault_rules  # here, where something has failed: a server holds no table of errors
    from vmgahp.drivers.libvirt.fault_table import RULES

    def takes(rule: "Rule") -> bool:
        return (not rule.kinds or code in numbers(rule.kinds)) and (
            not rule.origins or origin in numbers(rule.origins, libvirt.ORIGINS)
        )

    return fault_rules.classify(RULES, message, job_values, takes)


def from_libvirt(
    error: libvirt.libvirtError, doing: str, job_values: Iterable[str] = (), more: str = ""
) -> errors.Fault:
    """The fault for an error of libvirt met while `doing` something ("starting alice_lab_7.0").

    `job_values` are texts that the job chose (`fault_rules.classify`). `more` is what is known beside the
    message (`qemu_log`).
    """
    rule = classify(error, job_values, more)
    return rule.make(f"libvirt failed while {doing}: {message_of(error, more)}.")


def message_of(error: libvirt.libvirtError, more: str = "") -> str:
    """What libvirt says, in one line, and what is known beside it."""
    message = " ".join(str(error.get_error_message() or error).split())
    return f"{message.rstrip(' :')}: {more}" if more else message


_LOST = numbers(NO_CONNECTION.split())
_LOST_FROM = numbers(HUNG_UP.split()), numbers(HUNG_UP_ORIGINS.split(), libvirt.ORIGINS)
