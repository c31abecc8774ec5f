"""Attacks by disk images: backing names, headers, data elsewhere, and layers that change while QEMU starts."""

import mmap
import os
import signal
import struct
import subprocess
import time
from pathlib import Path

from tests.attacks.ground import CANARIES, SOCKET
from tests.attacks.site import Site
from tests.attacks.support import BOTH, Mode, Must, Who, attack, each
from tests.lab.odd_files import KINDS

# fmt: off
NAMES = (
    "nbd://127.0.0.1:{port}/x", "nbd+tcp://127.0.0.1:{port}/x", "nbd+unix:///x?socket={socket}", "nbd:127.0.0.1:{port}",
    "nbd:unix:{socket}:exportname=x", "http://127.0.0.1:{port}/x", "https://127.0.0.1:{port}/x",
    "ftp://127.0.0.1:{port}/x", "ssh://root@127.0.0.1:{port}/x", "iscsi://127.0.0.1:{port}/x/0", "nfs://127.0.0.1/x",
    "rbd:x/y", "gluster://127.0.0.1/x/y",
    'json:{{"driver":"nbd","server":{{"type":"inet","host":"127.0.0.1","port":"{port}"}}}}',
    'json:{{"driver":"raw","file":{{"driver":"nbd","path":"{socket}"}}}}',
    'json:{{"driver":"raw","file":{{"driver":"file","filename":"{canaries}/root"}}}}', 'json:{{"driver":"null-co"}}',
    "file:{canaries}/root", "{canaries}/root", "{canaries}/libvirt", "{canaries}/group", "{canaries}/other",
    "../../../canary/root", "link", "fat:rw:/etc", "fat:/etc", "vvfat:/etc", "host_device:/dev/sda",
    "blkdebug::{canaries}/root", "/proc/self/fd/0", "/proc/self/mem", "/proc/1/root/run/canary/root", "/dev/zero",
    "/dev/mem", "/dev/loop0", "{socket}", "fifo", "guest.qcow2", ".", "/", "-", "--help", "null-co://", "quorum:x",
    "x\ty", "x" * 900,
)
# fmt: on
"""What an image may name as its backing file."""

HEADERS: tuple[tuple[int, str, int], ...] = (
    *((4, ">I", version) for version in (0, 1, 4, 0xFFFFFFFF)),
    *((8, ">Q", offset) for offset in (1, 1 << 40, (1 << 64) - 1)),
    *((16, ">I", size) for size in (1024, 0xFFFFFFFF)),
    *((20, ">I", bits) for bits in (0, 8, 30, 63, 0xFFFFFFFF)),
    *((24, ">Q", size) for size in (0, 1, 1 << 56, (1 << 64) - 1)),
    *((32, ">I", crypt) for crypt in (1, 2, 3, 0xFFFFFFFF)),
    *((36, ">I", size) for size in (0, 1 << 25, 0xFFFFFFFF)),
    *((40, ">Q", offset) for offset in (0, 3, 1 << 40, (1 << 64) - 1)),
    *((48, ">Q", offset) for offset in (0, 3, 1 << 40, (1 << 64) - 1)),
    *((56, ">I", size) for size in (0, 1 << 23, 0xFFFFFFFF)),
    *((60, ">I", snapshots) for snapshots in (1, 65537, 0xFFFFFFFF)),
    *((64, ">Q", offset) for offset in (3, (1 << 64) - 1)),
    *((72, ">Q", 1 << bit) for bit in (0, 1, 2, 3, 4, 5, 63)),
    *((80, ">Q", 1 << bit) for bit in (0, 63)),
    *((96, ">I", order) for order in (7, 0xFFFFFFFF)),
    *((100, ">I", length) for length in (0, 103, 65536, 0xFFFFFFFF)),
    *((104, ">I", extension) for extension in (0xE2792ACA, 0x23852875, 0x44415441, 0x0537BE77)),
)
"""Where in a qcow2 header, in which form, what."""

# fmt: off
FORMATS = (
    "qcow2", "vmdk", "vdi", "vpc", "vhdx", "qed", "vhd", "iso", "luks", "nbd", "raw,file.locking=off", "host_device",
)
# fmt: on
RACES = 10


