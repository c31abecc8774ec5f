"""A libvirtd that writes sparse memory images, on a machine without zstd; one that hangs, is gone, or was stopped.

In a namespace, where it is ours to torment. What fails in the midst of an operation is in tests/faults.
"""

import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests import jobs
from tests.client import Client
from tests.lab.guest import BANNER, make_guest
from tests.lab.namespace import LAB, OUR_SERVER, Namespace, require_namespace, wait_until, wheel_of

from vmgahp.protocol.client import ProtocolError

pytestmark = pytest.mark.pool

PATIENCE = 60
RAW, ZSTD, SPARSE = 0, 5, 6
"""The numbers of formats in the head of an image."""
REQUEST_TIMEOUT = 40
PROBE_TIMEOUT = 5
"""The startd's, hard-coded."""


@pytest.fixture(scope="module")
def namespace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Namespace]:
    require_namespace()
    with Namespace(tmp_path_factory.mktemp("namespace")) as namespace:
        namespace.install(wheel_of(tmp_path_factory))
        namespace.run("rm", "-f", "/usr/bin/zstd")
        namespace.start_libvirt()
        yield namespace


class Site:
    """A job's scratch directory in the namespace, and the servers that run its VM."""

    number = 0

    def __init__(self, namespace: Namespace, log: Path) -> None:
        Site.number += 1
        self.namespace = namespace
        self.inside = f"{LAB}/scratch-{Site.number}"
        self.scratch = namespace.exchange / f"scratch-{Site.number}"
        self.log = log
        self._clients: list[Client] = []
        namespace.run("install", "-d", "-o", "alice", self.inside)
        make_guest(self.scratch / "guest.img", None)
        namespace.run("chown", "-R", "alice", self.inside)

    def client(self, **settings: str) -> Client:
        environ = self.namespace.environment() | {
            "VMGAHP_VMTYPE": "kvm",
            "VMGAHP_WORKING_DIR": self.inside,
            "VMGAHP_USER_UID": self.namespace.run("id", "-u", "alice").stdout.strip(),
            "VMGAHP_USER_GID": self.namespace.run("id", "-g", "alice").stdout.strip(),
            "_CONDOR_VM_MEMORY": "1024",
            "_CONDOR_VM_ALLOW_EMULATION": "True",
            "_CONDOR_VM_STOP_TIMEOUT": "0",
        }
        environ |= {f"_CONDOR_{name}": value for name, value in settings.items()}
        with self.log.open("a") as stderr:
            client = Client(self.namespace.command([OUR_SERVER, "-f", "-t", "-M", "3"]), environ, Path("/"), stderr)
        self._clients.append(client)
        client.greeting()
        return client

    def start(self, client: Client, *more: str) -> str:
        disk = '"guest.img:vda:w:raw"'
        ad = jobs.lines(self.inside, *more, JobVMMemory=128, VMPARAM_vm_Disk=disk, ClusterId=Site.number)
        client.send_ad(*ad)
        return client.call("START", "kvm")

    def console(self) -> str:
        path = self.scratch / "vm_console.log"
        return path.read_text() if path.exists() else ""

    def goes_on(self) -> None:
        """The guest counts on, and has not booted again."""
        lines = self.console().count("\n")
        wait_until("the guest counts on", lambda: self.console().count("\n") > lines, PATIENCE)
        assert self.console().count(BANNER) == 1

    def format(self, name: str) -> int:
        return int(struct.unpack_from("=16s5I", (self.scratch / name).read_bytes()[:64])[4])

    def close(self) -> None:
        for client in self._clients:
            client.finish()
        wait_until("the guardians end the VMs", lambda: not self.namespace.domains(), PATIENCE)


@pytest.fixture
def site(namespace: Namespace, tmp_path: Path) -> Iterator[Site]:
    made = Site(namespace, tmp_path / "log")
    try:
        yield made
    finally:
        print(made.log.read_text() if made.log.exists() else "")
        made.close()


