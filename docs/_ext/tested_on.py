"""The systems that the tests have run on, as the record of the newest full run has them (``tests/tried.json``)."""

import json
from pathlib import Path

TRIED = Path(__file__).resolve().parents[2] / "tests/tried.json"
COLUMNS = ("system", "libvirt", "QEMU", "HTCondor")
PARTS = {
    "unit": "everything that needs no guest",
    "user": "what an ordinary user does otherwise than root",
    "smoke on trixie": "the same, and a few guests",
    "smoke on sid": "the same, and a few guests",
    "libvirt": "all tests with guests, vSphere's simulator and stand-ins for other hypervisors",
    "attacks": "the [attacks](#attacks)",
    "faults": "the [faults](#faults)",
    "pool": "jobs in pools of HTCondor",
    "node": "jobs on whole machines, with systemd and AppArmor",
    "selinux": "the same, where SELinux enforces",
    "modular": "the same, with libvirt's modular daemons",
    "modular-faults": "a seventh of the [faults](#faults), with modular daemons",
    "xen": "guests and jobs in dom0 of a Xen",
    "fuzz": "the fuzzer",
}


def table(record: Path = TRIED) -> str:
    """Render the results of each part of the tests on each system."""
    parts = json.loads(record.read_text())["parts"]
    lines = [f"| what | {' | '.join(COLUMNS)} | tests | failed | date |\n", "|---" * (len(COLUMNS) + 4) + "|\n"]
    for name, what in PARTS.items():
        part = parts.get(name)
        if part is None:
            lines.append(f"| {what} |{' |' * len(COLUMNS)} not recorded yet | | |\n")
            continue
        for system, tests in part.get("ran on", []) or [[{"system": part["system"]}, part.get("passed", "")]]:
            seen = [_name(system), *(system.get(column, "") for column in COLUMNS[1:])]
            failed = part.get("failed", "")
            lines.append(f"| {what} | {' | '.join(seen)} | {tests} | {failed} | {part['date']} |\n")
    return "".join(lines)


def _name(system: dict[str, str]) -> str:
    """Name a system with what sets it apart."""
    known = (system[key] for key in ("security", "daemons", "hypervisor") if system.get(key))
    return ", ".join((system["system"], *known))
