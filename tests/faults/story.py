"""The life of one job on a machine where things fail, and what was lost of it."""

import contextlib
import itertools
import os
import signal
import time
from collections.abc import Callable

from tests import jobs
from tests.faults.cases import ENDS
from tests.faults.daemon import ANSWER, Daemon
from tests.faults.host import PATIENCE, Host, Scratch, until
from tests.lab.guest import BANNER, WRITE_FAILED, counts, make_guest, read_count
from vmgahp import errors, lifecycle
from vmgahp.protocol.client import ProtocolError
from vmgahp.protocol.requests import Request, RequestState

VM_TYPE = "kvm"
MEMORY_MIB = 16
TICKS = 2
"""Of 18.2 a second, between two counts of the guest."""

GUARDIAN = 60.0
"""Seconds in which nothing is left of a VM whose daemon was killed."""
ORDERLY = 30.0
"""Seconds in which a daemon that is told to end has ended, with its VM."""
SOON = 20.0
"""Seconds for a guest that runs to count one further, on a machine that is busy."""

LIBVIRTD_AWAY = 1.0
LIBVIRTD_HANGS = 16.0
"""Longer than anything waits for it (`launcher.SHORTER`)."""
DAEMON_HANGS = 6.0

CONSOLE, ERROR = "vm_console.log", "vm_error.txt"
SUSPEND_IMAGE = "vm_suspend.mem"
CHECKPOINT = ("vm_checkpoint.mem", "vm_checkpoint.json")
PREPARED: dict[str, tuple[str, ...]] = {
    "RESUME of a paused VM": ("SOFT_SUSPEND",),
    "RESUME of a saved VM": ("SUSPEND",),
    "CHECKPOINT of a saved VM": ("SUSPEND",),
    "RESUME of a checkpointed VM": ("CHECKPOINT",),
    "STOP of a saved VM": ("SUSPEND",),
}
"""Operation -> what comes before it."""
SERVED = (lifecycle.SUSPENDED, lifecycle.SOFT_SUSPENDED)


