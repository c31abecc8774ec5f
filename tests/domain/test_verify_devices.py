"""The rarer devices of a live domain against the job: interfaces, shared disks, CPU, firmware, TPM, share."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree as etree

import pytest

from tests.domain.support import TPM_SOCKET, disk, host, spec, with_value
from vmgahp import errors
from vmgahp.config import Settings
from vmgahp.domain import build as domain_xml
from vmgahp.domain import verify
from vmgahp.drivers.libvirt.start import capabilities, describe, tpm
from vmgahp.host.job_user import Identity
from vmgahp.job.attributes import Share
from vmgahp.job.spec import Devices, JobSpec, Nic, Topology

SPEC = spec(
    vcpus=4,
    disks=(disk(), disk("/shared/book.img", "vdb", transferred=False, shared=True)),
    nics=(Nic("nat", "52:54:00:12:34:56"), Nic("user", model="e1000", link_up=False)),
    devices=Devices(
        firmware="uefi", topology=Topology(1, 2, 2), tpm=True, shares=(Share("share", "/scratch/share", "9p"),)
    ),
)
ASKED = domain_xml.build(SPEC, host(tpm_socket=TPM_SOCKET))


def live() -> etree.Element:
    """Return it as libvirt 9.0 makes it."""
    domain = etree.fromstring(ASKED)
    memory, system = domain.find("memory"), domain.find("os")
    memory.text, memory.attrib["unit"] = str(int(memory.text or 0) << 10), "KiB"
    del system.attrib["firmware"]
    etree.SubElement(system, "loader", type="pflash").text = "/usr/share/OVMF/OVMF_CODE_4M.fd"
    etree.SubElement(system, "nvram").text = "/var/lib/libvirt/qemu/nvram/alice_lab_7.3_VARS.fd"
    return domain


def compare(domain: etree.Element, asked: str = ASKED, job: JobSpec = SPEC) -> str:
    try:
        verify.against_job(etree.tostring(domain, encoding="unicode"), asked, job)
    except verify.Mismatch as mismatch:
        return str(mismatch)
    return ""


def test_what_is_missing_or_too_much_is_named_and_nothing_else() -> None:
    assert compare(live()) == ""
    domain = live()
    book, system = domain.findall("devices/disk")[1], domain.find("os")
    book.remove(book.find("shareable"))
    system.remove(system.find("loader"))
    said = compare(domain)
    assert "shared of its disk vdb is False" in said
    assert "boots by BIOS" in said
    asked = domain_xml.build(spec(), host())
    domain = with_value(with_value(etree.fromstring(asked), "memory", "65536"), "memory@unit", "KiB")
    etree.SubElement(domain.find("os"), "loader").text = "/scratch/evil.fd"
    assert "boots by a firmware" in compare(domain, asked, spec())


CHANGES = {
    "another model": ("devices/interface[2]/model@type", "virtio", "of the model virtio, and not e1000"),
    "a cable that is in": ("devices/interface[2]/link@state", "up", "the cable of its interface is in"),
    "another topology": ("cpu/topology@threads", "1", "CPU topology is 1 2 1, and 1 2 2"),
    "another TPM": ("devices/tpm/backend/source@path", "/run/other", "was not asked for, tpm"),
    "the host's TPM": ("devices/tpm/backend@type", "passthrough", "was not asked for, tpm"),
    "another directory": ("devices/filesystem/source@dir", "/etc", "was not asked for, filesystem mount"),
    "another tag": ("devices/filesystem/target@dir", "root", "was not asked for, filesystem mount"),
    "another access": ("devices/filesystem@accessmode", "passthrough", "was not asked for, filesystem mount"),
}


@pytest.mark.parametrize("change", list(CHANGES))
def test_a_difference_is_named(change: str) -> None:
    place, value, expected = CHANGES[change]
    assert expected in compare(with_value(live(), place, value))


# --- the firmware of a restored domain


@pytest.fixture
def firmwares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    def describe(name: str, code: str, features: list[str], code_format: str = "raw") -> None:
        mapping = {
            "executable": {"filename": code, "format": code_format},
            "nvram-template": {"filename": f"{code}.vars", "format": code_format},
        }
        targets = [{"architecture": "x86_64", "machines": ["pc-q35-*"]}]
        (tmp_path / name).write_text(json.dumps({"mapping": mapping, "features": features, "targets": targets}))

    describe("60-plain.json", "/fw/plain.fd", ["acpi-s3"])
    describe("50-secure.json", "/fw/secure.fd", ["secure-boot", "enrolled-keys"])
    describe("55-qcow.json", "/fw/plain.qcow2", [], "qcow2")
    (tmp_path / "10-broken.json").write_text("{")
    in_memory = {"mapping": {"device": "memory", "filename": "/fw/m.fd"}, "features": []}
    (tmp_path / "20-memory.json").write_text(json.dumps(in_memory))
    monkeypatch.setattr(capabilities, "FIRMWARE_DESCRIPTORS", (str(tmp_path / "none"), str(tmp_path)))
    return tmp_path


def saved(loader: str) -> str:
    return f"<domain><os><loader>{loader}</loader><nvram template='/etc/shadow'>/etc/passwd</nvram></os></domain>"


def restored(ours: str, loader: str) -> etree.Element:
    """The domain's part about its firmware."""
    return etree.fromstring(capabilities.firmware_of_a_restore(ours, saved(loader), "qemu:///system")).find("os")


