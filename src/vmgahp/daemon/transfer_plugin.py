"""The file transfer plugin, which makes a job's disk a qcow2 overlay of an image.

``transfer_input_files = nfs:///images/base.qcow2:disk.qcow2`` copies nothing: an empty overlay ``disk.qcow2`` is made
in the job's scratch directory, which reads from the base and gets the guest's changes. condor_starter runs this
program as the job's user, by HTCondor's protocols for plugins of one file (version 1) and of many (version 2), which
its manual describes in ``docs/apis/file-transfer-plugins``. Images must be in the directories of VM_IMAGE_DIRS.
"""

import os
import re
import stat
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from vmgahp import __version__, config, errors
from vmgahp.config import Settings
from vmgahp.host.job_user import Identity
from vmgahp.images import qemu_img
from vmgahp.images.formats import UnclearFormat, backing_chain, image_format
from vmgahp.job.ad import quote
from vmgahp.text import shown

METHODS = "nfs", "vmimage"
"""The schemes of URLs: that of a widespread how-to, and one of our own."""

SETTING = "VM_IMAGE_DIRS"

MOST_ADS = 1000
LONGEST_INPUT = 4 << 20
"""The most files, and the most bytes of their list, of one call."""

USAGE = """\
usage: vmgahp-image-plugin -classad                          say what this plugin can do
       vmgahp-image-plugin URL FILE                          make an overlay for one URL
       vmgahp-image-plugin -infile FILE -outfile FILE        make all of a list of ads
HTCondor runs it by itself where FILETRANSFER_PLUGINS names it. A URL is nfs:///DIR/BASE:NAME[:FORMAT], with BASE
in a directory of VM_IMAGE_DIRS; the overlay is NAME in the job's scratch directory.
"""

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+=-]{0,199}", re.ASCII)
_ESCAPED = re.compile(r"%([0-9A-Fa-f]{2})")


class TransferError(Exception):
    """A failed transfer; the text is for the job's owner, and becomes the hold reason."""


class Wanted(NamedTuple):
    """The parts of a URL."""

    base: str
    name: str
    format: str


def parse_url(url: str) -> Wanted:
    """Read ``nfs:///DIR/BASE[:NAME[:FORMAT]]``. Raises `TransferError`."""
    scheme, colon, rest = url.partition(":")
    if not colon or scheme.lower() not in METHODS:
        raise TransferError(f"{shown(url)} is not a URL of {' or '.join(METHODS)}.")
    if rest.startswith("//") and not rest.startswith("///"):
        raise TransferError(f"{shown(url)} names a server: write {scheme}:/// and a path of the execute machine.")
    path, *words = rest.split(":")
    if len(words) > 2:
        raise TransferError(f"{shown(url)} is not of the form {scheme}:///DIR/BASE:NAME[:FORMAT].")
    base, *words = (_decode(url, word) for word in (path, *words))
    base = "/" + base.lstrip("/")
    name = words[0] if words else os.path.basename(base)
    if not _NAME.fullmatch(name):
        problem = f"{shown(url)}: {shown(name)} cannot be the name of a disk"
        raise TransferError(f"{problem}. Write {scheme}:///DIR/BASE:NAME with a plain NAME, such as disk.qcow2.")
    return Wanted(base, name, words[1] if len(words) > 1 else "")


