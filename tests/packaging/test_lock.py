"""What scripts/check asks of packaging/requirements.lock."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests import REPOSITORY
from tests.lab.programs import a_program

LOCK = REPOSITORY / "packaging/requirements.lock"


def ask(*words: str | Path, path: Path | None = None) -> tuple[int, str]:
    environ = os.environ | ({"PATH": str(path)} if path else {})
    command = [sys.executable, REPOSITORY / "scripts/lib/lock.py", *words]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    assert not done.stderr
    return done.returncode, done.stdout


def test_the_lock_fits_and_names_no_place() -> None:
    assert ask("fits") == (0, "")
    assert "://" not in LOCK.read_text()


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("lxml==", "lxml-html-clean==", "lxml>=4.9 is not in it"),
        ("pycdlib==1.", "pycdlib==0.", "is not pycdlib>=1.12"),
        ("wcwidth==", "wcwidth-of-another==", "nothing needs wcwidth-of-another"),
        ("--hash=sha256:", "--hash=md5:", "no SHA-256"),
        ("htcondor==", "--extra-index-url x\nhtcondor==", "more than pins"),
        ("htcondor==", "htcondor @ file:///x\nhtcondor==", "more than pins"),
    ],
)
def test_one_that_does_not_fit_is_told(tmp_path: Path, old: str, new: str, said: str) -> None:
    changed = tmp_path / "requirements.lock"
    text = LOCK.read_text()
    assert old in text
    changed.write_text(text.replace(old, new))
    status, out = ask("fits", changed)
    assert status == 1
    assert said in out


def answer(*packages: str) -> str:
    """A shell command that says of packages what pip-audit says: `known`, `unknown` or `vulnerable`."""
    kinds = {
        "known": {"vulns": []},
        "unknown": {"skip_reason": "Dependency not found on PyPI"},
        "vulnerable": {"vulns": [{"id": "X-1", "fix_versions": ["2"]}, {"id": "X-2", "fix_versions": []}]},
    }
    told = [{"name": f"{kind}-{number}", "version": "1"} | kinds[kind] for number, kind in enumerate(packages)]
    return f"echo '{json.dumps({'dependencies': told})}'; exit {int('vulnerable' in packages)}"


AUDITS = {
    "nothing is known against them": (answer("known", "known"), "ok", ""),
    "some are unknown": (answer("unknown", "known", "unknown"), "ok", "does not know unknown-0, unknown-2"),
    "all are unknown": (answer("unknown", "unknown"), "not checked", "knows none of the 2 packages"),
    "there are none": (answer(), "not checked", "knows none of the 0 packages"),
    "no network": ("echo 'ConnectionError: no route' >&2; exit 1", "not checked", "reached: ConnectionError: no route"),
    "silence": ("exit 1", "not checked", "cannot be reached: pip-audit said nothing"),
    "something else than JSON": ("echo '[]'", "not checked", "cannot be reached"),
    "one is vulnerable": (answer("known", "vulnerable"), "failed", "vulnerable-1 1: X-1, mended in 2"),
    "no release is mended": (answer("vulnerable"), "failed", "vulnerable-0 1: X-2, mended in no release"),
    "vulnerable and unknown": (answer("vulnerable", "unknown"), "failed", "does not know unknown-1"),
}


def script(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    a_program(path, text)


@pytest.mark.parametrize(("program", "outcome", "said"), AUDITS.values(), ids=AUDITS)
def test_only_a_known_vulnerability_fails(tmp_path: Path, program: str, outcome: str, said: str) -> None:
    script(tmp_path / "pip-audit", program)
    status, out = ask("audit", path=tmp_path)
    assert status == {"ok": 0, "failed": 1, "not checked": os.EX_TEMPFAIL}[outcome]
    assert said in out
    assert bool(out) is bool(said)


def test_without_pip_audit_nothing_was_checked(tmp_path: Path) -> None:
    status, out = ask("audit", path=tmp_path)
    assert (status, "pip-audit" in out) == (os.EX_TEMPFAIL, True)


@pytest.mark.parametrize("case", ["some are unknown", "all are unknown", "one is vulnerable"])
def test_scripts_check_says_ok_of_what_was_looked_at_only(tmp_path: Path, case: str) -> None:
    program, outcome, said = AUDITS[case]
    tools = tmp_path / "bin"
    for tool in ("ruff", "mypy", "lint-imports"):
        script(tools / tool, "")
    script(tools / "python", f'exec {shlex.quote(sys.executable)} "$@"')
    script(tools / "pip-audit", program)
    checks = f". {REPOSITORY}/scripts/lib/setup.sh; venv={shlex.quote(str(tmp_path))}; cd {REPOSITORY}; run_checks"
    done = subprocess.run(["bash", "-c", checks], capture_output=True, text=True, timeout=60, check=False)
    [line] = [line for line in done.stderr.splitlines() if line.split()[:1] == ["pip-audit"]]
    assert line.split(maxsplit=1)[1].startswith(outcome)
    assert said in done.stderr.partition(line)[2]
    assert done.returncode == int(outcome == "failed")
