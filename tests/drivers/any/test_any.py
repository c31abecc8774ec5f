"""VM type any: which type a job gets, whose fault it is where it gets none, and what becomes of its images."""

import contextlib
import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests import jobs
from tests.conftest import JOB_UID
from tests.drivers.libvirt.support import mounted
from tests.drivers.support import WHO, content_of, needs_qemu
from tests.lab.guest import BANNER, make_guest
from tests.lab.programs import a_program
from tests.lab.vmware import count_on, vmware
from vmgahp import errors, findings, lifecycle, vm_types
from vmgahp.config import Settings
from vmgahp.daemon import probe
from vmgahp.drivers import base
from vmgahp.drivers.any import CHOICE_FILE, AnyDriver
from vmgahp.drivers.base import Survey
from vmgahp.drivers.simulated import SimulatedDriver
from vmgahp.errors import JobFault, MachineFault
from vmgahp.host.job_user import Identity
from vmgahp.images import qemu_img
from vmgahp.job.ad import JobAd, quote
from vmgahp.testing.contract import until

MIB = 1 << 20
TYPES = ("kvm", "xen", "vmrun", "script")


class StandIn(SimulatedDriver):
    """A hypervisor in memory under the name of another, which a test can take out of service."""

    broken: set[str] = set()
    killed: set[str] = set()
    """The types whose programs are killed where they run as the job's user."""
    refuses: dict[str, str] = {}
    started: list[tuple[str, JobAd]] = []

    def start(self, job: JobAd) -> base.Machine:
        assert job.vm_type() == self.vm_type
        if self.vm_type in self.broken:
            raise MachineFault(f"{self.vm_type} is broken.", "fix it.")
        if self.vm_type in self.refuses:
            raise JobFault(errors.BAD_IMAGE, f"{self.refuses[self.vm_type]}.", "change the job.")
        self.started.append((self.vm_type, job))
        return super().start(job)

    def survey(self, end: float) -> Survey:
        if self.vm_type in self.broken | (self.killed if self.identity.uid == WHO.uid else set()):
            trouble = MachineFault(f"{self.vm_type} is broken.", "fix it.")
            return Survey([findings.judge("works", "this", trouble, "")])
        return Survey(
            [findings.Finding("works", findings.OK, "this", "it works")],
            attributes={"version": f"1.{self.vm_type}", "suspend": True, "checkpoint": self.vm_type != "xen"},
            machine_attributes={f"Has_{self.vm_type}": True},
            networking=["nat", "user"] if self.vm_type == "kvm" else ["nat", "bridge"],
            hypervisors=[self.vm_type],
            vm_types=[self.vm_type, "odd"],
        )


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> type[StandIn]:
    """kvm, xen, vmrun and script are in memory."""
    for vm_type in TYPES:
        monkeypatch.setitem(vm_types.DRIVERS, vm_type, f"{__name__}:StandIn")
    monkeypatch.setattr(StandIn, "broken", set())
    monkeypatch.setattr(StandIn, "killed", set())
    monkeypatch.setattr(StandIn, "refuses", {})
    monkeypatch.setenv("CONDOR_IDS", "64.64")
    monkeypatch.setattr(StandIn, "started", [])
    return StandIn


LOG: list[str] = []
_numbers = itertools.count(os.getpid() * 1000)


def driver(types: str = "kvm, vmrun, script", vm_type: str = "any", **settings: str) -> AnyDriver:
    LOG.clear()
    values = {"VM_MEMORY": "1024", "VM_STOP_TIMEOUT": "1", "VM_ANY_TYPES": types} | settings
    return AnyDriver(vm_type, Settings(values), WHO, LOG.append)


def job(scratch: Path, disk: str | None = None, **more: str) -> JobAd:
    """An ad; `disk` is the text of vm_disk, `more` are expressions."""
    disks = {} if disk is None else {"VMPARAM_vm_Disk": quote(disk)}
    ad = jobs.BASE | {"JobVMType": '"any"', "ClusterId": str(next(_numbers))} | disks
    return jobs.ad(ad, scratch, **more)


def own(*paths: Path) -> None:
    for path in paths:
        os.chown(path, WHO.uid, WHO.gid)


def image(path: Path, image_format: str, *, content: bytes = b"", options: str = "", size: int = MIB) -> Path:
    """A disk of the job's, made by the real qemu-img."""
    raw = path.with_name(path.name + ".making")
    raw.write_bytes(content.ljust(size, b"\0"))
    command = ["qemu-img", "convert", "-f", "raw", "-O", image_format]
    subprocess.run([*command, *(["-o", options] if options else []), raw, path], check=True)
    raw.unlink()
    own(path)
    return path


def files(scratch: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in scratch.iterdir()}


