"""A job's ad, prepared for a START by the console.

The attributes that a starter adds are added, secrets are left out, and the VM gets a name that no job has: a START
destroys the remains of an earlier VM of the same name.
"""

import os
import shlex
from collections.abc import Iterator
from typing import NamedTuple

from vmgahp.commands.queue import LARGEST_AD, no_ad
from vmgahp.job import disks
from vmgahp.job.ad import JobAd, quote
from vmgahp.text import escape, is_private

CLUSTER_BASE = 2_000_000_000
"""The first ClusterId of the console: schedds do not reach such numbers, and they still fit a C int."""


class Ad(NamedTuple):
    """A job ad that is ready to be sent."""

    lines: tuple[str, ...]
    vm_type: str
    """The value of JobVMType, in lower case."""
    name: str
    """The VM's name in the hypervisor."""
    notes: tuple[str, ...]
    """The changes that were made, and the files that are missing."""


def read_file(path: str) -> str:
    """Read the file of an ad. Raises `ClientFault`."""
    try:
        fd = os.open(os.path.expanduser(path), os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        with open(fd, encoding="utf-8", errors="surrogateescape") as file:
            return file.read(LARGEST_AD)
    except (OSError, ValueError) as error:
        raise no_ad(f"{escape(path)} cannot be read: {getattr(error, 'strerror', '') or error}") from error


def parse(text: str) -> list[tuple[str, str]]:
    """Parse the attributes of the first ad in a text. Raises `ClientFault`."""
    pairs: list[tuple[str, str]] = []
    for line in text.split("\n"):
        if pair := JobAd.parse_line(line.strip("\r")):
            pairs.append(pair)
        elif pairs and not line.strip():
            break
    if not pairs:
        raise no_ad("there is no line of the form Name = expression, as condor_q -l and .job.ad have them")
    return pairs


def prepare(text: str, working_dir: str, *, vm_type: str, serves: str, number: int) -> Ad:
    """Prepare the first ad of `text` for a START in `working_dir`.

    `vm_type` is the requested type, or empty for the ad's own; `serves` is the server's. The `number` makes the VM's
    name unique within this console. Raises `Fault`.
    """
    pairs = parse(text)
    found = JobAd(pairs)
    wanted = (vm_type or found.vm_type() or serves).lower()
    sent = {
        "VM_WORKING_DIR": quote(working_dir),
        "JobVMType": quote(wanted),
        "ClusterId": str(CLUSTER_BASE + os.getpid()),
        "ProcId": str(number),
    }
    if found.string("User") is None:
        sent["User"] = quote(f"{os.getuid()}@console")
    replaced = {name.lower() for name in sent}
    kept = [(name, value) for name, value in pairs if name.lower() not in replaced and not is_private(name)]
    made = JobAd([*sent.items(), *kept])
    notes = []
    if secrets := [name for name, _ in pairs if is_private(name)]:
        notes.append(f"Secrets were left out: {', '.join(secrets)}.")
    if wanted != serves:
        notes.append(f"Its type is {escape(wanted)}, and this server serves {serves}: that will be refused.")
    notes += _missing_disks(made, working_dir)
    lines = tuple(f"{name} = {value}" for name, value in [*sent.items(), *kept])
    return Ad(lines, wanted, made.vm_name(), tuple(notes))


def _missing_disks(ad: JobAd, working_dir: str) -> Iterator[str]:
    """Yield each disk that a starter would have transferred and that is missing in the working directory."""
    inputs = [item.strip() for item in (ad.string("TransferInput") or "").split(",")]
    for entry in disks.entries(ad.string(disks.DISK) or ""):
        file = entry.fields[0]
        name = os.path.basename(file)
        if file.startswith("/") or "://" in entry.text or entry.is_of_catalog or not name:
            continue
        if os.path.lexists(os.path.join(working_dir, name)):
            continue
        source = next((item for item in inputs if os.path.basename(item) == name), file)
        source = os.path.join(ad.string("Iwd") or "", source)
        is_here = os.path.isabs(source) and os.path.exists(source)
        todo = shlex.join(["cp", source, f"{working_dir}/"]) if is_here else f"put it into {working_dir}/"
        yield f"Its disk {escape(file)} is not in the working directory: {escape(todo)}"
