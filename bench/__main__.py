"""A comparison of our server with HTCondor's own: both in one namespace, in turns, from their client's side.

Times and memory of a shared machine wander, so every round measures both servers one right after the other, and a third
with them: the floor, the least that a server in Python does. `stopwatch` does the measuring, inside the namespace, and
`table` makes sense of it; `scale` measures many of our servers at once, `jobs` whole jobs in pools, `warm` programs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.lab import cloud_image, reference
from tests.lab.guest import RECORD, Code, boot_sector
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

from bench import jobs, scale, table, warm
from bench.table import FLOOR, OURS, REFERENCE

JOB_AD = Path(__file__).with_name("job.ad")
"""The 146 attributes of a job that came by way of DAGMan, as condor_starter sends them."""
SCRATCH = "/var/lib/condor/execute/dir_170"
GUARDIAN = "vmgahp-guardian"
"""The name by which the guardian of a VM goes, in `vmgahp.host.guardian`; it is nobody's child."""
WATCH = "/usr/local/sbin/stopwatch-python"
"""A copy of the namespace's interpreter: the kernel does not share its pages with those of our server, so
the one that measures takes nothing off what it measures."""
MODULES = ("__init__.py", "stopwatch.py", "watched.py", "floor.py", "scale.py", "warm.py")
"""The modules of this package that the namespace gets."""
CATALOG = """\
[debian]
path = "debian.qcow2"
format = "qcow2"
"""
LIBVIRT_MODULE = "/usr/lib/python3/dist-packages"
PAGE = REPOSITORY / "docs/explanation/performance.md"

ROUNDS = 16
ROUNDS_OF = {
    "without VM": 1.0, "probe": 0.5, "VM": 0.5, "256 MiB": 0.15, "1 GiB": 0.1,
    "many": 0.05, "fifty": 0.05, "silent": 0.05,
}  # fmt: skip
"""The number of rounds, and the share of them that each part takes, at least one."""
DEADLINE = 900
"""Seconds for all of a module's measurement."""

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

# ---- measuring --------------------------------------------------------------------------------------


def prepare(namespace: Namespace, wheel: Path) -> list[str]:
    """Make all that servers find on a machine of a pool, and what measures them; return the kinds of guests."""
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
    }
    for kind, sector in images.items():
        image(namespace.exchange, kind).write_bytes(sector.ljust(1 << 20, b"\0"))
    reference.describe(namespace.exchange)
    package = namespace.exchange / "watch/bench"
    package.mkdir(parents=True)
    for module in MODULES:
        shutil.copy(Path(__file__).with_name(module), package)
    namespace.run("cp", "--dereference", "/usr/bin/python3", WATCH)
    return sorted(images)


def image(directory: Path, kind: str) -> Path:
    return directory / f"{kind.replace(' ', '-')}.img"


def filling_sector(mib: int) -> bytes:
    """A guest that fills all below the middle of its memory with numbers of no pattern and then halts for good.

    Its record in sector 1 of its disk says 1 when that is done. It stays silent then, and so does its clock.
    """
    c = Code()
    c.emit("FA")  # cli
    c.refer("0F0116", "table", "abs16")  # lgdt [table]
    # A segment that was loaded in protected mode keeps its limit of 4 GiB in real mode.
    c.emit("0F20C0 0C01 0F22C0")  # mov eax,cr0; or al,1; mov cr0,eax
    c.emit("BB0800 8EC3")  # mov bx,8; mov es,bx
    c.emit("24FE 0F22C0")  # and al,0xFE; mov cr0,eax
    c.emit("31DB 8EC3")  # xor bx,bx; mov es,bx
    c.emit("66BF 00001000")  # mov edi,0x100000
    c.label("fill")
    c.emit("6669C0 0D661900 6605 5FF36E3C")  # imul eax,eax,1664525; add eax,1013904223
    c.emit("2667668907 6683C704")  # mov es:[edi],eax; add edi,4
    c.emit("6681FF")  # cmp edi,
    c.code += (mib << 19).to_bytes(4, "little")
    c.refer("72", "fill")  # jb fill
    c.emit("FB BF", RECORD)  # sti; mov di,RECORD
    c.emit("B90001 31C0 F3AB C606", RECORD)  # mov cx,256; xor ax,ax; rep stosw; mov byte [RECORD],
    c.emit("31")  # '1'
    c.write_sector()
    c.emit("FA F4")  # cli; hlt
    c.drive()
    c.packet(sector=1)
    c.label("table")  # of one segment: data, from 0, of 4 GiB
    c.refer("0F00", "segments", "abs16")
    c.emit("0000")
    c.label("segments")
    c.emit("0000000000000000 FFFF00000092CF00")
    return c.sector()


