"""A machine with a real Xen: the lab that scripts/xen-lab builds, booted under QEMU's emulation.

Xen's paravirtual guests need no virtualization hardware, so Xen itself runs in an emulated machine, Debian as
its dom0, and libvirt's Xen driver there starts guests that count (`tests/lab/dom0/guest-init`). The disk of
the lab is only read: what a run writes is gone with it, and the machine ends with the process that started it.

Commands run in dom0 through one SSH connection, from a port of this host's loopback and with a key made for
this run. So a program in dom0 has the pipes of an `ssh` process here, and whatever talks to a local process
can talk to it. The host's own libvirt reaches dom0's the same way (`XenHost.libvirt`).

``python -m tests.lab.xen`` boots it and gives a shell in dom0.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar
from xml.sax.saxutils import escape, quoteattr

from tests.lab.namespace import LabError, wait_until
from tests.lab.ports import free_port

T = TypeVar("T")

USER = "alice"
"""The user of jobs in dom0."""
OUR_SERVER = "/opt/vmgahp/bin/condor_vm-gahp"
URI = "xen:///system"
KERNEL, INITRD = "/lab/guest/vmlinux", "/lab/guest/initrd"
"""The guest's, as seen in dom0."""
CONSOLES = "/var/log/xen/console"
"""Where xenconsoled keeps ``guest-NAME.log``. It appends: one of the same name continues the same file."""

UP = "vmgahp dom0 up"
"""What dom0 says on its own console at the end of its start."""
BOOT_DEADLINE = 240.0
"""Seconds. A boot takes 20 on an idle machine."""

# Xen 4.17 on QEMU's emulated processors: `-cpu max` crashes dom0 or hides what libxl needs. The mitigations of
# hardware faults that an emulated processor does not have cost it half its speed.
QEMU = ["qemu-system-x86_64", "-nodefaults", "-no-user-config", "-no-reboot", "-display", "none"]
QEMU += ["-accel", "tcg,thread=multi", "-machine", "pc", "-cpu", "Nehalem", "-smp", "2", "-m", "2048"]
QEMU += ["-device", "virtio-net-pci,netdev=net,romfile="]
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
    missing = [tool for tool in (QEMU[0], "ssh", "ssh-keygen", "setpriv") if shutil.which(tool) is None]
    return f"missing on this machine: {', '.join(missing)}" if missing else ""


def disk(source: str, driver: str = "phy", format: str = "raw", target: str = "xvda") -> str:
    """A disk of a guest: a file, or with driver ``phy`` a block device as well, of dom0."""
    kind, key = ("block", "dev") if source.startswith("/dev/") else ("file", "file")
    return (
        f"<disk type='{kind}' device='disk'><driver name='{driver}' type='{format}'/>"
        f"<source {key}={quoteattr(source)}/><target dev='{target}' bus='xen'/></disk>"
    )


def guest_xml(name: str, devices: str, words: str = "", memory_mib: int = 128, more: str = "") -> str:
    """A paravirtual domain with the lab's guest; `words` are for `tests/lab/dom0/guest-init`."""
    return f"""\
<domain type='xen'>
  <name>{escape(name)}</name>
  <memory unit='MiB'>{memory_mib}</memory>
  <vcpu>1</vcpu>
  <os>
    <type arch='x86_64' machine='xenpv'>linux</type>
    <kernel>{KERNEL}</kernel>
    <initrd>{INITRD}</initrd>
    <cmdline>console=hvc0 quiet loglevel=0 {escape(words)}</cmdline>
  </os>
  <on_poweroff>destroy</on_poweroff><on_reboot>restart</on_reboot><on_crash>destroy</on_crash>
  <devices>{devices}<console type='pty'><target type='xen' port='0'/></console></devices>{more}
</domain>
"""


