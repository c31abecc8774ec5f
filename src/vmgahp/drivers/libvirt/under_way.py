"""A start that a helper is carrying out, and the fault for a helper that dies during an operation."""

from vmgahp import errors, lifecycle
from vmgahp.drivers.base import Machine
from vmgahp.drivers.lifecycle import OVERRULE_SECONDS
from vmgahp.host import threads
from vmgahp.host.helper import Helper, HungUp
from vmgahp.host.light import suppress
from vmgahp.metrics import Status


class StartUnderWay(Machine):
    """A VM whose start has not ended."""

    def __init__(self, name: str, work: Helper) -> None:
        self.name = name
        self.over = threads.Flag()
        self._work = work

    def interrupt(self) -> None:
        """Make the start fail soon."""
        with suppress(HungUp):
            self._work.send("end")

    def status(self) -> Status:
        return Status(lifecycle.RUNNING)

    def pid(self) -> int:
        return 0

    def stop(self) -> None:
        self.destroy()

    def destroy(self) -> None:
        """Wait for the end of the start, which was interrupted; if it does not come, leave the VM to the guardian."""
        if not self.over.wait(OVERRULE_SECONDS):
            self._work.kill()
            raise errors.HypervisorFault(
                f"The start of {self.name} has not ended in {OVERRULE_SECONDS:g} s.", "its guardian ends the VM."
            )


def ended_without_answer(name: str) -> errors.MachineFault:
    """Return the fault for a helper that was killed, or has died."""
    return errors.MachineFault(
        f"The helper process of {name} has ended without an answer.",
        "look for what kills processes on this machine, such as a lack of memory.",
    )
