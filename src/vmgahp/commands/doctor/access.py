"""Checks that QEMU's user can open its files and devices, and of the security modules that confine it."""

import os
from typing import NamedTuple

from vmgahp import errors
from vmgahp.commands.doctor.context import (
    AS_ROOT,
    NOBODY,
    Check,
    Context,
    User,
    down_to,
    first_closed,
    in_time,
    may_look,
    who_is,
)
from vmgahp.daemon.probe import DISK_SPACE
from vmgahp.findings import Finding, Late, NotKnown
from vmgahp.host import libvirt_daemons

LIBVIRT_DEADLINE = 3.0
"""The deadline in seconds for libvirtd's capabilities."""

EXECUTE_DEADLINE = 3.0
"""The deadline in seconds for a file system that the probe has accessed already."""


class Capabilities(NamedTuple):
    """The settings by which libvirt isolates guests."""

    qemu: User | None
    """The user as which it runs QEMU by default; None if it does not say."""
    models: tuple[str, ...]
    """The security drivers of libvirt: dac, apparmor, selinux."""


def capabilities(context: Context) -> Capabilities | errors.Fault:
    """Ask libvirtd for its capabilities, which it tells every user."""
    from xml.etree import ElementTree as etree

    from vmgahp.drivers.libvirt import binding as libvirt
    from vmgahp.drivers.libvirt import faults
    from vmgahp.drivers.libvirt.connection import LibvirtConnection
    from vmgahp.drivers.libvirt.uri import SESSION_URI, SYSTEM_URI

    own = not (context.is_root or context.blind)
    uri = context.settings.string("VM_LIBVIRT_URI") or (SESSION_URI if own else SYSTEM_URI)
    connection = LibvirtConnection(uri, context.notes.append, read_only=True)
    connection.deadline = LIBVIRT_DEADLINE
    try:
        host = etree.fromstring(connection.call(lambda opened: opened.getCapabilities(), seconds=LIBVIRT_DEADLINE))
    except libvirt.libvirtError as error:
        return faults.from_libvirt(error, "asking for its capabilities")
    except errors.Fault as fault:
        return fault
    finally:
        connection.close()
    qemu, models = None, []
    for model in host.iterfind("host/secmodel"):
        name = model.findtext("model") or ""
        models.append(name)
        uid, _, gid = (model.findtext("baselabel") or "").replace("+", "").partition(":")
        if name == "dac" and uid.isdigit() and gid.isdigit():
            qemu = who_is(_name(int(uid)), int(uid), int(gid))
    return Capabilities(qemu, tuple(name for name in models if name != "none"))


