"""``vmgahp config``: the value of each setting, its source, and its meaning."""

import argparse
import os
import re
import sys
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from shutil import get_terminal_size
from textwrap import wrap
from typing import NamedTuple

from vmgahp import config, errors
from vmgahp.commands.arguments import FINDINGS, add_json, did_you_mean, print_json, tell
from vmgahp.config import check, sources
from vmgahp.config.check import ELSEWHERE, ELSEWHERE_BY_NAME, RETIRED
from vmgahp.config.table import SHARE_DIRS, Setting, of_share_dirs, setting_of
from vmgahp.drivers import base
from vmgahp.findings import BAD, Finding, first_bad
from vmgahp.text import escape, redact

GOOD, WRONG, NO_SUCH_NAME = 0, 1, 2
"""The exit statuses: no setting keeps jobs from running, a setting does, or an unknown name was given."""


class Row(NamedTuple):
    """One setting with its value on this machine."""

    setting: Setting
    value: str
    where: str

    @property
    def is_changed(self) -> bool:
        """True if it is set explicitly, to any value."""
        return self.where not in ("default", "HTCondor's default")

    def document(self) -> dict[str, object]:
        """Return the setting as an object for ``--json``."""
        setting = self.setting
        return {
            "name": setting.name,
            "value": self.value,
            "default": setting.default,
            "changed": self.is_changed,
            "from": self.where,
            "type": setting.kind,
            "unit": setting.unit,
            "read_by": list(setting.readers),
            "meaning": setting.meaning,
        }


def rows(settings: config.Settings, environ: Mapping[str, str], places: Mapping[str, str]) -> list[Row]:
    """List every setting: those that this daemon reads, then those that only HTCondor's own daemons read."""
    ours = (*config.SETTINGS, *map(setting_of, of_share_dirs(settings.string(SHARE_DIRS))))
    found = [Row(one, _shown(one, settings.string(one.name)), settings.where(one.name)) for one in ours]
    values, where, _ = sources.read(tuple(ELSEWHERE_BY_NAME), environ)
    for setting in ELSEWHERE:
        value = values.get(setting.name, "").strip()
        place = places.get(setting.name, where[setting.name]) if value else "default"
        found.append(Row(setting, _shown(setting, value or setting.default), place))
    return found


def _shown(setting: Setting, value: str) -> str:
    """Hide possible secrets in a value: an argument such as ``--password …``, or a password within a URI."""
    if setting.kind in ("arguments", "string"):
        name = r"[\w-]*(?:pass(?:word|wd|phrase)?|secret|token|key)"
        value = re.sub(rf"(?i)({name}[=:]|-{name}\s+)[^\s'\"]+", r"\1...", value)
    value = re.sub(r"(://[^/\s:@]*):[^/\s@]*@", r"\1:...@", value)
    return escape(redact(value))


