"""The public part of a job's ClassAd, each attribute with the one value that it has.

Secrets are left out before anything else, so nothing that the job writes can spell one out. Literals, which nearly all
attributes are, are read here; where the value of an expression is asked for, HTCondor's engine (`vmgahp.job.engine`)
evaluates all that there are, once. From then on an attribute is a value and nothing else, for the administrator's
policy, for the drivers and in every message.
"""

from _collections_abc import Iterable, Mapping
from _thread import allocate_lock

from vmgahp import errors
from vmgahp.errors import ClientFault, JobFault
from vmgahp.text import has_control, is_private, shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from vmgahp.host.job_user import Identity

Plain = str | int | float | bool
"""A value. None stands for undefined."""

LONGEST_NAME = 200
"""Bytes of a VM's name: libvirt makes file names of it."""

SCOPES = frozenset(("my", "target", "parent", "self", "toplevel", "root", "other"))
"""Names that mean an ad, in lower case. An attribute of such a name would stand between an expression and that ad."""

_NOT_LITERAL = object()


class Odd(str):
    """What stands for a value that is no plain one: an error, a list, an ad. It is not a string of the job's."""

    __slots__ = ()


class _Said:
    """What the starter has sent, and what each expression of it has come to."""

    def __init__(self, pairs: "Iterable[tuple[str, str]]") -> None:
        self.values: dict[str, tuple[str, Plain | None]] = {}
        """Name in lower case -> name and value."""
        self.pending: dict[str, tuple[str, str]] = {}
        """The same, with an expression that was not evaluated yet."""
        self.expressions: frozenset[str] = frozenset()
        """The names in lower case of those that were no literals."""
        self.user: Identity | None = None
        self._refusal: JobFault | None = None
        self._lock = allocate_lock()
        for name, expression in pairs:
            key = name.lower()
            if any(is_private(part) or part in SCOPES for part in key.split(".")):
                continue
            if key == "vm_working_dir" and (key in self.values or key in self.pending):
                continue
            self.values.pop(key, None)
            self.pending.pop(key, None)
            value = literal(expression)
            if value is _NOT_LITERAL:
                self.pending[key] = name, expression
            else:
                self.values[key] = name, value  # type: ignore[assignment]
        self.expressions = frozenset(self.pending)

    def value(self, key: str) -> "Plain | None":
        # RequestMemory = MY.JobVMMemory and its like need no engine.
        for _ in range(10):
            if key not in self.pending:
                break
            expression = self.pending[key][1].lower()
            reference = expression[3:] if expression[:3] == "my." else expression
            if not _is_name(reference) or "." in reference:
                self.settle()
                break
            key = reference
        else:
            self.settle()
        return self.values[key][1] if key in self.values else None

    def settle(self) -> None:
        """Evaluate what is left. Raises `JobFault`."""
        with self._lock:
            if not self.pending:
                return
            if self._refusal is not None:  # once is enough: it may have taken long
                raise self._refusal
            from vmgahp.job import engine

            pairs = [(name, as_expression(value)) for name, value in self.values.values()]
            pairs += self.pending.values()
            try:
                found = engine.evaluate(pairs, [name for name, _ in self.pending.values()], self.user)
            except JobFault as fault:
                self._refusal = fault
                raise
            values = dict(self.values)
            for key, (name, _) in self.pending.items():
                value = found.get(name)
                values[key] = name, Odd(value[0]) if isinstance(value, list) else value  # type: ignore[assignment]
            self.values, self.pending = values, {}


