"""The file that ``vmgahp setup`` writes: its path, its text, and whether it was changed.

The first line has the checksum of the rest. A file without it, or with another, was edited by a person and is not
changed.
"""

import hashlib
import os
import re
from collections.abc import Mapping
from difflib import unified_diff

from vmgahp import config
from vmgahp.commands.arguments import UsageError, did_you_mean
from vmgahp.commands.files import open_regular, write_anew
from vmgahp.config import check, htcondor, sources
from vmgahp.config.table import setting_of
from vmgahp.findings import BAD

NAME = "60-vmgahp.config"
MODE_MASK = 0o022
"""The umask of the file: everyone may read it, like all of HTCondor's configuration, because it has no secrets."""
LONGEST = 1 << 16

_MARK = "# Written by vmgahp setup, which writes it anew where nobody else has changed it. SHA-256: "
_MARKED = re.compile(rf"{re.escape(_MARK)}([0-9a-f]{{64}})\n")

MACROS = {"VM_GAHP_LOG": "$(LOG)/VMGahpLog"}
"""The values that HTCondor's language expands; any other value is taken literally."""

USUAL = {**MACROS, "VM_RECHECK_INTERVAL": "60"}
"""The default values that are written. HTCondor's 600 seconds would keep a machine whose libvirt was slow once, as
after a boot, without VMs for ten minutes."""

KNOWN = {setting.name for setting in (*config.SETTINGS, *htcondor.ELSEWHERE)}


class NotWritten(Exception):
    """A file that could not be written; the text is a sentence with the remedy."""


class NotOurs(NotWritten):
    """A file that this command has not written, or that was changed since."""

    def __init__(self, sentence: str, text: str = "") -> None:
        super().__init__(sentence)
        self.text = text
        """The text of the file, if it could be read."""


def place(environ: Mapping[str, str], tool: str) -> str:
    """Find the path in the last directory of LOCAL_CONFIG_DIR, or that of the existing file. Raises `NotWritten`."""
    elsewhere = "or name a file by --output FILE."
    if not tool:
        raise NotWritten(
            "There is no HTCondor here whose configuration this could be: no condor_config_val is found. "
            f"Hint: install HTCondor, put the directory of condor_config_val on PATH, {elsewhere}"
        )
    values, _, _ = sources.read(("LOCAL_CONFIG_DIR",), environ)
    named = values.get("LOCAL_CONFIG_DIR", "").replace(",", " ").split()
    if not named:
        raise NotWritten(
            "HTCondor's LOCAL_CONFIG_DIR is not set: it reads no directory of files. "
            f"Hint: set LOCAL_CONFIG_DIR = /etc/condor/config.d in its configuration and make that, {elsewhere}"
        )
    paths = [os.path.join(directory, NAME) for directory in reversed(named) if os.path.isdir(directory)]
    if not paths:
        raise NotWritten(
            f"None of the directories of HTCondor's LOCAL_CONFIG_DIR is there: {', '.join(named)}. "
            f"Hint: mkdir -p {named[-1]}, {elsewhere}"
        )
    return next((path for path in paths if os.path.lexists(path)), paths[0])


def is_known(name: str) -> bool:
    """Return True for a setting of this daemon or for VMs; a directory of VM_SHARE_DIRS makes one of its own."""
    try:
        return name in KNOWN or bool(setting_of(name))
    except KeyError:
        return False


def require_plain(name: str, value: str) -> None:
    """Raise `UsageError` for an unknown setting, or a value that HTCondor would not take literally."""
    if not is_known(name):
        raise UsageError(f"{name} is not a setting{did_you_mean(name, KNOWN) or '; vmgahp config lists them.'}")
    if value == MACROS.get(name):
        return
    if not value.strip() or not value.isprintable() or "$" in value or value.rstrip().endswith("\\"):
        raise UsageError(
            f"{name} = {value!a} is not a plain value: one line, without $, which HTCondor would replace, and without "
            "a \\ at the end, which would continue it. Leave the setting out for its default."
        )


def require_valid(values: Mapping[str, str]) -> None:
    """Raise `UsageError` for everything that `vmgahp.config.check` finds wrong, even if jobs would run."""
    for name, value in values.items():
        require_plain(name, value)
    ours = {name: value for name, value in values.items() if name not in htcondor.BY_NAME}
    settings = config.Settings(ours, "given")
    vm_type = settings.string("VM_TYPE").lower()
    found = check.values(settings, vm_type)
    if not any(finding.verdict == BAD for finding in found):
        found += filter(None, [check.networking(settings, vm_type)])
    listed = [sources.Entry(name, value, "given") for name, value in values.items()]
    found += check.elsewhere(sources.Entries(listed, of_htcondor=True))
    for finding in found:
        raise UsageError(f"{finding.seen[:-1].replace(' (given)', '')}: {finding.hint}")


def text_of(values: Mapping[str, str], command: str) -> str:
    """Make the text of the file; `command` is the command line that makes it again."""
    lines = ["# The VM universe by vmgahp. Other settings: vmgahp config. Made by:", f"#   {command}"]
    lines += [f"{name} = {value}" for name, value in values.items()]
    body = "".join(f"{line}\n" for line in lines)
    return f"{_MARK}{hashlib.sha256(body.encode()).hexdigest()}\n{body}"


def read(path: str) -> str | None:
    """Read the file; None if it is missing. Raises `NotOurs` unless it is as this command has written it."""
    try:
        with open_regular(path, follow=False) as file:
            text = file.read(LONGEST).decode("utf-8", "surrogateescape")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise NotOurs(f"{path} cannot be read: {error.strerror or error}. Nothing is done to it.") from error
    mark = _MARKED.match(text)
    if mark is None:
        raise NotOurs(f"{path} was not written by vmgahp setup, and stays as it is. Move it away, or keep it.", text)
    rest = text[mark.end() :]
    if hashlib.sha256(rest.encode("utf-8", "surrogateescape")).hexdigest() != mark[1]:
        raise NotOurs(
            f"{path} was changed since vmgahp setup wrote it, and stays as it is. Put the changes into a file of "
            f"your own that HTCondor reads later, such as 61-local.config beside it, then rm {path}.",
            text,
        )
    return text


def values_in(text: str, path: str) -> dict[str, str]:
    """Parse the settings in a file of this command."""
    return {name: value for _, name, value in sources.logical_lines(text, path)}


def difference(old: str, new: str, path: str) -> list[str]:
    """List the lines that would change, as diff -u shows them, without the line of the checksum."""
    before, after = ([line for line in text.splitlines() if not line.startswith(_MARK)] for text in (old, new))
    return list(unified_diff(before, after, path if old else os.devnull, path if new else os.devnull, lineterm="", n=1))


def write(path: str, text: str) -> None:
    """Write the file atomically, readable by everyone. Raises OSError."""
    before = os.umask(MODE_MASK)
    try:
        write_anew(path, text.encode())
    finally:
        os.umask(before)
