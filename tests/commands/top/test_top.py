"""vmgahp top: the VMs of a machine as a table, from libvirt and from the files of scratch directories."""

import getpass
import json
import os
import re
import select
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path

import htcondor2
import pytest
from rich.console import Console, RenderableType

from tests.commands.support import absent
from tests.peer import VMGAHP
from vmgahp import cli, lifecycle
from vmgahp.commands.metrics_lines import read_line
from vmgahp.commands.page import UNLIMITED
from vmgahp.commands.top import VM
from vmgahp.commands.top import screen as top
from vmgahp.commands.top.screen import Look, Node, VmRow, is_vm_name
from vmgahp.config import Settings
from vmgahp.metrics.file import MOST_LINES, NAME

NOW = time.time()


def file_of(execute: Path, number: int, *lines: dict[str, object]) -> Path:
    directory = execute / f"dir_{number}"
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / NAME).open("a") as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines))
    return directory


def start(number: int, after: float = 0.0) -> dict[str, object]:
    name = f"alice_lab_{number}.0"
    return {"time": NOW - 100 + after, "event": "start", "name": name, "state": lifecycle.RUNNING, "seconds": 1.0}


def sample(after: float, cpu: float, written: int = 0) -> dict[str, object]:
    line: dict[str, object] = {"time": NOW - 100 + after, "state": lifecycle.RUNNING, "cpu_seconds": cpu, "vcpus": 2}
    block = {"vda": {"read_bytes": 0, "write_bytes": written}, "vdb": {"read_bytes": 1024 * int(after)}}
    return line | {"memory_kib": 65536, "max_memory_kib": 65536, "block": block, "network": {}}


@pytest.fixture
def node(tmp_path: Path) -> Node:
    """Of a machine whose libvirt cannot be reached."""
    return Node(Settings({"VM_LIBVIRT_URI": "qemu+unix:///system?socket=/nonexistent/socket"}), str(tmp_path))


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vmgahp.commands.top.screen.DEADLINE", 0.1)


def by_name(look: Look) -> dict[str, VmRow]:
    return {row["name"]: row for row in look.rows}


def test_a_vm_by_its_file(node: Node, tmp_path: Path) -> None:
    directory = file_of(tmp_path, 7, start(7), sample(10, 0.0), sample(20, 10.0, 10 << 20))
    look = node.look()
    row = by_name(look)["alice_lab_7.0"]
    figures = {"state": lifecycle.RUNNING, "vcpus": 2, "cpu_percent": 50.0, "written": 1 << 20, "read": 1024}
    assert row.items() >= figures.items()
    assert (row["memory_kib"], row["scratch"], bool(row["owner"])) == (65536, str(directory), True)
    assert row["age"] == pytest.approx(look.time - (NOW - 100), abs=0.01)
    # What is added is read, and what was read is not read again.
    file_of(tmp_path, 7, sample(30, 30.0, 10 << 20))
    row = by_name(node.look())["alice_lab_7.0"]
    assert (row["cpu_percent"], row["written"]) == (100.0, 0)
    assert by_name(node.look())["alice_lab_7.0"]["cpu_percent"] == 100.0


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_scratch_directory_in_one_of_the_starters(node: Node, tmp_path: Path) -> None:
    outer = tmp_path / "dir_7"
    inner = file_of(tmp_path, 7, start(7), sample(10, 0.0)).rename(tmp_path / "scratch")
    outer.mkdir()
    inner = inner.rename(outer / "scratch")
    os.chown(inner, 54321, 54321)
    assert by_name(node.look())["alice_lab_7.0"]["scratch"] == str(inner)


def test_a_line_that_is_half_there_waits_for_its_end(node: Node, tmp_path: Path) -> None:
    directory = file_of(tmp_path, 7, start(7), sample(10, 0.0))
    node.look()
    text = json.dumps(sample(20, 20.0))
    for part in (text[:30], text[30:] + "\n"):
        with (directory / NAME).open("a") as file:
            file.write(part)
        found = by_name(node.look())["alice_lab_7.0"]["cpu_percent"]
    assert found == 100.0


def test_what_is_suspended_uses_nothing_and_what_is_over_is_not_shown(node: Node, tmp_path: Path) -> None:
    saved = {"time": NOW, "event": "suspend", "state": lifecycle.SUSPENDED, "seconds": 2.0}
    file_of(tmp_path, 1, start(1), sample(10, 0.0), sample(20, 9.0), saved)
    file_of(tmp_path, 2, start(2), sample(10, 0.0), {"time": NOW, "event": "end", "state": lifecycle.STOPPED})
    found = by_name(node.look())
    assert list(found) == ["alice_lab_1.0"]
    row = found["alice_lab_1.0"]
    assert (row["state"], row["cpu_percent"], row["memory_kib"]) == (lifecycle.SUSPENDED, None, 0)


