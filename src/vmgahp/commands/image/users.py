"""The users of an image of the catalog on this machine, as far as this process can see them."""

import json
import os
from collections.abc import Iterator
from contextlib import suppress

from vmgahp.commands.files import open_regular
from vmgahp.config import Settings
from vmgahp.drivers.libvirt.provision import RECORD
from vmgahp.host.starter import scratch_in
from vmgahp.images import qemu_img
from vmgahp.images.catalog import Catalog, CatalogEntry

LARGEST = 1 << 20
"""The maximum number of bytes of a job's record."""


def of(settings: Settings, found: Catalog, entry: CatalogEntry) -> list[str]:
    """Describe each user of an image; empty if there are none."""
    return [*_processes(entry.path), *_jobs(settings, found, entry.name), *_images(found, entry)]


def _processes(path: str) -> Iterator[str]:
    """Yield the processes that have it open, above all a guest's QEMU."""
    try:
        wanted = os.stat(path)
    except OSError:
        return
    for pid in filter(str.isdigit, os.listdir("/proc")):
        if pid == str(os.getpid()):
            continue
        with suppress(OSError):  # it has ended, or belongs to another user
            for number in os.listdir(f"/proc/{pid}/fd"):
                with suppress(OSError):
                    if os.path.samestat(os.stat(f"/proc/{pid}/fd/{number}"), wanted):
                        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
                            yield f"process {pid} ({file.read().strip()}) has it open"
                        break


def _jobs(settings: Settings, found: Catalog, name: str) -> Iterator[str]:
    """Yield the scratch directories with an overlay of it, whose VM may be running, suspended or about to start."""
    execute = settings.string("EXECUTE")
    with suppress(OSError):
        for job in sorted(os.listdir(execute or "/nonexistent")):
            path = os.path.join(scratch_in(os.path.join(execute, job)), RECORD)
            with suppress(OSError, ValueError, RecursionError), open_regular(path, follow=False) as file:
                text = json.dumps(json.loads(file.read(LARGEST)))
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
