"""Checks of the machine: the user, libvirt, KVM, firmware, timing, the reach of QEMU's user."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from glob import glob
from time import monotonic
from typing import NamedTuple

from vmgahp import errors
from vmgahp.commands.doctor import condor
from vmgahp.commands.doctor.context import (
    AS_ROOT,
    NOBODY,
    Check,
    Context,
    User,
    ask,
    down_to,
    first_closed,
    in_time,
    may_look,
    who_is,
)
from vmgahp.daemon import probe
from vmgahp.daemon.probe import DISK_SPACE, Probe
from vmgahp.findings import BAD, OFF, OK, UNKNOWN, Finding, Late, NotKnown, side_by_side
from vmgahp.host import libvirt_daemons, packages, proof
from vmgahp.text import escape
from vmgahp.vm_types import HTCONDORS

STARTD_PATIENCE = 5.0
"""The seconds after which the startd kills a probe (``testVMGahp`` in HTCondor's
``src/condor_startd.V6/vmuniverse_mgr.cpp``)."""

CLOSE = 3.5
"""The seconds of a probe that may exceed `STARTD_PATIENCE` on a busy machine."""

PROBE_DEADLINE = 15.0

RESOLVER_PATIENCE = 3.0

_DRIVERS = (
    "/usr/lib/*/libvirt/connection-driver/libvirt_driver_qemu.so",
    "/usr/lib64/libvirt/connection-driver/libvirt_driver_qemu.so",
    "/usr/lib/libvirt/connection-driver/libvirt_driver_qemu.so",
    "/usr/local/lib*/libvirt/connection-driver/libvirt_driver_qemu.so",
)


def root(context: Context) -> Finding:
    """Check that this is the user who will run the jobs' server."""
    check = Check("root", "who runs the doctor")
    if context.is_root:
        return check.ok("root, as HTCondor runs the server")
    if context.blind:
        return check.unknown(
            f"User id {os.geteuid()}, and HTCondor runs the server as root: what only root may look at is not known.",
            AS_ROOT,
        )
    return check.ok(f"user id {os.geteuid()}, whose own session is what VMs would run in")


def host_name(resolver: probe.Resolver, context: Context) -> Finding:
    """Check that this machine's name is looked up in time, which explains a timeout of HTCondor's tool."""
    side_by_side({"the machine's name": resolver.wait}, monotonic() + RESOLVER_PATIENCE)
    found = resolver.judge()
    return found._replace(verdict=BAD) if found.verdict == OFF and context.waited else found


# libvirt


def explain_libvirt(context: Context, finding: Finding) -> Finding:
    """Add the cause to a finding that libvirt does not answer: not installed, not running, no rights."""
    seen, hint = libvirt_cause(context)
    if not seen:
        return finding
    return finding._replace(seen=f"{seen} ({finding.seen.rstrip('.')}).", hint=hint)


def libvirt_cause(context: Context) -> tuple[str, str]:
    """Return why libvirt's QEMU cannot be reached, and the command to type; empty if no cause is visible."""
    unit = libvirt_daemons.of_qemu(context.root)
    socket = libvirt_daemons.socket_of(unit)
    if not libvirt_daemons.is_installed(unit, context.root):
        return (
            "Neither libvirtd nor virtqemud is installed",
            f"{packages.of_system('libvirt-daemon-system qemu-system-x86', 'libvirt-daemon-kvm')}.",
        )
    if not any(glob(context.path(pattern)) for pattern in _DRIVERS):
        return (
            "libvirt is installed without its driver for QEMU (libvirt_driver_qemu.so)",
            f"{packages.of_system('libvirt-daemon-driver-qemu')}; then restart {unit}.",
        )
    if not (context.is_root or context.blind):
        return "", ""  # a user's own libvirtd is started on demand
    running = _running(context, unit)
    listens = os.path.exists(context.path(socket))
    if not running and not listens:
        return (
            f"{unit} is installed and does not run, and nothing listens for it",
            f"systemctl enable --now {unit}.socket {unit}",
        )
    if not running:
        return (
            f"{unit} does not run, although {socket} is there",
            f"systemctl start {unit}, and journalctl -u {unit} for why it ended.",
        )
    if not listens:
        return (
            f"{unit} runs, and its socket {socket} is missing",
            f"systemctl restart {unit}.socket {unit}; guests survive that.",
        )
    if not os.access(context.path(socket), os.W_OK):
        return (
            f"{unit} runs, and user id {os.geteuid()} may not use its socket {socket}",
            f"{AS_ROOT[:-1]}; for VMs of your own, join the group libvirt (usermod -aG libvirt NAME).",
        )
    if awaited := [child for pid in running for child in _children(context, pid)]:
        return (
            f"{unit} waits for {', '.join(awaited)}",
            f"see what that waits for, and kill it; guests survive a restart of {unit}.",
        )
    return "", ""


