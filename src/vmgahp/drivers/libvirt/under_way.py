"""A start that a helper is at, and what is said of a helper that ends in the middle of something."""

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
        """Have it end as a failure, soon."""
        with suppress(HungUp):
            self._work.send("end")

    def status(self) -> Status:
        return Status(lifecycle.RUNNING)

    def pid(self) -> int:
        return 0

    def stop(self) -> None:
        self.destroy()

    def destroy(self) -> None:
        """Wait for the end of the start, which was interrupted; where it does not come the guardian takes over."""
        if not self.over.wait(OVERRULE_SECONDS):
            self._work.kill()
            raise errors.HypervisorFault(
                f"The start of {self.name} has not ended in {OVERRULE_SECONDS:g} s.", "its guardian ends the VM."
            )


def ended_without_answer(name: str) -> errors.MachineFault:
    """A helper was killed, or has died."""
    return errors.MachineFault(
        f"The helper process of {name} has ended without an answer.",
        "look for what kills processes on this machine, such as a lack of memory.",
    )
