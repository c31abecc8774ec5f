"""The hook of the starter's that holds a job with a sentence before its START, by the script that setup writes."""

import io
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import REPOSITORY
from tests.conftest import as_root
from vmgahp.commands.setup import HOOK_TEXT
from vmgahp.daemon import prepare_job

HOOK = HOOK_TEXT.replace(" -I ", " ")
"""The same with this clone's modules."""

AD = b'JobUniverse = 13\nUser = "u@x"\nClusterId = 1\nProcId = 0\nJobVMType = "kvm"\nJobVMMemory = 64\nNote = "\xff"\n'


def held(directory: Path, ad: bytes, config: object) -> bytes:
    """Return the hook's answer to a job with that ad."""
    environ = {"PATH": "/usr/bin:/bin", "VMGAHP_CONFIG": str(config), "CONDOR_CONFIG": "/dev/null"}
    return answer(HOOK, directory, ad, environ | {"PYTHONPATH": str(REPOSITORY / "src")})


def answer(hook: str, directory: Path, ad: bytes, environ: dict[str, str]) -> bytes:
    done = subprocess.run(
        ["sh", "-c", hook], input=ad, env=environ, capture_output=True, check=False, timeout=60, cwd=directory
    )
    assert done.returncode == 0, f"the job is held without a sentence: {done.stderr.decode()}"
    return done.stdout


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "vmgahp.conf"
    path.write_text("VM_TYPE = kvm\nVM_MEMORY = 1024\n")
    path.chmod(0o644)
    return path


def test_a_job_that_a_start_or_the_policy_would_hold_is_held_with_a_sentence(tmp_path: Path, config: Path) -> None:
    said = held(tmp_path, AD + b'VMPARAM_vm_Disk = "none.img:vda:w"\n', config).decode()
    assert said.startswith("HookStatusCode = 1\nHookStatusMessage = ")
    assert "none.img" in said
    # A START has BAD_IMAGE for it.
    (tmp_path / "guest.img").write_bytes(bytes(1 << 20))
    ad = AD + b'VMPARAM_vm_Disk = "guest.img:vda:w:%s"\n'
    said = held(tmp_path, ad % b"qcow2", config).decode()
    assert "guest.img" in said
    assert "qcow2" in said
    assert held(tmp_path, ad % b"raw", config) == b""
    with config.open("a") as file:
        file.write("VM_POLICY_REQUIREMENTS = JobVMMemory < 32\n")
    assert "VM_POLICY_REQUIREMENTS" in held(tmp_path, AD, config).decode()


@pytest.mark.parametrize(
    ("setting", "closed", "disk", "answers"),
    [
        pytest.param("LOCAL_CONFIG_DIR = {}\n", False, b"none.img:vda:w", True, id="settings that it can read"),
        pytest.param("LOCAL_CONFIG_DIR = {}\n", True, b"none.img:vda:w", False, id="settings"),
        pytest.param(
            "VM_CATALOG = /nonexistent/catalog.toml\n", False, b"catalog:a:vda:r", False, marks=as_root, id="a catalog"
        ),
    ],
)
def test_no_job_is_held_for_what_its_user_cannot_read(
    tmp_path, config, monkeypatch, capsysbinary, setting, closed, disk, answers
) -> None:
    with config.open("a") as file:
        file.write(setting.format(tmp_path))
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: access(path, mode) and not (closed and path == str(config)))
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(AD + b'VMPARAM_vm_Disk = "%s"\n' % disk)))
    monkeypatch.setenv("VMGAHP_CONFIG", str(config))
    monkeypatch.chdir(tmp_path)
    prepare_job.main()
    assert capsysbinary.readouterr().out[:14] == (b"HookStatusCode" if answers else b"")


@pytest.mark.parametrize("settings", ["no line of a configuration", None], ids=["malformed", "not there"])
def test_no_job_is_held_for_what_the_machine_lacks(tmp_path: Path, config: Path, settings: str | None) -> None:
    if settings:
        config.write_text(settings)
    assert held(tmp_path, AD, config if settings else "elsewhere") == b""


def test_no_job_of_another_universe_is_looked_at_and_none_held_where_the_server_was_removed(tmp_path: Path) -> None:
    hook = HOOK.replace(f"timeout 60 {sys.executable}", "echo HookStatusCode = 1 #")
    environ = {"PATH": "/usr/bin:/bin"}
    assert answer(hook, tmp_path, AD, environ), "the replaced program answers for a VM job"
    assert answer(hook, tmp_path, AD.replace(b"JobUniverse = 13", b"JobUniverse = 5"), environ) == b""
    assert answer(HOOK.replace(sys.executable, "/gone/python3"), tmp_path, AD, {"PATH": "/usr/bin:/bin"}) == b""
