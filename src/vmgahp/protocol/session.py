"""One conversation with a client: commands, request ids, the result queue and the VMs. Pure.

Bytes go in with `Session.receive`, bytes to write come out of `Session.take_output`, and calls for a driver
out of `Session.take_calls`; the caller carries them out and reports each outcome to `Session.finished`. The
session never waits, reads no clock and knows no hypervisor, so a test can drive all of it.

The requests of one VM are carried out one after another in the order in which they came, those of
different VMs in parallel. A STATUS that waits behind a long operation of its own VM is answered from the
last figures after `PATIENCE` seconds: the starter counts unanswered ones, and gives up after five.
"""

from collections.abc import Callable

from vmgahp import errors, lifecycle
from vmgahp.protocol import wire
from vmgahp.protocol.wire import END, AdLines
from vmgahp.text import escape
from vmgahp.vm_types import HTCONDORS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from vmgahp.job.ad import JobAd
    from vmgahp.metrics import Accounting, Status

COMMANDS = (
    *("ASYNC_MODE_ON", "ASYNC_MODE_OFF"),
    *("CONDOR_VM_START", "CONDOR_VM_STOP", "CONDOR_VM_SUSPEND", "CONDOR_VM_SOFT_SUSPEND", "CONDOR_VM_RESUME"),
    *("CONDOR_VM_CHECKPOINT", "CONDOR_VM_STATUS", "CONDOR_VM_GETPID", "QUIT", "VERSION", "COMMANDS"),
    *("SUPPORT_VMS", "RESULTS", "CLASSAD", "CLASSAD_END"),
)

PATIENCE = 2.0
"""The seconds that a STATUS waits for its turn behind another operation of its VM."""

REQUEST_TIMEOUT, START_EXTRA = 300.0, 120.0
"""The seconds that condor_starter waits for a result: VM_GAHP_REQ_TIMEOUT by default, and longer for a START
(``VMGahpRequest`` in HTCondor's ``src/condor_starter.V6.1``)."""

MAX_OUTSTANDING = 4096
"""The most accepted requests whose results were not fetched yet; one more is refused with ``E``."""

SAVED = (lifecycle.SUSPENDED, lifecycle.CHECKPOINTED)

_VM_PREFIX = b"CONDOR_VM_"
_INT_MAX = 2**31 - 1


class Vm:
    """The session's record of one VM; `id` is the protocol's."""

    def __init__(self, vm_id: int) -> None:
        self.id = vm_id
        self.state = lifecycle.STARTING
        self.queue: list[Call] = []
        self.running: Call | None = None
        self.accounting: Accounting | None = None
        self.last_status: tuple[str, ...] | None = None
        self.is_attended = False
        """True once the client has asked for the pid: condor_starter sleeps for 30 s after a START, then does so."""
        self.resumes = False
        """True if the VM was running when its periodic checkpoint was made, or failed, and must be resumed."""


class Call:
    """One operation for a driver, and the request that it answers."""

    def __init__(self, target: Vm, operation: str, request_id: int, asked: float) -> None:
        self.vm = target
        self.operation = operation
        self.request_id = request_id
        self.asked = asked
        self.answered = False
        """True once the client has its answer. After a timeout the outcome still changes the VM's state."""
        self.late = errors.CRITICAL
        """The answer of a call that takes too long."""
        self.state = target.state
        self.job: JobAd | None = None


