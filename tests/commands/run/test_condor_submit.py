"""condor_submit itself makes of a program's words what they were, and of its files what HTCondor transfers."""

from __future__ import annotations

import os
import subprocess

import classad2
import pytest

from tests.commands.run.support import AWKWARD
from tests.lab.namespace import LAB, Namespace
from vmgahp.cli import main
from vmgahp.job import run
from vmgahp.job.ad import JobAd

pytestmark = pytest.mark.pool


def ads(namespace: Namespace, monkeypatch: pytest.MonkeyPatch, *words: str) -> list[JobAd]:
    """What condor_submit would send to a schedd of what the command writes: one ad, and what others have else."""
    monkeypatch.chdir(namespace.exchange)
    (namespace.exchange / "fit.py").touch()
    assert main(["vmgahp", "run", "--force", "--submit-file", "job.sub", "--image", "catalog:d", *words]) == 0
    namespace.run("condor_submit", "-dry-run", "ad", "job.sub", cwd=LAB)
    parts = (namespace.exchange / "ad").read_text().strip().split("\n\n")
    return [JobAd(filter(None, map(JobAd.parse_line, part.splitlines()))) for part in parts]


def test_words_and_variables_are_the_schedds_to_the_byte(namespace: Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {f"V{number}": text for number, text in enumerate(AWKWARD)}
    given = [word for name, text in variables.items() for word in ("--env", f"{name}={text}")]
    [ad] = ads(namespace, monkeypatch, *given, "--", "sh", "-c", 'printf "%s\\0" "$@"; exec env -0', "sh", *AWKWARD)
    line = ad.string("VMPARAM_vm_Run")
    assert line
    told = run.read_environment(ad)
    done = subprocess.run(["/bin/sh", "-c", line], env=told | {"PATH": os.environ["PATH"]}, stdout=-1, check=True)
    said = done.stdout.split(b"\0")
    assert said[: len(AWKWARD)] == [os.fsencode(word) for word in AWKWARD]
    assert {os.fsencode(f"{name}={text}") for name, text in variables.items()} <= set(said[len(AWKWARD) :])


def test_each_job_of_many_has_its_own(namespace: Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = ads(namespace, monkeypatch, "--queue", "2", "--macros", "--name", "fit", "--", "fit", "$(Process)")
    assert first.string("VMPARAM_vm_Run") == "fit '0'"
    assert second.string("VMPARAM_vm_Run") == "fit '1'"
    assert str(first.string("Iwd")).endswith("/fit.0")
    assert str(second.string("Iwd")).endswith("/fit.1")
    assert [first.string(name) for name in ("Out", "Err", "TransferOutput")] == ["fit.out", "fit.err", "vm_outputs/"]
    flags = [first.boolean(name) for name in ("StreamOut", "TransferOut", "StreamErr", "TransferErr")]
    assert flags == [False, True, False, True]


def test_retries_are_for_a_program_that_fails(namespace: Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """condor_submit joins `on_exit_remove` to what it makes of max_retries."""
    ads(namespace, monkeypatch, "--retries", "2", "--", "fit")
    ad = classad2.parseOne((namespace.exchange / "ad").read_text())
    assert ad["JobMaxRetries"] == 2
    ad["ExitBySignal"] = False
    for completions, code, is_over in ((1, 0, True), (1, 1, False), (2, 1, False), (3, 1, True)):
        ad["NumJobCompletions"], ad["ExitCode"] = completions, code
        assert ad.eval("OnExitRemove") is is_over, (completions, code)
