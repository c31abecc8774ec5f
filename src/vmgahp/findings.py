"""Findings about this machine: the check, its result, and a hint.

The probe publishes them beside its attributes and the doctor shows them; neither knows about hypervisors.
"""

import threading
from collections.abc import Callable, Iterable, Mapping
from time import monotonic
from typing import NamedTuple, TypeVar, cast

from vmgahp import errors

Result = TypeVar("Result")

OK = "ok"
OFF = "off"
"""The status of a feature that jobs do not get on this machine; jobs that do not use it can run."""
BAD = "bad"
"""The status of a failure with which no job can run."""
UNKNOWN = "unknown"
"""The status of a check that could not be made, and therefore proves nothing."""

VERDICTS = (OK, OFF, BAD, UNKNOWN)


class Finding(NamedTuple):
    """The result of one check."""

    check: str
    """A short name, such as ``kvm`` or ``network nat``."""
    verdict: str
    looked_at: str
    seen: str
    hint: str = ""
    """An instruction in the imperative, with the command to type; empty if the check passed."""
    because: str = ""
    """The name of the check that this one depends on, if that one failed."""


class Late(errors.MachineFault):
    """A check that has not ended by its deadline."""


class NotKnown(Exception):
    """An unknown result, because a check that this one depends on could not be made; the text, a sentence, says why.

    `because` is the check that failed to find out.
    """

    def __init__(self, because: str, why: str) -> None:
        super().__init__(why)
        self.because = because


def judge(check: str, looked_at: str, outcome: object, good: str | Callable[[], str], trouble: str = BAD) -> Finding:
    """Make the finding for the outcome of a check: `trouble` for a fault, `good` (or its return value) otherwise."""
    if isinstance(outcome, errors.Fault):
        return Finding(check, trouble, looked_at, outcome.problem, outcome.hint)
    return Finding(check, OK, looked_at, good if isinstance(good, str) else good())


def first_bad(findings: Iterable[Finding]) -> Finding | None:
    """Return the first finding that keeps every job from running."""
    return next((finding for finding in findings if finding.verdict == BAD), None)


def begin(work: Callable[[], Result]) -> Callable[[], Result]:
    """Start `work` in a thread and return a function that waits for it, and returns or raises what it did.

    If no thread can be started, the work is done when the returned function is called.
    """
    ended: list[tuple[Result | None, BaseException | None]] = []

    def run() -> None:
        try:
            ended.append((work(), None))
        except BaseException as error:  # noqa: BLE001 - raised again where the result is waited for
            ended.append((None, error))

    thread = threading.Thread(target=run, name="begun", daemon=True)
    try:
        thread.start()
    except RuntimeError:
        return work

    def wait() -> Result:
        thread.join()
        result, error = ended[0]
        if error is not None:
            raise error
        return cast(Result, result)

    return wait


class Checks:
    """Checks that run in parallel, each of which is waited for when its outcome is needed.

    A check that has not ended when the monotonic clock shows `end` is left running in its thread, and its outcome is
    `Late`, because the caller, above all the startd, must not wait any longer.
    """

    def __init__(self, end: float) -> None:
        self._began = monotonic()
        self._end = end
        self._threads: dict[str, threading.Thread] = {}
        self._outcomes: dict[str, object] = {}

    def begin(self, name: str, check: Callable[[], object]) -> None:
        """Run a check in a thread of its own."""

        def run() -> None:
            try:
                outcome = check()
            except errors.Fault as fault:
                outcome = fault
            except Exception as error:  # noqa: BLE001 - a bug in one check must not hide what the others found
                outcome = errors.HypervisorFault(f"The check failed: {error!r}.", "report it as a bug.")
            self._outcomes.setdefault(name, outcome)

        thread = threading.Thread(target=run, name=f"check {name}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            self._outcomes[name] = errors.MachineFault(
                f"The check was not made: {error}.", "look at the limits on processes."
            )
        self._threads[name] = thread

    def outcome(self, name: str, end: float | None = None) -> object:
        """Return what a check has returned, or the `errors.Fault` that it raised; None for one that was not started.

        `end` can be earlier than that of the other checks.
        """
        if name not in self._threads:
            return None
        if name not in self._outcomes:
            self._threads[name].join(max(0.0, (self._end if end is None else end) - monotonic()))
        seconds = monotonic() - self._began
        late = Late(f"The check of {name} had not ended after {seconds:.1f} s.", "see what it waits for.")
        return self._outcomes.setdefault(name, late)


def side_by_side(checks: Mapping[str, Callable[[], object]], end: float) -> dict[str, object]:
    """Run all checks at once, and return the outcome of each; see `Checks`."""
    running = Checks(end)
    for name, check in checks.items():
        running.begin(name, check)
    return {name: running.outcome(name) for name in checks}
