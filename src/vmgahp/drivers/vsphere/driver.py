"""The driver that starts, finds and kills VMs on a vSphere server."""

import os
import time
import uuid as uuids
from collections.abc import Callable, Iterable

from vmgahp import errors
from vmgahp.checkpoint.files import Unusable
from vmgahp.config import Settings
from vmgahp.drivers.base import Logger, Survey
from vmgahp.drivers.lifecycle import reached
from vmgahp.drivers.managed import ManagedDriver
from vmgahp.drivers.resources import Resources
from vmgahp.drivers.vsphere import annotations, hardware
from vmgahp.drivers.vsphere.annotations import RUNS, SAVED, Tag
from vmgahp.drivers.vsphere.checkpoint import VsphereCheckpoints
from vmgahp.drivers.vsphere.config_spec import guest_id
from vmgahp.drivers.vsphere.connection import VsphereConnection
from vmgahp.drivers.vsphere.datastore import Store
from vmgahp.drivers.vsphere.disks import flat_extent
from vmgahp.drivers.vsphere.inventory import Inventory
from vmgahp.drivers.vsphere.machine import VsphereMachine, retire
from vmgahp.drivers.vsphere.survey import VsphereSurveyor
from vmgahp.drivers.vsphere.transport import VsphereContext, VspherePlan
from vmgahp.drivers.vsphere.vm import Tagged, find
from vmgahp.host.job_user import Identity
from vmgahp.host.runtime_dir import is_claimed
from vmgahp.host.starter import directory_of, is_one_job
from vmgahp.job.ad import JobAd
from vmgahp.job.vmware import VmwareSpec, look
from vmgahp.job.vmx_drives import DISK

START_EXTRA, RESERVE = 120, 60
"""Seconds that condor_starter waits longer for a START than for other requests, and those kept for after the upload.

The first is in ``VMGahpRequest`` in HTCondor's ``src/condor_starter.V6.1``.
"""


