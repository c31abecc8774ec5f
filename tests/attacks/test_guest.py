"""Attacks from within a guest: what it prints, what it says of its end, and how it ends."""

import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import time
from pathlib import Path

from tests.attacks.ground import CANARIES, SECRET, STRANGER_UID
from tests.attacks.site import LOGS, Site
from tests.attacks.support import BOTH, Mode, Must, Who, attack, each
from tests.conftest import JOB_UID
from tests.faults.host import until
from tests.lab import linux_guest
from tests.lab.guest import growing_sector, panicking_sector
from vmgahp.job.exit_code import MARKER


def _printing(text: bytes) -> bytes:
    """A boot sector that prints a text again and again, as fast as the port takes it, and never ends."""
    code = bytearray.fromhex("FA31C08ED88EC08ED0BC007CFB")  # no interrupts, segments 0, a stack below the code
    start = 0x7C00 + len(code)
    body = bytearray.fromhex("BE0000 AC 84C0 7400 88C4 BAFD03 EC A820 74FB 88E0 BAF803 EE EB00")
    body[7] = -8 & 0xFF  # the zero at the end: from the start
    body[-1] = 3 - len(body) & 0xFF  # the next byte
    body[1:3] = struct.pack("<H", start + len(body))
    made = bytes(code + body) + text + b"\0"
    assert len(made) <= 510
    return made.ljust(510, b"\0") + b"\x55\xaa"


TEXTS: dict[str, bytes] = {
    "a flood without line ends": b"x" * 200,
    "a flood of line ends": b"\r\n" * 100,
    "escape sequences": b"\x1b[2J\x1b]0;owned\x07\x1b[31m\x9b5n\x1bP$q\x1b\\\x1b[6n\r\n",
    "no UTF-8": bytes(range(128, 256)),
    "exit records": (f"{MARKER}0\r\n" * 8 + f"{MARKER}-1\r\n{MARKER}999999999999\r\n").encode(),
    "an exit record without an end": MARKER.encode() + b"9" * 300,
    "words of the protocol": b"R\r\nS 1\r\n1 0 NULL\r\nCONDOR_VM_STOP 1 1\r\n",
    "words of libvirt and QEMU": b"qemu-system-x86_64: terminating\r\nerror: internal error\r\n",
    "ClassAd lines": b'HasVM = False\r\nExitCode = 0\r\nClaimId = "x"\r\n',
}
"""What a guest prints for ever."""


def boots(site: Site, sector: bytes) -> None:
    """A disk that boots this."""
    site.plant("guest.img", sector.ljust(1 << 20, b"\0"))


@attack(Who.GUEST, Must.RUN, *BOTH, times=len(TEXTS), daily=True)
def console(site: Site) -> None:
    """Print each kind of text as fast as it can."""
    site.settings = {"VM_CONSOLE_LOG_MAX": "64 Kb"}
    for what, text in TEXTS.items():
        boots(site, _printing(text))
        site.done("START")
        log = site.path("vm_console.log")
        assert until(lambda log=log: log.exists() and log.stat().st_size > 2000, 45), (
            f"{what}: the guest prints nothing"
        )  # type: ignore[misc]
        site.ask("STATUS")
        site.stop()
        if log.stat().st_size > 70_000:
            site.breach(f"{what}: vm_console.log has {log.stat().st_size} bytes")
        found = json.loads(site.path("vm_exit.json").read_text())
        if not isinstance(found, dict) or found.get("exit_code") not in (None, *range(256)):
            site.breach(f"{what}: {found}")
    daemon_log = site.daemon.log.read_bytes()
    if b"\x1b" in daemon_log or b"\x9b" in daemon_log:
        site.breach("the daemon's log has escape sequences of the guest's")


@attack(Who.GUEST, Must.RUN, *BOTH)
def panics(site: Site) -> None:
    """Panic by the device at once, and hundreds of times."""
    boots(site, panicking_sector())
    site.done("START")
    for _ in range(5):
        site.ask("STATUS")


MUCH = 512
"""MiB that a guest writes, and does not get done."""


@attack(Who.GUEST, Must.RUN, *BOTH, times=2)
def fills(site: Site) -> None:
    """Write more than the job has asked for, and into what the machine keeps free."""
    for asked, settings in ((2 << 10, {}), (1 << 30, {"RESERVED_DISK": 1 << 30, "VM_IO_ERROR_TIMEOUT": 1})):
        site.settings = dict(settings)
        boots(site, growing_sector(MUCH))
        os.truncate(site.path("guest.img"), 2 * MUCH << 20)
        site.start(RequestDisk=asked)
        if not until(lambda: site.name not in site.ground.domains(), 45):
            site.breach("it writes on")
        site.ask("STATUS")
        occupied = site.path("guest.img").stat().st_blocks >> 11
        if occupied > MUCH // 2:
            site.breach(f"its disk occupies {occupied} MiB")
        site.restart()


