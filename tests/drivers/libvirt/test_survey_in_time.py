"""What is offered where libvirt, its daemon for networks or QEMU does not answer in time: all that is known by then."""

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from time import monotonic
from unittest.mock import Mock

import libvirt
import pytest

from tests.drivers.libvirt.support import libvirt_error
from tests.peer import DEADLINE
from vmgahp import errors
from vmgahp.config import Settings
from vmgahp.drivers.base import Survey
from vmgahp.drivers.libvirt import survey
from vmgahp.drivers.libvirt.link.connection import LibvirtConnection
from vmgahp.findings import BAD, OFF, OK, UNKNOWN, Finding, Late
from vmgahp.host import libvirt_daemons
from vmgahp.host.job_user import Identity

ARCH = os.uname().machine
CAPABILITIES = f"""<capabilities><guest><os_type>hvm</os_type><arch name='{ARCH}'><emulator>/usr/bin/qemu</emulator>
    <machine maxCpus='255'>pc-1.0</machine><machine canonical='pc-1.0' maxCpus='255'>pc</machine>
    <domain type='qemu'/></arch></guest></capabilities>"""
DOMAIN_CAPABILITIES = """<domainCapabilities><path>/usr/bin/qemu</path><machine>pc-1.0</machine><vcpu max='255'/>
    <cpu><mode name='maximum' supported='yes'/></cpu></domainCapabilities>"""
NAT = {"VM_NETWORKING": "True", "VM_NETWORKING_TYPE": "nat"}


class Libvirtd:
    """A connection to one that answers everything, but for what a test has it keep to itself until its end."""

    def __init__(self) -> None:
        self.keeps: set[str] = set()
        self.network_error: libvirt.libvirtError | None = None
        self.save_error = "OPERATION_FAILED", "failed to read qemu header of %s"
        self.over = threading.Event()

    def _answer(self, what: str, answer: str) -> str:
        if what in self.keeps:
            self.over.wait(DEADLINE)
        return answer

    def getCapabilities(self) -> str:
        return self._answer("capabilities", CAPABILITIES)

    def getDomainCapabilities(self, *_arguments: object) -> str:
        return self._answer("domain capabilities", DOMAIN_CAPABILITIES)

    def getVersion(self) -> int:
        return 9_000_000

    getLibVersion = getVersion

    def saveImageGetXMLDesc(self, path: str) -> str:
        self._answer("save", "")
        code, said = self.save_error
        raise libvirt_error(getattr(libvirt, f"VIR_ERR_{code}"), libvirt.VIR_FROM_QEMU, said % path)

    def networkLookupByName(self, _name: str) -> "Libvirtd":
        self._answer("network", "")
        if self.network_error is not None:
            raise self.network_error
        return self

    def isActive(self) -> int:
        return 1

    isAlive = isActive

    def domainEventRegisterAny(self, *_arguments: object) -> int:
        return 1

    domainEventDeregisterAny = close = domainEventRegisterAny


@pytest.fixture
def libvirtd(monkeypatch: pytest.MonkeyPatch) -> Iterator[Libvirtd]:
    """It is the daemon for QEMU of a machine that has another one for networks; QEMU itself starts."""
    made = Libvirtd()
    monkeypatch.setattr(LibvirtConnection, "_connect", lambda _self: made)
    monkeypatch.setattr(libvirt_daemons, "of_networks", lambda: "virtnetworkd")
    monkeypatch.setattr(survey, "start_qemu", lambda *_arguments: None)
    yield made
    made.over.set()


def look(seconds: float = DEADLINE, **settings: str) -> Survey:
    connection = LibvirtConnection("qemu:///system", lambda _line: None)
    with contextlib.closing(connection):
        surveyor = survey.LibvirtSurveyor("qemu", Settings(settings), Identity(54321, 54321), print, connection)
        return surveyor.survey(monotonic() + seconds)


def finding(found: Survey, check: str, verdict: str) -> Finding:
    return next(one for one in found.findings if (one.check, one.verdict) == (check, verdict))


def is_capable(found: Survey) -> bool:
    return bool(found.vm_types) and BAD not in {one.verdict for one in found.findings}


def test_a_machine_whose_daemons_all_answer(libvirtd: Libvirtd) -> None:
    found = look(**NAT)
    assert is_capable(found)
    assert found.networking == ["nat"]
    assert found.machine_attributes["HasVirshDefaultNetwork"] is True
    assert "firmware" in found.attributes


