"""The table of states, and the page that shows it."""

from tests import REPOSITORY
from vmgahp import lifecycle

PAGE = REPOSITORY / "docs" / "reference" / "states.md"


def test_the_diagram_in_the_documentation_is_the_table() -> None:
    _, _, rest = PAGE.read_text().partition("```mermaid\n")
    assert rest.partition("```")[0] == lifecycle.diagram()


def test_every_state_can_be_stopped_and_a_saved_vm_is_not_so_for_the_client() -> None:
    for state in lifecycle.STATES:
        if state != lifecycle.STARTING:
            assert lifecycle.TRANSITIONS[state, lifecycle.STOP] == lifecycle.STOPPED
    assert lifecycle.STATUS_WORDS[lifecycle.SUSPENDED] == lifecycle.STATUS_WORDS[lifecycle.CHECKPOINTED] == "Suspended"
