"""A measurement of QEMU's need beside its guest's memory, and of the cost of a small cache of TCG.

Each VM is a Linux guest that boots, writes to most of its memory, and runs much code that is always other code, the
worst that a guest can do to TCG's cache. What counts is resident memory that is not the guest's, and QEMU's CPU time.

    sudo python -m bench.overhead [--write]      # into docs/explanation/memory.md
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree as etree

import libvirt
from tests.lab import linux_guest
from tests.lab.namespace import REPOSITORY

from bench import table
from vmgahp.domain import build
from vmgahp.host import proc

PAGE = REPOSITORY / "docs/explanation/memory.md"
DEADLINE = 900.0
"""Seconds for a guest to come to a stage."""
REST = 3
"""Seconds for which a guest rests at each stage, to be looked at."""
STAGES = UP, TOUCHED, WORKED = "booted", "written", "worked"
ROUNDS = 2

INIT = f"""#!/bin/busybox sh
/bin/busybox --install -s /bin
mount -t devtmpfs dev /dev; mount -t proc proc /proc; mkdir /m
echo 'STAGE {UP}'; sleep {REST}
mount -t tmpfs -o size=70% m /m; cat /dev/zero >/m/x 2>/dev/null
echo 'STAGE {TOUCHED}'; sleep {REST}; rm /m/x
for copy in $(seq 24); do mkdir /m/$copy; cp /bin/busybox /m/$copy; done
for round in $(seq {ROUNDS}); do for copy in $(seq 24); do b=/m/$copy/busybox
    $b seq 300 >/m/a; $b sort -rn /m/a >/m/b; $b awk '{{s+=$1*$1; t=t $1}} END {{print s, length(t)}}' /m/b >/m/c
    $b sed -n 's/1\\(.\\)/\\1x/p' /m/a >/m/c; $b gzip -c /m/a >/m/g; $b gunzip -c /m/g >/m/c; $b bzip2 -c /m/a >/m/c
    $b sha256sum /m/a >/m/c; $b md5sum /m/a >/m/c; $b tar cf /m/t /m/a 2>/m/c; $b find /proc/self >/m/c; $b vi -h 2>/m/c
    $b od -x /m/g >/m/c; $b diff /m/a /m/b >/m/c; echo '2^200' | $b dc >/m/c 2>&1; $b sh -c 'for i in 1 2 3; do :; done'
done; done
echo 'STAGE {WORKED}'; sleep 600
"""


class Case(NamedTuple):
    """One VM."""

    memory: int
    """MiB."""
    cpus: int = 1
    devices: str = ""
    """In a few words, as `DEVICES` has them."""
    cache: int = 0
    """MiB of TCG's; 0 for QEMU's own choice."""
    type: str = "qemu"


class Found(NamedTuple):
    """MiB beside the guest's memory at each stage, what is granted, and CPU seconds of the work."""

    case: Case
    beside: dict[str, int]
    granted: int
    seconds: float


DEVICES = {
    "": "",
    "display": "<graphics type='vnc' autoport='yes' listen='127.0.0.1'/>",
    "NIC": "<interface type='user'><model type='virtio'/></interface>",
    "display, NIC, 4 disks": "<graphics type='vnc' autoport='yes' listen='127.0.0.1'/>"
    "<interface type='user'><model type='virtio'/></interface>"
    + "".join(
        f"<disk type='file'><driver type='qcow2'/><source file='{{directory}}/{name}'/><target dev='{name}'/></disk>"
        for name in ("vda", "vdb", "vdc", "vdd")
    ),
}
CASES = (
    *(Case(memory, cache=64) for memory in (256, 512, 2048)),
    *(Case(512, cpus, cache=64) for cpus in (2, 4)),
    *(Case(512, 1, devices, 64) for devices in DEVICES if devices),
    *(Case(512, 1, cache=cache) for cache in (16, 32, 128, 256, 0)),
    *(Case(memory, type="kvm") for memory in (512, 2048)),
    Case(512, 4, "display", type="kvm"),
)


def measure(case: Case, connection: libvirt.virConnect) -> Found:
    """One VM, which is ended. Raises `TimeoutError`, `libvirt.libvirtError`."""
    with _directory() as directory:
        linux_guest.make(directory, init=INIT)
        console = directory / "console"
        domain = connection.createXML(_xml(case, directory), 0)
        try:
            pid = int(Path(f"/run/libvirt/qemu/{domain.name()}.pid").read_text())
            if case.type == "kvm":  # whose guests may crawl where it is nested: the firmware is all
                time.sleep(REST)
                return Found(case, {UP: beside(pid, case.memory)}, _granted(domain), 0.0)
            found, spent = {}, 0.0
            for stage in STAGES:
                _wait(console, f"STAGE {stage}")
                time.sleep(REST / 2)
                spent = proc.cpu_seconds(pid) - (spent if stage == WORKED else 0)
                found[stage] = beside(pid, case.memory)
            return Found(case, found, _granted(domain), spent)
        finally:
            domain.destroy()


