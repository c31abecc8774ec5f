"""The VM type xen: how guests of libxl differ from those of QEMU.

Its guests have no process on this machine, their disks are block devices, and libxl reports the reason of a failure
in a log only (`xen.dom0`).
"""

import os

import libvirt

from vmgahp import errors, findings, lifecycle
from vmgahp.checkpoint import memory_image
from vmgahp.checkpoint.substitute import Substitute
from vmgahp.domain import build as domain_xen
from vmgahp.domain import verify
from vmgahp.domain.build import XEN_DOMAIN_TYPE, XEN_NETWORKS
from vmgahp.domain.restore import reconcile_xen
from vmgahp.drivers.base import Survey, Value
from vmgahp.drivers.libvirt import survey
from vmgahp.drivers.libvirt.driver import LibvirtDriver
from vmgahp.drivers.libvirt.life.guest import Check, Make
from vmgahp.drivers.libvirt.life.machine import LibvirtMachine
from vmgahp.drivers.libvirt.life.save import XEN, Saver
from vmgahp.drivers.libvirt.link import faults
from vmgahp.drivers.libvirt.start import capabilities
from vmgahp.drivers.libvirt.start.describe import NO_UUID, ONE_TIME, Describer, Plan, first_attribute
from vmgahp.drivers.libvirt.survey import LibvirtSurveyor, look_at_bridge
from vmgahp.drivers.libvirt.xen import dom0
from vmgahp.drivers.libvirt.xen.dom0 import LibxlLog, PtyCapture
from vmgahp.drivers.resources import Resources
from vmgahp.errors import JobFault, MachineFault
from vmgahp.findings import OFF, OK, Finding
from vmgahp.host.system_calls import Opened
from vmgahp.job.ad import JobAd
from vmgahp.job.attributes import LIBVIRT_XML
from vmgahp.job.disks import refuse_made
from vmgahp.job.policy_view import PolicyView
from vmgahp.job.spec import Disk, JobSpec
from vmgahp.job.xen import BOOTLOADER, XenBoot, open_file, require_bootloader
from vmgahp.metrics import Status

URI = "xen:///system"
NO_XEN_HINT = "boot this machine with Xen, and install libvirt's driver for it (libvirt-daemon-driver-xen)."


class XenSaver(Saver):
    """A saver for libvirt's Xen driver, which saves without flags and restores the XML in the image it is given."""

    takes_xml = False

    def substitute(self, descriptor: int, xml: str) -> Substitute:
        return memory_image.substitute_xen(descriptor, xml)

    def inspect(self, descriptor: int) -> None:
        memory_image.inspect_xen(descriptor)

    def write(self, domain: libvirt.virDomain, path: str, *, checkpoint: bool) -> None:
        domain.save(path)


class XenMachine(LibvirtMachine):
    """A Xen domain: it has no process on this machine, and its console is a terminal, another one after a restore."""

    libxl_log: LibxlLog | None = None
    """The log of libxl since the guest's start began."""

    def pid(self) -> int:
        return 0

    def look(self) -> Status:
        report = super().look()
        if report.state == lifecycle.RUNNING:
            self._follow_console()  # a guest that has rebooted has another terminal
        return report

    def save(self, operation: str) -> None:
        """Save the guest, after resuming a paused one, since libxl needs the guest's cooperation."""
        self.require_saving()
        if self.state is not lifecycle.SOFT_SUSPENDED:
            super().save(operation)
            return
        self.unpause()
        try:
            super().save(operation)
        except BaseException:
            if not self.overruled:
                self.pause()
            raise

    def begin(self, make: Make, check: Check) -> None:
        def look(connection: libvirt.virConnect, domain: libvirt.virDomain, live: str) -> None:
            check(connection, domain, live)
            self._follow_console(live)

        super().begin(make, look)

    def _follow_console(self, live: str = "") -> None:
        """Capture the console's current terminal; without one the guest runs all the same."""
        console = self.resources.console
        if not isinstance(console, PtyCapture):
            return
        try:
            live = live or self.live_xml()
            terminal = first_attribute(live, "devices/console", "tty")
            console.follow(terminal or first_attribute(live, "devices/serial/source", "path"))
        except (libvirt.libvirtError, errors.Fault, OSError) as error:
            self.log(f"{self.name}: its console cannot be read: {error}")


