"""``vm_metrics.jsonl`` in the scratch directory: the resources that a VM has used, and its events.

The file is transferred back with the job, and with its checkpoint to a restart, which appends to it. It belongs to the
job: it is opened once, as the job's user and without following links, and its content from an earlier life is validated
and not trusted. The format is in docs/reference/metrics.md.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from threading import Lock

from vmgahp import errors
from vmgahp.host.job_user import Identity

NAME = "vm_metrics.jsonl"

LONGEST_LINE = 64 << 10
"""The maximum length of a line in bytes; also how much of the end of an earlier life's file is read."""

MOST_LINES = 100_000
"""The most lines that its readers accept, however long the file is: more than a sample a second for a day."""

ROOM_FOR_EVENTS = 64 << 10
"""The bytes that events may take when the limit leaves no room for samples."""


class MetricsFile:
    """The file, open for appending from any thread. A line that cannot be written is lost, which is logged once."""

    def __init__(self, identity: Identity, directory: str, limit: int, log: Callable[[str], None]) -> None:
        self._limit = limit
        self._log = log
        self._lock = Lock()
        self._told: set[str] = set()
        self._torn = False
        self._fd = -1
        try:
            self._fd = identity.open_scratch(directory, NAME, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        except (OSError, errors.Fault) as error:
            self._tell("open", f"{NAME} cannot be kept in {directory}: {error}")

    def last_sample(self) -> Mapping[str, object] | None:
        """Return the last sample of an earlier life; the job may have changed it."""
        if self._fd < 0:
            return None
        try:
            tail = os.pread(self._fd, LONGEST_LINE, max(0, os.fstat(self._fd).st_size - LONGEST_LINE))
        except OSError:
            return None
        self._torn = bool(tail) and not tail.endswith(b"\n")
        return last_sample(tail)

    def add(self, line: Mapping[str, object], *, event: bool = False) -> None:
        """Append a line; a sample is written only while the file is within its limit."""
        data = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        with self._lock:
            if self._fd < 0 or len(data) > LONGEST_LINE:
                return
            try:
                if os.fstat(self._fd).st_size + len(data) > self._limit + (ROOM_FOR_EVENTS if event else 0):
                    self._tell("limit", f"{NAME} has reached its limit of {self._limit} bytes")
                    return
                if self._torn:  # the last line was cut off, as on a full disk
                    data = b"\n" + data
                self._torn = os.write(self._fd, data) < len(data)
            except OSError as error:
                self._tell("write", f"lines of {NAME} are lost, it cannot be written: {error.strerror}")

    def close(self) -> None:
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
            self._fd = -1

    def _tell(self, what: str, text: str) -> None:
        if what not in self._told:
            self._told.add(what)
            self._log(text)


def parse(line: bytes) -> dict[str, object] | None:
    """Parse a line of the file; return None for anything that is not a JSON object."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def last_sample(tail: bytes) -> dict[str, object] | None:
    """Find the last sample in the end of a file."""
    lines = filter(None, map(parse, reversed(tail.split(b"\n"))))
    return next((found for found in lines if "cpu_seconds" in found), None)