def _name(uid: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def kvm_device(context: Context, known: Capabilities) -> Finding | None:
    """Check that libvirt's own user may open /dev/kvm; None if that does not apply."""
    device, place = "/dev/kvm", context.path("/dev/kvm")
    if known.qemu is None or not os.path.exists(place) or context.vm_type == "qemu":
        return None
    check = Check("kvm device", f"{device}, with the rights of {known.qemu.name}, as whom libvirt runs QEMU")
    closed = first_closed(known.qemu, [place], "-r") or first_closed(known.qemu, [place], "-w")
    if closed is None:
        return check.unknown("Only root can find that out.", AS_ROOT)
    if closed:
        return check.off(
            f"{known.qemu.name} may not open {device}. libvirt then examines QEMU anew at every call, which "
            "makes each start of a VM 4 to 50 s slower.",
            f"chmod 666 {device} (as udev does), or usermod -aG kvm {known.qemu.name} and restart "
            f"{libvirt_daemons.of_qemu(context.root)}.",
        )
    return check.ok(f"{known.qemu.name} may open it")


def scratch(context: Context, domain_type: str) -> Finding:
    """Check that the job's user, who opens the disks, has access to EXECUTE, and that QEMU can run as that user."""
    execute = context.settings.string("EXECUTE")
    check = Check("QEMU's user", "VM_RUN_AS_JOB_USER; EXECUTE and all directories above it, as the job's user")
    if not execute:
        return check.unknown("EXECUTE is not set: there is no HTCondor here.")
    if isinstance(in_time("EXECUTE", lambda: may_look(execute), EXECUTE_DEADLINE), Late):
        raise NotKnown(DISK_SPACE, f"EXECUTE = {execute} does not answer.")
    if not may_look(execute):
        return check.unknown(f"EXECUTE = {execute} cannot be looked at by this user.", AS_ROOT)
    if not os.path.isdir(execute):
        judge = check.bad if os.path.isdir(os.path.dirname(execute)) or context.is_root else check.unknown
        return judge(
            f"EXECUTE = {execute} is not a directory.",
            f"mkdir -p {execute}; chown condor {execute}; chmod 755 {execute}",
        )
    if context.blind:
        return check.unknown("Only root can look as the job's user.", AS_ROOT)
    uid, gid = (NOBODY, NOBODY) if context.is_root else (os.geteuid(), os.getegid())
    closed = first_closed(User("the job's user", uid, gid, (gid,)), down_to(execute))
    what = "the job's user, such as nobody, in no group of its own" if context.is_root else f"user id {uid}"
    if closed is None:
        return check.unknown(f"It could not be looked at as {what}.")
    if closed:
        seen = f"Disks are opened as {what}, who may not pass {closed} on the way to them in EXECUTE = {execute}."
        return check.bad(seen, f"chmod o+x {closed}")
    as_job_user = context.settings.boolean("VM_RUN_AS_JOB_USER")
    if as_job_user or context.settings.string("VM_SHARE_SCRATCH").lower() == "9p":
        from vmgahp.drivers.libvirt.emulator import TWO_GROUPS, TWO_GROUPS_HINT, groups_for_qemu

        if len(groups_for_qemu(domain_type)) > 1:
            if as_job_user:
                return check.bad(f"VM_RUN_AS_JOB_USER is on, and {TWO_GROUPS}.", TWO_GROUPS_HINT)
            hint = TWO_GROUPS_HINT.replace("VM_RUN_AS_JOB_USER = False", "VM_SHARE_SCRATCH = none")
            return check.off(f"No directory is shared with a VM (VM_SHARE_SCRATCH = 9p): {TWO_GROUPS}.", hint)
    from vmgahp.images.still import why_none

    if context.is_root and not as_job_user and (why := why_none(execute, NOBODY)):
        seen = f"Images of jobs in EXECUTE = {execute} that are qcow2, QED or VMDK cannot be held still: {why}."
        seen = f"{seen} Such a job is held, unless its QEMU can run as its user."
        return check.off(seen, "put EXECUTE on a local file system, or set VM_RUN_AS_JOB_USER = True.")
    return check.ok(f"{what}, may pass every directory down to {execute}")


def confinement(context: Context, known: Capabilities | errors.Fault) -> Finding:
    """Check AppArmor and SELinux, which also restrict the files that QEMU opens."""
    check = Check("confinement", "/sys/module/apparmor, /sys/fs/selinux, and libvirt's security drivers")
    apparmor = context.read("/sys/module/apparmor/parameters/enabled").strip() == "Y"
    selinux = context.read("/sys/fs/selinux/enforce").strip() == "1"
    if selinux:
        return check._replace(name="SELinux").unknown(
            f"SELinux is enforcing, {_uses('selinux', known)}. With it this daemon has not been tried.",
            "run a job; when a disk cannot be opened, see ausearch -m avc -ts recent. For images on NFS: "
            "setsebool -P virt_use_nfs on",
        )
    if apparmor:
        check, seen = check._replace(name="AppArmor"), f"AppArmor is on, {_uses('apparmor', known)}"
        if isinstance(known, Capabilities):
            return check.ok(seen)
        return check.unknown(f"{seen}.", "look again when libvirt answers.")
    return check.ok("neither SELinux nor AppArmor enforces anything")


def _uses(model: str, known: Capabilities | errors.Fault) -> str:
    if not isinstance(known, Capabilities):
        return "and libvirt has not said whether it confines guests by it"
    return "and libvirt confines guests by it" if model in known.models else "and libvirt does not use it"
