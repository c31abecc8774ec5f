"""A Linux guest that does what its user data say: Debian's kernel, and busybox for all the rest.

It looks for the drive of cloud-init by its label, tells the console what is on it, runs the user data where they are
a script, and powers off. scripts/test fetches the kernel (`setup_linux_guest` in scripts/lib/setup.sh); it is started
by a job's own XML, from a kernel and an initramfs in the scratch directory, or from a disk that GRUB boots.
"""

import gzip
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from vmgahp.job.run import guest_file

BUSYBOX = Path("/bin/busybox")
"""Debian's busybox-static."""
AGENT = Path("/usr/sbin/qemu-ga")
"""Debian's qemu-guest-agent."""
KERNEL, INITRD, XML = "vmlinuz", "initrd.gz", "domain.xml"
"""Their names in the scratch directory."""
MEMORY_MIB = 192

UP = "linux guest up"
NO_DRIVE = "linux guest has no cidata"

# In the order in which they go in.
_MODULES = (
    *("virtio_ring", "virtio", "virtio_pci_modern_dev", "virtio_pci_legacy_dev", "virtio_pci"),
    *("virtio_blk", "virtio_console", "cdrom", "isofs", "pvpanic", "pvpanic-mmio"),
    *("failover", "net_failover", "virtio_net"),
    *("fuse", "virtiofs"),
)

NVME = ("crct10dif_common", "crc-t10dif", "crc64", "crc64-rocksoft", "t10-pi", "nvme-core", "nvme")
"""More of them, for an NVMe disk."""

BEGIN = f"""#!/bin/busybox sh
busybox=/bin/busybox
$busybox --install -s /bin
mount -t devtmpfs dev /dev
mount -t proc proc /proc
mount -t sysfs sys /sys
for module in /modules/*; do insmod "$module"; done
mkdir -p /dev/virtio-ports
for port in /sys/class/virtio-ports/*; do
    [ -e "$port/name" ] && ln -s "/dev/${{port##*/}}" "/dev/virtio-ports/$(cat "$port/name")"
done
echo '{UP}'
"""
"""What any of its first programs begins with: devices by their names, and all of busybox in /bin."""

_INIT = f"""{BEGIN}mkdir /seed
# busybox-static has no blkid: the label is where ISO 9660 has it.
for disk in /sys/class/block/*; do
    label=$(dd if="/dev/${{disk##*/}}" bs=1 skip=32808 count=6 2>/dev/null)
    [ "$label" = cidata ] && drive=/dev/${{disk##*/}}
done
if [ -n "$drive" ] && mount -t iso9660 -o ro "$drive" /seed; then
    echo "drive $drive"
    ls -ln /seed
    cat /seed/meta-data
    case $(head -c 2 /seed/user-data) in '#!') sh /seed/user-data ;; esac
else
    echo '{NO_DRIVE}'
fi
poweroff -f
"""

_SHUTDOWN = "#!/bin/sh\necho 'powered off by its agent' >/dev/console\npoweroff -f\n"
"""What the agent runs; nothing in the guest listens to ACPI."""

_XML = f"""<domain type='kvm'><memory unit='MiB'>{MEMORY_MIB}</memory><vcpu>1</vcpu>
<os><type>hvm</type><kernel>{KERNEL}</kernel><initrd>{INITRD}</initrd>
<cmdline>console=ttyS0 quiet loglevel=0 no_timer_check panic=-1</cmdline></os>
<devices><serial type='pty'><target port='0'/></serial>{{}}</devices></domain>
"""
"""With room for more devices."""


_GRUB = Path("/usr/lib/grub/i386-pc")
"""Debian's grub-pc-bin."""
_GRUB_SETTINGS = f"""set root=(hd0,msdos1)
linux /{KERNEL} console=ttyS0 quiet loglevel=0 no_timer_check panic=-1
initrd /{INITRD}
boot
"""


def default_lab() -> Path:
    """Where scripts/test keeps the kernel."""
    return Path(os.environ.get("VMGAHP_LAB", "/var/cache/vmgahp-lab")) / "linux"


def why_not() -> str:
    """Why there is no such guest here; empty where there is."""
    if not list(default_lab().glob("boot/vmlinuz-*")):
        return f"there is no kernel in {default_lab()} (scripts/test fetches it)"
    return "" if BUSYBOX.exists() else "there is no /bin/busybox (the package busybox-static)"


def why_no_agent() -> str:
    """Why there is no guest agent for such a guest; empty where there is."""
    return "" if AGENT.exists() else f"there is no {AGENT} (the package qemu-guest-agent)"


def make(scratch: Path, devices: str = "", *, agent: bool = False, init: str = _INIT) -> list[Path]:
    """Put all that the guest is started from into a scratch directory; what was made.

    `devices` are more of them, as libvirt's XML; with `agent` it has QEMU's guest agent, which its user data start;
    `init` is what it does.
    """
    [kernel] = default_lab().glob("boot/vmlinuz-*")
    shutil.copy(kernel, scratch / KERNEL)
    (scratch / INITRD).write_bytes(gzip.compress(_initramfs(agent, init), 1, mtime=0))
    (scratch / XML).write_text(_XML.format(devices))
    return [scratch / name for name in (KERNEL, INITRD, XML)]


