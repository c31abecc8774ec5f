"""The recipes for other ways to install: conda's and Ansible's are read, and compared with what they are about."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import jinja2
import pytest
import yaml

from tests import REPOSITORY
from vmgahp.commands import setup
from vmgahp.config import sources

ROLE = REPOSITORY / "packaging/ansible/roles/vmgahp"
CONDAS_NAMES = {"htcondor": "python-htcondor", "PyYAML": "pyyaml"}
"""Of the same things on PyPI."""


def role(part: str) -> Any:
    return yaml.safe_load((ROLE / part / "main.yml").read_text())


def test_conda_asks_for_what_the_package_needs() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    text = (REPOSITORY / "packaging/conda/meta.yaml").read_text()
    # What Jinja does of it: one variable, and the Python.
    [default] = re.findall(r'^\{% set version = environ\.get\("VMGAHP_VERSION", "(.*)"\) %\}$', text, re.MULTILINE)
    plain = re.sub(r"^\{%.*%\}$", "", text, flags=re.MULTILINE).replace("{{ version }}", default)
    recipe = yaml.safe_load(plain.replace("{{ PYTHON }}", "python"))
    run = [line.replace(" ", "") for line in recipe["requirements"]["run"]]
    needed = []
    for one in project["dependencies"]:
        name, least = one.split(">=")
        needed.append(f"{CONDAS_NAMES.get(name, name)}>={least}")
    assert sorted(run) == sorted(["python", *needed])
    assert recipe["about"]["license"] == project["license"]
    assert f"py<{project['requires-python'].removeprefix('>=').replace('.', '')}]" in text


def test_every_variable_of_the_role_has_a_default() -> None:
    used = set()
    for part in ("tasks", "handlers"):
        used |= set(re.findall(r"\bvmgahp_\w+", (ROLE / part / "main.yml").read_text()))
    assert used - {task["register"] for task in role("tasks") if "register" in task} == set(role("defaults"))


@pytest.mark.parametrize(
    ("written", "fits", "restarts"),
    [("peaceful", True, True), ("now", True, True), ("no", True, False), ("'no'", True, False), ("never", False, None)],
)
def test_no_is_no_in_yaml_too(written: str, fits: bool, restarts: bool | None) -> None:
    """There the bare word is a boolean, as which Ansible reads it of a file of variables."""
    value = yaml.safe_load(written)
    expression = jinja2.Environment(autoescape=True).compile_expression
    [condition] = [one for one in role("tasks")[0]["ansible.builtin.assert"]["that"] if "vmgahp_restart" in one]
    assert expression(condition)(vmgahp_restart=value) is fits
    if fits:
        assert expression(role("handlers")[0]["when"])(vmgahp_restart=value) is restarts


def test_the_role_says_options_that_the_command_has() -> None:
    said = set(re.findall(r'"(--[a-z]+)=?"', (ROLE / "tasks/main.yml").read_text())) - {"--"}
    helped = subprocess.run(
        [Path(sys.executable).with_name("vmgahp"), "setup", "--help"], capture_output=True, text=True, check=True
    )
    assert {"--type", "--yes"} <= said
    assert {option for option in said if option not in helped.stdout} == set()


def test_ansible_reads_it_and_a_restart_is_not_lost_by_a_failure_behind_it(tmp_path: Path) -> None:
    book = REPOSITORY / "packaging/ansible/playbook.yml"
    environ = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "LC_ALL": "C.UTF-8"}
    command = [Path(sys.executable).with_name("ansible-playbook"), "--syntax-check", "-i", "localhost,", book]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    # Run again, nothing has changed, and nothing would ask for it.
    [play] = yaml.safe_load((REPOSITORY / "packaging/ansible/playbook.yml").read_text())
    assert play["force_handlers"] is True


def test_the_settings_to_include_are_those_that_setup_writes() -> None:
    text = (REPOSITORY / "config/execute.config").read_text()
    given = {name: value for _, name, value in sources.logical_lines(text, "execute.config")}
    assert setup.USUAL.items() <= given.items()
    assert {setup.SERVER, setup.TYPE, setup.MEMORY, setup.NETWORKING, setup.KINDS} <= set(given)
    assert set(given) - setup.KNOWN == {"THREE_QUARTERS_OF_MEMORY"}
