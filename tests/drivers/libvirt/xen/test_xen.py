"""The parts of the Xen driver that need no Xen; tests/xen has the rest."""

import contextlib
import os
import pty
import select
import threading
import tty
from collections.abc import Iterator
from pathlib import Path

import pytest
from lxml import etree

from tests.job.xen_jobs import CASES, HOST
from tests.lab.namespace import wait_until
from vmgahp import errors
from vmgahp.domain import build as domain_xen
from vmgahp.domain import verify
from vmgahp.domain.restore import SavedMismatch, reconcile_xen
from vmgahp.drivers.libvirt import xen
from vmgahp.drivers.libvirt.xen import dom0
from vmgahp.drivers.libvirt.xen.dom0 import PtyCapture
from vmgahp.host import serial_capture

LIVE = """\
<domain type='xen' id='1'>
  <name>alice_lab_7.3</name>
  <uuid>c7a5fdbd-edaf-9455-926a-d65c16db1809</uuid>
  <description>/scratch</description>
  <memory unit='KiB'>65536</memory>
  <currentMemory unit='KiB'>65536</currentMemory>
  <vcpu placement='static'>2</vcpu>
  <os>
    <type arch='x86_64' machine='xenpv'>linux</type>
    <kernel>/proc/4711/fd/20</kernel>
    <cmdline>root=/dev/xvda1 ro &lt;'"&amp;&gt; console=hvc0</cmdline>
  </os>
  <clock offset='utc'/>
  <on_poweroff>destroy</on_poweroff>
  <on_reboot>restart</on_reboot>
  <on_crash>destroy</on_crash>
  <devices>
    <disk type='block' device='disk'>
      <driver name='phy' type='raw'/>
      <source dev='/dev/loop0'/>
      <target dev='xvda1' bus='xen'/>
    </disk>
    <disk type='block' device='disk'>
      <driver name='phy' type='raw'/>
      <source dev='/dev/loop1'/>
      <target dev='xvda2' bus='xen'/>
    </disk>
    <controller type='xenbus' index='0'/>
    <interface type='network'>
      <mac address='00:16:3e:12:34:56'/>
      <source network='default' portid='72375885-53e8-4f1c-a1f8-b77fc1cac956'/>
      <target dev='vif1.0'/>
    </interface>
    <console type='pty' tty='/dev/pts/0'>
      <source path='/dev/pts/0'/>
      <target type='xen' port='0'/>
    </console>
    <input type='mouse' bus='xen'/>
    <memballoon model='xen'/>
  </devices>
</domain>
"""
"""What libvirt 9.0 made of the golden file kernel-without-initrd.xml on Xen 4.17."""

SPEC, BOOT = CASES["kernel-without-initrd"]
ASKED = domain_xen.build_xen(SPEC, BOOT, HOST)


def verified(live: str) -> None:
    object.__new__(xen.XenDriver)._verify(live, ASKED, SPEC)


def test_the_domain_that_was_asked_for() -> None:
    verified(LIVE)


@pytest.mark.parametrize(
    ("old", "new", "part"),
    [
        ("fd/20<", "fd/21<", "os/kernel"),
        ("console=hvc0", "init=/bin/sh", "os/cmdline"),
        ("<os>", "<bootloader>/usr/bin/pygrub</bootloader><os>", "bootloader"),
        (">65536<", ">32768<", "memory"),
        (">2</vcpu", ">1</vcpu", "CPUs"),
        ("/dev/loop1", "/dev/loop2", "xvda2 .dev.loop2"),
        ("<input", "<hostdev mode='subsystem' type='pci'/><input", "hostdev"),
        ("network='default'", "network='other'", "interface"),
        ("00:16:3e:12:34:56", "00:16:3e:12:34:57", "interface"),
    ],
)
def test_another_domain(old: str, new: str, part: str) -> None:
    assert old in LIVE
    with pytest.raises(verify.Mismatch, match=part):
        verified(LIVE.replace(old, new))


# --- the XML of a restart


def test_a_restart_keeps_what_the_guest_knows() -> None:
    """Its UUID and its MAC address, which libvirt had chosen; what is on the host's side is this machine's."""
    nic = SPEC.vm.nics[0]._replace(mac="")
    ours = domain_xen.build_xen(
        SPEC._replace(vm=SPEC.vm._replace(nics=(nic,))), BOOT, HOST._replace(kernel="/proc/1/fd/5")
    )
    made = etree.fromstring(reconcile_xen(LIVE.replace("/dev/loop1", "/etc/shadow"), ours))
    assert made.find("devices/interface/mac").get("address") == "00:16:3e:12:34:56"  # type: ignore[union-attr]
    assert [source.get("dev") for source in made.iterfind("devices/disk/source")] == ["/dev/loop0", "/dev/loop1"]
    assert made.findtext("os/kernel") == "/proc/1/fd/5"
    assert made.find("devices/input") is None


