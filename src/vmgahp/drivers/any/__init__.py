"""The VM type any: a job gets the first hypervisor of this machine that works and can run it.

The files of a choice travel with the job and are the job's to change, so they decide nothing but which of the types
that the job could have anyhow, and which of its own files is which disk.
"""

import errno
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from functools import partial
from time import monotonic
from typing import NamedTuple, TypeVar

from vmgahp import errors, findings, vm_types
from vmgahp.checkpoint import manifest, store
from vmgahp.checkpoint.store import Unusable
from vmgahp.config import Settings
from vmgahp.drivers import base
from vmgahp.drivers.base import ANY_TYPES, Driver, Machine, Survey, machine_types, progress
from vmgahp.drivers.surveyor import Logger
from vmgahp.errors import JobFault, MachineFault
from vmgahp.findings import BAD, OFF, Finding
from vmgahp.host import job_user
from vmgahp.host.job_user import Identity
from vmgahp.images import formats, qemu_img
from vmgahp.images.formats import CONVERTIBLE, FORMATS, HEADER, UnclearFormat, backing_chain, proven_format
from vmgahp.job.ad import JobAd, Plain, accepted_types, takes
from vmgahp.job.attributes import ATTRIBUTES, GENERAL, LIBVIRT_XML, OPTION_PREFIX, Options
from vmgahp.job.disks import DISK, PERMISSIONS, DiskEntry, bad_disk, entries, find_file, kind_of
from vmgahp.job.spec import UNSAVEABLE
from vmgahp.job.vmware import SNAPSHOT_DISK, TRANSFER, VMDK_FILES, VMX_FILE
from vmgahp.job.vmx import Vmx
from vmgahp.text import has_control, shown
from vmgahp.vm_types import HTCONDORS, LIBVIRT, QEMU, VMWARE, XEN

CHOICE_FILE = "vm_choice.json"
CHOICE_FORMAT = 1
CHOICE_VMX = "vm_choice.vmx"

_NAME = re.compile(r"[^/\x00-\x1f\x7f,:\ud800-\udfff]{1,255}")

_IDE = {"hda": "ide0:0", "hdb": "ide0:1", "hdc": "ide1:0", "hdd": "ide1:1"}
_SCSI = tuple(f"scsi0:{number}" for number in range(16) if number != 7)
"""The places of disks on the SCSI bus; 7 is the controller itself."""

START_EXTRA = 60.0
"""Seconds for conversions beyond VM_GAHP_REQ_TIMEOUT: condor_starter waits 120 s longer for a START, and the start
itself keeps half of that."""

SPARE = 64 << 20
"""Bytes by which the new image may be larger than was measured, and that stay free: headers and tables."""


class AnyDisk(NamedTuple):
    """One entry of vm_disk."""

    entry: str
    path: str = ""
    """The image's full path; empty if it is not an image that could be opened, such as one of the catalog."""
    device: str = ""
    permission: str = ""
    format: str = ""
    original: str = ""
    """The name of the job's image, even if another image has replaced it."""
    transferred: bool = False

    @property
    def name(self) -> str:
        return os.path.basename(self.path)

    @property
    def writable(self) -> bool:
        return "w" in self.permission and not self.is_cdrom

    @property
    def is_cdrom(self) -> bool:
        return kind_of(self.device, self.name, self.format) == "cdrom"

    @property
    def shared(self) -> bool:
        return self.permission.endswith("s")

    def written(self) -> str:
        if not self.path:
            return self.entry
        place = self.name if self.transferred else self.path
        return ":".join((place, self.device, self.permission, self.format))


def read_disks(ad: JobAd, earlier: Mapping[str, tuple[str, str]], identity: Identity) -> tuple[AnyDisk, ...]:
    """Read the job's disks; `earlier` is `Choice.images`. Raises `JobFault` only for an unclear format."""
    return tuple(_disk(entry, ad.working_dir(), earlier, identity) for entry in entries(ad.string(DISK) or ""))


