"""Commands that look at a file system whose server is gone: they end, though their looks never do."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.peer import environment

FUSE = """\
import ctypes, os, struct, sys
device = os.open("/dev/fuse", os.O_RDWR)
options = f"fd={device},rootmode=40000,user_id=0,group_id=0"
if ctypes.CDLL(None).mount(b"far", sys.argv[1].encode(), b"fuse.far", 0, options.encode()):
    sys.exit("no mount")
unique = struct.unpack("=IIQ", os.read(device, 1 << 17)[:16])[2]
said = struct.pack("=IIIIHHIIHHI28x", 7, 31, 0, 0, 12, 10, 1 << 16, 1, 0, 0, 0)
os.write(device, struct.pack("=IiQ", 16 + len(said), 0, unique) + said)
print("ready", flush=True)
while True:
    os.read(device, 1 << 17)
"""
"""Takes every question and answers none: whoever asks cannot be killed while this runs (FUSE_INIT in linux/fuse.h)."""

PROBE = """\
import sys
import vmgahp.cli as cli, vmgahp.daemon.probe as probe
probe.DEADLINE = 1.0
sys.exit(cli.main(["vmgahp", "probe", "--type", "simulated"]))
"""


@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
def test_a_file_system_that_lets_no_process_go_keeps_nobody_waiting(tmp_path: Path, scratch: Path) -> None:
    with subprocess.Popen(
        ["unshare", "--mount", sys.executable, "-c", FUSE, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stdout
            assert server.stdout.readline() == "ready\n"
            asking = subprocess.Popen(
                ["nsenter", f"--target={server.pid}", "--mount", sys.executable, "-c", PROBE],
                env=environment("simulated", scratch, EXECUTE=tmp_path / "execute"),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            out, said = asking.communicate(timeout=60)
            assert (asking.returncode, out) == (1, ""), said
            assert "had not ended" in said
        finally:
            server.kill()
