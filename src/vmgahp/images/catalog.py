"""The administrator's catalog of images, which defines ``catalog:<name>`` on this machine.

It is a TOML file (VM_CATALOG) with a table for each image::

    [debian-12]
    path = "debian-12.qcow2"      # beside this file, or a full path
    format = "qcow2"              # as in vm_disk; never detected
    description = "Debian 12 with cloud-init"
    min_memory = 512              # MiB

``vmgahp image`` writes an image's source, date and digests (`PROVENANCE`); jobs cannot see those.

Only root may be able to write to the file, to an image, or to a directory on the way. A fault of one image makes only
that image unavailable: other jobs are not affected.
"""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from vmgahp import errors, findings
from vmgahp.config import Settings
from vmgahp.errors import MachineFault
from vmgahp.findings import OFF, OK, Finding
from vmgahp.host.trust import require_trustworthy
from vmgahp.images import CATALOG
from vmgahp.images.formats import FORMATS, HEADER, looks_like, names_files

SETTING = "VM_CATALOG"
ATTRIBUTE = "VM_Images"
"""The machine attribute with the names of the images that jobs can have here, separated by commas."""

WARM_SETTING = "VM_WARM_DIR"
WARM_ATTRIBUTE = "VM_Images_Warm"
"""The machine attribute with the names of those of which a guest has booted already."""
_TEMPLATE = re.compile(r"([^.].*)-[0-9]+-[0-9]+-[0-9a-f]{16}", re.ASCII)
"""The name of a template (`vmgahp.drivers.libvirt.program.warm`): its image, memory, CPUs, and a digest."""

LONGEST_LINE = 5000
LARGEST = 1 << 20
MOST_IMAGES = 500
LARGEST_MEMORY = 1 << 24  # MiB

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,63}", re.ASCII)
PROVENANCE = ("sha256", "sha512", "source", "added")
"""The keys by which ``vmgahp image`` recognizes an image."""
_KEYS = {"path": str, "format": str, "description": str, "min_memory": int} | dict.fromkeys(PROVENANCE, str)

_WITH_MAGIC = ("qcow2", "qcow", "qed", "vmdk", "vdi")
"""The formats whose images begin with a magic number (`vmgahp.images.formats`)."""


class Image(NamedTuple):
    """An image of the administrator's catalog; a job gives its name only, and the rest is looked up."""

    name: str
    path: str = ""
    format: str = ""

    @property
    def known_as(self) -> str:
        """Return its name in a checkpoint, since its path may differ on another machine."""
        return f"{CATALOG}:{self.name}"


class CatalogEntry(NamedTuple):
    """One image as the catalog describes it."""

    name: str
    path: str
    format: str
    kind: str
    description: str = ""
    min_memory: int = 0
    provenance: tuple[tuple[str, str], ...] = ()

    @property
    def image(self) -> Image:
        """Return the image for use in a disk."""
        return Image(self.name, self.path, self.format)


