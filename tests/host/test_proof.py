"""What was seen to work is believed while it stands, and while nobody else can have written it."""

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import vmgahp
from vmgahp.host import kvm, proof, runtime_dir

IT, STANDS_ON = proof.KVM, "boot of-today\nkernel the-one"


class Looks:
    """A look that counts itself."""

    def __init__(self, reason: str | None = None, *, stays: bool = True) -> None:
        self.found = reason, stays
        self.times = 0

    def __call__(self) -> tuple[str | None, bool]:
        self.times += 1
        return self.found


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where this user's proofs are in this test; others may pass through to them."""
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        roots, own = Path(directory, "roots"), Path(directory, "own")
        monkeypatch.setattr(runtime_dir, "ROOT_BASE", str(roots))
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(own))
        own.mkdir(mode=0o700)
        yield roots if os.geteuid() == 0 else own


def is_believed(stands_on: str = STANDS_ON) -> bool:
    """Whether the fact that `made` has made is taken from its file."""
    return proof.kept(IT, stands_on) is not None


@pytest.fixture
def made(place: Path) -> Path:
    proof.shared(IT, STANDS_ON, Looks())
    assert is_believed()
    return place / "proof-kvm"


def test_it_is_made_once_and_shared(place: Path) -> None:
    looks = Looks()
    assert [proof.shared(IT, STANDS_ON, looks).path for _ in range(3)] == ["", *2 * [f"{place}/proof-kvm"]]
    assert looks.times == 1
    there = (place / "proof-kvm").stat()
    assert (there.st_uid, there.st_mode & 0o022) == (os.geteuid(), 0)
    assert [path.name for path in place.iterdir()] == ["proof-kvm"]


def test_a_failure_is_kept_with_its_reason_where_the_next_look_would_find_the_same(place: Path) -> None:
    passing, lasting = Looks("it was busy", stays=False), Looks("it\ncrawls", stays=True)
    proof.shared(IT, STANDS_ON, passing)
    assert not is_believed()
    proof.shared(IT, STANDS_ON, lasting)
    found = proof.shared(IT, STANDS_ON, lasting)
    assert (found.reason, lasting.times) == ("it crawls", 1)
    assert found.told("It crawls.") == f"It crawls (as seen 0 s ago, by {place}/proof-kvm)."


def test_what_it_stands_on_has_changed(made: Path) -> None:
    assert not is_believed("boot of-tomorrow\nkernel the-one")
    proof.shared(IT, "other", Looks())
    assert is_believed("other")
    assert not is_believed()


def test_a_version_of_this_package_believes_no_other(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "__version__", f"{vmgahp.__version__}.1")
    assert not is_believed()


@pytest.mark.parametrize(
    ("seconds", "reason", "believed"),
    [
        (proof.FAILURE_LASTS - 5, "it crawls", True),
        (proof.FAILURE_LASTS + 5, "it crawls", False),
        (proof.FAILURE_LASTS + 5, None, True),
        (proof.LASTS + 5, None, False),
        (-5, None, False),
    ],
)
def test_it_grows_old(
    place: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, reason: str | None, believed: bool
) -> None:
    """A failure sooner: an administrator may have mended it. What is of the future is of another boot."""
    proof.shared(IT, STANDS_ON, Looks(reason))
    later = time.clock_gettime(time.CLOCK_BOOTTIME) + seconds
    monkeypatch.setattr(proof, "_now", lambda: later)
    assert is_believed() == believed


FORGERIES: dict[str, Callable[[Path], object]] = {
    "cut off": lambda path: path.write_bytes(path.read_bytes()[:-3]),
    "cut off in the middle": lambda path: path.write_bytes(path.read_bytes()[:40]),
    "empty": lambda path: path.write_bytes(b""),
    "binary junk": lambda path: path.write_bytes(bytes(range(256)) * 16),
    "more than a proof has": lambda path: path.write_bytes(path.read_bytes() + b"x" * proof.LONGEST),
    "a second verdict": lambda path: path.write_bytes(path.read_bytes().replace(b"\nend", b"\n\nend")),
    "no time": lambda path: path.write_bytes(path.read_bytes().replace(b"\nmade ", b"\nmade nan ")),
    "not a number": lambda path: path.write_text(f"vmgahp {vmgahp.__version__}\n{STANDS_ON}\nmade nan\n\nend\n"),
    "no file": lambda path: path.unlink(),
    "a directory": lambda path: (path.unlink(), path.mkdir()),
    "a link": lambda path: (path.rename(f"{path}.other"), path.symlink_to(f"{path}.other")),
    "a file with another name": lambda path: os.link(path, f"{path}.other"),
    "a FIFO": lambda path: (path.unlink(), os.mkfifo(path)),
    "others may write to it": lambda path: path.chmod(0o666),
    "its group may write to it": lambda path: path.chmod(0o664),
    "others may write to its directory": lambda path: path.parent.chmod(0o777),
    "its directory is a link of others": lambda path: (
        path.parent.rename(f"{path.parent}.other"),
        path.parent.symlink_to(f"{path.parent}.other"),
        path.parent.parent.chmod(0o777),
    ),
}


