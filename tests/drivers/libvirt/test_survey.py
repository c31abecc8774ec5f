"""The checks of the probe on the real libvirt, QEMU and passt of this machine."""

import contextlib
import os
import subprocess
from pathlib import Path
from time import monotonic
from unittest.mock import Mock

import pytest

from tests.conftest import as_root
from tests.drivers.libvirt.support import BRIDGE, BRIDGED, NAT, URI, USER_NETWORK, processes, until
from tests.lab.programs import a_program
from vmgahp import errors
from vmgahp.config import Settings
from vmgahp.drivers.libvirt import survey
from vmgahp.drivers.libvirt.link.connection import LibvirtConnection
from vmgahp.drivers.libvirt.start import capabilities, tpm, virtiofs
from vmgahp.findings import BAD, OFF, OK, UNKNOWN, Finding
from vmgahp.host import kvm, proc
from vmgahp.host.job_user import Identity

pytestmark = pytest.mark.libvirt

QEMU = "/usr/bin/qemu-system-x86_64"
SOMEBODY = Identity(54321, 54321)
TPM = OFF if tpm.why_none(None) else OK
LIMITS = {"limits": OK if proc.cgroup_controllers() == list(proc.CGROUP_LIMITS) else OFF} if os.getuid() == 0 else {}
"""Of a user's own libvirtd nobody expects any."""


def look(vm_type: str = "kvm", read_only: bool = False, **settings: object) -> survey.Survey:
    made = Settings({name: str(value) for name, value in settings.items()})
    uri = made.string("VM_LIBVIRT_URI") or URI
    connection = LibvirtConnection(uri, lambda _line: None, read_only=read_only)
    with contextlib.closing(connection):
        return survey.LibvirtSurveyor(vm_type, made, SOMEBODY, print, connection).survey(monotonic() + 60)


def finding(found: survey.Survey, check: str) -> Finding:
    return next(finding for finding in found.findings if finding.check == check)


def verdicts(found: survey.Survey) -> dict[str, str]:
    return {finding.check: finding.verdict for finding in found.findings}


def test_emulation_where_it_is_asked_for() -> None:
    found = look("qemu")
    assert verdicts(found) == {"libvirt": OK, "cpu": OK, "tpm": TPM} | LIMITS
    assert found.attributes["memory_formats"] in ("raw,zstd", "raw,zstd,sparse")
    assert found.hypervisors == found.vm_types == ["qemu"]
    assert found.attributes["accel"] == "tcg"
    assert found.attributes["gpu"] is False
    version = subprocess.run([QEMU, "--version"], capture_output=True, text=True, check=True).stdout
    assert f"version {found.attributes['version']}" in version
    assert int(found.attributes["max_vcpus"]) > 1
    assert "q35" in str(found.attributes["machine_types"]).split(",")
    assert "bios" in str(found.attributes["firmware"]).split(",")
    assert str(found.attributes["limits"]).split(",")[-1] == "cores"
    assert int(found.attributes["overhead"]) > Settings().integer("VM_TB_CACHE")


def test_a_startd_that_may_only_read_hears_the_same_but_for_the_firmware() -> None:
    """It probes VM types that it does not know as its own user, and libvirt lets nobody but root ask for
    domain capabilities."""
    settings = USER_NETWORK
    whole, read = look("qemu", **settings), look("qemu", read_only=True, **settings)
    assert verdicts(read) == verdicts(whole)
    assert read.vm_types == whole.vm_types
    assert read.networking == whole.networking == ["user"]
    assert read.attributes == {k: v for k, v in whole.attributes.items() if k != "firmware"}


def test_a_startd_that_may_only_read_hears_of_no_architecture_without_a_firmware(tmp_path, monkeypatch):
    """It has that from the firmwares' own descriptors."""
    monkeypatch.setattr(capabilities, "FIRMWARE_DESCRIPTORS", (str(tmp_path / "nowhere"), str(tmp_path)))
    assert look("qemu", read_only=True).attributes["arches"] == "x86_64"


def test_kvm_is_offered_only_where_a_guest_runs() -> None:
    works = not kvm.check()
    found = look()
    assert verdicts(found)["kvm"] == (OK if works else BAD)
    assert ("kvm" in found.hypervisors) == works
    if not works:
        assert not found.vm_types
        assert "VM_ALLOW_EMULATION" in finding(found, "kvm").hint


def test_emulation_instead_of_a_kvm_that_does_not_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvm, "check", lambda _deadline: "its guests crawl")
    found = look(VM_ALLOW_EMULATION=True)
    assert verdicts(found) == {"libvirt": OK, "kvm": OFF, "cpu": OK, "tpm": TPM} | LIMITS
    assert "its guests crawl" in finding(found, "kvm").seen
    assert found.hypervisors == ["qemu"]
    assert found.attributes["accel"] == "tcg"


