"""All cases on several machines at once, and the page of what came of them."""

import json
import queue
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests import REPOSITORY
from tests.faults.cases import FAULTS, OPERATIONS, Case, Verdict, all_cases
from tests.lab.namespace import LAB, LabError, Namespace

MACHINES = 10
"""Most of a case is waiting."""

LONGEST = 300.0
"""Seconds for a case, with all that is looked at after it; `worker.SHOWN` is less."""

PAGE = REPOSITORY / "docs" / "explanation" / "reliability.md"
BEGIN, END = "<!-- tried -->\n", "<!-- end of tried -->"
FAULTS_BETWEEN = "<!-- faults -->\n", "<!-- end of faults -->"


class Machine:
    """A namespace over this very system, with a libvirtd of its own and a worker in it."""

    worker = "tests.faults.worker"
    """The module that is run there, and answers a line of JSON with another."""

    def __init__(self, directory: str | Path) -> None:
        self._namespace = Namespace(directory, root="/")
        self._worker: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        self._namespace.__enter__()
        try:
            self._namespace.configure_libvirt()
            # KVM that does not work is the same everywhere, and quickly seen.
            self._namespace.run("sh", "-c", "[ ! -e /dev/kvm ] || mount --bind /dev/null /dev/kvm")
            self._worker = self._namespace.popen(
                *("env", f"PYTHONPATH={REPOSITORY}", sys.executable, "-P", "-m", self.worker, LAB),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        except BaseException:
            self._namespace.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._namespace.close()
        assert self._worker is not None
        assert self._worker.stdin is not None
        assert self._worker.stdout is not None
        self._worker.wait()
        self._worker.stdin.close()
        self._worker.stdout.close()

    def ask(self, what: dict[str, object], seconds: float = LONGEST) -> Verdict:
        """Have something tried."""
        return Verdict(*self.answer(what, seconds))

    def answer(self, what: object, seconds: float = LONGEST) -> list[Any]:
        """What the worker says. Raises `LabError` where nothing comes of it."""
        assert self._worker is not None
        assert self._worker.stdin is not None
        assert self._worker.stdout is not None
        print(json.dumps(what), file=self._worker.stdin, flush=True)
        if not select.select([self._worker.stdout], [], [], seconds)[0]:
            raise LabError(f"nothing came of it in {seconds:.0f} s")
        line = self._worker.stdout.readline()
        if not line:
            raise LabError("its worker has ended")
        answer: list[Any] = json.loads(line)
        return answer

    def try_case(self, case: Case) -> Verdict:
        return self.ask({"case": case})

    def try_random(self, seed: int, seconds: float) -> Verdict:
        return self.ask({"random": [seed, seconds]}, seconds + LONGEST)


def try_all(
    tasks: Iterable[Callable[[Machine], Verdict]], machines: int, heard: Callable[[Verdict], None]
) -> list[Verdict]:
    """Try everything, on as many machines at once; `heard` is told of each verdict, in one thread at a time.

    What a machine has said nothing of is tried once more, on another: its worker prints where it stood.
    """
    waiting: queue.SimpleQueue[Callable[[Machine], Verdict]] = queue.SimpleQueue()
    for task in tasks:
        waiting.put(task)
    found: list[Verdict] = []
    again: list[Callable[[Machine], Verdict]] = []
    lock = threading.Lock()

    def note(verdict: Verdict) -> None:
        with lock:
            found.append(verdict)
            heard(verdict)

    def work() -> None:
        while not waiting.empty():
            with tempfile.TemporaryDirectory(prefix="vmgahp-faults.") as directory, Machine(directory) as machine:
                try:
                    while True:
                        task = waiting.get_nowait()
                        note(task(machine))
                except queue.Empty:
                    return
                except LabError as error:  # the machine is lost
                    if task in again:
                        note(Verdict("harness", "", "", True, [str(error)], 0.0, ""))
                    else:
                        print(f"a machine of the harness: {error}", file=sys.stderr, flush=True)
                        again.append(task)
                        waiting.put(task)

    threads = [threading.Thread(target=work) for _ in range(machines)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def try_matrix(machines: int, only: str, heard: Callable[[Verdict], None]) -> list[Verdict]:
    """Every case whose words have `only` in them."""
    cases = [case for case in all_cases() if only in str(case)]
    # The longest first: what waits for hung processes waits beside the others.
    cases.sort(key=lambda case: "SIGSTOP" not in case.fault)
    return try_all([lambda machine, case=case: machine.try_case(case) for case in cases], machines, heard)  # type: ignore[misc]


def try_random(machines: int, seed: int, seconds: float, heard: Callable[[Verdict], None]) -> list[Verdict]:
    """A random story on each machine."""
    seeds = range(seed, seed + machines)
    return try_all(
        [lambda machine, seed=seed: machine.try_random(seed, seconds) for seed in seeds],  # type: ignore[misc]
        machines,
        heard,
    )


def in_words(verdict: Verdict) -> str:
    """What came of one, and what tells why where it did not survive."""
    word = "LOST" if verdict.lost else "survived" if verdict.tried else "untried"
    lines = [f"{word:8} {verdict.seconds:5.1f} s  {verdict.operation}, {verdict.point}, {verdict.fault}"]
    lines += [f"         {what}" for what in verdict.lost]
    lines += [f"         | {line}" for line in verdict.log.splitlines()]
    return "\n".join(lines)


def faults_table() -> str:
    """The faults, as the page shows them."""
    return "| fault | what it is |\n|---|---|\n" + "".join(f"| {fault} | {what} |\n" for fault, what in FAULTS.items())


def tables(matrix: list[Verdict], random: list[Verdict], seconds: float) -> str:
    """What was tried, and what of it survived, as the page shows it."""
    tried = [verdict for verdict in matrix if verdict.tried]
    lost = [verdict for verdict in tried if verdict.lost]
    groups = list(dict.fromkeys(fault.split(": ")[0] for fault in FAULTS))
    date = time.strftime("%-d %B %Y", time.gmtime())
    lines = [
        f"On {date} {len(tried)} faults were tried, in {seconds / 60:.0f} minutes; {len(tried) - len(lost)} survived.",
        "",
        "| during | points | " + " | ".join(f"{group} fails" for group in groups) + " |",
        "|---" * (len(groups) + 2) + "|",
    ]
    for operation, points in OPERATIONS.items():
        cells = [
            _survived([v for v in tried if v.operation == operation and v.fault.startswith(f"{group}: ")])
            for group in groups
        ]
        lines.append(f"| {operation} | {len(points)} | " + " | ".join(cells) + " |")
    lines += ["", "| fault | survived |", "|---|---|"]
    lines += [f"| {fault} | {_survived([v for v in tried if v.fault == fault])} |" for fault in FAULTS]
    lines += ["", "Lost:", ""]
    lines += [f"- {verdict.operation}, {verdict.point}, {verdict.fault}: {'; '.join(verdict.lost)}" for verdict in lost]
    lines += [] if lost else ["- nothing."]
    if random:
        steps = sum(int(verdict.fault.split(" ")[0]) for verdict in random)
        taken = max(verdict.seconds for verdict in random)
        lines += [
            "",
            f"Random sequences: {steps} operations, half of them with a fault, in {taken / 60:.0f} minutes on "
            f"{len(random)} machines; {sum(bool(verdict.lost) for verdict in random)} sequences ended in a loss.",
        ]
        lines += [f"- {verdict.point}: {'; '.join(verdict.lost)}" for verdict in random if verdict.lost]
    return "\n".join(lines) + "\n"


def _survived(verdicts: list[Verdict]) -> str:
    return f"{sum(not verdict.lost for verdict in verdicts)} of {len(verdicts)}" if verdicts else "-"


def write_page(text: str) -> None:
    """Put the tables into the page."""
    page = PAGE.read_text()
    for (begin, end), content in (((BEGIN, END), text), (FAULTS_BETWEEN, faults_table())):
        head, _, rest = page.partition(begin)
        _, _, tail = rest.partition(end)
        page = head + begin + content + end + tail
    PAGE.write_text(page)