@pytest.mark.parametrize(
    ("old", "new", "part"),
    [
        ("type='xen' id", "type='kvm' id", "domain type"),
        (">alice_lab_7.3<", ">bob_lab_7.3<", "name"),
        (">65536<", ">131072<", "memory"),
        (">2</vcpu", ">1</vcpu", "CPUs"),
        ("xenpv", "xenpvh", "machine type"),
        ("'xvda2'", "'xvdb'", "disks"),
        ("<target dev='xvda2' bus='xen'/>", "<target dev='xvda2' bus='xen'/><readonly/>", "read-only"),
        ("<interface type='network'>", "<interface type='bridge'>", "interfaces"),
        ("00:16:3e:12:34:56", "00:16:3e:12:34:57", "address"),
        ("d65c16db1809<", "d65c16db1810<", "UUID"),
    ],
)
def test_a_saved_guest_that_is_another(old: str, new: str, part: str) -> None:
    assert old in LIVE
    with pytest.raises(SavedMismatch, match=part):
        reconcile_xen(LIVE.replace(old, new), ASKED)


# --- whose fault


def test_the_hold_codes_are_xens() -> None:
    for old, new in (
        (errors.INVALID_DISK_PARAM, "VMGAHP_ERR_JOBCLASSAD_XEN_INVALID_DISK_PARAM"),
        (errors.NO_DISK_PARAM, "VMGAHP_ERR_JOBCLASSAD_XEN_NO_DISK_PARAM"),
        (errors.MISMATCHED_CHECKPOINT, "VMGAHP_ERR_JOBCLASSAD_XEN_MISMATCHED_CHECKPOINT"),
        (errors.NO_MEMORY_PARAM, errors.NO_MEMORY_PARAM),
    ):
        found = xen.in_words_of_xen(errors.JobFault(old, "problem", "hint"))
        assert (found.code, found.problem, found.hint) == (new, "problem", "hint")


@pytest.mark.parametrize(
    ("line", "own_kernel", "kind"),
    [
        ("libxl: panic: xc_dom_core.c:753:xc_dom_find_loader: no loader found: Invalid kernel", True, errors.JobFault),
        ("libxl: libxl_bootloader.c:649:bootloader_finished: bootloader failed", True, errors.JobFault),
        ("panic: xc_dom_core.c:753:xc_dom_find_loader: no loader found", False, errors.HypervisorFault),
        ("libxl: xc_dom_boot: populate_physmap failed", True, errors.MachineFault),
        ("libxl: something else failed", True, errors.HypervisorFault),
    ],
)
def test_libxls_log_says_whose_fault_it_is(tmp_path: Path, line: str, own_kernel: bool, kind: type) -> None:
    path = tmp_path / "libxl.log"
    path.write_text("2026-11-20 14:01:35.550+0000: xc: error: no loader found of another day\n")
    log = dom0.LibxlLog(str(path))
    with open(path, "a") as out:
        out.write(f"2026-11-20 14:01:36.550+0000: {line}\n")
    assert type(log.judge("libvirt failed.", own_kernel=own_kernel)) is kind
    assert "another day" not in log.last_words()
    assert "fail" in log.last_words() or "panic" in log.last_words()
    assert not log.last_words().startswith("2026")


def test_no_log_says_nothing(tmp_path: Path) -> None:
    log = dom0.LibxlLog(str(tmp_path / "none"))
    assert log.last_words() == ""
    assert type(log.judge("libvirt failed.", own_kernel=True)) is errors.HypervisorFault


# --- the console


@pytest.fixture
def capture(tmp_path: Path) -> Iterator[PtyCapture]:
    room = tmp_path / "room"
    room.mkdir()
    output = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    made = PtyCapture(str(room / "console"), lambda: output, 1 << 20, lambda _line: None)
    yield made
    made.close()


def test_one_terminal_after_another_is_read(capture: PtyCapture, tmp_path: Path) -> None:
    threads = []
    for words in (b"before", b"after"):
        master, slave = pty.openpty()
        os.set_blocking(master, True)
        terminal = os.ttyname(slave)
        capture.follow(terminal)
        assert capture.is_reading(terminal)
        capture.follow(terminal)  # which changes nothing
        os.write(master, words + b"\n")
        wait_until("the words", lambda said=words: said in (tmp_path / "log").read_bytes(), 20, 0.01)
        threads.append((master, slave))
    capture.close()
    assert not capture.is_reading(terminal)
    assert (tmp_path / "log").read_bytes().split() == [b"before", b"after"]
    for descriptors in threads:
        for descriptor in descriptors:
            os.close(descriptor)


def test_a_console_whose_file_takes_nothing_holds_up_no_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (dom0, serial_capture):
        monkeypatch.setattr(module, "CLOSE_SECONDS", 0.1)
    (tmp_path / "room").mkdir()
    taking, given = os.pipe()
    capture = PtyCapture(str(tmp_path / "room/console"), lambda: given, 64 << 20, lambda _line: None)
    master, slave = pty.openpty()
    tty.setraw(slave)
    capture.follow(os.ttyname(slave))
    os.set_blocking(master, False)

    def is_stuck() -> bool:
        with contextlib.suppress(BlockingIOError):
            while os.write(master, bytes(1 << 16)):
                pass
        return not select.select([], [master], [], 0.2)[1]

    wait_until("the file to be full", is_stuck, 60, 0.01)
    capture.close()
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("console")], "they hang on"
    os.close(taking)  # which lets them go
    for descriptor in (master, slave):
        os.close(descriptor)


def test_no_terminal_is_no_console(capture: PtyCapture) -> None:
    capture.follow("")
    with pytest.raises(FileNotFoundError):
        capture.follow("/dev/pts/none")
