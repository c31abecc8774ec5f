"""The helper process of a server with VMs under libvirt, which starts one or saves and restores one.

`vmgahp.drivers.libvirt.served` is its other end. `driver` and `machine` do the work, as they do it in a single
process; this module exchanges the messages.
"""

import os
import pickle
import queue
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from vmgahp import __version__, errors, lifecycle
from vmgahp.config import Settings
from vmgahp.drivers.base import Sent
from vmgahp.drivers.libvirt import running
from vmgahp.drivers.libvirt.checkpoint import JobCheckpoints
from vmgahp.drivers.libvirt.connection import LibvirtConnection
from vmgahp.drivers.libvirt.describe import Plan
from vmgahp.drivers.libvirt.disk_files import DiskFiles
from vmgahp.drivers.libvirt.driver import LibvirtDriver
from vmgahp.drivers.libvirt.guest import LibvirtGuest
from vmgahp.drivers.libvirt.machine import LibvirtMachine
from vmgahp.drivers.libvirt.save import MemoryFile, partial_name
from vmgahp.drivers.resources import Later, Resources
from vmgahp.host import helper, own_code, runtime_dir, threads
from vmgahp.host.helper import CHANNEL, Channel, HungUp, Message
from vmgahp.host.job_user import Identity
from vmgahp.host.serial_capture import ConsoleCapture
from vmgahp.job.ad import JobAd
from vmgahp.log import LONGEST_LINE
from vmgahp.metrics import Usage

Told = dict[str, Any]

IDLE_SECONDS = 0.2
"""Seconds for a request to end when the server has gone; after that a helper that is still busy exits."""


class _Starter(LibvirtDriver):
    """A driver that starts a VM for a server."""

    worker: "VmHelper"
    serves = False
    directory = ""
    sent: Sent = (False, None)

    def claim(self, resources: Resources, match: str, uuid: str) -> None:
        super().claim(resources, match, uuid)
        # The server watches the guest's events from the beginning.
        self.worker.wait_for_leave("claimed", (match, uuid))

    def keep(self, machine: LibvirtMachine, plan: Plan) -> None:
        super().keep(machine, plan)
        self.directory, self.sent = plan.spec.working_dir, plan.spec.sent

    def record_end(self, *_: object) -> None:
        """Do nothing, since the server records the end."""


class _SavedElsewhere(LibvirtMachine):
    """A machine that sends the server, before it writes anything, what is needed to restore it."""

    worker: "VmHelper"

    def begin_writing(self) -> None:
        self.worker.keep()


