"""The job's ClassAd as the starter sends it, with HTCondor's own rules for looking a value up.

Literals, which nearly all attributes are, are read here. For every other expression HTCondor's ClassAd
engine (``classad2``) is loaded, which takes 20 ms and 14 MiB, and is given the whole ad. Nothing but the
engine is imported: a block of attributes comes in at the start of every job.
"""

from collections.abc import Iterable, Mapping
from time import thread_time
from typing import Any

from vmgahp import errors
from vmgahp.errors import ClientFault, JobFault, MachineFault
from vmgahp.text import has_control, is_private, shown

Literal = str | int | float | bool | None

LONGEST_NAME = 200
"""Bytes of a VM's name: libvirt makes file names of it."""

EVALUATION_SECONDS = 10.0
"""CPU time that the expressions of one ad may take together. HTCondor's engine gives up on a single one by itself,
after a second or so, in which no other thread of this process runs."""

_NOT_LITERAL = object()


class JobAd:
    """A job's ClassAd. Names are looked up in any case; of a name that comes twice the last one counts.

    ``VM_WORKING_DIR`` is the exception: condor_starter sends it first of all (``publishVMClassAd`` in
    HTCondor's ``src/condor_starter.V6.1/vm_gahp_server.cpp``), and a later one is the job's own invention.
    """

    def __init__(self, pairs: "Iterable[tuple[str, str]]") -> None:
        self._attributes: dict[str, tuple[str, str]] = {}
        for name, expression in pairs:
            key = name.lower()
            if key != "vm_working_dir" or key not in self._attributes:
                self._attributes[key] = (name, expression)
        self._evaluator: Any = None
        self._evaluation_seconds = 0.0

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

    def expression(self, name: str) -> str | None:
        """The attribute as it was sent, or None."""
        found = self._attributes.get(name.lower())
        return found[1] if found else None

    def names(self, prefix: str) -> list[str]:
        """The attributes whose name begins with `prefix`, in any case, as they are written."""
        return [name for key, (name, _) in self._attributes.items() if key.startswith(prefix.lower())]

    def string(self, name: str) -> str | None:
        """A string; None when absent, undefined or something else (``LookupString``)."""
        value = self._value(name)
        return value if isinstance(value, str) else None

    def integer(self, name: str) -> int | None:
        """A number without its fraction; true is 1 and false 0 (``LookupInteger``)."""
        value = self._value(name)
        if isinstance(value, int):
            return int(value)
        if isinstance(value, float) and abs(value) < 2.0**63:
            return int(value)
        return None

    def real(self, name: str) -> float | None:
        """A number; true is 1.0 and false 0.0 (``LookupFloat``)."""
        value = self._value(name)
        return float(value) if isinstance(value, int | float) else None

    def boolean(self, name: str) -> bool | None:
        """True or false; a number is true unless it is 0 (``LookupBool``)."""
        value = self._value(name)
        return bool(value) if isinstance(value, int | float) else None

    def lines(self, extra: Mapping[str, str] | None = None) -> list[str]:
        """The ad as ``Name = expression`` lines, in the order of the names, without the secret attributes.

        This is what LIBVIRT_XML_SCRIPT reads. The strings of `extra` are added, and replace what the job's
        ad has under these names.
        """
        attributes = dict(self._attributes)
        for name, value in (extra or {}).items():
            attributes[name.lower()] = (name, quote(value))
        return [
            f"{name} = {expression}" for _, (name, expression) in sorted(attributes.items()) if not is_private(name)
        ]

    def pairs(self) -> "list[tuple[str, str]]":
        """Name and expression of every attribute, of secret ones too: what another ad can be made of."""
        return list(self._attributes.values())

    def public(self) -> "JobAd":
        """The ad without its secret attributes, so that no expression of the job can spell one out."""
        return JobAd(pair for pair in self._attributes.values() if not is_private(pair[0]))

    def values(self) -> "dict[str, Literal]":
        """What every attribute that is not secret comes to, in the order of the names.

        None stands for undefined, error, lists, ads, and for numbers such as NaN: all of it can be JSON.
        """
        ad = self.public()
        found = {name: ad._value(name) for _, (name, _) in sorted(ad._attributes.items())}
        return {
            name: None if isinstance(value, float) and value - value != 0 else value for name, value in found.items()
        }

    def judge(self, expression: str) -> Literal:
        """The value of somebody else's expression over this ad without its secrets, None for undefined and error.

        The ad is MY and TARGET alike. Raises ValueError where it is not an expression.
        """
        ad = self.public()
        mine, target = ad._load(), ad._load()
        import classad2

        try:
            tree = classad2.ExprTree(expression)
        except Exception as error:
            raise ValueError(expression) from error
        try:
            value = tree.eval(mine, target)
        except Exception:  # noqa: BLE001 - as in _evaluate
            return None
        if isinstance(value, classad2.Value) or not isinstance(value, str | int | float):
            return None
        return value

    def vm_type(self) -> str:
        """JobVMType in lower case; empty where it is missing."""
        return (self.string("JobVMType") or "").strip().lower()

    def working_dir(self) -> str:
        """The job's scratch directory. Raises `ClientFault` where the starter did not send a full path."""
        path = self.string("VM_WORKING_DIR") or ""
        if not path.startswith("/") or has_control(path):
            raise ClientFault(
                errors.NO_JOBCLASSAD_INFO, f"VM_WORKING_DIR = {shown(path)} is not the full path of a directory."
            )
        return path

    def vm_name(self) -> str:
        """``<User with @ as _>_<ClusterId>.<ProcId>``, which the startd and the starter know the VM by too.

        (``create_name_for_VM`` in HTCondor's ``src/condor_utils/vm_univ_utils.cpp``.) Raises `ClientFault`
        where the ad lacks one of the three, `JobFault` for a name that libvirt cannot make a file name of.
        """
        user, cluster, proc = self.string("User"), self.integer("ClusterId"), self.integer("ProcId")
        if user is None or cluster is None or proc is None:
            raise ClientFault(
                errors.NO_JOBCLASSAD_INFO, "The job ad has no name for the VM: User, ClusterId or ProcId is missing."
            )
        name = f"{user.replace('@', '_')}_{cluster}.{proc}"
        if "/" in name or has_control(name) or len(name.encode()) > LONGEST_NAME:
            raise JobFault(
                errors.MISMATCHED,
                f"User = {shown(user)} makes no name for a VM.",
                f"submit as a user whose name has no slash and fewer than {LONGEST_NAME} characters.",
            )
        return name

    def _value(self, name: str) -> Literal:
        """An attribute's value, None for undefined, error, lists and ads."""
        for _ in range(10):  # RequestMemory = MY.JobVMMemory and its like need no evaluator
            expression = self.expression(name)
            if expression is None:
                return None
            value = literal(expression)
            if value is not _NOT_LITERAL:
                return value  # type: ignore[return-value]
            reference = expression[3:] if expression[:3].lower() == "my." else expression
            if not _is_name(reference) or "." in reference:
                break
            name = reference
        return self._evaluate(name)

    def _evaluate(self, name: str) -> Literal:
        if self._evaluation_seconds > EVALUATION_SECONDS:
            raise JobFault(
                errors.MISMATCHED,
                f"The expressions of the job ad have taken more than {EVALUATION_SECONDS:g} s to evaluate.",
                "write attributes that do not refer to each other again and again.",
            )
        began = thread_time()
        if self._evaluator is None:
            self._evaluator = self._load()
        import classad2

        try:
            value = self._evaluator.eval(name)
        except Exception:  # noqa: BLE001 - classad2 raises several kinds for an attribute that is no good
            return None
        finally:
            self._evaluation_seconds += thread_time() - began
        # Undefined and error are members of an IntEnum: 2 and 1, if one does not look.
        if isinstance(value, classad2.Value) or not isinstance(value, str | int | float):
            return None
        return value

    def _load(self) -> Any:
        """The whole ad in HTCondor's engine; attributes that it cannot parse are left out."""
        try:
            import classad2
        except ImportError as error:
            raise MachineFault(
                "The job ad has expressions, and HTCondor's ClassAd module, which evaluates them, is missing.",
                "install the Python package htcondor for the Python that runs this daemon.",
            ) from error
        attributes = [(name, text) for name, text in self._attributes.values()]
        try:
            whole = classad2.parseOne("\n".join(f"{name} = {text}" for name, text in attributes))
            if len(whole) == len(attributes):
                return whole
        except Exception:  # noqa: BLE001, S110 - the next paragraph finds out which attribute it was
            pass
        # parseOne drops what follows a bad line without a word; so one by one.
        whole = classad2.ClassAd()
        for name, text in attributes:
            try:
                one = classad2.parseOne(f"{name} = {text}")
                for key in one:
                    whole[key] = one.lookup(key)
            except Exception:  # noqa: BLE001, S112 - as the C++ daemon skips an attribute that it cannot insert
                continue
        return whole


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


def quote(text: str) -> str:
    """`text` as a string of the old ClassAd syntax, on one line; control characters become ``?``."""
    if has_control(text):
        text = "".join("?" if has_control(character) else character for character in text)
    return '"' + text.replace('"', '\\"') + '"'


def _is_name(text: str) -> bool:
    plain = text.replace("_", "a").replace(".", "a")
    return plain.isascii() and plain.isalnum() and text[0] != "." and not text[0].isdigit()