def fetch(url: str, destination: str, settings: Settings) -> int:
    """Make the overlay of `url` in the directory of `destination`; return its size in bytes.

    An existing one is from a checkpoint, or from the spool, and is kept if its base is the one that the URL names.
    Raises `TransferError`, and `MachineFault` for invalid settings.
    """
    wanted = parse_url(url)
    directories = _directories(settings)
    base = _allowed(wanted.base, directories, url)
    target = os.path.join(os.path.dirname(os.path.abspath(destination)), wanted.name)
    who = Identity(os.geteuid(), os.getegid())
    try:
        with open(who.open_named(base, os.O_RDONLY), "rb") as file:
            base_format = image_format(base, wanted.format, file)
    except UnclearFormat as error:
        raise TransferError(f"{shown(url)}: {error}. Say it at the end: {url[:200]}:qcow2.") from error
    except OSError as error:
        raise TransferError(f"{shown(url)}: {base} cannot be opened ({error.strerror}).") from error
    try:
        for layer in backing_chain(base, base_format, who):
            _allowed(layer.path, directories, url)
        if os.path.lexists(target):
            chain = backing_chain(target, "qcow2", who) if stat.S_ISREG(os.lstat(target).st_mode) else ()
            if not chain or os.path.realpath(chain[0].path) != base or chain[0].format != base_format:
                raise TransferError(f"{shown(url)}: there is a file {wanted.name} already that is not its overlay.")
        else:
            _create(base, base_format, target, who)
    except errors.JobFault as fault:
        raise TransferError(f"{shown(url)}: {fault.sentence}") from fault
    return os.stat(target).st_size


def _allowed(path: str, directories: Sequence[str], url: str) -> str:
    """Return the path without symbolic links, if it is in one of the directories. Raises `TransferError`.

    The error does not reveal whether a file elsewhere exists. Without root's rights this would not matter, but the
    administrator chooses the user who runs a plugin.
    """
    real = os.path.realpath(path)
    if not any(os.path.commonpath((real, directory)) == directory for directory in directories):
        known = f"{SETTING} = {', '.join(directories) or 'none'}"
        problem = f"{shown(path)} is in no directory from which this machine lets jobs take images ({known})"
        raise TransferError(f"{shown(url)}: {problem}.")
    return real


def _directories(settings: Settings) -> list[str]:
    found = []
    for directory in settings.strings(SETTING):
        real = os.path.realpath(directory)
        if not directory.startswith("/") or real == "/":
            problem = f"{SETTING} has {directory} ({settings.where(SETTING)}), which is no full path below /."
            raise errors.MachineFault(problem, "name the directories that have images for jobs.")
        found.append(real)
    return found


def _create(base: str, base_format: str, target: str, who: Identity) -> None:
    """Write an empty overlay under a temporary name and rename it, so that a partial one is never used."""
    temporary = f"{target}.{os.getpid()}.new"
    try:
        qemu_img.create_overlay(base, base_format, temporary, who)
        os.rename(temporary, target)
    except qemu_img.Trouble as error:
        raise TransferError(f"no overlay of {base} could be made: {error}.") from error
    except OSError as error:
        raise TransferError(f"{target} cannot be written ({error.strerror}).") from error
    finally:
        with suppress(OSError):
            os.unlink(temporary)


def _decode(url: str, text: str) -> str:
    """Decode ``%20`` and its like, which stand for characters that a list of files cannot have."""
    try:
        decoded = _ESCAPED.sub(lambda found: chr(int(found[1], 16)), text).encode("latin-1").decode()
    except UnicodeError:
        decoded = text if "%" not in text else "\0"
    if not decoded.isprintable():
        raise TransferError(f"{shown(url)} has characters that are no text.")
    return decoded


# The interface to HTCondor


