"""VMware's .vmx files: read as VMware reads them, no value becomes a line of its own, and the drives in them."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vmgahp.job.vmx import LARGEST, MOST_LINES, Vmx, VmxError, drives

NAMES = st.from_regex(r"[A-Za-z][A-Za-z0-9.:_]{0,20}", fullmatch=True)
VALUES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=60)
NASTY = st.lists(
    st.sampled_from(['"', "\n", "\r", "|", "#", "=", " ", "\t", "|22", "|0A", "|", "2", "\x85", "\u2028", "é", "x"])
).map("".join)


@given(st.dictionaries(NAMES, VALUES | NASTY, max_size=8))
def test_every_value_comes_back_and_none_adds_a_line(pairs):
    vmx = Vmx()
    for name, value in pairs.items():
        vmx[name] = value
    text = vmx.render()
    assert len([line for line in re.split("\r\n|\r|\n", text) if line]) == len(vmx), "as VMware counts lines"
    assert len(text.splitlines()) == len(vmx)
    assert Vmx.parse(text) == vmx
    assert Vmx.decode(vmx.encode()) == vmx


def test_the_syntax():
    vmx = Vmx.parse(
        '#!/usr/bin/vmware\r\n.encoding = "UTF-8"\r\n\r\n'
        "  memsize=64 # MiB\r\n"
        'displayName\t=\t"a |22quoted|22 name|0A"  # what people see\r\n'
        'guestOS = "dos # no comment"\r\n'
        "empty =\r\n"
        "last = |7Cx"
    )
    assert dict(vmx) == {
        ".encoding": "UTF-8",
        "memsize": "64",
        "displayName": 'a "quoted" name\n',
        "guestOS": "dos # no comment",
        "empty": "",
        "last": "|x",
    }
    assert vmx.render() == (
        '.encoding = "UTF-8"\nmemsize = "64"\ndisplayName = "a |22quoted|22 name|0A"\n'
        'guestOS = "dos # no comment"\nempty = ""\nlast = "|7Cx"\n'
    )
    assert dict(Vmx.parse('a = "1"\rb = "2"')) == {"a": "1", "b": "2"}
    with pytest.raises(VmxError, match="line 1"):
        Vmx.parse('a = "1\r2"')


def test_escapes_and_encodings():
    assert Vmx.parse('a = "caf|C3|A9"')["a"] == "café"
    assert Vmx.decode(b'.encoding = "windows-1252"\na = "caf|E9"\nb = "caf\xe9"')["a"] == "café"
    assert Vmx.parse('a = "100|%"')["a"] == "100|%"
    with pytest.raises(VmxError, match=r"line 2: \|E9 is no text in UTF-8"):
        Vmx.parse('\na = "caf|E9"')
    for name, codec in (("windows-932", "cp932"), ("Windows-1251", "cp1251"), ("windows-949", "cp949"), ("GBK", "gbk")):
        data = b'.encoding = "%s"\na = "%s"\n' % (name.encode(), "\u044f".encode(codec))
        assert Vmx.decode(data)["a"] == "\u044f"
    for name in ("windows-037", "windows-1200", "utf-16", "utf-7"):  # what is an end of a line there is none here
        with pytest.raises(VmxError, match="cannot be read here"):
            Vmx.decode(b'.encoding = "' + name.encode() + b'"\n')
    vmx = Vmx.decode(b'.encoding = "windows-1252"\nname = "caf\xe9"\n')
    assert vmx.encode() == '.encoding = "UTF-8"\nname = "café"\n'.encode()
    plain = Vmx.decode(b"\xef\xbb\xbfmemsize = 4\n")
    assert plain.encode() == b'.encoding = "UTF-8"\nmemsize = "4"\n'
    assert plain["MemSize"] == "4"


def test_a_mapping_in_any_case_that_keeps_its_spelling_and_its_order():
    vmx = Vmx({"scsi0:0.fileName": "a.vmdk", "memsize": "4"})
    vmx["SCSI0:0.FILENAME"] = "b.vmdk"
    assert "Scsi0:0.filename" in vmx
    assert list(vmx) == ["scsi0:0.fileName", "memsize"]
    assert vmx["scsi0:0.fileName"] == "b.vmdk"
    del vmx["SCSI0:0.filename"]
    vmx["scsi0:0.fileName"] = "c.vmdk"
    assert list(vmx) == ["memsize", "scsi0:0.fileName"]
    assert len(vmx) == 2
    assert vmx.get("nothing") is None
    with pytest.raises(KeyError):
        vmx["nothing"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("TRUE", True), ("yes", True), ("1", True), ("FALSE", False), ("0", False), ("no", False), ("what", False)],
)
def test_booleans(text, expected):
    assert Vmx({"a": text}).boolean("a") is expected
    assert Vmx().boolean("a", default=True)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        *(("a", "line 1"), ('\na = "open', "line 2"), ('a = "b" c', "line 1"), ("a = b c", "line 1")),
        ('a = b"c', "line 1"),
        ('a = "1"\nA = "2"', "line 2 has 'A', which an earlier line has already"),
        *(('= "1"', "line 1"), ('a = "|00"', "NUL"), ('a\x01b = "1"', "name"), ("\n" * (MOST_LINES + 1), "lines")),
        *(("#" * (LARGEST + 1), "characters"), ("a =" + " " * (LARGEST - 100) + '"', "line 1")),
    ],
)
def test_what_vmware_would_not_read_is_refused(text, why):
    with pytest.raises(VmxError, match=re.escape(why)):
        Vmx.parse(text)


@pytest.mark.parametrize(
    "data",
    [
        *(b'.encoding = "UTF-8"\na = "\xff"', b'.encoding = "zlib"\n', b"#" * (LARGEST + 1)),
        b'.encoding = "unicode_escape"\na = "\\x22\\nb = \\x22"\n',
    ],
)
def test_bytes_that_are_not_what_they_say_are_refused(data):
    with pytest.raises(VmxError):
        Vmx.decode(data)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, "1") for name in ("", "a b", "a=b", "a#b", "a\nb", "a\rb", "a\tb", "a\x85b")),
        *(("a", value) for value in ("a\0b", "\ud800")),
    ],
)
def test_a_name_or_value_that_no_file_can_have_is_refused(name, value):
    vmx = Vmx({"a": "1"})
    with pytest.raises(VmxError):
        vmx[name] = value
    assert dict(vmx) == {"a": "1"}


PHANTOM = {"floppy0.startConnected": "FALSE", "floppy0.clientDevice": "TRUE"}
PHANTOM |= {"floppy0.fileName": "vmware-null-remote-floppy"}
"""What ESXi writes into a VM of which nobody has ever wanted a floppy drive."""

CDROM = {"ide1:0.present": "TRUE", "ide1:0.deviceType": "cdrom-image", "ide1:0.fileName": "install.iso"}


def seen(**more: str) -> list[tuple[str, str, str]]:
    return [(drive.place, drive.kind, drive.no_image) for drive in drives(Vmx(more))]


def test_the_order_is_that_of_the_numbers_and_not_of_the_file() -> None:
    places = ["scsi0:10", "sata0:1", "scsi0:2", "floppy0", "nvme0:0", "scsi1:0", "ide1:0", "scsi0:0", "scsi10:0"]
    vmx = Vmx({f"{place}.present": "TRUE" for place in places})
    assert [drive.place for drive in drives(vmx) if drive.bus == "scsi"] == [
        *("scsi0:0", "scsi0:2", "scsi0:10", "scsi1:0", "scsi10:0")
    ]
    assert {drive.place for drive in drives(vmx)} == set(places)


@pytest.mark.parametrize(
    ("more", "no_image"),
    [
        (PHANTOM, "a drive of the machine with the console"),
        (PHANTOM | {"floppy0.present": "TRUE", "floppy0.fileType": "file"}, "a drive of the machine with the console"),
        ({"floppy0.fileType": "file", "floppy0.fileName": ""}, "a drive without an image"),
        (
            {"floppy0.fileType": "file", "floppy0.fileName": "a.flp", "floppy0.startConnected": "false"},
            "not connected when the VM starts",
        ),
        ({"floppy0.fileType": "device", "floppy0.fileName": "/dev/fd0"}, "a device of the host"),
        ({"floppy0.autodetect": "TRUE"}, "a drive without an image"),
        ({"floppy0.fileType": "file", "floppy0.fileName": "boot.flp"}, ""),
        (CDROM, ""),
        (CDROM | {"ide1:0.startConnected": "FALSE"}, "not connected when the VM starts"),
        (CDROM | {"IDE1:0.CLIENTDEVICE": "TRUE"}, "a drive of the machine with the console"),
        (CDROM | {"ide1:0.fileName": "emptyBackingString"}, "a drive without an image"),
        (CDROM | {"ide1:0.deviceType": "cdrom-raw", "ide1:0.fileName": "auto detect"}, "a drive without an image"),
        (CDROM | {"ide1:0.deviceType": "atapi-cdrom", "ide1:0.fileName": "/dev/cdrom"}, "a device of the host"),
        ({"scsi0:1.present": "TRUE", "scsi0:1.deviceType": "scsi-passthru"}, "a device of the host"),
        ({"scsi0:1.present": "TRUE", "scsi0:1.deviceType": "rawDisk", "scsi0:1.fileName": "a"}, "a device of the host"),
        ({"scsi0:1.present": "TRUE", "scsi0:1.fileName": "a.vmdk", "scsi0:1.startConnected": "FALSE"}, ""),
    ],
)
def test_what_has_no_image(more: dict[str, str], no_image: str) -> None:
    ((_, _, found),) = seen(**more)
    assert found == no_image


def test_a_floppy_drive_is_there_unless_denied_and_an_iso_is_a_cd() -> None:
    assert seen(**PHANTOM | {"floppy0.present": "FALSE"}) == []
    assert seen(**{"floppy0.fileType": "file", "floppy0.fileName": "boot.flp"}) == [("floppy0", "floppy", "")]
    assert seen(**{"ide0:0.fileName": "a.vmdk"}) == []
    assert seen(**{"sata0:1.present": "TRUE", "sata0:1.fileName": "Install.ISO"}) == [("sata0:1", "cdrom", "")]


@pytest.mark.parametrize(
    "name",
    ["scsi00:0", "scsi0:00", "scsi0:0:0", "scsi:0", "sc\u0661i0:0", "scsi\u0661:0", "\u017fcsi0:0", "\u0131de0:0"],
)
def test_what_is_no_name_of_a_drive(name: str) -> None:
    assert seen(**{f"{name}.present": "TRUE"}) == []
