"""The server: pipes, signals and workers, with all I/O of the protocol.

The main thread alone uses the session; it reads requests, writes replies and hands the calls of the
session to workers, one a VM, and one more for a call that overrules a running one. A worker puts the outcome on a list
and wakes the main thread through a pipe. So a save that takes minutes blocks only its own VM.
"""

import errno
import gc
import os
import select
import signal
import time
from _thread import allocate_lock, get_native_id, start_new_thread

from vmgahp import config, errors, lifecycle
from vmgahp.host import job_user
from vmgahp.host.budget import Budget
from vmgahp.host.job_user import Identity
from vmgahp.log import Log
from vmgahp.protocol.session import Call, Session
from vmgahp.vm_types import LIBVIRT

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from vmgahp.daemon.collector import Collector, Outcome
    from vmgahp.daemon.job_ad_file import JobAdFile
    from vmgahp.drivers.base import Driver, Machine
    from vmgahp.host.wait import Worker
    from vmgahp.job.ad import JobAd

STDIN, STDOUT = 0, 1

READ_SIZE = 1 << 14
WRITE_SIZE = 4096
"""The bytes (PIPE_BUF on Linux) that can be written without blocking to a pipe that is reported writable."""

OUTPUT_LIMIT = 1 << 18
"""The bytes of unwritten output at which requests are no longer read, until the client reads its replies."""

LONGEST_WAIT = 86400.0
"""The longest timeout in seconds; poll has a limit of 24 days, and a setting can exceed that."""

_HUNG_UP = select.POLLHUP | select.POLLRDHUP | select.POLLERR | select.POLLNVAL
"""The events of an input that has no writer any more."""


class ClientPipes:
    """The pipes on which the main thread waits, reads and writes."""

    def __init__(self) -> None:
        self.why_end = ""
        """The reason why the client is gone; empty while it is not."""
        self.watched: set[int] = set()
        """The descriptors that wake the main thread as `wake` does; each is removed once it is readable."""
        self._output = bytearray()
        self.wake_read, self.wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._writable = select.poll()
        self._writable.register(STDOUT, select.POLLOUT)

    def wait(self, deadline: float | None) -> tuple[bytes, bool]:
        """Wait for an event until `deadline` (monotonic); return the client's input, and True if `wake` was called."""
        reads = len(self._output) < OUTPUT_LIMIT
        poller = select.poll()
        # A client that does not read may be gone, so watch for the end of its input even while it is not read.
        poller.register(STDIN, select.POLLIN if reads else select.POLLRDHUP)
        poller.register(STDOUT, select.POLLOUT if self._output else 0)
        for descriptor in (self.wake_read, *self.watched):
            poller.register(descriptor, select.POLLIN)
        timeout = None if deadline is None else min(max(0.0, deadline - time.monotonic()), LONGEST_WAIT) * 1000 + 1
        data, woken = b"", False
        for descriptor, events in poller.poll(timeout):
            if descriptor == STDIN:
                if reads:
                    data = self._read()
                elif events & _HUNG_UP:
                    self.why_end = "the client closed our input and does not read its replies"
            elif descriptor == self.wake_read:
                woken = True
                os.read(self.wake_read, 4096)
            elif descriptor in self.watched:
                woken = True
                self.watched.discard(descriptor)
            elif events & select.POLLOUT:
                self.write(b"")
            else:
                self.why_end = "the client no longer reads"
        return data, woken

    def _read(self) -> bytes:
        try:
            data = os.read(STDIN, READ_SIZE)
        except BlockingIOError:
            return b""
        except OSError as error:
            self.why_end = f"standard input failed: {error.strerror}"
            return b""
        if not data:
            self.why_end = "the client closed our input"
        return data

    def write(self, output: bytes | bytearray) -> None:
        """Write as much as possible without blocking; `wait` writes the rest."""
        self._output += output
        try:
            # The pipe is not set to non-blocking, for the client or a shell may share it. Where poll says that there is
            # room, a write of WRITE_SIZE bytes does not block.
            while self._output and any(events & select.POLLOUT for _, events in self._writable.poll(0)):
                del self._output[: os.write(STDOUT, self._output[:WRITE_SIZE])]
        except BlockingIOError:
            pass
        except OSError as error:
            self.why_end = f"standard output failed: {error.strerror}"
            self._output.clear()

    def take_unwritten(self) -> bytes:
        """Return the output that was not written so far, and forget it."""
        output, self._output = bytes(self._output), bytearray()
        return output

    def flush(self, seconds: float) -> None:
        """Write the rest of the output, for `seconds` at most."""
        end = time.monotonic() + seconds
        while self._output and (left := end - time.monotonic()) > 0:
            for _, events in self._writable.poll(left * 1000):
                if not events & select.POLLOUT:
                    return
                self.write(b"")

    def wake(self) -> None:
        """Make `wait` return; may be called in any thread."""
        try:
            os.write(self.wake_write, b"\0")
        except BlockingIOError:
            pass  # the pipe is full of wakes already


