"""The end of a starter that chirp speaks with, for tests: it notes what it is told, or behaves badly."""

import contextlib
import socket
import threading
from pathlib import Path
from typing import Self

from tests.jobs import own

PASSWORD = "abcdefghij"

DELAYED, ANY = ("set_job_attr_delayed",), ("set_job_attr_delayed", "set_job_attr", "ulog")
"""What a starter lets jobs do as they are, and those with ``+WantRemoteUpdates = true``."""


class FakeStarter:
    """One starter, in a ``with``; what it was told is in `told`, each a list of words."""

    def __init__(self, scratch: Path, allowed: tuple[str, ...] = DELAYED, *, config: Path | None = None) -> None:
        self.told: list[list[str]] = []
        self.visits = 0
        self.allowed = allowed
        self.answer: bytes | None = None
        """Instead of what a starter answers; b"" for nothing at all."""
        self._changed = threading.Condition()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        port = self._listener.getsockname()[1]
        path = config or scratch / ".chirp.config"
        path.write_text(f"127.0.0.1 {port} {PASSWORD}\n")
        path.chmod(0o700)
        own(scratch, path)

    def __enter__(self) -> Self:
        threading.Thread(target=self._serve, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for way in self._open:
            with contextlib.suppress(OSError):
                way.shutdown(socket.SHUT_RDWR)
            way.close()

    def wait_for(self, *words: str) -> None:
        """Wait until it was told these words, in one line."""
        with self._changed:
            assert self._changed.wait_for(lambda: list(words) in self.told, 30.0), self.told

    def ad(self) -> dict[str, str]:
        """What the job ad has got, by name, as expressions."""
        return {words[1]: words[2] for words in list(self.told) if words[0] != "ulog" and words[0] in self.allowed}

    def log(self) -> list[str]:
        """The lines of the job's log."""
        return [words[1] for words in list(self.told) if words[0] == "ulog"]

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                way, _ = self._listener.accept()
                self._open.append(way)
                self.visits += 1
                threading.Thread(target=self._talk, args=(way,), daemon=True).start()

    def _talk(self, way: socket.socket) -> None:
        known = False
        with contextlib.suppress(OSError, ValueError), way.makefile("rb") as lines:
            for line in lines:
                words = unescaped(line.decode().rstrip("\n"))
                if not known:
                    known = words == ["cookie", PASSWORD]
                    way.sendall(b"0\n" if known else b"-1\n")
                    continue
                with self._changed:
                    self.told.append(words)
                    self._changed.notify_all()
                if self.answer != b"":
                    way.sendall(self.answer or (b"0\n" if words[0] in self.allowed else b"-8\n"))


def unescaped(line: str) -> list[str]:
    """The words of a line as a starter reads them: a backslash hides a space."""
    words = [""]
    letters = iter(line)
    for letter in letters:
        if letter == " ":
            words.append("")
        else:
            words[-1] += next(letters, "") if letter == "\\" else letter
    return words


def elsewhere(scratch: Path) -> Path:
    """A directory beside the scratch directory that is the job user's alone, as HTCondor 25 has it."""
    directory = scratch.parent / "user"
    directory.mkdir(mode=0o700)
    own(scratch, directory)
    return directory