def _disk(asked: DiskEntry, working_dir: str, earlier: Mapping[str, tuple[str, str]], identity: Identity) -> AnyDisk:
    entry = asked.text
    is_plain = asked.is_well_formed and not has_control(entry)
    if asked.is_of_catalog or not is_plain or asked.fields[2].lower() not in PERMISSIONS:
        return AnyDisk(entry)
    file, device, permission, said = (*asked.fields, "")[:4]
    original = os.path.basename(file)
    name, said = earlier.get(original, (original, said))
    try:
        place = os.path.join(os.path.dirname(file), name)
        path, transferred = find_file(place, working_dir, identity, False, partial(bad_disk, entry))
        header = identity.read_scratch(working_dir, name, HEADER) if transferred else identity.read_named(path, HEADER)
    except (OSError, JobFault):
        return AnyDisk(entry)
    try:
        image_format = proven_format(name, said, header)
    except UnclearFormat as error:
        hint = "write the format at the end of the entry, such as disk.img:vda:w:raw."
        raise bad_disk(entry, str(error), hint) from error
    return AnyDisk(entry, path, device, permission.lower(), image_format, original, transferred)


def convert(
    disk: AnyDisk, to_format: str, directory: str, identity: Identity, log: Logger, left: Callable[[], float]
) -> AnyDisk:
    """Make the disk's new image, NAME.FORMAT, within the seconds that are `left`; a failure leaves nothing.

    Raises `errors.Fault`, also that of `left`, which is asked again at each per cent.
    """
    # The guest writes to it, it is sent back, and the job's own image stays as it is.
    name = f"{disk.name}.{to_format}"
    temporary = f".{name}.new"
    size = 0
    try:
        backing_chain(disk.path, disk.format, identity)  # rejects layers that are not files of this machine
        size = qemu_img.measure(disk.path, disk.format, identity, seconds=120.0)  # reads its tables
        free = job_user.free_bytes(directory, identity)
        if free < size + SPARE:
            raise _no_room(disk, size, f"{free >> 20} MiB are free", directory, identity)
        log(f"converting {disk.name} ({disk.format}) to {name}: {-(-size // (1 << 20))} MiB")
        target = os.path.join(directory, temporary)
        most = 0 if to_format == "raw" else size + size // 5 + SPARE  # raw has holes, and all its length
        tell = progress(f"converting {disk.name} to {name}", log)
        source = disk.path, disk.format

        def go_on(per_cent: float) -> None:
            left()
            tell(per_cent)

        qemu_img.convert(*source, target, to_format, identity, seconds=left(), largest=most, progress=go_on)
        identity.rename_scratch(directory, temporary, name, replace=False)
    except qemu_img.CannotRun as error:
        raise error.fault() from error
    except qemu_img.Trouble as error:
        if isinstance(error, qemu_img.Refused) and error.no_space:
            raise _no_room(disk, size, f"qemu-img says: {error}", directory, identity) from error
        command = f"qemu-img convert -f {disk.format} -O qcow2 OLD NEW"
        hint = f"see that vm_disk names its true format, or convert it before you submit: {command}."
        problem = f"it cannot be converted from {disk.format} ({error})"
        seen, fault = qemu_img.as_of_the_system(error), bad_disk(disk.entry, problem, hint)
        raise job_user.blame(seen, directory, identity, fault.problem, hint, errors.BAD_IMAGE) from error
    except FileExistsError as error:
        problem = f"{name}, which it would be converted to, is there already"
        raise bad_disk(disk.entry, problem, "rename one of the two.") from error
    except OSError as error:
        raise job_user.unwritable(name, error, directory, identity) from error
    finally:
        job_user.forget(identity, directory, log, temporary)
    return disk._replace(path=os.path.join(directory, name), format=to_format, transferred=True)


def _no_room(disk: AnyDisk, size: int, seen: str, directory: str, identity: Identity) -> errors.Fault:
    room = (size + SPARE) >> 20
    problem = f"{disk.name} has to be converted, which takes {room} MiB in the scratch directory, and {seen}."
    hint = f"set request_disk to {room} MiB more than the job's files, or send an image that need not be converted."
    return job_user.blame(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), directory, identity, problem, hint)


class Choice(NamedTuple):
    """An earlier choice; empty if there is none."""

    vm_type: str = ""
    images: dict[str, tuple[str, str]] = {}
    """The name and the format of the converted image, by the name of the job's image."""


