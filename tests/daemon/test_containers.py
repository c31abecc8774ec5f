"""The check of containers: an image of our own, programs that work or do not, and the report to the startd."""

import os
from pathlib import Path
from time import monotonic

import pytest

from vmgahp import errors
from vmgahp.config import Settings
from vmgahp.daemon import containers, probe
from vmgahp.drivers.base import Survey
from vmgahp.findings import OFF, OK, UNKNOWN, Finding, Late
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


def a_program(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def stand_in(tmp_path: Path, status: int = 37) -> str:
    return a_program(tmp_path / "docker", RUNS.format(status=status, log=tmp_path / "asked"))


def seen(name: str, path: str, seconds: float = 60) -> str:
    return containers.version(name, path, ME, monotonic() + seconds)


def test_a_container_that_ran(tmp_path: Path) -> None:
    assert seen("docker", stand_in(tmp_path)) == "Docker version 20.10.24, build x"
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
    with pytest.raises(errors.MachineFault, match=f"docker runs no container: {reason}"):
        seen("docker", a_program(tmp_path / "docker", text))


def test_a_program_that_hangs_says_nothing_and_delays_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = {"docker": a_program(tmp_path / "hanging", "exec sleep 600"), "podman": stand_in(tmp_path)}
    monkeypatch.setattr(containers, "CLEANUP", 0.1)
    monkeypatch.setattr(containers, "which", paths.get)
    with pytest.raises(Late, match="docker had run no container"):
        seen("docker", paths["docker"], 0.2)
    attributes, found = containers.judge(containers.look(ME, monotonic() + 5))
    assert attributes == {"HasPodman": True}
    assert [one.verdict for one in found] == [UNKNOWN, OK]


def test_what_the_startd_is_told() -> None:
    works = {"docker": "Docker version 20.10.24, build x", "podman": "podman version 5.4.2"}
    attributes, found = containers.judge(works)
    assert attributes == {"HasDocker": True, "DockerVersion": "Docker version 20.10.24, build x", "HasPodman": True}
    assert {one.verdict for one in found} == {OK}
    for fault, verdict in ((errors.MachineFault("no daemon", ""), OFF), (Late("not yet", ""), UNKNOWN)):
        attributes, found = containers.judge(dict.fromkeys(works, fault))
        assert attributes == {}, "false would take the place of what the startd has seen"
        assert {one.verdict for one in found} == {verdict}
    assert containers.judge({})[1][0].verdict == OFF


def test_it_is_asked_where_the_administrator_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    class Driver:
        def survey(self, end: float) -> Survey:
            return Survey([Finding("hypervisor", OK, "it", "works")], vm_types=["kvm"])

    monkeypatch.setattr(containers, "look", lambda _identity, _end: {"podman": "podman version 5"})
    for value, expected in (("true", True), ("false", None)):
        settings = Settings({"VM_MEMORY": "64", "VM_PROBE_DOCKER": value})
        found = probe.probe("kvm", settings, Driver(), identity=ME)
        assert found.attributes.get("HasPodman") is expected
        assert "HasDocker" not in found.attributes
