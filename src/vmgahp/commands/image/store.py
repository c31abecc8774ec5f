"""Images in the catalog: adding, updating, listing, checking and removing them.

The catalog's file is changed by whole tables. The new text is parsed before it replaces the old file, and must differ
from it by exactly the one image that was added or removed.
"""

import argparse
import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from glob import glob
from typing import Any, NamedTuple

from vmgahp import config, errors
from vmgahp.commands.arguments import NotDone, print_json
from vmgahp.commands.files import RESTART, open_regular, sync_directory, update_ad, write_anew
from vmgahp.commands.image import fetch, say
from vmgahp.commands.image.fetch import Release, Voucher, known_releases
from vmgahp.commands.page import Page, print_table
from vmgahp.commands.page import size as in_words
from vmgahp.config import Settings
from vmgahp.config.sources import find_tool
from vmgahp.drivers.libvirt.start.disks import RECORD
from vmgahp.findings import BAD, OK, Finding
from vmgahp.host import proc
from vmgahp.host.job_user import Identity
from vmgahp.host.starter import scratch_in
from vmgahp.host.system_calls import Opened
from vmgahp.host.trust import trouble_with_directory
from vmgahp.images import catalog, formats, qemu_img
from vmgahp.images.catalog import Catalog, CatalogEntry
from vmgahp.images.formats import backing_chain
from vmgahp.job.look import backing_of
from vmgahp.text import redact

_LINES = r"(?:(?:[ \t]*(?:#.*)?\n)*[ \t]*[^\s#\[].*\n?)*"
"""The lines of a table, without the comments after the last one, which belong to the next table."""


