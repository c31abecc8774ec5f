"""The system calls that virtiofsd is refused in a directory that a guest mounts."""

import subprocess
import sys
from pathlib import Path

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
