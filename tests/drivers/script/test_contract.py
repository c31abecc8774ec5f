"""The contract of a driver, kept by the script driver with the examples: VirtualBox's stand-in, and real podman."""

import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import REPOSITORY
from tests.conftest import JOB_UID
from tests.drivers.support import counted, needs_qemu
from tests.jobs import owner
from tests.lab.guest import make_guest
from tests.lab.programs import a_program
from tests.lab.vmware import convert
from vmgahp import errors, lifecycle
from vmgahp.config import Settings
from vmgahp.daemon import containers
from vmgahp.drivers.base import Driver
from vmgahp.drivers.script import key_of
from vmgahp.drivers.script.machine import ScriptFailed
from vmgahp.host.job_user import Identity
from vmgahp.job.ad import JobAd
from vmgahp.testing.contract import DriverContract, Subject

EXAMPLES = REPOSITORY / "config" / "scripts"
LAB = REPOSITORY / "tests" / "lab"
CLONE_NEWNS = 0x00020000


def install(directory: Path, name: str, **changes: str) -> Path:
    """An example as an administrator installs it, with other values at its head."""
    text = (EXAMPLES / name).read_text()
    for variable, line in changes.items():
        before = next(old for old in text.splitlines() if old.startswith((f"{variable}=", f"{variable} =")))
        text = text.replace(before, line, 1)
    return a_program(directory / name, text)


class Scripted(Subject):
    vm_type = "script"

    def __init__(self, directory: Path, script: Path, identity: Identity) -> None:
        settings = {"VM_MEMORY": "1024", "VM_STOP_TIMEOUT": "1", "VM_SCRIPT": str(script), "VM_GAHP_REQ_TIMEOUT": "600"}
        super().__init__(directory, Settings(settings | {"VM_HYPERVISOR": script.name}), identity)

    def unfit(self) -> Settings:
        return Settings({"VM_MEMORY": "1024", "VM_HYPERVISOR": "none", "VM_SCRIPT": "/nonexistent/script"})

    def own(self, *paths: Path) -> None:
        for path in paths:
            os.chown(path, self.identity.uid, self.identity.gid)

    def job_beside_rubbish(self, suffix: str) -> JobAd:
        """A job with a file that is no image and with a link to a file of the machine's."""
        job = self.job(2)
        garbage = Path(job.working_dir(), f"garbage.{suffix}")
        garbage.write_bytes(b"no image at all" * 100)
        self.own(garbage)
        garbage.with_stem("link").symlink_to("/etc/passwd")
        return job


class VirtualBox(Scripted):
    def __init__(self, directory: Path, identity: Identity) -> None:
        self.state = directory / "state"
        self.state.mkdir()
        self.state.chmod(0o1777)
        for name in ("VBoxManage", "vmrun"):
            shutil.copyfile(LAB / name, directory / name)
        asks = f"VBOX_STATE_DIR='{self.state}' exec python3 '{directory}/VBoxManage' \"$@\""
        tool = a_program(directory / "vbox", asks)
        script = install(directory, "virtualbox", VBOXMANAGE=f'VBOXMANAGE = "{tool}"')
        super().__init__(directory, script, identity)

    def prepare(self, scratch: Path, number: int, ends: bool) -> dict[str, str]:
        for old in scratch.iterdir():
            old.unlink()
        convert(make_guest(scratch / "raw", seconds=1 if ends else None), scratch / "disk.vmdk")
        self.own(scratch, scratch / "disk.vmdk")
        return {"VMPARAM_vm_Disk": '"disk.vmdk:sda:w:vmdk"'}

    def records(self) -> list[dict[str, object]]:
        return [json.loads(path.read_text()) for path in self.state.glob("*/*.json")]

    def exists(self, job: JobAd) -> bool:
        return key_of(os.path.realpath(job.working_dir())) in [record["name"] for record in self.records()]

    def bad_jobs(self) -> dict[str, JobAd]:
        job = self.job_beside_rubbish("vmdk")
        return {
            "no disk": self.changed(job, VMPARAM_vm_Disk=None),
            "a disk that is not there": self.changed(job, VMPARAM_vm_Disk='"nothing.vmdk:sda:w"'),
            "a link": self.changed(job, VMPARAM_vm_Disk='"link.vmdk:sda:w"'),
            "a format that VirtualBox has not": self.changed(job, VMPARAM_vm_Disk='"disk.vmdk:sda:w:raw"'),
            "no image in the file": self.changed(job, VMPARAM_vm_Disk='"garbage.vmdk:sda:w:vmdk"'),
            "an unknown option": self.changed(job, VM_virtualbox_ATTR_colour='"green"'),
            "a guest that VirtualBox has not": self.changed(job, VM_virtualbox_ATTR_ostype='"Linux64"'),
            "too many CPUs": self.changed(job, JobVM_VCPUS="65"),
        }

    def count(self, job: JobAd) -> int:
        return counted(job)

    def kill_all(self) -> None:
        for record in self.records():
            pid = record["pid"]
            with contextlib.suppress(OSError):
                assert isinstance(pid, int)
                if str(record["uuid"]).encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                    os.kill(pid, signal.SIGKILL)