class XenSurveyor(LibvirtSurveyor):
    """The surveyor of one machine for Xen jobs."""

    def survey(self, end: float) -> Survey:
        found, asked = self._judge_script(), list[capabilities.Hypervisor]()
        if findings.first_bad(found):
            return Survey(found)

        def ask() -> capabilities.Hypervisor:
            asked.append(capabilities.ask_hypervisor(self._connection, XEN_DOMAIN_TYPE))
            if not asked[0].os_types:
                raise MachineFault("libvirt has none.", NO_XEN_HINT)
            return asked[0]

        networks = self.settings.networking_types(XEN_NETWORKS)
        made = survey.survey_other(self.settings, self._connection, XEN_DOMAIN_TYPE, end, ask, networks)
        found += made.findings
        if not made.hypervisors:
            return made._replace(findings=found)
        bootloader = self._bootloader()
        found.append(bootloader)
        if self.settings.boolean("VM_HARDWARE_VT"):
            subject = "VM_HARDWARE_VT, for jobs with xen_kernel = vmx"
            if "hvm" in asked[0].os_types:
                found.append(Finding("hvm", OK, subject, "Xen has hardware virtualization"))
            else:
                hint = "switch it on in the machine's firmware, or set VM_HARDWARE_VT = False."
                seen = "Xen has no hardware virtualization here: such jobs are held."
                found.append(Finding("hvm", OFF, subject, seen, hint))
        own: dict[str, Value] = {
            "suspend": True,
            "checkpoint": not self.settings.xml_script(),
            "bootloader": bootloader.verdict == OK,
            "hvm": "hvm" in asked[0].os_types,
        }
        return made._replace(findings=found, attributes={**made.attributes, **own}, vm_types=[self.vm_type])

    def _bootloader(self) -> Finding:
        path = self.settings.string(BOOTLOADER).strip("\"'")
        subject = f"{BOOTLOADER}, for jobs with xen_kernel = included"
        if not path:
            hint = f"set {BOOTLOADER} to the path of pygrub; docs/how-to/xen.md says what that risks."
            return Finding("bootloader", OFF, subject, f"{BOOTLOADER} is not set: such jobs are held.", hint)
        try:
            require_bootloader(path)
        except errors.Fault as fault:
            return findings.judge("bootloader", subject, fault, "", OFF)
        return Finding("bootloader", OK, subject, f"{path} is there")


