"""The lab's Xen, and what libvirt's driver for it does that another hypervisor's does not.

Each of these was seen with libvirt 9.0 and Xen 4.17. The Xen part of `vmgahp.drivers.libvirt` builds on them; when
one fails on a newer Xen, look there.
"""

from __future__ import annotations

import os
import struct
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.lab import guest
from tests.lab.chamber import LabError, build_wheel
from tests.lab.client import Client
from tests.lab.xen import OUR_SERVER, USER, XenHost, disk, guest_xml

libvirt = pytest.importorskip("libvirt")

pytestmark = pytest.mark.xen

SERVE = "3"
"""The daemon's mode (``-M``) that speaks the protocol."""
START = 180
"""Seconds for what takes 10 on an idle machine: a guest's start up to its first counts."""

HEAD = struct.Struct("=16sII40x")
MAGIC = b"libvirt-xml\n \0 \r"
"""How a memory image of this driver's begins: this, version 2, the length of the XML with its NUL, 40 zeroes."""


@pytest.fixture(scope="module")
def connection(xen: XenHost) -> Iterator[Any]:
    libvirt.registerErrorHandler(lambda *_: None, None)
    connection = xen.libvirt()
    yield connection
    connection.close()


class Guest:
    """A guest of one test: its disk, its domain, its console."""

    def __init__(self, host: XenHost, connection: Any, name: str) -> None:
        self.host, self.connection, self.name = host, connection, name
        self.image = f"/root/{name}.img"
        host.run("truncate", "-s", "1M", self.image)

    def start(self, words: str = "", driver: str = "phy", flags: int = 0) -> Any:
        self.domain = self.connection.createXML(guest_xml(self.name, disk(self.image, driver), words), flags)
        return self.domain

    def look_up(self) -> Any:
        self.domain = self.connection.lookupByName(self.name)
        return self.domain

    def counts(self) -> list[int]:
        return guest.counts(self.host.console(self.name))

    def goes_on(self) -> list[int]:
        """Wait until it has counted further: all counts on its console."""
        before = len(self.counts())
        return self.host.wait_until(
            f"{self.name} to count on",
            lambda: counts if len(counts := self.counts()) > before else None,
            START,
        )

    def is_gone(self) -> bool:
        try:
            self.connection.lookupByName(self.name)
        except libvirt.libvirtError as error:
            if error.get_error_code() != libvirt.VIR_ERR_NO_DOMAIN:
                raise
            return True
        return False

    def destroy(self) -> None:
        if not self.is_gone():
            self.look_up().destroy()


@pytest.fixture
def counter(xen: XenHost, connection: Any, request: pytest.FixtureRequest) -> Iterator[Guest]:
    """A guest that is named after its test, and not started."""
    made = Guest(xen, connection, request.node.name.removeprefix("test_")[:40].strip("_"))
    yield made
    made.destroy()


@pytest.fixture(scope="module")
def running(xen: XenHost, connection: Any) -> Iterator[Guest]:
    """One running guest, for the tests that leave it running."""
    made = Guest(xen, connection, "running")
    made.start()
    made.goes_on()
    yield made
    made.destroy()


class Events:
    """The lifecycle events of dom0's libvirt, as virsh prints them."""

    def __init__(self, host: XenHost, path: Path) -> None:
        self.path = path
        with open(path, "wb") as out:
            command = ("virsh", "-c", "xen:///system", "event", "--event", "lifecycle", "--loop")
            self.process = host.popen(
                "stdbuf", "-oL", *command, stdin=subprocess.PIPE, stdout=out, stderr=out
            )

    def of(self, name: str) -> list[str]:
        begin = f"event 'lifecycle' for domain '{name}': "
        lines = self.path.read_text().splitlines()
        return [line.removeprefix(begin) for line in lines if line.startswith(begin)]


@pytest.fixture(scope="module")
def events(xen: XenHost, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Events]:
    """Listening since before the first guest of the tests that ask for it."""
    found = Events(xen, tmp_path_factory.mktemp("events") / "events")
    yield found
    found.process.kill()
    found.process.wait()


@pytest.fixture(scope="module")
def paused_shutdown(xen: XenHost) -> Iterator[tuple[threading.Thread, list[Any]]]:
    """A shutdown request to a paused guest, under way on a connection of its own: it takes a minute."""
    connection = xen.libvirt()
    made = Guest(xen, connection, "paused")
    domain = made.start()
    made.goes_on()
    domain.suspend()
    came_of_it: list[Any] = []

    def shut_down() -> None:
        try:
            came_of_it.append(domain.shutdown())
        except libvirt.libvirtError as error:
            came_of_it.append(error)

    thread = threading.Thread(target=shut_down, daemon=True)
    thread.start()
    yield thread, came_of_it
    thread.join(START)
    made.destroy()
    connection.close()


def refused(code: str) -> Any:
    """A block that ends with an error of libvirt's of this code; see `LibvirtRefusal`."""
    return LibvirtRefusal(getattr(libvirt, f"VIR_ERR_{code}"))


