"""The documents say what the code does: what they show is replayed, run and compared here.

That they build without a warning is a check of its own in scripts/test.
"""

import argparse
import ast
import importlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import REPOSITORY
from tests.commands.support import parsers
from tests.peer import Peer, environment
from vmgahp import cli, lifecycle
from vmgahp.commands.tool import COMMANDS, ToolCommand, tool_parser
from vmgahp.config import table as settings_table
from vmgahp.config.check import ELSEWHERE, RETIRED
from vmgahp.job import attributes as job_attributes
from vmgahp.protocol import requests, transcript

ROOT = REPOSITORY
DOCS = ROOT / "docs"


def fences(page: str, language: str) -> Iterator[str]:
    """The code blocks of a page in one language."""
    yield from re.findall(rf"^```{language}\n(.*?)^```$", (DOCS / page).read_text(), re.DOTALL | re.MULTILINE)


def test_the_protocol_page_is_what_the_daemon_says(scratch: Path) -> None:
    script = transcript.parse("".join(fences("reference/protocol.md", "text")).replace("/tmp/job", str(scratch)))
    assert len(script.texts(">")) > 40
    with Peer(environment("simulated", scratch)) as peer:
        for line in script.lines:
            if line.mark == transcript.CLIENT:
                peer.send(line.text)
            else:
                said = peer.read_line()  # an ellipsis in the page stands for anything without a blank
                shown = r"\S+".join(map(re.escape, line.text.split("…")))
                assert re.fullmatch(shown, said), f"line {line.number}, {line.text}: {said}"
        peer.finish()
        assert peer.process.returncode == script.exit_status == 0


