"""The seconds that a job takes beside its guest, in a pool of each server, with HTCondor's own intervals."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from tests.lab import reference
from tests.lab.guest import make_guest
from tests.lab.namespace import LAB, OUR_SERVER, REFERENCE_SERVER
from tests.lab.pool import Pool

from bench.table import OURS, REFERENCE

TITLE = "jobs: seconds beside the guest"
"""The name that ``--only`` knows it by."""
GUESTS = (5, 45, 90)
"""The seconds that the guests count before they power off."""
GOAL = 35
"""The most seconds that a job may cost; 30 of them are the starter's own sleep."""
DEADLINE = 900
"""Seconds for a job."""

SETTINGS = "VM_STATUS_INTERVAL = 60\nVM_GAHP_DEBUG =\n"
SERVERS = {
    OURS: (OUR_SERVER, SETTINGS),
    REFERENCE: (REFERENCE_SERVER, f"{SETTINGS}LIBVIRT_XML_SCRIPT = {LAB}/describe-vm\n"),
}


def measure(directory: Path, server: str, wheel: Path) -> dict[int, float]:
    """Run the jobs side by side in a pool of one server; return the seconds of each beside those of its guest."""
    with Pool(directory, *SERVERS[server]).running(wheel, lambda pool: reference.describe(pool.directory)) as pool:
        pool.offering()
        jobs = {seconds: pool.submit(f"guest-{seconds}", partial(_make_guest, seconds)) for seconds in GUESTS}
        found = {}
        for seconds, job in jobs.items():
            job.wait_for_event("terminated", DEADLINE)
            ad = job.ad()
            found[seconds] = float(ad["CompletionDate"] - ad["JobCurrentStartExecutingDate"] - seconds)
        return found


def _make_guest(seconds: int, home: Path) -> None:
    make_guest(home / "guest.img", seconds)


def table(found: Mapping[str, Mapping[int, float]]) -> str:
    """Make a table of Markdown, a row for each guest."""
    lines = [["a guest of", *found, "goal"], ["---"] * (len(found) + 2)]
    for seconds in GUESTS:
        lines.append([f"{seconds} s", *(f"{column[seconds]:.0f} s" for column in found.values()), f"{GOAL} s"])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
