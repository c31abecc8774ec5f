"""Recorded conversations: where they are, and what is the same each time."""

import re
from pathlib import Path

from vmgahp.protocol.requests import Kind, Request, Requests
from vmgahp.protocol.transcript import CLIENT, SERVER, Transcript

TRANSCRIPTS = Path(__file__).parent / "transcripts"
STARTER = TRANSCRIPTS / "starter.txt"
"""A job that was suspended and continued, and whose guest powered itself off; from the pool's test_checkpoints.py."""


def outline(conversation: Transcript) -> list[str]:
    """List the requests with their outcomes in order, without repeated looks of the starter at the VM."""
    found: list[str] = []
    requests = Requests()
    for line in conversation.lines:
        if line.mark == CLIENT:
            request = Request(line.text)
            if requests.sent(request) and not request.operation and request.command != "RESULTS":
                found.append(line.text)
        elif line.mark == SERVER and (received := requests.received(line.text)).kind is Kind.RESULT:
            operation = received.request.operation
            success, *words = received.request.result
            words = [word for word in words if not word.startswith(("IP=", "MAC="))]
            outcome = "a pid" if operation == "GETPID" and words[0] != "0" else words[0]
            row = f"{operation} {success} {outcome}"
            if row != "STATUS 0 STATUS=Running" and row not in found[-1:]:
                found.append(row)
    return found


def for_everybody(text: str) -> str:
    """A fresh recording without what belongs to the day; the pool's names are the same on each machine."""
    rows = [re.sub(r"^# \S+Z pid \d+: ", "# ", row) for row in text.split("\n")]
    return "\n".join(re.sub(r"\b1[789]\d{8}\b", "1800000000", row) for row in rows)
