"""Fetching an image from a file, a URL or a release's URL, and verification by digest or signature."""

import base64
import binascii
import errno
import hashlib
import http.client
import os
import re
import tempfile
import tomllib
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedIOBase, BufferedReader
from time import monotonic
from typing import IO, NamedTuple
from urllib.parse import urljoin, urlsplit

from vmgahp.commands.arguments import NotDone
from vmgahp.commands.files import open_regular
from vmgahp.commands.page import size as in_words
from vmgahp.host import packages
from vmgahp.host.job_user import Identity
from vmgahp.host.run import run
from vmgahp.host.trust import changeable_by_others, require_trustworthy
from vmgahp.images.catalog import tables
from vmgahp.job.engine import NOBODY

PATIENCE = 60.0
"""The timeout in seconds without receiving a byte."""
LONGEST = 6 * 3600.0
"""The deadline in seconds for the whole download."""
SMALL = 16 << 20
"""The maximum number of bytes of a list of checksums, a signature, a key."""

_RESERVE = 256 << 20
"""The bytes of the file system that are kept free."""
_LENGTHS = {"sha256": 64, "sha512": 128}


class Voucher(NamedTuple):
    """The digest and signature with which an image must agree; all that are given are checked."""

    algorithm: str = ""
    """The name ``sha256`` or ``sha512``; empty if no digest is given."""
    digest: str = ""
    signature: str = ""
    """The file or URL of a detached signature of the image itself."""
    key: str = ""
    """A file with the keys that may have made the signature."""


def is_url(source: str) -> bool:
    """Return True if the source must be downloaded; anything else is a file's name."""
    return source.startswith(("http://", "https://"))


def small(source: str) -> bytes:
    """Read a small file, or a URL. Raises `NotDone`."""
    content = bytearray()
    with _opened(source) as (file, _):
        _copied(file, source, content.extend, SMALL)
    return bytes(content)


def bring(source: str, to: IO[bytes], proof: Voucher, say: Callable[[str], None]) -> dict[str, str]:
    """Copy the source into an empty file, verify it, and return its digests. Raises `NotDone`.

    The digests cover everything; blocks of zeros become holes in the file.
    """
    sums = {"sha256": hashlib.sha256(), "sha512": hashlib.sha512()}
    with _opened(source) as (file, length):
        room = os.fstatvfs(to.fileno())
        free = max(0, room.f_bavail * room.f_frsize - _RESERVE)
        if length > free and is_url(source):
            raise NotDone(f"{source} has {in_words(length)}, and there are {in_words(free)} free here.")

        def keep(chunk: bytes) -> None:
            for each in sums.values():
                each.update(chunk)
            if chunk.count(0) == len(chunk):
                to.seek(len(chunk), os.SEEK_CUR)
            else:
                to.write(chunk)

        say(f"reading {source}{f' ({in_words(length)})' if length >= 0 else ''}")
        came = _copied(file, source, keep, free if is_url(source) else -1)
        if 0 <= length != came:
            raise NotDone(f"{source} was cut off after {in_words(came)} of {in_words(length)}; try it again.")
        to.truncate()
        to.flush()
    found = {name: each.hexdigest() for name, each in sums.items()}
    if proof.algorithm and found[proof.algorithm] != proof.digest:
        raise NotDone(
            f"{source} is not what it should be: its {proof.algorithm} is {found[proof.algorithm]}, not {proof.digest}."
        )
    if proof.signature:
        require_signature(to.name, small(proof.signature), proof.key)
    return found


def _copied(file: BufferedIOBase, source: str, keep: Callable[[bytes], object], most: int) -> int:
    came = 0
    end = monotonic() + LONGEST
    try:
        while chunk := file.read1(1 << 20):  # with what has come, for the clock is looked at between
            came += len(chunk)
            if 0 <= most < came:
                raise NotDone(f"{source} has more than {in_words(most)}.")
            if monotonic() > end:
                raise NotDone(f"{source} was not here after {LONGEST / 3600:g} h.")
            keep(chunk)
    except http.client.HTTPException as error:
        raise NotDone(f"{source} was cut off after {in_words(came)} ({error!r}); try it again.") from error
    return came


@contextmanager
def _opened(source: str) -> Iterator[tuple[BufferedIOBase, int]]:
    """Open a source, and yield it with its length; -1 if that is unknown. Raises `NotDone`, also for later errors."""
    try:
        if not is_url(source):
            with open_local(os.path.abspath(source)) as file:
                yield file, os.fstat(file.fileno()).st_size
            return
        opener = urllib.request.build_opener(_Redirects)
        with opener.open(urllib.request.Request(source), timeout=PATIENCE) as response:  # noqa: S310 - is_url
            length = response.headers.get("Content-Length", "")
            yield response, int(length) if length.isascii() and length.isdigit() else -1
    except urllib.error.HTTPError as error:
        raise NotDone(f"{source}: the server says {error.code} {error.reason}.") from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        why = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):  # reading never fails so
            raise NotDone(f"there is no room for a copy of {source}: {why}; free some beside the catalog.") from error
        raise NotDone(f"{source}: {why}.") from error


def open_local(path: str) -> BufferedReader:
    """Open a file, with the rights of another user who can change what leads to it. Raises `NotDone` and OSError.

    A link of that user's may lead to what only root may read, and everybody can read the copy.
    """
    part = changeable_by_others(path) if os.geteuid() == 0 else ""
    if not part or (part == path and os.lstat(path).st_uid == 0):
        return open_regular(path)
    there = os.lstat(part)
    user = Identity(there.st_uid, there.st_gid) if there.st_uid else Identity(NOBODY, NOBODY)
    try:
        return open(user.open_named(path, os.O_RDONLY), "rb")
    except OSError as error:
        raise NotDone(
            f"{path} is reached by {part}, which other users can change, and uid {user.uid} cannot read it "
            f"({error.strerror}): move it to a directory that only root can write to."
        ) from error