class LibvirtRefusal:
    def __init__(self, code: int) -> None:
        self.code = code
        self.said = ""

    def __enter__(self) -> LibvirtRefusal:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        assert isinstance(error, libvirt.libvirtError), f"libvirt did it, or failed otherwise: {error!r}"
        assert error.get_error_code() == self.code, str(error)
        self.said = str(error)
        return True


# ---- the machine ------------------------------------------------------------------------------------


def test_a_program_in_dom0_has_pipes_user_directory_and_environment(xen: XenHost, tmp_path: Path) -> None:
    command = (
        "sh",
        "-c",
        'while read -r line; do echo "$line $(id -un) $(pwd) $WORD"; done; echo end >&2; exit 3',
    )
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


def test_our_package_runs_in_dom0(xen: XenHost, tmp_path: Path) -> None:
    xen.install(build_wheel(tmp_path))
    env = {"VMGAHP_CONFIG": "/dev/null", "VMGAHP_VMTYPE": "simulated", "_CONDOR_VM_MEMORY": "1024"}
    env |= {"VMGAHP_WORKING_DIR": "/home/alice", "VMGAHP_USER_UID": "1201", "VMGAHP_USER_GID": "1201"}
    command = xen.command([OUR_SERVER, "-f", "-t", "-M", SERVE], cwd="/home/alice", env=env)
    with open(tmp_path / "log", "w") as log:
        talk = Client(command, os.environ, tmp_path, log)
        try:
            assert talk.greeting().startswith("$VMGahpVersion ")
            assert "CONDOR_VM_START" in talk.say("COMMANDS")
            assert talk.quit() == 0
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


def test_a_guest_obeys_a_shutdown_request_or_does_not(counter: Guest) -> None:
    counter.start("deaf")
    counter.goes_on()
    counter.domain.shutdown()
    counter.goes_on()
    assert counter.domain.state()[0] == libvirt.VIR_DOMAIN_RUNNING
    counter.domain.destroy()
    counter.start()
    counter.goes_on()
    counter.domain.shutdown()
    counter.host.wait_until("its shutdown", counter.is_gone, START)
    assert "asked to shut down" in counter.host.console(counter.name)


# ---- what libxl does its own way --------------------------------------------------------------------


def test_memory_images_are_written_and_read_as_they_say(counter: Guest, xen: XenHost) -> None:
    """A save takes neither XML nor flags, to a file that is given by a descriptor as well; a restore no XML."""
    domain = counter.start()
    counter.goes_on()
    for flag in ("BYPASS_CACHE", "RUNNING", "PAUSED"):
        with refused("INVALID_ARG"):
            domain.saveFlags("/root/image", None, getattr(libvirt, f"VIR_DOMAIN_SAVE_{flag}"))
    with refused("ARGUMENT_UNSUPPORTED"):
        domain.saveFlags("/root/image", domain.XMLDesc(), 0)
    with refused("OPERATION_FAILED"):
        domain.save("/dev/full")
    counter.goes_on()

    # The user's own file, by its descriptor in another process: it keeps its owner and its mode.
    holder = 'import os, sys; fd = os.open("/home/alice/image", os.O_RDWR | os.O_CREAT, 0o600); '
    holder += "print(f'/proc/{os.getpid()}/fd/{fd}', flush=True); sys.stdin.read()"
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = xen.popen("python3", "-c", holder, user=USER, **options)
    path = process.stdout.readline().decode().strip()
    try:
        domain.save(path)
        assert xen.run("stat", "-c", "%U %a", "/home/alice/image").stdout.split() == [USER, "600"]
        with refused("INVALID_ARG"):
            counter.connection.restoreFlags(path, None, libvirt.VIR_DOMAIN_SAVE_RUNNING)
        with refused("ARGUMENT_UNSUPPORTED"):
            counter.connection.restoreFlags(path, guest_xml(counter.name, disk(counter.image)), 0)
        with refused("NO_SUPPORT"):
            counter.connection.saveImageGetXMLDesc(path)
        # But it may be left paused.
        counter.connection.restoreFlags(path, None, libvirt.VIR_DOMAIN_SAVE_PAUSED)
    finally:
        process.communicate(timeout=60)
    domain = counter.look_up()
    assert domain.state()[0] == libvirt.VIR_DOMAIN_PAUSED
    with refused("OPERATION_INVALID"):  # it has to run for that
        domain.save("/root/image")
    assert domain.state()[0] == libvirt.VIR_DOMAIN_PAUSED
    domain.resume()
    counter.goes_on()


RESTORE_OTHERWISE = """
import os, struct, sys, threading, libvirt
path, name, description = sys.argv[1:]
head = struct.Struct("=16sII40x")
with open(path, "rb") as image:
    magic, version, length = head.unpack(image.read(head.size))
    xml = image.read(length).rstrip(b"\\0").decode()
    xml = xml.replace("</name>", f"</name><description>{description}</description>")
    read, write = os.pipe()
    def feed():
        with open(write, "wb") as out:
            out.write(head.pack(magic, version, len(xml) + 1) + xml.encode() + b"\\0")
            while block := image.read(1 << 20):
                out.write(block)
    threading.Thread(target=feed, daemon=True).start()
    libvirt.open("xen:///system").restoreFlags(f"/proc/{os.getpid()}/fd/{read}", None, 0)
"""


