"""Compares our server with HTCondor's own: both in one namespace, in turns, from their client's side.

Times and memory of a shared machine wander, so every round measures both servers one right after the
other, and a third with them: the floor, the least that a server in Python does. `stopwatch` does the measuring,
inside the namespace, and `bench_table` makes sense of it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.lab import bench_table
from tests.lab.bench_table import FLOOR, OURS, REFERENCE, Samples
from tests.lab.guest import boot_sector, filling_sector
from tests.lab.namespace import (
    LAB,
    OUR_SERVER,
    REFERENCE_SERVER,
    REPOSITORY,
    LabError,
    Namespace,
    build_wheel,
    wait_until,
    why_not,
)  # fmt: skip
from tests.lab.pool import CONFIG, DOMAIN, USER

JOB_AD = Path(__file__).with_name("job.ad")
"""The 146 attributes of a job that came by way of DAGMan, as condor_starter sends them."""
SCRATCH = "/var/lib/condor/execute/dir_170"
GUARDIAN = "vmgahp-guardian"
"""The name by which the guardian of a VM goes, in `vmgahp.host.guardian`; it is nobody's child."""
WATCH = "/usr/local/sbin/stopwatch-python"
"""A copy of the namespace's interpreter: the kernel does not share its pages with those of our server, so
the one that measures takes nothing off what it measures."""
MODULES = ("__init__.py", "stopwatch.py", "watched.py", "floor.py")
"""What of this package the namespace gets."""
LIBVIRT_MODULE = "/usr/lib/python3/dist-packages"
PROOFS = ("/run/vmgahp/proof-*",)
"""Where our server keeps what it found out about KVM in this boot."""
PAGE = REPOSITORY / "docs/explanation/performance.md"

ROUNDS = 16
ROUNDS_OF = {
    "without VM": 1.0, "probe": 0.5, "VM": 0.5, "START anew": 0.2, "256 MiB": 0.15, "1 GiB": 0.1, "mixed": 0.1,
    "many": 0.05, "fifty": 0.05, "silent": 0.05,
}  # fmt: skip
"""How many rounds there are, and what of them each part takes, at least one."""
DEADLINE = 900
"""Seconds for the whole measurement."""

# The settings of the tests' pool, without the details in the log, which are no part of anybody's work.
# The master and the collector are there because the reference's libraries are theirs too, which counts
# in its PSS as on any machine of a pool, and because they bring the shared port along.
SETTINGS = """\
DAEMON_LIST = MASTER, COLLECTOR
VM_GAHP_DEBUG =
"""

# A file that is touched is copied up into the namespace's own layer. Those that both servers map are, so that
# no process outside of the namespace shares their pages and takes off their PSS.
OWN_FILES = """\
{ ldd /usr/sbin/condor_vm-gahp /usr/sbin/libvirtd /usr/bin/python3 | sed -n 's/.*=> \\(.*\\) (0x.*/\\1/p'
  find /usr/lib/python3/dist-packages -name '*.so'
  echo /usr/sbin/condor_vm-gahp
  echo /usr/bin/python3
} | sort -u | xargs readlink -f | xargs touch
"""

# The reference runs a guest by emulation only where a script describes the VM, and the floor has none to describe it.
DOMAIN_XML = """\
<domain type='qemu'>
  <name>{name}</name>
  <memory unit='MiB'>{memory}</memory>
  <os><type>hvm</type></os>
  <features><acpi/></features>
  <devices>
    <disk type='file' device='disk'>
      <driver name='qemu' type='raw'/><source file='{disk}'/><target dev='hda' bus='ide'/>
    </disk>
  </devices>
</domain>
"""
SCRIPT = """\
#!/bin/sh
ad=$(cat)
value() { printf '%s\\n' "$ad" | sed -n "s/^$1 *= *//p" | tr -d '"'; }
disk=$(value VMPARAM_vm_Disk)
case $disk in /*) ;; *) disk=$(value VM_WORKING_DIR)/$disk ;; esac
sed -e "s|{name}|$(value VMPARAM_VM_NAME)|" -e "s|{memory}|$(value JobVMMemory)|" \\
    -e "s|{disk}|${disk%%:*}|" /lab/domain.xml
"""