def load_choice(directory: str, identity: Identity) -> Choice:
    """Read the choice of an earlier start. Raises `JobFault` if it is unreadable: it tells the guest's image."""
    try:
        return store.find_record(identity, directory, CHOICE_FILE, _parse_choice) or Choice()
    except Unusable as unusable:
        problem = f"{CHOICE_FILE}, which says by which hypervisor the job ran before, cannot be used: {unusable.reason}"
        raise JobFault(errors.MISMATCHED_CHECKPOINT, problem, "submit the job anew, without this file.") from unusable


def _parse_choice(data: bytes) -> Choice:
    top = manifest.read(data, CHOICE_FORMAT, Choice._fields)
    made, found = top.value("images"), {}
    for name, image in made.items() if isinstance(made, dict) else [("", made)]:
        match image:
            case [str(new), str(kind)] if kind in CONVERTIBLE and _NAME.fullmatch(new) and _NAME.fullmatch(name):
                found[name] = new, kind
            case _:
                raise manifest.Invalid("its images are no images.")
    return Choice(top.text("vm_type", 100, may_be_empty=True), found)


def vmx_for(disks: Sequence[AnyDisk]) -> Vmx:
    """Return a ``.vmx`` with the job's disks and its console; the drivers add the rest. Raises `JobFault`."""
    vmx = Vmx({"config.version": "8", "virtualHW.version": "10", "guestOS": "other-64"})
    vmx.update({"scsi0.present": "TRUE", "scsi0.virtualDev": "lsilogic"})
    free = list(_SCSI)
    for disk in disks:
        place = _IDE.get(disk.device.lower()) or (free.pop(0) if free else "")
        if not place or f"{place}.present" in vmx:
            hint = f"use fewer disks, each with a device of its own; {len(_SCSI)} beside hda to hdd."
            raise bad_disk(disk.entry, "VMware's virtual machines have no more places for disks", hint)
        vmx.update({f"{place}.present": "TRUE", f"{place}.fileName": disk.name})
        if disk.is_cdrom:
            vmx[f"{place}.deviceType"] = "cdrom-image"
    vmx.update({"serial0.present": "TRUE", "serial0.fileType": "file", "serial0.fileName": "vm_console.log"})
    return vmx


XEN_KERNEL = "VMPARAM_Xen_Kernel"

_EACH_ITS_OWN = ("VMPARAM_Xen_", "VMPARAM_VMware_", DISK, OPTION_PREFIX + "Ignore_Unknown")
"""The attributes that describe the VM to one hypervisor, and mean nothing to the others."""

_STREAM = "streamoptimized"
"""The kind of VMDK of an OVA, to which no guest can write."""

Conversions = tuple[tuple[AnyDisk, str], ...]
"""The disks that a type needs in another format, each with QEMU's name of that."""


class NoFit(Exception):
    """The reason why a type cannot run a job, as a sentence without its end."""


def find_fit(vm_type: str, ad: JobAd, disks: Sequence[AnyDisk], identity: Identity) -> Conversions:
    """Return the conversions that the type needs to run the job. Raises `NoFit`."""
    if reason := next(_not_granted(vm_type, ad), "") or _no_description(vm_type, ad, disks):
        raise NoFit(reason)
    needed: list[tuple[AnyDisk, str]] = []
    for disk in disks:
        entry, stays = shown(disk.entry), disk.path and disk.writable and not disk.transferred
        if stays and vm_type in HTCONDORS and ad.boolean("JobVMCheckpoint"):
            # The starter takes periodic checkpoints of vm_type any, after which the guest is resumed.
            raise NoFit(f"{entry} is not transferred, and would move on after a periodic checkpoint")
        if target := _needs(vm_type, ad, disk, identity):
            if disk.shared:
                raise NoFit(f"{entry} would have to be converted, and other VMs use it too")
            if stays:
                raise NoFit(f"{entry} would have to be converted, and what the guest writes is to be in it")
            needed.append((disk, target))
    return tuple(needed)