@contextmanager
def locked_catalog(path: str) -> Iterator[None]:
    """Hold an exclusive lock on the catalog, so that no other process rewrites it. Raises OSError."""
    # A file that no other user can open: whoever can read the directory could hold a lock on it for ever.
    with Opened(os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def has_table(path: str, name: str) -> bool:
    """Return True if the catalog has an image of that name now. Raises `NotDone`."""
    return name in _entries(path, _text(path))


def add_table(path: str, name: str, table: Mapping[str, str | int]) -> None:
    """Add an image to the catalog, which is created if necessary. Raises `NotDone`."""
    text = _text(path)
    head = name if re.fullmatch(r"[A-Za-z0-9_-]+", name, re.ASCII) else _string(name)
    lines = [f"{key} = {_string(value) if isinstance(value, str) else value}" for key, value in table.items()]
    apart = "" if not text else "\n" if text.endswith("\n") else "\n\n"
    new = f"{text}{apart}[{head}]\n" + "".join(f"{line}\n" for line in lines)
    found = _parsed(path, new)
    if name in found.broken:
        raise NotDone(found.broken[name].sentence)
    _require(path, new, {**_entries(path, text), name: dict(table)})
    _write(path, new)


def remove_table(path: str, name: str) -> None:
    """Remove an image; comments before and after its lines stay. Raises `NotDone`."""
    text = _text(path)
    head = rf"^[ \t]*\[[ \t]*[\"']?{re.escape(name)}[\"']?[ \t]*\].*\n?"
    new, found = re.subn(f"{head}{_LINES}", "", text, count=1, flags=re.MULTILINE)
    if not found:
        raise NotDone(f"{path} has no line [{name}]; take that image out by hand.")
    new = new.lstrip("\n")
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
    """Replace the file with the mode and the owner that it had."""
    path = os.path.realpath(path)
    old = os.stat(path) if os.path.exists(path) else None
    kept = (stat.S_IMODE(old.st_mode), (old.st_uid, old.st_gid)) if old else (0o644,)
    write_anew(path, text.encode(), *kept)


def _string(text: str) -> str:
    """Format a basic string of TOML: it is JSON's, except for one character."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def users_of(settings: Settings, found: Catalog, entry: CatalogEntry) -> list[str]:
    """Describe each user of an image; empty if there are none."""
    return [*_processes(entry.path), *_jobs(settings, entry.name), *_images(found, entry)]


def _processes(path: str) -> Iterator[str]:
    """Yield the processes that have it open, above all a guest's QEMU."""
    try:
        wanted = os.stat(path)
    except OSError:
        return
    found, name = set(), os.path.basename(os.path.realpath(path))
    for file in glob("/proc/[0-9]*/fd/*"):  # of processes of this user, or of all for root
        with suppress(OSError):  # it is closed
            # Others may be on file systems that never answer.
            if os.path.basename(os.readlink(file)) == name and os.path.samestat(os.stat(file), wanted):
                found.add(int(file.split("/")[2]))
    for pid in sorted(found - {os.getpid()}):
        if process := proc.name(pid):
            yield f"process {pid} ({process}) has it open"


def _jobs(settings: Settings, name: str) -> Iterator[str]:
    """Yield the scratch directories with an overlay of it, whose VM may be running, suspended or about to start."""
    execute = settings.string("EXECUTE")
    with suppress(OSError):
        for job in sorted(os.listdir(execute or "/nonexistent")):
            path = os.path.join(scratch_in(os.path.join(execute, job)), RECORD)
            with suppress(OSError, ValueError, RecursionError), open_regular(path, follow=False) as file:
                text = json.dumps(json.loads(file.read(1 << 20)))
                if json.dumps(name) in text:
                    yield f"{path} is of a job with an overlay of it"


def _images(found: Catalog, entry: CatalogEntry) -> Iterator[str]:
    """Yield other images of the catalog whose backing file it is."""
    for other in found.entries.values():
        if other.name != entry.name and other.format != "raw" and other.path != entry.path:
            with suppress(OSError, qemu_img.Trouble):
                below = qemu_img.info(other.path, other.format).get("full-backing-filename")
                if below and os.path.realpath(str(below)) == os.path.realpath(entry.path):
                    yield f"the image {other.name} is laid on it"


_VERSION = re.compile(r"-[0-9]{8}$", re.ASCII)


class _New(NamedTuple):
    """An image that is to be added."""

    name: str
    source: str
    proof: Voucher
    format: str
    """The format as given by the user; empty if not."""
    description: str
    min_memory: int


def settings_and_catalog() -> tuple[config.Settings, Catalog]:
    """Return the settings and the catalog, which need not exist yet. Raises `NotDone`, `errors.Fault`."""
    settings = config.load(dict(os.environ))
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
    """Make sure that only root can write to the directory of the catalog. Raises `NotDone`, OSError."""
    directory = os.path.dirname(path)
    trouble = trouble_with_directory(directory)
    if not trouble and os.stat(directory).st_mode & stat.S_IWOTH:
        trouble = f"{directory}, to which others may write"
    if trouble:
        raise NotDone(f"{catalog.SETTING} = {path} is reached by {trouble}; only root may put an image there.")


def add(options: argparse.Namespace) -> None:
    """Execute ``vmgahp image add``. Raises `NotDone`, `errors.Fault`."""
    settings, found = settings_and_catalog()
    _require_new(found, options.name)
    _bring_in(found.path, _described(options, found))
    advertise(settings)


def advertise(settings: Settings) -> None:
    """Have this machine's startd advertise the images of the catalog as they are now, without a restart."""
    environ = dict(os.environ)
    if not settings.string("VM_TYPE") or environ.get("VMGAHP_CONFIG") or not find_tool(environ):
        return
    identity = Identity(os.geteuid(), os.getegid())
    found, _ = catalog.survey(settings, lambda image: backing_of(image, identity))
    told = catalog.published(found, settings)
    if trouble := update_ad(environ, "\n".join(f'{name} = "{names}"' for name, names in told.items())):
        say(f"{trouble} It advertises the change after: {RESTART}")
    else:
        say(f"this machine offers now: {told[catalog.ATTRIBUTE] or 'no image'}")


def _described(options: argparse.Namespace, found: Catalog) -> _New:
    known = known_releases(os.path.dirname(found.path))
    source = options.source
    release = known.get(source)
    if release is not None and not os.path.exists(source):
        if _proof(options) != Voucher() or options.format:
            raise NotDone(
                f"{source} is a release, whose format is known, and which is checked by the list of checksums of those "
                "who made it; give a digest, a signature or a format of yours with the URL of the image."
            )
        new = _of_release(options.name, release)
        more = {key: value for key in ("description", "min_memory") if (value := getattr(options, key))}
        return new._replace(**more)
    proof = _proof(options)
    if fetch.is_url(source) and not (proof.algorithm or proof.signature):
        raise NotDone(
            f"{redact(source)} could be anybody's: give --sha256, --sha512, or --signature and --key. "
            f"Those of {', '.join(known)} are known."
        )
    if not fetch.is_url(source) and not os.path.exists(source):
        raise NotDone(f"{source} is neither a file, nor a URL of http or https, nor one of {', '.join(known)}.")
    source = source if fetch.is_url(source) else os.path.abspath(source)
    return _New(options.name, source, proof, options.format, options.description, options.min_memory)


def _of_release(name: str, release: Release) -> _New:
    return _New(name, release.image, release.voucher(), release.format, release.description, release.min_memory)


def _proof(options: argparse.Namespace) -> Voucher:
    if bool(options.signature) != bool(options.key):
        raise NotDone("--signature and --key go together: who signed it, and which keys may have.")
    digests = [(name, text.lower()) for name in ("sha256", "sha512") if (text := getattr(options, name))]
    return Voucher(*(digests or [("", "")])[0], options.signature, options.key)


def update(options: argparse.Namespace) -> None:
    """Execute ``vmgahp image update``: add the newest version beside this one. Raises `NotDone`, `errors.Fault`."""
    settings, found = settings_and_catalog()
    entry = found.find(options.name)
    if entry is None:
        raise no_such_image(found, options.name)
    family = _VERSION.sub("", options.name)
    versions = [each for name, each in found.entries.items() if _VERSION.sub("", name) == family]
    known = known_releases(os.path.dirname(found.path))
    came_from = dict(entry.provenance).get("source", "")
    release = known.get(family) or next((each for each in known.values() if each.image == came_from), None)
    if release is None:
        raise NotDone(f"{options.name} is none of {', '.join(known)}: add the new version under a name of its own.")
    new = _of_release(f"{family}-{time.strftime('%Y%m%d')}", release)
    for each in versions:
        if dict(each.provenance).get(new.proof.algorithm) == new.proof.digest:
            say(f"{each.name} is the newest version; there is none beyond it")
            return
    _require_new(found, new.name)
    _bring_in(found.path, new._replace(description=entry.description, min_memory=entry.min_memory))
    advertise(settings)
    say(f"jobs have the new version by catalog:{new.name}; {options.name} stays as it is, for those that have overlays")


def no_such_image(found: Catalog, name: str) -> NotDone:
    return NotDone(f"{found.path} has no image {name}; it has {', '.join(found.entries) or 'none'}.")


def _require_new(found: Catalog, name: str) -> None:
    if not catalog.is_name(name):
        raise NotDone(f"{name} is no name for an image: use letters, digits and . _ + -, 64 at most.")
    if name in found.entries or name in found.broken:
        raise NotDone(
            f"{found.path} has an image {name} already, and none is ever changed in place: jobs have overlays of it. "
            f"vmgahp image update {name} brings a new version under a name of its own."
        )


def _bring_in(path: str, new: _New) -> None:
    """Fetch an image, check it, put it beside the catalog and then into it; after a failure remove everything."""
    _require_directory(path)
    directory = os.path.dirname(path)
    with tempfile.NamedTemporaryFile(dir=directory, prefix=".unfinished-") as file:  # a good image gets another link
        digests = fetch.bring(new.source, file, new.proof, say)
        said = _format(new, file.name)
        os.fchmod(file.fileno(), 0o644)
        os.fsync(file.fileno())
        target = os.path.join(directory, f"{new.name}.{said}")
        with locked_catalog(path):
            if has_table(path, new.name):
                raise NotDone(f"{path} has come to have an image {new.name} meanwhile, and it stays as it is.")
            try:
                os.link(file.name, target)
            except FileExistsError as error:
                why = "is there already, and is left as it is; use another name, or move it away."
                raise NotDone(f"{target} {why}") from error
            try:
                sync_directory(directory)
                add_table(path, new.name, _table(new, said, target, digests))
            except BaseException:
                if not has_table(path, new.name):
                    os.unlink(target)
                raise
    say(f"catalog:{new.name} is {target}, sha256 {digests['sha256']}")


def _table(new: _New, said: str, target: str, digests: dict[str, str]) -> dict[str, str | int]:
    table: dict[str, str | int] = {"path": os.path.basename(target), "format": said}
    table |= {"description": new.description, "min_memory": new.min_memory, **digests}
    source = redact(new.source).encode(errors="backslashreplace").decode()  # a file's name need not be UTF-8
    table |= {"source": source, "added": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
    return {key: value for key, value in table.items() if value}


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
    if kept == "raw" and not new.format and (other := formats.not_a_disk(header)):
        raise NotDone(f"{source} begins like {other}, and so is no disk; say --format {said} if it is one.")
    if not header or (kept != "raw" and formats.looks_like(header) != kept):
        raise NotDone(f"{source} is said to be {said}, and is not.")
    if kept == "raw":
        return said
    try:
        info = qemu_img.info(path, kept)
        if info.get("encrypted"):
            raise NotDone(f"{source} is encrypted, and no VM has its key; qemu-img convert writes it decrypted.")
        if below := info.get("backing-filename"):
            raise NotDone(f"{source} needs another image, {below}; qemu-img convert makes one of both.")
        if trouble := qemu_img.check(path, kept):
            raise NotDone(f"{source} {trouble}, says qemu-img check.")
    except qemu_img.Trouble as trouble_:
        raise NotDone(f"{source}: {trouble_}.") from trouble_
    return said


def remove(options: argparse.Namespace) -> None:
    """Execute ``vmgahp image remove``: remove it from the catalog, then its file. Raises `NotDone`, `errors.Fault`."""
    settings, found = settings_and_catalog()
    name = options.name
    entry = found.entries.get(name)
    if entry is None and name not in found.broken:
        raise no_such_image(found, name)
    with locked_catalog(found.path):
        if entry is not None and (used := users_of(settings, found, entry)):
            raise NotDone(f"{name} is used: {'; '.join(used[:5])}.")
        remove_table(found.path, name)
    say(f"{name} is no longer in {found.path}")
    for image, directory in catalog.templates(settings):
        if image == name:
            shutil.rmtree(directory)
    advertise(settings)
    if entry is None:
        return
    beside = os.path.dirname(entry.path) == os.path.dirname(found.path)
    if not beside or any(each.path == entry.path for key, each in found.entries.items() if key != name):
        say(f"{entry.path} stays: it {'is the file of another image, too' if beside else 'is not beside the catalog'}")
        return
    # A job that had found it in the catalog may have started meanwhile.
    if used := users_of(settings, found, entry):
        raise NotDone(f"{entry.path} stays, for it is used now: {used[0]}. Remove it when that is over.")
    os.unlink(entry.path)
    sync_directory(os.path.dirname(entry.path))
    say(f"{entry.path} is removed")


def show(options: argparse.Namespace) -> None:
    """Execute ``vmgahp image list``. Raises `NotDone`, `errors.Fault`."""
    _, found = settings_and_catalog()
    if options.json:
        print_json({"catalog": found.path, "images": _documents(found)})
        return
    rows = []
    for each in _documents(found):
        held = in_words(each["bytes"]) if "bytes" in each else "-"
        about = each.get("wrong") or each.get("description") or each["path"]
        rows.append((each["name"], each.get("format", "-"), held, each.get("added", "-")[:10], about))
    print_table(("NAME", "FORMAT", "SIZE", "ADDED", "DESCRIPTION"), rows)


def _documents(found: Catalog) -> list[dict[str, Any]]:
    images: list[dict[str, Any]] = []
    for entry in found.entries.values():
        about: dict[str, Any] = {"name": entry.name, "path": entry.path}
        about["format"] = "iso" if entry.kind == "cdrom" else entry.format
        about |= {"description": entry.description, "min_memory": entry.min_memory, **dict(entry.provenance)}
        try:
            catalog.check(entry)
            about["bytes"] = os.stat(entry.path).st_blocks * 512
        except (errors.Fault, OSError) as fault:
            about["wrong"] = fault.problem if isinstance(fault, errors.Fault) else str(fault)
        images.append(about)
    return images + [{"name": name, "wrong": fault.problem} for name, fault in found.broken.items()]


def check(options: argparse.Namespace) -> int:
    """Execute ``vmgahp image check``; return 1 if a chosen image is not good. Raises `NotDone`, `errors.Fault`."""
    _, found = settings_and_catalog()
    unknown = [name for name in options.names if name not in found.entries and name not in found.broken]
    if unknown:
        raise no_such_image(found, unknown[0])
    findings = [_judged(found, name) for name in options.names or [*found.entries, *found.broken]]
    if options.json:
        print_json({"catalog": found.path, "findings": [finding._asdict() for finding in findings]})
    else:
        page = Page()
        page.say(page.findings([(f"Images of {found.path}", findings)]))
    return int(any(finding.verdict != OK for finding in findings))


def _judged(found: Catalog, name: str) -> Finding:
    if name in found.broken:
        return Finding(name, BAD, found.path, found.broken[name].problem, found.broken[name].hint)
    entry = found.entries[name]
    again = "take it out by vmgahp image remove, and add it anew under another name."
    try:
        catalog.check(entry)
        for below in backing_chain(entry.path, entry.format, Identity(os.geteuid(), os.getegid())):
            catalog.trust(name, below.path)
        if trouble := "" if entry.format == "raw" else qemu_img.check(entry.path, entry.format):
            return Finding(name, BAD, entry.path, f"The image {trouble}, says qemu-img check.", again)
        return _same(entry, again)
    except errors.Fault as fault:
        return Finding(name, BAD, entry.path, fault.problem, fault.hint)
    except (qemu_img.Trouble, OSError) as error:
        return Finding(name, BAD, entry.path, f"The image cannot be checked ({error}).", "see why.")


def _same(entry: CatalogEntry, again: str) -> Finding:
    """Compare the image with its recorded digest, if there is one. Raises OSError."""
    recorded = dict(entry.provenance).get("sha256", "")
    if not recorded:
        return Finding(entry.name, OK, entry.path, "as its format is; no digest of it was ever written down")
    with open_regular(entry.path) as file:
        now = hashlib.file_digest(file, "sha256").hexdigest()
    if now != recorded:
        seen = f"It is not what came in: its sha256 is {now}, and was {recorded}."
        return Finding(entry.name, BAD, entry.path, seen, again)
    return Finding(entry.name, OK, entry.path, f"what came in, by its sha256 {now}")
