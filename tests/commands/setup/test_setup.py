"""``vmgahp setup``: the file that it writes, and the files that it leaves alone."""

import contextlib
import io
import os
import pty
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO
from unittest import mock

import pytest

from tests.commands.support import Done, absent, vmgahp
from vmgahp.commands.setup import file_text

CONFIG_VAL = """\
import os, sys
values, where = {{"LOG": "/var/log/condor"}}, {{}}
def read(path):
    for number, line in enumerate(open(path), 1):
        name, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            values[name.strip()], where[name.strip()] = value.strip(), f"{{path}}, line {{number}}"
read({root!r})
for directory in filter(os.path.isdir, values.get("LOCAL_CONFIG_DIR", "").replace(",", " ").split()):
    for name in sorted(os.listdir(directory)):
        read(os.path.join(directory, name))
for name, value in os.environ.items():
    if name.startswith("_CONDOR_"):
        values[name[8:]] = value
words = sys.argv[3:]
if words == ["-dump", "-verbose"]:
    for name, value in values.items():
        print(f"{{name}} = {{value}}\\n # at: {{where.get(name, '<Environment>')}}")
    sys.exit()
for name in words:
    if values.get(name):
        print(values[name].replace("$(LOG)", values["LOG"]))
    else:
        print("Not defined:", name, file=sys.stderr)
"""

GIVEN = ("--type", "simulated", "--memory", "64", "--network", "none")


