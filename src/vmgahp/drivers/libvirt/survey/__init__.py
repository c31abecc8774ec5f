"""The survey of a machine for libvirt's jobs: every check of the probe, seen to work."""

import contextlib
import os
import shutil
import socket
from collections.abc import Callable, Sequence
from functools import cache, partial
from time import monotonic
from typing import NamedTuple
from xml.etree import ElementTree as etree

import libvirt

from vmgahp import errors, findings, vm_types
from vmgahp.checkpoint import substitute
from vmgahp.config import Settings
from vmgahp.config.table import SHARE_DIRS
from vmgahp.domain.build import usual_need_mib
from vmgahp.drivers.libvirt.link import domains, faults
from vmgahp.drivers.libvirt.link.connection import SYSTEM_URI, LibvirtConnection, connection_for
from vmgahp.drivers.libvirt.start import capabilities, machine_devices, tpm
from vmgahp.drivers.libvirt.start.capabilities import TWO_GROUPS, TWO_GROUPS_HINT, Hypervisor, arches, uefis, version
from vmgahp.drivers.surveyor import Logger, Survey, Surveyor, Value
from vmgahp.findings import BAD, OFF, OK, UNKNOWN, Checks, Finding, Late
from vmgahp.hooks import xml_script
from vmgahp.host import kvm, libvirt_daemons, packages, pci, proc
from vmgahp.host.job_user import Identity
from vmgahp.host.run import Finished, run, which
from vmgahp.images import catalog, iso
from vmgahp.images.catalog import Image
from vmgahp.job.attributes import ARM, BIOS, NINEP, NO_SHARE, SHARES, VIRTIOFS, X86, Share

QEMU = "qemu-system-x86_64"


class _Host(NamedTuple):
    """The self-description of libvirtd."""

    capabilities: str
    version: int  # of the hypervisor, and of libvirt: 1,000,000 * major + 1,000 * minor + release
    libvirt_version: int
    domain_types: tuple[str, ...]  # those of kvm and qemu that it has for the machine's own architecture


class _Emulator(NamedTuple):
    """The description of QEMU by libvirt, for one domain type.

    CPU modes, firmware and TPM are None without domain capabilities: they are late, or the connection is read-only.
    """

    path: str
    machine: str  # the default machine type of a domain
    max_vcpus: int
    cpu_modes: frozenset[str] | None = None
    firmware: tuple[str, ...] | None = None
    passt: bool = False  # True if libvirt was built with passt, as far as it has reported, and passt is installed
    tpm: bool | None = None  # True if it accepts a TPM that it does not run itself
    boots_arm: bool = True  # True if the firmware that guests of aarch64 need is installed