class JobAd:
    """A job's ClassAd. Names are looked up in any case; of a name that comes twice the last one counts.

    ``VM_WORKING_DIR`` is the exception: condor_starter sends it first of all (``publishVMClassAd`` in
    HTCondor's ``src/condor_starter.V6.1/vm_gahp_server.cpp``), and a later one is the job's own invention.

    Whatever asks for a value raises `JobFault` where the ad's expressions cannot be evaluated.
    """

    __slots__ = ("_changes", "_said", "complete")

    def __init__(self, pairs: "Iterable[tuple[str, str]]", *, complete: bool = True) -> None:
        """Not `complete` is an ad of which a part was skipped, for it was too long."""
        self._said = _Said(pairs)
        self._changes: dict[str, tuple[str, Plain | None]] = {}
        self.complete = complete

    @staticmethod
    def parse_line(line: str) -> tuple[str, str] | None:
        """``Name = expression`` as a pair, or None for a line that is not of that form."""
        name, equals, expression = line.partition("=")
        name, expression = name.strip(" \t"), expression.strip()
        if not equals or not expression or not _is_name(name):
            return None
        if "\0" in expression or "\n" in expression or "\r" in expression:
            return None
        return name, expression

    def evaluate_as(self, user: "Identity") -> None:
        """Whose rights the engine gets that evaluates the ad's expressions; without this they are nobody's."""
        self._said.user = user

    def plain(self) -> "tuple[object, ...]":
        """What another process makes the same ad of (`of_plain`)."""
        kept = [
            [
                (key, name, str(value) if isinstance(value, Odd) else value, isinstance(value, Odd))
                for key, (name, value) in pairs
            ]
            for pairs in (self._said.values.items(), self._changes.items())
        ]
        return self.complete, dict(self._said.pending), self._said.expressions, *kept

    @classmethod
    def of_plain(cls, plain: "tuple[Any, ...]", user: "Identity") -> "JobAd":
        """The ad that another process has told of, whose engine gets the rights of `user`."""
        complete, pending, expressions, said, changes = plain
        made = cls((), complete=complete)
        made._said.user, made._said.pending, made._said.expressions = user, pending, expressions
        for kept, pairs in ((made._said.values, said), (made._changes, changes)):
            kept.update({key: (name, Odd(value) if is_odd else value) for key, name, value, is_odd in pairs})
        return made

    def changed(self, changes: "Mapping[str, Plain | None]") -> "JobAd":
        """The same with other values for some attributes."""
        made = JobAd((), complete=self.complete)
        made._said = self._said
        made._changes = self._changes | {name.lower(): (name, value) for name, value in changes.items()}
        return made

    def value(self, name: str) -> "Plain | None":
        """An attribute's value: `Odd` for an error, a list or an ad, None for undefined."""
        key = name.lower()
        return self._changes[key][1] if key in self._changes else self._said.value(key)

    def expression(self, name: str) -> str | None:
        """The value as it would be written into an ad; None where the ad has no such attribute."""
        return as_expression(self.value(name)) if self.has(name) else None

    def has(self, name: str) -> bool:
        """Whether the ad has such an attribute, whatever its value."""
        key = name.lower()
        return key in self._changes or key in self._said.values or key in self._said.pending

    def is_expression(self, name: str) -> bool:
        """Whether what was sent for an attribute is no literal, so that it may come to something else elsewhere."""
        return name.lower() in self._said.expressions

    def names(self, prefix: str = "") -> list[str]:
        """The attributes whose name begins with `prefix`, in any case, as they are written."""
        found = {key: name for kept in (self._said.values, self._said.pending) for key, (name, _) in kept.items()}
        found |= {key: name for key, (name, _) in self._changes.items()}
        return [name for key, name in found.items() if key.startswith(prefix.lower())]

    def string(self, name: str) -> str | None:
        """A string; None when absent, undefined or something else (``LookupString``)."""
        value = self.value(name)
        return value if type(value) is str else None

    def integer(self, name: str) -> int | None:
        """A number without its fraction; true is 1 and false 0 (``LookupInteger``)."""
        value = self.value(name)
        if isinstance(value, int):
            return int(value)
        if isinstance(value, float) and abs(value) < 2.0**63:
            return int(value)
        return None

    def real(self, name: str) -> float | None:
        """A number; true is 1.0 and false 0.0 (``LookupFloat``)."""
        value = self.value(name)
        return float(value) if isinstance(value, int | float) else None

    def boolean(self, name: str) -> bool | None:
        """True or false; a number is true unless it is 0 (``LookupBool``)."""
        value = self.value(name)
        return bool(value) if isinstance(value, int | float) else None

    def lines(self, extra: Mapping[str, str] | None = None) -> list[str]:
        """The ad as lines ``Name = value``, in the order of the names.

        This is what LIBVIRT_XML_SCRIPT reads. The strings of `extra` are added, and replace what the job's
        ad has under these names.
        """
        ad = self.changed(extra) if extra else self
        return [f"{name} = {'error' if isinstance(value, Odd) else as_expression(value)}" for name, value in ad._all()]

    def values(self) -> "dict[str, Plain | None]":
        """What every attribute comes to, in the order of the names.

        None stands for undefined, error, lists, ads, and for numbers such as NaN: all of it can be JSON.
        """
        return {
            name: None if isinstance(value, Odd) or (isinstance(value, float) and value - value != 0) else value
            for name, value in self._all()
        }

    def judge(self, expression: str) -> "Plain | None":
        """The value of somebody else's expression over the ad, None for undefined and error.

        The ad is MY and TARGET alike. Raises ValueError where it is not an expression, `MachineFault` where nothing
        here can evaluate one.
        """
        from vmgahp.job import engine

        return engine.judge(expression, self.values, self._said.user)

    def vm_type(self) -> str:
        """JobVMType in lower case; empty where it is missing."""
        return (self.string("JobVMType") or "").strip().lower()

    def working_dir(self) -> str:
        """The job's scratch directory. Raises `ClientFault` where the starter did not send a full path."""
        path = self.string("VM_WORKING_DIR") or ""
        if not path.startswith("/") or has_control(path):
            raise self.lacks(f"VM_WORKING_DIR = {shown(path)} is not the full path of a directory.")
        return path

    def vm_name(self) -> str:
        """``<User with @ as _>_<ClusterId>.<ProcId>``, which the startd and the starter know the VM by too.

        (``create_name_for_VM`` in HTCondor's ``src/condor_utils/vm_univ_utils.cpp``.) Raises `ClientFault`
        where the ad lacks one of the three, `JobFault` for a name that libvirt cannot make a file name of.
        """
        user, cluster, proc = self.string("User"), self.integer("ClusterId"), self.integer("ProcId")
        if user is None or cluster is None or proc is None:
            raise self.lacks(
                "The job ad has no name for the VM: User, ClusterId or ProcId is missing.",
                "User",
                "ClusterId",
                "ProcId",
            )
        name = f"{user.replace('@', '_')}_{cluster}.{proc}"
        if "/" in name or has_control(name) or len(name.encode()) > LONGEST_NAME:
            raise JobFault(
                errors.MISMATCHED,
                f"User = {shown(user)} makes no name for a VM.",
                f"submit as a user whose name has no slash and fewer than {LONGEST_NAME} characters.",
            )
        return name

    def lacks(self, problem: str, *names: str) -> errors.Fault:
        """The fault for what a starter always sends: the job's, where it has filled the ad or sent another value."""
        if self.complete and not (names and all(map(self.has, names))):
            return ClientFault(errors.NO_JOBCLASSAD_INFO, problem)
        return JobFault(errors.MISMATCHED, problem, "submit the job with fewer and plainer attributes of its own.")

    def _all(self) -> "list[tuple[str, Plain | None]]":
        from vmgahp.job import engine

        said = self._said
        try:
            said.settle()
        except JobFault as fault:
            if not isinstance(fault.__cause__, engine.NoEngine):
                raise
        # Without an engine an expression is undefined to those who read the whole ad; who needs its value is told.
        unknown: dict[str, tuple[str, Plain | None]] = {key: (name, None) for key, (name, _) in said.pending.items()}
        return [pair for _, pair in sorted((unknown | said.values | self._changes).items())]


