"""The time of one START over all its steps.

A job can hold up each program and each operation that runs with its user's rights until just below its own deadline:
by SIGSTOP, or with a file system that never answers. All of them together have to end before the client gives up.
"""

from contextvars import ContextVar, Token
from time import monotonic

from vmgahp.errors import MISMATCHED, JobFault, MachineFault

_FOR_EVER = float("inf")


class Budget:
    """A deadline for all operations of a thread in a ``with`` block; inner blocks have their own."""

    __slots__ = ("_end", "_of_the_job", "_seconds", "_token")

    def __init__(self, seconds: float = _FOR_EVER) -> None:
        self._seconds = seconds
        self._end = monotonic() + seconds
        self._of_the_job = 0.0
        self._token: Token[Budget] | None = None

    def __enter__(self) -> "Budget":
        self._token = _current.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._token is not None
        _current.reset(self._token)

    def left(self, most: float) -> float:
        """Return the timeout of the next operation in seconds, at most `most`. Raises a fault if no time is left.

        It is the job's fault if operations with the rights of its user have taken most of the time.
        """
        left = self._end - monotonic()
        if left > 0:
            return min(left, most)
        job = f"{self._of_the_job:.0f} of them in programs and files of the job's user"
        problem = f"The START has taken more than {self._seconds:.0f} s, {job}."
        if self._of_the_job > self._seconds / 2:
            hint = "use fewer and smaller files and images, and see that no process of the job's user stops programs."
            raise JobFault(MISMATCHED, problem, hint)
        raise MachineFault(problem, "see what makes this machine slow.")

    def spend(self, began: float) -> None:
        """Count the time since `began` (monotonic) as that of the job's user."""
        self._of_the_job += monotonic() - began


_current: ContextVar[Budget] = ContextVar("budget")


def current() -> Budget:
    """Return the budget of this thread; one without an end outside of a START."""
    return _current.get(None) or Budget()
