"""The driver that starts, finds and kills domains."""

import json
import os
import time
from collections.abc import Callable, Container
from contextlib import suppress
from functools import partial
from xml.etree import ElementTree as etree

import libvirt

from vmgahp import errors
from vmgahp.checkpoint.manifest import CheckpointKind
from vmgahp.checkpoint.store import Unusable
from vmgahp.config import Settings
from vmgahp.domain import job_xml, verify
from vmgahp.domain.model import AGENT
from vmgahp.domain.restore import reconcile
from vmgahp.drivers.base import Survey
from vmgahp.drivers.libvirt.life import pauses, usage
from vmgahp.drivers.libvirt.life.guest import LibvirtGuest
from vmgahp.drivers.libvirt.life.machine import CALL_SECONDS, LibvirtMachine
from vmgahp.drivers.libvirt.life.save import LEFTOVERS, LIBVIRT, LibvirtCheckpoints, LibvirtRestart, Saver
from vmgahp.drivers.libvirt.link import domains, faults
from vmgahp.drivers.libvirt.link.connection import SESSION_URI, connection_for
from vmgahp.drivers.libvirt.program import warm
from vmgahp.drivers.libvirt.start import capabilities, disks, forwarding, hooks, machine_devices, second_look
from vmgahp.drivers.libvirt.start.describe import CONTROL, VNC_FILE, Describer, Plan, first_attribute, type_for
from vmgahp.drivers.libvirt.survey import LibvirtSurveyor, kvm_fault
from vmgahp.drivers.managed import ManagedDriver
from vmgahp.drivers.resources import PASST, RELAY, Resources
from vmgahp.drivers.surveyor import Logger
from vmgahp.host import job_user, kvm, system_logs
from vmgahp.host.runtime_dir import sweep
from vmgahp.host.wait import Task, start_thread
from vmgahp.job import published
from vmgahp.job.ad import JobAd
from vmgahp.job.attributes import LIBVIRT_XML
from vmgahp.job.devices import require_shares_allowed
from vmgahp.job.look import look
from vmgahp.job.policy_view import PolicyView
from vmgahp.job.run import DRIVE_FILE, RECORD
from vmgahp.job.spec import JobSpec, save_blocker
from vmgahp.metrics import Usage
from vmgahp.text import shown