def refused(
    wanted: JobAd, types: str = "kvm, vmrun, script", kind: type[errors.Fault] = JobFault, match: str = ".", **more: str
) -> errors.Fault:
    """The fault of a start, which leaves the directory as it was; `more` are settings."""
    scratch = Path(wanted.working_dir())
    before = files(scratch)
    with pytest.raises(kind, match=match) as caught:
        driver(types, **more).start(wanted)
    assert files(scratch) == before
    return caught.value


# --- which type


def test_the_first_type_of_the_administrators(scratch: Path, stand_ins: type[StandIn]) -> None:
    image(scratch / "disk.qcow2", "qcow2")
    wanted = job(scratch, "disk.qcow2:vda:w:qcow2")
    for first, second in (("kvm", "script"), ("script", "kvm")):
        machine = driver(f"{first}, {second}").start(wanted)
        assert machine.name == wanted.vm_name()
        machine.destroy()
        (scratch / CHOICE_FILE).unlink()
    assert [vm_type for vm_type, _ in stand_ins.started] == ["kvm", "script"]


def test_one_that_is_not_proved_or_refuses_the_job_is_passed_over(scratch: Path, stand_ins: type[StandIn]) -> None:
    stand_ins.broken.add("kvm")
    stand_ins.refuses["vmrun"] = "it cannot"
    driver("kvm, vmrun, script").start(job(scratch, VMPARAM_VMware_VMX_File='"a.vmx"', VMPARAM_vm_Disk='"a:vda:w:raw"'))
    assert stand_ins.started[0][0] == "script"
    assert any("kvm is broken" in line for line in LOG)


def test_a_proved_type_that_fails_is_the_machines_fault(scratch, stand_ins, monkeypatch):
    monkeypatch.setattr(StandIn, "start", Mock(side_effect=MachineFault("no memory left.", "buy some.")))
    refused(job(scratch), "kvm, script", MachineFault, match="no memory")


def test_a_list_in_vm_type(scratch: Path, stand_ins: type[StandIn]) -> None:
    """The requirements of such a job match machines of several types; this one has kvm alone."""
    wanted = job(scratch, JobVMType='"vmware, kvm"')
    found = base.find("vmware, kvm")
    assert found is AnyDriver
    found("vmware, kvm", Settings({"VM_MEMORY": "1024", "VM_TYPE": "KVM"}), WHO, LOG.append).start(wanted)
    assert stand_ins.started[0][0] == "kvm"
    settings = Settings({"VM_MEMORY": "1024", "VM_TYPE": "xen"})
    with pytest.raises(JobFault, match="xen: the job does not take it"):
        found("vmware, kvm", settings, WHO, LOG.append).start(wanted)