class VsphereDriver(ManagedDriver[VspherePlan, VsphereMachine]):
    """The driver of the VM type vsphere."""

    def __init__(self, vm_type: str, settings: Settings, identity: Identity, log: Logger) -> None:
        super().__init__(vm_type, settings, identity, log)
        self._connection = VsphereConnection(settings, log)
        self._inventory = Inventory(self._connection, settings)
        self._host = annotations.this_host()

    # A start

    def plan(self, job: JobAd) -> VspherePlan:
        end = time.monotonic() + self.settings.integer("VM_GAHP_REQ_TIMEOUT") + START_EXTRA - RESERVE
        spec = look(VmwareSpec.parse(job, self.settings), self.settings, self.identity)
        found = hardware.read(spec.vmx, spec.vmx_file)
        names = [device.file for device in found.of_kind(DISK)]
        extents = {name: flat_extent(name, spec, self.identity) for name in names}
        plan = VspherePlan(spec, found, extents, annotations.job_id(job), end)
        try:
            return plan._replace(manifest=self._checkpoints().store(spec.working_dir).load())
        except Unusable as unusable:
            return plan._replace(unusable=unusable)

    def show(self, plan: VspherePlan) -> str:
        spec, found = plan.spec, plan.hardware
        lines = [
            f"name      {annotations.entity_name(spec.name, 'xxxxxxxx')}",
            f"memory    {spec.memory_mib} MiB",
            f"CPUs      {spec.vcpus}",
            f"guest     {guest_id(found.guest)}",
            f"firmware  {'efi' if found.efi else 'bios'}{', secure boot' if found.secure_boot else ''}",
            f"network   {spec.networking_type or 'none'}",
        ]
        for device in found.devices:
            extent = plan.extents.get(device.file)
            note = "" if extent is None else ", flat" if extent else ", to be converted"
            lines.append(f"{device.place:9} {device.kind} {device.file} as {device.stored_as}{note}")
        lines += [f"left out  {name}" for name in found.left_out]
        return "\n".join(lines) + "\n"

    def clear(self, plan: VspherePlan) -> None:
        """Remove what earlier starts left of this job, of this directory or of one that is gone, and checkpoints
        whose time is over.

        A VM that another host looks after is left alone, even if it is this job's: a host that is cut off from its pool
        may still run it, and its own guardian ends it. So is one of this host's in another directory that a server
        looks after.
        """
        context = self._context()
        there = find(self._connection, context.place.folder)
        try:
            kept = self._checkpointed(plan, context, there)
        except Unusable:
            kept = None
        for found in there:
            if kept is None or found.tag.id != kept.tag.id:
                self._clear_one(plan, context, found)

    def prepare(self, plan: VspherePlan, resources: Resources) -> VsphereMachine:
        if plan.unusable is not None:
            raise plan.unusable
        spec, context = plan.spec, self._context()
        kept = None
        if plan.manifest is not None:
            kept = self._checkpointed(plan, context, find(self._connection, context.place.folder))
        uuid = kept.tag.id if kept else str(uuids.uuid4())
        tag = Tag(uuid, spec.name, plan.job, spec.working_dir, self._host, RUNS)
        self.claim(resources, spec.working_dir, uuid)
        reached("prepare.guarded")
        machine = VsphereMachine(plan, tag, context, resources, self.deadlines(self._connection.deadline))
        if kept is not None:
            machine.vm = kept.vm
        return machine

    def launch(self, machine: VsphereMachine, plan: VspherePlan) -> None:
        if plan.manifest is not None:
            machine.take_up(plan.manifest)
            return
        spec, left_out = plan.spec, plan.hardware.left_out
        network = None
        if spec.networking_type:
            network = self._inventory.network(machine.context.place.datacenter, spec.networking_type)
        if left_out:
            self.log(f"{spec.name} is without {', '.join(left_out)}")
        machine.vm = machine.transport.deploy(machine.tag, network)

    def keep(self, machine: VsphereMachine, plan: VspherePlan) -> None:
        spec = plan.spec
        machine.find_mac()
        self.record_end(machine.resources, spec.name, spec.working_dir, machine.cpu_seconds, spec.sent)
        self.log(f"started {spec.name} ({machine.uuid}) on {self._connection.access}")

    def without_checkpoint(self, plan: VspherePlan, unusable: Unusable) -> tuple[VspherePlan, Callable[[], None]]:
        # The guest's data is on the server; the disks that came with the job are as at its first start.
        store = self._checkpoints().store(plan.spec.working_dir)
        take_back = store.refuse(plan.spec.name, unusable, fresh_disks=True)
        return plan._replace(manifest=None, unusable=None), take_back

    # The contract

    def kill(self, match: str, uuid: str = "") -> bool:
        """Destroy a VM as `vmgahp.drivers.base.Driver.kill` says; also by the VM's name, which is for people.

        HTCondor names the scratch directory, and then a checkpoint stays. By its name a VM of this machine, or a
        checkpoint that waits for its job, is removed with all its files.
        """
        context = self._context()
        found = False
        for vm, tag in find(self._connection, context.place.folder):
            runs_here = tag.host == self._host and tag.state == RUNS
            if uuid and tag.id != uuid:
                continue
            if match.startswith("/") and runs_here and is_one_job(tag.directory, match):
                retire(context, vm, tag)
                found = True
            elif tag.name == match and (runs_here or tag.state == SAVED):
                vm.destroy(context.place.datacenter)
                found = True
        return found

    def survey(self, end: float) -> Survey:
        return VsphereSurveyor(self.vm_type, self.settings, self._connection, self._inventory).survey(end)

    def close(self) -> None:
        self._connection.close()

    # How it is done

    def _checkpointed(self, plan: VspherePlan, context: VsphereContext, there: Iterable[Tagged]) -> Tagged | None:
        """Return the VM of the job's checkpoint. Raises `Unusable`."""
        if plan.manifest is None:
            return None
        return context.checkpoints.match(plan.manifest, plan.spec, plan.job, there)

    def _clear_one(self, plan: VspherePlan, context: VsphereContext, found: Tagged) -> None:
        (vm, tag), here = found, os.path.normpath(plan.spec.working_dir)
        same_job = tag.job == plan.job
        if tag.host == self._host and tag.state == RUNS:
            path = os.path.normpath(tag.directory)
            if not (same_job or _has_ended(path, here)) or (path != here and is_claimed(tag.id)):
                return
            self.log(f"{tag.name} is still there from an earlier start: removing it")
        elif tag.state == SAVED and same_job:
            self.log(f"an older checkpoint of {tag.name} is on the server: removing it")
        elif tag.has_expired:
            self.log(f"the checkpoint of {tag.name} has waited for its job for too long: removing it")
        else:
            return
        # Other hosts may do the same at this moment, and a VM of another job must not make this one fail.
        try:
            if same_job or tag.state == SAVED:
                vm.destroy(context.place.datacenter)
            else:
                retire(context, vm, tag)
        except errors.Fault as fault:
            if same_job:
                raise
            self.log(f"{tag.name} cannot be removed: {fault.problem}")

    def _context(self) -> VsphereContext:
        place = self._inventory.place()
        store = Store(self._connection, place, self.log)
        return VsphereContext(self._connection, store, self._checkpoints(), place, self.log)

    def _checkpoints(self) -> VsphereCheckpoints:
        return VsphereCheckpoints(self.identity, self.settings.integer("VSPHERE_CHECKPOINT_DAYS"), self.log)


def _has_ended(path: str, here: str) -> bool:
    """Tell if the job of a scratch directory is over: the directory is `here` now, or no longer beside `here`."""
    beside = os.path.dirname(directory_of(path)) == os.path.dirname(directory_of(here))
    return path == here or (beside and not os.path.lexists(path))
