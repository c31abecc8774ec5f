"""The recording of a real starter with this daemon: where it is, and what of it is the same each time."""

import re
from pathlib import Path

from vmgahp.protocol import wire
from vmgahp.protocol.transcript import Transcript
from vmgahp.protocol.transcript_rules import request_of, steps

STARTER = Path(__file__).parent / "transcripts" / "starter.txt"
"""A job that was suspended and continued, and whose guest powered itself off; from the pool's test_transcripts.py."""


def outline(conversation: Transcript) -> list[str]:
    """What was asked in which order and with what outcome, however often the starter looked after the VM."""
    found: list[str] = []
    asked: dict[str, str] = {}
    for step in steps(conversation):
        if step.is_sent() and not step.in_ad:
            request = request_of(step.line.text)
            if request:
                asked[request[0]] = request[1].decode()
            elif step.line.text != "RESULTS":
                found.append(step.line.text)
        for line in step.results:
            number, success, *words = wire.words(line.text)
            words = [word for word in words if not word.startswith(("IP=", "MAC="))]
            outcome = "a pid" if asked[number] == "GETPID" and words[0] != "0" else words[0]
            row = f"{asked[number]} {success} {outcome}"
            if row != "STATUS 0 STATUS=Running" and row not in found[-1:]:
                found.append(row)
    return found


def for_everybody(text: str) -> str:
    """A fresh recording without what belongs to the day; the pool's names are the same on each machine."""
    rows = [re.sub(r"^# \S+Z pid \d+: ", "# ", row) for row in text.split("\n")]
    return "\n".join(re.sub(r"\b1[789]\d{8}\b", "1800000000", row) for row in rows)
