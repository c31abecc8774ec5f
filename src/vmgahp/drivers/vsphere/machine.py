"""One VM on a vSphere server: its files' way there and back, its life, and its checkpoints.

A datastore wants a disk as two files, a descriptor and an extent with the plain content (``-flat``): an ESXi host does
not run the growing or split files that the desktop products write. So only the plain content travels; a disk that is
not flat is converted by ``qemu-img``, there and back, with the rights of the job's user.

A guest that powers itself off leaves its VM behind: the first STATUS that finds it off begins the download of its
disks, and the VM counts as running until then, because the starter sends the job's files away as soon as it hears of a
VM that has stopped. A disk is downloaded under a temporary name and replaces the job's only when it is complete. If a
download fails, so does that STATUS, and the next one begins it again.

The disks and the memory of a checkpoint stay on the server. A manifest travels with the job and says which VM and which
snapshot, so any execute host with the same server and folder can restore the guest. The manifest is the job's to
change: it is believed only if the VM's own tag, which the job cannot write, says that the VM is this job's.
"""

from __future__ import annotations

import errno
import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

from pyVmomi import vim

from vmgahp import errors, lifecycle
from vmgahp.checkpoint.manifest import UUID, CheckpointKind, Facts, Manifest, matching, text
from vmgahp.checkpoint.store import CheckpointStore, Unusable
from vmgahp.drivers.managed import Deadlines, ManagedMachine
from vmgahp.drivers.resources import Resources
from vmgahp.drivers.surveyor import Logger
from vmgahp.drivers.vsphere import inventory
from vmgahp.drivers.vsphere.connection import Gone, VsphereConnection
from vmgahp.drivers.vsphere.hardware import SERIAL, Device, Hardware, adapter_word, bare_spec, devices_spec
from vmgahp.drivers.vsphere.inventory import OFF, ON, SAVED, SUSPENDED, Tag, VsphereVm, directory_of, find_tagged
from vmgahp.host import job_user, wait
from vmgahp.host.job_user import Identity
from vmgahp.host.system_calls import Opened
from vmgahp.images import qemu_img
from vmgahp.images.formats import SECTOR, VmdkError, backing_chain, read_vmdk
from vmgahp.job.vmware import VMDK_FILES, VmwareSpec
from vmgahp.job.vmx import CDROM, DISK, FLOPPY
from vmgahp.metrics import Status, Usage
from vmgahp.text import shown

CONVERT_DEADLINE = 3600.0
SPARE = 64 << 20
"""Bytes that stay free beside a disk that is converted."""
DAY = 86400
POLL = 0.5
"""Seconds between two queries of a guest that was asked to shut down."""

_FIGURES = ("runtime.powerState", "summary.quickStats", "summary.runtime.maxCpuUsage", "guest.ipAddress")
_FLAT_TYPES = ("monolithicflat", "vmfs", "vmfspreallocated", "vmfseagerzeroedthick", "vmfsthin")
_HINT = "convert the disk with qemu-img convert -O vmdk, and transfer all of its files."
_SEND = "add the file to transfer_input_files (or vmware_dir): a regular file that its owner may read."
_NO_PARENT = "it is the snapshot of another disk", "send a disk without snapshots."


def flat_extent(name: str, spec: VmwareSpec, identity: Identity) -> str:
    """Return the file with the disk's plain content; empty for one to convert. Raises `errors.JobFault`."""
    with Opened(open_disk(name, name, spec, identity)) as descriptor:
        try:
            found = read_vmdk(descriptor)
        except VmdkError as error:
            raise bad_disk(name, str(error), _HINT, errors.BAD_IMAGE) from error
    if found.parent:
        raise bad_disk(name, *_NO_PARENT)
    if found.kind not in _FLAT_TYPES or len(found.extents) != 1:
        return ""
    (extent,) = found.extents
    if extent.access != "RW" or extent.kind == "SPARSE" or extent.offset:
        return ""
    with Opened(open_disk(name, extent.file, spec, identity)) as descriptor:
        size, wanted = os.fstat(descriptor).st_size, extent.sectors * SECTOR
    if size != wanted or not size:
        problem = f"it is to have {wanted} bytes, and {shown(extent.file)} has {size}"
        raise bad_disk(name, problem, "send the files as VMware wrote them.", errors.BAD_IMAGE)
    return extent.file


