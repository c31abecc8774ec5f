"""Fault rules: which errors of a hypervisor are whose fault, and what to do about them."""

from collections.abc import Callable, Iterable

from vmgahp.errors import Fault, MachineFault
from vmgahp.host.light import NamedTuple


class Rule(NamedTuple):
    """One row. Who must act is the class of the fault; only the rules of job faults have a code that holds the job."""

    name: str
    """What the errors are about."""
    fault: type[Fault]
    code: str
    """The code that answers the client: ``VMGAHP_ERR_…``."""
    hint: str = ""
    message: str = ""
    """A regular expression that is found in the message; empty takes any."""
    kinds: tuple[str, ...] = ()
    """Names of errors: libvirt's codes without ``VIR_ERR_``, or vSphere's types; none takes any."""
    origins: tuple[str, ...] = ()
    """The parts of libvirt that may report it, without ``VIR_FROM_``; none takes any."""
    job_may_cause: bool = False
    """Whether a job may have caused it, by what it asks for or does. A machine that is unfit starts no other guest."""
    example: tuple[str, str, str] = ("", "", "")
    """Kind, origin and message, shortened, with ``*`` for what the job chose; empty where a message decides first."""

    def make(self, problem: str) -> Fault:
        """The fault that a problem of this rule is."""
        if issubclass(self.fault, MachineFault):
            return self.fault(problem, self.hint, self.code)
        return self.fault(self.code, problem, self.hint)


def classify(
    rules: Iterable[Rule],
    message: str,
    job_values: Iterable[str] = (),
    takes: Callable[[Rule], bool] = lambda _rule: True,
) -> Rule:
    """The first rule that fits an error with this message; the last one of a table takes any.

    `takes` looks at what is no text: the rule's kinds and origins. `job_values` are texts that the job chose, its
    paths above all. They are cut out first, or a disk called "No space left on device" would take the machine out
    of service.
    """
    import re  # here, where something has failed: a server is to hold neither it nor its tables

    for value in sorted(filter(None, job_values), key=len, reverse=True):
        message = message.replace(value, "*")
    return next(rule for rule in rules if takes(rule) and (not rule.message or re.search(rule.message, message)))
