"""The lab's client against a scripted server, so that its own mistakes are not taken for the daemon's."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.lab.client import Client, ProtocolError, words

SCRIPT = r"""
import sys
for answer in open(sys.argv[1]):
    waits, line = answer.rstrip("\n").split(" ", 1)
    for _ in range(int(waits)):
        sys.stdin.readline()
    print(line.replace("~", "\n"), flush=True)
sys.stdin.read()
"""


def serve(directory: Path, *answers: str) -> Client:
    """A server that reads N lines, then answers, for each "N answer"."""
    (directory / "answers").write_text("".join(answer + "\n" for answer in answers))
    with open(directory / "log", "w") as log:
        argv = [sys.executable, "-c", SCRIPT, str(directory / "answers")]
        return Client(argv, dict(os.environ), directory, log)


def test_words_are_split_at_unescaped_spaces() -> None:
    assert words(r"S $VMGahpVersion Condor\ VMGAHP a\\b") == ["S", "$VMGahpVersion", "Condor VMGAHP", r"a\b"]


def test_a_request_waits_for_its_result(tmp_path: Path) -> None:
    client = serve(
        tmp_path,
        "0 $VMGahpVersion 0.0.1 May 1 2007 Condor\\ VMGAHP $",
        "1 S",
        "4 S",
        "1 S~R",
        "1 S 1~1 0 7",
        "1 R~S~R",
        "1 S 1~2 0 STATUS=Running CPUTIME=1",
    )
    client.greeting()
    client.send_ad(["A = 1", "B = 2", "C = 3"])
    assert client.request("CONDOR_VM_START", "kvm") == "7"
    # An R that comes before the reply is kept in mind.
    assert client.request("CONDOR_VM_STATUS", "7") == "STATUS=Running CPUTIME=1"
    assert client.close() == 0


def test_a_failure_carries_the_word(tmp_path: Path) -> None:
    client = serve(tmp_path, "1 S~R", "1 S 1~1 1 VMGAHP_ERR_INTERNAL")
    with pytest.raises(ProtocolError, match="VMGAHP_ERR_INTERNAL"):
        client.request("CONDOR_VM_START", "kvm")
    client.close()


def test_a_refusal_is_an_error(tmp_path: Path) -> None:
    client = serve(tmp_path, "1 E")
    with pytest.raises(ProtocolError, match="answered 'E'"):
        client.say("BOGUS")
    client.close()


def test_silence_is_an_error(tmp_path: Path) -> None:
    client = serve(tmp_path)
    with pytest.raises(ProtocolError, match="no line"):
        client.read_line(timeout=0.2)
    client.close()