class LibvirtSurveyor(Surveyor):
    """The surveyor of one machine for one VM type."""

    def __init__(
        self, vm_type: str, settings: Settings, identity: Identity, log: Logger, link: LibvirtConnection | None = None
    ) -> None:
        super().__init__(vm_type, settings, identity, log)
        self._connection = link or connection_for(settings, log)
        self._fixed = ""  # the domain type if the settings determine it; empty otherwise

    def survey(self, end: float) -> Survey:
        """Run all checks, independent ones in parallel; see `vmgahp.drivers.base.Driver.survey`."""
        try:
            self._fixed = capabilities.wanted_type(self.vm_type, self.settings)
        except errors.MachineFault as fault:
            return Survey([findings.judge("domain type", capabilities.SETTING, fault, "")])
        found = self._judge_script()
        if findings.first_bad(found):
            return Survey(found)
        wanted, settings = self.settings.networking_types(), self.settings
        if not domains.is_qemu(self._fixed):
            ask = partial(capabilities.require_hypervisor, self._connection, self._fixed, settings)
            made = survey_other(settings, self._connection, self._fixed, end, ask, wanted)
            return made._replace(findings=[*found, *made.findings])
        scripted = bool(settings.xml_script())  # the script describes the CPU and the devices itself
        checks = self._begin(wanted, end, scripted=scripted)
        host = checks.outcome("libvirt")
        daemon = libvirt_daemons.of_qemu()
        subject = f"{daemon} at {self._connection.uri}"
        if not isinstance(host, _Host):
            found.append(findings.judge("libvirt", subject, host, ""))
            self._judge_kvm(checks.outcome("kvm"), found)
            return Survey(found)
        seen = f"libvirt {version(host.libvirt_version)} answers, with QEMU {version(host.version)}"
        found.append(Finding("libvirt", OK, subject, seen))
        accel = self._judge_kvm(checks.outcome("kvm"), found)
        if accel not in host.domain_types:
            if accel:
                seen = f"libvirt knows no domains of type {accel} for {os.uname().machine}."
                hint = f"install QEMU for this machine's architecture (qemu-system-x86), and restart {daemon}."
                subject = f"the capabilities of {self._connection.uri}"
                found.append(Finding("domain type", BAD, subject, seen, hint))
            return Survey(found)
        checks.begin("emulator", lambda: self._ask_of_emulator(host, accel))
        qemu = checks.outcome("emulator")
        if not isinstance(qemu, _Emulator):
            subject = f"the domain capabilities for {accel}"
            if not isinstance(qemu, Late):
                return Survey([*found, findings.judge("libvirt", subject, qemu, "")])
            found.append(Finding("libvirt", UNKNOWN, subject, "libvirt has not told them in time.", qemu.hint))
            qemu = self._by_capabilities(host)
        tried = self._try_emulator(qemu, accel, "user" in wanted and not qemu.passt, end)
        of_tpm = _judge_tpm(qemu.tpm, checks.outcome("tpm"))
        own = self._may_be_the_jobs(accel)
        if not scripted:
            found.append(tried)
            if settings.boolean("VM_RUN_AS_JOB_USER"):
                outcome = None if own else errors.MachineFault(f"{TWO_GROUPS}.", TWO_GROUPS_HINT)
                seen = "QEMU runs as the job's user"
                found.append(findings.judge("QEMU's user", "VM_RUN_AS_JOB_USER", outcome, seen))
            found.append(of_tpm)
        shared: dict[str, Value] = {"share": NO_SHARE}
        if self._shares():
            shared, of_shares = judge_shares(settings, checks, qemu.path, self.identity, end, as_job_user=own)
            found += of_shares
        if self._connection.uri == SYSTEM_URI:
            found.append(_judge_limits(proc.cgroup_controllers()))
        saving: dict[str, Value] = {}
        if (saves := checks.outcome("save")) is not None:
            subject = "a file in EXECUTE of another user than root, which libvirtd is to open for a save"
            found.append(findings.judge("save", subject, saves, "libvirtd opens it", UNKNOWN))
            if isinstance(saves, str) and saves:
                found[-1] = Finding("save", OFF, subject, saves, "set VM_SOFT_SUSPEND = True to suspend VMs in memory.")
                saving = dict.fromkeys(("suspend", "checkpoint"), False)
        active = active_network(checks, wanted)
        judged = {kind: self._judge_network(kind, checks, active, qemu, tried) for kind in wanted}
        found += judged.values()
        networking = [kind for kind, finding in judged.items() if finding.verdict == OK]
        ways_in = None
        if settings.string("VM_SSH_PORTS"):
            from vmgahp.drivers.libvirt.start import forwarding  # with all of a VM's resources

            ways_in = forwarding.judge(settings, networking, passt=qemu.passt)
            found.append(ways_in)
        images: dict[str, Value] = {}
        if (surveyed := checks.outcome("images")) is not None:
            names, of_catalog = catalog.judge(surveyed)
            images = {name: listed for name, listed in catalog.published(names, settings).items() if listed}
            found += of_catalog
        given, of_devices = machine_devices.judge(checks.outcome("devices"))
        found += of_devices
        gpus = sum(number for name, number in given.items() if name.lower() == machine_devices.GPUS.lower())
        # Without a setting, checkpoints are restored here from these.
        formats = ["raw", *[substitute.ZSTD] * substitute.has_program(substitute.ZSTD)]
        if substitute.has_sparse(host.libvirt_version, host.version, host.capabilities):
            formats.append("sparse")
        return Survey(
            found,
            attributes=self._attributes(host, qemu, accel, networking)
            | {"tpm": of_tpm.verdict == OK, **shared, **saving}
            | ({"ssh": ways_in.verdict == OK} if ways_in else {})
            | {"memory_formats": ",".join(formats), "gpu": bool(gpus)}
            | ({"devices": ",".join(given)} if given else {}),
            machine_attributes={**published(active), **images} | ({"VM_GPUs": gpus} if gpus else {}),
            networking=networking,
            hypervisors=[name for name in ("kvm", "qemu") if name in host.domain_types and name in (accel, "qemu")],
            # kvm and libvirt mean what jobs of `vm_type` get.
            vm_types=list(dict.fromkeys((self.vm_type, *([self._fixed] if self._fixed else vm_types.QEMU)))),
        )

    # The checks

    def _begin(self, wanted: Sequence[str], end: float, *, scripted: bool) -> Checks:
        settings, checks = self.settings, Checks(end)
        let_answer_until(self._connection, end)
        checks.begin("libvirt", lambda: self._ask_libvirt(end))
        begin_networks(checks, self._connection, settings, wanted, end)
        if (execute := settings.string("EXECUTE")) and not self._connection.read_only:
            checks.begin("save", lambda: save_nothing(self._connection, execute, seconds_left(end)))
        if self._fixed != "qemu":
            checks.begin("kvm", lambda: kvm.check(end - monotonic()))
        if "user" in wanted:
            confined = self._connection.uri == SYSTEM_URI
            checks.begin("passt", lambda: start_passt(self.identity, end, confined=confined))
        if settings.string("VM_CATALOG") and not scripted:
            checks.begin("images", lambda: catalog.survey(settings, self._check_backing))
        if which(tpm.PROGRAM) and not scripted:
            checks.begin("tpm", lambda: tpm.trouble(self.identity, end - monotonic()))
        if settings.strings(machine_devices.SETTING) and not scripted:
            checks.begin("devices", lambda: tuple(machine_devices.offered(settings, os.environ)))
        if self._shares():
            begin_shares(checks, settings, self.identity, end)
        return checks

    def _judge_script(self) -> list[Finding]:
        if not (script := self.settings.xml_script()):
            return []
        arguments = self.settings.string(xml_script.ARGUMENTS_SETTING)
        return [xml_script.judge(script, arguments, blind=self._connection.read_only)]

    def _ask_libvirt(self, end: float) -> _Host:
        def ask(connection: libvirt.virConnect) -> _Host:
            described = connection.getCapabilities()
            here = etree.fromstring(described).find(f"guest/arch[@name='{os.uname().machine}']")
            kinds = () if here is None else tuple(domain.get("type", "") for domain in here.iterfind("domain"))
            kinds = tuple(kind for kind in kinds if kind in ("kvm", "qemu"))
            return _Host(described, connection.getVersion(), connection.getLibVersion(), kinds)

        return self._connection.ask(ask, "asking for its capabilities", seconds=seconds_left(end, TELLING / 2))

    def _ask_of_emulator(self, host: _Host, accel: str) -> _Emulator:
        if self._connection.read_only:
            return self._by_capabilities(host)
        own, others = os.uname().machine, arches(host.capabilities, emulates=True)

        def ask(connection: libvirt.virConnect) -> _Emulator:
            of_own = uefis(capabilities.of_machines(connection, own, accel))
            of_arm = of_own
            if own != ARM:
                of_arm = uefis(capabilities.of_machines(connection, ARM, "qemu")) if ARM in others else ()
            told = capabilities.domain_capabilities(connection, accel)
            most = told.find("vcpu")
            return _Emulator(
                told.findtext("path") or QEMU,
                told.findtext("machine") or "",
                1 if most is None else int(most.get("max", "1")),
                frozenset(mode.get("name", "") for mode in told.iterfind("cpu/mode[@supported='yes']")),
                firmware=(BIOS, *of_own),
                passt=capabilities.has_passt(told),
                tpm=tpm.is_offered(told),
                boots_arm=bool(of_arm),
            )

        return self._connection.ask(ask, "asking for its domain capabilities")

    @staticmethod
    def _by_capabilities(host: _Host) -> _Emulator:
        """Return what libvirt's capabilities and the firmwares' own descriptors tell of QEMU."""
        here = etree.fromstring(host.capabilities).find(f"guest/arch[@name='{os.uname().machine}']")
        assert here is not None
        machine = here.find("machine[@canonical]")
        return _Emulator(
            here.findtext("emulator") or QEMU,
            "" if machine is None else machine.get("canonical", ""),  # as in the domain capabilities
            1 if machine is None else int(machine.get("maxCpus", "1")),
            passt=which("passt") is not None,
            boots_arm=any(ARM in one.arches for one in capabilities.installed_firmwares().values()),
        )

    def _check_backing(self, image: Image) -> object:
        from vmgahp.job.look import backing_of  # with all of a job, for which a probe has no time: few images need it

        return backing_of(image, self.identity)

    def _try_emulator(self, qemu: _Emulator, accel: str, slirp: bool, end: float) -> Finding:
        """Start QEMU as jobs get it: with this accelerator, CPU mode and machine type."""
        mode = capabilities.cpu_mode(self.settings, accel)
        subject = f"{qemu.path} with {accel} and the CPU mode {mode}"
        if qemu.cpu_modes is not None and mode not in qemu.cpu_modes:
            seen = f"libvirt says that QEMU has no CPU mode {mode} here."
            hint = "set VM_CPU_MODE to one that virsh domcapabilities shows as supported."
            return Finding("cpu", BAD, subject, seen, hint)
        try:
            start_qemu(qemu.path, accel, mode, qemu.machine, slirp, self.identity, end)
        except errors.Fault as fault:
            verdict = UNKNOWN if isinstance(fault, Late) else BAD
            return Finding("cpu", verdict, subject, fault.problem, fault.hint)
        return Finding("cpu", OK, subject, "QEMU starts and answers")

    def _shares(self) -> bool:
        """Return True if jobs may share a directory with their guest."""
        wanted = self.settings.string(SCRATCH).lower() != NO_SHARE or self.settings.strings(SHARE_DIRS)
        return bool(wanted) and not self.settings.xml_script()

    def _may_be_the_jobs(self, accel: str) -> bool:
        """Return True if QEMU can run as the job's user, or if libvirt runs it as its own user anyway."""
        return self._connection.uri != SYSTEM_URI or len(capabilities.groups_for_qemu(accel)) < 2

    # Findings and attributes

    def _judge_kvm(self, reason: object, found: list[Finding]) -> str:
        """Return the domain type of jobs, empty if they can have none; `reason` is the outcome of `kvm.check`."""
        if self._fixed == "qemu":
            return "qemu"
        subject = f"{kvm.DEVICE}, with a guest in 64-bit mode"
        if not reason:
            found.append(Finding("kvm", OK, subject, "a guest runs at the speed of the hardware"))
            return "kvm"
        emulate = not self._fixed and self.settings.boolean("VM_ALLOW_EMULATION")
        fault = kvm_fault(reason) if isinstance(reason, str) else reason
        found.append(findings.judge("kvm", subject, fault, "", OFF if emulate else BAD))
        return "qemu" if emulate else ""

    def _judge_network(self, kind: str, checks: Checks, active: object, qemu: _Emulator, tried: Finding) -> Finding:
        name, slirp = "network user", "QEMU's own user networking (slirp)"
        if kind != "user":
            return judge_network(kind, checks, active, self.settings)
        if qemu.passt:
            return findings.judge(name, "passt", checks.outcome("passt"), "it starts and listens", OFF)
        if tried.verdict != OK:
            return Finding(name, OFF, slirp, f"QEMU was not seen to start: {tried.seen}", tried.hint)
        return Finding(name, OK, slirp, "QEMU starts with it")

    def _attributes(self, host: _Host, qemu: _Emulator, accel: str, networking: list[str]) -> dict[str, Value]:
        path = f"guest/arch[@name='{os.uname().machine}']/machine[@canonical]"
        machines = [machine.text or "" for machine in etree.fromstring(host.capabilities).iterfind(path)]
        emulates = accel == "qemu" or self.settings.boolean("VM_ALLOW_EMULATION")
        known = arches(host.capabilities, emulates=emulates)
        limits = proc.cgroup_controllers() if self._connection.uri == SYSTEM_URI else []
        attributes: dict[str, Value] = {
            "accel": "kvm" if accel == "kvm" else "tcg",
            "version": version(host.version),
            "libvirt_version": version(host.libvirt_version),
            "max_vcpus": qemu.max_vcpus,
            "machine_types": ",".join(dict.fromkeys(machines)),
            "suspend": True,
            "checkpoint": not self.settings.xml_script(),
            "snapshot": False,
            "networking": ",".join(networking),
            "arches": ",".join(arch for arch in known if arch in (os.uname().machine, X86) or qemu.boots_arm),
            "iso": iso.can_write(),
            "limits": ",".join([*limits, "cores"]),
            "overhead": usual_need_mib(accel, self.settings.integer("VM_TB_CACHE")),
        }
        if qemu.firmware is not None:
            attributes["firmware"] = ",".join(qemu.firmware)
        return attributes


