"""The server: pipes, signals and workers. The only place that does protocol I/O.

The main thread alone touches the session; it reads requests, writes replies and hands each call of the
session to a thread of its own. A thread puts its outcome on a list and wakes the main thread through a
pipe. So a save that takes minutes holds up nothing but its own VM.
"""

import errno
import os
import select
import signal
import time
from _thread import allocate_lock, start_new_thread

from vmgahp import config, errors, lifecycle
from vmgahp.daemon.job_ad_file import JobAdFile
from vmgahp.host.job_user import Identity
from vmgahp.log import Log
from vmgahp.protocol.calls import Call
from vmgahp.protocol.session import Session

TYPE_CHECKING = False
if TYPE_CHECKING:
    import threading
    from collections.abc import Mapping

    from vmgahp.daemon.sampler import Sampler
    from vmgahp.drivers.base import Driver, Machine
    from vmgahp.job.ad import JobAd
    from vmgahp.metrics import Status

    Outcome = Status | int | errors.Fault | None

STDIN, STDOUT = 0, 1

READ_SIZE = 1 << 16
WRITE_SIZE = 4096
"""PIPE_BUF on Linux: when a pipe is reported writable, this much goes in without blocking."""

OUTPUT_LIMIT = 1 << 18
"""Bytes of unwritten output at which requests are no longer read, until the client reads its replies."""

DESTROY_DEADLINE = 20.0
"""Seconds that the end of the server waits for its VMs to be destroyed."""

FLUSH_DEADLINE = 2.0
"""Seconds that the end of the server waits for the client to read the last replies."""

ERROR_FILE = "vm_error.txt"
"""In the scratch directory: why a START failed, in plain words."""

_HUNG_UP = select.POLLHUP | select.POLLRDHUP | select.POLLERR | select.POLLNVAL
"""Events of an input that nobody can write to any more."""


