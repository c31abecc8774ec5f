"""Programs that tests write: stand-ins for real ones, hooks and scripts."""

from pathlib import Path


def a_program(path: Path, text: str) -> Path:
    """A file that everybody may run; by the shell, where its text names no other interpreter."""
    path.write_text(text if text.startswith("#!") else f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path