def _judge_tpm(offered: bool | None, outcome: object) -> Finding:
    """Return the finding about TPMs by the outcome of `tpm.trouble`."""
    subject = f"{', '.join(tpm.OF_LIBVIRT)}, and libvirt's word for them"
    if reason := tpm.why_none(offered):
        return Finding("tpm", OFF, subject, f"{reason}.", f"for jobs with a TPM: {packages.of_system(tpm.PACKAGES)}.")
    if isinstance(outcome, str) and outcome:
        return Finding("tpm", OFF, subject, f"{outcome}.", tpm.NO_ANSWER_HINT)
    return findings.judge("tpm", subject, outcome, "swtpm makes a TPM", OFF)


def _judge_limits(honored: list[str]) -> Finding:
    subject = "the control groups that libvirt limits VMs by"
    if missing := [name for name in proc.CGROUP_LIMITS if name not in honored]:
        seen = f"The slot's limits do not reach VMs: no control groups are mounted that have {' and '.join(missing)}."
        hint = f"mount them (version 2 at /sys/fs/cgroup); restart {libvirt_daemons.of_qemu()}."
        return Finding("limits", OFF, subject, seen, hint)
    return Finding("limits", OK, subject, "VMs have the weight of their slots, and a limit of memory")


def kvm_fault(reason: str) -> errors.MachineFault:
    """Return the fault for a KVM that jobs should get and that does not work."""
    problem = f"KVM does not work on this machine: {reason}."
    return errors.MachineFault(problem, "fix KVM, or set VM_ALLOW_EMULATION = True to run jobs slowly, by emulation.")


