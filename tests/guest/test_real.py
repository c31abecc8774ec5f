"""The guest's scripts in a real guest of busybox, and the agent: QEMU without libvirt, and the host's side."""

import os
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.guest.support import SCRIPTS, Ran, RunJob, collect
from tests.lab import linux_guest

pytestmark = pytest.mark.qemu


_INIT = f"""{linux_guest.BEGIN}
export PATH=/bin
mkdir -p /run /tmp /etc /var/lib
mount -t tmpfs run /run
mount -t tmpfs tmp /tmp
cat >/agent <<'THE AGENT'
{(SCRIPTS / "agent").read_text()}
THE AGENT
sh /agent start
echo 'the agent has left'
poweroff -f
"""


@pytest.mark.skipif(linux_guest.why_not() != "", reason=linux_guest.why_not())
def test_busybox_with_the_agent(tmp_path: Path) -> None:
    linux_guest.make(tmp_path, init=_INIT)
    command = "cat in; id -u; echo fine > 'a b'; dd if=/dev/zero of=big bs=1k count=3000 2>/dev/null; kill -9 $$"
    job = RunJob(command, {"in": b"given\n"}, settings={"RUN_BOOT": "ready"})
    boots = ["-m", str(linux_guest.MEMORY_MIB), "-kernel", str(tmp_path / linux_guest.KERNEL)]
    boots += ["-initrd", str(tmp_path / linux_guest.INITRD), "-append", "console=ttyS0 quiet loglevel=0 panic=-1"]
    ran = run(job, tmp_path, boots, 250)
    assert ran.said == ["hello 1", "inputs", "started", "ended signal 9", f"outputs {ran.sizes[0]}", "off"]
    assert ran.out == "given\n31415\n"
    assert ran.files == {"a b": b"fine\n", "big": bytes(3_072_000)}
    assert ran.status == 0


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
    sizes = [(directory / "outputs").stat().st_size]
    console = (directory / "console").read_text(errors="replace")
    return collect(directory, said, sizes=sizes, console=console, status=status)


def _host(directory: Path, qemu: subprocess.Popen[bytes], deadline: float) -> list[str]:
    said: list[str] = []
    with socket.socket(socket.AF_UNIX) as port:
        while problem := port.connect_ex(str(directory / "run")):
            assert qemu.poll() is None, os.strerror(problem)
            assert time.monotonic() < deadline, os.strerror(problem)
            time.sleep(0.05)
        port.settimeout(max(0.1, deadline - time.monotonic()))
        with suppress(OSError), port.makefile("rb") as lines:
            for line in lines:
                said.append(line.decode().removesuffix("\n"))
                if line.startswith(b"outputs "):
                    port.sendall(b"taken\n")
    return said
