"""What the tests of settings share: a condor_config_val of one's own, and a file of settings."""

import sys
import textwrap
from pathlib import Path

import pytest

from tests.config.support import Program, Tool, Write
from vmgahp import cli


@pytest.fixture
def tool(tmp_path: Path) -> Tool:
    """Make a condor_config_val of a script, first on the PATH of the environment that is returned."""

    def make(script: str) -> dict[str, str]:
        path = tmp_path / "bin" / "condor_config_val"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!{sys.executable} -I\nimport os, sys, time\n{textwrap.dedent(script)}")
        path.chmod(0o755)
        return {"PATH": f"relative:{path.parent}", "HOME": str(tmp_path)}

    return make


@pytest.fixture
def given_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Write a file of settings that counts from now on."""

    def write(text: str) -> Path:
        path = tmp_path / "vmgahp.conf"
        path.write_text(textwrap.dedent(text))
        monkeypatch.setenv("VMGAHP_CONFIG", str(path))
        return path

    return write


@pytest.fixture
def vmgahp(capsys: pytest.CaptureFixture[str]) -> Program:
    """Run the program: its status, and what it has written to stdout and to stderr."""
    return lambda *words: (cli.main(["vmgahp", *words]), *capsys.readouterr())
