"""The lab's machine with Xen, and the life of a guest on it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import libvirt
import pytest
from tests.lab import guest
from tests.lab.namespace import LabError, wheel_of
from tests.lab.xen import OUR_SERVER, USER, XenHost
from tests.system.xen.guests import START, Events, Guest

from vmgahp.protocol.client import Client

pytestmark = pytest.mark.xen

SERVE = "3"
"""The daemon's mode (``-M``) that speaks the protocol."""


# ---- the machine ------------------------------------------------------------------------------------


def test_a_program_in_dom0_has_pipes_user_directory_and_environment(xen: XenHost, tmp_path: Path) -> None:
    command = ("sh", "-c", 'while read -r line; do echo "$line $(id -un) $(pwd) $WORD"; done; echo end >&2; exit 3')
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = xen.popen(*command, user=USER, cwd="/home/alice", env={"WORD": "it's $HOME"}, **options)
    for said in (b"one", b"two"):
        process.stdin.write(said + b"\n")
        process.stdin.flush()
        assert process.stdout.readline() == said + b" alice /home/alice it's $HOME\n"
    assert process.communicate(timeout=60) == (b"", b"end\n")
    assert process.returncode == 3


def test_files_go_in_and_come_out_as_they_are(xen: XenHost, tmp_path: Path) -> None:
    content = os.urandom(1 << 20)
    (tmp_path / "file").write_bytes(content)
    xen.put(tmp_path / "file", "/home/alice/a file", owner=USER, mode=0o600)
    assert xen.run("stat", "-c", "%U %a %s", "/home/alice/a file").stdout.split() == [USER, "600", "1048576"]
    assert xen.get("/home/alice/a file", tmp_path / "back").read_bytes() == content
    with pytest.raises(FileNotFoundError):
        xen.read("/home/alice/none")
    with pytest.raises(LabError, match="exit 1"):
        xen.run("false")


def test_our_package_runs_in_dom0(xen: XenHost, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    xen.install(wheel_of(tmp_path_factory))
    xen.write("/etc/vmgahp.conf", b"")
    env = {"VMGAHP_CONFIG": "/etc/vmgahp.conf", "VMGAHP_VMTYPE": "simulated", "VMGAHP_SIMULATED": "1"}
    env |= {"_CONDOR_VM_MEMORY": "1024"}
    env |= {"VMGAHP_WORKING_DIR": "/home/alice", "VMGAHP_USER_UID": "1201", "VMGAHP_USER_GID": "1201"}
    command = xen.command([OUR_SERVER, "-f", "-t", "-M", SERVE], cwd="/home/alice", env=env)
    with open(tmp_path / "log", "w") as log:
        talk = Client(command, os.environ, tmp_path, log)
        try:
            assert talk.greeting().startswith("$VMGahpVersion ")
            assert "CONDOR_VM_START" in talk.ask("COMMANDS")
            talk.quit()
        finally:
            talk.process.kill()
            talk.process.wait()


def test_libvirt_knows_paravirtual_guests_only_where_the_hardware_has_no_more(connection: Any) -> None:
    assert connection.getType() == "Xen"
    capabilities = connection.getCapabilities()
    assert "<os_type>xen</os_type>" in capabilities
    assert "hvm" not in capabilities
    assert "<machine>xenpv</machine>" in connection.getDomainCapabilities(None, "x86_64", None, "xen")
    assert [domain.name() for domain in connection.listAllDomains() if domain.ID() == 0] == ["Domain-0"]


# ---- a guest's life ---------------------------------------------------------------------------------


def test_a_guest_goes_on_after_pauses_and_after_a_save(
    paused_shutdown: object, events: Events, counter: Guest, tmp_path: Path
) -> None:
    domain = counter.start()
    assert counter.goes_on()[0] == 1
    assert domain.state() == [libvirt.VIR_DOMAIN_RUNNING, libvirt.VIR_DOMAIN_RUNNING_BOOTED]
    # Pausing twice, and resuming twice, succeeds each time.
    for _ in range(2):
        domain.suspend()
        assert domain.state()[0] == libvirt.VIR_DOMAIN_PAUSED
    used = domain.info()[4]
    assert used > 0
    assert domain.info()[4] == used
    for _ in range(2):
        domain.resume()
        assert domain.state() == [libvirt.VIR_DOMAIN_RUNNING, libvirt.VIR_DOMAIN_RUNNING_UNPAUSED]
    counter.goes_on()

    domain.save("/root/image")
    assert counter.is_gone()
    counter.connection.restore("/root/image")
    domain = counter.look_up()
    # The reason of the state says booted, though the event says restored.
    assert domain.state() == [libvirt.VIR_DOMAIN_RUNNING, libvirt.VIR_DOMAIN_RUNNING_BOOTED]
    counts = counter.goes_on()
    assert counts == list(range(1, len(counts) + 1))
    assert guest.read_count(counter.host.get(counter.image, tmp_path / "disk")) >= counts[-2]
    # The CPU time starts again from nothing.
    assert domain.info()[4] < used

    domain.destroy()
    expected = ["Started Booted", "Suspended Paused", "Resumed Unpaused", "Stopped Saved", "Started Restored"]
    expected.append("Stopped Destroyed")
    counter.host.wait_until("the last event", lambda: events.of(counter.name)[-1:] == expected[-1:], 30)
    assert events.of(counter.name) == expected


@pytest.mark.parametrize("driver", ["phy", "qemu"])
def test_a_guest_powers_off_by_itself(events: Events, counter: Guest, tmp_path: Path, driver: str) -> None:
    """On a file by each of the drivers for one: a loop device, or a QEMU in dom0 (which ``file`` stands for, too)."""
    counter.name, counter.image = f"power-off-{driver}", f"/root/power-off-{driver}.img"
    counter.host.run("truncate", "-s", "1M", counter.image)
    counter.start("seconds=2", driver)
    counter.host.wait_until("its end", counter.is_gone, START)
    assert counter.host.console(counter.name) == f"{guest.BANNER}\r\n1\r\n2\r\n{guest.DONE}\r\n"
    assert guest.read_count(counter.host.get(counter.image, tmp_path / "disk")) == 2
    counter.host.wait_until("the event", lambda: "Stopped Shutdown" in events.of(counter.name), 30)


def test_a_guest_obeys_a_shutdown_request_or_does_not(running: Guest, counter: Guest) -> None:
    running.domain.shutdown()
    counter.start()
    counter.goes_on()
    counter.domain.shutdown()
    counter.host.wait_until("its shutdown", counter.is_gone, START)
    assert "asked to shut down" in counter.host.console(counter.name)
    running.goes_on()
    assert running.domain.state()[0] == libvirt.VIR_DOMAIN_RUNNING
