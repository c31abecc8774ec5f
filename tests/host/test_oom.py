"""What the kernel's log says of a process that was killed for want of memory."""

import time
from pathlib import Path

import pytest

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


def test_a_process_that_came_to_its_groups_limit(monkeypatch, tmp_path):
    log = Log("CPU 0/TCG invoked oom-killer: gfp_mask=0xcc0", USAGE, "[  pid  ]", kill(4711))
    assert log.read(monkeypatch, tmp_path, 4711) == Killed(GROUP, 307200)
    assert log.read(monkeypatch, tmp_path, 471) is None


def test_the_limit_is_that_of_its_own_record(monkeypatch, tmp_path):
    log = Log(USAGE, kill(1), "memory: usage 5kB, limit 10240kB, failcnt 3", kill(2), kill(3))
    assert [log.read(monkeypatch, tmp_path, pid) for pid in (1, 2, 3)] == [
        Killed(GROUP, 307200),
        Killed(GROUP, 10240),
        Killed(GROUP, 0),
    ]


def test_a_machine_that_was_full(monkeypatch, tmp_path):
    said = f"oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),global_oom,task_memcg={GROUP},task=q,pid=7,uid=0"
    assert Log(USAGE, said).read(monkeypatch, tmp_path, 7) == Killed("", 0)


def test_an_earlier_process_of_the_number_is_another(monkeypatch, tmp_path):
    assert Log(kill(7), ago=system_logs.KILL_LASTS + 60).read(monkeypatch, tmp_path, 7) is None


@pytest.mark.parametrize("line", ["oom-kill:", "oom-kill:pid", "oom-kill:pid=,x", "oom-kill:pid=" + "9" * 5000, ""])
def test_a_line_that_makes_no_sense(monkeypatch, tmp_path, line):
    assert Log("memory: usage", line).read(monkeypatch, tmp_path, 7) is None


def test_a_log_that_cannot_be_read_says_nothing(tmp_path):
    assert system_logs.killed(7, str(tmp_path / "missing")) is None
    assert system_logs.killed(7, str(tmp_path)) is None


def test_records_without_fields(monkeypatch, tmp_path):
    log = Log()
    log.records = [b"", b";", b"no record"]
    assert log.read(monkeypatch, tmp_path, 7) is None
