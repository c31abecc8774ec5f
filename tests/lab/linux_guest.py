"""A Linux guest that does what its user data say: Debian's kernel for clouds, and busybox for all the rest.

It looks for the drive of cloud-init by its label, tells the console what is on it, runs the user data where they are
a script, and powers off. scripts/test fetches the kernel (`setup_linux_guest` in scripts/lib/setup.sh); it is started
by a job's own XML, from a kernel and an initramfs in the scratch directory.
"""

from __future__ import annotations

import gzip
import os
import shutil
from pathlib import Path

BUSYBOX = Path("/bin/busybox")
"""Debian's busybox-static."""
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
)

_INIT = f"""#!/bin/busybox sh
busybox=/bin/busybox
$busybox --install -s /bin
mount -t devtmpfs dev /dev
mount -t proc proc /proc
mount -t sysfs sys /sys
for module in /modules/*; do insmod "$module"; done
mkdir -p /dev/virtio-ports /seed
for port in /sys/class/virtio-ports/*; do
    [ -e "$port/name" ] && ln -s "/dev/${{port##*/}}" "/dev/virtio-ports/$(cat "$port/name")"
done
echo '{UP}'
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

_XML = f"""<domain type='kvm'><memory unit='MiB'>{MEMORY_MIB}</memory><vcpu>1</vcpu>
<os><type>hvm</type><kernel>{KERNEL}</kernel><initrd>{INITRD}</initrd>
<cmdline>console=ttyS0 quiet loglevel=0 panic=-1</cmdline></os>
<devices><serial type='pty'><target port='0'/></serial>{{}}</devices></domain>
"""
"""With room for more devices."""


def default_lab() -> Path:
    """Where scripts/test keeps the kernel."""
    return Path(os.environ.get("VMGAHP_LAB", "/var/cache/vmgahp-lab")) / "linux"


def why_not() -> str:
    """Why there is no such guest here; empty where there is."""
    if not list(default_lab().glob("boot/vmlinuz-*")):
        return f"there is no kernel in {default_lab()} (scripts/test fetches it)"
    return "" if BUSYBOX.exists() else "there is no /bin/busybox (the package busybox-static)"


def make(scratch: Path, devices: str = "") -> list[Path]:
    """Put all that the guest is started from into a scratch directory; what was made.

    `devices` are more of them, as libvirt's XML.
    """
    [kernel] = default_lab().glob("boot/vmlinuz-*")
    shutil.copy(kernel, scratch / KERNEL)
    (scratch / INITRD).write_bytes(gzip.compress(_initramfs(), 1, mtime=0))
    (scratch / XML).write_text(_XML.format(devices))
    return [scratch / name for name in (KERNEL, INITRD, XML)]


def _initramfs() -> bytes:
    """An archive in cpio's newc format, which is what the kernel unpacks (initramfs-buffer-format in its sources)."""
    archive = bytearray()
    for name in ("bin", "dev", "proc", "sys", "modules"):
        archive += _entry(name, 0o040755)
    archive += _entry("bin/busybox", 0o100755, BUSYBOX.read_bytes())
    archive += _entry("init", 0o100755, _INIT.encode())
    for number, module in enumerate(_MODULES, start=10):
        [file] = default_lab().glob(f"lib/modules/*/kernel/**/{module}.ko")
        archive += _entry(f"modules/{number}-{module}.ko", 0o100644, file.read_bytes())
    return bytes(archive + _entry("TRAILER!!!", 0))


def _entry(name: str, mode: int, content: bytes = b"") -> bytes:
    # inode, mode, uid, gid, links, mtime, size, device (major, minor), of a special file, length of the name, check
    fields = (0, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(name) + 1, 0)
    head = b"070701" + b"".join(b"%08X" % field for field in fields) + name.encode() + b"\0"
    return _padded(head) + _padded(content)


def _padded(piece: bytes) -> bytes:
    return piece + bytes(-len(piece) % 4)
