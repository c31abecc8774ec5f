"""The ports of a guest that runs a program, and the monitor that follows it to its end.

The guest's messages are untrusted. The guest is believed about the end of its own program; messages out of turn are
ignored. Each time limit counts while the guest runs, and not while it is paused.

Outputs are unpacked beside their directory and replace it at the end: until then it holds the files of a checkpoint,
and outputs there would become files of the scratch directory at a restart, where they replace inputs.
"""

import os
import threading
from functools import partial
from queue import Empty
from time import monotonic, time
from typing import NamedTuple

from vmgahp import errors, lifecycle
from vmgahp.config import Settings
from vmgahp.drivers.libvirt.life.machine import LibvirtMachine
from vmgahp.drivers.libvirt.start.describe import CONTROL, ERR, OUT, OUTPUTS, append_to
from vmgahp.drivers.libvirt.start.disks import limit_of, unreserved
from vmgahp.drivers.resources import Resources
from vmgahp.drivers.surveyor import Logger
from vmgahp.host import job_user, wait
from vmgahp.host.job_user import Identity
from vmgahp.host.runtime_dir import runtime_dir
from vmgahp.host.serial_capture import ConsoleCapture, LinePort
from vmgahp.host.system_calls import Opened
from vmgahp.job import exit_code
from vmgahp.job.archive import ENTRY, Allowed, Unpacked, unpack
from vmgahp.job.exit_code import NOT_READY, RUN_FAILED, Ending
from vmgahp.job.run import Run
from vmgahp.job.scratch_files import DIRECTORY
from vmgahp.job.spec import JobSpec

BOOTING, READY, STARTED, ENDED, TAKEN = "booting", "ready", "started", "ended", "taken"
EXIT, SIGNAL, LIMIT = "exit", "signal", "limit"
"""The ways in which a program ends."""
OUTPUTS_FILE = "vm_outputs.tar"
"""The file with the outputs received so far: it travels with a checkpoint."""
MOST_PRINTED = 1 << 30
"""The most bytes of the program's output, and of its errors, if the job may have so much on disk."""
STATE_FILE = "vm_run_state.txt"
"""The file with the guest's progress, for a server that continues it from a checkpoint."""
UNPACKED = ".vm_outputs"
"""The directory in which outputs are unpacked: HTCondor sends no directory that is not named."""
INODES_KEPT = 64
"""The part of EXECUTE's inodes, one in so many, that is left for other jobs."""
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


def most_outputs(spec: JobSpec, settings: Settings, identity: Identity) -> int:
    """Return the most bytes that a port's file may have: the job's limit or the free space. Raises `errors.Fault`."""
    directory, run = spec.vm.working_dir, spec.devices.run
    left = unreserved(settings, directory, identity)
    names = (OUTPUTS_FILE, run.stdout, run.stderr) if run else ()  # which the ports continue, or empty first
    left += sum(identity.occupied_scratch(directory, name) for name in names)
    return min(limit_of(spec, settings) or left, left)


def listen(
    spec: JobSpec,
    settings: Settings,
    owner: tuple[int, int],
    identity: Identity,
    log: Logger,
    resources: Resources,
    *,
    anew: bool,
) -> None:
    """Listen on all ports of a job with a program, for the QEMU of `owner`. Raises `errors.Fault`.

    With `anew` their files begin empty, and else they continue those of an earlier run.
    """
    run, directory = spec.devices.run, spec.vm.working_dir
    assert run is not None
    most = most_outputs(spec, settings, identity)
    ports, room = resources.run_ports, runtime_dir()
    ports[CONTROL] = LinePort(os.path.join(room, CONTROL), log, owner=owner)
    printed = min(MOST_PRINTED, most)
    for name, file, limit in ((OUT, run.stdout, printed), (ERR, run.stderr, printed), (OUTPUTS, OUTPUTS_FILE, most)):
        append = partial(append_to, file, directory, identity, anew=anew)
        ports[name] = ConsoleCapture(os.path.join(room, name), append, limit, log, owner=owner)


class RunProgress(NamedTuple):
    """The progress of a guest."""

    stage: str = BOOTING
    how: str = ""  # the way in which the program has ended; empty before
    number: int = 0  # the exit code of the program, or its signal

    def written(self) -> bytes:
        return f"{self.stage} {self.how or '-'} {self.number}\n".encode()


