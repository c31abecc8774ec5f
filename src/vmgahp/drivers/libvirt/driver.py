"""Starts, finds and kills domains."""

import os
import sys
import uuid as uuids

import libvirt

from vmgahp import errors, kvm
from vmgahp.checkpoint import Unusable
from vmgahp.console_capture import sweep
from vmgahp.drivers.base import Driver, Machine, Survey
from vmgahp.drivers.libvirt import faults, neighbourhood, qemu_log, verify
from vmgahp.drivers.libvirt.checkpoints import Checkpoints, Restart
from vmgahp.drivers.libvirt.connection import Connection
from vmgahp.drivers.libvirt.describe import (
    SESSION_URI,
    SYSTEM_URI,
    Describer,
    first_attribute,
)
from vmgahp.drivers.libvirt.doors import DESCRIPTION
from vmgahp.drivers.libvirt.machine import Belongings, LibvirtMachine
from vmgahp.drivers.libvirt.saving import Saver
from vmgahp.drivers.libvirt.survey import KVM_DEADLINE, Surveyor, kvm_fault
from vmgahp.guardian import Guardian
from vmgahp.images import backing_chain
from vmgahp.job import JobSpec

TYPE_CHECKING = False
if TYPE_CHECKING:
    from vmgahp.config import Settings
    from vmgahp.drivers.base import Logger
    from vmgahp.drivers.libvirt.checkpoints import Chains
    from vmgahp.identity import Identity
    from vmgahp.job_ad import JobAd


