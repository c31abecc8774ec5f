"""Xen jobs through the daemon in dom0: what condor_starter asks of it, answered by real guests."""

import contextlib
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests import jobs
from tests.client import Client
from tests.lab import guest
from tests.lab.namespace import OUR_SERVER, wheel_of
from tests.lab.xen import INITRD, KERNEL, USER, XenHost

from vmgahp.job.ad import quote
from vmgahp.protocol.client import ProtocolError

pytestmark = pytest.mark.xen

START = 180
"""Seconds for what takes 10 on an idle machine: a guest's start up to its first counts."""
UID = 1201
IMAGE = "disk.img"
CONSOLE = "vm_console.log"
SETTINGS = "/etc/vmgahp.conf"
"""Empty: each daemon gets its settings by its environment."""


@pytest.fixture(scope="module")
def dom0(xen: XenHost, tmp_path_factory: pytest.TempPathFactory) -> XenHost:
    xen.install(wheel_of(tmp_path_factory))
    xen.write(SETTINGS, b"")
    return xen


KILL = """
import glob, os, sys
[daemon] = [
    int(path.split("/")[2])
    for path in glob.glob("/proc/[0-9]*/cmdline")
    if b"\\0-M\\0003\\0" in open(path, "rb").read() and os.readlink(os.path.dirname(path) + "/cwd") == sys.argv[1]
]
os.kill(daemon, 9)
"""
"""Kills the daemon whose current directory is the argument, with no time to tidy up."""


class Job:
    """One job: its scratch directory in dom0, and the daemons that serve it."""

    def __init__(self, host: XenHost, local: Path, number: int) -> None:
        self.host, self.local, self.number = host, local, number
        self.name = f"alice_lab_{number}.0"
        self.scratch = f"/home/{USER}/dir_{number}"
        host.run("install", "-d", "-o", USER, "-g", USER, self.scratch)
        host.run("truncate", "-s", "1M", f"{self.scratch}/{IMAGE}", user=USER)
        self.settings = {"VM_MEMORY": "512", "VM_STOP_TIMEOUT": "60"}
        self.words = ""
        self.attributes: dict[str, str] = {}

    def ad(self) -> list[str]:
        said = {
            "JobVMType": '"xen"',
            "JobVMMemory": "128",
            "JobVMCheckpoint": "true",
            "ClusterId": str(self.number),
            "VMPARAM_vm_Disk": quote(f"{IMAGE}:xvda:w"),
            "VMPARAM_Xen_Kernel": quote(KERNEL),
            "VMPARAM_Xen_Initrd": quote(INITRD),
            "VMPARAM_Xen_Root": '"/dev/xvda"',
            "VMPARAM_Xen_Kernel_Params": quote(f"console=hvc0 quiet loglevel=0 {self.words}"),
        }
        return jobs.lines(self.scratch, **{name: text for name, text in (said | self.attributes).items() if text})

    def command(self, *argv: str) -> list[str]:
        env = {"VMGAHP_CONFIG": SETTINGS, "VMGAHP_VMTYPE": "xen", "VMGAHP_WORKING_DIR": self.scratch}
        env |= {"VMGAHP_USER_UID": str(UID), "VMGAHP_USER_GID": str(UID)}
        env |= {f"_CONDOR_{name}": value for name, value in self.settings.items()}
        return self.host.command([OUR_SERVER, "-f", "-t", *argv], cwd=self.scratch, env=env)

    @contextlib.contextmanager
    def daemon(self) -> Iterator[Client]:
        with open(self.local / "daemon.log", "a") as log:
            talk = Client(self.command("-M", "3"), os.environ, self.local, log)
            try:
                talk.greeting()
                assert talk.ask("ASYNC_MODE_ON") == "S"
                yield talk
            finally:
                talk.process.kill()
                talk.process.wait()

    def start(self, talk: Client) -> str:
        talk.send_ad(*self.ad())
        return talk.call("START", "xen", timeout=START)

    def counts(self) -> list[int]:
        try:
            return guest.counts(self.host.read(f"{self.scratch}/{CONSOLE}").decode())
        except FileNotFoundError:
            return []

    def goes_on(self) -> list[int]:
        """Wait until two more counts are in the console's file, whose first has no gap to the one before."""
        before = len(self.counts())

        def more() -> list[int] | None:
            counts = self.counts()
            return counts if len(counts) >= before + 2 else None

        return self.host.wait_until(f"{self.name} to count on", more, START)

    def leaves_nothing(self) -> None:
        assert self.name not in self.host.domains()
        self.host.wait_until("no loop device", lambda: self.scratch not in self.host.run("losetup", "-l").stdout, 60)