def _chosen(found: list[Row], wanted: Sequence[str]) -> tuple[list[Row], list[str]]:
    """Select the rows by the given names and patterns, and return a complaint about each unknown name."""
    chosen: list[Row] = []
    complaints = []
    for word in wanted:
        name = word.upper()
        matching = [row for row in found if fnmatchcase(row.setting.name, name)]
        chosen += [row for row in matching if row not in chosen]
        if not matching and name in RETIRED:
            complaints.append(f"{name}: neither HTCondor nor this daemon reads it any more. {RETIRED[name]}".strip())
        elif not matching:
            near = did_you_mean(name, (row.setting.name for row in found))
            complaints.append(f"{word} is not a setting{near or '.'}")
    return chosen, complaints


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Print each setting's value and the file and line, or whatever else, that it comes from; then what is wrong:
    invalid values, misspelled names, retired names."""
    add = command.add_argument
    add("names", nargs="*", metavar="NAME", help="these only; a pattern such as 'VSPHERE_*' too")
    add("--changed", action="store_true", help="only those that are set")
    add("--verbose", action="store_true", help="with the default, the type, who reads it, and the whole meaning")
    add_json(command)
    command.set_defaults(run=run)
    tell(
        command,
        examples=[
            ("vmgahp config --changed", "what is set on this machine, and where"),
            ("vmgahp config VM_MEMORY 'VSPHERE_*'", "one setting, and all of a name"),
        ],
        statuses={
            GOOD: "No setting keeps jobs from running.",
            WRONG: "One does, or the settings cannot be read.",
            NO_SUCH_NAME: "Wrong arguments, or a name that is no setting.",
        },
        keys={
            "settings[].name": "the setting",
            "settings[].value": "what counts, as text; secrets are not shown",
            "settings[].default": "what counts where it is not set",
            "settings[].changed": "whether it is set",
            "settings[].from": "file and line, or whatever else it comes from",
            "settings[].type": "boolean, integer, string and the like",
            "settings[].unit": "of a figure",
            "settings[].read_by": "the daemons that read it",
            "settings[].meaning": "what it does",
            **FINDINGS,
        },
    )


def run(options: argparse.Namespace) -> int:
    """Print the requested settings, or all, and what is wrong: on standard error if standard output is no terminal."""
    environ, wanted = os.environ, options.names
    settings, entries = config.load(environ), sources.entries(environ)
    settings.locate(entries.where())
    found = rows(settings, environ, entries.where())
    vm_type = settings.string("VM_TYPE").lower() or "kvm"
    network = check.networking(settings, vm_type)
    wrong = [*check.check(settings, vm_type, entries), *([network] if network else ())]
    try:
        base.find(vm_type)
    except errors.Fault as fault:
        wrong.insert(0, Finding("VM_TYPE", BAD, "VM_TYPE", fault.problem, fault.hint))
    found, complaints = _chosen(found, wanted or ["*"])
    if options.changed:
        found = [row for row in found if row.is_changed]
    for complaint in complaints:
        sys.stderr.write(f"vmgahp config: {escape(complaint)}\n")
    if options.json:
        settled = [row.document() for row in found]
        print_json({"settings": settled, "findings": [finding._asdict() for finding in wrong]})
    else:
        _print(found, wrong if not wanted else [], options.verbose)
    if complaints:
        return NO_SUCH_NAME
    return WRONG if first_bad(wrong) else GOOD


def _print(found: list[Row], wrong: list[Finding], verbose: bool) -> None:
    terminal = sys.stdout.isatty()
    if terminal and not verbose:
        _print_table(found)
    else:
        sys.stdout.write("".join(escape(line) + "\n" for row in found for line in _lines(row, verbose)))
    if wrong:
        from vmgahp.commands.page import Page  # late: completions and man pages are made without rich

        page = Page(sys.stdout if terminal else sys.stderr)
        page.say(page.findings([("What is wrong with the settings", wrong)]))


def _lines(row: Row, verbose: bool) -> list[str]:
    """Format a setting as in a file of settings; remarks about it are comments there."""
    setting = row.setting
    lines = [f"{setting.name} = {row.value}".rstrip(), f" # from: {row.where}"]
    if verbose:
        unit = f", {setting.unit}" if setting.unit else ""
        lines.append(f" # {setting.kind}{unit}; default: {setting.default or 'none'}")
        lines.append(f" # read by: {', '.join(setting.readers)}")
        lines += [f" # {line}" for line in wrap(setting.meaning, 98)]
    return lines


def _print_table(found: list[Row]) -> None:
    rows, styles = [], []
    for row in found:
        value = row.value or "(not set)"
        if row.is_changed and row.setting.default:
            value += f" (default {row.setting.default})"
        elif row.setting.unit:
            value += f" {row.setting.unit}"
        first = row.setting.meaning.partition(". ")[0].partition("; ")[0].rstrip(".")
        rows.append((row.setting.name, value, row.where, f"{first}."))
        styles.append("bold" if row.is_changed else "" if row.value else "dim")
    columns = 4 if get_terminal_size().columns >= 110 else 3  # meanings need room
    from vmgahp.commands.page import print_table

    print_table(("Setting", "Value", "From", "Meaning")[:columns], [row[:columns] for row in rows], styles)
