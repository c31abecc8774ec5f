"""The form of an attack, and the test that tries one."""

import contextlib
import enum
import importlib
import os
import signal
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.faults.matrix import Machine
from tests.lab.namespace import LabError


class Who(enum.StrEnum):
    """The attacker."""

    USER = "job's user"
    GUEST = "guest"
    OTHER = "another user of the node"
    SUBMIT = "submit side"
    STRANGER = "stranger's image"


class Must(enum.StrEnum):
    """The outcome that is wanted; that the machine stays in service and nobody is harmed goes without saying."""

    HOLD = "the job is held"
    RUN = "the job runs"
    SURVIVE = "the job runs or is held"
    REFUSE = "it is refused in words"
    NOTHING = "nothing happens"


class Mode(enum.StrEnum):
    """The user that QEMU is."""

    JOB = "QEMU as the job's user"
    LIBVIRT = "QEMU as libvirt's user"
    NONE = "no QEMU"


BOTH = (Mode.LIBVIRT, Mode.JOB)


class Attack(NamedTuple):
    """An attack, as `attack` registers it."""

    name: str
    who: Who
    must: Must
    act: Callable[..., None]
    """The function that does it, whose docstring says what is done."""
    arguments: tuple[Any, ...]
    modes: tuple[Mode, ...]
    times: int
    """The number of attacks that it is: tries of a race, values of a table."""
    daily: bool
    """True for the few that scripts/test tries each time, in their first mode."""


ATTACKS: defaultdict[str, list[Attack]] = defaultdict(list)
"""Name of a module -> its attacks."""


def attack(
    who: Who,
    must: Must,
    *modes: Mode,
    times: int = 1,
    daily: bool = False,
    cases: Mapping[str, tuple[Any, ...]] | None = None,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a function as an attack, or as one for each of `cases`: name -> arguments."""

    def register(act: Callable[..., None]) -> Callable[..., None]:
        name = act.__name__.replace("_", "-")
        for case, arguments in ({"": ()} if cases is None else cases).items():
            named = f"{name}-{case}" if case else name
            ATTACKS[act.__module__].append(Attack(named, who, must, act, arguments, modes, times, daily))
        return act

    return register


class Outcome(NamedTuple):
    """The outcome of an attack."""

    breaches: list[str]
    """All that must not be, and was."""
    told: list[str]
    """All that was done and answered, in its order."""
    seconds: float
    lost: str
    """The reason why the machine can be attacked no more; empty where it can."""


WITHOUT_GUESTS = ("helpers", "mounts", "outputs")
SURFACES = ("ad", "scratch", "images", "checkpoints", "job_xml", "environment", "guest", "tools", *WITHOUT_GUESTS)
"""The modules with attacks: each is about one thing that is attacked."""

LONGEST = 240.0
"""Seconds for one row."""


def rows(surface: str) -> list[Attack]:
    """Return the attacks of a surface."""
    found = ATTACKS[importlib.import_module(f"tests.attacks.test_{surface}").__name__]
    assert len({row.name for row in found}) == len(found), "a name is there twice"
    return found


class Battleground(Machine):
    """A machine of its own, with a worker that attacks it."""

    worker = "tests.attacks.worker"
    lost = ""
    """The reason why nothing more is tried on it; empty while it serves."""

    def attack(self, surface: str, name: str, mode: str) -> Outcome:
        """Try one row in one mode. Raises `LabError` or `OSError` where nothing comes of it: the machine is lost."""
        tried = f"{surface}: {name}, {mode}"
        # An answer that comes when nobody waits for it any more would be taken for that of the next attack.
        self.lost = f"{tried}: its test was ended before the answer came"
        try:
            outcome = Outcome(*self.answer([surface, name, mode], LONGEST))
        except (LabError, OSError) as error:
            self.lost = f"{tried}: {error}"
            raise
        self.lost = outcome.lost and f"{tried}: {outcome.lost}"
        return outcome


def each(module: str) -> Callable[..., None]:
    """Make a test of every attack of a module, in every mode that it has."""
    parameters = [
        pytest.param(
            row,
            mode,
            id=f"{row.name}-{mode.name.lower()}",
            marks=[pytest.mark.smoke] if row.daily and mode is row.modes[0] else [],
        )
        for row in ATTACKS[module]
        for mode in row.modes
    ]

    @pytest.mark.libvirt
    @pytest.mark.attacks
    @pytest.mark.parametrize(("attack", "mode"), parameters)
    def test(ground: Battleground, request: pytest.FixtureRequest, attack: Attack, mode: Mode) -> None:
        stopped(ground, request, attack, mode)

    return test


def each_here(module: str) -> Callable[..., None]:
    """Make a test of every attack of a module that needs no guest; the daily ones run with the unit tests."""
    parameters = [
        pytest.param(row, id=row.name, marks=[] if row.daily else [pytest.mark.attacks]) for row in ATTACKS[module]
    ]

    @pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
    @pytest.mark.parametrize("attack", parameters)
    def test(here: Any, request: pytest.FixtureRequest, attack: Attack) -> None:
        def act() -> Any:
            attack.act(here, *attack.arguments)
            here.judge()
            return here

        counted(request, attack, Mode.NONE, act)

    return test


def stopped(ground: Battleground, request: pytest.FixtureRequest, attack: Attack, mode: Mode) -> None:
    """Try it, count it, and see that nothing came of it."""
    assert not ground.lost, f"this worker has lost its machine to an attack before, {ground.lost}"
    counted(request, attack, mode, lambda: ground.attack(_surface(request), attack.name, mode.name))


def counted(request: pytest.FixtureRequest, attack: Attack, mode: Mode, act: Callable[[], Any]) -> None:
    """Count an attack by the breaches of what `act` returns, and see that there are none."""
    failed = attack.times  # what did not come to its end is not known to be stopped
    try:
        outcome = act()
        failed = min(attack.times, len(outcome.breaches))
    finally:
        keys = {"surface": _surface(request), "attacker": attack.who.value, "mode": mode.value}
        # In place of what a try before this one has counted.
        request.node.user_properties[:] = [
            ("counted", [f"attacks by {of}", key, attack.times, failed]) for of, key in keys.items()
        ]
    assert outcome.breaches == [], "\n".join([f"{attack.who}: {attack.act.__doc__}", *outcome.told])


def _surface(request: pytest.FixtureRequest) -> str:
    return Path(request.path).stem.removeprefix("test_")


@contextlib.contextmanager
def process_of(uid: int, work: Callable[[], None]) -> Iterator[int]:
    """Have a process of a user that does something until it is ended: its pid."""
    pid = os.fork()
    if not pid:
        try:
            os.setgroups(())
            os.setgid(uid)
            os.setuid(uid)
            work()
        finally:
            os._exit(0)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
