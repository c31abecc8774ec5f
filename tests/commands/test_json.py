"""What ``--json`` prints is what the manual pages tell of it: each key is there, and no other."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import htcondor2
import pytest

from tests.commands.support import parsers
from vmgahp import cli
from vmgahp.commands.tool import tool_parser

Printed = Callable[..., Mapping[str, object]]


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Printed:
    """Run a command with --json; what it has printed."""

    def run(*words: str) -> Mapping[str, object]:
        cli.main(["vmgahp", *words, "--json"])
        out = capsys.readouterr().out
        document = json.loads(out)
        assert out == json.dumps(document, indent=2) + "\n", "one object, as all are printed"
        assert isinstance(document, dict)
        return document

    return run


def told(*words: str) -> set[str]:
    """The keys that a command tells."""
    [parser] = [one for one in parsers(tool_parser(words[0])) if one.prog == f"vmgahp {' '.join(words)}"]
    return set(parser.keys)


def keys(document: object, path: str = "", ends: frozenset[str] = frozenset()) -> Iterator[str]:
    """The paths of all keys; below those of `ends`, what is there is the machine's to name."""
    if isinstance(document, dict) and path not in ends:
        for name, value in document.items():
            yield from keys(value, f"{path}.{name}" if path else name, ends)
    elif isinstance(document, list) and document and isinstance(document[0], dict) and path not in ends:
        for value in document:
            yield from keys(value, f"{path}[]", ends)
    else:
        yield path


def test_version_and_config(printed: Printed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(keys(printed("version"))) == told("version")
    (tmp_path / "settings").write_text("VM_MEMORY = lots\n")
    monkeypatch.setenv("VMGAHP_CONFIG", str(tmp_path / "settings"))
    assert set(keys(printed("config"))) == told("config")


def test_probe(printed: Printed) -> None:
    document = printed("probe", "--type", "simulated")
    assert set(keys(document, ends=frozenset({"attributes"}))) == told("probe")


def test_the_probe_is_of_the_machines_type(printed: Printed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "settings").write_text("VM_TYPE = Simulated\n")
    monkeypatch.setenv("VMGAHP_CONFIG", str(tmp_path / "settings"))
    assert printed("probe")["vm_type"] == "simulated"


def test_doctor(printed: Printed, tmp_path: Path) -> None:
    (tmp_path / "ad").write_text('JobVMType = "simulated"\nJobVMMemory = 64\n')
    document = printed("doctor", "--type", "simulated", "--job", str(tmp_path / "ad"))
    assert set(keys(document, ends=frozenset({"job.findings"}))) == told("doctor")


def test_top(printed: Printed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of VMs there are none here; what is told of one are the fields of a row."""
    from vmgahp.commands.top import VM

    document = printed("top", "--execute", str(tmp_path))
    rows = {f"vms[].{key}" for key in VM}
    monkeypatch.setattr(htcondor2.Collector, "query", lambda *_: [{}])
    pool = set(keys(printed("top", "--pool")))
    assert {path for path in keys(document) if not path.startswith("vms")} | rows | pool == told("top")


def test_images(printed: Printed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing image has no size, and was not brought here by `vmgahp image add`."""
    (tmp_path / "catalog.toml").write_text('[images.gone]\npath = "/nonexistent/gone.qcow2"\nformat = "qcow2"\n')
    (tmp_path / "settings").write_text(f"VM_CATALOG = {tmp_path}/catalog.toml\n")
    monkeypatch.setenv("VMGAHP_CONFIG", str(tmp_path / "settings"))
    rest = {"images[].bytes", "images[].added", "images[].source", "images[].sha256", "images[].sha512"}
    assert set(keys(printed("image", "list"))) | rest == told("image", "list")
    assert set(keys(printed("image", "check"))) == told("image", "check")


def test_submit(printed: Printed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "disk.raw").write_bytes(bytes(1 << 20))
    document = printed("submit", "disk", "disk.raw", "--format", "raw", "--memory", "64")
    assert set(keys(document, ends=frozenset({"file"}))) == told("submit", "disk")
