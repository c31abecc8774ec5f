"""Checks of the machine itself: the user, libvirt's daemon, causes of KVM failures, firmware, timing."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from glob import glob
from time import monotonic

from vmgahp.commands.doctor import log_history
from vmgahp.commands.doctor.context import AS_ROOT, Check, Context, User, ask
from vmgahp.daemon import probe
from vmgahp.daemon.probe import Probe
from vmgahp.findings import BAD, OFF, OK, UNKNOWN, Finding, side_by_side
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


def name(resolver: probe.Resolver, context: Context) -> Finding:
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
        problem, _, hint = log_history.parted(said.complaint)
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
