"""The catalog's file: whole tables are added and removed, and the rest of the text is kept.

The new text is parsed before it replaces the old file, and must differ from it by exactly the one image that was added
or removed.
"""

import fcntl
import json
import os
import re
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import pairwise

from vmgahp.commands.image import NotDone
from vmgahp.images import catalog

_BARE = re.compile(r"[A-Za-z0-9_-]+", re.ASCII)


@contextmanager
def locked(path: str) -> Iterator[None]:
    """Hold an exclusive lock on the catalog, so that no other process rewrites it. Raises `NotDone`."""
    try:
        directory = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise NotDone(f"{os.path.dirname(path)}: {error.strerror}.") from error
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        yield
    finally:
        os.close(directory)


def has(path: str, name: str) -> bool:
    """Return True if the catalog has an image of that name now. Raises `NotDone`."""
    return name in _entries(path, _text(path))


def add(path: str, name: str, table: Mapping[str, str | int]) -> None:
    """Add an image to the catalog, which is created if necessary. Raises `NotDone`."""
    text = _text(path)
    head = name if _BARE.fullmatch(name) else _string(name)
    lines = [f"{key} = {_string(value) if isinstance(value, str) else value}" for key, value in table.items()]
    apart = "" if not text else "\n" if text.endswith("\n") else "\n\n"
    new = f"{text}{apart}[{head}]\n" + "".join(f"{line}\n" for line in lines)
    found = _parsed(path, new)
    if name in found.broken:
        raise NotDone(found.broken[name].sentence)
    _require(path, new, {**_entries(path, text), name: dict(table)})
    _write(path, new)


def remove(path: str, name: str) -> None:
    """Remove an image; comments before and after its lines stay. Raises `NotDone`."""
    text = _text(path)
    lines = text.splitlines(keepends=True)
    heads = [number for number, line in enumerate(lines) if line.lstrip().startswith("[")]
    for begin, end in pairwise([*heads, len(lines)]):
        with suppress(tomllib.TOMLDecodeError):
            if name in dict(catalog.tables(tomllib.loads(lines[begin]))):
                # Comments after the last other line belong to the next table.
                while end > begin + 1 and (not lines[end - 1].strip() or lines[end - 1].lstrip().startswith("#")):
                    end -= 1
                new = "".join([*lines[:begin], *lines[end:]]).lstrip("\n")
                break
    else:
        raise NotDone(f"{path} has no line [{name}]; take that image out by hand.")
    _require(path, new, {key: table for key, table in _entries(path, text).items() if key != name})
    _write(path, new)


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", newline="") as file:
            return file.read(catalog.LARGEST + 1)
    except FileNotFoundError:
        return ""
    except (OSError, ValueError) as error:
        raise NotDone(f"{path} cannot be read ({error}).") from error


def _parsed(path: str, text: str) -> catalog.Catalog:
    try:
        return catalog.parse(path, text.encode())
    except (ValueError, RecursionError) as error:
        raise NotDone(f"{path} is not a catalog of images ({error}); mend it by hand.") from error


def _entries(path: str, text: str) -> dict[str, dict[str, object]]:
    _parsed(path, text)
    return dict(catalog.tables(tomllib.loads(text)))


def _require(path: str, new: str, wanted: Mapping[str, object]) -> None:
    if _entries(path, new) != wanted:
        raise NotDone(f"{path} is written in a way that only its author can change: do this by hand.")


def _write(path: str, text: str) -> None:
    """Replace the file atomically and durably, with the mode and the owner that it had."""
    directory, temporary = os.path.dirname(path), ""
    try:
        descriptor, temporary = tempfile.mkstemp(dir=directory, prefix=".catalog-")
        with open(descriptor, "wb") as file:
            try:
                old = os.stat(path)
                os.fchown(descriptor, old.st_uid, old.st_gid)
                os.fchmod(descriptor, old.st_mode & 0o7777)
            except FileNotFoundError:
                os.fchmod(descriptor, 0o644)
            file.write(text.encode())
            file.flush()
            os.fsync(descriptor)
        os.replace(temporary, os.path.realpath(path))
        temporary = ""
        sync_directory(directory)
    except OSError as error:
        raise NotDone(f"{path} cannot be written ({error.strerror}).") from error
    finally:
        if temporary:
            os.unlink(temporary)


def sync_directory(path: str) -> None:
    """Sync a directory, so that new and renamed entries survive a power failure. Raises OSError."""
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _string(text: str) -> str:
    """Format a basic string of TOML: it is JSON's, except for one character."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