def unseen(context: Context, answers: bool) -> list[Finding]:
    """Make the findings about libvirt and KVM for a user other than the one who owns the jobs' VMs.

    `answers` is True if libvirtd replies to this user.
    """
    cause, hint = ("", "") if answers else libvirt_cause(context)
    missing = cause and "may not use" not in cause
    seen = f"{cause}." if cause else "Whether it runs guests, only root can find out."
    hint = hint or AS_ROOT
    found = [Finding("libvirt", BAD if missing else UNKNOWN, "libvirt's daemon and socket", seen, hint)]
    if context.vm_type != "qemu":
        seen = "Whether root's guests run at the speed of the hardware, only root can find out."
        found.append(Finding("kvm", UNKNOWN, "/dev/kvm", seen, AS_ROOT))
    return found


def _running(context: Context, daemon: str) -> list[str]:
    """List the processes of a daemon."""
    pids = (path.split("/")[-2] for path in glob(context.path("/proc/[0-9]*/comm")))
    return [pid for pid in pids if context.read(f"/proc/{pid}/comm").strip() == daemon]


def _children(context: Context, pid: str) -> list[str]:
    """List the child processes that a daemon of libvirt waits for; guests and dnsmasq are no longer its children."""
    found = []
    for path in glob(context.path(f"/proc/{pid}/task/*/children")):
        for child in context.read(path.removeprefix(context.root)).split():
            words = context.read(f"/proc/{child}/cmdline").replace("\0", " ").strip()
            found += [f"{escape(words[:80])} (process {child})"] if words else []
    return found


# KVM


def explain_kvm(context: Context, finding: Finding) -> Finding:
    """Add the cause and its hint to a finding that KVM does not work."""
    seen, hint = kvm_cause(context)
    if finding.verdict == OFF:
        hint += "; until then VM_ALLOW_EMULATION = True runs jobs by emulation, many times slower"
    elif finding.verdict == BAD:
        hint += "; or set VM_ALLOW_EMULATION = True to run jobs by emulation, many times slower"
    already = seen and seen.rstrip(".") in finding.seen
    return finding._replace(seen=finding.seen if already or not seen else f"{finding.seen} {seen}", hint=f"{hint}.")


def compare_with_kept(finding: Finding) -> Finding:
    """Add to a new finding about KVM what servers use meanwhile from their cache file."""
    kept = proof.kept(proof.KVM, proof.machine())
    if kept is None:
        return finding
    seen = finding.seen.removesuffix(".")
    if bool(kept.reason) == (finding.verdict != OK):
        return finding._replace(seen=f"{seen}; {kept.path} has said so for {kept.age:.0f} s.")
    says = "does not work" if kept.reason else "works"
    return finding._replace(
        verdict=OFF if finding.verdict == OK else finding.verdict,
        seen=f"{seen}; but servers believe {kept.path}, of {kept.age:.0f} s ago, that it {says}.",
        hint=f"rm {kept.path}, which the next probe makes anew. {finding.hint}".rstrip(),
    )


def kvm_cause(context: Context) -> tuple[str, str]:
    """Return the known cause as a sentence, and the hint without its full stop."""
    flags = _cpu_flags(context)
    module = "kvm_intel" if "vmx" in flags else "kvm_amd"
    nested = "hypervisor" in flags
    device = context.path("/dev/kvm")
    if os.path.exists(device):
        if not os.access(device, os.R_OK | os.W_OK):
            return (
                f"This user, id {os.geteuid()}, may not open /dev/kvm.",
                f"{AS_ROOT[:-1]}, or join the group kvm (usermod -aG kvm NAME)",
            )
        if nested:
            return (
                "This machine is itself a virtual one, so KVM is nested here, and its host decides how well.",
                "let the host nest properly (cat /sys/module/kvm_intel/parameters/nested there, CPU mode "
                "host-passthrough for this machine), or use a machine that is not virtual",
            )
        return "", "see dmesg for what kvm says; load its module anew (modprobe -r and modprobe)"
    if "vmx" in flags or "svm" in flags:
        if os.path.isdir(context.path(f"/sys/module/{module}")):
            return (
                f"The module {module} is loaded and there is no /dev/kvm.",
                "see dmesg for what kvm says; make the device (udevadm trigger /dev/kvm, or mknod c 10 232)",
            )
        return (
            f"The processor can virtualize, and the module {module} is not loaded.",
            f"modprobe {module}; where that says “not supported”, switch virtualization on in the firmware "
            "(BIOS: VT-x, SVM)",
        )
    if nested:
        return (
            "This machine is a virtual one, and its host does not let it virtualize.",
            "on the host: modprobe kvm_intel nested=1 (or kvm_amd), and give this machine the CPU mode "
            "host-passthrough",
        )
    if not flags:
        return "", "load the kernel's module for KVM (modprobe kvm)"
    return (
        "The processor shows neither vmx nor svm.",
        "switch virtualization on in the firmware (BIOS: VT-x, SVM), then power the machine off and on",
    )


