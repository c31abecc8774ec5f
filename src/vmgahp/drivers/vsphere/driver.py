"""Starts, finds and kills VMs on a vSphere server."""

import os
import time
import uuid as uuids
from collections.abc import Iterable

from vmgahp import errors
from vmgahp.checkpoint.manifest import Manifest
from vmgahp.config import Settings
from vmgahp.drivers.base import Driver, Logger, Machine, Survey
from vmgahp.drivers.resources import Resources
from vmgahp.drivers.vsphere import annotations, power
from vmgahp.drivers.vsphere import machine as machines
from vmgahp.drivers.vsphere.annotations import Tag, Tagged
from vmgahp.drivers.vsphere.checkpoint import VsphereCheckpoints
from vmgahp.drivers.vsphere.config_spec import guest_id
from vmgahp.drivers.vsphere.connection import VsphereConnection
from vmgahp.drivers.vsphere.datastore import Store
from vmgahp.drivers.vsphere.deploy import Deployment, Launcher, store_name
from vmgahp.drivers.vsphere.download import Download
from vmgahp.drivers.vsphere.inventory import Inventory, Placement
from vmgahp.drivers.vsphere.machine import VsphereContext, VsphereMachine
from vmgahp.drivers.vsphere.survey import VsphereSurveyor
from vmgahp.host.job_user import Identity
from vmgahp.job.ad import JobAd
from vmgahp.job.vmware import VmwareSpec, look

START_EXTRA, RESERVE = 120, 60
"""Seconds that condor_starter waits longer for a START than for other requests (``VMGahpRequest`` in
HTCondor's ``src/condor_starter.V6.1``), and those kept of the whole for what comes after the upload."""