DESTROY_DEADLINE = 20.0
"""The seconds that the server's shutdown waits for its VMs to be destroyed."""

FLUSH_DEADLINE = 2.0
"""The seconds that the server's shutdown waits for the client to read the last replies."""

START_SHARE = 0.9
"""The part of the session's timeout that a START has for its programs, so that it ends with a reason."""

ERROR_FILE = "vm_error.txt"
"""The file in the scratch directory with the reason of a failed START."""

FIRST_LOOK, LOOK_INTERVAL = 0.5, 10.0
"""The seconds between two looks whether a guest has ended: at first, growing to the longest."""

_END_SIGNALS: dict[int, str] = {signal.SIGTERM: "SIGTERM", signal.SIGQUIT: "SIGQUIT", signal.SIGINT: "SIGINT"}


class _Watch:
    """A watch for the end of one guest. condor_starter itself asks only every VM_STATUS_INTERVAL seconds."""

    def __init__(self, pid: int) -> None:
        """Watch the process of a guest, or have its status asked for again and again if `pid` is 0."""
        self.process = -1
        """The pidfd of the process; -1 if there is none on this machine."""
        self.pause = FIRST_LOOK
        self.due = 0.0
        """The time of the next look once the process has ended, by the monotonic clock."""
        if pid:
            try:
                self.process = os.pidfd_open(pid)
            except OSError:
                pass  # it has ended already