class Machine:
    """One with an HTCondor of scripts, which reads a directory of files."""

    def __init__(self, directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys
        self.config = directory / "config.d"
        self.file = self.config / "60-vmgahp.config"
        self.root = directory / "condor_config"
        self.restarted = directory / "restarted"
        self.bin = directory / "bin"
        self.config.mkdir()
        self.bin.mkdir()
        self.root.write_text(f"LOCAL_CONFIG_DIR = {self.config}\n")
        self.program("condor_config_val", f"#!{sys.executable} -IS\n" + CONFIG_VAL.format(root=str(self.root)))
        self.program("condor_restart", f'#!/bin/sh\necho "$@" >{self.restarted}\n')
        # libvirt finds the session's daemon by these, once for the whole process, which has other tests.
        kept = {name: value for name in ("HOME", "XDG_RUNTIME_DIR") if (value := os.environ.get(name))}
        self.environ = {"PATH": f"{self.bin}:/usr/bin:/bin", "TERM": "dumb", **kept}

    def program(self, name: str, text: str) -> None:
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def run(self, *words: str, stdin: TextIO | None = None) -> Done:
        """Call it with `stdin`, or with nobody there who could answer."""
        with mock.patch.dict(os.environ, self.environ, clear=True), mock.patch("sys.stdin", stdin or io.StringIO()):
            return vmgahp(self.capsys, "setup", *words)

    def set_up(self, *words: str) -> str:
        done = self.run(*GIVEN, "--yes", *words)
        assert done.status == 0, done.err
        return done.out

    def refused(self, *words: str, status: int = 1) -> str:
        """The same, which has to fail: what it says."""
        done = self.run(*GIVEN, "--yes", *words)
        assert done.status == status, done.out
        return done.err


@contextlib.contextmanager
def terminal(answers: str) -> Iterator[TextIO]:
    ours, theirs = pty.openpty()
    try:
        os.write(ours, answers.encode())
        with open(theirs) as stdin:
            yield stdin
    finally:
        os.close(ours)


@pytest.fixture
def machine(capsys: pytest.CaptureFixture[str]) -> Iterator[Machine]:
    """A machine whose directories all users may pass, unlike those of pytest's."""
    with tempfile.TemporaryDirectory(prefix="vmgahp-setup-") as directory:
        os.chmod(directory, 0o755)
        yield Machine(Path(directory), capsys)


def settings(path: Path) -> dict[str, str]:
    return dict(line.split(" = ", 1) for line in path.read_text().splitlines() if not line.startswith("#"))


def test_it_writes_what_the_options_say(machine: Machine) -> None:
    said = machine.set_up("--set", "VM_GAHP_SERVER=/opt/x/condor_vm-gahp", "--set", "vm_soft_suspend=True")
    assert settings(machine.file) == {
        "VM_GAHP_SERVER": "/opt/x/condor_vm-gahp", "VM_TYPE": "simulated", "VM_MEMORY": "64",
        "VM_GAHP_LOG": "$(LOG)/VMGahpLog", "VM_RECHECK_INTERVAL": "60", "VM_NETWORKING": "False",
        "VM_SOFT_SUSPEND": "True",
    }  # fmt: skip
    assert machine.file.stat().st_mode & 0o7777 == 0o644
    assert os.listdir(machine.config) == [machine.file.name]
    assert "+VM_MEMORY = 64" in said
    assert "condor_restart -peaceful -startd" in said
    assert not machine.restarted.exists()


KVM = ("--type", "kvm", "--memory", "64", "--network", "none", "--yes")


def test_a_hook_for_hold_reasons_comes_and_goes_with_the_file_and_those_of_a_site_stay(machine: Machine) -> None:
    hook = machine.config.parent / "vmgahp-prepare-job"
    assert machine.run(*KVM).status == 0
    found = settings(machine.file)
    assert found["VMGAHP_HOOK_PREPARE_JOB"] == str(hook)
    assert found["STARTER_DEFAULT_JOB_HOOK_KEYWORD"] == "VMGAHP"
    assert hook.stat().st_mode & 0o7777 == 0o755
    assert "--set" not in machine.file.read_text()
    written = hook.read_text()
    hook.unlink()  # HTCondor runs no job where it is not there
    assert machine.run(*KVM).status == 0
    assert hook.read_text() == written
    hook.write_text(f"{written}# and more\n")
    for words in (KVM, ("--remove", "--yes")):
        done = machine.run(*words)
        assert (done.status, absent(done.err, f"{hook} was changed since")) == (1, [])
        assert hook.read_text() != written
    hook.write_text(written)
    assert machine.run("--remove", "--yes").status == 0
    assert not hook.exists()
    with machine.root.open("a") as file:
        file.write("STARTER_DEFAULT_JOB_HOOK_KEYWORD = SITE\n")
    assert machine.run(*KVM).status == 0
    found = settings(machine.file)
    assert "STARTER_DEFAULT_JOB_HOOK_KEYWORD" not in found
    assert "VMGAHP_HOOK_PREPARE_JOB" in found, "jobs have it by +HookKeyword"


@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
@pytest.mark.parametrize("mode", [0o700, 0o777], ids=["closed to jobs", "open to all"])
def test_no_hook_is_written_where_it_would_keep_jobs_from_running(machine: Machine, mode: int) -> None:
    machine.config.parent.chmod(mode)
    assert machine.run(*KVM).status == 0
    assert not [name for name in settings(machine.file) if "HOOK" in name]
    assert not (machine.config.parent / "vmgahp-prepare-job").exists()


def test_a_dry_run_and_a_question_that_nobody_answers_write_nothing(machine: Machine) -> None:
    done = machine.run(*GIVEN, "--dry-run")
    assert (done.status, absent(done.out, "+VM_TYPE = simulated", "Nothing was written")) == (0, [])
    assert os.listdir(machine.config) == []
    done = machine.run(*GIVEN)
    assert (done.status, "add --yes" in done.err) == (2, True)
    assert os.listdir(machine.config) == []


def test_again_it_keeps_what_was_said(machine: Machine) -> None:
    machine.set_up("--set", "VM_STOP_TIMEOUT=5", "--emulation", "--set", "VM_GAHP_SERVER=/opt/old/condor_vm-gahp")
    done = machine.run("--memory", "128", "--yes")
    assert done.status == 0, done.err
    assert re.findall(r"^[-+][A-Z].*", done.out, re.MULTILINE)[:1] == ["-VM_GAHP_SERVER = /opt/old/condor_vm-gahp"], (
        "another installation's server is this one's now"
    )
    now = settings(machine.file)
    assert (now["VM_MEMORY"], now["VM_STOP_TIMEOUT"], now["VM_ALLOW_EMULATION"]) == ("128", "5", "True")
    assert "is as it would be written" in machine.run("--yes").out
    assert machine.run("--type", "kvm,vmrun,KVM", "--set", "VM_STOP_TIMEOUT=", "--yes").status == 0
    now = settings(machine.file)
    assert (now["VM_TYPE"], now["VM_ANY_TYPES"], "VM_STOP_TIMEOUT" in now) == ("any", "kvm, vmrun", False)


def test_a_libvirt_that_was_slow_once_costs_a_minute_where_nobody_says_otherwise(machine: Machine) -> None:
    machine.set_up()
    assert settings(machine.file)["VM_RECHECK_INTERVAL"] == "60"
    assert "VM_RECHECK_INTERVAL=" not in machine.file.read_text(), "the command that makes the file again is short"
    machine.set_up("--set", "VM_RECHECK_INTERVAL=300")
    machine.set_up()
    assert settings(machine.file)["VM_RECHECK_INTERVAL"] == "300"


def test_what_is_off_is_off_whatever_a_file_before_says(machine: Machine) -> None:
    (machine.config / "10-site.config").write_text("VM_NETWORKING = True\nVM_ALLOW_EMULATION = True\n")
    machine.set_up("--no-emulation")
    off = {"VM_NETWORKING": "False", "VM_ALLOW_EMULATION": "False"}
    assert settings(machine.file).items() >= off.items()
    assert "is as it would be written" in machine.run("--yes").out
    assert "--network none --no-emulation" in machine.file.read_text()


def test_a_shared_directory_stays_and_a_setting_of_another_release_goes(machine: Machine) -> None:
    machine.set_up("--set", "VM_SHARE_DIRS=data", "--set", "VM_SHARE_DIR_DATA=/srv")
    assert "is as it would be written" in machine.run("--yes").out
    assert settings(machine.file)["VM_SHARE_DIR_DATA"] == "/srv"
    values = {"VM_TYPE": "simulated", "VM_MEMORY": "64", "VM_WAS_ONCE": "1"}
    machine.file.write_text(file_text(values, "vmgahp setup"))
    done = machine.run("--yes")
    assert done.status == 0, done.err
    assert "-VM_WAS_ONCE = 1" in done.out
    assert "VM_WAS_ONCE" not in settings(machine.file)


def test_a_wrong_answer_is_asked_again(machine: Machine) -> None:
    with terminal("kvn\nsimulated\nmuch\n9999G\n64\nnatt\nnone\ny\n") as stdin:
        done = machine.run(stdin=stdin)
    assert done.status == 0, done.out
    sentences = ("did you mean kvm?", "'much'", "more than this machine has", "did you mean nat?")
    assert absent(" ".join(done.out.split()), *sentences) == []
    assert settings(machine.file)["VM_MEMORY"] == "64"


def test_the_command_in_the_file_makes_it_again(machine: Machine) -> None:
    machine.set_up("--set", 'VM_POLICY_REQUIREMENTS=Owner == "a b"', "--emulation")
    first = machine.file.read_text()
    command = re.findall(r"^#   vmgahp setup (.*)$", first, re.MULTILINE)[0]
    machine.file.unlink()
    assert machine.run(*shlex.split(command), "--yes").status == 0
    assert machine.file.read_text() == first


@pytest.mark.parametrize("text", ["VM_TYPE = kvm\n", "", "# Written by vmgahp setup\n"])
def test_a_file_of_somebody_elses_stays(machine: Machine, text: str) -> None:
    machine.file.write_text(text)
    for words in ((*GIVEN, "--yes"), ("--remove", "--yes")):
        done = machine.run(*words)
        assert done.status == 1
        assert "was not written by vmgahp setup" in done.err
        assert machine.file.read_text() == text


def test_a_file_that_was_changed_stays(machine: Machine) -> None:
    machine.set_up()
    changed = machine.file.read_text().replace("VM_MEMORY = 64", "VM_MEMORY = 99")
    machine.file.write_text(changed)
    for words in ((*GIVEN, "--yes"), ("--remove", "--yes"), (*GIVEN, "--dry-run")):
        done = machine.run(*words)
        assert (done.status, absent(done.err, "was changed since", "61-local.config")) == (1, [])
        assert machine.file.read_text() == changed


def test_a_link_stays(machine: Machine, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("kept\n")
    machine.file.symlink_to(target)
    machine.refused()
    assert target.read_text() == "kept\n"


def test_it_takes_its_own_file_back_and_restarts_when_told_to(machine: Machine) -> None:
    machine.set_up()
    done = machine.run("--remove", "--yes")
    assert done.status == 0
    assert "condor_restart -peaceful -startd" in done.out
    assert os.listdir(machine.config) == []
    assert machine.run("--remove", "--yes").status == 1
    machine.set_up("--restart")
    assert machine.restarted.read_text() == "-peaceful -startd\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--set", "VM_STOP_TIMEOUT=5\nVM_MEMORY=9"), "one line, without $"),
        (("--set", "VM_CATALOG=$(LOG)/x"), "without $"),
        (("--set", "VM_CATALOG=/x\\"), "at the end, which would continue it"),
        (("--set", "VM_STOP_TIMEOUT=soon"), "whole number"),
        (("--set", "VM_STOP_TIMOUT=5"), "did you mean VM_STOP_TIMEOUT?"),
        (("--set", "VM_STOP_TIMEOUT"), "is not NAME=VALUE"),
        (("--set", "VM_STATUS_INTERVAL=5"), "is less than 30"),
        (("--network", "natt"), "did you mean nat?"),
        (("--network", "bridge"), "VM_NETWORKING_BRIDGE_INTERFACE is not set"),
        (("--network", "user"), "VM_ALLOW_HOST_LOOPBACK"),
        (("--memory", "9999G"), "more than this machine has"),
        (("--memory", "much"), "'much'"),
        (("--type", "kvn"), "did you mean kvm?"),
        (("--type", ","), "names no VM type"),
        (("--memory", "99999G"), "more than a VM can have"),
        (("--set", "VM_MEMORY=4*16"), "VM_MEMORY is set by --type"),
        (("--set", "VM_ALLOW_EMULATION=true"), "VM_ALLOW_EMULATION is set by --type"),
        (("--set", "VM_SHARE_DIR_A B=/srv"), "VM_SHARE_DIR_A B"),
        (("--set", "VM_SHARE_DIR_é=/srv"), "VM_SHARE_DIR_"),
        (("--set", "VM_MAX_NUMBER=two"), "VM_MAX_NUMBER = two"),
        (("--type", "kvm,any"), "any alone"),
    ],
)
def test_what_is_no_value_is_refused(machine: Machine, words: tuple[str, ...], said: str) -> None:
    assert said in machine.refused(*words, status=2)
    assert os.listdir(machine.config) == []