# ---- measuring --------------------------------------------------------------------------------------


def prepare(namespace: Namespace, wheel: Path) -> list[str]:
    """Everything that the servers find on a machine of a pool, and what measures them; the kinds of guests."""
    namespace.run("sh", "-c", OWN_FILES)
    namespace.install(wheel)
    namespace.start_libvirt()
    namespace.run("install", "-d", "-o", "condor", f"{LAB}/log")
    namespace.run("install", "-d", "-o", USER, SCRATCH)
    config = CONFIG.format(lab=LAB, domain=DOMAIN, server=OUR_SERVER) + SETTINGS
    namespace.path("/etc/condor/config.d/99-lab.config").write_text(config)
    namespace.run("condor_master")
    address = namespace.path("/run/lock/condor/shared_port_ad")
    wait_until("HTCondor's shared port", lambda: os.path.lexists(address), 60)

    images = {
        "counting": boot_sector(None),
        "silent": boot_sector(1, power_off=False),
        "half of 256": filling_sector(256),
        "half of 1024": filling_sector(1024),
        "half of 256, mixed": filling_sector(256, mixed=True),
    }
    for kind, sector in images.items():
        image(namespace.exchange, kind).write_bytes(sector.ljust(1 << 20, b"\0"))
    (namespace.exchange / "domain.xml").write_text(DOMAIN_XML)
    script = namespace.exchange / "describe-vm"
    script.write_text(SCRIPT)
    script.chmod(0o755)
    package = namespace.exchange / "watch/tests/lab"
    package.mkdir(parents=True)
    for module in MODULES:
        shutil.copy(Path(__file__).with_name(module), package)
    namespace.run("cp", "--dereference", "/usr/bin/python3", WATCH)
    return sorted(images)


def image(directory: Path, kind: str) -> Path:
    return directory / f"{kind.replace(' ', '-')}.img"


def task(namespace: Namespace, rounds: Mapping[str, int], images: Iterable[str]) -> dict[str, Any]:
    """What `stopwatch` is to do. All servers get what condor_starter and condor_startd would give them."""
    uid, gid = (namespace.run("id", option, USER).stdout.strip() for option in ("-u", "-g"))
    floor = ["/usr/bin/python3", "-I", "-S", f"{LAB}/watch/tests/lab/floor.py", LIBVIRT_MODULE, f"{LAB}/domain.xml"]
    return {
        "rounds": rounds,
        "servers": {
            OURS: {"argv": [OUR_SERVER], "environment": {}},
            REFERENCE: {
                "argv": [REFERENCE_SERVER],
                "environment": {"_CONDOR_LIBVIRT_XML_SCRIPT": f"{LAB}/describe-vm"},
            },
            FLOOR: {"argv": floor, "environment": {}},
        },
        "environment": {
            **namespace.environment(),
            "BATCH_SYSTEM": "HTCondor",
            "VMGAHP_VMTYPE": "kvm",
            "VMGAHP_WORKING_DIR": SCRATCH,
            "VMGAHP_USER_UID": uid,
            "VMGAHP_USER_GID": gid,
        },
        "serve": ["-f", "-M", "3"],
        "probe": ["-f", "-t", "-M", "0", "vmtype", "kvm"],
        "ad": JOB_AD.read_text().splitlines(),
        "images": {kind: str(image(Path(LAB), kind)) for kind in images},
        "proofs": PROOFS,
        "errors": f"{LAB}/errors",
        "helpers": GUARDIAN,
    }


