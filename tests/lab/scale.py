"""Says what many VMs cost: measured on one node, and reckoned for a pool of 10,000.

`scale_measure` finds the unit costs, which ``scale.json`` beside this keeps; `scale_model` reckons with them, and here
the tables of ``docs/explanation/scale.md`` are made of both.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from tests.lab import scale_model
from tests.lab.namespace import REPOSITORY, LabError, why_not
from tests.lab.scale_model import GIB, PoolSize

UNITS = Path(__file__).with_name("scale.json")
PAGE = REPOSITORY / "docs/explanation/scale.md"

Units = dict[str, Any]
Tables = dict[str, Callable[[PoolSize, Units], str]]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Rows as Markdown has them; all columns but the first are figures, where they begin with one."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def seconds(value: float) -> str:
    """A time with two digits that mean something."""
    if value < 0.001:
        return f"{value * 1e6:.0f} µs"
    if value < 1:
        return f"{value * 1e3:.2g} ms" if value < 0.1 else f"{value * 1e3:.0f} ms"
    if value < 120:
        return f"{value:.1f} s" if value < 10 else f"{value:.0f} s"
    return f"{value / 60:.0f} min" if value < 7200 else f"{value / 3600:.1f} h"


def size(value: float) -> str:
    """Bytes."""
    for unit, bytes_ in (("TiB", 1 << 40), ("GiB", GIB), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if value >= bytes_:
            number = value / bytes_
            return f"{number:.0f} {unit}" if number >= 100 else f"{number:.1f} {unit}"
    return f"{value:.0f}"


def _mib(kib: float) -> str:
    return f"{kib / 1024:.1f}"


def measured(_pool: PoolSize, units: Units) -> str:
    """What was measured, where and when."""
    versions = ", ".join(f"{name} {version}" for name, version in units["versions"].items())
    return f"Measured on {units['when']} with {units['processors']} shared processors: {versions}."


def node(_pool: PoolSize, units: Units) -> str:
    """Many servers with a VM each on one machine: a column for each number of them."""
    columns = [("libvirt's test driver", found) for found in units["simulated"]]
    columns += [("QEMU, emulated", found) for found in units["real"]]
    rows: dict[str, Callable[[Units, int], str]] = {
        "a server's own memory, MiB": lambda found, number: _mib(found["live"]["Anonymous"] / number),
        "its PSS": lambda found, number: _mib(found["live"]["Pss"] / number),
        "its own before START": lambda found, number: _mib(found["idle"]["Anonymous"] / number),
        "a guardian's PSS": lambda found, number: _mib(found["guardians"]["Pss"] / number),
        "libvirtd's own memory": lambda found, _: _mib(found["libvirtd"]["Anonymous"]),
        "threads of a server": lambda found, number: f"{found['threads'] / number:.0f}",
        "its descriptors": lambda found, number: f"{found['descriptors'] / number:.0f}",
        "STATUS, one after the other: median": lambda found, _: seconds(found["STATUS of one"]["median"]),
        "95 %": lambda found, _: seconds(found["STATUS of one"]["p95"]),
        "STATUS of all at once: the last": lambda found, _: seconds(found["STATUS of all"]["max"]),
        "START of all at once: half": lambda found, _: seconds(found["start"]["median"]),
        "the last": lambda found, _: seconds(found["start"]["max"]),
        "a processor's time for each": lambda found, _: seconds(found["CPU seconds a START"]),
        "SIGKILL to all at once: the last VM is gone": lambda found, _: seconds(found["death"]["last VM"]),
        "the last guardian": lambda found, _: seconds(found["death"]["last guardian"]),
        "memory for it, MiB": lambda found, _: _mib(found["death"]["memory"]),
    }
    return table(
        ["", *(f"{number['servers']}: {what}" for what, number in columns)],
        [[what, *(figure(found, found["servers"]) for _, found in columns)] for what, figure in rows.items()],
    )


def dying(_pool: PoolSize, units: Units) -> str:
    """What else was seen of them: at rest, and where libvirtd dies as well."""
    most, alone = units["simulated"][-1], units["without libvirtd"]
    return (
        f"While nobody asks, each of {most['servers']} servers uses {most['CPU seconds an hour']:.2f} seconds of a "
        f"processor in an hour. Where libvirtd is killed with {alone['servers']} servers and does not come back, the "
        f"guardians wait for it and then kill QEMU themselves: the last guest is gone after "
        f"{seconds(alone['death']['last VM'])}."
    )


def left(_pool: PoolSize, units: Units) -> str:
    """What was left when all servers had been killed."""
    remains = [
        (found["left"]["processes"], found["left"]["directories"]) for found in units["simulated"] + units["real"]
    ]
    files = sorted({name for found in units["simulated"] + units["real"] for name in found["left"]["files"]})
    names = ", ".join(f"`{name}`" for name in files)
    if any(processes or directories for processes, directories in remains):
        return f"Left behind: {remains}."
    return f"Nothing is left: no VM, no process, no socket. The scratch directories have {names}, which are the job's."


def pool(pool: PoolSize, _units: Units) -> str:
    """What is assumed."""
    return table(
        ["assumed", ""],
        [
            ["nodes, and VMs on each", f"{pool.nodes:,} with {pool.vms} each, {pool.all_vms:,} in all"],
            ["access points", f"{pool.access_points}"],
            ["lines: access point, node, server of shared files", _lines(pool)],
            ["an image; what a boot reads of it; what a guest writes", _sizes(pool)],
            ["a guest's memory, half of it never touched", f"{pool.memory_gib:g} GiB"],
            ["what a node's disk writes", f"{pool.disk_mib:g} MiB in a second"],
            ["how long a job runs", f"{pool.hours:g} h, so {pool.jobs_a_second:.1f} jobs end and begin in a second"],
        ],
    )


def _lines(pool: PoolSize) -> str:
    return f"{pool.access_gbit:g}, {pool.node_gbit:g}, {pool.shared_gbit:g} Gbit/s"


def _sizes(pool: PoolSize) -> str:
    return f"{pool.image_gib:g}, {pool.boot_gib:g}, {pool.written_gib:g} GiB"


def job(pool: PoolSize, units: Units) -> str:
    """Bytes that a job moves."""
    rows = [
        [
            flow.way.name,
            size(flow.way.sent),
            size(flow.way.back),
            size(flow.way.read),
            f"{flow.gbit:.1f}",
            str(flow.access_points),
        ]
        for flow in scale_model.flows(pool, units)
    ]
    head = [
        "the job's disk",
        "sent",
        "sent back",
        "read from the shared files",
        "Gbit/s of the pool",
        "access points that takes",
    ]
    return table(head, rows)


def filling(pool: PoolSize, _units: Units) -> str:
    """An empty pool that fills with transferred images."""
    rows = [[each.what, seconds(each.half), seconds(each.last)] for each in scale_model.fillings(pool)]
    return table(["transfers of an access point", "half of its VMs run", "the last one runs"], rows)


def overlay(_pool: PoolSize, units: Units) -> str:
    """What the plugin takes."""
    found = units["plugin"]
    return (
        f"The plugin makes an overlay in {seconds(found['seconds'])}, {seconds(found['cpu'])} of it on a processor; "
        f"it has {size(found['bytes'])}, and opens the base {found['opened']:.0f} times."
    )


def probe(_pool: PoolSize, units: Units) -> str:
    """What one probe takes."""
    first, later = units["probe"]["first"], units["probe"]["later"]
    return (
        f"The first probe after a boot takes {seconds(first['seconds'])} and {seconds(first['cpu'])} of the node's "
        f"processor, later ones {seconds(later['seconds'])} and {seconds(later['cpu'])}. With a catalog of one image "
        f"it opens {units['probe']['image files opened']:.0f} files of that."
    )


def storm(pool: PoolSize, units: Units) -> str:
    """Probes after a power cut."""
    rows = [
        [f"{each.spread} s", seconds(each.last), f"{each.updates:,}", f"{each.collector:.1%}", f"{each.opened:,}"]
        for each in scale_model.storms(pool, units)
    ]
    head = ["startds start within", "last VM-capable node", "most updates a second", "of the collector's processor"]
    return table([*head, "most files opened a second"], rows)


def ads(pool: PoolSize, units: Units) -> str:
    """Growth of ads."""
    unit, grown = units["ads"], scale_model.ad_growth(pool, units)
    number, match = unit["number"], unit["match"]
    without, full = unit["attributes"] - unit["added attributes"], unit["attributes"]
    rows = [
        ["a machine's ad: attributes", f"{without}", f"{full}"],
        ["its bytes", f"{unit['bytes'] - unit['added bytes']:,}", f"{unit['bytes']:,}"],
        [
            "the collector's memory for it, KiB",
            f"{unit['collector KiB without'] / number:.1f}",
            f"{unit['collector KiB with'] / number:.1f}",
        ],
        [
            "the collector's time for an update, µs",
            f"{unit['collector seconds without'] / number * 1e6:.0f}",
            f"{unit['collector seconds with'] / number * 1e6:.0f}",
        ],
        [
            "a match, µs",
            f"{match['plain']:.1f}",
            f"{match['with ours']:.1f}; {match['asking']:.1f} by a job that asks for ours",
        ],
        [f"{grown.ads:,} ads in the collector, GiB", f"{grown.without_gib:.2f}", f"{grown.with_gib:.2f}"],
        [f"{grown.updates:.0f} updates a second, Mbit/s", f"{grown.network_without:.1f}", f"{grown.network_with:.1f}"],
        [
            f"{pool.autoclusters} autoclusters meet {pool.nodes:,} nodes, s",
            f"{grown.cycle_without:.1f}",
            f"{grown.cycle_with:.1f}",
        ],
        ["a job's ad, bytes", f"{unit['job']['bytes'] - unit['job']['VM bytes']:,}", f"{unit['job']['bytes']:,}"],
    ]
    return table(["", "without", "with"], rows)


def boot(pool: PoolSize, _units: Units) -> str:
    """A thousand guests that boot at once."""
    rows = [[each.what, size(each.bytes), seconds(each.half), seconds(each.last)] for each in scale_model.boots(pool)]
    return table(["1,000 guests", "from the server", "half have read it", "the last has"], rows)


def drain(pool: PoolSize, units: Units) -> str:
    """A rack that is drained."""
    rows = [
        [str(40 * each.vms), size(each.bytes), seconds(each.saved), seconds(each.last), f"{each.lost:,}"]
        for each in scale_model.drains(pool, units)
    ]
    return table(
        [
            "VMs on 40 nodes",
            "bytes",
            "all saved after",
            "all home after",
            f"not home in {scale_model.VACATE_SECONDS} s",
        ],
        rows,
    )


def checkpoint(_pool: PoolSize, units: Units) -> str:
    """What one checkpoint takes."""
    unit = units["checkpoint"]
    return (
        f"A guest of {unit['MiB']} MiB, half of it random and the rest never touched, is checkpointed in "
        f"{seconds(unit['seconds'])} to {size(unit['bytes'])}, where the disk does not slow it down."
    )


def limit(pool: PoolSize, units: Units) -> str:
    """HTCondor's own limits."""
    head = ["limit", "HTCondor's default", "met", "turn it to"]
    return table(head, [list(each) for each in scale_model.limits(pool, units)])


