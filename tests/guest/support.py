"""Run jobs for the guest's scripts alone: a drive of the reference's layout, and a guest that is a namespace."""

import io
import json
import shlex
import tarfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests import REPOSITORY
from tests.lab.namespace import LAB, Namespace

SCRIPTS = REPOSITORY / "src/vmgahp/guest"
MACHINE = Path(__file__).with_name("machine.py")
DATE = 1_700_000_000


@dataclass
class RunJob:
    """What lies on a run drive."""

    command: str
    inputs: dict[str, bytes | None] = field(default_factory=dict)
    """By their names; None is a directory."""
    outputs: list[str] | None = None
    environment: dict[str, str] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    without: tuple[str, ...] = ()

    def drive(self) -> bytes:
        """The tar, padded to full MiB."""
        settings = {
            "RUN_AS_ROOT": "", "RUN_TIME_LIMIT": "", "RUN_OUTPUTS_SET": "" if self.outputs is None else "1",
            "RUN_BOOT": "cloud-init", **self.settings,
        }  # fmt: skip
        head = {
            "version": "1\n",
            "run": (SCRIPTS / "run").read_text(),
            "settings": "".join(f"{name}={shlex.quote(value)}\n" for name, value in settings.items()),
            "command": self.command,
            "outputs": "".join(f"{name}\n" for name in self.outputs or []),
            "environment": "".join(f"export {name}={shlex.quote(value)}\n" for name, value in self.environment.items()),
        }
        archive = io.BytesIO()
        with tarfile.open(fileobj=archive, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for name, text in head.items():
                if name not in self.without:
                    _add(tar, f"vmgahp-run/{name}", text.encode())
            for name, content in self.inputs.items():
                _add(tar, f"inputs/{name}", content)
        data = archive.getvalue()
        return data + bytes(-len(data) % 1_048_576)


def _add(tar: tarfile.TarFile, name: str, content: bytes | None) -> None:
    entry = tarfile.TarInfo(name)
    entry.mtime, entry.mode = DATE, 0o755 if content is None or content.startswith(b"#!") else 0o644
    if content is None:
        entry.type = tarfile.DIRTYPE
        tar.addfile(entry)
    else:
        entry.size = len(content)
        tar.addfile(entry, io.BytesIO(content))


@dataclass
class Ran:
    """What the host has of a run job."""

    said: list[str]
    """The lines on the control port, each once."""
    sizes: list[int]
    """Of the stream, as often as it was said to be whole."""
    out: str
    err: str
    files: dict[str, bytes]
    """What came home, by name; of a directory nothing, of a link what it says."""
    console: str
    status: int
    slept: int = 0
    """Seconds that a job in a hurry would have slept."""
    left: list[str] = field(default_factory=list)
    """Of the sleepers of a thousand seconds, who slept on when it said its last."""


class Machine:
    """A guest with one shell and its tools."""

    def __init__(self, namespace: Namespace, shell: str) -> None:
        self.namespace, self.shell = namespace, shell
        self._jobs = 0
        namespace.run("python3", str(MACHINE), "prepare", shell)

    def run(self, job: RunJob, **plan: object) -> Ran:
        """Boot it with a job's drive, and wait for its poweroff."""
        self._jobs += 1
        directory = self.namespace.exchange / f"job-{self._jobs}"
        directory.mkdir()
        (directory / "drive").write_bytes(job.drive())
        inside = f"{LAB}/{directory.name}"
        plan = {"shell": self.shell, "directory": inside, "agent": str(SCRIPTS / "agent"), **plan}
        (directory / "plan").write_text(json.dumps(plan))
        done = self.namespace.run("python3", str(MACHINE), "run", f"{inside}/plan", timeout=110)
        seen = json.loads(done.stdout.splitlines()[-1])
        seen["left"] = [line for line in seen["left"] if "sleep 1000" in line]
        return collect(directory, **seen)


def collect(directory: Path, said: list[str], **more: Any) -> Ran:
    """Gather what came of a job whose streams are files of a directory."""
    streams = {name: (directory / name).read_text() for name in ("out", "err")}
    return Ran(said=list(dict.fromkeys(said)), **streams, files=came_home(directory / "outputs"), **more)


def came_home(stream: Path) -> dict[str, bytes]:
    """What is in a stream of outputs."""
    if not stream.stat().st_size:
        return {}
    with tarfile.open(stream) as tar:
        return {
            entry.name.removeprefix("./"): file.read()
            if entry.isreg() and (file := tar.extractfile(entry))
            else entry.linkname.encode()
            for entry in tar
            if entry.name != "."
        }
