"""Starts, finds and kills domains."""

import os
import uuid as uuids

import libvirt

from vmgahp import errors
from vmgahp.checkpoint.files import Unusable
from vmgahp.config import Settings
from vmgahp.domain import verify
from vmgahp.drivers.base import Driver, Logger, Machine, Survey
from vmgahp.drivers.exit_record import ExitRecord
from vmgahp.drivers.libvirt import (
    capabilities,
    faults,
    firmware,
    hooks,
    host_checks,
    job_xml,
    other_hypervisors,
    provision,
    qemu_log,
)
from vmgahp.drivers.libvirt.checkpoint import Chains, LibvirtCheckpoints, LibvirtRestart
from vmgahp.drivers.libvirt.connection import LibvirtConnection
from vmgahp.drivers.libvirt.describe import SESSION_URI, SYSTEM_URI, Describer, Plan, first_attribute, has_display
from vmgahp.drivers.libvirt.fault_table import DESCRIPTION
from vmgahp.drivers.libvirt.hooks import Described
from vmgahp.drivers.libvirt.machine import LibvirtMachine
from vmgahp.drivers.libvirt.save import Saver
from vmgahp.drivers.libvirt.screenshot import Screenshot
from vmgahp.drivers.libvirt.survey import KVM_DEADLINE, LibvirtSurveyor, kvm_fault
from vmgahp.drivers.resources import Resources
from vmgahp.host import kvm, scratch
from vmgahp.host.job_user import Identity
from vmgahp.host.runtime_dir import sweep
from vmgahp.job.ad import JobAd
from vmgahp.job.look import look
from vmgahp.job.spec import JobSpec


