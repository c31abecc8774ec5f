"""The monitor of a guest that runs a program: reads its port until the outputs are complete.

The guest's messages are untrusted. The guest is believed about the end of its own program; messages out of turn are
ignored. Each time limit counts while the guest runs, and not while it is paused.
"""

from __future__ import annotations

import threading
from queue import Empty
from time import monotonic, time
from typing import NamedTuple

from vmgahp import errors, lifecycle
from vmgahp.drivers.libvirt.life.machine import LibvirtMachine
from vmgahp.drivers.libvirt.program import OUTPUTS_FILE, RunOutputs
from vmgahp.drivers.libvirt.start.describe import CONTROL, OUTPUTS
from vmgahp.host import wait
from vmgahp.host.job_user import Identity
from vmgahp.host.serial_capture import LinePort
from vmgahp.job import exit_code
from vmgahp.job.exit_code import NOT_READY, RUN_FAILED, Ending
from vmgahp.job.scratch_files import DIRECTORY
from vmgahp.job.spec import JobSpec

BOOTING, READY, STARTED, ENDED, TAKEN = STAGES = ("booting", "ready", "started", "ended", "taken")
EXIT, SIGNAL, LIMIT = "exit", "signal", "limit"
"""The ways in which a program ends."""
STATE_FILE = "vm_run_state.txt"
"""The file with the guest's progress, for a server that continues it from a checkpoint."""
TICK, OFTEN = 5.0, 0.25
"""Seconds between two checks of the time, and of outputs in transit."""
BEYOND_LIMIT = 120.0
"""Seconds after which a guest is ended that does not end a program at its time limit."""
OUTPUTS_SECONDS = 3600.0
"""Seconds for a guest to collect its outputs, and for each piece of them."""
QUIET_SECONDS = 20.0
"""Seconds after which incomplete outputs are requested again."""
MOST_TRIES = 3
OFF_SECONDS = 120.0
"""Seconds for a guest whose work is done to power off."""
END_SECONDS = 30.0
"""Seconds at a VM's end for outputs that are being unpacked."""
_CONSOLE = "vm_console.log has what it printed"
_BEGINS = {
    "drive": "the guest cannot read its run drive",
    "inputs": "the inputs cannot be unpacked in the guest",
    "room": "there is no room in the guest",
    "user": "the guest cannot run the program as it is to",
    "outputs": "the outputs are not complete",
}


class RunProgress(NamedTuple):
    """The progress of a guest."""

    stage: str = BOOTING
    how: str = ""
    """The way in which the program has ended; empty before."""
    number: int = 0
    """The exit code of the program, or its signal."""

    def written(self) -> bytes:
        return f"{self.stage} {self.how or '-'} {self.number}\n".encode()


def read(text: bytes) -> RunProgress:
    """Parse the text of `RunProgress.written`, which the job may have changed: any other means a program that runs."""
    match text.decode("ascii", "replace").split():
        case [stage, how, number] if stage in STAGES and number.isdigit() and len(number) <= 3:
            ended = stage in (ENDED, TAKEN)
            if _is_end(how, int(number)) if ended else how == "-":
                return RunProgress(stage, how if ended else "", int(number) if ended else 0)
    return RunProgress(STARTED)


def _is_end(how: str, number: int) -> bool:
    """Return True if a program can have ended so."""
    return how == LIMIT or (how == EXIT and number <= 255) or (how == SIGNAL and 1 <= number <= 64)