class _Redirects(urllib.request.HTTPRedirectHandler):
    """A handler that follows redirects only to http and https, and from https only to https."""

    def redirect_request(self, req, fp, code, msg, headers, newurl):  # type: ignore[no-untyped-def]
        new = urljoin(req.full_url, newurl)
        if not is_url(new) or (req.full_url.startswith("https:") and not new.startswith("https:")):
            raise NotDone(f"{req.full_url} leads to {new}, where nothing is fetched from.")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def require_signature(signed: bytes | str, signature: bytes, key: str) -> None:
    """Verify that a key in a file has signed some bytes, or a file. Raises `NotDone`."""
    if is_url(key):
        raise NotDone(f"the key {key} comes from where the image could, and vouches for nothing: name a file.")
    try:
        with tempfile.TemporaryDirectory(prefix="vmgahp-image-") as directory:
            names = {"keys": _plain(small(key)), "signature": signature}
            if isinstance(signed, bytes):
                names["signed"] = signed
            for name, data in names.items():
                with open(os.path.join(directory, name), "xb") as file:
                    file.write(data)
            what = signed if isinstance(signed, str) else "./signed"
            words = ["gpgv", "--homedir", directory, "--keyring", "./keys", "./signature", what]
            done = run(words, deadline=PATIENCE if isinstance(signed, bytes) else LONGEST, directory=directory)
    except FileNotFoundError as error:
        raise NotDone(f"{error.filename} is not installed: {packages.of_system('gpgv', 'gnupg2')}") from error
    except OSError as error:
        raise NotDone(f"the signature cannot be looked at ({error.strerror}).") from error
    if done.status != 0:
        raise NotDone(f"the signature is not good: {' / '.join(done.complaints[-6:]) or 'gpgv had not ended in time'}")


def _plain(key: bytes) -> bytes:
    """Convert keys for gpgv: with ``-----BEGIN`` they are in base64, with a checksum of their own at the end."""
    if not key.lstrip().startswith(b"-----BEGIN PGP"):
        return key
    plain = b""
    armored = rb"-----BEGIN PGP [^\n]*\n(?:[^\n]+\n)*\n(.*?)-----END PGP"
    for body in re.findall(armored, key.replace(b"\r", b""), re.DOTALL):
        with suppress(binascii.Error):
            plain += base64.b64decode(b"".join(line for line in body.split() if not line.startswith(b"=")))
    return plain


RELEASES = "cloud-images.toml"
"""The name of the table beside this module, and of the administrator's beside the catalog."""


class Release(NamedTuple):
    """A cloud image that is known by its name."""

    image: str
    """The URL of the image."""
    sums: str
    """The URL of a list of checksums."""
    algorithm: str
    format: str
    signature: str = ""
    """The URL of a signature of that list."""
    key: str = ""
    """The file with the keys that may have made the signature."""
    description: str = ""
    min_memory: int = 0
    """The least memory of a guest, in MiB."""

    def voucher(self) -> Voucher:
        """Find the digest of the image in the list of checksums. Raises `NotDone`."""
        data = small(self.sums)
        if self.signature:
            require_signature(data, small(self.signature), self.key)
        elif self.sums.startswith("http:"):
            raise NotDone(f"{self.sums} has no signature, and could be anybody's: it has to come by https.")
        base_name = os.path.basename(urlsplit(self.image).path)
        name, digits = re.escape(base_name), f"([0-9a-fA-F]{{{_LENGTHS[self.algorithm]}}})"
        # As written by sha256sum, without and with --tag.
        lines = rf"^(?:{digits} [ *](?:\./)?{name}|{self.algorithm.upper()} ?\({name}\) ?= {digits})\s*$"
        found = {first or second for first, second in re.findall(lines, data.decode("utf-8", "replace"), re.MULTILINE)}
        if len(found) != 1:
            raise NotDone(f"{self.sums} has {len(found) or 'no'} {self.algorithm} of {base_name}.")
        return Voucher(self.algorithm, str(found.pop()).lower())


def known_releases(directory: str) -> dict[str, Release]:
    """Return all releases; the administrator's own table overrides ours. Raises `NotDone`, `errors.MachineFault`."""
    found: dict[str, Release] = {}
    own = os.path.join(directory, RELEASES)
    places = [os.path.join(os.path.dirname(__file__), RELEASES)]
    if os.path.lexists(own):
        require_trustworthy(own, RELEASES, "remove it", executable=False)
        places.append(own)
    for place in places:
        try:
            with open(place, "rb") as file:
                found |= {name: _release(place, name, table) for name, table in tables(tomllib.load(file))}
        except (OSError, ValueError, RecursionError) as error:
            raise NotDone(f"{place} is no table of cloud images: {error}.") from error
    return found


def _release(place: str, name: str, table: dict[str, object]) -> Release:
    kinds = {key: int if key == "min_memory" else str for key in Release._fields}
    needed, empty = Release._fields[:4], [key for key in Release._fields[:4] if not table.get(key)]
    wrong = [key for key, value in table.items() if type(value) is not kinds.get(key)] + empty
    if wrong or table["algorithm"] not in _LENGTHS:
        takes = f"It takes {', '.join(kinds)}, and needs {', '.join(needed)}; the algorithm is sha256 or sha512."
        raise NotDone(f"{place}: [{name}]: {(wrong or ['algorithm'])[0]} is wrong. {takes}")
    return Release(**table)  # type: ignore[arg-type]
