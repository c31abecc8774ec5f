"""A whole node as people have it: the lab that scripts/node-lab builds, under QEMU's emulation.

Debian with systemd, AppArmor or SELinux that enforces, libvirt (libvirtd, or its modular daemons) and HTCondor; a pool
of this one machine, of which nothing is said of VMs. It does not boot: the lab has the memory of one that has, and goes
on from there. The disk is only read: what a run writes is gone with it. Guests in it are emulated once more.

``python -m tests.lab.node boot LAB PACKAGE`` installs our package in it, and gives a shell.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from tests import REPOSITORY
from tests.lab.emulated import QEMU, TOOLS, EmulatedMachine
from tests.lab.namespace import DAEMONS, LabError, wait_until
from tests.lab.pool import EVENTS, SUBMIT
from tests.lab.systems import MODULAR

USER = "alice"
"""The user of jobs."""
DOMAIN = "lab"
HOME = f"/home/{USER}"
EXECUTE = "/var/lib/condor/execute"
LOG = "/var/log/condor"
AUDIT = "/var/log/audit/audit.log"

SETUP = ["--type", "kvm", "--memory", "1024", "--emulation"]
"""The words of ``vmgahp setup`` for it: it has no KVM. Nothing in there reaches a network."""
SETTINGS = {"VM_STOP_TIMEOUT": "5", "VM_RECHECK_INTERVAL": "10"}


# ---- the machine that is kept -----------------------------------------------------------------
# scripts/node-lab builds it anew where this section changes.

# `-cpu max` has a KVM in it that is there and does not work, and without that QEMU 7.2 does not bring systemd up.
MACHINE = ["-machine", "q35", "-cpu", "Nehalem", "-smp", "2", "-m", "3072"]
MACHINE += ["-device", "virtio-net-pci,netdev=net,romfile="]
# An IOMMU, and slots to plug devices in that guests get, each an IOMMU group of its own.
PORTS = ("port0", "port1", "port2")
MACHINE += ["-device", "intel-iommu"]
MACHINE += [word for port in PORTS for word in ("-device", f"pcie-root-port,id={port},chassis={PORTS.index(port)}")]
COMMAND_LINE = "root=/dev/vda rw console=ttyS0 net.ifnames=0 quiet intel_iommu=on"
# Memory that is not in use is zero then, and not kept.
COMMAND_LINE += " init_on_free=1"


def prepare(node: Node) -> None:
    """Wait for the end of its start, and for its pool; then it uses as little memory as it can."""

    def started() -> str:
        said = node.run("systemctl", "is-system-running", check=False).stdout.strip()
        return "" if said in ("starting", "initializing") else said

    if (came := node.wait_until("the end of its start", started, 300)) != "running":
        raise LabError(f"it is {came}: {node.run('systemctl', '--failed', '--no-legend').stdout}")
    node.wait_until("its slot", node.machine, 120)
    if node.has_selinux:
        node.run("setsebool", "-P", "virt_use_execmem", "on", timeout=600)
    # A libvirtd that examines its QEMUs for the first time takes 15 seconds for it here.
    node.run("virsh", "-c", "qemu:///system", "capabilities")
    node.run("sh", "-c", "sync; echo 3 > /proc/sys/vm/drop_caches")


# ---- what runs --------------------------------------------------------------------------------


def default_lab() -> Path:
    """Return a directory of scripts/node-lab: VMGAHP_NODE_LAB, or else that of the node with AppArmor and libvirtd."""
    named = os.environ.get("VMGAHP_NODE_LAB")
    return Path(named or Path(os.environ.get("VMGAHP_LAB", "/var/cache/vmgahp-lab"), "node-trixie"))


def why_not() -> str:
    """Why no node can be had here; empty where it can."""
    lab = default_lab()
    if not (lab / "recipe").exists():
        return f"there is no node in {lab} (scripts/node-lab builds it)"
    if not os.access(lab / "key", os.R_OK):
        return f"the key in {lab} is another user's, who built it (scripts/node-lab --rebuild)"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    return f"missing on this machine: {', '.join(missing)}" if missing else ""


class Node(EmulatedMachine):
    """One node, in a ``with``; `first` is the boot of a lab that is being built, whose disk is written."""

    called = "the node"
    logs = (f"{LOG}/VMGahpLog*", f"{LOG}/StarterLog.slot*", f"{LOG}/StartLog", f"{LOG}/ShadowLog")

    def __init__(self, directory: str | Path, lab: str | Path | None = None, *, first: bool = False) -> None:
        super().__init__(directory)
        self.lab = Path(lab) if lab else default_lab()
        self._first = first
        self._denied_before: list[str] = []

    def key(self, private: Path) -> Path:
        """The lab's own."""
        return self.lab / "key"

    def qemu(self, private: Path) -> list[str]:
        """QEMU's command line."""
        command = [word for word in QEMU if word != "-no-reboot"]
        command += [*MACHINE, "-qmp", f"unix:{private}/qmp,server=on,wait=off"]
        written = "off" if self._first else "on"
        command += ["-drive", f"file={self.lab}/disk.img,format=raw,if=virtio,snapshot={written}"]
        words = f"{COMMAND_LINE} {(self.lab / 'append').read_text().strip()}"
        command += ["-kernel", f"{self.lab}/vmlinuz", "-initrd", f"{self.lab}/initrd", "-append", words]
        return command if self._first else [*command, "-incoming", f"exec:cat {self.lab}/memory"]

    def wait_for_boot(self) -> None:
        """Let it go on once its memory has been read. It was kept while it stood still."""
        if not self._first:
            assert self._private
            with Control(self._private.name) as qemu:
                self._wait("its memory to be read", lambda: qemu.ask("query-status")["status"] == "paused", 60)
                qemu.ask("cont")

    def keep(self) -> None:
        """Write its memory into the lab, and end it."""
        assert self._private
        assert self._machine
        self.disconnect()
        with Control(self._private.name) as qemu:
            # Of a machine that is emulated on several threads, and runs, not all that it writes is noticed.
            qemu.ask("stop")
            qemu.ask("migrate-set-parameters", **{"max-bandwidth": 1 << 40})
            qemu.ask("migrate", uri=f"exec:cat > {self.lab}/memory")
            ends = {"completed", "failed"}
            state = self._wait("its memory to be written", lambda: ends & {qemu.ask("query-migrate")["status"]}, 120)
            if state != {"completed"}:
                raise LabError("its memory cannot be written")
            qemu.ask("quit")
        self._machine.wait(60)

    def plug(self, port: str, driver: str, **properties: object) -> str:
        """Plug a device into one of `PORTS`; its PCI address there."""
        assert self._private
        before = self._pci()
        with Control(self._private.name) as qemu:
            qemu.ask("device_add", driver=driver, bus=port, id=f"in-{port}", **properties)
        [address] = self.wait_until("the device", lambda: self._pci() - before, 60)
        return str(address)

    def add_disk(self, name: str, file: Path) -> None:
        """Have a raw image of this machine ready for a disk drive that is plugged in."""
        assert self._private
        with Control(self._private.name) as qemu:
            qemu.ask("blockdev-add", **{"node-name": name, "driver": "file", "filename": str(file)})

    def add_network(self, name: str, addresses: str) -> None:
        """Have a network, with a gateway and nothing else, ready for a card that is plugged in."""
        assert self._private
        with Control(self._private.name) as qemu:
            qemu.ask("netdev_add", type="user", id=name, net=addresses, restrict=True)

    def _pci(self) -> set[str]:
        return set(self.run("ls", "/sys/bus/pci/devices").stdout.split())

    def driver(self, address: str) -> str:
        """Return the driver of a PCI device; empty for none."""
        found = self.run("readlink", f"/sys/bus/pci/devices/{address}/driver", check=False).stdout
        return Path(found.strip()).name

    # ---- HTCondor -------------------------------------------------------------------------------

    def install(self, package: Path) -> None:
        """Install our package, or upgrade it, as an administrator does."""
        self._denied_before = self._denied_before or self._denials()
        self.put(package, f"/root/{package.name}")
        self.run("apt-get", "-q", "-y", "install", f"./{package.name}", cwd="/root", timeout=600)

    def load_policy(self) -> None:
        """Compile and load our module of SELinux's policy."""
        for name in ("vmgahp.te", "vmgahp.fc"):
            self.put(REPOSITORY / "packaging/selinux" / name, f"/root/{name}")
        self.run("checkmodule", "-M", "-m", "-o", "vmgahp.mod", "vmgahp.te", cwd="/root")
        self.run("semodule_package", "-o", "vmgahp.pp", "-m", "vmgahp.mod", "-f", "vmgahp.fc", cwd="/root")
        self.run("semodule", "-X", "200", "-i", "vmgahp.pp", cwd="/root", timeout=600)
        self._denied_before = self._denials()  # semodule itself, which Debian's policy does not let work on a tmpfs

    def set_up(self, *words: str, settings: Mapping[str, str] = MappingProxyType({})) -> None:
        """Set the machine up by ``vmgahp setup`` and `words`; then it offers VMs."""
        # The lab's guest never listens to a shutdown request.
        told = [*SETUP, *words]
        for name, value in (SETTINGS | dict(settings)).items():
            told += ["--set", f"{name}={value}"]
        self.run("vmgahp", "setup", *told, "--yes", "--restart", timeout=600)
        self.wait_for_offer()

    def wait_for_offer(self) -> dict[str, Any]:
        """Wait until its slot says that it runs VMs; its ad."""
        # The question takes a second of the emulated processors, of which the probe has five.
        return self._wait("an offer of VMs", lambda: (ad := self.machine()).get("HasVM") and ad, 300, interval=8)

    def reboot(self) -> None:
        """Shut it down in order and boot it anew; its files stay."""
        before = self.read("/proc/sys/kernel/random/boot_id")
        self.run("systemctl", "--no-block", "reboot")
        self.disconnect()

        def is_up() -> bool:
            try:
                return self._connect() and self.read("/proc/sys/kernel/random/boot_id") != before
            except (LabError, subprocess.TimeoutExpired):  # it goes down meanwhile
                return False

        self.wait_until("it to have booted", is_up, 600)

    def machine(self) -> dict[str, Any]:
        """The ad of its slot; empty while there is none."""
        out = self.run("condor_status", "-constraint", "PartitionableSlot", "-json", user=USER, check=False).stdout
        ads = json.loads(out) if out.startswith("[") else []
        return dict(ads[0]) if ads else {}

    def traits(self) -> dict[str, str]:
        """Name the security module, and libvirt's daemons where they are modular."""
        kept = self.run("cat", "/sys/kernel/security/lsm").stdout.strip().split(",")
        security = ", ".join(name for name in ("AppArmor", "SELinux") if name.lower() in kept)
        return {"security": security} | ({"daemons": MODULAR} if self.libvirt != ["libvirtd"] else {})

    @functools.cached_property
    def libvirt(self) -> list[str]:
        """Name libvirt's daemons that are installed and run guests or have networks or storage."""
        listed = "; ".join(f"command -v {name} || true" for name in ("libvirtd", *DAEMONS))
        return [Path(line).name for line in self.run("sh", "-c", listed).stdout.split()]

    def submit(self, name: str, make_files: Callable[[Path], object], commands: str = "") -> NodeJob:
        """Submit a job from a directory of its own, which `make_files` fills; `commands` go on top."""
        home = self.new_home(name)
        with tempfile.TemporaryDirectory() as place:
            make_files(Path(place))
            Path(place, "job.sub").write_text(SUBMIT.format(name=name) + commands + "\nqueue\n")
            for file in Path(place).iterdir():
                self.put(file, f"{home}/{file.name}", USER)
        out = self.run("condor_submit", "-terse", "job.sub", user=USER, cwd=home).stdout
        return NodeJob(self, int(out.split(".")[0]), home)

    def new_home(self, name: str) -> str:
        """Make a directory for a job's files, another one where a test runs again."""
        return str(self.run("mktemp", "--directory", f"{HOME}/{name}.XXXXXX", user=USER).stdout.strip())

    @functools.cached_property
    def has_selinux(self) -> bool:
        """True if its security module is SELinux."""
        return "SELinux" in self.traits()["security"]

    def denied(self) -> list[str]:
        """Return what the security module has denied and prevented, but for what it had before our package came."""
        return [line for line in self._denials() if line not in self._denied_before]

    def _denials(self) -> list[str]:
        """Return the audit log's lines, without what differs from time to time."""
        mark = re.compile(r'apparmor="DENIED"|avc: +denied .*permissive=0')
        lines = filter(mark.search, self.read(AUDIT).decode(errors="replace").splitlines())
        return [re.sub(r'audit\([^)]*\)|(pid|ino)=\d+|name="\d+" dev="proc"', "", line) for line in lines]


