"""Checks of the machine: the user, libvirt, KVM, firmware, timing, the reach of QEMU's user."""

import os
from glob import glob
from pathlib import Path
from time import monotonic
from xml.etree import ElementTree as etree

from vmgahp import errors
from vmgahp.commands.doctor import condor
from vmgahp.commands.doctor.context import AS_ROOT, Check, Context, User, ask, down_to, first_closed, in_time, may_look
from vmgahp.commands.files import complaint
from vmgahp.config import sources
from vmgahp.daemon import probe
from vmgahp.daemon.probe import DISK_SPACE, Probe
from vmgahp.drivers.surveyor import Survey, Surveyor, find_surveyor
from vmgahp.findings import BAD, OFF, OK, Finding, Late
from vmgahp.host import libvirt_daemons, packages, proc
from vmgahp.host.job_user import Identity
from vmgahp.images.leases import why_no_lease
from vmgahp.job.engine import NOBODY
from vmgahp.vm_types import QEMU

STARTD_PATIENCE = 5.0
"""The seconds after which the startd kills a probe (``testVMGahp`` in HTCondor's
``src/condor_startd.V6/vmuniverse_mgr.cpp``)."""

CLOSE = 3.5
"""The seconds of a probe that may exceed `STARTD_PATIENCE` on a busy machine."""

PROBE_DEADLINE = 15.0

RESOLVER_PATIENCE = 3.0


def root(context: Context) -> Finding:
    """Check that this is the user who will run the jobs' server."""
    check = Check("root", "who runs the doctor")
    user = f"user id {os.geteuid()}"
    if context.blind:
        return check.for_root(f"This is {user}, and what only root may look at, who runs the jobs' server, is open.")
    theirs = f"{user}, whose own session runs the VMs"
    return check.ok("root, as HTCondor runs the server" if context.is_root else theirs)


def host_name(context: Context) -> Finding:
    """Check that this machine's name is looked up in time, which explains a timeout of HTCondor's tool."""
    context.resolver.wait(RESOLVER_PATIENCE)
    found = context.resolver.judge()
    has_waited = isinstance(context.fault, sources.Unanswered)
    return found._replace(verdict=BAD) if found.verdict == OFF and has_waited else found


# The probe


class _Surveyed(Surveyor):
    """A replacement for a survey that cannot be made here, so that the other checks of the probe are made."""

    outcome: Survey | errors.Fault

    def survey(self, end: float) -> Survey:
        if isinstance(self.outcome, errors.Fault):
            raise self.outcome
        return self.outcome


def probed(context: Context) -> list[Finding]:
    """Run the startd's probe in this process, with a surveyor that writes no log, and explain its findings."""
    if context.vm_type in QEMU:
        _ask_libvirt(context)
    surveyor, identity = _surveyor(context)
    context.probe = probe.probe(context.vm_type, context.settings, surveyor, identity=identity)
    found = []
    for one in context.probe.findings:
        if one.check == "libvirt" and one.verdict == BAD and context.vm_type in QEMU:
            seen, hint = libvirt_cause(context)
            one = one._replace(seen=f"{seen} ({one.seen.rstrip('.')}).", hint=hint) if seen else one
        elif one.check == "kvm" and one.verdict in (BAD, OFF):
            one = explain_kvm(context, one)
        if not (one.check == "memory" and "VM_MEMORY" in context.bad_names):  # it is among the settings already
            found.append(one)
    return found


# libvirt


