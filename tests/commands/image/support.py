"""A catalog of a test's own, and a server from which images come."""

import hashlib
import os
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.commands.support import Done, vmgahp
from tests.peer import VMGAHP

RAW = b"\x01content of a disk".ljust(3 << 20, b"\0") + b"end"


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Place:
    """The directory of a catalog."""

    def __init__(self, directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.directory = directory
        self.catalog = directory / "catalog.toml"
        nothing = directory.parent / "vmgahp.conf"
        nothing.touch(0o644)
        self.environ = {
            "VMGAHP_CONFIG": str(nothing),
            "_CONDOR_VM_CATALOG": str(self.catalog),
            "_CONDOR_EXECUTE": str(directory.parent / "execute"),
            "_CONDOR_VM_WARM_DIR": str(directory.parent / "warm"),
        }
        self._capsys = capsys

    def image(self, *words: str) -> Done:
        """``vmgahp image`` with these words."""
        return vmgahp(self._capsys, "image", *words)

    def refused(self, *words: str, status: int = 1) -> str:
        """The same, which has to fail: what it says."""
        ended = self.image(*words)
        assert ended.status == status, ended.out
        return ended.err

    def begin(self, *words: str) -> "subprocess.Popen[str]":
        """The same as a process of its own."""
        environ = os.environ | self.environ
        return subprocess.Popen([*VMGAHP, "image", *words], env=environ, stderr=subprocess.PIPE, text=True)

    def names(self) -> list[str]:
        """All files of the directory, but for the catalog's lock."""
        return sorted(path.name for path in self.directory.iterdir() if path.suffix != ".lock")


@pytest.fixture
def place(scratch: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Place:
    """An empty directory for images, which VM_CATALOG names."""
    directory = scratch.parent / "images"
    directory.mkdir(mode=0o755)
    directory.chmod(0o755)
    made = Place(directory, capsys)
    for name, value in made.environ.items():
        monkeypatch.setenv(name, value)
    return made


class Server(ThreadingHTTPServer):
    """What it serves is in `files`; `lengths` says a length that is not the true one, `leads` where else it is."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, bytes] = {}
        self.lengths: dict[str, int] = {}
        self.leads: dict[str, str] = {}
        self.asked: list[str] = []
        self.waiting = threading.Event()
        """Set when the half of ``/endless`` was sent."""
        self.go_on = threading.Event()

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/{name}"


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        name = self.path.lstrip("/")
        self.server.asked.append(name)
        if name in self.server.leads:
            self.send_response(302)
            self.send_header("Location", self.server.leads[name])
            self.end_headers()
            return
        if name not in self.server.files:
            self.send_error(404)
            return
        data = self.server.files[name]
        self.send_response(200)
        self.send_header("Content-Length", str(self.server.lengths.get(name, len(data))))
        self.end_headers()
        if name == "endless":
            self.wfile.write(data[: len(data) // 2])
            self.server.waiting.set()
            self.server.go_on.wait(60)
            return
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing is told."""


@pytest.fixture
def server() -> Iterator[Server]:
    """One that serves nothing yet."""
    with Server() as made:
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        yield made
        made.go_on.set()
        made.shutdown()
        thread.join(10)