class Control:
    """A connection to a QEMU's control socket in `directory`, in a ``with``."""

    def __init__(self, directory: str) -> None:
        self._path = f"{directory}/qmp"
        self._socket = socket.socket(socket.AF_UNIX)

    def __enter__(self) -> Self:
        wait_until("QEMU's control socket", lambda: self._socket.connect_ex(self._path) == 0, 30)
        self._answers = self._socket.makefile()
        self.ask("qmp_capabilities")
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def ask(self, name: str, **arguments: object) -> Any:
        """The answer to a command; `LabError` where it is refused."""
        self._socket.sendall(json.dumps({"execute": name, "arguments": arguments}).encode())
        for line in self._answers:
            answer = json.loads(line)  # or a greeting, or an event
            if "error" in answer:
                raise LabError(f"QEMU's {name}: {answer['error']['desc']}")
            if "return" in answer:
                return answer["return"]
        raise LabError(f"QEMU ended at {name}")


class NodeJob:
    """A job that was submitted on a node, from the directory `home` there."""

    def __init__(self, node: Node, cluster: int, home: str) -> None:
        self.node = node
        self.cluster = cluster
        self.home = home

    def file(self, name: str) -> str:
        """The text of a file that has come home; empty where it has not."""
        try:
            return self.node.read(f"{self.home}/{name}").decode(errors="replace").replace("\r\n", "\n")
        except FileNotFoundError:
            return ""

    def events(self) -> list[str]:
        """The job event log, as words in their order."""
        numbers = re.findall(r"^(\d{3}) \(", self.file("job.log"), re.MULTILINE)
        return [EVENTS.get(int(number), number) for number in numbers]

    def wait_for_event(self, event: str, timeout: float, times: int = 1) -> None:
        """Wait for an event to have come so often; one that ends the job, or holds it, ends the waiting as well."""
        final = {"terminated", "removed", "held"}

        def came() -> list[str]:
            events = self.events()
            return events if events.count(event) >= times or final & set(events) else []

        events = self.node.wait_until(f"job {self.cluster} to be {event}", came, timeout)
        if events.count(event) < times:
            said = self.node.run("condor_q", str(self.cluster), "-af", "HoldReason", user=USER, check=False).stdout
            raise LabError(f"job {self.cluster} is not {event}, but has: {', '.join(events)}\n{said}{self.told()}")

    def command(self, name: str) -> None:
        """condor_suspend and the like, as its owner."""
        self.node.run(name, str(self.cluster), user=USER)

    def told(self) -> str:
        """The log of the starter that runs it now; empty while none does."""
        script = 'ad=$(grep -slx "ClusterId = $1" "$2"/dir_*/.job.ad "$2"/dir_*/scratch/.job.ad)'
        script += '; [ -z "$ad" ] || grep -h -A 1000000 -F "${ad%/.job.ad}\\"" "$3"/StarterLog.slot*'
        return self.node.run("sh", "-c", script, "sh", str(self.cluster), EXECUTE, LOG, check=False).stdout

    @property
    def domain(self) -> str:
        """The name of its VM."""
        return f"{USER}_{DOMAIN}_{self.cluster}.0"

    def ask_of_qemu(self, script: str) -> str:
        """Run a shell script with `$pid`, the process that runs its guest; what it prints, empty while none does."""
        found = 'pid=$(pgrep -f -- "[g]uest=$1,") && ' + script
        return self.node.run("sh", "-c", found, "sh", self.domain, check=False).stdout.strip()

    def confinement(self) -> str:
        """Return the profile or context of the QEMU that runs its guest; empty while none does."""
        return self.ask_of_qemu("tr -d '\\0' </proc/$pid/attr/current")

    def scratch(self) -> str:
        """Its scratch directory; empty while there is none."""
        script = 'ad=$(grep -slx "ClusterId = $1" "$2"/dir_*/.job.ad "$2"/dir_*/scratch/.job.ad) && dirname "$ad"'
        return self.node.run("sh", "-c", script, "sh", str(self.cluster), EXECUTE, check=False).stdout.strip()


HELP = """\
This is the node, with our package. Leave the shell, and all is gone: nothing of it is kept. The user of jobs is {user}:

    vmgahp doctor
    su - {user}
"""


def main(words: list[str]) -> int:
    """What scripts/node-lab calls."""
    task, lab, *rest = words
    with tempfile.TemporaryDirectory(prefix="vmgahp-node-") as directory:
        if task == "save":
            with Node(directory, lab, first=True) as node:
                prepare(node)
                node.keep()
            return 0
        with Node(directory, lab) as node:
            node.install(Path(rest[0]))
            if node.has_selinux:
                node.load_policy()
            node.set_up("--network", "none")
            print(HELP.format(user=USER), file=sys.stderr)
            return node.shell()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
