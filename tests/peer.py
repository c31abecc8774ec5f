"""This clone's daemon for tests, at the other end of the pipes of `vmgahp.protocol.client`."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from tests.client import Client
from vmgahp.cli import KILL, PROBE, SERVE
from vmgahp.protocol.client import DEADLINE
from vmgahp.protocol.requests import PREFIX, READY

DAEMON = (sys.executable, "-P", "-m", "vmgahp")
MAIN = "import sys; from vmgahp.cli import main; sys.exit(main(sys.argv))"
VMGAHP = (sys.executable, "-P", "-c", MAIN)
"""The program ``vmgahp``."""


def environment(vm_type: str, scratch: Path, **settings: object) -> dict[str, str]:
    """What condor_starter sets, without any HTCondor or settings of this machine."""
    environ = {name: value for name, value in os.environ.items() if not name.upper().startswith("_CONDOR_")}
    empty = scratch.parent / f"{scratch.name}.conf"
    empty.touch()
    environ |= {
        "VMGAHP_CONFIG": str(empty), "VMGAHP_VMTYPE": vm_type, "VMGAHP_WORKING_DIR": str(scratch),
        "VMGAHP_USER_UID": str(scratch.stat().st_uid or 54321), "VMGAHP_USER_GID": str(scratch.stat().st_gid or 54321),
        "_CONDOR_VM_MEMORY": "1024",
    }  # fmt: skip
    return environ | {f"_CONDOR_{name}": str(value) for name, value in settings.items()}


class Peer(Client):
    """Starts the daemon and talks to it as condor_starter does."""

    def __init__(self, environ: Mapping[str, str], *, cwd: Path | None = None, through: Sequence[str] = ()) -> None:
        """`through` is a command that becomes the daemon, which its last arguments are."""
        command = [*through, *DAEMON, "-f", "-t", "-M", str(SERVE)]
        super().__init__(command, environ, cwd or environ["VMGAHP_WORKING_DIR"])

    def line(self, timeout: float = DEADLINE) -> str:
        """The next line that is no R."""
        while (line := self.receive(timeout).line) == READY:
            pass
        return line

    def request(self, operation: str, argument: object) -> int:
        """Send a request that has to be accepted, without waiting for its result: its request id."""
        number = self.requests.last_id + 1
        assert self.ask(f"{PREFIX}{operation} {number} {argument}") == "S"
        return number

    def results(self) -> list[str]:
        """RESULTS, which also re-arms the R: the result lines as they are."""
        accepted, count = self.ask("RESULTS").split(" ")
        assert accepted == "S"
        return [self.line() for _ in range(int(count))]


def daemon(environ: Mapping[str, str], mode: int, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the daemon in one of the modes that end by themselves."""
    assert mode in (PROBE, KILL)
    command, scratch = [*DAEMON, "-f", "-t", "-M", str(mode), *words], environ["VMGAHP_WORKING_DIR"]
    return subprocess.run(command, cwd=scratch, env=environ, capture_output=True, text=True, timeout=DEADLINE)


def kill_guardian(mark: str) -> None:
    """Kill the guardians that have this in their words or environment: a VM's UUID, a directory."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (process / "cmdline").read_bytes()
            if b"vmgahp-guardian" in words and mark.encode() in words + (process / "environ").read_bytes():
                os.kill(int(process.name), signal.SIGKILL)
