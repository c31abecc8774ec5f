"""Compares our server with HTCondor's own: both in one namespace, in turns, from their client's side.

Times and memory of a shared machine wander, so every round measures both servers one right after the
other, and what counts is the ratio. Its interval says how far to trust it: where that spans 1 there is no
difference to speak of. `stopwatch` does the measuring, inside the namespace.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.lab.guest import make_guest
from tests.lab.namespace import LAB, OUR_SERVER, REFERENCE_SERVER, LabError, Namespace, build_wheel, wait_until, why_not
from tests.lab.pool import CONFIG, DOMAIN, USER

OURS, REFERENCE = "this", "reference"
JOB_AD = Path(__file__).with_name("job.ad")
"""The 146 attributes of a job that came by way of DAGMan, as condor_starter sends them."""
SCRATCH = "/var/lib/condor/execute/dir_170"
GUARDIAN = "vmgahp-guardian"
"""The name by which the guardian of a VM goes, in `vmgahp.host.guardian`; it is nobody's child."""
WATCH = "/usr/local/sbin/stopwatch-python"
"""A copy of the namespace's interpreter: the kernel does not share its pages with those of our server, so
the one that measures takes nothing off what it measures."""

ROUNDS, ROUNDS_A_VM = 20, 2
"""How many rounds there are, and in how many of them (one in so many) a VM is started as well."""
DEADLINE = 600
"""Seconds for the whole measurement."""
TOO_MUCH = 1.5
"""A ratio above this needs a reason."""
RESAMPLES = 2000

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

# The reference runs a guest by emulation only where a script describes the VM.
SCRIPT = """\
#!/bin/sh
name=$(sed -n 's/^VMPARAM_VM_NAME *= *"\\(.*\\)"$/\\1/p')
cat <<XML
<domain type='qemu'>
  <name>$name</name>
  <memory unit='MiB'>64</memory>
  <os><type>hvm</type></os>
  <features><acpi/></features>
  <devices>
    <disk type='file' device='disk'>
      <driver name='qemu' type='raw'/><source file='{scratch}/guest.img'/><target dev='hda' bus='ide'/>
    </disk>
  </devices>
</domain>
XML
"""


class Row(NamedTuple):
    """A row of the table: its name for `stopwatch`, what it is in words, and what must be known of it."""

    key: str
    title: str
    unit: str
    remark: str = ""


MICRO, MILLI, MIB = "µs", "ms", "MiB"
SCALE = {MICRO: 1000.0, MILLI: 1.0, MIB: 1 / 1024}

PROBE = (
    "Ours runs a guest on /dev/kvm, which takes 0.3 s where KVM opens and does not work, and asks libvirt"
    " for an emulator; the reference does neither."
)
START = "Ours tries KVM first, as in the probe, and has a guardian and a capture of the console."
SHARED = "PSS divides a page by the processes that share it; beside the servers those are libvirtd's and HTCondor's."
GUARDED = "The guardian of the VM is included."
OWN = "Anonymous pages: what no other process shares."
ROWS = (
    Row("greeting", "from exec to the greeting", MILLI),
    Row("first reply", "from exec to the first reply", MILLI),
    Row("VERSION", "VERSION", MICRO),
    Row("lone VERSION", "VERSION after a pause", MICRO),
    Row("STATUS", "STATUS and RESULTS, no VM", MICRO),
    Row("CLASSAD", "job ad, a line at a time", MICRO),
    Row("CLASSAD at once", "job ad, at once", MICRO),
    Row("probe", "the probe", MILLI, PROBE),
    Row("START", "START to its result", MILLI, START),
    Row("live STATUS", "STATUS and RESULTS, a VM", MICRO),
    Row("QUIT", "QUIT to the end, a VM", MILLI, "The reference sleeps for two seconds when its VM is gone."),
    Row("idle Rss", "RSS after the job ad", MIB),
    Row("idle Pss", "PSS after the job ad", MIB, SHARED),
    Row("idle Anonymous", "its own after the job ad", MIB, OWN),
    Row("live Rss", "RSS with a VM", MIB, GUARDED),
    Row("live Pss", "PSS with a VM", MIB, SHARED),
    Row("live Anonymous", "its own with a VM", MIB, OWN),
)