TABLES: Tables = {
    "measured": measured,
    "node": node,
    "dying": dying,
    "left": left,
    "pool": pool,
    "job": job,
    "overlay": overlay,
    "filling": filling,
    "probe": probe,
    "storm": storm,
    "ads": ads,
    "boot": boot,
    "checkpoint": checkpoint,
    "drain": drain,
    "limit": limit,
}


def read_units() -> Units:
    """The unit costs of the last measurement."""
    found = json.loads(UNITS.read_text())
    assert isinstance(found, dict)
    return found


def written(page: str, units: Units, size: PoolSize | None = None) -> str:
    """The page with all of its tables made anew. Raises `LabError` where it has not one place for each."""
    for name, make in TABLES.items():
        place = re.compile(rf"(?<=<!-- {name} -->\n).*?(?=\n<!-- /{name} -->)", re.DOTALL)
        content = make(size or PoolSize(), units)
        page, found = place.subn(lambda _, content=content: content, page)  # type: ignore[misc]
        if found != 1:
            raise LabError(f"{PAGE.name} has {found} places for {name}")
    return page


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="scripts/scale", description=__doc__.partition("\n")[0])
    parser.add_argument("--measure", action="store_true", help="measure the unit costs anew, in some minutes")
    parser.add_argument("--write", action="store_true", help=f"put the tables into {PAGE.relative_to(REPOSITORY)}")
    options = parser.parse_args(argv)
    try:
        if options.measure:
            if reason := why_not():
                raise LabError(reason)
            from tests.lab import scale_measure

            units = scale_measure.measure(None, lambda line: print(line, file=sys.stderr, flush=True))
            UNITS.write_text(json.dumps(scale_measure.rounded(units), indent=1) + "\n")
        units = read_units()
        if options.write:
            PAGE.write_text(written(PAGE.read_text(), units))
    except LabError as error:
        print(f"scripts/scale: {error}", file=sys.stderr)
        return 1
    if not options.write:
        print("\n\n".join(make(PoolSize(), units) for make in TABLES.values()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
