"""Conditions, events and threads, each against that of threading."""

import contextlib
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from tests.peer import DEADLINE
from vmgahp.host import light, threads


@pytest.fixture(params=[threading, threads], ids=["theirs", "ours"])
def of(request: pytest.FixtureRequest) -> Any:
    return request.param


def begin(run: Callable[[], object]) -> threading.Thread:
    made = threading.Thread(target=run, daemon=True)
    made.start()
    return made


def test_an_event(of: ModuleType) -> None:
    event = (getattr(of, "Event", None) or of.Flag)()
    assert (event.is_set(), event.wait(0), event.wait(0.01), event.wait(-1)) == (False, False, False, False)
    heard: list[bool] = []
    waiting = [begin(lambda: heard.append(event.wait(DEADLINE))) for _ in range(5)]
    event.set()
    for each in waiting:
        each.join(DEADLINE)
    assert heard == [True] * 5
    assert (event.is_set(), event.wait(), event.wait(0)) == (True, True, True)
    event.clear()
    assert (event.is_set(), event.wait(0)) == (False, False)


def test_a_condition_wakes_as_many_as_it_is_told(of: ModuleType) -> None:
    condition, inside, woken = of.Condition(), threading.Semaphore(0), threading.Semaphore(0)

    def wait() -> None:
        with condition:
            inside.release()
            assert condition.wait(DEADLINE)
            woken.release()

    for _ in range(4):
        begin(wait)
        assert inside.acquire(timeout=DEADLINE)
    with condition:
        condition.notify()
    assert woken.acquire(timeout=DEADLINE)
    assert not woken.acquire(timeout=0.1)
    with condition:
        condition.notify(2)
    assert woken.acquire(timeout=DEADLINE)
    assert woken.acquire(timeout=DEADLINE)
    assert not woken.acquire(timeout=0.1)
    with condition:
        condition.notify_all()
    assert woken.acquire(timeout=DEADLINE)
    with condition:
        condition.notify_all()  # of whom there are none


def test_a_condition_that_nobody_tells_of(of: ModuleType) -> None:
    condition = of.Condition()
    with condition, condition:  # its lock is the thread's own, however often
        assert not condition.wait(0.01)
        assert not condition.wait(0)
        assert not condition.wait_for(lambda: False, 0.01)
        assert condition.wait_for(lambda: True)
        others = begin(lambda: condition.__enter__())
        others.join(0.1)
        assert others.is_alive(), "and is held again after a wait"
    for call in (lambda: condition.wait(0), condition.notify):
        with pytest.raises(RuntimeError):
            of.Condition().notify() if call is condition.notify else of.Condition().wait(0)


def test_a_condition_is_waited_for_until_it_is_so(of: ModuleType) -> None:
    condition, counted, found = of.Condition(), [0], []

    def wait() -> None:
        with condition:
            found.append(condition.wait_for(lambda: counted[0] >= 100, DEADLINE))

    waiting = [begin(wait) for _ in range(8)]
    for _ in range(100):
        with condition:
            counted[0] += 1
            condition.notify_all()
    for each in waiting:
        each.join(DEADLINE)
    assert found == [True] * 8


def test_turns_are_passed_on_without_a_loss(of: ModuleType) -> None:
    condition, turn = of.Condition(), [0]

    def play(mine: int) -> None:
        for _ in range(300):
            with condition:
                assert condition.wait_for(lambda: turn[0] % 3 == mine, DEADLINE)
                turn[0] += 1
                condition.notify_all()

    playing = [begin(lambda mine=mine: play(mine)) for mine in range(3)]  # type: ignore[misc]
    for each in playing:
        each.join(DEADLINE)
    assert turn == [900]


def test_a_thread() -> None:
    go_on, said = threading.Event(), []
    thread = threads.start("name", lambda what: (go_on.wait(DEADLINE), said.append(what)), "a word")
    thread.join(0.01)
    assert thread.is_alive()
    go_on.set()
    thread.join(DEADLINE)
    assert (thread.is_alive(), thread.name, said) == (False, "name", ["a word"])
    thread.join()


def test_a_thread_that_fails_has_ended_and_is_heard_of(monkeypatch: pytest.MonkeyPatch) -> None:
    told = threading.Event()
    monkeypatch.setattr(sys, "unraisablehook", lambda _error: told.set())
    thread = threads.start("name", lambda: 1 / 0)
    thread.join(DEADLINE)
    assert not thread.is_alive()
    assert told.wait(DEADLINE)


# Contexts


@pytest.mark.parametrize("of", [contextlib, light], ids=["theirs", "ours"])
def test_a_context_that_is_a_function(of: Any) -> None:
    seen: list[object] = []

    @of.contextmanager
    def context(word: str, deaf: bool = False) -> Any:
        """Says it."""
        try:
            yield word
        except ValueError as error:
            if not deaf:
                raise
            seen.append(error)
        finally:
            seen.append("over")

    with context("a") as found:
        seen.append(found)
    assert seen == ["a", "over"]
    assert (context.__name__, context.__doc__) == ("context", "Says it.")
    error = ValueError("x")
    with pytest.raises(ValueError, match="x") as raised, context("b"):
        raise error
    assert raised.value is error
    with context("c", deaf=True):
        raise error
    assert seen[-2] is error
    for other in (KeyError("k"), StopIteration("s"), GeneratorExit(), RuntimeError("r")):
        with pytest.raises(type(other)) as kept, context("d", deaf=True):
            raise other
        assert kept.value is other


@pytest.mark.parametrize("of", [contextlib, light], ids=["theirs", "ours"])
def test_a_context_that_raises_another(of: Any) -> None:
    @of.contextmanager
    def context() -> Any:
        try:
            yield
        except ValueError as error:
            raise KeyError("k") from error

    @of.contextmanager
    def twice() -> Any:
        yield
        yield

    with pytest.raises(KeyError), context():
        raise ValueError("x")
    with pytest.raises(RuntimeError), twice():
        pass


@pytest.mark.parametrize("of", [contextlib, light], ids=["theirs", "ours"])
def test_suppress_and_null(of: Any) -> None:
    with of.suppress(ValueError, KeyError):
        raise UnicodeDecodeError("utf-8", b"", 0, 1, "x")
    with pytest.raises(OSError, match="x"), of.suppress(ValueError):
        raise OSError("x")
    with of.nullcontext("v") as value:
        assert value == "v"
