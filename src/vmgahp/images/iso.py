"""Small ISO 9660 images of the job's files: a CD-ROM with the input of a guest.

They are written by pycdlib with Rock Ridge names for Linux and the BSDs and Joliet names for Windows. The same contents
under the same names always make the same bytes: a VM that is restarted from a checkpoint finds its drive unchanged.

The contents are not trusted. So they are read, and the image is written, by a separate process that has the job
user's rights, limits, and open descriptors instead of names. It takes on those rights after it has loaded its code:
the job's user need not be able to read this installation.
"""

from __future__ import annotations

import errno
import json
import os
import re
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any, BinaryIO

from vmgahp.errors import MachineFault
from vmgahp.host import job_user, packages
from vmgahp.host.job_user import Identity
from vmgahp.host.run import run
from vmgahp.host.system_calls import Opened, restrict, unnamed

Contents = Mapping[str, bytes | int]
"""The files by name in the image, with slashes for directories: bytes, or an open descriptor of a regular file."""

MOST_FILES = 500
"""The most files in an image: each is an open descriptor until it is written."""
DEEPEST = 7
"""The deepest path, the file itself included; ISO 9660 has eight levels, the root being one."""
LARGEST_FILE = 2**32 - 1
"""The most bytes of one file, by the field of a directory record."""
OVERHEAD = 16 << 20
"""The most bytes of an image besides its contents."""

MEMORY = 1 << 30
CPU_SECONDS = 600
"""The limits of the process that writes the image, in bytes and seconds."""
DEADLINE = 30.0
BYTES_A_SECOND = 10 << 20
"""The timeout of that process: the deadline in seconds, and the time that the contents take at this rate."""

WHEN = 946684800.0
"""The timestamp of everything in an image: the first second of 2000, UTC."""

_LABEL = re.compile(r"[A-Za-z0-9_]{1,16}", re.ASCII)
_NOT_JOLIET = re.compile(r'[\x00-\x1f*/:;?\\<>|"\ud800-\udfff\U00010000-\U0010ffff]')
_LONGEST_JOLIET = 64
"""The most bytes of a Joliet name, in UTF-8 as pycdlib counts them."""
_NO_ROOM, _CHANGED = 3, 4
"""The exit statuses of the process that writes the image, besides 0 and Python's own 1."""


class Unfit(Exception):
    """An error: the contents cannot become an image; the message gives the reason as a sentence without its end."""


def can_write() -> bool:
    """Return True if pycdlib, which writes the images, is installed."""
    from importlib.util import find_spec

    return find_spec("pycdlib") is not None


def write(
    directory: str,
    name: str,
    label: str,
    contents: Contents,
    identity: Identity,
    *,
    most_bytes: int,
    secret: bool = False,
) -> None:
    """Write the image `name` in the scratch `directory` as the job's user, all or nothing.

    `label` is the volume's name, of at most 16 letters, digits and underscores. The contents together may have
    `most_bytes`; descriptors stay the caller's and are read from their beginning. Only the job's user can read the
    image (mode 0600); in a `secret` one only the guest's root can read the files. Raises `Unfit` for contents that are
    too many, too large, have invalid names, or change meanwhile, and a job's or machine's fault if it fails.
    """
    if not _LABEL.fullmatch(label):
        raise ValueError(f"{label!r} is not a label of a volume")
    check_names(contents)
    if len(contents) > MOST_FILES:
        raise Unfit(f"these are {len(contents)} files, and an image takes {MOST_FILES}")
    try:
        with ExitStack() as opened:
            files = []
            for path, content in sorted(contents.items()):
                file = content if isinstance(content, int) else opened.enter_context(Opened(unnamed(content)))
                files.append((path, file, os.fstat(file).st_size))
            for path, _, size in files:
                if size > LARGEST_FILE:
                    raise Unfit(f"{path!a} has {size} bytes, and a file in an image at most {LARGEST_FILE}")
            if (total := sum(size for _, _, size in files)) > most_bytes:
                raise Unfit(f"together they have {total} bytes, and {most_bytes} is the most")
            identity.make_scratch(directory, name, lambda to: _write(to, label, files, identity, secret=secret))
    except OSError as error:
        raise job_user.unwritable(name, error, directory, identity) from error


def check_names(names: Iterable[str]) -> None:
    """Raise `Unfit` for names that cannot be in one image, such as a file and a directory of one name."""
    directories: set[str] = set()
    files = set(names)
    for name in files:
        parts = name.split("/")
        try:
            encoded = [part.encode() for part in parts]
        except UnicodeEncodeError:
            raise Unfit(f"{name!a} is not a name in UTF-8") from None
        if any(part in (b"", b".", b"..") or b"\0" in part for part in encoded):
            raise Unfit(f"{name!a} is not a plain relative name")
        if len(parts) > DEEPEST:
            raise Unfit(f"{name!a} lies deeper than {DEEPEST} levels")
        if any(len(part) > 200 for part in encoded):
            raise Unfit(f"{name[:50]!a}… has more than 200 bytes")
        directories.update("/".join(parts[:depth]) for depth in range(1, len(parts)))
    if both := sorted(directories & files):
        raise Unfit(f"{both[0]!a} is both a file and a directory")