def _not_granted(vm_type: str, ad: JobAd) -> Iterator[str]:
    """Yield the features that the job asks for and the type does not have."""
    if vm_type not in LIBVIRT + VMWARE:  # its driver reports it at the start of the job
        return
    kernel = ad.string(XEN_KERNEL)
    # Any hypervisor could boot a disk with a kernel.
    if kernel is not None and kernel.strip().lower() not in ("included", "vmx") and vm_type not in XEN:
        yield f"{XEN_KERNEL} = {shown(kernel)} is for Xen alone"
    for row in ATTRIBUTES:
        if not row.types or vm_type in row.types or row.name.startswith(_EACH_ITS_OWN):
            continue
        names = [row.name]
        if row.name.startswith(OPTION_PREFIX):
            option = row.name.removeprefix(OPTION_PREFIX)
            names += [f"{GENERAL}{option}", f"VM_{vm_type}_ATTR_{option}"]
        for name in names:
            if (ad.expression(name) or "").lower() not in ("", "undefined", "false"):
                yield f"it does not have {name}"


def _no_description(vm_type: str, ad: JobAd, disks: Sequence[AnyDisk]) -> str:
    """Return the reason why the type cannot identify the job's VM; empty if it can."""
    has_vmx = ad.expression(VMX_FILE) is not None
    has_disks = ad.expression(DISK) is not None or ad.expression(LIBVIRT_XML) is not None
    if vm_type in QEMU and has_vmx and not has_disks:
        return f"the job has {VMX_FILE} and no {DISK}"
    if vm_type in XEN and ad.expression(XEN_KERNEL) is None:
        return f"the job does not say how it boots under Xen ({XEN_KERNEL})"
    if vm_type in VMWARE and not has_vmx:
        if not disks:
            return f"the job has neither {VMX_FILE} nor {DISK}"
        for disk in disks:
            if not disk.path or not disk.transferred:
                return f"{shown(disk.entry)} is not an image in the scratch directory"
            if disk.device.lower().startswith("fd") or disk.shared:
                return f"{shown(disk.entry)} is neither a disk nor a CD-ROM of this VM alone"
    return ""


def _needs(vm_type: str, ad: JobAd, disk: AnyDisk, identity: Identity) -> str:
    """Return the format that the type needs the disk in; empty if it can use it as it is."""
    if not disk.path or disk.format == "iso":
        return ""
    if vm_type in XEN:
        return "" if disk.format == "raw" else "raw"
    kind = _vmdk_kind(disk, identity)
    if vm_type in VMWARE:
        if ad.expression(VMX_FILE) is not None or disk.is_cdrom or kind == "monolithicsparse":
            return ""
        # The driver for vSphere unpacks them all.
        return "" if kind == _STREAM and vm_type == "vsphere" else "vmdk"
    saved = bool(ad.boolean("JobVMCheckpoint")) and disk.format in UNSAVEABLE
    if vm_type in QEMU and (disk.format not in FORMATS.values() or saved or (disk.writable and kind == _STREAM)):
        return "qcow2"
    return ""


def _vmdk_kind(disk: AnyDisk, identity: Identity) -> str:
    """Return VMware's word for the kind of a VMDK, in lower case; empty if it is not one, or cannot be used."""
    if disk.format != "vmdk":
        return ""
    try:
        with os.fdopen(identity.open_named(disk.path, os.O_RDONLY), "rb") as file:
            return formats.read_vmdk(file.fileno()).kind
    except (OSError, formats.VmdkError):
        return ""  # the driver reports the error


_Result = TypeVar("_Result")

SURVEY, RESERVE = 20.0, 0.2
"""Seconds for the proof of one type at a start, and those before its end by which the types' surveys must be done."""


class _Known(NamedTuple):
    job: JobAd
    disks: tuple[AnyDisk, ...]
    earlier: Choice
    fits: dict[str, Conversions]
    """The types that can run it, in the order in which they are tried."""
    reasons: dict[str, str]
    """The types that cannot run it, each with the reason."""

    def needs_vmx(self, vm_type: str) -> bool:
        return vm_type in vm_types.VMWARE and self.job.expression(VMX_FILE) is None