class Session:
    """The server's side of the protocol for a server of `vm_type`."""

    def __init__(self, vm_type: str, log: Callable[[str], None], debug: Callable[[str], None]) -> None:
        self.vm_type = vm_type.lower()
        self.quitting = False
        """True once QUIT was received: destroy the VMs, send `goodbye`, exit. No more input is read."""
        self.request_timeout = REQUEST_TIMEOUT
        """The seconds that the client waits for a result; every request is answered a little sooner."""
        self.vms: dict[int, Vm] = {}
        self._log, self._debug = log, debug
        self.expect_start: Callable[[], None] = lambda: None
        """A callback for when a client asks to be notified of results: it is about to start a VM."""
        self._reader = wire.LineReader()
        self._output = bytearray()
        self._calls: list[Call] = []
        self._async_mode, self._signalled = True, False
        self._results: list[bytes] = []
        self._starts: dict[int, Call] = {}
        self._asked: dict[int, Call] = {}
        """The calls without a result by their request ids, as they came: STARTs, which have more time, and others."""
        self._patient: dict[int, Call] = {}
        """The subset of STATUS calls in a queue that can be answered with the last known status."""
        self._last_vm_id = 0
        self._ad: AdLines | None = None
        self._in_ad = False
        self._types = (*HTCONDORS, *(() if self.vm_type in HTCONDORS else (self.vm_type,)))
        self._words = {command.encode(): getattr(self, "_do_" + command.lower(), None) for command in COMMANDS}

    # Input and output

    def receive(self, data: bytes, now: float) -> None:
        """Take bytes from the client, cut anywhere; `now` is a monotonic clock in seconds."""
        self._reader.receive(data)
        while not self.quitting and (line := self._reader.next_line()) is not None:
            if self._in_ad:
                self._ad_line(line)
            else:
                self._request(line, now)

    def take_output(self) -> bytearray:
        """Return the bytes to write to the client, and forget them."""
        output, self._output = self._output, bytearray()
        return output

    def take_calls(self) -> list[Call]:
        """Return the calls that may begin now, and forget them. The caller must report each to `finished`."""
        calls, self._calls = self._calls, []
        return calls

    def finished(self, call: Call, outcome: "Status | int | errors.Fault | None", now: float) -> None:
        """Record the outcome of a call: a fault, a `Status` for a STATUS, a pid for a GETPID, None otherwise."""
        target = call.vm
        if target.running is not call:
            return  # a STOP has overruled it, and decides the VM's state
        target.running = None
        target.is_attended |= call.operation == lifecycle.GETPID
        was_unknown = target.last_status is None
        if isinstance(outcome, errors.Fault):
            self._failed(call, outcome)
        elif call.operation == lifecycle.STATUS:
            self._found(call, outcome, now)
        elif call.operation == lifecycle.GETPID:
            self._result(call, True, str(outcome))
        else:
            self._succeeded(call, now)
        if was_unknown:
            for waiting in target.queue:
                self._be_patient(waiting)
        is_to_be_suspended = any("SUSPEND" in waiting.operation for waiting in target.queue)
        self._advance(target)
        if isinstance(outcome, errors.Fault) and self._is_our_resume(call) and not is_to_be_suspended:
            target.resumes = True  # not before, or the STATUS that waits for it would try without end

    def look(self, vm_id: int, now: float) -> bool:
        """Ask for a running VM's status without a request; return False while the client is busy with it."""
        target = self.vms[vm_id]
        if target.state != lifecycle.RUNNING or target.running or not (target.is_attended and self._is_idle()):
            return False
        self._issue(Call(target, lifecycle.STATUS, 0, now))
        return True

    def log_nothing(self) -> None:
        """Log no more, in a process that has no log."""
        self._log = self._debug = lambda _text: None

    @property
    def is_over(self) -> bool:
        """True if the guests of all VMs have ended by themselves, and the client has every result."""
        return bool(self.vms) and self._is_idle() and all(vm.state == lifecycle.STOPPED for vm in self.vms.values())

    def _is_idle(self) -> bool:
        """Return True if the client waits for no result, and has fetched all of them."""
        return not (self._asked or self._starts or self._results)

    def next_deadline(self) -> float | None:
        """Return the time at which `expire` must be called at the latest, or None."""
        if not (self._asked or self._starts):
            return None
        return min(next(iter(calls.values())).asked + limit for calls, limit in self._limits() if calls)

    def expire(self, now: float) -> None:
        """Answer calls that have waited too long: a STATUS with the last known one, everything else with a fault.

        A running call is not aborted, and its outcome still changes the VM's state; a STOP no longer waits for it.
        """
        late: dict[Call, None] = {}
        for calls, limit in self._limits():
            for call in calls.values():
                if call.asked + limit > now:
                    break
                late[call] = None
        for call in sorted(late, key=lambda call: call is call.vm.running):
            target = call.vm
            if call is not target.running:
                target.queue.remove(call)
            if call.operation == lifecycle.STATUS and target.last_status is not None:
                self._debug(f"STATUS of VM {target.id} answered with the last known status")
                self._result(call, True, *target.last_status)
            else:
                self._log(f"{call.operation} of VM {target.id} has taken {now - call.asked:.0f} s, too long")
                self._result(call, False, call.late)
        for target in {call.vm for call in late}:
            self._advance(target)

    def _limits(self) -> tuple[tuple[dict[int, Call], float], ...]:
        """Return the calls in order of arrival, and how long each of them may wait for its answer."""
        usual = self._usual_timeout
        return (self._patient, min(usual, PATIENCE)), (self._asked, usual), (self._starts, self.start_timeout)

    @property
    def _usual_timeout(self) -> float:
        return self.request_timeout - min(20.0, self.request_timeout / 4)

    @property
    def start_timeout(self) -> float:
        """Return the seconds within which a START is answered."""
        return self._usual_timeout + START_EXTRA

    def goodbye(self) -> None:
        """Answer the QUIT, once the VMs are gone."""
        self._output += b"S\n"

    # Requests

    def _request(self, line: bytes, now: float) -> None:
        words = wire.split(line)
        command = words[0].upper()
        if command not in self._words:
            self._refuse(f"an unknown command of {len(line)} bytes")
        elif command.startswith(_VM_PREFIX):
            self._vm_request(command[len(_VM_PREFIX) :].decode(), words, now)
        elif len(words) != 1:
            self._refuse(f"{command.decode()}: it takes no arguments")
        elif (handler := self._words[command]) is not None:
            handler()

    def _refuse(self, what: str) -> None:
        self._log(f"refused {what}")
        self._output += b"E\n"

    def _accept(self) -> None:
        self._output += b"S\n"

    def _do_async_mode_on(self) -> None:
        self._async_mode, self._signalled = True, False
        self.expect_start()
        self._accept()

    def _do_async_mode_off(self) -> None:
        self._async_mode = False
        self._accept()

    def _do_quit(self) -> None:
        self.quitting = True

    def _do_version(self) -> None:
        self._output += b"S " + wire.GREETING + b"\n"

    def _do_commands(self) -> None:
        self._output += wire.reply("S", *COMMANDS)

    def _do_support_vms(self) -> None:
        self._output += wire.reply("S", *self._types)

    def _do_results(self) -> None:
        self._output += b"S %d\n" % len(self._results)
        self._output += b"".join(self._results)
        self._results.clear()
        self._signalled = False

    def _do_classad(self) -> None:
        self._in_ad = True
        self._ad = AdLines()
        self._accept()

    def _do_classad_end(self) -> None:
        self._ad = None
        self._accept()

    def _ad_line(self, line: bytes) -> None:
        assert self._ad is not None
        if line.upper() == END:
            self._in_ad = False
            self._accept()
            self._ad.tell_skipped(self._log)
        else:
            self._ad.take(line)

    def _vm_request(self, operation: str, words: list[bytes], now: float) -> None:
        if operation == lifecycle.START and len(words) > 3:
            words = [*words[:2], b" ".join(words[2:])]  # the client does not escape a blank in the job's type
        request_id = _number(words[1]) if len(words) == 3 else None
        is_taken = request_id in self._asked or request_id in self._starts
        if request_id is None or not 0 < request_id <= _INT_MAX or is_taken:
            self._refuse(f"{operation}: it takes a fresh request id and one argument")
            return
        if len(self._asked) + len(self._starts) + len(self._results) >= MAX_OUTSTANDING:
            self._refuse(f"{operation}: {MAX_OUTSTANDING} results wait to be fetched")
            return
        if operation == lifecycle.START:
            self._start(request_id, words[2], now)
            return
        vm_id = _number(words[2])
        if vm_id is None:
            self._refuse(f"{operation}: the VM id is not a number")
            return
        self._accept()
        target = self.vms.get(vm_id)
        if target is None or target.state == lifecycle.STARTING:
            self._gone(Call(Vm(vm_id), operation, request_id, now))
            return
        self._asked[request_id] = call = Call(target, operation, request_id, now)
        target.queue.append(call)
        self._be_patient(call)
        self._advance(target)

    def _start(self, request_id: int, word: bytes, now: float) -> None:
        wanted = word.decode("utf-8", "replace").lower()
        if wanted not in self._types:
            self._refuse("START: unknown VM type")
            return
        self._accept()
        if self._ad is None or not self._ad.lines:
            self._log("START failed: no job ad was sent")
            self._answer(request_id, False, errors.NO_JOBCLASSAD_INFO)
            return
        from vmgahp.job.ad import JobAd

        job = JobAd(self._ad.pairs(JobAd.parse_line), complete=self._ad.complete)
        self._ad.tell_skipped(self._log)
        if not (job.has("VM_WORKING_DIR") and job.has("JobVMType")):
            fault = job.lacks("VM_WORKING_DIR or JobVMType is not in the job ad.")
            self._log(f"START failed: {fault.render()}")
            self._answer(request_id, False, fault.code)
            return
        if wanted != self.vm_type:
            self._log(f"START failed: asked for {escape(wanted)}, this server is of type {escape(self.vm_type)}")
            self._answer(request_id, False, errors.NO_SUPPORTED_VM_TYPE)
            return
        self._last_vm_id += 1
        target = Vm(self._last_vm_id)
        self.vms[target.id] = target
        self._starts[request_id] = call = Call(target, lifecycle.START, request_id, now)
        call.job = job
        target.queue.append(call)
        self._advance(target)

    # VMs

    def _advance(self, target: Vm) -> None:
        """Issue the next call of a VM, after answering those that need no driver."""
        while target.queue and (target.running is None or self._is_overruled(target.running, target.queue[0])):
            call = target.queue.pop(0)
            self._patient.pop(call.request_id, None)
            call.state = target.state
            if target.id not in self.vms:
                self._gone(call)
            elif call.operation in (lifecycle.STATUS, lifecycle.GETPID):
                if call.operation == lifecycle.STATUS and target.state in SAVED and target.resumes:
                    self._resume_after_checkpoint(call)
                elif target.state != lifecycle.STOPPED:
                    self._issue(call)
                elif call.operation == lifecycle.STATUS:
                    self._result(call, True, f"STATUS={lifecycle.STOPPED}")
                else:
                    self._result(call, True, "0")
            else:
                self._operate(call)

    def _be_patient(self, call: Call) -> None:
        """Limit the wait of a STATUS to `PATIENCE` if the last known status can answer it."""
        if call.operation == lifecycle.STATUS and call.vm.last_status is not None:
            self._patient[call.request_id] = call

    @staticmethod
    def _is_overruled(running: Call, following: Call) -> bool:
        is_waited_for = not (running.answered or Session._is_our_resume(running))
        return following.operation == lifecycle.STOP != running.operation and not is_waited_for

    @staticmethod
    def _is_our_resume(call: Call) -> bool:
        """Return True for a RESUME that no client has asked for."""
        return call.operation == lifecycle.RESUME and not call.request_id

    def _operate(self, call: Call) -> None:
        target = call.vm
        outcome = lifecycle.TRANSITIONS.get((target.state, call.operation))
        if outcome is None:
            self._log(f"{call.operation} of VM {target.id} refused: it is {target.state}")
            self._result(call, False, errors.VM_INVALID_OPERATION)
        elif target.state == lifecycle.STOPPED:
            del self.vms[target.id]
            self._result(call, True)
        elif outcome == target.state:
            target.resumes &= call.operation == lifecycle.CHECKPOINT  # a SUSPEND stands
            self._result(call, True)
        else:
            self._issue(call)

    def _resume_after_checkpoint(self, status: Call) -> None:
        """Resume a VM after its periodic checkpoint, before a STATUS of it.

        The starter is meant to do this, but never does: it continues jobs only while it is suspended itself
        (``Starter::Continue`` in HTCondor's ``src/condor_starter.V6.1/starter.cpp``). A STATUS means that it has
        transferred the files; it does not send one before it stops a VM for good.
        """
        target = status.vm
        target.resumes = False
        target.queue.insert(0, status)
        self._be_patient(status)
        self._log(f"VM {target.id} resumes after its checkpoint")
        self._issue(Call(target, lifecycle.RESUME, 0, status.asked))

    def _issue(self, call: Call) -> None:
        call.vm.running = call
        self._calls.append(call)

    def _gone(self, call: Call) -> None:
        """Answer a call whose VM does not exist, or went away while it waited."""
        if call.operation == lifecycle.STATUS:
            self._result(call, True, f"STATUS={lifecycle.STOPPED}")
        else:
            self._result(call, False, errors.VM_NOT_FOUND)

    def _succeeded(self, call: Call, now: float) -> None:
        target = call.vm
        target.state = lifecycle.TRANSITIONS[call.state, call.operation]
        if call.operation == lifecycle.START:
            from vmgahp.metrics import Accounting

            target.accounting = Accounting(call.asked)
            if call.answered:
                self._log(f"VM {target.id} has started too late for its client: stopping it")
                target.queue.append(Call(target, lifecycle.STOP, 0, now))
            self._result(call, True, str(target.id))
            return
        if call.operation == lifecycle.STOP:
            self.vms.pop(target.id, None)
        was_checkpointed = call.operation == lifecycle.CHECKPOINT and call.state == lifecycle.RUNNING
        target.resumes = was_checkpointed and self.vm_type not in HTCONDORS
        target.last_status = (f"STATUS={lifecycle.STATUS_WORDS[target.state]}",)
        self._result(call, True)

    def _failed(self, call: Call, fault: errors.Fault) -> None:
        is_look = call.operation == lifecycle.STATUS and not call.request_id  # the client's own STATUS will fail too
        (self._debug if is_look else self._log)(f"{call.operation} of VM {call.vm.id} failed: {fault.render()}")
        if call.operation == lifecycle.START:
            self.vms.pop(call.vm.id, None)
        is_question = call.operation in (lifecycle.STATUS, lifecycle.GETPID)
        if call.state == lifecycle.RUNNING and not is_question:  # the VM may have stayed saved
            call.vm.resumes = call.operation == lifecycle.CHECKPOINT and self.vm_type not in HTCONDORS
        self._result(call, False, fault.code)

    def _found(self, call: Call, report: "Status | int | None", now: float) -> None:
        """Take the state from a STATUS that came back: the hypervisor's view wins."""
        assert report is not None
        assert not isinstance(report, int)
        target = call.vm
        found = report.state
        if not call.request_id and found != lifecycle.STOPPED:
            return  # the figures count from the last STATUS that the client has asked for
        if found == lifecycle.SUSPENDED and target.state == lifecycle.CHECKPOINTED:
            found = lifecycle.CHECKPOINTED  # a driver need not tell the two apart
        target.resumes &= found in SAVED
        if found != target.state:
            self._log(f"VM {target.id} was {target.state} and is now {found}")
            target.state = found
        words: tuple[str, ...] = (f"STATUS={lifecycle.STATUS_WORDS[found]}",)
        if report.state == lifecycle.RUNNING:
            assert target.accounting is not None
            utilization, cpu_time = target.accounting.account(report.cpu_seconds, report.vcpus, now)
            words += (
                f"CPUUTILIZATION={utilization:f}",
                f"CPUTIME={cpu_time:f}",
                f"MEMORY={report.memory_kib}",
                f"MAXMEMORY={report.max_memory_kib}",
            )
            if report.ip:
                words = (f"IP={report.ip}", *words)
            if report.mac:
                words = (f"MAC={report.mac}", *words)
        target.last_status = words
        self._result(call, True, *words)

    def _result(self, call: Call, success: bool, *words: str) -> None:
        if call.request_id and not call.answered:
            self._answer(call.request_id, success, *words)
        call.answered = True

    def _answer(self, request_id: int, success: bool, *words: str) -> None:
        for calls in (self._asked, self._starts, self._patient):
            calls.pop(request_id, None)
        self._results.append(wire.reply(str(request_id), "0" if success else "1", *(words or ("NULL",))))
        if self._async_mode and not self._signalled:
            self._output += b"R\n"
            self._signalled = True


def _number(word: bytes) -> int | None:
    """Parse a word of ASCII digits; return None for any other, and for one too long to be an id."""
    return int(word) if word.isdigit() and len(word) <= 40 else None
