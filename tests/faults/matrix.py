"""A machine on which faults are tried: a namespace, and a worker in it that answers."""

import json
import select
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

from tests import REPOSITORY
from tests.faults.cases import Verdict
from tests.lab.namespace import LAB, LabError, Namespace, Opened

LONGEST = 300.0
"""Seconds for a case, with all that is looked at after it; `worker.SHOWN` is less."""

LIVES = 2
"""A machine that is lost is replaced once: what then fails again is no accident."""


class Machine(Opened):
    """A namespace over this very system, with a libvirtd of its own and a worker in it."""

    worker = "tests.faults.worker"
    """The module that is run there, and answers a line of JSON with another; a line that is a string is its last."""

    def __init__(self, directory: str | Path) -> None:
        self._directory = Path(directory)
        self._worker: subprocess.Popen[str] | None = None
        self._lost: list[str] = []
        """Why each machine so far was lost."""

    def open(self) -> None:
        self._namespace = Namespace(self._directory / str(len(self._lost)), root="/")
        self._namespace.open()
        self._namespace.configure_libvirt()
        # KVM that does not work is the same everywhere, and quickly seen.
        self._namespace.run("sh", "-c", "[ ! -e /dev/kvm ] || mount --bind /dev/null /dev/kvm")
        self._worker = self._namespace.popen(
            *("env", f"PYTHONPATH={REPOSITORY}", sys.executable, "-P", "-m", self.worker, LAB),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def close(self) -> None:
        """End everything in the namespace, whatever state it is in."""
        self._namespace.close()
        if self._worker:
            self._worker.communicate()

    def ask(self, what: dict[str, object], seconds: float = LONGEST) -> Verdict:
        """Have something tried."""
        return Verdict(*self.answer(what, seconds))

    def answer(self, what: object, seconds: float = LONGEST) -> list[Any]:
        """Return what the worker says; where the machine is lost, what a fresh one says.

        Raises `LabError` at once where all `LIVES` are lost.
        """
        while len(self._lost) < LIVES:
            try:
                return self._answer(what, seconds)
            except LabError as error:
                self._lost.append(str(error))
                self.close()
                if len(self._lost) < LIVES:
                    warnings.warn(f"a machine was lost at {what} and is replaced: {error}", stacklevel=2)
                    self.open()
        raise LabError(f"{LIVES} machines were lost, one after the other:\n" + "\n".join(self._lost))

    def _answer(self, what: object, seconds: float) -> list[Any]:
        try:
            print(json.dumps(what), file=self._worker.stdin, flush=True)
        except BrokenPipeError:
            pass  # its last line is still to be read
        if not select.select([self._worker.stdout], [], [], seconds)[0]:
            raise LabError(f"nothing came of {what} in {seconds:.0f} s")
        line = self._worker.stdout.readline()
        if not line:
            raise LabError("its worker has ended")
        answer: list[Any] | str = json.loads(line)
        if isinstance(answer, str):
            raise LabError(answer)
        return answer

    def try_random(self, seed: int, seconds: float) -> Verdict:
        return self.ask({"random": [seed, seconds]}, seconds + LONGEST)


def in_words(verdict: Verdict) -> str:
    """Say what came of one, and what tells why where it did not survive."""
    word = "LOST" if verdict.lost else "survived" if verdict.tried else "untried"
    lines = [f"{word:8} {verdict.seconds:5.1f} s  {verdict.operation}, {verdict.point}, {verdict.fault}"]
    lines += [f"         {what}" for what in verdict.lost]
    lines += [f"         | {line}" for line in verdict.log.splitlines()]
    return "\n".join(lines)
