"""The one place that calls qemu-img, with the real one."""

import os
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest

from tests.images.support import AS_ROOT
from tests.lab.programs import a_program
from vmgahp.host.job_user import Identity
from vmgahp.images import qemu_img

pytestmark = pytest.mark.qemu

MIB = 1 << 20


@pytest.fixture
def raw(scratch: Path, user: Identity) -> Path:
    """An image with something in it, and a hole."""
    path = scratch / "disk.raw"
    with path.open("wb") as file:
        file.write(os.urandom(3 * MIB))
        file.truncate(16 * MIB)
    os.chown(path, user.uid, user.gid)
    return path


def convert(raw: Path, image_format: str, user: Identity, **more: Any) -> Path:
    other = raw.with_name("other")
    qemu_img.convert(str(raw), "raw", str(other), image_format, user, seconds=60, **more)
    return other


@pytest.mark.parametrize("image_format", ["raw", "qcow2", "vmdk", "vdi", "vpc", "vhdx"])
def test_there_and_back_nothing_is_lost(raw: Path, user: Identity, image_format: str) -> None:
    other, back = convert(raw, image_format, user), raw.with_name("back")
    qemu_img.convert(str(other), image_format, str(back), "raw", user, seconds=60)
    with back.open("rb") as file:
        assert file.read(raw.stat().st_size) == raw.read_bytes()
        assert not file.read().strip(b"\0")  # vpc rounds up
    assert other.stat().st_uid == user.uid
    assert stat.S_IMODE(other.stat().st_mode) == 0o600


def test_progress_is_told_from_little_to_all(raw: Path, user: Identity) -> None:
    told: list[float] = []
    convert(raw, "qcow2", user, progress=told.append)
    assert told == sorted(told)
    assert told[-1] == 100.0


def test_options_are_those_of_the_new_format(raw: Path, user: Identity) -> None:
    found = qemu_img.info(str(convert(raw, "vmdk", user, options=["subformat=streamOptimized"])), "vmdk", user)
    assert found["format-specific"]["data"]["create-type"] == "streamOptimized"
    assert found["virtual-size"] == raw.stat().st_size


def test_what_is_too_large_is_given_up_and_measured_before(raw: Path, user: Identity) -> None:
    with pytest.raises(qemu_img.Trouble, match="larger than it may be"):
        convert(raw, "qcow2", user, largest=MIB)
    assert raw.with_name("other").stat().st_size <= MIB
    assert 3 * MIB <= qemu_img.measure(str(raw), "raw", user) < 5 * MIB


def test_an_overlay_names_its_base(raw: Path, user: Identity) -> None:
    overlay = str(raw.with_name("overlay.qcow2"))
    qemu_img.create_overlay(str(raw), "raw", overlay, user)
    found, wanted = qemu_img.info(overlay, "qcow2", user), (overlay, str(raw), "raw")
    assert (found["filename"], found["backing-filename"], found["backing-filename-format"]) == wanted


def test_a_format_is_believed_and_never_found_out(raw: Path, user: Identity) -> None:
    assert qemu_img.info(str(convert(raw, "qcow2", user)), "raw", user)["format"] == "raw"
    with pytest.raises(qemu_img.Refused, match="not in qcow2 format"):
        qemu_img.info(str(raw), "qcow2", user)


@AS_ROOT
def test_it_can_read_and_write_no_more_than_the_user(raw: Path, user: Identity, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"root's own" * 1000)
    secret.chmod(0o600)
    with pytest.raises(qemu_img.Refused) as caught:
        qemu_img.convert(str(secret), "raw", str(raw.with_name("stolen")), "raw", user, seconds=60)
    assert caught.value.no_access
    link = raw.with_name("disk.qcow2")
    link.symlink_to(secret)
    for target in (secret, link):
        with pytest.raises(qemu_img.Refused):
            qemu_img.convert(str(raw), "raw", str(target), "raw", user, seconds=60)
    assert secret.read_bytes() == b"root's own" * 1000


@pytest.mark.parametrize("name", ["nbd:127.0.0.1:1", "json:{}", "-h", "file:x"])
def test_a_name_is_a_file_and_nothing_else(scratch: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(scratch)
    Path(name).write_bytes(bytes(MIB))
    assert qemu_img.info(name, "raw")["virtual-size"] == MIB


def test_errors_are_in_english_whatever_the_language(raw: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    monkeypatch.setenv("LANGUAGE", "de")
    with pytest.raises(qemu_img.Refused) as caught:
        qemu_img.info("/nonexistent/disk", "raw")
    assert caught.value.no_access


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Puts a qemu-img of the test's own before the real one."""

    def place(script: str) -> None:
        path = tmp_path / "bin" / "qemu-img"
        path.parent.mkdir(exist_ok=True)
        a_program(path, script)
        monkeypatch.setenv("PATH", f"{path.parent}:{os.environ['PATH']}")

    return place


def test_one_that_hangs_is_killed(stand_in, tmp_path: Path) -> None:
    stand_in(f"echo $$ > {tmp_path}/pid; exec sleep 1000")
    with pytest.raises(qemu_img.TooSlow, match="after 1 s"):
        qemu_img.info("/dev/null", "raw", seconds=1)
    assert not Path("/proc", (tmp_path / "pid").read_text().strip()).exists()


def test_one_that_says_nonsense_and_has_one_arena(stand_in) -> None:
    """Each of its own takes from the limit's addresses, until one day no thread can be made."""
    stand_in('echo "{\\"virtual-size\\": $MALLOC_ARENA_MAX}"')
    assert qemu_img.info("/dev/null", "raw") == {"virtual-size": 1}
    stand_in("echo '{'")
    with pytest.raises(qemu_img.Trouble, match="JSON"):
        qemu_img.info("/dev/null", "raw")
    stand_in("printf '(nonsense/100%%)\\r(50/100%%)\\r'")
    told: list[float] = []
    qemu_img.convert("/dev/null", "raw", "/dev/null", "raw", seconds=60, progress=told.append)
    assert told == [50.0]


def test_where_it_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for missing in ("prlimit", "qemu-img"):
        with pytest.raises(qemu_img.NotInstalled) as caught:
            qemu_img.info("/dev/null", "raw")
        assert caught.value.program == missing
        installed = shutil.which(missing, path=os.defpath)
        assert installed
        (tmp_path / missing).symlink_to(installed)


def test_nothing_of_the_environment_reaches_it(stand_in, tmp_path: Path, monkeypatch) -> None:
    stand_in(f"env > {tmp_path}/env; echo '{{\"virtual-size\": 1}}'")
    monkeypatch.setenv("LD_PRELOAD_OF_THE_JOB", "x")
    qemu_img.info("/dev/null", "raw")
    assert "OF_THE_JOB" not in (tmp_path / "env").read_text()