QCOW2 = '"guest.qcow2:hda:w:qcow2"'


def qemu_img(*words: str | Path) -> None:
    subprocess.run(["qemu-img", *words], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def overlay(site: Site, name: str, backing: str, image_format: str = "raw") -> Path:
    """A qcow2 image whose header has any name in it."""
    path = site.path(name)
    path.unlink(missing_ok=True)
    qemu_img("create", "-q", "-f", "qcow2", path, "1M")
    raw = backing.encode()
    with open(path, "r+b") as file:
        head = bytearray(file.read(104))
        length = struct.unpack(">I", head[100:104])[0]
        extension = struct.pack(">II", 0xE2792ACA, len(image_format)) + image_format.encode().ljust(8, b"\0")
        extension = extension if image_format else b""
        head[8:16], head[16:20] = struct.pack(">Q", length + len(extension) + 8), struct.pack(">I", len(raw))
        file.seek(0)
        file.write(head)
        file.seek(length)
        file.write(extension + bytes(8) + raw)
    return site.own(path, 0o644)


def try_it(site: Site, what: str, disk: str = QCOW2, *, may_run: bool = False) -> None:
    """START with an image that is no good."""
    with site.naming(what):
        site.start(VMPARAM_vm_Disk=disk)
        if site.vm and not may_run:
            site.breach("it runs")
        site.stop()
        site.look_at_the_machine()


@attack(Who.STRANGER, Must.HOLD, Mode.LIBVIRT, times=len(NAMES), cases={"raw": ("raw",), "in-a-chain": ("qcow2",)})
def backing_names(site: Site, by: str) -> None:
    """Name URLs, pseudo-protocols and files of others as the backing file of an image or of its own."""
    site.link("link", CANARIES / "root")
    site.node("fifo", os.mkfifo)
    for name in NAMES:
        name = name.format(port=site.ground.port, socket=SOCKET, canaries=CANARIES)
        if by == "qcow2":
            overlay(site, "middle.qcow2", name)
            overlay(site, "guest.qcow2", str(site.path("middle.qcow2")), "qcow2")
        else:
            overlay(site, "guest.qcow2", name)
        try_it(site, name)


@attack(Who.STRANGER, Must.HOLD, Mode.LIBVIRT)
def without_format(site: Site) -> None:
    """Leave out the format of a backing file, which is a qcow2 image that names a file of root's."""
    overlay(site, "base", str(CANARIES / "root"))
    overlay(site, "guest.qcow2", str(site.path("base")), "")
    try_it(site, "")


@attack(Who.STRANGER, Must.HOLD, Mode.LIBVIRT, times=3)
def chains(site: Site) -> None:
    """Make an image its own backing file, two each other's, and a chain of 300."""
    overlay(site, "guest.qcow2", str(site.path("guest.qcow2")), "qcow2")
    try_it(site, "itself")
    overlay(site, "other.qcow2", str(site.path("guest.qcow2")), "qcow2")
    overlay(site, "guest.qcow2", str(site.path("other.qcow2")), "qcow2")
    try_it(site, "each other")
    site.guest("0.qcow2", format="qcow2")
    for number in range(1, 300):
        overlay(site, f"{number}.qcow2", str(site.path(f"{number - 1}.qcow2")), "qcow2")
    overlay(site, "guest.qcow2", str(site.path("299.qcow2")), "qcow2")
    try_it(site, "300")


def with_data_file(site: Site, name: str, target: str) -> Path:
    """A qcow2 image that keeps its data in any file."""
    path = site.path(name)
    path.unlink(missing_ok=True)
    own = site.guest("own.raw")
    qemu_img("create", "-q", "-f", "qcow2", "-o", f"data_file={own}", path, "1M")
    with open(site.own(path, 0o644), "r+b") as file:
        file.seek(file.read().index(str(own).encode()) - 4)
        file.write(struct.pack(">I", len(target)) + target.encode().ljust(len(str(own)), b"\0"))
    return path


@attack(Who.STRANGER, Must.HOLD, Mode.LIBVIRT, times=6)
def data_file(site: Site) -> None:
    """Keep the data of a qcow2 image in a file of root's, of libvirt's, of another, at an URL."""
    for name in (
        *(str(CANARIES / canary) for canary in ("root", "libvirt", "other")),
        f"nbd://127.0.0.1:{site.ground.port}/x",
        "../../../canary/root",
        str(site.path("own.raw")),
    ):
        with_data_file(site, "guest.qcow2", name)
        try_it(site, name)


@attack(Who.STRANGER, Must.SURVIVE, Mode.LIBVIRT, times=len(HEADERS))
def headers(site: Site) -> None:
    """Have an impossible field in a qcow2 header, one at a time."""
    good = site.guest("guest.qcow2", format="qcow2").read_bytes()
    for offset, form, value in HEADERS:
        packed = struct.pack(form, value)
        site.plant("guest.qcow2", good[:offset] + packed + good[offset + len(packed) :])
        try_it(site, f"{value:#x} at {offset}", may_run=True)


@attack(Who.USER, Must.SURVIVE, Mode.LIBVIRT, times=4 * len(FORMATS))
def formats(site: Site) -> None:
    """Give each format in `vm_disk` to an image that is another, empty, random or cut off."""
    other = site.guest("other.qcow2", format="qcow2").read_bytes()
    for image_format in FORMATS:
        for content in (b"", os.urandom(4096), other[:70_000], site.guest("raw.img").read_bytes()):
            site.plant("guest.qcow2", content)
            try_it(site, image_format, f'"guest.qcow2:hda:w:{image_format}"', may_run=True)


@attack(Who.STRANGER, Must.HOLD, Mode.LIBVIRT, times=7)
def extents(site: Site) -> None:
    """Name files of others, devices and URLs as the extents and the parent of a .vmdk."""
    head = '# Disk DescriptorFile\nversion=1\nCID=fffffffe\nparentCID={parent}\ncreateType="monolithicFlat"\n{more}\n'
    head += '# Extent description\nRW 2048 FLAT "{extent}" 0\n# The Disk Data Base\nddb.adapterType = "ide"\n'
    for extent in (
        *(str(CANARIES / canary) for canary in ("root", "libvirt", "other")),
        "/dev/zero",
        f"nbd://127.0.0.1:{site.ground.port}/x",
        "../../../canary/root",
    ):
        site.plant("guest.vmdk", head.format(parent="ffffffff", more="", extent=extent).encode())
        try_it(site, extent, '"guest.vmdk:hda:w:vmdk"')
    site.guest("own.raw")
    more = f'parentFileNameHint="{CANARIES / "root"}"'
    site.plant("guest.vmdk", head.format(parent="00000001", more=more, extent="own.raw").encode())
    try_it(site, more, '"guest.vmdk:hda:w:vmdk"')


@attack(Who.GUEST, Must.RUN, *BOTH, daily=True)
def header_in_raw(site: Site) -> None:
    """Write a qcow2 header that names a file of root's into the raw disk; SUSPEND, RESUME, restart."""
    overlay(site, "guest.img", str(CANARIES / "root"))
    site.done("START", "SUSPEND", "RESUME", "CHECKPOINT")
    site.restart()
    site.start()


@attack(Who.USER, Must.SURVIVE, *BOTH, times=RACES)
def backing_swapped(site: Site) -> None:
    """Exchange the backing file of an image and a link to a file of root's all the time during START."""
    site.guest("base.img")
    site.link("evil", CANARIES / "root")
    overlay(site, "guest.qcow2", str(site.path("base.img")))
    with site.swapping("base.img", "evil"):
        for _ in range(RACES):
            try_it(site, "", may_run=True)


@attack(Who.USER, Must.SURVIVE, *BOTH, times=RACES)
def header_swapped(site: Site) -> None:
    """Exchange an image and one whose header names a data file of libvirt's user all the time during START."""
    site.guest("base.img")
    with_data_file(site, "evil.qcow2", str(CANARIES / "libvirt"))
    overlay(site, "guest.qcow2", str(site.path("base.img")))
    with site.swapping("guest.qcow2", "evil.qcow2"):
        for _ in range(RACES):
            try_it(site, "", may_run=True)


@attack(Who.USER, Must.SURVIVE, *BOTH, times=RACES, cases={"by-name": ("by-name",), "by-memory": ("by-memory",)})
def rewritten(site: Site, how: str) -> None:
    """Rewrite an image's header in place, to name a data file of libvirt's user, by name or by a mapping."""
    base = site.guest("base.img")
    good = overlay(site, "guest.qcow2", str(base)).read_bytes()[:4096]
    evil = overlay(site, "evil.qcow2", str(CANARIES / "libvirt")).read_bytes()[:4096]
    worse = with_data_file(site, "evil.qcow2", str(CANARIES / "libvirt")).read_bytes()[:4096]
    path = overlay(site, "guest.qcow2", str(base))

    def by_name() -> None:
        while os.getppid() != 1:
            for head in (evil, good, worse, good):
                file = os.open(path, os.O_WRONLY)
                os.pwrite(file, head, 0)
                os.close(file)
                time.sleep(0.0005)

    def by_memory() -> None:
        file = os.open(path, os.O_RDWR)
        memory = mmap.mmap(file, 4096)
        os.close(file)
        while os.getppid() != 1:
            for head in (evil, good, worse, good):
                memory[:] = head
                time.sleep(0.0005)

    with site.beside(by_name if how == "by-name" else by_memory):
        for _ in range(RACES):
            try_it(site, how, may_run=True)


@attack(Who.USER, Must.SURVIVE, *BOTH)
def held_open(site: Site) -> None:
    """Have the image, its backing file and the CD-ROM open for writing, and never close them."""
    overlay(site, "guest.qcow2", str(site.guest("base.img")))
    site.plant("seed.iso", bytes(1 << 16))

    def hold() -> None:
        for name in ("base.img", "guest.qcow2", "seed.iso"):
            os.open(site.path(name), os.O_RDWR)
        signal.pause()

    with site.beside(hold):
        try_it(site, "held open", '"guest.qcow2:hda:w:qcow2,seed.iso:hdc:r:raw"', may_run=True)
    result = site.start(VMPARAM_vm_Disk=QCOW2)
    assert result[:1] == ["0"], result


@attack(Who.USER, Must.SURVIVE, *BOTH, times=4)
def backing_before_resume(site: Site) -> None:
    """Link the backing file to a file of others between SUSPEND and RESUME, or name another in the header."""
    for number, canary in enumerate(("root", "libvirt", "group", "other")):
        site.path("base.img").unlink(missing_ok=True)
        site.guest("base.img")
        overlay(site, "guest.qcow2", str(site.path("base.img")))
        site.start(VMPARAM_vm_Disk=QCOW2)
        if site.vm:
            site.ask("SUSPEND")
            if number % 2:
                overlay(site, "guest.qcow2", str(CANARIES / canary))
            else:
                site.path("base.img").unlink()
                site.link("base.img", CANARIES / canary)
            site.ask("RESUME")
            site.look_at_the_machine()
            site.stop()


@attack(Who.USER, Must.SURVIVE, *BOTH, times=2)
def cdrom(site: Site) -> None:
    """Have a CD-ROM that is a link, or becomes one between SUSPEND and RESUME."""
    site.guest()
    disks = '"guest.img:hda:w:raw,seed.iso:hdc:r:raw"'
    site.link("seed.iso", CANARIES / "root")
    try_it(site, "a link", disks)
    site.path("seed.iso").unlink()
    site.plant("seed.iso", bytes(1 << 16))
    site.start(VMPARAM_vm_Disk=disks)
    if site.vm:
        site.ask("SUSPEND")
        site.path("seed.iso").unlink()
        site.link("seed.iso", CANARIES / "root")
        site.ask("RESUME")


@attack(Who.USER, Must.HOLD, Mode.NONE, times=6)
def nodes(site: Site) -> None:
    """Name in `vm_disk` what is no regular file: FIFO, socket, directory, device, terminal."""
    site.node("fifo", os.mkfifo)
    site.node("socket", KINDS["a socket"])
    site.node("directory", os.mkdir)
    for name in ("fifo", "socket", "directory", "/dev/null", "/dev/ptmx", "."):
        try_it(site, name, f'"{name}:hda:w:raw"')


test_nothing_comes_of_it = each(__name__)
