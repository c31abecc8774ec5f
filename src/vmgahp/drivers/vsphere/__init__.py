"""The VM type vsphere: jobs for VMware on an ESXi host or a vCenter, through the vSphere API.

`connection` reaches the server, `inventory` finds its objects and moves files, `hardware` describes a job's VM, and
`machine` is one of them.
"""

from __future__ import annotations

import os
import uuid as uuids
from collections.abc import Callable, Iterable
from functools import partial
from time import monotonic

from pyVmomi import vim

from vmgahp import errors, findings
from vmgahp.checkpoint.store import CheckpointStore, Unusable
from vmgahp.config import Settings
from vmgahp.drivers.base import Survey
from vmgahp.drivers.managed import ManagedDriver, reached
from vmgahp.drivers.resources import Resources
from vmgahp.drivers.surveyor import Logger
from vmgahp.drivers.vsphere import hardware, inventory
from vmgahp.drivers.vsphere.connection import VsphereConnection
from vmgahp.drivers.vsphere.inventory import MIB, RUNS, SAVED, Inventory, Store, Tag, Tagged, find_tagged, this_host
from vmgahp.drivers.vsphere.machine import KIND, VsphereContext, VsphereMachine, VspherePlan, flat_extent
from vmgahp.findings import BAD, OFF, OK, Finding
from vmgahp.host.job_user import Identity
from vmgahp.host.runtime_dir import is_claimed
from vmgahp.host.starter import directory_of, is_one_job
from vmgahp.job.ad import JobAd
from vmgahp.job.spec import require_snapshot
from vmgahp.job.vmware import NETWORKING_TYPES, VMX_FILE, VmwareSpec, look
from vmgahp.job.vmx import DISK
from vmgahp.text import shown

LEAST_ROOM = 1 << 30
"""The free bytes below which no job's disks would fit into the datastore."""

OBJECT_STORES = {"vsan": "vSAN", "vvol": "vVols"}
"""The kinds of datastores whose disks are objects of the storage, by the server's word in lower case."""

START_EXTRA, RESERVE = 120, 60
"""Seconds that condor_starter waits longer for a START than for other requests (``VMGahpRequest`` in HTCondor's
``src/condor_starter.V6.1``), and those kept for after the upload."""


