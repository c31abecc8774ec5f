"""The description of a job for libvirt: its domain XML, and the user that QEMU runs as."""

import os
import re
import secrets
from functools import partial
from typing import NamedTuple
from xml.etree import ElementTree as etree

from vmgahp import errors
from vmgahp.config import Settings
from vmgahp.domain import build
from vmgahp.domain.job_xml import JobXml
from vmgahp.domain.model import value
from vmgahp.drivers.libvirt.link import domains
from vmgahp.drivers.libvirt.link.connection import SYSTEM_URI, LibvirtConnection
from vmgahp.drivers.libvirt.start import capabilities, forwarding, machine_devices, tpm, virtiofs
from vmgahp.drivers.libvirt.start.capabilities import TWO_GROUPS, TWO_GROUPS_HINT, domain_capabilities, has_passt
from vmgahp.drivers.libvirt.start.hooks import Described, described
from vmgahp.drivers.resources import CONSOLE_FILE, PASST, RELAY, ExitPort, PortForwards, Resources
from vmgahp.drivers.surveyor import Logger
from vmgahp.hooks import xml_script
from vmgahp.host import job_user, packages, runtime_dir
from vmgahp.host.job_user import Identity
from vmgahp.host.serial_capture import ConsoleCapture
from vmgahp.images import leases
from vmgahp.job.ad import JobAd
from vmgahp.job.attributes import ARM, BIOS, NINEP, VIRTIOFS, X86, Share
from vmgahp.job.devices import Devices
from vmgahp.job.disks import Disk
from vmgahp.job.policy_view import PolicyView
from vmgahp.job.spec import JobSpec

VNC_FILE = "vm_vnc.json"
SCRIPT_DEADLINE = 60.0
"""Seconds for LIBVIRT_XML_SCRIPT."""
ONE_TIME = "(one-time)"
"""The placeholder for a password, or for the path of a socket, that only exists during a start."""
ASKING = "asking what libvirt can do"
NO_UUID = "00000000-0000-0000-0000-000000000000"
"""The placeholder for the UUID."""


CONTROL, OUT, ERR, OUTPUTS = "run", "out", "err", "outputs"
"""The ports by which a guest that runs a program talks to us."""
PREFIX = "org.vmgahp."
"""The prefix of the ports' names in the guest."""


PANIC_MODELS = {X86: ("isa", 0), ARM: ("pvpanic", 9_001_000)}
"""The panic device of an architecture's machines, and the first libvirt with it; s390x and pseries have their own."""


class Plan(NamedTuple):
    """A VM to be started or shown: the job's validated options, and how this machine meets them."""

    view: PolicyView
    """The job ad, with the requests of the job's own XML, and as the administrator's policy sees it."""
    spec: JobSpec
    """The job's spec under the domain's name, which differs if another pool's VM has the job's."""
    domain_type: str
    label: str
    """The user and group of its QEMU, as libvirt's DAC label; empty for libvirt's default."""
    passt: bool
    """True if its user network is provided by passt."""
    panic: str = ""
    """The model of its panic device; empty for none."""
    devices: tuple[str, ...] = ()
    """The addresses of the machine's devices that it gets."""
    xml: JobXml | None = None
    """The job's own XML."""
    may_restart: bool = True
    """True if it continues from its checkpoint, if there is one; False once that has turned out to be unusable."""
    afresh: str = ""
    """The reason why a checkpoint is not used."""

    @property
    def checkpoint_spec(self) -> JobSpec:
        """The spec under the job's name, which its checkpoint has on every machine."""
        return self.spec._replace(vm=self.spec.vm._replace(name=self.view.job.vm_name()))


