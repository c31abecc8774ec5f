"""What lies beneath a disk image: its backing files, found out as the job's user.

The header of an image is the job's to write, and it can name any file of the host as its backing file. To
leave it to libvirt, which looks as root, would let it give that file to QEMU. So ``qemu-img info`` looks
with the rights of the job's user and within limits, and the chain that it finds is written into the domain
XML, which keeps libvirt and QEMU from reading the header's own again.
"""

from typing import NamedTuple

from vmgahp import errors

TYPE_CHECKING = False
if TYPE_CHECKING:
    from vmgahp.identity import Identity

DEADLINE = 30.0
"""Seconds for ``qemu-img info``; a healthy image takes a hundredth of one."""

CPU_SECONDS, ADDRESS_SPACE = 10, 1 << 30
"""Limits of ``qemu-img info``, which a crafted header can make work hard (as OpenStack's nova has them)."""

PLAIN_FORMATS = ("raw",)
"""Formats without a header: nothing to look at."""


class Layer(NamedTuple):
    """One backing file."""

    path: str
    format: str


def backing_chain(path: str, image_format: str, identity: "Identity") -> tuple[Layer, ...]:
    """The backing files of an image, the nearest first.

    Raises `errors.JobFault` for an image that is not of its format, that is damaged, or whose layers the
    job's user may not read or leave it open what they are.
    """
    if image_format in PLAIN_FORMATS:
        return ()
    import json

    text = _info(path, image_format, identity)
    try:
        images = json.loads(text)
    except ValueError as error:
        raise errors.HypervisorFault(
            f"qemu-img said about {path} what is not JSON: {error}.", "see that qemu-img works."
        ) from error
    layers: list[Layer] = []
    for image in images:
        name = image.get("filename", path)
        if (image.get("format-specific") or {}).get("data", {}).get("data-file"):
            raise _bad(
                errors.INVALID_DISK_PARAM, f"{name} keeps its data in another file", "convert the image."
            )
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
        layers.append(Layer(backing, backing_format))
    return tuple(layers)


def _info(path: str, image_format: str, identity: "Identity") -> bytes:
    import subprocess

    # -U: a template that another VM has open for writing is still to be looked at.
    command = ["qemu-img", "info", "-U", "--output=json", "--backing-chain", "-f", image_format, path]
    try:
        ended = subprocess.run(
            ["prlimit", f"--cpu={CPU_SECONDS}", f"--as={ADDRESS_SPACE}", *command],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            cwd="/",
            timeout=DEADLINE,
            check=False,
            **identity.of_process(),
        )
    except FileNotFoundError as error:
        raise errors.MachineFault(
            f"{error.filename} is not installed, and {path} has to be looked at.",
            "install qemu-utils and util-linux.",
        ) from error
    except subprocess.TimeoutExpired as error:
        raise _bad(
            errors.BAD_IMAGE,
            f"{path} could not be read within {DEADLINE:g} s",
            "see that the file system answers.",
        ) from error
    if ended.returncode != 0:
        said = " ".join(ended.stderr.decode("utf-8", "replace").split()).removeprefix("qemu-img: ")
        unreadable = "Permission denied" in said or "No such file" in said
        word = errors.INVALID_DISK_PARAM if unreadable else errors.BAD_IMAGE
        raise _bad(
            word,
            f"{path} is no usable {image_format} image ({said})",
            "see what qemu-img info says about it.",
        )
    return bytes(ended.stdout)


def _bad(word: str, problem: str, cure: str) -> errors.JobFault:
    return errors.JobFault(word, f"VMPARAM_vm_Disk: {problem}.", cure)