def libvirt_cause(context: Context) -> tuple[str, str]:
    """Return why libvirt's QEMU cannot be reached, and the command to type; empty if no cause is visible."""
    unit = libvirt_daemons.of_qemu(context.root)
    socket = libvirt_daemons.socket_of(unit)
    if not libvirt_daemons.is_installed(unit, context.root):
        hint = f"{packages.of_system('libvirt-daemon-system qemu-system-x86', 'libvirt-daemon-kvm')}."
        return "Neither libvirtd nor virtqemud is installed", hint
    driver = "libvirt/connection-driver/libvirt_driver_qemu.so"
    if not any(glob(f"{context.root}/usr/{lib}/{driver}") for lib in ("lib*", "lib/*", "local/lib*")):
        hint = f"{packages.of_system('libvirt-daemon-driver-qemu')}; then restart {unit}."
        return "libvirt is installed without its driver for QEMU (libvirt_driver_qemu.so)", hint
    if not (context.is_root or context.blind):
        return "", ""  # a user's own libvirtd is started on demand
    names = (context.read(path.removeprefix(context.root)).strip() for path in glob(f"{context.root}/proc/[0-9]*/comm"))
    runs, listens = unit in names, os.path.exists(context.root + socket)
    if not runs and not listens:
        enable = f"systemctl enable --now {unit}.socket {unit}"
        return f"{unit} is installed and does not run, and nothing listens for it", enable
    if not runs:
        hint = f"systemctl start {unit}, and journalctl -u {unit} for why it ended."
        return f"{unit} does not run, although {socket} is there", hint
    if not listens:
        restart = f"systemctl restart {unit}.socket {unit}; guests survive that."
        return f"{unit} runs, and its socket {socket} is missing", restart
    if not os.access(context.root + socket, os.W_OK):
        hint = f"{AS_ROOT[:-1]}; for VMs of your own, join the group libvirt (usermod -aG libvirt NAME)."
        return f"{unit} runs, and user id {os.geteuid()} may not use its socket {socket}", hint
    return "", ""


def unseen(context: Context) -> list[Finding]:
    """Make the findings about libvirt and KVM for a user other than the one who owns the jobs' VMs."""
    cause, hint = ("", "") if context.libvirt_answers else libvirt_cause(context)
    check = Check("libvirt", "libvirt's daemon and socket")
    if cause and "may not use" not in cause:
        found = [check.bad(f"{cause}.", hint)]
    else:
        found = [check.for_root(f"{cause}." if cause else "Whether it runs guests, only root can find out.")]
    if context.vm_type != "qemu":
        seen = "Whether root's guests run at the speed of the hardware, only root can find out."
        found.append(Check("kvm", "/dev/kvm").for_root(seen))
    return found


# KVM


def explain_kvm(context: Context, finding: Finding) -> Finding:
    """Add the cause and its hint to a finding that KVM does not work."""
    seen, hint = kvm_cause(context)
    way = "; or set VM_ALLOW_EMULATION = True to run" if finding.verdict == BAD else "; until then the machine runs"
    seen = finding.seen if seen.rstrip(".") in finding.seen else f"{finding.seen} {seen}"
    return finding._replace(seen=seen, hint=f"{hint}{way} jobs by emulation, many times slower.")


def kvm_cause(context: Context) -> tuple[str, str]:
    """Return the known cause as a sentence, and the hint without its full stop."""
    flags = next((line for line in context.read("/proc/cpuinfo").splitlines() if line.startswith("flags")), "").split()
    nested = "hypervisor" in flags
    if os.path.exists(device := f"{context.root}/dev/kvm"):
        if not os.access(device, os.R_OK | os.W_OK):
            hint = f"{AS_ROOT[:-1]}, or join the group kvm (usermod -aG kvm NAME)"
            return f"This user, id {os.geteuid()}, may not open /dev/kvm.", hint
        if nested:
            hint = "let the host nest properly (nested=1 of its module, CPU mode host-passthrough for this machine)"
            return "This machine is itself a virtual one, so KVM is nested here, and its host decides how well.", hint
        return "", "see dmesg for what kvm says; load its module anew (modprobe -r and modprobe)"
    if "vmx" in flags or "svm" in flags:
        module = "kvm_intel" if "vmx" in flags else "kvm_amd"
        if os.path.isdir(f"{context.root}/sys/module/{module}"):
            hint = "see dmesg for what kvm says; make the device (udevadm trigger /dev/kvm, or mknod c 10 232)"
            return f"The module {module} is loaded and there is no /dev/kvm.", hint
        hint = f"modprobe {module}; where that fails, switch virtualization on in the firmware (BIOS: VT-x, SVM)"
        return f"The processor can virtualize, and the module {module} is not loaded.", hint
    if nested:
        hint = "on the host: modprobe kvm_intel nested=1 (or kvm_amd), and CPU mode host-passthrough for this machine"
        return "This machine is a virtual one, and its host does not let it virtualize.", hint
    if not flags:
        return "", "load the kernel's module for KVM (modprobe kvm)"
    hint = "switch virtualization on in the firmware (BIOS: VT-x, SVM), then power the machine off and on"
    return "The processor shows neither vmx nor svm.", hint


