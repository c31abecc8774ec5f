"""A real guest of a run job, by QEMU without libvirt, and the host's side of its ports."""

from __future__ import annotations

import socket
import subprocess
import time
from pathlib import Path

from tests.guest.support import Ran, RunJob, came_home

QEMU = "qemu-system-x86_64"


def run(job: RunJob, directory: Path, boots: list[str], seconds: float) -> Ran:
    """Start a guest as QEMU's words `boots` say, with a job's drive and ports, and wait until it is off."""
    (directory / "drive").write_bytes(job.drive())
    for name in ("out", "err", "outputs", "console"):
        (directory / name).touch()
    words = [QEMU, "-accel", "tcg", "-nodefaults", "-display", "none", "-no-reboot", *boots]
    words += ["-serial", f"file:{directory}/console", "-device", "virtio-serial"]
    words += ["-drive", f"if=virtio,format=raw,readonly=on,file={directory}/drive"]
    words += ["-chardev", f"socket,id=run,server=on,wait=off,path={directory}/run"]
    words += ["-device", "virtserialport,chardev=run,name=org.vmgahp.run"]
    for name in ("out", "err", "outputs"):
        words += ["-chardev", f"file,id={name},path={directory}/{name}"]
        words += ["-device", f"virtserialport,chardev={name},name=org.vmgahp.{name}"]
    deadline = time.monotonic() + seconds
    with subprocess.Popen(words, stdin=subprocess.DEVNULL) as qemu:
        try:
            said = _host(directory, qemu, deadline)
            status = qemu.wait(max(1, deadline - time.monotonic()))
        finally:
            qemu.kill()
    return Ran(
        said=list(dict.fromkeys(said)),
        sizes=[(directory / "outputs").stat().st_size],
        out=(directory / "out").read_text(),
        err=(directory / "err").read_text(),
        files=came_home(directory / "outputs"),
        console=(directory / "console").read_text(errors="replace"),
        status=status,
    )


def _host(directory: Path, qemu: subprocess.Popen[bytes], deadline: float) -> list[str]:
    said: list[str] = []
    with socket.socket(socket.AF_UNIX) as port:
        while True:
            try:
                port.connect(str(directory / "run"))
                break
            except OSError:
                if qemu.poll() is not None or time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
        rest = b""
        while True:
            port.settimeout(max(0.1, deadline - time.monotonic()))
            try:
                piece = port.recv(4096)
            except OSError:
                return said
            if not piece:
                return said
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                said.append(line.decode())
                if line.startswith(b"outputs "):
                    port.sendall(b"taken\n")
