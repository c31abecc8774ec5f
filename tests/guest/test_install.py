"""The agent as it is put into images that are started without cloud-init."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.guest.support import SCRIPTS

AGENT = "usr/local/sbin/vmgahp-run-agent"


def install(tree: Path, shell: str = "sh") -> subprocess.CompletedProcess[str]:
    command = [*shell.split(), SCRIPTS / "agent", "install", "--root", tree]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize("shell", ["dash", "bash", "busybox sh"])
def test_systemd(tmp_path: Path, shell: str) -> None:
    if not shutil.which(shell.split()[0]):
        pytest.skip(f"needs {shell.split()[0]}")
    (tmp_path / "usr/lib/systemd").mkdir(parents=True)
    (tmp_path / "usr/lib/systemd/systemd").touch()
    for _ in range(2):
        assert install(tmp_path, shell).returncode == 0
    assert (tmp_path / AGENT).read_bytes() == (SCRIPTS / "agent").read_bytes()
    assert (tmp_path / AGENT).stat().st_mode & 0o777 == 0o755
    unit = tmp_path / "etc/systemd/system/vmgahp-run.service"
    assert f"\nExecStart=/bin/sh /{AGENT} start\n" in unit.read_text()
    wanted = tmp_path / "etc/systemd/system/multi-user.target.wants/vmgahp-run.service"
    assert str(wanted.readlink()) == "/etc/systemd/system/vmgahp-run.service"


def test_openrc(tmp_path: Path) -> None:
    (tmp_path / "sbin").mkdir()
    (tmp_path / "sbin/openrc-run").touch()
    assert install(tmp_path).returncode == 0
    service = tmp_path / "etc/init.d/vmgahp-run"
    assert service.read_text().startswith("#!/sbin/openrc-run\n")
    assert f"\ncommand=/{AGENT}\ncommand_args=start\n" in service.read_text()
    assert service.stat().st_mode & 0o777 == 0o755
    assert str((tmp_path / "etc/runlevels/default/vmgahp-run").readlink()) == "/etc/init.d/vmgahp-run"


@pytest.mark.parametrize("before", [None, "#!/bin/sh -e\necho here\nexit 0\n"])
def test_rc_local(tmp_path: Path, before: str | None) -> None:
    (tmp_path / "etc").mkdir()
    rc = tmp_path / "etc/rc.local"
    if before:
        rc.write_text(before)
    for _ in range(2):
        assert install(tmp_path).returncode == 0
    kept = "#!/bin/sh -e\necho here\n" if before else "#!/bin/sh\n"
    assert rc.read_text() == f"{kept}/bin/sh /{AGENT} start &\nexit 0\n"
    assert rc.stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize("link", ["usr", "etc", "etc/init.d", "etc/init.d/vmgahp-run"])
def test_no_link_of_the_image_leads_out_of_it(tmp_path: Path, link: str) -> None:
    tree, outside = tmp_path / "tree", tmp_path / "outside"
    (tree / "sbin").mkdir(parents=True)
    (tree / "sbin/openrc-run").touch()
    (tree / link).parent.mkdir(parents=True, exist_ok=True)
    outside.mkdir()
    (tree / link).symlink_to(outside)
    done = install(tree)
    assert done.returncode == 1
    assert done.stderr == f"vmgahp-run: {tree / link} is a link, which may lead out of {tree}\n"
    assert list(outside.iterdir()) == []


def test_what_it_does_not_understand(tmp_path: Path) -> None:
    for arguments in (["install", tmp_path], ["install", "--root"], ["stop"]):
        done = subprocess.run(["sh", SCRIPTS / "agent", *arguments], capture_output=True, text=True)
        assert done.returncode == 2
        assert done.stderr.startswith("usage: ")
