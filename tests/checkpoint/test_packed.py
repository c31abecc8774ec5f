"""Memory images that are compressed."""

import errno
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.checkpoint.support import image, stored
from tests.lab.programs import a_program
from vmgahp.checkpoint.memory_image import FORMATS, Damaged, Head, inspect, substitute
from vmgahp.checkpoint.substitute import NotPacked, Substitute, Write, has_program, unpack_image
from vmgahp.errors import MISMATCHED, JobFault
from vmgahp.host import wait
from vmgahp.host.budget import Budget
from vmgahp.host.job_user import Identity

HERE = [form for form in FORMATS if form not in ("raw", "sparse") and has_program(form)]
MEMORY = os.urandom(1 << 20) + b"some words, again and again. " * 10_000 + bytes(1 << 20)
SECONDS = 600.0


def unpacking(user: Identity) -> Callable[[int, Head, Write, int], None]:
    def unpack(fd: int, head: Head, write: Write, reader: int) -> None:
        unpack_image(fd, head.end, head.format, write, user, SECONDS, 1 << 30, reader)

    return unpack


def zstd(directory: str, script: str) -> None:
    """A program of that name."""
    a_program(Path(directory) / "zstd", script)


def compressed(form: str, data: bytes) -> bytes:
    return subprocess.run([form, "-c"], input=data, stdout=subprocess.PIPE, check=True).stdout


@pytest.mark.parametrize("form", HERE)
def test_what_was_packed_comes_out_with_our_head_and_not_packed(form: str, user: Identity) -> None:
    """Of libvirtd's programs none is run."""
    made = image(number=FORMATS.index(form), rest=bytes(64)) + compressed(form, b"QEVM" + MEMORY)
    with stored(made) as file:
        with substitute(file.fileno(), "<ours/>", FORMATS, unpacking(user)) as whole, open(whole.path, "rb") as read:
            seen = read.read()
        with pytest.raises(Damaged, match=f"has the format {form}"):
            substitute(file.fileno(), "<ours/>", ("raw",), unpacking(user))
    with stored(seen) as file:
        head = inspect(file.fileno())
    assert (head.xml, head.format) == ("<ours/>", "raw")
    assert seen[head.end :] == b"QEVM" + MEMORY


@pytest.mark.parametrize("form", HERE)
@pytest.mark.parametrize("damage", [b"", b"no such thing", bytes(1 << 16)])
def test_what_cannot_be_unpacked_is_not_begun(form: str, damage: bytes, user: Identity) -> None:
    made = image(number=FORMATS.index(form), rest=bytes(64)) + damage
    with stored(made) as file, pytest.raises(Damaged, match=r"cannot be unpacked|not QEMU's"):
        substitute(file.fileno(), "<ours/>", FORMATS, unpacking(user))


@pytest.mark.parametrize("form", HERE)
def test_no_more_comes_out_than_may(form: str, user: Identity) -> None:
    """A few KiB that become 16 MiB."""
    with stored(compressed(form, bytes(1 << 24))) as small:
        out = []
        with pytest.raises(NotPacked, match="more than 1000000 bytes"):
            unpack_image(small.fileno(), 0, form, lambda data: out.append(len(data)), user, SECONDS, 1_000_000)
        assert sum(out) <= 1_000_000


def test_no_reader_waits_for_what_is_not_written_before_the_deadline_of_a_start() -> None:
    def late(_: object) -> None:
        raise JobFault(MISMATCHED, "The START has taken too long.")

    with Substitute(b"head", late) as whole:
        twice = wait.Task("reading", lambda: [Path(whole.path).read_bytes() for _ in range(2)])
        assert twice.wait(5)


def test_an_error_of_who_writes_ends_the_program(user: Identity) -> None:
    full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    with stored(compressed(HERE[0], MEMORY)) as file, pytest.raises(OSError, match="No space left"):
        unpack_image(file.fileno(), 0, HERE[0], full, user, SECONDS, 1 << 30)


def test_a_program_that_does_not_end_keeps_nobody_waiting(user: Identity, monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as directory, stored(b"") as file:
        os.chmod(directory, 0o755)
        zstd(directory, "exec sleep 1000")
        monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")
        with pytest.raises(NotPacked, match="it had not ended"):
            unpack_image(file.fileno(), 0, "zstd", pytest.fail, user, 0.2, 1 << 30)
        # Nor does the end of who reads wait for it: one that is silent is not told by its pipe.
        zstd(directory, "printf QEVM\nexec sleep 1000")
        file.write(image(number=FORMATS.index("zstd")))
        file.flush()
        began = time.monotonic()
        with substitute(file.fileno(), "<ours/>", FORMATS, unpacking(user)) as whole, open(whole.path, "rb") as read:
            seen = b""
            while not seen.endswith(b"QEVM"):
                seen += read.read(1)
        assert time.monotonic() - began < SECONDS / 2


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_the_time_of_a_program_that_is_stopped_is_the_jobs_in_a_start(
    user: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory() as directory, stored(image(number=FORMATS.index("zstd"))) as file:
        os.chmod(directory, 0o755)
        zstd(directory, "printf QEVM\nkill -STOP $$")
        monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")
        with Budget(1.0) as start:
            with substitute(file.fileno(), "<ours/>", FORMATS, unpacking(user)) as whole, open(whole.path, "rb"):
                assert wait.until(lambda: start._of_the_job > 0.5, 10.0, 0.05), "nobody ends it"
            with pytest.raises(JobFault, match="of the job's user"):
                start.left(1.0)


def test_a_program_that_is_not_there_or_does_not_work(user: Identity, monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as directory, stored(b"") as file:
        os.chmod(directory, 0o755)
        for name in ("prlimit", "setpriv"):
            os.symlink(shutil.which(name) or "", Path(directory) / name)
        monkeypatch.setenv("PATH", directory)
        assert not has_program("zstd")
        with pytest.raises(NotPacked, match="zstd is not installed"):
            unpack_image(file.fileno(), 0, "zstd", pytest.fail, user, SECONDS, 1 << 30)
        zstd(directory, "echo no >&2\nexit 1")
        assert has_program("zstd")
        with pytest.raises(NotPacked, match="zstd: no"):
            unpack_image(file.fileno(), 0, "zstd", pytest.fail, user, SECONDS, 1 << 30)
