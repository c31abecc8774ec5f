"""Compressed files of strangers, unpacked within limits into files with holes for zeros."""

import bz2
import lzma
import os
import subprocess
import zlib
from collections.abc import Iterable, Iterator
from typing import IO

from vmgahp.commands.submit.images import free
from vmgahp.commands.submit.summary import SubmitError, Summary

CHUNK = 1 << 20
LARGEST = 4 << 40
"""Bytes that anything may have when it is unpacked: a few MiB can stand for any number of zeros."""
_MOST_PARTS, _LEAST_PART = 1000, 1 << 10
"""Files that one may be made of, and how many bytes each has on average where it is of more: each one costs a copy."""
_MEMORY = 256 << 20
"""Bytes that a decompressor may take for itself; what ``xz -9`` writes needs 65 MiB."""

ENDINGS = {".gz": "gzip", ".xz": "xz", ".bz2": "bzip2", ".zst": "zstd"}
"""What the names of compressed files end in."""
_MARKS = ((b"\x1f\x8b\x08", "gzip"), (b"\xfd7zXZ\0", "xz"), (b"BZh", "bzip2"), (b"\x28\xb5\x2f\xfd", "zstd"))


def compression_of(header: bytes) -> str:
    """How a file with these first bytes is compressed, empty for not at all."""
    return next((kind for mark, kind in _MARKS if header.startswith(mark)), "")


def content(file: IO[bytes], kind: str, name: str) -> Iterator[bytes]:
    """The content of a file that is compressed in this way (`compression_of`). Raises `SubmitError`."""
    return _zstd(file, name) if kind == "zstd" else unpacked(_chunks(file), kind, name)


def unpacked(chunks: Iterable[bytes], kind: str, name: str) -> Iterator[bytes]:
    """The content of a file that is compressed with gzip, xz or bzip2. Raises `SubmitError`."""
    decompressor, left, begun = _decompressor(kind), b"", False
    size = parts = 0
    try:
        for chunk in chunks:
            left += chunk
            size += len(chunk)
            while left or not decompressor.needs_input:
                if decompressor.eof:  # another one may follow, and xz fills up with zeros
                    left = (decompressor.unused_data + left).lstrip(b"\0")
                    if not left:
                        break
                    decompressor, begun, parts = _decompressor(kind), False, parts + 1
                    if parts > _MOST_PARTS and size < parts * _LEAST_PART:
                        raise ValueError("it is made of too many files")
                begun = True
                data = decompressor.decompress(left, CHUNK)
                left = b""
                if data:
                    yield data
    except (OSError, EOFError, lzma.LZMAError, zlib.error, ValueError) as error:
        raise SubmitError(f"{name} cannot be unpacked with {kind} ({error}).", "get it again.") from error
    if begun and not decompressor.eof:
        raise SubmitError(f"{name} ends in the middle.", "get it again.")


def _chunks(file: IO[bytes]) -> Iterator[bytes]:
    """All that is left of a file."""
    while chunk := file.read(CHUNK):
        yield chunk


def _zstd(file: IO[bytes], name: str) -> Iterator[bytes]:
    """The same of zstd, which Python has not. Raises `SubmitError`."""
    command = ["zstd", "-dcq", f"--memory={_MEMORY >> 20}MB"]
    os.lseek(file.fileno(), file.tell(), os.SEEK_SET)  # what was read ahead is for zstd
    try:
        run = subprocess.Popen(command, stdin=file, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    except FileNotFoundError as error:
        raise SubmitError("zstd is not installed.", "install zstd, or unpack the file elsewhere.") from error
    assert run.stdout is not None
    assert run.stderr is not None
    try:
        yield from _chunks(run.stdout)  # it writes one line of error at most, which the pipe holds
        said = run.stderr.read(4096).decode("utf-8", "replace").strip()
        if run.wait():
            raise SubmitError(f"{name} cannot be unpacked with zstd ({said}).", "get it again.")
    finally:
        run.kill()
        run.wait()
        run.stdout.close()
        run.stderr.close()


def write(chunks: Iterable[bytes], target: str, summary: Summary, *, force: bool) -> None:
    """Write a file of these bytes, with holes, where none is or only with `force`. Raises `SubmitError`."""
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
    """Raises `SubmitError` for more bytes than there is room for."""
    if size > room:
        raise SubmitError(
            f"{target} needs more than the {room} bytes that are free there.", "name a larger place with --dir."
        )


class _Gzip:
    """zlib's decompressor with the words of the two others."""

    def __init__(self) -> None:
        self._inner = zlib.decompressobj(31)
        self._full = False

    def decompress(self, data: bytes, most: int) -> bytes:
        found = self._inner.decompress(self._inner.unconsumed_tail + data, most)
        self._full = len(found) == most
        return found

    @property
    def eof(self) -> bool:
        return self._inner.eof

    @property
    def needs_input(self) -> bool:
        return not (self.eof or self._full or self._inner.unconsumed_tail)

    @property
    def unused_data(self) -> bytes:
        return self._inner.unused_data


def _decompressor(kind: str) -> "_Gzip | lzma.LZMADecompressor | bz2.BZ2Decompressor":
    if kind == "gzip":
        return _Gzip()
    return lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_MEMORY) if kind == "xz" else bz2.BZ2Decompressor()