def read(text: bytes) -> RunProgress:
    """Parse the text of `RunProgress.written`, which the job may have changed: any other means a program that runs."""
    match text.decode("ascii", "replace").split():
        case [("ended" | "taken") as stage, how, number] if _is_end(how, number):
            return RunProgress(stage, how, int(number))
        case [("booting" | "ready" | "started") as stage, "-", number] if number.isdigit() and len(number) <= 3:
            return RunProgress(stage)
    return RunProgress(STARTED)


def _is_end(how: str, digits: str) -> bool:
    if not digits.isdigit() or len(digits) > 3:
        return False
    return how == LIMIT or (how == EXIT and int(digits) <= 255) or (how == SIGNAL and 1 <= int(digits) <= 64)


def begin(machine: LibvirtMachine, spec: JobSpec, kept: int, identity: Identity) -> None:
    """Follow a guest until its end; outputs leave `kept` bytes of EXECUTE free. Raises `errors.Fault`, OSError."""
    assert spec.devices.run is not None
    watch = ProgramMonitor(machine, spec.devices.run, spec.vm.working_dir, kept, identity)
    if machine.restart is not None and not machine.restart.is_warm:
        try:
            watch.progress = read(identity.read_scratch(spec.vm.working_dir, STATE_FILE, 100))
        except (OSError, errors.Fault):
            watch.progress = RunProgress(STARTED)
    watch.is_alone = spec.vm.sent[1] is None
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

    def __init__(self, machine: LibvirtMachine, run: Run, directory: str, kept: int, identity: Identity) -> None:
        """Prepare to follow the program `run`, whose outputs leave `kept` bytes of EXECUTE's file system free."""
        self.progress = RunProgress()
        self.failure = "", ""  # the word and the reason of a failure; empty without one
        self.is_alone = False  # True if the archive of the outputs is sent back as received, since no directory is
        self._machine = machine
        self._program = run
        self._directory = directory
        self._kept = kept
        self._identity = identity
        control = machine.resources.run_ports[CONTROL]
        assert isinstance(control, LinePort)
        self._control = control
        self._outputs = machine.resources.run_ports[OUTPUTS]
        self._unpacked: Unpacked | None = None
        self._last_line = ""
        self._elapsed = 0.0  # seconds that the guest has run since its last message
        self._wanted: int | None = None  # the bytes of the outputs by the guest's message, while they are incomplete
        self._here = -1
        self._tries = 0
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
        remove = partial(job_user.forget, self._identity, self._directory, self._machine.log)
        remove(STATE_FILE, f"{DIRECTORY}/{STATE_FILE}")  # with a checkpoint's copy, which is out of date
        if (done := self._unpacked) is not None:
            moves = {UNPACKED: DIRECTORY}
            if done.problem:
                moves[OUTPUTS_FILE] = f"{DIRECTORY}/{OUTPUTS_FILE}"  # as they came
            for old, new in moves.items():
                try:
                    self._identity.rename_scratch(self._directory, old, new)
                except (OSError, errors.Fault) as error:
                    self._log(f"{old} does not go home: {error}")
        if not self.is_alone or self.progress.stage != TAKEN:
            remove(OUTPUTS_FILE)

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
            reason = f"the program was ended after the {self._program.time_limit} s of its time limit"
            ending = ending._replace(reason=reason)
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
        limits = {
            STARTED: self._program.time_limit and self._program.time_limit + BEYOND_LIMIT,
            ENDED: OUTPUTS_SECONDS,
            TAKEN: max(OFF_SECONDS, self._machine.deadlines.stop),
        }
        return limits.get(self.progress.stage, self._program.boot_timeout)

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
                self._machine.updates.say("The program runs in the VM")
            case ["ended", how, *number] if stage in (BOOTING, READY, STARTED):
                self._hear_end(how, number)
            case ["outputs", size] if size.isdigit() and len(size) <= 15:
                if stage == TAKEN:
                    self._control.say("taken")
                elif stage == ENDED and self._wanted != int(size):
                    self._wanted, self._here, self._elapsed = int(size), -1, 0.0
            case ["failed", what, *text]:
                begins = _BEGINS.get(what, "the guest cannot run the program")
                self._fail(RUN_FAILED, f"{begins}: {' '.join(text)[:400] or what[:40]}")
            case ["off"]:
                pass
            case _:
                return
        self._last_line = line[:200]

    def _hear_end(self, how: str, number: list[str]) -> None:
        match how, number:
            case (("exit" | "signal"), [digits]) if _is_end(how, digits):
                ended = RunProgress(ENDED, how, int(digits))
            case "limit", []:
                ended = RunProgress(ENDED, LIMIT)
            case _:
                return
        self._to(ended)
        said = f"with exit code {ended.number}" if how == EXIT else f"by signal {ended.number}"
        self._machine.updates.say(f"The program has ended {'at its time limit' if how == LIMIT else said}")

    def look(self) -> None:
        """Check the outputs and the time limits."""
        if self._machine.guest.watch.gone.is_set():
            if self._wanted is not None and self._outputs.written == self._wanted:
                self._take()
            return
        if self.failure[0] and self.progress.stage != TAKEN:
            self._machine.screenshot()
            self._end_it(*self.failure)
        elif self._wanted is not None:
            self._look_at_outputs(self._wanted)
        elif (limit := self._limit()) and self._elapsed > limit and (self.progress.stage == TAKEN or self._runs()):
            self._too_late(limit)

    def _too_late(self, limit: float) -> None:
        stage, within = self.progress.stage, f"within {limit:g} s"
        if stage == TAKEN:
            self._log("its work is done, and it does not power off: it is ended")
            self._end_it(exit_code.POWERED_OFF, "")
            return
        why = {
            BOOTING: f"the guest has not begun the program {within}: it has no cloud-init (or agent), or it does not "
            f"boot; {_CONSOLE}",
            READY: f"the guest has not started the program {within}: the last that it said was '{self._last_line}'; "
            f"{_CONSOLE}",
            STARTED: f"the program has a time limit of {self._program.time_limit} s, which the guest ignores",
            ENDED: f"the guest has not sent the outputs {within}; {_CONSOLE}",
        }
        self._fail(NOT_READY if stage in (BOOTING, READY) else RUN_FAILED, why[stage])

    # Outputs

    def _look_at_outputs(self, wanted: int) -> None:
        here = self._outputs.written
        if wanted == 0 or here == wanted:
            self._take()
        elif self._outputs.is_cut:
            limit = self._outputs.limit >> 20
            why = f"the outputs have more than {limit} MiB, for which there is room: raise request_disk"
            self._fail(RUN_FAILED, why)
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
                self._log(f"{OUTPUTS_FILE} cannot be emptied: {error}")
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
            said = f"The outputs are in {OUTPUTS_FILE}: with transfer_output_files = {DIRECTORY}/ they are files"
            self._machine.updates.say(said)
            return
        resources = self._machine.resources
        try:
            resources.unpacked = 0
            allowed = self._allowed()
            resources.unpacked = min(self._outputs.written, allowed.size)  # about as much, until it is known
            with Opened(self._identity.open_scratch(self._directory, OUTPUTS_FILE, os.O_RDONLY)) as stream:
                done = unpack(stream, self._directory, UNPACKED, allowed, self._identity)
        except (OSError, errors.Fault) as error:
            done = Unpacked(0, 0, (), error.problem if isinstance(error, errors.Fault) else str(error))
        self._unpacked, resources.unpacked = done, done.taken
        for left_out in done.left_out:
            self._log(f"of the outputs is left out {left_out}")
        problem = f": {done.problem}" if done.problem else ""
        self._log(f"the outputs are {done.entries} files with {done.size} bytes{problem}")
        if problem:
            why = f"the outputs cannot be unpacked{problem}; {OUTPUTS_FILE} has them as they came"
            self.failure = RUN_FAILED, why

    def _allowed(self) -> Allowed:
        """Return the room for outputs beside all other files of the VM in EXECUTE. Raises `Fault` and OSError."""
        free, free_inodes, all_inodes, _ = job_user.free_room(self._directory, self._identity)
        left = max(int(min(free - self._kept, self._outputs.left())), 0)
        inodes = free_inodes - (all_inodes // INODES_KEPT if self._kept else 0)
        if not all_inodes:  # a file system without a fixed number of them
            inodes = left // ENTRY
        names = ("*",) if self._program.outputs is None else self._program.outputs
        return Allowed(names, left, max(inodes, 0), self._kept, self._program.beside)

    # Results

    def _log(self, line: str) -> None:
        self._machine.log(f"{self._machine.name}: {line}")

    def _to(self, progress: RunProgress) -> None:
        self.progress = progress
        self._elapsed = 0.0
        self._log(f"its program: {' '.join(filter(None, map(str, progress)))}")
        self._machine.updates.on_stage(progress.stage)
        self._keep()

    def _keep(self) -> None:
        try:
            self._identity.write_scratch(self._directory, STATE_FILE, self.progress.written())
        except (OSError, errors.Fault) as error:
            self._machine.log(f"{STATE_FILE} cannot be written: {error}")

    def _fail(self, how: str, why: str) -> None:
        if not self.failure[0]:
            self.failure = how, why
        self._wanted = None

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
