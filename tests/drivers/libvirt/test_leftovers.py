"""A job's domain is defined while it is made: what is left of one is cleared, and no domain of anybody else's."""

from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree as etree

import libvirt
import pytest

from tests.domain.support import SCRIPTED
from tests.drivers.libvirt.support import URI, Job, driver_for
from tests.peer import daemon, environment
from vmgahp import errors
from vmgahp.cli import KILL
from vmgahp.drivers.libvirt.link import domains
from vmgahp.drivers.libvirt.start import capabilities as firmwares

pytestmark = pytest.mark.libvirt


@pytest.fixture
def left(job: Job) -> Iterator[Job]:
    """A job of which nothing is defined when the test is over."""
    yield job
    if (domain := job.domain()) is not None and domain.isPersistent():
        domain.undefineFlags(libvirt.VIR_DOMAIN_UNDEFINE_NVRAM)


def define(job: Job, *, marked: bool, name: str = "", directory: object = None) -> libvirt.virDomain:
    xml = etree.fromstring(SCRIPTED.format(memory=64, vcpus=1, devices=""))
    xml.find("name").text = name or job.name
    etree.SubElement(xml, "description").text = str(directory or job.scratch)
    if marked:
        domains.mark(xml)
    return job._connection.defineXML(etree.tostring(xml, encoding="unicode"))


def kill(job: Job, how: str, uuid: str) -> str:
    words = {"name": [job.name], "directory": [str(job.scratch)], "UUID": [job.name, "uuid", uuid]}[how]
    made = daemon(environment("kvm", job.scratch), KILL, "vmtype", "kvm", "match", *words)
    assert made.returncode == 0, made.stderr
    return made.stderr


hows = pytest.mark.parametrize("how", ["name", "directory", "UUID"])


@hows
@pytest.mark.parametrize("runs", [False, True], ids=["defined", "defined and running"])
def test_the_kill_mode_leaves_nothing(left: Job, how: str, runs: bool) -> None:
    domain = define(left, marked=True)
    if runs:
        domain.create()
    kill(left, how, domain.UUIDString())
    assert left.domain() is None


@hows
@pytest.mark.parametrize("runs", [False, True], ids=["defined", "defined and running"])
def test_the_kill_mode_spares_what_an_administrator_has_defined(left: Job, how: str, runs: bool) -> None:
    domain = define(left, marked=False)
    if runs:
        domain.create()
    kill(left, how, domain.UUIDString())
    assert left.domain().isPersistent()
    assert left.domain().isActive() == runs


@pytest.mark.parametrize("runs", [False, True], ids=["defined", "defined and running"])
def test_the_next_start_clears_it(left: Job, runs: bool) -> None:
    domain = define(left, marked=True)
    if runs:
        domain.create()
    log: list[str] = []
    driver, ad = driver_for(left, log)
    machine = driver.start(ad)
    try:
        assert left.domain().UUIDString() == machine.uuid != domain.UUIDString()
        assert not left.domain().isPersistent()
    finally:
        machine.destroy()
        driver.close()
    assert left.domain() is None


def test_a_domain_of_an_administrators_stays(left: Job) -> None:
    define(left, marked=False)
    driver, ad = driver_for(left, [])
    with pytest.raises(errors.MachineFault, match="is defined in libvirt, and jobs' domains never are"):
        driver.start(ad)
    driver.close()
    assert left.domain().isPersistent()


@pytest.mark.parametrize("runs", [False, True], ids=["defined", "defined and running"])
def test_any_start_clears_what_is_left_of_a_job_that_never_comes_back(left: Job, runs: bool) -> None:
    """As after a reboot, when its directory has gone. What has a directory, or a mark of nobody's, stays."""
    gone = left.scratch.parent / "gone"
    gone.mkdir()  # until all is made: a start of another test would clear it
    orphan = define(left, marked=True, name=f"{left.name}-gone", directory=gone)
    lives = define(left, marked=True, name=f"{left.name}-lives")
    stranger = define(left, marked=False, name=f"{left.name}-stranger", directory=gone)
    if runs:
        orphan.create()
    gone.rmdir()
    try:
        driver, ad = driver_for(left, [])
        driver.start(ad).destroy()
        driver.close()
        with pytest.raises(libvirt.libvirtError, match="not found"):
            left._connection.lookupByName(f"{left.name}-gone")
        assert lives.isPersistent()
        assert stranger.isPersistent()
    finally:
        lives.undefine()
        stranger.undefine()


@pytest.mark.parametrize("firmware", ["bios", "uefi"])
def test_a_libvirtd_that_goes_away_is_transient(left: Job, monkeypatch: pytest.MonkeyPatch, firmware: str) -> None:
    """The start fails, and its end finds the domain defined and running."""
    nvram = Path(firmwares.firmware_directory(URI)) / f"{left.name}_VARS.fd"

    usual, left_to_do = domains.undefine, [True]

    def go_away(domain: libvirt.virDomain) -> None:
        if domain.name() != left.name or not left_to_do:  # another test's may be swept by this start
            usual(domain)
            return
        left_to_do.clear()
        assert domain.isPersistent()
        assert domain.isActive()
        assert nvram.exists() == (firmware == "uefi")
        raise libvirt.libvirtError("the connection is gone")

    monkeypatch.setattr(domains, "undefine", go_away)
    more = (f'VMPARAM_vm_Firmware = "{firmware}"', 'VMPARAM_vm_Disk = "guest.img:vda:w:raw"')
    driver, ad = driver_for(left, [], ad=more)
    with pytest.raises(errors.Fault, match="gone"):
        driver.start(ad)
    driver.close()
    assert left.domain() is None
    assert not nvram.exists()
