"""The kernel and the initrd that a job's XML boots from: copies of the files in its scratch directory.

libvirt gives both files to the hypervisor's user by changing their owner, as root and by their names. In a directory of
the job's a symbolic link could redirect that to any file; so libvirt gets copies in a directory of root's, which are
removed with the VM.
"""

import errno
import os
from collections.abc import Callable, Mapping
from typing import BinaryIO
from xml.etree import ElementTree as etree

from vmgahp import errors
from vmgahp.domain.job_xml.sanitize import refused
from vmgahp.errors import JobFault
from vmgahp.host import companion
from vmgahp.host.job_user import Identity
from vmgahp.text import shown

ELEMENTS = ("kernel", "initrd")

LARGEST = 256 << 20
"""The maximum number of bytes of both together; they lie in memory, in addition to the guest's own copy."""

_CHUNK = 1 << 20


def names(domain: etree.Element, name: str, directory: str, identity: Identity) -> dict[str, str]:
    """Return the names in the scratch directory by element, each checked to be a file that the job's user can read.

    Raises `JobFault`.
    """
    found = {}
    total = 0
    for tag in ELEMENTS:
        text = domain.findtext(f"os/{tag}")
        if text is None:
            continue
        base = os.path.basename(text)
        descriptor = _open(base, directory, identity, name)
        try:
            total += os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)
        found[tag] = base
    if total > LARGEST:
        raise refused(
            name, f"its kernel and initrd have {total >> 20} MiB, and {LARGEST >> 20} MiB can be booted from so"
        )
    return found


def copy(
    files: Mapping[str, str], directory: str, identity: Identity, make_room: Callable[[], str], name: str
) -> dict[str, str]:
    """Copy the files into a directory that `make_room` makes; return the paths by element. Raises `errors.Fault`."""
    room = make_room()
    left = LARGEST
    paths = {}
    try:
        for tag, base in files.items():
            paths[tag] = os.path.join(room, tag)
            with os.fdopen(_open(base, directory, identity, name), "rb") as read, open(paths[tag], "xb") as written:
                # libvirt gives it to the hypervisor's user; other users can read it if they could read the original.
                os.fchmod(written.fileno(), 0o400 | os.fstat(read.fileno()).st_mode & 0o044)
                while chunk := _read(read, min(_CHUNK, left + 1), base, name):
                    left -= len(chunk)
                    if left < 0:
                        raise refused(name, f"its kernel and initrd have more than {LARGEST >> 20} MiB")
                    written.write(chunk)
    except BaseException as error:
        remove(room)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM):
            raise refused(name, f"there is no room for its kernel and initrd: {error.strerror}") from error
        if isinstance(error, OSError):
            raise errors.MachineFault(f"The job's kernel cannot be copied to {room}: {error}.") from error
        raise
    return paths


def _open(base: str, directory: str, identity: Identity, name: str) -> int:
    try:
        return identity.open_scratch(directory, base, os.O_RDONLY)
    except OSError as error:
        raise _unusable(base, name, error) from error


def _read(file: BinaryIO, most: int, base: str, name: str) -> bytes:
    try:
        return file.read(most)
    except OSError as error:
        raise _unusable(base, name, error) from error


def _unusable(base: str, name: str, error: OSError) -> JobFault:
    return refused(
        name,
        f"/domain/os: {shown(base)} in the job's scratch directory cannot be opened or read: {error.strerror}",
        "add the file to transfer_input_files; it is a regular file, no link.",
    )


def remove(room: str) -> None:
    """Remove the directory of the copies. Raises nothing."""
    companion.clear(room, (os.path.join(room, tag) for tag in ELEMENTS))
