"""Starts, finds and kills domains."""

from collections.abc import Callable, Container

from vmgahp import errors
from vmgahp.checkpoint.files import Unusable
from vmgahp.checkpoint.manifest import CheckpointKind
from vmgahp.config import Settings
from vmgahp.domain import verify
from vmgahp.domain.job_xml import ad_for_policy
from vmgahp.drivers.base import Logger, Survey
from vmgahp.drivers.libvirt import binding as libvirt
from vmgahp.drivers.libvirt import (
    capabilities,
    faults,
    firmware,
    hooks,
    host_checks,
    job_xml,
    names,
    other_hypervisors,
    provision,
    qemu_process,
    running,
)
from vmgahp.drivers.libvirt.checkpoint import LIBVIRT, JobCheckpoints, LibvirtCheckpoints, LibvirtRestart
from vmgahp.drivers.libvirt.describe import Describer, Plan, first_attribute, has_display
from vmgahp.drivers.libvirt.disk_files import DiskFiles
from vmgahp.drivers.libvirt.fault_table import DESCRIPTION
from vmgahp.drivers.libvirt.guest import LibvirtGuest
from vmgahp.drivers.libvirt.hooks import Described
from vmgahp.drivers.libvirt.kill import kill
from vmgahp.drivers.libvirt.machine import LibvirtMachine, Order
from vmgahp.drivers.libvirt.save import LEFTOVERS, Saver
from vmgahp.drivers.libvirt.uri import SESSION_URI, connection_for
from vmgahp.drivers.managed import ManagedDriver
from vmgahp.drivers.resources import Later, Resources
from vmgahp.host import execute, proof, scratch
from vmgahp.host.job_user import Identity
from vmgahp.job.ad import JobAd
from vmgahp.job.look import look
from vmgahp.job.own_xml import NOTHING, OwnXml
from vmgahp.job.spec import JobSpec
from vmgahp.metrics import Usage


