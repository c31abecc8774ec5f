"""The manifest of a checkpoint, the same for every driver, as objects and as JSON; pure.

A manifest comes back with the job and may have any content, so each field is checked for its type, its form and its
range, no field may be missing or unknown, and reading a bad one raises only `Invalid`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, NoReturn

from vmgahp.text import has_control

FORMAT = 2
"""The version of the manifest; others are refused."""

LARGEST = 4 << 20
"""The maximum size of a manifest in bytes; one with the longest XML and the most files is smaller."""
LARGEST_XML = 1 << 20
MOST_FILES = 5000

MEMORY, STATE, DISK, BACKING = "memory", "state", "disk", "backing"
"""The values of `CheckpointFile.role`: a memory image that is read as a whole; other state that a hypervisor keeps of a
VM; the files of its disks, and their backing files. Only the last two can be outside the scratch directory."""

WORD = re.compile(r"[A-Za-z0-9_.+-]{1,64}", re.ASCII)
UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.ASCII)
SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)
LARGEST_FILE = 2**63 - 1

_WORD_OR_NOTHING = re.compile(r"[A-Za-z0-9_.+-]{0,64}", re.ASCII)
_ROLES = re.compile("|".join((MEMORY, STATE, DISK, BACKING)))
_PASSWORD = re.compile(r"""\spasswd=(?:"[^"]*"|'[^']*')""")


class Invalid(Exception):
    """An invalid manifest; the text says why."""


class CheckpointFile(NamedTuple):
    """One file as it was at the checkpoint."""

    role: str
    path: str
    """A path relative to the scratch directory, which differs between machines, for a file in it; the catalog's name
    for an image of the catalog; otherwise a full path."""
    transferred: bool
    """True if it is in the scratch directory and is transferred with the job."""
    device: str
    """The disk that it belongs to, if the driver sets that."""
    writable: bool
    format: str
    size: int
    mtime_ns: int
    """The modification time in nanoseconds; 0 if it is meaningless."""
    digest: str
    """The SHA-256, in hexadecimal, of the size and the parts that `vmgahp.checkpoint.store.sample` reads."""


Facts = Mapping[str, Any]


class Manifest(NamedTuple):
    """The content of one manifest."""

    driver: str
    name: str
    vm_type: str
    memory_mib: int
    vcpus: int
    cpu_seconds: float
    """The CPU time that the guest has used until then."""
    time: float
    """The time when it was made, in seconds since 1970."""
    facts: Facts
    """The facts that only the driver knows, in the form of `CheckpointKind.facts`."""
    files: tuple[CheckpointFile, ...] = ()


class CheckpointKind(NamedTuple):
    """The properties of one driver's checkpoints."""

    driver: str
    facts: Mapping[str, Form]
    """The name of each fact -> the form that it must have."""
    most_files: int = MOST_FILES
    differences: Callable[[Facts, Facts], Iterable[str]] = lambda _then, _now: ()
    """A function of the facts then and now: the reasons why the checkpoint cannot be restored, as parts of a
    sentence."""
    memory: str = ""
    inspect: Callable[[int], object] = lambda _descriptor: None
    """A function that checks the head of an open memory image before a hypervisor reads it. Raises as
    `memory_image.inspect` does."""
    knows_disks: bool = True
    """True if the files tell which of them are disks; otherwise a guest that boots afresh may find any state of its
    disks."""


def dump(kind: CheckpointKind, manifest: Manifest) -> bytes:
    """Format the manifest as JSON, without the VNC password that the XML may have."""
    facts = {
        name: _PASSWORD.sub("", value) if kind.facts.get(name) is Fields.xml else value
        for name, value in manifest.facts.items()
    }
    return encode(FORMAT, manifest._replace(facts=facts))


def encode(number: int, record: NamedTuple) -> bytes:
    """Format a record with the format `number` as JSON, for `read`."""
    return json.dumps({"format": number} | _objects(record), indent=1).encode() + b"\n"


def _objects(value: Any) -> Any:
    if hasattr(value, "_asdict"):
        return {name: _objects(field) for name, field in value._asdict().items()}
    return [_objects(one) for one in value] if isinstance(value, tuple) else value


def parse(kind: CheckpointKind, data: bytes) -> Manifest:
    """Parse the manifest of a kind of checkpoint. Raises `Invalid`."""
    top = read(data, FORMAT, Manifest._fields)
    driver = top.form("driver", WORD)
    if driver != kind.driver:
        raise Invalid(f"it is of the driver {driver}, and here is {kind.driver}.")
    facts = Fields(top.value("facts"), "facts.", tuple(kind.facts))
    files = read_files(top, kind.most_files)
    if odd := [file.path for file in files if file.role == MEMORY and file.path != kind.memory]:
        raise Invalid(f"{odd[0]!a} is no memory image of {kind.driver}.")
    return Manifest(
        driver=driver,
        name=top.text("name", 300),
        vm_type=top.text("vm_type", 100),
        memory_mib=top.integer("memory_mib", 1, 10**9),
        vcpus=top.integer("vcpus", 1, 10**6),
        cpu_seconds=top.real("cpu_seconds", 1e12),
        time=top.real("time", 1e12),
        facts={name: form(facts, name) for name, form in kind.facts.items()},
        files=files,
    )


