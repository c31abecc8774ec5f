"""VM_LIBVIRT_URI and VM_LIBVIRT_DOMAIN_TYPE: any hypervisor that libvirt knows, and what is wrong with a choice.

The contract is kept by libvirt's test hypervisor (test_contract.py) and by containers (tests/system/pool/test_lxc.py).
"""

import contextlib
import os
import signal
from pathlib import Path
from time import monotonic

import libvirt
import pytest

from tests.drivers.libvirt.support import done, words_of
from tests.drivers.support import ANY, TEST_URI, URI, WHO, AnyHypervisor, Emulated
from tests.lab.programs import a_program
from tests.peer import Peer, environment
from vmgahp import errors, findings, lifecycle
from vmgahp.config import Settings
from vmgahp.drivers.base import Survey
from vmgahp.drivers.libvirt.driver import LibvirtDriver
from vmgahp.drivers.libvirt.life.machine import LibvirtMachine
from vmgahp.host import kvm
from vmgahp.job.ad import JobAd
from vmgahp.testing.contract import goes_on


def survey(**settings: str) -> Survey:
    with contextlib.closing(LibvirtDriver("libvirt", Settings(ANY | settings), WHO, lambda _line: None)) as driver:
        return driver.survey(monotonic() + 60)


def test_what_the_probe_says_of_it() -> None:
    found = survey()
    assert findings.first_bad(found.findings) is None
    assert (found.hypervisors, found.vm_types, found.networking) == (["test"], ["libvirt"], ["nat"])
    verdicts = {finding.check: finding.verdict for finding in found.findings}
    assert verdicts == {"libvirt": findings.OK, "network nat": findings.OK, "network user": findings.OFF}
    assert found.attributes["suspend"] is found.attributes["checkpoint"] is False
    assert "accel" not in found.attributes


def test_kvm_is_checked_for_each_start_and_sooner_where_one_is_to_come(monkeypatch: pytest.MonkeyPatch) -> None:
    reasons = ["", "its guests crawl", "it is gone"]
    monkeypatch.setattr(kvm, "check", lambda: reasons.pop(0))
    with contextlib.closing(LibvirtDriver("kvm", Settings(), WHO, lambda _line: None)) as driver:
        driver.get_ready()
        assert driver._domain_type() == "kvm"
        for reason in reasons[:]:
            with pytest.raises(errors.MachineFault, match=reason):
                driver._domain_type()


@pytest.mark.parametrize(
    ("settings", "seen"),
    [
        ({"VM_LIBVIRT_DOMAIN_TYPE": "lxc"}, "no domains of that type"),
        ({"VM_LIBVIRT_DOMAIN_TYPE": "no type"}, "is no domain type"),
        ({"VM_LIBVIRT_URI": "test:///nonexistent.xml"}, "cannot be reached"),
    ],
)
def test_a_choice_that_does_not_work(subject: AnyHypervisor, settings: dict[str, str], seen: str) -> None:
    bad = findings.first_bad(survey(**settings).findings)
    assert seen in bad.seen
    assert bad.hint
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vmgahp.drivers.libvirt.link.connection.RECONNECT_DEADLINE", 0.5)
        with pytest.raises(errors.MachineFault, match=seen):
            subject.driver(Settings(ANY | settings)).start(subject.job())


def test_it_is_for_the_vm_type_libvirt_alone(subject: AnyHypervisor) -> None:
    for vm_type in ("kvm", "qemu"):
        driver = LibvirtDriver(vm_type, Settings(ANY | {"VM_ALLOW_EMULATION": "true"}), WHO, subject.log.append)
        assert driver._domain_type() in ("kvm", "qemu")
        driver.close()


def test_a_script_needs_no_disk_and_the_built_in_description_does(subject: AnyHypervisor) -> None:
    diskless = subject.changed(subject.job(), VMPARAM_vm_Disk=None)
    with pytest.raises(errors.JobFault, match="VMPARAM_vm_Disk"):
        subject.driver().start(diskless)
    script = a_program(
        subject.directory / "make-xml",
        "echo \"<domain type='test'><name>$(sed -n 's/^VMPARAM_VM_NAME = \"\\(.*\\)\"$/\\1/p')</name>"
        "<memory unit='MiB'>64</memory><os><type>hvm</type></os></domain>\"",
    )
    driver = subject.driver(Settings(ANY | {"LIBVIRT_XML_SCRIPT": str(script)}))
    assert driver.start(diskless).status().state == lifecycle.RUNNING


