"""The display of a job's guest: a tunnel to it, and a viewer that gets the password."""

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

from vmgahp.commands.queue import job_id
from vmgahp.commands.reach import ways
from vmgahp.errors import NO_JOBCLASSAD_INFO, ClientFault
from vmgahp.host.run import which
from vmgahp.text import escape

END_SECONDS = 5.0


def show(job: str) -> int:
    """Show the display until the viewer is closed; return the exit status. Raises `ClientFault`."""
    port, password = _where(job)
    viewer = next((name for name in ("remote-viewer", "vncviewer") if which(name)), "")
    with _tunnel(job, port) as here, tempfile.TemporaryDirectory(prefix="vmgahp-") as directory:
        if viewer == "remote-viewer":
            path = f"{directory}/display.vv"
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(f"[virt-viewer]\ntype=vnc\nhost=127.0.0.1\nport={here}\npassword={password}\n")
            return subprocess.run([viewer, path], check=False).returncode
        if viewer:
            told = dict(os.environ, VNC_PASSWORD=password)
            return subprocess.run([viewer, f"127.0.0.1::{here}"], env=told, check=False).returncode
        where = f"The display is at 127.0.0.1:{here} here, with the password {password}, until you press Enter."
        sys.stdout.write(where + "\n")
        sys.stdout.flush()
        sys.stdin.readline()
        return 0


def _where(job: str) -> tuple[int, str]:
    said = ways.read_file(job, "vm_vnc.json")
    match said:
        case {"port": int(port), "password": str(password)} if 0 < port < 1 << 16 and password.isprintable():
            return port, password
    raise ClientFault(NO_JOBCLASSAD_INFO, f"vm_vnc.json of job {job} names no display.", "see what is in it.")


@contextlib.contextmanager
def _tunnel(job: str, port: int) -> Iterator[int]:
    """Open a tunnel and yield its port on this machine's loopback address. Raises `ClientFault`."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        here = int(free.getsockname()[1])
    through = f"ssh -N -o ExitOnForwardFailure=yes -L 127.0.0.1:{here}:127.0.0.1:{port}"
    try:
        tunnel = subprocess.Popen(
            [ways.TO_NODE, "-ssh", through, job_id(job)], stdin=subprocess.DEVNULL, start_new_session=True
        )
    except OSError as error:
        problem = f"{ways.TO_NODE} cannot be run: {error.strerror}."
        raise ClientFault(NO_JOBCLASSAD_INFO, problem, "run this where HTCondor is.") from error
    try:
        _wait(tunnel, here)
        yield here
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(tunnel.pid, 15)
        try:
            tunnel.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(tunnel.pid, 9)
            tunnel.wait()


def _wait(tunnel: "subprocess.Popen[bytes]", here: int) -> None:
    end = time.monotonic() + ways.NODE_DEADLINE
    while tunnel.poll() is None and time.monotonic() < end:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", here), timeout=1):
            return
        time.sleep(0.1)
    raise ClientFault(
        NO_JOBCLASSAD_INFO, f"{escape(ways.TO_NODE)} has made no way to the display.", "see what it has said above."
    )