@attack(Who.GUEST, Must.RUN, *BOTH, times=3)
def deaf(site: Site) -> None:
    """Ignore the power button, during STOP, SUSPEND and QUIT."""
    site.settings = {"VM_STOP_TIMEOUT": 1}
    site.guest()
    site.done("START", "SUSPEND", "RESUME", "STOP")
    site.vm = ""
    site.done("START", "SOFT_SUSPEND", "STOP")
    site.vm = ""
    site.done("START")


MUTE = """#!/bin/sh
exec 3<>/dev/virtio-ports/org.qemu.guest_agent.0
echo "mute now"
while true; do read -r line <&3 && echo "asked" || sleep 1; done
"""


@attack(Who.GUEST, Must.RUN, *BOTH)
def mute_agent(site: Site) -> None:
    """Open the port of the guest agent and never answer, during every operation."""
    assert not linux_guest.why_not(), linux_guest.why_not()
    site.settings = {"VM_STOP_TIMEOUT": 1}
    site.guest()
    site.plant("user-data", MUTE.encode())
    for path in linux_guest.make(site.directory):
        site.own(path)
    lines = (
        *('VMPARAM_Libvirt_XML = "domain.xml"', 'VMPARAM_vm_User_Data = "user-data"'),
        'VMPARAM_vm_Disk = "guest.img:vda:w:raw"',
    )
    site.start(*lines, JobVMMemory=linux_guest.MEMORY_MIB, VMPARAM_vm_Disk=None)
    assert until(lambda: "mute now" in site.console(), 90), site.console()
    site.done("STATUS", "SOFT_SUSPEND", "RESUME", "STATUS")
    assert until(lambda: "asked" in site.console(), 90), site.console()
    site.done("SUSPEND", "RESUME", "STATUS", "CHECKPOINT", "RESUME", "STATUS")
    site.done("STOP")
    site.vm = ""


@attack(Who.GUEST, Must.SURVIVE, *BOTH, times=3)
def dies_at_once(site: Site) -> None:
    """End in the first instruction: triple fault, power off, reset for ever."""
    for code in ("0F0B", "BA0406B80020EF", "EAF0FF00F0"):  # no such instruction; power off; the reset vector
        boots(site, bytes.fromhex(code).ljust(510, b"\xf4") + b"\x55\xaa")
        site.start()
        if site.vm:
            site.ask("STATUS")
        site.stop()


@attack(Who.OTHER, Must.SURVIVE, *BOTH, times=3)
def killed(site: Site) -> None:
    """Stop and kill what the job's uid may while the guest runs, is saved and is restored."""
    site.guest()
    for operation in ("STATUS", "SUSPEND", "CHECKPOINT"):
        site.done("START")
        site.as_user("/bin/sh", "-c", f"kill -{signal.SIGSTOP} -1; kill -{signal.SIGKILL} -1", check=False)
        site.ask(operation)
        if operation == "SUSPEND":
            site.ask("RESUME")
        site.stop()
        for path in site.directory.glob("vm_checkpoint*"):
            path.unlink()
    site.start()


@attack(Who.USER, Must.RUN, *BOTH, times=4)
def files_replaced(site: Site) -> None:
    """Make the console, the exit file and the figures links to files of others while the guest prints."""
    for name in ("vm_console.log", "vm_exit.json", "vm_metrics.jsonl", "vm_error.txt"):
        boots(site, _printing(b"printed\r\n"))
        site.done("START")
        until(lambda: bool(site.console()), 45)
        site.path(name).unlink(missing_ok=True)
        site.link(name, CANARIES / "root")
        site.ask("STATUS")
        site.ask("SOFT_SUSPEND")
        site.ask("RESUME")
        site.stop()
        site.look_at_the_machine()
        site.path(name).unlink(missing_ok=True)
    site.start()


@attack(Who.OTHER, Must.RUN, *BOTH, times=2)
def display(site: Site) -> None:
    """Read the display's password as another user, and ask the VNC server without one."""
    site.guest()
    site.start("JobVMVNCConsole = true")
    status = site.path("vm_vnc.json").stat()
    if status.st_mode & 0o077:
        site.breach(f"vm_vnc.json has the mode {status.st_mode:o}")
    said = json.loads(site.path("vm_vnc.json").read_text())
    if said["host"] != "127.0.0.1" or len(said["password"]) < 8:
        site.breach("the display is open")
    for entry in site.ground.processes().values():
        if any(said["password"] in word for word in entry):
            site.breach("the password is in a command line")
    if said["password"] in site.daemon.log.read_text(errors="replace"):
        site.breach("the password is in the log")