class VsphereDriver(Driver):
    """VM type vsphere."""

    def __init__(self, vm_type: str, settings: Settings, identity: Identity, log: Logger) -> None:
        super().__init__(vm_type, settings, identity, log)
        self._connection = VsphereConnection(settings, log)
        self._inventory = Inventory(self._connection, settings)
        self._host = annotations.this_host()

    # The contract

    def start(self, job: JobAd) -> Machine:
        end = time.monotonic() + self.settings.integer("VM_GAHP_REQ_TIMEOUT") + START_EXTRA - RESERVE
        spec = look(VmwareSpec.parse(job, self.settings), self.identity)
        deployment = Deployment.of(spec, self.identity)
        place = self._inventory.place()
        checkpoints = self._checkpoints()
        there = annotations.find(self._connection, place.folder)
        restart = checkpoints.find(spec, annotations.job_id(job), there)
        kept = restart[0].tag.id if restart else ""
        self._clear(job, spec, place, [vm for vm in there if vm.tag.id != kept])
        tag = Tag(
            kept or str(uuids.uuid4()),
            spec.name,
            annotations.job_id(job),
            spec.working_dir,
            self._host,
            annotations.RUNS,
        )
        context = self._context(deployment, place, tag)
        try:
            vm = (
                self._take_up(deployment, context, restart, tag)
                if restart
                else self._launch(deployment, place, context, tag, end)
            )
            vm.find_mac()
        except BaseException:
            self._tidy(context, place, tag)
            raise
        self.record_end(context.resources, spec.name, spec.working_dir, lambda: vm.cpu_seconds, spec.no_output_vm)
        self.log(f"started {spec.name} ({tag.id}) on {self._connection.access}")
        return vm

    def describe(self, job: JobAd) -> str:
        spec = look(VmwareSpec.parse(job, self.settings), self.identity)
        deployment = Deployment.of(spec, self.identity)
        lines = [
            f"name      {annotations.entity_name(spec.name, 'xxxxxxxx')}",
            f"memory    {spec.memory_mib} MiB",
            f"CPUs      {spec.vcpus}",
            f"guest     {guest_id(deployment.hardware.guest)}",
            f"firmware  {'efi' if deployment.hardware.efi else 'bios'}",
            f"network   {spec.networking_type or 'none'}",
        ]
        for device in deployment.hardware.devices:
            disk = deployment.disks.get(device.file)
            note = "" if disk is None else ", flat" if disk.extent else ", to be converted"
            lines.append(f"{device.place:9} {device.kind} {device.file} as {store_name(device)}{note}")
        lines += [f"left out  {name}" for name in deployment.hardware.left_out]
        return "\n".join(lines) + "\n"

    def kill(self, match: str, uuid: str = "") -> bool:
        """See `vmgahp.drivers.base.Driver.kill`; also by the VM's name, which is for people.

        HTCondor names the scratch directory, and then a checkpoint stays. By its name a VM of this machine, or
        a checkpoint that waits for its job, is removed with all that there is of it.
        """
        place = self._inventory.place()
        context = self._bare_context(place)
        found = False
        for there in annotations.find(self._connection, place.folder):
            tag = there.tag
            if uuid and tag.id != uuid:
                continue
            runs_here = tag.host == self._host and tag.state == annotations.RUNS
            if match.startswith("/"):
                if not runs_here or os.path.normpath(tag.directory) != os.path.normpath(match):
                    continue
                machines.retire(context, there.ref, tag)
            else:
                if tag.name != match or not (runs_here or tag.state == annotations.SAVED):
                    continue
                power.destroy(self._connection, there.ref, place.datacenter)
            found = True
        return found

    def survey(self, end: float) -> Survey:
        return VsphereSurveyor(self.vm_type, self.settings, self._connection, self._inventory).survey(end)

    def close(self) -> None:
        self._connection.close()

    # A start

    def _launch(
        self, deployment: Deployment, place: Placement, context: VsphereContext, tag: Tag, end: float
    ) -> VsphereMachine:
        spec = deployment.spec
        network = None
        if spec.networking_type:
            network = self._inventory.network(place.datacenter, spec.networking_type)
        if deployment.hardware.left_out:
            self.log(f"{spec.name} gets no {', '.join(deployment.hardware.left_out)}: not on a server")
        launcher = Launcher(self._connection, place, context.store, self.identity, self.log)
        return VsphereMachine(launcher.launch(deployment, tag, network, end), tag, spec, context)

    def _take_up(
        self, deployment: Deployment, context: VsphereContext, restart: tuple[Tagged, Manifest], tag: Tag
    ) -> VsphereMachine:
        """Restore the job's guest. Where that fails the checkpoint stays, for another day or machine."""
        there, manifest = restart
        snapshot = manifest.facts["snapshot"]
        tag = tag._replace(checkpoint=snapshot)
        annotations.write(self._connection, there.ref, tag)
        power.off(self._connection, there.ref, f"powering {tag.name} off")
        context.checkpoints.go_on(there.ref, snapshot, tag.name)
        vm = VsphereMachine(there.ref, tag, deployment.spec, context)
        vm.cpu_seconds = manifest.cpu_seconds
        self.log(f"{tag.name} is restored from its checkpoint {snapshot}")
        return vm

    def _clear(self, job: JobAd, spec: VmwareSpec, place: Placement, there: Iterable[Tagged]) -> None:
        """Remove what earlier starts left of this job, of this directory or of one that is gone, and checkpoints
        whose time is over.

        A VM that another host looks after is left alone, even if it is this job's: a host that is cut off from
        its pool may still run it, and its own guardian ends it.
        """
        here = os.path.normpath(spec.working_dir)
        for found in there:
            tag = found.tag
            same_job = tag.job == annotations.job_id(job)
            leftover = tag.host == self._host and (same_job or _has_ended(tag.directory, here))
            if leftover and tag.state == annotations.RUNS:
                self.log(f"{tag.name} is still there from an earlier start: removing it")
            elif tag.state == annotations.SAVED and same_job:
                self.log(f"an older checkpoint of {tag.name} is on the server: removing it")
            elif annotations.expired(tag):
                self.log(f"the checkpoint of {tag.name} has waited for its job for too long: removing it")
            else:
                continue
            # Others may be at it at the same moment, and what is not this job's must not fail it.
            try:
                if same_job or tag.state == annotations.SAVED:
                    power.destroy(self._connection, found.ref, place.datacenter)
                else:
                    machines.retire(self._bare_context(place), found.ref, tag)
            except errors.Fault as fault:
                if same_job:
                    raise
                self.log(f"{tag.name} cannot be removed: {fault.problem}")

    def _tidy(self, context: VsphereContext, place: Placement, tag: Tag) -> None:
        """A start failed: leave nothing behind. What cannot be removed now is the guardian's."""
        try:
            for found in annotations.find(self._connection, place.folder):
                if found.tag.id == tag.id and found.tag.host == self._host:
                    machines.retire(context, found.ref, found.tag)
        except errors.Fault as fault:
            self.log(f"what was made of {tag.name} cannot be removed now: {fault.problem}")
        else:
            context.resources.release()

    def _context(self, deployment: Deployment, place: Placement, tag: Tag) -> VsphereContext:
        context = self._bare_context(place)
        download = Download(self._connection, context.store, deployment, self.identity, self.log)
        try:
            context.resources.guardian = self.post_guardian(tag.directory, tag.id)
        except OSError as error:
            raise errors.MachineFault(f"The machine is out of resources: {error}.") from error
        return context._replace(download=download)

    def _bare_context(self, place: Placement) -> VsphereContext:
        return VsphereContext(
            self._connection,
            Store(self._connection, place, self.log),
            self._checkpoints(),
            place.datacenter,
            self.settings.integer("VM_STOP_TIMEOUT"),
            Resources(self.log),
            self.log,
        )

    def _checkpoints(self) -> VsphereCheckpoints:
        days = self.settings.integer("VSPHERE_CHECKPOINT_DAYS")
        return VsphereCheckpoints(self._connection, self.identity, days, self.log)


def _has_ended(directory: str, here: str) -> bool:
    """Whether the job of a scratch directory is over: it is `here` now, or it is gone from beside `here`."""
    path = os.path.normpath(directory)
    return path == here or (os.path.dirname(path) == os.path.dirname(here) and not os.path.lexists(path))