@pytest.mark.parametrize(
    ("attributes", "words"),
    [
        ({"VMPARAM_vm_Types": '"kvm; rm -rf /"'}, "is not a VM type"),
        ({"VMPARAM_vm_Types": '" , "'}, "not a list"),
        ({"VMPARAM_vm_Types": "7"}, "not a string"),
        ({"VMPARAM_vm_Types": '"kvm"', "JobVMType": '"kvm,xen"'}, "both are lists"),
        ({"VMPARAM_vm_Typos": '"kvm"'}, "no such option"),
        ({"VM_ATTR_Types": '"kvm"'}, "no such option"),
        ({"VM_any_ATTR_TPM": "true"}, "VM_any_ATTR_TPM"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(scratch, stand_ins, attributes, words):
    assert next(iter(attributes)) in refused(job(scratch, **attributes), match=words).problem
    assert not stand_ins.started


@pytest.mark.parametrize(
    ("types", "attribute", "value", "expected"),
    [
        ("kvm, vmrun, script", "VMPARAM_vm_Types", '"vmrun"', "vmrun"),
        ("kvm, vmrun, script", "VMPARAM_vm_Types", '"VMware"', "vmrun"),
        ("kvm, vmrun, script", "VMPARAM_vm_Types", '"nothing, script"', "script"),
        ("kvm, vmrun, script", "VMPARAM_vm_Types", '"script, any"', "kvm"),
        ("vmrun, kvm", "VMPARAM_vm_TPM", "true", "kvm"),
        ("vmrun, kvm", "VM_ATTR_Firmware", '"uefi"', "kvm"),
        ("vmrun, kvm", "VMPARAM_vm_TPM", "false", "vmrun"),
        ("vmrun, kvm", "VM_kvm_ATTR_TPM", "true", "vmrun"),
        ("vmrun, kvm", "VM_vmrun_ATTR_TPM", "true", "kvm"),
        ("vmrun, kvm", "JobVMVNCConsole", "true", "kvm"),
        ("vmrun, kvm", "VMPARAM_Libvirt_XML", '"mine.xml"', "kvm"),
        ("vmrun, kvm", "VMPARAM_Xen_Kernel", '"included"', "vmrun"),
    ],
)
def test_the_jobs_list_holds_and_a_wish_goes_to_a_type_that_grants_it(
    scratch: Path, stand_ins: type[StandIn], types: str, attribute: str, value: str, expected: str
) -> None:
    image(scratch / "disk.vmdk", "vmdk")
    driver(types).start(job(scratch, "disk.vmdk:vda:w:vmdk", **{attribute: value}))
    assert stand_ins.started[0][0] == expected


def test_where_no_type_will_do_the_job_is_told_why_of_each(scratch: Path, stand_ins: type[StandIn]) -> None:
    stand_ins.broken.add("kvm")
    image(scratch / "disk.vmdk", "vmdk")
    wanted = job(scratch, "disk.vmdk:vda:w:vmdk", VMPARAM_vm_TPM="true", VMPARAM_vm_Types='"kvm, xen, vmrun"')
    fault = refused(wanted, "script, vmrun, xen, kvm")
    for vm_type in ("vmrun", "xen"):
        assert f"{vm_type}: it does not have VMPARAM_vm_TPM." in fault.problem
    assert "script: the job does not take it." in fault.problem
    assert "kvm: kvm is broken." in fault.problem
    assert fault.hint


def test_a_reason_of_all_is_told_once_and_of_none_that_works(scratch: Path, stand_ins: type[StandIn]) -> None:
    assert refused(job(scratch, JobVMMemory="0"), "kvm, script").problem == "JobVMMemory is not set."
    stand_ins.broken |= {"kvm", "xen", "vmrun", "script"}
    fault = refused(job(scratch), "kvm, script", MachineFault, match=r"kvm is broken.*script is broken")
    assert fault.code not in errors.HOLD_CODES


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_types_that_the_jobs_user_keeps_from_their_proof_are_its_fault(scratch: Path, stand_ins: type[StandIn]) -> None:
    stand_ins.killed |= {"kvm", "script"}
    refused(job(scratch), "kvm, script", match="No VM type of this machine can run the job")


def test_settings_that_make_no_sense(scratch: Path, stand_ins: type[StandIn]) -> None:
    refused(job(scratch), "kvm, any", MachineFault, match="VM_ANY_TYPES has any")
    assert findings.first_bad(driver("kvm, any").survey(10**9).findings)
    # one that is not installed is only not proved
    driver("nobodys, kvm").start(job(scratch))
    assert stand_ins.started[0][0] == "kvm"


def test_the_machines_types_without_a_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(base, "XEN", str(tmp_path / "privcmd"))
    assert base.machine_types(Settings({"VM_TYPE": "any"})) == ("kvm",)
    (tmp_path / "privcmd").touch()
    (tmp_path / "vmrun").touch(mode=0o755)
    more = {"VSPHERE_HOST": "esx", "VM_SCRIPT": "/x"}
    assert base.machine_types(Settings(more)) == ("kvm", "xen", "vmrun", "vsphere", "script")
    assert base.machine_types(Settings(more | {"VM_TYPE": "Qemu"})) == ("qemu",)
    assert base.machine_types(Settings({"VM_TYPE": "qemu", "VM_ANY_TYPES": "xen kvm"})) == ("xen", "kvm")


# --- the survey


def test_the_machine_offers_all_that_was_proved(stand_ins: type[StandIn]) -> None:
    stand_ins.broken.add("xen")
    found = probe.probe("any", driver().settings, driver("kvm, xen, vmrun"))
    assert found.trouble is None
    expected = {"VM_Type": "any", "VM_TYPES": "any,kvm,vmrun", "VM_Networking_Types": "nat,user,bridge"}
    expected |= dict.fromkeys(("VM_any_ATTR_types", "VM_HYPERVISORS"), "kvm,vmrun")
    expected |= {f"VM_{vm_type}_ATTR_version": f"1.{vm_type}" for vm_type in ("kvm", "vmrun")}
    assert expected.items() <= found.attributes.items()
    assert found.attributes["Has_kvm"] is True
    assert not [name for name in found.attributes if "xen" in name.lower()]
    assert [finding.check for finding in found.findings if finding.verdict == findings.OFF] == ["xen: works"]


def test_a_machine_without_room_offers_no_saving(stand_ins, monkeypatch, tmp_path):
    monkeypatch.setattr(probe, "_free_mib", lambda directory: 1)
    settings = Settings({"VM_MEMORY": "1024", "EXECUTE": str(tmp_path), "VM_ANY_TYPES": "kvm, vmrun"})
    found = probe.probe("any", settings, AnyDriver("any", settings, WHO, LOG.append))
    for name in ("any", "kvm", "vmrun"):
        assert found.attributes[f"VM_{name}_ATTR_suspend"] is False
        assert found.attributes[f"VM_{name}_ATTR_checkpoint"] is False


# --- formats


@pytest.mark.qemu
@pytest.mark.parametrize(
    ("name", "made_as", "said", "expected"),
    [
        ("disk.qcow2", "qcow2", "", "qcow2"),
        ("disk.img", "raw", "raw", "raw"),
        ("disk.qcow2", "qcow2", "raw", "raw"),
        ("disk.img", "raw", "", "begins like no format"),
        ("disk.qcow2", "raw", "", "its name says qcow2, and it begins like no format"),
        ("disk.raw", "raw", "qcow9", "not one of the formats"),
    ],
)
def test_a_format_is_what_the_job_says_or_name_and_header_agree_about(
    scratch: Path, stand_ins: type[StandIn], name: str, made_as: str, said: str, expected: str
) -> None:
    image(scratch / name, made_as)
    wanted = job(scratch, f"{name}:vda:w" + (f":{said}" if said else ""))
    if " " not in expected:
        driver("kvm, script").start(wanted)
        assert stand_ins.started[0][1].string("VMPARAM_vm_Disk") == f"{name}:vda:w:{expected}"
        return
    assert refused(wanted, "kvm, script", match=expected).code == errors.INVALID_DISK_PARAM


def test_what_is_no_disk_is_left_to_the_driver(scratch: Path, stand_ins: type[StandIn]) -> None:
    for odd in ("nothing.img:vda:w:raw", "what:ever", "catalog:debian-12:vda:w", "a:b:c:d:e"):
        stand_ins.started.clear()
        driver("kvm, script").start(job(scratch, odd)).destroy()
        assert stand_ins.started[0][1].string("VMPARAM_vm_Disk") == odd


def test_a_name_that_is_not_text_is_left_to_the_driver(scratch: Path, stand_ins: type[StandIn]) -> None:
    name = os.fsdecode(b"\xff.iso")
    (scratch / name).write_bytes(bytes(4096))
    own(scratch / name)
    refused(job(scratch, VMPARAM_vm_Disk=f'"{name}:hdc:r"'), "vmrun", match="is not an image in the scratch directory")


def test_a_cdrom_stays_one(scratch: Path, stand_ins: type[StandIn]) -> None:
    for name in ("boot.iso", "seed.img"):
        (scratch / name).write_bytes(bytes(4096))
        own(scratch / name)
    driver("kvm, script").start(job(scratch, "boot.iso:hdc:r, seed.img:hdd:r:iso"))
    assert stand_ins.started[0][1].string("VMPARAM_vm_Disk") == "boot.iso:hdc:r:iso,seed.img:hdd:r:iso"


# --- conversion


@pytest.mark.qemu
@pytest.mark.parametrize(
    ("vm_type", "made_as", "options", "expected"),
    [
        ("kvm", "raw", "", ""), ("kvm", "vmdk", "", ""), ("kvm", "vmdk", "subformat=streamOptimized", "qcow2"),
        ("kvm", "vhdx", "", "qcow2"), ("xen", "raw", "", ""), ("xen", "qcow2", "", "raw"), ("vmrun", "vmdk", "", ""),
        ("vmrun", "vmdk", "subformat=streamOptimized", "vmdk"), ("vmrun", "raw", "", "vmdk"),
        ("script", "vhdx", "", ""), ("kvm", "parallels", "", "qcow2"),
    ],
)  # fmt: skip
def test_an_image_becomes_what_the_type_can_use(scratch, stand_ins, vm_type, made_as, options, expected):
    data = os.urandom(3 * MIB)
    disk = image(scratch / "disk.x", made_as, content=data, options=options, size=4 * MIB)
    before = disk.read_bytes()
    wanted = job(scratch, f"disk.x:sda:w:{made_as}", VMPARAM_Xen_Kernel='"included"')
    driver(vm_type).start(wanted)
    assert disk.read_bytes() == before, "the job's own image stays as it is"
    made = sorted(path.name for path in scratch.iterdir() if path.name.startswith("disk"))
    told = stand_ins.started[0][1].string("VMPARAM_vm_Disk")
    if not expected:
        assert made == ["disk.x"]
        assert told == f"disk.x:sda:w:{made_as}"
        return
    name = f"disk.x.{expected}"
    assert made == ["disk.x", name]
    assert told == f"{name}:sda:w:{expected}"
    assert content_of(scratch / name, expected)[: len(data)] == data
    assert (scratch / name).stat().st_uid == WHO.uid
    assert any("100 %" in line for line in LOG)


@pytest.mark.qemu
def test_a_type_that_takes_the_image_as_it_is_comes_first(scratch: Path, stand_ins: type[StandIn]) -> None:
    image(scratch / "disk.vdi", "vdi")
    driver("vmrun, kvm").start(job(scratch, "disk.vdi:vda:w:vdi"))
    assert stand_ins.started[0][0] == "kvm"
    stand_ins.broken.add("kvm")
    driver("vmrun, kvm").start(job(scratch, "disk.vdi:vda:w:vdi"))
    assert stand_ins.started[1][0] == "vmrun"


@pytest.mark.qemu
def test_a_job_that_is_to_be_saved_gets_an_image_with_which_it_can(scratch: Path, stand_ins: type[StandIn]) -> None:
    image(scratch / "disk.vmdk", "vmdk")
    driver("kvm").start(job(scratch, "disk.vmdk:vda:w:vmdk", JobVMCheckpoint="true"))
    assert stand_ins.started[0][1].string("VMPARAM_vm_Disk") == "disk.vmdk.qcow2:vda:w:qcow2"


@pytest.mark.qemu
def test_an_image_elsewhere_is_converted_only_to_be_read(scratch: Path, stand_ins: type[StandIn]) -> None:
    shared = scratch.parent / "shared"
    shared.mkdir(mode=0o755)
    disk = image(shared / "disk.vhdx", "vhdx", content=b"data")
    refused(job(scratch, f"{disk}:vda:w:vhdx"), "kvm", match="what the guest writes is to be in it")
    refused(job(scratch, f"{disk}:vda:rs:vhdx"), "kvm", match="other VMs use it")
    driver("kvm").start(job(scratch, f"{disk}:vda:r:vhdx"))
    assert stand_ins.started[0][1].string("VMPARAM_vm_Disk") == "disk.vhdx.qcow2:vda:r:qcow2"
    assert content_of(scratch / "disk.vhdx.qcow2", "qcow2")[:4] == b"data"


@pytest.mark.qemu
def test_what_is_of_that_name_already_is_not_overwritten(scratch: Path, stand_ins: type[StandIn]) -> None:
    image(scratch / "disk.vhdx", "vhdx")
    for make in (lambda path: path.write_bytes(b"the job's own"), lambda path: path.symlink_to("/etc/passwd")):
        place = scratch / "disk.vhdx.qcow2"
        place.unlink(missing_ok=True)
        make(place)
        refused(job(scratch, "disk.vhdx:vda:w:vhdx"), "kvm", match=r"disk.vhdx.qcow2.*is there already")
    assert place.is_symlink()


@pytest.mark.qemu
def test_where_conversions_are_not_wanted_or_in_vain_no_copy_stays(scratch: Path, stand_ins: type[StandIn]) -> None:
    image(scratch / "disk.vhdx", "vhdx")
    wanted = job(scratch, "disk.vhdx:vda:w:vhdx")
    refused(wanted, "kvm, vmrun", match="VM_ANY_CONVERT is false", VM_ANY_CONVERT="false")
    stand_ins.refuses |= {"kvm": "not this", "vmrun": "nor that"}
    refused(wanted, "kvm, vmrun", match=r"kvm: not this. vmrun: nor that.")


@pytest.mark.qemu
def test_an_image_that_is_no_good_is_the_jobs_fault(scratch: Path, stand_ins: type[StandIn]) -> None:
    disk = image(scratch / "disk.vhdx", "vhdx", content=os.urandom(2 * MIB), size=2 * MIB)
    os.truncate(disk, 200_000)
    fault = refused(job(scratch, "disk.vhdx:vda:w:vhdx"), "kvm")
    assert fault.code in (errors.BAD_IMAGE, errors.INVALID_DISK_PARAM)
    assert "disk.vhdx" in fault.problem


@pytest.mark.qemu
@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
def test_an_image_that_names_a_secret_of_the_machine_does_not_get_it(scratch: Path, stand_ins: type[StandIn]) -> None:
    secret, disk = scratch.parent / "secret", scratch / "disk.qcow2"
    secret.write_bytes(b"the machine's secret".ljust(MIB, b"."))
    secret.chmod(0o600)
    subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", "-F", "raw", "-b", secret, disk], check=True)
    own(disk)
    refused(job(scratch, "disk.qcow2:xvda:w:qcow2", VMPARAM_Xen_Kernel='"included"'), "xen")
    assert not any(b"the machine's secret" in data for data in files(scratch).values())


@pytest.fixture
def small(scratch: Path) -> Iterator[Path]:
    """A scratch directory on a file system of 16 MiB."""
    with mounted(scratch.parent / "small", "size=16m,mode=755") as place:
        own(place)
        yield place


@pytest.mark.qemu
@pytest.mark.parametrize("place", ["a file system of its own", "a full EXECUTE"])
def test_room_is_looked_at_first(small: Path, stand_ins: type[StandIn], place: str, user: Identity) -> None:
    """Its lack is the machine's fault only where EXECUTE itself has none."""
    full = place == "a full EXECUTE"
    directory = small / "dir_1" if full else small
    directory.mkdir(exist_ok=True)
    os.chown(directory, user.uid, user.gid)
    image(directory / "disk.vhdx", "vhdx", content=os.urandom(2 * MIB), size=2 * MIB)
    if full:
        with (small / "filler").open("wb") as filler, contextlib.suppress(OSError):
            for _ in range(16):
                filler.write(bytes(MIB))
                filler.flush()
    kind = MachineFault if full else JobFault
    fault = refused(job(directory, "disk.vhdx:vda:w:vhdx"), "kvm", kind, match="has to be converted")
    assert ("EXECUTE" if full else "request_disk") in fault.hint


@pytest.mark.qemu
def test_a_conversion_without_end(scratch: Path, stand_ins: type[StandIn], monkeypatch: pytest.MonkeyPatch) -> None:
    image(scratch / "disk.vhdx", "vhdx")
    real = shutil.which("qemu-img")
    # Where the job's user finds it too.
    slow = a_program(scratch.parent / "qemu-img", f'[ "$1" = convert ] && exec sleep 1000\nexec {real} "$@"')
    monkeypatch.setenv("PATH", f"{slow.parent}:{os.environ['PATH']}")
    monkeypatch.setattr("vmgahp.drivers.any.START_EXTRA", 0.0)
    refused(job(scratch, "disk.vhdx:vda:w:vhdx"), "kvm", match="had not ended after", VM_GAHP_REQ_TIMEOUT="1")


# --- a job that comes back


@pytest.mark.qemu
def test_it_restarts_by_the_same_type_with_the_same_image(scratch: Path, stand_ins: type[StandIn]) -> None:
    image(scratch / "disk.vhdx", "vhdx", content=b"before")
    wanted = job(scratch, "disk.vhdx:vda:w", JobVMCheckpoint="true")
    stand_ins.broken.add("kvm")
    driver("kvm, vmrun").start(wanted).destroy()
    stand_ins.broken.clear()
    image(scratch / "disk.vhdx.vmdk", "vmdk", content=b"what the guest wrote")
    driver("kvm, vmrun").start(wanted)
    assert [vm_type for vm_type, _ in stand_ins.started] == ["vmrun", "vmrun"]
    assert stand_ins.started[1][1].string("VMPARAM_vm_Disk") == "disk.vhdx.vmdk:vda:w:vmdk"
    assert content_of(scratch / "disk.vhdx.vmdk", "vmdk").startswith(b"what the guest wrote")


@pytest.mark.qemu
def test_with_a_checkpoint_another_type_is_none(scratch: Path, stand_ins: type[StandIn]) -> None:
    image(scratch / "disk.qcow2", "qcow2")
    wanted = job(scratch, "disk.qcow2:vda:w", JobVMCheckpoint="true")
    driver("kvm, script").start(wanted).destroy()
    assert refused(wanted, "script, xen", match="'kvm' before").code == errors.MISMATCHED_CHECKPOINT
    stand_ins.broken.add("kvm")
    refused(wanted, "script, kvm", match="kvm is broken")
    stand_ins.broken.clear()
    driver("script, kvm").start(wanted)
    assert stand_ins.started[-1][0] == "kvm"


@pytest.mark.qemu
def test_without_one_another_type_takes_the_image_that_was_written_to(scratch: Path, stand_ins: type[StandIn]) -> None:
    image(scratch / "disk.vhdx", "vhdx", content=b"before")
    wanted = job(scratch, "disk.vhdx:vda:w")
    driver("kvm, vmrun").start(wanted).destroy()
    image(scratch / "disk.vhdx.qcow2", "qcow2", content=b"what the guest wrote")
    stand_ins.broken.add("kvm")
    driver("kvm, vmrun").start(wanted)
    assert [vm_type for vm_type, _ in stand_ins.started] == ["kvm", "vmrun"]
    assert stand_ins.started[1][1].string("VMPARAM_vm_Disk") == "disk.vhdx.qcow2.vmdk:vda:w:vmdk"
    assert content_of(scratch / "disk.vhdx.qcow2.vmdk", "vmdk").startswith(b"what the guest wrote")
    stand_ins.broken.clear()
    driver("kvm, vmrun").start(wanted)
    assert stand_ins.started[2][0] == "vmrun", "the type that it had last"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b'{"format": 2, "vm_type": "kvm", "images": {}}',
        b'{"format": 1, "vm_type": 7, "images": {}}',
        b'{"format": 1, "vm_type": "kvm", "images": {"a": ["../../etc/passwd", "raw"]}}',
        b'{"format": 1, "vm_type": "kvm", "images": {"a": ["b:vda:w", "raw"]}}',
        rb'{"format": 1, "vm_type": "kvm", "images": {"a": ["\udcff", "raw"]}}',
        b'{"format": 1, "vm_type": "kvm", "images": {"a": ["b", "nbd"]}}',
        b"[" * 100_000,
    ],
)
def test_a_choice_that_was_tampered_with(scratch: Path, stand_ins: type[StandIn], data: bytes) -> None:
    (scratch / CHOICE_FILE).write_bytes(data)
    own(scratch / CHOICE_FILE)
    assert refused(job(scratch), match=CHOICE_FILE).code == errors.MISMATCHED_CHECKPOINT


@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
def test_a_scratch_directory_that_is_closed_is_the_machines_fault(scratch: Path, stand_ins: type[StandIn]) -> None:
    os.chown(scratch, 0, 0)
    refused(job(scratch), "kvm, script", MachineFault, match=CHOICE_FILE)
    assert not stand_ins.started


def test_a_forged_choice_gets_no_type_that_the_job_could_not_have(scratch: Path, stand_ins: type[StandIn]) -> None:
    (scratch / CHOICE_FILE).write_text(json.dumps({"format": 1, "vm_type": "simulated", "images": {}}))
    own(scratch / CHOICE_FILE)
    driver("kvm, script").start(job(scratch))
    assert stand_ins.started[0][0] == "kvm"


@pytest.mark.qemu
@pytest.mark.parametrize("vm_type", ["kvm", "xen"])
def test_a_disk_that_moves_after_a_periodic_checkpoint(scratch: Path, stand_ins: type[StandIn], vm_type: str) -> None:
    """The starter takes none of vm_type kvm and xen, and of vm_type any it does."""
    shared = scratch.parent / "shared"
    shared.mkdir(mode=0o755)
    disk = image(shared / "disk.raw", "raw")
    more = {"VMPARAM_Xen_Kernel": '"included"'}
    wanted = job(scratch, f"{disk}:xvda:w:raw", JobVMCheckpoint="true", **more)
    refused(wanted, vm_type, match="periodic checkpoint")
    driver(vm_type).start(job(scratch, f"{disk}:xvda:w:raw", **more))


# --- kill, dry run, the server


def test_kill_finds_the_vm_of_any_type(scratch: Path, stand_ins: type[StandIn]) -> None:
    wanted = job(scratch)
    for types in ("kvm, script", "script, kvm"):
        machine = driver(types).start(wanted)
        assert driver("kvm, vmrun, script").kill(str(scratch)) is True
        assert machine.status().state == lifecycle.STOPPED
    assert driver().kill(str(scratch)) is False


def test_a_type_that_cannot_say_is_a_fault_where_nobody_has_the_vm(scratch: Path, stand_ins: type[StandIn]) -> None:
    written = scratch / CHOICE_FILE
    driver("script").start(job(scratch))
    assert driver("nobodys, script").kill(str(scratch)) is True
    assert driver("nobodys, script").kill(str(scratch)) is False, "the job did not run by it"
    settings = Settings({"VM_MEMORY": "1024", "VM_ANY_TYPES": "nobodys, script"})
    startd = AnyDriver("any", settings, Identity(JOB_UID + 1, JOB_UID + 1), LOG.append)
    assert startd.kill(str(scratch)) is False, "the startd is another user"
    for text in (written.read_text().replace("script", "nobodys"), "nonsense"):
        written.write_text(text)
        for directory in (str(scratch), "/nonexistent/dir_1"):
            with pytest.raises(MachineFault, match="nobodys"):
                driver("nobodys, script").kill(directory)


@pytest.mark.qemu
def test_a_start_by_any_type_is_interrupted(scratch: Path, stand_ins: type[StandIn], monkeypatch) -> None:
    monkeypatch.setattr(StandIn, "interrupt", lambda self: [self.vm_type])
    chosen = driver("kvm, script")
    chosen.start(job(scratch)).destroy()
    assert chosen.interrupt() == ["kvm"]


def test_a_dry_run_says_what_would_be(scratch: Path, stand_ins: type[StandIn]) -> None:
    image(scratch / "disk.vhdx", "vhdx")
    before = files(scratch)
    told = driver("kvm, vmrun").describe(job(scratch, "disk.vhdx:vda:w"))
    assert "by kvm" in told
    assert "disk.vhdx as qcow2" in told
    assert "by vmrun" in driver("vmrun, xen").describe(job(scratch, "disk.vhdx:vda:w"))
    assert files(scratch) == before
    assert not stand_ins.started


# --- with real hypervisors


def guest(disk: Path, image_format: str, *, seconds: int | None, options: str = "") -> None:
    """A disk of the job's with the guest that counts."""
    raw = make_guest(disk.with_name("guest.raw"), seconds=seconds)
    image(disk, image_format, content=raw.read_bytes(), options=options)
    raw.unlink()


def run_to_its_end(chosen: AnyDriver, wanted: JobAd) -> None:
    with contextlib.closing(chosen):
        machine = chosen.start(wanted)
        until(lambda: machine.status().state == lifecycle.STOPPED, "the guest powers off")
        machine.release()


@pytest.mark.libvirt
@pytest.mark.parametrize(
    ("made_as", "options", "used"),
    [("vmdk", "subformat=streamOptimized", "disk.vmdk.qcow2:qcow2"), ("vdi", "", "disk.vdi:vdi")],
)
def test_a_real_guest_runs_from_any_image(scratch: Path, made_as: str, options: str, used: str) -> None:
    name = f"disk.{made_as}"
    guest(scratch / name, made_as, seconds=1, options=options)
    run_to_its_end(driver("vmrun, qemu"), job(scratch, f"{name}:vda:w"))
    assert (scratch / "vm_console.log").read_text().count(BANNER) == 1
    written, _, image_format = used.partition(":")
    assert content_of(scratch / written, image_format)[512:513] == b"1", "the guest's count"
    if written != name:
        assert content_of(scratch / name, made_as)[512:513] == b"\0", "the job's own image is as it was"


@pytest.mark.qemu
@needs_qemu
@pytest.mark.parametrize("made_as", ["qcow2", "vmdk"])
def test_vmware_runs_a_job_that_says_nothing_of_vmware(scratch: Path, made_as: str) -> None:
    name = f"disk.{made_as}"
    guest(scratch / name, made_as, seconds=1)
    with vmware() as here:
        wanted = job(scratch, f"{name}:hda:w", VMPARAM_vm_Types='"vmware"')
        run_to_its_end(driver("xen, vmrun", VMWARE_VMRUN=str(here.vmrun)), wanted)
    assert BANNER in (scratch / "vm_console.log").read_text()
    assert count_on(scratch / ("disk.vmdk" if made_as == "vmdk" else "disk.qcow2.vmdk")) == 1


def converting(monkeypatch: pytest.MonkeyPatch, convert: Callable[..., None], scratch: Path) -> JobAd:
    monkeypatch.setattr("vmgahp.drivers.any.backing_chain", lambda *_: ())
    monkeypatch.setattr(qemu_img, "measure", lambda *_, **__: MIB)
    monkeypatch.setattr(qemu_img, "convert", convert)
    (scratch / "disk.vhdx").write_bytes(b"vhdxfile".ljust(MIB))
    own(scratch / "disk.vhdx")
    return job(scratch, "disk.vhdx:vda:w")


def test_a_server_that_ends_starts_nothing_after_a_conversion(scratch: Path, stand_ins, monkeypatch) -> None:
    chosen = driver("kvm")

    def convert(*_: object, progress: Callable[[float], None], **__: object) -> None:
        chosen.interrupt()
        progress(1.0)
        pytest.fail("it goes on")

    wanted = converting(monkeypatch, convert, scratch)
    with pytest.raises(errors.ClientFault):
        chosen.start(wanted)
    assert [*files(scratch)] == ["disk.vhdx"]
    assert not stand_ins.started


@pytest.mark.parametrize(
    ("trouble", "reason", "kind"),
    [
        (qemu_img.CannotRun("qemu-img cannot be run (Resource temporarily unavailable)"), "", MachineFault),
        (qemu_img.Refused("error while writing at byte 0: Input/output error"), "EXECUTE is ill.", MachineFault),
        (qemu_img.Refused("error while writing at byte 0: Input/output error"), "", JobFault),
    ],
)
def test_a_conversion_that_the_machine_fails_is_its_fault(scratch, stand_ins, monkeypatch, trouble, reason, kind):
    wanted = converting(monkeypatch, Mock(side_effect=trouble), scratch)
    monkeypatch.setattr("vmgahp.host.job_user.why", lambda *_: reason)
    refused(wanted, "kvm", kind)


def test_a_machine_that_cannot_read_a_disk_is_at_fault(scratch: Path, stand_ins, monkeypatch) -> None:
    wanted = converting(monkeypatch, Mock(), scratch)
    monkeypatch.setattr("vmgahp.drivers.any.find_file", Mock(side_effect=MachineFault("No process can be started.")))
    refused(wanted, "vmrun", MachineFault)
