"""The system's logs: a process that was killed for want of memory, and what SELinux and AppArmor have denied."""

import time
from pathlib import Path

import pytest

from vmgahp import errors
from vmgahp.host import system_logs
from vmgahp.host.system_logs import Killed

GROUP = "/machine/qemu-957-alice_lab_1.0.libvirt-qemu"


class Log:
    """A log of the kernel's of which each read gives one record."""

    def __init__(self, *lines: str, ago: float = 1.0) -> None:
        when = int((time.clock_gettime(time.CLOCK_MONOTONIC) - ago) * 1e6)
        self.records = [f"6,{number},{when},-;{line}\n KEY=value\n".encode() for number, line in enumerate(lines)]

    def read(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pid: int) -> Killed | None:
        place = tmp_path / "kmsg"
        place.write_bytes(b"")
        left = list(self.records)

        def read(_descriptor: int, _most: int) -> bytes:
            if not left:
                raise BlockingIOError
            return left.pop(0)

        with monkeypatch.context() as patch:
            patch.setattr(system_logs.os, "read", read)
            return system_logs.killed(pid, str(place))


def kill(pid: int, group: str = GROUP) -> str:
    where = f"CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,oom_memcg={group}"
    return f"oom-kill:constraint={where},task_memcg={GROUP},task=qemu-system-x86,pid={pid},uid=64055"


USAGE = "memory: usage 307200kB, limit 307200kB, failcnt 33"


def test_whose_limit_a_killed_process_came_to(monkeypatch, tmp_path):
    log = Log("CPU 0/TCG invoked oom-killer: gfp_mask=0xcc0", USAGE, "[  pid  ]", kill(4711))
    assert log.read(monkeypatch, tmp_path, 4711) == Killed(GROUP, 307200)
    assert log.read(monkeypatch, tmp_path, 471) is None
    log = Log(USAGE, kill(1), "memory: usage 5kB, limit 10240kB, failcnt 3", kill(2), kill(3))
    limits = [Killed(GROUP, size) for size in (307200, 10240, 0)]
    assert [log.read(monkeypatch, tmp_path, pid) for pid in (1, 2, 3)] == limits
    said = f"oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),global_oom,task_memcg={GROUP},task=q,pid=7,uid=0"
    assert Log(USAGE, said).read(monkeypatch, tmp_path, 7) == Killed("", 0)
    assert Log(kill(7), ago=system_logs.KILL_LASTS + 60).read(monkeypatch, tmp_path, 7) is None


@pytest.mark.parametrize("line", ["oom-kill:", "oom-kill:pid", "oom-kill:pid=,x", "oom-kill:pid=" + "9" * 5000, ""])
def test_a_line_that_makes_no_sense(monkeypatch, tmp_path, line):
    assert Log("memory: usage", line).read(monkeypatch, tmp_path, 7) is None


def test_a_log_that_cannot_be_read_or_has_no_fields_says_nothing(tmp_path, monkeypatch):
    assert system_logs.killed(7, str(tmp_path / "missing")) is None
    assert system_logs.killed(7, str(tmp_path)) is None
    log = Log()
    log.records = [b"", b";", b"no record"]
    assert log.read(monkeypatch, tmp_path, 7) is None


NOW = 1_795_661_124
SVIRT = (
    'type=AVC msg=audit({when}.783:23): avc:  denied  {{ open }} for  pid=382 comm="qemu-system-x86" '
    'path="/var/lib/condor/execute/dir_5/guest.img" dev="vda" ino=215 scontext=system_u:system_r:svirt_tcg_t:s0:c1,c2 '
    "tcontext=system_u:object_r:condor_var_lib_t:s0 tclass=file permissive={permissive}"
)
APPARMOR = (
    'type=AVC msg=audit({when}.1:9): apparmor="DENIED" operation="open" class="file" '
    'profile="libvirt-5e1b4d66-0000-4000-8000-000000000000" name="/srv/x" pid=7 comm="qemu-system-x86"'
)


def last(tmp_path: Path, *lines: str, since: float = NOW) -> str:
    log = tmp_path / "audit.log"
    log.write_text("\n".join(lines))
    return system_logs.denial_since(since, str(log), str(tmp_path / "no kernel log"))


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system_logs, "_SETTLES", 0)


@pytest.mark.parametrize("line", [SVIRT, APPARMOR])
def test_the_last_denial_is_told(tmp_path: Path, line: str) -> None:
    wanted = line.format(when=NOW, permissive=0)
    told = last(tmp_path, "type=USER msg=audit(1.0:1): x", wanted, "type=EOE msg=audit(1.0:1):")
    assert told == " ".join(wanted.split())


@pytest.mark.parametrize(
    "line",
    [
        SVIRT.format(when=NOW - 5, permissive=0),
        SVIRT.format(when=NOW, permissive=1),
        SVIRT.format(when=NOW, permissive=0).replace("svirt_tcg_t", "getty_t"),
        APPARMOR.format(when=NOW).replace("libvirt-", "firefox-"),
        APPARMOR.format(when=NOW).replace("DENIED", "ALLOWED"),
    ],
    ids=["earlier", "permissive", "another domain", "another profile", "allowed"],
)
def test_what_is_no_denial_of_the_guest(tmp_path: Path, line: str) -> None:
    assert last(tmp_path, line) == ""


def test_a_machine_without_an_audit_log(tmp_path: Path) -> None:
    assert system_logs.denial_since(NOW, str(tmp_path / "none"), str(tmp_path / "none")) == ""


def test_a_denial_makes_a_fault_the_machines_or_is_in_its_hint() -> None:
    job = errors.JobFault("VMGAHP_ERR_JOBCLASSAD_KVM_INVALID_DISK_PARAM", "Could not open 'x': Permission denied.")
    told = system_logs.with_denial(job, "avc: denied { open }")
    assert isinstance(told, errors.MachineFault)
    assert "avc: denied { open }" in told.hint
    assert system_logs.with_denial(job, "") is job
    said = system_logs.with_denial(errors.MachineFault("libvirt is gone.", "look."), "avc: denied { use }").hint
    assert said == "look. And a security module has denied it: avc: denied { use }"