def main(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> int:
    """Run the program ``vmgahp-image-plugin`` and return the exit status."""
    words = list(argv[1:])
    if words == ["-classad"]:
        sys.stdout.write(capabilities())
        return 0
    if words in (["-h"], ["-help"], ["--help"]):
        sys.stdout.write(USAGE)
        return 0
    if upload := "-upload" in words:
        words.remove("-upload")
    if len(words) == 4 and {words[0], words[2]} == {"-infile", "-outfile"}:
        options = dict(zip(words[::2], words[1::2], strict=True))
        return _many(options["-infile"], options["-outfile"], upload, environ)
    if len(words) == 2 and not words[0].startswith("-") and not upload:
        result = _one(words[0], words[1], False, environ)
        # HTCondor takes these lines for attributes about the transfer, and shows TransferError to people.
        sys.stdout.write("".join(f"{attribute} = {_old(value)}\n" for attribute, value in result.items()))
        return 0 if result["TransferSuccess"] else 1
    sys.stderr.write(USAGE)
    return 1


def capabilities() -> str:
    """Return the plugin's capabilities, in the syntax of old ClassAds."""
    return (
        "MultipleFileSupport = true\n"
        'PluginType = "FileTransfer"\n'
        f'PluginVersion = "{__version__}"\n'
        "ProtocolVersion = 2\n"
        f'SupportedMethods = "{",".join(METHODS)}"\n'
    )


def _many(infile: str, outfile: str, upload: bool, environ: Mapping[str, str]) -> int:
    """Handle version 2 of the protocol: read a list of ads, write one result ad for each."""
    try:
        import classad2

        with open(infile, encoding="utf-8", errors="surrogateescape") as file:
            text = file.read(LONGEST_INPUT + 1)
        ads = list(classad2.parseAds(text)) if len(text) <= LONGEST_INPUT else None
    except Exception as error:  # noqa: BLE001 - a missing module, a file that is not a list of ads: the job must hear of it
        _write(outfile, [_result("", "", f"the list of files cannot be read: {error}")])
        return 1
    if ads is None or len(ads) > MOST_ADS:
        _write(outfile, [_result("", "", "the list of files is too long")])
        return 1
    results = []
    for ad in ads:
        url, name = ad.get("Url"), ad.get("LocalFileName")
        if isinstance(url, str) and isinstance(name, str):  # other ads do not name a file
            results.append(_one(url, name, upload, environ))
    results = results or [_result("", "", "the list of files names none")]
    return 0 if _write(outfile, results) and all(result["TransferSuccess"] for result in results) else 1


def _one(url: str, name: str, upload: bool, environ: Mapping[str, str]) -> dict[str, str | int]:
    try:
        if upload:
            raise TransferError(f"{shown(url)}: this plugin sends no files anywhere.")
        if os.geteuid() == 0:
            off = "RUN_FILETRANSFER_PLUGINS_WITH_ROOT = False on the execute machine"
            raise TransferError(f"the plugin runs as root, and it looks at files that jobs name: set {off}.")
        size = fetch(url, name, config.load(environ))
    except TransferError as error:
        return _result(url, name, str(error))
    except errors.Fault as fault:
        return _result(url, name, fault.render())
    return _result(url, name, "", size)


def _result(url: str, name: str, error: str, size: int = 0) -> dict[str, str | int]:
    found: dict[str, str | int] = {
        "TransferUrl": url,
        "TransferFileName": name,
        "TransferProtocol": url.partition(":")[0].lower(),
        "TransferType": "download",
        "TransferSuccess": not error,
        "TransferTotalBytes": size,
        "TransferFileBytes": size,
    }
    if error:
        found["TransferError"] = f"vmgahp-image-plugin: {error}"
    return found


def _old(value: str | int) -> str:
    """Format a value in the syntax of old ClassAds."""
    return quote(value) if isinstance(value, str) else str(value).lower()


def _new(value: str | int) -> str:
    """Format a value in the syntax of new ClassAds, where a backslash begins an escape."""
    return _old(value.replace("\\", "\\\\") if isinstance(value, str) else value)


def _write(outfile: str, results: Sequence[dict[str, str | int]]) -> bool:
    """Write the results over the beginning of the file that HTCondor has filled with blanks, and keep its length."""
    ads = ("; ".join(f"{attribute} = {_new(value)}" for attribute, value in result.items()) for result in results)
    text = "".join(f"[ {ad} ]\n" for ad in ads)
    try:
        descriptor = os.open(outfile, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        with os.fdopen(descriptor, "wb") as file:
            file.write(text.encode("utf-8", "replace"))
    except OSError as error:
        sys.stderr.write(f"vmgahp-image-plugin: {outfile}: {error.strerror}\n")
        return False
    return True