@pytest.fixture
def client(site: Site) -> Client:
    """A conversation with a daemon in the namespace, with a guest that runs on and on."""
    timeouts = {"VM_STOP_TIMEOUT": "1", "VM_GAHP_REQ_TIMEOUT": str(REQUEST_TIMEOUT)}
    client = site.client(VM_REPORT_PID="True", VM_METRICS_INTERVAL="1", **timeouts)
    assert site.start(client) == "1"
    return client


def probe(namespace: Namespace, timeout: float = PROBE_TIMEOUT) -> subprocess.CompletedProcess[str]:
    environ = namespace.environment() | {"VMGAHP_USER_UID": "65534", "_CONDOR_VM_MEMORY": "64"}
    environ["_CONDOR_EXECUTE"] = LAB
    command = namespace.command([OUR_SERVER, "-f", "-t", "-M", "0", "vmtype", "qemu"])
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=timeout)


def end_libvirtd(namespace: Namespace, signal: str) -> None:
    pid = libvirtd(namespace)
    namespace.kill(pid, signal)
    wait_until("libvirtd to end", lambda: pid not in namespace.processes(), 30)


def libvirtd(namespace: Namespace) -> int:
    [pid] = [pid for pid, words in namespace.processes().items() if words.startswith("libvirtd")]
    return pid


def test_a_libvirtd_that_hangs_is_answered_for_in_time(namespace: Namespace, site: Site, client: Client) -> None:
    assert client.call("STATUS", "1").startswith("STATUS=Running")
    hanging = libvirtd(namespace)
    namespace.kill(hanging, "STOP")
    figures = site.scratch / "vm_metrics.jsonl"
    try:
        began = time.monotonic()
        assert client.call("STATUS", "1").startswith("STATUS=Running"), "QEMU runs on"
        assert time.monotonic() - began < REQUEST_TIMEOUT
        assert client.ask("VERSION").startswith("S ")
        began = time.monotonic()
        with pytest.raises(ProtocolError, match="VMGAHP_ERR_CRITICAL"):
            client.call("SOFT_SUSPEND", "1")
        assert time.monotonic() - began < REQUEST_TIMEOUT
        before = figures.read_bytes()
    finally:
        namespace.kill(hanging, "CONT")
    wait_until(
        "the daemon to have its libvirt again",
        lambda: client.call("STATUS", "1").startswith("STATUS=") and client.call("GETPID", "1") != "0",
        60,
    )
    wait_until("figures again", lambda: b"cpu_seconds" in figures.read_bytes().removeprefix(before), 60)
    assert client.call("STOP", "1") == "NULL"
    assert namespace.domains() == []
    client.quit()


def test_a_guest_of_a_killed_daemon_ends_while_libvirtd_is_away(namespace: Namespace, client: Client) -> None:
    """And its guardian does not wait for libvirtd."""
    end_libvirtd(namespace, "KILL")
    [server] = [pid for pid, words in namespace.processes().items() if f"{OUR_SERVER} -f" in words]
    try:
        namespace.kill(server, "KILL")
        wait_until("the guest to end", lambda: "qemu-system" not in str(namespace.processes()), 60)
        wait_until("the guardian to end", lambda: "vmgahp-guardian" not in str(namespace.processes()), 60)
    finally:
        namespace.run("libvirtd", "-d")
    wait_until("libvirt to see it", lambda: namespace.domains() == [], 60)


def test_a_probe_ends_in_time_though_libvirtd_hangs_or_is_gone(namespace: Namespace) -> None:
    ended = probe(namespace, PATIENCE)
    assert (ended.returncode, ended.stdout.startswith("VM_GAHP_VERSION")) == (0, True), ended.stderr
    assert 'VM_qemu_ATTR_memory_formats = "raw,sparse"' in ended.stdout, "for there is no zstd"
    namespace.kill(libvirtd(namespace), "STOP")
    ended = probe(namespace)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "libvirt at qemu:///system does not answer" in ended.stderr
    end_libvirtd(namespace, "KILL")
    ended = probe(namespace)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "start libvirtd" in ended.stderr
    namespace.run("libvirtd", "-d")


