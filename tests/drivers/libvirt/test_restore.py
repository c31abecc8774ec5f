"""Saved guests on libvirt and QEMU, restored as on another machine: other paths, other console, other password."""

import contextlib
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import libvirt
import pytest

from tests import jobs
from tests.conftest import JOB_UID
from tests.domain.support import disk, spec
from tests.drivers.libvirt.support import URI
from tests.lab.guest import counts, make_guest
from vmgahp.checkpoint import memory_image
from vmgahp.domain import build as domain_xml
from vmgahp.domain.restore import SavedMismatch, reconcile
from vmgahp.drivers.libvirt.connection import LibvirtConnection
from vmgahp.drivers.libvirt.disk_files import DiskFiles
from vmgahp.drivers.libvirt.guest import LibvirtGuest
from vmgahp.images.formats import BackingFile
from vmgahp.job.spec import Nic

pytestmark = pytest.mark.libvirt

QEMU_DIRECTORY = "/var/lib/libvirt/qemu"

Files = Sequence[tuple[str, str, str, str]]
"""File, device, format and kind of the disks."""


class Site:
    """A machine's worth of what a job has: a scratch directory, and someone who listens to the console."""

    def __init__(self, scratch: Path, number: int) -> None:
        self.directory = scratch.parent / f"dir_{number}"
        self.directory.mkdir(exist_ok=True)
        self.own(self.directory)
        self.console = str(scratch.parent / f"console{number}")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.console)
        self._listener.listen()
        self.own(self.console)
        self._heard = b""
        threading.Thread(target=self._listen, daemon=True).start()

    def own(self, path: str | Path) -> None:
        if os.getuid() == 0:
            os.chown(path, JOB_UID, JOB_UID)

    def making(self, connection: "libvirt.virConnect", xml: str, make: Callable[[object], object]) -> None:
        """Make a domain that gets the files of its disks."""
        guest = LibvirtGuest("", "", "qemu", LibvirtConnection(URI, print), print)
        guest.files = self.files
        with guest.defined(connection, xml) as domain:
            make(domain)

    def _listen(self) -> None:
        with contextlib.suppress(OSError):
            connection = self._listener.accept()[0]
            while heard := connection.recv(4096):
                self._heard += heard

    def count(self) -> int:
        """The guest's latest count, once it has said one here."""
        end = time.monotonic() + 20
        while not counts(self._heard):
            assert time.monotonic() < end, "the guest says nothing on the console"
            time.sleep(0.05)
        return counts(self._heard)[-1]

    def xml(self, name: str, files: Files, cpu_mode: str = "maximum", vnc: bool = True, nic: bool = True) -> str:
        """The domain of a job with disks in this scratch directory."""
        disks = [
            disk(
                str(self.directory / file),
                device,
                writable=kind != "cdrom" and "readonly" not in file,
                format=image_format,
                kind=kind,
                backing=(BackingFile(str(self.directory / "under.img"), "raw"),) if file == "over.qcow2" else (),
            )
            for file, device, image_format, kind in files
        ]
        job = spec(
            name=name,
            vm_type="qemu",
            working_dir=str(self.directory),
            disks=tuple(disks),
            nics=(Nic("user"),) if nic else (),
            vnc=vnc,
            checkpoint=True,
        )
        label = f"+{JOB_UID}:+{os.stat(QEMU_DIRECTORY).st_gid}" if os.getuid() == 0 else ""
        host = domain_xml.Host(
            uuid=f"00000000-0000-4000-8000-{os.getpid():012x}",
            domain_type="qemu",
            cpu_mode=cpu_mode,
            dac_label=label,
            console_socket=self.console,
            vnc_password=self.directory.name if vnc else "",
        )
        self.files = DiskFiles(job, jobs.owner(self.directory))
        return self.files.open(domain_xml.build(job, host))


@pytest.fixture
def here(scratch: Path) -> Site:
    site = Site(scratch, 1)
    make_guest(site.directory / "guest.img", seconds=None)
    for name, size in {"under.img": 1 << 20, "readonly.img": 1 << 20, "cd.iso": 1 << 20, "fd.img": 1440 << 10}.items():
        (site.directory / name).write_bytes(bytes(size))
    command = ["qemu-img", "create", "-q", "-f", "qcow2", "-b", "under.img", "-F", "raw", "over.qcow2"]
    subprocess.run(command, cwd=site.directory, check=True)
    for path in site.directory.iterdir():
        site.own(path)
    return site


@pytest.fixture
def there(scratch: Path) -> Site:
    return Site(scratch, 2)