def test_a_restored_domain_gets_the_firmware_that_it_had(firmwares: Path) -> None:
    ours = domain_xml.build(spec(devices=Devices(firmware="uefi")), host())
    for code, kind in (("/fw/plain.fd", "fd"), ("/fw/plain.qcow2", "qcow2")):
        system = restored(ours, code)
        assert (system.get("firmware"), system.find("firmware")) == (None, None)
        loader, nvram = system.find("loader"), system.find("nvram")
        assert (loader.text, loader.get("readonly"), loader.get("secure")) == (code, "yes", None)
        assert nvram.get("template") == f"{code}.vars"
        assert nvram.text == f"/var/lib/libvirt/qemu/nvram/alice_lab_7.3_VARS.{kind}"
    ours = domain_xml.build(spec(devices=Devices(firmware="uefi-secure")), host())
    assert restored(ours, "/fw/secure.fd").find("loader").get("secure") == "yes"
    with pytest.raises(LookupError):
        restored(ours, "/fw/plain.fd")
    ours = domain_xml.build(spec(devices=Devices("aarch64", "uefi-secure")), host(arch="aarch64", cpu_mode=""))
    assert "smm" not in ours
    assert restored(ours, "/fw/secure.fd").find("loader").get("secure") is None
    ours = domain_xml.build(spec(), host())
    assert capabilities.firmware_of_a_restore(ours, saved("/etc/shadow"), "qemu:///system") == ours


@pytest.mark.parametrize("loader", ["/etc/shadow", "", "/fw/secure.fd", "/fw/m.fd"])
def test_a_firmware_that_is_not_this_machines_is_not_taken(firmwares: Path, loader: str) -> None:
    ours = domain_xml.build(spec(devices=Devices(firmware="uefi")), host())
    with pytest.raises(LookupError, match="firmware"):
        restored(ours, loader)


# --- what a machine offers


def settings(**more: str) -> Settings:
    return Settings({"VM_MEMORY": "1024", **more})


@pytest.fixture
def on_x86(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.uname", lambda: type("Uname", (), {"machine": "x86_64"})())


def test_another_architecture_is_emulated_or_the_job_is_held(on_x86: None) -> None:
    foreign, own = spec(devices=Devices(arch="aarch64")), spec(devices=Devices(arch="x86_64"))
    assert describe.type_for(own, "kvm", settings()) == "kvm"
    assert describe.type_for(foreign, "qemu", settings()) == "qemu"
    assert describe.type_for(foreign, "kvm", settings(VM_ALLOW_EMULATION="true")) == "qemu"
    with pytest.raises(errors.JobFault, match=r"aarch64.*VM_ALLOW_EMULATION"):
        describe.type_for(foreign, "kvm", settings())
    assert [describe.arch_of(each) for each in (foreign, own, spec())] == ["aarch64", "", ""]
    names = ("aarch64", "armv7l", "i686", "x86_64", "aarch64")
    text = "".join(f"<guest><arch name='{name}'/></guest>" for name in names)
    assert capabilities.arches(f"<capabilities>{text}</capabilities>", emulates=True) == ["x86_64", "aarch64"]
    assert capabilities.arches(f"<capabilities>{text}</capabilities>", emulates=False) == ["x86_64"]


@pytest.mark.parametrize(
    ("arch", "domain_type", "version", "model"),
    [
        *(("", "kvm", 0, "isa"), ("x86_64", "qemu", 0, "isa"), ("aarch64", "qemu", 9_001_000, "pvpanic")),
        *(("aarch64", "qemu", 9_000_000, ""), ("", "xen", 0, ""), ("", "test", 0, "")),
    ],
)
def test_the_panic_device_of_a_machine(on_x86: None, arch: str, domain_type: str, version: int, model: str) -> None:
    libvirtd = SimpleNamespace(ask=lambda look, _doing: look(SimpleNamespace(getLibVersion=lambda: version)))
    wanted = spec(devices=Devices(arch=arch))
    assert describe.panic_model(wanted, domain_type, libvirtd) == model  # type: ignore[arg-type]


class Capable:
    """A connection whose libvirt has these TPMs."""

    def __init__(self, *backends: str) -> None:
        values = "".join(f"<value>{backend}</value>" for backend in backends)
        enum = f"<enum name='backendModel'>{values}</enum>"
        self.text = f"<domainCapabilities><devices><tpm supported='yes'>{enum}</tpm></devices></domainCapabilities>"

    def ask(self, look: Callable[["Capable"], object], _doing: str) -> object:
        return look(self)

    def getDomainCapabilities(self, *_of_what: object) -> str:
        return self.text


def require(vm_type: str, connection: Capable | None = None, **devices: object) -> None:
    wanted = spec(devices=Devices(**devices))  # type: ignore[arg-type]
    describe.require(wanted, vm_type, "", connection, Identity(54321, 54321))  # type: ignore[arg-type]


def test_a_tpm_takes_qemu_swtpm_and_a_libvirt_that_takes_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(errors.JobFault, match="lxc do not get here: firmware"):
        require("lxc", firmware="uefi")
    require("lxc")
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(errors.JobFault, match="VMPARAM_vm_TPM"):
        require("qemu", Capable("emulator", "external"), tpm=True)
    # It may find less than this daemon, and more.
    monkeypatch.setenv("PATH", str(tmp_path))
    for program in tpm.OF_LIBVIRT:
        (tmp_path / program).touch(0o755)
    with pytest.raises(errors.JobFault, match="libvirt does not find swtpm"):
        require("qemu", Capable("passthrough"), tpm=True)
    monkeypatch.setattr(tpm, "trouble", lambda _identity, _seconds: "swtpm is ill")
    with pytest.raises(errors.JobFault, match="swtpm is ill"):
        require("qemu", Capable("emulator", "external"), tpm=True)
    monkeypatch.setattr(tpm, "trouble", lambda _identity, _seconds: "")
    require("qemu", Capable("emulator", "external"), tpm=True)
    (tmp_path / "swtpm_setup").unlink()
    require("qemu", Capable("emulator", "external"), tpm=True)
