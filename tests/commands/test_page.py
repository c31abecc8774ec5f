"""How the doctor's findings look, on a terminal and in a pipe; two machines as golden files.

`pytest --update-golden` writes the golden files anew; read the difference before you commit it.
"""

import io
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

import pytest

from tests.commands.doctor.support import AD, Condor, as_root, failure, pool
from vmgahp import __version__
from vmgahp.commands import doctor
from vmgahp.commands.doctor import condor
from vmgahp.commands.page import Page
from vmgahp.findings import BAD, OFF, OK, UNKNOWN, Finding

__all__ = ["pool"]

GOLDEN = Path(__file__).parent / "doctor" / "golden"

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


def golden(name: str, done: doctor.Examination, pool: Condor, request: pytest.FixtureRequest) -> None:
    """Compare with a golden file; what this machine and this run put in is replaced before the wrapping."""

    def usual(text: str) -> str:
        for old, new in (
            (str(pool.directory), "/lab"),
            (f"vmgahp {__version__} ", "vmgahp 1.0 "),
            (condor.our_launcher(), "/opt/vmgahp/bin/condor_vm-gahp"),
            (str(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20), "16000"),
        ):
            text = text.replace(old, new)
        return text

    sections = []
    for title, found in done.sections:
        made = []
        for finding in found:
            seen = usual(finding.seen)
            if finding.check == "disk space" and "MiB free" in seen:
                seen = "EXECUTE = /lab/execute has 9000 MiB free, VM_MEMORY is 64 MiB"
            if finding.check == "simulated" and finding.verdict == OK:
                seen = "it runs nothing"
            if finding.check == "host name":
                seen = "lab is looked up at once"
                finding = finding._replace(subject="the address of lab, this machine's name, from its resolver")
            if finding.check == "clock":
                seen = "0.1 s of the 5 s that the startd waits"
            made.append(finding._replace(seen=seen, subject=usual(finding.subject), hint=usual(finding.hint)))
        sections.append((title, made))
    page = Page(io.StringIO(), 80)
    text = f"{page.findings(sections)}\n{page.paragraph(done.verdict())}"
    text += "\nWithout --verbose:\n\n"
    brief = [("", [finding for _, found in sections for finding in found if finding.verdict != OK])]
    text += str(page.findings(brief, brief=True))
    path = GOLDEN / name
    if request.config.getoption("--update-golden"):
        path.write_text(text)
    assert text == path.read_text()


@as_root
def test_a_healthy_machine(pool: Condor, request: pytest.FixtureRequest) -> None:
    golden("doctor-healthy.txt", pool.examine(VM_NETWORKING=True, VM_NETWORKING_TYPE="nat"), pool, request)


@as_root
def test_a_sick_machine(pool: Condor, request: pytest.FixtureRequest) -> None:
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
    golden("doctor-sick.txt", done, pool, request)