def beside(pid: int, memory: int) -> int:
    """MiB of a QEMU that are resident and not its guest's memory, which is one mapping of that size."""
    resident, is_guests = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text(errors="replace").splitlines():
        if mapping := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            is_guests = int(mapping[2], 16) - int(mapping[1], 16) == memory << 20
        elif line.startswith("Rss:") and not is_guests:
            resident += int(line.split()[1])
    return round(resident / 1024)


def _granted(domain: libvirt.virDomain) -> int:
    return build.need_mib(etree.fromstring(domain.XMLDesc()))


def _xml(case: Case, directory: Path) -> str:
    cache = f"<tcg><tb-cache unit='MiB'>{case.cache}</tb-cache></tcg>" if case.cache else ""
    devices = DEVICES[case.devices].format(directory=directory)
    boot = (
        f"<kernel>{directory}/{linux_guest.KERNEL}</kernel><initrd>{directory}/{linux_guest.INITRD}</initrd>"
        "<cmdline>console=ttyS0 quiet loglevel=0 panic=-1</cmdline>"
    )
    cpu = "<cpu mode='maximum'/>" if case.type == "qemu" else ""
    features = f"<features><acpi/><apic/>{cache}</features>{cpu}"
    return f"""<domain type='{case.type}'><name>vmgahp-overhead</name><memory unit='MiB'>{case.memory}</memory>
        <vcpu>{case.cpus}</vcpu><os><type>hvm</type>{boot if case.type == "qemu" else ""}</os>{features}
        <devices><serial type='file'><source path='{directory}/console'/></serial>{devices}</devices></domain>"""


@contextmanager
def _directory() -> Iterator[Path]:
    """A place for what the guest is started from, which libvirt's QEMU can read."""
    with tempfile.TemporaryDirectory(prefix="vmgahp-overhead-", dir="/var/tmp") as made:
        directory = Path(made)
        directory.chmod(0o755)
        for name in ("vda", "vdb", "vdc", "vdd"):
            _qcow2(directory / name)
        yield directory


def _qcow2(path: Path) -> None:
    subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", path, "10G"], check=True)


def _wait(console: Path, word: str) -> None:
    end = time.monotonic() + DEADLINE
    while word not in console.read_text(errors="replace"):
        if time.monotonic() > end:
            raise TimeoutError(f"the guest has not said {word!r}: {console.read_text(errors='replace')[-500:]}")
        time.sleep(0.2)


def tables(found: Sequence[Found]) -> dict[str, list[str]]:
    """The tables of the page, by the names of their places."""
    need = [
        "| accelerator | memory | CPUs | more | cache | booted | all memory written | after the work | granted |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    speed = ["| cache | beside the guest's memory | CPU time of the work |", "| --- | --- | --- |"]
    for one in found:
        case = one.case
        cache = "" if case.type == "kvm" else f"{case.cache} MiB" if case.cache else "QEMU's own"
        stages = [f"{one.beside[stage]} MiB" if stage in one.beside else "" for stage in STAGES]
        name = {"qemu": "TCG", "kvm": "KVM, firmware only"}[case.type]
        row = [name, f"{case.memory} MiB", str(case.cpus), case.devices, cache, *stages, f"{one.granted} MiB"]
        need.append(f"| {' | '.join(row)} |")
    plain = [one for one in found if one.case._replace(cache=0) == Case(512)]
    for one in sorted(plain, key=lambda one: one.case.cache or 1 << 20):
        cache = f"{one.case.cache} MiB" if one.case.cache else "QEMU's own"
        speed.append(f"| {cache} | {one.beside[WORKED]} MiB | {one.seconds:.0f} s |")
    return {"need": need, "cache": speed}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help=f"put the tables into {PAGE.name}")
    arguments = parser.parse_args()
    if reason := linux_guest.why_not():
        sys.exit(reason)
    if not shutil.which("qemu-img"):
        sys.exit("there is no qemu-img")
    connection = libvirt.open("qemu:///system")
    found = []
    for case in CASES:
        one = measure(case, connection)
        found.append(one)
        print(case, one.beside, f"granted {one.granted}", f"{one.seconds:.1f} s", flush=True)
    made = tables(found)
    print("\n".join(line for lines in made.values() for line in ("", *lines)))
    if arguments.write:
        page = PAGE.read_text()
        for name, lines in made.items():
            page = table.written(page, name, "\n" + "\n".join(lines) + "\n")
        PAGE.write_text(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
