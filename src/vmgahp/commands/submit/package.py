"""An OVF package: a directory with a descriptor and its files, or one tar file (OVA).

The tar file is read header by header and never unpacked as a whole. Its regular files are taken by their plain
names, and only those that the descriptor names for a disk are written, under names of our own; links, devices, holes
and paths are not followed anywhere.
"""

import hashlib
import os
import re
import tarfile
from collections.abc import Iterator, Sequence
from typing import BinaryIO, NamedTuple

from vmgahp.commands.files import open_regular
from vmgahp.commands.submit.images import require_beside
from vmgahp.commands.submit.machine import simple_name
from vmgahp.commands.submit.summary import SubmitError, Summary
from vmgahp.commands.submit.unpack import CHUNK, ENDINGS, compression_of, require_room, unpacked, write
from vmgahp.commands.submit.xml_input import LARGEST

BLOCK = 512
MOST_MEMBERS = 1000
MOST_EXTRA = 64 << 10
"""Bytes of a header that belongs to a member (a long name, attributes)."""
_RECORD = re.compile(rb"(?<!\d)\d++ (path|size|GNU\.sparse[^=]*)=([^\n]*)\n")
_DIGEST = re.compile(
    r"^[^\S\n]*+(SHA1|SHA256|SHA512)[^\S\n]*+\(([^)\n]*)\)[^\S\n]*+=[^\S\n]*+([0-9a-fA-F]++)[^\S\n]*+$", re.MULTILINE
)


class Reference(NamedTuple):
    """A file as the descriptor names it."""

    href: str
    compression: str = ""
    """``gzip`` or another; empty or ``identity`` for none."""
    in_pieces: bool = False
    size: int = 0
    """Bytes of all its pieces together, 0 for unknown."""


class _Piece(NamedTuple):
    """Bytes of a file here."""

    name: str
    path: str
    begin: int
    size: int


