"""What a checkpoint says of itself, the same for every driver, as objects and as JSON; pure.

A manifest comes back with the job and may be anything, so each field is checked for its type, its form and
its range, none may be missing and none may be more, and `Invalid` is all that can come of reading one.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, NoReturn

from vmgahp.text import has_control

FORMAT = 2
"""The version of the manifest; another one is refused, but for those of `vmgahp.checkpoint.earlier`."""

LARGEST = 4 << 20
"""Bytes of a manifest; one with the longest XML and the most files stays below."""
LARGEST_XML = 1 << 20
MOST_FILES = 5000

MEMORY, STATE, DISK, BACKING = "memory", "state", "disk", "backing"
"""`CheckpointFile.role`: a memory image that is read as a whole; what else a hypervisor keeps of a VM; what its disks
consist of, and the backing files of these. Only the last two can be elsewhere than in the scratch directory."""

WORD = re.compile(r"[A-Za-z0-9_.+-]{1,64}", re.ASCII)
UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.ASCII)
SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)
LARGEST_FILE = 2**63 - 1

_WORD_OR_NOTHING = re.compile(r"[A-Za-z0-9_.+-]{0,64}", re.ASCII)
_ROLES = re.compile("|".join((MEMORY, STATE, DISK, BACKING)))
_PASSWORD = re.compile(r"""\spasswd=(?:"[^"]*"|'[^']*')""")


class Invalid(Exception):
    """This is not a manifest; the text says why."""


class CheckpointFile(NamedTuple):
    """One file as it was."""

    role: str
    path: str
    """From the scratch directory on where it is in there, which is elsewhere on every machine; of an image of the
    catalog its name there; else a full path."""
    transferred: bool
    """Whether it is in the scratch directory and travels with the job."""
    device: str
    """The disk that it is of, where the driver says that."""
    writable: bool
    format: str
    size: int
    mtime_ns: int
    """0 where it has nothing to say."""
    digest: str
    """SHA-256, in hexadecimal: of a memory image, else of what `vmgahp.checkpoint.files.sample` reads of a file."""


Facts = Mapping[str, Any]


class Manifest(NamedTuple):
    """One checkpoint."""

    driver: str
    name: str
    """The VM's name, which says whose checkpoint it is."""
    vm_type: str
    memory_mib: int
    vcpus: int
    cpu_seconds: float
    """CPU time that the guest has used until then."""
    time: float
    """When it was made, in seconds since 1970."""
    facts: Facts
    """What only its driver knows, as `CheckpointKind.facts` says."""
    files: tuple[CheckpointFile, ...] = ()
    """A disk before its backing files, of which the nearest is first."""


class CheckpointKind(NamedTuple):
    """What the checkpoints of one driver have of their own."""

    driver: str
    facts: "Mapping[str, Form]"
    """Every fact, and what it has to be."""
    most_files: int = MOST_FILES
    differences: Callable[[Facts, Facts], Iterable[str]] = lambda _then, _now: ()
    """Why a checkpoint with these facts cannot be restored where they are like those, as parts of a sentence."""
    memory: str = ""
    """The name of its memory image, where it has one."""
    inspect: Callable[[int], object] = lambda _descriptor: None
    """Looks at the head of an open memory image before a hypervisor does. Raises as `memory_image.inspect` does."""
    knows_disks: bool = True
    """Whether the files say which of them are disks; if not, nobody knows what a guest finds that boots afresh."""


def dump(kind: CheckpointKind, manifest: Manifest) -> bytes:
    """The manifest as JSON, without the VNC password that XML may have."""
    facts = {
        name: _PASSWORD.sub("", value) if kind.facts.get(name) is xml else value
        for name, value in manifest.facts.items()
    }
    return encode(FORMAT, manifest._replace(facts=facts))


def encode(number: int, record: NamedTuple) -> bytes:
    """A record with the format `number` as JSON, for `read`."""
    import json  # of no use to a job that has no checkpoint

    return json.dumps({"format": number} | _objects(record), indent=1).encode() + b"\n"


def _objects(value: Any) -> Any:
    """Records as what JSON calls objects, at every depth."""
    if hasattr(value, "_asdict"):
        return {name: _objects(field) for name, field in value._asdict().items()}
    return [_objects(one) for one in value] if isinstance(value, tuple) else value


def parse(kind: CheckpointKind, data: bytes) -> Manifest:
    """The manifest of this kind that `data` is. Raises `Invalid`."""
    top = read(data, FORMAT, Manifest._fields)
    driver = top.form("driver", WORD)
    if driver != kind.driver:
        raise Invalid(f"it is of the driver {driver}, and here is {kind.driver}.")
    facts = Fields(top.value("facts"), "facts.", tuple(kind.facts))
    files = read_files(top, "files", kind.most_files)
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


def read(data: bytes, number: int, names: tuple[str, ...]) -> "Fields":
    """The outermost object of a record with the format `number`, with exactly these fields. Raises `Invalid`."""
    if len(data) > LARGEST:
        raise Invalid("it is too long.")
    try:
        import json

        content = json.loads(data.decode(), object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise Invalid(f"it is not JSON: {error}.") from error
    if isinstance(content, dict) and _is_integer(content.get("format")) and content["format"] != number:
        raise Invalid(f"it has the format {str(content['format'])[:20]}, and this daemon knows {number} only.")
    top = Fields(content, "", ("format", *names))
    top.integer("format", number, number)
    return top


def read_files(top: "Fields", where: str, most: int) -> tuple[CheckpointFile, ...]:
    """The files, `most` at most, in the field `where`. Raises `Invalid`."""
    found = []
    for number, item in enumerate(top.items(where, most)):
        fields = Fields(item, f"{where}[{number}].", CheckpointFile._fields)
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
    """The fields of one JSON object, each taken out with what it has to be."""

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
        if not isinstance(value, str) or len(value) > longest or has_control(value):
            self._refuse(name)
        if not value and not may_be_empty:
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
        if not _is_integer(value) or not least <= value <= most:
            self._refuse(name)
        return int(value)

    def real(self, name: str, most: float) -> float:
        value = self._content[name]
        if not (_is_integer(value) or isinstance(value, float)) or not 0 <= value <= most:
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
"""What a fact has to be: takes it out of the fields, or raises `Invalid`."""


def matching(pattern: re.Pattern[str]) -> Form:
    return lambda fields, name: fields.form(name, pattern)


def text(longest: int, *, may_be_empty: bool = False) -> Form:
    return lambda fields, name: fields.text(name, longest, may_be_empty)


def integer(least: int, most: int) -> Form:
    return lambda fields, name: fields.integer(name, least, most)


def xml(fields: Fields, name: str) -> str:
    return fields.xml(name)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name comes twice")
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")