@attack(Who.OTHER, Must.RUN, *BOTH)
def of_a_running_vm(site: Site) -> None:
    """Connect to every socket and open every file of a VM outside of its directory, as another user."""
    site.guest()
    site.start("JobVMVNCConsole = true", "VMPARAM_vm_Exit_Port = true", "VMPARAM_vm_TPM = false")
    places = (*LOGS, "/var/lib/libvirt/qemu")
    paths = [path for place in places for path in Path(place).rglob(f"*{site.name}*") if not path.is_dir()]
    paths += [path for path in Path("/run/vmgahp").rglob("*") if not path.is_dir()]
    paths = [path for path in paths if path.suffix != ".pid"]
    assert any(path.is_socket() for path in paths), paths
    mine = [path for path in site.directory.iterdir() if path.name in ("vm_vnc.json", "vm_suspend.mem")]
    found = site.outer / "found"
    found.touch()
    found.chmod(0o666)

    def open_all() -> None:
        with open(found, "w") as told:
            for path in (*paths, *mine):
                try:
                    if path.is_socket():
                        with socket.socket(socket.AF_UNIX) as asked:
                            asked.connect(str(path))
                    else:
                        path.read_bytes()
                except OSError:
                    continue
                print(path, file=told)
            print("done", file=told)
        signal.pause()

    with site.beside(open_all, STRANGER_UID):
        assert until(lambda: "done\n" in found.read_text(), 45)
    for path in found.read_text().splitlines()[:-1]:
        site.breach(f"another user gets at {path}")


@attack(Who.USER, Must.SURVIVE, *BOTH, times=6)
def snooping(site: Site) -> None:
    """Read what the job's user can of every process while jobs start: memory, environment, files."""
    site.guest("guest.qcow2", format="qcow2")
    site.plant("user.yaml", b"#cloud-config\n")
    found = site.outer / "found"
    found.touch()
    found.chmod(0o666)
    mark = SECRET.encode()
    base = site.ground.processes()

    def read(pid: str) -> bytes:
        text = b""
        for name in ("environ", "cmdline"):
            with contextlib.suppress(OSError):
                text += Path("/proc", pid, name).read_bytes()
        with contextlib.suppress(OSError), open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb") as memory:
            for line in maps:
                first, last = (int(number, 16) for number in line.split(" ")[0].split("-"))
                if " rw" in line and last - first < 1 << 26:
                    memory.seek(first)
                    text += memory.read(last - first)
        return text

    def snoop() -> None:
        ours = {str(os.getpid()), *map(str, base)}
        while os.getppid() != 1:
            for entry in os.listdir("/proc"):
                if entry.isdigit() and entry not in ours and mark in read(entry):
                    with contextlib.suppress(OSError), open(found, "a") as told:
                        print(f"{entry} {Path('/proc', entry, 'cmdline').read_bytes()!r}", file=told)
            time.sleep(0.001)

    with site.beside(snoop):
        with subprocess.Popen(
            ["sleep", "60"], user=JOB_UID, group=JOB_UID, extra_groups=(), env={"SEEN": SECRET}
        ) as seen:
            assert until(lambda: bool(found.read_text()), 45), "it sees nothing at all"
            seen.kill()
        found.write_text("")
        for _ in range(6):
            site.start('VMPARAM_vm_User_Data = "user.yaml"', VMPARAM_vm_Disk='"guest.qcow2:hda:w:qcow2"')
            site.stop()
    if said := found.read_text():
        site.breach(f"a private attribute is in what the job's user can read of processes: {said[:500]}")


@attack(Who.USER, Must.HOLD, Mode.NONE, times=4)
def user_networking(site: Site) -> None:
    """Ask for user networking, which reaches the machine's loopback, where the machine does not allow it."""
    site.guest()
    site.settings = {"VM_NETWORKING": True, "VM_NETWORKING_TYPE": "nat"}
    for more in (
        ('JobVMNetworkingType = "user"',),
        ('JobVMNetworkingType = "USER"',),
        ('VMPARAM_vm_NICs = "user"',),
        ('VM_ATTR_NICs = "nat,user"',),
    ):
        site.start("JobVMNetworking = true", *more)
        if site.vm:
            site.breach(f"user networking by {more}")
            site.stop()


test_nothing_comes_of_it = each(__name__)
