"""The life of a VM, the same for every driver: one start of five steps, one state, one end.

A driver implements each step and each operation with its hypervisor; this module decides when it is done, what comes
before and after it, and what a failure leaves behind. `vmgahp.lifecycle.TRANSITIONS` is the table of valid transitions,
as for the session.
"""

import errno
import os
import sys
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Generic, NamedTuple, TypeVar

from vmgahp import errors, lifecycle
from vmgahp.checkpoint.store import CheckpointStore, Unusable
from vmgahp.drivers.base import Driver, Machine
from vmgahp.drivers.resources import ExitRecord, Resources
from vmgahp.drivers.surveyor import Logger
from vmgahp.host import job_user, runtime_dir
from vmgahp.host.budget import Budget
from vmgahp.host.guardian import Guardian
from vmgahp.job.ad import JobAd
from vmgahp.job.exit_code import DESTROYED, POWERED_OFF_WHEN_ASKED
from vmgahp.job.scratch_files import OutputDirectory, empty_directory
from vmgahp.lifecycle import CHECKPOINTED, RUNNING, SOFT_SUSPENDED, STARTING, STOPPED, SUSPENDED, State
from vmgahp.metrics import Status, Usage

LEAST_LONG_SECONDS = 30

END = "END"
"""The operation on a VM that is being ended; clients cannot request it."""

OVERRULE_SECONDS = 15.0
"""The seconds that an end waits for what it overrules: fewer than the server's DESTROY_DEADLINE for the end."""

OVERRULE_INTERVAL = 0.5
"""Seconds between two attempts to end the guest of an operation under way, which may make one meanwhile."""

_DONE = {"save": "named", "checkpoint": "written", "restore": "runs"}  # the last points that are not called "done"


def reached(point: str) -> None:
    """Mark that a VM has reached one of the `vmgahp.lifecycle.POINTS`. Tests replace this function to stop there."""


Sent = tuple[bool, tuple[str, ...] | None]
"""The part of a scratch directory that is sent back: see `vmgahp.job.vm_spec.VmSpec.sent`."""


class Deadlines(NamedTuple):
    """Deadlines for the calls of a VM, in seconds."""

    usual: float
    memory: float
    """The deadline for a call that writes or reads the guest's memory: as long as the client waits."""
    stop: float
    """The deadline for a guest that was asked to power off (VM_STOP_TIMEOUT)."""


