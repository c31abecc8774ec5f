"""A libvirtd that restarts, and one that hangs, while a guest runs: in a namespace, where it is ours to torment."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.lab.guest import make_guest
from tests.lab.namespace import LAB, OUR_SERVER, Namespace, wait_until, wheel_of, why_not

from vmgahp.protocol.client import Client, ProtocolError

pytestmark = pytest.mark.pool

SCRATCH = f"{LAB}/scratch"
REQUEST_TIMEOUT = 40
PROBE_TIMEOUT = 5
"""The startd's, hard-coded."""


@pytest.fixture(scope="module")
def namespace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Namespace]:
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with Namespace(tmp_path_factory.mktemp("namespace")) as namespace:
        namespace.install(wheel_of(tmp_path_factory))
        namespace.start_libvirt()
        yield namespace


@pytest.fixture
def client(namespace: Namespace, tmp_path: Path) -> Iterator[Client]:
    """A conversation with a daemon in the namespace, with a guest that runs on and on."""
    namespace.run("install", "-d", "-o", "alice", SCRATCH)
    make_guest(namespace.exchange / "scratch" / "guest.img", None)
    namespace.run("chown", "-R", "alice", SCRATCH)
    environ = namespace.environment() | {
        "VMGAHP_VMTYPE": "kvm",
        "VMGAHP_WORKING_DIR": SCRATCH,
        "VMGAHP_USER_UID": namespace.run("id", "-u", "alice").stdout.strip(),
        "VMGAHP_USER_GID": namespace.run("id", "-g", "alice").stdout.strip(),
        "_CONDOR_VM_MEMORY": "1024",
        "_CONDOR_VM_ALLOW_EMULATION": "True",
        "_CONDOR_VM_STOP_TIMEOUT": "1",
        "_CONDOR_VM_REPORT_PID": "True",
        "_CONDOR_VM_METRICS_INTERVAL": "1",
        "_CONDOR_VM_GAHP_REQ_TIMEOUT": str(REQUEST_TIMEOUT),
    }
    log = tmp_path / "log"
    with log.open("w") as stderr:
        client = Client(namespace.command([OUR_SERVER, "-f", "-t", "-M", "3"]), environ, Path("/"), stderr)
        try:
            client.greeting()
            client.send_ad(
                f'VM_WORKING_DIR = "{SCRATCH}"',
                'JobVMType = "kvm"',
                "JobVMMemory = 64",
                'VMPARAM_vm_Disk = "guest.img:vda:w:raw"',
                "ClusterId = 1",
                "ProcId = 0",
                'User = "alice@lab"',
            )
            assert client.call("START", "kvm") == "1"
            yield client
        finally:
            print(log.read_text())
            client.process.kill()
            client.process.wait()


def probe(namespace: Namespace) -> subprocess.CompletedProcess[str]:
    environ = namespace.environment() | {"VMGAHP_USER_UID": "65534", "_CONDOR_VM_MEMORY": "64"}
    environ["_CONDOR_EXECUTE"] = LAB
    return subprocess.run(
        namespace.command([OUR_SERVER, "-f", "-t", "-M", "0", "vmtype", "qemu"]),
        env=environ,
        capture_output=True,
        text=True,
        timeout=PROBE_TIMEOUT,
        check=False,
    )


def libvirtd(namespace: Namespace) -> int:
    [pid] = [pid for pid, words in namespace.processes().items() if words.startswith("libvirtd")]
    return pid


def test_a_guest_survives_a_restart_of_libvirtd(namespace: Namespace, client: Client) -> None:
    pid = client.call("GETPID", "1")
    assert client.call("STATUS", "1").startswith("STATUS=Running")
    old = libvirtd(namespace)
    namespace.kill(old, "TERM")
    wait_until("libvirtd to end", lambda: old not in namespace.processes(), 30)
    namespace.run("libvirtd", "-d")
    assert client.call("STATUS", "1").startswith("STATUS=Running")
    assert client.call("GETPID", "1") == pid
    assert client.call("SUSPEND", "1") == "NULL"
    assert client.call("RESUME", "1") == "NULL"
    assert client.call("STOP", "1") == "NULL"
    assert namespace.domains() == []
    client.quit()


