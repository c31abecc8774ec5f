"""The start of a VM, the same for every driver: five steps, and the clean-up after a failure."""

import errno
import os
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from vmgahp import errors
from vmgahp.checkpoint.files import Unusable
from vmgahp.drivers import lifecycle
from vmgahp.drivers.base import Driver, Machine
from vmgahp.drivers.lifecycle import ManagedMachine
from vmgahp.drivers.resources import Resources
from vmgahp.host import job_user
from vmgahp.host.budget import Budget
from vmgahp.job.ad import JobAd

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
            lifecycle.reached("plan.looked")
            self.clear(plan)
            lifecycle.reached("clear.done")
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
        """Return the plan without its unusable checkpoint, and a function to undo this. Raises `errors.JobFault`."""
        raise NotImplementedError

    def explain(self, job: JobAd, fault: errors.Fault) -> errors.Fault:
        """Return the fault of a start, worded for the job's owner."""
        return fault

    def _fault_for(self, error: OSError, job: JobAd) -> errors.Fault:
        """Return the fault for an error of a start: the job's if it can come from a file system of the job's.

        A job can mount one on its scratch directory, or on a directory there, that fails in every way.
        """
        name, directory = error.filename, os.path.join(job.working_dir(), "")
        is_there = isinstance(name, str) and os.path.join(name, "").startswith(directory)
        if is_there or (name is None and (error.errno in OF_FILES or job_user.is_mounted_on(directory))):
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
            lifecycle.reached("launch.runs")
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
        lifecycle.reached("keep.done")
        return machine
