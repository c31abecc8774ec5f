"""What an attack is, and how all of them are tried."""

import enum
import functools
import importlib
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests import REPOSITORY
from tests.faults.matrix import Machine

PAGE = REPOSITORY / "docs" / "explanation" / "security.md"
BEGIN, END = "<!-- attacks -->\n", "<!-- end of attacks -->"


class Who(enum.StrEnum):
    """Who attacks."""

    USER = "job's user"
    GUEST = "guest"
    OTHER = "another user of the node"
    SUBMIT = "submit side"
    STRANGER = "stranger's image"


class Must(enum.StrEnum):
    """What must happen; that the machine stays in service and nobody is harmed goes without saying."""

    HOLD = "the job is held"
    RUN = "the job runs"
    SURVIVE = "the job runs or is held"
    REFUSE = "it is refused in words"
    NOTHING = "nothing happens"


class Mode(enum.StrEnum):
    """Who QEMU is."""

    JOB = "QEMU as the job's user"
    LIBVIRT = "QEMU as libvirt's user"
    NONE = "no QEMU"


BOTH = (Mode.LIBVIRT, Mode.JOB)
NO_QEMU = (Mode.NONE,)


class Attack(NamedTuple):
    """A row of a module's ATTACKS."""

    name: str
    who: Who
    done: str
    must: Must
    act: str
    """The function of the module that does it."""
    arguments: tuple[Any, ...] = ()
    modes: tuple[Mode, ...] = BOTH
    times: int = 1
    """How many attacks it is: tries of a race, values of a table."""
    daily: bool = False
    """Whether scripts/test tries it without being asked for more."""


class Outcome(NamedTuple):
    """What came of an attack."""

    breaches: list[str]
    """What must not be, and was."""
    told: list[str]
    """What was done and answered, in its order."""
    seconds: float


SURFACES = {
    "ad": "the job ad",
    "scratch": "the scratch directory",
    "images": "images",
    "checkpoints": "checkpoints",
    "job_xml": "a job's own XML",
    "environment": "the environment",
    "guest": "the guest",
    "tools": "people's tools",
}
"""Module -> what is attacked."""

LONGEST = 240.0
"""Seconds for one row."""


def rows(surface: str) -> list[Attack]:
    """The table of a surface."""
    found: list[Attack] = importlib.import_module(f"tests.attacks.test_{surface}").ATTACKS
    assert len({row.name for row in found}) == len(found), "a name is there twice"
    return found


class Battleground(Machine):
    """A machine of its own, with a worker that attacks it."""

    worker = "tests.attacks.worker"

    def attack(self, surface: str, name: str, mode: str) -> Outcome:
        """Try one row in one mode."""
        return Outcome(*self.answer([surface, name, mode], LONGEST))


def each(attacks: list[Attack]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A test of every row, in every mode that it has."""
    parameters = [
        pytest.param(
            row,
            mode,
            id=f"{row.name}-{mode.name.lower()}",
            marks=[pytest.mark.libvirt, *([pytest.mark.smoke] if row.daily else [])],
        )
        for row in attacks
        for mode in row.modes
    ]
    return functools.partial(pytest.mark.parametrize(("attack", "mode"), parameters))


def stopped(ground: Battleground, request: pytest.FixtureRequest, attack: Attack, mode: Mode) -> None:
    """Try it, and see that nothing came of it."""
    surface = Path(request.path).stem.removeprefix("test_")
    outcome = ground.attack(surface, attack.name, mode.name)
    request.node.user_properties.append(("attack", (surface, attack.times, len(outcome.breaches))))
    assert outcome.breaches == [], "\n".join([f"{attack.who}: {attack.done}", *outcome.told])


def table() -> str:
    """What the suite tries, as the page shows it: it has no row that is not stopped."""
    tried: Counter[str] = Counter()
    number: Counter[str] = Counter()
    for surface in SURFACES:
        for row in rows(surface):
            for counted in (surface, f"by {row.who}", "all"):
                number[counted] += 1
            for mode in row.modes:
                for counted in (surface, f"by {row.who}", mode, "all"):
                    tried[counted] += row.times

    def part(title: str, names: Mapping[str, str]) -> str:
        head = f"| {title} | rows | tried | stopped | breached |\n|---|---|---|---|---|\n"
        lines = [f"| {shown} | {number[name]} | {tried[name]} | {tried[name]} | 0 |\n" for name, shown in names.items()]
        return head + "".join(lines)

    surfaces = {name: f"[{what}](../../tests/attacks/test_{name}.py)" for name, what in SURFACES.items()}
    by_mode = [f"{tried[mode]} with {mode}" for mode in BOTH]
    return "\n".join(
        [
            part("what is attacked", surfaces | {"all": "all of it"}),
            part("who attacks", {f"by {who}": who for who in Who}),
            f"{' and '.join(by_mode)}; the others end before there is one.\n",
        ]
    )


def write_page() -> None:
    """Put the tables into the page."""
    head, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(head + BEGIN + table() + END + rest.partition(END)[2])
