"""Run a command on another Debian: `python -m tests.lab.on_suite SUITE COMMAND…`, as root.

The machine is a namespace over the pool's root of that suite (scripts/pool-root), whose Python and libraries are
Debian's; `modular` is trixie with libvirt's modular daemons in place of libvirtd (scripts/modular-libvirt). pytest and
most other tools are those of this environment, and what is about these tools (`tests/docs`, `tests/packaging`) is not
for it. It sees the clone at its own place, and what is written there is thrown away; `python` finds all of them.
libvirt runs. The exit status is the command's. The file that VMGAHP_RECORD names (tests/lab/record.py) is written all
the same.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from tests.lab.namespace import LAB, REPOSITORY, LabError, Namespace, default_root

PASSED_ON = ("CI", "HYPOTHESIS_", "VMGAHP_")
"""How the names of environment variables begin that the command gets."""

PREPARE = f"""\
mkdir -p /tmp/clone/upper /tmp/clone/work
mount -t overlay -o "lowerdir={REPOSITORY},upperdir=/tmp/clone/upper,workdir=/tmp/clone/work" overlay {REPOSITORY}
printf '%s\\n' {REPOSITORY}/src {sysconfig.get_path("purelib")} >/usr/lib/python3/dist-packages/zz-vmgahp.pth
"""
"""Debian's modules come before this environment's, which may be compiled for another Python."""

MODULARIZE = 'cp -a "$1/etc" "$1/usr" / && rm /usr/sbin/libvirtd'
"""Debian's libvirt, with the modular daemons of the directory `$1`."""


def run(suite: str, command: list[str]) -> int:
    """Return the exit status of a command on a machine of that suite."""
    modular = default_root().with_name("modular-trixie") if suite == "modular" else None
    root = default_root().with_name("pool-trixie" if modular else f"pool-{suite}")
    with tempfile.TemporaryDirectory(prefix="vmgahp-suite-") as exchange, Namespace(exchange, root) as machine:
        machine.run("sh", "-e", "-c", PREPARE)
        if modular:
            machine.run("sh", "-e", "-c", MODULARIZE, "sh", str(modular))
        machine.start_libvirt()
        environ = machine.environment()
        environ["PATH"] = f"/opt/vmgahp/bin:{environ['PATH']}"
        environ |= {name: value for name, value in os.environ.items() if name.startswith(PASSED_ON)}
        if record := environ.get("VMGAHP_RECORD"):
            environ["VMGAHP_RECORD"] = f"{LAB}/record.json"
        done = subprocess.run(machine.command(command, cwd=str(REPOSITORY)), env=environ, check=False)
        if record and (written := Path(exchange, "record.json")).exists():
            shutil.copyfile(written, record)
        return done.returncode


if __name__ == "__main__":
    try:
        sys.exit(run(sys.argv[1], sys.argv[2:]))
    except LabError as error:
        sys.exit(f"on_suite: {error}")
