"""The requests to a hypervisor script and the parsing of its answers; pure.

docs/how-to/script-drivers.md is for authors of such scripts.

A script gets the job ad on standard input, a request as JSON in a file of its own, and the request's plain
values as environment variables. It answers with one object of JSON, or with lines ``Name = literal``, and with
its exit status. An answer comes from the administrator's program, but it may repeat what a guest said: every value is
checked for its kind, and anything unknown raises `Malformed` and is never guessed at.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from vmgahp.checkpoint.manifest import strict_json
from vmgahp.job.ad import JobAd, Plain, as_expression, literal
from vmgahp.text import has_control, is_private

PROBE, START, STATUS, PID, STOP, DESTROY = "probe", "start", "status", "pid", "stop", "destroy"
PAUSE, UNPAUSE, SUSPEND, RESUME, CHECKPOINT = "pause", "unpause", "suspend", "resume", "checkpoint"

ACTIONS = (PROBE, START, STATUS, PID, STOP, DESTROY, PAUSE, UNPAUSE, SUSPEND, RESUME, CHECKPOINT)
NEEDED = (PROBE, START, STATUS, DESTROY)
"""The actions that every script must implement; when it is probed, a script names the others that it has."""

DONE, REJECTED, MODIFIED, NOT_IMPLEMENTED = "done", "rejected", "modified", "not implemented"
OUTCOMES = (DONE, REJECTED, MODIFIED, NOT_IMPLEMENTED)

STATUSES = {0: "", 65: REJECTED, 69: NOT_IMPLEMENTED}
"""The outcome of each exit status; 0 stands for the outcome in the answer, or `DONE` without one.

The two others are EX_DATAERR and EX_UNAVAILABLE of ``sysexits.h``: shells do not end with them by mistake, as they do
with 1 and 2.
"""

RUNNING, PAUSED, SUSPENDED, STOPPED = "running", "paused", "suspended", "stopped"
STATES = (RUNNING, PAUSED, SUSPENDED, STOPPED)

LONGEST_ANSWER = 64 << 10
LONGEST_TEXT = 500
MOST_ATTRIBUTES = 100
MOST_FILES = 1000

UNCHANGEABLE = ("vm_working_dir", "jobvmtype", "user", "owner", "clusterid", "procid", "globaljobid")
"""The attributes of a job ad, in lower case, that a script may not change: whose job it is, and where."""

_FIELDS: dict[str, dict[str, str]] = {
    PROBE: {"version": "text", "actions": "list", "networking": "list"},
    START: {"id": "text", "pid": "integer"},
    STATUS: {
        "state": "state",
        "pid": "integer",
        "cpu_seconds": "number",
        "memory_kib": "integer",
        "max_memory_kib": "integer",
        "mac": "text",
        "ip": "text",
    },
    PID: {"pid": "integer"},
    CHECKPOINT: {"files": "list", "note": "text"},
    DESTROY: {"existed": "bool"},
}
_WITH_ATTRIBUTES = (PROBE, START)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}", re.ASCII)


class Malformed(Exception):
    """An invalid answer of a script; the text says why."""


class ScriptRequest(NamedTuple):
    """One call of a script."""

    action: str
    hypervisor: str
    name: str = ""
    """The VM's name, for people; empty if only its directory is known."""
    key: str = ""
    """The VM's key with the hypervisor: the same for the same scratch directory, and of plain letters."""
    uuid: str = ""
    """The UUID of this one start of the VM; empty stands for any VM with the key."""
    id: str = ""
    """The id that the script answered when it started the VM."""
    directory: str = ""
    uid: int = 0
    gid: int = 0
    memory_mib: int = 0
    vcpus: int = 0
    networking: str = ""
    mac: str = ""
    state: str = ""
    """The state of the VM as the server knows it."""
    restart: bool = False
    """True if this start restores the checkpoint in the scratch directory."""
    note: str = ""
    """The note that the script answered when it made that checkpoint."""
    keep: bool = False
    """True if the files of a checkpoint stay where they are when the VM is destroyed."""

    def environment(self) -> dict[str, str]:
        """Return the request as environment variables, always all: ``VMGAHP_ACTION``, ``VMGAHP_KEY`` and so on."""
        found = self._asdict().items()
        return {f"VMGAHP_{key.upper()}": "1" * one if isinstance(one, bool) else str(one) for key, one in found}

    def document(self, ad: JobAd | None) -> bytes:
        """Return the request as JSON, with the values of the ad's attributes if there is an ad."""
        content = self._asdict() | {"ad": None if ad is None else ad.values()}
        return json.dumps(content, indent=1).encode() + b"\n"


def ad_text(ad: JobAd | None) -> bytes:
    """Return the job ad for the script's standard input, without its secrets; a blank line ends it."""
    lines = [line.replace("\n", " ") for line in ad.lines()] if ad is not None else []
    return "".join(line + "\n" for line in (*lines, "")).encode("utf-8", "surrogateescape")


class Answer(NamedTuple):
    """The parsed answer to a call."""

    outcome: str
    reason: str
    """A line of text for people, shortened, with whatever characters the script has put there."""
    fields: dict[str, Any]
    """The fields that the action has, each of its kind (`_FIELDS`)."""
    attributes: dict[str, Plain]

    def get(self, name: str, default: Any = "") -> Any:
        """Return a field; the default if the script does not tell it."""
        return self.fields.get(name, default)


