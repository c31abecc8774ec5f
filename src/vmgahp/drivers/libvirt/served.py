"""The server's side of VMs under libvirt: the operations while they run.

To read a job, to describe and verify its domain, and to save and restore a guest takes much code, which a server
should not keep in memory as long as its VM lives: `vmgahp.drivers.libvirt.worker` does it, in a process that returns
the results.
"""

from _collections_abc import Sequence

from vmgahp import __version__, errors
from vmgahp.config import Settings
from vmgahp.drivers.base import Driver, Logger, Machine, Survey
from vmgahp.drivers.exit_record import ExitPort
from vmgahp.drivers.libvirt import binding as libvirt
from vmgahp.drivers.libvirt.served_machine import END_SECONDS, WORKER, ServedMachine
from vmgahp.drivers.libvirt.under_way import StartUnderWay, ended_without_answer
from vmgahp.drivers.libvirt.uri import connection_for
from vmgahp.drivers.resources import Resources
from vmgahp.host import helper, threads
from vmgahp.host.guardian import Guardian
from vmgahp.host.helper import Helper, HungUp, Spare
from vmgahp.host.job_user import Identity
from vmgahp.host.light import suppress
from vmgahp.host.serial_capture import ConsoleCapture
from vmgahp.job.ad import JobAd

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Told = dict[str, Any]
else:
    Told = dict
"""The data of a helper's message, plain values."""

IN_PROCESS = "test:"
"""The prefix of the URIs of libvirt's test driver, whose domains are in the memory of the process that makes them."""


class ServedDriver(Driver):
    """The driver that a server uses for the VM types kvm, qemu and libvirt."""

    def __init__(self, vm_type: str, settings: Settings, identity: Identity, log: Logger) -> None:
        super().__init__(vm_type, settings, identity, log)
        self.connection = connection_for(settings, log)
        self.connection.hears_agents = settings.boolean("VM_GUEST_AGENT")
        self._whole: Driver | None = None
        """The driver that does all in this process, for domains that only exist in the process that makes them."""
        if self.connection.uri.startswith(IN_PROCESS):
            self._whole = self._make_whole()
        self._starting: tuple[StartUnderWay, ...] = ()
        self._lock = threads.Lock()
        self._server_ends = False
        self._spare = Spare(WORKER)

    def get_ready(self) -> None:
        if self._whole is None:
            self._spare.get_ready()

    def start(self, job: JobAd) -> Machine:
        if self._whole is not None:
            return self._whole.start(job)
        work = self._spare.take()
        try:
            starting = StartUnderWay(job.vm_name(), work)
            with self._lock:
                self._starting = (*self._starting, starting)
                if self._server_ends:
                    raise errors.ClientFault(errors.VM_NOT_FOUND, "The server is ending: no VM is started any more.")
            try:
                machine = self._start(job, work)
            finally:
                with self._lock:
                    self._starting = tuple(each for each in self._starting if each is not starting)
                starting.over.set()
        except BaseException:
            work.dismiss(END_SECONDS)
            raise
        try:
            threads.start("the end of a helper", work.dismiss, END_SECONDS)  # which takes 10 ms
        except errors.MachineFault:
            work.dismiss(END_SECONDS)
        return machine

    def interrupt(self) -> Sequence[Machine]:
        if self._whole is not None:
            return self._whole.interrupt()
        with self._lock:
            self._server_ends = True
            starting = self._starting
        for each in starting:
            each.interrupt()
        return starting

    def kill(self, match: str, uuid: str = "") -> bool:
        return self._make_whole().kill(match, uuid)

    def survey(self, end: float) -> Survey:
        return self._make_whole().survey(end)

    def close(self) -> None:
        if self._whole is not None:
            self._whole.close()
        self.connection.close()
        self._spare.close()

    def order(self) -> Told:
        """Return what every helper must know."""
        return {
            "version": __version__,
            "vm_type": self.vm_type,
            "settings": self.settings.given(),
            "user": (self.identity.uid, self.identity.gid),
        }

    def _make_whole(self) -> Driver:
        """Make the driver that does all in this process, for callers that serve no VM."""
        from vmgahp.drivers.libvirt.driver import LibvirtDriver

        return LibvirtDriver(self.vm_type, self.settings, self.identity, self.log)

    def _start(self, job: JobAd, work: Helper) -> Machine:
        uuid = ""
        try:
            work.send("start", self.order() | {"job": job.plain()})
            with suppress(errors.Fault, libvirt.libvirtError):  # the helper meets the same error and reports it
                self.connection.call(lambda _: None)  # opens the connection that receives the guest's events
            while True:
                message = work.receive()
                match message.word, message.data:
                    case "log", str(line):
                        self.log(line)
                    case "claimed", (str(name), str(uuid)):
                        watch = self.connection.watch(uuid, name)
                        watch.ours = True
                        work.send("go")
                    case "fault", words:
                        raise errors.of_plain(words)  # type: ignore[arg-type]
                    case "runs", told:
                        try:
                            return self._take_over(told, message.descriptors)  # type: ignore[arg-type]
                        except BaseException:
                            helper.close(message.descriptors)  # its guardian then ends the VM
                            raise
        except (HungUp, OSError) as error:
            self.connection.unwatch(uuid)
            raise ended_without_answer(job.vm_name()) from error
        except BaseException:
            self.connection.unwatch(uuid)
            raise

    def _take_over(self, told: Told, descriptors: Sequence[int]) -> Machine:
        """Return the machine for the VM that a helper has started. Raises `errors.MachineFault`."""
        resources = Resources(self.log)
        resources.news.take_over(told["news"])
        machine = ServedMachine(self, resources, told, descriptors)
        self.record_end(resources, machine.name, told["directory"], lambda: machine.usage.seconds, told["sent"])
        assert resources.exit is not None
        resources.exit.doubt = told["doubt"]
        if told["exit_port"]:
            path, *places = told["exit_port"]
            memory, output, listener = (descriptors[place] for place in places)
            resources.exit_port = ExitPort.taken_over(path, self.log, (memory, output, listener))
            resources.exit.port = resources.exit_port.written
        if told["console"]:
            path, limit, output, listener = told["console"]
            resources.console = ConsoleCapture.taken_over(
                path, limit, self.log, descriptors[output], descriptors[listener]
            )
            resources.exit.console = resources.console.tail
        if told["run_ports"]:
            from vmgahp.drivers.libvirt import run_ports

            resources.run_ports = run_ports.taken_over(told["run_ports"], descriptors, self.log)
        machine.begin()
        resources.guardian = Guardian(descriptors[told["guardian"]], told["guardians_session"])
        return machine