def measure(namespace: Namespace, task: Mapping[str, Any], heard: Callable[[Mapping[str, Any]], object]) -> Samples:
    """Run `stopwatch` and collect what it finds; `heard` is called with each value as it comes."""
    errors = namespace.exchange / "stopwatch.err"
    program = f"import sys; sys.path.insert(0, '{LAB}/watch'); from tests.lab.stopwatch import main; main()"
    with errors.open("w") as file:
        watch = namespace.popen(
            *("timeout", str(DEADLINE), WATCH, "-I", "-c", program),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=file,
        )
        assert watch.stdin
        assert watch.stdout
        with watch:
            watch.stdin.write(json.dumps(task))
            watch.stdin.close()
            samples = bench_table.collect(_passed_on(map(json.loads, watch.stdout), heard))
    if watch.returncode:
        said = [f"the measurement failed (exit {watch.returncode}):", errors.read_text().rstrip()]
        for name in ("errors", "log/VMGahpLog"):
            log = namespace.exchange / name
            said += [f"---- the end of {name} ----", *log.read_text(errors="replace").splitlines()[-8:]]
        raise LabError("\n".join(said))
    return samples


def _passed_on(
    values: Iterable[Mapping[str, Any]], heard: Callable[[Mapping[str, Any]], object]
) -> Iterator[Mapping[str, Any]]:
    for value in values:
        heard(value)
        yield value


def versions(namespace: Namespace) -> dict[str, str]:
    """What was compared, and with which Python and libvirt."""
    ours, theirs, python, libvirt = (
        namespace.run(*command).stdout
        for command in (
            [OUR_SERVER, "-version"], ["condor_version"], ["/usr/bin/python3", "--version"], ["libvirtd", "--version"]
        )
    )  # fmt: skip
    return {
        OURS: ours.split()[1],
        REFERENCE: theirs.split()[1],
        "python": python.split()[1],
        "libvirt": libvirt.split()[-1],
    }


def rounds_of(rounds: int, words: Sequence[str]) -> dict[str, int]:
    """How often each part is measured that has a row with these words."""
    return {part: max(1, round(rounds * ROUNDS_OF[part])) for part in bench_table.parts(words)}


def compare(rounds: Mapping[str, int]) -> tuple[Samples, dict[str, str]]:
    """Everything in a namespace of its own; what comes is shown to who waits for it at a terminal."""

    def show(found: Mapping[str, Any]) -> None:
        if sys.stderr.isatty():
            sys.stderr.write(f"\r\x1b[K  round {found['round'] + 1} of {max(rounds.values())}: {found['row']}")
            sys.stderr.flush()

    with tempfile.TemporaryDirectory(prefix="vmgahp-bench-") as directory:
        wheel = build_wheel(directory)
        with Namespace(Path(directory) / "exchange") as namespace:
            images = prepare(namespace, wheel)
            compared = versions(namespace)
            samples = measure(namespace, task(namespace, rounds, images), show)
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[K")
    return samples, compared


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench", description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS, metavar="N", help=f"default: {ROUNDS}")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="WORD", help="the rows with all the words, and their part"
    )
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="every value, for a program")
    output.add_argument("--write", action="store_true", help=f"write the table into {PAGE.name}")
    output.add_argument(
        "--check", action="store_true", help=f"compare with the table in {PAGE.name}; exit 1 where it differs"
    )
    options = parser.parse_args(argv)
    rounds = rounds_of(options.rounds, options.only)
    if options.rounds < 1:
        parser.error("there must be a round")
    if not rounds:
        parser.error(f"no row has the words {' '.join(options.only)}")
    if options.write and options.only:
        parser.error("the page has all rows")
    reason = why_not()
    if reason:
        parser.exit(1, f"scripts/bench: {reason}\n")
    try:
        samples, compared = compare(rounds)
    except LabError as error:
        parser.exit(1, f"scripts/bench: {error}\n")
    lines = bench_table.summarize(samples)
    if options.json:
        print(json.dumps(bench_table.report(lines, samples, compared), indent=1))
    else:
        print(f"{bench_table.head(compared)}\n\n{bench_table.table(lines)}")
    if options.write:
        PAGE.write_text(bench_table.written(PAGE.read_text(), lines, compared))
    if options.check:
        page = PAGE.read_text()
        found = bench_table.departures(page, lines)
        again = {part: rounds[part] for part in found.values()}
        if again:  # what another's work on the machine did is gone by now
            lines = bench_table.summarize(compare(again)[0])
            found = bench_table.departures(page, [line for line in lines if line.row.part in again])
        print("", *found or ["All is as the page says."], sep="\n")
        return 1 if found else 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