def read(data: bytes, number: int, names: tuple[str, ...]) -> Fields:
    """Parse the outermost object of a record with the format `number` and exactly these fields. Raises `Invalid`."""
    if len(data) > LARGEST:
        raise Invalid("it is too long.")
    try:
        content = strict_json(data.decode())
    except (ValueError, RecursionError) as error:
        raise Invalid(f"it is not JSON: {error}.") from error
    if isinstance(content, dict) and type(content.get("format")) is int and content["format"] != number:
        raise Invalid(f"it has the format {str(content['format'])[:20]}, and this daemon knows {number} only.")
    top = Fields(content, "", ("format", *names))
    top.integer("format", number, number)
    return top


def read_files(top: Fields, most: int) -> tuple[CheckpointFile, ...]:
    """Read the files, `most` at most. Raises `Invalid`."""
    found = []
    for number, item in enumerate(top.items("files", most)):
        fields = Fields(item, f"files[{number}].", CheckpointFile._fields)
        file = CheckpointFile(
            role=fields.form("role", _ROLES),
            path=fields.text("path", 4096),
            transferred=fields.flag("transferred"),
            device=fields.form("device", _WORD_OR_NOTHING),
            writable=fields.flag("writable"),
            format=fields.form("format", _WORD_OR_NOTHING),
            size=fields.integer("size", 0, LARGEST_FILE),
            mtime_ns=fields.integer("mtime_ns", -LARGEST_FILE, LARGEST_FILE),
            digest=fields.form("digest", SHA256),
        )
        elsewhere = file.path.startswith("/") or not file.transferred
        if elsewhere and (file.role in (MEMORY, STATE) or file.transferred):
            raise Invalid(f"{file.path!a} is not in the scratch directory.")
        found.append(file)
    return tuple(found)


class Fields:
    """The fields of one JSON object, each of which is read with a check of its form."""

    def __init__(self, content: object, where: str, names: tuple[str, ...]) -> None:
        self._where = where
        if not isinstance(content, dict):
            raise Invalid(f"{where.rstrip('.') or 'it'} is not an object.")
        if content.keys() != set(names):
            odd = sorted(content.keys() ^ set(names))
            raise Invalid(f"{where}{odd[0][:50]!a} is missing, or should not be there.")
        self._content = content

    def value(self, name: str) -> object:
        return self._content[name]

    def text(self, name: str, longest: int, may_be_empty: bool = False) -> str:
        value = self._content[name]
        if not isinstance(value, str) or not (value or may_be_empty) or len(value) > longest or has_control(value):
            self._refuse(name)
        return value

    def xml(self, name: str) -> str:
        value = self._content[name]
        if not isinstance(value, str) or len(value) > LARGEST_XML:
            self._refuse(name)
        if has_control(value.replace("\n", " ").replace("\t", " ")):
            self._refuse(name)
        return value

    def form(self, name: str, pattern: re.Pattern[str]) -> str:
        value = self._content[name]
        if not isinstance(value, str) or not pattern.fullmatch(value):
            self._refuse(name)
        return value

    def integer(self, name: str, least: int, most: int) -> int:
        value = self._content[name]
        if type(value) is not int or not least <= value <= most:
            self._refuse(name)
        return value

    def real(self, name: str, most: float) -> float:
        value = self._content[name]
        if type(value) not in (int, float) or not 0 <= value <= most:
            self._refuse(name)
        return float(value)

    def flag(self, name: str) -> bool:
        value = self._content[name]
        if not isinstance(value, bool):
            self._refuse(name)
        return value

    def items(self, name: str, most: int) -> list[object]:
        value = self._content[name]
        if not isinstance(value, list) or len(value) > most:
            self._refuse(name)
        return value

    def _refuse(self, name: str) -> NoReturn:
        raise Invalid(f"{self._where}{name} is not what it should be: {ascii(self._content[name])[:80]}.")


Form = Callable[[Fields, str], Any]
"""A function that reads a fact from the fields in the form that it must have, or raises `Invalid`."""


def matching(pattern: re.Pattern[str]) -> Form:
    return lambda fields, name: fields.form(name, pattern)


def text(longest: int, *, may_be_empty: bool = False) -> Form:
    return lambda fields, name: fields.text(name, longest, may_be_empty)


def integer(least: int, most: int) -> Form:
    return lambda fields, name: fields.integer(name, least, most)


def strict_json(text: str) -> object:
    """Parse JSON without a name that comes twice, NaN or an infinity. Raises ValueError and RecursionError."""
    return json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name comes twice")
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")