class ManagedMachine(Machine):
    """One VM, whose driver implements each operation on it."""

    no_checkpoint = "the job does not ask for it with vm_checkpoint"
    """The reason why the VM cannot be checkpointed, in the form of "because …"; empty if it can."""
    store: CheckpointStore | None = None
    """The job's checkpoint, if its files are all in the scratch directory."""

    def __init__(self, name: str, resources: Resources, deadlines: Deadlines, log: Logger) -> None:
        self.name = name
        self.resources = resources
        self.updates = resources.updates
        self.deadlines = deadlines
        self.log = log
        self.state: State = STARTING
        self._doing = lifecycle.START  # the operation under way, `END`, or empty
        self.overruled = False
        """True if the VM is to end: the operation under way stops at its next step, and no other one begins."""
        self._turn = threading.Condition()
        self.usage = Usage()  # the CPU time of the guest, in seconds
        self.lost: errors.Fault | None = None

    # The operations that a driver fills in

    @abstractmethod
    def look(self) -> Status:
        """Return the state of a VM that runs or is paused; STOPPED if it is gone. Raises `errors.Fault`."""

    @abstractmethod
    def ask_to_power_off(self) -> None:
        """Ask the guest, which may be paused, to power off. Raises `errors.Fault`."""

    @abstractmethod
    def wait_until_off(self, seconds: float) -> bool:
        """Wait until the guest is off, `seconds` have passed, or `overruled` is set; return True if it is off."""

    @abstractmethod
    def end_guest(self) -> None:
        """End the guest at once, whatever is under way; may be called by two threads. Raises `errors.Fault`."""

    def look_at_saved(self) -> None:
        """Check that the memory of a SUSPENDED VM is in place. Raises the fault of `report_lost`."""

    def clear_up(self) -> None:
        """Remove what is left with the hypervisor of a guest that ended on its own. The caller logs a fault."""

    def interrupt(self) -> None:
        """Make the operation under way stop, since the VM is to end; called until it has. Raises `errors.Fault`."""
        self.end_guest()  # what it waits for may be the guest

    def collect_output(self) -> None:
        """Fetch the guest's output from elsewhere, for STOP. On a fault STOP fails, and the VM stays."""

    def pause(self) -> None:
        """Stop the guest's CPUs. Raises `errors.Fault`."""
        raise errors.ClientFault(errors.VM_NO_SUPPORT_SUSPEND, f"{self.name} cannot be paused by its driver.")

    def unpause(self) -> None:
        """Resume the CPUs of a paused guest. Raises `errors.Fault`."""
        raise errors.ClientFault(errors.VM_INVALID_OPERATION, f"{self.name} cannot be resumed by its driver.")

    def save(self, operation: str) -> None:
        """Write the memory of a guest that runs or is paused to the place that a SUSPEND, or a CHECKPOINT, uses.

        When this returns the guest is gone and its memory is safe. On any exception the guest is as before, or it is
        reported `lost`. It takes the `step` "save.written", if it can.
        """
        raise errors.ClientFault(errors.VM_NO_SUPPORT_SUSPEND, f"{self.name} cannot be saved by its driver.")

    def keep_saved(self) -> None:
        """Move the memory of a SUSPENDED VM to the place for a CHECKPOINT. Raises `errors.Fault`."""

    def write_manifest(self) -> None:
        """Write the manifest of the checkpoint of a saved VM, for a driver that has any. Raises `errors.Fault`."""
        raise NotImplementedError

    def restore(self, before_it_runs: Callable[[], None]) -> None:
        """Run a saved guest, after `before_it_runs`; a failure leaves it as saved. Raises `errors.Fault`."""
        raise errors.ClientFault(errors.VM_INVALID_OPERATION, f"{self.name} cannot be resumed by its driver.")

    def set_aside(self) -> None:
        """Invalidate the checkpoint, since its guest is about to run and to change its disks."""
        if self.store:
            self.store.begin_restart()

    def put_back(self) -> None:
        """Make the checkpoint valid again after `set_aside`, since its guest has not run."""
        if self.store:
            self.store.put_back()

    def forget_saved(self) -> None:
        """Remove the saved memory of a VM that no longer needs it; errors are logged."""
        if self.store:
            self.store.discard()

    # The questions of a driver

    def step(self, point: str) -> None:
        """Mark that the operation under way has reached `point`. Raises `errors.ClientFault` if the VM is to end."""
        reached(point)
        if self.overruled or (self.state is STARTING and self.resources.server_ends()):
            raise errors.ClientFault(errors.VM_NOT_FOUND, f"{self.name} is being ended.")

    def started(self) -> None:
        """Mark that the guest runs: from now on clients request the operations."""
        self.state = RUNNING
        self._over_with_it()

    def give_up(self, how: str, why: str) -> None:
        """End the guest as a failure: `how` is a word of `vmgahp.job.exit_code`, `why` is for the job's owner.

        The next STATUS finds it gone and tells the starter, which cannot be told before. Raises `errors.Fault` if the
        guest does not end: its record is then as before.
        """
        self.log(f"{self.name} ends as a failure: {why}")
        self.resources.ended(how, time.time(), why)
        try:
            self.end_guest()
        except errors.Fault:
            self.resources.not_ended(how)
            raise

    def report_lost(self, problem: str, hint: str) -> errors.Fault:
        """Return the fault for a guest that is gone with its work; STATUS raises it instead of reporting STOPPED."""
        self.lost = errors.HypervisorFault(problem, hint)
        return self.lost

    # The requests of the server

    def status(self) -> Status:
        if self.state is STOPPED:
            return Status(STOPPED)
        if self.lost is not None:
            raise self.lost
        if self.state is SUSPENDED:
            self.look_at_saved()
        if self.state in (SUSPENDED, CHECKPOINTED):
            return Status(SUSPENDED)
        return self.look()

    def soft_suspend(self) -> None:
        with self._under_way(lifecycle.SOFT_SUSPEND, "pause"):
            self.pause()

    def suspend(self) -> None:
        with self._under_way(lifecycle.SUSPEND, "save"):
            self.save(lifecycle.SUSPEND)

    def resume(self, state: str) -> None:
        saved = self.state in (SUSPENDED, CHECKPOINTED)
        with self._under_way(lifecycle.RESUME, "restore" if saved else "unpause"):
            if saved:
                self._restore()
            else:
                self.unpause()

    def checkpoint(self) -> None:
        if self.no_checkpoint:
            problem = f"{self.name} cannot be checkpointed: {self.no_checkpoint}."
            raise errors.ClientFault(errors.VM_NO_SUPPORT_CHECKPOINT, problem)
        before = self.state
        with self._under_way(lifecycle.CHECKPOINT, "checkpoint"):
            if before is SUSPENDED:
                self.keep_saved()
            else:
                reached("save.begun")
                self.save(lifecycle.CHECKPOINT)
                self.state = SUSPENDED
            try:
                self.step("checkpoint.saved")
                self.write_manifest()
                if self.resources.luggage:
                    self.resources.luggage.with_checkpoint()
            except BaseException:
                self._leave_luggage()
                self._go_back_to(before)
                raise

    def stop(self) -> None:
        self.resources.to_be_stopped()
        if self.state in (RUNNING, SOFT_SUSPENDED, SUSPENDED) and not (self._doing or self.overruled or self.lost):
            with self._under_way(lifecycle.STOP):
                if self.state is not SUSPENDED:
                    self._ask_and_wait()
                if not self.overruled:
                    self.collect_output()
        self.destroy()

    def destroy(self) -> None:
        if not self._take_over():
            return
        try:
            reached("end.begun")
            if self.state not in (SUSPENDED, CHECKPOINTED):
                self.resources.ended(DESTROYED)
            self.end_guest()
            self._tidy()
        except BaseException:
            self.overruled = False  # it lives on, and is as it was
            raise
        finally:
            self._over_with_it()

    def undo(self) -> None:
        """Destroy what a start that failed has left: now, or by the guardian where that fails."""
        self._over_with_it()
        try:
            self.destroy()
        except errors.Fault as fault:
            self.log(f"{self.name} is left to its guardian: {fault.problem}")
            self.resources.guardian = None  # it is kept, and acts when the server ends

    def release(self) -> None:
        if self._take_over():
            try:
                self.clear_up()
            except errors.Fault as fault:
                self.log(f"{self.name} is gone, and what is left of it cannot be cleared: {fault.problem}")
            finally:
                self._tidy()
                self._over_with_it()

    def exit_status(self) -> int:
        return self.resources.exit_status

    def cpu_seconds(self) -> float:
        """Return the CPU time of the guest at the last STATUS, in seconds."""
        return self.usage.seconds

    # How it is done

    @contextmanager
    def _under_way(self, operation: str, points: str = "") -> Iterator[None]:
        """Carry out an operation exclusively, and enter the state of the table. Raises `errors.ClientFault`."""
        with self._turn:
            outcome = lifecycle.TRANSITIONS.get((self.state, operation))
            if outcome is None or self._doing or self.overruled or self.lost:
                word = errors.VM_NOT_FOUND if self.state is STOPPED or self.overruled else errors.VM_INVALID_OPERATION
                raise errors.ClientFault(word, f"{self.name} is {self._doing or self.state}: it has no {operation}.")
            self._doing = operation
        try:
            if points:
                self.step(f"{points}.begun")
            yield
            if operation != lifecycle.STOP:
                self.state = outcome
            if points:
                reached(f"{points}.{_DONE.get(points, 'done')}")
        finally:
            self._over_with_it()

    def _over_with_it(self) -> None:
        with self._turn:
            self._doing = ""
            self._turn.notify_all()

    def _ask_and_wait(self) -> None:
        try:
            self.ask_to_power_off()
            self.step("end.asked")
            if self.wait_until_off(self.deadlines.stop):
                self.resources.ended(POWERED_OFF_WHEN_ASKED)
            elif not self.overruled:
                self.log(f"{self.name} has not powered off in {self.deadlines.stop:g} s: destroying it")
        except errors.Fault as fault:
            self.log(f"{self.name} cannot be asked to power off: {fault.problem} It is destroyed")

    def _restore(self) -> None:
        def before_it_runs() -> None:
            self.step("restore.made")
            self.set_aside()  # a suspended VM has a manifest, too, if its CHECKPOINT has failed behind it
            self.step("restore.set_aside")

        try:
            self.restore(before_it_runs)
        except BaseException:
            self.put_back()
            raise
        self.state = RUNNING
        self._leave_luggage()
        self.forget_saved()

    def _leave_luggage(self) -> None:
        if self.resources.luggage:
            self.resources.luggage.without_checkpoint()

    def _go_back_to(self, before: State) -> None:
        if before is SUSPENDED or self.overruled:
            return
        try:
            self.restore(self.set_aside)  # the manifest may be there, and the guest changes its disks from now on
            self.state = RUNNING
            self.forget_saved()
            if before is SOFT_SUSPENDED:
                self.pause()
                self.state = SOFT_SUSPENDED
        except errors.Fault as fault:
            self.log(f"{self.name} stays saved after a checkpoint that failed: {fault.problem}")

    def _take_over(self) -> bool:
        """Acquire the right to end the VM, waiting for the current operation; False if it has ended. Raises `Fault`."""
        with self._turn:
            self.overruled = True
            self._turn.notify_all()
        latest = time.monotonic() + OVERRULE_SECONDS
        while True:
            with self._turn:
                if self.state is STOPPED:
                    return False
                if not self._doing:
                    self._doing = END
                    return True
                doing = self._doing
            if time.monotonic() >= latest:
                problem = f"{self.name} cannot be ended: its {doing} has not stopped in {OVERRULE_SECONDS:g} s."
                hint = "its guardian ends it when the server is gone; see why the hypervisor does not answer."
                raise errors.HypervisorFault(problem, hint)
            if doing != END:
                try:
                    self.interrupt()
                except errors.Fault as fault:
                    self.log(f"{self.name}, in the middle of its {doing}: {fault.problem}")
            with self._turn:
                self._turn.wait_for(lambda: not self._doing or self.state is STOPPED, OVERRULE_INTERVAL)

    def _tidy(self) -> None:
        reached("end.gone")
        kept = self.state is CHECKPOINTED
        if self.state is SUSPENDED:
            self.resources.ended(DESTROYED)
            self.forget_saved()
        try:
            self.before_release()
        except (OSError, errors.Fault) as error:  # of the job's file system, say: the VM has ended all the same
            self.log(f"{self.name} has ended, and what is left of it cannot be cleared: {error}")
        self.state = STOPPED
        self.resources.release(kept=kept)
        reached("end.released")

    def before_release(self) -> None:
        """Record how the VM ended, and stop watching it."""