def test_a_memory_image_is_restored_from_a_pipe_with_another_xml(counter: Guest, xen: XenHost) -> None:
    """The only way to have a restored guest described by other words than those in the image."""
    counter.start()
    counter.goes_on()
    counter.domain.save("/root/image")
    start = subprocess.check_output(xen.command(["head", "-c", "4096", "/root/image"]), timeout=60)
    magic, version, length = HEAD.unpack_from(start)
    assert (magic, version) == (MAGIC, 2)
    assert start[HEAD.size :].startswith(b"<domain type='xen'")
    assert start[HEAD.size + length - 1 :].startswith(b"\0LibxlFmt")
    xen.write("/root/restore.py", RESTORE_OTHERWISE.encode())
    xen.run("python3", "/root/restore.py", "/root/image", counter.name, "of the reader's", timeout=START)
    domain = counter.look_up()
    assert domain.metadata(libvirt.VIR_DOMAIN_METADATA_DESCRIPTION, None) == "of the reader's"
    counts = counter.goes_on()
    assert counts == list(range(1, len(counts) + 1))


def test_much_is_not_supported(running: Guest, connection: Any) -> None:
    domain = running.domain
    for ask in (
        connection.getAllDomainStats,
        lambda: connection.domainListGetStats([domain]),
        lambda: domain.screenshot(connection.newStream(), 0),
        lambda: domain.snapshotCreateXML("<domainsnapshot/>"),
        domain.reset,
        domain.vcpus,
        domain.abortJob,
        domain.controlInfo,
        lambda: domain.blockInfo("xvda"),
        lambda: (
            domain.saveParams({libvirt.VIR_DOMAIN_SAVE_PARAM_FILE: "/root/image"})
            if hasattr(domain, "saveParams")
            else domain.reset()
        ),
    ):
        with refused("NO_SUPPORT"):
            ask()
    with refused("INVALID_ARG"):
        domain.destroyFlags(libvirt.VIR_DOMAIN_DESTROY_GRACEFUL)
    running.goes_on()


def test_what_is_asked_of_a_running_guest_is_answered(running: Guest) -> None:
    domain = running.domain
    state, largest, memory, cpus, used = domain.info()
    assert (state, largest, memory, cpus) == (libvirt.VIR_DOMAIN_RUNNING, 128 << 10, 128 << 10, 1)
    assert used > 0
    assert domain.getCPUStats(True)[0]["cpu_time"] >= used
    assert "<console type='pty' tty='/dev/pts/" in domain.XMLDesc()
    running.goes_on()
    assert domain.info()[4] > used


def test_a_start_can_leave_the_guest_paused_but_not_tie_it_to_the_connection(counter: Guest) -> None:
    with refused("INVALID_ARG"):
        counter.start(flags=libvirt.VIR_DOMAIN_START_AUTODESTROY)
    domain = counter.start("seconds=1", flags=libvirt.VIR_DOMAIN_START_PAUSED)
    assert domain.state()[0] == libvirt.VIR_DOMAIN_PAUSED
    assert counter.counts() == []
    domain.resume()
    counter.host.wait_until("its end", counter.is_gone, START)


def test_why_a_start_fails_is_in_a_log_only(connection: Any, counter: Guest, xen: XenHost) -> None:
    """The code is that of an internal error, whoever is to blame."""
    good = guest_xml("fault", disk(counter.image))
    faults = {
        "No such file or directory": guest_xml("fault", disk("/root/none.img")),
        "no loader found": good.replace("/lab/guest/vmlinuz", "/etc/passwd"),
        "no suitable backend": guest_xml("fault", disk(counter.image, "tap")),
    }
    for reason, xml in faults.items():
        xen.run("truncate", "-s", "0", "/var/log/libvirt/libxl/libxl-driver.log")
        with refused("INTERNAL_ERROR") as refusal:
            connection.createXML(xml)
        assert refusal.said == "internal error: libxenlight failed to create new domain 'fault'"
        assert reason in xen.read("/var/log/libvirt/libxl/libxl-driver.log").decode()
    assert "fault" not in xen.domains()


def test_a_disk_that_is_not_there_is_no_fault_for_the_driver_qemu(counter: Guest, xen: XenHost) -> None:
    """The guest starts, and waits for it for minutes before it says a word."""
    xen.run("rm", counter.image)
    domain = counter.start(driver="qemu")
    assert domain.state()[0] == libvirt.VIR_DOMAIN_RUNNING


def test_a_shutdown_request_to_a_paused_guest_blocks_and_fails(
    paused_shutdown: tuple[threading.Thread, list[Any]], connection: Any
) -> None:
    thread, came_of_it = paused_shutdown
    thread.join(START)
    [error] = came_of_it
    assert isinstance(error, libvirt.libvirtError), error
    assert connection.lookupByName("paused").state()[0] == libvirt.VIR_DOMAIN_PAUSED
