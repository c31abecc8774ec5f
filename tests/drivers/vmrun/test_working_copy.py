"""The working .vmx and its disks: a job chooses its own machine, and nothing of this one."""

import os
import shutil
import struct
import subprocess

import pytest

from tests.jobs import own
from vmgahp import errors
from vmgahp.config import Settings
from vmgahp.drivers.vmrun import working_copy
from vmgahp.drivers.vmrun.working_copy import WorkingCopy, look_at_layers
from vmgahp.errors import JobFault, MachineFault
from vmgahp.host.budget import Budget
from vmgahp.job.vm_spec import Nic, VmSpec
from vmgahp.job.vmware import VmwareSpec
from vmgahp.job.vmx import Vmx

ATTRIBUTE = "VMPARAM_VMware_VMX_File"
TEXT_DISK = """# Disk DescriptorFile
version=1
CID=fffffffe
parentCID={cid}
createType="{kind}"
{parent}
# Extent description
{extents}
"""


@pytest.fixture
def disk(scratch, user):
    """Makes a disk whose description is a file of its own."""

    def make(name="dos.vmdk", kind="monolithicFlat", parent="", extents='RW 2048 FLAT "dos-flat.vmdk" 0'):
        text = TEXT_DISK.format(
            kind=kind,
            extents=extents,
            cid="fffffffe" if parent else "ffffffff",
            parent=f'parentFileNameHint="{parent}"' if parent else "",
        )
        (scratch / name).write_text(text)
        (scratch / "dos-flat.vmdk").write_bytes(b"")
        own(scratch)
        return scratch / name

    return make


@pytest.fixture
def read(scratch, user):
    """Reads a disk of the scratch directory: its layers."""
    return lambda name, **more: look_at_layers(user, str(scratch), name, ATTRIBUTE, **more)


