"""An OVF package: a directory with a descriptor and its files, or one tar file (OVA).

The tar file is read header by header and never unpacked as a whole. Its regular files are taken by their plain
names, and only those that the descriptor names for a disk are written, under names of our own; links, devices, holes
and paths are not followed anywhere.
"""

import hashlib
import os
import re
import tarfile
from typing import BinaryIO

from vmgahp.commands.submit.images import free, require_beside
from vmgahp.commands.submit.machine import simple_name
from vmgahp.commands.submit.summary import SubmitError, Summary
from vmgahp.commands.submit.xml_input import LARGEST

BLOCK = 512
MOST_MEMBERS = 1000
MOST_EXTRA = 64 << 10
"""Bytes of a header that belongs to a member (a long name, attributes)."""
_CHUNK = 1 << 20
_RECORD = re.compile(rb"(?<!\d)\d++ (path|size|GNU\.sparse[^=]*)=([^\n]*)\n")
_DIGEST = re.compile(
    r"^[^\S\n]*+(SHA1|SHA256|SHA512)[^\S\n]*+\(([^)\n]*)\)[^\S\n]*+=[^\S\n]*+([0-9a-fA-F]++)[^\S\n]*+$", re.MULTILINE
)


class Package:
    """A package at `path`: its descriptor, and the files that it names."""

    def __init__(self, path: str, summary: Summary) -> None:
        self.path = os.path.abspath(path)
        self._summary = summary
        self._members: dict[str, tuple[int, int]] = {}
        """Of a tar file: name -> where the member's data begins, and how long it is."""
        try:
            with open(self.path, "rb") as file:
                head = file.read(BLOCK)
                if head[257:262] == b"ustar":
                    self._members = _members(file, os.path.basename(path))
        except OSError as error:
            raise SubmitError(f"{path} cannot be read ({error.strerror}).") from error
        self.is_archive = bool(self._members)
        self.descriptor_name = os.path.basename(path)
        if self.is_archive:
            names = [name for name in self._members if name.lower().endswith(".ovf")]
            if len(names) != 1:
                raise SubmitError(f"{path} has {len(names)} descriptors (.ovf).", "see what tar -t shows of it.")
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

    def file(self, name: str, directory: str, *, force: bool) -> str:
        """The full path of a file of the package here; what is in a tar file is written to `directory`.

        Raises `SubmitError` for a file that is not there or not in the package.
        """
        if self.is_archive:
            return self._extract(name, directory, force)
        parts = name.split("/")
        path = os.path.join(os.path.dirname(self.path), *parts)
        if "" in parts or ".." in parts or "." in parts or ":" in name or not os.path.isfile(path):
            raise SubmitError(f"{name!a} is not a file in the directory of {self.path}.", "keep the package together.")
        require_beside(path, self.descriptor_name, self.path)
        if name in self.digests:
            with open(path, "rb") as file:
                self._compare(name, _digest(file, self.digests[name][0], None))
        return path

    def _extract(self, name: str, directory: str, force: bool) -> str:
        if name not in self._members:
            raise SubmitError(f"{name!a} is not in {self.path}.", "see what tar -t shows of it.")
        begin, size = self._members[name]
        stem, ending = os.path.splitext(os.path.basename(name))
        target = os.path.join(directory, f"{simple_name(stem, 'disk')}.{simple_name(ending[1:], 'img')}")
        free(target, force)
        room = os.statvfs(directory)
        if size > room.f_bavail * room.f_frsize:
            raise SubmitError(
                f"{name} has {size} bytes, more than are free in {directory}.", "name a larger place with --dir."
            )
        temporary = target + ".new"
        try:
            with open(self.path, "rb") as source, open(temporary, "xb") as copy:
                source.seek(begin)
                algorithm = self.digests.get(name, ("sha1", ""))[0]
                found = _digest(source, algorithm, size, copy)
            self._compare(name, found)
            os.replace(temporary, target)
            self._summary.made.append(target)
        except OSError as error:
            raise SubmitError(f"{target} cannot be written ({error.strerror}).") from error
        finally:
            if os.path.lexists(temporary):
                os.unlink(temporary)
        self._summary.carry(f"{name} was taken out of the archive to {target}")
        return target

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


def _digest(source: BinaryIO, algorithm: str, size: int | None, copy: BinaryIO | None = None) -> str:
    """The digest of `size` bytes (all, for None), which go to `copy` too. Raises OSError where they end too soon."""
    digest = hashlib.new(algorithm, usedforsecurity=False)
    left = size
    while left is None or left > 0:
        chunk = source.read(_CHUNK if left is None else min(_CHUNK, left))
        if not chunk:
            if left:
                raise OSError(5, "the archive ends in the middle of it")
            break
        digest.update(chunk)
        if copy is not None:
            copy.write(chunk)
        if left is not None:
            left -= len(chunk)
    return digest.hexdigest()


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