class Package:
    """A package at `path`: its descriptor, and the files that it names."""

    def __init__(self, path: str, summary: Summary, descriptor: str = ".ovf") -> None:
        """`descriptor` is how the name of the file ends that says what the others are."""
        self.path = _descriptor_in(path) if os.path.isdir(path) else os.path.abspath(path)
        self._summary = summary
        self._members: dict[str, tuple[int, int]] = {}
        """Of a tar file: name -> where the member's data begins, and how long it is."""
        try:
            with open_regular(self.path) as file:
                head = file.read(BLOCK)
                if kind := compression_of(head):
                    raise SubmitError(f"{path} is compressed with {kind}.", "unpack it first.")
                if head[257:262] == b"ustar":
                    self._members = _members(file, os.path.basename(path))
        except OSError as error:
            raise SubmitError(f"{path} cannot be read ({error.strerror}).") from error
        self.is_archive = bool(self._members)
        self.descriptor_name = os.path.basename(self.path)
        summary.sources.add(os.path.realpath(self.path))
        if self.is_archive:
            names = [name for name in self._members if name.lower().endswith(descriptor)]
            if len(names) != 1:
                raise SubmitError(
                    f"{path} has {len(names)} descriptors ({descriptor}).", "see what tar -t shows of it."
                )
            self.descriptor_name = names[0]
        self.digests = self._digests()

    def descriptor(self) -> bytes:
        """The descriptor's content; at most one byte more than is allowed."""
        if self.is_archive:
            data = self._read(self.descriptor_name)
        else:
            with open(self.path, "rb") as file:
                data = file.read(LARGEST + 1)
        self._verify(self.descriptor_name, data)
        return data

    def names(self) -> list[str]:
        """The files of the archive, or of the directory."""
        return list(self._members) if self.is_archive else sorted(os.listdir(os.path.dirname(self.path)))

    def text(self, name: str) -> bytes:
        """A small file's content, as far as it is read. Raises `SubmitError`."""
        if self.is_archive:
            return self._read(name)
        with open(self._piece(name).path, "rb") as file:
            return file.read(LARGEST + 1)

    def file(self, reference: Reference, directory: str, *, force: bool) -> str:
        """The full path of a file of the package here; what is in a tar file, compressed or in pieces is written anew.

        That goes to `directory`. Raises `SubmitError` for a file that is not there or not in the package.
        """
        name, kind = reference.href, reference.compression
        if kind not in ("", "identity", "gzip", "xz", "bzip2"):
            raise SubmitError(f"{name!a} is compressed with {kind[:20]!a}.", "unpack it, and take the attribute away.")
        pieces = self._pieces(reference)
        if not self.is_archive and kind in ("", "identity") and not reference.in_pieces:
            for _ in self._content(pieces) if name in self.digests else ():
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
        content = self._content(pieces)
        write(
            content if kind in ("", "identity") else unpacked(content, kind, name), target, self._summary, force=force
        )
        where = "in the archive" if self.is_archive else "in the package"
        how = "joined to" if reference.in_pieces else "taken out to" if kind in ("", "identity") else "unpacked to"
        self._summary.carry("", f"{name} {where}", f"{how} {target}")
        return target

    def _pieces(self, reference: Reference) -> list[_Piece]:
        """Where the bytes of a file are; a file in pieces has nine digits at the end of their names."""
        if not reference.in_pieces:
            return [self._piece(reference.href)]
        found: list[_Piece] = []
        while len(found) < MOST_MEMBERS:
            name = f"{reference.href}.{len(found):09}"
            if name not in self._members if self.is_archive else not os.path.lexists(self._beside(name)):
                break
            found.append(self._piece(name))
        if not found or (reference.size and reference.size != sum(piece.size for piece in found)):
            raise SubmitError(
                f"{len(found)} pieces of {reference.href!a} are there, which are not the whole file.",
                "keep the package together.",
            )
        return found

    def _piece(self, name: str) -> _Piece:
        if self.is_archive:
            if name not in self._members:
                raise SubmitError(f"{name!a} is not in {self.path}.", "see what tar -t shows of it.")
            return _Piece(name, self.path, *self._members[name])
        path, parts = self._beside(name), name.split("/")
        if "" in parts or ".." in parts or "." in parts or ":" in name or not os.path.isfile(path):
            raise SubmitError(f"{name!a} is not a file in the directory of {self.path}.", "keep the package together.")
        require_beside(path, self.descriptor_name, self.path)
        return _Piece(name, path, 0, os.path.getsize(path))

    def _beside(self, name: str) -> str:
        return os.path.join(os.path.dirname(self.path), *name.split("/"))

    def _content(self, pieces: Sequence[_Piece]) -> Iterator[bytes]:
        """The bytes of a file, whose digests are compared. Raises `SubmitError`."""
        for piece in pieces:
            digest = hashlib.new(self.digests.get(piece.name, ("sha1", ""))[0], usedforsecurity=False)
            left = piece.size
            with open(piece.path, "rb") as file:
                file.seek(piece.begin)
                while left and (chunk := file.read(min(left, CHUNK))):
                    left -= len(chunk)
                    digest.update(chunk)
                    yield chunk
            if left:
                raise SubmitError(f"{piece.path} ends in the middle of {piece.name!a}.", "get it again.")
            self._compare(piece.name, digest.hexdigest())

    def _digests(self) -> dict[str, tuple[str, str]]:
        """What the manifest says: name -> algorithm and digest."""
        stem = os.path.splitext(self.descriptor_name)[0]
        data = b""
        if self.is_archive:
            if stem + ".mf" in self._members:
                data = self._read(stem + ".mf")
        else:
            path = os.path.join(os.path.dirname(self.path), stem + ".mf")
            if os.path.isfile(path):
                with open(path, "rb") as file:
                    data = file.read(LARGEST)
        if stem + ".cert" in self._members:
            self._summary.advise(f"{stem}.cert, the package's signature, was not looked at.")
        return {
            name: (algorithm.lower(), digest.lower())
            for algorithm, name, digest in _DIGEST.findall(data.decode("utf-8", "replace"))
        }

    def _verify(self, name: str, data: bytes) -> None:
        if name in self.digests:
            self._compare(name, hashlib.new(self.digests[name][0], data, usedforsecurity=False).hexdigest())

    def _compare(self, name: str, found: str) -> None:
        if name in self.digests and self.digests[name][1] != found:
            raise SubmitError(
                f"{name} is not the file of the package's manifest: its digest differs.", "get the package again."
            )

    def _read(self, name: str) -> bytes:
        begin, size = self._members[name]
        with open(self.path, "rb") as file:
            file.seek(begin)
            return file.read(min(size, LARGEST + 1))