@pytest.mark.qemu
@needs_qemu
class TestVirtualBox(DriverContract):
    @pytest.fixture
    def subject(self, scratch: Path) -> Iterator[Subject]:
        made = VirtualBox(scratch.parent, owner(scratch))
        try:
            with made:
                yield made
        finally:
            made.kill_all()

    def test_a_disk_that_fails_is_the_jobs_fault(self, subject: VirtualBox, driver: Driver, job: JobAd) -> None:
        for text, fault in (
            ("Could_not_open_the_medium_(VERR-VD-VMDK)", errors.JobFault),
            (
                "The_kernel_driver_is_not_accessible",
                ScriptFailed if subject.identity.switching else errors.MachineFault,
            ),
        ):
            (subject.state / "modes").write_text(f"fail:startvm={text}")
            with pytest.raises(fault, match=text.replace("_", " ").partition(" (")[0]):
                driver.start(job)
            (subject.state / "modes").unlink()
            assert not subject.exists(job)
            assert sorted(os.listdir(job.working_dir())) == ["disk.vmdk"]

    @pytest.mark.parametrize("version", ["6.1.50r161033", "7.0.26r168464", "7.1.0r164728", "7.2.4r170995"])
    def test_each_version_has_its_words(self, subject: VirtualBox, driver: Driver, job: JobAd, version: str) -> None:
        (subject.state / "version").write_text(version)
        driver.start(job).destroy()
        assert not subject.exists(job)

    def test_a_guest_with_two_cpus_sees_both(self, subject: VirtualBox, driver: Driver, job: JobAd) -> None:
        """VirtualBox shows a guest one, where there is no I/O APIC."""
        machine = driver.start(subject.changed(job, JobVM_VCPUS="2"))
        [record] = subject.records()
        assert {"cpus": "2", "ioapic": "on"}.items() <= record["settings"].items()  # type: ignore[attr-defined]
        machine.destroy()

    def test_two_jobs_with_the_same_image_run_at_once(self, subject: VirtualBox, driver: Driver, job: JobAd) -> None:
        """VirtualBox knows a disk by a UUID that is the same in each copy."""
        other = subject.job(2)
        image, copy = Path(job.working_dir(), "disk.vmdk"), Path(other.working_dir(), "disk.vmdk")
        shutil.copyfile(image, copy)
        first, second = driver.start(job), driver.start(other)
        assert subject.exists(job)
        assert subject.exists(other)
        for machine in (first, second):
            machine.destroy()

    def test_a_guru_meditation_is_an_end_without_rests(self, subject: VirtualBox, driver: Driver, job: JobAd) -> None:
        machine = driver.start(job)
        (subject.state / "modes").write_text("guru")
        assert machine.status().state == lifecycle.STOPPED
        machine.destroy()
        assert not subject.exists(job)

    def test_without_its_kernel_module_virtualbox_is_not_offered(self, subject: VirtualBox) -> None:
        (subject.state / "modes").write_text("nodriver")
        script = subject.settings.string("VM_SCRIPT")
        request = subject.state / "request"
        request.write_text("{}")
        done = subprocess.run(
            [script, "probe"], env=os.environ | {"VMGAHP_REQUEST": str(request)}, capture_output=True, text=True
        )
        assert done.returncode == 1
        assert "vboxdrv kernel module is not loaded" in done.stderr


