"""Puts the manual pages into the wheel, where they have been built (scripts/docs, scripts/build-deb)."""

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class ManualPages(BuildHookInterface):  # type: ignore[type-arg,unused-ignore]
    """A clone has none at first, and installs without."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        for page in sorted(Path(self.root, "docs/_build/man").glob("*.1")):
            build_data["shared_data"][str(page)] = f"share/man/man1/{page.name}"