@pytest.fixture
def job(dom0: XenHost, tmp_path: Path) -> Iterator[Job]:
    made = Job(dom0, tmp_path, next(NUMBERS))
    yield made
    dom0.virsh("destroy", made.name, check=False)


NUMBERS = iter(range(10, 1000))


def status(talk: Client, vm: str) -> str:
    return talk.call("STATUS", vm, timeout=START)


def test_the_probe_says_what_jobs_get(dom0: XenHost, tmp_path: Path) -> None:
    made = Job(dom0, tmp_path, next(NUMBERS))

    def probe() -> subprocess.CompletedProcess[str] | None:
        """What the probe says; None where this emulated machine was too slow, in which case the startd asks again."""
        argv = made.command("-M", "0", "vmtype", "xen")
        said = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
        return None if "had not ended after" in said.stderr else said

    said = dom0.wait_until("a probe within its time", probe, 120)
    assert said.returncode == 0, said.stderr
    lines = said.stdout.splitlines()
    assert 'VM_Type = "xen"' in lines
    assert "VM_Memory = 512" in lines
    assert 'VM_HYPERVISORS = "xen"' in lines
    assert "VM_xen_ATTR_checkpoint = TRUE" in lines
    assert "VM_xen_ATTR_hvm = FALSE" in lines


def test_a_job_from_start_to_its_own_end(job: Job) -> None:
    job.words = "seconds=3"
    with job.daemon() as talk:
        vm = job.start(talk)
        assert talk.call("GETPID", vm) == "0"
        job.host.wait_until("its end", lambda: "STATUS=Stopped" in status(talk, vm), START)
        talk.call("STOP", vm, timeout=START)
        talk.quit()
    assert job.counts() == [1, 2, 3]
    assert guest.DONE in job.host.read(f"{job.scratch}/{CONSOLE}").decode()
    assert guest.read_count(job.host.get(f"{job.scratch}/{IMAGE}", job.local / "disk")) == 3
    job.leaves_nothing()


def test_pausing_saving_and_a_checkpoint_that_another_daemon_goes_on_from(job: Job) -> None:
    job.host.virsh("net-start", "default", check=False)
    job.settings |= {"VM_NETWORKING": "true", "VM_NETWORKING_TYPE": "user, nat"}
    job.settings |= {"VM_ALLOW_HOST_LOOPBACK": "true", "VM_REPORT_ADDRESS": "true"}
    job.attributes["JobVMNetworking"] = "true"
    with job.daemon() as talk:
        vm = job.start(talk)
        job.goes_on()
        nic = re.search(r"MAC=([0-9a-f:]{17})", status(talk, vm))
        assert nic
        talk.call("SOFT_SUSPEND", vm, timeout=START)
        assert "STATUS=SoftSuspended" in status(talk, vm)
        # A guest that is paused is saved all the same, though libxl would not.
        talk.call("SUSPEND", vm, timeout=START)
        assert job.name not in job.host.domains()
        assert "STATUS=Suspended" in status(talk, vm)
        talk.call("RESUME", vm, timeout=START)
        job.goes_on()
        assert "STATUS=Running" in status(talk, vm)
        talk.call("CHECKPOINT", vm, timeout=START)
        talk.call("STOP", vm, timeout=START)
        talk.quit()
    job.leaves_nothing()
    before = job.counts()
    owners = job.host.run("sh", "-c", f"stat -c '%U %a' {job.scratch}/vm_checkpoint.*").stdout.split("\n")
    assert owners[0] == owners[1] == f"{USER} 600"

    with job.daemon() as talk:
        vm = job.start(talk)
        counts = job.goes_on()
        assert counts[: len(before)] == before
        assert nic[0] in status(talk, vm)
        # The memory came back, and not a new boot: no count twice, none left out.
        assert counts == list(range(1, len(counts) + 1))
        talk.call("STOP", vm, timeout=START)
        assert "asked to shut down" in job.host.read(f"{job.scratch}/{CONSOLE}").decode()
        talk.quit()
    assert "vm_checkpoint.mem" not in job.host.run("ls", job.scratch).stdout
    job.leaves_nothing()


