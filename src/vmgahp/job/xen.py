"""The boot options of a Xen job: its kernel, initrd, root and parameters, checked.

There are three ways (``XenType::CreateConfigFile`` in HTCondor's ``src/condor_vm-gahp/xen_type.linux.cpp``): the
kernel that is ``included`` in the disk, found by a bootloader program on the machine; ``vmx``, a full machine with
hardware virtualization; or a kernel of the job's own, with an initrd, for a paravirtual guest.
"""

from __future__ import annotations

import os
from functools import partial
from typing import NamedTuple

from vmgahp import errors
from vmgahp.config import Settings
from vmgahp.errors import JobFault, MachineFault
from vmgahp.host.job_user import Identity
from vmgahp.job.ad import JobAd
from vmgahp.job.disks import Disk, find_file
from vmgahp.text import has_control, shown

KERNEL, INITRD = "VMPARAM_Xen_Kernel", "VMPARAM_Xen_Initrd"
ROOT, PARAMS = "VMPARAM_Xen_Root", "VMPARAM_Xen_Kernel_Params"

INCLUDED, HARDWARE = "included", "vmx"

BOOTLOADER = "XEN_BOOTLOADER"

LONGEST_COMMAND_LINE = 1023
"""The most bytes that Xen passes to a paravirtual kernel (``MAX_GUEST_CMDLINE`` of Xen's ``public/xen.h``, with its
NUL); it silently cuts off the rest."""

_KERNEL = (KERNEL, errors.XEN_KERNEL_NOT_FOUND)
_INITRD = (INITRD, errors.XEN_INITRD_NOT_FOUND)


class BootFile(NamedTuple):
    """A kernel or an initrd."""

    path: str
    """The full path; for a transferred file, in the scratch directory. Before `look` the path as the job names it."""
    transferred: bool = False


class XenBoot(NamedTuple):
    """The way in which a guest boots; exactly one of the first three fields is set."""

    bootloader: str = ""
    """The program that extracts the kernel from the guest's first disk."""
    hardware: bool = False
    kernel: BootFile | None = None
    initrd: BootFile | None = None
    command_line: str = ""
    """The root device and the job's parameters, for a kernel of the job's own."""

    @classmethod
    def parse(cls, ad: JobAd, settings: Settings) -> XenBoot:
        """Read and check the job's attributes, without access to files. Raises `JobFault`."""
        wanted = (ad.string(KERNEL) or "").strip()
        if not wanted:
            problem = f"{KERNEL} = {shown(ad.expression(KERNEL))}: the job does not say which kernel its VM boots."
            hint = "set xen_kernel to included, to vmx, or to a kernel image, in the submit file."
            raise JobFault(errors.XEN_NO_KERNEL, problem, hint)
        if wanted.lower() == INCLUDED:
            if path := settings.string(BOOTLOADER).strip("\"'"):
                return cls(bootloader=path)
            problem = f"{KERNEL} = {INCLUDED}, and this machine takes no kernel from a disk ({BOOTLOADER} is not set)."
            hint = "set xen_kernel to a kernel image, or require a machine whose VM_xen_ATTR_bootloader is true."
            raise JobFault(errors.XEN_KERNEL_NOT_FOUND, problem, hint)
        if wanted.lower() == HARDWARE:
            if not settings.boolean("VM_HARDWARE_VT"):
                why = "this machine offers no hardware virtualization (VM_HARDWARE_VT)."
                hint = "add VM_HardwareVT to the job's requirements, or boot another kernel."
                raise JobFault(errors.MISMATCHED, f"{KERNEL} = {shown(wanted)}, and {why}", hint)
            return cls(hardware=True)
        initrd = (ad.string(INITRD) or "").strip()
        return cls(
            kernel=_file(_KERNEL, wanted),
            initrd=_file(_INITRD, initrd) if initrd else None,
            command_line=_command_line(ad),
        )


def look(boot: XenBoot, working_dir: str, identity: Identity) -> XenBoot:
    """Find the files. Raises `JobFault`, and `MachineFault` for a missing bootloader."""
    if boot.bootloader:
        require_bootloader(boot.bootloader)
    return boot._replace(
        kernel=boot.kernel and _find(_KERNEL, boot.kernel.path, working_dir, identity),
        initrd=boot.initrd and _find(_INITRD, boot.initrd.path, working_dir, identity),
    )


def open_file(file: BootFile | Disk, working_dir: str, identity: Identity, flags: int = os.O_RDONLY) -> int:
    """Open a file as the job's user, and return the descriptor. Raises OSError and `MachineFault`."""
    if file.transferred:
        return identity.open_scratch(working_dir, os.path.basename(file.path), flags)
    return identity.open_named(file.path, flags)


def require_bootloader(path: str) -> None:
    """Make sure that the program of XEN_BOOTLOADER exists. Raises `MachineFault`."""
    if not path.startswith("/") or not os.access(path, os.X_OK):
        hint = f"set {BOOTLOADER} to the full path of pygrub, or of another bootloader of Xen's; or unset it."
        raise MachineFault(f"{BOOTLOADER} = {path} is not a program on this machine.", hint)


def _file(which: tuple[str, str], value: str) -> BootFile:
    if has_control(value):
        raise _refused(which, value, "it has a control character", "name a file.")
    return BootFile(value)


def _find(which: tuple[str, str], value: str, working_dir: str, identity: Identity) -> BootFile:
    return BootFile(*find_file(value, working_dir, identity, False, partial(_refused, which, value)))


def _refused(which: tuple[str, str], value: str, problem: str, hint: str) -> JobFault:
    name, word = which
    return JobFault(word, f"{name} = {shown(value)}: {problem}.", hint)


def _command_line(ad: JobAd) -> str:
    root = (ad.string(ROOT) or "").strip()
    if not root:
        problem = f"{ROOT} = {shown(ad.expression(ROOT))}: a kernel of the job's own must be told its root device."
        raise JobFault(errors.XEN_NO_ROOT, problem, "set xen_root in the submit file, such as xen_root = /dev/xvda1.")
    params = (ad.string(PARAMS) or "").strip()
    line = " ".join(word for word in (root if root.startswith("root=") else f"root={root}", params) if word)
    if has_control(line):
        problem = f"{ROOT} = {shown(root)} or {PARAMS} = {shown(params)} has a control character."
        raise JobFault(errors.XEN_NO_ROOT, problem, "write both in one line each.")
    if len(line.encode()) > LONGEST_COMMAND_LINE:
        problem = f"{ROOT} and {PARAMS} have {len(line.encode())} bytes together"
        problem += f", and Xen hands {LONGEST_COMMAND_LINE} to a guest."
        raise JobFault(errors.MISMATCHED, problem, "shorten xen_kernel_params.")
    return line
