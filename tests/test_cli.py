"""Command lines, as HTCondor writes them and as people do."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.peer import DAEMON, environment
from vmgahp import cli
from vmgahp.cli import _Arguments, _UsageError
from vmgahp.daemon import transfer_plugin


def arguments(line: str) -> _Arguments:
    return _Arguments(["condor_vm-gahp", *line.split()])


@pytest.mark.parametrize("mode", ["1", "3"])
def test_serving(mode: str) -> None:
    parsed = arguments(f"-f -t -M {mode}")
    assert (parsed.mode, parsed.to_stderr) == (int(mode), True)


def test_the_startds_probe_and_kill_whose_words_may_be_abbreviated() -> None:
    assert arguments("-f -M 0 vmtype KVM").vm_type == "kvm"
    parsed = arguments("-f -t -M 4 vmtype kvm match alice_lab_7.3")
    assert (parsed.vm_type, parsed.match, parsed.uuid) == ("kvm", "alice_lab_7.3", "")
    parsed = arguments("-foreground -term -M 4 vm kvm ma alice_lab_7.3 u 12-34")
    assert (parsed.to_stderr, parsed.vm_type, parsed.match, parsed.uuid) == (True, "kvm", "alice_lab_7.3", "12-34")


@pytest.mark.parametrize(
    "line",
    [
        *("", "-f", "-M", "-M 2", "-M 5", "-M x", "-f -M 0", "-M 0 vmtype", "-M 4 vmtype kvm", "-M 0 kvm"),
        *("-Z -M 3", "serve"),
    ],
)
def test_anything_else_is_a_usage_error(line: str) -> None:
    with pytest.raises(_UsageError):
        arguments(line)


def run(*words: str, **environ: str) -> "subprocess.CompletedProcess[str]":
    command = [*DAEMON, *words]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)


def test_usage_goes_to_stderr_with_status_1() -> None:
    ended = run("-M", "9")
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "unknown mode: 9" in ended.stderr
    assert "usage:" in ended.stderr


@pytest.mark.parametrize("word", ["-h", "-help", "--help"])
def test_usage_that_is_asked_for_is_no_failure(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    for program, usage in ((cli.daemon, cli.USAGE), (transfer_plugin.main, transfer_plugin.USAGE)):
        assert program(["program", word]) == 0
        assert capsys.readouterr() == (usage, "")


@pytest.mark.parametrize("missing", ["VMGAHP_VMTYPE", "VMGAHP_WORKING_DIR"])
def test_serving_needs_its_environment(missing: str, scratch: Path) -> None:
    environ = environment("simulated", scratch)
    del environ[missing]
    ended = run("-f", "-M", "3", **environ)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert missing in ended.stderr


def loaded(code: str) -> list[str]:
    """What a fresh interpreter prints of the modules that some code loads."""
    command = [sys.executable, "-P", "-c", "import sys; " + code]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.split()


def test_the_greeting_and_the_first_reply_need_no_heavy_module(scratch: Path) -> None:
    """What is imported up to the greeting: a handful of our own modules and what the interpreter has loaded."""
    code = "before = set(sys.modules); import vmgahp.cli; print(*sorted(set(sys.modules) - before))"
    assert loaded(code) == ["vmgahp", "vmgahp.cli"]
    heavy = {"dataclasses", "json", "libvirt", "lxml", "re", "subprocess", "threading", "typing"}
    code = "before = set(sys.modules); import vmgahp.daemon.server; print(*sorted(set(sys.modules) - before))"
    assert not heavy & set(loaded(code))


LOADED = """
import ast, os
from pathlib import Path
import vmgahp
from vmgahp.config import Settings, sources
from vmgahp.daemon.server import Server
from vmgahp.host.job_user import Identity
Server("kvm", ".", {}, to_stderr=False)._load_driver("kvm", Settings(), Identity(os.getuid(), os.getgid()))
root = Path(vmgahp.__file__).parent.parent
for name in [name for name in sys.modules if name.startswith("vmgahp.")]:
    for node in ast.walk(ast.parse(Path(sys.modules[name].__file__).read_bytes())):
        if isinstance(node, ast.ImportFrom):
            for each in (node.module, *(f"{node.module}.{alias.name}" for alias in node.names)):
                # A START loads these for the jobs that need them until their end.
                if each.startswith(("vmgahp.hooks.policy", "vmgahp.drivers.libvirt.program.")):
                    continue
                if each not in sys.modules and (root / f"{each.replace('.', '/')}.py").exists():
                    print(f"{name}:{each}")
"""


def test_what_a_server_imports_late_is_loaded_when_it_has_a_driver() -> None:
    """An upgrade of the package beneath a server changes nothing for it, until its VM has ended."""
    assert loaded(LOADED) == []


@pytest.mark.parametrize(
    ("before", "after"),
    [(".:/usr/bin", "/usr/bin"), ("/opt::/usr/bin:", "/opt:/usr/bin"), ("bin", None), ("", None), (None, None)],
)
@pytest.mark.parametrize("name", ["PATH", "LD_LIBRARY_PATH"])
def test_no_import_is_local(name: str, before: str | None, after: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    for program in (cli.daemon, cli.main):
        monkeypatch.delenv(name, raising=False)
        if before is not None:
            monkeypatch.setenv(name, before)
        program(["vmgahp", "version"] if program is cli.main else ["condor_vm-gahp", "-version"])
        assert os.environ.get(name) == after