class LibvirtDriver(Driver):
    """VM types kvm and libvirt (by KVM, or by TCG where VM_ALLOW_EMULATION allows it) and qemu (always TCG).

    The type libvirt is kvm under a name that condor_starter does not know, and so takes periodic checkpoints
    of; or whatever VM_LIBVIRT_DOMAIN_TYPE makes of it (`others`).
    """

    # What another hypervisor has of its own (`xen`).
    describer: type[Describer] = Describer
    machine: type[LibvirtMachine] = LibvirtMachine
    saver: type[Saver] = Saver

    def __init__(self, vm_type: str, settings: Settings, identity: Identity, log: Logger) -> None:
        super().__init__(vm_type, settings, identity, log)
        uri = settings.string("VM_LIBVIRT_URI") or self._usual_uri()
        read_only = uri == SESSION_URI and _probing_for_a_startd()
        self._connection = LibvirtConnection(SYSTEM_URI if read_only else uri, log, read_only=read_only)
        self._checkpoints = LibvirtCheckpoints(identity, self._connection, log)
        self._describer = self.describer(settings, identity, self._connection, log)

    # The contract

    def start(self, job: JobAd) -> Machine:
        job = job_xml.load(job, self.settings, self.identity)
        try:
            return self._start(job)
        except errors.Fault as fault:
            judged = job_xml.judge(job, fault)
            if judged is fault:
                raise
            raise judged from fault

    def _start(self, job: JobAd) -> Machine:
        made = provision.Provision(job.working_dir(), self.identity)
        try:
            return self._start_with(job, made)
        except BaseException:
            made.undo()
            raise

    def _start_with(self, job: JobAd, made: provision.Provision) -> Machine:
        plan = self._look_at(job, made)
        restart = self._checkpoints.find(plan.spec, plan.domain_type, plan.chains)
        if restart is not None:
            try:
                plan = self._with_macs(plan._replace(restart=restart))
                machine = self._launch(plan)
            except Unusable as unusable:
                self._checkpoints.refuse(plan.spec, unusable)
            else:
                self._checkpoints.used_up(plan.spec)
                return machine
            finally:
                restart.close()
            return self._launch(plan._replace(restart=None))
        return self._launch(self._with_macs(plan))

    def describe(self, job: JobAd) -> str:
        job = job_xml.load(job, self.settings, self.identity)
        plan = self._with_macs(self._look_at(job, None), dry=True)
        uuid = str(uuids.UUID(int=0))  # that of a start is made for it
        try:
            return self._describer.describe(plan, uuid, None).xml
        except libvirt.libvirtError as error:
            raise faults.from_libvirt(error, f"describing {plan.spec.name}") from error

    def kill(self, match: str, uuid: str = "") -> bool:
        def destroy(connection: libvirt.virConnect) -> bool:
            try:
                domain = self._matching(connection, match, uuid)
                if domain is None:
                    return False
                name, of_a_job = domain.name(), not domain.isPersistent()
                domain.destroy()
                if of_a_job:
                    self._forget_firmware(name)
            except libvirt.libvirtError as error:
                if faults.is_no_domain(error):
                    return False
                raise
            return True

        sweep()  # the console's socket of a server that was killed
        try:
            return self._connection.call(destroy)
        except libvirt.libvirtError as error:
            raise faults.from_libvirt(error, f"destroying {match}") from error

    def survey(self, end: float) -> Survey:
        return LibvirtSurveyor(self.vm_type, self.settings, self.identity, self._connection, self.log).survey(end)

    def close(self) -> None:
        self._connection.close()

    # A start

    def _look_at(self, job: JobAd, made: provision.Provision | None) -> Plan:
        """What the job asks for, by which domain type it runs, and the backing files of its disks, all checked.

        Where it starts, what an earlier server left behind under its name is cleared away, and disks are `made`.
        """
        hooks.require(self.settings, job)
        try:
            spec = look(self._read(job), self.settings, self.identity)
            domain_type = capabilities.type_for(spec, self._domain_type(), self.settings)
            provision.require_possible(spec, domain_type, self.settings)
            if made:
                self._clear_orphan(spec.name)
                sweep()
                made.make(spec)
        except errors.JobFault:
            host_checks.require_access(job.working_dir(), self.identity)
            other_hypervisors.require_fit(self.vm_type, self._connection, self.settings)
            raise
        host_checks.require_free_space(spec.working_dir)
        if spec.macs:
            self._require_free_macs(spec)
        return Plan(job, spec, domain_type, spec.chains)

    def _read(self, job: JobAd) -> JobSpec:
        diskless = other_hypervisors.may_be_diskless(self.vm_type, self.settings)
        return JobSpec.parse(job, self.settings, diskless=diskless)

    @staticmethod
    def _usual_uri() -> str:
        return SYSTEM_URI if os.getuid() == 0 else SESSION_URI

    @staticmethod
    def _matching(connection: libvirt.virConnect, match: str, uuid: str) -> libvirt.virDomain | None:
        """The domain that a kill is about: by its name, or by the scratch directory of its job.

        The startd names the directory for every VM type but kvm and xen (``VMUniverseMgr::killVM`` in
        HTCondor's ``src/condor_startd.V6/vmuniverse_mgr.cpp``).
        """
        if uuid:
            return faults.find(connection, match, uuid)
        if not match.startswith("/"):
            return connection.lookupByName(match)
        for domain in connection.listAllDomains(libvirt.VIR_CONNECT_LIST_DOMAINS_TRANSIENT):
            try:
                description = domain.metadata(libvirt.VIR_DOMAIN_METADATA_DESCRIPTION, None)
            except libvirt.libvirtError:
                continue  # it has none, or it went away
            if os.path.normpath(description) == os.path.normpath(match):
                return domain
        return None

    def _domain_type(self) -> str:
        fixed = other_hypervisors.wanted_type(self.vm_type, self.settings)
        if not other_hypervisors.is_qemu(fixed):
            other_hypervisors.require(self._connection, fixed, self.settings)
        if fixed and fixed != "kvm":
            return fixed
        reason = kvm.check(KVM_DEADLINE)
        if reason is None:
            return "kvm"
        if not fixed and self.settings.boolean("VM_ALLOW_EMULATION"):
            self.log(f"KVM does not work here ({reason}): using TCG, since VM_ALLOW_EMULATION is true")
            return "qemu"
        raise kvm_fault(reason)

    def _clear_orphan(self, name: str) -> None:
        """Destroy what an earlier server left behind under the name of this job."""

        def clear(connection: libvirt.virConnect) -> None:
            try:
                domain = connection.lookupByName(name)
            except libvirt.libvirtError as error:
                if faults.is_no_domain(error):
                    return
                raise
            if domain.isPersistent():
                raise errors.MachineFault(
                    f"A domain called {name} is defined in libvirt, and jobs' domains never are.",
                    f"see whose it is; then virsh undefine {name}.",
                )
            self.log(f"{name} still runs from an earlier start: destroying it")
            domain.destroy()

        try:
            self._connection.call(clear)
        except libvirt.libvirtError as error:
            if not faults.is_no_domain(error):
                raise faults.from_libvirt(error, f"clearing a leftover {name}") from error

    def _launch(self, plan: Plan) -> LibvirtMachine:
        """Boot the job's guest, or let it continue; on any exception nothing of it is left.

        Raises `errors.Fault`, and `Unusable` where it is the checkpoint that does not work.
        """
        _, spec, domain_type, chains, restart = plan
        uuid = restart.manifest.uuid if restart else str(uuids.uuid4())
        resources = Resources(self.log)
        resources.at_end.append(lambda: self._forget_firmware(spec.name))
        self._forget_firmware(spec.name)
        if spec.ignored:
            self.log(f"{spec.name} runs without unknown attributes: {', '.join(spec.ignored)}")
        try:
            described = self._describer.describe(plan, uuid, resources)
            if restart:
                described = described._replace(xml=self._describe_restart(restart, described.xml))
            resources.guardian = self.post_guardian(spec.name, uuid)
            saver = self.saver(spec.working_dir, self.identity, self.settings, self.log)
            saver.before_restore = resources.before_restore
            if spec.devices.share:
                saver.cannot = "its guest can mount a directory of the job's (VMPARAM_vm_Share)"
            machine = self.machine(
                spec.name,
                uuid,
                self._connection,
                resources,
                saver,
                stop_timeout=self.settings.integer("VM_STOP_TIMEOUT"),
                log=self.log,
            )
            machine.domain_type = domain_type
            machine.no_checkpoint = self._why_not_save(spec, domain_type) or self._checkpoints.why_not(spec)
            machine.write_manifest = lambda saved: self._checkpoints.write(saved, spec, domain_type, chains)
            self._create(described, machine, plan)
        except OSError as error:
            resources.release()
            raise errors.MachineFault(f"The machine is out of resources: {error}.") from error
        except BaseException:
            resources.release()
            raise
        resources.at_end.append(lambda: provision.remove_files_image(spec, self.identity))
        resources.exit = self._exit_record(machine, spec, resources)
        if self.settings.boolean("VM_SCREENSHOT") and has_display(described.xml):
            machine.screenshot = Screenshot(
                self._connection, spec.name, uuid, spec.working_dir, self.identity, self.log
            ).take
        if spec.no_output_vm:
            resources.when_over.append(lambda: scratch.empty(spec.working_dir, self.identity, self.log))
        self._describer.publish_vnc(spec, machine, described.xml)
        self.log(f"started {spec.name} ({uuid}) by {domain_type}")
        return machine

    def _exit_record(self, machine: LibvirtMachine, spec: JobSpec, resources: Resources) -> ExitRecord:
        made = ExitRecord(spec.name, spec.working_dir, machine.cpu_seconds, self.settings, self.identity, self.log)
        if resources.exit_port is not None:
            made.port = resources.exit_port.written
        if resources.console is not None:
            made.console = resources.console.tail
        return made

    def _create(self, described: Described, machine: LibvirtMachine, plan: Plan) -> None:
        xml, authors, macs, _ = described
        _, spec, _, chains, restart = plan

        def check(connection: libvirt.virConnect, domain: libvirt.virDomain, live: str) -> None:
            machine.mac = first_attribute(live, "devices/interface/mac", "address")
            if not authors:
                self._verify(live, xml, spec, chains)
            elif less := verify.against_script(live, xml, spec):
                self.log(f"{machine.name}, as {authors} made it: {less}")
            for mac, origin in macs:
                host_checks.require_free_mac(connection, mac, self.log, domain.ID(), origin)

        try:
            if authors:
                verify.before_libvirt(xml)
            if restart:
                machine.cpu_before = restart.manifest.cpu_seconds
                machine.restart_from(restart.descriptor, xml, check)
            else:
                machine.create(xml, check)
        except verify.Mismatch as mismatch:
            machine.undo()
            if restart:
                raise Unusable(f"what libvirt made of it is another VM: {mismatch}", True) from mismatch
            raise hooks.mismatch_fault(machine.name, authors, mismatch) from mismatch
        except errors.Fault:
            machine.undo()
            raise
        except libvirt.libvirtError as error:
            machine.undo()
            doing = f"{'restoring' if restart else 'starting'} {machine.name}"
            fault = self._blame(error, doing, machine, plan, described)
            # Where the machine is unfit the checkpoint stays, for another machine or a better day.
            if restart and type(fault) is not errors.MachineFault:
                raise Unusable(fault.problem, True) from error
            raise fault from error

    def _blame(
        self, error: libvirt.libvirtError, doing: str, machine: LibvirtMachine, plan: Plan, described: Described
    ) -> errors.Fault:
        """Whose fault an error of a start is."""
        chosen = [disk.path for disk in plan.spec.disks]
        chosen += [image.path for images in plan.chains.values() for image in images]
        more = ""
        if qemu_log.says_nothing(faults.message_of(error)):
            more = qemu_log.last_words(machine.name, machine.uuid)
        fault = faults.from_libvirt(error, doing, chosen, more)
        is_description = faults.classify(error, chosen, more) is DESCRIPTION
        if is_description and hooks.hooks_are_to_blame(described, self._connection):
            return hooks.refused(fault.problem, described.authors)
        if faults.is_no_domain(error):
            return errors.HypervisorFault(
                f"{fault.problem} The VM was gone before it ran.", "see whether QEMU has crashed."
            )
        return fault

    def _describe_restart(self, restart: LibvirtRestart, ours: str) -> str:
        return restart.description(ours, self._connection.uri)

    def _verify(self, live: str, asked: str, spec: JobSpec, chains: Chains) -> None:
        verify.against_job(live, asked, spec, chains)

    def _why_not_save(self, spec: JobSpec, domain_type: str) -> str:
        """Why the VM's memory cannot be saved to a file; empty where it can."""
        return other_hypervisors.no_saving(domain_type)

    def _with_macs(self, plan: Plan, *, dry: bool = False) -> Plan:
        saved = plan.restart.manifest.xml if plan.restart else ""
        spec = hooks.with_macs(self.settings, self.log, plan.job, plan.spec, saved, dry=dry)
        return plan._replace(spec=spec)

    def _require_free_macs(self, spec: JobSpec) -> None:
        def require(connection: libvirt.virConnect) -> None:
            for mac in spec.macs:
                host_checks.require_free_mac(connection, mac, self.log)

        try:
            self._connection.call(require)
        except libvirt.libvirtError as error:
            raise faults.from_libvirt(error, "asking for the MAC addresses in use") from error

    def _forget_firmware(self, name: str) -> None:
        firmware.forget(name, self._connection.uri, self.log)


def _probing_for_a_startd() -> bool:
    """Whether a startd of root's runs this as its own user.

    It does for the probe of every VM type but kvm and xen (``VMUniverseMgr::testVMGahp`` in HTCondor's
    ``src/condor_startd.V6/vmuniverse_mgr.cpp``), although the jobs will run as root.
    """
    try:
        with open(f"/proc/{os.getppid()}/comm") as file:
            return os.getuid() != 0 and file.read().strip() == "condor_startd"
    except OSError:
        return False
