"""Files that the command line tools read and write: untrusted files of jobs, job ads, and the log.

Text that a job may have written is sanitized again: control characters are shown as escapes, and secrets are hidden.
"""

import os
import re
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from io import BufferedReader
from stat import S_ISREG
from typing import Any

from vmgahp.commands.arguments import NotDone
from vmgahp.config import sources
from vmgahp.errors import NO_JOBCLASSAD_INFO, ClientFault
from vmgahp.host.run import Finished, run
from vmgahp.host.system_calls import Opened
from vmgahp.job.ad import JobAd
from vmgahp.text import escape, redact

_LINE = re.compile(r"(\d\d/\d\d/\d\d \d\d:\d\d:\d\d) \(pid:\d{1,10}\) (.*)", re.ASCII)


class NotRegular(OSError):
    """A path that is a directory, a FIFO or a device."""


def open_regular(path: str, *, follow: bool = True, directory: int | None = None) -> BufferedReader:
    """Open a regular file for reading, without blocking on a FIFO or a device. Raises OSError."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    descriptor = os.open(path, flags, dir_fd=directory)
    if S_ISREG(os.fstat(descriptor).st_mode):
        return open(descriptor, "rb")
    os.close(descriptor)
    raise NotRegular(0, "it is not a regular file", path)


def write_anew(path: str, data: bytes, mode: int | None = None, owner: tuple[int, int] | None = None) -> None:
    """Create a file or replace a regular one, but never write through a link, which an attacker may have made.

    The umask decides the mode unless it is given. A power failure leaves the old file or the new one. Raises OSError.
    """
    with suppress(FileNotFoundError):
        if not S_ISREG(os.lstat(path).st_mode):
            raise NotRegular(0, "it is there, and is not a regular file", path)
    if mode is None:
        mask = os.umask(0o077)
        os.umask(mask)
        mode = 0o666 & ~mask
    directory = os.path.dirname(path) or "."
    temporary = ""
    try:
        descriptor, temporary = tempfile.mkstemp(dir=directory, prefix=".vmgahp-")
        with open(descriptor, "wb") as file:
            if owner is not None:
                os.fchown(descriptor, *owner)
            os.fchmod(descriptor, mode)
            file.write(data)
            file.flush()
            os.fsync(descriptor)
        os.replace(temporary, path)
    except BaseException as error:
        if temporary:
            os.unlink(temporary)
        if isinstance(error, OSError):
            raise OSError(error.errno, error.strerror, path) from error
        raise
    with suppress(OSError):  # the file is there, also where a directory may not be read, or cannot be synced
        sync_directory(directory)


def sync_directory(path: str) -> None:
    """Sync a directory, so that new and renamed entries survive a power failure. Raises OSError."""
    with Opened(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as directory:
        os.fsync(directory)


def log_lines(path: str, longest: int) -> Iterator[tuple[float, str]]:
    """Yield time and text, sanitized for display, of the lines in the last `longest` bytes of a log. Raises OSError."""
    with open_regular(path, follow=False) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - longest))
        text = file.read(longest).decode("utf-8", "replace")
    for line in text.split("\n"):
        found = _LINE.fullmatch(line.rstrip("\r"))
        if found is None:
            continue
        try:
            when = time.mktime(time.strptime(found[1], "%m/%d/%y %H:%M:%S"))
        except (ValueError, OverflowError):
            continue
        yield when, escape(redact(found[2]))


# Job ads, in files and from condor_q

LARGEST_AD = 1 << 22
"""The maximum number of bytes that are read of a file, or of condor_q's output; ads have some kilobytes."""

CONDOR_Q_DEADLINE = 60.0
"""The deadline in seconds for condor_q, which may have to wait for a busy schedd."""

_TRY_IT = "see what condor_q itself says"


def job_id(text: str) -> str:
    """Parse a job id such as 12.0, or 12. Raises `ClientFault`."""
    cluster, _, proc = text.partition(".")
    if not all(part.isascii() and part.isdigit() for part in (cluster, proc or "0")):
        raise no_ad(f"{escape(text)} is not a job id", "write it as 12.0")
    return text