class AnyDriver(Driver):
    """The driver of the VM type any, and of every list of types."""

    _server_ends = False

    def __init__(self, vm_type: str, settings: Settings, identity: Identity, log: Logger) -> None:
        super().__init__(vm_type, settings, identity, log)
        self._drivers: dict[str, Driver] = {}
        self._lock = threading.Lock()

    def start(self, job: JobAd) -> Machine:
        known = self._look_at(job)
        end = monotonic() + self.settings.integer("VM_GAHP_REQ_TIMEOUT") + START_EXTRA
        return self._first(known, lambda vm_type: self._start(known, vm_type, end))

    def describe(self, job: JobAd) -> str:
        known = self._look_at(job)

        def tell(vm_type: str) -> str:
            needed = known.fits[vm_type]
            if needed or known.needs_vmx(vm_type):
                converted = "".join(f"; {disk.name} as {target}" for disk, target in needed)
                return f"The job would run by {vm_type}{converted}.\n"
            ad = self._changed(known, vm_type, {})
            return f"By {vm_type}:\n{self._driver_for(vm_type).describe(ad)}"

        return self._first(known, tell)

    def kill(self, match: str, uuid: str = "") -> bool:
        """Kill the VM by every type's driver, since the startd does not know by which the job runs."""
        found, trouble, by_directory = False, None, match.startswith("/")
        # The type whose failure is raised, None for every one: no job has run by a type that is not installed here.
        chosen: str | None = None
        if by_directory and os.path.isdir(match):
            with suppress(errors.Fault):
                chosen = load_choice(match, self.identity).vm_type
        for vm_type in machine_types(self.settings):
            if not by_directory and vm_type not in vm_types.LIBVIRT:
                continue  # these drivers find VMs by their directories
            try:
                found |= self._driver_for(vm_type).kill(match, uuid)
            except errors.Fault as fault:
                self.log(f"{vm_type} cannot say whether it has the VM of {match}: {fault.problem}")
                if chosen in (None, vm_type):
                    trouble = trouble or fault
        if trouble is not None and not found:
            raise trouble
        return found

    def survey(self, end: float) -> Survey:
        try:
            types = machine_types(self.settings)
        except MachineFault as fault:
            return Survey([findings.judge("types", ANY_TYPES, fault, "")])
        return _together(_surveys(types, self._driver_for, end))

    def interrupt(self) -> Sequence[Machine]:
        self._server_ends = True
        return [machine for driver in tuple(self._drivers.values()) for machine in driver.interrupt()]

    def close(self) -> None:
        for driver in self._drivers.values():
            driver.close()

    # The job

    def _look_at(self, job: JobAd) -> _Known:
        """Find the types that can run the job. Raises `errors.Fault`."""
        types = machine_types(self.settings)
        accepted = accepted_types(job)
        Options(job, others_know=bool(self.settings.xml_script()))
        for name in job.names(f"VM_{vm_types.ANY}_ATTR_"):
            problem = f"{name} = {shown(job.expression(name))}: the job runs by another type than any."
            hint = "write it for all types, as VM_ATTR_<name>, or for one, as VM_<type>_ATTR_<name>."
            raise JobFault(errors.MISMATCHED, problem, hint)
        job.vm_name()  # raises for a job whose VM cannot get a name
        earlier = load_choice(job.working_dir(), self.identity)
        disks = read_disks(job, earlier.images, self.identity)
        fits: dict[str, Conversions] = {}
        reasons: dict[str, str] = {}
        for vm_type in types:
            try:
                if not takes(accepted, vm_type):
                    raise NoFit("the job does not take it")
                fits[vm_type] = find_fit(vm_type, job, disks, self.identity)
                if fits[vm_type] and not self.settings.boolean("VM_ANY_CONVERT"):
                    disk, target = fits.pop(vm_type)[0]
                    raise NoFit(f"{shown(disk.entry)} would have to be {target}, and VM_ANY_CONVERT is false")
            except NoFit as reason:
                reasons[vm_type] = str(reason)
        before = earlier.vm_type
        if before and job.boolean("JobVMCheckpoint"):
            # A checkpoint is restored by the type that made it, with the images that it was made with.
            fits = {before: self._as_before(before, fits, reasons)}
        order = sorted(fits, key=lambda vm_type: (vm_type != before, bool(fits[vm_type])))
        return _Known(job, disks, earlier, {vm_type: fits[vm_type] for vm_type in order}, reasons)

    def _as_before(self, before: str, fits: dict[str, Conversions], reasons: dict[str, str]) -> Conversions:
        if before in fits and not fits[before]:
            return ()
        absent = "its images are not there" if before in fits else "this machine does not have it"
        why = reasons.get(before, absent)
        problem = f"The job has run by {shown(before)} before, and no other type can restore it; {why}."
        hint = f"submit the job anew, without {CHOICE_FILE}."
        if before in vm_types.DRIVERS:
            hint = f'require a machine that has it: stringListIMember("{before}", TARGET.VM_TYPES).'
        raise JobFault(errors.MISMATCHED_CHECKPOINT, problem, hint)

    # The choice

    def _first(self, known: _Known, attempt: Callable[[str], _Result]) -> _Result:
        """Return the result of the first type that is proved and does not refuse the job."""
        refusals: dict[str, JobFault] = {}
        unproved: dict[str, str] = {}
        only = len(machine_types(self.settings)) == 1
        for vm_type in known.fits:
            # With one type there is no choice: if it does not work, its driver reports that at the start.
            why = "" if only else self._why_not((vm_type,))[vm_type]
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

    def _why_not(self, types: tuple[str, ...], user: Identity | None = None) -> dict[str, str]:
        """Return the reason why each type is not proved, by a survey like the probe's; empty for one that is proved."""
        with ExitStack() as made:
            # Separate drivers, as a survey has shorter timeouts for a connection than a start.
            end = monotonic() + SURVEY
            found = _surveys(types, lambda name: made.enter_context(closing(self._new(name, user))), end)
            return {name: _trouble(survey) for name, survey in found.items()}

    def _nothing_left(self, known: _Known, refusals: dict[str, JobFault], unproved: dict[str, str]) -> errors.Fault:
        """Return the fault after all types were tried: the machine's only if none of its types works."""
        types = machine_types(self.settings)
        if not refusals and unproved:
            # Processes of the job's user can keep each type from its proof, so HTCondor's user asks again for all.
            user = Identity.of_condor() if self.identity.switching else self.identity
            is_the_jobs = user is None or (self.identity.switching and user.uid == self.identity.uid)
            if not is_the_jobs and all(self._why_not(types, user).values()):
                problem = f"No VM type of this machine works: {_listed(unproved)}"
                return MachineFault(problem, "see vmgahp doctor, which says what to do about each.")
        reasons = known.reasons | unproved | {name: fault.problem for name, fault in refusals.items()}
        first = next(iter(refusals.values()), None)
        if first is not None and len(set(reasons.values())) == 1:
            return first
        in_order = {vm_type: reasons[vm_type] for vm_type in types if vm_type in reasons}
        problem = f"No VM type of this machine can run the job: {_listed(in_order)}"
        hint = first.hint if first else "require a machine with the VM type that the job needs (VM_TYPES)."
        return JobFault(first.code if first else errors.MISMATCHED, problem, hint)

    # One type

    def _start(self, known: _Known, vm_type: str, end: float) -> Machine:
        made: dict[str, AnyDisk] = {}
        try:
            for disk, target in known.fits[vm_type]:
                left = partial(self._left, end)
                made[disk.path] = convert(disk, target, known.job.working_dir(), self.identity, self.log, left)
            ad = self._changed(known, vm_type, made)
            new = {disk.original: made[disk.path] for disk in known.disks if disk.path in made}
            kept = known.earlier.images | {name: (image.name, image.format) for name, image in new.items()}
            self._store_choice(known, Choice(vm_type, kept))
            driver = self._driver_for(vm_type)
            self._left(end)  # not before there is a driver that `interrupt` finds
            machine = driver.start(ad)
        except BaseException:
            self._undo(known, vm_type, made)
            raise
        self.log(f"{machine.name} runs by {vm_type}, of {', '.join(known.fits)}")
        return machine

    def _left(self, end: float) -> float:
        """Return the seconds until `end`, one at least. Raises `errors.ClientFault` if the server ends."""
        if self._server_ends:
            raise errors.ClientFault(errors.VM_NOT_FOUND, "The server is ending: no VM is started any more.")
        return max(1.0, end - monotonic())

    def _changed(self, known: _Known, vm_type: str, made: dict[str, AnyDisk]) -> JobAd:
        """Return the job for the type's driver; `made` are new images by the paths of the old ones."""
        changes: dict[str, Plain | None] = {"JobVMType": vm_type}
        if disks := [made.get(disk.path, disk) for disk in known.disks]:
            changes[DISK] = ",".join(disk.written() for disk in disks)
        if known.needs_vmx(vm_type):
            self._write(known, CHOICE_VMX, vmx_for(disks).encode())
            changes |= {VMX_FILE: CHOICE_VMX, TRANSFER: True, SNAPSHOT_DISK: False}
            changes[VMDK_FILES] = ",".join(disk.name for disk in disks if not disk.is_cdrom)
        return known.job.changed(changes)

    def _store_choice(self, known: _Known, choice: Choice) -> None:
        self._write(known, CHOICE_FILE, manifest.encode(CHOICE_FORMAT, choice), 0o644)  # another user's kill reads it

    def _write(self, known: _Known, name: str, data: bytes, mode: int = 0o600) -> None:
        try:
            self.identity.write_scratch(known.job.working_dir(), name, data, mode)
        except OSError as error:
            raise job_user.unwritable(name, error, known.job.working_dir(), self.identity) from error

    def _undo(self, known: _Known, vm_type: str, made: dict[str, AnyDisk]) -> None:
        """Leave the scratch directory as it was before a start that failed."""
        names = [disk.name for disk in made.values()] + [CHOICE_VMX] * known.needs_vmx(vm_type)
        try:
            for name in names:
                self.identity.unlink_scratch(known.job.working_dir(), name)
            if known.earlier.vm_type:
                self._store_choice(known, known.earlier)
            else:
                self.identity.unlink_scratch(known.job.working_dir(), CHOICE_FILE)
        except (OSError, errors.Fault) as error:
            self.log(f"a start failed, and what it has made cannot be removed: {error}")

    # The drivers

    def _driver_for(self, vm_type: str) -> Driver:
        with self._lock:
            if vm_type not in self._drivers:
                self._drivers[vm_type] = self._new(vm_type)
            return self._drivers[vm_type]

    def _new(self, vm_type: str, user: Identity | None = None) -> Driver:
        return base.find(vm_type)(vm_type, self.settings, user or self.identity, self.log)