def task(namespace: Namespace, rounds: Mapping[str, int], images: Iterable[str]) -> dict[str, Any]:
    """Make the task of `stopwatch` and `scale`. Servers get what condor_starter and condor_startd would give them."""
    uid, gid = (namespace.run("id", option, USER).stdout.strip() for option in ("-u", "-g"))
    floor = ["/usr/bin/python3", "-I", "-S", f"{LAB}/watch/bench/floor.py", LIBVIRT_MODULE, f"{LAB}/domain.xml"]
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
        "errors": f"{LAB}/errors",
        "helpers": GUARDIAN,
        "warm": {"_CONDOR_VM_CATALOG": f"{LAB}/catalog.toml", "_CONDOR_VM_MEMORY": "16384"},
    }


def watch(namespace: Namespace, module: str, task: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Run a module of `MODULES` to its end, and return its values as they come. Raises `LabError`."""
    errors = namespace.exchange / "watch.err"
    program = f"import sys; sys.path.insert(0, '{LAB}/watch'); from bench.{module} import main; main()"
    with errors.open("w") as file:
        process = namespace.popen(
            *("timeout", str(DEADLINE), WATCH, "-I", "-c", program),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=file,
        )
        assert process.stdin
        assert process.stdout
        with process:
            process.stdin.write(json.dumps(task))
            process.stdin.close()
            yield from map(json.loads, process.stdout)
    if process.returncode:
        said = [f"the measurement failed (exit {process.returncode}):", errors.read_text().rstrip()]
        for name in ("errors", "log/VMGahpLog"):
            log = namespace.exchange / name
            if log.exists():
                said += [f"---- the end of {name} ----", *log.read_text(errors="replace").splitlines()[-8:]]
        raise LabError("\n".join(said))


def versions(namespace: Namespace) -> dict[str, str]:
    """Find the versions of both servers, of Python and of libvirt."""
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


class Outcome(NamedTuple):
    """The values of a run."""

    versions: dict[str, str]
    lines: list[table.Line]
    columns: list[dict[str, float]]
    """Those of `scale`."""
    jobs: dict[str, dict[int, float]]
    """The seconds that `jobs` has measured, by server."""
    warm: list[dict[str, float]]
    """The columns of `warm`."""


def rounds_of(rounds: int, words: Sequence[str]) -> dict[str, int]:
    """Say how often each part is measured that has a row with these words."""
    return {part: max(1, round(rounds * ROUNDS_OF[part])) for part in table.parts(words)}


def compare(rounds: Mapping[str, int], parts: Collection[str] = ()) -> Outcome:
    """Measure in a namespace of its own, also `parts` by their titles; say at a terminal how far it is.

    Raises `LabError`.
    """

    def shown(values: Iterable[dict[str, Any]], count: int, what: str) -> Iterator[dict[str, Any]]:
        for number, value in enumerate(values, start=1):
            if sys.stderr.isatty():
                where = f"round {value['round'] + 1}" if "round" in value else f"column {number}"
                sys.stderr.write(f"\r\x1b[K  {where} of {count}: {value.get('row', what)}")
                sys.stderr.flush()
            yield value
        if sys.stderr.isatty():
            sys.stderr.write("\r\x1b[K")

    lines, columns, of_jobs, programs = [], [], {}, []
    with tempfile.TemporaryDirectory(prefix="vmgahp-bench-") as directory:
        wheel = build_wheel(directory)
        with Namespace(Path(directory) / "exchange") as namespace:
            images = prepare(namespace, wheel)
            compared = versions(namespace)
            work = task(namespace, rounds, images)
            if rounds:
                lines = table.summarize(shown(watch(namespace, "stopwatch", work), max(rounds.values()), ""))
            if scale.TITLE in parts:
                columns = list(shown(watch(namespace, "scale", work), len(scale.COLUMNS), scale.TITLE))
            if warm.TITLE in parts:
                shutil.copy(cloud_image.IMAGE, namespace.exchange / "debian.qcow2")
                (namespace.exchange / "catalog.toml").write_text(CATALOG)
                programs = list(shown(watch(namespace, "warm", work), len(warm.COLUMNS), warm.TITLE))
        if jobs.TITLE in parts:
            of_jobs = {server: jobs.measure(Path(directory) / server, server, wheel) for server in jobs.SERVERS}
    return Outcome(compared, lines, columns, of_jobs, programs)


def write(outcome: Outcome) -> None:
    """Put the tables into the page."""
    page, head = PAGE.read_text(), table.head(outcome.versions)
    if outcome.lines:
        page = table.written(page, "bench", f"```\n{head}\n\n{table.table(outcome.lines)}\n```")
    if outcome.columns:
        page = table.written(page, "scale", f"{head}.\n\n{scale.table(outcome.columns)}")
    if outcome.jobs:
        page = table.written(page, "jobs", f"{head}.\n\n{jobs.table(outcome.jobs)}")
    if outcome.warm:
        page = table.written(page, "warm", f"{head}.\n\n{warm.table(outcome.warm)}")
    PAGE.write_text(page)


def check(outcome: Outcome, rounds: Mapping[str, int]) -> list[str]:
    """Find the figures that the page has otherwise, twice: the work of others on the machine is gone by then."""
    page = PAGE.read_text()
    found = table.departures(page, outcome.lines)
    again = {part: rounds[part] for part in found.values()}
    if again:
        lines = [line for line in compare(again).lines if line.row.part in again]
        found = table.departures(page, lines)
    return list(found)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench", description="Compare our server with HTCondor's own.")
    parser.add_argument("--rounds", type=int, default=ROUNDS, metavar="N", help=f"default: {ROUNDS}")
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="WORD",
        help="the rows with all the words, and their part; or scale, jobs, warm",
    )
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="every value, for a program")
    output.add_argument("--write", action="store_true", help=f"write the tables into {PAGE.name}")
    output.add_argument(
        "--check", action="store_true", help=f"compare with the first table of {PAGE.name}; exit 1 where it differs"
    )
    options = parser.parse_args(argv)
    rounds = rounds_of(options.rounds, options.only)
    titles = () if options.check else (scale.TITLE, jobs.TITLE, warm.TITLE)
    parts = [title for title in titles if all(word.casefold() in title for word in options.only)]
    if options.rounds < 1:
        parser.error("there must be a round")
    if not (rounds or parts):
        parser.error(f"no row has the words {' '.join(options.only)}")
    if options.write and rounds and options.only:
        parser.error("the page has all rows")
    reason = why_not() or (cloud_image.why_none() if warm.TITLE in parts else "")
    if reason:
        parser.exit(1, f"scripts/bench: {reason}\n")
    try:
        outcome = compare(rounds, parts)
        departed = check(outcome, rounds) if options.check else []
    except LabError as error:
        parser.exit(1, f"scripts/bench: {error}\n")
    if options.json:
        report = {
            "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "processors": os.cpu_count(),
            "versions": outcome.versions,
            "rows": table.report(outcome.lines),
            "scale": [
                {"title": column.title, "servers": column.servers, **values}
                for column, values in zip(scale.COLUMNS, outcome.columns, strict=False)
            ],
            "jobs": outcome.jobs,
            "warm": [
                {"jobs": f"{n} {does}", **values} for (n, does), values in zip(warm.COLUMNS, outcome.warm, strict=False)
            ],
        }
        print(json.dumps(report, indent=1))
        return 0
    print(table.head(outcome.versions))
    if outcome.lines:
        print(f"\n{table.table(outcome.lines)}")
    if outcome.columns:
        print(f"\n{scale.table(outcome.columns)}")
    if outcome.jobs:
        print(f"\n{jobs.table(outcome.jobs)}")
    if outcome.warm:
        print(f"\n{warm.table(outcome.warm)}")
    if options.write:
        write(outcome)
    if options.check:
        print("", *departed or ["All is as the page says."], sep="\n")
    return 1 if departed else 0


if __name__ == "__main__":
    sys.exit(main())
