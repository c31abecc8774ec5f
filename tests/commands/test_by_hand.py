"""Commands that look at a file system whose server is gone: they end, though their looks never do."""

import subprocess
import sys
from pathlib import Path

from tests.attacks.fuse import BEHAVIORS, mounted
from tests.conftest import as_root
from tests.peer import environment

PROBE = """\
import sys
import vmgahp.cli as cli, vmgahp.daemon.probe as probe
probe.DEADLINE = 1.0
sys.exit(cli.main(["vmgahp", "probe", "--type", "simulated"]))
"""


@as_root
def test_a_file_system_that_lets_no_process_go_keeps_nobody_waiting(tmp_path: Path, scratch: Path) -> None:
    with mounted(tmp_path, 0, BEHAVIORS["it never answers"]):
        environ = environment("simulated", scratch, EXECUTE=tmp_path / "execute")
        asked = subprocess.run(
            [sys.executable, "-c", PROBE], env=environ, capture_output=True, text=True, timeout=30, check=False
        )
    assert (asked.returncode, asked.stdout) == (1, ""), asked.stderr
    assert "had not ended" in asked.stderr
