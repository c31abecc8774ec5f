"""Starts, finds and kills domains."""

import os
import sys
import uuid as uuids

import libvirt
from lxml import etree

from vmgahp import domain_xml, errors, kvm, xml_script
from vmgahp.console_capture import ConsoleCapture, runtime_dir, sweep
from vmgahp.drivers.base import Driver, Machine
from vmgahp.drivers.libvirt import faults
from vmgahp.drivers.libvirt.connection import Connection
from vmgahp.drivers.libvirt.machine import Belongings, LibvirtMachine
from vmgahp.drivers.libvirt.saving import Saver
from vmgahp.guardian import Guardian
from vmgahp.images import backing_chain
from vmgahp.job import JobSpec

TYPE_CHECKING = False
if TYPE_CHECKING:
    from vmgahp.config import Settings
    from vmgahp.drivers.base import Logger
    from vmgahp.identity import Identity
    from vmgahp.job_ad import JobAd

SYSTEM_URI, SESSION_URI = "qemu:///system", "qemu:///session"

CONSOLE_FILE = "vm_console.log"
VNC_FILE = "vm_vnc.json"

QEMU_DIRECTORY = "/var/lib/libvirt/qemu"
"""Where libvirt keeps the monitor socket and the keys of each domain; QEMU must be able to enter it."""

KVM_DEADLINE = 0.3
"""Seconds for the proof that KVM works; a machine where it does needs a hundredth of that."""

SCRIPT_DEADLINE = 60.0
"""Seconds for LIBVIRT_XML_SCRIPT."""