# Networks, and other hypervisors


CONNECTING = 1.5
"""Seconds to retry a refused connection, as while libvirtd is being restarted."""
TELLING = 0.3
"""Seconds before the end of all checks at which a silent libvirt is given up, which gives a better reason."""


def look_at_bridge(settings: Settings) -> str:
    """Return the state of the bridge, without a full stop. Raises `errors.MachineFault` without a bridge."""
    name = settings.string("VM_NETWORKING_BRIDGE_INTERFACE")
    setting = f"VM_NETWORKING_BRIDGE_INTERFACE = {name}"
    place = f"/sys/class/net/{os.path.basename(name)}"
    if not os.path.isdir(place):
        raise errors.MachineFault(f"{setting}, and there is no such interface.", "make the bridge, or name another.")
    if not os.path.isdir(f"{place}/bridge"):
        raise errors.MachineFault(f"{setting}, and that is no bridge.", "name a bridge.")
    if not pci.is_up(place):
        raise errors.MachineFault(f"{setting}, and that bridge is down.", f"ip link set {name} up")
    return f"the bridge {name} is up"


def survey_other(
    settings: Settings,
    connection: LibvirtConnection,
    domain_type: str,
    end: float,
    ask: Callable[[], Hypervisor],
    networks: Sequence[str],
) -> Survey:
    """Survey the machine for another hypervisor than QEMU, of which `ask` tells."""
    checks = Checks(end)
    let_answer_until(connection, end)
    checks.begin("type", ask)
    begin_networks(checks, connection, settings, networks, end)
    host = checks.outcome("type")
    subject = f"domains of type {domain_type} at {connection.uri}"
    if not isinstance(host, Hypervisor):
        return Survey([findings.judge("libvirt", subject, host, "", BAD)])
    versions = {"version": version(host.version), "libvirt_version": version(host.libvirt_version)}
    seen = f"libvirt {versions['libvirt_version']} has them, with {host.name} {versions['version']}"
    active = active_network(checks, networks)
    judged = {kind: judge_network(kind, checks, active, settings) for kind in networks}
    networking = [kind for kind, finding in judged.items() if finding.verdict == OK]
    names = ("suspend", "checkpoint", "snapshot", "gpu")
    return Survey(
        [Finding("libvirt", OK, subject, seen), *judged.values()],
        attributes={**versions, **dict.fromkeys(names, False), "networking": ",".join(networking)},
        machine_attributes=published(active),
        networking=networking,
        hypervisors=[domain_type],
        vm_types=["libvirt"],
    )


