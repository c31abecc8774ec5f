"""A VM whose server's code is replaced or removed beneath it, as an upgrade and a removal do."""

import os
import shutil
import site
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import REPOSITORY
from tests.drivers.libvirt.support import WANTS, Job, done, until
from tests.peer import Peer, environment

pytestmark = pytest.mark.libvirt

SOURCE = REPOSITORY / "src/vmgahp"


def installed(directory: Path) -> Path:
    """A virtual environment with the package as a wheel has it, and all else of this one's: the package's place."""
    os.symlink(sys.executable, directory / "python")
    home = Path(os.path.realpath(sys.executable)).parent
    (directory / "pyvenv.cfg").write_text(f"home = {home}\ninclude-system-site-packages = false\n")
    (directory / "bin").mkdir()
    os.replace(directory / "python", directory / "bin/python")
    packages = directory / f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
    place = packages / "vmgahp"
    shutil.copytree(SOURCE, place, ignore=shutil.ignore_patterns("__pycache__"))
    (packages / "others.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    return place


def replace(place: Path) -> None:
    """Another version, none of whose modules can be used by the one before."""
    for path in place.rglob("*.py"):
        (new := path.with_suffix(".new")).write_text("raise AssertionError('of the next version')\n")
        new.replace(path)
    shutil.rmtree(place / "__pycache__", ignore_errors=True)


class Installed(Peer):
    """The daemon of an installation."""

    def __init__(self, place: Path, job: Job) -> None:
        python = str(place.parents[3] / "bin/python")
        # What follows is how tests start this clone's daemon.
        through = ("sh", "-c", 'python=$1; shift 5; exec "$python" -I -m vmgahp "$@"', "sh", python)
        environ = environment("kvm", job.scratch, VM_ALLOW_EMULATION=True, VM_STOP_TIMEOUT=0)
        super().__init__(environ, through=through)


@pytest.mark.parametrize("change", [replace, shutil.rmtree], ids=["upgraded", "removed"])
def test_a_vm_lives_on_with_the_code_of_its_server(job: Job, tools: Path, change: Callable[[Path], None]) -> None:
    place = installed(tools)
    with Installed(place, job) as peer:
        assert peer.line().startswith("$VMGahpVersion")
        peer.send_ad(*job.ad(WANTS))
        assert peer.run("START", "kvm") == ["0", "1"]
        change(place)
        until(lambda: "2\n" in job.console(), "the guest counts to two")
        done(peer, "SUSPEND", "RESUME", "CHECKPOINT")
        assert peer.run("STATUS", 1) == ["0", "STATUS=Suspended"]
        done(peer, "STOP")
        peer.quit()
    assert job.domain() is None
    assert (job.scratch / "vm_checkpoint.mem").exists()
