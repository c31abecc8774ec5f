"""What a job may have in its scratch directory in place of a file that the daemon writes or reads."""

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


def of_mode(mode: int) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        path.write_bytes(b"{}")
        path.chmod(mode)

    return make


def _full_directory(path: Path) -> None:
    path.mkdir()
    (path / "kept").write_bytes(b"mine")


KINDS: dict[str, Callable[[Path], None]] = {
    "a directory": os.mkdir,
    "a full directory": _full_directory,
    "a FIFO": os.mkfifo,
    "a socket": _socket,
    "a link to nothing": lambda path: path.symlink_to("nothing"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "mode 0400": of_mode(0o400),
    "mode 0000": of_mode(0),
}
"""Kind -> the function that makes it."""


def remove(path: Path) -> None:
    """Whatever it is."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
