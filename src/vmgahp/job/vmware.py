"""A VMware job's request for a VM, checked, for all drivers that run one.

The ad's attributes are those that condor_submit wrote while it supported the type (HTCondor 10.1 and before), and
that a submit file can set explicitly since. Today condor_starter does not know VMware's error words for a job's
mistakes, and they would take the machine out of service: a refusal has one of the thirteen words that hold the
job, and its sentence names the attribute.
"""

from __future__ import annotations

import errno
import os
from typing import NamedTuple

from vmgahp import errors
from vmgahp.config import Settings
from vmgahp.errors import JobFault
from vmgahp.host.job_user import Identity
from vmgahp.job import vm_spec
from vmgahp.job.ad import JobAd
from vmgahp.job.vm_spec import VmSpec
from vmgahp.job.vmx import LARGEST, Vmx, VmxError
from vmgahp.text import has_control, shown

DIR = "VMPARAM_VMware_Dir"
TRANSFER = "VMPARAM_VMware_Transfer"
SNAPSHOT_DISK = "VMPARAM_VMware_SnapshotDisk"
VMX_FILE = "VMPARAM_VMware_VMX_File"
VMDK_FILES = "VMPARAM_VMware_VMDK_Files"

NETWORKING_TYPES = ("nat", "bridge")

STATIC_MACS = "00:50:56:00:00:00", "00:50:56:3f:ff:ff"
"""The range of static addresses that VMware accepts; with another one it does not power on a VM."""

WORKING_COPY_SUFFIX = "_condor.vmx"
"""The suffix of a working copy's name, in HTCondor's own VMware support and here."""

DECRYPT_HINT = "take the encryption away in VMware (Options, Access Control; a vTPM goes first), and send that machine."

_MOST_VMDKS, _LONGEST_NAME = 1000, 200
_TRANSFER_HINT = "add it to transfer_input_files: a regular file, no link, that its owner may read."


class VmwareSpec(NamedTuple):
    """A VMware virtual machine, with at most one NIC, of the kind ``nat`` or ``bridge``."""

    vm: VmSpec
    dir: str
    """The full path of the directory of disks that are not transferred; else a path of the submit machine, unused."""
    transfer: bool
    """True if the disks are in the scratch directory; if not, they are in `dir`."""
    snapshot_disk: bool
    """True if the guest writes to snapshot disks and leaves the job's disks unchanged."""
    vmx_file: str
    vmdk_files: tuple[str, ...]
    """The names of the job's ``.vmdk`` files as the ad lists them, in the scratch directory or in `dir`. A
    split disk's extents are among them."""

    vmx: Vmx

    @classmethod
    def parse(cls, ad: JobAd, settings: Settings) -> VmwareSpec:
        """Read and check the job ad, without access to files. Raises `errors.Fault`."""
        common = vm_spec.parse(ad, settings, settings.networking_types(NETWORKING_TYPES, own_bridge=True))
        first, last = STATIC_MACS
        if common.mac and not first <= common.mac <= last:
            problem = f"JobVM_MACADDR = {shown(common.mac)}: VMware takes a chosen address from {first} to {last} only."
            raise JobFault(errors.MISMATCHED, problem, "set vm_macaddr to one of these, or remove it.")
        transfer = _boolean(ad, TRANSFER)
        snapshot_disk = _boolean(ad, SNAPSHOT_DISK)
        if not transfer and not snapshot_disk:
            problem = f"{TRANSFER} = false and {SNAPSHOT_DISK} = false: a shared disk needs a snapshot disk."
            hint = "set vmware_snapshot_disk = True, or transfer the files (vmware_should_transfer_files = True)."
            raise JobFault(errors.INVALID_DISK_PARAM, problem, hint)
        return cls(
            vm=common,
            dir=_dir(ad, transfer),
            transfer=transfer,
            snapshot_disk=snapshot_disk,
            vmx_file=_vmx_file(ad),
            vmdk_files=_vmdk_files(ad),
            vmx=Vmx(),
        )


def look(spec: VmwareSpec, settings: Settings, identity: Identity) -> VmwareSpec:
    """Find the slot, read the ``.vmx`` and check that the transferred disks exist. Raises `JobFault`."""
    spec = spec._replace(vm=vm_spec.settle_slot(spec.vm, settings, identity))
    vmx = read_vmx(identity, spec.vm.working_dir, spec.vmx_file)
    for name in spec.vmdk_files if spec.transfer else ():
        try:
            os.close(identity.open_scratch(spec.vm.working_dir, name, os.O_RDONLY))
        except OSError as error:
            problem = f"it cannot be opened in the job's scratch directory: {error.strerror}"
            raise _bad(VMDK_FILES, name, problem, _TRANSFER_HINT) from error
    return spec._replace(vmx=vmx)