@pytest.fixture
def name(connection: "libvirt.virConnect") -> Iterator[str]:
    name = f"alice_restore_{os.getpid()}.0"
    yield name
    with contextlib.suppress(libvirt.libvirtError):
        connection.lookupByName(name).destroy()


def save(connection: "libvirt.virConnect", site: Site, xml: str) -> str:
    """Run the guest until it counts, save it, and return the XML in the image."""
    site.making(connection, xml, lambda domain: domain.create())
    domain = connection.lookupByUUIDString(xml.partition("<uuid>")[2].partition("</uuid>")[0])
    site.count()
    descriptor = os.open(site.directory / "mem", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        domain.saveFlags(f"/proc/{os.getpid()}/fd/{descriptor}", None, 0)
        return memory_image.inspect(descriptor).xml
    finally:
        os.close(descriptor)


def restore(connection: "libvirt.virConnect", site: Site, xml: str) -> "libvirt.virDomain":
    image = str(site.directory / "mem")
    site.making(connection, xml, lambda _: connection.restoreFlags(image, xml, libvirt.VIR_DOMAIN_SAVE_RUNNING))
    domain = connection.lookupByUUIDString(xml.partition("<uuid>")[2].partition("</uuid>")[0])
    assert domain.isActive()
    return domain


CASES: dict[str, tuple[Files, dict[str, object]]] = {
    "virtio": ([("guest.img", "vda", "raw", "disk"), ("over.qcow2", "vdb", "qcow2", "disk")], {}),
    "every-bus": (
        [
            ("guest.img", "hda", "raw", "disk"),
            ("over.qcow2", "sda", "qcow2", "disk"),
            ("readonly.img", "sdb", "raw", "disk"),
            ("cd.iso", "hdc", "raw", "cdrom"),
            ("fd.img", "fda", "raw", "floppy"),
        ],
        {"vnc": False, "nic": False},
    ),
    "q35": ([("guest.img", "vda", "raw", "disk"), ("readonly.img", "sdb", "raw", "disk")], {}),
    "host-model": ([("guest.img", "vda", "raw", "disk")], {"cpu_mode": "host-model", "vnc": False}),
    "default-cpu": ([("guest.img", "vda", "raw", "disk")], {"cpu_mode": "", "nic": False}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_guest_goes_on_elsewhere(
    connection: "libvirt.virConnect", here: Site, there: Site, name: str, case: str
) -> None:
    files, options = CASES[case]

    def xml(site: Site) -> str:
        text = site.xml(name, files, **options)  # type: ignore[arg-type]
        return text.replace("<type>hvm", '<type machine="q35">hvm') if case == "q35" else text

    saved = save(connection, here, xml(here))
    before = here.count()
    described = connection.saveImageGetXMLDesc(str(here.directory / "mem"), 0)
    for path in here.directory.iterdir():
        shutil.copy(path, there.directory)
        there.own(there.directory / path.name)
    shutil.rmtree(here.directory)
    ours = reconcile(saved, xml(there))
    assert reconcile(described, xml(there)).count("<disk") == ours.count("<disk") == len(files)
    domain = restore(connection, there, ours)
    assert there.count() > before >= 1
    live = domain.XMLDesc(libvirt.VIR_DOMAIN_XML_SECURE)
    assert str(here.directory) not in live
    assert here.console not in live
    assert "'dir_1'" not in live  # the old password
    if os.getuid() == 0:
        assert live.count("relabel='no'") == live.count("<source file=")
        assert f"<label>+{JOB_UID}:" in live
    domain.destroy()


def test_libvirt_has_the_last_word(connection: "libvirt.virConnect", here: Site, there: Site, name: str) -> None:
    """What `reconcile` lets through and does not fit all the same, libvirt refuses, and nothing runs."""
    files = CASES["host-model"][0]
    saved = save(connection, here, here.xml(name, files, nic=False))
    shutil.copytree(here.directory, there.directory, dirs_exist_ok=True)
    for path in there.directory.iterdir():
        there.own(path)
    crafted = saved.replace("slot='0x02'", "slot='0x1e'").replace("slot='0x03'", "slot='0x1d'")
    with pytest.raises(libvirt.libvirtError, match="address"):
        restore(connection, there, reconcile(crafted, there.xml(name, files, nic=False)))
    assert name not in [domain.name() for domain in connection.listAllDomains()]
    with pytest.raises(SavedMismatch, match="interface user"):
        reconcile(saved, there.xml(name, files, nic=True))
