"""The backing files of a disk image, read from its header as the job's user.

The job can write the header of an image, and name any file of the host as its backing file. libvirt, which
reads it as root, would give that file to QEMU. So ``qemu-img info`` reads it with the rights of the job's user
and within limits, and the chain that it finds is written into the domain XML, so that libvirt and QEMU do not
take the one in the header.
"""

from math import inf
from time import monotonic

from vmgahp import errors
from vmgahp.host.job_user import Identity
from vmgahp.host.light import NamedTuple
from vmgahp.images.formats import FORMATS, HEADER, looks_like, unfit
from vmgahp.text import has_control, not_for_xml, shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

PLAIN_FORMATS = ("raw",)
"""The formats without a header to look at."""

MOST_LAYERS = 64
"""The most backing files of one image; QEMU has each of them open, and libvirt describes none deeper than 200."""


class BackingFile(NamedTuple):
    """One backing file."""

    path: str
    format: str
    known_as: str = ""
    """The name of it in a checkpoint, if that is not its path: for an image of the administrator's catalog."""


def backing_chain(
    path: str, image_format: str, identity: Identity, *, parts: bool = False, end: float = inf
) -> tuple[BackingFile, ...]:
    """Return the backing files of an image, the nearest first.

    Each name is checked before it is used, for it could be that of a server or a device. With `parts` the data of the
    image may be in further files, which the caller has checked; `end` is the deadline by the monotonic clock.

    Raises `errors.JobFault` for an image that is not of its format, that is damaged, or whose backing files
    have no stated format or are not readable for the job's user.
    """
    if image_format in PLAIN_FORMATS:
        return ()
    from vmgahp.images import qemu_img  # most jobs do not need it

    found: list[BackingFile] = []
    end = min(end, monotonic() + qemu_img.LOOK)
    while image_format not in PLAIN_FORMATS:
        image = _look(path, image_format, identity, end, parts=parts and not found)
        below = _backing_file(path, image)
        if below is None:
            break
        found.append(below)
        if len(found) > MOST_LAYERS:
            raise _bad(
                errors.INVALID_DISK_PARAM,
                f"{found[0].path} and what is below it are more than {MOST_LAYERS} backing files, or a circle of them",
                "write them into one image: qemu-img convert.",
            )
        path, image_format = below.path, below.format
    if found:
        _header(path, identity)  # check that the last one, which is not examined, can be read
    return tuple(found)


def _backing_file(path: str, image: "dict[str, Any]") -> BackingFile | None:
    """Return the backing file that an image names, or None."""
    name = image.get("full-backing-filename") or image.get("backing-filename")
    if not name:
        return None
    if not name.startswith("/") or has_control(name) or not_for_xml(name):
        raise _bad(
            errors.INVALID_DISK_PARAM,
            f"the backing file of {path} is {shown(name)}, which is no file of this machine, or cannot be named",
            "use images whose backing files are plain files, with names that can be printed.",
        )
    image_format = image.get("backing-filename-format") or ""
    if image_format not in FORMATS.values():
        of = f"{shown(image_format)} as the format of" if image_format else "no format of"
        raise _bad(
            errors.INVALID_DISK_PARAM,
            f"{path} names {of} its backing file {name}, and vm_disk's formats are {', '.join(FORMATS)}",
            f"write it into the image: qemu-img rebase -u -b {name} -F FORMAT {path}",
        )
    return BackingFile(name, image_format)


def require_whole(path: str, image_format: str, identity: Identity) -> None:
    """Check an image whose backing files are known, without following those that its header names.

    Raises `errors.JobFault` if it is not of its format, or keeps its data in another file.
    """
    from vmgahp.images import qemu_img

    _look(path, image_format, identity, monotonic() + qemu_img.LOOK)


def _look(path: str, image_format: str, identity: Identity, end: float, *, parts: bool = False) -> "dict[str, Any]":
    header = _header(path, identity)
    if not parts and (reason := unfit(image_format, header)):
        if looks_like(header) == image_format:
            raise _unfit(path, image_format, reason)
        raise _unusable(path, image_format, "it does not begin like one")
    return _info(path, image_format, identity, end - monotonic())


def _header(path: str, identity: Identity) -> bytes:
    try:
        return identity.read_named(path, HEADER)
    except OSError as error:
        raise _bad(
            errors.INVALID_DISK_PARAM,
            f"{path} cannot be opened ({error.strerror}, for uid {identity.uid})",
            "use images whose backing files the job's user can read on this machine.",
        ) from error


def _unfit(path: str, image_format: str, reason: str) -> errors.JobFault:
    hint = f"write it anew: qemu-img convert -f {image_format} -O qcow2 {path} NEW"
    return _bad(errors.INVALID_DISK_PARAM, f"{path} {reason}", hint)


def _unusable(path: str, image_format: str, why: object, *, no_access: bool = False) -> errors.JobFault:
    word = errors.INVALID_DISK_PARAM if no_access else errors.BAD_IMAGE
    return _bad(word, f"{path} is not a usable {image_format} image ({why})", "see what qemu-img info says about it.")


def _info(path: str, image_format: str, identity: Identity, seconds: float) -> "dict[str, Any]":
    from vmgahp.images import qemu_img

    try:
        if seconds <= 0:
            raise qemu_img.TooSlow(0)
        return qemu_img.info(path, image_format, identity, seconds=seconds)
    except qemu_img.NotInstalled as error:
        raise errors.MachineFault(
            f"{error.program} is not installed, and {path} has to be looked at.", "install qemu-utils and util-linux."
        ) from error
    except qemu_img.TooSlow as error:
        raise _bad(
            errors.BAD_IMAGE,
            f"{path} could not be read within {error.seconds:g} s"
            if error.seconds
            else f"there is no time left for {path}",
            "see that the file system answers, and use fewer images.",
        ) from error
    except qemu_img.Refused as error:
        raise _unusable(path, image_format, error, no_access=error.no_access) from error
    except qemu_img.CannotRun as error:
        raise errors.HypervisorFault(f"{path}: {error}.", "see that qemu-img works.") from error
    except qemu_img.Trouble as error:
        raise _bad(
            errors.BAD_IMAGE, f"{path} cannot be looked at ({error})", "see what qemu-img info says about it."
        ) from error


def _bad(word: str, problem: str, hint: str) -> errors.JobFault:
    return errors.JobFault(word, f"{problem}.", hint, "VMPARAM_vm_Disk")
