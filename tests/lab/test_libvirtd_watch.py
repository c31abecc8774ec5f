"""The question to libvirtd before each of its tests, asked of functions in its place."""

import threading
from collections.abc import Iterator

import pytest

from tests.lab.libvirtd_watch import Watch


class Libvirtd:
    """Answers, refuses or hangs, and counts how often it was asked."""

    def __init__(self) -> None:
        self.refuses: list[str] = []
        """The errors of the next questions."""
        self.answers = threading.Event()
        self.answers.set()
        self.asked = 0

    def __call__(self) -> None:
        self.asked += 1
        self.answers.wait()
        if self.refuses:
            raise OSError(self.refuses.pop())


@pytest.fixture
def libvirtd() -> Iterator[Libvirtd]:
    made = Libvirtd()
    yield made
    made.answers.set()


def test_one_that_never_answered_is_left_to_the_tests(libvirtd: Libvirtd) -> None:
    libvirtd.refuses = ["not installed"]
    assert Watch(libvirtd).trouble() == ""
    assert libvirtd.asked == 1


def test_one_that_is_started_again_is_waited_for(libvirtd: Libvirtd) -> None:
    watch = Watch(libvirtd)
    assert watch.trouble() == ""
    libvirtd.refuses = ["refused", "refused"]
    assert watch.trouble() == ""
    assert libvirtd.asked == 4


def test_one_that_is_gone_is_waited_for_once(libvirtd: Libvirtd) -> None:
    watch = Watch(libvirtd, patience=2)
    assert watch.trouble() == ""
    libvirtd.refuses = ["refused"] * 1000
    assert watch.trouble() == "refused"
    asked = libvirtd.asked
    assert asked > 2
    assert watch.trouble() == "refused"
    assert libvirtd.asked == asked + 1
    libvirtd.refuses = []
    assert watch.trouble() == ""


def test_one_that_hangs_is_asked_once_until_it_answers(libvirtd: Libvirtd) -> None:
    watch = Watch(libvirtd, patience=2)
    assert watch.trouble() == ""
    libvirtd.answers.clear()
    assert "does not answer" in watch.trouble()
    assert "does not answer" in watch.trouble()
    assert libvirtd.asked == 2
    libvirtd.answers.set()
    assert watch.trouble() == ""