def test_a_libvirtd_that_is_away_ends_no_job(namespace: Namespace, client: Client) -> None:
    assert client.call("STATUS", "1").startswith("STATUS=Running")
    old = libvirtd(namespace)
    namespace.kill(old, "KILL")
    wait_until("libvirtd to end", lambda: old not in namespace.processes(), 30)
    assert client.call("STATUS", "1").startswith("STATUS=Running"), "QEMU runs on"
    namespace.run("libvirtd", "-d")
    assert client.call("STATUS", "1").startswith("STATUS=Running")
    assert client.call("STOP", "1") == "NULL"
    client.quit()


def test_a_libvirtd_that_hangs_is_answered_for_in_time(namespace: Namespace, client: Client) -> None:
    assert client.call("STATUS", "1").startswith("STATUS=Running")
    hanging = libvirtd(namespace)
    namespace.kill(hanging, "STOP")
    figures = namespace.exchange / "scratch" / "vm_metrics.jsonl"
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


def qemus(namespace: Namespace) -> list[int]:
    return [pid for pid, words in namespace.processes().items() if "qemu-system" in words]


def test_a_vm_is_ended_though_libvirtd_hangs(namespace: Namespace, client: Client) -> None:
    assert len(qemus(namespace)) == 1
    hanging = libvirtd(namespace)
    namespace.kill(hanging, "STOP")
    try:
        assert client.call("STOP", "1") == "NULL"
        assert qemus(namespace) == []
    finally:
        namespace.kill(hanging, "CONT")
    wait_until("libvirt to see it", lambda: namespace.domains() == [], 60)
    client.quit()


def test_a_guest_of_a_killed_daemon_ends_while_libvirtd_is_away(namespace: Namespace, client: Client) -> None:
    """And its guardian does not wait for libvirtd."""
    old = libvirtd(namespace)
    namespace.kill(old, "KILL")
    wait_until("libvirtd to end", lambda: old not in namespace.processes(), 30)
    [server] = [pid for pid, words in namespace.processes().items() if f"{OUR_SERVER} -f" in words]
    try:
        namespace.kill(server, "KILL")
        wait_until("the guest to end", lambda: qemus(namespace) == [], 60)
        wait_until("the guardian to end", lambda: "vmgahp-guardian" not in str(namespace.processes()), 60)
    finally:
        namespace.run("libvirtd", "-d")
    wait_until("libvirt to see it", lambda: namespace.domains() == [], 60)


def test_a_probe_ends_in_time_though_libvirtd_hangs_or_is_gone(namespace: Namespace) -> None:
    ended = probe(namespace)
    assert (ended.returncode, ended.stdout.startswith("VM_GAHP_VERSION")) == (0, True), ended.stderr
    hanging = libvirtd(namespace)
    namespace.kill(hanging, "STOP")
    ended = probe(namespace)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "libvirt at qemu:///system does not answer" in ended.stderr
    namespace.kill(hanging, "KILL")
    wait_until("libvirtd to end", lambda: hanging not in namespace.processes(), 30)
    ended = probe(namespace)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "start libvirtd" in ended.stderr
    namespace.run("libvirtd", "-d")


def test_a_libvirtd_that_was_stopped_is_the_machines(namespace: Namespace, client: Client) -> None:
    assert client.call("STOP", "1") == "NULL"
    old = libvirtd(namespace)
    namespace.kill(old, "TERM")
    wait_until("libvirtd to end", lambda: old not in namespace.processes(), 30)
    try:
        with pytest.raises(ProtocolError, match="VMGAHP_ERR_CRITICAL"):
            client.call("START", "kvm")
        text = (namespace.exchange / "scratch" / "vm_error.txt").read_text()
        assert "libvirt cannot be reached" in text
        assert "start libvirtd" in text
    finally:
        namespace.run("libvirtd", "-d")
    assert client.call("START", "kvm") == "3"
    client.quit()