def seconds_left(end: float, telling: float = TELLING) -> float:
    """Return the timeout of a call to libvirt, which ends `telling` seconds before all checks do."""
    return round(max(TELLING, end - monotonic() - telling), 1)


def let_answer_until(connection: LibvirtConnection, end: float) -> None:
    """Give libvirt nearly all of the time that is left for the checks."""
    connection.deadline = seconds_left(end)
    connection.refused_deadline = CONNECTING


def judge_network(kind: str, checks: Checks, active: object, settings: Settings) -> Finding:
    """Judge the bridge of the settings, or the network of VM_NAT_NETWORK by `active_network`."""
    if kind == "bridge":
        outcome, subject = checks.outcome("bridge"), "the bridge of VM_NETWORKING_BRIDGE_INTERFACE"
        return findings.judge("network bridge", subject, outcome, str(outcome), OFF)
    if kind == "user":
        hint = "leave user out of VM_NETWORKING_TYPE."
        return Finding("network user", OFF, "user networking", "It is QEMU's, and this hypervisor has none.", hint)
    network = settings.string("VM_NAT_NETWORK")
    if active is False:
        hint = f"virsh net-start {network}; virsh net-autostart {network}"
        active = errors.MachineFault(f"{network} is not active, or not defined.", hint)
    subject = f"the libvirt network {network} (VM_NAT_NETWORK)"
    return findings.judge("network nat", subject, active, f"{network} is active", OFF)