class LibvirtDriver(ManagedDriver[Plan, LibvirtMachine]):
    """VM types kvm and libvirt (by KVM, or by TCG where VM_ALLOW_EMULATION allows it) and qemu (always TCG).

    The type libvirt is kvm under a name that condor_starter does not know, and so takes periodic checkpoints
    of; or whatever VM_LIBVIRT_DOMAIN_TYPE makes of it (`others`).
    """

    # What another hypervisor has of its own (`xen`).
    describer: type[Describer] = Describer
    machine: type[LibvirtMachine] = LibvirtMachine
    saver: type[Saver] = Saver
    checkpoints: CheckpointKind = LIBVIRT
    usual_uri = ""

    def __init__(self, vm_type: str, settings: Settings, identity: Identity, log: Logger) -> None:
        super().__init__(vm_type, settings, identity, log)
        self.connection = connection_for(settings, log, self.usual_uri)
        self.checkpoints_of = LibvirtCheckpoints(self.checkpoints, identity, self.connection, log)
        self._describer = self.describer(settings, identity, self.connection, log)

    # The contract

    def plan(self, job: JobAd) -> Plan:
        xml = job_xml.load(job, self.settings, self.identity)
        for_policy = ad_for_policy(job, xml)
        hooks.require(self.settings, for_policy)
        try:
            spec = look(self._read(job, xml.asks if xml else NOTHING), self.settings, self.identity)
            domain_type = capabilities.type_for(spec, self._domain_type(), self.settings)
            provision.require_possible(spec, domain_type, self.settings)
        except errors.JobFault:
            execute.require_entry(job.working_dir(), self.identity)
            other_hypervisors.require_fit(self.vm_type, self.connection, self.settings)
            raise
        execute.require_room(spec.working_dir, self.identity)
        name = names.free_name(self.connection, spec.name, spec.working_dir, self.log)
        return self._describer.plan(for_policy, spec._replace(name=name), domain_type)._replace(xml=xml)

    def show(self, plan: Plan) -> str:
        self._require_free_macs(plan.spec)
        try:
            return self._describer.show(plan._replace(spec=self._with_macs(plan, "", dry=True)))
        except libvirt.libvirtError as error:
            raise faults.from_libvirt(error, f"describing {plan.spec.name}") from error

    def clear(self, plan: Plan) -> None:
        names.clear(self.connection, plan.job.vm_name(), plan.spec.working_dir, self.log)
        names.sweep(self.connection, self.log)
        self._forget_firmware(plan.spec.name)
        scratch.forget(self.identity, plan.spec.working_dir, self.log, *LEFTOVERS)
        self._require_free_macs(plan.spec)

    def prepare(self, plan: Plan, resources: Resources) -> LibvirtMachine:
        made = provision.Provision(plan.spec.working_dir, self.identity)
        resources.not_started.append(made.undo)
        made.make(plan.spec)
        restart = None
        if plan.may_restart:
            restart = self.checkpoints_of.find(plan.checkpoint_spec, plan.domain_type)
        try:
            return self._prepare(plan, restart, resources)
        except BaseException:
            if restart:
                restart.close()
            raise

    def launch(self, machine: LibvirtMachine, plan: Plan) -> None:
        order = machine.order
        if order.restart is None:
            self._create(order, machine, plan)
            return
        try:
            self._create(order, machine, plan)
        finally:
            order.restart.close()
        machine.checkpoints.store.discard()

    def keep(self, machine: LibvirtMachine, plan: Plan) -> None:
        spec, resources, xml = plan.spec, machine.resources, machine.order.described.xml
        resources.not_started.clear()
        if made := provision.files_made(spec):
            resources.at_end.append(Later(provision.remove, self.identity, self.log, spec.working_dir, *made))
        self.record_end(resources, spec.name, spec.working_dir, lambda: machine.usage.seconds, spec.no_output_vm)
        if resources.exit and resources.exit_port:
            resources.exit.port = resources.exit_port.written
        if resources.exit and resources.console:
            resources.exit.console = resources.console.tail
        if self.settings.boolean("VM_SCREENSHOT") and has_display(xml):
            machine.has_display = True
            from vmgahp.drivers.libvirt.screenshot import Screenshot

            machine.screenshot = Screenshot(
                self.connection, spec.name, machine.uuid, spec.working_dir, self.identity, self.log
            ).take
        self._describer.publish_vnc(spec, machine, xml)
        self.log(f"started {spec.name} ({machine.uuid}) by {plan.domain_type}")

    def without_checkpoint(self, plan: Plan, unusable: Unusable) -> tuple[Plan, Callable[[], None]]:
        take_back = self.checkpoints_of.store(plan.checkpoint_spec).refuse(plan.checkpoint_spec.name, unusable)
        return plan._replace(may_restart=False), take_back

    def explain(self, job: JobAd, fault: errors.Fault) -> errors.Fault:
        try:
            xml = job_xml.load(job, self.settings, self.identity)
        except errors.Fault:
            return fault
        return xml.explain(fault) if xml and isinstance(fault, errors.JobFault) else fault

    def kill(self, match: str, uuid: str = "") -> bool:
        return kill(self.connection, match, uuid, self.log)

    def survey(self, end: float) -> Survey:
        from vmgahp.drivers.libvirt.survey import LibvirtSurveyor  # of no use to a start

        return LibvirtSurveyor(self.vm_type, self.settings, self.identity, self.log, self.connection).survey(end)

    def close(self) -> None:
        self.connection.close()

    # A start

    def _read(self, job: JobAd, own: OwnXml) -> JobSpec:
        diskless = other_hypervisors.may_be_diskless(self.vm_type, self.settings)
        return JobSpec.parse(job, self.settings, own=own, diskless=diskless)

    def _domain_type(self) -> str:
        fixed = other_hypervisors.wanted_type(self.vm_type, self.settings)
        if not qemu_process.is_qemu(fixed):
            other_hypervisors.require(self.connection, fixed, self.settings)
        if fixed and fixed != "kvm":
            return fixed
        reason = proof.of_kvm().reason
        if not reason:
            return "kvm"
        if not fixed and self.settings.boolean("VM_ALLOW_EMULATION"):
            self.log(f"KVM does not work here ({reason}): using TCG, since VM_ALLOW_EMULATION is true")
            return "qemu"
        from vmgahp.drivers.libvirt.survey import kvm_fault

        raise kvm_fault(reason)

    def _prepare(self, plan: Plan, restart: LibvirtRestart | None, resources: Resources) -> LibvirtMachine:
        """What the VM stands on, its description, its guardian. Raises `errors.Fault`, OSError and `Unusable`."""
        spec = self._with_macs(plan, restart.manifest.facts["xml"] if restart else "", dry=False)
        plan = plan._replace(spec=spec)
        uuid = restart.manifest.facts["uuid"] if restart else names.new_uuid()
        resources.at_end.append(Later(forget_firmware, self.identity, self.log, spec.name, self.connection.uri))
        if spec.ignored:
            self.log(f"{spec.name} runs without unknown attributes: {', '.join(spec.ignored)}")
        described = self._describer.describe(plan, uuid, resources)
        if restart:
            described = described._replace(xml=self._describe_restart(restart, described.xml))
        guest = LibvirtGuest(spec.name, uuid, plan.domain_type, self.connection, self.log)
        if qemu_process.is_qemu(plan.domain_type):
            guest.files = DiskFiles(spec, self.identity, may_chown=self.connection.uri != SESSION_URI)
            resources.at_end.append(guest.files.close)
            described = described._replace(xml=guest.files.open(described.xml))
        self.claim(resources, spec.name, uuid)
        saver = self.saver(spec.working_dir, self.identity, self.settings, self.log)
        saver.before_restore, saver.memory_mib = resources.before_restore, spec.memory_mib
        saver.may_travel = spec.checkpoint
        if spec.devices.share:
            saver.cannot = "its guest can mount a directory of the job's (VMPARAM_vm_Share)"
        machine = self.machine(guest, resources, saver, self.deadlines(running.CALL_SECONDS), self.log)
        machine.io_errors.patience = self.settings.integer("VM_IO_ERROR_TIMEOUT")
        machine.no_checkpoint = self._why_not_save(spec, plan.domain_type) or self.checkpoints_of.why_not(spec)
        machine.checkpoints = JobCheckpoints(self.checkpoints_of, plan.checkpoint_spec, plan.domain_type)
        machine.order = Order(described, restart)
        machine.step("prepare.guarded")
        return machine

    def _create(self, order: Order, machine: LibvirtMachine, plan: Plan) -> None:
        xml, authors, macs, _ = order.described
        restart, spec = order.restart, plan.spec

        def check(connection: libvirt.virConnect, domain: libvirt.virDomain, live: str) -> None:
            machine.step("launch.made")
            machine.mac = first_attribute(live, "devices/interface/mac", "address")
            if not authors:
                self._verify(live, xml, spec)
            elif less := verify.against_script(live, xml, spec):
                self.log(f"{machine.name}, as {authors} made it: {less}")
            for mac, origin in macs:
                host_checks.require_free_mac(connection, mac, self.log, domain.ID(), origin)
            if restart:
                self._require_free_saved_macs(connection, domain, live, dict(macs))
                machine.set_aside()
                machine.step("restore.set_aside")

        try:
            if authors:
                verify.before_libvirt(xml)
            if restart:
                machine.usage = Usage(restart.manifest.cpu_seconds)
                machine.restart_from(restart.descriptor, xml, check)
            else:
                machine.create(xml, check)
        except verify.Mismatch as mismatch:
            if restart:
                raise Unusable(f"what libvirt made of it is another VM: {mismatch}", True) from mismatch
            fault = hooks.mismatch_fault(machine.name, authors, mismatch)
            raise (fault if authors or not plan.xml else self._second_look(fault, plan)) from mismatch
        except libvirt.libvirtError as error:
            doing = f"{'restoring' if restart else 'starting'} {machine.name}"
            fault = self._blame(error, doing, machine, plan, order.described)
            if restart:
                raise Unusable(fault.problem, True) from error
            raise fault from error
        except errors.MachineFault as fault:
            if restart:
                raise Unusable(fault.problem, True) from fault
            raise

    def _blame(
        self, error: libvirt.libvirtError, doing: str, machine: LibvirtMachine, plan: Plan, described: Described
    ) -> errors.Fault:
        """Whose fault an error of a start is."""
        from vmgahp.drivers.libvirt import qemu_log  # of no use where nothing fails

        chosen = [disk.path for disk in plan.spec.disks]
        chosen += [image.path for disk in plan.spec.disks for image in disk.backing]
        more = ""
        if qemu_log.says_nothing(faults.message_of(error)):
            more = qemu_log.last_words(machine.name, machine.uuid)
        fault = faults.from_libvirt(error, doing, chosen, more)
        rule = faults.classify(error, chosen, more)
        if not issubclass(rule.fault, errors.JobFault):
            proof.forget()
        if rule is DESCRIPTION and hooks.hooks_are_to_blame(described, self.connection):
            return hooks.refused(fault.problem, described.authors)
        if faults.is_no_domain(error):
            fault = errors.HypervisorFault(
                f"{fault.problem} The VM was gone before it ran.", "see whether QEMU has crashed."
            )
        elif not rule.job_may_cause:
            return fault
        # A checkpoint that is of no use is told by a start without it.
        return fault if machine.order.restart else self._second_look(fault, plan)

    def _second_look(self, fault: errors.Fault, plan: Plan) -> errors.Fault:
        from vmgahp.drivers.libvirt import second_look

        return second_look.judge(fault, plan, self._describer, self.connection, self.log)

    def _describe_restart(self, restart: LibvirtRestart, ours: str) -> str:
        return restart.description(ours, self.connection.uri)

    def _verify(self, live: str, asked: str, spec: JobSpec) -> None:
        verify.against_job(live, asked, spec)

    def _why_not_save(self, spec: JobSpec, domain_type: str) -> str:
        """Why the VM's memory cannot be saved to a file; empty where it can."""
        return other_hypervisors.no_saving(domain_type)

    def _with_macs(self, plan: Plan, saved: str, *, dry: bool) -> JobSpec:
        """The job with the addresses of VM_MAC_HOOK; `saved` is the XML of its checkpoint."""
        return hooks.with_macs(self.settings, self.log, plan.job, plan.spec, saved, dry=dry)

    def _require_free_macs(self, spec: JobSpec) -> None:
        if not spec.macs:
            return

        def require(connection: libvirt.virConnect) -> None:
            for mac in spec.macs:
                host_checks.require_free_mac(connection, mac, self.log)

        try:
            self.connection.call(require)
        except libvirt.libvirtError as error:
            raise faults.from_libvirt(error, "asking for the MAC addresses in use") from error

    def _require_free_saved_macs(
        self, connection: libvirt.virConnect, domain: libvirt.virDomain, live: str, others: Container[str]
    ) -> None:
        """As `_require_free_macs`, of the addresses that only the checkpoint has given. Raises `Unusable`."""
        for mac in hooks.macs_of(live):
            try:
                if mac not in others:
                    host_checks.require_free_mac(connection, mac, self.log, domain.ID())
            except errors.JobFault as fault:
                problem = f"its MAC address {mac} is that of another VM that runs on this machine"
                raise Unusable(problem, True) from fault

    def _forget_firmware(self, name: str) -> None:
        firmware.forget(name, self.connection.uri, self.log)


def forget_firmware(_identity: Identity, log: Logger, name: str, uri: str) -> None:
    """The domain is gone: remove what it has kept in its firmware."""
    firmware.forget(name, uri, log)