def test_its_events_are_heard(subject: AnyHypervisor) -> None:
    """A driver within this process has no keep-alive, and events all the same."""
    subject.driver().start(subject.job()).stop()
    assert not [line for line in subject.log if "has not powered off" in line]
    assert not subject.exists(subject.job())


def test_what_it_cannot_do_is_said(subject: AnyHypervisor) -> None:
    machine = subject.driver().start(subject.job())
    for operation, word in (
        (machine.suspend, errors.VM_NO_SUPPORT_SUSPEND),
        (machine.checkpoint, errors.VM_NO_SUPPORT_CHECKPOINT),
    ):
        with pytest.raises(errors.ClientFault, match="test") as caught:
            operation()
        assert caught.value.code == word
    assert machine.pid() == 0
    assert machine.status().state == lifecycle.RUNNING


def test_a_pause_that_libvirt_does_not_know_is_the_clients_fault(subject, monkeypatch):
    machine = subject.driver().start(subject.job())
    assert isinstance(machine, LibvirtMachine)

    def unsupported(_domain: object) -> None:
        libvirt.open(TEST_URI).setKeepAlive(5, 3)  # which that driver really does not have

    monkeypatch.setattr(libvirt.virDomain, "suspend", unsupported)
    with pytest.raises(errors.ClientFault) as caught:
        machine.soft_suspend()
    assert caught.value.code == errors.VM_NO_SUPPORT_SUSPEND
    assert machine.status().state == lifecycle.RUNNING


def test_a_vm_that_is_another_is_ended_although_it_ran(subject: AnyHypervisor, monkeypatch: pytest.MonkeyPatch) -> None:
    """This hypervisor cannot start a VM that stands still: it is looked at while it runs."""
    job = subject.job()
    create = libvirt.virConnect.createXML

    def more(connection: object, xml: str, flags: int) -> object:
        changed = xml.replace('<memory unit="MiB">64<', '<memory unit="MiB">65<')
        assert changed != xml
        return create(connection, changed, flags)

    monkeypatch.setattr(libvirt.virConnect, "createXML", more)
    with pytest.raises(errors.HypervisorFault, match="memory"):
        subject.driver().start(job)
    assert not subject.exists(job)


def test_the_daemon_with_it(subject: AnyHypervisor) -> None:
    job = subject.job()
    settings = {name: value for name, value in ANY.items() if name != "VM_MEMORY"}
    with Peer(environment("libvirt", Path(job.working_dir()), **settings)) as peer:
        assert peer.line().startswith("$VMGahpVersion")
        peer.send_ad(*job.lines(), f'VM_WORKING_DIR = "{job.working_dir()}"')
        assert peer.run("START", "libvirt") == ["0", "1"], peer.end_by(signal.SIGTERM)
        assert words_of(peer.run("STATUS", 1))["STATUS"] == "Running"
        assert peer.run("GETPID", 1) == ["0", "0"]
        done(peer, "SOFT_SUSPEND", "RESUME", "STOP")
        assert "Traceback" not in peer.quit()


@pytest.mark.libvirt
def test_emulation_may_be_chosen_for_the_type_libvirt(scratch: Path) -> None:
    class Chosen(Emulated):
        vm_type = "libvirt"

    settings = Settings({"VM_MEMORY": "1024", "VM_STOP_TIMEOUT": "1", "VM_LIBVIRT_DOMAIN_TYPE": "qemu"})
    with Chosen(scratch.parent, settings, WHO) as subject:
        job = subject.job()
        machine = subject.driver().start(job)
        goes_on(subject, job)
        with contextlib.closing(libvirt.open(URI)) as connection:
            [domain] = [each for each in connection.listAllDomains() if each.name() == job.vm_name()]
            assert "<domain type='qemu'" in domain.XMLDesc()
        machine.destroy()
        found = subject.driver().survey(monotonic() + 60)
        assert (found.hypervisors, found.vm_types) == (["qemu"], ["libvirt", "qemu"])
        assert "kvm" not in {finding.check for finding in found.findings}


def test_jobs_bring_xml_to_it_too(subject: AnyHypervisor) -> None:
    job: JobAd = subject.job()
    path = Path(job.working_dir(), "domain.xml")
    path.write_text(
        "<domain type='kvm'><memory unit='MiB'>64</memory><devices><disk type='file'><source file='guest.img'/>"
        "<target dev='vda'/></disk><watchdog model='i6300esb'/></devices></domain>"
    )
    os.chown(path, WHO.uid, WHO.gid)
    machine = subject.driver().start(subject.changed(job, VMPARAM_Libvirt_XML='"domain.xml"', VMPARAM_vm_Disk=None))
    assert isinstance(machine, LibvirtMachine)
    assert "i6300esb" in machine.live_xml()