def _descriptor_in(directory: str) -> str:
    try:
        found = [name for name in os.listdir(directory) if name.lower().endswith(".ovf")]
    except OSError as error:
        raise SubmitError(f"{directory} cannot be read ({error.strerror}).") from error
    if len(found) != 1:
        raise SubmitError(f"{directory} has {len(found)} descriptors (.ovf).", "name one of them.")
    return os.path.abspath(os.path.join(directory, found[0]))


def _members(file: BinaryIO, name: str) -> dict[str, tuple[int, int]]:
    """The regular files of a tar file: plain name -> begin and size. Raises `SubmitError`."""
    found: dict[str, tuple[int, int]] = {}
    end = file.seek(0, os.SEEK_END)
    at, long_name, long_size = 0, "", -1
    for _ in range(2 * MOST_MEMBERS):
        file.seek(at)
        block = file.read(BLOCK)
        if len(block) < BLOCK or not block.strip(b"\0"):
            return found
        try:
            member = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except (tarfile.HeaderError, ValueError) as error:
            raise SubmitError(f"{name} is a damaged tar file: {error}.", "get it again.") from error
        begin = at + BLOCK
        size = member.size if long_size < 0 else long_size
        if member.type in (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME):
            if not 0 <= member.size <= MOST_EXTRA:
                raise SubmitError(f"{name}: a header has {member.size} bytes.", "see whether it is the right file.")
            extra = file.read(member.size)
            if member.type == tarfile.GNUTYPE_LONGNAME:
                long_name = extra.rstrip(b"\0").decode("utf-8", "surrogateescape")
            elif member.type == tarfile.XHDTYPE:
                long_name, long_size = _extended(extra, name)
            size = member.size
        else:
            path = long_name or member.name
            if size < 0 or begin + size > end:
                raise SubmitError(f"{name} ends in the middle of {path!a}.", "get it again.")
            if member.type in (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE):
                found[_plain(path, name)] = begin, size
            elif member.type != tarfile.DIRTYPE:
                raise SubmitError(f"{name} has {path!a}, which is not a regular file.", "see what tar -tv shows.")
            long_name, long_size = "", -1
        if len(found) > MOST_MEMBERS:
            break
        at = begin + (size + BLOCK - 1) // BLOCK * BLOCK
    raise SubmitError(f"{name} has more than {MOST_MEMBERS} files.", "see whether it is the right file.")


def _extended(extra: bytes, name: str) -> tuple[str, int]:
    """Name and size that an extended header has for the next member, empty and -1 for none."""
    path, size = "", -1
    for key, value in _RECORD.findall(extra):
        if key == b"path":
            path = value.decode("utf-8", "surrogateescape")
        elif key == b"size" and value.isdigit() and len(value) < 19:
            size = int(value)
        elif key.startswith(b"GNU.sparse"):
            raise SubmitError(f"{name} has files with holes.", "make it anew with tar --format=ustar.")
    return path, size


def _plain(path: str, name: str) -> str:
    parts = path.removeprefix("./").split("/")
    if not path.isprintable() or path.startswith("/") or ".." in parts or "" in parts:
        raise SubmitError(f"{name} has a file {path!a}.", "keep the files of a package in its directory.")
    return "/".join(parts)
