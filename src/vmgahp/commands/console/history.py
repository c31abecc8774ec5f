"""What was typed before, kept in a file of the user's own: short commands, and never a job ad."""

import os
import stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

MOST_LINES = 1000
"""Lines that are kept; the oldest go first."""

LONGEST_LINE = 500
"""Characters of a line that is kept; longer ones were pasted, not typed."""

_LARGEST = MOST_LINES * LONGEST_LINE * 4


def path(environ: "Mapping[str, str]") -> str:
    """Where the history is, by the XDG rules; empty where there is no home."""
    state = environ.get("XDG_STATE_HOME", "")
    if not os.path.isabs(state):
        home = environ.get("HOME", "")
        if not os.path.isabs(home):
            return ""
        state = os.path.join(home, ".local", "state")
    return os.path.join(state, "vmgahp", "console_history")


class History:
    """The lines of the file, the oldest first. Where the file cannot be had there are none, and nothing is kept.

    The file is the user's and closed to others (0600), in a directory that only he can write. As root in somebody
    else's home it is left alone.
    """

    def __init__(self, file: str) -> None:
        self.lines: list[str] = []
        self._fd = -1
        if not file:
            return
        try:
            directory = os.path.dirname(file)
            os.makedirs(directory, mode=0o700, exist_ok=True)
            found = os.stat(directory)
            if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                return
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            self._fd = os.open(file, flags, 0o600)
            found = os.fstat(self._fd)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
                self.close()
                return
            os.fchmod(self._fd, 0o600)
            self._read(found.st_size)
        except OSError:
            self.close()

    def _read(self, size: int) -> None:
        data = os.pread(self._fd, _LARGEST, max(0, size - _LARGEST))
        lines = data.decode("utf-8", "replace").split("\n")[:-1]
        self.lines = [line for line in lines if line.isprintable()][-MOST_LINES:]
        if len(lines) > 2 * MOST_LINES or size > _LARGEST:
            os.ftruncate(self._fd, 0)
            os.write(self._fd, "".join(f"{line}\n" for line in self.lines).encode())

    def add(self, line: str) -> None:
        """Keep a line, if it is one that a person typed; the same one twice in a row is kept once."""
        if not line.isprintable() or not 0 < len(line) <= LONGEST_LINE or self.lines[-1:] == [line]:
            return
        self.lines.append(line)
        if self._fd >= 0:
            try:
                os.write(self._fd, f"{line}\n".encode())
            except OSError:
                self.close()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
