"""From a file to libvirt and back: the same machine, or what differs was named in the report.

The file is a writer's, the lines are read by HTCondor, the domain by libvirt, and none of the readers is ours.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest
from hypothesis import strategies as st

from tests.commands.submit import oracle, samples
from tests.commands.submit.oracle import Seen
from tests.commands.submit.writers import WRITERS, Machine, Written, machines, named
from tests.conftest import JOB_UID, examples
from tests.drivers.libvirt.support import libvirtd
from vmgahp.cli import main

if TYPE_CHECKING:
    import libvirt

pytestmark = pytest.mark.libvirt

CARRIED = "carried over"


@pytest.fixture(scope="module")
def connection() -> Iterator[libvirt.virConnect]:
    with libvirtd() as opened:
        yield opened


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An image of each format."""
    directory = tmp_path_factory.mktemp("images")
    made = {form: directory / f"image.{form}" for form in ("qcow2", "vmdk")}
    for form, path in made.items():
        samples.image(path, form)
    made["raw"] = directory / "image.raw"
    made["raw"].write_bytes(bytes(1474560))
    return made


class Room:
    """A directory with a file of somebody's and its images, and a scratch directory of a job's."""

    def __init__(self, outer: str) -> None:
        os.chmod(outer, 0o755)
        self.home, self.scratch = Path(outer, "home"), Path(outer, "dir_1")
        for directory in (self.home, self.scratch):
            directory.mkdir()
        if os.getuid() == 0:
            os.chown(self.scratch, JOB_UID, JOB_UID)

    def fill(self, machine: Machine, images: dict[str, Path]) -> None:
        for unit in machine.units:
            shutil.copyfile(images[unit.drive.form], self.home / unit.drive.file)


def differences(machine: Machine, seen: Seen) -> Iterator[tuple[str, object, object]]:
    """What is not as it was: of what (an image, ``nic0``, a field), how it was, how it is."""
    for field in ("memory_mib", "vcpus", "arch", "firmware", "tpm", "display"):
        before, now = getattr(machine.seen, field), getattr(seen, field)
        if before != now:
            yield field, before, now
    if machine.seen.topology and machine.seen.topology != seen.topology:
        yield "topology", machine.seen.topology, seen.topology
    found = {drive.file.partition(".")[0]: drive for drive in seen.drives}
    for unit in machine.units:
        before, now = unit.drive, found.pop(unit.drive.file.partition(".")[0], None)
        if now is None:
            yield before.file, before, None
            continue
        now = now._replace(bus="floppy" if now.bus == "fdc" else now.bus, file=before.file, device="")
        if before != now:
            yield before.file, before, now
    for drive in found.values():
        yield drive.file, None, drive
    for number in range(max(len(machine.seen.cards), len(seen.cards))):
        card, other = ((*cards, None, None)[number] for cards in (machine.seen.cards, seen.cards))
        if card != other:
            yield f"nic{number}", card, other
    if wrong := _order(machine, [drive.file.partition(".")[0] for drive in seen.drives]):
        yield "boot", *wrong


def _order(machine: Machine, order: list[str]) -> tuple[object, object] | None:
    """What is wrong with the order in which drives are tried."""
    units = {unit.drive.file.partition(".")[0]: unit for unit in machine.units}
    explicit = sorted((unit.boot, stem) for stem, unit in units.items() if unit.boot and stem in order)
    if explicit:
        wanted = [stem for _, stem in explicit]
        return None if order[: len(wanted)] == wanted else (wanted, order)
    kinds = [units[stem].drive.kind for stem in order if stem in units]
    firsts = list(dict.fromkeys(kinds))
    classes = [kind for kind in machine.classes or ("disk", "cdrom", "floppy") if kind in kinds]
    if firsts[: len(classes)] != classes:
        return classes, firsts
    buses = {stem: (unit.drive.kind, unit.drive.bus) for stem, unit in units.items()}
    for bus in dict.fromkeys(buses.values()):  # natural within each
        alike = [stem for stem in order if buses.get(stem) == bus]
        wanted = sorted(alike, key=lambda stem: units[stem].number)
        if alike != wanted:
            return wanted, alike
    return None


Run = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs the command in a room: its exit status and its report."""

    def command(room: Room, *words: str) -> tuple[int, dict[str, Any]]:
        monkeypatch.chdir(room.home)
        capsys.readouterr()
        status = main(["vmgahp", "submit", *words, "--json", "-o", "job.sub", "--force"])
        return status, json.loads(capsys.readouterr().out)

    return command


def complaints(
    room: Room, machine: Machine, written: Written, run: Run, connection: libvirt.virConnect
) -> Iterator[str]:
    """What is wrong with what a front end makes of a machine, and says of it."""

    def outcomes(what: str) -> set[str]:
        return {entry["outcome"] for entry in report["entries"] if named(written.places, what, entry["place"])}

    words = written.kind, f"source.{written.suffix}", *written.options
    Path(room.home, words[1]).write_text(written.text)
    status, report = run(room, *words)
    hypothesis.note(json.dumps(report, indent=1))
    if status:
        yield f"refused: {report['problem']}"
        return
    text = (room.home / "job.sub").read_text()
    hypothesis.note(text)
    devices = [unit.drive.file for unit in machine.units] + [f"nic{place}" for place in range(len(machine.seen.cards))]
    for what in devices:
        if not outcomes(what):
            yield f"{what} is not told of"
    for what, before, now in differences(machine, judged(room.scratch, text, connection)):
        if not outcomes(what) - {CARRIED}:
            yield f"{what} was {before} and is {now}"


@pytest.mark.parametrize("dialect", WRITERS)
@hypothesis.settings(
    max_examples=examples(40),
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture, hypothesis.HealthCheck.too_slow],
)
@hypothesis.given(data=st.data())
def test_a_machine_comes_back_as_it_was_or_the_report_says_what_did_not(dialect, data, run, images, connection):
    words, write = WRITERS[dialect]
    machine = data.draw(machines(words))
    written = write(machine)
    hypothesis.note(written.text)
    with tempfile.TemporaryDirectory(prefix="vmgahp-test-") as outer:
        room = Room(outer)
        room.fill(machine, images)
        assert list(complaints(room, machine, written, run, connection)) == []


def judged(scratch: Path, text: str, connection: libvirt.virConnect) -> Seen:
    """The machine that libvirt would run of a submit file."""
    oracle.bring(text, scratch)
    with contextlib.closing(oracle.driver_at(scratch)) as driver:
        domain = driver.describe(oracle.ad_of(text, scratch))
    return oracle.seen(oracle.defined(connection, domain))