def test_after_a_resume_nothing_is_known_before_the_second_reading(node: Node, tmp_path: Path) -> None:
    resumed = {"time": NOW, "event": "resume", "state": lifecycle.RUNNING, "seconds": 2.0}
    file_of(tmp_path, 1, start(1), sample(10, 0.0), sample(20, 9.0), resumed, sample(60, 9.5))
    assert by_name(node.look())["alice_lab_1.0"]["cpu_percent"] is None
    file_of(tmp_path, 1, sample(70, 19.5))
    assert by_name(node.look())["alice_lab_1.0"]["cpu_percent"] == 50.0


def test_what_jobs_write_is_shown_and_never_acted_upon(node: Node, tmp_path: Path) -> None:
    file_of(tmp_path, 1, start(1) | {"name": "\x1b[2Jevil\n\ud800", "state": "\x07" * 5000}, sample(1, 1e308))
    file_of(tmp_path, 1, sample(0, 0.0) | {"time": 0}, sample(0, 1e18) | {"time": 1e-300})
    (tmp_path / "dir_1" / NAME).open("ab").write(b"[" * 100_000 + b"\n\xff\n{}\n")
    (tmp_path / "dir_2").mkdir()
    (tmp_path / "dir_2" / NAME).symlink_to(tmp_path / "dir_1" / NAME)
    (tmp_path / "dir_3").mkdir()
    os.mkfifo(tmp_path / "dir_3" / NAME)
    (tmp_path / "dir_4").symlink_to(tmp_path / "dir_1")
    node._execute = f"{tmp_path}/\x1b[2J/.."
    assert any("\\x1b[2J" in note for note in node.look().notes)
    node._execute = str(tmp_path)
    look = node.look()
    (row,) = look.rows
    assert row["name"].isprintable()
    assert json.loads(json.dumps(row, allow_nan=False))["cpu_percent"] > 100
    assert shown(look, UNLIMITED).replace("\n", "").isprintable()


