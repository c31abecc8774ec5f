"""A machine for the guest's scripts, made of a namespace: ports, a drive, a poweroff; and the host's side of the ports.

`python3 machine.py prepare SHELL` once in a namespace, whose /bin/sh and tools become those of the shell; then
`python3 machine.py run PLAN` for each job, which prints as JSON what the guest has said. It needs nothing but Python.
"""

import contextlib
import json
import os
import pty
import shutil
import subprocess
import sys
import threading
import tty
from pathlib import Path

PORTS = Path("/dev/virtio-ports")
DRIVE = Path("/dev/vdz")
TOOLS = Path("/tools")
HURRIED = 'sleep() { echo "$1" >>%s; }\n'
"""The first line of the agent of a job that is in a hurry: to sleep takes no time, and is counted."""


def prepare(shell: str) -> None:
    """The machine: a /dev and a /sys/class of its own, and the tools of the shell."""
    command = (
        "mkdir /dev.new && mount -t tmpfs -o mode=755 dev /dev.new && mkdir /dev.new/pts /dev.new/virtio-ports &&"
        "for name in null zero full random urandom tty; do cp -a /dev/$name /dev.new/; done &&"
        "mount -t devpts -o newinstance,ptmxmode=666 devpts /dev.new/pts && ln -s pts/ptmx /dev.new/ptmx &&"
        "ln -s /proc/self/fd /dev.new/fd && ln -s fd/1 /dev.new/stdout && ln -s fd/2 /dev.new/stderr &&"
        "mount --move /dev.new /dev && mount -t tmpfs class /sys/class && mkdir -p /sys/class/block/vdz"
    )
    subprocess.run(["/bin/sh", "-c", command], check=True)
    TOOLS.mkdir()
    if shell == "busybox":
        subprocess.run(["/bin/busybox", "--install", "-s", TOOLS], check=True)
    found = "/bin/busybox" if shell == "busybox" else shutil.which(shell)
    assert found
    for name in ("poweroff", "systemctl", "shutdown", "halt", "modprobe"):
        (TOOLS / name).unlink(missing_ok=True)
        (TOOLS / name).write_text("#!/bin/sh\nexit 1\n")
        (TOOLS / name).chmod(0o755)
    os.symlink(found, "/usr/bin/sh.new")
    os.rename("/usr/bin/sh.new", "/usr/bin/sh")


def running() -> list[str]:
    """The command lines of all that runs."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found.append(file.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return found


def run(plan: dict[str, object]) -> dict[str, object]:
    """One job, from the agent to the poweroff."""
    work = Path(str(plan["directory"]))
    shutil.rmtree("/run/vmgahp-run", ignore_errors=True)
    shutil.copy(work / "drive", DRIVE)
    Path("/sys/class/block/vdz/size").write_text(f"{plan.get('sectors') or DRIVE.stat().st_size // 512}\n")
    master, slave = pty.openpty()
    tty.setraw(slave)
    for name in ("out", "err", "outputs"):
        (PORTS / f"org.vmgahp.{name}").unlink(missing_ok=True)
        (PORTS / f"org.vmgahp.{name}").symlink_to(work / name)
        (work / name).touch()
    control = PORTS / "org.vmgahp.run"
    control.unlink(missing_ok=True)
    control.symlink_to(os.ttyname(slave))
    said: list[str] = []
    answers = list(plan.get("answers") or ["taken"])  # type: ignore[call-overload]
    sizes: list[int] = []
    left: list[str] = []

    def listen() -> None:
        with open(master, "rb", buffering=0) as port:
            rest = b""
            while piece := port.read(4096):
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    text = line.decode()
                    if text == "the end":
                        return
                    said.append(text)
                    if text.startswith(("off", "failed ")):
                        left.extend(running())
                        guest.kill()  # all of its namespace goes with it
                    if text.startswith("outputs ") and answers:
                        sizes.append((work / "outputs").stat().st_size)
                        os.write(master, f"{answers.pop(0)}\n".encode())

    agent, slept = str(plan["agent"]), work / "slept"
    slept.touch()
    if plan.get("hurried"):
        hurried = work / "agent"
        hurried.write_text(HURRIED % slept + Path(agent).read_text())
        agent = str(hurried)
    path = str(TOOLS) if plan["shell"] == "busybox" else f"{TOOLS}:/usr/sbin:/usr/bin:/sbin:/bin"
    init = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "bash", "-c", '"$@"; exit $?', "init"]
    guest = subprocess.Popen(
        [*init, "env", f"PATH={path}", "/bin/sh", agent, *plan.get("arguments", [])],  # type: ignore[misc]
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    listener = threading.Thread(target=listen)
    listener.start()
    try:
        console, _ = guest.communicate(timeout=90)
    finally:
        guest.kill()
    os.write(slave, b"the end\n")
    listener.join()
    os.close(slave)
    return {
        "said": said, "sizes": sizes, "left": left, "console": console, "status": guest.returncode,
        "slept": sum(map(int, slept.read_text().split())),
    }  # fmt: skip


if __name__ == "__main__":
    if sys.argv[1] == "prepare":
        prepare(sys.argv[2])
    else:
        print(json.dumps(run(json.loads(Path(sys.argv[2]).read_text()))))
