"""The demonstration behind scripts/demo: one job, from the greeting to the guest's own power-off.

It plays condor_starter's part: makes a scratch directory with the job's disk in it, starts the daemon as
the starter does, and shows the conversation (``>`` to the daemon, ``<`` from it) and the guest's console
(``|``) as they happen. Anything that is not as it should be ends it with the daemon's log and status 1.
"""

import argparse
import os
import pwd
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests import jobs
from tests.client import Client
from tests.lab.guest import BANNER, DONE, counts, make_guest, read_count
from tests.lab.namespace import REPOSITORY
from tests.peer import environment
from vmgahp.protocol.client import ProtocolError

SERVER = Path(sys.prefix) / "bin/condor_vm-gahp"
LEGEND = "seconds, then: > what HTCondor would say, < what the daemon answers, | the guest's console, # what happens"
PROGRAM = ["run", "--image", "catalog:debian-12", "--memory", "1G", "--dry-run", "--", "python3", "-c", "print(6 * 7)"]
COLORS = {">": "36", "<": "32", "|": "33", "#": "2", "!": "31"}


class DemoError(Exception):
    """Something is not as it should be."""


class Screen:
    """What the person sees: a mark, the seconds since the start, and the line."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.color = sys.stdout.isatty()

    def show(self, mark: str, line: str) -> None:
        text = f"{time.monotonic() - self.began:6.1f}  {mark} {line}"
        if self.color:
            text = f"\033[{COLORS[mark]}m{text}\033[0m"
        print(text, flush=True)


class Console:
    """The guest's console file, shown line by line as it grows."""

    def __init__(self, path: Path, screen: Screen) -> None:
        self.path = path
        self.screen = screen
        self.text = b""
        self.shown = 0

    def follow(self) -> None:
        if not self.path.exists():
            return
        self.text = self.path.read_bytes()
        while (end := self.text.find(b"\n", self.shown)) >= 0:
            self.screen.show("|", self.text[self.shown : end].decode("ascii", "replace").rstrip())
            self.shown = end + 1


def job_user() -> tuple[int, int] | None:
    """Who the job belongs to, when root starts the daemon: the user behind sudo, or nobody."""
    if os.geteuid() != 0:
        return None
    if os.environ.get("SUDO_UID", "0") != "0":
        return int(os.environ["SUDO_UID"]), int(os.environ["SUDO_GID"])
    nobody = pwd.getpwnam("nobody")
    return nobody.pw_uid, nobody.pw_gid


def job_ad(scratch: Path) -> list[str]:
    disk = '"guest.img:hda:w:raw"'
    return jobs.lines(scratch, JobVM_VCPUS=1, JobVMNetworking="false", VMPARAM_vm_Disk=disk, ClusterId=os.getpid())


def accelerator(pid: int) -> str:
    """How the QEMU process `pid` runs its guest, by its own command line."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace")
    except OSError as error:
        raise DemoError(f"GETPID answered {pid}, which is no process: {error}") from None
    if "qemu" not in command:
        raise DemoError(f"GETPID answered {pid}, which is not QEMU but: {command[:80]}")
    return "KVM" if "accel=kvm" in command or "enable-kvm" in command else "emulation (TCG)"


def converse(client: Client, scratch: Path, console: Console, screen: Screen, seconds: int) -> str:
    """The whole conversation of a job that ends by itself; says how the guest was run."""
    client.greeting()
    for request in ("COMMANDS", "SUPPORT_VMS", "ASYNC_MODE_ON"):
        if not client.ask(request).startswith("S"):
            raise DemoError(f"{request} was refused")
    client.send_ad(*job_ad(scratch))
    vm = client.call("START", "kvm", timeout=60)
    how = accelerator(int(client.call("GETPID", vm)))
    screen.show("#", f"the guest is up, by {how}, and will power itself off after {seconds} s")
    seen: list[str] = []
    deadline = time.monotonic() + seconds + 30
    while not seen or seen[-1] != "Stopped":
        if time.monotonic() > deadline:
            raise DemoError(f"the guest should have powered itself off; STATUS said {', '.join(seen)}")
        seen.append(client.call("STATUS", vm).split("STATUS=", 1)[-1].split()[0])
        # As long as the guest runs, its console is more interesting than the next status.
        until = time.monotonic() + (1.5 if seen[-1] == "Running" else 0)
        while time.monotonic() < until:
            console.follow()
            time.sleep(0.05)
    if "Running" not in seen:
        raise DemoError("STATUS never said Running")
    console.follow()
    client.quit()
    return how


def check(scratch: Path, console: Console, seconds: int) -> None:
    """What is left when all is over: a whole console and a changed disk."""
    console.follow()
    text = console.text.decode("ascii", "replace")
    if BANNER not in text or DONE not in text or counts(text) != list(range(1, seconds + 1)):
        raise DemoError(f"{console.path.name} is not the guest's whole console: {text!r}")
    count = read_count(scratch / "guest.img")
    if count != seconds:
        raise DemoError(f"the guest counted to {seconds}, but its disk says {count}")


def demonstrate(directory: Path, seconds: int, screen: Screen) -> str:
    """Everything, in an empty directory; the closing line."""
    scratch = directory / "scratch"
    scratch.mkdir()
    make_guest(scratch / "guest.img", seconds=seconds)
    if user := job_user():
        for path in (scratch, scratch / "guest.img"):
            os.chown(path, *user)
    console = Console(scratch / "vm_console.log", screen)
    with open(directory / "daemon.log", "w") as log:
        command = [str(SERVER), "-f", "-t", "-M", "3"]
        screen.show("#", LEGEND)
        screen.show("#", "starting " + " ".join([str(SERVER.relative_to(REPOSITORY)), *command[1:]]))
        environ = environment("kvm", scratch, VM_TYPE="kvm", VM_ALLOW_EMULATION=True, VM_REPORT_PID=True)
        client = Client(command, environ, scratch, log, screen.show, console.follow)
        try:
            how = converse(client, scratch, console, screen, seconds)
        finally:
            if client.process.poll() is None:
                client.finish()
    check(scratch, console, seconds)
    return (
        f"Seen: a guest booted by {how}, counted to {seconds} on its console and its disk, and powered itself"
        f" off, which the daemon reported as STATUS=Stopped; {time.monotonic() - screen.began:.1f} s in all."
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/demo", description="Boot a real guest through the protocol.")
    parser.add_argument("--seconds", type=int, default=5, help="how long the guest counts (default: 5)")
    seconds = parser.parse_args().seconds
    screen = Screen()
    directory = Path(tempfile.mkdtemp(prefix="vmgahp-demo-"))
    directory.chmod(0o755)  # QEMU runs as a user of its own and has to reach the disk
    try:
        closing = demonstrate(directory, seconds, screen)
    except (DemoError, ProtocolError, OSError) as error:
        screen.show("!", str(error))
        log = directory / "daemon.log"
        for line in log.read_text(errors="replace").splitlines()[-60:] if log.exists() else []:
            screen.show("#", line)
        return 1
    except KeyboardInterrupt:
        screen.show("!", "interrupted")
        return 130
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    screen.show("#", closing)
    screen.show("#", f"A program in a guest as a job, by vmgahp {shlex.join(PROGRAM)}")
    return subprocess.run([SERVER.with_name("vmgahp"), *PROGRAM], check=False, timeout=60).returncode


if __name__ == "__main__":
    sys.exit(main())
