"""Decompression of untrusted files within limits, into files with holes for zeros."""

import bz2
import gzip
import io
import lzma
import os
import subprocess
import zlib
from collections.abc import Iterable, Iterator
from typing import IO, Any

from vmgahp.commands.submit.images import free
from vmgahp.commands.submit.summary import SubmitError, Summary

CHUNK = 1 << 20
LARGEST = 4 << 40
"""The maximum number of bytes of a decompressed file: a few MiB can expand to any number of zeros."""
_MEMORY = 256 << 20
"""The memory limit of a decompressor in bytes; output of ``xz -9`` needs 65 MiB."""
_PIECE = 64 << 10
"""The bytes of an xz file that are read at once: data after a stream is copied, and a stream may have 32 bytes."""

ENDINGS = {".gz": "gzip", ".xz": "xz", ".bz2": "bzip2", ".zst": "zstd"}
"""The suffixes of compressed files."""
_MARKS = ((b"\x1f\x8b\x08", "gzip"), (b"\xfd7zXZ\0", "xz"), (b"BZh", "bzip2"), (b"\x28\xb5\x2f\xfd", "zstd"))


def compression_of(header: bytes) -> str:
    """Return the compression of a file by its first bytes; empty for none."""
    return next((kind for mark, kind in _MARKS if header.startswith(mark)), "")


def content(file: IO[bytes], kind: str, name: str) -> Iterator[bytes]:
    """Decompress a file with the given compression (`compression_of`). Raises `SubmitError`."""
    try:
        if kind == "zstd":
            yield from _zstd(file)
        elif kind == "xz":
            yield from _xz(file)
        else:
            opened: Any = gzip.GzipFile(fileobj=file) if kind == "gzip" else bz2.BZ2File(file)
            yield from _chunks(opened)
    except EOFError as error:
        raise SubmitError(f"{name} ends in the middle.", "get it again.") from error
    except (OSError, lzma.LZMAError, zlib.error) as error:
        raise SubmitError(f"{name} cannot be unpacked with {kind} ({error}).", "get it again.") from error


class Chunks(io.RawIOBase):
    """A readable file over an iterator of chunks."""

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self._chunks = iter(chunks)
        self._left = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._left = self._left or next(self._chunks, b"")
        part, self._left = self._left[: len(buffer)], self._left[len(buffer) :]
        buffer[: len(part)] = part
        return len(part)


def _chunks(file: IO[bytes]) -> Iterator[bytes]:
    """Read the rest of a file."""
    while chunk := file.read(CHUNK):
        yield chunk


def _xz(file: IO[bytes]) -> Iterator[bytes]:
    """Decompress xz within `_MEMORY`, which `lzma.open` cannot limit: a header can request gigabytes."""
    data = file.read(_PIECE)
    while data:
        stream = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_MEMORY)
        while not stream.eof:
            yield stream.decompress(data, CHUNK)
            data = b""
            if stream.needs_input and not (data := file.read(_PIECE)):
                raise EOFError
        # Another stream may follow, with zeros as padding in between.
        data = stream.unused_data.lstrip(b"\0")
        while not data and (more := file.read(_PIECE)):
            data = more.lstrip(b"\0")


def _zstd(file: IO[bytes]) -> Iterator[bytes]:
    """Decompress with the program zstd, because Python has no module for it. Raises OSError, `SubmitError`."""
    command = ["zstd", "-dcq", f"--memory={_MEMORY >> 20}MB"]
    os.lseek(file.fileno(), file.tell(), os.SEEK_SET)  # zstd must get the bytes that were read ahead
    try:
        run = subprocess.Popen(command, stdin=file, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    except FileNotFoundError as error:
        raise SubmitError("zstd is not installed.", "install zstd, or unpack the file elsewhere.") from error
    assert run.stdout is not None
    assert run.stderr is not None
    try:
        yield from _chunks(run.stdout)  # it writes at most one line of error, which fits into the pipe
        said = run.stderr.read(4096).decode("utf-8", "replace").strip()
        if run.wait():
            raise OSError(said)
    finally:
        run.kill()
        run.wait()
        run.stdout.close()
        run.stderr.close()


def write(chunks: Iterable[bytes], target: str, summary: Summary, *, force: bool) -> None:
    """Write the chunks to a file, with holes; an existing file is replaced only with `force`. Raises `SubmitError`."""
    free(target, summary, force=force)
    room = os.statvfs(os.path.dirname(target))
    most = room.f_bavail * room.f_frsize
    temporary, size, used = f"{target}.new", 0, 0
    try:
        with open(temporary, "xb") as file:
            for chunk in chunks:
                size += len(chunk)
                if chunk.count(0) == len(chunk):
                    file.seek(size)
                else:
                    used += len(chunk)
                    require_room(used, most, target)
                    file.write(chunk)
                if size > LARGEST:
                    raise SubmitError(f"{target} would have more than {LARGEST >> 40} TiB.", "see what it is.")
            file.truncate(size)
        os.replace(temporary, target)
        summary.made.append(target)
    except OSError as error:
        raise SubmitError(
            f"{target} cannot be written ({error.strerror}).", "name another place with --dir."
        ) from error
    finally:
        if os.path.lexists(temporary):
            os.unlink(temporary)


def require_room(size: int, room: int, target: str) -> None:
    """Raise `SubmitError` if the size exceeds the free space."""
    if size > room:
        raise SubmitError(
            f"{target} needs more than the {room} bytes that are free there.", "name a larger place with --dir."
        )
