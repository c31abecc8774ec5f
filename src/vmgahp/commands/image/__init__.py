"""``vmgahp image``: the administrator's images, from import to removal.

`store` adds, updates and removes those of the catalog, `listing` shows and checks them, and `build` makes one from
Debian's packages. docs/how-to/images.md is for administrators. Everything runs with the rights of the caller.
"""

import argparse
import os
import signal
import sys
from types import FrameType

from vmgahp import errors
from vmgahp.commands.arguments import FINDINGS, add_json, tell
from vmgahp.text import escape

GOOD, WRONG = 0, 1
"""The exit statuses."""


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


class NotDone(Exception):
    """A request that was not carried out; the text says why, and what to do."""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of ``vmgahp image``."""
    command.description = (
        "Keep the images of this machine that jobs name as catalog:NAME (VM_CATALOG). None is ever changed in place: "
        "jobs have overlays of them."
    )
    actions = command.add_subparsers(title="what to do", dest="action", metavar="ACTION", required=True)
    _keep(actions)
    build = actions.add_parser(
        "build",
        help="make an image with cloud-init, of Debian's packages",
        description="Make a qcow2 image of Debian with cloud-init, which boots by BIOS and by UEFI, of a mirror's "
        "packages. It has no password, no machine id and no host keys. No root is needed where users may have "
        "namespaces (uidmap, and a line of /etc/subuid).",
    )
    build.add_argument("name", metavar="NAME", help="debian-12 or debian-13; any other name together with --suite")
    build.add_argument("-o", "--output", default="", metavar="FILE", help="the image (default: NAME.qcow2, here)")
    build.add_argument("--suite", default="", help="Debian's name of the release, such as bookworm")
    build.add_argument(
        "--mirror", default="", metavar="URL", help="the archive of the packages (default: Debian's own)"
    )
    build.add_argument("--size", default="3G", metavar="SIZE", help="of the disk as the guest sees it (default: 3G)")
    build.add_argument("--packages", default="", metavar="A,B", help="Debian packages more")
    build.add_argument(
        "--copy", action="append", default=[], metavar="FILE:PATH", help="put a file into the image, with its mode"
    )
    build.add_argument(
        "--run",
        dest="commands",
        action="append",
        default=[],
        metavar="COMMAND",
        help="run it by the image's shell, as root, at last",
    )
    build.add_argument("--force", action="store_true", help="replace an image that is there")
    tell(build, examples=[("vmgahp image build debian-12 --packages python3-numpy", "debian-12.qcow2, here")])
    command.set_defaults(run=run)


def _keep(actions: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    add = actions.add_parser(
        "add",
        help="bring an image into the catalog",
        description="Copy or fetch an image to a place beside the catalog, make sure of it, and write it into the "
        "catalog, with its digests and where it came from. What is fetched needs a checksum or a signature.",
    )
    add.add_argument("name", metavar="NAME", help="what jobs say: catalog:NAME")
    add.add_argument(
        "source", metavar="SOURCE", help="a file, a URL (file, http, https), or a release such as debian-12"
    )
    for option in ("--sha256", "--sha512"):
        add.add_argument(option, default="", metavar="DIGEST", help="what it must have")
    add.add_argument("--signature", default="", metavar="FILE", help="of the image, a file or URL, for gpgv")
    add.add_argument("--key", default="", metavar="FILE", help="the keys that may have made the signature")
    add.add_argument("--format", default="", help="where name and content do not say it")
    add.add_argument("--description", default="", metavar="TEXT", help="for those who look at the catalog")
    add.add_argument("--min-memory", type=int, default=0, metavar="MIB", help="what a job with it must have at least")
    tell(
        add,
        examples=[
            ("vmgahp image add debian-12 debian-12", "Debian's image for clouds, checked by Debian's own list"),
            ("vmgahp image add tools ./tools.qcow2", "an image of your own"),
        ],
    )
    show = actions.add_parser("list", help="show what is in the catalog", description="Show what is in the catalog.")
    add_json(show)
    tell(show, keys=_LISTED)
    check = actions.add_parser(
        "check",
        help="see whether images are what they were when they came",
        description="Compare images with the digests in the catalog, look at their owners and modes and at their "
        "backing files, and have qemu-img check them.",
    )
    check.add_argument("names", nargs="*", metavar="NAME", help="these only")
    add_json(check)
    tell(
        check,
        statuses={0: "All are as they were.", 1: "One is not, or it cannot be told."},
        keys={"catalog": "its file", **FINDINGS},
    )
    update = actions.add_parser(
        "update",
        help="bring the newest version of a release, under a new name",
        description="Fetch the newest version of a cloud image, and put it into the catalog beside the one that there "
        "is, under its name with the date.",
    )
    update.add_argument("name", metavar="NAME", help="the image that there is")
    update.add_argument(
        "--source", default="", metavar="RELEASE", help="default: by the name, or by where it came from"
    )
    remove = actions.add_parser(
        "remove",
        help="take an image out of the catalog that nothing uses",
        description="Take an image out of the catalog, and remove its file where it lies beside the catalog. An image "
        "that a VM, an overlay or another image on this machine uses stays.",
    )
    remove.add_argument("name", metavar="NAME", help="the image")
    tell(update, examples=[("vmgahp image update debian-12", "debian-12-DATE comes beside debian-12")])
    tell(remove, examples=[("vmgahp image remove debian-12", "jobs that name it are held from then on")])


def run(options: argparse.Namespace) -> int:
    """Execute the command and return the exit status."""
    from vmgahp.commands.image import build, store

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupted)
    environ = dict(os.environ)
    try:
        if options.action == "build":
            build.build(build.recipe(options), say)
        elif options.action == "list":
            store.show(options, environ)
        elif options.action == "check":
            return GOOD if store.check(options, environ) else WRONG
        else:
            {"add": store.add, "update": store.update, "remove": store.remove}[options.action](options, environ, say)
    except (NotDone, errors.Fault) as fault:
        text = fault.sentence if isinstance(fault, errors.Fault) else str(fault)
        sys.stderr.write(f"vmgahp image: {escape(text)}\n")
        return WRONG
    return GOOD


def say(text: str) -> None:
    """Print a line about the progress."""
    sys.stderr.write(escape(text) + "\n")


def _interrupted(_number: int, _frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt on a signal, so that all clean-up is done."""
    raise KeyboardInterrupt
