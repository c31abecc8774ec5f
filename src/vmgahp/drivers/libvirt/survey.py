"""Whether jobs can run by libvirt here, and what they get: every check of the probe, seen to work."""

import os
from time import monotonic
from typing import NamedTuple
from xml.etree import ElementTree as etree

import libvirt

from vmgahp import errors, findings, kvm
from vmgahp.drivers.base import Survey
from vmgahp.drivers.libvirt import emulator, faults
from vmgahp.drivers.libvirt.describe import cpu_mode, domain_capabilities, has_passt
from vmgahp.findings import OFF, OK, Finding

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from vmgahp.config import Settings
    from vmgahp.drivers.base import Logger, Value
    from vmgahp.drivers.libvirt.connection import Connection
    from vmgahp.identity import Identity

KVM_DEADLINE = 0.3
"""Seconds for the proof that KVM works; a machine where it does needs a hundredth of that."""

EMULATOR_TIME = 1.6
"""Seconds kept for the second step: QEMU is tried once it is known by which accelerator."""

CONNECTING = 1.5
"""Seconds for reaching a libvirtd that is just being restarted."""

IFF_UP = 1
"""Of an interface's flags (``linux/if.h``)."""

_FIRMWARE = {"bios": "bios", "efi": "uefi"}


class _Host(NamedTuple):
    """What libvirtd says of itself."""

    capabilities: str
    version: int
    """Of the hypervisor, and of libvirt: 1,000,000 * major + 1,000 * minor + release."""
    libvirt_version: int
    domain_capabilities: dict[str, str]
    """By domain type: ``kvm`` and ``qemu``, those that this libvirtd has."""
    default_network: bool
    """Whether the network of VM_NAT_NETWORK is active."""


