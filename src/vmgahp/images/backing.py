"""The backing files of a disk image, found out as the job's user.

The header of an image is the job's to write, and it can name any file of the host as its backing file. To
leave it to libvirt, which looks as root, would let it give that file to QEMU. So ``qemu-img info`` looks
with the rights of the job's user and within limits, and the chain that it finds is written into the domain
XML, which keeps libvirt and QEMU from reading the header's own again.
"""

from typing import Any, NamedTuple

from vmgahp import errors
from vmgahp.host.job_user import Identity

PLAIN_FORMATS = ("raw",)
"""Formats without a header: nothing to look at."""


class BackingFile(NamedTuple):
    """One backing file."""

    path: str
    format: str
    known_as: str = ""
    """What a checkpoint calls it, where that is not its path: an image of the administrator's catalog."""


def backing_chain(path: str, image_format: str, identity: Identity) -> tuple[BackingFile, ...]:
    """The backing files of an image, the nearest first.

    Raises `errors.JobFault` for an image that is not of its format, that is damaged, or whose backing files
    the job's user may not read or have no stated format.
    """
    if image_format in PLAIN_FORMATS:
        return ()
    found: list[BackingFile] = []
    for image in _info(path, image_format, identity):
        name = image.get("filename", path)
        _require_own_data(name, image)
        if "full-backing-filename" not in image and "backing-filename" not in image:
            continue
        backing = image.get("full-backing-filename") or image["backing-filename"]
        if not backing.startswith("/"):
            raise _bad(
                errors.INVALID_DISK_PARAM,
                f"the backing file of {name} is {backing!r}, which is not a file of this machine",
                "use images whose backing files are plain files.",
            )
        backing_format = image.get("backing-filename-format")
        if backing_format is None:
            raise _bad(
                errors.INVALID_DISK_PARAM,
                f"{name} does not say what format its backing file {backing} has",
                f"write it into the image: qemu-img rebase -u -b {backing} -F FORMAT {name}",
            )
        found.append(BackingFile(backing, backing_format))
    return tuple(found)


def require_whole(path: str, image_format: str, identity: Identity) -> None:
    """Look at an image whose backing files are known: those that its header names are not followed.

    Raises `errors.JobFault` for one that is not of its format, or keeps its data in another file.
    """
    for image in _info(path, image_format, identity, chain=False):
        _require_own_data(path, image)


def _require_own_data(name: str, image: dict[str, Any]) -> None:
    if (image.get("format-specific") or {}).get("data", {}).get("data-file"):
        raise _bad(errors.INVALID_DISK_PARAM, f"{name} keeps its data in another file", "convert the image.")


def _info(path: str, image_format: str, identity: "Identity", *, chain: bool = True) -> list[dict[str, Any]]:
    from vmgahp.images import qemu_img

    try:
        return qemu_img.info(path, image_format, identity, chain=chain)
    except qemu_img.NotInstalled as error:
        raise errors.MachineFault(
            f"{error.program} is not installed, and {path} has to be looked at.", "install qemu-utils and util-linux."
        ) from error
    except qemu_img.TooSlow as error:
        raise _bad(
            errors.BAD_IMAGE,
            f"{path} could not be read within {error.seconds:g} s",
            "see that the file system answers.",
        ) from error
    except qemu_img.Refused as error:
        word = errors.INVALID_DISK_PARAM if error.no_access else errors.BAD_IMAGE
        raise _bad(
            word, f"{path} is not a usable {image_format} image ({error})", "see what qemu-img info says about it."
        ) from error
    except qemu_img.Trouble as error:
        raise errors.HypervisorFault(f"{path}: {error}.", "see that qemu-img works.") from error


def _bad(word: str, problem: str, hint: str) -> errors.JobFault:
    return errors.JobFault(word, f"{problem}.", hint, "VMPARAM_vm_Disk")