class Server:
    """One client, one conversation, any number of VMs."""

    def __init__(self, vm_type: str, working_dir: str, environ: "Mapping[str, str]", *, to_stderr: bool) -> None:
        self.working_dir = working_dir
        self.log = Log()
        self.session = Session(vm_type, self.log.always, self.log.debug)
        self._environ = environ
        self._to_stderr = to_stderr
        self._output = bytearray()
        self._machines: dict[int, Machine] = {}
        self._job_ad_files: dict[int, JobAdFile] = {}
        self._directories: dict[int, str] = {}
        """The scratch directory of each VM that has not ended: no two share one."""
        self._directories_lock = allocate_lock()
        self._threads: dict[Call, threading.Thread] = {}
        self._outcomes: list[tuple[Call, Outcome]] = []
        self._ending = False
        self._why_end = ""
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._settings: config.Settings | None = None
        self._identity: Identity | None = None
        self._configuring = allocate_lock()
        """Held until the settings are there, or a fault in their place."""
        self._request_timeout = self.session.request_timeout
        self._configuration_fault: errors.Fault | None = None
        self._driver: Driver | None = None
        self._driver_lock = allocate_lock()
        self._sampler: Sampler | None = None
        """Keeps the figures of the VMs; none where VM_METRICS_INTERVAL is 0."""
        self._poller = select.poll()
        self._poller.register(STDIN, select.POLLIN)
        self._poller.register(STDOUT, 0)
        self._poller.register(self._wake_read, select.POLLIN)
        self._watched = (True, False)
        """Whether `_poller` waits for input, and whether for room for output."""
        self._writable = select.poll()
        self._writable.register(STDOUT, select.POLLOUT)

    def run(self) -> int:
        """Serve until QUIT, the end of input, a signal or a client that is gone; the exit status."""
        self._catch_signals()
        self._configuring.acquire()
        try:
            start_new_thread(self._configure, ())
        except RuntimeError:  # no thread can be started now: the client waits until the settings are read
            self._configure()
        while not (self.session.quitting or self._why_end):
            self._turn()
        self.log.always("QUIT received" if self.session.quitting else self._why_end)
        self._destroy_all()
        if self.session.quitting:
            self.session.goodbye()
        self._flush()
        if self._driver is not None and not self._threads:
            self._driver.close()
        self.log.always("the server ends")
        self.log.close()
        return 0

    # The loop

    def _turn(self) -> None:
        """Wait for one thing to happen and deal with all that did."""
        self._watch()
        deadline = self.session.next_deadline()
        timeout = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000 + 1
        for descriptor, events in self._poller.poll(timeout):
            if descriptor == self._wake_read:
                self._drain_wakes()
            elif descriptor == STDIN:
                if self._watched[0]:
                    self._read()
                elif events & _HUNG_UP:
                    self._why_end = "the client closed our input and does not read its replies"
            elif not events & select.POLLOUT:
                self._why_end = "the client no longer reads"
        if not self._configuring.locked():
            self.session.request_timeout = self._request_timeout
        now = time.monotonic()
        self._collect(now)
        self.session.expire(now)
        self._output += self.session.take_output()
        if self._output:
            self._write()
        for call in self.session.take_calls():
            self._begin(call)

    def _watch(self) -> None:
        """Tell poll what is wanted now, which mostly is what was wanted before."""
        wanted = len(self._output) < OUTPUT_LIMIT, bool(self._output)
        if wanted == self._watched:
            return
        # A client that reads nothing may be gone: the end of the input is seen while no input is wanted.
        self._poller.modify(STDIN, select.POLLIN if wanted[0] else select.POLLRDHUP)
        self._poller.modify(STDOUT, select.POLLOUT if wanted[1] else 0)
        self._watched = wanted

    def _read(self) -> None:
        try:
            data = os.read(STDIN, READ_SIZE)
        except BlockingIOError:
            return
        except OSError as error:
            self._why_end = f"standard input failed: {error.strerror}"
            return
        if data:
            self.session.receive(data, time.monotonic())
        else:
            self._why_end = "the client closed our input"

    def _write(self) -> None:
        """Write what goes in without waiting; poll says when there is room for the rest."""
        if not any(events & select.POLLOUT for _, events in self._writable.poll(0)):
            return
        try:
            written = os.write(STDOUT, self._output[:WRITE_SIZE])
        except BlockingIOError:
            return
        except OSError as error:
            self._output.clear()
            self._why_end = f"standard output failed: {error.strerror}"
            return
        del self._output[:written]

    def _flush(self) -> None:
        self._output += self.session.take_output()
        end = time.monotonic() + FLUSH_DEADLINE
        while self._output and (left := end - time.monotonic()) > 0:
            for _, events in self._writable.poll(left * 1000):
                if not events & select.POLLOUT:
                    return
                self._write()

    # Signals and other threads

    def _catch_signals(self) -> None:
        for number in (signal.SIGTERM, signal.SIGQUIT, signal.SIGINT):
            signal.signal(number, self._signalled)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)

    def _signalled(self, number: int, _frame: object) -> None:
        self._why_end = f"received {signal.Signals(number).name}"

    def _wake(self) -> None:
        try:
            os.write(self._wake_write, b"\0")
        except BlockingIOError:
            pass  # full of wakes already

    def _drain_wakes(self) -> None:
        try:
            os.read(self._wake_read, 4096)
        except BlockingIOError:
            pass

    def _collect(self, now: float) -> None:
        while self._outcomes:  # to which the threads append
            call, outcome = self._outcomes.pop(0)
            self._threads.pop(call, None)
            failed = isinstance(outcome, errors.Fault)
            if (call.operation == lifecycle.STOP and not failed) or (call.operation == lifecycle.START and failed):
                for kept in (self._machines, self._job_ad_files, self._directories):
                    kept.pop(call.vm.id, None)
            self.session.finished(call, outcome, now)

    def _begin(self, call: Call) -> None:
        # Here, in the main thread: Python 3.11 takes whoever imports threading first for that one.
        from vmgahp.host import threads

        try:
            self._threads[call] = threads.start(f"vm{call.vm.id}-{call.operation}", self._work, call)
        except errors.MachineFault as fault:
            self._outcomes.append((call, fault))
            self._wake()

    # What the threads do

    def _configure(self) -> None:
        """Read the settings; beside the protocol, because to ask HTCondor takes longer than to answer."""
        try:
            self._settings = config.load(self._environ)
            self._identity = Identity.from_environ(self._environ)
            self.log.open(self._settings, to_stderr=self._to_stderr)
            self._request_timeout = float(max(1, self._settings.integer("VM_GAHP_REQ_TIMEOUT")))
        except Exception as error:  # noqa: BLE001 - without an outcome every START would wait for ever
            fault = error if isinstance(error, errors.Fault) else errors.MachineFault(f"No settings: {error!r}.")
            self._configuration_fault = fault
            self.log.open(config.Settings(), to_stderr=True)
            self.log.always(fault.render())
        else:
            for warning in self._settings.warnings:
                self.log.always(warning)
            self.log.always(f"serving VM type {self.session.vm_type} in {self.working_dir}")
        self._configuring.release()
        self._wake()  # deadlines may be nearer than was thought

    def _work(self, call: Call) -> None:
        outcome: Outcome
        began = time.monotonic()
        try:
            outcome = self._perform(call)
        except errors.Fault as fault:
            outcome = fault
        except Exception as error:  # noqa: BLE001 - a bug in a driver must not leave a request unanswered
            import traceback

            self.log.always("".join(traceback.format_exception(error)))
            outcome = errors.HypervisorFault(
                f"{call.operation} ended in an unexpected {type(error).__name__}: {error}.",
                "this is a defect of the server: please report it with the log.",
            )
        if call.operation == lifecycle.START and isinstance(outcome, errors.Fault):
            outcome = self._explain(call, outcome)
        if self._sampler is not None:
            self._sampler.done(call, outcome, began, self._machines.get(call.vm.id))
        self._outcomes.append((call, outcome))
        self._wake()

    def _perform(self, call: Call) -> "Outcome":
        if call.operation == lifecycle.START:
            self._start(call)
            return None
        machine = self._machines[call.vm.id]
        if self._sampler is not None:
            self._sampler.before(call)
        match call.operation:
            case lifecycle.STATUS:
                report = machine.status()
                machine.found = time.time(), report
                if report.state == lifecycle.STOPPED:
                    machine.release()
                    self._directories.pop(call.vm.id, None)
                return report
            case lifecycle.GETPID:
                assert self._settings is not None
                return machine.pid() if self._settings.boolean("VM_REPORT_PID") else 0
            case lifecycle.STOP:
                machine.stop()
            case lifecycle.SOFT_SUSPEND:
                machine.soft_suspend()
            case lifecycle.SUSPEND:
                machine.suspend()
            case lifecycle.RESUME:
                machine.resume(call.state)
            case lifecycle.CHECKPOINT:
                machine.checkpoint()
                if self._job_ad_files[call.vm.id].restore():
                    self.log.debug("put .job.ad back as it was at the START, to keep it out of the checkpoint")
        return None

    def _start(self, call: Call) -> None:
        assert call.job is not None
        with self._configuring:  # it is not known before as whom the ad is evaluated
            pass
        if self._identity is not None:
            call.job.evaluate_as(self._identity)
        self._claim_directory(call)
        self._job_ad_files[call.vm.id] = JobAdFile(call.job.working_dir())
        driver = self._get_driver(call.job)
        assert self._settings is not None
        assert self._identity is not None
        from vmgahp.host import scratch  # before the first reply it would cost too much

        with self._identity.at_hand():
            scratch.forget(self._identity, call.job.working_dir(), self.log.always, ERROR_FILE)
            if self._settings.string("VM_POLICY_REQUIREMENTS"):
                from vmgahp.hooks import policy

                policy.require(self._settings, call.job)
            machine = driver.start(call.job)
        self._machines[call.vm.id] = machine
        if self._ending:
            self._destroy(machine)

    def _claim_directory(self, call: Call) -> None:
        """See that no other VM has the scratch directory: each would overwrite what the other saves and prints."""
        assert call.job is not None
        directory = os.path.realpath(call.job.working_dir())
        with self._directories_lock:
            if directory in self._directories.values():
                raise errors.ClientFault(
                    errors.VM_INVALID_OPERATION,
                    f"VM_WORKING_DIR = {directory} is the scratch directory of another VM of this server.",
                    "give each VM a scratch directory of its own.",
                )
            self._directories[call.vm.id] = directory

    def _get_driver(self, job: "JobAd") -> "Driver":
        """The driver of this machine's type, for a job that is of it. Raises `errors.Fault`."""
        if self._configuration_fault is not None:
            raise self._configuration_fault
        if self._ending:
            raise errors.ClientFault(errors.VM_NOT_FOUND, "The server is ending: no VM is started any more.")
        assert self._settings is not None
        assert self._identity is not None
        from vmgahp.drivers import base
        from vmgahp.drivers.machine_types import type_for

        vm_type = type_for(job, self.session.vm_type, self._settings)
        with self._driver_lock:
            if self._driver is None:
                self._driver = base.find(vm_type)(vm_type, self._settings, self._identity, self.log.always)
                self._sampler = self._make_sampler(self._settings, self._identity)
            return self._driver

    def _make_sampler(self, settings: "config.Settings", identity: Identity) -> "Sampler | None":
        """None where no figures are wanted, and where that setting makes no sense: no job fails for want of them."""
        try:
            if not settings.integer("VM_METRICS_INTERVAL"):
                return None
            from vmgahp.daemon.sampler import Sampler

            return Sampler(settings, identity, self.log)
        except errors.MachineFault as fault:
            self.log.always(fault.render())
            return None

    def _explain(self, call: Call, fault: errors.Fault) -> errors.Fault:
        """Leave the reason of a failed START where the job's owner can find it.

        The fault is the machine's and not the job's where that cannot be done because the machine is ill: what was
        wrong with a file of the job's then says nothing about the job.
        """
        with self._configuring:  # a job may be refused before it is known who its user is
            pass
        directory = self._directories.get(call.vm.id)
        if self._identity is None or directory is None or self._ending:
            return fault  # a start that the end overtakes explains nothing to the job's owner
        try:
            self._identity.write_scratch(directory, ERROR_FILE, (fault.render() + "\n").encode())
        except errors.MachineFault as failure:
            self.log.always(f"could not write {ERROR_FILE}: {failure.problem}")
            # A job that was refused can have filled the file system itself.
            full = isinstance(failure.__cause__, OSError) and failure.__cause__.errno == errno.ENOSPC
            if isinstance(fault, errors.JobFault) and not full:
                return errors.MachineFault(f"{fault.problem} {failure.problem}", failure.hint)
        except OSError as error:
            self.log.always(f"could not write {ERROR_FILE}: {error}")
            if isinstance(fault, errors.JobFault) and error.errno == errno.EACCES:
                from vmgahp.host import execute  # before the first reply it would cost too much

                found = execute.unwritable(f"{fault.problem} {ERROR_FILE}", error, directory, self._identity)
                return found if isinstance(found, errors.MachineFault) else fault
        return fault

    # The end

    def _destroy_all(self) -> None:
        """Destroy every VM, those whose START still runs included, side by side and within a deadline."""
        from vmgahp.host import threads

        self._ending = True
        if self._identity is None:
            return  # without settings there is no driver, and no START goes on from here
        starting = () if self._driver is None else self._driver.interrupt()
        end = time.monotonic() + DESTROY_DEADLINE
        workers = list(self._threads.values())
        without_thread = []
        for machine in {*self._machines.values(), *starting}:
            try:
                workers.append(threads.start(f"end-{machine.name}", self._destroy, machine))
            except errors.MachineFault:
                without_thread.append(machine)
        for machine in without_thread:
            if time.monotonic() < end:
                self._destroy(machine)
            else:
                self.log.always(f"no time is left to destroy {machine.name}; the guardian takes over")
        for thread in workers:
            thread.join(max(0.0, end - time.monotonic()))
            if thread.is_alive():
                self.log.always(f"{thread.name} has not ended in {DESTROY_DEADLINE:.0f} s; the guardian takes over")
        self._collect(time.monotonic())

    def _destroy(self, machine: "Machine") -> None:
        try:
            machine.destroy()
        except Exception as error:  # noqa: BLE001 - a bug in one driver must not keep the other VMs
            said = error.render() if isinstance(error, errors.Fault) else repr(error)
            self.log.always(f"could not destroy {machine.name}: {said}")
        else:
            if self._sampler is not None:
                self._sampler.end(machine, "the server has ended: " + (self._why_end or "QUIT received"))


def serve(vm_type: str, working_dir: str, environ: "Mapping[str, str]", *, to_stderr: bool) -> int:
    """Serve one client on standard input and output, after the greeting; returns the exit status."""
    return Server(vm_type, working_dir, environ, to_stderr=to_stderr).run()