class Spread(NamedTuple):
    """A figure and the interval that it comes with."""

    value: float
    low: float
    high: float


Samples = Mapping[str, Mapping[str, Mapping[int, float]]]
"""Row -> server -> round -> value."""


# ---- statistics -------------------------------------------------------------------------------------


def quartiles(values: Sequence[float]) -> Spread:
    """The median with the quartiles; all the same for a single value."""
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(middle, low, high)


def ratio(ours: Sequence[float], theirs: Sequence[float], seed: int = 1) -> Spread:
    """The ratio of the medians, with the interval that 95 % of bootstrap resamples fall into.

    The two come in pairs, one a round, and are drawn in pairs: what a round's noise does to both is not
    taken for a difference between them. The drawing is the same for the same values.
    """
    pairs = list(zip(ours, theirs, strict=True))
    draw = random.Random(seed)
    resampled = sorted(_ratio_of_medians(draw.choices(pairs, k=len(pairs))) for _ in range(RESAMPLES))
    edge = RESAMPLES // 40
    return Spread(_ratio_of_medians(pairs), resampled[edge], resampled[-edge - 1])


def _ratio_of_medians(pairs: Sequence[tuple[float, float]]) -> float:
    return statistics.median(a for a, _ in pairs) / statistics.median(b for _, b in pairs)


class Line(NamedTuple):
    """What is known of a row in the end."""

    row: Row
    ours: Spread
    theirs: Spread
    ratio: Spread


def summarize(samples: Samples) -> list[Line]:
    """The lines of all rows that were measured, in the order of `ROWS`; rounds without a pair do not count."""
    lines = []
    for row in ROWS:
        ours, theirs = (samples.get(row.key, {}).get(server, {}) for server in (OURS, REFERENCE))
        rounds = sorted(ours.keys() & theirs.keys())
        if rounds:
            a, b = ([values[turn] * SCALE[row.unit] for turn in rounds] for values in (ours, theirs))
            lines.append(Line(row, quartiles(a), quartiles(b), ratio(a, b)))
    return lines


# ---- output -----------------------------------------------------------------------------------------


def table(lines: Sequence[Line]) -> str:
    """The lines as text: medians with quartiles, ratios with their intervals, remarks below."""
    remarks = list(dict.fromkeys(line.row.remark for line in lines if line.row.remark))
    cells = [["", "", OURS, REFERENCE, f"{OURS} / {REFERENCE}", ""]]
    for line in lines:
        marks = ["!"] if line.ratio.value > TOO_MUCH else []
        if line.row.remark:
            marks.append(f"[{remarks.index(line.row.remark) + 1}]")
        figures = [_figure(spread, _digits(spread)) for spread in (line.ours, line.theirs)]
        cells.append([line.row.title, line.row.unit, *figures, _figure(line.ratio, 2), " ".join(marks)])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    text = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]
    text += ["", f"Medians (quartiles); ratio of the medians (95 % of resamples), ! where above {TOO_MUCH}."]
    text += [f"[{number}] {remark}" for number, remark in enumerate(remarks, start=1)]
    return "\n".join(text)


def _figure(spread: Spread, digits: int) -> str:
    return f"{spread.value:.{digits}f} ({spread.low:.{digits}f} - {spread.high:.{digits}f})"


def _digits(spread: Spread) -> int:
    """Three digits are more than such a figure is good for already."""
    return 2 if spread.value < 10 else 1 if spread.value < 100 else 0


def report(lines: Sequence[Line], samples: Samples, versions: Mapping[str, str]) -> dict[str, Any]:
    """The same for a program, every single value included."""
    return {
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "processors": os.cpu_count(),
        "versions": dict(versions),
        "rows": [
            {
                "name": line.row.key,
                "title": line.row.title,
                "unit": line.row.unit,
                OURS: line.ours._asdict(),
                REFERENCE: line.theirs._asdict(),
                "ratio": line.ratio._asdict(),
                "values": {
                    server: [value * SCALE[line.row.unit] for value in of_round.values()]
                    for server, of_round in samples[line.row.key].items()
                },
            }
            for line in lines
        ],
    }