def _cpu_flags(context: Context) -> list[str]:
    for line in context.read("/proc/cpuinfo").splitlines():
        if line.startswith("flags"):
            return line.split()
    return []


# The results of the probe


def firmware(context: Context, probe: Probe) -> Finding:
    """Check which firmware a guest can have, by libvirt's domain capabilities."""
    check = Check("firmware", "libvirt's domain capabilities (virsh domcapabilities)")
    offered = probe.attributes.get(f"VM_{context.vm_type}_ATTR_firmware")
    if not isinstance(offered, str):
        return check.unknown("The driver did not come so far as to say.")
    if "uefi" in offered.split(","):
        return check.ok(f"guests can have: {offered.replace(',', ', ')}")
    return check.off(
        "There is no UEFI for guests; those of a BIOS run.",
        f"{packages.of_system('ovmf', 'edk2-ovmf')}; then restart {libvirt_daemons.of_qemu(context.root)}.",
    )


def clock(context: Context, probe: Probe, run_server: bool) -> Finding:
    """Measure how long the startd's probe takes here, by running it as the startd does if that is safe.

    With -t its lines go to standard error and not to the log.
    """
    server = context.more("VM_GAHP_SERVER")
    if context.blind:
        seen = "Only root can run all of the probe."
        return Finding("clock", UNKNOWN, "the startd's own probe", seen, AS_ROOT)
    if not (run_server and server and context.is_root) or probe.trouble:
        return _judge_clock(Check("clock", "the time that all checks of the probe took"), probe.seconds, probe)
    command = [server, "-f", "-t", "-M", "0", "vmtype", context.vm_type]
    check = Check("clock", f"the startd's own probe, {' '.join(command)}")
    who = None if context.vm_type in HTCONDORS else context.condor
    began = monotonic()
    with _called("condor_startd"):
        said = ask(command, PROBE_DEADLINE, context.environ, who)
    seconds = monotonic() - began
    if said.status is None or seconds > STARTD_PATIENCE:
        return _judge_clock(check, seconds, probe)
    if said.status != 0 or not said.out.strip():
        problem, _, hint = condor.parted(said.complaint)
        return check.bad(
            f"It says nothing to the startd{_as(who)}, although nothing else was found wrong: "
            f"{problem.rstrip('.') or 'no word'}.",
            hint or "run the command by hand and fix what it complains about.",
        )
    return _judge_clock(check, seconds, probe)


def _as(who: User | None) -> str:
    return f", run as the user {who.name}" if who else ""


@contextmanager
def _called(name: str) -> Iterator[None]:
    """Change the name of this process temporarily: a server checks its parent's name, and does more for a startd."""
    own = "/proc/self/comm"
    try:
        with open(own) as file:
            before = file.read().strip()
        with open(own, "w") as file:
            file.write(name)
    except OSError:
        yield
        return
    try:
        yield
    finally:
        with open(own, "w") as file:
            file.write(before)


def _judge_clock(check: Check, seconds: float, probe: Probe) -> Finding:
    """Judge the duration of a probe; a failed check of the probe is given as the cause."""
    because = probe.trouble.check if probe.trouble else ""
    hint = "see which check above is slow; a libvirt that examines QEMU anew at every call is the usual one."
    if seconds > STARTD_PATIENCE:
        seen = f"It takes more than {STARTD_PATIENCE:g} s ({seconds:.1f} s), and the startd waits no longer."
        return check.bad(seen, hint)._replace(because=because)
    if seconds > CLOSE:
        seen = f"It takes {seconds:.1f} s, and the startd waits {STARTD_PATIENCE:g} s: a busy machine is too slow."
        return check.off(seen, hint)._replace(because=because)
    return check.ok(f"{seconds:.1f} s of the {STARTD_PATIENCE:g} s that the startd waits")


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

    import libvirt

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
