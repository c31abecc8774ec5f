"""Every input that is kept, and a few more of each target; ``scripts/fuzz`` tries them by the minute."""

import pytest

from tests.conftest import examples
from tests.fuzz import engines
from tests.fuzz.target import Target
from tests.fuzz.targets import TARGETS

each = pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)


@each
def test_what_is_kept_breaks_nothing(target: Target) -> None:
    for path in target.samples():
        target.run(path.read_bytes())


@each
def test_a_few_more_break_nothing(target: Target) -> None:
    engines.once(target, examples(100))