def begin_networks(
    checks: Checks, connection: LibvirtConnection, settings: Settings, wanted: Sequence[str], end: float
) -> None:
    """Begin the checks of the bridge and, in parallel, of the network VM_NAT_NETWORK, which another daemon may have."""
    if "bridge" in wanted:
        checks.begin("bridge", lambda: look_at_bridge(settings))
    checks.begin("nat", lambda: is_active(connection, settings.string("VM_NAT_NETWORK"), seconds_left(end)))


def active_network(checks: Checks, wanted: Sequence[str]) -> object:
    """Return True if VM_NAT_NETWORK is active, False if not, or a fault; no wait if it is not offered."""
    return checks.outcome("nat", None if "nat" in wanted else monotonic() + TELLING)


def published(active: object) -> dict[str, Value]:
    """Return the attribute about the network of VM_NAT_NETWORK, where it is known."""
    return {"HasVirshDefaultNetwork": active} if isinstance(active, bool) else {}


def is_active(connection: LibvirtConnection, network: str, seconds: float) -> bool:
    """Return True if libvirt has such a network, and it is up. Raises `errors.MachineFault` if unknown."""
    daemon = libvirt_daemons.of_networks()
    try:
        return bool(connection.call(lambda opened: opened.networkLookupByName(network).isActive(), seconds=seconds))
    except libvirt.libvirtError as error:
        if not faults.is_of_another_daemon(error):
            return False  # no such network, or the hypervisor's driver has no networks
        problem = f"{daemon} does not run: {faults.message_of(error)}."
        raise errors.MachineFault(problem, f"systemctl enable --now {daemon}.socket") from error
    except errors.MachineFault as fault:
        problem = f"{daemon} has not said whether {network} is active: {fault.problem}"
        hint = f"see what {daemon} hangs on, or restart {daemon}; guests survive that."
        raise errors.MachineFault(problem, hint) from fault


# Shared directories


SCRATCH = "VM_SHARE_SCRATCH"


def begin_shares(checks: Checks, settings: Settings, identity: Identity, end: float) -> None:
    """Begin the checks that take time, or may hang with a file system."""
    has_directories = bool(settings.strings(SHARE_DIRS))
    if has_directories:
        checks.begin("share dirs", lambda: _there(settings))
    if has_directories or _share_kind(settings) == VIRTIOFS:
        from vmgahp.drivers.libvirt.start import virtiofs  # with ctypes

        checks.begin("virtiofs", lambda: virtiofs.trouble(identity, end - monotonic()))


def judge_shares(
    settings: Settings, checks: Checks, qemu: str, identity: Identity, end: float, *, as_job_user: bool
) -> tuple[dict[str, Value], list[Finding]]:
    """Return the attributes and findings of shares; with `as_job_user` QEMU can run as the job's user."""

    @cache
    def why_not(kind: str) -> errors.Fault | None:
        return _trouble(kind, checks.outcome("virtiofs"), qemu, identity, end, as_job_user=as_job_user)

    found: list[Finding] = []
    scratch = _share_kind(settings)
    if scratch != NO_SHARE:
        found.append(findings.judge("share", SCRATCH, why_not(scratch), f"QEMU shares directories by {scratch}", OFF))
        scratch = scratch if found[-1].verdict == OK else NO_SHARE
    there, names = checks.outcome("share dirs") or (), []
    if isinstance(there, errors.Fault):
        found.append(findings.judge("share dirs", SHARE_DIRS, there, "", OFF))
        there = ()
    assert isinstance(there, tuple)
    for share, missing in there:
        trouble = missing or why_not(share.kind)
        access = "to read and write" if share.writable else "to read"
        good = f"jobs can have {share.directory} as {share.tag}, {access}, by {share.kind}"
        found.append(findings.judge("share dirs", share.setting, trouble, good, OFF))
        if trouble is None:
            names.append(share.tag)
    offered: dict[str, Value] = {"share": scratch}
    return offered | ({"share_dirs": ",".join(names)} if names else {}), found


