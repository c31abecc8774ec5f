"""What libvirt's driver for Xen does that its driver for QEMU does not, or does otherwise.

Each of these was seen with libvirt 9.0 and Xen 4.17. The Xen part of `vmgahp.drivers.libvirt` builds on them; when
one fails on a newer Xen, look there.
"""

from __future__ import annotations

import struct
import subprocess
import threading
from typing import Any

import libvirt
import pytest
from tests.lab.xen import KERNEL, USER, XenHost, disk, guest_xml
from tests.system.xen.guests import START, Guest, refused

pytestmark = pytest.mark.xen

HEAD = struct.Struct("=16sII40x")
MAGIC = b"libvirt-xml\n \0 \r"
"""How a memory image of this driver's begins: this, version 2, the length of the XML with its NUL, 40 zeroes."""


def test_memory_images_are_written_and_read_as_they_say(running: Guest, xen: XenHost) -> None:
    """A save takes neither XML nor flags, to a file that is given by a descriptor as well; a restore no XML."""
    domain = running.domain
    for flag in ("BYPASS_CACHE", "RUNNING", "PAUSED"):
        with refused("INVALID_ARG"):
            domain.saveFlags("/root/image", None, getattr(libvirt, f"VIR_DOMAIN_SAVE_{flag}"))
    with refused("ARGUMENT_UNSUPPORTED"):
        domain.saveFlags("/root/image", domain.XMLDesc(), 0)
    with refused("OPERATION_FAILED"):
        domain.save("/dev/full")
    running.goes_on()

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
            running.connection.restoreFlags(path, None, libvirt.VIR_DOMAIN_SAVE_RUNNING)
        with refused("ARGUMENT_UNSUPPORTED"):
            running.connection.restoreFlags(path, guest_xml(running.name, disk(running.image)), 0)
        with refused("NO_SUPPORT"):
            running.connection.saveImageGetXMLDesc(path)
        # But it may be left paused.
        running.connection.restoreFlags(path, None, libvirt.VIR_DOMAIN_SAVE_PAUSED)
    finally:
        process.communicate(timeout=60)
    domain = running.look_up()
    assert domain.state()[0] == libvirt.VIR_DOMAIN_PAUSED
    with refused("OPERATION_INVALID"):  # it has to run for that
        domain.save("/root/image")
    assert domain.state()[0] == libvirt.VIR_DOMAIN_PAUSED
    domain.resume()
    running.goes_on()


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


def test_a_memory_image_is_restored_from_a_pipe_with_another_xml(running: Guest, xen: XenHost) -> None:
    """The only way to have a restored guest described by other words than those in the image."""
    running.domain.save("/root/image")
    start = subprocess.check_output(xen.command(["head", "-c", "4096", "/root/image"]), timeout=60)
    magic, version, length = HEAD.unpack_from(start)
    assert (magic, version) == (MAGIC, 2)
    assert start[HEAD.size :].startswith(b"<domain type='xen'")
    assert start[HEAD.size + length - 1 :].startswith(b"\0LibxlFmt")
    xen.write("/root/restore.py", RESTORE_OTHERWISE.encode())
    xen.run("python3", "/root/restore.py", "/root/image", running.name, "of the reader's", timeout=START)
    domain = running.look_up()
    assert domain.metadata(libvirt.VIR_DOMAIN_METADATA_DESCRIPTION, None) == "of the reader's"
    counts = running.goes_on()
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
        "no loader found": good.replace(KERNEL, "/etc/passwd"),
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