class TestDisks:
    @pytest.mark.qemu
    @pytest.mark.skipif(shutil.which("qemu-img") is None, reason="needs qemu-img")
    def test_what_qemu_makes_of_every_kind(self, scratch, read):
        for kind in ("monolithicSparse", "monolithicFlat", "twoGbMaxExtentSparse", "twoGbMaxExtentFlat"):
            path = scratch / f"{kind}.vmdk"
            subprocess.run(["qemu-img", "create", "-f", "vmdk", "-o", f"subformat={kind}", path, "3G"], check=True)
            own(scratch)
            (layer,) = read(path.name)
            made = {entry.name for entry in scratch.iterdir() if entry.name.startswith(kind)}
            assert set(layer.files) == made

    @pytest.mark.parametrize("inside", [True, False])
    def test_the_parents_path_of_another_machine_is_corrected(self, scratch, user, disk, read, inside):
        disk()
        old = "/execute/dir_17/dos.vmdk"
        child = disk("dos-000001.vmdk", parent=old)
        if inside:  # in the disk itself, as far as anything looks at it
            text = child.read_bytes().replace(b"monolithicFlat", b"monolithicSparse")
            header = b"KDMV" + struct.pack("<IIQQQQ", 1, 3, 2048, 128, 1, 20)
            child.write_bytes(header.ljust(512, b"\0") + text.ljust(512 * 20, b"\0") + b"data" * 128)
        before = child.read_bytes()
        found = read(child.name)
        assert [layer.path for layer in found] == ["dos-000001.vmdk", "dos.vmdk"]
        assert child.read_bytes() == before
        WorkingCopy("dos_condor.vmx", Vmx(), {"ide0:0": tuple(found)}).correct_parents(str(scratch), user)
        after = child.read_bytes()
        assert (b'parentFileNameHint="dos.vmdk"' in after, old.encode() in after) == (True, False)
        if inside:
            text = before[512:].partition(b"\0")[0].replace(old.encode(), b"dos.vmdk")
            assert after == before[:512] + text.ljust(512 * 20, b"\0") + before[512 * 21 :]
        again = read(child.name)
        assert [layer[:2] for layer in again] == [layer[:2] for layer in found]
        assert not any(layer.parent for layer in again)
        assert child.stat().st_uid == user.uid

    def test_the_rest_of_a_longer_text_is_no_description_and_a_path_may_be_of_windows(self, disk, read):
        path = disk()
        # QEMU leaves it there when the disk's changing number has fewer digits than before.
        path.write_bytes(path.read_bytes() + b'\0"0"\n\0\0')
        assert read("dos.vmdk")
        disk()
        disk("child.vmdk", parent=r"C:\vms\dos.vmdk")
        assert [layer.path for layer in read("child.vmdk")] == ["child.vmdk", "dos.vmdk"]

    def test_a_shared_parent_keeps_its_path(self, scratch, disk, read):
        disk()
        shared = scratch.with_name("shared")
        shared.mkdir()
        shutil.copy(scratch / "dos.vmdk", shared)
        shutil.copy(scratch / "dos-flat.vmdk", shared)
        child = disk("child.vmdk", parent=f"{shared}/dos.vmdk")
        found = read("child.vmdk", shared=True)
        assert [layer.path for layer in found] == ["child.vmdk", f"{shared}/dos.vmdk"]
        assert found[1].files == (f"{shared}/dos.vmdk", f"{shared}/dos-flat.vmdk")
        assert str(shared) in child.read_text()
        # The same job with its disks transferred means the one that came with it.
        assert [layer.path for layer in read("child.vmdk")] == ["child.vmdk", "dos.vmdk"]

    @pytest.mark.parametrize(
        ("changes", "part"),
        [
            ({"kind": "fullDevice", "extents": 'RW 2048 FLAT "/dev/sda" 0'}, "'fullDevice'"),
            ({"kind": "partitionedDevice"}, "'partitionedDevice'"),
            ({"extents": 'RW 2048 FLAT "/dev/sda" 0'}, "'/dev/sda' is not a file beside it"),
            ({"extents": 'RW 2048 FLAT "../other.vmdk" 0'}, "not a file beside it"),
            ({"extents": 'RW 2048 VMFSRDM "dos-flat.vmdk" 0'}, "VMFSRDM"),
            ({"extents": "RW 2048 FLAT dos-flat.vmdk"}, "cannot be understood"),
            ({"kind": 'monolithicFlat"\ncreateType="fullDevice'}, "no description"),
            ({"kind": 'monolithicFlat"\nCREATETYPE="fullDevice'}, "no description"),
            ({"kind": 'monolithicFlat"\ncreateType = fullDevice\nx="'}, "cannot be understood"),
            ({"kind": 'monolithicFlat"\rcreateType="fullDevice'}, "cannot be understood"),
            ({"extents": 'RW 1 FLAT "dos-flat.vmdk" 0\nrw 1 FLAT "/dev/sda" 0'}, "'/dev/sda'"),
            ({"extents": 'RW 1 FLAT "dos-flat.vmdk" 0 "/dev/sda"'}, "cannot be understood"),
            ({"extents": 'RW 1 FLAT "|2Fdev|2Fsda" 0'}, "not a file beside it"),
            ({"parent": "|2Fetc|2Fpasswd"}, "cannot be used"),
            ({"parent": 'a.vmdk"\nparentFileNameHint="b.vmdk'}, "more than one parent"),
            ({"extents": 'RW 1 FLAT "dos-flat.vmdk" 0\n\0\ncreateType="fullDevice"'}, "after its end"),
        ],
    )
    def test_a_disk_that_is_more_than_its_files_is_refused(self, disk, read, changes, part):
        disk(**changes)
        with pytest.raises(JobFault) as caught:
            read("dos.vmdk")
        assert caught.value.code == errors.BAD_IMAGE
        assert [words for words in (part, ATTRIBUTE, "'dos.vmdk'") if words not in caught.value.problem] == []

    @pytest.mark.parametrize(
        ("changes", "part"),
        [
            ({"extents": 'RW 2048 FLAT "gone.vmdk" 0'}, "No such file"),
            ({"extents": 'RW 2048 FLAT "link.vmdk" 0'}, "symbolic links"),
            ({"parent": "gone.vmdk"}, "its parent 'gone.vmdk' is not in the scratch directory"),
            ({"parent": "/nowhere/gone.vmdk"}, "'/nowhere/gone.vmdk'"),
            ({"parent": "/dev/zero"}, "not a regular file"),
            ({"parent": "dos.vmdk"}, "no end"),
            ({"parent": "link.vmdk"}, "symbolic links"),
        ],
    )
    def test_files_that_are_not_the_jobs_are_refused(self, scratch, disk, read, changes, part):
        (scratch / "link.vmdk").symlink_to("/etc/hostname")
        disk(**changes)
        with pytest.raises(JobFault) as caught:
            read("dos.vmdk")
        assert part in caught.value.problem

    @pytest.mark.skipif(os.getuid() != 0, reason="needs root")
    def test_a_parent_that_only_root_may_read_is_refused(self, scratch, disk, read):
        secret = scratch.with_name("secret.vmdk")
        shutil.copy(disk("other.vmdk"), secret)
        secret.chmod(0o600)
        os.chown(secret, 0, 0)
        disk(parent=str(secret))
        with pytest.raises(JobFault, match="Permission denied"):
            read("dos.vmdk")