def test_the_directory_that_is_read_last(machine: Machine, tmp_path: Path) -> None:
    later = tmp_path / "later.d"
    machine.root.write_text(f"LOCAL_CONFIG_DIR = {machine.config}, {later}, {tmp_path}/missing\n")
    later.mkdir()
    machine.set_up()
    assert os.listdir(later) == [machine.file.name]
    (later / machine.file.name).rename(machine.file)
    machine.set_up("--memory", "65")
    assert os.listdir(later) == [], "it stays where it was"


@pytest.mark.parametrize(
    ("root", "said"),
    [
        ("LOCAL_CONFIG_DIR = /nowhere/config.d\n", "mkdir -p /nowhere/config.d"),
        ("LOG = /tmp\n", "LOCAL_CONFIG_DIR is not set"),
    ],
)
def test_no_directory(machine: Machine, root: str, said: str) -> None:
    machine.root.write_text(root)
    assert absent(machine.refused(), said, "--output FILE") == []


def test_no_htcondor(machine: Machine, tmp_path: Path) -> None:
    (machine.bin / "condor_config_val").unlink()
    assert "no condor_config_val is found" in machine.refused()
    machine.set_up("--output", str(tmp_path / "mine"))
    assert settings(tmp_path / "mine")["VM_TYPE"] == "simulated"