class Describer:
    """The writer of descriptions for libvirt of one driver's jobs."""

    def __init__(self, settings: Settings, identity: Identity, connection: LibvirtConnection, log: Logger) -> None:
        self.settings = settings
        self.identity = identity
        self.log = log
        self.connection = connection

    def plan(self, view: PolicyView, spec: JobSpec, domain_type: str) -> Plan:
        """Return the plan of a job. Raises `errors.Fault` for what this machine cannot do."""
        if self.settings.xml_script():
            return Plan(view, spec, domain_type, "", passt=False)
        label = self._dac_label(spec, domain_type)
        require(spec, domain_type, label, self.connection, self.identity)
        devices = machine_devices.assigned(view.job, self.settings) if domains.is_qemu(domain_type) else ()
        passt = (
            domains.is_qemu(domain_type)
            and any(nic.networking_type == "user" for nic in spec.vm.nics)
            and has_passt(self.connection.ask(lambda connection: domain_capabilities(connection, domain_type), ASKING))
        )
        panic = panic_model(spec, domain_type, self.connection)
        return Plan(view, spec, domain_type, label, passt, panic, devices)

    def show(self, plan: Plan) -> str:
        """Return the domain XML, with placeholders for what only a start makes. Raises `errors.Fault`."""
        if script := self.settings.xml_script():
            problem = f"LIBVIRT_XML_SCRIPT = {script} makes the domain XML, and a dry run does not run it."
            hint = f"run it by hand: {script} {self.settings.string('LIBVIRT_XML_SCRIPT_ARGS')} < the job ad"
            raise errors.MachineFault(problem, hint)
        return described(plan.view, self.log, plan.spec, self._dry(plan), dry=True).xml

    def describe(self, plan: Plan, uuid: str, resources: Resources) -> Described:
        """Return the domain XML of a start, ours or the script's, changed by VM_POLICY. Raises `errors.Fault`."""
        if script := self.settings.xml_script():
            xml = self._scripted(script, plan.view.job, plan.spec, uuid)
        else:
            xml = self._made(plan, uuid, resources)
        return described(plan.view, self.log, plan.spec, xml, dry=False)

    def host(self, plan: Plan, uuid: str) -> build.Host:
        """Return the contribution of this machine to a domain, without the resources of a start."""
        return build.Host(
            uuid=uuid,
            domain_type=plan.domain_type,
            cpu_mode="maximum" if is_foreign(plan.spec) else capabilities.cpu_mode(self.settings, plan.domain_type),
            dac_label=plan.label,
            nat_network=self.settings.string("VM_NAT_NETWORK"),
            bridge=self.settings.string("VM_NETWORKING_BRIDGE_INTERFACE"),
            passt=plan.passt,
            arch=arch_of(plan.spec),
            panic=plan.panic,
            devices=plan.devices,
            tb_cache_mib=self.settings.integer("VM_TB_CACHE"),
            agent=self.settings.boolean("VM_GUEST_AGENT") and domains.is_qemu(plan.domain_type),
        )

    def _console_limit(self, plan: Plan) -> int:
        """Return the bytes of the console that are kept; 0 if it is not captured."""
        return self.settings.size("VM_CONSOLE_LOG_MAX") if domains.is_qemu(plan.domain_type) else 0

    def _dry(self, plan: Plan) -> str:
        """Return our domain XML with placeholders. Raises `errors.Fault`."""
        room, ports = f"/run/vmgahp/{ONE_TIME}", (CONTROL, OUT, ERR, OUTPUTS) if plan.spec.devices.run else ()
        host = self.host(plan, NO_UUID)._replace(
            console_socket=f"{room}/console" if self._console_limit(plan) else "",
            vnc_password=ONE_TIME,
            tpm_socket=f"{room}/tpm",
            exit_socket=f"{room}/exit",
            run_sockets=tuple((PREFIX + name, f"{room}/{name}") for name in ports),
            share_sockets=(f"{room}/share",) * len(plan.spec.devices.shares),
        )
        ours = build.build(plan.spec, host)
        return plan.xml.describe(ours, plan.spec.vm.working_dir, None, self.identity) if plan.xml else ours

    def _made(self, plan: Plan, uuid: str, resources: Resources) -> str:
        """Make the resources that the XML names, each released with `resources`, and return our domain XML."""
        spec, host = plan.spec, self.host(plan, uuid)
        for share in spec.devices.shares:
            if not share.setting and share.directory != spec.vm.working_dir:
                job_user.make_directory(spec.vm.working_dir, os.path.basename(share.directory), self.identity)
        if limit := self._console_limit(plan):
            resources.console = self._capture(ConsoleCapture, spec, limit, owner=self.owner(plan.label))
            host = host._replace(console_socket=resources.console.path)
        if spec.vnc:
            host = host._replace(vnc_password=secrets.token_urlsafe(6))  # VNC looks at eight characters
        if spec.devices.tpm:
            room = runtime_dir.runtime_dir()
            begin = partial(tpm.begin, self.identity, self.log, room, *self.owner(plan.label))
            resources.at_end.append(partial(runtime_dir.remove, room))
            resources.before_restore.append(begin)
            begin()
            host = host._replace(tpm_socket=tpm.socket_in(room))
        if spec.devices.ssh:
            access = self._open_ports(plan, resources)
            if access.means == PASST:
                host = host._replace(ssh_address=access.address, ssh_ports=access.ports)
        if spec.devices.exit_port:
            resources.exit_port = ExitPort(self.owner(plan.label), self.log)
            host = host._replace(exit_socket=resources.exit_port.path)
        host = host._replace(
            run_sockets=tuple((PREFIX + name, port.path) for name, port in resources.run_ports.items()),
            share_sockets=tuple(self._serve(share, plan, resources) for share in spec.devices.shares),
        )
        ours, make_room = build.build(spec, host), partial(self._room, resources)
        return plan.xml.describe(ours, spec.vm.working_dir, make_room, self.identity) if plan.xml else ours

    def _capture(
        self, kind: type[ConsoleCapture], spec: JobSpec, limit: int, **owner: tuple[int, int]
    ) -> ConsoleCapture:
        """Begin to write a VM's console, `limit` bytes of it, to `CONSOLE_FILE`. Raises `errors.Fault`."""
        append = partial(append_to, CONSOLE_FILE, spec.vm.working_dir, self.identity)
        return kind(os.path.join(runtime_dir.runtime_dir(), "console"), append, limit, self.log, **owner)

    def _open_ports(self, plan: Plan, resources: Resources) -> PortForwards:
        means = PASST if plan.spec.vm.networking_type == "user" else RELAY
        wanted = plan.spec.devices.ssh
        if means == PASST and not plan.passt:
            self.log(f"{plan.spec.vm.name}: no port leads to its guest: user networking is QEMU's own here (no passt)")
            wanted = ()
        resources.access = made = forwarding.claim(self.settings, wanted, means, self.log)
        resources.at_end.append(partial(runtime_dir.remove, made.directory))
        return made

    def _serve(self, share: Share, plan: Plan, resources: Resources) -> str:
        """Return the socket of virtiofsd for a directory; empty for one that QEMU shares itself."""
        if share.kind != VIRTIOFS:
            return ""
        room = runtime_dir.runtime_dir()
        resources.at_end.append(partial(runtime_dir.remove, room))
        virtiofs.begin(self.identity, room, share, self.owner(plan.label))
        return virtiofs.socket_in(room)

    def _room(self, resources: Resources) -> str:
        """Make a directory for copies of the job's own kernel, which is removed with the VM."""
        room = runtime_dir.runtime_dir()
        resources.at_end.append(partial(runtime_dir.remove, room))
        if self.identity.switching:
            os.chmod(room, 0o711)  # noqa: S103 - to enter, for the copies; others can neither list nor write
        return room

    def _scripted(self, script: str, job: JobAd, spec: JobSpec, uuid: str) -> str:
        lines = job.lines({"VMPARAM_VM_NAME": spec.vm.name})
        lines += xml_script.extra_lines(
            lines,
            bootloader=spec.xen.bootloader if spec.xen else "",
            bridge_interface=self.settings.string("VM_NETWORKING_BRIDGE_INTERFACE"),
            networking_type=spec.vm.networking_type,
        )
        return self.by_script(script, lines, spec, uuid)

    def by_script(self, script: str, lines: list[str], spec: JobSpec, uuid: str) -> str:
        """Return the script's XML for an ad, with a UUID. Raises `errors.Fault`."""
        arguments = self.settings.string("LIBVIRT_XML_SCRIPT_ARGS")
        text = xml_script.run(script, arguments, lines, SCRIPT_DEADLINE, self.log, spec.vm.name)
        domain = etree.fromstring(text)
        for old in domain.findall("uuid"):
            domain.remove(old)
        etree.SubElement(domain, "uuid").text = uuid
        if domain.find("description") is None:
            etree.SubElement(domain, "description").text = spec.vm.working_dir
        return etree.tostring(domain, encoding="unicode")

    # The user that QEMU runs as

    def _dac_label(self, spec: JobSpec, domain_type: str) -> str:
        """Return ``+uid:+gid`` of the job's user for QEMU, or empty for libvirt's default.

        It runs as the job's user if it shares a directory with the guest itself, or if an image cannot have a lease,
        such as one on NFS. As that user it must be able to use libvirt's directory and /dev/kvm; if these are
        restricted to a group, it runs with that group; libvirt gives a domain only one. Raises `errors.MachineFault`.
        """
        wanted = self.settings.boolean("VM_RUN_AS_JOB_USER")
        if not self.identity.switching or self.connection.uri != SYSTEM_URI:
            return ""
        by_qemu = any(share.kind == NINEP for share in spec.devices.shares)
        if not (wanted or by_qemu) and all(map(_can_be_held, spec.disks)):
            return ""
        needed = capabilities.groups_for_qemu(domain_type) - {self.identity.gid}
        if len(needed) > 1:
            if wanted:
                raise errors.MachineFault(f"VM_RUN_AS_JOB_USER is on, and {TWO_GROUPS}.", TWO_GROUPS_HINT)
            return ""
        gid = needed.pop() if needed else self.identity.gid
        return f"+{self.identity.uid}:+{gid}"

    def owner(self, label: str) -> tuple[int, int]:
        """Return the user and group of the QEMU with this label; without one, libvirt's own (its DAC base label)."""
        if not label and os.getuid() == 0:
            # The rest of this long document, on what the host can emulate, is not parsed.
            capabilities = self.connection.ask(lambda connection: connection.getCapabilities(), ASKING)
            if models := re.search("<secmodel>.*</secmodel>", capabilities, re.DOTALL):
                host = etree.fromstring(f"<host>{models[0]}</host>")
                label = host.findtext("secmodel[model='dac']/baselabel") or ""
        uid, _, gid = label.replace("+", "").partition(":")
        return (int(uid), int(gid)) if uid.isdigit() and gid.isdigit() else (os.getuid(), os.getgid())