def test_the_kill_mode_and_the_guardian_end_what_a_daemon_leaves(job: Job) -> None:
    with job.daemon() as talk:
        vm = job.start(talk)
        done = subprocess.run(
            job.command("-M", "4", "vmtype", "xen", "match", job.name), stdin=subprocess.DEVNULL, timeout=START
        )
        assert done.returncode == 0
        assert "STATUS=Stopped" in status(talk, vm)
        job.leaves_nothing()
    with job.daemon() as talk:
        job.start(talk)
        assert job.name in job.host.domains()
        job.host.run("python3", "-c", KILL, job.scratch)
        job.host.wait_until("the guardian", lambda: job.name not in job.host.domains(), START)
    job.leaves_nothing()


@pytest.mark.parametrize(
    ("attribute", "value", "word"),
    [
        ("VMPARAM_Xen_Kernel", '"/etc/passwd"', "JOBCLASSAD_XEN_KERNEL_NOT_FOUND"),
        ("VMPARAM_Xen_Kernel", '"/etc/shadow"', "JOBCLASSAD_XEN_KERNEL_NOT_FOUND"),
        ("VMPARAM_Xen_Kernel", '"vmx"', "JOBCLASSAD_MISMATCHED_HARDWARE_VT"),
        ("VMPARAM_vm_Disk", '"none.img:xvda:w"', "JOBCLASSAD_XEN_INVALID_DISK_PARAM"),
    ],
)
def test_a_jobs_fault_holds_the_job(job: Job, attribute: str, value: str, word: str) -> None:
    """/etc/passwd is no kernel, which libxl alone finds out; /etc/shadow the job's user may not read."""
    job.attributes[attribute] = value
    with job.daemon() as talk:
        with pytest.raises(ProtocolError, match=f"VMGAHP_ERR_{word}$"):
            job.start(talk)
        talk.quit()
    job.leaves_nothing()


IN_A_DISK = f"""
tree=$(mktemp -d -p /root) && mkdir -p "$tree/boot/grub"
cp {KERNEL} "$tree/boot/vmlinux" && cp {INITRD} "$tree/boot/initrd"
cat > "$tree/boot/grub/grub.cfg" <<'END'
set timeout=0
menuentry 'guest' {{
  linux /boot/vmlinux console=hvc0 quiet loglevel=0 seconds=2
  initrd /boot/initrd
}}
END
mke2fs -q -F -t ext2 -d "$tree" "$1" 128M && rm -r "$tree"
"""
"""Makes a disk with a file system, in which there are a kernel and a configuration of GRUB's."""


def test_the_kernel_in_the_disk_is_booted_where_there_is_a_bootloader(job: Job) -> None:
    job.host.run("sh", "-ec", IN_A_DISK, "sh", f"{job.scratch}/{IMAGE}")
    for name in ("Initrd", "Root", "Kernel_Params"):
        job.attributes[f"VMPARAM_Xen_{name}"] = ""
    job.attributes["VMPARAM_Xen_Kernel"] = '"included"'
    job.settings["XEN_BOOTLOADER"] = job.host.run("sh", "-c", "echo /usr/lib/xen-*/bin/pygrub").stdout.strip()
    with job.daemon() as talk:
        vm = job.start(talk)
        job.host.wait_until("its end", lambda: "STATUS=Stopped" in status(talk, vm), START)
        talk.quit()
    assert job.counts() == [1, 2]
    job.leaves_nothing()
