"""Jobs with real guests on libvirt and QEMU, and what tests do with them."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from ipaddress import IPv4Network
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree as etree

import pytest

from tests import jobs
from tests.domain.support import SCRIPTED
from tests.lab import linux_guest
from tests.lab.guest import make_guest
from tests.lab.libvirtd_watch import URI
from tests.lab.processes import descriptors
from tests.peer import DEADLINE, Peer, environment
from vmgahp import config
from vmgahp.drivers import managed
from vmgahp.host import wait
from vmgahp.job.ad import JobAd

if TYPE_CHECKING:
    import libvirt

    from vmgahp.drivers.libvirt.driver import LibvirtDriver
    from vmgahp.drivers.libvirt.life.machine import LibvirtMachine

CONSOLE = "vm_console.log"
METRICS = "vm_metrics.jsonl"
EXIT = "vm_exit.json"


@contextlib.contextmanager
def libvirtd() -> Iterator["libvirt.virConnect"]:
    """A connection to libvirt, without which the test is skipped."""
    import libvirt

    libvirt.registerErrorHandler(lambda _context, _error: None, None)
    try:
        opened = libvirt.open(URI)
    except libvirt.libvirtError as error:
        pytest.skip(f"no libvirtd at {URI}: {error}")
    yield opened
    opened.close()


class Job:
    """A job with a boot-sector guest, in a scratch directory of the job's user."""

    number = 0

    def __init__(self, scratch: Path, connection: "libvirt.virConnect", seconds: int | None = None) -> None:
        Job.number += 1
        self.cluster = os.getpid() * 100 + Job.number
        self.name = f"alice_lab_{self.cluster}.0"
        self.scratch = scratch
        self.disk = scratch / "guest.img"
        self._connection = connection
        make_guest(self.disk, seconds=seconds)
        self.own(self.disk)

    def own(self, *paths: Path) -> None:
        jobs.own(self.scratch, *paths)

    def put(self, name: str | Path, content: str | bytes) -> Path:
        """A file of the job's, in the scratch directory if its name is no full path."""
        path = self.scratch / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        self.own(path)
        return path

    def ad(self, *more: str) -> list[str]:
        disk = '"guest.img:hda:w:raw"'
        return jobs.lines(self.scratch, *more, JobVM_VCPUS=1, VMPARAM_vm_Disk=disk, ClusterId=self.cluster)

    def domain(self) -> "libvirt.virDomain | None":
        import libvirt

        try:
            return self._connection.lookupByName(self.name)
        except libvirt.libvirtError:
            return None

    def console(self) -> str:
        with contextlib.suppress(FileNotFoundError):
            return (self.scratch / CONSOLE).read_text()
        return ""

    def live(self) -> etree.Element:
        return etree.fromstring(self.domain().XMLDesc())

    def exit_file(self) -> dict[str, object]:
        path = self.scratch / EXIT
        assert path.stat().st_uid == self.scratch.stat().st_uid
        found = json.loads(path.read_text())
        assert isinstance(found, dict)
        return found


PATIENCE = 3 * DEADLINE
"""Seconds for what an emulated guest does in a few, on a machine that is busy."""


def until(condition: Callable[[], object], what: str, deadline: float = PATIENCE) -> None:
    """Wait for a condition of the outside world that sends no event."""
    assert wait.until(condition, deadline, 0.05), f"{what}: not within {deadline:g} s"


def serving(job: Job, vm_type: str = "kvm", **settings: object) -> Peer:
    # The guest never listens to a shutdown request: nobody waits for it where that is not what is tested. Tests find
    # QEMU by GETPID, and look at addresses.
    settings = {
        "VM_ALLOW_EMULATION": True, "VM_STOP_TIMEOUT": 0, "VM_REPORT_PID": True, "VM_REPORT_ADDRESS": True,
    } | settings  # fmt: skip
    return Peer(environment(vm_type, job.scratch, **settings))