def open_disk(disk: str, name: str, spec: VmwareSpec, identity: Identity) -> int:
    """Open a file of the job's `disk`, sent or shared, as the job's user. Raises `JobFault`, about `disk`."""
    try:
        if spec.transfer:
            return identity.open_scratch(spec.vm.working_dir, name, os.O_RDONLY)
        return identity.open_named(os.path.join(spec.dir, name), os.O_RDONLY)
    except OSError as error:
        where = "the job's scratch directory" if spec.transfer else shown(spec.dir)
        raise bad_disk(disk, f"{shown(name)} cannot be opened in {where}: {error.strerror}", _SEND) from error


def disk_descriptor(extent: str, size: int, adapter: str, *, create_type: str = "vmfs") -> bytes:
    """Return the descriptor of a disk whose content is `extent`: vmfs for a datastore, monolithicFlat for desktops."""
    heads = 16 if adapter == "ide" else 255
    cylinders = max(1, size // (heads * 63 * SECTOR))
    kind, offset = ("VMFS", "") if create_type == "vmfs" else ("FLAT", " 0")
    return (
        "# Disk DescriptorFile\n"
        "version=1\n"
        f"CID={secrets.randbelow(0xFFFFFFFE):08x}\n"
        "parentCID=ffffffff\n"
        f'createType="{create_type}"\n'
        "\n# Extent description\n"
        f'RW {size // SECTOR} {kind} "{extent}"{offset}\n'
        "\n# The Disk Data Base\n#DDB\n\n"
        f'ddb.adapterType = "{adapter}"\n'
        f'ddb.geometry.cylinders = "{cylinders}"\n'
        f'ddb.geometry.heads = "{heads}"\n'
        'ddb.geometry.sectors = "63"\n'
        'ddb.virtualHWVersion = "4"\n'
    ).encode()


def bad_disk(name: str, problem: str, hint: str, word: str = errors.INVALID_DISK_PARAM) -> errors.JobFault:
    return errors.JobFault(word, f"{VMDK_FILES}, disk {shown(name)}: {problem}.", hint)


def _convert(
    source: str, target: str, formats: tuple[str, str], name: str, identity: Identity, seconds: float = CONVERT_DEADLINE
) -> None:
    """Convert the job's disk `name` between ``raw`` and a growing VMDK. Raises `errors.Fault`."""
    options = ("subformat=monolithicSparse",) if formats[1] == "vmdk" else ()
    try:
        # A compressed disk may be a thousandth of its content. One that filled EXECUTE would be the machine's fault.
        needed = qemu_img.measure(source, formats[0], identity)
        job_user.require_room(os.path.dirname(target), identity, needed + SPARE)
        qemu_img.convert(source, formats[0], target, formats[1], identity, seconds=max(1.0, seconds), options=options)
    except qemu_img.CannotRun as error:
        raise error.fault() from error
    except qemu_img.TooSlow as error:
        raise bad_disk(name, f"it could not be converted within {seconds:.0f} s", "send it as a flat disk.") from error
    except qemu_img.Trouble as error:
        if isinstance(error, qemu_img.Refused) and error.no_space:
            full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            problem = f"{name} cannot be converted: {error}."
            raise job_user.blame(full, os.path.dirname(target), identity, problem) from error
        raise bad_disk(name, f"qemu-img cannot convert it ({error})", _HINT, errors.BAD_IMAGE) from error


def _differences(then: Facts, now: Facts) -> Iterator[str]:
    if then["snapshot"] != now["snapshot"]:
        yield "the VM on the server has another one"


KIND = CheckpointKind(
    "vsphere",
    {
        "id": matching(UUID),  # that of the VM's tag
        "snapshot": matching(inventory.SNAPSHOT),
        # VSPHERE_HOST where it was made; for people, because a server has several names.
        "server": text(300, may_be_empty=True),
    },
    most_files=0,
    differences=_differences,
)


class VsphereContext(NamedTuple):
    """The server, the place of VMs there, and the settings of checkpoints."""

    connection: VsphereConnection
    place: inventory.Placement
    files: inventory.Store
    identity: Identity
    days: int
    """The days for which a checkpoint waits for its job; 0 for ever."""
    log: Logger

    def waiting(self, tag: Tag) -> Tag:
        """Return the tag of a VM that from now on is a checkpoint and no host's."""
        expires = int(self.connection.now()) + self.days * DAY if self.days else 0
        return tag._replace(state=SAVED, directory="", host="", expires=str(expires))

    def retire(self, vm: VsphereVm, tag: Tag) -> None:
        """End a VM at once: one with a checkpoint is kept as that, powered off. Raises `errors.Fault`."""
        # The job may go on without its disks, but its spool directory still has the manifest of its last checkpoint.
        if not tag.checkpoint:
            vm.destroy(self.place.datacenter)
            return
        with suppress(Gone):
            vm.power(OFF, f"powering {tag.name} off")
            vm.retag(self.waiting(tag))
            self.log(f"{tag.name} is off; its last checkpoint stays on the server")


class VspherePlan(NamedTuple):
    """The plan of a START, as far as the job determines it; the server has not been queried yet."""

    spec: VmwareSpec
    hardware: Hardware
    extents: dict[str, str]
    """The file with the plain content of each disk, by its name in the ``.vmx``; empty for one to convert."""
    job: str
    end: float
    """The time by which uploads must be done, by the monotonic clock."""
    checkpoint: CheckpointStore
    manifest: Manifest | None = None
    unusable: Unusable | None = None


class Transport:
    """The transport of one job's VM to the server, and of its files back."""

    def __init__(self, plan: VspherePlan, context: VsphereContext) -> None:
        self._spec, self._hardware, self._extents, self._end = plan.spec, plan.hardware, plan.extents, plan.end
        self._context = context
        self._identity = context.identity
        self.fetched = False
        """True if all files are here, although the VM may not have been removed yet."""

    def deploy(self, tag: Tag, network: vim.vm.device.VirtualDevice.BackingInfo | None) -> VsphereVm:
        """Make the VM and power it on. Raises `errors.Fault`; then the caller finds what was made by the tag."""
        connection, spec, present = self._context.connection, self._spec, "config.hardware.device"
        vm = VsphereVm(connection, self._create(tag))
        seen = connection.properties(vm.ref, "config.files.vmPathName", present)
        directory = directory_of(seen.get("config.files.vmPathName"))
        if not directory:
            problem = f"vSphere gave {spec.vm.name} no directory of its own: {seen.get('config.files.vmPathName')}."
            raise errors.HypervisorFault(problem, "see whether VSPHERE_DATASTORE is one for virtual machines.")
        folder = directory.partition("] ")[2]
        sizes = {device.file: self._upload_disk(device, folder) for device in self._hardware.of_kind(DISK)}
        for device in self._hardware.of_kind(CDROM, FLOPPY):
            opened = open_disk(device.file, device.file, spec, self._identity)
            self._upload(opened, device.file, f"{folder}/{device.stored_as}")
        config = devices_spec(self._hardware, directory, sizes, spec, network, seen.get(present) or ())
        files = {f"{directory}/{device.stored_as}" for device in self._hardware.devices}

        def added() -> bool | None:
            there = connection.get(vm.ref, present) or ()
            return files <= {getattr(device.backing, "fileName", "") for device in there} or None

        connection.task(lambda _content: vm.ref.ReconfigVM_Task(config), f"giving {spec.vm.name} its devices", added)
        vm.power(ON, f"starting {spec.vm.name}")
        return vm

    def _create(self, tag: Tag) -> vim.VirtualMachine:
        connection, place = self._context.connection, self._context.place
        entity = inventory.entity_name(tag.name, tag.id)
        config = bare_spec(self._spec, self._hardware, entity, tag, place.datastore_name)

        def made() -> vim.VirtualMachine | None:
            return next((vm.ref for vm, found in find_tagged(connection, place.folder) if found.id == tag.id), None)

        ref = connection.task(lambda _all: place.folder.CreateVM_Task(config, place.pool), f"creating {tag.name}", made)
        if not isinstance(ref, vim.VirtualMachine):
            raise errors.HypervisorFault(f"vSphere created {tag.name}, and does not say which VM it is.")
        return ref

    def _upload_disk(self, device: Device, folder: str) -> int:
        name, extent, spec = device.file, self._extents[device.file], self._spec
        raw = f".{name}.vmgahp-raw"
        try:
            if extent:
                opened = open_disk(name, extent, spec, self._identity)
            else:
                self._context.log(f"{name} is not flat: converting it for the datastore")
                path = os.path.join(spec.vm.working_dir if spec.transfer else spec.dir, name)
                try:
                    chain = backing_chain(path, "vmdk", self._identity, parts=True)
                except errors.JobFault as fault:
                    raise fault.of(VMDK_FILES) from fault
                if chain:
                    raise bad_disk(name, *_NO_PARENT)
                target, left = os.path.join(spec.vm.working_dir, raw), self._end - time.monotonic()
                _convert(path, target, ("vmdk", "raw"), name, self._identity, left)
                opened = open_disk(name, raw, spec._replace(transfer=True), self._identity)
            size = self._upload(opened, name, f"{folder}/{device.extent}")
        finally:
            if not extent:
                job_user.forget(self._identity, spec.vm.working_dir, self._context.log, raw)
        text = disk_descriptor(device.extent, size, adapter_word(device, self._hardware))
        self._context.files.upload_bytes(text, f"{folder}/{device.stored_as}")
        return size

    def _upload(self, opened: int, name: str, target: str) -> int:
        with open(opened, "rb"):
            return self._context.files.upload(opened, name, target, self._end)

    def fetch(self, vm: VsphereVm) -> None:
        """Download what a VM that is off has written; on `errors.Fault` each file is old or whole."""
        connection, name = self._context.connection, self._spec.vm.name
        if connection.get(vm.ref, "snapshot") is not None:
            # The guest's writes since its checkpoint are in a separate disk until the snapshots are removed.
            connection.task(lambda _content: vm.ref.RemoveAllSnapshots_Task(), f"merging the snapshots of {name}")
        seen = connection.properties(vm.ref, "config.files.vmPathName", "config.hardware.device")
        directory = directory_of(seen.get("config.files.vmPathName"))
        disks = [one for one in seen.get("config.hardware.device") or () if isinstance(one, vim.vm.device.VirtualDisk)]
        used = sorted(disk.backing.fileName for disk in disks)
        for device in self._hardware.of_kind(DISK):
            if f"{directory}/{device.stored_as}" not in used:
                problem = f"The guest of {name} has written to another file than the one uploaded for {device.place}"
                hint = "see who has changed the VM, or made snapshots of it."
                raise errors.HypervisorFault(f"{problem}: there is {', '.join(used) or 'none'}.", hint)
        try:
            for device in self._hardware.of_kind(DISK, FLOPPY, SERIAL):
                if device.persistent:
                    self._fetch(device, directory.partition("] ")[2])
        except OSError as error:
            problem = f"The disks of {name} cannot be written into the scratch directory: {error.strerror or error}."
            raise errors.MachineFault(problem, "check the file system of EXECUTE.") from error
        self.fetched = True

    def _fetch(self, device: Device, folder: str) -> None:
        name, directory, extent = device.file, self._spec.vm.working_dir, self._extents.get(device.file)
        part, packed = f".{name}.vmgahp-part", f".{name}.vmgahp-packed"
        stored = device.stored_as if extent is None else device.extent
        self._identity.unlink_scratch(directory, part)
        try:
            opened = self._identity.open_scratch(directory, part, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            with open(opened, "r+b") as file:
                size = self._context.files.download(f"{folder}/{stored}", name, file, device.kind == SERIAL)
            if size is None:
                return
            if extent is None or (extent and self._spec.transfer):
                self._identity.rename_scratch(directory, part, extent or name)
            elif not extent:
                source, made = (os.path.join(directory, file) for file in (part, packed))
                _convert(source, made, ("raw", "vmdk"), name, self._identity)
                self._identity.rename_scratch(directory, packed, name)
            else:  # a shared disk is sent back under another name
                extent, adapter = f"{name.removesuffix('.vmdk')}-flat.vmdk", adapter_word(device, self._hardware)
                self._identity.rename_scratch(directory, part, extent)
                text = disk_descriptor(extent, size, adapter, create_type="monolithicFlat")
                self._identity.write_scratch(directory, name, text)
        finally:
            job_user.forget(self._identity, directory, self._context.log, part, packed)


class VsphereMachine(ManagedMachine):
    """A VM that this daemon creates, or takes up from a checkpoint."""

    vm: VsphereVm

    def __init__(
        self, plan: VspherePlan, tag: Tag, context: VsphereContext, resources: Resources, deadlines: Deadlines
    ) -> None:
        super().__init__(plan.spec.vm.name, resources, deadlines, context.log)
        if plan.spec.vm.checkpoint:
            self.no_checkpoint = ""
        self.tag = tag
        self.context = context
        self.transport = Transport(plan, context)
        self._spec = spec = plan.spec
        self._checkpoint = plan.checkpoint
        self._snapshot = ""
        """The snapshot with the guest's memory; empty if a suspended VM has it, or if there is none."""
        self._raw_seconds = 0.0
        """The guest's CPU seconds here, an estimate: STATUSes add up the server's mean load of the last seconds."""
        self._looked: float | None = None
        self._last = Status(lifecycle.RUNNING, vcpus=spec.vm.vcpus, max_memory_kib=spec.vm.memory_mib << 10)
        self._download: wait.Task[None] | None = None
        self._mac = ""

    def pid(self) -> int:
        return 0  # the guest runs on another machine

    def look(self) -> Status:
        if self._is_home(0):
            return Status(lifecycle.STOPPED)
        if self._download is not None:
            return self._last
        if self.transport.fetched:  # the VM could not be removed
            return self._begin_download()
        try:
            seen = self.context.connection.properties(self.vm.ref, *_FIGURES)
        except Gone as gone:
            # A guest that powers off leaves its VM; a VM that is gone was removed by others, with the job's disks.
            problem = f"The VM of {self.name} is not on the server any more, and its disks are lost."
            raise errors.HypervisorFault(problem, "see who has removed it; the job has to run again.") from gone
        if seen.get("runtime.powerState") == OFF and self._snapshot:
            # It was powered off for a checkpoint whose outcome the server did not tell: its guest has not ended.
            self.vm.go_back_to(self._snapshot, self.name)
            self._snapshot = ""
            self.log(f"{self.name} goes on after a checkpoint that failed")
            return self._last
        if seen.get("runtime.powerState") == OFF:
            self.log(f"{self.name}: the guest has powered off")
            return self._begin_download()
        self._snapshot = ""  # the checkpoint that failed has not powered it off
        if seen.get("runtime.powerState") == SUSPENDED:
            self._looked = None
            return Status(lifecycle.SUSPENDED)
        self._last = self._figures(seen)
        return self._last

    def look_at_saved(self) -> None:
        try:
            there = self._snapshot in self.vm.snapshots() if self._snapshot else self.vm.power_state() != OFF
        except Gone:
            there = False
        if not there:
            problem = f"The memory of {self.name} is not on the server any more."
            raise self.report_lost(problem, "see who has powered the VM off or removed it; the job has to run again.")

    def ask_to_power_off(self) -> None:
        if self._download is not None or not self.vm.ask_to_shut_down():
            raise errors.HypervisorFault("VMware Tools do not run in it.")

    def wait_until_off(self, seconds: float) -> bool:
        return wait.until(lambda: self.overruled or self.vm.power_state() != ON, seconds, POLL) and not self.overruled

    def collect_output(self) -> None:
        with suppress(errors.Fault):
            self._is_home(0)  # a download that has failed is begun again
        try:
            if self._download is None:
                self.vm.power(OFF, f"powering {self.name} off")
                self._begin_download()
            self._is_home()
        except Gone:
            self.log(f"the VM of {self.name} is not on the server any more, and its disks are lost")

    def interrupt(self) -> None:
        """Stop transfers; a task of the server's cannot be interrupted, and a VM not removed during one."""
        self.context.files.aborted.set()

    def end_guest(self) -> None:
        self.interrupt()
        if self.state is lifecycle.STARTING:
            for vm, tag in find_tagged(self.context.connection, self.context.place.folder):
                if (tag.id, tag.host) == (self.tag.id, self.tag.host):
                    self.context.retire(vm, tag)
            return
        try:
            if self._is_home():
                return
        except errors.Fault as fault:
            self.log(f"{self.name}: {fault.problem}")
        if not (self.state is lifecycle.CHECKPOINTED and self.tag.state == SAVED):
            self.context.retire(self.vm, self.tag)

    def unpause(self) -> None:
        """Resume a VM that was suspended by others."""
        self._require_guest("resumed")
        self.vm.power(ON, f"resuming {self.name}")

    def save(self, operation: str) -> None:
        if operation == lifecycle.CHECKPOINT:
            self._require_guest("checkpointed")
            self._take_snapshot()
        else:
            self._require_guest("suspended", may_be_off=True)
            self.vm.power(SUSPENDED, f"suspending {self.name}")
            self.log(f"{self.name} is suspended, its memory is on the datastore")
        self._looked = None
        self.step("save.written")

    def keep_saved(self) -> None:
        if self._snapshot:
            return
        self._require_guest("checkpointed")
        try:
            self._take_snapshot()
        except errors.Fault:
            self.vm.power(SUSPENDED, f"suspending {self.name} again")
            raise

    def write_manifest(self) -> None:
        facts = {"id": self.tag.id, "snapshot": self._snapshot, "server": str(self.context.connection.access)}
        try:
            self._checkpoint.write(self._checkpoint.now(self._spec.vm, facts, self.usage.seconds), ())
            self._retag(self.context.waiting(self.tag._replace(checkpoint=self._snapshot)))
        except errors.Fault:
            self._checkpoint.discard()
            raise
        self.log(f"{self.name} is checkpointed, in the snapshot {self._snapshot} on the server")

    def restore(self, before_it_runs: Callable[[], None]) -> None:
        before_it_runs()
        if not self._snapshot:
            self.unpause()
            return
        try:
            directory, host = self._spec.vm.working_dir, inventory.this_host()
            self._retag(self.tag._replace(state=inventory.RUNS, directory=directory, host=host))
            self.vm.go_back_to(self._snapshot, self.name)
        except errors.Fault:
            self._put_away()
            raise
        self.log(f"{self.name} is restored from its checkpoint")

    def forget_saved(self) -> None:
        """Remove all checkpoints but the last one with a manifest, which is in the job's spool directory."""
        if self._snapshot and self.state is lifecycle.RUNNING:
            self.vm.forget_snapshots(self.tag.checkpoint, self.log)
        self._snapshot = ""

    def take_up(self, manifest: Manifest) -> None:
        """Restore the guest of a checkpoint, which stays on a failure, for a retry here or elsewhere."""
        snapshot = manifest.facts["snapshot"]
        self._retag(self.tag._replace(checkpoint=snapshot))
        self.vm.power(OFF, f"powering {self.name} off")
        self.vm.go_back_to(snapshot, self.name)
        self.usage = Usage(manifest.cpu_seconds)
        self.log(f"{self.name} is restored from its checkpoint {snapshot}")

    def find_mac(self) -> None:
        """Query the MAC address of the first NIC, once. Raises `errors.Fault`."""
        devices = self.context.connection.get(self.vm.ref, "config.hardware.device") or ()
        nics = (device for device in devices if isinstance(device, vim.vm.device.VirtualEthernetCard))
        self._mac = next((str(nic.macAddress or "").lower() for nic in nics), "")

    def _begin_download(self) -> Status:
        if not self.overruled:
            self._download = wait.Task("download", self._bring_home)
        return self._last

    def _bring_home(self) -> None:
        if not (self.transport.fetched or self._spec.vm.no_output_vm):
            self.transport.fetch(self.vm)
            self.log(f"{self.name}: its disks are downloaded")
        self.vm.destroy(self.context.place.datacenter)
        self._checkpoint.discard()

    def _is_home(self, seconds: float | None = None) -> bool:
        """Return True if the disks are here, waiting `seconds` for a download that was begun; raises its fault."""
        if self._download is None:
            return False
        if seconds is not None and not self._download.wait(seconds):
            return False
        try:
            self._download.result()
        except Exception as error:  # of the thread that downloads, whatever it was
            self._download = None
            if isinstance(error, errors.Fault):
                raise
            problem = f"The disks of {self.name} cannot be downloaded: {error!r}."
            raise errors.HypervisorFault(problem, "report it as a bug.") from error
        return True

    def _take_snapshot(self) -> None:
        """Take a snapshot with the guest's memory, and power the VM off; on any exception the guest runs."""
        if self.vm.power_state() == SUSPENDED:
            # Only a running guest's memory is included in a snapshot.
            self.vm.power(ON, f"resuming {self.name} for its checkpoint")
        self._snapshot = self.vm.take_snapshot(self.name)
        try:
            self.vm.power(OFF, f"saving {self.name}")
        except errors.Fault:
            self.vm.go_back_to(self._snapshot, self.name)
            self._snapshot = ""
            raise

    def _put_away(self) -> None:
        """Power off a VM that was not restored, and mark it again as a checkpoint if it was one; errors are logged."""
        try:
            self.vm.power(OFF, f"powering {self.name} off")
            if self.state is lifecycle.CHECKPOINTED:
                self._retag(self.context.waiting(self.tag))
        except errors.Fault as fault:
            self.log(f"{self.name} cannot be put away: {fault.problem}")

    def _require_guest(self, what: str, *, may_be_off: bool = False) -> None:
        """Refuse a VM that is off: a power-on would boot it anew. Its next STATUS downloads its disks."""
        why = "its guest has powered off, and its disks are being downloaded" if self._download is not None else ""
        if not why and not may_be_off and self.vm.power_state() == OFF:
            why = "it is switched off"
        if why:
            raise errors.ClientFault(errors.VM_INVALID_OPERATION, f"{self.name} cannot be {what}: {why}.")

    def _retag(self, tag: Tag) -> None:
        self.vm.retag(tag)
        self.tag = tag

    def _figures(self, seen: dict[str, Any]) -> Status:
        stats = seen.get("summary.quickStats")
        most = seen.get("summary.runtime.maxCpuUsage") or 0
        now = time.monotonic()
        if self._looked is not None and most:
            load = min(1.0, (getattr(stats, "overallCpuUsage", 0) or 0) / most)
            self._raw_seconds += load * self._spec.vm.vcpus * (now - self._looked)
        self._looked = now
        return Status(
            lifecycle.RUNNING,
            cpu_seconds=self.usage.read(self._raw_seconds),
            vcpus=self._spec.vm.vcpus,
            memory_kib=(getattr(stats, "hostMemoryUsage", 0) or 0) << 10,
            max_memory_kib=self._spec.vm.memory_mib << 10,
            mac=self._mac,
            ip=str(seen.get("guest.ipAddress") or ""),
        )