BASE = {
    ".encoding": "UTF-8", "config.version": "8", "virtualHW.version": "10", "guestOS": "dos", "displayName": "mine",
    "memsize": "99999", "numvcpus": "64", "ide0:0.present": "TRUE", "ide0:0.fileName": "dos.vmdk",
}  # fmt: skip

CDROM = {"ide1:0.present": "TRUE", "ide1:0.deviceType": "cdrom-image"}


@pytest.fixture
def build(scratch, user, disk):
    disk()

    def make(source=None, machine=None, **changes):
        vm = {"name": "alice_lab_7.0", "vm_type": "vmware", "working_dir": str(scratch), "memory_mib": 515, "vcpus": 2}
        vm |= {"nics": (), "checkpoint": False, "no_output_vm": False}
        job = {
            "dir": "", "transfer": True, "snapshot_disk": True, "vmx_file": "dos.vmx", "vmdk_files": (), "vmx": Vmx(),
        }  # fmt: skip
        vm = VmSpec(**{name: changes.pop(name, value) for name, value in vm.items()})
        vmx, spec = Vmx(BASE | (source or {})), VmwareSpec(vm, **job | changes)
        return working_copy.build(vmx, spec, str(scratch), "1-2-3", Settings(machine or {}), user)

    return make


class TestWorkingCopy:
    def test_all_of_it(self, build):
        copy = build()
        assert copy.name == "dos_condor.vmx"
        assert copy.disks.keys() == {"ide0:0"}
        assert dict(Vmx.decode(copy.vmx.encode())) == {
            ".encoding": "UTF-8", "config.version": "8", "virtualHW.version": "10", "guestOS": "dos",
            "ide0:0.present": "TRUE", "ide0:0.fileName": "dos.vmdk", "ide0:0.writeThrough": "TRUE", "memsize": "512",
            "numvcpus": "2", "displayName": "alice_lab_7.0", "uuid.action": "keep", "disk.locking": "FALSE",
            "msg.autoAnswer": "TRUE", "workingDir": ".", "snapshot.redoNotWithParent": "TRUE", "vmgahp.uuid": "1-2-3",
            "ethernet0.present": "FALSE",
        }  # fmt: skip

    @pytest.mark.parametrize(
        "source",
        [
            {"ide1:0.present": "TRUE", "ide1:0.deviceType": "cdrom-raw", "ide1:0.fileName": "/dev/sr0"},
            {"scsi0:1.present": "TRUE", "scsi0:1.deviceType": "scsi-passthru", "scsi0:1.fileName": "/dev/sg0"},
            {"scsi0:1.present": "FALSE", "scsi0:1.fileName": "gone.vmdk"},
            {"scsi0:1.fileName": "dos.vmdk"},
            {"floppy0.present": "TRUE", "floppy0.fileType": "device", "floppy0.fileName": "/dev/fd0"},
            {"floppy0.fileType": "file", "floppy0.fileName": "vmware-null-remote-floppy"},
            CDROM | {"ide1:0.fileName": "gone.iso", "ide1:0.clientDevice": "TRUE"},
            {"serial0.present": "TRUE", "serial0.fileType": "device", "serial0.fileName": "/dev/ttyS0"},
            {"serial0.present": "TRUE", "serial0.fileType": "pipe", "serial0.fileName": "/run/docker.sock"},
            {"serial0.present": "TRUE", "serial0.fileType": "network", "serial0.fileName": "tcp://:1"},
            {"serial0.present": "TRUE", "serial0.fileType": "file", "serial0.fileName": "dos.vmdk"},
            {"parallel0.present": "TRUE", "parallel0.fileType": "device", "parallel0.fileName": "/dev/lp0"},
            {"usb.present": "TRUE", "usb.generic.autoconnect": "TRUE"},
            {"sharedFolder0.present": "TRUE", "sharedFolder0.hostPath": "/"},
            {"RemoteDisplay.vnc.enabled": "TRUE", "pciPassthru0.present": "TRUE"},
            {"checkpoint.vmState": "/etc/passwd", "nvram": "/etc/passwd", "extendedConfigFile": "/x"},
            {"msg.autoAnswer": "FALSE", "disk.locking": "TRUE", "uuid.action": "create", "vmgahp.uuid": "x"},
            {"ethernet0.present": "TRUE", "ethernet0.virtualDev": "e1000", "ethernet1.present": "TRUE"},
        ],
    )
    def test_what_is_left_out(self, build, source):
        assert build(source).vmx == build().vmx

    def test_what_is_kept(self, build, scratch, user):
        for name in ("data.iso", "boot.flp"):
            (scratch / name).write_bytes(b"")
        own(scratch)
        devices = ("scsi0", "pciBridge0", "sata0:1", "floppy0", "serial0", "parallel1", "nvme0:0")
        kept = {f"{device}.present": "TRUE" for device in devices}
        kept |= {"bios.bootOrder": "cdrom,hdd", "bios.hddOrder": "nvme0:0,ide0:0"}
        kept |= {"firmware": "efi", "uefi.secureBoot.enabled": "TRUE", "scsi0.virtualDev": "lsilogic"}
        kept |= {"sata0:1.deviceType": "cdrom-image", "sata0:1.fileName": "data.iso"}
        kept |= {"floppy0.fileType": "file", "floppy0.fileName": "boot.flp"}
        kept |= {"serial0.fileType": "file", "serial0.fileName": "out.txt"}
        kept |= {"parallel1.fileType": "file", "parallel1.fileName": "printed.txt"}
        kept |= {"nvme0:0.fileName": "dos.vmdk", "nvme0:0.mode": "independent-persistent"}
        source = kept | {
            "sata0:1.fileName": "/home/alice/data.iso",
            "floppy0.fileName": r"C:\boot.flp",
            "serial0.fileName": "/var/log/out.txt",
        }
        vmx = build(source).vmx
        assert {name: vmx[name] for name in kept} == kept

    @pytest.mark.parametrize("name", [b"\xff.vmdk", b"\xff.iso"])
    def test_a_link_to_a_name_that_is_not_text_holds_the_job(self, build, scratch, name):
        target = scratch / os.fsdecode(name)
        shutil.copy(scratch / "dos.vmdk", target)
        link = scratch / f"link{target.suffix}"
        link.symlink_to(target)
        own(scratch)
        drives = {"ide0:0.fileName": str(scratch / "dos.vmdk")}
        drives |= {"ide0:0.fileName": str(link)} if target.suffix == ".vmdk" else CDROM | {"ide1:0.fileName": str(link)}
        with pytest.raises(JobFault, match="is not text"):
            build(drives, transfer=False)

    def test_the_jobs_nvram_goes_where_it_was_transferred(self, build, scratch):
        for name in ("dos.nvram", "dos_condor.nvram", "dos.txt"):
            (scratch / name).write_bytes(b"")
        (scratch / "link.nvram").symlink_to("dos.nvram")
        own(scratch)
        copy = build({"nvram": r"C:\vms\dos.nvram"})
        assert (copy.nvram, copy.vmx["nvram"], copy.left_out) == ("dos.nvram", "dos.nvram", ())
        for name, reason in (
            ("gone.nvram", "No such file or directory, in the scratch directory"),
            ("link.nvram", "Too many levels of symbolic links, in the scratch directory"),
            ("dos.vmdk", "it is no .nvram file"),
            ("dos.txt", "it is no .nvram file"),
            ("DOS_condor.nvram", "the name is VMware's own"),
        ):
            copy = build({"nvram": name})
            assert (copy.nvram, "nvram" in copy.vmx) == ("", False)
            assert copy.left_out == (f"nvram = '{name}' ({reason}): VMware makes a new one",)

    def test_cores_are_those_of_the_vmx_where_the_jobs_cpus_can_have_them(self, build):
        assert build({"cpuid.coresPerSocket": "2"}).vmx["cpuid.coresPerSocket"] == "2"
        for odd in ("3", "0", "-2", "2.0", "\u0662", "99999", ""):
            assert "cpuid.coresPerSocket" not in build({"cpuid.coresPerSocket": odd}).vmx

    def test_what_has_no_image_is_said(self, build):
        source = {"floppy0.clientDevice": "TRUE"} | CDROM | {"ide1:0.fileName": "a.iso", "ide1:0.startConnected": "no"}
        said = ("floppy0 (a drive of the machine with the console)", "ide1:0 (not connected when the VM starts)")
        assert build(source).left_out == said

    @pytest.mark.parametrize("value", ['dos"\nmemsize = "1', "a|22|0Ab", "\r\x85\u2028é"])
    def test_no_value_adds_a_line(self, build, value):
        """The writer of a .vmx has a property test of its own; here is what the builder copies of a job's."""
        plain, nasty = (
            dict(Vmx.decode(build({"guestOS": word, "ethernet0.virtualDev": word}, nics=(Nic("nat"),)).vmx.encode()))
            for word in ("dos", value)
        )
        assert nasty == plain | {"guestOS": value, "ethernet0.virtualDev": value}

    def test_shared_disks_have_full_paths_and_are_not_independent(self, build, scratch, user):
        shared = scratch.with_name("shared")
        shared.mkdir()
        for name in ("dos.vmdk", "dos-flat.vmdk"):
            shutil.copy(scratch / name, shared)
        copy = build({"ide0:0.mode": "independent-persistent"}, transfer=False, dir=str(shared))
        assert (copy.vmx["ide0:0.fileName"], copy.vmx["ide0:0.mode"]) == (f"{shared}/dos.vmdk", "persistent")

    @pytest.mark.parametrize(
        ("kind", "machine", "word"),
        [
            ("nat", {}, "nat"),
            ("bridge", {}, "bridged"),
            ("bridge", {"VMWARE_NETWORKING_TYPE": "nat"}, "nat"),
            ("nat", {"VMWARE_NETWORKING_TYPE": "hostonly", "VMWARE_BRIDGE_NETWORKING_TYPE": "x"}, "hostonly"),
            ("nat", {"VMWARE_NETWORKING_TYPE": "hostonly", "VMWARE_NAT_NETWORKING_TYPE": "nat"}, "nat"),
            ("bridge", {"VMWARE_BRIDGE_NETWORKING_TYPE": 'a"\nb'}, 'a"\nb'),
        ],
    )
    def test_networks(self, build, kind, machine, word):
        vmx = build(machine=machine, nics=(Nic(kind, "00:50:56:00:00:01"),)).vmx
        assert vmx["ethernet0.connectionType"] == word
        assert (vmx["ethernet0.addressType"], vmx["ethernet0.address"]) == ("static", "00:50:56:00:00:01")

    def test_the_administrators_lines_win(self, build, tmp_path):
        local = tmp_path / "local"
        local.write_text('# ours\nmemsize = "256"\nethernet0.vnet = "/dev/vmnet2"\n')
        vmx = build(machine={"VMWARE_LOCAL_SETTINGS_FILE": str(local)}).vmx
        assert (vmx["memsize"], vmx["ethernet0.vnet"]) == ("256", "/dev/vmnet2")

    @pytest.mark.parametrize("content", [None, "not a line of a vmx"])
    def test_a_local_settings_file_that_is_none_blames_the_machine(self, build, tmp_path, content):
        local = tmp_path / "local"
        if content:
            local.write_text(content)
        with pytest.raises(MachineFault, match="VMWARE_LOCAL_SETTINGS_FILE"):
            build(machine={"VMWARE_LOCAL_SETTINGS_FILE": str(local)})

    @pytest.mark.parametrize(
        ("source", "part"),
        [
            ({"ide0:0.fileName": "gone.vmdk"}, "'gone.vmdk'"),
            ({"ide0:0.fileName": ".."}, "'..' is not the name of a disk"),
            ({"ide0:0.fileName": "a\nb.vmdk"}, "is not the name of a disk"),
            ({"ide0:0.fileName": ""}, "'' is not the name of a disk"),
            ({"ide0:0.present": "FALSE"}, "has no disk"),
            (CDROM | {"ide1:0.fileName": "gone.iso"}, "'gone.iso'"),
            (CDROM | {"ide1:0.fileName": "/dev/zero"}, "'/dev/zero'"),
        ],
    )
    def test_a_jobs_mistake_names_the_line(self, build, source, part, monkeypatch):
        with monkeypatch.context() as patched:
            patched.setattr(os.path, "realpath", pytest.fail)  # root follows no path that the user cannot open
            with pytest.raises(JobFault) as caught:
                build(source)
        assert [words for words in (part, f"{ATTRIBUTE} = 'dos.vmx'") if words not in caught.value.problem] == []
        assert caught.value.hint


def test_one_with_thousands_of_ports_holds_the_job(build):
    with pytest.raises(JobFault, match=r"[0-9]{4} drives and ports") as caught:
        build(source={f"serial{number}.present": "TRUE" for number in range(1, 5000)} | {"scsi0:0.present": "TRUE"})
    assert caught.value.code == errors.BAD_IMAGE


def test_a_start_that_descriptions_of_disks_take_up_is_the_jobs_fault(scratch, user):
    (scratch / "a.vmdk").write_bytes(b'createType="vmfs"\nRW 1 FLAT "a.vmdk"\n' + b"   \n" * 200_000)
    own(scratch)
    with Budget(1.0) as start, pytest.raises(JobFault, match="of the job's user"):
        all(look_at_layers(user, str(scratch), "a.vmdk", "a") for _ in iter(lambda: start.left(1.0), 0))
