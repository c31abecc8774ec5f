"""A libvirtd that restarts, and one that hangs, while a guest runs: in a chamber, where it is ours to torment."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.lab.guest import make_guest
from tests.lab.namespace import LAB, OUR_SERVER, Chamber, wait_until, wheel_of, why_not

from vmgahp.protocol.client import Client, ProtocolError

pytestmark = pytest.mark.pool

SCRATCH = f"{LAB}/scratch"
REQUEST_TIMEOUT = 40
PROBE_TIMEOUT = 5
"""The startd's, hard-coded."""


@pytest.fixture(scope="module")
def chamber(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chamber]:
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with Chamber(tmp_path_factory.mktemp("chamber")) as chamber:
        chamber.install(wheel_of(tmp_path_factory))
        chamber.start_libvirt()
        yield chamber


@pytest.fixture
def client(chamber: Chamber, tmp_path: Path) -> Iterator[Client]:
    """A conversation with a daemon in the chamber, with a guest that runs on and on."""
    chamber.run("install", "-d", "-o", "alice", SCRATCH)
    make_guest(chamber.exchange / "scratch" / "guest.img", None)
    chamber.run("chown", "-R", "alice", SCRATCH)
    environ = chamber.environment() | {
        "VMGAHP_VMTYPE": "kvm",
        "VMGAHP_WORKING_DIR": SCRATCH,
        "VMGAHP_USER_UID": chamber.run("id", "-u", "alice").stdout.strip(),
        "VMGAHP_USER_GID": chamber.run("id", "-g", "alice").stdout.strip(),
        "_CONDOR_VM_MEMORY": "1024",
        "_CONDOR_VM_ALLOW_EMULATION": "True",
        "_CONDOR_VM_STOP_TIMEOUT": "1",
        "_CONDOR_VM_METRICS_INTERVAL": "1",
        "_CONDOR_VM_GAHP_REQ_TIMEOUT": str(REQUEST_TIMEOUT),
    }
    log = tmp_path / "log"
    with log.open("w") as stderr:
        client = Client(chamber.command([OUR_SERVER, "-f", "-t", "-M", "3"]), environ, Path("/"), stderr)
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


def probe(chamber: Chamber) -> subprocess.CompletedProcess[str]:
    environ = chamber.environment() | {"VMGAHP_USER_UID": "65534", "_CONDOR_VM_MEMORY": "64"}
    environ["_CONDOR_EXECUTE"] = LAB
    return subprocess.run(
        chamber.command([OUR_SERVER, "-f", "-t", "-M", "0", "vmtype", "qemu"]),
        env=environ,
        capture_output=True,
        text=True,
        timeout=PROBE_TIMEOUT,
        check=False,
    )


def libvirtd(chamber: Chamber) -> int:
    [pid] = [pid for pid, words in chamber.processes().items() if words.startswith("libvirtd")]
    return pid


def test_a_guest_survives_a_restart_of_libvirtd(chamber: Chamber, client: Client) -> None:
    pid = client.call("GETPID", "1")
    assert client.call("STATUS", "1").startswith("STATUS=Running")
    old = libvirtd(chamber)
    chamber.kill(old, "TERM")
    wait_until("libvirtd to end", lambda: old not in chamber.processes(), 30)
    chamber.run("libvirtd", "-d")
    assert client.call("STATUS", "1").startswith("STATUS=Running")
    assert client.call("GETPID", "1") == pid
    assert client.call("SUSPEND", "1") == "NULL"
    assert client.call("RESUME", "1") == "NULL"
    assert client.call("STOP", "1") == "NULL"
    assert chamber.domains() == []
    client.quit()


def test_a_libvirtd_that_is_away_ends_no_job(chamber: Chamber, client: Client) -> None:
    assert client.call("STATUS", "1").startswith("STATUS=Running")
    old = libvirtd(chamber)
    chamber.kill(old, "KILL")
    wait_until("libvirtd to end", lambda: old not in chamber.processes(), 30)
    assert client.call("STATUS", "1").startswith("STATUS=Running"), "QEMU runs on"
    chamber.run("libvirtd", "-d")
    assert client.call("STATUS", "1").startswith("STATUS=Running")
    assert client.call("STOP", "1") == "NULL"
    client.quit()


def test_a_libvirtd_that_hangs_is_answered_for_in_time(chamber: Chamber, client: Client) -> None:
    assert client.call("STATUS", "1").startswith("STATUS=Running")
    hanging = libvirtd(chamber)
    chamber.kill(hanging, "STOP")
    figures = chamber.exchange / "scratch" / "vm_metrics.jsonl"
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
        chamber.kill(hanging, "CONT")
    wait_until(
        "the daemon to have its libvirt again",
        lambda: client.call("STATUS", "1").startswith("STATUS=") and client.call("GETPID", "1") != "0",
        60,
    )
    wait_until("figures again", lambda: b"cpu_seconds" in figures.read_bytes().removeprefix(before), 60)
    assert client.call("STOP", "1") == "NULL"
    assert chamber.domains() == []
    client.quit()


def test_a_probe_ends_in_time_though_libvirtd_hangs_or_is_gone(chamber: Chamber) -> None:
    ended = probe(chamber)
    assert (ended.returncode, ended.stdout.startswith("VM_GAHP_VERSION")) == (0, True), ended.stderr
    hanging = libvirtd(chamber)
    chamber.kill(hanging, "STOP")
    ended = probe(chamber)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "libvirt at qemu:///system does not answer" in ended.stderr
    chamber.kill(hanging, "KILL")
    wait_until("libvirtd to end", lambda: hanging not in chamber.processes(), 30)
    ended = probe(chamber)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "start libvirtd" in ended.stderr
    chamber.run("libvirtd", "-d")


def test_a_libvirtd_that_was_stopped_is_the_machines(chamber: Chamber, client: Client) -> None:
    assert client.call("STOP", "1") == "NULL"
    old = libvirtd(chamber)
    chamber.kill(old, "TERM")
    wait_until("libvirtd to end", lambda: old not in chamber.processes(), 30)
    try:
        with pytest.raises(ProtocolError, match="VMGAHP_ERR_CRITICAL"):
            client.call("START", "kvm")
        text = (chamber.exchange / "scratch" / "vm_error.txt").read_text()
        assert "libvirt cannot be reached" in text
        assert "start libvirtd" in text
    finally:
        chamber.run("libvirtd", "-d")
    assert client.call("START", "kvm") == "3"
    client.quit()