def test_a_usual_value_gives_way_and_another_that_a_file_takes_over_is_told(machine: Machine) -> None:
    (machine.config / "99-site.config").write_text("VM_RECHECK_INTERVAL = 10\n")
    done = machine.run(*GIVEN, "--yes")
    assert (done.status, done.err) == (0, "")
    (machine.config / "99-site.config").write_text("VM_MEMORY = 32\n")
    for _ in ("written", "there already"):
        said = f"VM_MEMORY = 32 counts all the same, of {machine.config}/99-site.config, line 1"
        assert said in machine.refused()


@pytest.mark.skipif(os.geteuid() == 0, reason="needs an ordinary user")
def test_who_may_not_write_is_told_what_root_types(machine: Machine) -> None:
    machine.config.chmod(0o555)
    wanted = "As root, run: vmgahp setup --type simulated --memory 64 --network none --yes"
    assert wanted in machine.refused()


def test_it_asks_on_a_terminal(machine: Machine) -> None:
    with terminal("simulated\n64\n\ny\n") as stdin:
        done = machine.run(stdin=stdin)
    said = done.out
    assert done.status == 0, said
    assert "VM type (kvm, xen, vmware, vsphere, any, ...) [kvm]: " in said
    assert f"Write {machine.file}? y or n [n]: " in " ".join(said.split())
    assert settings(machine.file)["VM_MEMORY"] == "64"
    assert settings(machine.file)["VM_NETWORKING"] == "False", "this machine has none to suggest"
    assert not machine.restarted.exists()


