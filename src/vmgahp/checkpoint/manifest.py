"""What a checkpoint says of itself, as objects and as JSON; pure.

A manifest comes back with the job and may be anything, so each field is checked for its type, its form and
its range, none may be missing and none may be more, and `Invalid` is all that can come of reading one.
"""

import json
import re
from typing import Any, NamedTuple, NoReturn

from vmgahp.text import has_control

FORMAT = 1
"""The version of the manifest; another one is refused."""

LARGEST = 4 << 20
"""Bytes of a manifest; one with the longest XML and the most disks stays below."""
LARGEST_XML = 1 << 20
MOST_DISKS, MOST_LAYERS = 1024, 64

_PASSWORD = re.compile(r"""\spasswd=(?:"[^"]*"|'[^']*')""")

_WORD = re.compile(r"[A-Za-z0-9_.+-]{1,64}", re.ASCII)
_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)

_LARGEST_FILE = 2**63 - 1


class Invalid(Exception):
    """This is not a manifest; the text says why."""


class FileState(NamedTuple):
    """An image, or a backing file of one, as it was."""

    path: str
    """From the scratch directory on where it is in there, which is elsewhere on every machine."""
    transferred: bool
    """Whether it is in the scratch directory and travels with the job."""
    format: str
    size: int
    mtime_ns: int
    sample: str
    """SHA-256, in hexadecimal, of what `vmgahp.checkpoint.store.sample` reads of it."""


class DiskState(NamedTuple):
    """One disk of the VM, with all the files that make up its content."""

    device: str
    writable: bool
    image: FileState
    backing: tuple[FileState, ...]
    """The nearest first."""


class MemoryState(NamedTuple):
    """The memory image as it was written."""

    size: int
    sha256: str


class Manifest(NamedTuple):
    """One checkpoint."""

    name: str
    """The VM's name, which says whose checkpoint it is."""
    vm_type: str
    domain_type: str
    """kvm or qemu: a guest saved under the one cannot be resumed under the other."""
    uuid: str
    libvirt_version: int
    """As libvirt counts: 9.1.2 is 9001002."""
    qemu_version: int
    host_cpu: str
    """What tells two kinds of CPU apart; empty where the guest does not see the host's CPU."""
    machine_type: str
    architecture: str
    xml: str
    """The domain as it was saved."""
    cpu_seconds: float
    """CPU time that the guest has used until then."""
    time: float
    """When it was made, in seconds since 1970."""
    disks: tuple[DiskState, ...]
    memory: MemoryState


def dump(manifest: Manifest) -> bytes:
    """The manifest as JSON, without the VNC password that the XML may have."""
    return encode(FORMAT, manifest._replace(xml=_PASSWORD.sub("", manifest.xml)))


def encode(number: int, record: NamedTuple) -> bytes:
    """A manifest of the format `number` as JSON, for `read`."""
    return json.dumps({"format": number} | _objects(record), indent=1).encode() + b"\n"


def _objects(value: Any) -> Any:
    """Records as what JSON calls objects, at every depth."""
    if hasattr(value, "_asdict"):
        return {name: _objects(field) for name, field in value._asdict().items()}
    return [_objects(one) for one in value] if isinstance(value, tuple) else value


def parse(data: bytes) -> Manifest:
    """The manifest that `data` is. Raises `Invalid`."""
    top = read(data, FORMAT, Manifest._fields)
    memory = Fields(top.value("memory"), "memory.", MemoryState._fields)
    return Manifest(
        name=top.text("name", 300),
        vm_type=top.form("vm_type", _WORD),
        domain_type=top.form("domain_type", _WORD),
        uuid=top.form("uuid", _UUID),
        libvirt_version=top.integer("libvirt_version", 0, 10**10),
        qemu_version=top.integer("qemu_version", 0, 10**10),
        host_cpu=top.text("host_cpu", 500, may_be_empty=True),
        machine_type=top.form("machine_type", _WORD),
        architecture=top.form("architecture", _WORD),
        xml=top.xml("xml"),
        cpu_seconds=top.real("cpu_seconds", 1e12),
        time=top.real("time", 1e12),
        disks=tuple(_disk(item, f"disks[{number}].") for number, item in enumerate(top.items("disks", MOST_DISKS))),
        memory=MemoryState(size=memory.integer("size", 0, _LARGEST_FILE), sha256=memory.form("sha256", _SHA256)),
    )


def read(data: bytes, number: int, names: tuple[str, ...]) -> "Fields":
    """The outermost object of a manifest of the format `number`, with exactly these fields. Raises `Invalid`."""
    if len(data) > LARGEST:
        raise Invalid("it is too long.")
    try:
        content = json.loads(data.decode(), object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise Invalid(f"it is not JSON: {error}.") from error
    if isinstance(content, dict) and _is_integer(content.get("format")) and content["format"] != number:
        raise Invalid(f"it has the format {str(content['format'])[:20]}, and this daemon knows {number} only.")
    top = Fields(content, "", ("format", *names))
    top.integer("format", number, number)
    return top


def _disk(content: object, where: str) -> DiskState:
    disk = Fields(content, where, DiskState._fields)
    return DiskState(
        device=disk.form("device", _WORD),
        writable=disk.flag("writable"),
        image=_file(disk.value("image"), where + "image."),
        backing=tuple(
            _file(item, f"{where}backing[{number}].") for number, item in enumerate(disk.items("backing", MOST_LAYERS))
        ),
    )


def _file(content: object, where: str) -> FileState:
    file = Fields(content, where, FileState._fields)
    return FileState(
        path=file.text("path", 4096),
        transferred=file.flag("transferred"),
        format=file.form("format", _WORD),
        size=file.integer("size", 0, _LARGEST_FILE),
        mtime_ns=file.integer("mtime_ns", -_LARGEST_FILE, _LARGEST_FILE),
        sample=file.form("sample", _SHA256),
    )


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


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name comes twice")
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")
