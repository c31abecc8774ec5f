"""The system calls that virtiofsd is refused in a directory that a guest mounts."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lab.programs import a_program
from vmgahp.drivers.libvirt.start import virtiofs
from vmgahp.host import proc
from vmgahp.host.job_user import Identity
from vmgahp.job.attributes import Share
from vmgahp.testing.contract import until

TRIES = """
import ctypes, os, socket, sys
from vmgahp.host import file_server
os.chdir(sys.argv[1])
file_server.restrict(ctypes.CDLL("libseccomp.so.2"))
libc = ctypes.CDLL(None, use_errno=True)
open("file", "w").close()
os.chmod("file", 0o700)
os.link("file", "twin")
os.mkdir("directory")
libc.setresuid(-2, 12345, 12345)
for name, attempt in {
    "symlink": lambda: os.symlink("/etc/passwd", "link"),
    "mkfifo": lambda: os.mkfifo("pipe"),
    "device": lambda: os.mknod("device", 0o60644, 8),
    "chmod": lambda: os.chmod("file", 0o4755),
    "chmod for the group": lambda: os.chmod("file", 0o2755),
    "fchmod": lambda: os.fchmod(os.open("file", os.O_RDWR), 0o6755),
    "open": lambda: os.open("new", os.O_CREAT | os.O_WRONLY, 0o4755),
}.items():
    try:
        attempt()
        print(name, "is done")
    except PermissionError:
        pass
for number in (425, 437, 452):
    if libc.syscall(number, -100, b"file", 0o4755, 0, 0) != -1 or ctypes.get_errno() not in (1, 38):
        print("call", number, "is done")
"""


def test_what_would_lead_out_of_a_directory_is_not_made(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", TRIES, tmp_path], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["directory", "file", "twin"]


@pytest.mark.qemu  # where user namespaces can be made, which is not so in a chroot
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_it_ends_with_its_server_until_qemu_has_connected_and_then_with_qemu(
    user: Identity, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although the job's user has stopped it; a thread of the server may end before the VM."""
    program = a_program(scratch / "virtiofsd", "exec sleep 1000")
    monkeypatch.setattr(virtiofs, "program", lambda: str(program))
    rooms = [scratch.parent / name for name in ("waits", "serves")]
    server = os.fork()
    if server == 0:
        try:
            for room in rooms:
                room.mkdir()
                virtiofs.begin(user, str(room), Share("a", "/usr", "", writable=False), (0, 0), 30)
            (scratch / "begun").touch()
            signal.pause()
        finally:
            os._exit(1)
    pids = []
    try:
        until((scratch / "begun").exists, "both are started")
        pids = waits, serves = [int((room / "pid").read_text()) for room in rooms]
        with socket.socket(socket.AF_UNIX) as qemu:
            qemu.connect(virtiofs.socket_in(str(rooms[1])))
            until(lambda: proc.name(serves) == "sleep", "virtiofsd serves")
        os.kill(waits, signal.SIGSTOP)
        os.kill(server, signal.SIGKILL)
        until(lambda: not proc.birth(waits), "the one that waits is ended")
        assert proc.birth(serves)
    finally:
        for pid in (server, *filter(proc.birth, pids)):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(server, 0)