@pytest.mark.parametrize("answers", ["\n", "n\n", "\x04"])
def test_without_a_yes_nothing_is_written(machine: Machine, answers: str) -> None:
    with terminal(answers) as stdin:
        done = machine.run(*GIVEN, stdin=stdin)
    assert (done.status, os.listdir(machine.config)) == (1, [])
    assert "Nothing was written." in done.out + done.err


def test_a_directory_that_is_not_there_is_named(machine: Machine, tmp_path: Path) -> None:
    assert f"There is no directory {tmp_path}/none." in machine.refused("--output", str(tmp_path / "none/mine"))


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_root_is_not_sent_to_root(machine: Machine) -> None:
    assert "/sys/mine cannot be written: " in machine.refused("--output", "/sys/mine")


@pytest.mark.parametrize("words", [GIVEN, (*GIVEN, "--memory", "65"), ("--remove",)])
def test_what_was_changed_before_the_yes_stays(machine: Machine, words: tuple[str, ...]) -> None:
    if words is not GIVEN:
        machine.set_up()

    def answer(question: str) -> str:
        print(question)
        machine.file.write_text("VM_MEMORY = 99\n")
        return "y"

    with terminal("") as stdin, mock.patch("builtins.input", answer):
        done = machine.run(*words, stdin=stdin)
    assert done.status == 1
    assert "was not written by vmgahp setup" in done.err
    assert " ".join(done.out.split()).endswith("y or n [n]:")
    assert machine.file.read_text() == "VM_MEMORY = 99\n"
