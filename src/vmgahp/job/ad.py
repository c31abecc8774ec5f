"""The public part of a job's ClassAd, with a single value for each attribute.

Secrets are removed first, so that no expression of the job can contain one. Literals, which nearly all attributes are,
are parsed here; when the value of an expression is needed, HTCondor's engine (`vmgahp.job.engine`) evaluates all
expressions, once. From then on an attribute has only its value, for the policy, the drivers and all messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from threading import Lock

from vmgahp import errors
from vmgahp.errors import ClientFault, JobFault
from vmgahp.host.job_user import Identity
from vmgahp.job import engine
from vmgahp.text import has_control, is_private, shown
from vmgahp.vm_types import ANY, VMWARE

Plain = str | int | float | bool
"""The type of a value; an undefined one is None."""

UNIVERSE = 13
"""The VM universe, as JobUniverse (``CONDOR_UNIVERSE_VM`` in HTCondor's ``src/condor_includes/condor_universe.h``)."""

LONGEST_NAME = 200
"""The most bytes of a VM's name: libvirt makes file names of it."""

SCOPES = frozenset(("my", "target", "parent", "self", "toplevel", "root", "other"))
"""The names that refer to an ad, in lower case. An attribute of such a name would hide that ad from an expression."""

_NOT_LITERAL = object()


class Odd(str):
    """A stand-in for a value that is not plain (an error, a list, an ad); it is not a string of the job's."""

    __slots__ = ()


class _Said:
    """The attributes that the starter has sent, and the value of each expression."""

    def __init__(self, pairs: Iterable[tuple[str, str]]) -> None:
        self.values: dict[str, tuple[str, Plain | None]] = {}
        """The name and value of each attribute with a value, by its name in lower case."""
        self.pending: dict[str, tuple[str, str]] = {}
        """The name and expression of each attribute that was not evaluated yet, by its name in lower case."""
        self.user: Identity | None = None
        self._refusal: JobFault | None = None
        self._lock = Lock()
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
        """The names, in lower case, of the attributes that were sent as expressions."""

    def value(self, key: str) -> Plain | None:
        # References such as RequestMemory = MY.JobVMMemory need no engine.
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
        """Evaluate the remaining expressions. Raises `JobFault`."""
        with self._lock:
            if not self.pending:
                return
            if self._refusal is not None:  # not retried: it may have taken long
                raise self._refusal
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
    """A job's ClassAd. Names are case-insensitive; if a name occurs twice, the last one counts.

    ``VM_WORKING_DIR`` is the exception: condor_starter sends it first of all (``publishVMClassAd`` in HTCondor's
    ``src/condor_starter.V6.1/vm_gahp_server.cpp``), and a later one comes from the job. Every method that needs a value
    raises `JobFault` if the ad's expressions cannot be evaluated.
    """

    __slots__ = ("_changes", "_said", "complete")

    def __init__(self, pairs: Iterable[tuple[str, str]], *, complete: bool = True) -> None:
        """Make an ad; `complete` is false if a part of it was skipped because it was too long."""
        self._said = _Said(pairs)
        self._changes: dict[str, tuple[str, Plain | None]] = {}
        self.complete = complete

    @staticmethod
    def parse_line(line: str) -> tuple[str, str] | None:
        """Parse ``Name = expression`` into a pair; return None for a line that is not of that form."""
        name, equals, expression = line.partition("=")
        name, expression = name.strip(" \t"), expression.strip()
        if not equals or not expression or not _is_name(name):
            return None
        if "\0" in expression or "\n" in expression or "\r" in expression:
            return None
        return name, expression

    def evaluate_as(self, user: Identity) -> None:
        """Set the user whose rights the engine gets to evaluate the ad's expressions, by default the user nobody."""
        self._said.user = user

    def changed(self, changes: Mapping[str, Plain | None]) -> JobAd:
        """Return a copy with other values for some attributes."""
        made = JobAd((), complete=self.complete)
        made._said = self._said
        made._changes = self._changes | {name.lower(): (name, value) for name, value in changes.items()}
        return made

    def value(self, name: str) -> Plain | None:
        """Return an attribute's value: `Odd` for an error, a list or an ad, None for undefined."""
        key = name.lower()
        return self._changes[key][1] if key in self._changes else self._said.value(key)

    def expression(self, name: str) -> str | None:
        """Return the value as it is written into an ad; None if the ad has no such attribute."""
        return as_expression(self.value(name)) if self.has(name) else None

    def has(self, name: str) -> bool:
        """Return True if the ad has such an attribute, even if it is undefined."""
        key = name.lower()
        return key in self._changes or key in self._said.values or key in self._said.pending

    def is_expression(self, name: str) -> bool:
        """Return True if an attribute was sent as an expression, whose value may differ elsewhere."""
        return name.lower() in self._said.expressions

    def names(self, prefix: str = "") -> list[str]:
        """Return the names that begin with `prefix` (case-insensitive), as they are written."""
        found = {key: name for kept in (self._said.values, self._said.pending) for key, (name, _) in kept.items()}
        found |= {key: name for key, (name, _) in self._changes.items()}
        return [name for key, name in found.items() if key.startswith(prefix.lower())]

    def string(self, name: str) -> str | None:
        """Return a string; None if it is missing, undefined or something else (``LookupString``)."""
        value = self.value(name)
        return value if type(value) is str else None

    def integer(self, name: str) -> int | None:
        """Return a number without its fraction; true is 1 and false 0 (``LookupInteger``)."""
        value = self.value(name)
        if isinstance(value, int) or (isinstance(value, float) and abs(value) < 2.0**63):
            return int(value)
        return None

    def boolean(self, name: str) -> bool | None:
        """Return true or false; a number is true unless it is 0 (``LookupBool``)."""
        value = self.value(name)
        return bool(value) if isinstance(value, int | float) else None

    def lines(self, extra: Mapping[str, str] | None = None) -> list[str]:
        """Return the ad for LIBVIRT_XML_SCRIPT as sorted lines ``Name = value``, with the strings of `extra`."""
        ad = self.changed(extra) if extra else self
        return [f"{name} = {'error' if isinstance(value, Odd) else as_expression(value)}" for name, value in ad._all()]

    def values(self) -> dict[str, Plain | None]:
        """Return all values in the order of the names, for JSON: undefined, lists, NaN and so on become None."""
        return {
            name: None if isinstance(value, Odd) or (isinstance(value, float) and value - value != 0) else value
            for name, value in self._all()
        }

    def judge(self, expression: str) -> Plain | None:
        """Evaluate another's expression, with the ad as MY and TARGET. Raises ValueError and `MachineFault`."""
        return engine.judge(expression, self.values, self._said.user)

    def vm_type(self) -> str:
        """Return JobVMType in lower case; empty if it is missing."""
        return (self.string("JobVMType") or "").strip().lower()

    def working_dir(self) -> str:
        """Return the job's scratch directory. Raises `ClientFault` if the starter did not send a full path."""
        path = self.string("VM_WORKING_DIR") or ""
        if not path.startswith("/") or has_control(path):
            raise self.lacks(f"VM_WORKING_DIR = {shown(path)} is not the full path of a directory.")
        return path

    def vm_name(self) -> str:
        """Return ``<User with @ as _>_<ClusterId>.<ProcId>``, the VM's name in the startd and the starter, too.

        (``create_name_for_VM`` in HTCondor's ``src/condor_utils/vm_univ_utils.cpp``.) Raises `ClientFault`
        if the ad lacks one of the three, `JobFault` for a name that libvirt cannot turn into a file name.
        """
        user, cluster, proc = self.string("User"), self.integer("ClusterId"), self.integer("ProcId")
        if user is None or cluster is None or proc is None:
            problem = "The job ad has no name for the VM: User, ClusterId or ProcId is missing."
            raise self.lacks(problem, "User", "ClusterId", "ProcId")
        name = f"{user.replace('@', '_')}_{cluster}.{proc}"
        if "/" in name or has_control(name) or len(name.encode()) > LONGEST_NAME:
            hint = f"submit as a user whose name has no slash and fewer than {LONGEST_NAME} characters."
            raise JobFault(errors.MISMATCHED, f"User = {shown(user)} makes no name for a VM.", hint)
        return name

    def lacks(self, problem: str, *names: str) -> errors.Fault:
        """Make the fault for a missing attribute of the starter: the job's if the ad is cut off or has other values."""
        if self.complete and not (names and all(map(self.has, names))):
            return ClientFault(errors.NO_JOBCLASSAD_INFO, problem)
        return JobFault(errors.MISMATCHED, problem, "submit the job with fewer and plainer attributes of its own.")

    def _all(self) -> list[tuple[str, Plain | None]]:
        said = self._said
        try:
            said.settle()
        except JobFault as fault:
            if not isinstance(fault.__cause__, engine.NoEngine):
                raise
        # Without an engine an expression is undefined in the whole ad; a reader of its single value gets the fault.
        unknown: dict[str, tuple[str, Plain | None]] = {key: (name, None) for key, (name, _) in said.pending.items()}
        return [pair for _, pair in sorted((unknown | said.values | self._changes).items())]


def literal(expression: str) -> object:
    """Return the value of a plain literal; None for undefined and error.

    Strings are in the old ClassAd syntax, which the starter writes: a backslash escapes a quote that is not the
    last character, and is literal everywhere else (``tokenizeStringOld`` in HTCondor's
    ``src/classad/lexer.cpp``). Returns a private object for any other expression.
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


def as_expression(value: Plain | None) -> str:
    """Format a value as it is written into an ad; for an `Odd` one this is a word that describes it."""
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
    """Quote `text` as a string of the old ClassAd syntax, on one line; control characters become ``?``."""
    if has_control(text):
        text = "".join("?" if has_control(character) else character for character in text)
    return '"' + text.replace('"', '\\"') + '"'


def _is_name(text: str) -> bool:
    plain = text.replace("_", "a").replace(".", "a")
    return plain.isascii() and plain.isalnum() and text[0] != "." and not text[0].isdigit()


# The VM types that a job accepts
#
# A job accepts any type by ``vm_type = any``, and only some of them with ``+VMPARAM_vm_Types = "kvm, vmware"``, or with
# a list in vm_type itself and requirements that match machines of each (docs/how-to/any-hypervisor.md).


TYPES = "VMPARAM_vm_Types"

STANDS_FOR = {"vmware": VMWARE}
"""The machines' VM types for each word of a job that means several."""

_MOST_TYPES = 20
_LONGEST_TYPE = 64
_FIRST_LETTERS = frozenset("abcdefghijklmnopqrstuvwxyz0123456789")
_TYPE_LETTERS = _FIRST_LETTERS | set("_.+-")
_TYPES_HINT = f'write vm_type = any and +{TYPES} = "kvm, vmware", with the types that would do.'


def is_choice(vm_type: str) -> bool:
    """Return True if a job of this vm_type, in lower case, leaves the hypervisor open."""
    return vm_type == ANY or "," in vm_type


def accepted_types(ad: JobAd) -> tuple[str, ...]:
    """Return the types that the job accepts, in its order; empty if it accepts any. Raises `JobFault`."""
    vm_type = ad.vm_type()
    listed = "," in vm_type
    if ad.expression(TYPES) is None or (ad.expression(TYPES) or "").lower() == "undefined":
        return _type_words("JobVMType", vm_type) if listed else ()
    if listed:
        both = f"JobVMType = {shown(vm_type)} and {TYPES} = {shown(ad.expression(TYPES))}"
        raise JobFault(errors.MISMATCHED, f"{both}: both are lists of VM types.", f"keep one of them; {_TYPES_HINT}")
    text = ad.string(TYPES)
    if text is None:
        raise JobFault(errors.MISMATCHED, f"{TYPES} = {shown(ad.expression(TYPES))}: it is not a string.", _TYPES_HINT)
    return _type_words(TYPES, text)


def driver_type(ad: JobAd, asked: str, machine: str, types: Sequence[str]) -> str:
    """Return the type of the driver that runs the job on a machine of type `machine`. Raises `JobFault` if none fits.

    `asked` is the type of the request, `types` are those of a machine of the type any. A job reaches no other driver.
    """
    require_accepted(ad)
    vm_type = ad.vm_type()
    if not vm_type or vm_type != asked.strip().lower():
        problem = f"JobVMType = {shown(ad.expression('JobVMType'))}, and a VM of the type {shown(asked)} was asked for."
        raise JobFault(errors.MISMATCHED, problem, "let vm_type be one plain word.")
    if is_choice(machine):
        fits = is_choice(vm_type) or any(takes((vm_type,), one) for one in types)
        found = ANY if is_choice(vm_type) else vm_type
    else:
        fits = vm_type != ANY and takes(_type_words("JobVMType", vm_type), machine)
        found = ANY if is_choice(vm_type) else machine
    if not fits:
        problem = f"JobVMType = {shown(vm_type)}, and this machine has {', '.join(types)} (VM_TYPE = {machine})."
        hint = f"set vm_type = {types[0] if types else machine}, or require a machine whose VM_Type is the job's."
        raise JobFault(errors.MISMATCHED, problem, hint)
    return found


def takes(accepted: Sequence[str], vm_type: str) -> bool:
    """Return True if a machine's `vm_type` is among the `accepted` ones, a result of `accepted_types`."""
    return not accepted or any(vm_type in STANDS_FOR.get(word, (word,)) for word in accepted)


def require_accepted(ad: JobAd) -> None:
    """Make sure that a job's single type is among those that it accepts. Raises `JobFault`."""
    vm_type = ad.vm_type()
    if ad.expression(TYPES) is not None and not is_choice(vm_type) and not takes(accepted_types(ad), vm_type):
        both = f"{TYPES} = {shown(ad.string(TYPES))} contradicts JobVMType = {shown(vm_type)}"
        hint = f"write vm_type = any, or remove {TYPES}."
        raise JobFault(errors.MISMATCHED, f"{both}, which is not one of them.", hint)


def _type_words(attribute: str, text: str) -> tuple[str, ...]:
    words = tuple(dict.fromkeys(word.strip().lower() for word in text.split(",") if word.strip()))
    odd = [
        word
        for word in words
        if word[0] not in _FIRST_LETTERS or len(word) > _LONGEST_TYPE or not _TYPE_LETTERS.issuperset(word)
    ]
    if odd or not words or len(words) > _MOST_TYPES:
        what = f"{shown(odd[0])} is not a VM type" if odd else "it is not a list of VM types"
        raise JobFault(errors.MISMATCHED, f"{attribute} = {shown(text)}: {what}.", _TYPES_HINT)
    # "any" in a list accepts every type.
    return () if ANY in words else words
