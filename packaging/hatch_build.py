"""Hatchling hooks that add version, manual pages and completions to a wheel and an sdist."""

import os
import re
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

MAKE = ["sphinx>=8.1", "myst-parser>=4", "shtab>=1.8"]
"""The packages that make manual pages and completions in a clone; an sdist has both."""


class Made(BuildHookInterface):  # type: ignore[type-arg,unused-ignore]
    """The hook for manual pages and completions. It writes nothing into the clone, which may be another user's."""

    def dependencies(self) -> list[str]:
        """List what the build environment needs."""
        return [] if Path(self.root, "made").is_dir() else MAKE

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the files, except for an editable installation, whose version changes with the clone."""
        self._work = tempfile.TemporaryDirectory(prefix="vmgahp-build-")
        if version == "editable":
            return
        work, root = Path(self._work.name), Path(self.root)
        share = root / "made/share"
        if not share.is_dir():
            share = work / "share"
            if missing := [name for name in ("sphinx", "myst_parser", "shtab") if find_spec(name) is None]:
                # Whoever builds without an environment for it (--no-build-isolation) decides what may be installed.
                self.app.display_warning(f"without manual pages and completions: {', '.join(missing)} not installed")
            else:
                make(root, share)
        into = build_data["force_include" if self.target_name == "sdist" else "shared_data"]
        place = "made/share" if self.target_name == "sdist" else "share"
        found = sorted(path for path in share.rglob("*") if path.is_file())
        into |= {str(path): f"{place}/{path.relative_to(share)}" for path in found}
        if self.target_name == "wheel":
            told = work / "__init__.py"
            told.write_text(with_version((root / "src/vmgahp/__init__.py").read_text(), self.metadata.version))
            told.chmod(0o644)
            build_data["force_include"][str(told)] = "vmgahp/__init__.py"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the temporary files."""
        self._work.cleanup()


class Described(MetadataHookInterface):
    """The hook for the description on PyPI and in Debian's package, from README.md."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add the text."""
        readme = Path(self.root, "README.md").read_text()
        metadata["readme"] = {"content-type": "text/markdown", "text": without_links(readme)}


def without_links(readme: str) -> str:
    """Remove pictures, the list of documents and links to files, which are in no package, from a README."""
    told = re.sub(r"^!\[[^\n]*\n\n|^## Documents\n.*?^(?=## )", "", readme, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"\[([^]]+)\]\((?!https?://)[^)]*\)", r"\1", told)


def with_version(text: str, version: str) -> str:
    """Put the version into the text of the package's first module."""
    head, line, rest = text.partition('\n__version__ = "0+checkout"\n')
    if not line:
        raise ValueError('src/vmgahp/__init__.py has no line: __version__ = "0+checkout"')
    return f'{head}\n__version__ = "{version}"\n{rest}'


def make(root: Path, share: Path) -> None:
    """Make the manual pages, but no other documents, and the completions below a directory ``share``.

    Raises:
        RuntimeError: a command failed; the message has its output
    """
    others = "_build,_ext,index.md,tutorial,how-to,reference,explanation"
    settings = ("root_doc=man/vmgahp", "suppress_warnings=toc.not_included", f"exclude_patterns={others}")
    sphinx = ["-m", "sphinx", "-b", "man", "-W", "--keep-going", "-q", "-E"]
    for setting in settings:
        sphinx += ["-D", setting]
    with tempfile.TemporaryDirectory(prefix="vmgahp-doctrees-") as doctrees:
        _run(root, *sphinx, "-d", doctrees, str(root / "docs"), str(share / "man/man1"))
    # pip's isolation takes out of sys.path what an editable install has put there, also where PYTHONPATH names it.
    begin = f"import runpy, sys; sys.path.insert(0, {str(root / 'src')!r}); del sys.argv[0]"
    begin += "; runpy.run_path(sys.argv[0], run_name='__main__')"
    _run(root, "-c", begin, str(root / "docs/_ext/completions.py"), str(share))


def _run(root: Path, *words: str) -> None:
    command = [sys.executable, "-B", *words]
    environ = os.environ | {"PYTHONPATH": f"{root / 'src'}:{os.environ.get('PYTHONPATH', '')}".rstrip(":")}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"this failed: {' '.join(command)}\n{(done.stdout + done.stderr).strip()}")