class VsphereDriver(ManagedDriver[VspherePlan, VsphereMachine]):
    """The driver of the VM type vsphere."""

    def __init__(self, vm_type: str, settings: Settings, identity: Identity, log: Logger) -> None:
        super().__init__(vm_type, settings, identity, log)
        self._connection = VsphereConnection(settings, log)
        self._inventory = Inventory(self._connection, settings)
        self._host = this_host()

    def plan(self, job: JobAd) -> VspherePlan:
        end = monotonic() + self.settings.integer("VM_GAHP_REQ_TIMEOUT") + START_EXTRA - RESERVE
        spec = look(VmwareSpec.parse(job, self.settings), self.settings, self.identity)
        found = hardware.read_hardware(spec.vmx, spec.vmx_file)
        if spec.vm.checkpoint:
            independent = [disk.place for disk in found.of_kind(DISK) if not disk.persistent]
            require_snapshot(f"{VMX_FILE} = {shown(spec.vmx_file)}", independent)
        extents = {disk.file: flat_extent(disk.file, spec, self.identity) for disk in found.of_kind(DISK)}
        store = CheckpointStore(KIND, self.identity, spec.vm.working_dir, self.log)
        plan = VspherePlan(spec, found, extents, (job.string("GlobalJobId") or job.vm_name())[:500], end, store)
        try:
            return plan._replace(manifest=store.load())
        except Unusable as unusable:
            return plan._replace(unusable=unusable)

    def show(self, plan: VspherePlan) -> str:
        spec, found = plan.spec, plan.hardware
        lines = [
            f"name      {inventory.entity_name(spec.vm.name, 'xxxxxxxx')}",
            f"memory    {spec.vm.memory_mib} MiB",
            f"CPUs      {spec.vm.vcpus}",
            f"guest     {hardware.guest_id(found.guest)}",
            f"firmware  {'efi' if found.efi else 'bios'}{', secure boot' if found.secure_boot else ''}",
            f"network   {spec.vm.networking_type or 'none'}",
        ]
        for device in found.devices:
            extent = plan.extents.get(device.file)
            note = "" if extent is None else ", flat" if extent else ", to be converted"
            lines.append(f"{device.place:9} {device.kind} {device.file} as {device.stored_as}{note}")
        lines += [f"left out  {name}" for name in found.left_out]
        return "\n".join(lines) + "\n"

    def clear(self, plan: VspherePlan) -> None:
        """Remove leftovers of this job, of this directory or of one that is gone, and expired checkpoints.

        Left alone are VMs of other hosts, even this job's, since a host that is cut off from its pool may still run it,
        and its own guardian ends it; and those of this host in other directories that a server looks after.
        """
        context = self._context()
        there = find_tagged(self._connection, context.place.folder)
        try:
            kept = self._checkpointed(plan, there)
        except Unusable:
            kept = None
        for found in there:
            if kept is None or found.tag.id != kept.tag.id:
                self._clear_one(plan, context, found)

    def prepare(self, plan: VspherePlan, resources: Resources) -> VsphereMachine:
        if plan.unusable is not None:
            raise plan.unusable
        spec, context = plan.spec, self._context()
        kept = self._checkpointed(plan, find_tagged(self._connection, context.place.folder) if plan.manifest else ())
        uuid = kept.tag.id if kept else str(uuids.uuid4())
        tag = Tag(uuid, spec.vm.name, plan.job, spec.vm.working_dir, self._host, RUNS)
        self.claim(resources, spec.vm.working_dir, uuid)
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
        if spec.vm.networking_type:
            network = self._inventory.network(machine.context.place.datacenter, spec.vm.networking_type)
        if left_out:
            self.log(f"{spec.vm.name} is without {', '.join(left_out)}")
        machine.vm = machine.transport.deploy(machine.tag, network)

    def keep(self, machine: VsphereMachine, plan: VspherePlan) -> None:
        spec = plan.spec
        machine.find_mac()
        self.record_end(machine.resources, spec.vm.name, spec.vm.working_dir, machine.cpu_seconds, spec.vm.sent)
        self.log(f"started {spec.vm.name} ({machine.tag.id}) on {self._connection.access}")

    def without_checkpoint(self, plan: VspherePlan, unusable: Unusable) -> tuple[VspherePlan, Callable[[], None]]:
        # The guest's data is on the server; the disks that came with the job are as at its first start.
        take_back = plan.checkpoint.refuse(plan.spec.vm.name, unusable, fresh_disks=True)
        return plan._replace(manifest=None, unusable=None), take_back

    def kill(self, match: str, uuid: str = "") -> bool:
        """Destroy a VM as `vmgahp.drivers.base.Driver.kill` says; also by the VM's name, which is for people.

        HTCondor names the scratch directory, and then a checkpoint stays. By its name a VM of this machine, or a
        checkpoint that waits for its job, is removed with all its files.
        """
        context = self._context()
        found = False
        for vm, tag in find_tagged(self._connection, context.place.folder):
            runs_here = tag.host == self._host and tag.state == RUNS
            if uuid and tag.id != uuid:
                continue
            if match.startswith("/") and runs_here and is_one_job(tag.directory, match):
                context.retire(vm, tag)
                found = True
            elif tag.name == match and (runs_here or tag.state == SAVED):
                vm.destroy(context.place.datacenter)
                found = True
        return found

    def close(self) -> None:
        self._connection.close()

    def _checkpointed(self, plan: VspherePlan, there: Iterable[Tagged]) -> Tagged | None:
        manifest = plan.manifest
        if manifest is None:
            return None
        found = next((vm for vm in there if vm.tag.id == manifest.facts["id"]), None)
        if found is None:
            where = manifest.facts["server"]
            raise Unusable(f"its VM is not on this server; it was made on {where}, and may have expired.", True)
        if found.tag.job != plan.job or found.tag.name != plan.spec.vm.name:
            raise Unusable("it is another job's.", True)
        plan.checkpoint.check(manifest, plan.checkpoint.now(plan.spec.vm, {"snapshot": found.tag.checkpoint}), ())
        return found

    def _clear_one(self, plan: VspherePlan, context: VsphereContext, found: Tagged) -> None:
        (vm, tag), here = found, os.path.normpath(plan.spec.vm.working_dir)
        same_job = tag.job == plan.job
        if tag.host == self._host and tag.state == RUNS:
            path = os.path.normpath(tag.directory)
            # A running job's directory may be a file system that never answers.
            if (path != here and is_claimed(tag.id)) or not (same_job or _has_ended(path, here)):
                return
            self.log(f"{tag.name} is still there from an earlier start: removing it")
        elif tag.state == SAVED and same_job:
            self.log(f"an older checkpoint of {tag.name} is on the server: removing it")
        elif tag.has_expired(self._connection.now):
            self.log(f"the checkpoint of {tag.name} has waited for its job for too long: removing it")
        else:
            return
        # Other hosts may do the same at this moment, and a VM of another job must not make this one fail.
        try:
            if same_job or tag.state == SAVED:
                vm.destroy(context.place.datacenter)
            else:
                context.retire(vm, tag)
        except errors.Fault as fault:
            if same_job:
                raise
            self.log(f"{tag.name} cannot be removed: {fault.problem}")

    def _context(self) -> VsphereContext:
        place, days = self._inventory.place(), self.settings.integer("VSPHERE_CHECKPOINT_DAYS")
        files = Store(self._connection, place, self.log)
        return VsphereContext(self._connection, place, files, self.identity, days, self.log)

    # The survey

    def survey(self, end: float) -> Survey:
        # The login first, then the checks that need it.
        left = max(0.5, end - monotonic())
        self._connection.deadline = self._connection.timeout = left / 2
        where = self.settings.string("VSPHERE_HOST") or "VSPHERE_HOST"
        checked = f"the vSphere server {where}"
        asked = findings.side_by_side({"vsphere": self._ask}, monotonic() + left * 0.6)["vsphere"]
        if not isinstance(asked, tuple):
            return Survey([findings.judge("vsphere", checked, asked, "")])
        about, datacenter, path = asked
        said = f"{about.fullName} lets us in, and has the data center {path}"
        found = [Finding("vsphere", OK, checked, said), self._tls()]
        wanted = self.settings.networking_types(NETWORKING_TYPES, own_bridge=True)
        networks = {f"network {kind}": kind for kind in wanted}
        checks: dict[str, Callable[[], object]] = {
            "datastore": lambda: self._datastore(datacenter),
            "resource pool": lambda: self._pool(path),
            "folder": lambda: self._folder(path),
        }
        checks |= {name: partial(self._network, datacenter, kind) for name, kind in networks.items()}
        for name, outcome in findings.side_by_side(checks, end).items():
            setting = "NETWORK_MAP" if name in networks else name.upper().replace(" ", "_")
            trouble = OFF if name in networks else BAD
            found.append(findings.judge(name, f"the {name} of VSPHERE_{setting}", outcome, str(outcome), trouble))
        networking = [networks[one.check] for one in found if one.check in networks and one.verdict == OK]
        self._connection.timeout = max(0.1, end - monotonic())
        self._connection.close()
        return Survey(
            found,
            attributes={
                "product": str(about.fullName),
                "version": str(about.version),
                "kind": "vcenter" if about.apiType == "VirtualCenter" else "esxi",
                "suspend": True,
                "soft_suspend": False,
                "checkpoint": True,
                "snapshot": True,
                "networking": ",".join(networking),
            },
            networking=networking,
            hypervisors=[self.vm_type],
            vm_types=[self.vm_type],
        )

    def _ask(self) -> tuple[vim.AboutInfo, vim.Datacenter, str]:
        about = self._connection.call(lambda content: content.about, "asking the server who it is")
        return about, *self._inventory.datacenter()

    def _tls(self) -> Finding:
        checked = "how the server proves who it is"
        if self.settings.string("VSPHERE_TLS_PIN"):
            return Finding("tls", OK, checked, "by its own certificate, in VSPHERE_TLS_PIN")
        if self.settings.boolean("VSPHERE_TLS_VERIFY"):
            return Finding("tls", OK, checked, "by an authority that this machine trusts")
        seen = "VSPHERE_TLS_VERIFY is off: whoever answers in the server's place gets the password."
        return Finding("tls", OFF, checked, seen, "save the server's certificate as the file of VSPHERE_TLS_PIN.")

    def _datastore(self, datacenter: vim.Datacenter) -> str:
        ref, name = self._inventory.datastore(datacenter)
        seen = self._connection.properties(ref, "summary.accessible", "summary.freeSpace", "summary.type")
        free = seen.get("summary.freeSpace")
        if seen.get("summary.accessible") is False:
            raise errors.MachineFault(f"The server cannot reach its datastore {name}.", "look at the server's storage.")
        if free is not None and free < LEAST_ROOM:
            problem = f"The datastore {name} has room for {free // MIB} MiB, too little for any job's disks."
            raise errors.MachineFault(problem, "free disk space on it.")
        room = f"{name} has room for {'unknown' if free is None else free // MIB} MiB"
        kind = OBJECT_STORES.get(str(seen.get("summary.type")).lower())
        # Not tested: whether an ESXi host runs a disk's file there, where VMware's own disks are not files.
        return f"{room}; it is {kind}, whose disks are no files, and was never tried" if kind else room

    def _pool(self, path: str) -> str:
        unreserved = "runtime.memory.unreservedForVm"
        seen = self._connection.properties(self._inventory.pool(path), "name", unreserved)
        memory, free = self.settings.integer("VM_MEMORY"), (seen.get(unreserved) or 0) // MIB
        if not free:
            return f"{seen.get('name')} is there"
        note = "" if free >= memory else f", less than VM_MEMORY = {memory} MiB"
        return f"{seen.get('name')} has {free} MiB that is not reserved{note}"

    def _folder(self, path: str) -> str:
        there = [tag for _, tag in find_tagged(self._connection, self._inventory.folder(path))]
        here = sum(tag.host == this_host() for tag in there)
        saved = sum(tag.state == SAVED for tag in there)
        return f"it has {len(there)} VMs of jobs, {here} of this machine and {saved} checkpoints"

    def _network(self, datacenter: vim.Datacenter, kind: str) -> str:
        self._inventory.network(datacenter, kind)
        return f"{inventory.network_map(self.settings)[kind]} is there"


def _has_ended(path: str, here: str) -> bool:
    """Tell if the job of a scratch directory is over: the directory is `here` now, or no longer beside `here`."""
    beside = os.path.dirname(directory_of(path)) == os.path.dirname(directory_of(here))
    return path == here or (beside and not os.path.lexists(path))
