"""The table of states."""

from vmgahp import lifecycle


def test_every_state_can_be_stopped_and_a_saved_vm_is_not_so_for_the_client() -> None:
    for state in lifecycle.STATES:
        if state != lifecycle.STARTING:
            assert lifecycle.TRANSITIONS[state, lifecycle.STOP] == lifecycle.STOPPED
    assert lifecycle.STATUS_WORDS[lifecycle.SUSPENDED] == lifecycle.STATUS_WORDS[lifecycle.CHECKPOINTED] == "Suspended"
