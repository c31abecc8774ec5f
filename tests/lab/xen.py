"""A machine with a real Xen: the lab that scripts/xen-lab builds, booted under QEMU's emulation.

Xen's paravirtual guests need no virtualization hardware, so Xen itself runs in an emulated machine, Debian as
its dom0, and libvirt's Xen driver there starts guests that count (`tests/lab/dom0/guest-init`). The disk of
the lab is only read: what a run writes is gone with it, and the machine ends with the process that started it.

Commands run in dom0 with a key made for this run (`tests.lab.emulated`).

``python -m tests.lab.xen`` boots it and gives a shell in dom0.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from tests.lab.emulated import QEMU, TOOLS, EmulatedMachine

USER = "alice"
"""The user of jobs in dom0."""
URI = "xen:///system"
KERNEL, INITRD = "/lab/guest/vmlinux", "/lab/guest/initrd"
"""The guest's, as seen in dom0."""
UP = "vmgahp dom0 up"
"""What dom0 says on its own console at the end of its start."""
BOOT_DEADLINE = 240.0
"""Seconds. A boot takes 20 on an idle machine."""

# Xen 4.17 on QEMU's emulated processors: `-cpu max` crashes dom0 or hides what libxl needs. The mitigations of
# hardware faults that an emulated processor does not have cost it half its speed.
MACHINE = ["-machine", "pc", "-cpu", "Nehalem", "-smp", "2", "-m", "2048"]
MACHINE += ["-device", "virtio-net-pci,netdev=net,romfile="]
XEN_COMMAND_LINE = "console=com1 com1=115200,8n1 dom0_mem=1024M,max:1024M spec-ctrl=no xpti=no pv-l1tf=no"
DOM0_COMMAND_LINE = "console=hvc0 quiet net.ifnames=0"


def default_lab() -> Path:
    """Where scripts/xen-lab keeps what it builds."""
    named = os.environ.get("VMGAHP_XEN_LAB")
    return Path(named) if named else Path(os.environ.get("VMGAHP_LAB", "/var/cache/vmgahp-lab")) / "xen"


def why_not() -> str:
    """Why no machine with Xen can be booted here; empty where it can."""
    if not (default_lab() / "recipe").exists():
        return f"there is no Xen lab in {default_lab()} (scripts/xen-lab builds it)"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    return f"missing on this machine: {', '.join(missing)}" if missing else ""


class XenHost(EmulatedMachine):
    """One machine with Xen, in a ``with``; `directory` keeps what it says on its serial console."""

    called = "dom0"
    logs = ("/var/log/libvirt/libvirtd.log", "/var/log/libvirt/libxl/libxl-driver.log", "/var/log/xen/xen-hotplug.log")

    def __init__(self, directory: str | Path, lab: str | Path | None = None) -> None:
        super().__init__(directory)
        self.lab = Path(lab) if lab else default_lab()

    def open(self) -> None:
        """Boot, and wait until libvirt answers in dom0."""
        super().open()
        self._wait("libvirt in dom0", lambda: self.virsh("version", check=False).returncode == 0, 120)

    def wait_for_boot(self) -> None:
        """Wait for the end of dom0's start."""
        self._wait("dom0", lambda: UP in self.serial.read_text(errors="replace"), BOOT_DEADLINE)

    def traits(self) -> dict[str, str]:
        """Name the hypervisor."""
        major, minor = self.run("sh", "-c", "cd /sys/hypervisor/version; cat major minor").stdout.split()
        return {"hypervisor": f"Xen {major}.{minor}"}

    # ---- services -------------------------------------------------------------------------------

    def virsh(self, *argv: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return self.run("virsh", "-q", "-c", URI, *argv, check=check)

    def domains(self) -> list[str]:
        """The names of all guests, running or not."""
        said = self.virsh("list", "--all", "--name", check=False)
        if said.returncode:  # once ssh ended with its own 255 and no word, and the next command was as always
            said = self.virsh("list", "--all", "--name")
        return [name for name in said.stdout.split() if name != "Domain-0"]

    def install(self, wheel: Path) -> None:
        """Put our package into dom0's /opt/vmgahp, over Debian's own modules of the rest."""
        inside = f"/tmp/{wheel.name}"
        self.put(wheel, inside)
        options = ["--quiet", "--no-index", "--no-deps", "--force-reinstall", "--disable-pip-version-check"]
        self.run("/opt/vmgahp/bin/python", "-m", "pip", "install", *options, inside, timeout=300)

    # ---- the start ------------------------------------------------------------------------------

    def key(self, private: Path) -> Path:
        """Make the key, and what dom0 reads as its second disk: the public half of it in a tar archive."""
        key = private / "key"
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "vmgahp-lab", "-f", str(key)]
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL)

        def of_root(member: tarfile.TarInfo) -> tarfile.TarInfo:
            member.uid = member.gid = 0
            member.mode = 0o600
            return member

        with tarfile.open(private / "seed.tar", "w") as archive:
            archive.add(private / "key.pub", "authorized_keys", filter=of_root)
        return key

    def qemu(self, private: Path) -> list[str]:
        """QEMU's command line."""
        command = [*QEMU, *MACHINE]
        command += ["-drive", f"file={self.lab}/dom0.img,format=raw,if=virtio,snapshot=on"]
        command += ["-drive", f"file={private}/seed.tar,format=raw,if=virtio,readonly=on"]
        command += ["-kernel", f"{self.lab}/xen", "-append", XEN_COMMAND_LINE]
        return [*command, "-initrd", f"{self.lab}/vmlinux {DOM0_COMMAND_LINE},{self.lab}/initrd"]


def main() -> int:
    """Boot it for a person: a shell in dom0 until that is left."""
    if reason := why_not():
        sys.exit(reason)
    with tempfile.TemporaryDirectory(prefix="vmgahp-xen-") as directory:
        print("booting Xen and its dom0 (half a minute); nothing of it is kept ...", file=sys.stderr)
        with XenHost(directory) as host:
            return host.shell()


if __name__ == "__main__":
    sys.exit(main())