class LibvirtDriver(Driver):
    """VM types kvm (by KVM, or by TCG where VM_ALLOW_EMULATION allows it) and qemu (always TCG)."""

    def __init__(self, vm_type: str, settings: "Settings", identity: "Identity", log: "Logger") -> None:
        super().__init__(vm_type, settings, identity, log)
        uri = settings.string("VM_LIBVIRT_URI") or (SYSTEM_URI if os.getuid() == 0 else SESSION_URI)
        self._connection = Connection(uri, log)

    # The contract

    def start(self, job: "JobAd") -> Machine:
        spec = JobSpec.from_ad(job, self.settings, self.identity)
        name = spec.name
        domain_type = self._domain_type()
        self._clear_orphan(name)
        sweep()
        uuid = str(uuids.uuid4())
        belongings = Belongings()
        try:
            xml = self._describe(job, spec, uuid, domain_type, belongings)
            belongings.guardian = Guardian.post(self._kill_command(name, uuid), os.environ)
            machine = LibvirtMachine(
                name,
                uuid,
                self._connection,
                belongings,
                Saver(spec.working_dir, self.identity, self.settings, self.log),
                stop_timeout=self.settings.integer("VM_STOP_TIMEOUT"),
                log=self.log,
            )
            self._create(xml, machine, [disk.path for disk in spec.disks])
        except OSError as error:
            belongings.let_go()
            raise errors.MachineFault(f"The machine is out of resources: {error}.") from error
        except BaseException:
            belongings.let_go()
            raise
        if spec.no_output_vm:
            belongings.at_end.append(lambda: self._empty(spec.working_dir))
        self._publish_vnc(spec, machine, xml)
        self.log(f"started {name} ({uuid}) by {domain_type}")
        return machine

    def kill(self, match: str, uuid: str = "") -> bool:
        def destroy(connection: "libvirt.virConnect") -> bool:
            try:
                domain = connection.lookupByName(match)
                if uuid and domain.UUIDString() != uuid:
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

    def probe(self) -> dict[str, str | int | bool]:
        domain_type = self._domain_type()

        def ask(connection: "libvirt.virConnect") -> int:
            _capabilities(connection, domain_type)
            version: int = connection.getVersion()
            return version

        try:
            version = self._connection.call(ask)
        except libvirt.libvirtError as error:
            raise errors.MachineFault(
                f"libvirt at {self._connection.uri} cannot run domains of type {domain_type}: {error}.",
                "install QEMU for this machine's architecture, and look into libvirtd's log.",
            ) from error
        prefix = f"VM_{self.vm_type}_ATTR_"
        return {
            prefix + "accel": "kvm" if domain_type == "kvm" else "tcg",
            prefix + "version": f"{version // 1000000}.{version // 1000 % 1000}.{version % 1000}",
        }

    def networking(self) -> list[str]:
        usable = []
        for kind in self.settings.networking_types():
            reason = self._networking_trouble(kind)
            if reason:
                self.log(f"networking type {kind} is not offered: {reason}")
            else:
                usable.append(kind)
        return usable

    def close(self) -> None:
        self._connection.close()

    # A start

    def _domain_type(self) -> str:
        if self.vm_type == "qemu":
            return "qemu"
        reason = kvm.check(KVM_DEADLINE)
        if reason is None:
            return "kvm"
        if self.settings.boolean("VM_ALLOW_EMULATION"):
            self.log(f"KVM does not work here ({reason}): using TCG, since VM_ALLOW_EMULATION is true")
            return "qemu"
        raise errors.MachineFault(
            f"KVM does not work on this machine: {reason}.",
            "mend KVM, or set VM_ALLOW_EMULATION = True to run jobs slowly, by emulation.",
        )

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

    def _describe(
        self, job: "JobAd", spec: JobSpec, uuid: str, domain_type: str, belongings: Belongings
    ) -> str:
        script = self.settings.xml_script()
        if script:
            return self._scripted(script, job, spec, uuid)
        label = self._dac_label(domain_type)
        host = domain_xml.Host(
            uuid=uuid,
            domain_type=domain_type,
            cpu_mode=self.settings.string("VM_CPU_MODE")
            or ("host-passthrough" if domain_type == "kvm" else "maximum"),
            dac_label=label,
            console_socket=self._listen_to_console(spec, label, belongings),
            vnc_password=_password() if spec.vnc else "",
            nat_network=self.settings.string("VM_NAT_NETWORK"),
            bridge=self.settings.string("VM_NETWORKING_BRIDGE_INTERFACE"),
            backing={disk.path: backing_chain(disk.path, disk.format, self.identity) for disk in spec.disks},
            passt=spec.networking_type == "user" and self._has_passt(domain_type),
        )
        return domain_xml.build(spec, host)

    def _scripted(self, script: str, job: "JobAd", spec: JobSpec, uuid: str) -> str:
        """The administrator's own XML, with the UUID by which the guardian and the kill mode know it."""
        lines = job.lines({"VMPARAM_VM_NAME": spec.name})
        lines += xml_script.extra_lines(
            lines,
            bridge_interface=self.settings.string("VM_NETWORKING_BRIDGE_INTERFACE"),
            networking_type=spec.networking_type,
        )
        arguments = self.settings.string("LIBVIRT_XML_SCRIPT_ARGS")
        text = xml_script.run(script, arguments, lines, SCRIPT_DEADLINE, self.log)
        try:
            domain = etree.fromstring(text.encode(), etree.XMLParser(resolve_entities=False, no_network=True))
        except etree.XMLSyntaxError as error:
            raise errors.MachineFault(
                f"LIBVIRT_XML_SCRIPT = {script} printed what is not XML: {error}.", "mend the script."
            ) from error
        if domain.findtext("name") != spec.name:
            raise errors.MachineFault(
                f"LIBVIRT_XML_SCRIPT = {script} named the domain {domain.findtext('name')!r}.",
                f"let it use VMPARAM_VM_NAME, here {spec.name}: the startd looks for the VM under that name.",
            )
        for old in domain.findall("uuid"):
            domain.remove(old)
        etree.SubElement(domain, "uuid").text = uuid
        return etree.tostring(domain, encoding="unicode")

    def _create(self, xml: str, machine: LibvirtMachine, job_values: list[str]) -> None:
        try:
            domain = self._connection.once(lambda connection: connection.createXML(xml, 0))
            machine.mac = _attribute(domain.XMLDesc(), "devices/interface/mac", "address")
        except libvirt.libvirtError as error:
            machine.destroy()
            raise faults.from_libvirt(error, f"starting {machine.name}", job_values) from error

    def _kill_command(self, name: str, uuid: str) -> list[str]:
        return [
            *(sys.executable, "-I", "-m", "vmgahp", "-f", "-M", "4"),
            *("vmtype", self.vm_type, "match", name, "uuid", uuid),
        ]

    # Whom QEMU runs as

    def _dac_label(self, domain_type: str) -> str:
        """``+uid:+gid`` of the job's user for QEMU, or empty to leave it to libvirt.

        With it QEMU can read and write just what the job's user can, in a scratch directory of mode 700 and
        on an NFS without root's rights too, and libvirt need not change the owner of any image. QEMU must
        still get into libvirt's directory and at /dev/kvm; where those are kept to a group, it runs with
        that group. libvirt gives a domain one group, so two of them leave libvirt's own user as the way.
        """
        if not (self.identity.switching and self.settings.boolean("VM_RUN_AS_JOB_USER")):
            return ""
        if self._connection.uri != SYSTEM_URI:
            return ""
        needed = {gid for gid in (_group_to_enter(QEMU_DIRECTORY, 0o1),) if gid is not None}
        if domain_type == "kvm":
            needed |= {gid for gid in (_group_to_enter(kvm.DEVICE, 0o6),) if gid is not None}
        needed.discard(self.identity.gid)
        if len(needed) > 1:
            self.log(
                f"QEMU runs as libvirt's user and not as the job's: {QEMU_DIRECTORY} and {kvm.DEVICE} belong to "
                f"two groups. chmod o+x {QEMU_DIRECTORY} mends it"
            )
            return ""
        gid = needed.pop() if needed else self.identity.gid
        return f"+{self.identity.uid}:+{gid}"

    def _listen_to_console(self, spec: JobSpec, label: str, belongings: Belongings) -> str:
        """Listen for the serial console and return the socket's path, empty where it is not captured."""
        if not self.settings.boolean("VM_CONSOLE_LOG"):
            return ""
        owner = tuple(int(part.lstrip("+")) for part in label.split(":")) if label else self._qemu_user()
        belongings.console = ConsoleCapture(
            os.path.join(runtime_dir(), "console"),
            lambda: self._open_console_file(spec.working_dir),
            self.settings.size("VM_CONSOLE_LOG_MAX"),
            self.log,
            owner=(owner[0], owner[1]),
        )
        return belongings.console.path

    def _open_console_file(self, working_dir: str) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        try:
            return self.identity.open_scratch(working_dir, CONSOLE_FILE, flags, 0o600)
        except OSError as error:
            raise errors.MachineFault(
                f"{CONSOLE_FILE} cannot be opened in {working_dir} as uid {self.identity.uid}: {error.strerror}.",
                "see that the job's user can write to its scratch directory, and that the file is not a link.",
            ) from error

    def _qemu_user(self) -> tuple[int, int]:
        """The user as which libvirt runs QEMU by itself (its DAC base label)."""
        if os.getuid() != 0:
            return os.getuid(), os.getgid()
        capabilities = etree.fromstring(
            self._connection.call(lambda connection: connection.getCapabilities())
        )
        for model in capabilities.iterfind("host/secmodel"):
            if model.findtext("model") == "dac":
                label = model.findtext("baselabel") or ""
                uid, _, gid = label.replace("+", "").partition(":")
                if uid.isdigit() and gid.isdigit():
                    return int(uid), int(gid)
        return os.getuid(), os.getgid()

    # Small things around it

    def _has_passt(self, domain_type: str) -> bool:
        """Whether user networking can be passt's; QEMU's own, slirp, is there without further programs.

        libvirt names the back ends that it was built with in its domain capabilities; one that names none
        refuses the element.
        """
        capabilities = etree.fromstring(
            self._connection.call(lambda connection: _capabilities(connection, domain_type))
        )
        values = capabilities.iterfind("devices/interface/enum[@name='backendType']/value")
        return any(value.text == "passt" for value in values) and _passt() is not None

    def _publish_vnc(self, spec: JobSpec, machine: LibvirtMachine, xml: str) -> None:
        """Tell the job's owner, and nobody else, where the display is and its one-time password."""
        if not spec.vnc or self.settings.xml_script():
            return
        import json

        try:
            live = self._connection.call(
                lambda connection: connection.lookupByUUIDString(machine.uuid).XMLDesc()
            )
            display = {
                "host": "127.0.0.1",
                "port": int(_attribute(live, "devices/graphics", "port") or 0),
                "password": _attribute(xml, "devices/graphics", "passwd"),
            }
            text = json.dumps(display) + "\n"
            self.identity.write_scratch(spec.working_dir, VNC_FILE, text.encode())
        except (libvirt.libvirtError, errors.Fault, OSError) as error:
            self.log(f"{machine.name}: could not write {VNC_FILE}: {error}")

    def _networking_trouble(self, kind: str) -> str:
        if kind == "nat":
            network = self.settings.string("VM_NAT_NETWORK")
            try:
                active = self._connection.call(
                    lambda connection: connection.networkLookupByName(network).isActive()
                )
            except libvirt.libvirtError as error:
                return str(error)
            return (
                "" if active else f"the libvirt network {network} is not active (virsh net-start {network})"
            )
        if kind == "bridge":
            bridge = self.settings.string("VM_NETWORKING_BRIDGE_INTERFACE")
            return "" if os.path.isdir(f"/sys/class/net/{bridge}/bridge") else f"there is no bridge {bridge}"
        return ""

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


def _capabilities(connection: "libvirt.virConnect", domain_type: str) -> str:
    text: str = connection.getDomainCapabilities(None, os.uname().machine, None, domain_type)
    return text


def _attribute(xml: str, path: str, name: str) -> str:
    """An attribute of the first element at `path`, or empty."""
    element = etree.fromstring(xml).find(path)
    return "" if element is None else element.get(name, "")


def _group_to_enter(path: str, bits: int) -> int | None:
    """The group that must be had to use `path`, or None when everybody may or it is not there."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return None if status.st_mode & bits == bits else status.st_gid


def _password() -> str:
    import secrets

    return secrets.token_urlsafe(6)  # eight characters, the most that VNC looks at


def _passt() -> str | None:
    import shutil

    return shutil.which("passt")
