"""Threads that end with the process."""

import threading

from tests.peer import DEADLINE
from vmgahp.host import threads


def test_a_thread() -> None:
    go_on, said = threading.Event(), []
    thread = threads.start("name", lambda what: (go_on.wait(DEADLINE), said.append(what)), "a word")
    thread.join(0.01)
    assert thread.is_alive()
    go_on.set()
    thread.join(DEADLINE)
    assert (thread.is_alive(), thread.name, said) == (False, "name", ["a word"])
    thread.join()