# ---- measuring --------------------------------------------------------------------------------------


def prepare(namespace: Namespace, wheel: Path) -> None:
    """Everything that both servers find on a machine of a pool, and what measures them."""
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

    make_guest(namespace.exchange / "guest.img", None)
    script = namespace.exchange / "describe-vm"
    script.write_text(SCRIPT.format(scratch=SCRATCH))
    script.chmod(0o755)
    shutil.copy(Path(__file__).with_name("stopwatch.py"), namespace.exchange)
    namespace.run("cp", "--dereference", "/usr/bin/python3", WATCH)


def task(namespace: Namespace, rounds: int) -> dict[str, Any]:
    """What `stopwatch` is to do. Both servers get what condor_starter and condor_startd would give them."""
    uid, gid = (namespace.run("id", option, USER).stdout.strip() for option in ("-u", "-g"))
    return {
        "rounds": rounds,
        "vm_rounds": -(-rounds // ROUNDS_A_VM),
        "servers": {
            OURS: {"argv": [OUR_SERVER], "environment": {}},
            REFERENCE: {
                "argv": [REFERENCE_SERVER],
                "environment": {"_CONDOR_LIBVIRT_XML_SCRIPT": f"{LAB}/describe-vm"},
            },
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
        "image": f"{LAB}/guest.img",
        "errors": f"{LAB}/errors",
        "helpers": GUARDIAN,
    }


def measure(namespace: Namespace, rounds: int, heard: Callable[[Mapping[str, Any]], object]) -> Samples:
    """Run `stopwatch` and collect what it finds; `heard` is called with each value as it comes."""
    errors = namespace.exchange / "stopwatch.err"
    with errors.open("w") as file:
        watch = namespace.popen(
            *("timeout", str(DEADLINE), WATCH, "-I", f"{LAB}/stopwatch.py"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=file,
        )
        assert watch.stdin
        assert watch.stdout
        with watch:
            watch.stdin.write(json.dumps(task(namespace, rounds)))
            watch.stdin.close()
            samples = collect(_passed_on(map(json.loads, watch.stdout), heard))
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


def collect(values: Iterable[Mapping[str, Any]]) -> Samples:
    """Put the values of `stopwatch` in their places."""
    samples: dict[str, dict[str, dict[int, float]]] = {}
    for found in values:
        of_server = samples.setdefault(found["row"], {}).setdefault(found["server"], {})
        of_server[found["round"]] = found["value"]
    return samples


def versions(namespace: Namespace) -> dict[str, str]:
    """What was compared, and with which Python."""
    ours, theirs, python = (
        namespace.run(*command).stdout
        for command in ([OUR_SERVER, "-version"], ["condor_version"], ["/usr/bin/python3", "--version"])
    )
    return {OURS: ours.split()[1], REFERENCE: theirs.split()[1], "python": python.split()[1]}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench", description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS, metavar="N", help=f"default: {ROUNDS}")
    parser.add_argument("--json", action="store_true", help="every value, for a program")
    options = parser.parse_args(argv)
    if options.rounds < 1:
        parser.error("there must be a round")
    reason = why_not()
    if reason:
        parser.exit(1, f"scripts/bench: {reason}\n")

    def show(found: Mapping[str, Any]) -> None:
        if sys.stderr.isatty():
            sys.stderr.write(f"\r\x1b[K  round {found['round'] + 1} of {options.rounds}: {found['row']}")
            sys.stderr.flush()

    try:
        with tempfile.TemporaryDirectory(prefix="vmgahp-bench-") as directory:
            wheel = build_wheel(directory)
            with Namespace(Path(directory) / "exchange") as namespace:
                prepare(namespace, wheel)
                compared = versions(namespace)
                samples = measure(namespace, options.rounds, show)
    except LabError as error:
        parser.exit(1, f"scripts/bench: {error}\n")
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[K")
    lines = summarize(samples)
    if options.json:
        print(json.dumps(report(lines, samples, compared), indent=1))
    else:
        print(f"vmgahp {compared[OURS]} by Python {compared['python']}, HTCondor {compared[REFERENCE]};", end=" ")
        print(f"{options.rounds} rounds, {os.cpu_count()} processors\n")
        print(table(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
