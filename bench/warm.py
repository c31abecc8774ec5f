"""The seconds from START to a program's first line: in a guest that boots, and in copies of one that has booted.

It runs inside the namespace, as `stopwatch` does, on a real Debian with cloud-init. Each column of the table goes to
standard output as an object of JSON: seconds and KiB.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from bench.scale import all_at_once
from bench.stopwatch import Subject
from bench.watched import Server, memory

TITLE = "warm: a program in a guest"
"""The name that ``--only`` knows it by."""
COLUMNS = ((1, "boots"), (1, "goes on"), (10, "go on at once"))
"""The number of jobs, and what their guests do."""
MEMORY_MIB = 512
DEADLINE = 600
"""Seconds for a guest to boot, and for all of its jobs."""
LOOK = 0.1
GOALS = {1: 3, 10: 15}
"""The most seconds to the last program's first line, by the number of jobs that do not boot."""


def measure(subject: Subject, number: int) -> dict[str, float]:
    """Start so many jobs with a program at once, and wait for the first line of each. Raises `ValueError`."""
    with ExitStack() as stack:
        servers: list[Server] = []
        outputs = []
        for turn in range(1, number + 1):
            own = subject.in_scratch(turn)
            servers.append(server := stack.enter_context(own.serve()))
            server.lines(1)
            server.write(b"ASYNC_MODE_ON\r\n")
            server.lines(1)
            values = {
                "JobVMMemory": MEMORY_MIB, "RequestMemory": MEMORY_MIB, "VMPARAM_vm_Disk": "catalog:debian:vda:w",
                "VMPARAM_vm_Run": "echo here; sleep 600", "VMPARAM_vm_Run_Inputs": "", "ClusterId": turn,
                "TransferOutput": "vm_outputs/",
            }  # fmt: skip
            server.block(own.ad(**values), piecewise=False)
            outputs.append(own.scratch / "vm_stdout")
        began = time.time()
        all_at_once(servers, b"CONDOR_VM_START 1 kvm\r\n", 2)
        _, answers = all_at_once(servers, b"RESULTS\r\n", 2)
        if refused := [result for _, result in answers if result != b"1 0 1"]:
            raise ValueError(f"{len(refused)} of {number} jobs have not started: {refused[0]!r}")
        signal.alarm(DEADLINE)
        while not all(output.exists() and output.stat().st_size for output in outputs):
            time.sleep(LOOK)
        said = sorted(output.stat().st_mtime - began for output in outputs)  # nothing else is written there
        found = {"first": said[0], "last": said[-1]} | _costs(number)
        for server in servers:
            server.quit()
    return found


def _costs(number: int) -> dict[str, float]:
    """Return what each guest's QEMU has read, and its memory, in KiB."""
    qemus = {
        int(entry.parent.name)
        for entry in Path("/proc").glob("[0-9]*/cmdline")
        if os.path.exists(entry) and entry.read_bytes().startswith(b"/usr/bin/qemu-system")
    }
    if len(qemus) != number:
        raise ValueError(f"{number} guests should run, but these do: {qemus}")
    read = sum(int(Path(f"/proc/{pid}/io").read_text().split()[1]) for pid in qemus)
    return {"read": read / 1024 / number, "PSS": memory(qemus)["Pss"] / number}


def main() -> None:
    task = json.load(sys.stdin)
    ours = task["servers"]["this"]
    for number, does in COLUMNS:
        subject = Subject("this", ours["argv"], {**task["environment"], **ours["environment"], **task["warm"]}, task)
        if number == 1 and does != COLUMNS[0][1]:
            words = [
                os.path.join(os.path.dirname(ours["argv"][0]), "vmgahp"),
                "image",
                "warm",
                "debian",
                "--memory",
                str(MEMORY_MIB),
                "--timeout",
                str(DEADLINE),
            ]
            subprocess.run(words, env=subject.environment, check=True, stdout=subprocess.DEVNULL)
        print(json.dumps(measure(subject, number)), flush=True)


ROWS = {
    "first": "the first program's first line",
    "last": "the last one's",
    "read": "read by each QEMU, MiB",
    "PSS": "PSS of each QEMU, MiB",
}


def table(found: Sequence[Mapping[str, float]]) -> str:
    """Make a table of Markdown, a column for each number of jobs."""
    lines = [["", *(f"{number} {does}" for number, does in COLUMNS)], ["---"] * (len(COLUMNS) + 1)]
    for key, title in ROWS.items():
        unit, digits = (1024, 0) if key in ("read", "PSS") else (1, 1)
        suffix = "" if unit > 1 else " s"
        lines.append([title, *(f"{column[key] / unit:.{digits}f}{suffix}" for column in found)])
    goals = ["" if does == COLUMNS[0][1] else f"{GOALS[number]} s" for number, does in COLUMNS]
    lines.append(["goal for the last", *goals])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
