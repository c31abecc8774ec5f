"""The systems that tests run on, as the record of a run names them: docs/reference/tested-on.md is made from it.

A test that runs elsewhere than on this machine says so by `ran_on`, from an autouse fixture of its directory.
"""

import functools
import json
import platform
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

PACKAGES = {"libvirt": "libvirt-daemon", "QEMU": "qemu-system-x86", "HTCondor": "condor"}
"""Debian's packages of what a system is known by."""

MODULAR = "modular daemons"
"""The name, as "daemons" of a system, of libvirt's daemons where libvirtd is not one of them."""

System = dict[str, str]
Ask = Callable[[list[str]], str]
"""Runs a command on the system; what it prints, empty where it fails."""


def ran_on(item: pytest.Item, system: System) -> None:
    """Note the system that a test runs on."""
    item.user_properties.append(("ran on", json.dumps(system, sort_keys=True)))


def seen_by(ask: Ask, release: dict[str, str], **more: str) -> System:
    """Name a Debian by its release file and its packages, and by what else is known of it."""
    found = {"system": release["PRETTY_NAME"]} | more
    listed = ask(["dpkg-query", "-W", "-f", "${Package} ${Version}\n", *PACKAGES.values()])
    for line in listed.splitlines():
        package, _, version = line.partition(" ")
        short = re.match(r"(?:\d+:)?([\d.]+)", version)
        found |= {name: short[1] for name, known in PACKAGES.items() if known == package and short}
    return found


def release_of(text: str) -> dict[str, str]:
    """Read an os-release file."""
    pairs = (line.partition("=") for line in text.splitlines() if "=" in line)
    return {name: value.strip('"') for name, _, value in pairs}


@functools.cache
def here() -> str:
    """Name this machine, as `ran_on` would."""
    more = {"daemons": MODULAR} if shutil.which("virtqemud") and not shutil.which("libvirtd") else {}
    return json.dumps(seen_by(_run, platform.freedesktop_os_release(), **more), sort_keys=True)


@functools.cache
def of_root(root: Path) -> System:
    """Name the Debian in a directory."""

    def ask(command: list[str]) -> str:
        return _run([command[0], f"--admindir={root}/var/lib/dpkg", *command[1:]])

    return seen_by(ask, release_of((root / "usr/lib/os-release").read_text()))


def _run(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60).stdout
    except FileNotFoundError:
        return ""