def begin(machine: LibvirtMachine, spec: JobSpec, kept: int, identity: Identity) -> None:
    """Follow a guest until its end; outputs leave `kept` bytes of EXECUTE free. Raises `errors.Fault`, OSError."""
    run, directory = spec.devices.run, spec.working_dir
    assert run is not None
    progress = RunProgress()
    if machine.launch.restart is not None:
        try:
            progress = read(identity.read_scratch(directory, STATE_FILE, 100))
        except (OSError, errors.Fault):
            progress = RunProgress(STARTED)
    names = ("*",) if run.outputs is None else run.outputs
    files = RunOutputs(directory, names, kept, identity, lambda line: machine.log(f"{machine.name}: {line}"))
    watch = ProgramMonitor(machine, files, progress, run.boot_timeout, run.time_limit)
    watch.is_alone = spec.sent[1] is None
    record = machine.resources.exit
    assert record is not None
    record.program = watch.ending
    machine.resources.at_end.append(watch.end)
    machine.resources.when_over.insert(0, watch.forget)
    try:
        watch.begin()
    except errors.MachineFault as fault:
        machine.report_lost(f"Nobody can follow the program of {machine.name}: {fault.problem}", fault.hint)
        machine.end_guest()


class ProgramMonitor:
    """The monitor of one guest, in a thread of its own."""

    def __init__(
        self, machine: LibvirtMachine, files: RunOutputs, progress: RunProgress, boot_timeout: float, time_limit: float
    ) -> None:
        self.progress = progress
        self.failure = "", ""
        """The word and the reason of a failure; empty without one."""
        self.is_alone = False
        """True if the archive of the outputs is sent back as received, since no directory is."""
        self._machine = machine
        self._identity = files.identity
        self._directory = files.directory
        self._boot_timeout = boot_timeout
        self._time_limit = time_limit
        control = machine.resources.run_ports[CONTROL]
        assert isinstance(control, LinePort)
        self._control = control
        self._outputs = machine.resources.run_ports[OUTPUTS]
        self._files = files
        self._last_line = ""
        self._elapsed = 0.0
        """Seconds that the guest has run since its last message."""
        self._wanted: int | None = None
        """The size of the outputs by the guest's message, in bytes, while they are incomplete; else None."""
        self._here = -1
        self._tries = 0
        self._is_shot = False
        self._is_given_up = False
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Start to follow the guest. Raises `errors.MachineFault`."""
        self._keep()
        self._thread = wait.start_thread(f"run-{self._machine.name}", self._run)

    def end(self) -> None:
        """Process the remaining messages of a VM that is gone and whose ports are closed."""
        self._control.lines.put(None)
        if self._thread is not None:
            self._thread.join(END_SECONDS)

    def forget(self) -> None:
        """Remove the state of a job that is over, and put its outputs into their place."""
        self._remove(STATE_FILE)
        self._remove(f"{DIRECTORY}/{STATE_FILE}")  # a checkpoint's copy, which is out of date
        if not self.is_alone:
            self._files.bring_home()
        if not self.is_alone or self.progress.stage != TAKEN:
            self._remove(OUTPUTS_FILE)

    def _remove(self, name: str) -> None:
        try:
            self._identity.unlink_scratch(self._directory, name)
        except (OSError, errors.Fault) as error:
            self._machine.log(f"{name} stays: {error}")

    def ending(self, ending: Ending) -> Ending:
        """Return the VM's end, completed by the guest's messages about its program."""
        if ending.how not in exit_code.BY_ITSELF:
            return ending
        stage, how, number = self.progress
        if how == EXIT:
            ending = ending._replace(exit_code=number, source="program")
        elif how:
            ending = ending._replace(exit_code=None, source="program", signal=number if how == SIGNAL else 0)
        word, reason = self.failure
        if word:
            if ending.how in (exit_code.POWERED_OFF, exit_code.GONE, exit_code.CRASHED):
                ending = ending._replace(how=word, reason=reason)
        elif not how:
            came = "crashed" if ending.how == exit_code.CRASHED else "powered off, or rebooted,"
            what = "ended" if stage == STARTED else "begun"
            reason = f"the guest {came} before the program had {what}: {_CONSOLE}"
            ending = ending._replace(exit_code=None, source="", reason=ending.reason or reason)
        elif stage != TAKEN and not ending.reason:
            ending = ending._replace(how=RUN_FAILED, reason=f"the guest ended before its outputs were here: {_CONSOLE}")
        elif how == LIMIT and not ending.reason:
            ending = ending._replace(reason=f"the program was ended after the {self._time_limit} s of its time limit")
        return ending

    # The thread

    def _run(self) -> None:
        while True:
            try:
                self._follow()
                return
            except Exception as error:  # noqa: BLE001 - after a bug the guest must still be followed
                self._fail(RUN_FAILED, f"it cannot be followed: an unexpected {type(error).__name__}: {error}")

    def _follow(self) -> None:
        if self.progress.stage == TAKEN and self._outputs.written:
            self._unpack()  # continued from a checkpoint, which has only the archive
        last, line = monotonic(), ""
        while True:
            try:
                line = self._control.lines.get(True, self._wait()) or ""
                if not line:
                    return
            except Empty:
                line = ""
            now = monotonic()
            if self._runs():
                self._elapsed += min(now - last, 2 * TICK)  # in a longer gap the guest may have been paused
            last = now
            if line:
                self.hear(line)
            self.look()

    def _wait(self) -> float | None:
        """Return the seconds until the next check if the guest is silent; None for no check."""
        if self._wanted is not None:
            return OFTEN
        return TICK if self._limit() or self.failure[0] else None

    def _limit(self) -> float:
        """Return the seconds within which the guest must send its next message; 0 for no limit."""
        match self.progress.stage:
            case "started":
                return self._time_limit and self._time_limit + BEYOND_LIMIT
            case "ended":
                return OUTPUTS_SECONDS
            case "taken":
                return max(OFF_SECONDS, self._machine.deadlines.stop)
            case _:
                return self._boot_timeout

    def _runs(self) -> bool:
        return self._machine.state is lifecycle.RUNNING and not self._machine.io_errors.under_way

    def hear(self, line: str) -> None:
        """Process a message of the guest."""
        stage = self.progress.stage
        words = line.split()
        match words:
            case ["hello", *_] if stage == BOOTING:
                self._to(RunProgress(READY))
            case ["inputs", *_] if stage == READY:
                self._elapsed = 0.0
            case ["started"] if stage in (BOOTING, READY):
                self._to(RunProgress(STARTED))
                self._machine.news.say("The program runs in the VM")
            case ["ended", how, *number] if stage in (BOOTING, READY, STARTED):
                self._hear_end(how, number)
            case ["outputs", size] if size.isdigit() and len(size) <= 15:
                self._hear_outputs(int(size))
            case ["failed", what, *text]:
                self._hear_failure(what, " ".join(text))
            case ["off"]:
                pass
            case _:
                return
        self._last_line = line[:200]

    def _hear_end(self, how: str, number: list[str]) -> None:
        match how, number:
            case (("exit" | "signal"), [digits]) if digits.isdigit() and len(digits) <= 3:
                ended = RunProgress(ENDED, how, int(digits))
            case "limit", []:
                ended = RunProgress(ENDED, LIMIT)
            case _:
                return
        if not _is_end(how, ended.number):
            return
        self._to(ended)
        said = f"with exit code {ended.number}" if how == EXIT else f"by signal {ended.number}"
        self._machine.news.say(f"The program has ended {'at its time limit' if how == LIMIT else said}")

    def _hear_outputs(self, size: int) -> None:
        if self.progress.stage == TAKEN:
            self._control.say("taken")
        elif self.progress.stage == ENDED and self._wanted != size:
            self._wanted, self._here, self._elapsed = size, -1, 0.0

    def _hear_failure(self, what: str, text: str) -> None:
        begins = _BEGINS.get(what, "the guest cannot run the program")
        self._fail(RUN_FAILED, f"{begins}: {text[:400] or what[:40]}")

    def look(self) -> None:
        """Check the outputs and the time limits."""
        if self._machine.guest.watch.gone.is_set():
            if self._wanted is not None and self._outputs.written == self._wanted:
                self._take()
            return
        if self.failure[0] and self.progress.stage != TAKEN:
            self._give_up()
        elif self._wanted is not None:
            self._look_at_outputs(self._wanted)
        elif (limit := self._limit()) and self._elapsed > limit and self._runs():
            self._too_late(limit)

    def _too_late(self, limit: float) -> None:
        seconds = f"{limit:g} s"
        match self.progress.stage:
            case "booting":
                self._fail(
                    NOT_READY,
                    f"the guest has not begun the program within {seconds}: it has no cloud-init (or agent), or it "
                    f"does not boot; {_CONSOLE}",
                )
            case "ready":
                self._fail(
                    NOT_READY,
                    f"the guest has not started the program within {seconds}: the last that it said was "
                    f"'{self._last_line}'; {_CONSOLE}",
                )
            case "started":
                self._fail(RUN_FAILED, f"the program has a time limit of {self._time_limit} s, which the guest ignores")
            case "ended":
                self._fail(RUN_FAILED, f"the guest has not sent the outputs within {seconds}; {_CONSOLE}")
            case _:
                self._machine.log(f"{self._machine.name}: its work is done, and it does not power off: it is ended")
                self._end_it(exit_code.POWERED_OFF, "")

    # Outputs

    def _look_at_outputs(self, wanted: int) -> None:
        here = self._outputs.written
        if wanted == 0 or here == wanted:
            self._take()
        elif self._outputs.is_cut:
            limit = self._outputs.limit >> 20
            self._fail(
                RUN_FAILED, f"the outputs have more than {limit} MiB, for which there is room: raise request_disk"
            )
        elif here != self._here and here < wanted:
            self._here, self._elapsed = here, 0.0
        elif here > wanted or self._elapsed > QUIET_SECONDS:
            self._tries += 1
            if self._tries > MOST_TRIES:
                self._fail(RUN_FAILED, f"of the outputs, {wanted} bytes, no more than {here} bytes could be received")
                return
            self._wanted, self._elapsed = None, 0.0
            try:
                self._outputs.empty()
            except OSError as error:
                self._machine.log(f"{self._machine.name}: {OUTPUTS_FILE} cannot be emptied: {error}")
            self._control.say("again")

    def _take(self) -> None:
        """Unpack the complete outputs, and let the guest power off."""
        wanted, self._wanted = self._wanted, None
        if wanted:
            self._unpack()
        self._to(self.progress._replace(stage=TAKEN))
        self._control.say("taken")

    def _unpack(self) -> None:
        if self.is_alone:
            self._machine.news.say(
                f"The outputs are in {OUTPUTS_FILE}: with transfer_output_files = {DIRECTORY}/ they are files"
            )
            return
        self._files.unpack(self._outputs.limit)
        if self._files.problem:
            why = f"the outputs cannot be unpacked: {self._files.problem}; {OUTPUTS_FILE} has them as they came"
            self.failure = RUN_FAILED, why

    # Results

    def _to(self, progress: RunProgress) -> None:
        self.progress = progress
        self._elapsed = 0.0
        self._machine.log(f"{self._machine.name}: its program: {' '.join(filter(None, map(str, progress)))}")
        self._keep()

    def _keep(self) -> None:
        try:
            self._identity.write_scratch(self._directory, STATE_FILE, self.progress.written())
        except (OSError, errors.Fault) as error:
            self._machine.log(f"{STATE_FILE} cannot be written: {error}")

    def _fail(self, how: str, why: str) -> None:
        """Record a failure, since which the VM is to end."""
        if not self.failure[0]:
            self.failure = how, why
        self._wanted = None

    def _give_up(self) -> None:
        if not self._is_shot:
            self._is_shot = True
            self._machine.screenshot()
        self._end_it(*self.failure)

    def _end_it(self, how: str, why: str) -> None:
        """End the guest; if an operation has paused it, this is done when it runs again."""
        machine = self._machine
        try:
            if self._is_given_up or not machine.io_errors.stop(why or "its end"):
                return
            if why:
                machine.give_up(how, why)
            else:
                machine.resources.ended(how, time())
                machine.end_guest()
            self._is_given_up = True
        except errors.Fault as fault:
            machine.log(f"{machine.name} cannot be ended: {fault.problem}")
