"""A job's domain is defined while it is made: what is left of one is cleared, and no domain of anybody else's."""

from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree as etree

import libvirt
import pytest

from tests.domain.support import SCRIPTED
from tests.drivers.libvirt.support import URI, Job, driving, started
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


def define(
    job: Job, *, marked: bool, runs: bool = False, name: str = "", directory: object = None
) -> libvirt.virDomain:
    xml = etree.fromstring(SCRIPTED.format(memory=64, vcpus=1, devices=""))
    xml.find("name").text = name or job.name
    etree.SubElement(xml, "description").text = str(directory or job.scratch)
    if marked:
        domains.mark(xml)
    made = job._connection.defineXML(etree.tostring(xml, encoding="unicode"))
    if runs:
        made.create()
    return made


in_each_state = pytest.mark.parametrize("runs", [False, True], ids=["defined", "defined and running"])


@pytest.mark.parametrize("how", ["name", "directory", "UUID"])
@pytest.mark.parametrize("marked", [True, False], ids=["ours", "an administrator's"])
@in_each_state
def test_the_kill_mode_ends_what_is_ours_and_nothing_else(left: Job, how: str, marked: bool, runs: bool) -> None:
    uuid = define(left, marked=marked, runs=runs).UUIDString()
    words = {"name": [left.name], "directory": [str(left.scratch)], "UUID": [left.name, "uuid", uuid]}[how]
    made = daemon(environment("kvm", left.scratch), KILL, "vmtype", "kvm", "match", *words)
    assert made.returncode == 0, made.stderr
    domain = left.domain()
    assert (domain is None) == marked
    assert domain is None or (domain.isPersistent(), domain.isActive()) == (True, runs)


@in_each_state
def test_the_next_start_clears_it(left: Job, runs: bool) -> None:
    domain = define(left, marked=True, runs=runs)
    with started(left, []) as machine:
        assert left.domain().UUIDString() == machine.uuid != domain.UUIDString()
        assert not left.domain().isPersistent()
    assert left.domain() is None


def test_a_domain_of_an_administrators_stays(left: Job) -> None:
    define(left, marked=False)
    said = "is defined in libvirt, and jobs' domains never are"
    with driving(left, []) as (driver, ad), pytest.raises(errors.MachineFault, match=said):
        driver.start(ad)
    assert left.domain().isPersistent()


@in_each_state
def test_any_start_clears_what_is_left_of_a_job_that_never_comes_back(left: Job, runs: bool) -> None:
    """As after a reboot, when its directory has gone. What has a directory, or a mark of nobody's, stays."""
    gone = left.scratch.parent / "gone"
    gone.mkdir()  # until all is made: a start of another test would clear it
    define(left, marked=True, runs=runs, name=f"{left.name}-gone", directory=gone)
    lives = define(left, marked=True, name=f"{left.name}-lives")
    stranger = define(left, marked=False, name=f"{left.name}-stranger", directory=gone)
    gone.rmdir()
    try:
        with started(left, []):
            pass
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
    with driving(left, [], *more) as (driver, ad), pytest.raises(errors.Fault, match="gone"):
        driver.start(ad)
    assert left.domain() is None
    assert not nvram.exists()
