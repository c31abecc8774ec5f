"""``vmgahp image``: the administrator's images, from import to removal.

`store` keeps those of the catalog, `fetch` brings them here, and `build` makes one from Debian's packages.
docs/how-to/images.md is for administrators. Everything runs with the rights of the caller.
"""

import argparse
import os
import re
import sys
from collections.abc import Callable

from vmgahp.commands.arguments import FINDINGS, UsageError, add_json, add_type, cpus, memory, tell, whole
from vmgahp.job.run import BOOTS
from vmgahp.text import escape

SUITES = {"debian-12": "bookworm", "debian-13": "trixie"}
"""The releases of which an image can be built."""
LEAST, MOST = 2 << 30, 1 << 44
"""The limits for the size of the disk of an image, in bytes."""

_LISTED = {
    "catalog": "its file",
    "images[].name": "what jobs say behind catalog:",
    "images[].path": "the image",
    "images[].format": "its format, iso for a CD",
    "images[].description": "for people",
    "images[].min_memory": "MiB that a job with it must have at least, 0 for any",
    "images[].bytes": "that it occupies on its disk",
    "images[].wrong": "why no job can have it; missing where one can",
    "images[].source": "where vmgahp image add found it; this and those below are missing where nobody wrote them down",
    "images[].added": "when it came",
    "images[].sha256": "its digest then",
    "images[].sha512": "the same, where that was asked for",
}


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Keep the images of this machine that jobs name as catalog:NAME (VM_CATALOG). None is ever changed in place: jobs
    have overlays of them."""
    actions = command.add_subparsers(title="what to do", dest="action", metavar="ACTION", required=True)

    def action(word: str, text: str, description: str, *examples: tuple[str, str]) -> argparse.ArgumentParser:
        made = actions.add_parser(word, help=text, description=description)
        tell(made, examples=examples)
        return made

    made = action(
        "add",
        "bring an image into the catalog",
        "Copy or fetch an image to a place beside the catalog, make sure of it, and write it into the "
        "catalog, with its digests and where it came from. What is fetched needs a checksum or a signature.",
        ("vmgahp image add debian-12 debian-12", "Debian's image for clouds, checked by Debian's own list"),
        ("vmgahp image add tools ./tools.qcow2", "an image of your own"),
    )
    add = made.add_argument
    add("name", metavar="NAME", help="what jobs say: catalog:NAME")
    add("source", metavar="SOURCE", help="a file, a URL (http, https), or a release such as debian-12")
    either = made.add_mutually_exclusive_group()
    for name, digits in (("sha256", 64), ("sha512", 128)):
        digest = _form(f"[0-9a-fA-F]{{{digits}}}", f"{name}: that has {digits} hexadecimal digits")
        either.add_argument(f"--{name}", type=digest, metavar="DIGEST", help="what it must have")
    add("--signature", default="", metavar="FILE", help="of the image, a file or URL, for gpgv")
    add("--key", default="", metavar="FILE", help="the keys that may have made the signature")
    add("--format", default="", help="where name and content do not say it")
    described = _form(r"[^\ud800-\udfff]{0,800}", "text of 800 characters at most")
    add("--description", type=described, default="", metavar="TEXT", help="for those who look at the catalog")
    add("--min-memory", type=memory, default=0, metavar="MIB", help="what a job with it must have at least")
    made = action("list", "show what is in the catalog", "Show what is in the catalog.")
    add_json(made)
    tell(made, keys=_LISTED)
    made = action(
        "check",
        "see whether images are what they were when they came",
        "Compare images with the digests in the catalog, look at their owners and modes and at their "
        "backing files, and have qemu-img check them.",
    )
    made.add_argument("names", nargs="*", metavar="NAME", help="these only")
    add_json(made)
    statuses = {0: "All are as they were.", 1: "One is not, or it cannot be told."}
    tell(made, statuses=statuses, keys={"catalog": "its file", **FINDINGS})
    action(
        "update",
        "bring the newest version of a release, under a new name",
        "Fetch the newest version of a cloud image, and put it into the catalog beside the one that there "
        "is, under its name with the date.",
        ("vmgahp image update debian-12", "debian-12-DATE comes beside debian-12"),
    ).add_argument("name", metavar="NAME", help="the image that there is")
    action(
        "remove",
        "take an image out of the catalog that nothing uses",
        "Take an image out of the catalog, and remove its file where it lies beside the catalog. An image "
        "that a VM, an overlay or another image on this machine uses stays.",
        ("vmgahp image remove debian-12", "jobs that name it are held from then on"),
    ).add_argument("name", metavar="NAME", help="the image")
    made = action(
        "warm",
        "boot a guest from which jobs go on, and need no boot",
        "Boot a guest of an image that waits for a job, and keep its memory (VM_WARM_DIR). A job of vmgahp run with "
        "the same image, memory and CPUs, and with no user data of its own, goes on from it within seconds, with "
        "random numbers, a name and network cards of its own. Make it anew after an upgrade of QEMU or of vmgahp.",
        ("vmgahp image warm debian-12 --memory 2048 --cpus 2", "for jobs of that size"),
    )
    add = made.add_argument
    add("name", metavar="NAME", help="the image")
    add("--memory", type=memory, default=1024, metavar="MIB", help="of the jobs (default: 1024, as of vmgahp run)")
    add("--cpus", type=cpus, default=1, metavar="N", help="of the jobs (default: 1)")
    add_type(made, text="of the jobs (default: kvm)")
    add("--boot", choices=BOOTS, default=BOOTS[0], help="of the jobs (default: cloud-init)")
    seconds = whole(86400, "not a valid number of seconds. Give one")
    add("--timeout", type=seconds, default=600, metavar="SECONDS", help="for the guest to boot (default: 600)")
    add = action(
        "build",
        "make an image with cloud-init, of Debian's packages",
        "Make a qcow2 image of Debian with cloud-init, which boots by BIOS and by UEFI, of a mirror's "
        "packages. It has no password, no machine id and no host keys. No root is needed where users may have "
        "namespaces (uidmap, and a line of /etc/subuid).",
        ("vmgahp image build debian-12 --packages python3-numpy", "debian-12.qcow2, here"),
    ).add_argument
    add("name", metavar="NAME", choices=tuple(SUITES), help="debian-12 or debian-13")
    add("-o", "--output", default="", metavar="FILE", help="the image (default: NAME.qcow2, here)")
    mirror = _form(r"(https?|file|copy)://?\S+", "URL; http://mirror.example.org/debian is one")
    add("--mirror", type=mirror, metavar="URL", help="the archive of the packages (default: Debian's own)")
    add("--size", type=_size, default="3G", help="of the disk as the guest sees it (default: 3G)")
    add("--packages", type=_packages, default=[], metavar="A,B", help="Debian packages more")
    text = "put a file into the image, with its mode"
    add("--copy", type=_copy, action="append", default=[], metavar="FILE:PATH", help=text)
    text = "run it by the image's shell, as root, at last"
    add("--run", dest="commands", action="append", default=[], metavar="COMMAND", help=text)
    add("--force", action="store_true", help="replace an image that is there")
    command.set_defaults(run=run)


def _form(pattern: str, what: str) -> Callable[[str], str]:
    """Make a parser of words of one form."""

    def parse(text: str) -> str:
        if not re.fullmatch(pattern, text, re.ASCII):
            raise UsageError(f"{text} is no {what}")
        return text

    return parse


def _packages(text: str) -> list[str]:
    name = _form("[a-z0-9][a-z0-9+.-]*", "name of a Debian package")
    return [name(word) for word in text.replace(",", " ").split()]


def _size(text: str) -> int:
    found = re.fullmatch(r"([0-9]{1,6})([MGT])", text.upper(), re.ASCII)
    size = int(found[1]) << {"M": 20, "G": 30, "T": 40}[found[2]] if found else 0
    if not LEAST <= size <= MOST:
        raise UsageError(f"{text} is no size from {LEAST >> 30}G to {MOST >> 40}T; 3G is one")
    return size


def _copy(text: str) -> tuple[str, str]:
    source, _, path = text.rpartition(":")
    if not source or not path.startswith("/") or ".." in path.split("/") or path.endswith("/"):
        raise UsageError(f"{text} is not FILE:PATH, where PATH is a file in the image, from / on")
    if not os.path.isfile(source):
        raise UsageError(f"{source} is not a file")
    return source, os.path.normpath(path).lstrip("/")


def run(options: argparse.Namespace) -> int:
    """Execute the command and return the exit status."""
    from vmgahp.commands.image import build, store, warm

    done: dict[str, Callable[[argparse.Namespace], int | None]]
    done = {"build": build.build, "add": store.add, "list": store.show, "check": store.check}
    done |= {"update": store.update, "remove": store.remove, "warm": warm.make}
    return done[options.action](options) or 0


def say(text: str) -> None:
    """Print a line about the progress."""
    sys.stderr.write(escape(text) + "\n")