class Surveyor:
    """Looks at one machine for one VM type."""

    def __init__(
        self,
        vm_type: str,
        settings: "Settings",
        identity: "Identity",
        connection: "Connection",
        log: "Logger",
    ) -> None:
        self.vm_type = vm_type
        self.settings = settings
        self.identity = identity
        self.log = log
        self._connection = connection

    def survey(self, end: float) -> Survey:
        """All checks, those that do not need one another side by side; see `vmgahp.drivers.base.Driver.survey`."""
        first_end = end - EMULATOR_TIME
        # Ends before the checks do: what libvirt says, or does not say, is a better reason than the time.
        self._connection.deadline = max(0.3, min(CONNECTING, first_end - monotonic() - 0.3))
        wanted = self.settings.networking_types()
        checks: dict[str, Callable[[], object]] = {"libvirt": self._ask_libvirt}
        if self.vm_type != "qemu":
            checks["kvm"] = _prove_kvm
        if "bridge" in wanted:
            checks["bridge"] = self._look_at_bridge
        if "user" in wanted:
            checks["passt"] = lambda: emulator.start_passt(self.identity, first_end)
        outcomes = findings.side_by_side(checks, first_end)

        found: list[Finding] = []
        host = outcomes["libvirt"]
        found.append(
            findings.judge("libvirt", f"libvirtd at {self._connection.uri}", host, lambda: _versions(host))
        )
        accel = self._judge_kvm(outcomes.get("kvm"), found)
        if not isinstance(host, _Host):
            return Survey(found)
        text = host.domain_capabilities.get(accel) if accel else None
        if accel and text is None:
            found.append(_no_such_domains(self._connection.uri, accel))
        if not accel or text is None:
            return Survey(found, machine_attributes={"HasVirshDefaultNetwork": host.default_network})
        capabilities = etree.fromstring(text)
        slirp = "user" in wanted and not has_passt(text)
        tried = self._try_emulator(capabilities, accel, slirp, end)
        if not self.settings.xml_script():  # which describes a CPU of its own
            found.append(tried)
        networking = []
        for kind in wanted:
            finding = self._judge_network(kind, host, outcomes, slirp, tried)
            found.append(finding)
            if finding.verdict == OK:
                networking.append(kind)
        return Survey(
            found,
            attributes=self._attributes(host, capabilities, accel, networking),
            machine_attributes={"HasVirshDefaultNetwork": host.default_network},
            networking=networking,
            hypervisors=[
                name
                for name in ("kvm", "qemu")
                if name in host.domain_capabilities and name in (accel, "qemu")
            ],
            vm_types=self._vm_types(accel),
        )

    # The checks

    def _ask_libvirt(self) -> _Host:
        def ask(connection: "libvirt.virConnect") -> _Host:
            capabilities = connection.getCapabilities()
            here = etree.fromstring(capabilities).find(f"guest/arch[@name='{os.uname().machine}']")
            kinds = [] if here is None else [domain.get("type", "") for domain in here.iterfind("domain")]
            return _Host(
                capabilities,
                connection.getVersion(),
                connection.getLibVersion(),
                {kind: domain_capabilities(connection, kind) for kind in kinds if kind in ("kvm", "qemu")},
                self._nat_is_active(connection),
            )

        try:
            return self._connection.call(ask)
        except libvirt.libvirtError as error:
            raise faults.from_libvirt(error, "asking for its capabilities") from error

    def _nat_is_active(self, connection: "libvirt.virConnect") -> bool:
        try:
            network = connection.networkLookupByName(self.settings.string("VM_NAT_NETWORK"))
            return bool(network.isActive())
        except libvirt.libvirtError as error:
            if faults.is_connection_loss(error):
                raise
            return False

    def _look_at_bridge(self) -> str:
        name = self.settings.string("VM_NETWORKING_BRIDGE_INTERFACE")
        setting = f"VM_NETWORKING_BRIDGE_INTERFACE = {name}"
        place = f"/sys/class/net/{os.path.basename(name)}"
        if not os.path.isdir(place):
            raise errors.MachineFault(
                f"{setting}, and there is no such interface.", "make the bridge, or name another."
            )
        if not os.path.isdir(f"{place}/bridge"):
            raise errors.MachineFault(f"{setting}, and that is no bridge.", "name a bridge.")
        with open(f"{place}/flags") as file:
            if not int(file.read(), 16) & IFF_UP:
                raise errors.MachineFault(f"{setting}, and that bridge is down.", f"ip link set {name} up")
        return f"the bridge {name} is up"

    def _try_emulator(self, capabilities: etree.Element, accel: str, slirp: bool, end: float) -> Finding:
        """Start QEMU as jobs get it: with this accelerator, this CPU, on this machine type."""
        path = capabilities.findtext("path") or "qemu-system-x86_64"
        mode = cpu_mode(self.settings, accel)
        looked_at = f"{path} with {accel} and the CPU mode {mode}"
        supported = capabilities.find(f"cpu/mode[@name='{mode}']")
        if supported is None or supported.get("supported") != "yes":
            return Finding(
                "cpu",
                findings.BAD,
                looked_at,
                f"libvirt says that QEMU has no CPU mode {mode} here.",
                "set VM_CPU_MODE to one that virsh domcapabilities shows as supported.",
            )
        try:
            emulator.start_qemu(
                path, accel, mode, capabilities.findtext("machine") or "", slirp, self.identity, end
            )
        except errors.Fault as fault:
            return Finding("cpu", findings.BAD, looked_at, fault.problem, fault.cure)
        return Finding("cpu", OK, looked_at, "QEMU starts and answers")

    # What is made of them

    def _judge_kvm(self, reason: object, found: list[Finding]) -> str:
        """The domain type of jobs, empty where they can have none."""
        if self.vm_type == "qemu":
            return "qemu"
        looked_at = f"{kvm.DEVICE}, with a guest in 64-bit mode"
        if not isinstance(reason, errors.Fault):
            found.append(Finding("kvm", OK, looked_at, "a guest runs at the speed of the hardware"))
            return "kvm"
        emulate = self.settings.boolean("VM_ALLOW_EMULATION")
        found.append(Finding("kvm", OFF if emulate else findings.BAD, looked_at, reason.problem, reason.cure))
        return "qemu" if emulate else ""

    def _judge_network(
        self, kind: str, host: _Host, outcomes: dict[str, object], slirp: bool, tried: Finding
    ) -> Finding:
        name = f"network {kind}"
        if kind == "nat":
            network = self.settings.string("VM_NAT_NETWORK")
            looked_at = f"the libvirt network {network} (VM_NAT_NETWORK)"
            if host.default_network:
                return Finding(name, OK, looked_at, f"{network} is active")
            cure = f"virsh net-start {network}; virsh net-autostart {network}"
            return Finding(name, OFF, looked_at, f"{network} is not active, or not defined.", cure)
        if kind == "bridge":
            outcome = outcomes["bridge"]
            return findings.judge(
                name, "the bridge of VM_NETWORKING_BRIDGE_INTERFACE", outcome, str(outcome), OFF
            )
        if slirp:
            looked_at = "QEMU's own user networking (slirp)"
            if tried.verdict == OK:
                return Finding(name, OK, looked_at, "QEMU starts with it")
            return Finding(name, OFF, looked_at, f"QEMU does not start: {tried.seen}", tried.cure)
        return findings.judge(name, "passt", outcomes["passt"], "it starts and listens", OFF)

    def _vm_types(self, accel: str) -> list[str]:
        """The types that this driver would serve here; kvm and libvirt mean what jobs of `vm_type` get."""
        if self.vm_type == "qemu":
            return ["qemu"]
        return list(dict.fromkeys((self.vm_type, "kvm", "libvirt", "qemu")))

    def _attributes(
        self, host: _Host, capabilities: etree.Element, accel: str, networking: list[str]
    ) -> "dict[str, Value]":
        machines = [
            machine.text or ""
            for machine in etree.fromstring(host.capabilities).iterfind(
                f"guest/arch[@name='{os.uname().machine}']/machine[@canonical]"
            )
        ]
        firmware = [
            _FIRMWARE[value.text or ""]
            for value in capabilities.iterfind("os/enum[@name='firmware']/value")
            if value.text in _FIRMWARE
        ]
        most = capabilities.find("vcpu")
        return {
            "accel": "kvm" if accel == "kvm" else "tcg",
            "version": _version(host.version),
            "libvirt_version": _version(host.libvirt_version),
            "max_vcpus": int(most.get("max", "1")) if most is not None else 1,
            "machine_types": ",".join(dict.fromkeys(machines)),
            "firmware": ",".join(dict.fromkeys(["bios", *firmware])),
            "suspend": True,
            "checkpoint": not self.settings.xml_script(),
            "snapshot": False,
            "networking": ",".join(networking),
            "gpu": False,
        }


def _prove_kvm() -> None:
    reason = kvm.check(KVM_DEADLINE)
    if reason is not None:
        raise kvm_fault(reason)


def kvm_fault(reason: str) -> errors.MachineFault:
    """KVM is what jobs should get, and it does not work."""
    return errors.MachineFault(
        f"KVM does not work on this machine: {reason}.",
        "mend KVM, or set VM_ALLOW_EMULATION = True to run jobs slowly, by emulation.",
    )


def _no_such_domains(uri: str, accel: str) -> Finding:
    return Finding(
        "domain type",
        findings.BAD,
        f"the capabilities of {uri}",
        f"libvirt knows no domains of type {accel} for {os.uname().machine}.",
        "install QEMU for this machine's architecture (qemu-system-x86), and restart libvirtd.",
    )


def _versions(host: object) -> str:
    assert isinstance(host, _Host)
    return f"libvirt {_version(host.libvirt_version)} answers, with QEMU {_version(host.version)}"


def _version(number: int) -> str:
    return f"{number // 1000000}.{number // 1000 % 1000}.{number % 1000}"


__all__ = ["KVM_DEADLINE", "Surveyor", "kvm_fault"]