class Server:
    """A server for one client, with one conversation and any number of VMs."""

    def __init__(self, vm_type: str, working_dir: str, environ: "Mapping[str, str]", *, to_stderr: bool) -> None:
        self.working_dir = working_dir
        self.log = Log()
        self.session = Session(vm_type, self.log.always, self.log.debug)
        self.session.expect_start = self._expect_start
        self._environ = environ
        self._to_stderr = to_stderr
        self._pipes = ClientPipes()
        self._machines: dict[int, Machine] = {}
        self._job_ad_files: dict[int, JobAdFile] = {}
        self._directories: dict[int, tuple[str, str | None]] = {}
        """The scratch directory of each VM that has not ended, and the directory of its claim."""
        self._workers: dict[int, Worker] = {}
        self._under_way: dict[Call, Worker] = {}
        self._outcomes: list[tuple[Call, Outcome]] = []
        self._ends_early = False
        """True if the server exits once its guests have ended, for a client that is known to expect it."""
        self._is_over = False
        self._pids: dict[int, int] = {}
        """The process of each guest, as found by GETPID and RESUME; 0 for none on this machine."""
        self._watches: dict[int, _Watch] = {}
        self._ending = False
        self._why_end = ""
        self._exit_status = 0
        """The exit status to report on QUIT: that of the last VM whose guest ended on its own."""
        self._settings: config.Settings | None = None
        self._identity: Identity | None = None
        self._configuring = allocate_lock()
        """A lock that is held until the settings are loaded, or have failed to load."""
        self._request_timeout = self.session.request_timeout
        self._configuration_fault: errors.Fault | None = None
        self._driver: Driver | None = None
        self._driver_lock = allocate_lock()
        self._collector: Collector | None = None

    def run(self) -> int:
        """Serve until QUIT, the end of input, a signal, the loss of the client or the end of its guest.

        Returns the exit status: after QUIT or the guest's end its exit code, or minus the signal of its program.
        """
        for number in _END_SIGNALS:
            signal.signal(number, self._signalled)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.set_wakeup_fd(self._pipes.wake_write, warn_on_full_buffer=False)
        self._configuring.acquire()
        try:
            start_new_thread(self._configure, ())
        except RuntimeError:  # no thread: the client must wait until the settings are read
            self._configure()
        while not (self.session.quitting or self._why_end or self._pipes.why_end):
            self._turn()
            if self._is_over and self._leave_client_to_a_child():
                self._why_end = "the guest has ended, which condor_starter learns from the exit of this server"
        self._why_end = self._why_end or self._pipes.why_end
        self.log.always("QUIT received" if self.session.quitting else self._why_end)
        self._destroy_all()
        for vm_id in list(self._directories):
            self._leave_directory(vm_id)
        if self.session.quitting:
            self.session.goodbye()
        self._pipes.write(self.session.take_output())
        self._pipes.flush(FLUSH_DEADLINE)
        if self._driver is not None and not self._under_way:
            self._driver.close()
        status = self._exit_status if self.session.quitting or self._is_over else 0
        how = f"with the guest's exit code {status}" if status > 0 else f"by signal {-status}, as the guest's program"
        self.log.always(f"the server ends {how}" if status else "the server ends")
        self.log.close()
        return status

    # The loop

    def _turn(self) -> None:
        """Wait for an event and handle all that have occurred."""
        session = self.session
        due = None if self._collector is None else self._collector.due
        looks = [watch.due for watch in self._watches.values() if watch.process not in self._pipes.watched]
        ends = [end for end in (session.next_deadline(), due, *looks) if end is not None]
        data, woken = self._pipes.wait(min(ends, default=None))
        now = time.monotonic()
        if data:
            session.receive(data, now)
        if woken:
            if not self._configuring.locked():
                session.request_timeout = self._request_timeout
            self._collect(now)
        session.expire(now)
        self._look(now)
        if due is not None and due <= now:
            assert self._collector is not None
            self._collector.look(now)
        self._pipes.write(session.take_output())
        for call in session.take_calls():
            self._begin(call)

    # Signals and other threads

    def _signalled(self, number: int, _frame: object) -> None:
        self._why_end = f"received {_END_SIGNALS[number]}"

    def _collect(self, now: float) -> None:
        while self._outcomes:  # the threads append to it
            call, outcome = self._outcomes.pop(0)
            self._under_way.pop(call, None)
            failed = isinstance(outcome, errors.Fault)
            if (call.operation == lifecycle.STOP and not failed) or (call.operation == lifecycle.START and failed):
                for kept in (self._machines, self._job_ad_files):
                    kept.pop(call.vm.id, None)
                self._leave_directory(call.vm.id)
            self.session.finished(call, outcome, now)
            if call.vm.state != lifecycle.RUNNING:
                self._unwatch(call.vm.id)
            elif call.operation in (lifecycle.GETPID, lifecycle.RESUME) and self._ends_early:
                self._unwatch(call.vm.id)
                self._watches[call.vm.id] = watch = _Watch(self._pids.get(call.vm.id, 0))
                if watch.process >= 0:
                    self._pipes.watched.add(watch.process)
            # An end that a request of the client has found is told by its result.
            if self._ends_early and not call.request_id and self.session.is_over:
                self._is_over = True
            if call.vm.state == lifecycle.STOPPED or call.vm.id not in self.session.vms:
                self._dismiss(call.vm.id)

    def _look(self, now: float) -> None:
        """Ask for the status of guests whose process has ended, and of those that have none here."""
        for vm_id, watch in self._watches.items():
            # The hypervisor may report the end a little after the process is gone.
            if watch.process not in self._pipes.watched and watch.due <= now:
                watch.due = now + watch.pause
                if self.session.look(vm_id, now):
                    watch.pause = min(2 * watch.pause, LOOK_INTERVAL)

    def _unwatch(self, vm_id: int) -> None:
        if watch := self._watches.pop(vm_id, None):
            self._pipes.watched.discard(watch.process)
            if watch.process >= 0:
                os.close(watch.process)

    def _begin(self, call: Call) -> None:
        from vmgahp.host import wait  # before the first reply it would cost too much

        worker = self._workers.get(call.vm.id)
        try:
            if worker is None or worker in self._under_way.values():  # which this call overrules
                made = wait.Worker(f"vm{call.vm.id}", self._work)
                self._dismiss(call.vm.id)
                self._workers[call.vm.id] = worker = made
            self._under_way[call] = worker
            worker.give(call)
        except errors.MachineFault as fault:
            self._outcomes.append((call, fault))
            self._pipes.wake()

    def _dismiss(self, vm_id: int) -> None:
        if vm_id in self._workers:
            self._workers.pop(vm_id).end()

    # Run in other threads

    def _configure(self) -> None:
        """Read the settings, in parallel to the protocol, because asking HTCondor takes longer than a first reply."""
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
        self._pipes.wake()  # the timeout may be shorter than the default

    def _work(self, call: Call) -> None:
        outcome: Outcome
        began = time.monotonic()
        try:
            outcome = self._perform(call)
        except errors.Fault as fault:
            outcome = fault
        except BaseException as error:  # noqa: BLE001 - it would end the worker, and leave a request unanswered
            import traceback

            self.log.always("".join(traceback.format_exception(error)))
            problem = f"{call.operation} ended in an unexpected {type(error).__name__}: {error}."
            hint = "this is a defect of the server: please report it with the log."
            outcome = errors.HypervisorFault(problem, hint)
        if call.operation == lifecycle.START and isinstance(outcome, errors.Fault):
            outcome = self._explain(call, outcome)
        if self._collector is not None and call.operation != lifecycle.START:
            self._collector.done(call, outcome, began, self._machines.get(call.vm.id))
        self._outcomes.append((call, outcome))
        self._pipes.wake()

    def _perform(self, call: Call) -> "Outcome":
        if call.operation == lifecycle.START:
            self._start(call)
            return None
        assert self._settings is not None
        machine, job_ad_file = self._machines[call.vm.id], self._job_ad_files[call.vm.id]
        if self._collector is not None:
            self._collector.before(call)
        match call.operation:
            case lifecycle.STATUS:
                report = machine.status()
                machine.found = time.time(), report
                if report.state == lifecycle.STOPPED:
                    machine.release()
                    self._exit_status = machine.exit_status()
                    self._leave_directory(call.vm.id)
                if report.mac and not self._settings.boolean("VM_REPORT_ADDRESS"):
                    report = report._replace(mac="", ip="")
                return report
            case lifecycle.GETPID:
                reports = self._settings.boolean("VM_REPORT_PID")
                self._pids[call.vm.id] = pid = machine.pid() if reports or self._ends_early else 0
                return pid if reports else 0
            case lifecycle.STOP:
                machine.stop()
            case lifecycle.SOFT_SUSPEND:
                machine.soft_suspend()
            case lifecycle.SUSPEND:
                machine.suspend()
            case lifecycle.RESUME:
                machine.resume(call.state)
                job_ad_file.release()
                self._pids[call.vm.id] = 0
                try:
                    self._pids[call.vm.id] = machine.pid() if self._ends_early else 0
                except errors.Fault as fault:
                    self.log.debug(f"the end of VM {call.vm.id} is looked for by its status: {fault.problem}")
            case lifecycle.CHECKPOINT:
                machine.checkpoint()
        if call.operation in (lifecycle.STOP, lifecycle.CHECKPOINT) and job_ad_file.restore():
            self.log.debug("put .job.ad back as it was at the START, to keep it out of what goes to the spool")
        return None

    def _start(self, call: Call) -> None:
        assert call.job is not None
        with self._configuring:  # wait for the user as whom the ad is evaluated
            pass
        from vmgahp.host import wait  # before the first reply it would cost too much

        seconds, thread, began = START_SHARE * self.session.start_timeout, get_native_id(), time.monotonic()
        with Budget(seconds), wait.overseen("the START", seconds, lambda: self._judge(call, thread)):
            self._machines[call.vm.id] = machine = self._start_job(call, call.job)
            assert self._collector is not None
            self._collector.done(call, None, began, machine)  # it writes to a file of the job's
        if self._ending:
            self._destroy(machine)

    def _judge(self, call: Call, thread: int) -> None:
        """Find out if a START, which has no time left, waits for a file of the job's, for which there is no deadline.

        Processes of the job's user can hold the lock of such a file for ever.
        """
        from vmgahp.host import proc

        directory, _ = self._directories.get(call.vm.id, ("", None))
        path = proc.awaited_file(thread)
        is_the_jobs = directory != "" and f"{path}/".startswith(f"{directory}/")
        if call.late != errors.CRITICAL or self._identity is None or not is_the_jobs:
            return
        problem, hint = f"The START has waited for {path} too long.", "see what the job's processes do with that file."
        error = OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
        fault = job_user.blame(error, directory, self._identity, problem, hint)
        self.log.always(fault.render())
        if isinstance(fault, errors.JobFault):
            call.late = fault.code
            self._explain(call, fault)

    def _start_job(self, call: Call, job: "JobAd") -> "Machine":
        if self._identity is not None:
            job.evaluate_as(self._identity)
        self._claim_directory(call)
        driver = self._get_driver(job)
        assert self._settings is not None
        assert self._identity is not None
        # Before the first reply they would cost too much.
        from vmgahp.daemon.job_ad_file import JobAdFile
        from vmgahp.host import proc

        # No job can give its parent that name.
        self._ends_early = self._settings.boolean("VM_END_EARLY") and proc.name(os.getppid()) == "condor_starter"
        with self._identity.at_hand():
            self._job_ad_files[call.vm.id] = JobAdFile(job.working_dir(), self._identity)
            job_user.forget(self._identity, job.working_dir(), self.log.always, ERROR_FILE)
            if self._settings.string("VM_POLICY_REQUIREMENTS") and not driver.evaluates_policy:
                from vmgahp.hooks import policy
                from vmgahp.job.policy_view import PolicyView

                policy.require(PolicyView(job, self._settings))
            return driver.start(job)

    def _claim_directory(self, call: Call) -> None:
        """Make sure that no other VM, of any server, has the scratch directory: each would use the other's files."""
        from vmgahp.host import runtime_dir  # before the first reply it would cost too much

        assert call.job is not None
        directory, claimed = job_user.resolved(call.job.working_dir()), None
        try:
            claimed = runtime_dir.claim_scratch(directory)
        except (errors.MachineFault, OSError) as error:
            self.log.always(f"another server would start a VM in {directory} as well: {error}")
        if claimed == "":
            problem = f"VM_WORKING_DIR = {directory} is the scratch directory of another VM that runs or starts."
            hint = "give each VM a scratch directory of its own."
            raise errors.ClientFault(errors.VM_INVALID_OPERATION, problem, hint)
        self._directories[call.vm.id] = directory, claimed

    def _leave_directory(self, vm_id: int) -> None:
        """Let others have the scratch directory of a VM that is gone."""
        _, claimed = self._directories.pop(vm_id, ("", None))
        if claimed:
            from vmgahp.host import runtime_dir

            runtime_dir.remove(claimed)

    def _get_driver(self, job: "JobAd") -> "Driver":
        """Return the driver of this machine's type, if the job is of that type. Raises `errors.Fault`."""
        if self._configuration_fault is not None:
            raise self._configuration_fault
        if self._ending:
            raise errors.ClientFault(errors.VM_NOT_FOUND, "The server is ending: no VM is started any more.")
        assert self._settings is not None
        assert self._identity is not None
        from vmgahp.drivers.base import type_for

        vm_type = type_for(job, self.session.vm_type, self._settings)
        with self._driver_lock:
            if self._collector is None:
                from vmgahp.daemon.collector import Collector

                self._collector = Collector(self._settings, self._identity, self.log)
            return self._load_driver(vm_type, self._settings, self._identity)

    def _load_driver(self, vm_type: str, settings: "config.Settings", identity: Identity) -> "Driver":
        """Load the driver once; call it under `_driver_lock`. Raises `errors.MachineFault`."""
        # Whatever is needed until the end is imported here: an upgrade of the package changes nothing for this server.
        import resource  # noqa: F401

        from vmgahp.daemon import collector, job_ad_file  # noqa: F401
        from vmgahp.drivers import base

        if self._driver is None:
            self._driver = base.find(vm_type)(vm_type, settings, identity, self.log.always)
        return self._driver

    def _expect_start(self) -> None:
        """Prepare for the VM of a client that has connected, in a thread."""
        from vmgahp.host import wait  # imported late, in the main thread, as in `_begin`

        self.session.expect_start = lambda: None
        try:
            wait.start_thread("getting ready", self._get_ready)
        except errors.MachineFault:
            pass  # the START does it, or reports the reason

    def _get_ready(self) -> None:
        with self._configuring:
            pass
        if self._settings is None or self._identity is None:
            return
        try:
            vm_type = self._settings.string("VM_TYPE").lower() or self.session.vm_type
            if vm_type in LIBVIRT:
                with self._driver_lock:
                    driver = self._load_driver(vm_type, self._settings, self._identity)
                driver.get_ready()
        except errors.Fault as fault:
            self.log.debug(f"not ready for a START: {fault.problem}")  # the START reports it

    def _explain(self, call: Call, fault: errors.Fault) -> errors.Fault:
        """Write the reason of a failed START to a file for the job's owner, and return the fault.

        If a fault of the machine prevents that, the fault is the machine's: it may have made the job's file unusable.
        """
        with self._configuring:  # the job's user may not be known yet
            pass
        directory, _ = self._directories.get(call.vm.id, ("", None))
        if self._identity is None or not directory or self._ending:
            return fault  # a START that the shutdown interrupts tells the owner nothing
        try:
            # Its file system may be what has taken all the time of the START.
            text = (fault.render() + "\n").encode(errors="backslashreplace")
            with Budget((1 - START_SHARE) / 2 * self.session.start_timeout):
                self._identity.write_scratch(directory, ERROR_FILE, text)
        except errors.Fault as failure:
            self.log.always(f"could not write {ERROR_FILE}: {failure.problem}")
            # The job itself may have filled the file system.
            full = isinstance(failure.__cause__, OSError) and failure.__cause__.errno == errno.ENOSPC
            if isinstance(failure, errors.MachineFault) and isinstance(fault, errors.JobFault) and not full:
                return errors.MachineFault(f"{fault.problem} {failure.problem}", failure.hint)
        except OSError as error:
            self.log.always(f"could not write {ERROR_FILE}: {error}")
            if isinstance(fault, errors.JobFault) and error.errno == errno.EACCES:
                found = job_user.unwritable(f"{fault.problem} {ERROR_FILE}", error, directory, self._identity)
                return found if isinstance(found, errors.MachineFault) else fault
        return fault

    # The end

    def _leave_client_to_a_child(self) -> bool:
        """Fork a child that answers the client until it has reaped this server; return False if there is no process.

        condor_starter takes the exit of its server for the end of the job, with the server's exit status, but fails if
        its pipes close before that (``VMGahpServer::poll`` and ``VMProc::JobReaper`` in HTCondor's
        ``src/condor_starter.V6.1``). To the child all VMs are stopped.
        """
        output = self._pipes.take_unwritten()
        last = max(int(name) for name in os.listdir("/proc/self/fd")) + 64  # other threads may open some
        gc.disable()  # in the child a finalizer would speak on the connections of this process
        try:
            child = os.fork()
        except OSError as error:
            gc.enable()
            self.log.always(f"the end of the guest is told at the next STATUS: no process can be started ({error})")
            self._pipes.write(output)
            self._is_over = False
            return False
        if child == 0:
            try:
                self._answer_until_quit(output, last)
            finally:
                os._exit(0)
        return True

    def _answer_until_quit(self, output: bytes, last: int) -> None:
        """Answer the client in a child without threads or log, whose lock another thread may have held."""
        signal.set_wakeup_fd(-1)
        for number in _END_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        # File locks, the pipes of guardians and libvirt's connections end with this server, and not with the child.
        os.closerange(3, last)
        os.chdir("/")
        session, pipes = self.session, ClientPipes()
        session.log_nothing()
        pipes.write(output)
        while not (session.quitting or pipes.why_end):
            data, _ = pipes.wait(session.next_deadline())
            now = time.monotonic()
            session.receive(data, now)
            for call in session.take_calls():
                session.finished(call, errors.ClientFault(errors.VM_NOT_FOUND, "The server has ended."), now)
            session.expire(now)
            pipes.write(session.take_output())
        if session.quitting:
            session.goodbye()
        pipes.write(session.take_output())
        pipes.flush(FLUSH_DEADLINE)

    def _destroy_all(self) -> None:
        """Destroy all VMs, including those whose START still runs, in parallel and within a deadline."""
        from vmgahp.host import wait

        self._ending = True
        if self._identity is None:
            return  # without settings there is no driver, and every START fails
        starting = () if self._driver is None else self._driver.interrupt()
        end = time.monotonic() + DESTROY_DEADLINE
        workers = [worker.thread for worker in self._under_way.values()]
        for vm_id in list(self._workers):
            self._dismiss(vm_id)
        without_thread = []
        for machine in {*self._machines.values(), *starting}:
            try:
                workers.append(wait.start_thread(f"end-{machine.name}", self._destroy, machine))
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
            if self._collector is not None:
                self._collector.end(machine, "the server has ended: " + (self._why_end or "QUIT received"))


def serve(vm_type: str, working_dir: str, environ: "Mapping[str, str]", *, to_stderr: bool) -> int:
    """Serve one client on standard input and output, after the greeting, and return the exit status."""
    status = Server(vm_type, working_dir, environ, to_stderr=to_stderr).run()
    return status if status >= 0 else _end_by(-status)


def _end_by(number: int) -> int:
    """End this process by a signal; return an exit status if the signal does not end it."""
    import atexit
    import resource

    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    # A limit of 1 also suppresses core dumps that are piped to a program.
    resource.setrlimit(resource.RLIMIT_CORE, (1, 1) if hard else (0, 0))
    atexit._run_exitfuncs()  # kill programs that still run
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
    os.kill(os.getpid(), number)
    return 128 + number