def test_domains_and_a_cpu_mode_that_this_machine_does_not_have() -> None:
    assert verdicts(look("qemu", VM_LIBVIRT_URI="test:///default")) == {"libvirt": OK, "domain type": BAD}
    found = look("qemu", VM_CPU_MODE="host-passthrough")
    assert verdicts(found)["cpu"] == BAD
    assert "host-passthrough" in finding(found, "cpu").subject
    assert "VM_CPU_MODE" in finding(found, "cpu").hint


def test_no_job_comes_where_the_administrators_script_cannot_run(tmp_path: Path) -> None:
    """Else the first job would fail, and take the machine out of service."""
    good = a_program(tmp_path / "xml", "exit 0")
    assert verdicts(look("qemu", LIBVIRT_XML_SCRIPT=good))["script"] == OK
    assert "cpu" not in verdicts(look("qemu", VM_CPU_MODE="host-passthrough", LIBVIRT_XML_SCRIPT=good)), "it has one"
    for wrong in (tmp_path / "none", f"{good} -v", "xml"):
        found = look("qemu", LIBVIRT_XML_SCRIPT=wrong)
        assert verdicts(found) == {"script": BAD}
        assert not found.vm_types
    assert verdicts(look("qemu", read_only=True, LIBVIRT_XML_SCRIPT="xml"))["script"] == UNKNOWN
    assert verdicts(look("libvirt", VM_LIBVIRT_DOMAIN_TYPE="lxc", LIBVIRT_XML_SCRIPT="xml")) == {"script": BAD}


def test_qemu_itself_says_whether_a_cpu_works() -> None:
    """libvirt's capabilities would have to be believed; TCG has no host CPU, and QEMU says so."""
    with pytest.raises(errors.MachineFault, match="requires KVM"):
        survey.start_qemu(QEMU, "qemu", "host-passthrough", "pc", False, SOMEBODY, monotonic() + 60)


@pytest.mark.parametrize(
    ("text", "word", "seconds"),
    [
        ("cat > /dev/null; kill -ABRT $$", "status -6", 60),
        ("echo 'failed to set MSR 0x10a' >&2; exit 1", "failed to set MSR 0x10a", 60),
        ("exit 0", "status 0", 60),
        ("exec tail -f /dev/null", "was not up", 0.2),
    ],
)
def test_a_qemu_that_gives_up_or_hangs(tools: Path, text: str, word: str, seconds: float) -> None:
    path, me = str(a_program(tools / "qemu", text)), Identity(os.getuid(), 0)
    with pytest.raises(errors.MachineFault, match=word):
        survey.start_qemu(path, "kvm", "host-passthrough", "pc", False, me, monotonic() + seconds)


