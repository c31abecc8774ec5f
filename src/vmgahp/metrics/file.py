"""``vm_metrics.jsonl`` in the scratch directory: what a VM has used, and its events.

The file is transferred back with the job, and to a restart with its checkpoint, which appends to it. It is the
job's: it is opened once, as the job's user and through no link, and what an earlier life has left in it is
looked at and not believed. The format is in docs/reference/metrics.md.
"""

import os
from _collections_abc import Callable, Mapping
from _json import encode_basestring_ascii as quoted
from _thread import allocate_lock

from vmgahp import errors
from vmgahp.host.job_user import Identity

NAME = "vm_metrics.jsonl"

LONGEST_LINE = 64 << 10
"""Bytes of a line; also how much of the end of an earlier life's file is looked at."""

MOST_LINES = 100_000
"""Lines of it that its readers take in, be the file ever so long: a sample a second for a day are fewer."""

ROOM_FOR_EVENTS = 64 << 10
"""Bytes that events may take when the limit leaves no room for samples any more."""


class MetricsFile:
    """Lines at the end of the file, from any thread. A line that cannot be written is lost, and that is logged once."""

    def __init__(self, identity: "Identity", directory: str, limit: int, log: "Callable[[str], None]") -> None:
        self._limit = limit
        self._log = log
        self._lock = allocate_lock()
        self._told: set[str] = set()
        self._torn = False
        self._fd = -1
        try:
            self._fd = identity.open_scratch(directory, NAME, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        except (OSError, errors.Fault) as error:
            self._tell("open", f"{NAME} cannot be kept in {directory}: {error}")

    def last_sample(self) -> Mapping[str, object] | None:
        """The last sample that an earlier life has left, whatever the job has made of it."""
        if self._fd < 0:
            return None
        try:
            size = os.fstat(self._fd).st_size
            tail = os.pread(self._fd, LONGEST_LINE, max(0, size - LONGEST_LINE))
        except OSError:
            return None
        self._torn = bool(tail) and not tail.endswith(b"\n")
        return last_sample(tail)

    def add(self, line: Mapping[str, object], *, event: bool = False) -> None:
        """Append a line; a sample only as long as the file is within its limit."""
        data = as_json(line).encode() + b"\n"
        with self._lock:
            if self._fd < 0 or len(data) > LONGEST_LINE:
                return
            try:
                size = os.fstat(self._fd).st_size
                if size + len(data) > self._limit + (ROOM_FOR_EVENTS if event else 0):
                    self._tell("limit", f"{NAME} has reached its limit of {self._limit} bytes")
                    return
                if self._torn:  # the last line went in half, as when a disk runs full
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
        """Log it, once of each kind."""
        if what not in self._told:
            self._told.add(what)
            self._log(text)


def as_json(value: object) -> str:
    """A line, or what is in one, as ``json.dumps`` writes it: the module json brings re, for what it reads."""
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{quoted(name)}:{as_json(each)}' for name, each in value.items())}}}"
    if isinstance(value, str):
        return quoted(value)
    words = {None: "null", True: "true", False: "false"}
    return words[value] if value is None or isinstance(value, bool) else repr(value)


def parse(line: bytes) -> dict[str, object] | None:
    """A line of the file; None for anything else, be it ever so strange."""
    import json  # of an earlier life, and in what reads the file

    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def last_sample(tail: bytes) -> dict[str, object] | None:
    """The last sample in the end of a file."""
    for text in reversed(tail.split(b"\n")):
        found = parse(text) if text else None
        if found is not None and "cpu_seconds" in found:
            return found
    return None
