"""Images in the catalog: adding one, adding a new version beside it, and removing one."""

import argparse
import os
import re
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import BinaryIO, NamedTuple

from vmgahp import config
from vmgahp.commands.image import NotDone, catalog_file, fetch, releases, users
from vmgahp.commands.image.fetch import Voucher
from vmgahp.host.trust import trouble_with_directory
from vmgahp.images import catalog, formats, qemu_img
from vmgahp.images.catalog import Catalog, CatalogEntry
from vmgahp.text import redact

Say = Callable[[str], None]

CHECK = 1800.0
"""The deadline in seconds for ``qemu-img check``, which reads all tables of an image."""

_VERSION = re.compile(r"-[0-9]{8}(\.[0-9]+)?$", re.ASCII)


class _New(NamedTuple):
    """An image that is to be added."""

    name: str
    source: str
    proof: Voucher
    format: str
    """The format as given by the user; empty if not."""
    description: str
    min_memory: int


def settings_and_catalog(environ: dict[str, str]) -> tuple[config.Settings, Catalog]:
    """Return the settings and the catalog, which need not exist yet. Raises `NotDone`, `errors.Fault`."""
    settings = config.load(environ)
    path = settings.string(catalog.SETTING)
    if not path:
        raise NotDone(f"{catalog.SETTING} is not set: name a file there, such as /srv/vm-images/catalog.toml.")
    if not os.path.lexists(path):
        _require_directory(path)
        return settings, Catalog(path)
    found = catalog.read(settings)
    assert found is not None
    return settings, found


def _require_directory(path: str) -> None:
    """Make sure that only root can write to the directory of the catalog. Raises `NotDone`."""
    directory = os.path.dirname(path)
    try:
        trouble = trouble_with_directory(directory)
        if not trouble and os.stat(directory).st_mode & stat.S_IWOTH:
            trouble = f"{directory}, to which others may write"
    except OSError as error:
        raise NotDone(f"{directory} cannot be used: {error.strerror}.") from error
    if trouble:
        raise NotDone(f"{catalog.SETTING} = {path} is reached by {trouble}; only root may put an image there.")


def add(options: argparse.Namespace, environ: dict[str, str], say: Say) -> None:
    """Execute ``vmgahp image add``. Raises `NotDone`, `errors.Fault`."""
    _, found = settings_and_catalog(environ)
    _require_new(found, options.name)
    new = _described(options, found)
    _bring_in(found.path, new, say)


def _described(options: argparse.Namespace, found: Catalog) -> _New:
    known = releases.known(os.path.dirname(found.path))
    source = fetch.as_file(options.source)
    release = known.get(source)
    if release is not None and not os.path.exists(source):
        if _proof(options) != Voucher() or options.format:
            raise NotDone(
                f"{source} is a release, whose format is known, and which is checked by the list of checksums of those "
                "who made it; give a digest, a signature or a format of yours with the URL of the image."
            )
        new = _of_release(options.name, release)
        return new._replace(
            description=options.description or new.description, min_memory=options.min_memory or new.min_memory
        )
    proof = _proof(options)
    if fetch.is_url(source) and not (proof.algorithm or proof.signature):
        raise NotDone(
            f"{redact(source)} could be anybody's: give --sha256, --sha512, or --signature and --key. "
            f"Those of {', '.join(known)} are known."
        )
    if not fetch.is_url(source) and not os.path.exists(source):
        raise NotDone(f"{source} is neither a file nor one of the releases {', '.join(known)}.")
    source = source if fetch.is_url(source) else os.path.abspath(source)
    return _New(options.name, source, proof, options.format, options.description, options.min_memory)


def _of_release(name: str, release: releases.Release) -> _New:
    proof = Voucher(release.sums.algorithm, fetch.listed(release.sums, release.image))
    return _New(name, release.image, proof, release.format, release.description, release.min_memory)