def test_a_libvirtd_that_was_stopped_is_the_machines(namespace: Namespace, site: Site, client: Client) -> None:
    assert client.call("STOP", "1") == "NULL"
    end_libvirtd(namespace, "TERM")
    try:
        with pytest.raises(ProtocolError, match="VMGAHP_ERR_CRITICAL"):
            client.call("START", "kvm")
        text = (site.scratch / "vm_error.txt").read_text()
        assert "libvirt cannot be reached" in text
        assert "start libvirtd" in text
    finally:
        namespace.run("libvirtd", "-d")
    assert client.call("START", "kvm") == "3"
    client.quit()


def test_a_suspended_vm_is_sparse_and_goes_on(site: Site) -> None:
    client = site.client()
    assert site.start(client) == "1"
    wait_until("the guest is up", lambda: BANNER in site.console(), PATIENCE)
    for _ in range(2):
        client.call("SUSPEND", 1)
        image = site.scratch / "vm_suspend.mem"
        assert site.format(image.name) == SPARSE
        assert image.stat().st_uid == site.scratch.stat().st_uid
        assert image.stat().st_blocks * 512 < image.stat().st_size / 4
        client.call("RESUME", 1)
        site.goes_on()
        assert not image.exists()


@pytest.mark.parametrize(("form", "number"), [("", RAW), ("sparse", SPARSE)])
def test_a_checkpoint_restarts(site: Site, form: str, number: int) -> None:
    """It is raw, for it travels; and whatever the next machine's settings say."""
    client = site.client(VM_MEMORY_IMAGE_FORMAT=form)
    assert site.start(client, "JobVMCheckpoint = true") == "1"
    wait_until("the guest is up", lambda: BANNER in site.console(), PATIENCE)
    client.call("SUSPEND", 1)
    client.call("CHECKPOINT", 1)
    assert site.format("vm_checkpoint.mem") == number
    client.call("STOP", 1)
    again = site.client()
    assert site.start(again, "JobVMCheckpoint = true") == "1"
    site.goes_on()


def test_a_checkpoint_that_only_zstd_unpacks_holds_the_job_and_stays(site: Site) -> None:
    client = site.client()
    assert site.start(client, "JobVMCheckpoint = true") == "1"
    client.call("CHECKPOINT", 1)
    client.call("STOP", 1)
    site.namespace.run("/opt/vmgahp/bin/python", "-c", CLAIM_ZSTD, site.inside)
    before = {path.name: path.read_bytes() for path in site.scratch.glob("vm_checkpoint*")}
    assert len(before) == 2
    with pytest.raises(ProtocolError, match="JOBCLASSAD_KVM_MISMATCHED_CHECKPOINT"):
        site.start(site.client(), "JobVMCheckpoint = true")
    assert {path.name: path.read_bytes() for path in site.scratch.glob("vm_checkpoint*")} == before
    assert 'stringListMember("zstd"' in (site.scratch / "vm_error.txt").read_text()


CLAIM_ZSTD = """
import json, struct, sys
from vmgahp.checkpoint import store
name = sys.argv[1] + "/vm_checkpoint.mem"
with open(name, "r+b") as image:
    image.seek(28)
    image.write(struct.pack("=I", 5))
    image.flush()
    digest = store.sample(image.fileno(), image.seek(0, 2))
with open(sys.argv[1] + "/vm_checkpoint.json", "r+") as file:
    manifest = json.load(file)
    for one in manifest["files"]:
        if one["role"] == "memory":
            one["digest"] = digest
    file.seek(0)
    file.truncate()
    json.dump(manifest, file)
"""