Plan = TypeVar("Plan")
AnyMachine = TypeVar("AnyMachine", bound=ManagedMachine)


OF_FILES = (errno.EIO, errno.ENOTCONN, errno.ESTALE, errno.ETIMEDOUT)
"""The errors of file systems that fail, which no program and no lack of anything causes."""


class ManagedDriver(Driver, Generic[Plan, AnyMachine]):
    """A driver whose START reads as five calls; each is a step that a driver fills in."""

    _server_ends = False
    _starting: tuple[AnyMachine, ...] = ()

    def interrupt(self) -> Sequence[Machine]:
        self._server_ends = True
        return self._starting

    def start(self, job: JobAd) -> AnyMachine:
        try:
            plan = self.plan(job)
            reached("plan.looked")
            self.clear(plan)
            reached("clear.done")
            try:
                return self._restart(plan, job)
            except Unusable as unusable:
                if self._server_ends:
                    raise errors.ClientFault(errors.VM_NOT_FOUND, unusable.reason) from unusable
                afresh, take_back = self.without_checkpoint(plan, unusable)
                try:
                    return self._carry_out(afresh, job)
                except BaseException:
                    take_back()  # the start without it failed too: keep it for another machine or a later try
                    raise
        except (errors.Fault, OSError) as error:
            with Budget():  # a second look at this machine is not the job's to use up
                fault = self._fault_for(error, job) if isinstance(error, OSError) else error
                explained = self.explain(job, fault)
            if explained is error:
                raise
            raise explained from error

    def describe(self, job: JobAd) -> str:
        return self.show(self.plan(job))

    @abstractmethod
    def plan(self, job: JobAd) -> Plan:
        """Plan the start by the job, its files and this machine; change nothing. Raises `errors.Fault`."""

    @abstractmethod
    def show(self, plan: Plan) -> str:
        """Return the plan as text, such as the domain XML. Changes nothing. Raises `errors.Fault`."""

    @abstractmethod
    def clear(self, plan: Plan) -> None:
        """Remove what an earlier start of this job has left behind. Raises `errors.Fault`."""

    @abstractmethod
    def prepare(self, plan: Plan, resources: Resources) -> AnyMachine:
        """Make what the VM needs, each with its removal in `resources`. Raises `errors.Fault`, OSError, `Unusable`."""

    @abstractmethod
    def launch(self, machine: AnyMachine, plan: Plan) -> None:
        """Start the guest, new or from its checkpoint. Raises the same as `prepare`."""

    @abstractmethod
    def keep(self, machine: AnyMachine, plan: Plan) -> None:
        """Set up what accompanies the running guest until its end. Raises `errors.Fault` and OSError."""

    def without_checkpoint(self, plan: Plan, unusable: Unusable) -> tuple[Plan, Callable[[], None]]:
        """Return the plan without its unusable checkpoint, and a function to undo this. Raises `errors.JobFault`.

        Only a driver whose `prepare` raises `Unusable` needs it.
        """
        raise NotImplementedError

    def explain(self, job: JobAd, fault: errors.Fault) -> errors.Fault:
        """Return the fault of a start, worded for the job's owner."""
        return fault

    def post_guardian(self, match: str, uuid: str) -> Guardian:
        """Start a guardian that runs the kill mode for this VM when the server is killed. Raises OSError."""
        kill = (sys.executable, "-I", "-m", "vmgahp", "-f", "-M", "4")
        return Guardian.post([*kill, "vmtype", self.vm_type, "match", match, "uuid", uuid], os.environ)

    def claim(self, resources: Resources, match: str, uuid: str) -> None:
        """Claim the VM, so that no other server takes it for a leftover, and start its guardian. Raises OSError."""
        runtime_dir.sweep()
        try:
            claimed = runtime_dir.claim(uuid)
        except (errors.MachineFault, OSError) as error:
            self.log(f"another job of the same name would end this VM: {error}")
        else:
            resources.at_end.append(partial(runtime_dir.remove, claimed))
        resources.guardian = self.post_guardian(match, uuid)

    def record_end(
        self, resources: Resources, name: str, directory: str, cpu_seconds: Callable[[], float], sent: Sent
    ) -> None:
        """Register the record of the end of a VM that now runs, and its outputs. Raises `errors.Fault`."""
        resources.exit = ExitRecord(name, directory, cpu_seconds, resources.updates, self.identity, self.log)
        nothing, left_behind = sent
        if left_behind is not None:
            resources.luggage = OutputDirectory(directory, left_behind, self.identity, self.log)
            resources.when_over.append(resources.luggage.at_end)
        if nothing:
            resources.when_over.append(partial(empty_directory, directory, self.identity, self.log))

    def deadlines(self, usual: float) -> Deadlines:
        """Return the deadlines of a VM's calls; `usual` is the number of seconds for ordinary calls."""
        memory = max(LEAST_LONG_SECONDS, self.settings.integer("VM_GAHP_REQ_TIMEOUT"))
        return Deadlines(usual, memory, self.settings.integer("VM_STOP_TIMEOUT"))

    def _fault_for(self, error: OSError, job: JobAd) -> errors.Fault:
        """Return the fault for an error of a start: the job's if it can come from a file system of the job's.

        A job can mount one on its scratch directory, or on a directory there, that fails in every way.
        """
        name, directory = error.filename, job.working_dir()
        behind = job_user.resolved(directory)
        places = tuple(os.path.join(place, "") for place in (directory, behind))
        is_there = isinstance(name, str) and os.path.join(name, "").startswith(places)
        if is_there or (name is None and (error.errno in OF_FILES or job_user.is_mounted_on(behind))):
            problem = f"The start has failed at the job's scratch directory: {error}."
            return job_user.blame(error, directory, self.identity, problem)
        return errors.MachineFault(f"The machine is out of resources: {error}.", "see what is scarce.")

    def _restart(self, plan: Plan, job: JobAd) -> AnyMachine:
        """Carry out the plan, and retry once if the checkpoint failed by accident only. Raises as `_carry_out`.

        The retry may come late: libvirtd 11 takes up to half a minute to shut down, and a guest that boots afresh has
        lost its work. If the client gives up meanwhile, the server ends and the checkpoint stays as it is.
        """
        try:
            return self._carry_out(plan, job)
        except Unusable as unusable:
            if not unusable.by_accident or self._server_ends:
                raise
            self.log(f"{unusable.reason} The restart is tried once more.")
        return self._carry_out(plan, job)

    def _carry_out(self, plan: Plan, job: JobAd) -> AnyMachine:
        """Prepare, launch and keep the VM; on any exception remove everything of it."""
        resources = Resources(self.log, lambda: self._server_ends)
        machine: AnyMachine | None = None
        try:
            machine = self.prepare(plan, resources)
            self._starting = (*self._starting, machine)
            machine.step("prepare.done")
            self.launch(machine, plan)
            reached("launch.runs")
            self.keep(machine, plan)
            machine.started()
        except BaseException as error:
            with Budget():  # no time may be left for the start
                # Before the job unmounts anything.
                fault = self._fault_for(error, job) if isinstance(error, OSError) else None
                if machine is None:
                    resources.release()
                else:
                    machine.undo()
            if fault is not None:
                raise fault from error
            raise
        reached("keep.done")
        return machine