def _share_kind(settings: Settings) -> str:
    kind = settings.string(SCRATCH).lower()
    return kind if kind in SHARES else NO_SHARE


def _there(settings: Settings) -> tuple[tuple[Share, errors.Fault | None], ...]:
    """Return every directory, with its fault if it has one. Raises `errors.MachineFault` for invalid settings."""
    from vmgahp.job.devices import inspect_shares  # with all that judges a job, for which most probes have no time

    def missing(share: Share) -> errors.Fault | None:
        problem = f"{share.setting} = {share.directory}: there is no such directory."
        fault = errors.MachineFault(problem, f"make it, mount it, or correct {share.setting}.")
        return None if os.path.isdir(share.directory) else fault

    return tuple((share, missing(share)) for share in inspect_shares(settings))


def _trouble(
    kind: str, virtiofsd: object, qemu: str, identity: Identity, end: float, *, as_job_user: bool
) -> errors.Fault | None:
    """Return the fault for which QEMU cannot share directories by `kind`; None if it can."""
    if kind == NINEP and not as_job_user:
        hint = TWO_GROUPS_HINT.replace("VM_RUN_AS_JOB_USER = False", f"{SCRATCH} = virtiofs")
        return errors.MachineFault(f"{TWO_GROUPS}.", hint)
    if kind == VIRTIOFS:
        if isinstance(virtiofsd, errors.Fault):
            return virtiofsd
        if virtiofsd:
            from vmgahp.drivers.libvirt.start import virtiofs

            return errors.MachineFault(f"{virtiofsd}.", virtiofs.hint())
    try:
        require_share(kind, qemu, identity, end)
    except errors.Fault as fault:
        return fault
    return None


# Trials of QEMU and passt, started without libvirt to see that they work.
#
# libvirt's capabilities show how QEMU was built. Whether a CPU model makes QEMU abort on this machine, or passt may
# make namespaces here, shows only when they are run.


_CPU_OF_MODE = {"host-passthrough": "host", "maximum": "max"}
"""QEMU's names for libvirt's CPU modes; libvirt works out host-model, for which the default CPU is tried."""
_QMP = b'{"execute": "qmp_capabilities"}\n{"execute": "quit"}\n'
"""The input that ends QEMU once it is up (QEMU's ``docs/interop/qmp-spec.rst``)."""


def start_qemu(path: str, accel: str, mode: str, machine: str, slirp: bool, identity: Identity, end: float) -> None:
    """Start QEMU with stopped CPUs and no devices, read its greeting, and let it quit.

    `accel` is kvm or qemu. Raises `errors.MachineFault` if it does not start, `Late` if not by `end` (monotonic).
    """
    command = [path, "-S", "-nodefaults", "-no-user-config", "-display", "none", "-m", "64"]
    command += ["-machine", f"{machine or 'none'},accel={'kvm' if accel == 'kvm' else 'tcg'}"]
    if cpu := _CPU_OF_MODE.get(mode):
        command += ["-cpu", cpu]
    if slirp:
        command += ["-netdev", "user,id=n0", "-device", "virtio-net-pci,netdev=n0,romfile="]
    command += ["-qmp", "stdio"]
    done = _run(command, _QMP, identity, end, [kvm.DEVICE] if accel == "kvm" else [])
    if done.status is None:
        raise Late(f"{path} was not up after {_patience(end)}.", "see what it waits for.")
    if done.status != 0 or b'"QMP"' not in done.out:
        said = _last_line(done) or f"it ended with status {done.status}"
        problem = f"{path} does not start with {accel} and the CPU mode {mode}: {said}."
        hint = "set VM_CPU_MODE to a mode that works here, or see why QEMU cannot have this one."
        raise errors.MachineFault(problem, hint)


