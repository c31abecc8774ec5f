"""Takes, for each job, the first VM type of this machine that is proved and that can run it."""

import os
from _thread import allocate_lock
from collections.abc import Callable, Sequence
from time import monotonic
from typing import NamedTuple, TypeVar

from vmgahp import errors, findings, vm_types
from vmgahp.config import Settings
from vmgahp.drivers import base
from vmgahp.drivers.any import choice, compatibility, conversion, disks, surveys, vmx_writer
from vmgahp.drivers.any.compatibility import Compatibility
from vmgahp.drivers.any.disks import AnyDisk
from vmgahp.drivers.base import Driver, Logger, Machine, Survey
from vmgahp.drivers.machine_types import SETTING, machine_types
from vmgahp.errors import JobFault, MachineFault
from vmgahp.host.job_user import Identity
from vmgahp.job import accepted_types
from vmgahp.job.ad import JobAd, Plain
from vmgahp.job.disks import DISK
from vmgahp.job.options import Options
from vmgahp.job.vmware import VMX_FILE
from vmgahp.text import shown

_Result = TypeVar("_Result")

SURVEY = 20.0
"""Seconds for the proof of one type at a start; on a quiet machine it takes about one."""


class _Known(NamedTuple):
    """What is known of a job before a type is tried."""

    job: JobAd
    directory: str
    disks: tuple[AnyDisk, ...]
    earlier: choice.Choice
    fits: dict[str, Compatibility]
    """Types that can run it, in the order in which they are to be tried."""
    reasons: dict[str, str]
    """Types that cannot, and why."""


