"""Checkpoints of libvirt's domains: their manifest, and the check that a VM can restart from one.

The files and their checks are in `vmgahp.checkpoint.store`; this module adds what is specific to libvirt.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple
from xml.etree import ElementTree as etree

import libvirt

from vmgahp import errors
from vmgahp.checkpoint import memory_image, memory_image_xen, packed
from vmgahp.checkpoint.files import FileRef, Unusable
from vmgahp.checkpoint.manifest import (
    BACKING,
    DISK,
    MEMORY,
    UUID,
    WORD,
    CheckpointKind,
    Facts,
    Manifest,
    integer,
    matching,
    text,
    xml,
)
from vmgahp.checkpoint.store import CANNOT_SAVE, HINT, MEMORY_FILE, CheckpointStore
from vmgahp.domain.restore import SavedMismatch, reconcile
from vmgahp.drivers.base import Logger
from vmgahp.drivers.libvirt import faults, firmware
from vmgahp.drivers.libvirt.connection import LibvirtConnection
from vmgahp.host.job_user import Identity
from vmgahp.job.spec import Disk, JobSpec
from vmgahp.vm_types import HTCONDORS

if TYPE_CHECKING:
    from vmgahp.drivers.libvirt.machine import LibvirtMachine


def _differences(then: Facts, now: Facts) -> Iterator[str]:
    if then["domain_type"] != now["domain_type"]:
        made, here = _hypervisor(then["domain_type"]), _hypervisor(now["domain_type"])
        yield f"it was made under {made}, and VMs here run under {here}"
    if then["host_cpu"] and now["host_cpu"] and then["host_cpu"] != now["host_cpu"]:
        yield f"it was made on another CPU ({then['host_cpu']!a}; here: {now['host_cpu']})"
    # The stable releases of one series understand each other's images, both ways. An older libvirt is not refused:
    # libvirt itself reports what it cannot read.
    if then["qemu_version"] // 1000 > now["qemu_version"] // 1000:
        hypervisor = "Xen" if now["domain_type"] == "xen" else "QEMU"
        made, here = _version(then["qemu_version"]), _version(now["qemu_version"])
        yield f"it was made by {hypervisor} {made}, and here is {here}"


LIBVIRT = CheckpointKind(
    "libvirt",
    {
        "domain_type": matching(WORD),  # kvm or qemu: a guest saved under the one cannot be resumed under the other
        "uuid": matching(UUID),
        "libvirt_version": integer(0, 10**10),  # as libvirt counts: 9.1.2 is 9001002
        "qemu_version": integer(0, 10**10),
        # The identification of the host's CPU; empty if the guest does not see that CPU.
        "host_cpu": text(500, may_be_empty=True),
        "machine_type": matching(WORD),
        "architecture": matching(WORD),
        "xml": xml,  # the domain as it was saved
    },
    differences=_differences,
    memory=MEMORY_FILE,
    inspect=memory_image.inspect,
)
XEN = LIBVIRT._replace(driver="xen", inspect=memory_image_xen.inspect)


def disk_refs(disks: Iterable[Disk]) -> list[FileRef]:
    """Return the disks, each with its backing files."""
    refs = []
    for disk in disks:
        known_as = disk.image.known_as if disk.image and not disk.writable else ""
        refs.append(FileRef(DISK, disk.path, disk.device, disk.writable, disk.format, known_as))
        refs += [
            FileRef(BACKING, layer.path, disk.device, False, layer.format, layer.known_as) for layer in disk.backing
        ]
    return refs


class LibvirtRestart:
    """A checkpoint from which a VM may be restarted, and its open memory image; the caller closes it."""

    def __init__(self, manifest: Manifest, descriptor: int) -> None:
        self.manifest = manifest
        self.descriptor = descriptor

    def close(self) -> None:
        os.close(self.descriptor)

    def description(self, ours: str, uri: str) -> str:
        """Return the domain XML to restore with at `uri`.

        Raises `Unusable` if the saved domain is another than `ours`.
        """
        try:
            return firmware.of_a_restore(reconcile(self.manifest.facts["xml"], ours), self.manifest.facts["xml"], uri)
        except (SavedMismatch, LookupError) as mismatch:
            raise Unusable(
                f"the VM that was saved is not the one that the job asks for: {mismatch}", True
            ) from mismatch


class JobCheckpoints(NamedTuple):
    """The checkpoints of one job's VM."""

    every: LibvirtCheckpoints
    spec: JobSpec
    """The job under its own name (`vmgahp.drivers.libvirt.describe.Plan.checkpoint_spec`)."""
    domain_type: str

    @property
    def store(self) -> CheckpointStore:
        return self.every.store(self.spec)

    def write(self, machine: LibvirtMachine) -> None:
        self.every.write(machine, self.spec, self.domain_type)