@pytest.mark.parametrize("forge", FORGERIES.values(), ids=FORGERIES)
def test_no_other_file_is_believed(made: Path, forge: Callable[[Path], object]) -> None:
    forge(made)
    assert not is_believed()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
@pytest.mark.parametrize("what", ["the file", "its directory"])
def test_root_believes_nobody_else(made: Path, what: str) -> None:
    os.chown(made if what == "the file" else made.parent, 54321, 54321)
    assert not is_believed()
    proof.shared(IT, STANDS_ON, Looks())
    assert is_believed() == (what == "the file"), "a file of another's is replaced, and no directory written to"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_user_believes_root_and_writes_nothing_of_roots(made: Path) -> None:
    before = made.read_bytes()
    if (pid := os.fork()) == 0:
        status = 1
        try:
            os.setgroups([])
            os.setgid(54321)
            os.setuid(54321)
            status = 0 if is_believed() and not proof.shared(IT, "other", Looks()).path else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert made.read_bytes() == before


def test_two_who_write_at_once_leave_one_whole_proof(made: Path) -> None:
    children = []
    for number in range(8):
        if (pid := os.fork()) == 0:
            try:
                for _ in range(50):
                    proof.keep(IT, STANDS_ON, f"{number} " + "x" * 4000)
            finally:
                os._exit(0)
        children.append(pid)
    while children:
        for pid in children[:]:
            if os.waitpid(pid, os.WNOHANG)[0]:
                children.remove(pid)
        found = proof.kept(IT, STANDS_ON)
        assert found
        assert len(found.reason) in (0, 4002)
    assert list(made.parent.iterdir()) == [made]


def test_no_room_is_no_reason_to_fail(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "write", lambda _descriptor, data: len(data) - 1)
    assert not proof.shared(IT, STANDS_ON, Looks()).reason
    monkeypatch.undo()
    assert list(place.iterdir()) == []


def test_the_doctor_sees_for_itself_and_writes_nothing(made: Path) -> None:
    before = made.read_bytes()
    looks = Looks("it crawls")
    with proof.LookAnew():
        assert proof.shared(IT, STANDS_ON, looks).reason == "it crawls"
    assert (looks.times, made.read_bytes()) == (1, before)
    told = proof.kept(IT, STANDS_ON)
    assert told is not None
    assert not told.reason, "what others believe can still be said"
    assert proof.shared(IT, STANDS_ON, looks).path


def test_it_can_be_forgotten(made: Path) -> None:
    proof.forget()
    assert not made.exists()
    proof.forget()


def test_kvm_is_proved_once(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvm, "unopenable", lambda: None)
    monkeypatch.setattr(kvm, "prove", lambda _deadline: (None, True))
    assert not proof.of_kvm().path
    monkeypatch.setattr(kvm, "prove", lambda _deadline: ("it is gone", True))
    assert proof.of_kvm().path
    monkeypatch.setattr(kvm, "unopenable", lambda: "it may not be opened")
    assert proof.of_kvm().reason == "it may not be opened", "whether the device opens costs nothing to know"


@pytest.mark.parametrize("what", ["boot_id", "parameter", "module", "device", "microcode", "kernel"])
def test_what_kvm_stands_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    device, cpuinfo = tmp_path / "kvm", tmp_path / "cpuinfo"
    parameters = tmp_path / "module/kvm_amd/parameters"
    parameters.mkdir(parents=True)
    (parameters / "nested").write_text("1\n")
    device.touch()
    cpuinfo.write_text("model\t: 1\nmicrocode\t: 0x1\n\nmodel\t: 1\n")
    monkeypatch.setattr(kvm, "DEVICE", str(device))
    monkeypatch.setattr(proof, "_MODULES", str(tmp_path / "module"))
    monkeypatch.setattr(proof, "_CPUINFO", str(cpuinfo))
    monkeypatch.setattr(proof, "_MICROCODE", str(tmp_path / "none"))
    before = proof.machine()
    assert proof.machine() == before
    assert "parameter kvm_amd.nested 1" in before.split("\n")
    if what == "boot_id":
        boot = tmp_path / "boot_id"
        boot.write_text("another\n")
        monkeypatch.setattr(proof, "_BOOT_ID", str(boot))
    elif what == "parameter":
        (parameters / "nested").write_text("0\n")
    elif what == "module":
        parameters.parent.rename(tmp_path / "unloaded")
        parameters.mkdir(parents=True)
        (parameters / "nested").write_text("1\n")
    elif what == "device":
        device.chmod(0o600)
    elif what == "microcode":
        cpuinfo.write_text("model\t: 1\nmicrocode\t: 0x2\n")
    else:
        monkeypatch.setattr(os, "uname", lambda: os.uname_result(("Linux", "here", "99", "#1", "x86_64")))
    assert proof.machine() != before