def test_of_a_flood_the_end_is_read(node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[bytes] = []
    monkeypatch.setattr("vmgahp.commands.top.screen.read_line", lambda text: taken.append(text) or read_line(text))
    (file_of(tmp_path, 7) / NAME).write_bytes(b"x\n" * 4 * MOST_LINES)
    file_of(tmp_path, 7, start(7), sample(10, 0.0), sample(20, 10.0))
    assert by_name(node.look())["alice_lab_7.0"]["cpu_percent"] == 50.0
    assert len(taken) <= MOST_LINES


def test_libvirt_that_cannot_be_asked_is_told_and_fails_an_empty_table(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("vmgahp.commands.top.screen.DEADLINE", 1.0)
    # From a file of its own: HTCondor's Python module reads the environment once, when a test first imports it.
    settings = tmp_path / "settings"
    settings.write_text("VM_LIBVIRT_URI = qemu+unix:///system?socket=/nonexistent/socket\n")
    monkeypatch.setenv("VMGAHP_CONFIG", str(settings))
    assert cli.main(["vmgahp", "top", "--once", "--execute", str(tmp_path)]) == 1
    assert "libvirt cannot be reached at" in capsys.readouterr().out
    file_of(tmp_path, 7, start(7), sample(10, 0.0), sample(20, 10.0))
    assert cli.main(["vmgahp", "top", "--execute", str(tmp_path)]) == 0, "a pipe gets one table"
    out = capsys.readouterr().out
    assert re.search(r"^alice_lab_7.0 .* Running +50.0% +2 +64.0 MiB", out, re.MULTILINE), out
    assert "libvirt cannot be reached at" in out
    assert cli.main(["vmgahp", "top", "--json", "--execute", str(tmp_path)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [(row["name"], row["cpu_percent"]) for row in told["vms"]] == [("alice_lab_7.0", 50.0)]
    assert len(told["notes"]) == 1
    figures = tmp_path / "vmgahp.prom"
    assert cli.main(["vmgahp", "top", "--prometheus", str(figures), "--execute", str(tmp_path)]) == 0
    assert {
        "vmgahp_vms 1",
        "vmgahp_unreadable_sources 1",
        'vmgahp_vm_memory_bytes{name="alice_lab_7.0",owner="root"} 67108864',
    } <= {line.replace(f'owner="{getpass.getuser()}"', 'owner="root"') for line in figures.read_text().splitlines()}


def test_two_vms_of_one_name_spoil_no_file_of_prometheus() -> None:
    look = rows(2)
    look.rows.append(dict(look.rows[0]))
    lines = top.prometheus(look).splitlines()
    assert len(set(lines)) == len(lines)


def test_names_of_jobs_vms() -> None:
    assert is_vm_name("alice_example.org_12.0")
    for name in ("debian", "alice_12", "12.0", "alice_x.0", "alice_12.", "alice_.0", "alice_1\uff12.0"):
        assert not is_vm_name(name), name


def shown(look: Look, width: int, draw: Callable[[Look, int], RenderableType] = top.table) -> str:
    """What is printed."""
    console = Console(width=width, file=StringIO())
    console.print(draw(look, width))
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def rows(number: int) -> Look:
    """A machine with so many VMs, one of them of somebody with a long name."""
    long = "a-user-with-a-long-name_at-a-site-with-a-long-domain.example.org_123456789.12345"
    names = [f"alice_lab_{each}.0" for each in range(number - 1)] + [long]
    row = dict.fromkeys(VM) | {"scratch": "/scratch", "state": "Running", "cpu_percent": 1.0, "memory_kib": 0}
    return Look(time=NOW, rows=[row | {"name": name} for name in names])


@pytest.mark.parametrize("width", [40, 60, 80, UNLIMITED])
def test_a_table_is_no_wider_than_the_terminal(width: int) -> None:
    look = rows(30)
    look.notes = ["The scratch directories in /var/lib/condor/execute cannot be seen: Permission denied."]
    text = shown(look, width)
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    assert sum("Running" in line and "1.0%" in line for line in lines) == 30
    assert text.index("The scratch directories") < text.index("alice_lab_0.0")
    assert "12345" in lines[-1], "the job's id is at the end of the name, which is not left out"
    assert ("SCRATCH" in text) == (width == UNLIMITED)


@pytest.mark.parametrize("width", [60, 150])
def test_a_screen_begins_with_the_sum(width: int) -> None:
    lines = shown(rows(30), width, top.screen).splitlines()
    assert max(map(len, lines)) <= width
    assert absent(lines[0], "VMs: 30, running: 30", "(q ends)") == []


def test_what_could_not_be_looked_at_is_not_nothing() -> None:
    assert shown(Look(time=NOW), 80) == "There are no VMs of jobs on this machine.\n"
    assert shown(Look(time=NOW, notes=["No libvirt."]), 80) == "No libvirt.\nNo VMs of jobs were found.\n"


@contextmanager
def in_terminal(term: str, directory: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """The command on a terminal of its own; its process, and the terminal's other end."""
    ours, theirs = os.openpty()
    environ = os.environ | {"TERM": term, "COLUMNS": "150", "LINES": "30", "_CONDOR_VM_LIBVIRT_URI": "test:///default"}
    command = [*VMGAHP, "top", "--execute", str(directory), "--interval", "0.2"]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environ, start_new_session=True)
    os.close(theirs)
    try:
        yield process, ours
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def read_until(descriptor: int, words: bytes) -> bytes:
    seen = b""
    while words not in seen:
        assert select.select([descriptor], [], [], 60)[0], seen
        seen += os.read(descriptor, 65536)
    return seen


@pytest.mark.parametrize("key", [b"q", b"\x03"])
def test_on_a_terminal_it_stays_until_it_is_told_to_end(tmp_path: Path, key: bytes) -> None:
    file_of(tmp_path, 7, start(7), sample(10, 0.0), sample(20, 10.0))
    with in_terminal("xterm", tmp_path) as (process, terminal):
        read_until(terminal, b"alice_lab_7.0")
        file_of(tmp_path, 8, start(8), sample(10, 0.0))
        seen = read_until(terminal, b"alice_lab_8.0")
        if key == b"q":
            os.write(terminal, key)
        else:
            process.send_signal(2)
        seen += read_until(terminal, b"\x1b[?1049l")  # the screen as it was
        assert process.wait(60) == 0
        assert b"Traceback" not in seen


def test_a_dumb_terminal_gets_one_table(tmp_path: Path) -> None:
    file_of(tmp_path, 7, start(7), sample(10, 0.0), sample(20, 10.0))
    with in_terminal("dumb", tmp_path) as (process, terminal):
        assert b"\x1b" not in read_until(terminal, b"alice_lab_7.0")
        assert process.wait(60) == 0


def slots(_collector: object, _type: object, constraint: str, _names: list[str]) -> list[dict[str, object]]:
    """Answer as a collector that knows two jobs and a machine, of which one attribute is missing."""
    if "JobUniverse" not in constraint:
        return [{"Machine": "node7", "VM_Type": "kvm", "VM_Memory": 2048, "VM_Images": "debian-12"}]
    job = {"RemoteOwner": "alice@lab", "Activity": "Busy", "VM_Type": "kvm", "Cpus": 1, "Memory": 1536}
    job |= {"Name": "slot1_1@node7", "JobStart": int(time.time()) - 60}
    return [{**job, "JobId": f"{number}.0"} for number in (10, 9)]


def test_the_jobs_and_machines_of_a_pool(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(htcondor2.Collector, "query", slots)
    assert cli.main(["vmgahp", "top", "--pool", "127.0.0.1:9"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "VM jobs: 2, machines that offer VMs: 1"
    assert [line.split()[0] for line in lines[2:5]] == ["JOB", "9.0", "10.0"]
    assert absent(lines[3], "alice@lab", "slot1_1@node7", "1.5 GiB", "1 min") == []
    assert lines[-1].split() == ["node7", "kvm", "2.0", "GiB", "debian-12", "-", "-"]
    assert cli.main(["vmgahp", "top", "--pool", "127.0.0.1:9", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["jobs"][0]["memory_mib"], said["machines"][0]["warm"]) == (1536, None)


def test_a_pool_that_does_not_answer(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["vmgahp", "top", "--pool", "127.0.0.1:9"]) == 1
    assert "The collector does not say" in capsys.readouterr().err