class LibvirtCheckpoints:
    """The checkpoints of one driver's jobs: finds them and writes them."""

    def __init__(self, kind: CheckpointKind, identity: Identity, connection: LibvirtConnection, log: Logger) -> None:
        self._kind = kind
        self._identity = identity
        self._connection = connection
        self._log = log

    def store(self, spec: JobSpec) -> CheckpointStore:
        """Return the store for the checkpoint of a job."""
        return CheckpointStore(self._kind, self._identity, spec.working_dir, self._log)

    def find(self, spec: JobSpec, domain_type: str) -> LibvirtRestart | None:
        """Return the checkpoint in the job's scratch directory, regardless of the ad; None if there is none.

        Raises `Unusable`, and `errors.MachineFault`.
        """
        store = self.store(spec)
        store.forget_interrupted()
        manifest = store.load()
        if manifest is None:
            return None
        here = {
            "domain_type": domain_type,
            "host_cpu": self._host_cpu(domain_type),
            "qemu_version": self._connection.call(lambda connection: connection.getVersion()),
        }
        store.check(manifest, store.now(spec, here), disk_refs(spec.disks))
        if self._is_taken(manifest.facts["uuid"]):
            raise Unusable(f"a domain with its UUID, {manifest.facts['uuid']}, runs on this machine", True)
        restart = LibvirtRestart(manifest, store.open_memory(manifest, spec.memory_mib))
        try:
            self._require_program(restart.descriptor)
        except BaseException:
            restart.close()
            raise
        return restart

    def _require_program(self, descriptor: int) -> None:
        """Check that this machine can decompress the image. Raises `errors.JobFault` if not: another machine may."""
        form = getattr(self._kind.inspect(descriptor), "format", memory_image.RAW)
        if form == packed.ZSTD and not packed.has(form):
            raise errors.JobFault(
                errors.MISMATCHED_CHECKPOINT,
                f"The checkpoint's memory is compressed by {form}, which is not installed on this machine.",
                f'ask for stringListMember("{form}", VM_<type>_ATTR_memory_formats) in the job\'s requirements, or '
                f"install {form}; the checkpoint stays as it is.",
            )

    def write(self, machine: LibvirtMachine, spec: JobSpec, domain_type: str) -> None:
        """Write the manifest of the memory image that is in its place. Raises `errors.MachineFault`."""
        kind = etree.fromstring(machine.description).find("os/type")
        assert kind is not None
        store = self.store(spec)
        try:
            versions = self._connection.call(lambda connection: (connection.getLibVersion(), connection.getVersion()))
        except libvirt.libvirtError as error:
            raise errors.MachineFault(
                f"The checkpoint of {spec.name} cannot be completed: {error}.", HINT, CANNOT_SAVE
            ) from error
        facts = {
            "domain_type": domain_type,
            "uuid": machine.uuid,
            "libvirt_version": versions[0],
            "qemu_version": versions[1],
            "host_cpu": self._host_cpu(domain_type),
            "machine_type": kind.get("machine", ""),
            "architecture": kind.get("arch", ""),
            "xml": machine.description,
        }
        refs = [FileRef(MEMORY, MEMORY_FILE), *disk_refs(spec.disks)]
        store.write(store.now(spec, facts, machine.usage.seconds), refs)

    @staticmethod
    def why_not(spec: JobSpec) -> str:
        """Return the reason why a job's VM cannot be checkpointed; empty if it can."""
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
        """Return the host CPU that a guest of KVM depends on; empty for TCG, which emulates the same CPU everywhere."""
        if domain_type != "kvm":
            return ""
        capabilities = etree.fromstring(self._connection.call(lambda connection: connection.getCapabilities()))
        parts = [capabilities.findtext(f"host/cpu/{name}") or "" for name in ("arch", "vendor", "model")]
        features = sorted(element.get("name", "") for element in capabilities.iterfind("host/cpu/feature"))

        return " ".join([*parts, hashlib.sha256(" ".join(features).encode()).hexdigest()[:16]])


def _hypervisor(domain_type: str) -> str:
    return {"kvm": "KVM", "qemu": "emulation (TCG)", "xen": "Xen"}.get(domain_type, domain_type)


def _version(number: int) -> str:
    return f"{number // 1000000}.{number // 1000 % 1000}.{number % 1000}"
