"""The drives of a .vmx: in the order of their controllers, and with the images that are any."""

import pytest

from vmgahp.job.vmx import Vmx, drives

PHANTOM = {
    "floppy0.startConnected": "FALSE",
    "floppy0.clientDevice": "TRUE",
    "floppy0.fileName": "vmware-null-remote-floppy",
}
"""What ESXi writes into a VM of which nobody has ever wanted a floppy drive."""

CDROM = {"ide1:0.present": "TRUE", "ide1:0.deviceType": "cdrom-image", "ide1:0.fileName": "install.iso"}


def seen(**more: str) -> list[tuple[str, str, str]]:
    return [(drive.place, drive.kind, drive.no_image) for drive in drives(Vmx(more))]


def test_the_order_is_that_of_the_numbers_and_not_of_the_file() -> None:
    places = ["scsi0:10", "sata0:1", "scsi0:2", "floppy0", "nvme0:0", "scsi1:0", "ide1:0", "scsi0:0", "scsi10:0"]
    vmx = Vmx({f"{place}.present": "TRUE" for place in places})
    assert [drive.place for drive in drives(vmx) if drive.bus == "scsi"] == [
        "scsi0:0",
        "scsi0:2",
        "scsi0:10",
        "scsi1:0",
        "scsi10:0",
    ]
    assert {drive.place for drive in drives(vmx)} == set(places)


@pytest.mark.parametrize(
    ("more", "no_image"),
    [
        (PHANTOM, "a drive of the machine with the console"),
        (PHANTOM | {"floppy0.present": "TRUE", "floppy0.fileType": "file"}, "a drive of the machine with the console"),
        ({"floppy0.fileType": "file", "floppy0.fileName": ""}, "a drive without an image"),
        ({"floppy0.fileType": "file", "floppy0.fileName": "vmware-null-remote-floppy"}, "a drive without an image"),
        (
            {"floppy0.fileType": "file", "floppy0.fileName": "a.flp", "floppy0.startConnected": "false"},
            "not connected when the VM starts",
        ),
        ({"floppy0.fileType": "device", "floppy0.fileName": "/dev/fd0"}, "a device of the host"),
        ({"floppy0.autodetect": "TRUE"}, "a drive without an image"),
        ({"floppy0.fileType": "file", "floppy0.fileName": "boot.flp"}, ""),
        (CDROM, ""),
        (CDROM | {"ide1:0.startConnected": "TRUE"}, ""),
        (CDROM | {"ide1:0.startConnected": "FALSE"}, "not connected when the VM starts"),
        (CDROM | {"IDE1:0.CLIENTDEVICE": "TRUE"}, "a drive of the machine with the console"),
        (CDROM | {"ide1:0.fileName": "emptyBackingString"}, "a drive without an image"),
        (CDROM | {"ide1:0.deviceType": "cdrom-raw", "ide1:0.fileName": "auto detect"}, "a drive without an image"),
        (CDROM | {"ide1:0.deviceType": "atapi-cdrom", "ide1:0.fileName": "/dev/cdrom"}, "a device of the host"),
        ({"scsi0:1.present": "TRUE", "scsi0:1.deviceType": "scsi-passthru"}, "a device of the host"),
        (
            {"scsi0:1.present": "TRUE", "scsi0:1.deviceType": "rawDisk", "scsi0:1.fileName": "a.vmdk"},
            "a device of the host",
        ),
        ({"scsi0:1.present": "TRUE", "scsi0:1.fileName": "a.vmdk", "scsi0:1.startConnected": "FALSE"}, ""),
    ],
)
def test_what_has_no_image(more: dict[str, str], no_image: str) -> None:
    ((_, _, found),) = seen(**more)
    assert found == no_image


def test_a_floppy_drive_is_there_unless_the_file_says_no() -> None:
    assert seen(**PHANTOM | {"floppy0.present": "FALSE"}) == []
    assert seen(**{"floppy0.fileType": "file", "floppy0.fileName": "boot.flp"}) == [("floppy0", "floppy", "")]
    assert seen(**{"ide0:0.fileName": "a.vmdk"}) == []


def test_an_iso_is_a_cd_whatever_else_is_said() -> None:
    assert seen(**{"sata0:1.present": "TRUE", "sata0:1.fileName": "Install.ISO"}) == [("sata0:1", "cdrom", "")]


@pytest.mark.parametrize(
    "name", ["scsi00:0", "scsi0:00", "scsi0:0:0", "scsi:0", "scsi0", "sc\u0661i0:0", "scsi\u0661:0"]
)
def test_what_is_no_name_of_a_drive(name: str) -> None:
    assert seen(**{f"{name}.present": "TRUE"}) == []
