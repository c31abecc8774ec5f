"""A package of files that describe a VM (OVF, OVA, a Vagrant box): a directory, or one tar file.

Only the headers of the tar file are read, and it is never unpacked as a whole. Only files that the description names
are written, under names of our own; links, devices, holes and paths are never followed.
"""

import hashlib
import io
import os
import re
import tarfile
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from vmgahp.commands.files import open_regular
from vmgahp.commands.submit.images import (
    CHUNK,
    ENDINGS,
    Chunks,
    compression_of,
    require_beside,
    require_room,
    unpacked_content,
    write_unpacked,
)
from vmgahp.commands.submit.machine import SubmitError, Summary, os_errors_as, simple_name
from vmgahp.commands.submit.xml_input import LARGEST

MOST_MEMBERS = 1000
_MOST_EXTRA = 8 << 10
"""The maximum bytes of an extra header of a member (a long name, attributes), for which older versions of tarfile need
quadratic time."""
_MOST_HEADERS = MOST_MEMBERS * (3 << 10)
"""The maximum bytes of all headers of a tar file."""
_DIGEST = re.compile(
    r"^[^\S\n]*+(SHA1|SHA256|SHA512)[^\S\n]*+\(([^)\n]*)\)[^\S\n]*+=[^\S\n]*+([0-9a-fA-F]++)[^\S\n]*+$", re.MULTILINE
)


class Reference(NamedTuple):
    """A file as the descriptor names it."""

    href: str
    compression: str = ""
    """The compression: ``gzip`` or another; empty or ``identity`` for none."""
    in_pieces: bool = False
    size: int = 0
    """The bytes of all its pieces together, 0 if unknown."""


class _Piece(NamedTuple):
    """The position of a file's bytes here."""

    name: str
    path: str
    begin: int
    size: int


class Package:
    """The files of a package, by their names in it."""

    def __init__(self, path: str, summary: Summary, *, called: str = "") -> None:
        """Open a tar file, a directory, or the directory of a descriptor. Raises `SubmitError`.

        `called` is the user's name for the file, if that is not `path`.
        """
        self.path = os.path.abspath(path)
        self.called = called or path
        self._summary = summary
        self._members: dict[str, tuple[int, int]] | None = None
        """Name -> offset and size of the member's data, for a tar file."""
        self._descriptor = ""
        self._digests: dict[str, tuple[str, str]] = {}
        """Name -> algorithm and digest, from the manifest."""
        if os.path.isdir(self.path):
            self._directory = self.path
            return
        self._directory = os.path.dirname(self.path)
        with os_errors_as(f"{self.called} cannot be read"), open_regular(self.path) as file:
            head = file.read(tarfile.BLOCKSIZE)
            if kind := compression_of(head):
                raise SubmitError(f"{self.called} is compressed with {kind}.", "unpack it first.")
            if head[257:262] == b"ustar":
                self._members = _members(file.fileno(), os.path.basename(self.called))
            else:
                self._descriptor = os.path.basename(self.path)
        summary.sources.add(os.path.realpath(self.path))

    @property
    def is_archive(self) -> bool:
        """True for a tar file."""
        return self._members is not None

    def names(self) -> list[str]:
        """List the files of the archive, or of the directory. Raises `SubmitError`."""
        if self._members is not None:
            return list(self._members)
        with os_errors_as(f"{self._directory} cannot be read"):
            return sorted(os.listdir(self._directory))

    def one(self, ending: str) -> str:
        """Return the name of the only file with this ending. Raises `SubmitError`."""
        names = [name for name in self.names() if name.lower().endswith(ending)]
        if len(names) != 1:
            hint = "see what tar -t shows of it." if self.is_archive else "name one of them."
            raise SubmitError(f"{self.called} has {len(names)} files {ending}.", hint)
        return names[0]

    def descriptor(self, ending: str) -> tuple[str, bytes]:
        """Return the name and the content of the file that describes the package. Raises `SubmitError`.

        The digests of its manifest are checked for all files that are read from now on.
        """
        name = self._descriptor or self.one(ending)
        stem = os.path.splitext(name)[0]
        others = self.names()
        if f"{stem}.mf" in others:
            found = _DIGEST.findall(self.text(f"{stem}.mf").decode("utf-8", "replace"))
            self._digests = {member: (algorithm.lower(), digest.lower()) for algorithm, member, digest in found}
        if f"{stem}.cert" in others:
            self._summary.advise(f"{stem}.cert, the package's signature, was not looked at.")
        data = self.text(name)
        if name in self._digests:
            self._compare(name, hashlib.new(self._digests[name][0], data, usedforsecurity=False).hexdigest())
        return name, data

    def text(self, name: str) -> bytes:
        """Return a small file's content, at most one byte more than is allowed. Raises `SubmitError`."""
        piece = self._piece(name)
        with open_regular(piece.path) as file:
            file.seek(piece.begin)
            return file.read(min(piece.size, LARGEST + 1))

    def file(self, reference: Reference, directory: str, *, force: bool) -> str:
        """Return the full path of a file of the package here.

        A file that is in a tar file, compressed or in pieces is extracted to `directory`. Raises `SubmitError` for a
        missing file or one outside the package.
        """
        name, kind = reference.href, reference.compression
        if kind not in ("", "identity", "gzip", "xz", "bzip2"):
            raise SubmitError(f"{name!a} is compressed with {kind[:20]!a}.", "unpack it, and take the attribute away.")
        pieces = self._pieces(reference)
        if not self.is_archive and kind in ("", "identity") and not reference.in_pieces:
            for _ in self._content(pieces) if name in self._digests else ():
                pass
            return pieces[0].path
        stem, ending = os.path.splitext(os.path.basename(name))
        if ending.lower() in ENDINGS:
            stem, ending = os.path.splitext(stem)
        ending = simple_name(ending[1:], "img")
        target = os.path.join(directory, f"{simple_name(stem, 'disk')}.{ending}")
        if any(os.path.realpath(target) == os.path.realpath(piece.path) for piece in pieces):
            target = os.path.join(directory, f"{simple_name(stem, 'disk')}-unpacked.{ending}")
        room = os.statvfs(directory)
        require_room(sum(piece.size for piece in pieces), room.f_bavail * room.f_frsize, target)
        chunks = self._content(pieces)
        if kind not in ("", "identity"):
            chunks = unpacked_content(io.BufferedReader(Chunks(chunks)), kind, name)
        write_unpacked(chunks, target, self._summary, force=force)
        where = "in the archive" if self.is_archive else "in the package"
        how = "joined to" if reference.in_pieces else "taken out to" if kind in ("", "identity") else "unpacked to"
        self._summary.carry("", f"{name} {where}", f"{how} {target}")
        return target

    def _pieces(self, reference: Reference) -> list[_Piece]:
        """Find the bytes of a file; the names of pieces end in nine digits."""
        if not reference.in_pieces:
            return [self._piece(reference.href)]
        found: list[_Piece] = []
        while len(found) < MOST_MEMBERS:
            name = f"{reference.href}.{len(found):09}"
            if not os.path.lexists(self._beside(name)) if self._members is None else name not in self._members:
                break
            found.append(self._piece(name))
        if not found or (reference.size and reference.size != sum(piece.size for piece in found)):
            raise SubmitError(
                f"{len(found)} pieces of {reference.href!a} are there, which are not the whole file.",
                "keep the package together.",
            )
        return found

    def _piece(self, name: str) -> _Piece:
        if self._members is not None:
            if name not in self._members:
                raise SubmitError(f"{name!a} is not in {self.called}.", "see what tar -t shows of it.")
            return _Piece(name, self.path, *self._members[name])
        path, parts = self._beside(name), name.split("/")
        if "" in parts or ".." in parts or "." in parts or ":" in name or not os.path.isfile(path):
            raise SubmitError(f"{name!a} is not a regular file in {self._directory}.", "keep the package together.")
        require_beside(path, name, os.path.join(self._directory, self._descriptor))
        return _Piece(name, path, 0, os.path.getsize(path))

    def _beside(self, name: str) -> str:
        return os.path.join(self._directory, *name.split("/"))

    def _content(self, pieces: Sequence[_Piece]) -> Iterator[bytes]:
        """Read a file and verify its digest. Raises `SubmitError`."""
        for piece in pieces:
            digest = hashlib.new(self._digests.get(piece.name, ("sha1", ""))[0], usedforsecurity=False)
            left = piece.size
            with open_regular(piece.path) as file:
                file.seek(piece.begin)
                while left and (chunk := file.read(min(left, CHUNK))):
                    left -= len(chunk)
                    digest.update(chunk)
                    yield chunk
            if left:
                raise SubmitError(f"{piece.path} ends in the middle of {piece.name!a}.", "get it again.")
            self._compare(piece.name, digest.hexdigest())

    def _compare(self, name: str, found: str) -> None:
        if name in self._digests and self._digests[name][1] != found:
            raise SubmitError(
                f"{name} is not the file of the package's manifest: its digest differs.", "get the package again."
            )