def append_to(name: str, directory: str, identity: Identity, *, anew: bool = False) -> int:
    """Open a file of the server's own in a scratch directory, to append to it, or `anew`. Raises `errors.Fault`."""
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        return identity.open_scratch(directory, name, flags | os.O_TRUNC if anew else flags)
    except OSError as error:
        raise job_user.unwritable(name, error, directory, identity) from error


def first_attribute(xml: str, path: str, name: str) -> str:
    """Return an attribute of the first element at `path`, or empty."""
    return value(etree.fromstring(xml), path, name)


def _can_be_held(disk: Disk) -> bool:
    """Return True if no one can change its files while a VM starts; an image of root's need not be checked."""
    own = [(disk.path, disk.format)] if disk.writable or not disk.image else []
    own += [] if disk.image else [(layer.path, layer.format) for layer in disk.backing]
    return all(leases.can_be_leased(path, image_format) for path, image_format in own)


# The check that a job asks for no more than this machine has. libvirt would refuse most of it too, with an error that
# does not say who must act.


def type_for(spec: JobSpec, domain_type: str, settings: Settings) -> str:
    """Return the domain type for the job's architecture: a foreign one is emulated. Raises `errors.JobFault`."""
    if not is_foreign(spec) or domain_type == "qemu":
        return domain_type
    if domain_type == "kvm" and settings.boolean("VM_ALLOW_EMULATION"):
        return "qemu"
    wanted, own = spec.devices.arch, os.uname().machine
    problem = f"The job wants a guest of {wanted}, and this machine of {own} emulates no other (VM_ALLOW_EMULATION)"
    raise _refused(problem, "require a machine that runs such guests (VM_kvm_ATTR_arches).")