def _write(output: int, label: str, files: list[tuple[str, int, int]], identity: Identity, *, secret: bool) -> None:
    total = sum(size for _, _, size in files)
    plan = {
        "output": output,
        "label": label,
        "files": files,
        "mode": 0o400 if secret else 0o444,
        "most": total + OVERHEAD,
        "user": identity.becoming(),
    }
    seconds = DEADLINE + total / BYTES_A_SECOND
    done = run(
        [sys.executable, "-I", "-m", "vmgahp.images.iso"],
        deadline=seconds,
        stdin=json.dumps(plan).encode(),
        environ={"PATH": os.defpath, "TZ": "UTC"},
        becomes=identity,
        pass_fds={output, *(descriptor for _, descriptor, _ in files)},
    )
    if done.status is None:
        raise OSError(errno.ETIMEDOUT, f"an image of {total} bytes was not written within {seconds:.0f} seconds")
    if done.status == 0:
        return
    words = done.complaints or ["it said nothing"]
    if done.status < 0:  # killed by its limits, or by another process of the job's user
        raise Unfit("the process that writes the image was killed")
    if done.status == _NO_ROOM and words[-1].isdigit():
        raise OSError(int(words[-1]), os.strerror(int(words[-1])))
    if done.status == _CHANGED:
        raise Unfit(words[-1])
    if words[-1].startswith("ModuleNotFoundError"):
        problem = "Images for guests cannot be written: pycdlib is not installed here."
        raise MachineFault(problem, f"{packages.of_python('pycdlib', '1.12')}.")
    raise MachineFault(f"An image cannot be written: {words[-1][:200]}.", "see whether a file of it has changed.")


# The process that writes


def _main() -> None:
    """Read the plan from standard input and carry it out; for an OSError print its errno to standard error."""
    plan = json.loads(sys.stdin.buffer.read())
    time.time = lambda: WHEN  # pycdlib's timestamps; this process does nothing else
    with open(os.memfd_create("rehearsal", os.MFD_CLOEXEC), "r+b") as nowhere, open(os.devnull, "rb") as nothing:
        # This loads all code: the job's user may not be allowed to read this installation.
        _image(nowhere, "rehearsal", [["a/b", nothing.fileno(), 0]], 0o444)
    restrict(plan["user"], memory=MEMORY, cpu_seconds=CPU_SECONDS, file_bytes=plan["most"])
    status = _CHANGED
    try:
        with open(plan["output"], "r+b") as output:
            _image(output, plan["label"], plan["files"], plan["mode"])
            os.fsync(output.fileno())
        status = 0
    except OSError as error:
        print(error.errno or errno.EIO, file=sys.stderr)  # noqa: T201 - to the process that started this one
        status = _NO_ROOM
    except Exception as unfit:  # noqa: BLE001 - due to the contents: the rehearsal has worked
        print(unfit or repr(unfit), file=sys.stderr)  # noqa: T201
    finally:
        os._exit(status)  # by no error of Python's, whatever limits the job's processes have set meanwhile


def _image(output: BinaryIO, label: str, files: list[list[Any]], mode: int) -> None:
    """Write the image, with names for directories and files that are valid in ISO 9660, Rock Ridge and Joliet."""
    import pycdlib

    image = pycdlib.PyCdlib()
    image.new(interchange_level=3, rock_ridge="1.09", joliet=3, vol_ident=label, app_ident_str="VMGAHP")
    isos, joliets = {"": ""}, {"": ""}
    taken: dict[str, set[str]] = {}
    for number, (path, descriptor, size) in enumerate(files):
        parts = path.split("/")
        for depth in range(1, len(parts)):
            above, here = "/".join(parts[: depth - 1]), "/".join(parts[:depth])
            if here in isos:
                continue
            isos[here] = f"{isos[above]}/D{len(isos):07d}"
            joliets[here] = f"{joliets[above]}/{_joliet(parts[depth - 1], taken.setdefault(above, set()))}"
            access = 0o040000 | mode | 0o111
            image.add_directory(isos[here], rr_name=parts[depth - 1], joliet_path=joliets[here], file_mode=access)
        above = "/".join(parts[:-1])
        image.add_fp(
            open(descriptor, "rb", closefd=False),  # noqa: SIM115 - read when the image is written
            size,
            iso_path=f"{isos[above]}/F{number:07d}.;1",
            rr_name=parts[-1],
            joliet_path=f"{joliets[above]}/{_joliet(parts[-1], taken.setdefault(above, set()))}",
            file_mode=0o100000 | mode,
        )
    image.write_fp(output)
    output.flush()
    if changed := [path for path, descriptor, size in files if os.fstat(descriptor).st_size != size]:
        raise Unfit(f"{changed[0]!a} has changed meanwhile")


def _joliet(name: str, taken: set[str]) -> str:
    """Return a valid Joliet name that is not taken; usually the name itself."""
    clean = _NOT_JOLIET.sub("_", name)
    number = 0
    found = clean.encode()[:_LONGEST_JOLIET].decode(errors="ignore")
    while found.lower() in taken:
        number += 1
        found = f"{clean.encode()[: _LONGEST_JOLIET - 4].decode(errors='ignore')}~{number}"
    taken.add(found.lower())
    return found


if __name__ == "__main__":
    _main()
