"""The log: HTCondor's format, rotation among several writers, no secrets, and never a failure."""

import fcntl
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vmgahp import log as log_module
from vmgahp.config import Settings
from vmgahp.log import Log, wants_debug
from vmgahp.text import is_private, redact

LINE = re.compile(r"\d\d/\d\d/\d\d \d\d:\d\d:\d\d \(pid:\d+\) (.*)")


def opened(path, **values):
    log = Log()
    log.open(Settings({"VM_GAHP_LOG": str(path), **values}))
    return log


def texts(path):
    return [LINE.fullmatch(line)[1] for line in path.read_text().splitlines()]


def test_a_line_is_what_htcondor_writes_with_d_pid(tmp_path):
    opened(tmp_path / "log").always("VM-GAHP initialized with run-mode 3")
    line = (tmp_path / "log").read_text()
    assert LINE.fullmatch(line.rstrip("\n"))[1] == "VM-GAHP initialized with run-mode 3"
    assert f"(pid:{os.getpid()})" in line
    assert abs(time.mktime(time.strptime(line[:17], "%m/%d/%y %H:%M:%S")) - time.time()) < 5


def test_lines_before_open_are_kept_in_order_and_bounded(tmp_path):
    log = Log()
    for number in range(2000):
        log.always(f"line {number}")
    log.debug("a detail")
    log.open(Settings({"VM_GAHP_LOG": str(tmp_path / "log")}))
    kept = texts(tmp_path / "log")
    assert kept[-1] == "line 1999"
    assert 100 <= len(kept) < 1000
    assert "a detail" not in kept


@pytest.mark.parametrize(
    ("flags", "debug"),
    [
        *((on, True) for on in ("D_FULLDEBUG", "d_fulldebug,D_PID", "D_PID | D_FULLDEBUG:2", "D_ALWAYS:2")),
        *((off, False) for off in ("", "D_PID", "D_ALL", "D_FULLDEBUG:0", "D_FULLDEBUG -D_FULLDEBUG")),
        ("D_NO_SUCH_FLAG:x ::: -", False),
    ],
)
def test_debug_flags(flags, debug):
    assert wants_debug(flags) is debug


@given(st.text())
def test_debug_flags_never_fail(flags):
    wants_debug(flags)


@pytest.mark.parametrize("name", ["VM_GAHP_DEBUG", "DEFAULT_DEBUG", "ALL_DEBUG"])
def test_debug_level_comes_from_htcondors_three_settings(tmp_path, name):
    opened(tmp_path / "log", **{name: "D_FULLDEBUG"}).debug("a detail")
    assert (tmp_path / "log").exists()
    opened(tmp_path / "none", VM_GAHP_DEBUG="D_PID", DEFAULT_DEBUG="D_FULLDEBUG").debug("a detail")
    assert not (tmp_path / "none").exists()


def test_control_characters_stay_on_one_line(tmp_path):
    opened(tmp_path / "log").always("evil\n11/20/26 09:17:06 (pid:1) forged\r\x1b[2Jü\u2028\ud800")
    assert texts(tmp_path / "log") == [r"evil\n11/20/26 09:17:06 (pid:1) forged\r\x1b[2Jü\u2028\ud800"]


@pytest.mark.parametrize(
    "name", ["ClaimId", "CLAIMIDS", "ClaimIdList", "Capability", "TransferKey", "ChildClaimIds", "_condor_privFoo"]
)
def test_private_names(name):
    assert is_private(name)
    assert is_private(name.lower())
    assert not is_private("X" + name)
    for line in (f'{name} = "s3cret\\"s3cret"', f"x {name}=s3cret", f"'{name}': 's3cret'"):
        assert "s3cret" not in redact(line)


def test_redact_leaves_the_rest_alone():
    assert redact('A = 1, ClaimId = "x y", B = 2') == "A = 1, ClaimId = <hidden>, B = 2"
    assert redact('ClaimId = "one" ClaimId = "two" C = 3') == "ClaimId = <hidden> ClaimId = <hidden> C = 3"
    assert redact("PublicClaimId = 5, ClaimIdea = 6") == "PublicClaimId = 5, ClaimIdea = 6"
    assert redact("claim <192.0.2.2:9618?addrs=x>#1700000000#5#[secret]abc, ok") == (
        "claim <192.0.2.2:9618?addrs=x>#1700000000#5#..., ok"
    )
    assert redact('Environment = "TOKEN=abc"') == "Environment = <hidden>"


def test_a_secret_never_reaches_the_file(tmp_path):
    log = opened(tmp_path / "log", VM_GAHP_DEBUG="D_FULLDEBUG")
    log.debug('CLASSAD line: ClaimId = "<192.0.2.1:1>#1#2#s3cret"')
    assert "s3cret" not in (tmp_path / "log").read_text()


def test_rotation_keeps_one_old_file(tmp_path):
    path = tmp_path / "log"
    log = opened(path, MAX_VM_GAHP_LOG="1000")
    for number in range(100):
        log.always(f"line {number:03}")
    assert path.stat().st_size < 1100
    assert sorted(os.listdir(tmp_path)) == ["log", "log.lock", "log.old"]
    assert (tmp_path / "log.lock").stat().st_mode & 0o777 == 0o600
    numbers = [int(text[-3:]) for text in texts(tmp_path / "log.old") + texts(path)]
    assert numbers == list(range(numbers[0], 100))