def _listed(reasons: dict[str, str]) -> str:
    return " ".join(f"{vm_type}: {reason.rstrip('.')}." for vm_type, reason in reasons.items())


def _surveys(types: tuple[str, ...], driver_for: Callable[[str], Driver], end: float) -> dict[str, Survey]:
    """Make the surveys of all types in parallel; a driver that cannot be loaded is a finding too."""

    def look(vm_type: str) -> Survey:
        return driver_for(vm_type).survey(end - RESERVE)

    found: dict[str, Survey] = {}
    for vm_type, outcome in findings.side_by_side({name: partial(look, name) for name in types}, end).items():
        failed = findings.judge("driver", f"the driver of VM type {vm_type}", outcome, "")
        found[vm_type] = outcome if isinstance(outcome, Survey) else Survey([failed])
    return found


def _trouble(survey: Survey) -> str:
    trouble = findings.first_bad(survey.findings)
    return trouble.seen if trouble else ""


def _together(found: Mapping[str, Survey]) -> Survey:
    proved = {vm_type: survey for vm_type, survey in found.items() if not _trouble(survey)}
    told: list[Finding] = []
    for vm_type, survey in found.items():
        for finding in survey.findings:
            verdict = OFF if finding.verdict == BAD and proved else finding.verdict
            told.append(finding._replace(check=f"{vm_type}: {finding.check}", verdict=verdict))
    if not told:
        hint = f"set {ANY_TYPES} to the VM types that this machine has, such as kvm."
        told.append(Finding("types", BAD, ANY_TYPES, "This machine has no VM types.", hint))
    machine_attributes: dict[str, base.Value] = {}
    for vm_type, survey in proved.items():
        of_type = {f"VM_{vm_type}_ATTR_{name}": value for name, value in survey.attributes.items()}
        machine_attributes |= survey.machine_attributes | of_type
    can = {name: any(survey.attributes.get(name) for survey in proved.values()) for name in ("suspend", "checkpoint")}
    return Survey(
        told,
        attributes={**can, "types": ",".join(proved)},
        machine_attributes=machine_attributes,
        # A job with a network that only one of the types has runs by that type.
        networking=list(dict.fromkeys(kind for survey in proved.values() for kind in survey.networking)),
        hypervisors=list(dict.fromkeys(name for survey in proved.values() for name in survey.hypervisors)),
        vm_types=[vm_types.ANY, *proved] if proved else [],
    )
