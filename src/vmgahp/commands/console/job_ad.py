"""A job's ad, made fit to be started from here.

An ad comes from a file (``condor_q -l``, ``.job.ad``, or the new syntax in brackets) or from condor_q itself. What a
starter would have put in is put in, secrets are left out, and the VM gets a name that is no other job's: a START
destroys what is left of an earlier VM of the same name.
"""

import os
from typing import NamedTuple

from vmgahp.commands.queue import LARGEST_AD, no_ad
from vmgahp.job import disks
from vmgahp.job.ad import JobAd, quote
from vmgahp.text import escape, is_private

CLUSTER_BASE = 2_000_000_000
"""ClusterIds from here on are the console's: no schedd has come this far, and they still fit a C int."""


class Ad(NamedTuple):
    """A job ad that can be sent."""

    lines: tuple[str, ...]
    vm_type: str
    """JobVMType, in lower case."""
    notes: tuple[str, ...]
    """What the person should know of it: what was changed, and which files would be missed."""
    name: str = ""
    """The VM's name with the hypervisor."""


def read_file(path: str) -> str:
    """The text of an ad's file. Raises `ClientFault`."""
    try:
        fd = os.open(os.path.expanduser(path), os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        with open(fd, encoding="utf-8", errors="surrogateescape") as file:
            return file.read(LARGEST_AD)
    except OSError as error:
        raise no_ad(f"{escape(path)} cannot be read: {error.strerror}") from error


def parse(text: str) -> tuple[list[tuple[str, str]], int]:
    """The attributes of the first ad in a text, and how many lines were skipped. Raises `ClientFault`."""
    if text.lstrip().startswith("["):
        return _new_syntax(text), 0
    pairs: list[tuple[str, str]] = []
    skipped = 0
    for line in text.split("\n"):
        line = line.strip("\r")
        pair = JobAd.parse_line(line)
        if pair:
            pairs.append(pair)
        elif line.strip():
            # condor_q -l begins with a line about the schedd in some versions, and files have comments.
            skipped += bool(pairs) and not line.lstrip().startswith("#")
        elif pairs:
            break
    if not pairs:
        raise no_ad("there is no line of the form Name = expression")
    return pairs, skipped


def _new_syntax(text: str) -> list[tuple[str, str]]:
    """The attributes of an ad in brackets, as lines of the old syntax, which is what a server reads."""
    try:
        import classad2
    except ImportError as error:
        raise no_ad("ads in brackets need HTCondor's Python package (htcondor)") from error
    try:
        ad = classad2.parseOne(text)
        found = [(str(name), ad.lookup(name)) for name in ad]
    except Exception as error:  # classad2 has no common class for what it raises
        raise no_ad("the text is not a ClassAd in brackets") from error
    if not found:
        raise no_ad("the text is not a ClassAd in brackets, or an empty one")
    return [(name, quote(tree) if isinstance(tree, str) else " ".join(str(tree).split("\n"))) for name, tree in found]


def prepare(text: str, working_dir: str, *, vm_type: str, serves: str, user: str, cluster: int, proc: int) -> Ad:
    """The first ad of `text` for a START in `working_dir`.

    `vm_type` is what the person wants it to be, or empty; `serves` is the type of the server, or empty where
    nobody knows; `user`, `cluster` and `proc` name the VM. Raises `ClientFault`.
    """
    pairs, skipped = parse(text)
    notes = []
    if skipped:
        notes.append(f"{skipped} lines of it were skipped: they are not of the form Name = expression.")
    secrets = [name for name, _ in pairs if is_private(name)]
    if secrets:
        notes.append(f"Secrets were left out: {', '.join(secrets)}.")
    found = JobAd(pairs)
    wanted = (vm_type or found.vm_type() or serves).lower()
    ours = {
        "VM_WORKING_DIR": quote(working_dir),
        "JobVMType": quote(wanted),
        "ClusterId": str(cluster),
        "ProcId": str(proc),
    }
    if found.string("User") is None:
        ours["User"] = quote(user)
    if not wanted:
        raise no_ad("it has no JobVMType; say the type after it")
    if serves and wanted != serves:
        notes.append(f"Its type is {escape(wanted)}, and this server serves {serves}: that will be refused.")
    replaced = {name.lower() for name in ours}
    kept = [(name, text) for name, text in pairs if name.lower() not in replaced and not is_private(name)]
    sent = [*ours.items(), *kept]
    made = JobAd(sent)
    notes += _missing_files(made, found, working_dir)
    lines = tuple(f"{name} = {expression}" for name, expression in sent)
    owner = (made.string("User") or "").replace("@", "_")
    return Ad(lines, wanted, tuple(notes), f"{owner}_{cluster}.{proc}")


def _missing_files(ad: JobAd, found: JobAd, working_dir: str) -> list[str]:
    """A note for each disk that a starter would have transferred and that is not in the working directory."""
    iwd = found.string("Iwd") or ""
    inputs = [item.strip() for item in (found.string("TransferInput") or "").split(",")]
    notes = []
    for entry in disks.entries(ad.string(disks.DISK) or ""):
        file = entry.fields[0]
        if not file or file.startswith("/") or "://" in entry.text or entry.is_of_catalog:
            continue
        if os.path.lexists(os.path.join(working_dir, os.path.basename(file))):
            continue
        source = next((item for item in inputs if os.path.basename(item) == os.path.basename(file)), file)
        source = os.path.join(iwd, source)
        there = os.path.isabs(source) and os.path.exists(source)
        hint = f"cp {escape(source)}" if there else "put it into"
        where = f"{escape(working_dir)}/"
        notes.append(f"Its disk {escape(file)} is not in the working directory: {hint} {where}")
    return notes