def _proof(options: argparse.Namespace) -> Voucher:
    if bool(options.signature) != bool(options.key):
        raise NotDone("--signature and --key go together: who signed it, and which keys may have.")
    if options.sha256 and options.sha512:
        raise NotDone("--sha256 and --sha512 do not go together: give one of them.")
    for algorithm in ("sha512", "sha256"):
        if text := getattr(options, algorithm):
            return Voucher(algorithm, fetch.digest(algorithm, text), options.signature, options.key)
    return Voucher(signature=options.signature, key=options.key)


def update(options: argparse.Namespace, environ: dict[str, str], say: Say) -> None:
    """Execute ``vmgahp image update``: add the newest version beside this one. Raises `NotDone`, `errors.Fault`."""
    _, found = settings_and_catalog(environ)
    entry = found.find(options.name)
    if entry is None:
        raise NotDone(f"{found.path} has no image {options.name}; it has {', '.join(found.entries) or 'none'}.")
    family = _VERSION.sub("", options.name)
    versions = [each for name, each in found.entries.items() if _VERSION.sub("", name) == family]
    known = releases.known(os.path.dirname(found.path))
    source = options.source or family
    if source not in known:
        came_from = dict(entry.provenance).get("source", "")
        source = options.source or next((name for name, each in known.items() if each.image == came_from), "")
        if source not in known:
            raise NotDone(
                f"{options.name} came from {came_from or 'where nobody wrote down'}: say by --source which of "
                f"{', '.join(known)} it is, or add the new version under a name of its own."
            )
    new = _of_release(_free_name(found, family), known[source])
    for each in versions:
        if dict(each.provenance).get(new.proof.algorithm) == new.proof.digest:
            say(f"{each.name} is the newest version; there is none beyond it")
            return
    _bring_in(found.path, new._replace(description=entry.description, min_memory=entry.min_memory), say)
    say(f"jobs have the new version by catalog:{new.name}; {options.name} stays as it is, for those that have overlays")


def _free_name(found: Catalog, family: str) -> str:
    name = base = f"{family}-{time.strftime('%Y%m%d')}"
    number = 1
    while name in found.entries or name in found.broken:
        number += 1
        name = f"{base}.{number}"
    return name


def _require_new(found: Catalog, name: str) -> None:
    if not catalog.is_name(name):
        raise NotDone(f"{name} is no name for an image: use letters, digits and . _ + -, 64 at most.")
    if name in found.entries or name in found.broken:
        raise NotDone(
            f"{found.path} has an image {name} already, and none is ever changed in place: jobs have overlays of it. "
            f"vmgahp image update {name} brings a new version under a name of its own."
        )


def _bring_in(path: str, new: _New, say: Say) -> None:
    """Fetch an image, check it, put it beside the catalog and then into it; after a failure remove everything."""
    _require_directory(path)
    directory = os.path.dirname(path)
    with _unfinished(directory) as file:
        digests = fetch.bring(new.source, file, new.proof, say)
        said = _format(new, file.name)
        os.fchmod(file.fileno(), 0o644)
        os.fsync(file.fileno())
        target = os.path.join(directory, f"{new.name}.{said}")
        with catalog_file.locked(path):
            if catalog_file.has(path, new.name):
                raise NotDone(f"{path} has come to have an image {new.name} meanwhile, and it stays as it is.")
            _put(file.name, target)
            try:
                catalog_file.sync_directory(directory)
                catalog_file.add(path, new.name, _table(new, said, target, digests))
            except BaseException:
                if not catalog_file.has(path, new.name):
                    os.unlink(target)
                raise
    say(f"catalog:{new.name} is {target}, sha256 {digests['sha256']}")


@contextmanager
def _unfinished(directory: str) -> Iterator[BinaryIO]:
    """Make a temporary file beside the catalog, and remove it afterwards: a good image has another link by then."""
    try:
        descriptor, name = tempfile.mkstemp(dir=directory, prefix=".unfinished-")
    except OSError as error:
        raise NotDone(f"{directory} cannot be written to ({error.strerror}).") from error
    try:
        os.close(descriptor)
        with open(name, "r+b") as file:
            yield file
    finally:
        with suppress(FileNotFoundError):
            os.unlink(name)


