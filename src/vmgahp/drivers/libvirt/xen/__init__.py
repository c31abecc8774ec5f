"""The VM type xen: the differences from QEMU in describing, starting and blaming for guests of libxl.

Its guests have no process on this machine, their disks are block devices, and libxl reports the reason of a failure
in a log only. `xen.machine` is one guest, `xen.console` its console, `xen.survey` checks what this machine offers.
"""

import os

import libvirt

from vmgahp import errors
from vmgahp.checkpoint.files import Unusable
from vmgahp.domain import verify
from vmgahp.domain import xen as domain_xen
from vmgahp.domain.job_xml import ATTRIBUTE
from vmgahp.domain.restore import SavedMismatch, reconcile_xen
from vmgahp.domain.xen import DOMAIN_TYPE, NETWORKS
from vmgahp.drivers.base import Survey
from vmgahp.drivers.libvirt import capabilities, faults, other_hypervisors
from vmgahp.drivers.libvirt.checkpoint import XEN, LibvirtRestart
from vmgahp.drivers.libvirt.describe import ONE_TIME, Describer, HostResources, Plan
from vmgahp.drivers.libvirt.driver import LibvirtDriver
from vmgahp.drivers.libvirt.host_checks import look_at_bridge
from vmgahp.drivers.libvirt.machine import LibvirtMachine, Order
from vmgahp.drivers.libvirt.xen import loop_device
from vmgahp.drivers.libvirt.xen.console import PtyCapture
from vmgahp.drivers.libvirt.xen.libxl_log import LibxlLog
from vmgahp.drivers.libvirt.xen.machine import XenMachine, XenSaver
from vmgahp.drivers.libvirt.xen.survey import XenSurveyor
from vmgahp.drivers.resources import Resources
from vmgahp.errors import JobFault, MachineFault
from vmgahp.host.runtime_dir import runtime_dir
from vmgahp.job import data_disks
from vmgahp.job.ad import JobAd
from vmgahp.job.policy_view import PolicyView
from vmgahp.job.spec import Disk, JobSpec
from vmgahp.job.xen import XenBoot, open_file

URI = "xen:///system"


class XenDescriber(Describer):
    """The writer of descriptions of Xen jobs."""

    def plan(self, view: PolicyView, spec: JobSpec, domain_type: str) -> Plan:
        plan = Plan(view, spec, domain_type, "", passt=False)
        if self.settings.xml_script():
            return plan
        capabilities.require(spec, domain_type, "", self._connection, self.settings, self.identity)
        assert spec.xen is not None
        domain_xen.require(spec, spec.xen)
        if any(nic.networking_type == "bridge" for nic in spec.nics):
            look_at_bridge(self.settings)
        return plan

    def build(self, plan: Plan, given: HostResources) -> str:
        spec, boot = plan.spec, plan.spec.xen
        assert boot is not None
        devices = given.devices or {disk.device: f"/dev/loop{ONE_TIME}" for disk in spec.disks}
        host = domain_xen.XenHost(
            uuid=given.uuid,
            devices=devices,
            kernel=given.kernel,
            initrd=given.initrd,
            nat_network=self.settings.string("VM_NAT_NETWORK"),
            bridge=self.settings.string("VM_NETWORKING_BRIDGE_INTERFACE"),
        )
        return domain_xen.build(spec, boot, host)

    def _prepare(self, plan: Plan, uuid: str, resources: Resources) -> HostResources:
        """Make the resources as `Describer._prepare` does, and keep files that the XML names open until the guest is
        gone.
        """
        spec, boot = plan.spec, plan.spec.xen
        assert boot is not None

        def keep(descriptor: int) -> int:
            resources.at_end.append(lambda: os.close(descriptor))
            return descriptor

        def held(what: str, word: str) -> str:
            file = getattr(boot, what)
            if file is None:
                return ""
            try:
                # libxl opens it as root. This name always stands for the file that the job's user could open.
                return f"/proc/{os.getpid()}/fd/{keep(open_file(file, spec.working_dir, self.identity))}"
            except OSError as error:
                raise JobFault(
                    word, f"The {what} {file.path} cannot be opened: {error.strerror}.", "see that it stays."
                ) from error

        kernel = held("kernel", errors.XEN_KERNEL_NOT_FOUND)
        initrd = held("initrd", errors.XEN_INITRD_NOT_FOUND)
        devices = {}
        for disk in spec.disks:
            devices[disk.device], descriptor = self._attach(disk, spec.working_dir)
            keep(descriptor)
        limit = self.settings.size("VM_CONSOLE_LOG_MAX")
        if limit:
            resources.console = PtyCapture(
                os.path.join(runtime_dir(), "console"),
                lambda: self._open_console_file(spec.working_dir),
                limit,
                self.log,
            )
        return HostResources(uuid, devices=devices, kernel=kernel, initrd=initrd)

    def _attach(self, disk: Disk, working_dir: str) -> tuple[str, int]:
        flags = os.O_RDWR if disk.writable else os.O_RDONLY
        try:
            if disk.transferred:
                image = self.identity.open_scratch(working_dir, os.path.basename(disk.path), flags)
            else:
                image = self.identity.open_named(disk.path, flags)
            try:
                return loop_device.attach(image, writable=disk.writable, shared=disk.shared)
            finally:
                os.close(image)
        except OSError as error:
            raise JobFault(
                errors.INVALID_DISK_PARAM,
                f"VMPARAM_vm_Disk: {disk.path} cannot be used: {error.strerror}.",
                "see that it stays where it is, and that no other VM uses it at the same time.",
            ) from error


