"""The count of attacks, and the end of those whose machine is lost."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.attacks.support import Attack, Battleground, Mode, Must, Outcome, Who, stopped
from tests.lab.namespace import LabError

ATTACK = Attack("tried", Who.GUEST, Must.HOLD, lambda _site: None, (), (Mode.JOB,), times=3, daily=False)


class _Ground(Battleground):
    """A machine whose worker answers this, or does not."""

    def __init__(self, directory: Path, *answers: Outcome | BaseException) -> None:
        super().__init__(directory)
        self.answers = list(answers)

    def answer(self, what: object, seconds: float = 0) -> list[object]:
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return list(answer)


class _Test:
    """The test of a row."""

    def __init__(self) -> None:
        self.path = Path("tests/attacks/test_ad.py")
        self.node = SimpleNamespace(user_properties=[])

    def run(self, ground: Battleground) -> None:
        stopped(ground, self, ATTACK, Mode.JOB)  # type: ignore[arg-type]

    def counted(self, tried: int, failed: int) -> bool:
        """Look whether the attack was counted so in each table, once."""
        keys = ("surface", "ad"), ("attacker", "guest"), ("mode", "QEMU as the job's user")
        wanted = [("counted", [f"attacks by {of}", key, tried, failed]) for of, key in keys]
        return bool(self.node.user_properties == wanted)


@pytest.mark.parametrize(
    ("breaches", "failed"), [(["it runs"], 1), (["a", "b", "c", "d"], 3)], ids=["some", "more than tries"]
)
def test_a_breach_fails_the_test_and_is_counted(tmp_path: Path, breaches: list[str], failed: int) -> None:
    test = _Test()
    with pytest.raises(AssertionError, match="START -> 0"):
        test.run(_Ground(tmp_path, Outcome(breaches, ["START -> 0"], 1.0, "")))
    assert test.counted(3, failed)


def test_a_second_try_counts_in_place_of_the_first(tmp_path: Path) -> None:
    test = _Test()
    ground = _Ground(tmp_path, Outcome(["it runs"], [], 1.0, ""), Outcome([], [], 1.0, ""))
    with pytest.raises(AssertionError):
        test.run(ground)
    test.run(ground)
    assert test.counted(3, 0)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (LabError("its worker has ended"), "its worker has ended"),
        (BrokenPipeError(32, "Broken pipe"), "Broken pipe"),
        (KeyboardInterrupt(), "ended before the answer came"),
        (Outcome(["left"], [], 1.0, "libvirtd does not answer"), "libvirtd does not answer"),
    ],
    ids=["worker", "pipe", "deadline", "libvirtd"],
)
def test_a_lost_machine_fails_the_others_at_once(tmp_path: Path, answer: Outcome | BaseException, reason: str) -> None:
    ground = _Ground(tmp_path, answer)
    first, second = _Test(), _Test()
    with pytest.raises((AssertionError, LabError, OSError, KeyboardInterrupt)):
        first.run(ground)
    assert first.counted(3, 1 if isinstance(answer, Outcome) else 3)
    with pytest.raises(AssertionError, match=f"ad: tried, JOB: .*{reason}"):
        second.run(ground)
    assert second.node.user_properties == [], "what was not tried is not counted"