@contextlib.contextmanager
def greeted(job: Job, **settings: object) -> Iterator[Peer]:
    """A server that nothing was asked of; it is told to quit at the end, where the test has not ended it."""
    with serving(job, **settings) as peer:
        assert peer.line().startswith("$VMGahpVersion")
        yield peer
        if peer.process.returncode is None:
            peer.quit()


def answers(peer: Peer, job: Job, expected: list[str], *more: str) -> None:
    """What START with the job's ad ends with."""
    peer.send_ad(*job.ad(*more))
    result = peer.run("START", "kvm")
    assert result == expected, f"{result}\n{peer.end_by(signal.SIGTERM)}"


def done(peer: Peer, *operations: str) -> None:
    """Requests of the first VM that have to succeed, one after the other."""
    for operation in operations:
        result = peer.run(operation, 1)
        assert result == ["0", "NULL"], f"{operation}: {result}\n{peer.end_by(signal.SIGTERM)}"


def words_of(status: list[str]) -> dict[str, str]:
    return dict(word.split("=") for word in status[1:])


@contextlib.contextmanager
def running(job: Job, *more: str, **settings: object) -> Iterator[Peer]:
    """A server that has started the job's VM."""
    with greeted(job, **settings) as peer:
        answers(peer, job, ["0", "1"], *more)
        yield peer


def run_to_its_end(peer: Peer, job: Job) -> dict[str, object]:
    """Wait for the end of the guest, which HTCondor has not asked for: what the exit file says."""
    until(lambda: job.domain() is None, "the guest ends")
    assert peer.run("STATUS", 1) == ["0", "STATUS=Stopped"]
    return job.exit_file()


CHECKPOINT = {"vm_checkpoint.mem", "vm_checkpoint.json"}
WANTS = "JobVMCheckpoint = true"


def vacate(job: Job, *more: str, **settings: object) -> None:
    """What condor_starter does with a job that must go: CHECKPOINT, STATUS, STOP, QUIT."""
    with running(job, WANTS, *more, **settings) as peer:
        until(lambda: "2\n" in job.console(), "the guest counts to two")
        done(peer, "CHECKPOINT")
        assert peer.run("STATUS", 1) == ["0", "STATUS=Suspended"]
        done(peer, "STOP")


def moved(job: Job, scratch: Path) -> None:
    """Another machine: the files come back with new times, in another scratch directory."""
    for path in list(job.scratch.iterdir()):
        target = scratch / path.name
        shutil.copyfile(path, target)
        path.unlink()
        job.own(target)
    job.scratch = scratch
    job.disk = scratch / job.disk.name


CRITICAL = "VMGAHP_ERR_CRITICAL"


def state(scratch: Path) -> dict[str, tuple[object, ...]]:
    """The job's files: whose they are and what is in them."""
    ours = (CONSOLE, "vm_error.txt")
    found = {}
    for path in scratch.iterdir():
        status = path.lstat()
        content = b"" if path.is_symlink() else path.read_bytes()
        if path.name not in ours:
            found[path.name] = (status.st_uid, status.st_gid, status.st_mode, content)
    return found


def processes(*parts: str) -> dict[int, str]:
    """The processes whose command lines have all these parts, with them; a NUL is behind each word."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            line = os.fsdecode((entry / "cmdline").read_bytes())
            if all(part in line for part in parts):
                found[int(entry.name)] = line
    return found


def left_behind(name: str, pid: int) -> list[str]:
    """What of a VM is still there: its guardian, its QEMU, and, of the server with that `pid`, its console's socket."""
    from vmgahp.host.runtime_dir import ROOT_BASE

    found = [path.name for path in Path(ROOT_BASE).glob(f"*-{pid}-*")] if pid else []
    for word in (name, f"guest={name},debug-threads=on"):
        found += processes(f"\0{word}\0").values()
    return found


