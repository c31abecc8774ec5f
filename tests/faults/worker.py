"""Tries cases on a machine of its own, inside of a namespace: ``python -m tests.faults.worker DIRECTORY``.

A line of JSON on standard input is a case, or a seed and seconds for a random story; the answer is a verdict.
"""

import faulthandler
import json
import random
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.faults import rows
from tests.faults.cases import ENDS, FAULTS, OPERATIONS, Case, Verdict
from tests.faults.host import Host
from tests.faults.story import CHECKPOINT, Story

SHOWN = 280.0
"""Seconds after which it says where it stands; a case has some more (`matrix.LONGEST`)."""

TRIES = 3
"""On a busy machine a point early in the life of a daemon is now and then passed before it can be held."""


class Worker:
    """One machine, and one case after the other on it."""

    def __init__(self, directory: Path) -> None:
        self.host = Host(directory)
        self._number = 0
        self._checkpoint: dict[str, bytes] = {}
        """The files of a job that was checkpointed, made once."""

    def story(self) -> Story:
        """A new job, in a directory of its own."""
        self._number += 1
        return Story(self.host, self._number)

    def answer(self, asked: dict[str, Any]) -> Verdict:
        """What comes of one line."""
        match asked:
            case {"random": [seed, seconds]}:
                return self.try_random(seed, seconds)
            case {"row": name}:
                return self._repeated(Case("row", name, ""), rows.ROWS[name])
            case {"case": words}:
                return self.try_case(Case(*words))
        raise AssertionError(asked)

    def try_case(self, case: Case) -> Verdict:
        """Try one case, and look at what it left."""
        if case.operation == "START from a checkpoint" and not self._checkpoint:
            self._make_checkpoint()
        return self._repeated(case, lambda story: self._try(story, case))

    def _repeated(self, case: Case, play: Callable[[Story], bool]) -> Verdict:
        """Some faults come too late now and then, for nothing stands still where they are to come."""
        faulthandler.dump_traceback_later(SHOWN)
        for _ in range(TRIES):
            verdict = self._judged(case, play)
            if verdict.tried or verdict.lost:
                break
        faulthandler.cancel_dump_traceback_later()
        return verdict

    def _judged(self, case: Case, play: Callable[[Story], int]) -> Verdict:
        began = time.monotonic()
        story = self.story()
        tried = 0
        try:
            tried = play(story)
        except Exception:  # noqa: BLE001 - the harness has to say what it saw, whatever that was
            story.lose(f"the harness failed: {traceback.format_exc()}")
        finally:
            story.close()
        log = "" if tried and not story.lost else "\n".join(story.told[-40:])
        return Verdict(*case, int(tried), story.lost, time.monotonic() - began, log)

    def _try(self, story: Story, case: Case) -> bool:
        if case.operation == "START from a checkpoint":
            story.take_over(self._checkpoint)
        story.begin_for(case.operation)
        tried = story.act(case.operation.split(" ")[0] if case.operation not in ENDS else case.operation, *case[1:])
        story.comes_back_or_stays()
        story.finish()
        story.next_start()
        return tried

    def _make_checkpoint(self) -> None:
        story = self.story()
        try:
            story.begin_for("CHECKPOINT")
            story.done("CHECKPOINT")
            story.done("STOP")
            story.fail("QUIT")
            story.judge_end(in_order=True)
            assert story.lost == [], story.lost
            self._checkpoint = {name: (story.directory / name).read_bytes() for name in (*CHECKPOINT, "guest.img")}
        finally:
            story.close()

    def try_random(self, seed: int, seconds: float) -> Verdict:
        """Operations and faults as they come, until the time is up."""
        end = time.monotonic() + seconds
        chance = random.Random(seed)

        def play(story: Story) -> int:
            tried = 0
            while time.monotonic() < end and not story.lost:
                random_step(story, chance)
                tried += 1
            story.comes_back_or_stays()
            story.finish()
            story.next_start()
            return tried

        return self._judged(Case("random", f"seed {seed}", ""), play)


def random_step(story: Story, chance: random.Random) -> None:
    """One operation, with a fault or without."""
    if story.daemon is None:
        story.begin()
    if not story.vm:
        operation = "START"
    else:
        operation = chance.choice(("SOFT_SUSPEND", "SUSPEND", "CHECKPOINT", "RESUME", "RESUME", "STOP", *ENDS))
    fault = chance.choice((*FAULTS, *[""] * 6))
    if operation in ENDS and fault.startswith("daemon: "):
        fault = ""
    matching = [points for name, points in OPERATIONS.items() if name.split(" ")[0] == operation.split(" ")[0]]
    point = chance.choice(chance.choice(matching)) if fault and chance.random() < 0.5 else ""
    pause = 0.0 if point else chance.random() ** 2
    story.act(operation, point, fault, lambda: time.sleep(pause))
    if story.daemon is not None and story.vm and (story.stopped or story.killed or story.hung):
        story.finish()


def main(directory: str) -> None:
    """Answer one line after the other; the last answer says why there is no machine any more."""
    try:
        worker = Worker(Path(directory))
        for line in sys.stdin:
            print(json.dumps(worker.answer(json.loads(line))), flush=True)
    except Exception:
        print(json.dumps(traceback.format_exc()), flush=True)
        raise


if __name__ == "__main__":
    main(sys.argv[1])