class XenDriver(LibvirtDriver):
    """The driver of the VM type xen, by libvirt's driver for libxl."""

    describer = XenDescriber
    machine = XenMachine
    saver = XenSaver
    checkpoints = XEN
    usual_uri = URI

    def plan(self, job: JobAd) -> Plan:
        try:
            return super().plan(job)
        except JobFault as fault:
            raise in_words_of_xen(fault) from fault

    def explain(self, job: JobAd, fault: errors.Fault) -> errors.Fault:
        return in_words_of_xen(fault) if isinstance(fault, JobFault) else fault

    def survey(self, end: float) -> Survey:
        return XenSurveyor(self.vm_type, self.settings, self.identity, self.log, self.connection).survey(end)

    def _read(self, job: JobAd) -> JobSpec:
        if job.expression(ATTRIBUTE) is not None:
            raise JobFault(
                errors.MISMATCHED,
                f"{ATTRIBUTE} is set, and a Xen job cannot bring XML of its own.",
                "leave it out, or require a machine with kvm or qemu in VM_HYPERVISORS.",
            )
        data_disks.refuse(job)
        boot = XenBoot.parse(job, self.settings)
        networks = self.settings.networking_types(NETWORKS)
        spec = JobSpec.parse(job, self.settings, networks=networks)
        if boot.hardware and "hvm" not in self._os_types():
            raise JobFault(
                errors.MISMATCHED,
                "xen_kernel = vmx, and Xen has no hardware virtualization on this machine.",
                "require another machine, or boot a paravirtual kernel.",
            )
        # A partition is a disk by itself here.
        disks = (disk._replace(device=disk.device + disk.partition, partition="") for disk in spec.requests)
        return spec._replace(xen=boot, requests=tuple(disks))

    def _domain_type(self) -> str:
        if not self._os_types():
            raise MachineFault(
                f"The libvirt at {self.connection.uri} has no domains of type {DOMAIN_TYPE}.",
                "boot this machine with Xen, and install libvirt's driver for it (libvirt-daemon-driver-xen).",
            )
        return DOMAIN_TYPE

    def _os_types(self) -> tuple[str, ...]:
        return other_hypervisors.ask(self.connection, DOMAIN_TYPE).os_types

    def _describe_restart(self, restart: LibvirtRestart, ours: str) -> str:
        try:
            return reconcile_xen(restart.manifest.facts["xml"], ours)
        except SavedMismatch as mismatch:
            raise Unusable(
                f"the VM that was saved is not the one that the job asks for: {mismatch}", True
            ) from mismatch

    def _verify(self, live: str, asked: str, spec: JobSpec) -> None:
        verify.against_xen(live, asked, spec)

    def _why_not_save(self, spec: JobSpec, domain_type: str) -> str:
        hardware = spec.xen is not None and spec.xen.hardware
        if hardware and not self.settings.boolean("XEN_ALLOW_HARDWARE_VT_SUSPEND"):
            return "it has hardware virtualization, and XEN_ALLOW_HARDWARE_VT_SUSPEND is not set"
        return ""

    def _create(self, order: Order, machine: LibvirtMachine, plan: Plan) -> None:
        assert isinstance(machine, XenMachine)
        machine.saver.cannot = machine.saver.cannot or self._why_not_save(plan.spec, DOMAIN_TYPE)
        machine.libxl_log = LibxlLog()
        super()._create(order, machine, plan)

    def _blame(
        self, error: libvirt.libvirtError, doing: str, words: str, machine: LibvirtMachine, plan: Plan
    ) -> errors.Fault:
        """Return the fault by libxl's log: libvirt has one error for nearly all failures of libxl."""
        assert isinstance(machine, XenMachine)
        if error.get_error_code() == libvirt.VIR_ERR_INTERNAL_ERROR and machine.libxl_log is not None:
            message = faults.message_of(error, machine.libxl_log.last_words())
            own_kernel = plan.spec.xen is not None and not plan.spec.xen.hardware
            return machine.libxl_log.judge(f"libvirt failed while {doing}: {message}.", own_kernel=own_kernel)
        return super()._blame(error, doing, words, machine, plan)


def in_words_of_xen(fault: JobFault) -> JobFault:
    """Return the fault with Xen's hold code: HTCondor has codes for each hypervisor."""
    word = fault.code.replace("_KVM_", "_XEN_")
    return fault if word == fault.code else JobFault(word, fault.problem, fault.hint)