def _put(name: str, target: str) -> None:
    try:
        os.link(name, target)
    except FileExistsError as error:
        raise NotDone(f"{target} is there already, and is left as it is; use another name, or move it away.") from error
    except OSError as error:
        raise NotDone(f"{target} cannot be made ({error.strerror}).") from error


def _table(new: _New, said: str, target: str, digests: dict[str, str]) -> dict[str, str | int]:
    table: dict[str, str | int] = {"path": os.path.basename(target), "format": said}
    if new.description:
        table["description"] = new.description
    if new.min_memory:
        table["min_memory"] = new.min_memory
    return table | digests | {"source": redact(new.source), "added": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}


def _format(new: _New, path: str) -> str:
    """Detect the format of the new image, which must not refer to other files. Raises `NotDone`."""
    with open(path, "rb") as file:
        header = file.read(formats.HEADER)
    source = redact(new.source)
    try:
        said = formats.proven_format(new.source, new.format, header)
    except formats.UnclearFormat as unclear:
        raise NotDone(f"{source}: {unclear}; say by --format what it is.") from unclear
    if said not in formats.FORMATS:
        raise NotDone(f"{source} is {said}, which no VM is started from: qemu-img convert makes a qcow2 of it.")
    kept = formats.FORMATS[said]
    if reason := formats.unfit(kept, header):
        raise NotDone(f"{source} {reason}; qemu-img convert makes an image of it that stands alone.")
    if not header or (kept != "raw" and formats.looks_like(header) != kept):
        raise NotDone(f"{source} is said to be {said}, and is not.")
    if kept == "raw":
        return said
    try:
        below = qemu_img.info(path, kept).get("backing-filename")
        if below:
            raise NotDone(f"{source} needs another image, {below}; qemu-img convert makes one of both.")
        if trouble := qemu_img.check(path, kept, seconds=CHECK):
            raise NotDone(f"{source} {trouble}, says qemu-img check.")
    except qemu_img.Trouble as trouble_:
        raise NotDone(f"{source}: {trouble_}.") from trouble_
    return said


def remove(options: argparse.Namespace, environ: dict[str, str], say: Say) -> None:
    """Execute ``vmgahp image remove``: remove it from the catalog, then its file. Raises `NotDone`, `errors.Fault`."""
    settings, found = settings_and_catalog(environ)
    name = options.name
    entry = found.entries.get(name)
    if entry is None and name not in found.broken:
        raise NotDone(f"{found.path} has no image {name}; it has {', '.join(found.entries) or 'none'}.")
    with catalog_file.locked(found.path):
        if entry is not None:
            _require_unused(settings, found, entry)
        catalog_file.remove(found.path, name)
    say(f"{name} is no longer in {found.path}")
    if entry is None:
        return
    beside = os.path.dirname(entry.path) == os.path.dirname(found.path)
    if not beside or any(each.path == entry.path for key, each in found.entries.items() if key != name):
        say(f"{entry.path} stays: it {'is the file of another image, too' if beside else 'is not beside the catalog'}")
        return
    # A job that had found it in the catalog may have started meanwhile.
    if used := users.of(settings, found, entry):
        raise NotDone(f"{entry.path} stays, for it is used now: {used[0]}. Remove it when that is over.")
    try:
        os.unlink(entry.path)
        catalog_file.sync_directory(os.path.dirname(entry.path))
    except OSError as error:
        raise NotDone(f"{entry.path} cannot be removed ({error.strerror}).") from error
    say(f"{entry.path} is removed")


def _require_unused(settings: config.Settings, found: Catalog, entry: CatalogEntry) -> None:
    if used := users.of(settings, found, entry):
        raise NotDone(f"{entry.name} is used: {'; '.join(used[:5])}.")
