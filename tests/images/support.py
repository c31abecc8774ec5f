"""Images and catalogs that tests make, and what is in an image."""

import io
import os
from pathlib import Path

import pycdlib
import pytest

from tests import jobs
from tests.jobs import Files
from vmgahp.config import Settings
from vmgahp.job.disks import Disk
from vmgahp.job.look import find
from vmgahp.job.spec import JobSpec

AS_ROOT = pytest.mark.skipif(os.getuid() != 0, reason="needs root")


def read(path: Path, facade: str = "rr") -> dict[str, bytes]:
    """All files of an image, as one kind of guest sees them."""
    image = pycdlib.PyCdlib()
    image.open(str(path))
    found = {}
    for directory, _, names in image.walk(**{f"{facade}_path": "/"}):
        for name in names:
            full = f"{directory.rstrip('/')}/{name}"
            content = io.BytesIO()
            image.get_file_from_iso_fp(content, **{f"{facade}_path": full})
            found[full.removeprefix("/")] = content.getvalue()
    image.close()
    return found


@pytest.fixture
def place(scratch: Path) -> Path:
    """A directory that everybody may enter and only its owner write to."""
    made = scratch.parent / "images"
    made.mkdir()
    made.chmod(0o755)
    return made


def write(path: Path, content: str | bytes, mode: int = 0o644) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    path.chmod(mode)
    return path


def settings(place: Path, **more: str) -> Settings:
    return Settings({"VM_MEMORY": "1024", "VM_CATALOG": str(place / "catalog.toml"), **more})


def offering(place: Path, text: str) -> Settings:
    write(place / "catalog.toml", text)
    return settings(place)


def one(place: Path, image_format: str = "raw", content: bytes = b"content") -> Settings:
    write(place / "a", content)
    return offering(place, f'[a]\npath = "a"\nformat = "{image_format}"\n')


def resolved(
    made: Settings, disks: str = "catalog:a:vda:w", files: Files | None = None, **attributes: str
) -> tuple[Disk, ...]:
    ad = jobs.ad(VMPARAM_vm_Disk=f'"{disks}"', **attributes)
    beside = [str(path) for path in Path(made.string("VM_CATALOG")).parent.glob("*")]
    return find(JobSpec.parse(ad, made), made, files or Files(shared=beside)).disks  # type: ignore[arg-type]
