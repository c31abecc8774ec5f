"""The vSphere driver before it talks to any server: the job's .vmx and disks, faults, tags."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyVmomi import vim, vmodl

from tests.drivers.support import WHO
from tests.drivers.vsphere.simulator import VMX, Job
from tests.jobs import of_lines, owner
from vmgahp import errors
from vmgahp.config import Settings
from vmgahp.drivers.vsphere import VsphereDriver, hardware, inventory
from vmgahp.drivers.vsphere.connection import RULES, Access, from_vsphere
from vmgahp.drivers.vsphere.hardware import bare_spec, guest_id
from vmgahp.drivers.vsphere.inventory import LONGEST_NAME, RUNS, SAVED, Tag, entity_name, network_map
from vmgahp.drivers.vsphere.machine import DAY, VsphereContext, _convert
from vmgahp.images import qemu_img
from vmgahp.job.vmx import Vmx


@pytest.fixture
def job(scratch: Path) -> Job:
    return Job(scratch)


def subject(job: Job, *more: str) -> str:
    """Return the dry run of the job, without any server. Raises `errors.Fault`."""
    driver = VsphereDriver("vsphere", Settings({"VM_MEMORY": "1024"}), owner(job.scratch), print)
    return driver.describe(of_lines(*job.ad(*more)))


def refusal(job: Job, *more: str) -> errors.JobFault:
    with pytest.raises(errors.JobFault) as caught:
        subject(job, *more)
    assert "VMPARAM_VMware" in caught.value.problem
    assert caught.value.hint
    return caught.value


def test_a_dry_run_says_what_the_server_would_be_told(job: Job) -> None:
    assert subject(job).splitlines() == [
        f"name      alice_lab_{job.cluster}.0-xxxxxxxx", "memory    64 MiB", "CPUs      2", "guest     ubuntu64Guest",
        "firmware  bios", "network   none", "scsi0:0   disk disk.vmdk as disk-scsi0-0.vmdk, flat",
    ]  # fmt: skip


# Disks


def rewrite(job: Job, old: str, new: str) -> None:
    path = job.scratch / "disk.vmdk"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("parentCID=ffffffff", 'parentCID=ffffffff\nparentFileNameHint="base.vmdk"', "snapshot of another disk"),
        ('"disk-flat.vmdk"', '"/etc/shadow"', "its extent '/etc/shadow' is not a file beside it"),
        ('"disk-flat.vmdk"', '"..\\\\disk-flat.vmdk"', "is not a file beside it"),
        ('"disk-flat.vmdk"', '"other-flat.vmdk"', "No such file"),
        ("RW 2048", "RW 4096", "is to have 2097152 bytes"),
        ("RW 2048", "RW 1", "is to have 512 bytes"),
        ('RW 2048 FLAT "disk-flat.vmdk" 0', "", "names no data"),
    ],
)
def test_a_descriptor_that_is_no_good(job: Job, old: str, new: str, said: str) -> None:
    rewrite(job, old, new)
    assert said in refusal(job).problem


@pytest.mark.parametrize("content", [b"", b"COWD" + b"\0" * 600])
def test_a_file_that_is_no_vmdk(job: Job, content: bytes) -> None:
    (job.scratch / "disk.vmdk").write_bytes(content)
    assert refusal(job).code == errors.BAD_IMAGE


@pytest.mark.parametrize("name", ["disk.vmdk", "disk-flat.vmdk", "machine.vmx"])
@pytest.mark.parametrize(
    "make",
    [lambda path: path.symlink_to("../target"), os.mkfifo, os.mkdir, lambda _path: None],
    ids=["link", "fifo", "directory", "missing"],
)
def test_the_files_of_the_job_are_regular_files(job: Job, name: str, make: Callable[[Path], None]) -> None:
    (job.scratch.parent / "target").write_text("secret")
    (job.scratch / name).unlink()
    make(job.scratch / name)
    fault = refusal(job)
    assert fault.code == errors.INVALID_DISK_PARAM
    assert "secret" not in fault.problem


def test_a_disk_split_into_pieces_is_converted(job: Job) -> None:
    rewrite(job, 'createType="monolithicFlat"', 'createType="twoGbMaxExtentFlat"')
    assert "disk.vmdk as disk-scsi0-0.vmdk, to be converted" in subject(job)


def test_a_disk_whose_content_has_no_room_is_not_converted(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(qemu_img, "measure", lambda *_: 1 << 60)
    monkeypatch.setattr(qemu_img, "convert", lambda *_, **__: pytest.fail("it fills EXECUTE"))
    with pytest.raises(errors.JobFault, match="no room"):
        _convert("disk.vmdk", str(job.scratch / "raw"), ("vmdk", "raw"), "disk.vmdk", owner(job.scratch))


# The .vmx


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('displayName = "nothing"\n', "has no disk"),
        (VMX.replace("scsi0:0", "scsi0:7"), "scsi0:7 is not a place for a device"),
        (VMX.replace("scsi0:0", "scsi0:16"), "is not a place for a device"),
        (VMX.replace('"disk.vmdk"', '""'), "is not a name for a file"),
        (VMX.replace('"disk.vmdk"', '"[LocalDS_0] other/di|0Ask.vmdk"'), "is not a name for a file"),
        (VMX.replace('"lsilogic"', '"passthrough"'), "scsi0.virtualDev = 'passthrough' is not known"),
        (VMX.replace('"vmxnet3"', '"sriov"'), "ethernet0.virtualDev = 'sriov' is not known"),
        (VMX + 'scsi0:1.present = "TRUE"\nscsi0:1.fileName = "disk.vmdk"\n', "two of its devices use the same file"),
        ("no vmx at all", "could not read this file"),
        (VMX.replace('"lsilogic"', '"pvscsi"').replace("scsi0:0", "scsi0:65"), "is not a place for a device"),
        ('encryption.keySafe = "vmware:key/list/x"\nencryption.data = "abc="\n', "is encrypted"),
    ],
)
def test_a_vmx_that_no_server_could_run(job: Job, text: str, said: str) -> None:
    (job.scratch / "machine.vmx").write_text(text)
    assert said in refusal(job).problem


def test_a_path_is_a_name_in_the_scratch_directory_and_a_paravirtual_controller_has_more_places(job: Job) -> None:
    (job.scratch / "machine.vmx").write_text(VMX.replace('"disk.vmdk"', '"C:\\VMs\\mine\\disk.vmdk"'))
    assert "disk disk.vmdk" in subject(job)
    text = VMX.replace('"lsilogic"', '"pvscsi"').replace("scsi0:0", "scsi0:16")
    (job.scratch / "machine.vmx").write_text(text.replace('version = "13"', 'version = "14"'))
    assert "scsi0:16  disk disk.vmdk" in subject(job)
    (job.scratch / "machine.vmx").write_text(text)
    assert "scsi0:16 is not a place for a device" in refusal(job).problem


def test_drives_without_an_image_are_left_out_and_said(job: Job) -> None:
    more = 'floppy0.clientDevice = "TRUE"\nfloppy0.fileName = "vmware-null-remote-floppy"\n'
    more += 'sata0:0.present = "TRUE"\nsata0:0.deviceType = "cdrom-image"\nsata0:0.fileName = "gone.iso"\n'
    more += 'sata0:0.startConnected = "FALSE"\nnvram = "machine.nvram"\n'
    (job.scratch / "machine.vmx").write_text(VMX + more)
    assert [line for line in subject(job).splitlines() if line.startswith("left out")] == [
        "left out  floppy0 (a drive of the machine with the console)",
        "left out  sata0:0 (not connected when the VM starts)",
        "left out  nvram (the server makes a new one)",
    ]


def test_no_checkpoint_is_asked_of_a_vm_with_an_independent_disk(job: Job) -> None:
    (job.scratch / "machine.vmx").write_text(VMX + 'scsi0:0.mode = "independent-nonpersistent"\n')
    assert subject(job)
    fault = refusal(job, "JobVMCheckpoint = true")
    assert "scsi0:0.mode" in fault.problem
    assert "vm_checkpoint = false" in fault.hint


def test_secure_boot_and_the_order_of_booting_are_asked_for(job: Job) -> None:
    more = 'firmware = "efi"\nuefi.secureBoot.enabled = "TRUE"\nbios.bootOrder = "cdrom,hdd"\nbios.hddOrder = "x;y"\n'
    (job.scratch / "machine.vmx").write_text(VMX + more)
    assert "firmware  efi, secure boot" in subject(job)
    found = hardware.read_hardware(Vmx.parse(VMX + more), "machine.vmx")
    tag = Tag("id", "name", "job#1", "/dir", "host", RUNS)
    spec = SimpleNamespace(vm=SimpleNamespace(memory_mib=64, vcpus=4), vmx=Vmx({"cpuid.coresPerSocket": "2"}))
    config = bare_spec(spec, found, "name", tag, "store")  # type: ignore[arg-type]
    assert (config.firmware, config.bootOptions.efiSecureBootEnabled) == ("efi", True)
    assert (config.numCPUs, config.numCoresPerSocket) == (4, 2)
    options = {option.key: option.value for option in config.extraConfig}
    assert (options["bios.bootOrder"], "bios.hddOrder" in options) == ("cdrom,hdd", False)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("ubuntu-64", "ubuntu64Guest"), ("other-64", "otherGuest64"), ("other", "otherGuest"), ("", "otherGuest64"),
        ("plan9", "otherGuest64"),
    ],
)  # fmt: skip
def test_the_guests_system(name: str, wanted: str) -> None:
    assert guest_id(name) == wanted


# Whose fault it is


def test_each_row_of_the_table_is_a_fault_of_vsphere_that_can_be_reached() -> None:
    kinds = list(RULES)
    for number, kind in enumerate(kinds):
        assert issubclass(kind, vmodl.MethodFault)
        hidden = [other for other in kinds[:number] if issubclass(kind, other)]
        assert not hidden, f"{kind} is never reached behind {hidden}"


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (vim.fault.NoPermission(privilegeId="VirtualMachine.Create"), errors.MachineFault, "Machine.Create"),
        (vim.fault.InvalidLogin(msg="Cannot complete login."), errors.MachineFault, "Cannot complete login"),
        (vim.fault.NoDiskSpace(datastore="ds1"), errors.MachineFault, "ds1"),
        (vim.fault.InsufficientMemoryResourcesFault(), errors.MachineFault, "Memory"),
        (vim.fault.NumVirtualCpusIncompatible(), errors.JobFault, "CPUs"),
        (vim.fault.DeviceNotSupported(device="e1000e"), errors.JobFault, "DeviceNotSupported"),
        (vim.fault.InvalidVmConfig(property="numCPU"), errors.JobFault, "numCPU"),
        (vim.fault.InvalidDiskFormat(), errors.JobFault, "InvalidDiskFormat"),
        (vim.fault.FileNotFound(file="[ds] a/b"), errors.HypervisorFault, "[ds] a/b"),
        (vmodl.fault.HostNotConnected(), errors.HypervisorFault, "HostNotConnected"),
        (vmodl.fault.ManagedObjectNotFound(), errors.ClientFault, "ManagedObjectNotFound"),
        (vmodl.fault.SystemError(reason="x"), errors.HypervisorFault, "SystemError"),
        (vmodl.MethodFault(msg="something\nnew"), errors.HypervisorFault, "something new"),
    ],
)
def test_whose_fault(error: Exception, kind: type, said: str) -> None:
    fault = from_vsphere(error, "starting a VM")
    assert type(fault) is kind
    assert said in fault.render()
    assert "\n" not in fault.render()


def test_a_configuration_fault_for_want_of_room_is_not_the_jobs() -> None:
    error = vim.fault.GenericVmConfigFault(reason="x")
    assert isinstance(from_vsphere(error, "starting"), errors.JobFault)
    error.faultMessage = [vmodl.LocalizableMessage(key="msg.hbacommon.outofspace", message="no space")]
    assert isinstance(from_vsphere(error, "starting"), errors.MachineFault)


# Datastores


@pytest.mark.parametrize(("kind", "note"), [("VMFS", False), ("NFS41", False), ("vsan", True), ("VVOL", True)])
def test_a_datastore_whose_disks_are_no_files_is_named(kind: str, note: bool) -> None:
    seen = {"summary.accessible": True, "summary.freeSpace": 1 << 40, "summary.type": kind}
    driver = VsphereDriver("vsphere", Settings({}), WHO, print)
    driver._connection = SimpleNamespace(properties=lambda _ref, *paths: seen)  # type: ignore[assignment]
    driver._inventory = SimpleNamespace(datastore=lambda _datacenter: (None, "store"))  # type: ignore[assignment]
    said = driver._datastore(None)  # type: ignore[arg-type]
    assert said.startswith("store has room for 1048576 MiB")
    assert ("disks are no files" in said) is note


# Settings and tags


def access(host: str) -> Access:
    return Access.from_settings(Settings({"VSPHERE_HOST": host, "VSPHERE_USER": "u", "VSPHERE_PASSWORD_FILE": "/p"}))


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("esx1", "esx1", 443), ("esx1:8443", "esx1", 8443), ("[fe80::1]:444", "fe80::1", 444),
        ("fe80::1", "fe80::1", 443),
    ],
)  # fmt: skip
def test_the_address_of_the_server(text: str, host: str, port: int) -> None:
    found = access(text)
    assert (found.host, found.port) == (host, port)


@pytest.mark.parametrize("text", ["esx1:x", "esx1:99999", ":443", "https://esx1", "esx1/sdk"])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(errors.MachineFault, match="VSPHERE_HOST"):
        access(text)


def test_the_network_map() -> None:
    text = "nat = VM Network, bridge=Lab = 2"
    assert network_map(Settings({"VSPHERE_NETWORK_MAP": text})) == {"nat": "VM Network", "bridge": "Lab = 2"}
    for bad in ("nat", "nat =", "= x", "n t = x"):
        with pytest.raises(errors.MachineFault, match="VSPHERE_NETWORK_MAP"):
            network_map(Settings({"VSPHERE_NETWORK_MAP": bad}))


@given(st.text(min_size=1, max_size=300))
def test_a_name_for_vsphere_is_plain_short_and_unique(name: str) -> None:
    made = entity_name(name, "0123456789abcdef")
    assert re.fullmatch(r"[A-Za-z0-9_@+][A-Za-z0-9_.@+-]*-01234567", made)
    assert len(made) <= LONGEST_NAME
    assert made != entity_name(name, "1123456789abcdef")


def test_a_tag_is_read_as_it_was_written() -> None:
    tag = Tag("id", "name", "job#1", "/dir", "host", RUNS, "vmgahp-0", "1700000000")
    assert Tag.read([*tag._replace(state=SAVED).options(), *tag.options()]) == tag, "the last of a key counts"
    assert Tag.read(None) is None
    for key in ("vmgahp.id", "guestinfo.vmgahp.id"):
        assert Tag.read([vim.option.OptionValue(key=key, value="x")]) is None


def test_a_checkpoint_expires_by_the_server_s_clock() -> None:
    """A host whose clock is wrong would keep a checkpoint for ever, or destroy those of others that wait."""
    server: Any = SimpleNamespace(now=lambda: 1000.0)
    unused: Any = None
    context = VsphereContext(server, unused, unused, unused, 1, print)
    waiting = context.waiting(Tag("id", "name", "job#1", "/dir", "host", RUNS))
    assert (waiting.state, waiting.expires) == (SAVED, str(1000 + DAY))
    assert not waiting.has_expired(lambda: 1000.0 + DAY)
    assert waiting.has_expired(lambda: 1001.0 + DAY)


# A file service that breaks off

CONTENT = bytes(range(250)) * 40


class Breaking:
    """A connection that breaks off each answer after some bytes."""

    def __init__(self, after: int, *, resumes: bool) -> None:
        self.after, self.resumes = after, resumes
        self.asked = 0

    def https(self) -> tuple["Breaking", dict[str, str]]:
        return self, {}

    def request(self, _method: str, _path: str, _body: None, headers: dict[str, str]) -> None:
        self.asked += 1
        begin = int(headers["Range"].strip("bytes=-")) if self.resumes and "Range" in headers else 0
        self.status, self.left = 206 if begin else 200, self.after
        self.rest = CONTENT[begin:]
        self.length = len(self.rest)

    def getresponse(self) -> "Breaking":
        return self

    def read(self, size: int) -> bytes:
        given, self.rest = self.rest[: min(size, self.left)], self.rest[min(size, self.left) :]
        self.left -= len(given)
        return given

    def close(self) -> None:
        pass


@pytest.mark.parametrize(("after", "resumes", "tries"), [(1000, True, 10), (1000, False, None), (0, True, None)])
def test_a_download_that_gets_on_may_break_off_any_number_of_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int, resumes: bool, tries: int | None
) -> None:
    monkeypatch.setattr(inventory, "RETRY_INTERVAL", 0.0)
    connection: Any = Breaking(after, resumes=resumes)
    place: Any = SimpleNamespace(datacenter_path="dc", datastore_name="store")
    store = inventory.Store(connection, place, print)
    with (tmp_path / "disk").open("w+b") as file:
        if tries is None:
            with pytest.raises(errors.HypervisorFault, match=f"{inventory.TRIES} times over"):
                store.download("a/disk.vmdk", "disk", file)
            assert connection.asked <= inventory.TRIES + 1
            return
        assert store.download("a/disk.vmdk", "disk", file) == len(CONTENT)
        file.seek(0)
        assert file.read() == CONTENT
    assert connection.asked == tries