class XenDescriber(Describer):
    """The writer of descriptions of Xen jobs."""

    def plan(self, view: PolicyView, spec: JobSpec, domain_type: str) -> Plan:
        plan = super().plan(view, spec, domain_type)
        if not self.settings.xml_script():
            assert spec.xen is not None
            domain_xen.require_xen(spec, spec.xen)
            if any(nic.networking_type == "bridge" for nic in spec.vm.nics):
                look_at_bridge(self.settings)
        return plan

    def _dry(self, plan: Plan) -> str:
        devices = {disk.device: f"/dev/loop{ONE_TIME}" for disk in plan.spec.disks}
        return self._build(plan, NO_UUID, devices, ONE_TIME, ONE_TIME)

    def _build(self, plan: Plan, uuid: str, devices: dict[str, str], kernel: str, initrd: str) -> str:
        assert plan.spec.xen is not None
        nat, bridge = self.settings.string("VM_NAT_NETWORK"), self.settings.string("VM_NETWORKING_BRIDGE_INTERFACE")
        host = domain_xen.XenHost(uuid, devices, kernel, initrd, nat, bridge)
        return domain_xen.build_xen(plan.spec, plan.spec.xen, host)

    def _made(self, plan: Plan, uuid: str, resources: Resources) -> str:
        """Make the resources, keep files that the XML names open until the guest is gone, and return the XML."""
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
                return f"/proc/{os.getpid()}/fd/{keep(open_file(file, spec.vm.working_dir, self.identity))}"
            except OSError as error:
                problem = f"The {what} {file.path} cannot be opened: {error.strerror}."
                raise JobFault(word, problem, "see that it stays.") from error

        kernel, initrd = held("kernel", errors.XEN_KERNEL_NOT_FOUND), held("initrd", errors.XEN_INITRD_NOT_FOUND)
        devices = {}
        for disk in spec.disks:
            devices[disk.device], descriptor = self._attach(disk, spec.vm.working_dir)
            keep(descriptor)
        if limit := self.settings.size("VM_CONSOLE_LOG_MAX"):
            resources.console = self._capture(PtyCapture, spec, limit)
        return self._build(plan, uuid, devices, kernel, initrd)

    def _attach(self, disk: Disk, working_dir: str) -> tuple[str, int]:
        flags = os.O_RDWR if disk.writable else os.O_RDONLY
        try:
            with Opened(open_file(disk, working_dir, self.identity, flags)) as image:
                return dom0.attach(image, writable=disk.writable, shared=disk.shared)
        except OSError as error:
            problem = f"VMPARAM_vm_Disk: {disk.path} cannot be used: {error.strerror}."
            hint = "see that it stays where it is, and that no other VM uses it at the same time."
            raise JobFault(errors.INVALID_DISK_PARAM, problem, hint) from error


class XenDriver(LibvirtDriver):
    """The driver of the VM type xen, by libvirt's driver for libxl."""

    describer = XenDescriber
    machine = XenMachine
    saver = XenSaver
    checkpoints = XEN
    reconcile = staticmethod(reconcile_xen)
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
        if job.expression(LIBVIRT_XML) is not None:
            problem = f"{LIBVIRT_XML} is set, and a Xen job cannot bring XML of its own."
            hint = "leave it out, or require a machine with kvm or qemu in VM_HYPERVISORS."
            raise JobFault(errors.MISMATCHED, problem, hint)
        refuse_made(job)
        boot = XenBoot.parse(job, self.settings)
        networks = self.settings.networking_types(XEN_NETWORKS)
        spec = JobSpec.parse(job, self.settings, networks=networks)
        if boot.hardware and "hvm" not in self._os_types():
            problem = "xen_kernel = vmx, and Xen has no hardware virtualization on this machine."
            raise JobFault(errors.MISMATCHED, problem, "require another machine, or boot a paravirtual kernel.")
        # A partition is a disk by itself here.
        disks = (disk._replace(device=disk.device + disk.partition, partition="") for disk in spec.requests)
        return spec._replace(xen=boot, requests=tuple(disks))

    def _domain_type(self) -> str:
        if not self._os_types():
            problem = f"The libvirt at {self.connection.uri} has no domains of type {XEN_DOMAIN_TYPE}."
            raise MachineFault(problem, NO_XEN_HINT)
        return XEN_DOMAIN_TYPE

    def _os_types(self) -> tuple[str, ...]:
        return capabilities.ask_hypervisor(self.connection, XEN_DOMAIN_TYPE).os_types

    def _verify(self, live: str, asked: str, spec: JobSpec) -> None:
        verify.against_xen(live, asked, spec)

    def _why_not_save(self, spec: JobSpec, domain_type: str, xml: str) -> str:
        hardware = spec.xen is not None and spec.xen.hardware
        if hardware and not self.settings.boolean("XEN_ALLOW_HARDWARE_VT_SUSPEND"):
            return "it has hardware virtualization, and XEN_ALLOW_HARDWARE_VT_SUSPEND is not set"
        return ""

    def _create(self, machine: LibvirtMachine, plan: Plan) -> None:
        assert isinstance(machine, XenMachine)
        machine.libxl_log = LibxlLog()
        super()._create(machine, plan)

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