@pytest.mark.qemu
@pytest.mark.skipif(shutil.which("qemu-system-x86_64") is None, reason="needs qemu-system-x86_64")
def test_the_driver_page_has_a_driver_that_fulfils_the_contract(tmp_path: Path) -> None:
    driver, contract = fences("how-to/write-a-driver.md", "python")
    (project,) = fences("how-to/write-a-driver.md", "toml")
    name, place = tomllib.loads(project)["project"]["entry-points"]["vmgahp.drivers"].popitem()
    site, tests = tmp_path / "site", tmp_path / "tests"
    info = site / "vmgahp_bare-1.0.dist-info"
    for directory in (info, tests):
        directory.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vmgahp-bare\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[vmgahp.drivers]\n{name} = {place}\n")
    (site / f"{place.partition(':')[0]}.py").write_text(driver)
    (tests / "test_bare.py").write_text(contract)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests)]
    environ = os.environ | {"PYTHONPATH": str(site)}
    run = subprocess.run(command, cwd=tests, env=environ, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    assert int(re.findall(r"(\d+) passed", run.stdout)[-1]) >= 20, run.stdout
    assert "skipped" not in run.stdout


def test_every_setting_is_in_one_part_of_the_reference_with_all_that_its_row_says() -> None:
    import from_code

    page = (DOCS / "reference/settings.md").read_text()
    parts = [part for part in from_code.PARTS if part.startswith("settings-")]
    assert set(re.findall(r"{from-code} (\S+)", page)) == set(parts)
    shown = [name for part in parts for name in re.findall(r"{confval} (\S+)", from_code.PARTS[part]())]
    assert sorted(shown) == sorted(row.name for row in (*settings_table.SETTINGS, *ELSEWHERE))
    text = from_code.PARTS["settings-ours"]()
    assert "{confval} VM_STOP_TIMEOUT\n:type: integer, seconds\n:default: `30`\n\nHow long a guest may take" in text


READERS = ("boolean", "has", "integer", "real", "string", "value")
"""The methods of an ad and of options that say what the job has."""


def asked(tree: ast.Module, known: dict[str, object]) -> Iterator[str]:
    """Find the names that a module asks a job's ad or its options for.

    They are given to a method that reads, or to a helper beside the ad; or a tuple of the module's has them for a loop.
    """
    values = [node.value for node in tree.body if isinstance(node, ast.Assign)]
    given = [each for value in values if isinstance(value, ast.Tuple) for each in value.elts]
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            reads = isinstance(node.func, ast.Attribute) and node.func.attr in READERS
            if reads or any(isinstance(each, ast.Name) and each.id in ("ad", "options") for each in node.args):
                given += node.args
    for each in given:
        if isinstance(each, ast.Constant) and isinstance(each.value, str):
            yield each.value
        elif isinstance(each, ast.Name) and isinstance(known.get(each.id), str):
            yield str(known[each.id])


def test_the_table_of_job_attributes_is_what_the_code_reads() -> None:
    """Every attribute in the code is a row, and every row is asked for; an option by its word.

    The commands and the contract write ads, and do not count.
    """
    named, read = set(), set()
    for path in (ROOT / "src/vmgahp").glob("*/**/*.py"):
        place, text = path.relative_to(ROOT / "src").with_suffix(""), path.read_text()
        if place.parts[1] in ("commands", "testing"):
            continue
        is_table = place.parts[1:] == ("job", "attributes")
        found = set() if is_table else set(re.findall(r'"((?:JobVM|VMPARAM_)\w*[^\W_])"', text))
        named |= found
        if found or is_table or "options" in text:
            module = importlib.import_module(".".join(place.parts).removesuffix(".__init__"))
            for word in asked(ast.parse(text), vars(module)):
                read.add(job_attributes.OPTION_PREFIX + word if word in job_attributes.NAMES else word)
    rows = {row.name for row in job_attributes.ATTRIBUTES}
    given = {"VMPARAM_VM_NAME", "VMPARAM_Bridge_Interface", "VMPARAM_Xen_Bootloader"}
    assert named - rows - given == set(), "what is read has a row; the rest is given to LIBVIRT_XML_SCRIPT"
    assert rows - read == set(), "nobody reads these rows"


def test_every_module_says_what_it_is_in_one_line() -> None:
    """The code map is made of these sentences."""
    import from_code

    sentences = {name: from_code.first_sentence(path) for name, path in from_code.modules()}
    assert {"", "drivers/", "drivers/libvirt/xen/", "protocol/wire"} <= set(sentences)
    assert {name for name, sentence in sentences.items() if not 10 < len(sentence) <= 100} == set()
    page = from_code.PARTS["code-map"]()
    assert all(f"`{name or 'vmgahp'}`: {sentence}\n" in page for name, sentence in sentences.items())


def test_the_readme_is_short_and_has_every_street() -> None:
    page = (ROOT / "README.md").read_text()
    assert len(page.split()) < 900
    streets = {path.parent.name for path in (ROOT / "src/vmgahp").glob("*/__init__.py")} - {"testing"}
    rows = page.partition("## The code")[2]
    assert {street for street in streets if f"`{street}`" not in rows} == set()


@pytest.mark.parametrize("row", COMMANDS, ids=lambda row: row.word)
def test_each_command_has_a_manual_page_of_all_that_it_takes(row: ToolCommand) -> None:
    import command_line

    source = DOCS / f"man/vmgahp-{row.word}.md"
    assert source.exists(), f"write it: # vmgahp-{row.word}"
    assert source.read_text().startswith(f"# vmgahp-{row.word}\n")
    page = command_line.page(row.word)
    [parser] = [one for one in parsers(tool_parser(row.word)) if one.prog == f"vmgahp {row.word}"]
    for each in parsers(parser):
        own = page.partition(f"\n## {each.prog}\n")[2].partition("\n## ")[0] if each is not parser else page
        common = page.partition("\n## Common options\n")[2].partition("\n## ")[0]
        for action in each._actions:
            for option in set(action.option_strings) - {"-h", "--help"}:
                assert f"`{option}" in own or f"`{option}" in common, option
        for typed, _ in each.examples:
            assert f"\n{typed}\n" in page
        for key in each.keys:
            assert f"\n`{key}`\n: " in page
        for number, text in each.statuses.items() if each._subparsers is None else ():
            assert f"\n`{number}`\n: {command_line.plain(text)}\n" in page
    assert "](vmgahp.md)" in page


def test_the_list_of_commands_leads_to_their_pages() -> None:
    import command_line

    listed = command_line.commands()
    assert [row.word for row in COMMANDS if f"](/man/vmgahp-{row.word}.md)\n: " not in listed] == []
    assert [name for _, name, _ in command_line.man_pages()] == [f"vmgahp-{row.word}" for row in COMMANDS]


def test_the_manual_has_every_option_of_the_daemon() -> None:
    page = (DOCS / "man/condor_vm-gahp.md").read_text()
    options, variables = re.findall(r"(?<!\S)-\w+", cli.USAGE), re.findall(r"VMGAHP_\w+", cli.USAGE)
    assert {"-f", "-M", "VMGAHP_VMTYPE"} <= {*options, *variables}
    assert [word for word in options if not re.search(rf"`{word}[` ]", page)] == []
    assert [name for name in variables if f"`{name}`" not in page] == []


def diagram() -> str:
    """Return `TRANSITIONS` as a Mermaid state diagram, which docs/reference/states.md shows."""
    lines = ["stateDiagram-v2", f"    [*] --> {lifecycle.STARTING}"]
    for (state, operation), outcome in lifecycle.TRANSITIONS.items():
        if state != outcome:
            lines.append(f"    {state} --> {outcome}: {operation}")
    lines += [
        f"    {state} --> {lifecycle.STOPPED}: the guest is gone"
        for state in (lifecycle.RUNNING, lifecycle.SOFT_SUSPENDED)
    ]
    lines += [f"    {lifecycle.STARTING} --> [*]: it fails", f"    {lifecycle.STOPPED} --> [*]: STOP"]
    return "\n".join(lines) + "\n"


def test_the_diagram_in_the_documentation_is_the_table() -> None:
    _, _, rest = (DOCS / "reference/states.md").read_text().partition("```mermaid\n")
    assert rest.partition("```")[0] == diagram()


def test_the_picture_of_the_states_has_every_transition() -> None:
    import state_diagram

    dot = state_diagram.to_dot(diagram())
    for (state, operation), outcome in lifecycle.TRANSITIONS.items():
        if outcome != state:
            (arrow,) = (line for line in dot.splitlines() if f'"{state}" -> "{outcome}"' in line)
            assert operation in arrow
    with pytest.raises(ValueError, match="not a transition"):
        state_diagram.to_dot("stateDiagram-v2\n    state a <<choice>>\n")


@pytest.mark.skipif(shutil.which("dot") is None, reason="needs dot")
def test_a_picture_has_the_color_of_the_text() -> None:
    import state_diagram

    svg = state_diagram.draw(diagram())
    assert "black" not in svg
    assert svg.count('<text fill="currentColor"') == svg.count("<text ") > 10


def test_links_out_of_the_documents_become_names() -> None:
    import links_out

    def rewritten(text: str) -> str:
        return links_out.rewrite(text, str(DOCS / "how-to"), str(DOCS))

    assert rewritten("[config/policy](../../config/policy)") == "`config/policy`"
    assert rewritten("[examples](../../config/policy)") == "examples (`config/policy` in the source)"
    for kept in ("[a](devices.md)", "[b](../reference/states.md)", "[c](../../LICENSE)", "[d](../../nothing)"):
        assert rewritten(kept) == kept


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", DOCS / "index.md", *sorted(DOCS.glob("[!_]*/*.md"))]
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def unknown_names(text: str) -> set[str]:
    """What a text calls like a setting or an attribute, and is none."""
    settings = {row.name for row in (*settings_table.SETTINGS, *ELSEWHERE)}
    others = {"VM_TYPES", "VM_HYPERVISORS", "VM_GAHP_VERSION", "VM_VMGAHP_VERSION", "VM_WORKING_DIR", "VM_GAHP"}
    named = set(re.findall(r"(?<!\w)(?:VM|VMWARE|VSPHERE|XEN|LIBVIRT)_[A-Z_]*[A-Z](?![\w*<…])", text))
    words = {word.removeprefix("JOBCLASSAD_") for word in requests.WORDS}
    attributes = {row.name for row in job_attributes.ATTRIBUTES}
    of_jobs = set(re.findall(r"(?<!\w)(?:JobVM|VMPARAM_)\w*\w(?![\w*<…])", text))
    return (named - settings - set(RETIRED) - others - words) | {
        name for name in of_jobs - attributes if not name.endswith("_")
    }


def unknown_commands(text: str) -> list[str]:
    """The command lines of a text that begin with vmgahp, and that vmgahp would not take."""
    [commands] = [action.choices for action in tool_parser()._actions if isinstance(action, argparse._SubParsersAction)]
    found = []
    for command, rest in re.findall(r"(?:^ {4}|^|`|sudo |/)vmgahp ([a-z]+)([^`\n]*)", text, re.MULTILINE):
        ours, _, _ = rest.partition("#")[0].partition(" -- ")  # behind it are another program's
        options = set(re.findall(r"(?<!\S)--[a-z0-9-]+", ours))
        chosen = list(parsers(commands[command])) if command in commands else []
        known = {option for each in chosen for action in each._actions for option in action.option_strings}
        if not chosen or options - {"--help"} - known:
            found.append(f"vmgahp {command}{rest}")
    return found


@each_page
def test_settings_attributes_and_commands_that_a_page_names_exist(page: Path) -> None:
    assert unknown_names(page.read_text()) == set()
    assert unknown_commands(page.read_text()) == []


def test_a_name_that_does_not_exist_is_found() -> None:
    text = "`VM_MEMROY`, VM_MEMORY, `VM_<name>`, +VMPARAM_vm_Tmp = 1, JobVMMemory, VMPARAM_vm_*"
    assert unknown_names(text) == {"VM_MEMROY", "VMPARAM_vm_Tmp"}
    wrong = ["vmgahp docter", "vmgahp doctor --jsn", "vmgahp top --help --nothing"]
    assert unknown_commands("".join(f"    {line}\n`sudo vmgahp doctor --json`\n" for line in wrong)) == wrong
