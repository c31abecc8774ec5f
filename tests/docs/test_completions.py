"""The completions of bash, zsh and fish, asked for in those shells."""

import os
import pty
import shutil
import subprocess
import sys
import time
from pathlib import Path
from select import select

import pytest

from tests import REPOSITORY
from tests.lab.programs import a_program

PROGRAM = REPOSITORY / "docs/_ext/completions.py"

ASKED = [
    ("vmgahp do", "doctor"), ("vmgahp doctor --js", "--json"), ("vmgahp doctor --type xe", "xen"),
    ("vmgahp image rem", "remove"), ("vmgahp submit ovf appl", "appliance.ova"),
    ("vmgahp submit disk x --network brid", "bridge"), ("vmgahp config VM_MEMORY_IMA", "VM_MEMORY_IMAGE_FORMAT"),
    ("vmgahp ssh 123", "123456.7"), ("vmgahp image remove debian-12-bo", "debian-12-bookworm"),
]  # fmt: skip
"""What is typed, and the word that comes of its last."""


@pytest.fixture(scope="module")
def share(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory as /usr/share, with the completions."""
    path: Path = tmp_path_factory.mktemp("share")
    subprocess.run([sys.executable, PROGRAM, path], check=True, timeout=60)
    return path


@pytest.fixture(scope="module")
def environ(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which condor_q knows a job, and the catalog has an image."""
    programs = tmp_path_factory.mktemp("bin")
    says = {
        "condor_q": 'test "$2" = JobUniverse==13 && echo 123456.7',
        "vmgahp": 'printf "NAME FORMAT\\ndebian-12-bookworm qcow2\\n"',
    }
    for name, text in says.items():
        a_program(programs / name, text)
    home = str(tmp_path_factory.mktemp("home"))
    return {"PATH": f"{programs}:/usr/bin:/bin", "HOME": home, "TERM": "dumb", "LC_ALL": "C.UTF-8"}


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "appliance.ova").touch()
    return tmp_path


def need(shell: str) -> str:
    path = shutil.which(shell)
    if path is None:
        pytest.skip(f"needs {shell}")
    return path


@pytest.mark.parametrize(("line", "word"), ASKED)
def test_in_bash(line: str, word: str, share: Path, environ: dict[str, str], here: Path) -> None:
    words = line.split()
    code = f"""
        source {share}/bash-completion/completions/vmgahp
        complete -p vmgahp >&2
        COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
        _shtab_vmgahp vmgahp "${{COMP_WORDS[COMP_CWORD]}}" "${{COMP_WORDS[COMP_CWORD-1]}}" 2>/dev/null
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    command = [need("bash"), "--norc", "-c", code, "bash", *words]
    done = subprocess.run(command, env=environ, cwd=here, capture_output=True, text=True, check=True, timeout=60)
    assert "-F _shtab_vmgahp vmgahp" in done.stderr
    assert done.stdout.split() == [word]


@pytest.mark.parametrize(("line", "word"), ASKED)
def test_in_fish(line: str, word: str, share: Path, environ: dict[str, str], here: Path) -> None:
    code = f"source {share}/fish/vendor_completions.d/vmgahp.fish; complete -C '{line}'"
    command = [need("fish"), "--no-config", "-c", code]
    done = subprocess.run(command, env=environ, cwd=here, capture_output=True, text=True, check=True, timeout=60)
    assert [found.partition("\t")[0] for found in done.stdout.splitlines()] == [word]


def test_in_zsh(share: Path, environ: dict[str, str], here: Path) -> None:
    """On a terminal."""
    terminal, end = pty.openpty()
    process = subprocess.Popen(
        [need("zsh"), "-f", "-i"], env=environ, cwd=here, stdin=end, stdout=end, stderr=end, process_group=0
    )
    os.close(end)
    begin = f"PS1=; unsetopt zle_bracketed_paste; fpath=({share}/zsh/site-functions $fpath); "
    begin += "autoload -Uz compinit; compinit -u -D; echo RE''ADY\r"
    try:
        for typed, word in [(begin, "READY"), *((f"{line}\t", word) for line, word in ASKED)]:
            os.write(terminal, typed.encode())
            said, deadline = "", time.monotonic() + 60
            while word not in said:
                assert select([terminal], [], [], max(0.0, deadline - time.monotonic()))[0], said
                said += os.read(terminal, 4096).decode(errors="replace")
            os.write(terminal, b"\x15")
    finally:
        process.kill()
        process.wait()
        os.close(terminal)


def test_all_that_there_is_can_be_completed_and_nothing_else_is_asked_for(share: Path) -> None:
    from vmgahp.commands.tool import COMMANDS

    for path in (path for path in share.rglob("*") if path.is_file()):
        text = path.read_text()
        assert [row.word for row in COMMANDS if row.word not in text] == []
