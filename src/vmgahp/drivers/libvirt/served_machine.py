"""The server's side of a VM under libvirt, which helpers start, save and restore."""

import os
import time
from _collections_abc import Callable, Iterator, Mapping, Sequence

from vmgahp import errors
from vmgahp.drivers.libvirt import running
from vmgahp.drivers.libvirt.guest import EVENT_WAIT, LibvirtGuest, let_go
from vmgahp.drivers.libvirt.running import RunningMachine
from vmgahp.drivers.libvirt.stats import cpu_seconds
from vmgahp.drivers.libvirt.under_way import ended_without_answer
from vmgahp.drivers.resources import Later, Resources
from vmgahp.host.helper import Helper, HungUp, Message
from vmgahp.host.light import contextmanager, suppress
from vmgahp.metrics import Usage

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from vmgahp.drivers.libvirt.served import ServedDriver

    Told = dict[str, Any]
else:
    Told = dict
"""The data of a helper's message, plain values."""

WORKER = "vmgahp.drivers.libvirt.worker"

END_SECONDS = 3.0
"""Seconds for a helper that has answered to exit; then it is killed."""

OBEY_SECONDS = 10.0
"""Seconds for a helper whose VM is to end to stop its work; then it is killed."""


class ServedMachine(RunningMachine):
    """A domain that a helper has started, and that helpers save and restore."""

    def __init__(self, driver: "ServedDriver", resources: Resources, told: Told, descriptors: Sequence[int]) -> None:
        guest = LibvirtGuest(told["name"], told["uuid"], told["type"], driver.connection, driver.log)
        super().__init__(guest, resources, driver.deadlines(running.CALL_SECONDS), driver.log)
        self._driver = driver
        self._directory: str = told["directory"]
        self.mac = told["mac"]
        self.usage = Usage(told["usage"])
        self.no_checkpoint = told["no_checkpoint"]
        self.io_errors.patience = driver.settings.integer("VM_IO_ERROR_TIMEOUT")
        if told["display"]:
            self.screenshot = self._take_screenshot
        self._is_shot = False
        self._cannot: str = told["cannot"]
        """The reason why the guest's memory cannot be saved; empty if it can."""
        self._groups: list[str] = told["groups"]
        self._disks = [descriptors[place] for place in told["disks"]]
        """The job's disks as QEMU has them open, kept until the VM is gone: a restored guest gets the same files."""
        self._kept = descriptors[told["kept"]]
        """A file in memory with everything that a helper must know of the VM."""
        self._image = ""
        self._is_checkpoint = False
        """True if `_image` is in the place for a checkpoint."""
        self._is_unsure = False
        """True if the outcome of the last save is unknown; `_work` still has its file."""
        self._not_removed: set[str] = set()
        self._work: Helper | None = None
        self._obeys_until = 0.0
        """The time by which the operation under way has to stop, by the monotonic clock; 0 for none."""
        resources.at_end += [self._later(each) for each in told["at_end"]]
        resources.when_over += [self._later(each) for each in told["when_over"]]
        resources.while_running += [self._later(each) for each in told["while_running"]]

    def begin(self) -> None:
        """Begin to serve the VM, whose guest runs."""
        self.guest.pid()  # needed for its last statistics
        self.guest.watch.resumed.wait(EVENT_WAIT)  # wait for our own event, so that it is not logged as others' doing
        self.guest.watch.ours = False
        self.started()
        self.serve()

    def disk_files(self) -> Mapping[str, int]:
        return dict(zip(self._groups, self._disks, strict=True))

    # What the server asks

    def was_saved_after_all(self) -> bool:
        if not self._is_unsure or not self._ask("settle")["result"]:
            return False
        self._is_saved()
        return True

    def saved_bytes(self) -> int:
        return self._driver.identity.occupied_scratch(self._directory, self._image) if self._image else 0

    def suspend(self) -> None:
        with self._helped():
            super().suspend()

    def resume(self, state: str) -> None:
        with self._helped():
            super().resume(state)

    def checkpoint(self) -> None:
        with self._helped():
            super().checkpoint()

    def interrupt(self) -> None:
        """Tell the helper to stop, and kill it if it does not obey."""
        if (work := self._work) is not None:
            now = time.monotonic()
            if not self._obeys_until:
                self._obeys_until = now + OBEY_SECONDS
                with suppress(HungUp):
                    work.send("end")
            elif now > self._obeys_until:
                work.kill()
        super().interrupt()

    def before_release(self) -> None:
        super().before_release()
        self._dismiss()
        for name in self._not_removed.copy():
            self._remove(name)
        let_go(self._disks)
        self._disks = []
        if self._kept >= 0:
            os.close(self._kept)
            self._kept = -1

    # Saving and restoring

    def save(self, operation: str) -> None:
        if self._cannot:
            raise errors.ClientFault(errors.VM_NO_SUPPORT_SUSPEND, f"{self.name} cannot be saved: {self._cannot}.")
        nanoseconds = self.guest.operate("saving", lambda domain: domain.info())[4]
        self.guest.watch.ours = True
        self.guest.watch.gone.clear()
        try:
            with self.io_errors.held():
                try:
                    self._ask("save", operation)
                except HungUp:
                    self.log(f"{self.name}: what saved it has ended; seeing what has become of the guest")
                    self._ask("recover", operation)
                self.usage.read(cpu_seconds(nanoseconds))
                self._is_saved()
        except HungUp as error:
            raise ended_without_answer(self.name) from error
        finally:
            self.guest.watch.ours = False

    def keep_saved(self) -> None:
        self._have("keep_saved")

    def write_manifest(self) -> None:
        self._have("write_manifest")

    def restore(self, before_it_runs: Callable[[], None]) -> None:
        watch = self.guest.watch
        watch.gone.clear()
        watch.resumed.clear()
        watch.was_saved = False
        watch.ours = True
        try:
            self._ask("restore", made=before_it_runs)
            self.guest.pid()
            watch.resumed.wait(EVENT_WAIT)
        except HungUp as error:
            self.end_guest()
            raise ended_without_answer(self.name) from error
        finally:
            watch.ours = False
        self.io_errors.let_go()
        self.goes_on()

    def set_aside(self) -> None:
        self._have("set_aside")

    def put_back(self) -> None:
        self._have("put_back")

    def forget_saved(self) -> None:
        if self._is_checkpoint:
            try:
                self._have("forget_saved")
            except errors.Fault as fault:
                self.log(f"{self.name}: its saved memory stays: {fault.problem}")
        elif self._image:
            self._remove(self._image)
        self._image = ""

    def _is_saved(self) -> None:
        """Record that the guest is gone, and its memory is safe."""
        self._last_report = None
        self.usage.carry()

    def _remove(self, name: str) -> None:
        try:
            self._driver.identity.unlink_scratch(self._directory, name)
        except (OSError, errors.Fault) as error:
            self.log(f"could not remove {name} from {self._directory}: {error}")
            self._not_removed.add(name)  # retried at the end of the VM

    def _take_screenshot(self) -> None:
        from vmgahp.drivers.libvirt.screenshot import Screenshot

        if not self._is_shot:
            self._is_shot = True
            driver = self._driver
            Screenshot(driver.connection, self.name, self.uuid, self._directory, driver.identity, self.log).take()

    # Helpers

    def _later(self, plain: tuple[str, tuple[str | int, ...]]) -> Later:
        place, arguments = plain
        return Later(place, self._driver.identity, self.log, *arguments)

    @contextmanager
    def _helped(self) -> Iterator[None]:
        """Use one helper for a whole operation, and dismiss it afterwards."""
        self._obeys_until = 0.0
        try:
            yield
        finally:
            if not self._is_unsure:
                self._dismiss()

    def _dismiss(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            work.dismiss(END_SECONDS)

    def _have(self, what: str) -> None:
        """Have a helper do `what`. Raises `errors.Fault`."""
        try:
            self._ask(what)
        except HungUp as error:
            raise ended_without_answer(self.name) from error

    def _ask(self, what: str, *arguments: str, made: Callable[[], None] = lambda: None) -> Told:
        """Return a helper's answer; `made` is called when it asks for permission to continue.

        Raises `errors.Fault`, `HungUp`.
        """
        try:
            if self._work is None:
                self._work = Helper(WORKER)
                order = self._driver.order() | {"groups": self._groups}
                self._work.send("take up", order, [self._kept, *self._disks])
            self._work.send(what, {"arguments": arguments, "state": str(self.state), "usage": self.usage.seconds})
            return self._hear(self._work, made)
        except (HungUp, OSError) as error:
            self._dismiss()  # the next helper does the rest
            raise HungUp from error

    def _hear(self, work: Helper, made: Callable[[], None]) -> Told:
        refusal: BaseException | None = None
        while True:
            message = work.receive()
            match message.word, message.data:
                case "log", str(line):
                    self.log(line)
                case "made", _:
                    try:
                        made()
                    except BaseException as error:  # noqa: BLE001 - raised when the helper has undone what it has made
                        refusal = error
                    work.send("go" if refusal is None else "stop")
                case "kept", _:
                    self._learn(message)
                case "refused", words:
                    raise errors.of_plain(words)  # type: ignore[arg-type]
                case "done" | "fault" as outcome, dict(told):
                    self._learn(message)
                    if refusal is not None:
                        raise refusal
                    if outcome == "fault":
                        raise errors.of_plain(told["fault"])
                    return told

    def _learn(self, message: Message) -> None:
        """Take over the changes of the VM from a helper's message."""
        told: Told = message.data  # type: ignore[assignment]
        kept, self._kept = self._kept, message.descriptors[0]
        os.close(kept)
        self._image, self._is_checkpoint = told["image"], told["is_checkpoint"]
        self._is_unsure = told["unsure"]
        self._not_removed |= set(told["not_removed"])
        self.news.take_over(told["news"])
        if told["lost"]:
            self.lost = errors.of_plain(told["lost"])