def literal(expression: str) -> object:
    """The value of an expression that is a plain literal; None for undefined and error.

    Strings are those of the old ClassAd syntax, which the starter writes: a backslash hides a quote that is
    not the last character, and is itself everywhere else (``tokenizeStringOld`` in HTCondor's
    ``src/classad/lexer.cpp``). Returns a private object for what is no such literal.
    """
    if expression[:1] == '"':
        body = expression[1:-1]
        if len(expression) > 1 and expression[-1] == '"' and body.count('"') == body.count('\\"'):
            return body.replace('\\"', '"')
        return _NOT_LITERAL
    digits = expression[1:] if expression[:1] == "-" else expression
    if digits.isascii() and digits[:1].isdigit():
        whole, point, fraction = digits.partition(".")
        if whole.isdigit() and len(whole) < 19 and (whole == "0" or whole[0] != "0"):
            if not point:
                return int(expression)
            if fraction.upper().partition("E")[0].isdigit() and len(fraction) < 30:
                try:
                    return float(expression)
                except ValueError:
                    return _NOT_LITERAL
        return _NOT_LITERAL
    word = expression.lower()
    if word in ("true", "false"):
        return word == "true"
    if word in ("undefined", "error"):
        return None
    return _NOT_LITERAL


def as_expression(value: "Plain | None") -> str:
    """A value as it is written into an ad; what is no plain value becomes a word that says what it is."""
    if value is None:
        return "undefined"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str) and not isinstance(value, Odd):
        return quote(value)
    if isinstance(value, float) and value - value != 0:
        return f'real("{value}")'
    return str(value)


def quote(text: str) -> str:
    """`text` as a string of the old ClassAd syntax, on one line; control characters become ``?``."""
    if has_control(text):
        text = "".join("?" if has_control(character) else character for character in text)
    return '"' + text.replace('"', '\\"') + '"'


def _is_name(text: str) -> bool:
    plain = text.replace("_", "a").replace(".", "a")
    return plain.isascii() and plain.isalnum() and text[0] != "." and not text[0].isdigit()