def refused_cleanly(peer: Peer, job: Job, word: str, *more: str, explained: bool = True) -> str:
    """A START that fails as it should and leaves nothing; the text of vm_error.txt."""
    before = state(job.scratch)
    answers(peer, job, ["1", word], *more)
    assert job.domain() is None
    until(lambda: not left_behind(job.name, peer.process.pid), "all of it to go")
    assert state(job.scratch) == before
    if not explained:
        return ""
    text = (job.scratch / "vm_error.txt").read_text()
    assert word in text
    assert "Hint: " in text
    return text


def runs(peer: Peer, job: Job, *more: str) -> None:
    """A START that succeeds, on a server that has seen others fail."""
    peer.send_ad(*job.ad(*more))
    result = peer.run("START", "kvm")
    assert result[0] == "0", f"{result}\n{peer.end_by(signal.SIGTERM)}"
    assert peer.run("STATUS", result[1])[-5] == "STATUS=Running"


USER_NETWORK = {"VM_NETWORKING": True, "VM_NETWORKING_TYPE": "user", "VM_ALLOW_HOST_LOOPBACK": True}


def own_mac(number: int) -> str:
    """One of four MAC addresses that no other process on this machine takes: a process id has 22 bits, and these 24."""
    digits = f"{os.getpid() << 2 | number:06x}"
    return ":".join(["52:54:00", digits[:2], digits[2:4], digits[4:]])


MAC, OTHER_MAC = own_mac(0), own_mac(1)

ASKS = ("JobVMNetworking = true", f'JobVM_MACADDR = "{MAC}"')


def refused_by(peer: Peer, job: Job, code: str, *more: str) -> str:
    """A START that is refused with `code`; what vm_error.txt says."""
    answers(peer, job, ["1", code], *more)
    assert job.domain() is None
    return (job.scratch / "vm_error.txt").read_text()


def refused(job: Job, code: str, *more: str, **settings: object) -> str:
    """The same, of a server of its own."""
    with greeted(job, **settings) as peer:
        return refused_by(peer, job, code, *more)


def evict(peer: Peer) -> None:
    """What condor_starter does with a job that must go."""
    done(peer, "CHECKPOINT", "STOP")
    peer.quit()


LINUX = ('VMPARAM_Libvirt_XML = "domain.xml"', f"JobVMMemory = {linux_guest.MEMORY_MIB}")
"""For the fixture `linux`."""
ON_VIRTIO = 'VMPARAM_vm_Disk = "guest.img:vda:w:raw"'
USER_DATA = 'VMPARAM_vm_User_Data = "user-data"'
DHCP = """#!/bin/sh
cat >/tmp.sh <<'END'
[ "$1" = bound ] || exit
ip addr add $ip/$mask dev $interface
ip route add default via $router
echo "$router $dns" >/hosts
END
chmod 755 /tmp.sh
ip link set lo up
ip link set eth0 up
udhcpc -i eth0 -n -q -s /tmp.sh
"""
"""The start of a script as user-data: the guest has an address, and its router and name server in /hosts."""

NETWORK_NAME, BRIDGE = f"vmgahp-test-{os.getpid()}", f"vgt{os.getpid()}"

# 198.18.0.0/15 is set aside for benchmarks (RFC 2544): no machine has it. Each process that runs tests takes 8 of it.
ADDRESSES = IPv4Network("198.18.0.0/15")[os.getpid() % (1 << 14) * 8]
LEASED = str(ADDRESSES + 3)
NETWORK_XML = f"""<network><name>{NETWORK_NAME}</name><forward mode='nat'/><bridge name='{BRIDGE}'/>
    <ip address='{ADDRESSES + 1}' netmask='255.255.255.248'>
        <dhcp><range start='{ADDRESSES + 2}' end='{ADDRESSES + 6}'/></dhcp></ip></network>"""


NAT = {"VM_NETWORKING": True, "VM_NETWORKING_TYPE": "nat", "VM_NAT_NETWORK": NETWORK_NAME}
BRIDGED = {"VM_NETWORKING": True, "VM_NETWORKING_TYPE": "bridge", "VM_NETWORKING_BRIDGE_INTERFACE": BRIDGE}