class LibvirtDriver(Driver):
    """VM types kvm and libvirt (by KVM, or by TCG where VM_ALLOW_EMULATION allows it) and qemu (always TCG).

    The type libvirt is kvm under a name that condor_starter does not know, and so takes periodic checkpoints
    of.
    """

    def __init__(self, vm_type: str, settings: "Settings", identity: "Identity", log: "Logger") -> None:
        super().__init__(vm_type, settings, identity, log)
        uri = settings.string("VM_LIBVIRT_URI") or (SYSTEM_URI if os.getuid() == 0 else SESSION_URI)
        read_only = uri == SESSION_URI and _probing_for_a_startd()
        self._connection = Connection(SYSTEM_URI if read_only else uri, log, read_only=read_only)
        self._checkpoints = Checkpoints(identity, self._connection, log)
        self._describer = Describer(settings, identity, self._connection, log)

    # The contract

    def start(self, job: "JobAd") -> Machine:
        spec, domain_type, chains = self._look_at(job, starts=True)
        restart = self._checkpoints.find(spec, domain_type, chains)
        if restart is not None:
            try:
                machine = self._launch(job, spec, domain_type, chains, restart)
            except Unusable as unusable:
                self._checkpoints.refuse(spec, unusable)
            else:
                self._checkpoints.used_up(spec)
                return machine
            finally:
                restart.close()
        return self._launch(job, spec, domain_type, chains, None)

    def describe(self, job: "JobAd") -> str:
        spec, domain_type, chains = self._look_at(job, starts=False)
        uuid = str(uuids.UUID(int=0))  # that of a start is made for it
        try:
            return self._describer.describe(job, spec, uuid, domain_type, chains, None)
        except libvirt.libvirtError as error:
            raise faults.from_libvirt(error, f"describing {spec.name}") from error

    def kill(self, match: str, uuid: str = "") -> bool:
        def destroy(connection: "libvirt.virConnect") -> bool:
            try:
                domain = self._matching(connection, match, uuid)
                if domain is None:
                    return False
                domain.destroy()
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
        return Surveyor(self.vm_type, self.settings, self.identity, self._connection, self.log).survey(end)

    def close(self) -> None:
        self._connection.close()

    # A start

    def _look_at(self, job: "JobAd", *, starts: bool) -> tuple[JobSpec, str, "Chains"]:
        """What the job asks for, by which domain type it runs, and what lies beneath its disks, all checked.

        Where it `starts`, what an earlier server left behind under its name is cleared away.
        """
        try:
            spec = JobSpec.from_ad(job, self.settings, self.identity)
            domain_type = self._domain_type()
            if starts:
                self._clear_orphan(spec.name)
                sweep()
            chains = {disk.path: backing_chain(disk.path, disk.format, self.identity) for disk in spec.disks}
        except errors.JobFault:
            neighbourhood.require_way_in(job.working_dir(), self.identity)
            raise
        neighbourhood.require_room(spec.working_dir)
        if spec.mac:
            self._require_free_mac(spec)
        return spec, domain_type, chains

    @staticmethod
    def _matching(connection: "libvirt.virConnect", match: str, uuid: str) -> "libvirt.virDomain | None":
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
        if self.vm_type == "qemu":
            return "qemu"
        reason = kvm.check(KVM_DEADLINE)
        if reason is None:
            return "kvm"
        if self.settings.boolean("VM_ALLOW_EMULATION"):
            self.log(f"KVM does not work here ({reason}): using TCG, since VM_ALLOW_EMULATION is true")
            return "qemu"
        raise kvm_fault(reason)

    def _clear_orphan(self, name: str) -> None:
        """Destroy what an earlier server left behind under the name of this job."""

        def clear(connection: "libvirt.virConnect") -> None:
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

    def _launch(
        self, job: "JobAd", spec: JobSpec, domain_type: str, chains: "Chains", restart: Restart | None
    ) -> LibvirtMachine:
        """Boot the job's guest, or let it go on; on any exception nothing of it is left.

        Raises `errors.Fault`, and `Unusable` where it is the checkpoint that does not work.
        """
        uuid = restart.manifest.uuid if restart else str(uuids.uuid4())
        belongings = Belongings()
        try:
            xml = self._describer.describe(job, spec, uuid, domain_type, chains, belongings)
            if restart:
                xml = restart.description(xml)
            belongings.guardian = Guardian.post(self._kill_command(spec.name, uuid), os.environ)
            machine = LibvirtMachine(
                spec.name,
                uuid,
                self._connection,
                belongings,
                Saver(spec.working_dir, self.identity, self.settings, self.log),
                stop_timeout=self.settings.integer("VM_STOP_TIMEOUT"),
                log=self.log,
            )
            machine.no_checkpoint = self._checkpoints.why_not(spec)
            machine.write_manifest = lambda saved: self._checkpoints.write(saved, spec, domain_type, chains)
            self._create(xml, machine, spec, chains, restart)
        except OSError as error:
            belongings.let_go()
            raise errors.MachineFault(f"The machine is out of resources: {error}.") from error
        except BaseException:
            belongings.let_go()
            raise
        if spec.no_output_vm:
            belongings.at_end.append(lambda: self._empty(spec.working_dir))
        self._describer.publish_vnc(spec, machine, xml)
        self.log(f"started {spec.name} ({uuid}) by {domain_type}")
        return machine

    def _create(
        self, xml: str, machine: LibvirtMachine, spec: JobSpec, chains: "Chains", restart: Restart | None
    ) -> None:
        script = self.settings.xml_script()

        def check(connection: "libvirt.virConnect", domain: "libvirt.virDomain", live: str) -> None:
            machine.mac = first_attribute(live, "devices/interface/mac", "address")
            if not script:
                verify.against_job(live, xml, spec, chains)
            elif less := verify.against_script(live, xml, spec):
                self.log(f"{machine.name}, as LIBVIRT_XML_SCRIPT made it: {less}")
            if spec.mac:
                neighbourhood.require_free_mac(connection, spec.mac, self.log, domain.ID())

        try:
            if script:
                verify.before_libvirt(xml)
            if restart:
                machine.cpu_before = restart.manifest.cpu_seconds
                machine.go_on_from(restart.descriptor, xml, check)
            else:
                machine.create(xml, check)
        except verify.Mismatch as mismatch:
            machine.undo()
            if restart:
                raise Unusable(f"what libvirt made of it is another VM: {mismatch}", True) from mismatch
            raise _unlike(machine.name, script, mismatch) from mismatch
        except errors.JobFault:
            machine.undo()
            raise
        except libvirt.libvirtError as error:
            machine.undo()
            doing = f"{'restoring' if restart else 'starting'} {machine.name}"
            fault = self._blame(error, doing, machine, spec, chains)
            # Where the machine is unfit the checkpoint stays, for another machine or a better day.
            if restart and type(fault) is not errors.MachineFault:
                raise Unusable(fault.problem, True) from error
            raise fault from error

    def _blame(
        self,
        error: "libvirt.libvirtError",
        doing: str,
        machine: LibvirtMachine,
        spec: JobSpec,
        chains: "Chains",
    ) -> errors.Fault:
        """Whose fault an error of a start is."""
        chosen = [disk.path for disk in spec.disks]
        chosen += [layer.path for layers in chains.values() for layer in layers]
        more = ""
        if qemu_log.says_nothing(faults.message_of(error)):
            more = qemu_log.last_words(machine.name, machine.uuid)
        fault, door = faults.from_libvirt(error, doing, chosen, more), faults.judge(error, chosen, more)
        if script := self.settings.xml_script() if door is DESCRIPTION else "":
            return errors.MachineFault(
                f"{fault.problem} The description of the VM was written by LIBVIRT_XML_SCRIPT = {script}.",
                "mend the script.",
            )
        if faults.is_no_domain(error):
            return errors.HypervisorFault(
                f"{fault.problem} The VM was gone before it ran.", "see whether QEMU has crashed."
            )
        return fault

    def _require_free_mac(self, spec: JobSpec) -> None:
        try:
            self._connection.call(
                lambda connection: neighbourhood.require_free_mac(connection, spec.mac, self.log)
            )
        except libvirt.libvirtError as error:
            raise faults.from_libvirt(error, "asking for the MAC addresses in use") from error

    def _kill_command(self, name: str, uuid: str) -> list[str]:
        return [
            *(sys.executable, "-I", "-m", "vmgahp", "-f", "-M", "4"),
            *("vmtype", self.vm_type, "match", name, "uuid", uuid),
        ]

    # Small things around it

    def _empty(self, directory: str) -> None:
        """vm_no_output_vm: leave nothing in the scratch directory that would be sent home."""
        import subprocess

        as_user: dict[str, object] = {}
        if self.identity.switching:
            as_user = {"user": self.identity.uid, "group": self.identity.gid, "extra_groups": []}
        try:
            subprocess.run(
                ["find", directory, "-xdev", "-mindepth", "1", "-delete"],
                cwd="/",
                timeout=60,
                check=True,
                capture_output=True,
                **as_user,  # type: ignore[call-overload]
            )
        except (OSError, subprocess.SubprocessError) as error:
            self.log(f"vm_no_output_vm: could not empty {directory}: {error}")


def _unlike(name: str, script: str, mismatch: verify.Mismatch) -> errors.Fault:
    """Whose fault it is that a VM is not as it should be: of him who wrote its description, or of libvirt."""
    problem = f"{name} is not the VM that was asked for: {mismatch}. It was destroyed before it ran."
    if script:
        return errors.MachineFault(
            f"LIBVIRT_XML_SCRIPT = {script}: {problem}", "mend the script, or unset it for the built-in XML."
        )
    return errors.HypervisorFault(problem, "see what libvirt's hooks or its version change; report it.")


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