def is_foreign(spec: JobSpec) -> bool:
    """Return True if the guest's architecture is another than the machine's."""
    return spec.devices.arch not in ("", os.uname().machine)


def arch_of(spec: JobSpec) -> str:
    """Return the guest's architecture for `vmgahp.domain.build.Host`: empty for x86_64 on itself."""
    arch = spec.devices.arch or os.uname().machine
    return "" if arch == X86 and not is_foreign(spec) else arch


def require(spec: JobSpec, domain_type: str, label: str, connection: LibvirtConnection, identity: Identity) -> None:
    """Check that this machine has what the job asks for; `label` is QEMU's user. Raises `errors.JobFault`."""
    wanted = spec.devices
    firmware = build.firmware_of(spec, arch_of(spec))
    if not domains.is_qemu(domain_type):
        if wanted != Devices():
            named = ", ".join(name for name, value in wanted._asdict().items() if value)
            problem = f"The job asks for devices that domains of type {domain_type} do not get here: {named}"
            raise _refused(problem, "leave them out, or require a machine with kvm or qemu in VM_HYPERVISORS.")
        return
    kinds = {share.kind for share in wanted.shares}
    if NINEP in kinds and not label and identity.switching:
        problem = "A directory is to be shared by 9p, and QEMU cannot run as the job's user here, who alone may use it"
        hint = "require another machine (VM_kvm_ATTR_share, VM_kvm_ATTR_share_dirs), or hand the files over on a disk."
        raise _refused(problem, hint)
    if VIRTIOFS in kinds and (reason := virtiofs.trouble(identity, virtiofs.TRIAL_WAIT)):
        problem = f"A directory is to be shared by virtiofs, and this machine cannot do that: {reason}"
        hint = f"require a machine that can (VM_kvm_ATTR_share, VM_kvm_ATTR_share_dirs). {virtiofs.hint()}"
        raise _refused(problem, hint)
    arch = wanted.arch or os.uname().machine
    if firmware == BIOS and not wanted.arch and not wanted.tpm:
        return  # the usual job needs no query
    machine = connection.ask(lambda libvirtd: capabilities.of_machines(libvirtd, arch, domain_type), ASKING)
    if machine is None:
        problem = f"The job wants a guest of the architecture {arch}, for which this machine has no QEMU"
        raise _refused(problem, "leave VMPARAM_vm_Arch out, or require a machine that has one (VM_kvm_ATTR_arches).")
    # The same check of TPMs as the probe's: a job that asks for one does not match a machine that offers none.
    if wanted.tpm and (reason := tpm.why_none(tpm.is_offered(machine)) or tpm.trouble(identity, tpm.TRIAL_WAIT)):
        problem = f"VMPARAM_vm_TPM = true, and this machine has no software TPM: {reason}"
        hint = f"require a machine that has one (VM_kvm_ATTR_tpm); here: {packages.of_system(tpm.PACKAGES)}."
        raise _refused(problem, hint)
    if firmware not in (BIOS, *capabilities.uefis(machine)):
        problem = f"The job boots by the firmware {firmware}, and this machine has none for {arch}"
        raise _refused(problem, "require a machine that has it (VM_kvm_ATTR_firmware).")


def panic_model(spec: JobSpec, domain_type: str, connection: LibvirtConnection) -> str:
    """Return the panic device that the guest gets; empty if there is none for its machine."""
    arch = spec.devices.arch or os.uname().machine
    if not domains.is_qemu(domain_type) or arch not in PANIC_MODELS:
        return ""
    model, since = PANIC_MODELS[arch]
    return model if not since or connection.ask(lambda libvirtd: libvirtd.getLibVersion(), ASKING) >= since else ""


def _refused(problem: str, hint: str) -> errors.JobFault:
    return errors.JobFault(errors.MISMATCHED, f"{problem}.", hint)