class Catalog:
    """The images of one machine by name, and the faults of those that are unusable."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.entries: dict[str, CatalogEntry] = {}
        self.broken: dict[str, MachineFault] = {}

    def find(self, name: str) -> CatalogEntry | None:
        """Find and check the image of that name; return None for an unknown name. Raises `MachineFault` if broken."""
        if name in self.broken:
            raise self.broken[name]
        entry = self.entries.get(name)
        if entry is not None:
            check(entry)
        return entry


def is_name(text: str) -> bool:
    """Return True if an image can have that name."""
    return _NAME.fullmatch(text) is not None


def read(settings: Settings) -> Catalog | None:
    """Read the catalog, None without one; its images are not checked yet. Raises `MachineFault`."""
    path = settings.string(SETTING)
    if not path:
        return None
    require_trustworthy(path, SETTING, f"remove {SETTING} to offer no images", executable=False)
    try:
        with open(path, "rb") as file:
            return parse(path, file.read(LARGEST + 1))
    except (OSError, ValueError, RecursionError) as error:
        problem = f"{SETTING} = {path} ({settings.where(SETTING)}) is not a catalog of images: {error}."
        raise MachineFault(problem, 'write a table for each image: [name], path = "…", format = "qcow2".') from error


def parse(path: str, data: bytes) -> Catalog:
    """Parse the content of a catalog file. Raises ValueError or RecursionError if it is invalid."""
    import tomllib

    if len(data) > LARGEST:
        raise ValueError(f"it has more than {LARGEST >> 20} MiB")
    for number, line in enumerate(data.split(b"\n"), start=1):
        if len(line) > LONGEST_LINE:  # tomllib takes gigabytes for a key with a thousand dots
            raise ValueError(f"line {number} has more than {LONGEST_LINE} bytes")
    described = dict(tables(tomllib.loads(data.decode())))
    if len(described) > MOST_IMAGES:
        raise ValueError(f"it has more than {MOST_IMAGES} images")
    found = Catalog(path)
    for name, table in described.items():
        try:
            found.entries[name] = _entry(path, name, table)
        except MachineFault as fault:
            found.broken[name] = fault
    return found


def tables(content: dict[str, object], above: str = "") -> Iterator[tuple[str, dict[str, object]]]:
    """Yield the tables and their names; an unquoted name with a dot, ``[ubuntu-24.04]``, is a nested table in TOML."""
    if plain := {key: value for key, value in content.items() if not isinstance(value, dict)}:
        if not above:
            raise ValueError(f"{next(iter(plain))[:40]} is outside of any table")
        yield above.removesuffix("."), plain
    for key, value in content.items():
        if isinstance(value, dict):
            if not value:
                yield above + key, value
            yield from tables(value, f"{above}{key}.")


def _entry(catalog: str, name: str, table: dict[str, object]) -> CatalogEntry:
    wrong = partial(_broken, catalog, name)
    if not is_name(name):
        raise wrong("is not a name for an image", "use letters, digits and . _ + - in its name, 64 characters at most.")
    for key, value in table.items():
        if key not in _KEYS:
            raise wrong(f"has the key {key[:40]!a}, which is unknown", f"write {', '.join(_KEYS)} only.")
        if not isinstance(value, _KEYS[key]) or isinstance(value, bool):
            problem = f"has the {key} {value!a:.80}, which is not a {'number' if _KEYS[key] is int else 'string'}"
            raise wrong(problem, f"write a {'number' if _KEYS[key] is int else 'string in quotes'}.")
    path, said = str(table.get("path", "")), str(table.get("format", "")).lower()
    if not path or "\0" in path:
        raise wrong("has no path", f'write path = "…" under [{name}], the full path or one beside the catalog.')
    if said not in FORMATS:
        raise wrong(f"has the format {said!a:.40}" if said else "has no format", f"write one of {', '.join(FORMATS)}.")
    memory = table.get("min_memory", 0)
    if not isinstance(memory, int) or not 0 <= memory <= LARGEST_MEMORY:
        raise wrong(f"has the min_memory {memory!a:.40}", "write MiB.")
    return CatalogEntry(
        name,
        os.path.normpath(os.path.join(os.path.dirname(catalog), path)),
        FORMATS[said],
        "cdrom" if said == "iso" else "disk",
        str(table.get("description", "")),
        memory,
        tuple((key, str(table[key])) for key in PROVENANCE if key in table),
    )


def check(entry: CatalogEntry) -> bytes:
    """Check that only root can have written an image, like its format; return its beginning. Raises `MachineFault`."""
    trust(entry.name, entry.path)
    try:
        with open(entry.path, "rb") as file:
            header = file.read(HEADER)
    except OSError as error:
        raise _broken(entry.path, entry.name, f"cannot be read ({error.strerror})", "see why.") from error
    likeness = looks_like(header)
    marked = likeness if likeness in _WITH_MAGIC or entry.format in _WITH_MAGIC else entry.format
    # Both versions of qcow have the same magic number.
    same = {likeness, entry.format} == {"qcow2", "qcow"} or marked == entry.format
    if not header or not same:
        problem = f"is said to be {entry.format} and {'looks like ' + likeness if likeness else 'is not'}"
        hint = f"see qemu-img info {entry.path}, and write the format that it has."
        raise _broken(entry.path, entry.name, problem if header else "is empty", hint)
    return header


def trust(name: str, path: str) -> None:
    """Make sure that only root can have written a file of an image. Raises `MachineFault`."""
    require_trustworthy(path, f"the path of [{name}] in {SETTING}", "take it out of the catalog", executable=False)


def survey(settings: Settings, check_backing: Callable[[Image], object]) -> tuple[list[str], list[Finding]]:
    """Return the usable images, and findings for all and for each; `check_backing` raises `errors.Fault`."""
    subject = f"the images of {SETTING}"
    try:
        catalog = read(settings)
    except MachineFault as fault:
        return [], [findings.judge("images", subject, fault, "", OFF)]
    if catalog is None:
        return [], []
    found = [findings.judge(f"image {name[:64]}", subject, wrong, "", OFF) for name, wrong in catalog.broken.items()]
    names = []
    for entry in catalog.entries.values():
        at = f"{entry.path}, {entry.format}"
        try:
            header = check(entry)
            _require_readable(entry)
            # By their headers most images need no other files, and qemu-img need not be run.
            is_alone = entry.format == "qcow2" and not any(header[8:16]) and not names_files(entry.format, header)
            if not is_alone and entry.format not in ("raw", "vdi"):
                check_backing(entry.image)
        except errors.Fault as fault:
            found.append(findings.judge(f"image {entry.name}", at, fault, "", OFF))
            continue
        names.append(entry.name)
        needs = f"; it needs {entry.min_memory} MiB" if entry.min_memory else ""
        found.append(Finding(f"image {entry.name}", OK, at, f"{entry.description or 'jobs can have it'}{needs}"))
    shown = ", ".join(names) or "it has none that jobs could use"
    return names, [Finding("images", OK if names else OFF, f"{subject} = {catalog.path}", shown), *found]


def templates(settings: Settings) -> list[tuple[str, str]]:
    """List the image and the directory of each template of this machine."""
    place, names = settings.string(WARM_SETTING), []
    with suppress(OSError):
        names = os.listdir(place)
    return [(found[1], os.path.join(place, name)) for name in names if (found := _TEMPLATE.fullmatch(name))]


def published(names: Sequence[str], settings: Settings) -> dict[str, str]:
    """Return the machine attributes about the images `names`; an empty one says that there are none."""
    is_warm = {image for image, _ in templates(settings)}
    listed = {ATTRIBUTE: names, WARM_ATTRIBUTE: [name for name in names if name in is_warm]}
    return {name: ",".join(images) for name, images in listed.items()}


def judge(outcome: object) -> tuple[list[str], list[Finding]]:
    """Return the names and the findings of a `survey`, or of the fault that it was late; none makes a machine unfit."""
    if isinstance(outcome, errors.Fault):
        return [], [findings.judge("images", f"the catalog of images ({SETTING})", outcome, "", OFF)]
    return outcome if isinstance(outcome, tuple) else ([], [])


def _require_readable(entry: CatalogEntry) -> None:
    """Check that every user can read it; else it works for some, unadvertised. Raises `MachineFault`."""
    place = os.path.realpath(entry.path)
    closed = [place] if not os.stat(place).st_mode & 0o004 else []
    while place != "/":
        place = os.path.dirname(place)
        if not os.stat(place).st_mode & 0o001:
            closed.append(place)
    if closed:
        problem = f"cannot be read by the users of jobs, because of the mode of {closed[-1]}"
        hint = f"chmod {'o+r' if closed[-1] == os.path.realpath(entry.path) else 'o+x'} {closed[-1]}"
        raise _broken(entry.path, entry.name, problem, hint)


def _broken(path: str, name: str, problem: str, hint: str) -> MachineFault:
    return MachineFault(f"The image [{name[:64]}] of the catalog {problem} ({path}).", hint)
