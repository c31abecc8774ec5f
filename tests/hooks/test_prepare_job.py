"""The hook of the starter's that holds a job with a sentence before its START."""

import subprocess
import sys
from pathlib import Path

import pytest

HOOK = Path(__file__).resolve().parents[2] / "config/hooks/prepare-job"

AD = b'JobUniverse = 13\nUser = "u@x"\nClusterId = 1\nProcId = 0\nJobVMType = "kvm"\nJobVMMemory = 64\nNote = "\xff"\n'


def held(directory: Path, ad: bytes, config: object) -> bytes:
    """Return the hook's answer to a job with that ad."""
    environ = {"PATH": "/usr/bin:/bin", "VMGAHP_CONFIG": str(config), "CONDOR_CONFIG": "/dev/null"}
    done = subprocess.run(
        [sys.executable, "-I", HOOK], input=ad, env=environ, cwd=directory, capture_output=True, check=False, timeout=60
    )
    assert done.returncode == 0, f"the job is held without a sentence: {done.stderr.decode()}"
    return done.stdout


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "vmgahp.conf"
    path.write_text("VM_TYPE = kvm\nVM_MEMORY = 1024\n")
    path.chmod(0o644)
    return path


def test_a_job_that_a_start_would_hold_is_held_with_a_sentence(tmp_path: Path, config: Path) -> None:
    said = held(tmp_path, AD + b'VMPARAM_vm_Disk = "none.img:vda:w"\n', config).decode()
    assert said.startswith("HookStatusCode = 1\nHookStatusMessage = ")
    assert "none.img" in said


@pytest.mark.parametrize("settings", ["no line of a configuration", None], ids=["malformed", "not there"])
def test_no_job_is_held_for_what_the_machine_lacks(tmp_path: Path, config: Path, settings: str | None) -> None:
    if settings:
        config.write_text(settings)
    assert held(tmp_path, AD, config if settings else "elsewhere") == b""