# The results of the probe


def firmware(context: Context) -> Finding | None:
    """Check which firmware a guest can have, by libvirt's domain capabilities."""
    if context.vm_type not in QEMU:
        return None
    check = Check("firmware", "libvirt's domain capabilities (virsh domcapabilities)")
    offered = context.probe.attributes.get(f"VM_{context.vm_type}_ATTR_firmware")
    if not isinstance(offered, str):
        return check.unknown("The driver did not come so far as to say.")
    if "uefi" in offered.split(","):
        return check.ok(f"guests can have: {offered.replace(',', ', ')}")
    hint = f"{packages.of_system('ovmf', 'edk2-ovmf')}; then restart {libvirt_daemons.of_qemu(context.root)}."
    return check.off("There is no UEFI for guests; those of a BIOS run.", hint)


def clock(context: Context) -> Finding:
    """Measure how long the startd's probe takes here, by running it as the startd does if that is safe."""
    server = context.more["VM_GAHP_SERVER"]
    check = Check("clock", "the time that all checks of the probe took")
    if context.blind:
        return check.for_root("Only root can run all of the probe.")
    is_ours = [one.verdict for one in context.found if one.check == "VM_GAHP_SERVER"] == [OK]
    if not (is_ours and context.is_root) or context.probe.trouble:
        return _judge_clock(check, context.probe.seconds, context.probe)
    command = [server, "-f", "-t", "-M", "0", "vmtype", context.vm_type]  # -t keeps its lines out of the log
    check = check._replace(subject=f"the startd's own probe, {' '.join(command)}")
    who = condor.as_whom(context)
    comm = Path("/proc/self/comm")
    name, began = comm.read_text().rstrip("\n"), monotonic()
    comm.write_text("condor_startd")  # a server checks its parent's name, and does more for a startd
    try:
        said = ask(command, PROBE_DEADLINE, context.environ, who)
    finally:
        comm.write_text(name)
    seconds = monotonic() - began
    if said.status is not None and seconds <= STARTD_PATIENCE and (said.status or not said.out.strip()):
        problem, _, hint = condor.parted(complaint(said))
        run_as = f", run as the user {who.name}" if who else ""
        word = problem.rstrip(".") or "no word"
        seen = f"It says nothing to the startd{run_as}, although nothing else was found wrong: {word}."
        return check.bad(seen, hint or "run the command by hand and fix what it complains about.")
    return _judge_clock(check, seconds, context.probe)


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


LIBVIRT_DEADLINE, EXECUTE_DEADLINE = 3.0, 3.0
"""The deadlines in seconds for libvirtd's capabilities, and for a file system that the probe has accessed already."""


def _surveyor(context: Context) -> tuple[Surveyor, Identity | None]:
    """Return the surveyor that the startd's probe has, or a replacement for it, and the job's user if known."""
    identity, of_this = None, (context.vm_type, context.settings)
    made = _Surveyed(*of_this, Identity(NOBODY, NOBODY), context.notes.append)
    try:
        identity = Identity.from_environ(context.environ)
        if not (context.blind and context.vm_type in QEMU):
            return find_surveyor(context.vm_type)(*of_this, identity, context.notes.append), identity
        made.outcome = Survey(unseen(context))
    except errors.Fault as fault:
        made.outcome = fault
    return made, identity


def _ask_libvirt(context: Context) -> None:
    """Find out whether libvirtd answers, which it does to every user, and as whom it runs QEMU."""
    import libvirt

    from vmgahp.drivers.libvirt.link.connection import SESSION_URI, SYSTEM_URI, LibvirtConnection

    own = not (context.is_root or context.blind)
    uri = context.settings.string("VM_LIBVIRT_URI") or (SESSION_URI if own else SYSTEM_URI)
    connection = LibvirtConnection(uri, context.notes.append, read_only=True)
    connection.deadline = LIBVIRT_DEADLINE
    try:
        host = etree.fromstring(connection.call(lambda opened: opened.getCapabilities(), seconds=LIBVIRT_DEADLINE))
    except (libvirt.libvirtError, errors.Fault):
        return  # the probe has the reason
    finally:
        connection.close()
    context.libvirt_answers = True
    for model in host.iterfind("host/secmodel[model='dac']"):
        uid, _, gid = (model.findtext("baselabel") or "").replace("+", "").partition(":")
        if uid.isdigit() and gid.isdigit():
            context.qemu_user = User.of(int(uid), int(gid))