def network_ad(kind: str) -> tuple[str, ...]:
    return ("JobVMNetworking = true", f'JobVMNetworkingType = "{kind}"', f'JobVM_MACADDR = "{MAC}"')


@contextlib.contextmanager
def driving(job: Job, log: list[str], *more: str, **settings: object) -> Iterator[tuple["LibvirtDriver", JobAd]]:
    """The driver itself, in this process, and the job's ad."""
    from vmgahp.drivers.libvirt.driver import LibvirtDriver

    options = {"VM_ALLOW_EMULATION": True, "VM_STOP_TIMEOUT": 0} | settings
    made = config.load(environment("kvm", job.scratch, **options))
    with contextlib.closing(LibvirtDriver("kvm", made, jobs.owner(job.scratch), log.append)) as driver:
        yield driver, jobs.of_lines(*job.ad(*more))


@contextlib.contextmanager
def started(job: Job, log: list[str], *more: str, **settings: object) -> Iterator["LibvirtMachine"]:
    """The job's VM, started by a driver in this process, and destroyed at the end."""
    with driving(job, log, *more, **settings) as (driver, ad):
        machine = driver.start(ad)
        try:
            yield machine
        finally:
            machine.destroy()


def libvirt_error(code: int | None, origin: int | None, message: str) -> "libvirt.libvirtError":
    """An error as libvirt would raise it."""
    import libvirt

    error = libvirt.libvirtError(message)
    error.err = (code, origin, message, 2, None, None, None, 0, 0)
    return error


def no_thread(_thread: threading.Thread) -> None:
    """Stand in for `threading.Thread.start` where no thread can start."""
    raise RuntimeError("can't start new thread")


@contextlib.contextmanager
def another_vm(
    connection: "libvirt.virConnect", name: str, devices: str = "", flags: int = 0
) -> Iterator["libvirt.virDomain"]:
    """A VM that is nobody's job, destroyed at the end."""
    xml = SCRIPTED.format(memory=32, vcpus=1, devices=devices)
    made = connection.createXML(xml.replace("<name>x<", f"<name>{name}<"), flags)
    try:
        yield made
    finally:
        if made.UUIDString() in [one.UUIDString() for one in connection.listAllDomains()]:
            made.destroy()


@contextlib.contextmanager
def mounted(directory: Path, options: str) -> Iterator[Path]:
    """A small file system of its own, without which the test is skipped."""
    if os.getuid() != 0:
        pytest.skip("needs root")
    directory.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", directory], check=True)
    try:
        yield directory
    finally:
        subprocess.run(["umount", "-l", directory], check=True)


def overlay(job: Job, name: str | Path, base: str | Path, base_format: str = "raw") -> Path:
    """A qcow2 image of the job's upon another image, in the scratch directory if its name is no full path."""
    made = job.scratch / name
    subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", "-b", base, "-F", base_format, made], check=True)
    job.own(made)
    return made


def nic_xml(mac: str) -> str:
    return f"<interface type='user'><mac address='{mac}'/></interface>"


def holders(path: Path) -> list[str]:
    """The processes that have a file open, but for this one."""
    wanted = (path.stat().st_dev, path.stat().st_ino)
    found = []
    for link in descriptors():
        with contextlib.suppress(OSError):
            status = link.stat()
            if (status.st_dev, status.st_ino) == wanted and link.parts[2] != str(os.getpid()):
                found.append((link.parents[1] / "cmdline").read_bytes().decode(errors="replace"))
    return found


@contextlib.contextmanager
def at(point: str, act: Callable[[], None]) -> Iterator[None]:
    """Have something done when a VM's life comes to a point, once."""
    usual, left = managed.reached, [act]

    def reached(now: str) -> None:
        usual(now)
        if now == point and left:
            left.pop()()

    managed.reached = reached
    try:
        yield
    finally:
        managed.reached = usual
    assert not left, f"{point} was not reached"
