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

from bench.scale import all_at_once, processes, start_all
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
GOALS = ("", "3 s", "15 s")
"""The most seconds to the last program's first line, by the column."""


def measure(subject: Subject, number: int) -> dict[str, float]:
    """Start so many jobs with a program at once, and wait for the first line of each. Raises `ValueError`."""
    with ExitStack() as stack:
        servers: list[Server] = []
        outputs = []
        for turn in range(1, number + 1):
            own = subject.in_scratch(turn)
            servers.append(server := stack.enter_context(own.serve()))
            server.lines(1)
            values = {
                "JobVMMemory": MEMORY_MIB, "RequestMemory": MEMORY_MIB, "VMPARAM_vm_Disk": "catalog:debian:vda:w",
                "VMPARAM_vm_Run": "echo here; sleep 600", "VMPARAM_vm_Run_Inputs": "", "ClusterId": turn,
                "TransferOutput": "vm_outputs/",
            }  # fmt: skip
            server.block(own.ad(**values), piecewise=False)
            outputs.append(own.scratch / "vm_stdout")
        all_at_once(servers, b"ASYNC_MODE_ON\r\n", 1)
        began = time.time()
        start_all(servers, "kvm")
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
    qemus = [pid for pid, words in processes().items() if words.startswith(b"/usr/bin/qemu-system")]
    if len(qemus) != number:
        raise ValueError(f"{number} guests should run, but these do: {qemus}")
    read = sum(int(Path(f"/proc/{pid}/io").read_text().split()[1]) for pid in qemus)
    return {"read": read / 1024 / number, "PSS": memory(qemus)["Pss"] / number}


def main() -> None:
    task = json.load(sys.stdin)
    ours = task["servers"]["this"]
    subject = Subject("this", ours["argv"], {**task["environment"], **ours["environment"], **task["warm"]}, task)
    vmgahp = os.path.join(os.path.dirname(ours["argv"][0]), "vmgahp")
    make = [vmgahp, "image", "warm", "debian", f"--memory={MEMORY_MIB}", f"--timeout={DEADLINE}"]
    for turn, (number, _) in enumerate(COLUMNS):
        if turn == 1:  # the first column's guest has booted for its job
            subprocess.run(make, env=subject.environment, check=True, stdout=subprocess.DEVNULL)
        print(json.dumps(measure(subject, number)), flush=True)


ROWS = {
    "first": ("the first program's first line", "{:.1f} s", 1),
    "last": ("the last one's", "{:.1f} s", 1),
    "read": ("read by each QEMU, MiB", "{:.0f}", 1024),
    "PSS": ("PSS of each QEMU, MiB", "{:.0f}", 1024),
}
"""By the key of a value: its title, how it is written, and by what it is divided before."""


def table(found: Sequence[Mapping[str, float]]) -> str:
    """Make a table of Markdown, a column for each number of jobs."""
    lines = [["", *(f"{number} {does}" for number, does in COLUMNS)], ["---"] * (len(COLUMNS) + 1)]
    for key, (title, form, unit) in ROWS.items():
        lines.append([title, *(form.format(column[key] / unit) for column in found)])
    lines.append(["goal for the last", *GOALS])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
