"""Checkpoints of libvirt's domains: what is written of one, and whether a VM can restart from it.

The files and their checks are `vmgahp.checkpoint.store`'s; here is what only libvirt knows.
"""

import hashlib
import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple
from xml.etree import ElementTree as etree

import libvirt

from vmgahp import errors
from vmgahp.checkpoint import store
from vmgahp.checkpoint.files import Unusable
from vmgahp.checkpoint.manifest import Manifest
from vmgahp.drivers.base import Logger
from vmgahp.drivers.libvirt import faults, firmware
from vmgahp.drivers.libvirt.connection import LibvirtConnection
from vmgahp.drivers.libvirt.machine import LibvirtMachine
from vmgahp.drivers.libvirt.save import CANNOT_SAVE
from vmgahp.host.job_user import Identity
from vmgahp.images.backing import BackingFile
from vmgahp.job.spec import JobSpec
from vmgahp.vm_types import HTCONDORS

if TYPE_CHECKING:
    from vmgahp.drivers.libvirt.describe import Plan

Chains = Mapping[str, tuple[BackingFile, ...]]


class LibvirtRestart:
    """A checkpoint that a VM may be restarted from, and its open memory image; to be closed."""

    def __init__(self, manifest: Manifest, descriptor: int) -> None:
        self.manifest = manifest
        self.descriptor = descriptor

    def close(self) -> None:
        os.close(self.descriptor)

    def description(self, ours: str, uri: str) -> str:
        """The domain XML to restore with at `uri`. Raises `Unusable` where the saved domain is another than `ours`."""
        from vmgahp.domain.restore import SavedMismatch, reconcile

        try:
            return firmware.of_a_restore(reconcile(self.manifest.xml, ours), self.manifest.xml, uri)
        except (SavedMismatch, LookupError) as mismatch:
            raise Unusable(
                f"the VM that was saved is not the one that the job asks for: {mismatch}", True
            ) from mismatch


RESTARTING = f"{store.MANIFEST_FILE}.restarting"


class JobCheckpoints(NamedTuple):
    """The checkpoints of one job's VM."""

    every: "LibvirtCheckpoints"
    plan: "Plan"

    def set_aside(self) -> None:
        self.every.set_aside(self.plan.checkpoint_spec)

    def put_back(self) -> None:
        self.every.put_back(self.plan.checkpoint_spec)

    def used_up(self) -> None:
        self.every.used_up(self.plan.checkpoint_spec)

    def write(self, machine: LibvirtMachine) -> None:
        self.every.write(machine, self.plan.checkpoint_spec, self.plan.domain_type, self.plan.spec.chains)