def read_vmx(identity: Identity, directory: str, name: str) -> Vmx:
    """Read a ``.vmx`` of the scratch directory as the job's user. Raises `JobFault`."""
    try:
        data = identity.read_scratch(directory, name, LARGEST + 1)
    except OSError as error:
        missing = error.errno in (errno.ENOENT, errno.EINVAL)
        reason = "it is not in the job's scratch directory" if missing else f"it cannot be opened: {error.strerror}"
        raise _bad(VMX_FILE, name, reason, _TRANSFER_HINT) from error
    try:
        vmx = Vmx.decode(data)
    except VmxError as error:
        problem = f"{VMX_FILE} = {shown(name)}: VMware could not read this file: {error}."
        hint = "open the virtual machine in VMware, and send the .vmx that it writes."
        raise JobFault(errors.BAD_IMAGE, problem, hint) from error
    if vmx.is_encrypted:
        problem = f"{VMX_FILE} = {shown(name)}: the virtual machine is encrypted, and no job has its password."
        raise JobFault(errors.BAD_IMAGE, problem, DECRYPT_HINT)
    return vmx


def _boolean(ad: JobAd, name: str) -> bool:
    """Read a boolean; a missing one is true, as in a submit file that transfers its files. Raises `JobFault`."""
    value = ad.boolean(name)
    if value is None and ad.expression(name) is not None:
        raise _bad(name, ad.expression(name), "it is neither true nor false", f"set {name} to true or false.")
    return value is None or value


def _dir(ad: JobAd, transfer: bool) -> str:
    directory = (ad.string(DIR) or "").strip()
    if transfer:
        return directory
    if not directory:
        both = f"{TRANSFER} = false and {DIR} = {shown(ad.expression(DIR))}"
        hint = "set vmware_dir to the directory that has them on a shared file system."
        raise JobFault(errors.NO_DISK_PARAM, f"{both}: the directory with the disks is unknown.", hint)
    if not directory.startswith("/") or has_control(directory):
        hint = "set vmware_dir to the full path on a shared file system, or transfer the files."
        raise _bad(DIR, directory, "it is not the full path of a directory", hint)
    return directory


def _vmx_file(ad: JobAd) -> str:
    text = (ad.string(VMX_FILE) or "").strip()
    if not text:
        problem = f"{VMX_FILE} = {shown(ad.expression(VMX_FILE))}: the job names no virtual machine."
        hint = "set vmware_dir to a directory with one .vmx file, or name the file in +VMPARAM_VMware_VMX_File."
        raise JobFault(errors.NO_DISK_PARAM, problem, hint)
    name = base_name(text)
    if not name.lower().endswith(".vmx") or len(name) > _LONGEST_NAME:
        raise _bad(VMX_FILE, text, "it is not the name of a .vmx file", "name the .vmx of the virtual machine.")
    if name.lower().endswith(WORKING_COPY_SUFFIX):
        problem = f"names that end in {WORKING_COPY_SUFFIX} are for the working copy"
        raise _bad(VMX_FILE, text, problem, "give the file another name.")
    return name


def _vmdk_files(ad: JobAd) -> tuple[str, ...]:
    text = ad.string(VMDK_FILES)
    if text is None and ad.expression(VMDK_FILES) is not None:
        hint = "write the names of the .vmdk files with commas between them."
        raise _bad(VMDK_FILES, ad.expression(VMDK_FILES), "it is not a list of file names", hint)
    names: dict[str, None] = {}
    for entry in (text or "").split(","):
        if not entry.strip():
            continue
        name = base_name(entry.strip())
        if not name.lower().endswith(".vmdk") or len(name) > _LONGEST_NAME:
            raise _bad(VMDK_FILES, entry, "it is not the name of a .vmdk file", "name .vmdk files only.")
        names[name] = None
        if len(names) > _MOST_VMDKS:
            raise _bad(VMDK_FILES, text, f"it names more than {_MOST_VMDKS} files", "use fewer or larger disks.")
    return tuple(names)


def base_name(path: str) -> str:
    """Return the last part of a path, which may be of Windows; empty if that cannot be a file's name."""
    name = path.replace("\\", "/").rpartition("/")[2]
    return "" if name in (".", "..") or has_control(name) else name


def _bad(name: str, value: str | None, problem: str, hint: str) -> JobFault:
    return JobFault(errors.INVALID_DISK_PARAM, f"{name} = {shown(value)}: {problem}.", hint)
