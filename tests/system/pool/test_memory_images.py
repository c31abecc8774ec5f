"""Memory images of a libvirt that writes sparse ones, and of a machine without zstd: in a namespace."""

from __future__ import annotations

import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.lab.guest import BANNER, make_guest
from tests.lab.namespace import LAB, OUR_SERVER, Namespace, wait_until, wheel_of, why_not

from vmgahp.protocol.client import Client, ProtocolError
from vmgahp.protocol.requests import PREFIX

pytestmark = pytest.mark.pool

PATIENCE = 60
RAW, ZSTD, SPARSE = 0, 5, 6
"""The numbers of formats in the head of an image."""


@pytest.fixture(scope="module")
def namespace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Namespace]:
    reason = why_not()
    if reason:
        pytest.skip(reason)
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
        client.send_ad(
            f'VM_WORKING_DIR = "{self.inside}"',
            'JobVMType = "kvm"',
            "JobVMMemory = 128",
            'VMPARAM_vm_Disk = "guest.img:vda:w:raw"',
            f"ClusterId = {Site.number}",
            "ProcId = 0",
            'User = "alice@lab"',
            *more,
        )
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
    """It is raw where there is no zstd, for it travels; and whatever the next machine's settings say."""
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


def test_a_server_that_is_killed_while_it_saves_leaves_nothing_in_the_way(site: Site, namespace: Namespace) -> None:
    client = site.client()
    assert site.start(client) == "1"
    wait_until("the guest is up", lambda: BANNER in site.console(), PATIENCE)
    assert client.ask(f"{PREFIX}SUSPEND {client.requests.last_id + 1} 1") == "S"
    partial = site.scratch / ".vm_suspend.mem.part"
    wait_until("the image is being written", partial.exists, PATIENCE, 0.01)
    pids = [pid for pid, words in namespace.processes().items() if OUR_SERVER in words and "-M" in words]
    for pid in pids:
        namespace.kill(pid, "KILL")
    wait_until("the guardian ends the VM", lambda: not namespace.domains(), PATIENCE)
    again = site.client()
    assert site.start(again) == "1"
    assert not partial.exists()
    wait_until("the guest boots again", lambda: site.console().count(BANNER) == 2, PATIENCE)


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
import hashlib, json, struct, sys
name = sys.argv[1] + "/vm_checkpoint.mem"
with open(name, "r+b") as image:
    image.seek(28)
    image.write(struct.pack("=I", 5))
    image.seek(0)
    digest = hashlib.sha256(image.read()).hexdigest()
with open(sys.argv[1] + "/vm_checkpoint.json", "r+") as file:
    manifest = json.load(file)
    for one in manifest["files"]:
        if one["role"] == "memory":
            one["digest"] = digest
    file.seek(0)
    file.truncate()
    json.dump(manifest, file)
"""


def test_the_probe_says_what_is_restored(namespace: Namespace) -> None:
    environ = namespace.environment() | {"VMGAHP_USER_UID": "65534", "_CONDOR_VM_MEMORY": "64"}
    found = subprocess.run(
        namespace.command([OUR_SERVER, "-f", "-t", "-M", "0", "vmtype", "qemu"]),
        env=environ | {"_CONDOR_EXECUTE": LAB},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert 'VM_qemu_ATTR_memory_formats = "raw,sparse"' in found.stdout, found.stderr
