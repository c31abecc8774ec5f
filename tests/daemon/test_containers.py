"""Whether containers run here: an image of our own, programs that work or do not, and what the startd is told."""

import os
from pathlib import Path
from time import monotonic

import pytest

from vmgahp.config import Settings
from vmgahp.daemon import containers, probe
from vmgahp.daemon.containers import Seen
from vmgahp.drivers.base import Survey
from vmgahp.findings import OFF, OK, UNKNOWN, Finding
from vmgahp.host import proof, runtime_dir
from vmgahp.host.job_user import Identity

ME = Identity(os.getuid(), os.getgid())

RUNS = """case $1 in -v) echo "Docker version 20.10.24, build x"; exit ;; esac
echo "$@" >>{log}
for word in "$@"; do
    case $word in
    import) exit 0 ;;
    run) exit {status} ;;
    rmi) exit 0 ;;
    esac
done
exit 9
"""


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where facts are written down, for this test alone."""
    place = tmp_path / "facts"
    place.mkdir(mode=0o755)
    if os.geteuid() == 0:
        monkeypatch.setattr(runtime_dir, "ROOT_BASE", str(place))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(place))
    return place


def a_program(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def stand_in(tmp_path: Path, status: int = 37) -> str:
    return a_program(tmp_path / "docker", RUNS.format(status=status, log=tmp_path / "asked"))


def test_a_container_that_ran(tmp_path: Path) -> None:
    assert containers.trouble("docker", stand_in(tmp_path), ME) == ""
    assert "rmi --force localhost/vmgahp-probe:" in (tmp_path / "asked").read_text(), "the image is forgotten"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("echo 'Cannot connect to the Docker daemon' >&2; exit 1", "Cannot connect to the Docker daemon"),
        ('for word in "$@"; do [ "$word" = run ] && exit 0; done; exit 0', "it says nothing"),
        ("kill -9 $$", "it says nothing"),
    ],
)
def test_one_that_did_not(tmp_path: Path, text: str, reason: str) -> None:
    assert containers.trouble("docker", a_program(tmp_path / "docker", text), ME) == reason


def test_a_program_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(containers, "DEADLINE", 0.2)
    path = a_program(tmp_path / "docker", "exec sleep 600")
    assert containers.trouble("docker", path, ME) == "it made no image within 0 s"


def test_a_probe_is_told_and_the_next_one_believes_it(
    tmp_path: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = stand_in(tmp_path)
    monkeypatch.setattr(containers, "which", lambda name: path if name == "docker" else None)
    [seen] = containers.look(ME, monotonic() + 60)
    assert seen == Seen("docker", "Docker version 20.10.24, build x", "")
    proof.keep("docker", containers._stands_on("docker", path, ME), "it did not run")
    [seen] = containers.look(ME, monotonic() + 60)
    assert seen.reason == "it did not run", "as it is written down"
    with proof.LookAnew():
        assert containers.look(ME, monotonic() + 60)[0].reason == "", "the doctor sees for itself"


def test_a_probe_that_must_answer_does_not_wait(tmp_path: Path, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marker = tmp_path / "go"
    os.mkfifo(marker)
    path = a_program(tmp_path / "docker", f'case $1 in -v) echo v ;; *) read line <"{marker}"; exit 1 ;; esac')
    monkeypatch.setattr(containers, "which", lambda name: path if name == "docker" else None)
    with proof.LookAnew():
        [seen] = containers.look(ME, monotonic() + 0.3)
    assert seen.reason is None
    marker.write_text("go\n")


def test_what_the_startd_is_told() -> None:
    seen = (Seen("docker", "Docker version 20.10.24, build x", ""), Seen("podman", "podman version 5.4.2", ""))
    attributes, found = containers.judge(seen)
    assert attributes == {"HasDocker": True, "DockerVersion": "Docker version 20.10.24, build x", "HasPodman": True}
    assert {one.verdict for one in found} == {OK}
    for reason, verdict in (("no daemon", OFF), (None, UNKNOWN)):
        attributes, found = containers.judge(tuple(one._replace(reason=reason) for one in seen))
        assert attributes == {}, "false would take the place of what the startd has seen"
        assert {one.verdict for one in found} == {verdict}
    assert containers.judge(())[1][0].verdict == OFF


def test_it_is_asked_where_the_administrator_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    class Driver:
        def survey(self, end: float) -> Survey:
            return Survey([Finding("hypervisor", OK, "it", "works")], vm_types=["kvm"])

    monkeypatch.setattr(containers, "look", lambda _identity, _end: (Seen("podman", "podman version 5", ""),))
    for value, expected in (("true", True), ("false", None)):
        settings = Settings({"VM_MEMORY": "64", "VM_PROBE_DOCKER": value})
        found = probe.probe("kvm", settings, Driver(), identity=ME)
        assert found.attributes.get("HasPodman") is expected
        assert "HasDocker" not in found.attributes