def container_runtime(directory: Path) -> str:
    """Why no container runs here for another user, or nothing; `directory` gets an image archive."""
    if shutil.which("podman") is None or not Path("/bin/busybox").exists():
        return "podman or busybox-static is not installed"
    tree = directory / "tree" / "bin"
    tree.mkdir(parents=True)
    shutil.copy("/bin/busybox", tree / "busybox")
    (tree / "sh").symlink_to("busybox")
    subprocess.run(["tar", "-C", tree.parent, "-cf", directory / "layer.tar", "."], check=True)
    own = ["podman", "--root", directory / "root", "--runroot", directory / "rr", "--storage-driver=vfs"]
    for command in (
        [*own, "import", "--quiet", directory / "layer.tar", "localhost/guest:1"],
        [*own, "save", "--quiet", "--format", "oci-archive", "--output", directory / "image.tar", "localhost/guest:1"],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            return f"podman makes no image here: {done.stderr.strip()}"
    with pure_cgroups(), podman_home() as home:
        shutil.copyfile(directory / "image.tar", f"{home}/image.tar")
        for path in (home, home / "image.tar"):
            os.chown(path, JOB_UID, JOB_UID)
        own = f"podman --root {home}/root --runroot {home}/run --storage-driver=vfs"
        options = "--network=none --cgroups=disabled --ulimit=nofile=1024:1024 --ulimit=nproc=1024:1024"
        script = f"{own} load -i {home}/image.tar && {own} run {options} localhost/guest:1 /bin/busybox true"
        environ = {"HOME": str(home), "XDG_RUNTIME_DIR": f"{home}/run", "PATH": os.environ["PATH"]}
        who = {"user": JOB_UID, "group": JOB_UID, "extra_groups": [], "cwd": "/", "env": environ}
        streams = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
        done = subprocess.run(["sh", "-c", script], **who, **streams)
        return "" if done.returncode == 0 else f"podman runs no container here: {done.stderr.strip()}"


@contextlib.contextmanager
def pure_cgroups() -> Iterator[None]:
    """crun runs on no machine that has both kinds of cgroups: this thread gets a view of one kind for a while."""
    if " /sys/fs/cgroup cgroup2 " in Path("/proc/self/mounts").read_text():
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    outside = os.open("/proc/thread-self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    here = Path.cwd()
    assert libc.unshare(CLONE_NEWNS) == 0, os.strerror(ctypes.get_errno())
    try:
        cgroup = "/sys/fs/cgroup"
        for command in ("mount --make-rprivate /", f"umount --recursive {cgroup}", f"mount -t cgroup2 none {cgroup}"):
            subprocess.run(command.split(), check=True)
        yield
    finally:
        assert libc.setns(outside, CLONE_NEWNS) == 0, os.strerror(ctypes.get_errno())
        os.close(outside)
        os.chdir(here)


class Podman(Scripted):
    soft_suspend = False
    suspend = False
    checkpoint = False

    def __init__(self, directory: Path, base: Path, image: Path, identity: Identity) -> None:
        base.chmod(0o1777)
        self.image = image
        self.base = base
        options = "OPTIONS='--ulimit=nofile=1024:1024 --ulimit=nproc=1024:1024'"
        super().__init__(directory, install(directory, "podman", BASE=f"BASE={base}", OPTIONS=options), identity)

    def prepare(self, scratch: Path, number: int, ends: bool) -> dict[str, str]:
        for old in scratch.iterdir():
            old.unlink()
        shutil.copyfile(self.image, scratch / "image.tar")
        self.own(scratch, scratch / "image.tar")
        end = "[ $n -ge 2 ] && exit;" if ends else ""
        command = f"n=0; while :; do n=$((n+1)); echo $n >/scratch/count; {end} /bin/busybox sleep 1; done"
        return {"VM_podman_ATTR_image": '"image.tar"', "VM_podman_ATTR_command": f'"{command}"'}

    def exists(self, job: JobAd) -> bool:
        return any(self.base.glob(f"{key_of(os.path.realpath(job.working_dir()))}.*"))

    def bad_jobs(self) -> dict[str, JobAd]:
        job = self.job_beside_rubbish("tar")
        return {
            "no image": self.changed(job, VM_podman_ATTR_image=None),
            "an image that is not there": self.changed(job, VM_podman_ATTR_image='"nothing.tar"'),
            "an image elsewhere": self.changed(job, VM_podman_ATTR_image='"/etc/passwd"'),
            "a link": self.changed(job, VM_podman_ATTR_image='"link.tar"'),
            "no image in the file": self.changed(job, VM_podman_ATTR_image='"garbage.tar"'),
            "an image that runs nothing by itself": self.changed(job, VM_podman_ATTR_command=None),
            "an unknown option": self.changed(job, VM_podman_ATTR_colour='"green"'),
        }

    def count(self, job: JobAd) -> int:
        try:
            return int(Path(job.working_dir(), "count").read_text() or 0)
        except FileNotFoundError:
            return 0


@pytest.mark.parametrize(
    ("version", "installed", "network"),
    [
        ("4.3.1", ("slirp4netns", "pasta"), "slirp4netns"), ("4.3.1", ("pasta",), ""),
        ("5.4.2", ("slirp4netns", "pasta"), "pasta"), ("5.4.2", ("slirp4netns",), "slirp4netns"),
        ("6.0.0", ("slirp4netns",), ""), ("6.0.0", ("pasta",), "pasta"),
    ],
)  # fmt: skip
def test_podmans_network_is_its_versions(scratch: Path, version: str, installed: tuple[str, ...], network: str) -> None:
    """A podman that says what it was asked."""
    tools, base = scratch / "tools", scratch / "base"
    for directory in (tools, base):
        directory.mkdir()
    said = (
        'case "$*" in *load*) echo "Loaded image: guest" ;; *" run "*) echo "$*" >"$ASKED" ;; *inspect*) echo 1 ;; esac'
    )
    # Podman 5 says not even its version where that is set to a directory that is not there.
    there = '[ -z "${XDG_RUNTIME_DIR-}" ] || [ -d "$XDG_RUNTIME_DIR" ] || exit 125'
    podman = f"{there}\n[ $1 != --version ] || {{ echo podman version {version}; exit; }}\n{said}"
    for name, text in {"podman": podman, **dict.fromkeys(installed, "")}.items():
        a_program(tools / name, text)
    for name in ("sed", "tail", "head", "mkdir", "mktemp", "cat"):
        (tools / name).symlink_to(shutil.which(name) or "")
    script = install(scratch, "podman", BASE=f"BASE={base}")
    (scratch / "image.tar").touch()
    request = {"VMGAHP_DIRECTORY": str(scratch), "VMGAHP_KEY": "job", "VMGAHP_UUID": "1", "VMGAHP_NETWORKING": "user"}
    environ = request | {"PATH": str(tools), "ASKED": str(scratch / "asked"), "VMGAHP_MEMORY_MIB": "64"}

    def call(action: str) -> str:
        ad = 'VM_podman_ATTR_image = "image.tar"\n'
        done = subprocess.run(
            ["/bin/sh", script, action], env=environ, input=ad, capture_output=True, text=True, check=True
        )
        return done.stdout

    assert json.loads(call("probe"))["networking"] == ("user" if network else "")
    if network:
        call("start")
        assert f"--network {network} " in (scratch / "asked").read_text()


@pytest.fixture(scope="module")
def image() -> Iterator[Path]:
    with podman_home() as directory:
        reason = container_runtime(directory) if os.getuid() == 0 else "needs root"
        if reason:
            pytest.skip(reason)
        yield directory / "image.tar"


@contextlib.contextmanager
def podman_home() -> Iterator[Path]:
    """A place for rootless podman, which leaves a process behind that keeps its user namespace: until the end of this.

    It is short: podman takes no long path.
    """
    with tempfile.TemporaryDirectory(prefix="vp-") as home:
        try:
            yield Path(home)
        finally:
            for process in Path("/proc").glob("[0-9]*"):
                with contextlib.suppress(OSError):
                    if f"HOME={home}".encode() in (process / "environ").read_bytes():
                        os.kill(int(process.name), signal.SIGKILL)


@pytest.mark.podman
def test_the_probe_sees_podman_run_a_container(scratch: Path, image: Path) -> None:
    podman = shutil.which("podman")
    assert podman is not None
    with pure_cgroups():
        assert "podman" in containers.version(containers.PODMAN, podman, owner(scratch), time.monotonic() + 60)


@pytest.mark.podman
class TestPodman(DriverContract):
    @pytest.fixture
    def subject(self, scratch: Path, image: Path) -> Iterator[Subject]:
        with pure_cgroups(), podman_home() as base, Podman(scratch.parent, base, image, owner(scratch)) as subject:
            yield subject
