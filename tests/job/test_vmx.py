"""VMware's .vmx files: read as VMware reads them, and no value can ever become a line of its own."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vmgahp.job.vmx import LARGEST, MOST_LINES, Vmx, VmxError

NAMES = st.from_regex(r"[A-Za-z][A-Za-z0-9.:_]{0,20}", fullmatch=True)
VALUES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=60)
NASTY = st.lists(
    st.sampled_from(['"', "\n", "\r", "|", "#", "=", " ", "\t", "|22", "|0A", "|", "2", "\x85", "\u2028", "é", "x"])
).map("".join)


def lines_as_vmware_counts_them(text):
    return [line for line in re.split("\r\n|\r|\n", text) if line]


@given(st.dictionaries(NAMES, VALUES | NASTY, max_size=8))
def test_every_value_comes_back_and_none_adds_a_line(pairs):
    vmx = Vmx()
    for name, value in pairs.items():
        vmx[name] = value
    text = vmx.render()
    assert len(lines_as_vmware_counts_them(text)) == len(vmx)
    assert len(text.splitlines()) == len(vmx)
    assert Vmx.parse(text) == vmx
    assert Vmx.decode(vmx.encode()) == vmx


@given(VALUES | NASTY)
def test_a_rewritten_value_changes_its_own_line_only(value):
    vmx = Vmx.parse('# mine\n.encoding = "UTF-8"\na = "1"\nb = "2" # two\n')
    vmx["A"] = value
    first, second, third = vmx.render().split("\n")[:3]
    assert (first, third) == ('.encoding = "UTF-8"', 'b = "2"')
    assert second.startswith('a = "')
    assert vmx["a"] == value


@given(st.binary(max_size=300) | st.text(max_size=300).map(str.encode))
def test_what_is_read_at_all_is_written_so_that_it_reads_the_same(data):
    try:
        vmx = Vmx.decode(data)
    except VmxError:
        return
    assert Vmx.parse(vmx.render()) == vmx


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


def test_escapes_are_bytes_in_the_encoding_of_the_file():
    assert Vmx.parse('a = "caf|C3|A9"')["a"] == "café"
    assert Vmx.decode(b'.encoding = "windows-1252"\na = "caf|E9"\nb = "caf\xe9"')["a"] == "café"
    assert Vmx.parse('a = "100|%"')["a"] == "100|%"
    with pytest.raises(VmxError, match=r"line 2: \|E9 is no text in UTF-8"):
        Vmx.parse('\na = "caf|E9"')


def test_the_encodings_are_those_of_windows_in_other_countries():
    for name, codec in (("windows-932", "cp932"), ("Windows-1251", "cp1251"), ("windows-949", "cp949"), ("GBK", "gbk")):
        assert (
            Vmx.decode(b'.encoding = "' + name.encode() + b'"\na = "' + "\u044f".encode(codec) + b'"\n')["a"]
            == "\u044f"
        )
    for name in ("windows-037", "windows-1200", "utf-16", "utf-7"):  # what is an end of a line there is none here
        with pytest.raises(VmxError, match="cannot be read here"):
            Vmx.decode(b'.encoding = "' + name.encode() + b'"\n')


def test_what_is_written_is_utf_8_and_says_so():
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
    assert list(vmx.under("SCSI0:")) == [("scsi0:0.fileName", "b.vmdk")]
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
        ("a", "line 1"),
        ('\na = "open', "line 2"),
        ('a = "b" c', "line 1"),
        ("a = b c", "line 1"),
        ('a = b"c', "line 1"),
        ('a = "1"\nA = "2"', "line 2 has 'A', which an earlier line has already"),
        ('= "1"', "line 1"),
        ('a = "|00"', "NUL"),
        ('a\x01b = "1"', "name"),
        ("\n" * (MOST_LINES + 1), "lines"),
        ("#" * (LARGEST + 1), "characters"),
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


def test_a_lone_carriage_return_ends_a_line_as_it_does_for_vmware():
    assert dict(Vmx.parse('a = "1"\rb = "2"')) == {"a": "1", "b": "2"}
    with pytest.raises(VmxError, match="line 1"):
        Vmx.parse('a = "1\r2"')