class LibvirtCheckpoints:
    """Finds and makes the checkpoints of one driver's jobs."""

    def __init__(self, identity: Identity, connection: LibvirtConnection, log: Logger) -> None:
        self._identity = identity
        self._connection = connection
        self._log = log

    def find(self, spec: JobSpec, domain_type: str, chains: Chains) -> LibvirtRestart | None:
        """The checkpoint in the job's scratch directory, whatever the ad says of one; None where there is none.

        One that cannot be used is set aside (`refuse`).
        """
        try:
            manifest = store.load(self._identity, spec.working_dir)
            if manifest is None:
                return None
            descriptor = store.check(
                self._identity,
                spec.working_dir,
                manifest,
                name=spec.name,
                vm_type=spec.vm_type,
                domain_type=domain_type,
                host_cpu=self._host_cpu(domain_type),
                qemu_version=self._connection.call(lambda connection: connection.getVersion()),
                memory_mib=spec.memory_mib,
                disks=spec.disks,
                chains=chains,
            )
            if self._is_taken(manifest.uuid):
                os.close(descriptor)
                raise Unusable(f"a domain with its UUID, {manifest.uuid}, runs on this machine", True)
        except Unusable as unusable:
            self.refuse(spec, unusable)
            return None
        return LibvirtRestart(manifest, descriptor)

    def refuse(self, spec: JobSpec, unusable: Unusable) -> None:
        """Set a checkpoint aside and say why.

        Raises `errors.JobFault` where the disks are not known to be as they were: a guest that boots on them
        may find anything, and its owner has to decide.
        """
        try:
            kept = store.set_aside(self._identity, spec.working_dir)
        except (OSError, errors.Fault) as error:
            kept = []
            self._log(f"the checkpoint of {spec.name} cannot be set aside: {error}")
        problem = f"The checkpoint of {spec.name} cannot be used: {unusable.reason}"
        if not unusable.disks_intact:
            raise errors.JobFault(
                errors.MISMATCHED_CHECKPOINT,
                problem,
                "submit the job again with disks that are in order; the checkpoint's files end in .refused.",
            )
        self._log(f"{problem} It is kept as {', '.join(kept) or 'it was'}; the guest boots afresh.")

    def set_aside(self, spec: JobSpec) -> None:
        """The guest is about to run: from now on the checkpoint is none. Raises `errors.MachineFault`."""
        try:
            self._identity.rename_scratch(spec.working_dir, store.MANIFEST_FILE, RESTARTING)
        except OSError as error:
            raise errors.MachineFault(
                f"The checkpoint of {spec.name} cannot be set aside: {error.strerror}."
            ) from error

    def put_back(self, spec: JobSpec) -> None:
        """The guest has not run after all."""
        try:
            self._identity.rename_scratch(spec.working_dir, RESTARTING, store.MANIFEST_FILE)
        except FileNotFoundError:
            pass  # it was not set aside
        except (OSError, errors.Fault) as error:
            self._log(f"the checkpoint of {spec.name} stays aside: {error}")

    def used_up(self, spec: JobSpec) -> None:
        """The guest continues and its disks change: the checkpoint in the scratch directory is no longer valid."""
        try:
            store.discard(self._identity, spec.working_dir)
            self._identity.unlink_scratch(spec.working_dir, RESTARTING)
        except (OSError, errors.Fault) as error:
            self._log(f"the used checkpoint of {spec.name} cannot be removed: {error}")

    def write(self, machine: LibvirtMachine, spec: JobSpec, domain_type: str, chains: Chains) -> None:
        """Write the manifest of the memory image that is in its place. Raises `errors.MachineFault`."""
        from vmgahp.checkpoint.manifest import Manifest

        kind = etree.fromstring(machine.description).find("os/type")
        assert kind is not None
        try:
            versions = self._connection.call(lambda connection: (connection.getLibVersion(), connection.getVersion()))
            store.write(
                self._identity,
                spec.working_dir,
                Manifest(
                    name=spec.name,
                    vm_type=spec.vm_type,
                    domain_type=domain_type,
                    uuid=machine.uuid,
                    libvirt_version=versions[0],
                    qemu_version=versions[1],
                    host_cpu=self._host_cpu(domain_type),
                    machine_type=kind.get("machine", ""),
                    architecture=kind.get("arch", ""),
                    xml=machine.description,
                    cpu_seconds=machine.usage.seconds,
                    time=time.time(),
                    disks=store.describe_disks(self._identity, spec.working_dir, spec.disks, chains),
                    memory=store.describe_memory(self._identity, spec.working_dir),
                ),
            )
        except (OSError, Unusable, libvirt.libvirtError) as error:
            raise errors.MachineFault(
                f"The checkpoint of {spec.name} cannot be completed: {error}.",
                "look at the file system of the scratch directory; the VM still runs.",
                CANNOT_SAVE,
            ) from error

    @staticmethod
    def why_not(spec: JobSpec) -> str:
        """Why a job's VM cannot be checkpointed; empty where it can."""
        if not spec.checkpoint:
            return "the job does not ask for it with vm_checkpoint"
        if spec.vm_type in HTCONDORS:
            return ""
        shared = [disk.path for disk in spec.disks if disk.writable and not disk.transferred]
        if shared:
            # The VM may continue after a checkpoint of this type, and its memory would no longer fit the disk.
            return (
                f"{shared[0]} is not transferred with the job, and would change after a periodic checkpoint; "
                "transfer it, or use vm_type = kvm, which has no periodic ones"
            )
        return ""

    def _is_taken(self, uuid: str) -> bool:
        try:
            self._connection.call(lambda connection: connection.lookupByUUIDString(uuid))
        except libvirt.libvirtError as error:
            if faults.is_no_domain(error):
                return False
            raise faults.from_libvirt(error, "looking for a domain") from error
        return True

    def _host_cpu(self, domain_type: str) -> str:
        """What a guest of KVM depends on; TCG emulates the same CPU everywhere."""
        if domain_type != "kvm":
            return ""
        capabilities = etree.fromstring(self._connection.call(lambda connection: connection.getCapabilities()))
        parts = [capabilities.findtext(f"host/cpu/{name}") or "" for name in ("arch", "vendor", "model")]
        features = sorted(element.get("name", "") for element in capabilities.iterfind("host/cpu/feature"))
        return " ".join([*parts, hashlib.sha256(" ".join(features).encode()).hexdigest()[:16]])
