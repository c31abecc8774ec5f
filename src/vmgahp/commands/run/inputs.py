"""The inputs of a program, which HTCondor transfers: they are checked before the job is submitted.

A link to a directory or an unreadable file would hold the job when it is about to start, and a FIFO would block
HTCondor's transfer forever.
"""

import argparse
import os
import re
import stat
from collections.abc import Iterator

from vmgahp.commands.run import words
from vmgahp.commands.submit.summary import SubmitError, Summary
from vmgahp.job.scratch_names import is_reserved

MOST_LOOKED_FOR = 1000
"""The maximum number of jobs of one submit file whose inputs are checked here."""

_NO_PATH = re.compile(r"[,\"'\\<>|*?;]")
_NO_URL = re.compile(r"[\s,\"'\\]")


def listed(options: argparse.Namespace, names: set[str], summary: Summary) -> Iterator[str]:
    """Yield the entries of the job's list of input files; their names in its scratch directory are added to `names`.

    Raises `SubmitError`.
    """
    for text in options.input:
        if "://" in text:
            name, entry = _of_url(text)
        else:
            # With a trailing slash HTCondor would send the content of a directory instead of the directory.
            entry = os.path.abspath(text)
            name = os.path.basename(entry)
        if not name:
            raise SubmitError(f"--input {text!a} has no name.", "name what is in it.")
        if is_reserved(name):
            raise SubmitError(f"--input {text!a}: {name} is a name of HTCondor's or of the server's.", "rename it.")
        if name in names:
            raise SubmitError(
                f"--input {text!a}: two files of the job are called {name}.", "rename one, or put them in directories."
            )
        names.add(name)
        for path in _places(entry, options):
            require(f"--input {text!a}", path)
            if os.path.isdir(path):
                _require_whole(f"--input {text!a}", path, summary)
        yield _below(entry, options) if options.macros else _below(entry, options).replace("$", "$(DOLLAR)")


def _below(path: str, options: argparse.Namespace) -> str:
    """Shorten a path to a relative one, if the submit file is in this directory and the path below it."""
    if "://" in path or options.queue > 1 or os.path.dirname(options.submit_file):
        return path
    relative = os.path.relpath(path)
    outside = relative.split("/")[0] in (".", "..")
    return path if outside or relative != relative.strip() else relative  # the list ignores blanks at the ends


def _of_url(text: str) -> tuple[str, str]:
    name = os.path.basename(re.split(r"[?#]", text)[0])
    if not name or _NO_URL.search(text) or not text.isprintable():
        raise SubmitError(f"--input {text!a} is no URL of a file.", "write %20 for a blank and its like.")
    return name, text


def _places(path: str, options: argparse.Namespace) -> Iterator[str]:
    """Yield the files here that an input stands for, as far as that can be known."""
    if "://" in path:
        return
    if not options.macros or not words.MACRO.search(path):
        yield path
        return
    for process in range(min(options.queue, MOST_LOOKED_FOR)):
        known = re.sub(r"\$\((process|procid)\)", str(process), path, flags=re.IGNORECASE)
        if words.MACRO.search(known):
            return  # condor_submit will know
        yield known


def require(what: str, path: str) -> None:
    """Check that a file or directory can be transferred with the job. Raises `SubmitError`."""
    said = f"{what}: {path!a}"
    if _NO_PATH.search(path) or not path.isprintable() or path != path.strip() or "$$" in path:
        raise SubmitError(f"{said} has characters that a list of HTCondor's cannot have.", "rename it.")
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        raise SubmitError(f"{said} cannot be found ({error.strerror}).", "name a file of this machine.") from error
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise SubmitError(f"{said} is neither a file nor a directory.", "copy what is in it into a file.")
    if not os.access(path, os.R_OK | (os.X_OK if stat.S_ISDIR(mode) else 0)):
        raise SubmitError(f"{said} cannot be read by you.", "see its mode, and who owns it.")


def _require_whole(what: str, path: str, summary: Summary) -> None:
    """Check that everything in a directory can be transferred with the job. Raises `SubmitError`."""

    def closed(error: OSError) -> None:
        raise SubmitError(f"{what}: {error.filename!a} cannot be read by you.", "see its mode, and who owns it.")

    for directory, directories, files in os.walk(path, onerror=closed):
        for name in (*directories, *files):
            inside = os.path.join(directory, name)
            said = f"{what}: {inside!a}"
            try:
                mode = os.stat(inside).st_mode
            except OSError:
                summary.advise(f"{said} leads nowhere, and does not go with the job.")
                continue
            if stat.S_ISDIR(mode) and os.path.islink(inside):
                raise SubmitError(
                    f"{said} is a link to a directory, which HTCondor does not send.", "copy what it has."
                )
            if not stat.S_ISDIR(mode) and not stat.S_ISREG(mode):
                raise SubmitError(f"{said} is neither a file nor a directory.", "take it away from there.")
            if stat.S_ISREG(mode) and not os.access(inside, os.R_OK):
                raise SubmitError(f"{said} cannot be read by you.", "see its mode, and who owns it.")
