"""Parts of the reference made from the code's own tables while the documents are built.

A page says ``{from-code} settings-ours`` and the like; each name in `PARTS` is a function that returns Markdown.
Nothing of it is written into the source tree, so it cannot be out of date.
"""

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

import attacks_tried
import command_line
import faults_tried
import tested_on
import vmgahp
from command_line import plain
from vmgahp import cli, errors, vm_types
from vmgahp.config.check import ELSEWHERE, RETIRED
from vmgahp.config.table import SERVER, SETTINGS, Setting
from vmgahp.daemon import transfer_plugin
from vmgahp.job import published
from vmgahp.job.attributes import ATTRIBUTES, OPTIONS, JobAttribute
from vmgahp.job.scratch_files import FILES
from vmgahp.protocol import requests

FAMILIES = {
    "settings-xen": vm_types.XEN,
    "settings-vmware": vm_types.VMRUN,
    "settings-vsphere": vm_types.VSPHERE,
    "settings-script": vm_types.SCRIPT,
}
"""Part -> the VM types that alone use its settings."""


def settings_of(part: str) -> list[Setting]:
    """Return the rows of the table that a part shows; every row is in one part."""
    if part in FAMILIES:
        return [setting for setting in SETTINGS if setting.types == FAMILIES[part]]
    ours = part == "settings-ours"
    return [s for s in SETTINGS if s.ours == ours and s.types not in FAMILIES.values()]


def _settings(part: str) -> str:
    return "\n".join(_setting(setting) for setting in settings_of(part))


def _setting(setting: Setting) -> str:
    unit = f", {setting.unit}" if setting.unit else ""
    default = f"`{setting.default}`" if setting.default else "empty"
    words = f" One of: {', '.join(f'`{word}`' for word in setting.words)}." if setting.words else ""
    readers = "" if setting.readers == (SERVER,) else f" Read by: {', '.join(setting.readers)}."
    return (
        f"```{{confval}} {setting.name}\n:type: {setting.kind}{unit}\n:default: {default}\n\n"
        f"{plain(setting.meaning)}{words}{readers}\n```\n"
    )


def _settings_list() -> str:
    """List the names of all settings, each with a link to its place."""
    parts = (settings_of(part) for part in ("settings-htcondor", "settings-ours", *FAMILIES))
    names = sorted(setting.name for part in (*parts, ELSEWHERE) for setting in part)
    return ", ".join(f"{{confval}}`{name}`" for name in names) + ".\n"


def _attributes(*, options: bool) -> str:
    return "\n".join(_attribute(row) for row in ATTRIBUTES if (row in OPTIONS) == options)


def _attribute(row: JobAttribute) -> str:
    written = f"`{row.command} = …`" if row.command else f"`+{row.name} = …`"
    types = ", ".join(f"`{name}`" for name in row.types) or "all"
    return (
        f"```{{job-attribute}} {row.name}\n{plain(row.meaning)}\n\nIn a submit file: {written}. Type: {row.kind}. "
        f"Without it: {plain(row.default)}. VM types: {types}.\n```\n"
    )


def _past(settings: dict[str, str]) -> str:
    lines = [f"`{name}`\n: {plain(instead) or 'Nothing reads it.'}\n" for name, instead in sorted(settings.items())]
    return "\n".join(lines)


def _words(*, ours: bool) -> str:
    """List the error words of this daemon, or the others; those that hold a job come first."""
    answered = {value for value in vars(errors).values() if isinstance(value, str)}
    holding = [word.removeprefix(errors.PREFIX) for word in errors.HOLD_CODES]
    text = ""
    for word in (*holding, *(word for word in requests.WORDS if word not in holding)):
        if (errors.PREFIX + word in answered) == ours:
            fate = f"Holds the job, subcode {holding.index(word)}." if word in holding else "Does not hold the job."
            text += f"```{{error-word}} {errors.PREFIX}{word}\n{plain(requests.meaning(word))} {fate}\n```\n\n"
    return text


def modules() -> Iterator[tuple[str, Path]]:
    """Yield every module of `vmgahp` by its path, each package (``drivers/``) before its modules."""
    root = Path(vmgahp.__file__).parent
    for directory in sorted({path.parent for path in root.rglob("*.py")}):
        for path in sorted(directory.glob("*.py"), key=lambda path: (path.stem != "__init__", path.stem)):
            name = str(path.relative_to(root).with_suffix(""))
            yield name.removesuffix("__init__"), path


def first_sentence(path: Path) -> str:
    """Return the first sentence of a module's docstring, or an empty string."""
    text = " ".join((ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n\n")[0].split())
    return re.split(r"(?<=[.!?])\s", text)[0]


def _code_map() -> str:
    """List the packages, each followed by its modules."""
    lines = []
    for name, path in modules():
        package = path.stem == "__init__"
        indent = "" if package else "  "
        lines.append(f"{indent}- `{name or 'vmgahp'}`: {first_sentence(path)}")
    return "\n".join(lines) + "\n"


def _published() -> str:
    rows = [f"| `{name.attribute}` | {name.kind} | {plain(name.meaning)} |" for name in published.NAMES]
    return "\n".join(("| attribute | type | meaning |", "|---|---|---|", *rows, ""))


def _scratch_files() -> str:
    rows = [f"| `{file.name}` | {file.content} | {file.travel.value} | `{file.writer}` |" for file in FILES]
    return "\n".join(("| file | content | goes | written by |", "|---|---|---|---|", *rows, ""))


def _verbatim(text: str) -> str:
    return f"```text\n{text}```\n"


def parts() -> "Iterator[tuple[str, Callable[[], str]]]":
    """Yield each part's name and the function that makes it."""
    for part in ("settings-htcondor", "settings-ours", *FAMILIES):
        yield part, lambda part=part: _settings(part)
    yield "settings-list", _settings_list
    yield "settings-elsewhere", lambda: "\n".join(_setting(setting) for setting in ELSEWHERE)
    yield "settings-retired", lambda: _past(RETIRED)
    yield "scratch-files", _scratch_files
    yield "words-of-ours", lambda: _words(ours=True)
    yield "words-of-others", lambda: _words(ours=False)
    yield "job-attributes", lambda: _attributes(options=False)
    yield "job-options", lambda: _attributes(options=True)
    yield "code-map", _code_map
    yield "published", _published
    yield "commands", command_line.commands
    yield "exit-statuses", command_line.statuses
    yield "daemon-usage", lambda: _verbatim(cli.USAGE)
    yield "plugin-usage", lambda: _verbatim(transfer_plugin.USAGE)
    yield "attacks-tried", attacks_tried.tables
    yield "faults-kinds", faults_tried.kinds
    yield "faults-tried", faults_tried.tried
    yield "tested-on", tested_on.table


PARTS = dict(parts())


class FromCode(SphinxDirective):
    """The directive ``from-code NAME``."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        try:
            make = PARTS[self.arguments[0]]
        except KeyError:
            raise self.error(f"from-code knows {', '.join(PARTS)}, and not {self.arguments[0]}") from None
        return self.parse_text_to_nodes(make())


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("from-code", FromCode)
    app.add_object_type("job-attribute", "job-attribute", "single: %s; job attribute", objname="job attribute")
    app.add_object_type("error-word", "error-word", "single: %s; error word", objname="error word")
    return {"parallel_read_safe": True}