def test_a_directory_is_shared_by_a_qemu_that_can(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Enterprise Linux's cannot."""
    monkeypatch.setattr(survey.LibvirtSurveyor, "_may_be_the_jobs", lambda _self, _accel: True)
    found = look("qemu", VM_SHARE_SCRATCH="9p")
    assert (verdicts(found)["share"], found.attributes["share"]) == (OK, "9p")
    said = "echo \"qemu: -device $2: Device 'virtio-9p-pci' not found\" >&2; exit 1"
    path = str(a_program(tools / "qemu", said))
    real = survey.require_share
    me = Identity(os.getuid(), 0)
    monkeypatch.setattr(survey, "require_share", lambda kind, _path, _of, end: real(kind, path, me, end))
    found = look("qemu", VM_SHARE_SCRATCH="9p")
    assert (verdicts(found)["share"], found.attributes["share"]) == (OFF, "none")
    assert "'virtio-9p-pci' not found" in finding(found, "share").seen
    assert "share" not in verdicts(look("qemu"))


@pytest.mark.skipif(not virtiofs.program(), reason="needs virtiofsd")
def test_a_directory_of_the_machine_is_offered_where_it_is_there(tmp_path: Path) -> None:
    os.chmod(tmp_path, 0o755)
    settings = {"VM_SHARE_DIRS": "here, gone", "VM_SHARE_DIR_HERE": tmp_path, "VM_SHARE_DIR_GONE": "/nonexistent"}
    found = look("qemu", VM_SHARE_SCRATCH="virtiofs", **settings)
    assert (found.attributes["share"], found.attributes["share_dirs"]) == ("virtiofs", "here")
    assert [(one.verdict, one.subject) for one in found.findings if one.check == "share dirs"] == [
        (OK, "VM_SHARE_DIR_HERE"),
        (OFF, "VM_SHARE_DIR_GONE"),
    ]
    found = look("qemu", **settings, VM_SHARE_DIR_HERE_IF="Owner ==")
    assert "share_dirs" not in found.attributes
    assert "VM_SHARE_DIR_HERE_IF" in finding(found, "share dirs").seen


def test_passt_starts_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tmp_path.chmod(0o711)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    survey.start_passt(Identity(os.getuid(), os.getgid()), monotonic() + 60)
    assert list(tmp_path.iterdir()) == []
    until(lambda: not processes(str(tmp_path)), "passt to end")


def test_a_passt_that_does_not_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    me = Identity(os.getuid(), 0)
    monkeypatch.setenv("PATH", str(tmp_path))
    late = "echo UNIX domain socket bound at x >&2; sleep 1; echo No namespace: Operation not permitted >&2; exit 1"
    for text, why, seconds in (
        ("", "not installed", 60),
        ("echo 'Failed to sandbox process' >&2; exit 1", "Failed to sandbox process", 60),
        (f"PATH=/bin; {late}", "Operation not permitted", 60),
        ("read forever < /proc/self/fd/0; exec /usr/bin/tail -f /dev/null", "did not listen", 0.2),
    ):
        if text:
            a_program(tmp_path / "passt", text)
        with pytest.raises(errors.MachineFault, match=why):
            survey.start_passt(me, monotonic() + seconds)


def test_a_passt_that_selinux_denies_libvirt(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "enforce").write_text("1")
    kinds = {"bin_t": "whose type is bin_t", "passt_exec_t": "did not listen"}
    monkeypatch.setattr(survey.proc, "ENFORCE", str(tmp_path / "enforce"))
    monkeypatch.setenv("PATH", str(tmp_path))
    a_program(tmp_path / "passt", "exec /usr/bin/tail -f /dev/null")
    for kind, why in kinds.items():
        monkeypatch.setattr(os, "getxattr", lambda *_, kind=kind: f"system_u:object_r:{kind}:s0\0".encode())
        with pytest.raises(errors.MachineFault, match=why):
            survey.start_passt(Identity(os.getuid(), 0), monotonic() + 0.2, confined=True)
    (tmp_path / "enforce").write_text("0")
    with pytest.raises(errors.MachineFault, match="did not listen"):
        survey.start_passt(Identity(os.getuid(), 0), monotonic() + 0.2, confined=True)


def test_user_networking_without_passt_is_qemus_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capabilities, "has_passt", lambda _capabilities: False)
    found = look("qemu", **USER_NETWORK)
    assert found.networking == ["user"]
    assert "slirp" in finding(found, "network user").subject


def test_user_networking_with_a_passt_that_does_not_start_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Mock(side_effect=errors.MachineFault("passt does not start: no namespaces.", "allow them."))
    monkeypatch.setattr(capabilities, "has_passt", lambda _capabilities: True)
    monkeypatch.setattr(survey, "start_passt", broken)
    found = look("qemu", **USER_NETWORK)
    assert not found.networking
    assert verdicts(found)["network user"] == OFF
    assert "no namespaces" in finding(found, "network user").seen


@as_root
def test_a_network_is_offered_while_it_is_active(network: "object") -> None:
    settings = NAT | BRIDGED | {"VM_NETWORKING_TYPE": "nat,bridge"}
    found = look("qemu", **settings)
    assert found.networking == ["nat", "bridge"]
    assert found.machine_attributes == {"HasVirshDefaultNetwork": True}
    assert found.attributes["networking"] == "nat,bridge"
    subprocess.run(["ip", "link", "set", BRIDGE, "down"], check=True)
    found = look("qemu", **settings)
    assert found.networking == ["nat"]
    assert f"ip link set {BRIDGE} up" in finding(found, "network bridge").hint


@as_root
@pytest.mark.parametrize(("bridge", "word"), [("nosuchbridge0", "no such interface"), ("lo", "no bridge")])
def test_what_is_no_bridge_is_not_offered(bridge: str, word: str) -> None:
    found = look("qemu", **BRIDGED | {"VM_NETWORKING_BRIDGE_INTERFACE": bridge})
    assert not found.networking
    assert word in finding(found, "network bridge").seen


def test_an_inactive_network_is_known_without_being_asked_for() -> None:
    """Pools look at this attribute to keep jobs off machines whose default network is down."""
    found = look("qemu", VM_NAT_NETWORK="nowhere")
    assert found.machine_attributes == {"HasVirshDefaultNetwork": False}
    assert not found.networking
