"""The shipped contract suite against the drivers that are here, and against one that comes from elsewhere."""

import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.drivers import small_driver
from tests.drivers.support import WHO, Emulated, any_hypervisor, only
from vmgahp import errors, vm_types
from vmgahp.config import Settings
from vmgahp.drivers import base
from vmgahp.drivers.simulated import SimulatedDriver
from vmgahp.job.ad import JobAd
from vmgahp.testing.contract import DriverContract, Subject


class Simulated(Subject):
    vm_type = "simulated"
    has_guest = False

    def prepare(self, scratch: Path, number: int, ends: bool) -> dict[str, str]:
        os.chown(scratch, self.identity.uid, self.identity.gid)
        return {}

    def exists(self, job: JobAd) -> bool:
        return job.working_dir() in SimulatedDriver._machines

    def bad_jobs(self) -> dict[str, JobAd]:
        job = self.job(2)
        return {"disk": self.changed(job, Simulated_Fault='"job"'), "no memory": self.changed(job, JobVMMemory=None)}

    def unfit(self) -> Settings:
        return Settings({"VM_MEMORY": "0"})

    def power_off(self, job: JobAd) -> None:
        SimulatedDriver._machines[job.working_dir()].destroy()


@pytest.mark.qemu
class TestAnyHypervisor(DriverContract):
    @pytest.fixture
    def subject(self, scratch: Path) -> Iterator[Subject]:
        with any_hypervisor(scratch) as subject:
            yield subject


@pytest.mark.libvirt
class TestQemu(DriverContract):
    @pytest.fixture
    def subject(self, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Subject]:
        # A machine without libvirt is known at once; patience with a restart has its own tests.
        monkeypatch.setattr("vmgahp.drivers.libvirt.link.connection.RECONNECT_DEADLINE", 2.0)
        with Emulated(scratch.parent, Settings({"VM_MEMORY": "1024", "VM_STOP_TIMEOUT": "1"}), WHO) as subject:
            yield subject


class TestSimulated(DriverContract):
    @pytest.fixture
    def subject(self, tmp_path: Path) -> Iterator[Subject]:
        with Simulated(tmp_path, Settings({"VM_MEMORY": "1024"}), WHO) as subject:
            yield subject


class Chosen(Simulated):
    vm_type = "any"

    def unfit(self) -> Settings:
        return Settings({"VM_MEMORY": "0", "VM_ANY_TYPES": "simulated"})


class TestAny(DriverContract):
    @pytest.fixture
    def subject(self, scratch: Path) -> Iterator[Subject]:
        with Chosen(scratch.parent, Settings({"VM_MEMORY": "1024", "VM_ANY_TYPES": "simulated"}), WHO) as made:
            yield made


class Small(Subject):
    """A driver that knows nothing but the life of a VM; it is shown as an example too."""

    vm_type = "small"
    checkpoint = False

    def prepare(self, scratch: Path, number: int, ends: bool) -> dict[str, str]:
        os.chown(scratch, self.identity.uid, self.identity.gid)
        return {}

    def exists(self, job: JobAd) -> bool:
        return small_driver.find(job.working_dir()) != 0

    def count(self, job: JobAd) -> int:
        with suppress(FileNotFoundError):
            return Path(job.working_dir(), "count").stat().st_size
        return 0

    def power_off(self, job: JobAd) -> None:
        small_driver.tell(job.working_dir(), signal.SIGTERM)

    def bad_jobs(self) -> dict[str, JobAd]:
        return {"no memory": self.changed(self.job(2), JobVMMemory=None)}

    def unfit(self) -> Settings:
        return Settings({"VM_MEMORY": "0"})


class TestOneOfHundredLines(DriverContract):
    @pytest.fixture
    def subject(self, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Subject]:
        assert len([line for line in Path(small_driver.__file__).read_text().splitlines() if line]) <= 100
        monkeypatch.setitem(vm_types.DRIVERS, "small", f"{small_driver.__name__}:SmallDriver")
        with Small(scratch.parent, Settings({"VM_MEMORY": "1024", "VM_STOP_TIMEOUT": "5"}), WHO) as subject:
            yield subject


class ThirdParty(Simulated):
    """A driver that is not ours: known to nobody but the entry points of its package."""

    vm_type = "theirs"


@only("test_a_started_vm_runs", "test_the_survey_of_a_machine_that_works")
class TestOneFromElsewhere(DriverContract):
    @pytest.fixture
    def subject(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Subject]:
        """As if a package with this metadata was installed."""
        site = tmp_path / "site"
        info = site / "theirs-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("[vmgahp.drivers]\ntheirs = theirs_driver:TheirDriver\n")
        (site / "theirs_driver.py").write_text(
            "from vmgahp.drivers.base import Survey\n"
            "from vmgahp.drivers.simulated import SimulatedDriver\n\n\n"
            "class TheirDriver(SimulatedDriver):\n"
            "    def survey(self, end):\n"
            "        found = super().survey(end)\n"
            "        return Survey(found.findings, hypervisors=['theirs'], vm_types=['theirs'])\n"
        )
        monkeypatch.syspath_prepend(site)
        importlib.invalidate_caches()
        with ThirdParty(tmp_path / "jobs", Settings({"VM_MEMORY": "1024"}), WHO) as subject:
            subject.directory.mkdir()
            yield subject


def test_what_is_no_driver_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(vm_types.DRIVERS, "odd", "vmgahp.errors:Fault")
    with pytest.raises(errors.MachineFault, match="is not a Driver"):
        base.find("odd")
    monkeypatch.setitem(vm_types.DRIVERS, "missing", "vmgahp.drivers.no_such_module:Driver")
    with pytest.raises(errors.MachineFault, match="cannot be loaded"):
        base.find("missing")
    with pytest.raises(errors.MachineFault, match="No driver is installed"):
        base.find("nobodys")


def test_the_suite_itself_is_not_of_the_server() -> None:
    """A daemon must not need pytest."""
    code = "import sys, vmgahp.daemon.server, vmgahp.drivers.libvirt, vmgahp.commands.doctor; "
    code += "sys.exit('pytest' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
