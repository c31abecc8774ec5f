"""An HTCondor of two scripts, and a job ad beside its disk: what the tests of the doctor look at."""

import os
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import jobs
from tests.commands.support import absent
from tests.lab.programs import a_program
from vmgahp import __version__
from vmgahp.commands import doctor
from vmgahp.commands.doctor import dry_run
from vmgahp.commands.doctor.context import Context
from vmgahp.daemon import probe
from vmgahp.findings import Finding

as_root = pytest.mark.skipif(os.getuid() != 0, reason="needs root")

CONFIG_VAL = """\
import os, sys
values = dict(line.rstrip("\\n").split(" = ", 1) for line in open({file!r}))
words = sys.argv[1:]
assert words[:2] == ["-subsystem", "VM_GAHP"], words
if words[2:] == ["-dump", "-verbose"]:
    print("# Configuration from machine: lab")
    for number, (name, value) in enumerate(values.items(), 1):
        print(f"{{name}} = {{value}}\\n # at: /etc/condor/condor_config, line {{number}}\\n # expanded: {{value}}")
    sys.exit()
for name in words[2:]:
    if name in values:
        print(values[name])
    else:
        print("Not defined:", name, file=sys.stderr)
"""

STATUS = """\
import sys
words = sys.argv[1:]
assert words[0] == "-pool" and words[1] == "<127.0.0.1:9618?sock=startd>", words
sys.stdout.write(open({file!r}).read())
"""

SERVER = """\
#!/bin/sh
case "$*" in
-version) echo "vmgahp {version} (VM GAHP protocol 0.0.1)" ;;
*) echo 'VM_Type = "simulated"' ;;
esac
"""

AD = """\
HasVM = true
Name = "slot1@lab"
PartitionableSlot = true
VM_AvailNum = 10000
VM_Memory = 64
VM_Type = "simulated"
"""


class Condor:
    """An HTCondor of two scripts, whose settings and whose startd's ad a test writes."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        for name in ("bin", "log", "execute", "sbin"):
            (directory / name).mkdir()
        self.ad = directory / "ad"
        self.ad.write_text(AD)
        self._values = directory / "values"
        self.script("condor_config_val", CONFIG_VAL.format(file=str(self._values)))
        self.script("condor_status", STATUS.format(file=str(self.ad)))
        self.address = directory / "log/.startd_address"
        self.address.write_text("<127.0.0.1:9618?sock=startd>\n$CondorVersion: 23.9.6 $\n")
        self.server = directory / "sbin/condor_vm-gahp"
        self.program(SERVER.format(version=__version__))
        self.values = {
            "VM_TYPE": "simulated", "VM_MEMORY": "64", "VM_GAHP_SERVER": str(self.server),
            "VM_GAHP_LOG": f"{directory}/log/VMGahpLog", "VM_RECHECK_INTERVAL": "600",
            "EXECUTE": f"{directory}/execute", "STARTD_ADDRESS_FILE": str(self.address),
        }  # fmt: skip

    def script(self, name: str, text: str) -> None:
        a_program(self.directory / "bin" / name, f"#!{sys.executable} -IS\n{text}")

    def program(self, text: str) -> None:
        a_program(self.server, text)

    def environ(self, **settings: object) -> dict[str, str]:
        """The environment of a doctor on this machine; a setting that is None is not set."""
        values = {name: value for name, value in (self.values | settings).items() if value is not None}
        self._values.write_text("".join(f"{name} = {value}\n" for name, value in values.items()))
        return {"PATH": f"{self.directory}/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": str(self.directory)}

    def context(self, root: str = "", **settings: object) -> Context:
        return Context(self.environ(**settings), root=root)

    def examine(self, job: str = "", **settings: object) -> doctor.Examination:
        return doctor.examine(self.environ(**settings), job=job)

    def log(self, *lines: str, name: str = "VMGahpLog") -> None:
        (self.directory / "log" / name).write_text("".join(line + "\n" for line in lines))


@pytest.fixture
def pool() -> Iterator[Condor]:
    """Not below pytest's own directory, which is closed to other users."""
    with tempfile.TemporaryDirectory(prefix="vmgahp-doctor-") as directory:
        os.chmod(directory, 0o755)
        yield Condor(Path(directory))


def named(found: list[Finding], check: str) -> Finding:
    checks = [finding.check for finding in found]
    assert check in checks, f"no finding {check} among {checks}"
    return found[checks.index(check)]


def judged(found: Finding | None, verdict: str, *seen: str, hint: str = "") -> Finding:
    """A finding with this verdict, whose sentence has these parts."""
    assert found is not None
    assert found.verdict == verdict, found
    assert absent(found.seen, *seen) == [], found.seen
    assert hint in found.hint
    return found


def tree(root: Path, **files: str) -> str:
    """A machine of files; ``__`` in a name stands for a slash."""
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(root)


def snapshot(directory: Path) -> dict[str, tuple[object, ...]]:
    found: dict[str, tuple[object, ...]] = {}
    for path in directory.rglob("*"):
        status = path.lstat()
        content = path.read_bytes() if stat.S_ISREG(status.st_mode) else b""
        written = 0 if path.is_dir() else status.st_mtime_ns  # a directory's changes with what comes and goes in it
        found[str(path)] = (status.st_mode, status.st_uid, status.st_ino, written, content)
    return found


def failure(day: int, sentence: str, who: str = "administrator") -> str:
    return f"11/{day:02}/26 10:00:00 (pid:7) START of VM 1 failed: {sentence} Hint: do {day}. ({who})"


# Job ads

CLUSTER = os.getpid()
NAME = f"alice_lab_{CLUSTER}.0"

JOB_AD = """\
ClusterId = {cluster}
ProcId = 0
User = "alice@lab"
JobUniverse = 13
JobVMType = "{vm_type}"
JobVMMemory = 48
VMPARAM_vm_Disk = "guest.img:vda:w:raw"
ClaimId = "<127.0.0.1:9618>#1#2#verysecret"
"""


class Ad:
    """A job ad in a file beside its disk, in a directory of the job's user."""

    def __init__(self, scratch: Path) -> None:
        self.directory = scratch
        self.path = scratch / "ad.txt"
        self.disk = scratch / "guest.img"
        self.disk.write_bytes(bytes(1 << 20))
        jobs.own(scratch)
        self.write()

    def write(self, *more: str, vm_type: str = "qemu") -> str:
        self.path.write_text(JOB_AD.format(cluster=CLUSTER, vm_type=vm_type) + "".join(line + "\n" for line in more))
        return str(self.path)


@pytest.fixture
def ad(scratch: Path) -> Ad:
    return Ad(scratch)


def offers(vm_type: str = "qemu", **attributes: object) -> probe.Probe:
    found = probe.Probe(vm_type)
    found.attributes = {"VM_Memory": 64, "VM_Networking": False} | attributes  # type: ignore[assignment]
    return found


def tried(pool: Condor, path: str, offered: probe.Probe | None = None, **settings: object) -> dry_run.Trial:
    return dry_run.try_out(pool.context(**{"VM_TYPE": "qemu"} | settings), path, offered or offers())