class LibvirtDriver(ManagedDriver[Plan, LibvirtMachine]):
    """The driver for kvm and libvirt (KVM, or TCG with VM_ALLOW_EMULATION) and qemu (always TCG).

    The type libvirt is kvm under a name that condor_starter takes periodic checkpoints of, or VM_LIBVIRT_DOMAIN_TYPE.
    """

    # Overridden for another hypervisor (`xen`).
    describer: type[Describer] = Describer
    machine: type[LibvirtMachine] = LibvirtMachine
    saver: type[Saver] = Saver
    checkpoints: CheckpointKind = LIBVIRT
    reconcile = staticmethod(reconcile)
    usual_uri = ""
    evaluates_policy = True

    def __init__(self, vm_type: str, settings: Settings, identity: job_user.Identity, log: Logger) -> None:
        super().__init__(vm_type, settings, identity, log)
        self.connection = connection_for(settings, log, self.usual_uri)
        self.checkpoints_of = LibvirtCheckpoints(self.checkpoints, identity, self.connection, log)
        self._describer = self.describer(settings, identity, self.connection, log)
        self._kvm: Task[str] | None = None  # the check of KVM for the next start, if it has begun

    # The contract

    def get_ready(self) -> None:
        if self.vm_type in ("kvm", "libvirt"):
            with suppress(errors.MachineFault):  # without a thread it is made when it is needed
                self._kvm = Task("KVM", kvm.check)

    def start(self, job: JobAd) -> LibvirtMachine:
        self.connection.hears_agents = self.settings.boolean("VM_GUEST_AGENT")
        machine = super().start(job)
        machine.serve()
        return machine

    def plan(self, job: JobAd) -> Plan:
        try:
            xml = job_xml.load(job, self.settings, self.identity) if job.has(LIBVIRT_XML) else None
        except errors.JobFault:
            job_user.require_entry(job.working_dir(), self.identity)
            raise
        if xml:
            job = xml.ad
        view = PolicyView(job, self.settings)
        hooks.require(view)
        try:
            spec = look(self._read(job), self.settings, self.identity)
            domain_type = type_for(spec, self._domain_type(), self.settings)
            disks.require_possible(spec, domain_type, self.settings)
            require_shares_allowed(view, spec.devices.shares)
        except errors.JobFault:
            job_user.require_entry(job.working_dir(), self.identity)
            # A hypervisor that cannot run any job is to blame, and not a job that is refused.
            if not domains.is_qemu(fixed := capabilities.wanted_type(self.vm_type, self.settings)):
                capabilities.require_hypervisor(self.connection, fixed, self.settings)
            raise
        job_user.require_room(spec.vm.working_dir, self.identity)
        name = domains.free_name(self.connection, spec.vm.name, spec.vm.working_dir, self.log)
        if xml and (dropped := xml.without()):
            self.log(f"{name}: {dropped}")
        return self._describer.plan(view, spec._replace(vm=spec.vm._replace(name=name)), domain_type)._replace(xml=xml)

    def show(self, plan: Plan) -> str:
        self._require_free_macs(plan.spec)
        spec = hooks.with_macs(plan.view, self.log, plan.spec, "", dry=True)
        return self._describer.show(plan._replace(spec=spec))

    def clear(self, plan: Plan) -> None:
        domains.clear(self.connection, plan.view.job.vm_name(), plan.spec.vm.working_dir, self.log)
        domains.sweep(self.connection, self.log)
        if self.settings.string("VM_MAC_HOOK"):
            hooks.sweep_addresses(self.log)
        self._forget_firmware(plan.spec.vm.name)
        job_user.forget(self.identity, plan.spec.vm.working_dir, self.log, *LEFTOVERS, hooks.POLICY_FILE)
        self._require_free_macs(plan.spec)

    def prepare(self, plan: Plan, resources: Resources) -> LibvirtMachine:
        made = disks.Provision(plan.spec.vm.working_dir, self.settings, self.identity)
        resources.not_started.append(made.undo)
        restart = None
        try:
            if plan.may_restart and plan.spec.devices.run:
                restart = warm.find(plan, self._describer, self.checkpoints_of, self.log)
            made.make(plan.spec, partial(warm.copy, restart.overlay) if restart else None)
            if plan.spec.devices.run:
                from vmgahp.drivers.libvirt.program import drive  # a megabyte, for jobs with a program alone

                most = disks.room_for(DRIVE_FILE, plan.spec, self.settings, self.identity)
                made.made += drive.make(plan.spec, plan.spec.devices.run, most, self.identity)
            if plan.may_restart and not restart:
                restart = self.checkpoints_of.find(plan.checkpoint_spec, plan.domain_type)
            return self._prepare(plan, restart, resources)
        except BaseException as error:
            if restart:
                restart.close()
            if warm.has_failed(restart, error):
                raise warm.Cold(error) from error
            if isinstance(error, libvirt.libvirtError):
                raise faults.from_libvirt(error, f"preparing {plan.spec.vm.name}") from error
            raise

    def launch(self, machine: LibvirtMachine, plan: Plan) -> None:
        restart = machine.restart
        try:
            self._create(machine, plan)
            if restart and restart.is_warm:
                warm.wake(machine)
        except BaseException as error:
            if warm.has_failed(restart, error):
                raise warm.Cold(error) from error
            raise
        finally:
            if restart:
                restart.close()
        if restart:
            machine.store.discard()

    def keep(self, machine: LibvirtMachine, plan: Plan) -> None:
        spec, resources, xml = plan.spec, machine.resources, machine.described.xml
        resources.not_started.clear()
        forget = partial(job_user.forget, self.identity, spec.vm.working_dir, self.log)
        resources.at_end.append(partial(forget, *disks.files_made(spec)))
        if spec.devices.run:
            resources.when_over.append(partial(forget, RECORD))
        self.record_end(resources, spec.vm.name, spec.vm.working_dir, lambda: machine.usage.seconds, spec.vm.sent)
        assert resources.exit is not None
        resources.exit.doubt = " ".join(filter(None, (disk.doubt for disk in spec.disks)))
        if resources.exit_port:
            resources.exit.port = resources.exit_port.written
        if resources.console:
            resources.exit.console = resources.console.tail
        if spec.devices.run:
            from vmgahp.drivers.libvirt.program import monitor

            kept = disks.kept_free(self.settings, spec.vm.working_dir, self.identity)
            resources.while_running.append(partial(monitor.begin, machine, spec, kept, self.identity))
        self._watch_disks(machine, spec)
        devices = etree.fromstring(xml).find("devices")
        if devices is not None and any(devices.find(tag) is not None for tag in ("graphics", "video")):
            machine.screenshot = partial(machine.guest.take_screenshot, spec.vm.working_dir, self.identity)
        self._publish_vnc(spec, machine, xml)
        machine.resumed = lambda: self._publish_vnc(spec, machine, machine.saved_xml)  # its port may have changed
        if way := resources.access:
            if way.means == RELAY:
                relay = forwarding.Relay(self.identity, self.log, spec.vm.name, way.address, way.ports)
                way = way._replace(ports=tuple(relay.ports))
                machine.has_address = relay.lead_to
                resources.at_end.append(relay.end)
            forwarding.tell(way, spec.vm.name, spec.vm.working_dir, self.identity, self.log)
            resources.updates.publish(published.SSH, way.words or None)
        if changes := machine.described.changes:
            hooks.tell_owner(machine, changes, spec.vm.working_dir, self.identity, self.log)
        if plan.afresh:
            resources.updates.say(f"The VM starts afresh: its checkpoint cannot be used ({plan.afresh})")
        elif machine.restart and not machine.restart.is_warm:
            resources.updates.say("The VM goes on from its checkpoint")
        if not machine.restart and plan.may_restart and spec.devices.run:
            resources.while_running.append(partial(warm.want, plan, self._describer, self.log))
        self.log(f"started {spec.vm.name} ({machine.uuid}) by {plan.domain_type}")

    def without_checkpoint(self, plan: Plan, unusable: Unusable) -> tuple[Plan, Callable[[], None]]:
        if isinstance(unusable, warm.Cold):
            self.log(f"{plan.spec.vm.name} boots, for it cannot go on from a guest that has booted: {unusable.reason}")
            return plan._replace(may_restart=False), lambda: None
        take_back = self.checkpoints_of.store(plan.checkpoint_spec).refuse(plan.checkpoint_spec.vm.name, unusable)
        return plan._replace(may_restart=False, afresh=unusable.reason), take_back

    def explain(self, job: JobAd, fault: errors.Fault) -> errors.Fault:
        name = LIBVIRT_XML
        if not isinstance(fault, errors.JobFault) or job.value(name) is None or name in fault.problem:
            return fault
        problem = f"{fault.problem} ({name} = {shown(job.expression(name))} may say it.)"
        return errors.JobFault(fault.code, problem, fault.hint)

    def kill(self, match: str, uuid: str = "") -> bool:
        try:
            return self._kill(match, uuid)
        finally:
            hooks.sweep_addresses(self.log)

    def _kill(self, match: str, uuid: str) -> bool:
        def destroy(libvirtd: libvirt.virConnect) -> bool:
            try:
                domain = domains.matching(libvirtd, match, uuid)
                if domain is not None:
                    name = domain.name()
                    domains.end(domain)
                    self._forget_firmware(name)
            except libvirt.libvirtError as error:
                if not faults.is_no_domain(error):
                    raise
                return False
            return domain is not None

        sweep()  # removes the console's socket of a server that was killed
        fault: errors.Fault
        try:
            was_there = self.connection.call(destroy, seconds=CALL_SECONDS)
        except libvirt.libvirtError as error:
            fault = faults.from_libvirt(error, f"destroying {match}")
        except errors.MachineFault as away:
            fault = away
        else:
            domains.sweep(self.connection, self.log)
            return was_there
        if not (uuid and domains.kill(match, uuid)):
            raise fault
        self.log(f"{match}: {fault.problem} Its QEMU was killed")  # libvirtd forgets the domain when it is back
        self._forget_firmware(match)
        return True

    def survey(self, end: float) -> Survey:
        return LibvirtSurveyor(self.vm_type, self.settings, self.identity, self.log, self.connection).survey(end)

    def close(self) -> None:
        self.connection.close()

    def _publish_vnc(self, spec: JobSpec, machine: LibvirtMachine, xml: str) -> None:
        """Write the address of the display and its one-time password to a file for the job's owner only."""
        if not spec.vnc or self.settings.xml_script() or not first_attribute(xml, "devices/graphics", "type"):
            return
        try:
            live = machine.live_xml()
            port = int(first_attribute(live, "devices/graphics", "port") or 0)
            password = first_attribute(xml, "devices/graphics", "passwd")
            text = json.dumps({"host": "127.0.0.1", "port": port, "password": password}) + "\n"
            machine.updates.publish(published.VNC, f"127.0.0.1:{port}")
            self.identity.write_scratch(spec.vm.working_dir, VNC_FILE, text.encode())
        except (libvirt.libvirtError, errors.Fault, OSError) as error:
            self.log(f"{machine.name}: could not write {VNC_FILE}: {error}")

    def _watch_disks(self, machine: LibvirtMachine, spec: JobSpec) -> None:
        """Have the files that a VM fills watched once it runs, and log the size that its disks may reach."""
        files = machine.guest.files
        images = files.in_scratch() if files is not None else {}
        ports = [port for name, port in machine.resources.run_ports.items() if name != CONTROL]
        limit = disks.limit_of(spec, self.settings)
        kept = disks.kept_free(self.settings, spec.vm.working_dir, self.identity)
        if files is None or not images or not (limit or kept):
            return

        def begin() -> None:
            descriptors = [os.dup(files.files()[group]) for group in images] + [port.file() for port in ports]
            watch = pauses.DiskLimits(machine.io_errors, descriptors, limit, kept, self.log)
            watch.unpacked = lambda: machine.resources.unpacked
            watch.is_shared = any(not share.setting for share in spec.devices.shares)
            machine.resources.at_end.append(watch.end)
            for port in ports:
                port.left = watch.left
            start_thread(f"disks-{machine.name}", watch.run)

        machine.resources.while_running.append(begin)
        try:
            largest = sum(map(disks.largest_size, images.values())) if limit else 0
        except OSError:  # an error of the job's own file system does not concern the machine
            return
        saved = largest + (0 if machine.saver.cannot else spec.vm.memory_mib << 20)
        if largest > disks.allowed(limit):
            end = f"it ends where they occupy more than the {limit >> 20} MiB that the job has asked for"
            self.log(f"{machine.name}: its disks may come to {largest >> 20} MiB, and {end}")
        elif limit and saved > disks.allowed(limit):
            both = f"the job has asked for {limit >> 20} MiB (request_disk): HTCondor counts both"
            what = f"its disks and its memory, where that is saved, may come to {saved >> 20} MiB"
            self.log(f"{machine.name}: {what}, and {both}")

    # A start

    def _read(self, job: JobAd) -> JobSpec:
        # A container gets its root from the administrator's script.
        diskless = bool(self.settings.xml_script())
        diskless = diskless and not domains.is_qemu(capabilities.wanted_type(self.vm_type, self.settings))
        return JobSpec.parse(job, self.settings, diskless=diskless)

    def _domain_type(self) -> str:
        fixed = capabilities.wanted_type(self.vm_type, self.settings)
        if not domains.is_qemu(fixed):
            capabilities.require_hypervisor(self.connection, fixed, self.settings)
        if fixed and fixed != "kvm":
            return fixed
        begun, self._kvm = self._kvm, None
        reason = begun.result() if begun else kvm.check()
        if not reason:
            return "kvm"
        if not fixed and self.settings.boolean("VM_ALLOW_EMULATION"):
            self.log(f"KVM does not work here ({reason}): using TCG, since VM_ALLOW_EMULATION is true")
            return "qemu"
        raise kvm_fault(reason)

    def _prepare(self, plan: Plan, restart: LibvirtRestart | None, resources: Resources) -> LibvirtMachine:
        """Make the VM's resources, description and guardian. Raises `errors.Fault`, OSError and `Unusable`."""
        saved = restart.manifest.facts["xml"] if restart else ""
        spec = hooks.with_macs(plan.view, self.log, plan.spec, saved, dry=False)
        self._hand_out(spec, resources)
        plan = plan._replace(spec=spec)
        uuid = restart.manifest.facts["uuid"] if restart else domains.new_uuid()
        resources.at_end.append(partial(self._forget_firmware, spec.vm.name))
        if spec.ignored:
            self.log(f"{spec.vm.name} runs without unknown attributes: {', '.join(spec.ignored)}")
        for doubt in filter(None, (disk.doubt for disk in spec.disks)):
            self.log(f"{spec.vm.name}: {doubt}")
        if spec.devices.run:
            from vmgahp.drivers.libvirt.program import monitor

            owner = self._describer.owner(plan.label)
            anew = not restart or restart.is_warm
            monitor.listen(spec, self.settings, owner, self.identity, self.log, resources, anew=anew)
        described = self._describer.describe(plan, uuid, resources)
        plugged: tuple[str, ...] = ()
        if restart:
            xml = described.xml
            if restart.is_warm:
                xml, plugged = warm.without_nics(xml)
            described = described._replace(xml=restart.description(xml, self.connection.uri, self.reconcile))
        guest = LibvirtGuest(spec.vm.name, uuid, plan.domain_type, self.connection, self.log)
        if domains.is_qemu(plan.domain_type):
            guest.files = disks.DiskFiles(spec, self.identity, may_chown=self.connection.uri != SESSION_URI)
            resources.at_end.append(guest.files.close)
            described = described._replace(xml=guest.files.open(described.xml))
            disks.require_space(spec, guest.files, self.settings)
            if self.settings.xml_script():
                guest.files.require_no_links(described.xml)
        self.claim(resources, spec.vm.name, uuid)
        saver = self.saver(spec.vm.working_dir, self.identity, self.settings, self.log)
        saver.before_restore, saver.memory_mib = resources.before_restore, spec.vm.memory_mib
        saver.may_travel = spec.vm.checkpoint
        saver.cannot = self._why_not_save(spec, plan.domain_type, described.xml)
        if saver.cannot:
            self.log(f"{spec.vm.name} can be neither suspended to disk nor checkpointed: {saver.cannot}")
        machine = self.machine(guest, resources, saver, self.deadlines(CALL_SECONDS), self.log)
        machine.io_errors.patience = self.settings.integer("VM_IO_ERROR_TIMEOUT")
        machine.no_checkpoint = saver.cannot or self.checkpoints_of.why_not(spec)
        machine.store = self.checkpoints_of.store(plan.checkpoint_spec)
        machine.write_checkpoint = partial(self.checkpoints_of.write, plan.checkpoint_spec, plan.domain_type)
        machine.described, machine.restart, machine.plugged = described, restart, plugged
        machine.limits = usage.limits_of(spec, self.settings, plan.domain_type, self.connection.uri, described.xml)
        machine.step("prepare.guarded")
        return machine

    def _create(self, machine: LibvirtMachine, plan: Plan) -> None:
        (xml, authors, macs, *_), restart = machine.described, machine.restart
        spec = plan.spec
        began = time.time()
        made = False

        def check(connection: libvirt.virConnect, domain: libvirt.virDomain, live: str) -> None:
            nonlocal made
            made = True
            machine.step("launch.made")
            for nic in machine.plugged:
                domain.attachDeviceFlags(nic, libvirt.VIR_DOMAIN_AFFECT_LIVE)
            live = domain.XMLDesc() if machine.plugged else live
            machine.mac = first_attribute(live, "devices/interface/mac", "address")
            has_port = first_attribute(live, f"devices/channel/target[@name='{AGENT}']", "name")
            if has_port and self.settings.boolean("VM_GUEST_AGENT"):
                macs_of, is_late = hooks.macs_of(live), restart is not None
                machine.resources.while_running.append(partial(machine.attach_agent, macs_of, is_late=is_late))
            if not authors:
                self._verify(live, warm.with_nics(xml, machine.plugged) if machine.plugged else xml, spec)
            elif less := verify.against_script(live, xml, spec):
                self.log(f"{machine.name}, as {authors} made it: {less}")
            for mac, origin in macs:
                domains.require_free_mac(connection, mac, self.log, domain.ID(), origin)
            if restart:
                self._require_free_saved_macs(connection, domain, live, dict(macs))
                machine.set_aside()
                machine.step("restore.set_aside")

        try:
            if authors:
                verify.before_libvirt(xml)
            if restart:
                machine.usage = Usage(restart.manifest.cpu_seconds)
            image = restart.descriptor if restart else None
            wanted = usage.with_huge_pages(xml) if self.settings.boolean("VM_HUGEPAGES") else xml
            try:
                machine.make(image, wanted, check)
            except libvirt.libvirtError as error:
                if (access := machine.resources.access) and access.means == PASST:
                    # Leave out the ports that others have taken meanwhile, on which passt would fail.
                    machine.resources.access = forwarding.as_free(access)
                    xml = forwarding.without_taken(xml, self.log)
                if made or xml == wanted or faults.is_connection_loss(error):
                    raise
                self.log(f"{machine.name} does without what others have taken meanwhile: {error}")
                machine.make(image, xml, check)
        except verify.Mismatch as mismatch:
            if restart:
                raise Unusable(f"what libvirt made of it is another VM: {mismatch}", True) from mismatch
            fault = hooks.mismatch_fault(machine.name, authors, mismatch)
            may_be_the_jobs = self.settings.xml_script() if authors else plan.xml
            raise (second_look.judge(fault, plan, self._describer) if may_be_the_jobs else fault) from mismatch
        except libvirt.libvirtError as error:
            doing = f"{'restoring' if restart else 'starting'} {machine.name}"
            is_silent = domains.says_nothing(faults.message_of(error))
            words = domains.last_words(machine.name, machine.uuid) if is_silent else ""
            fault = self._blame(error, doing, words, machine, plan)
            if denial := system_logs.denial_since(began):
                told = system_logs.with_denial(fault, denial)
                # A process of the job's user could have relabelled its disk: a plain guest shows whose fault it is.
                is_the_jobs = isinstance(fault, errors.JobFault) and not restart
                fault = second_look.judge(told, plan, self._describer, with_disk=True) if is_the_jobs else told
            if restart:
                # The image is not to blame if QEMU has read it, or was killed without a message.
                is_away = faults.is_connection_loss(error) or faults.is_of_another_daemon(error)
                by_accident = made or is_away or bool(denial) or (is_silent and not words)
                raise Unusable(fault.problem, True, by_accident=by_accident) from error
            raise fault from error
        except errors.MachineFault as fault:
            if restart:  # only a libvirtd that does not answer says nothing about the checkpoint
                raise Unusable(fault.problem, True, by_accident=fault.code == errors.CRITICAL) from fault
            raise

    def _blame(
        self, error: libvirt.libvirtError, doing: str, words: str, machine: LibvirtMachine, plan: Plan
    ) -> errors.Fault:
        """Return the fault for an error of a start; QEMU's last `words` may tell more about it."""
        described = machine.described
        chosen = [disk.path for disk in plan.spec.disks]
        chosen += [image.path for disk in plan.spec.disks for image in disk.backing]
        fault = faults.from_libvirt(error, doing, chosen, words)
        said = f"{faults.message_of(error)} {words}"
        if of_device := machine_devices.refused(plan.devices, fault, said, chosen):
            return of_device
        rule = faults.classify(error, chosen, words)
        scripted = bool(self.settings.xml_script())
        if rule is faults.DESCRIPTION and hooks.hooks_are_to_blame(described, self.connection):
            fault = hooks.refused(fault.problem, described.authors)
            if not scripted:
                return fault
        if faults.is_no_domain(error):
            problem = f"{fault.problem} The VM was gone before it ran."
            fault = errors.HypervisorFault(problem, "see whether QEMU has crashed.")
        elif not rule.job_may_cause and not scripted:
            return fault
        # A start without the checkpoint shows if that is to blame.
        return fault if machine.restart else second_look.judge(fault, plan, self._describer)

    def _verify(self, live: str, asked: str, spec: JobSpec) -> None:
        verify.against_job(live, asked, spec)

    def _why_not_save(self, spec: JobSpec, domain_type: str, xml: str) -> str:
        """Return the reason why the VM's memory cannot be saved to a file; empty if it can."""
        if domains.is_qemu(domain_type):
            return save_blocker(xml)
        return f"the form in which libvirt saves domains of type {domain_type} is not known to this daemon"

    def _hand_out(self, spec: JobSpec, resources: Resources) -> None:
        """Configure DHCP with the IP addresses of VM_MAC_HOOK, until the guest's end. Raises `errors.Fault`."""
        given = [(number, nic) for number, nic in enumerate(spec.vm.nics) if nic.address]
        if given:
            paths: list[str] = []
            try:
                for number, nic in given:
                    paths.append(hooks.note_address(self.settings, self.connection.uri, spec.vm.name, number, nic))
            finally:
                resources.at_end.append(partial(hooks.give_back, self.log, *paths))
            hooks.hand_out(self.connection, self.settings, spec, self.identity, self.log)

    def _require_free_macs(self, spec: JobSpec) -> None:
        if not spec.macs:
            return

        def require(connection: libvirt.virConnect) -> None:
            for mac in spec.macs:
                domains.require_free_mac(connection, mac, self.log)

        self.connection.ask(require, "asking for the MAC addresses in use")

    def _require_free_saved_macs(
        self, connection: libvirt.virConnect, domain: libvirt.virDomain, live: str, others: Container[str]
    ) -> None:
        """Check the MAC addresses of the checkpoint only, as `_require_free_macs` does. Raises `Unusable`."""
        for mac in hooks.macs_of(live):
            try:
                if mac not in others:
                    domains.require_free_mac(connection, mac, self.log, domain.ID())
            except errors.JobFault as fault:
                problem = f"its MAC address {mac} is that of another VM that runs on this machine"
                raise Unusable(problem, True) from fault

    def _forget_firmware(self, name: str) -> None:
        capabilities.forget_firmware(name, self.connection.uri, self.log)
