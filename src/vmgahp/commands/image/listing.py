"""The list of the catalog's images, and the check that they are unchanged."""

import argparse
import hashlib
import os

from vmgahp import errors
from vmgahp.commands.arguments import print_json
from vmgahp.commands.files import open_regular
from vmgahp.commands.image import NotDone, store
from vmgahp.commands.page import Page, print_table
from vmgahp.commands.units import size as in_words
from vmgahp.findings import BAD, OK, Finding
from vmgahp.host.job_user import Identity
from vmgahp.images import catalog, qemu_img
from vmgahp.images.backing import backing_chain
from vmgahp.images.catalog import Catalog, CatalogEntry


def show(options: argparse.Namespace, environ: dict[str, str]) -> None:
    """Execute ``vmgahp image list``. Raises `NotDone`, `errors.Fault`."""
    _, found = store.settings_and_catalog(environ)
    if options.json:
        print_json({"catalog": found.path, "images": _documents(found)})
        return
    rows = []
    for each in _documents(found):
        bytes_ = each.get("bytes")
        held = in_words(bytes_) if isinstance(bytes_, int) else "-"
        about = each.get("wrong") or each.get("description") or each.get("path")
        rows.append(
            (str(each["name"]), str(each.get("format", "-")), held, str(each.get("added", "-"))[:10], str(about))
        )
    print_table(("NAME", "FORMAT", "SIZE", "ADDED", "DESCRIPTION"), rows)


def _documents(found: Catalog) -> list[dict[str, object]]:
    images: list[dict[str, object]] = []
    for entry in found.entries.values():
        about: dict[str, object] = {"name": entry.name, "path": entry.path}
        about["format"] = "iso" if entry.kind == "cdrom" else entry.format
        about |= {"description": entry.description, "min_memory": entry.min_memory, **dict(entry.provenance)}
        try:
            catalog.check(entry)
            about["bytes"] = os.stat(entry.path).st_blocks * 512
        except (errors.Fault, OSError) as fault:
            about["wrong"] = fault.problem if isinstance(fault, errors.Fault) else str(fault)
        images.append(about)
    return images + [{"name": name, "wrong": fault.problem} for name, fault in found.broken.items()]


def check(options: argparse.Namespace, environ: dict[str, str]) -> bool:
    """Execute ``vmgahp image check``; return True if all chosen images are good. Raises `NotDone`, `errors.Fault`."""
    _, found = store.settings_and_catalog(environ)
    unknown = [name for name in options.names if name not in found.entries and name not in found.broken]
    if unknown:
        raise NotDone(f"{found.path} has no image {unknown[0]}; it has {', '.join(found.entries) or 'none'}.")
    findings = []
    for name in options.names or [*found.entries, *found.broken]:
        findings.append(_judged(found, name))
    if options.json:
        print_json({"catalog": found.path, "findings": [finding._asdict() for finding in findings]})
        return all(finding.verdict == OK for finding in findings)
    page = Page()
    page.say(page.findings([(f"Images of {found.path}", findings)]))
    return all(finding.verdict == OK for finding in findings)


def _judged(found: Catalog, name: str) -> Finding:
    if name in found.broken:
        return Finding(name, BAD, found.path, found.broken[name].problem, found.broken[name].hint)
    entry = found.entries[name]
    again = "take it out by vmgahp image remove, and add it anew under another name."
    try:
        catalog.check(entry)
        for below in backing_chain(entry.path, entry.format, Identity(os.geteuid(), os.getegid())):
            catalog.trust(name, below.path)
        if trouble := "" if entry.format == "raw" else qemu_img.check(entry.path, entry.format, seconds=store.CHECK):
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
    digest = hashlib.sha256()
    with open_regular(entry.path) as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    now = digest.hexdigest()
    if now != recorded:
        seen = f"It is not what came in: its sha256 is {now}, and was {recorded}."
        return Finding(entry.name, BAD, entry.path, seen, again)
    return Finding(entry.name, OK, entry.path, f"what came in, by its sha256 {now}")