def kvm_device(context: Context) -> Finding | None:
    """Check that libvirt's own user may open /dev/kvm; None if that does not apply."""
    device, place, user = "/dev/kvm", f"{context.root}/dev/kvm", context.qemu_user
    if user is None or not os.path.exists(place) or context.vm_type == "qemu":
        return None
    check = Check("kvm device", f"{device}, with the rights of {user.name}, as whom libvirt runs QEMU")
    closed = first_closed(user, [place], "-r") or first_closed(user, [place], "-w")
    if closed is None:
        return check.for_root("Only root can find that out.")
    if closed:
        return check.off(
            f"{user.name} may not open {device}. libvirt then examines QEMU anew at every call, which "
            "makes each start of a VM 4 to 50 s slower.",
            f"chmod 666 {device} (as udev does), or usermod -aG kvm {user.name} and restart "
            f"{libvirt_daemons.of_qemu(context.root)}.",
        )
    return check.ok(f"{user.name} may open it")


def scratch(context: Context) -> Finding | None:
    """Check that the job's user, who opens the disks, has access to EXECUTE."""
    if context.vm_type not in QEMU:
        return None
    execute = context.settings.string("EXECUTE")
    check = Check("QEMU's user", "EXECUTE and all directories above it, as the job's user")
    if not execute:
        return check.unknown("EXECUTE is not set: there is no HTCondor here.")
    if isinstance(in_time("EXECUTE", lambda: may_look(execute), EXECUTE_DEADLINE), Late):
        return check.unknown(f"EXECUTE = {execute} does not answer.")._replace(because=DISK_SPACE)
    if not may_look(execute):
        return check.for_root(f"EXECUTE = {execute} cannot be looked at by this user.")
    if not os.path.isdir(execute):
        judge = check.bad if os.path.isdir(os.path.dirname(execute)) or context.is_root else check.unknown
        hint = f"mkdir -p {execute}; chown condor {execute}; chmod 755 {execute}"
        return judge(f"EXECUTE = {execute} is not a directory.", hint)
    if context.blind:
        return check.for_root("Only root can look as the job's user.")
    uid, gid = (NOBODY, NOBODY) if context.is_root else (os.geteuid(), os.getegid())
    closed = first_closed(User("the job's user", uid, gid, (gid,)), down_to(execute))
    what = "the job's user, such as nobody, in no group of its own" if context.is_root else f"user id {uid}"
    if closed is None:
        return check.unknown(f"It could not be looked at as {what}.")
    if closed:
        seen = f"Disks are opened as {what}, who may not pass {closed} on the way to them in EXECUTE = {execute}."
        return check.bad(seen, f"chmod o+x {closed}")
    as_job_user = context.settings.boolean("VM_RUN_AS_JOB_USER")
    if context.is_root and not as_job_user and (why := why_no_lease(execute, NOBODY)):
        seen = f"Images of jobs in EXECUTE = {execute} that are qcow2, QED or VMDK cannot be held still: {why}."
        seen = f"{seen} Such a job is held, unless its QEMU can run as its user."
        return check.off(seen, "put EXECUTE on a local file system, or set VM_RUN_AS_JOB_USER = True.")
    return check.ok(f"{what}, may pass every directory down to {execute}")


def confinement(context: Context) -> Finding | None:
    """Check SELinux, which also restricts the files that QEMU opens."""
    if context.vm_type not in QEMU or context.read(proc.ENFORCE).strip() != "1":
        return None
    check = Check("SELinux", "/sys/fs/selinux, and the modules of the policy in /var/lib/selinux")
    if not context.is_root:
        return check.for_root("SELinux is enforcing.")
    if glob(f"{context.root}/var/lib/selinux/*/active/modules/*/vmgahp"):
        seen = "SELinux is enforcing, and its policy has the module vmgahp."
        return check.ok(seen, "for images on NFS: setsebool -P virt_use_nfs on")
    hint = "install vmgahp-selinux (the section on SELinux in docs/how-to/install.md); see ausearch -m avc -ts recent."
    return check.off("SELinux is enforcing, and its policy has no module vmgahp.", hint)