def ask_condor_q(job: str) -> str:
    """Return the output of ``condor_q -l`` for a job, such as 12.0. Raises `ClientFault`."""
    try:
        done = run(["condor_q", "-l", job_id(job)], deadline=CONDOR_Q_DEADLINE, environ=os.environ, directory="")
    except OSError as error:
        raise no_ad(f"condor_q cannot be run: {error.strerror}", "run this where HTCondor is, and in PATH") from error
    if done.status is None:
        raise no_ad(f"condor_q had not ended after {CONDOR_Q_DEADLINE:g} s", _TRY_IT)
    if done.status:
        said = escape(done.err.decode("utf-8", "replace").strip()[-300:]) or "it says nothing"
        raise no_ad(f"condor_q -l {job}: {said}", _TRY_IT)
    out = done.out.decode("utf-8", "surrogateescape")
    if not out.strip():
        raise no_ad(f"the queue has no job {job}", f"condor_history {job} shows it if it has ended")
    return out[:LARGEST_AD]


def read_ad_file(path: str) -> str:
    """Read the file of an ad. Raises `ClientFault`."""
    try:
        fd = os.open(os.path.expanduser(path), os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        os.set_blocking(fd, True)  # what comes from condor_q takes its time
        with open(fd, encoding="utf-8", errors="surrogateescape") as file:
            return file.read(LARGEST_AD)
    except (OSError, ValueError) as error:
        raise no_ad(f"{escape(path)} cannot be read: {getattr(error, 'strerror', '') or error}") from error


def parse_ad(text: str) -> list[tuple[str, str]]:
    """Parse the attributes of the first ad in a text. Raises `ClientFault`."""
    pairs = pairs_of(text)
    if not pairs:
        raise no_ad("there is no line of the form Name = expression, as condor_q -l and .job.ad have them")
    return pairs


def pairs_of(text: str) -> list[tuple[str, str]]:
    """Parse the attributes of the first ad in a text; lines that are none are left out."""
    pairs: list[tuple[str, str]] = []
    for line in text.split("\n"):
        if pair := JobAd.parse_line(line.strip("\r")):
            pairs.append(pair)
        elif pairs and not line.strip():
            break
    return pairs


def no_ad(problem: str, hint: str = "write an ad with condor_q -l CLUSTER.PROC > job.ad") -> ClientFault:
    """Make the fault for a job or an ad that is missing or unusable."""
    return ClientFault(NO_JOBCLASSAD_INFO, f"{problem}.", hint)


# Programs of HTCondor's


def complaint(done: Finished) -> str:
    """Return the last line on a program's standard error, for people; empty if there is none."""
    return escape(redact(done.complaints[-1].strip()))[:1000].rstrip(".") if done.complaints else ""


RESTART = "condor_restart -peaceful -startd"
"""The restart that ends no job: the startd waits for those that run."""


def query_machines(constraint: str, names: Sequence[str], pool: str = "") -> list[Mapping[str, Any]]:
    """Return the attributes `names` of the slots that a collector knows. Raises `NotDone`."""
    try:
        import htcondor2

        collector = htcondor2.Collector(pool) if pool else htcondor2.Collector()
        return list(collector.query(htcondor2.AdType.Startd, constraint, list(names)))
    except Exception as error:  # theirs, of any kind
        raise NotDone(f"The collector does not say which machines there are: {' '.join(str(error).split())}") from error


def update_ad(environ: Mapping[str, str], lines: str) -> str:
    """Have the startd advertise attributes, beside the jobs that run; return why it does not, empty if it does."""
    tool = os.path.join(os.path.dirname(sources.find_tool(environ)), "condor_update_machine_ad")
    try:
        said = run([tool], deadline=30.0, environ=environ, stdin=f"{lines}\n".encode())
    except OSError as error:
        return f"{tool} cannot be run: {error.strerror}."
    if said.status == 0:
        return ""
    why = "not in time" if said.status is None else complaint(said) or "it says nothing"
    return f"The startd does not take {'; '.join(lines.splitlines())}: {why}. Only root may change its ad."