class VmHelper:
    """A worker that carries out the server's requests, one after the other."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._orders: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._handing_over = threading.Lock()
        self._is_ending = False
        self._idle = threading.Event()
        self._starter: _Starter | None = None
        self.machine: _SavedElsewhere | None = None
        self._kept: Told = {}
        self._connection: LibvirtConnection | None = None

    def run(self) -> None:
        """Carry out requests until the server has gone."""
        threads.start("the server", self._listen)
        while True:
            self._idle.set()
            order = self._orders.get()
            self._idle.clear()
            match order.word, order.data:
                case "start", dict(told):
                    self._start(told)
                case "take up", dict(told):
                    try:
                        self._take_up(told, order.descriptors)
                    except Exception as error:  # noqa: BLE001 - the server waits for an answer
                        return self._channel.send("refused", errors.plain(self._unable(error, told["version"])))
                case str(what), dict(told):
                    self._do(what, told)

    def log(self, line: str) -> None:
        """Send a line for the server's log."""
        with suppress(HungUp):
            self._channel.send("log", line[: LONGEST_LINE + 1])

    def wait_for_leave(self, word: str, data: object = None) -> None:
        """Ask the server for permission to continue, and carry out its requests until then.

        Raises `errors.ClientFault`.
        """
        self._channel.send(word, data)
        while True:
            order = self._orders.get()
            match order.word, order.data:
                case "go", _:
                    return
                case "stop", _:
                    raise errors.ClientFault(errors.VM_NOT_FOUND, "The server has refused it.")
                case str(what), dict(told):
                    self._do(what, told)

    def keep(self) -> None:
        """Send the server what the next helper must know of the VM."""
        self._tell("kept", {})

    # Messages of the server during an operation

    def _listen(self) -> None:
        try:
            while True:
                message = self._channel.receive()
                if message.word == "end":
                    threads.start("the end", self._end)
                else:
                    self._orders.put(message)
        except (HungUp, OSError):
            pass
        finally:
            if self._idle.wait(IDLE_SECONDS):
                with suppress(Exception):
                    self._leave()
            os._exit(0)

    def _leave(self) -> None:
        """Close the connection after all requests are done, lest libvirtd complain of a client that has vanished."""
        if self.machine is not None:
            self.machine.forget_unsure()
        if self._connection is not None:
            self._connection.close()

    def _end(self) -> None:
        """Stop the work, since the VM is to end."""
        with self._handing_over:
            self._is_ending = True
            starter = self._starter
        if self.machine is not None:
            self.machine.overruled = True
        for machine in () if starter is None else starter.interrupt():
            try:
                machine.destroy()
            except errors.Fault as fault:
                self.log(f"could not destroy {machine.name}: {fault.render()}")

    # A start

    def _start(self, told: Told) -> None:
        try:
            with self._handing_over:
                self._starter = starter = _Starter(*self._common(told), self.log)
                starter.worker, self._connection = self, starter.connection
                if self._is_ending:
                    starter.interrupt()
            with starter.identity.at_hand():
                machine = starter.start(JobAd.of_plain(told["job"], starter.identity))
            assert isinstance(machine, LibvirtMachine)
            with self._handing_over:
                self._starter = None
                is_ending = self._is_ending
            if is_ending:
                machine.destroy()
                raise errors.ClientFault(errors.VM_NOT_FOUND, f"{machine.name} is being ended.")
            self._hand_over(machine, starter)
        except BaseException as error:  # noqa: BLE001 - the server waits for an answer
            self._channel.send("fault", errors.plain(self._fault(error, lifecycle.START)))

    def _hand_over(self, machine: LibvirtMachine, starter: _Starter) -> None:
        resources, guest = machine.resources, machine.guest
        descriptors: list[int] = []

        def place(descriptor: int) -> int:
            descriptors.append(descriptor)
            return len(descriptors) - 1

        assert resources.guardian is not None
        told: Told = {
            "name": machine.name,
            "uuid": machine.uuid,
            "type": guest.type,
            "mac": machine.mac,
            "usage": machine.usage.seconds,
            "no_checkpoint": machine.no_checkpoint,
            "cannot": machine.why_not_saved(),
            "directory": starter.directory,
            "sent": starter.sent,
            "doubt": machine.doubt,
            "display": machine.has_display,
            "guardian": place(resources.guardian.pipe),
            "guardians_session": resources.guardian.session,
            "console": None,
            "exit_port": None,
            "run_ports": [
                (name, port.path, port.limit, *map(place, port.descriptors()))
                for name, port in resources.run_ports.items()
            ],
            "at_end": _plain(resources.at_end),
            "when_over": _plain(resources.when_over),
            "news": resources.news.plain(),
            "while_running": _plain(resources.while_running),
        }
        if resources.console is not None:
            output, listener = map(place, resources.console.descriptors())
            told["console"] = (resources.console.path, resources.console.limit, output, listener)
        if resources.exit_port is not None:
            told["exit_port"] = (resources.exit_port.path, *map(place, resources.exit_port.descriptors()))
        files = guest.files.files() if guest.files is not None else {}
        told["groups"] = list(files)
        told["disks"] = [place(descriptor) for descriptor in files.values()]
        kept = {
            "guest": (guest.name, guest.uuid, guest.type),
            "files": None if guest.files is None else guest.files.described(),
            "spec": machine.checkpoints.spec,
            "limits": machine.limits,
            "cannot": machine.saver.cannot,
            "before_restore": _plain(machine.saver.before_restore),
            "access": resources.access,
        }
        told["kept"] = place(helper.in_memory(pickle.dumps(kept | {"saved": ("", "", "")})))
        self._channel.send("runs", told, descriptors)

    # A save or a restore

    def _take_up(self, told: Told, descriptors: Sequence[int]) -> None:
        """Take over the VM to save or restore."""
        kept, *disks = descriptors
        self._kept = pickle.loads(helper.read(kept))  # noqa: S301 - written by a helper of this package
        vm_type, settings, identity = self._common(told)
        driver = LibvirtDriver(vm_type, settings, identity, self.log)
        self._connection = driver.connection
        name, uuid, domain_type = self._kept["guest"]
        guest = LibvirtGuest(name, uuid, domain_type, driver.connection, self.log)
        spec = self._kept["spec"]
        if self._kept["files"] is not None:
            files = dict(zip(told["groups"], disks, strict=True))
            guest.files = DiskFiles.taken_over(self._kept["files"], files, spec, identity)
        saver = driver.saver(spec.working_dir, identity, settings, self.log)
        saver.cannot, saver.memory_mib = self._kept["cannot"], spec.memory_mib
        saver.may_travel = spec.checkpoint
        saver.before_restore = [
            Later(place, identity, self.log, *arguments) for place, arguments in self._kept["before_restore"]
        ]
        machine = _SavedElsewhere(guest, Resources(self.log), saver, driver.deadlines(running.CALL_SECONDS), self.log)
        machine.worker, machine.limits = self, self._kept["limits"]
        machine.resources.access = self._kept["access"]
        machine.image, machine.saved_xml, machine.description = self._kept.pop("saved")
        machine.resumed = lambda: driver.display_again(spec, machine)
        machine.checkpoints = JobCheckpoints(driver.checkpoints_of, spec, domain_type)
        self.machine = machine

    def _do(self, what: str, told: Told) -> None:
        machine = self.machine
        assert machine is not None
        machine.state, machine.usage = lifecycle.State(told["state"]), Usage(told["usage"])
        machine.overruled = self._is_ending
        try:
            result = None
            match what, told["arguments"]:
                case "save", (str(operation),):
                    machine.save(operation)
                case "recover", (str(operation),):
                    self._recover(machine, operation)
                case "settle", ():
                    result = machine.was_saved_after_all()
                case "restore", ():
                    machine.restore(lambda: self.wait_for_leave("made"))
                case ("keep_saved" | "write_manifest" | "set_aside" | "put_back" | "forget_saved") as name, ():
                    getattr(machine, name)()
                case _:
                    raise ValueError(f"nobody knows how to {what}")
        except BaseException as error:  # noqa: BLE001 - the server waits for an answer
            self._tell("fault", {"fault": errors.plain(self._fault(error, what))})
        else:
            self._tell("done", {"result": result})

    def _recover(self, machine: LibvirtMachine, operation: str) -> None:
        """Recover the save of a helper that has died. Raises `errors.Fault` if the guest runs on, or is lost."""
        saver = machine.saver
        name = machine.image_of(operation)
        with suppress(OSError, errors.Fault):
            descriptor = saver.identity.open_scratch(saver.directory, partial_name(name), os.O_RDWR)
            machine.unsure = MemoryFile(saver, name, descriptor)
        machine.see_whether_it_was_saved()

    def _tell(self, word: str, told: Told) -> None:
        machine = self.machine
        assert machine is not None
        saved = machine.image, machine.saved_xml, machine.description
        memory = helper.in_memory(pickle.dumps(self._kept | {"saved": saved}))
        told |= {
            "image": machine.image,
            "is_checkpoint": machine.image == machine.image_of(lifecycle.CHECKPOINT),
            "unsure": machine.unsure is not None,
            "not_removed": sorted(machine.saver.not_removed),
            "lost": None if machine.lost is None else errors.plain(machine.lost),
            "news": machine.news.plain(),
        }
        try:
            self._channel.send(word, told, [memory])
        finally:
            os.close(memory)

    # What helps

    @staticmethod
    def _common(told: Told) -> tuple[str, Settings, Identity]:
        values, where = told["settings"]
        return told["vm_type"], Settings(values, where), Identity(*told["user"])

    def _unable(self, error: Exception, version: str) -> errors.Fault:
        """Return the fault for a running VM that cannot be taken over, perhaps since another version has started it."""
        if version == __version__:
            return self._fault(error, "what was kept of the VM")
        return errors.MachineFault(
            f"vmgahp {version} has started this VM, and vmgahp {__version__} of now cannot take it up: {error}.",
            f"the VM runs on; install {version} again for as long as it does.",
        )

    def _fault(self, error: BaseException, what: str) -> errors.Fault:
        if isinstance(error, errors.Fault):
            return error
        if isinstance(error, HungUp):
            raise error
        import traceback

        self.log("".join(traceback.format_exception(error)))
        return errors.HypervisorFault(
            f"{what} ended in an unexpected {type(error).__name__}: {error}.",
            "this is a defect of the server: please report it with the log.",
        )


def _plain(actions: Sequence[object]) -> list[tuple[str, tuple[str | int, ...]]]:
    """Return deferred calls in a form that the server can use."""
    return [action.plain for action in actions if isinstance(action, Later)]


def main() -> None:
    """Carry out the requests of the server that has started this process."""
    own_code.hold()
    runtime_dir.belong_to(os.getppid())
    ConsoleCapture.serves = False
    VmHelper(Channel(CHANNEL)).run()


if __name__ == "__main__":
    main()