class _Headers(io.FileIO):
    """A tar file whose reads are limited to the size of headers: tarfile itself reads as much as a header claims."""

    _left = _MOST_HEADERS

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or not 0 <= size <= min(_MOST_EXTRA, self._left):
            raise tarfile.ReadError("its headers are too long")
        self._left -= size
        return super().read(size)


def _members(descriptor: int, name: str) -> dict[str, tuple[int, int]]:
    """List the regular files of a tar file: plain name -> offset and size. Raises `SubmitError`."""
    found: dict[str, tuple[int, int]] = {}
    end = os.fstat(descriptor).st_size
    os.lseek(descriptor, 0, os.SEEK_SET)
    try:
        with _Headers(descriptor, closefd=False) as file, tarfile.open(fileobj=file, mode="r:") as archive:
            for number, member in enumerate(archive):
                if number >= MOST_MEMBERS:
                    problem = f"{name} has more than {MOST_MEMBERS} files."
                    raise SubmitError(problem, "see whether it is the right file.")
                if member.isdir():
                    continue
                if not member.isreg() or member.issparse():
                    problem = f"{name} has {member.name!a}, which is not a regular file, or one with holes."
                    raise SubmitError(problem, "make it anew with tar --format=ustar, of plain files.")
                if not 0 <= member.size <= end - member.offset_data:
                    raise SubmitError(f"{name} ends in the middle of {member.name!a}.", "get it again.")
                found[_plain(member.name, name)] = member.offset_data, member.size
    except (tarfile.TarError, ValueError, OverflowError, RecursionError, OSError) as error:
        raise SubmitError(f"{name} is a damaged tar file: {error}.", "get it again.") from error
    return found


def _plain(path: str, name: str) -> str:
    parts = path.removeprefix("./").split("/")
    if not path.isprintable() or path.startswith("/") or ".." in parts or "" in parts:
        raise SubmitError(f"{name} has a file {path!a}.", "keep the files of a package in its directory.")
    return "/".join(parts)
