"""Fault rules: the classification of a hypervisor's errors by whose fault they are, with hints."""

import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

from vmgahp.errors import Fault, MachineFault


class Rule(NamedTuple):
    """One row. The class of the fault says who must act; only rules of job faults have a code that holds the job."""

    name: str
    fault: type[Fault]
    code: str
    """The code that answers the client: ``VMGAHP_ERR_…``."""
    hint: str = ""
    message: str = ""
    """A regular expression to search for in the message; empty matches any."""
    kinds: tuple[str, ...] = ()
    """The names of errors: libvirt's codes without ``VIR_ERR_``; empty matches any."""
    origins: tuple[str, ...] = ()
    """The parts of libvirt that may report it, without ``VIR_FROM_``; empty matches any."""
    job_may_cause: bool = False
    """True if a job can cause the error by its options or its work. An unfit machine starts no other guest."""
    example: tuple[str, str, str] = ("", "", "")
    """The kind, origin and message of an example, shortened, with ``*`` for the job's own words.

    It is empty if a rule with a message decides first.
    """

    def make(self, problem: str) -> Fault:
        """Return the fault for a problem of this rule."""
        if issubclass(self.fault, MachineFault):
            return self.fault(problem, self.hint, self.code)
        return self.fault(self.code, problem, self.hint)


def classify(
    rules: Iterable[Rule],
    message: str,
    job_values: Iterable[str] = (),
    takes: Callable[[Rule], bool] = lambda _rule: True,
) -> Rule:
    """Return the first rule that matches an error with this message; the last rule of a table matches any.

    `takes` tests what is not text: the rule's kinds and origins. `job_values` are texts that the job chose, above all
    its paths. They are cut out first, or a disk called "No space left on device" would take the machine out of
    service.
    """
    for value in sorted(filter(None, job_values), key=len, reverse=True):
        message = message.replace(value, "*")
    return next(rule for rule in rules if takes(rule) and (not rule.message or re.search(rule.message, message)))
