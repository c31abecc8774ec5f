"""The table of states, and the page that shows it."""

from pathlib import Path

from vmgahp import vm

PAGE = Path(__file__).parent.parent / "docs" / "reference" / "states.md"


def test_the_diagram_in_the_documentation_is_the_table() -> None:
    _, _, rest = PAGE.read_text().partition("```mermaid\n")
    assert rest.partition("```")[0] == vm.diagram()


def test_the_table_speaks_of_known_states_and_operations() -> None:
    for (state, operation), outcome in vm.TRANSITIONS.items():
        assert state in vm.STATES
        assert operation in vm.OPERATIONS
        assert outcome in (*vm.STATES, vm.KEEP)


def test_every_state_can_be_stopped_once_the_vm_has_started() -> None:
    for state in vm.STATES:
        if state != vm.STARTING:
            assert vm.TRANSITIONS[state, vm.STOP] == vm.STOPPED


def test_a_saved_vm_is_never_stopped_for_the_client() -> None:
    assert vm.STATUS_WORDS[vm.SUSPENDED] == vm.STATUS_WORDS[vm.CHECKPOINTED] == "Suspended"