class XenHost:
    """One machine with Xen, in a ``with``; `directory` keeps what it says on its serial console."""

    def __init__(self, directory: str | Path, lab: str | Path | None = None) -> None:
        self.directory = Path(directory)
        self.lab = Path(lab) if lab else default_lab()
        self.serial = self.directory / "serial.log"
        self._machine: subprocess.Popen[bytes] | None = None
        self._private: tempfile.TemporaryDirectory[str] | None = None
        self._ssh: list[str] = []

    def __enter__(self) -> Self:
        try:
            self.open()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def open(self) -> None:
        """Boot, and wait until libvirt answers in dom0."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self.serial.write_bytes(b"")
        # The socket's name must be short, and the key is nobody else's business.
        self._private = tempfile.TemporaryDirectory(prefix="vmgahp-xen-")
        private = Path(self._private.name)
        port = free_port()
        self._machine = self._boot(port, self._make_key(private))
        self._wait("dom0", lambda: UP in self.serial.read_text(errors="replace"), BOOT_DEADLINE)
        # dom0 makes its own key at each start, and nothing that is sent is worth an impostor's while.
        options = {"StrictHostKeyChecking": "no", "UserKnownHostsFile": "/dev/null", "LogLevel": "ERROR"}
        options |= {"BatchMode": "yes", "ConnectTimeout": "20", "IdentitiesOnly": "yes"}
        options |= {"ControlPath": str(private / "ssh"), "IdentityFile": str(private / "key")}
        self._ssh = ["ssh", "-F", "none", "-p", str(port)]
        for name, value in options.items():
            self._ssh += ["-o", f"{name}={value}"]
        self._wait("the SSH server in dom0", self._connect, 120)
        self._wait("libvirt in dom0", lambda: self.virsh("version", check=False).returncode == 0, 120)

    def close(self) -> None:
        """End the machine at once, and with it all that runs or was written there."""
        if self._machine:
            self._machine.kill()
            self._machine.wait()
            self._machine = None
        if self._private:
            # The connection's own process has ended with the machine, or does so now.
            if self._ssh:
                subprocess.run([*self._ssh, "-O", "exit", "dom0"], capture_output=True, timeout=30)
            self._private.cleanup()
            self._private, self._ssh = None, []

    # ---- processes ------------------------------------------------------------------------------

    def command(
        self, argv: Sequence[str], user: str | None = None, cwd: str = "/", env: Mapping[str, str] | None = None
    ) -> list[str]:
        """The host's command line that runs `argv` in dom0, with a pipe for each of its standard streams.

        As root, or as `user`; of the environment it has what `environment` gives, and `env` over that. When the
        process here is killed, the one in dom0 sees the end of its input and continues.
        """
        entered = ["exec", "env", "-i", "--chdir", cwd]
        entered += [f"{name}={value}" for name, value in (self.environment() | dict(env or {})).items()]
        if user:
            entered += ["setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups", "--"]
        return [*self._ssh, "root@127.0.0.1", shlex.join([*entered, *argv])]

    def run(
        self,
        *argv: str,
        user: str | None = None,
        cwd: str = "/",
        env: Mapping[str, str] | None = None,
        input: str | None = None,
        check: bool = True,
        timeout: float = 120,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in dom0 to its end; `LabError` with its output when it fails."""
        done = subprocess.run(
            self.command(argv, user, cwd, env),
            input=input or "",
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
        )
        if check and done.returncode:
            output = (done.stdout + done.stderr).rstrip()
            raise LabError(f"{' '.join(argv)} in dom0: exit {done.returncode}\n{output}\n{self.diagnosis()}")
        return done

    def popen(
        self, *argv: str, user: str | None = None, cwd: str = "/", env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[bytes]:
        """Start a command in dom0, with pipes or files as the caller wants them."""
        return subprocess.Popen(self.command(argv, user, cwd, env), **options)

    def environment(self) -> dict[str, str]:
        """Nothing of the caller's environment: neither its settings nor its Python."""
        return {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8", "HOME": "/root"}

    # ---- files ----------------------------------------------------------------------------------

    def write(self, inside: str, data: bytes, owner: str = "root", mode: int = 0o644) -> None:
        """Make a file of dom0, in a directory that is there, or replace it."""
        script = 'umask 077; cat > "$1" && chown "$2" "$1" && chmod "$3" "$1"'
        command = self.command(["sh", "-c", script, "sh", inside, owner, f"{mode:o}"])
        done = subprocess.run(command, input=data, capture_output=True, timeout=300)
        if done.returncode:
            raise LabError(f"{inside} cannot be written in dom0: {done.stderr.decode(errors='replace')}")

    def read(self, inside: str) -> bytes:
        """What is in a file of dom0; `FileNotFoundError` where there is none."""
        script = 'if [ -e "$1" ]; then exec cat "$1"; else exit 44; fi'
        done = subprocess.run(
            self.command(["sh", "-c", script, "sh", inside]), stdin=subprocess.DEVNULL, capture_output=True, timeout=300
        )
        if done.returncode == 44:
            raise FileNotFoundError(inside)
        if done.returncode:
            raise LabError(f"{inside} cannot be read in dom0: {done.stderr.decode(errors='replace')}")
        return done.stdout

    def put(self, local: Path, inside: str, owner: str = "root", mode: int = 0o644) -> None:
        """Copy a file into dom0."""
        self.write(inside, local.read_bytes(), owner, mode)

    def get(self, inside: str, local: Path) -> Path:
        """Copy a file out of dom0."""
        local.write_bytes(self.read(inside))
        return local

    # ---- services -------------------------------------------------------------------------------

    def virsh(self, *argv: str, check: bool = True, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        return self.run("virsh", "-q", "-c", URI, *argv, check=check, timeout=timeout)

    def domains(self) -> list[str]:
        """The names of all guests, running or not."""
        said = self.virsh("list", "--all", "--name", check=False)
        if said.returncode:  # once ssh ended with its own 255 and no word, and the next command was as always
            said = self.virsh("list", "--all", "--name")
        return [name for name in said.stdout.split() if name != "Domain-0"]

    def console(self, name: str) -> str:
        """What the guests of this name have said on their consoles so far."""
        try:
            return self.read(f"{CONSOLES}/guest-{name}.log").decode("ascii", "replace")
        except FileNotFoundError:
            return ""

    def libvirt(self) -> Any:
        """A connection of the host's own libvirt to dom0's: a ``libvirt.virConnect``."""
        import libvirt

        assert self._private
        helper = Path(self._private.name) / "libvirt"
        command = self.command(["virt-ssh-helper", URI])
        helper.write_text(f"#!/bin/sh\nexec {shlex.join(command)}\n")
        helper.chmod(0o700)
        return libvirt.open(f"xen+ext:///system?command={helper}")

    def install(self, wheel: Path) -> None:
        """Put our package into dom0's /opt/vmgahp, over Debian's own modules of the rest."""
        inside = f"/tmp/{wheel.name}"
        self.put(wheel, inside)
        options = ["--quiet", "--no-index", "--no-deps", "--force-reinstall", "--disable-pip-version-check"]
        self.run("/opt/vmgahp/bin/python", "-m", "pip", "install", *options, inside, timeout=300)

    def wait_until(self, what: str, condition: Callable[[], T | None], timeout: float) -> T:
        """As `namespace.wait_until`, with dom0's logs in the error."""
        return self._wait(what, condition, timeout, interval=1)

    def diagnosis(self, lines: int = 30) -> str:
        """The ends of the logs that tell most, for a test that failed."""
        tail = self.serial.read_text(errors="replace").splitlines()[-lines:]
        shown = [f"---- the end of {self.serial} ----", *tail]
        if self._ssh and self._machine and self._machine.poll() is None:
            script = f"tail -n {lines} /var/log/libvirt/libvirtd.log /var/log/libvirt/libxl/libxl-driver.log"
            script += " /var/log/xen/xen-hotplug.log"
            try:
                done = subprocess.run(
                    [*self._ssh, "root@127.0.0.1", script], stdin=subprocess.DEVNULL, capture_output=True, timeout=30
                )
                shown.append(done.stdout.decode(errors="replace"))
            except subprocess.TimeoutExpired:
                shown.append("dom0 does not answer")
        return "\n".join(shown)

    # ---- the start ------------------------------------------------------------------------------

    def _make_key(self, private: Path) -> Path:
        """Make the key, and what dom0 reads as its second disk: the public half of it in a tar archive."""
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "vmgahp-lab", "-f", str(private / "key")]
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL)

        def of_root(member: tarfile.TarInfo) -> tarfile.TarInfo:
            member.uid = member.gid = 0
            member.mode = 0o600
            return member

        seed = private / "seed.tar"
        with tarfile.open(seed, "w") as archive:
            archive.add(private / "key.pub", "authorized_keys", filter=of_root)
        return seed

    def _boot(self, port: int, seed: Path) -> subprocess.Popen[bytes]:
        # The kernel ends the machine when this process ends, however that happens.
        command = ["setpriv", "--pdeathsig", "KILL", *QEMU]
        command += ["-serial", f"file:{self.serial}"]
        command += ["-drive", f"file={self.lab}/dom0.img,format=raw,if=virtio,snapshot=on"]
        command += ["-drive", f"file={seed},format=raw,if=virtio,readonly=on"]
        # Nothing in there reaches any network; this one port of loopback leads in.
        command += ["-netdev", f"user,id=net,restrict=on,hostfwd=tcp:127.0.0.1:{port}-:22"]
        command += ["-kernel", f"{self.lab}/xen", "-append", XEN_COMMAND_LINE]
        command += ["-initrd", f"{self.lab}/vmlinux {DOM0_COMMAND_LINE},{self.lab}/initrd"]
        with open(self.directory / "qemu.log", "wb") as log:
            # In TMPDIR QEMU keeps what is written to the disk: a file without a name.
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | {"TMPDIR": str(self.directory)},
            )

    def _connect(self) -> bool:
        """Open the connection that all commands share. It ends with the machine."""
        command = [*self._ssh, "-f", "-N", "-o", "ControlMaster=yes", "root@127.0.0.1"]
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        return subprocess.run(command, timeout=60, **streams).returncode == 0  # type: ignore[call-overload,no-any-return]

    def _wait(self, what: str, condition: Callable[[], T | None], timeout: float, interval: float = 0.3) -> T:
        def or_dead() -> T | None:
            if self._machine is None or self._machine.poll() is not None:
                said = (self.directory / "qemu.log").read_text(errors="replace")
                raise LabError(f"QEMU ended while waiting for {what}: {said}\n{self.diagnosis()}")
            return condition()

        try:
            return wait_until(what, or_dead, timeout, interval)
        except LabError as error:
            if "---- the end of" in str(error):
                raise
            raise LabError(f"{error}\n{self.diagnosis()}") from None


HELP = """\
This is dom0. Leave the shell, and all is gone: nothing of it is kept. To start a guest and see it count:

    virsh -c {uri} create /root/guest.xml
    tail -f {consoles}/guest-lab.log

The guest's disk is /root/guest.img, its kernel and initramfs are in /lab/guest.
"""


def main() -> int:
    """Boot it for a person: a shell in dom0 until that is left."""
    if reason := why_not():
        print(reason, file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="vmgahp-xen-") as directory:
        print("booting Xen and its dom0 (half a minute) ...", file=sys.stderr)
        with XenHost(directory) as host:
            host.run("truncate", "-s", "1M", "/root/guest.img")
            host.write("/root/guest.xml", guest_xml("lab", disk("/root/guest.img")).encode())
            print(HELP.format(consoles=CONSOLES, uri=URI), file=sys.stderr)
            return subprocess.run([*host._ssh, "-t", "root@127.0.0.1"]).returncode


if __name__ == "__main__":
    sys.exit(main())