def require_share(kind: str, path: str, identity: Identity, end: float) -> None:
    """Check that QEMU can share a directory by `kind`; Enterprise Linux's has no 9p. Raises `errors.MachineFault`."""
    device = "virtio-9p-pci" if kind == NINEP else "vhost-user-fs-pci"
    done = _run([path, "-device", f"{device},help"], b"", identity, end, [])
    if done.status != 0:
        problem = f"{path} shares no directories by {kind}: {_last_line(done) or 'it did not answer'}."
        hint = f"set VM_SHARE_SCRATCH to another, or have a QEMU that is built with {device}."
        raise errors.MachineFault(problem, hint)


PASST_TYPE = "passt_exec_t"


def _selinux_type(path: str) -> str:
    """Return the SELinux type of a file; empty where SELinux does not enforce."""
    with contextlib.suppress(OSError, IndexError), open(proc.ENFORCE) as file:
        if file.read().strip() == "1":
            return os.getxattr(path, "security.selinux").decode("utf-8", "replace").split(":")[2]
    return ""


def start_passt(identity: Identity, end: float, *, confined: bool = False) -> None:
    """Start passt as the job's user, as libvirt does, and end it by a connection (``--one-off``).

    The command exits when its background process has taken over. It reports that it listens before it makes its
    namespaces, which may fail. A libvirtd that SELinux has `confined` may start it by its own type only. Raises
    `errors.MachineFault` if it is missing or has not started by `end` (monotonic).
    """
    path = which("passt")
    if path is None:
        raise errors.MachineFault("passt is not installed.", "install passt.")
    if confined and (label := _selinux_type(path)) not in ("", PASST_TYPE):
        problem = f"SELinux enforces, and libvirtd may not start {path}, whose type is {label}."
        hint = f"install passt-selinux, which makes it {PASST_TYPE}; or leave user out of VM_NETWORKING_TYPE."
        raise errors.MachineFault(problem, hint)
    import tempfile  # late: it loads OpenSSL

    # AppArmor lets passt make its socket there.
    directory = tempfile.mkdtemp(prefix="vmgahp-")
    try:
        if identity.switching:
            os.chown(directory, identity.uid, identity.gid)
        listener = f"{directory}/socket"
        done = _run([path, "--one-off", "--socket", listener], b"", identity, end, [])
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as client:
            client.settimeout(max(0.05, end - monotonic()))
            client.connect(listener)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    if done.status is None:
        raise errors.MachineFault(f"passt did not listen within {_patience(end)}.", "see what it waits for.")
    if done.status != 0:
        problem = f"passt does not start: {_last_line(done) or f'it ended with status {done.status}'}."
        hint = "see whether this machine allows user namespaces (sysctl user.max_user_namespaces)."
        raise errors.MachineFault(problem, hint)


def save_nothing(connection: LibvirtConnection, execute: str, seconds: float) -> str:
    """Have libvirtd open a file in EXECUTE as for a save: one of another user, by a descriptor of this process.

    Returns the reason why it cannot; empty if it can. Raises `errors.MachineFault` and OSError if that is unknown.
    """
    name, status = f".vmgahp-save-{os.getpid()}", os.stat(execute)
    owner = Identity(status.st_uid, status.st_gid)
    file = owner.open_scratch(execute, name, os.O_RDWR | os.O_CREAT)
    try:
        connection.call(lambda opened: opened.saveImageGetXMLDesc(f"/proc/{os.getpid()}/fd/{file}"), seconds=seconds)
    except libvirt.libvirtError as error:  # always: it is no memory image
        if faults.is_closed(error):
            return f"{faults.CLOSED}: {faults.message_of(error)}."
    finally:
        os.close(file)
        owner.unlink_scratch(execute, name)
    return ""


def _run(command: list[str], stdin: bytes, identity: Identity, end: float, devices: list[str]) -> Finished:
    """Run a command as the job's user with the groups of `devices`."""
    groups = [os.stat(device).st_gid for device in devices if os.path.exists(device)]
    try:
        return run(command, deadline=max(0.05, end - monotonic()), stdin=stdin, user=identity, groups=groups)
    except OSError as error:
        problem = f"{command[0]} cannot be run: {error.strerror}."
        raise errors.MachineFault(problem, "see that it is installed and whole.") from error


def _patience(end: float) -> str:
    return f"the {max(0.0, end - monotonic()):.1f} s that were left" if end > monotonic() else "its deadline"


def _last_line(done: Finished) -> str:
    return done.complaints[-1].strip()[:300].rstrip(".") if done.complaints else ""