def why_no_disk() -> str:
    """Why no disk can be made that such a guest boots from; empty where one can."""
    missing = [tool for tool in ("grub-mkimage", "mke2fs") if shutil.which(tool) is None]
    if not (_GRUB / "boot.img").exists():
        missing.append(str(_GRUB))
    return why_not() or (f"missing: {', '.join(missing)} (grub-pc-bin, e2fsprogs)" if missing else "")


def make_ready_disk(disk: Path, prepare: str = "") -> Path:
    """A disk of a guest whose image has the agent; `prepare` are lines of shell that it runs before that."""
    init = f"""{BEGIN}mkdir -p /run /etc /root /tmp /var/lib
mount -t tmpfs tmpfs /run
mount -t tmpfs tmpfs /var/lib
echo root::0:0:root:/root:/bin/sh >/etc/passwd
echo root:x:0: >/etc/group
{prepare}
# By this signal busybox's poweroff asks the first process.
trap 'poweroff -f' USR2
sh /agent start &
wait
poweroff -f
"""
    return make_disk(disk, init, {"agent": guest_file("agent")})


def make_disk(
    disk: Path, init: str, files: Mapping[str, bytes] = MappingProxyType({}), modules: Sequence[str] = ()
) -> Path:
    """A raw disk of 24 MiB that boots by a PC's BIOS, for a guest that does what `init` says; `files` lie in its root.

    `modules` are more of the kernel's.

    The boot sector and GRUB's core are before the one partition, which has the kernel and the initramfs.
    """
    with tempfile.TemporaryDirectory(dir=disk.parent) as place:
        tree, core, partition = Path(place, "tree"), Path(place, "core"), Path(place, "partition")
        tree.mkdir()
        [kernel] = default_lab().glob("boot/vmlinuz-*")
        shutil.copy(kernel, tree / KERNEL)
        (tree / INITRD).write_bytes(gzip.compress(_initramfs(False, init, files, modules), 1, mtime=0))
        settings = Path(place, "grub.cfg")
        settings.write_text(_GRUB_SETTINGS)
        command = ["grub-mkimage", "-O", "i386-pc", "-p", "/", "-c", str(settings), "-o", str(core)]
        subprocess.run([*command, "biosdisk", "part_msdos", "ext2", "linux", "boot"], check=True)
        subprocess.run(["mke2fs", "-q", "-t", "ext2", "-d", tree, partition, "23M"], check=True)
        content = partition.read_bytes()
        sector = bytearray((_GRUB / "boot.img").read_bytes())
        start, sectors = 2048, len(content) // 512
        # It is where the boot sector has code for floppy disks, which GRUB itself takes for partitions of no sense.
        sector[446:510] = struct.pack("<8B2I48x", 0x80, 254, 255, 255, 0x83, 254, 255, 255, start, sectors)
        disk.write_bytes((bytes(sector) + core.read_bytes()).ljust(start * 512, b"\0") + content)
    return disk


def _initramfs(
    agent: bool, init: str, files: Mapping[str, bytes] = MappingProxyType({}), modules: Sequence[str] = ()
) -> bytes:
    """An archive in cpio's newc format, which is what the kernel unpacks (initramfs-buffer-format in its sources)."""
    archive = bytearray()
    for name in ("bin", "dev", "proc", "sys", "modules"):
        archive += _entry(name, 0o040755)
    archive += _entry("bin/busybox", 0o100755, BUSYBOX.read_bytes())
    archive += _entry("init", 0o100755, init.encode())
    archive += b"".join(_entry(name, 0o100755, content) for name, content in files.items())
    for number, module in enumerate((*_MODULES, *modules), start=10):
        [file] = default_lab().glob(f"lib/modules/*/kernel/**/{module}.ko")
        archive += _entry(f"modules/{number}-{module}.ko", 0o100644, file.read_bytes())
    if agent:
        archive += _agent()
    return bytes(archive + _entry("TRAILER!!!", 0))


def _agent() -> bytes:
    """The agent, with the libraries that it is linked with, and what it runs."""
    linked = subprocess.run(["ldd", AGENT], capture_output=True, text=True, check=True).stdout.split()
    files = [AGENT, *(Path(word) for word in linked if word.startswith("/"))]
    directories = sorted({str(parent) for file in files for parent in file.parents} - {"/", "/bin"} | {"/sbin"})
    archive = b"".join(_entry(directory[1:], 0o040755) for directory in directories)
    archive += b"".join(_entry(str(file)[1:], 0o100755, file.read_bytes()) for file in files)
    return archive + _entry("sbin/shutdown", 0o100755, _SHUTDOWN.encode())


def _entry(name: str, mode: int, content: bytes = b"") -> bytes:
    # inode, mode, uid, gid, links, mtime, size, device (major, minor), of a special file, length of the name, check
    fields = (0, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(name) + 1, 0)
    head = b"070701" + b"".join(b"%08X" % field for field in fields) + name.encode() + b"\0"
    return _padded(head) + _padded(content)


def _padded(piece: bytes) -> bytes:
    return piece + bytes(-len(piece) % 4)