class Story:
    """What a client does, what goes wrong meanwhile, and what it has a right to find afterwards."""

    def __init__(self, host: Host, number: int) -> None:
        """In a scratch directory of its own."""
        self.host = host
        self.process = 0
        """The job's ProcId."""
        self.name = "alice_lab_7.0"
        self.scratch = Scratch(host.directory / f"dir_{number}")
        self.directory = self.scratch.path
        self.disk = self.directory / "guest.img"
        self.console = self.directory / CONSOLE
        make_guest(self.disk, seconds=None, ticks=TICKS)
        jobs.own(self.directory)
        self.lost: list[str] = []
        self.told: list[str] = []
        """What was done and answered, in its order."""
        self.daemon: Daemon | None = None
        self.vm = ""
        self.saved_at: int | None = None
        """The count on the disk when a SUSPEND or CHECKPOINT was granted; its guest must come back as long as the disk
        has moved no further."""
        self.durable = False
        """It was a CHECKPOINT, and outlives its daemon."""
        self.killed = False
        """The guest was killed, so that it may be gone."""
        self.hung = False
        """The guest's process was stopped, and does not count."""
        self.stopped = False
        """A STOP was granted, so that the guest has to be gone."""
        self.ended_read_only = False
        """Its files could not be removed: that is the next START's to do."""
        self.may_be_held = False
        """Nobody can tell who has killed a QEMU, and a job that has one killed takes no machine out of service."""

    def lose(self, what: str) -> None:
        self.told.append(f"LOST: {what}")
        self.lost.append(what)

    # What a client does

    def begin(self, **settings: object) -> Daemon:
        """Start the daemon; nothing is asked of it."""
        assert self.daemon is None
        self.daemon = Daemon(self.directory, VM_TYPE, **settings)
        self.killed = self.hung = self.stopped = self.ended_read_only = False
        self.vm = ""
        return self.daemon

    def take_over(self, checkpoint: dict[str, bytes]) -> None:
        """Have the files of a job that was checkpointed, as they come back with it."""
        for name, content in checkpoint.items():
            (self.directory / name).write_bytes(content)
        jobs.own(self.directory)
        self.saved_at, self.durable = self.count(), True

    def begin_for(self, operation: str) -> None:
        """Start a daemon, and a VM in the state in which the operation is tried."""
        self.begin(VM_STOP_TIMEOUT=int(operation == "STOP"))  # this guest never obeys, and only there it matters
        if not operation.startswith("START"):
            self.done("START")
            assert until(lambda: self.count() > 2, PATIENCE), "the guest does not count"
            for before in PREPARED.get(operation, ()):
                self.done(before)

    def ask_start(self) -> Request:
        self.daemon.send_ad(
            *jobs.lines(
                self.directory,
                "JobVMCheckpoint = true",
                JobVMType=f'"{VM_TYPE}"',
                JobVMMemory=MEMORY_MIB,
                JobVM_VCPUS=1,
                VMPARAM_vm_Disk=f'"{self.disk.name}:hda:w:raw"',
                ProcId=self.process,
            )
        )
        return self.daemon.begin("START", VM_TYPE)

    def ask(self, operation: str) -> Request:
        return self.ask_start() if operation == "START" else self.daemon.begin(operation, self.vm)

    def done(self, operation: str) -> None:
        """An operation that has to succeed, for nothing has failed."""
        request = self.ask(operation)
        result = self.daemon.answer(request)
        assert self.granted(request), f"{operation}: {result}\n{self.daemon.said()}"

    def granted(self, request: Request) -> bool:
        """Note what an answer means for what comes; whether it is a success."""
        self.told.append(f"{request.operation} -> {' '.join(request.result) or 'no answer'}")
        good = request.result[:1] == ["0"]
        if good:
            match request.operation:
                case "START":
                    self.vm = request.result[1]
                    if refused := [name for name in self.files() if ".refused-" in name]:
                        self.lose(f"the guest of a checkpoint that was in order starts anew: {', '.join(refused)}")
                case "SUSPEND" | "CHECKPOINT":
                    if self.saved_at is None or self.count() != self.saved_at:
                        self.saved_at = self.count()
                        self.durable = False
                    self.durable |= request.operation == "CHECKPOINT"
                case "STOP":
                    self.stopped = True
        elif request.operation == "START" and {*request.result[1:2]} & {*errors.HOLD_CODES} and not self.may_be_held:
            self.lose(f"the job is held: {request.result[1]} ({self.explanation()})")
        return good

    # What is seen from outside

    def count(self) -> int:
        return read_count(self.disk)

    def moves(self) -> bool:
        """Whether the guest counts on."""
        before = self.count()
        return until(lambda: self.count() != before, SOON)  # a guest that boots begins at 1

    def guests(self) -> list[int]:
        return self.host.guests(self.name)

    def printed(self, start: int = 0) -> str:
        with contextlib.suppress(FileNotFoundError):
            return self.console.read_bytes()[start:].decode("ascii", "replace")
        return ""

    def explanation(self) -> str:
        with contextlib.suppress(OSError):
            return (self.directory / ERROR).read_text().splitlines()[0]
        return ""

    def files(self) -> set[str]:
        return {path.name for path in self.directory.iterdir()}

    # Faults

    def fail(self, fault: str) -> bool:
        """Begin a fault; False where there is nothing to fail."""
        self.told.append(f"({fault})")
        match fault.removeprefix("daemon: "):
            case "SIGKILL" | "SIGTERM" | "SIGSTOP" as name:
                self.daemon.process.send_signal(signal.Signals[name])
            case "QUIT":
                self.daemon.send_quietly("QUIT")
            case "end of input":
                self.daemon.process.stdin.close()
            case "libvirtd: SIGKILL" | "libvirtd: SIGTERM":
                self.host.end_libvirtd(signal.Signals[fault.removeprefix("libvirtd: ")])
            case "libvirtd: SIGSTOP":
                self.host.signal_libvirtd(signal.SIGSTOP)
            case "QEMU: SIGKILL" | "QEMU: SIGSTOP":
                guests = self.guests()
                for pid in guests:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.Signals[fault.removeprefix("QEMU: ")])
                if fault.endswith("KILL"):
                    self.killed |= bool(guests)
                    until(lambda: not set(guests) & set(self.guests()), PATIENCE)
                else:
                    self.hung |= bool(guests)
                return bool(guests)
            case "disk: full":
                self.scratch.fill()
            case "disk: read-only":
                self.scratch.make_read_only()
            case _:
                raise AssertionError(f"no fault is called {fault}")
        return True

    def heal(self, fault: str) -> None:
        """End a fault that passes by itself, when its time has come."""
        match fault:
            case "daemon: SIGSTOP":
                time.sleep(DAEMON_HANGS)
                self.daemon.process.send_signal(signal.SIGCONT)
            case "libvirtd: SIGKILL" | "libvirtd: SIGTERM":
                time.sleep(LIBVIRTD_AWAY)
                self.host.heal_libvirtd()
            case "libvirtd: SIGSTOP":
                time.sleep(LIBVIRTD_HANGS)
                self.host.heal_libvirtd()

    @staticmethod
    def ends_daemon(fault: str) -> bool:
        return fault.removeprefix("daemon: ") in (*ENDS, "SIGKILL")

    def act(self, operation: str, point: str, fault: str, when: Callable[[], object] = lambda: None) -> bool:
        """Ask for an operation and let something fail at a point of it, once `when` has returned.

        Whether it was tried. Afterwards everything is well again, and what is then has been judged.
        """
        daemon, request, status = self.daemon, None, None
        begun = len(daemon.points.trace)
        if point:
            daemon.points.hold(point)
        if operation in ENDS:
            self.fail(operation)
        else:
            request = self.ask(operation)
        if point:
            if not self._comes_to_the_point(request):
                daemon.points.release()
                self.told += [f"{point} is not reached: {daemon.points.trace}", daemon.said()]
                if request is not None:
                    self.granted(request)
                return False
            if self.vm and operation not in ENDS:
                status = daemon.begin("STATUS", self.vm)
        when()
        tried = self.fail(fault) if fault else True
        # Without a point a START may find the disk full when it looks for room.
        self.may_be_held = fault == "QEMU: SIGKILL" or (fault == "disk: full" and not point)
        self.ended_read_only = fault == "disk: read-only" and operation in ("STOP", *ENDS)
        if fault == "daemon: SIGKILL":
            until(daemon.points.is_left, 1.0)
        elif self.ends_daemon(fault):
            daemon.points.wait_for("end.begun", 1.0)
        daemon.points.release()
        self.heal(fault)
        self._forget_what_has_run(daemon.points.trace[begun:], fault)
        if operation in ENDS or self.ends_daemon(fault):
            self.judge_end(in_order=fault != "daemon: SIGKILL")
        elif request is not None:
            self._judge_answers(request, status)
            self.scratch.heal()
            if self.daemon is not None and self.vm:
                self.judge_status()
        self.scratch.heal()
        return tried

    def _forget_what_has_run(self, trace: list[str], fault: str) -> None:
        """A guest that has run may have changed its disks, and what was saved of it before is none any more.

        Where the daemon was killed when it was about to run, nobody can know whether it has.
        """
        if {"restore.runs", "launch.runs"} & set(trace):
            self.saved_at = None
        if fault == "daemon: SIGKILL" and "restore.set_aside" in trace:
            self.saved_at = None

    def _comes_to_the_point(self, request: Request | None) -> bool:
        daemon = self.daemon

        def over() -> bool:
            daemon.take()
            finished = request is not None and request.state is RequestState.FINISHED
            return daemon.points.came.is_set() or finished or not daemon.alive()

        until(over, ANSWER, pause=0.01)
        return daemon.points.came.is_set()

    # What must be so

    def _judge_answers(self, request: Request, status: Request | None) -> None:
        for asked in (request, status):
            if asked is None:
                continue
            try:
                self.daemon.answer(asked)
            except ProtocolError as error:
                self.told.append(str(error).splitlines()[0])
            if not asked.result and self.daemon.alive():
                self.lose(f"a request without an answer: {asked.operation}")
        if not self.daemon.alive():
            self._died_by_itself()
            return
        self.granted(request)
        if status is not None and status.result:
            self._judge_word(status.result, beside=True)

    def judge_status(self) -> str:
        """Ask how the VM is, and compare it with what is; the word."""
        result: list[str] = []
        for _ in range(3):  # condor_starter takes five bad ones
            try:
                result = self.daemon.answer(self.daemon.begin("STATUS", self.vm))
            except ProtocolError as error:
                self.told.append(str(error).splitlines()[0])
            if not self.daemon.alive():
                self._died_by_itself()
                return ""
            # libvirt takes a moment to see that a guest was killed.
            late = self.killed and result[1:] != [f"STATUS={lifecycle.STOPPED}"] and not self.guests()
            if (result[:1] == ["0"] and not late) or not result:
                break
            time.sleep(0.5)
        return self._judge_word(result)

    def _died_by_itself(self) -> None:
        self.lose(f"the daemon died by itself (exit {self.daemon.process.returncode})")
        self._end_of_daemon(in_order=False)

    def _judge_word(self, result: list[str], *, beside: bool = False) -> str:
        """Whether what STATUS said is true; `beside` an operation it may be of before that or of after it."""
        words = dict(word.split("=", 1) for word in result[1:] if "=" in word)
        word = words.get("STATUS", "") if result[:1] == ["0"] else "unknown" if result else "unanswered"
        self.told.append(f"STATUS{' beside' if beside else ''} -> {word}")
        if beside:
            if word == lifecycle.STOPPED and not (self.stopped or self.killed or self.guests() == []):
                self.lose("STATUS said Stopped of a guest that runs")
            return word
        guest = bool(self.guests())
        match word:
            case lifecycle.RUNNING:
                if not guest:
                    self.lose("STATUS says Running, and there is no guest")
                elif not self.hung and not self.moves():
                    self.lose("STATUS says Running, and the guest stands still")
            case lifecycle.SOFT_SUSPENDED:
                if not guest:
                    self.lose("STATUS says SoftSuspended, and there is no guest")
            case lifecycle.SUSPENDED:
                if guest and not self.hung:
                    self.lose("STATUS says Suspended, and the guest is there")
                if self.saved_at is None:
                    self.saved_at, self.durable = self.count(), False
            case lifecycle.STOPPED:
                if guest and not self.hung:
                    self.lose("STATUS says Stopped, and the guest is there")
                elif not (self.stopped or self.killed):
                    self.lose("the job counts as done, and is not: STATUS says Stopped")
                elif self.is_safe() and not self.stopped:
                    self.lose("the job counts as done, although its guest is saved: STATUS says Stopped")
            case "unanswered":
                self.lose("a request without an answer: STATUS")
            case _:
                if guest and not self.hung:
                    self.lose(f"the guest runs, and STATUS says nothing of it: {' '.join(result)}")
                elif not guest and not self.killed:
                    self.lose("the guest is gone, by nobody's will")
        return word

    def is_safe(self) -> bool:
        """Whether there is a save that was granted, and whose disk has not changed since."""
        return self.saved_at is not None and self.saved_at == self.count()

    def comes_back_or_stays(self) -> None:
        """A saved guest, or a paused one, continues when it is asked to, now that nothing fails.

        A checkpoint is left for the next START.
        """
        if self.daemon is None or not self.vm or self.hung or (self.durable and self.is_safe()):
            return
        word = self.judge_status()
        if self.daemon is not None and word in SERVED:
            saved, before = self.is_safe(), self.count()
            request = self.ask("RESUME")
            self.daemon.answer(request)
            if not self.granted(request):
                if not self.hung:
                    self.lose(f"what is {word} does not continue: RESUME is answered {' '.join(request.result)}")
            elif not self.hung and not self.moves():
                self.lose(f"what was {word} stands still after its RESUME")
            elif saved and self.count() <= before:
                self.lose("a saved guest has started anew")
            self.judge_status()

    def finish(self, *, stop: bool = True) -> None:
        """STOP and QUIT, which always work, and leave nothing."""
        if self.daemon is None:
            return
        if self.vm and stop and not self.stopped:
            request = self.daemon.begin("STOP", self.vm)
            self.daemon.answer(request)
            if not self.granted(request):
                self.lose(f"STOP does not end the VM: {' '.join(request.result) or 'no answer'}")
        self.fail("QUIT")
        self.judge_end(in_order=True)

    def judge_end(self, *, in_order: bool) -> None:
        """The daemon ends, in order or by SIGKILL: nothing of the VM is left, and no request was answered twice."""
        status = self.daemon.exit_status(ORDERLY + 10)
        if status is None:
            self.lose("the daemon does not end")
        elif in_order and status != 0:
            self.lose(f"the daemon's exit status is {status}")
        self._end_of_daemon(in_order=in_order and status == 0)

    def _end_of_daemon(self, *, in_order: bool) -> None:
        if self.daemon.unasked:
            self.lose(f"answers that nobody asked for: {self.daemon.unasked}")
        if self.lost:
            self.told.append(self.daemon.said())
        self.daemon.discard()
        self.daemon = None
        self.scratch.heal()
        self.host.heal_libvirtd()
        patience = ORDERLY if in_order else GUARDIAN
        if not until(lambda: not self.host.leftovers(self.name), patience):
            self.lose(f"left behind: {'; '.join(self.host.leftovers(self.name))}")
        if not self.durable:
            self.saved_at = None
        if in_order and not self.ended_read_only:
            left = sorted(name for name in self.files() if name.endswith(".part") or name == SUSPEND_IMAGE)
            if left:
                self.lose(f"files are left: {', '.join(left)}")

    def next_start(self) -> None:
        """A START in the same directory, on a machine that is well: it continues where that was promised."""
        safe, before, printed = self.is_safe(), self.count(), len(self.printed())
        self.begin()
        request = self.ask_start()
        self.daemon.answer(request)
        if not self.granted(request):
            if not self.lost or "held" not in self.lost[-1]:
                self.lose(f"the next START fails: {' '.join(request.result) or 'no answer'} ({self.explanation()})")
        else:
            self._judge_new_life(safe, before, printed)
        self.finish(stop=False)

    def _judge_new_life(self, safe: bool, before: int, printed: int) -> None:
        if not until(lambda: len(counts(self._whole_lines(printed))) > 1, PATIENCE):
            self.lose(f"the guest of the next START says nothing: {self.printed(printed)!r}")
            return
        text = self._whole_lines(printed)
        afresh, seen = BANNER in self.printed(printed), counts(text)
        self.told.append(f"the next START {'boots afresh' if afresh else 'continues'} (disk {before}, first {seen[0]})")
        if safe and afresh:
            self.lose("the guest that was saved starts anew")
        if not afresh and seen[0] not in (before, before + 1):
            self.lose(f"an old memory on a newer disk: the disk is at {before}, the guest continues from {seen[0]}")
        if WRITE_FAILED in text:
            self.lose("the guest cannot write to its disk")
        if any(later != earlier + 1 for earlier, later in itertools.pairwise(seen)):
            self.lose(f"the guest miscounts: {seen}")
        left = sorted(name for name in self.files() if name.endswith(".part") or name == SUSPEND_IMAGE)
        if left:
            self.lose(f"the next START leaves files of the one before: {', '.join(left)}")
        self.judge_status()

    def _whole_lines(self, start: int) -> str:
        """What the guest has printed since, from the first line that began since."""
        whole = self.printed()
        return self.printed(
            start if start == 0 or whole[start - 1 : start] == "\n" else start + whole[start:].find("\n") + 1
        )

    def close(self) -> None:
        """Leave nothing of the story on the machine."""
        if self.daemon is not None:
            self.daemon.discard()
            self.daemon = None
        self.host.clean()
        self.scratch.close()
