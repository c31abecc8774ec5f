"""Looks into images that were made."""

import io
from pathlib import Path

import pycdlib


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
