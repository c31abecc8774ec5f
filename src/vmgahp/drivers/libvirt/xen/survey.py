"""The survey of a machine for Xen jobs: whether they can run, and what they get."""

from vmgahp import errors, findings
from vmgahp.config import Settings
from vmgahp.domain.xen import DOMAIN_TYPE, NETWORKS
from vmgahp.drivers.base import Survey
from vmgahp.drivers.libvirt import other_hypervisors
from vmgahp.drivers.libvirt.other_hypervisors import Hypervisor
from vmgahp.drivers.libvirt.survey import LibvirtSurveyor
from vmgahp.findings import BAD, OFF, OK, Finding
from vmgahp.job.xen import BOOTLOADER, require_bootloader


class XenSurveyor(LibvirtSurveyor):
    """The surveyor of one machine for Xen jobs."""

    def survey(self, end: float) -> Survey:
        """Survey the machine as `vmgahp.drivers.base.Driver.survey` says."""
        connection, settings = self._connection, self.settings
        by_script = self._judge_script()
        if findings.first_bad(by_script):
            return Survey(by_script)
        wanted, checks = settings.networking_types(NETWORKS), findings.Checks(end)
        other_hypervisors.let_answer_until(connection, end)
        checks.begin("libvirt", lambda: other_hypervisors.ask(connection, DOMAIN_TYPE))
        other_hypervisors.begin_networks(checks, connection, settings, wanted, end)
        outcome = checks.outcome("libvirt")
        looked_at = f"domains of type {DOMAIN_TYPE} at {connection.uri}"
        if not isinstance(outcome, other_hypervisors.Hypervisor):
            return Survey([findings.judge("libvirt", looked_at, outcome, "", BAD)])
        if not outcome.os_types:
            hint = "boot this machine with Xen, and install libvirt's driver for it (libvirt-daemon-driver-xen)."
            return Survey([Finding("libvirt", BAD, looked_at, "libvirt has none.", hint)])
        libvirt_version, xen_version = map(other_hypervisors.version, (outcome.libvirt_version, outcome.version))
        seen = f"libvirt {libvirt_version} has them, with Xen {xen_version}"
        found = [*by_script, Finding("libvirt", OK, looked_at, seen)]
        bootloader = self._bootloader()
        found += [bootloader, *_hardware(outcome, settings)]
        active = other_hypervisors.active_network(checks, wanted)
        networks = {kind: self._network(kind, checks, active) for kind in wanted}
        networking = [kind for kind, finding in networks.items() if finding.verdict == OK]
        script = bool(settings.xml_script())
        return Survey(
            [*found, *networks.values()],
            attributes={
                **outcome.attributes(networking, suspend=True, checkpoint=not script),
                "bootloader": bootloader.verdict == OK,
                "hvm": "hvm" in outcome.os_types,
            },
            machine_attributes=other_hypervisors.published(active),
            networking=networking,
            hypervisors=[DOMAIN_TYPE],
            vm_types=[self.vm_type],
        )

    def _bootloader(self) -> Finding:
        path = self.settings.string(BOOTLOADER).strip("\"'")
        looked_at = f"{BOOTLOADER}, for jobs with xen_kernel = included"
        if not path:
            return Finding(
                "bootloader",
                OFF,
                looked_at,
                f"{BOOTLOADER} is not set: such jobs are held.",
                f"set {BOOTLOADER} to the path of pygrub; docs/how-to/xen.md says what that risks.",
            )
        try:
            require_bootloader(path)
        except errors.Fault as fault:
            return findings.judge("bootloader", looked_at, fault, "", OFF)
        return Finding("bootloader", OK, looked_at, f"{path} is there")

    def _network(self, kind: str, checks: findings.Checks, active: object) -> Finding:
        if kind == "nat":
            return other_hypervisors.judge_nat(self.settings.string("VM_NAT_NETWORK"), active)
        return other_hypervisors.judge_bridge(checks.outcome("bridge"))


def _hardware(host: Hypervisor, settings: Settings) -> list[Finding]:
    """Return the finding if VM_HARDWARE_VT is set: whether Xen has hardware virtualization."""
    if not settings.boolean("VM_HARDWARE_VT"):
        return []
    looked_at = "VM_HARDWARE_VT, for jobs with xen_kernel = vmx"
    if "hvm" in host.os_types:
        return [Finding("hvm", OK, looked_at, "Xen has hardware virtualization")]
    hint = "switch it on in the machine's firmware, or set VM_HARDWARE_VT = False."
    return [Finding("hvm", OFF, looked_at, "Xen has no hardware virtualization here: such jobs are held.", hint)]