def decode(action: str, output: bytes, status: int) -> Answer:
    """Parse the answer to `action` that a script with this exit status printed. Raises `Malformed`."""
    if status not in STATUSES:
        raise Malformed(f"it ended with {f'exit status {status}' if status > 0 else f'signal {-status}'}")
    try:
        text = output.decode().strip()
    except UnicodeDecodeError as error:
        raise Malformed(f"it printed what is not UTF-8 ({error.reason})") from error
    meant = STATUSES[status]
    if text.startswith("{"):
        said = _json(text)
        attributes = said.pop("attributes", {})
    elif (lines := _class_ad(action, text)) is not None:
        said, attributes = lines
    elif meant:
        said, attributes = {"reason": text}, {}
    else:
        raise Malformed(f"it printed neither JSON nor lines of a ClassAd: {text[:100]!a}")
    outcome = _outcome(said.pop("outcome", None), meant)
    reason = said.pop("reason", "")
    if not isinstance(reason, str):
        raise Malformed(f"reason = {str(reason)[:100]!a} is no text")
    kinds = _FIELDS.get(action, {})
    for name in said:
        if name not in kinds:
            raise Malformed(f"it answers {action} with {name!a}, which means nothing there")
    fields = {name: _checked(name, kinds[name], value) for name, value in said.items()}
    checked = _attributes(attributes)
    if checked and not (action == PROBE or (action == START and outcome == MODIFIED)):
        raise Malformed(f"it answers {action} with attributes and the outcome {outcome!a}")
    if outcome == MODIFIED and (action != START or not checked):
        raise Malformed("only a start can be modified, and then the attributes say what has changed")
    if action == STATUS and outcome == DONE and "state" not in fields:
        raise Malformed("it does not say what state the VM is in")
    return Answer(outcome, " ".join(reason.split())[:LONGEST_TEXT], fields, checked)


def changed(ad: JobAd, attributes: Mapping[str, Plain]) -> JobAd:
    """Return the ad with the script's modifications. Raises `Malformed` for an attribute that it may not change."""
    for name in attributes:
        if name.lower() in UNCHANGEABLE or is_private(name):
            raise Malformed(f"it changes {name}, which says whose job it is")
    return ad.changed(attributes)


def difference(ad: JobAd, attributes: Mapping[str, Plain]) -> list[str]:
    """Return the script's modifications as lines of a diff."""
    lines = []
    for name, value in sorted(attributes.items()):
        before, after = ad.expression(name), as_expression(value)
        if before != after:
            lines += [f"- {name} = {before}"] if before is not None else []
            lines.append(f"+ {name} = {after}")
    return lines


def _json(text: str) -> dict[str, object]:
    try:
        said = strict_json(text)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"it printed what is not JSON: {error}") from error
    if not isinstance(said, dict):
        raise Malformed("it printed JSON that is not an object")
    return said


def _class_ad(action: str, text: str) -> tuple[dict[str, object], dict[str, object]] | None:
    """Parse lines ``Name = literal``; return None for any other text.

    An answer's own words may be written in any case; others are attributes of ads, for the actions that have some.
    """
    found: dict[str, object] = {}
    for line in filter(str.strip, text.splitlines()):
        pair = JobAd.parse_line(line)
        if pair is None or pair[0] in found:
            return None
        found[pair[0]] = literal(pair[1])
        if not isinstance(found[pair[0]], str | int | float):
            raise Malformed(f"{pair[0]} = {pair[1][:100]!a} is no literal")
    own = ("outcome", "reason", *_FIELDS.get(action, {}))
    said = {name.lower(): value for name, value in found.items() if name.lower() in own}
    rest = {name: value for name, value in found.items() if name.lower() not in own}
    return (said, rest) if action in _WITH_ATTRIBUTES else (said | rest, {})


def _outcome(told: object, meant: str) -> str:
    if told is None:
        return meant or DONE
    word = str(told).strip().lower().replace("_", " ")
    if word not in OUTCOMES:
        raise Malformed(f"its outcome is {str(told)[:60]!a}, which is none of {', '.join(OUTCOMES)}")
    if meant and word != meant:
        raise Malformed(f"its outcome is {word!a}, and its exit status says {meant!a}")
    return word


_KINDS: dict[str, Callable[[Any], bool]] = {
    "text": lambda value: isinstance(value, str) and not has_control(value) and len(value) <= LONGEST_TEXT,
    "bool": lambda value: isinstance(value, bool),
    "integer": lambda value: type(value) is int and 0 <= value < 2**53,
    "number": lambda value: type(value) in (int, float) and 0 <= value < 1e12,
    "state": STATES.__contains__,
    "list": lambda value: (
        isinstance(value, list)
        and len(value) <= MOST_FILES
        and all(isinstance(word, str) and word and not has_control(word) for word in value)
    ),
}


def _checked(name: str, kind: str, value: Any) -> object:
    """Return the value of a field of an answer, after checking that it is of the required kind."""
    if isinstance(value, str):
        words = [word.strip() for word in value.split(",") if word.strip()]
        value = {"text": " ".join(value.split()), "state": value.strip().lower(), "list": words}.get(kind, value)
    if not _KINDS[kind](value):
        raise Malformed(f"{name} = {str(value)[:100]!a} is no {kind}")
    return value


def _attributes(found: object) -> dict[str, Plain]:
    if not isinstance(found, dict) or len(found) > MOST_ATTRIBUTES:
        raise Malformed(f"its attributes are no object of at most {MOST_ATTRIBUTES} values")
    checked: dict[str, Plain] = {}
    for name, value in found.items():
        if _NAME.fullmatch(name) is None:
            raise Malformed(f"{name[:100]!a} is not a name of an attribute")
        if not isinstance(value, str | int | float) or (isinstance(value, float) and not math.isfinite(value)):
            raise Malformed(f"the attribute {name} is neither a string nor a number nor true or false")
        if isinstance(value, str) and (has_control(value) or len(value) > LONGEST_TEXT):
            raise Malformed(f"the attribute {name} is too long, or has a control character")
        checked[name] = value
    return checked