def test_without_the_daemon_for_networks_there_is_no_network_and_all_else(libvirtd: Libvirtd) -> None:
    # What virtqemud passes on where virtnetworkd's socket is missing.
    said = "Failed to connect socket to '/run/libvirt/virtnetworkd-sock': No such file or directory"
    libvirtd.network_error = libvirt_error(libvirt.VIR_ERR_SYSTEM_ERROR, libvirt.VIR_FROM_RPC, said)
    found = look(**NAT)
    assert is_capable(found)
    assert not found.networking
    assert "HasVirshDefaultNetwork" not in found.machine_attributes
    network = finding(found, "network nat", OFF)
    assert network.seen.startswith("virtnetworkd does not run: Failed to connect socket")
    assert network.hint == "systemctl enable --now virtnetworkd.socket"
    assert is_capable(look())


def test_a_daemon_for_networks_that_hangs_takes_the_network_and_nothing_else(libvirtd, monkeypatch):
    libvirtd.keeps.add("network")
    found = look(2.0, **NAT)
    assert is_capable(found)
    assert not found.networking
    network = finding(found, "network nat", OFF)
    assert "virtnetworkd has not said whether default is active" in network.seen
    assert "restart virtnetworkd" in network.hint
    assert "firmware" in found.attributes, "the rest was asked for meanwhile"
    monkeypatch.setattr(survey, "TELLING", 0.01)
    found = look()  # for as long as a test may last, were it waited for
    assert is_capable(found)
    assert "HasVirshDefaultNetwork" not in found.machine_attributes


def test_without_the_domain_capabilities_all_else_is_offered(libvirtd: Libvirtd) -> None:
    libvirtd.keeps.add("domain capabilities")
    found = look(4.0)
    assert is_capable(found)
    finding(found, "libvirt", UNKNOWN)
    assert "firmware" not in found.attributes
    assert found.attributes["max_vcpus"] == 255


def test_a_libvirt_that_has_said_nothing_offers_nothing(libvirtd: Libvirtd) -> None:
    libvirtd.keeps.add("capabilities")
    found = look(4.0)
    assert not is_capable(found)
    seen = finding(found, "libvirt", BAD).seen
    assert any(words in seen for words in ("does not answer", "has not answered", "had not ended")), seen


def test_a_qemu_that_is_slow_is_not_called_broken(libvirtd: Libvirtd, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Mock(side_effect=Late("QEMU was not up in time.", "see what it waits for."))
    monkeypatch.setattr(survey, "start_qemu", Mock(side_effect=errors.MachineFault("QEMU does not start.", "mend it.")))
    assert finding(look(), "cpu", BAD)
    monkeypatch.setattr(survey, "start_qemu", slow)
    found = look()
    assert is_capable(found)
    assert finding(found, "cpu", UNKNOWN)


def test_what_hangs_of_the_rest_keeps_nobody_from_libvirt(libvirtd: Libvirtd, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a TPM whose program is on a file system that is gone."""
    monkeypatch.setattr(survey, "which", lambda _program: "/gone/swtpm")
    monkeypatch.setattr(survey.tpm, "trouble", lambda _identity, _seconds: libvirtd.over.wait(DEADLINE))
    found = look(4.0)
    assert is_capable(found)
    assert "firmware" in found.attributes
    assert finding(found, "tpm", OFF)


@pytest.mark.parametrize(
    "said", ["", "Failed to open file '%s': Permission denied", "Failed to create file '%s': No such file"]
)
def test_saves_are_offered_where_libvirtd_can_open_a_file_of_anothers(libvirtd, scratch, said):
    """It cannot on NFS with root_squash, nor the descriptors of a process in a pid namespace of its own."""
    if said:
        libvirtd.save_error = "SYSTEM_ERROR", said
    found = look(EXECUTE=str(scratch))
    assert finding(found, "save", OFF if said else OK).seen
    assert (found.attributes["suspend"], found.attributes["checkpoint"]) == (not said, not said)
    assert is_capable(found)
    assert list(scratch.iterdir()) == []


def test_a_save_that_is_not_tried_in_time_is_offered(libvirtd: Libvirtd, scratch: Path) -> None:
    libvirtd.keeps = {"save"}
    found = look(seconds=4.0, EXECUTE=str(scratch))
    assert finding(found, "save", UNKNOWN)
    assert found.attributes["suspend"]
