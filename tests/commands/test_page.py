"""How the doctor's findings look, on a terminal and in a pipe."""

import io
import re
import time
from collections.abc import Sequence
from typing import TextIO

import pytest

from tests.commands.doctor.support import AD, Condor, as_root, failure, pool
from tests.commands.support import absent
from vmgahp.commands.page import Page
from vmgahp.findings import BAD, OFF, OK, UNKNOWN, Finding

__all__ = ["pool"]

SECTIONS = [
    ("First", [Finding("kvm", BAD, "/dev/kvm", "It is too slow.", "modprobe kvm_intel; " + "mend " * 20)]),
    ("Empty", []),
    ("Second", [Finding("VM_TYPE", OK, "VM_TYPE", "VM_TYPE = kvm"), Finding("log", UNKNOWN, "it", "none")]),
]


def shown(stream: TextIO, width: int = 80, sections: Sequence[tuple[str, list[Finding]]] = SECTIONS) -> str:
    """What is written to a stream, in its own encoding."""
    page = Page(stream, width)
    page.say(page.findings(sections))
    stream.flush()
    stream.seek(0)
    return stream.read()


def test_plain_text_has_no_color_and_no_line_is_too_long() -> None:
    text = shown(io.StringIO(), 50)
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 50
    assert "  ✗ kvm: It is too slow.\n    looked at /dev/kvm\n    → modprobe kvm_intel; mend" in text
    assert "  ✓ VM_TYPE = kvm.\n" in text, "the name is not said twice"
    assert "Empty" not in text


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_colors_change_no_letter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    colored = shown(_Terminal(), 60)
    assert "\x1b[1;31m✗\x1b[0m" in colored
    assert re.sub(r"\x1b\[[0-9;]*m", "", colored) == shown(io.StringIO(), 60)
    for name, value in (("NO_COLOR", "1"), ("TERM", "dumb")):
        monkeypatch.setenv(name, value)
        assert "\x1b" not in shown(_Terminal(), 60)


def test_without_utf8_the_marks_are_ascii() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="backslashreplace")
    text = shown(stream, sections=[("One", [Finding("x", OFF, "it", "müde", "do")])])
    assert "  !! x: m\\xfcde." in text
    assert "-> do" in text


def test_what_a_terminal_would_act_upon_is_escaped() -> None:
    text = shown(io.StringIO(), sections=[("One", [Finding("log", OFF, "\x1b[2J", "\x1b]0;owned\x07", "\r\n\x9b31m")])])
    assert all(letter.isprintable() or letter == "\n" for letter in text)


@as_root
def test_a_sick_machine(pool: Condor) -> None:
    """Sections come in the order in which one mends, and without --verbose nothing is shown of what is well."""
    pool.server.chmod(0o644)
    offline = f'VMOfflineTime = {int(time.time()) - 605}\nVMOfflineReason = "VMGAHP_ERR_CRITICAL"\n'
    pool.ad.write_text(AD.replace("HasVM = true", "HasVM = false") + offline)
    pool.log(
        failure(1, "VMGAHP_ERR_BAD_IMAGE: disk.qcow2 is damaged.", "job's owner"),
        failure(2, "VMGAHP_ERR_CRITICAL: No space is left in /lab/execute."),
    )
    done = pool.examine(
        VM_STOP_TIMEOUT="soon", VM_MEMROY=64, VM_NETWORKING=True, VM_NETWORKING_TYPE="natt", EXECUTE="/nonexistent"
    )
    assert [title for title, _ in done.sections] == [
        "HTCondor's settings", "The user", "The hypervisor", "Scratch directories and QEMU's user",
        "Firmware and the probe's time", "The startd", "The last failures",
    ]  # fmt: skip
    wrong = "settings, VM_GAHP_SERVER, disk space, startd (begin with settings)."
    assert done.verdict() == f"A VM job of type simulated cannot run here: {wrong}"
    text = " ".join(shown(io.StringIO(), sections=done.sections).split())
    settings = ("✗ settings: VM_STOP_TIMEOUT = soon", "! settings: VM_MEMROY", "did you mean VM_MEMORY?")
    others = ("✗ disk space:", "✗ startd:", "! log: 2026-11-02", "✓ log: 2026-11-01", "looked at", "→ do 1.")
    assert absent(text, *settings, *others) == []
    brief = [("", [finding for _, found in done.sections for finding in found if finding.verdict != OK])]
    told = str(Page(io.StringIO(), 80).findings(brief, brief=True))
    assert absent(told, "✗ settings: VM_STOP_TIMEOUT", "→ do 2.", "✓") == ["✓"]