class AnyDriver(Driver):
    """VM type any, and every list of types."""

    def __init__(self, vm_type: str, settings: Settings, identity: Identity, log: Logger) -> None:
        super().__init__(vm_type, settings, identity, log)
        self._drivers: dict[str, Driver] = {}
        self._lock = allocate_lock()

    # The contract

    def start(self, job: JobAd) -> Machine:
        known = self._look_at(job)
        end = monotonic() + conversion.patience(self.settings)
        return self._first(known, lambda vm_type: self._start(known, vm_type, end))

    def describe(self, job: JobAd) -> str:
        known = self._look_at(job)

        def tell(vm_type: str) -> str:
            needed = known.fits[vm_type].conversions
            if needed or (vm_type in vm_types.VMWARE and known.job.expression(VMX_FILE) is None):
                converted = "".join(f"; {disk.name} as {target}" for disk, target in needed)
                return f"The job would run by {vm_type}{converted}.\n"
            ad = self._changed(known, vm_type, {})
            return f"By {vm_type}:\n{self._driver_for(vm_type).describe(ad)}"

        return self._first(known, tell)

    def kill(self, match: str, uuid: str = "") -> bool:
        """Ask every type's driver: the startd does not know which of them the job got."""
        found, trouble = False, None
        counts = self._may_have_it(match)
        for vm_type in machine_types(self.settings):
            if not match.startswith("/") and vm_type not in vm_types.LIBVIRT:
                continue  # those know VMs by their directories
            try:
                found |= self._driver_for(vm_type).kill(match, uuid)
            except errors.Fault as fault:
                self.log(f"{vm_type} cannot say whether it has the VM of {match}: {fault.problem}")
                if counts is None or vm_type == counts:
                    trouble = trouble or fault
        if trouble is not None and not found:
            raise trouble
        return found

    def _may_have_it(self, match: str) -> str | None:
        """The type whose silence counts, empty for none: the one that was written down; None for every one of them.

        A type that is not installed here cannot be asked either, and no job has run by it.
        """
        if not match.startswith("/") or not os.path.isdir(match):
            return None
        try:
            return choice.load(match, self.identity).vm_type
        except errors.Fault:
            return None

    def survey(self, end: float) -> Survey:
        try:
            types = machine_types(self.settings)
        except MachineFault as fault:
            return Survey([findings.judge("types", SETTING, fault, "")])
        return surveys.together(vm_types.ANY, surveys.surveys(types, self._driver_for, end))

    def close(self) -> None:
        for driver in self._drivers.values():
            driver.close()

    # What is known of the job

    def _look_at(self, job: JobAd) -> _Known:
        """Raises `JobFault` for what no type could make sense of, `MachineFault` for settings."""
        types = machine_types(self.settings)
        accepted = accepted_types.wanted(job)
        Options(job, others_know=bool(self.settings.xml_script()))
        for name in job.names(f"VM_{vm_types.ANY}_ATTR_"):
            raise JobFault(
                errors.MISMATCHED,
                f"{name} = {shown(job.expression(name))}: the job runs by another type than any.",
                "write it for all types, as VM_ATTR_<name>, or for one, as VM_<type>_ATTR_<name>.",
            )
        directory = job.working_dir()
        job.vm_name()  # raises for a job that no type could name
        earlier = choice.load(directory, self.identity)
        found = disks.read(job, earlier.images, self.identity)
        fits: dict[str, Compatibility] = {}
        reasons: dict[str, str] = {}
        for vm_type in types:
            if not accepted_types.takes(accepted, vm_type):
                reasons[vm_type] = "the job does not take it"
                continue
            fit = fits[vm_type] = compatibility.fit(vm_type, job, found, self.identity)
            if fit.reason:
                reasons[vm_type] = fit.reason
            elif fit.conversions and not self.settings.boolean("VM_ANY_CONVERT"):
                disk, target = fit.conversions[0]
                reasons[vm_type] = f"{shown(disk.entry)} would have to be {target}, and VM_ANY_CONVERT is false"
        order = [vm_type for vm_type in types if vm_type not in reasons]
        order.sort(key=lambda vm_type: bool(fits[vm_type].conversions))
        if earlier.vm_type:
            order = self._as_before(job, earlier.vm_type, order, fits, reasons)
        return _Known(job, directory, found, earlier, {vm_type: fits[vm_type] for vm_type in order}, reasons)

    def _as_before(
        self, job: JobAd, before: str, order: list[str], fits: dict[str, Compatibility], reasons: dict[str, str]
    ) -> list[str]:
        """A checkpoint is restored by the type that made it, with the images that it was made with."""
        if not job.boolean("JobVMCheckpoint"):
            return sorted(order, key=lambda vm_type: vm_type != before)
        if before not in order or fits[before].conversions:
            why = reasons.get(before) or (
                "its images are not there" if before in order else "this machine does not have it"
            )
            raise JobFault(
                errors.MISMATCHED_CHECKPOINT,
                f"The job has run by {shown(before)} before, and no other type can restore it; {why}.",
                f'require a machine that has it: stringListIMember("{before}", TARGET.VM_TYPES).'
                if before in vm_types.DRIVERS
                else f"submit the job anew, without {choice.FILE}.",
            )
        return [before]

    # The choice

    def _first(self, known: _Known, attempt: Callable[[str], _Result]) -> _Result:
        """What comes of the first type that is proved and that does not refuse the job."""
        refusals: dict[str, JobFault] = {}
        unproved: dict[str, str] = {}
        for vm_type in known.fits:
            why = self._why_not(vm_type)
            if why:
                self.log(f"VM type {vm_type} is not proved on this machine: {why}")
                unproved[vm_type] = why
                continue
            try:
                return attempt(vm_type)
            except JobFault as fault:
                self.log(f"VM type {vm_type} does not take the job: {fault.problem}")
                refusals[vm_type] = fault
        raise self._nothing_left(known, refusals, unproved)

    def _why_not(self, vm_type: str) -> str:
        """Why a type is not proved, as the probe would have it; empty where it is.

        A machine with one type has nothing to choose: what is wrong with that one, its driver says at the start.
        """
        if len(machine_types(self.settings)) == 1:
            return ""
        return surveys.why_not(self._surveys((vm_type,))[vm_type])

    def _surveys(self, types: tuple[str, ...]) -> dict[str, Survey]:
        made: list[Driver] = []

        def fresh(vm_type: str) -> Driver:
            # Of its own: a survey has less patience with a connection than a start.
            driver = self._new(vm_type)
            made.append(driver)
            return driver

        try:
            return surveys.surveys(types, fresh, monotonic() + SURVEY)
        finally:
            for driver in made:
                driver.close()

    def _nothing_left(self, known: _Known, refusals: dict[str, JobFault], unproved: dict[str, str]) -> errors.Fault:
        """Whose fault it is: the machine's only where not one of its types works."""
        types = machine_types(self.settings)
        if not refusals and unproved:
            others = self._surveys(tuple(vm_type for vm_type in types if vm_type not in unproved))
            if all(surveys.why_not(survey) for survey in others.values()):
                return MachineFault(
                    f"No VM type of this machine works: {_listed(unproved)}",
                    "see vmgahp doctor, which says what to do about each.",
                )
        reasons = known.reasons | unproved | {name: fault.problem for name, fault in refusals.items()}
        first = next(iter(refusals.values()), None)
        if first is not None and len(set(reasons.values())) == 1:
            return first
        hint = first.hint if first else "require a machine with the VM type that the job needs (VM_TYPES)."
        return JobFault(
            first.code if first else errors.MISMATCHED,
            f"No VM type of this machine can run the job: {_listed(dict(sorted(reasons.items(), key=_in(types))))}",
            hint,
        )

    # One type

    def _start(self, known: _Known, vm_type: str, end: float) -> Machine:
        made: dict[str, AnyDisk] = {}
        try:
            self._clear_leftover(known, vm_type)
            for disk, target in known.fits[vm_type].conversions:
                made[disk.path] = conversion.convert(disk, target, known.job, self.identity, self.log, end)
            ad = self._changed(known, vm_type, made)
            images = known.earlier.images | {
                disk.original: (made[disk.path].name, made[disk.path].format)
                for disk in known.disks
                if disk.path in made
            }
            choice.store(known.directory, self.identity, choice.Choice(vm_type, images))
            machine = self._driver_for(vm_type).start(ad)
        except BaseException:
            self._undo(known, vm_type, made)
            raise
        self.log(f"{machine.name} runs by {vm_type}, of {', '.join(known.fits)}")
        return machine

    def _clear_leftover(self, known: _Known, vm_type: str) -> None:
        """What an earlier server left behind by another type; of the same one its driver clears it away itself."""
        before = known.earlier.vm_type
        if before == vm_type or before not in machine_types(self.settings):
            return
        try:
            if self._driver_for(before).kill(known.directory):
                self.log(f"{known.job.vm_name()} still ran by {before} from an earlier start: it was destroyed")
        except errors.Fault as fault:
            # Where it is not proved now, it may not even be there to ask.
            self.log(f"{before} cannot say whether it still has the VM of an earlier start: {fault.problem}")

    def _changed(self, known: _Known, vm_type: str, made: dict[str, AnyDisk]) -> JobAd:
        """The job as the type's driver is to see it. Raises `JobFault`."""
        changes: dict[str, Plain | None] = {"JobVMType": vm_type}
        if known.disks:
            changes[DISK] = compatibility.as_they_would_be(known.disks, made)
        if vm_type in vm_types.VMWARE and known.job.expression(VMX_FILE) is None:
            now = [made.get(disk.path, disk) for disk in known.disks]
            choice.write(known.directory, vmx_writer.FILE, vmx_writer.describe(now).encode(), self.identity)
            changes |= vmx_writer.attributes(now)
        return known.job.changed(changes)

    def _undo(self, known: _Known, vm_type: str, made: dict[str, AnyDisk]) -> None:
        """A start that failed leaves the scratch directory as it was."""
        names = [disk.name for disk in made.values()]
        if vm_type in vm_types.VMWARE and known.job.expression(VMX_FILE) is None:
            names.append(vmx_writer.FILE)
        try:
            for name in names:
                self.identity.unlink_scratch(known.directory, name)
            if known.earlier.vm_type:
                choice.store(known.directory, self.identity, known.earlier)
            else:
                self.identity.unlink_scratch(known.directory, choice.FILE)
        except (OSError, errors.Fault) as error:
            self.log(f"a start failed, and what it has made cannot be removed: {error}")

    # The drivers

    def _driver_for(self, vm_type: str) -> Driver:
        with self._lock:
            if vm_type not in self._drivers:
                self._drivers[vm_type] = self._new(vm_type)
            return self._drivers[vm_type]

    def _new(self, vm_type: str) -> Driver:
        return base.find(vm_type)(vm_type, self.settings, self.identity, self.log)


def _listed(reasons: dict[str, str]) -> str:
    return " ".join(f"{vm_type}: {reason.rstrip('.')}." for vm_type, reason in reasons.items())


def _in(types: Sequence[str]) -> Callable[[tuple[str, str]], int]:
    return lambda pair: types.index(pair[0])