def test_only_one_server_rotates(tmp_path):
    path = tmp_path / "log"
    one, two = (opened(path, MAX_VM_GAHP_LOG="1000") for _ in range(2))
    one.always("old " + "x" * 1000)
    two._follow_file()
    one.always("new")
    two._open_file()
    two._inode = (0, 0)  # as if it had found the old file full and came late
    assert two._rotate() is True
    assert texts(path) == ["new"]
    assert texts(tmp_path / "log.old")[0].startswith("old")
    one.always("old " + "x" * 1000)
    with open(tmp_path / "log.lock", "w") as busy:
        fcntl.flock(busy, fcntl.LOCK_EX)
        one.always("while another server rotates")
    assert texts(path)[-1] == "while another server rotates"
    with open(path) as reader:
        fcntl.flock(reader, fcntl.LOCK_EX)
        one.always("new again")
    assert texts(path) == ["new again"]


WRITER = """
import sys
from vmgahp.config import Settings
from vmgahp.log import Log
log = Log()
log.open(Settings({"VM_GAHP_LOG": sys.argv[1], "MAX_VM_GAHP_LOG": sys.argv[2]}))
for number in range(int(sys.argv[3])):
    log.always(f"writer {sys.argv[4]} line {number} " + "x" * 100)
"""


def test_several_servers_rotate_one_file_without_tearing_or_losing_lines(tmp_path):
    path, lines, writers = tmp_path / "log", 3000, 6
    # Large enough for one rotation and no second one: then every line must still be there.
    size = str(lines * writers * 155 * 2 // 3)
    processes = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(path), size, str(lines), str(writer)])
        for writer in range(writers)
    ]
    assert [process.wait(60) for process in processes] == [0] * writers
    found = texts(tmp_path / "log.old") + texts(path)
    for writer in range(writers):
        numbers = [int(text.split()[3]) for text in found if text.startswith(f"writer {writer} ")]
        assert numbers == list(range(lines))


def test_a_vanished_directory_and_a_full_disk_silence_it_until_they_are_back(tmp_path):
    directory = tmp_path / "logs"
    directory.mkdir()
    log = opened(directory / "log")
    log.always("one")
    (directory / "log").unlink()
    directory.rmdir()
    log.always("two")
    log.always("three")
    directory.mkdir()
    log.always("four")
    assert texts(directory / "log") == ["(2 lines were lost before this one) four"]


def test_a_full_disk_is_not_noticed_by_the_caller():
    log = opened("/dev/full")  # not a regular file: nowhere
    log.always("text")
    log._path, log._fd = "/dev/full", os.open("/dev/full", os.O_WRONLY)
    found = os.stat("/dev/full")
    log._inode = (found.st_dev, found.st_ino)
    log.always("text")
    assert log._dropped
    log.close()


@pytest.mark.parametrize("there", [True, False])
def test_a_symbolic_link_is_not_followed(tmp_path, there):
    if there:
        (tmp_path / "elsewhere").write_text("")
    (tmp_path / "log").symlink_to(tmp_path / "elsewhere")
    opened(tmp_path / "log").always("text")
    assert (tmp_path / "elsewhere").exists() is there
    assert not there or (tmp_path / "elsewhere").read_text() == ""


@pytest.mark.parametrize("path", ["/dev/null", "relative", "/nonexistent/log"])
def test_nowhere(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    opened(path).always("text")
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_as_root_the_file_belongs_to_the_owner_of_its_directory(tmp_path):
    os.chown(tmp_path, 54321, 54322)
    opened(tmp_path / "log").always("text")
    found = os.stat(tmp_path / "log")
    assert (found.st_uid, found.st_gid, found.st_mode & 0o777) == (54321, 54322, 0o644)


@pytest.mark.parametrize("blocking", [True, False])
def test_a_full_stderr_pipe_drops_lines_and_never_blocks(blocking):
    read_end, write_end = os.pipe()
    saved = os.dup(2)
    try:
        os.set_blocking(write_end, blocking)
        os.dup2(write_end, 2)
        os.close(write_end)
        log = Log()
        log.open(Settings(), to_stderr=True)
        for number in range(3000):  # nobody reads until they are all written
            log.always(f"line {number} " + "x" * 200)
        log.always("é" * 9000)
        assert log._dropped
        got = os.read(read_end, 1 << 20)  # more than a pipe can hold
        log.always("it works again")
        got += os.read(read_end, 65536)
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(read_end)
    lines = got.decode().splitlines()
    assert lines[0] == "line 0 " + "x" * 200
    assert re.fullmatch(r"\(\d+ lines were lost before this one\) it works again", lines[-1])
    log.close()


def test_a_closed_stderr_is_not_noticed():
    code = (
        "import os; os.close(2)\nfrom vmgahp.config import Settings\nfrom vmgahp.log import Log\n"
        "log = Log(); log.open(Settings(), to_stderr=True); log.always('text'); print('fine')"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout == "fine\n"


def test_threads_and_signal_handlers_may_log_at_once(tmp_path):
    log = opened(tmp_path / "log")
    with log._lock:  # as when a signal handler interrupts its own thread within a write
        log.always("from the handler")

    def write(writer):
        for number in range(200):
            log.always(f"{writer} {number}")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(8)))
    assert len(texts(tmp_path / "log")) == 1601


def test_whatever_is_passed_nothing_is_raised(tmp_path):
    log = opened(tmp_path / "log")
    log.always(None)
    log.always("x" * 1_000_000)
    log.close()
    log.always("after close")
    log.close()
    [text] = texts(tmp_path / "log")
    assert len(text) < log_module.LONGEST_LINE + 100
