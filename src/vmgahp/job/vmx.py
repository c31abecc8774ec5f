"""VMware's ``.vmx`` files: lines of ``name = "value"``, read and written as VMware does.

The syntax is that of VMware's own dictionary library, which is published (``lib/dict/dictll.c`` of
open-vm-tools): a name has no blank, ``=`` or ``#``; a value stands in quotes or is one word; a comment goes
from ``#`` to the end of the line; ``|xx`` stands for the byte with that hexadecimal number. A line ends
with ``\n``, ``\r\n`` or a lone ``\r``, so all three have to be kept out of a value.

Pure: text in, text out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, MutableMapping
from typing import NamedTuple

LARGEST = 1 << 20
"""The most bytes of a ``.vmx``; one of VMware's has some thousands."""

MOST_LINES = 15_000
"""The most lines of a file that is read."""
_MOST_WRITTEN = 20_000
"""The most lines of a file that is written, with room for the additions to a working copy."""

ENCODING = ".encoding"
"""The name whose value is the encoding of a ``.vmx``; usually its first line."""

_LINE_END = re.compile("\r\n|\r|\n")
# Possessive, since a word may be empty: a line of a megabyte of blanks would take hours, and the whole server with it.
_LINE = re.compile(r'[ \t]*+([^ \t=#]+)[ \t]*+=[ \t]*+(?:"([^"]*)"|([^ \t#"]*+))[ \t]*+(?:#.*)?', re.DOTALL)
_COMMENT = re.compile(r"[ \t]*(?:#.*)?", re.DOTALL)
_NAME = re.compile(r"[^ \t=#]+")
_ENCODING_LINE = re.compile(rb'(?:^|[\r\n])[ \t]*\.encoding[ \t]*=[ \t]*"?([A-Za-z0-9_.:-]{1,40})', re.IGNORECASE)
_ENCODINGS = re.compile(
    r"utf-?8|us-ascii|windows-(?:125[0-8]|874|932|936|949|950)|iso-8859-[0-9]{1,2}|gbk|gb2312|gb18030|big5|shift_jis|euc-(?:jp|kr)",
    re.IGNORECASE,
)
"""The encodings that VMware writes. Some other ones of Python decode plain bytes as line ends."""
_ESCAPED = re.compile("(?:[|][0-9A-Fa-f]{2})+")
_TO_ESCAPE = re.compile('["|\x01-\x08\x0a-\x1f\x7f\x85\u2028\u2029]')


class VmxError(ValueError):
    """An error in a ``.vmx``, or a value that cannot be in one; the text is the reason, without a full stop."""


class Vmx(MutableMapping[str, str]):
    """A ``.vmx`` in memory: a mapping of names to values.

    Names are case-insensitive and keep their spelling and their order; new ones come last. Comments are dropped.
    Values are plain text: escapes exist in the file only.
    """

    def __init__(self, pairs: dict[str, str] | None = None) -> None:
        self._entries: dict[str, tuple[str, str]] = {}
        """The name as it is written, and the value, by the name in lower case."""
        self.update(pairs or {})

    @classmethod
    def decode(cls, data: bytes) -> Vmx:
        """Read a file in the encoding that it names, or UTF-8, which `encode` writes. Raises `VmxError`."""
        if len(data) > LARGEST:
            raise VmxError(f"it has more than {LARGEST} bytes")
        data = data.removeprefix(b"\xef\xbb\xbf")
        named = _ENCODING_LINE.search(data)
        encoding = named[1].decode() if named else "UTF-8"
        if not _ENCODINGS.fullmatch(encoding):
            raise VmxError(f"it is written in {encoding}, which cannot be read here")
        encoding = encoding.lower().replace("windows-", "cp")
        try:
            text = data.decode(encoding)
        except (LookupError, UnicodeError) as error:
            raise VmxError(f"its bytes are not {encoding}: {error}") from error
        vmx = cls.parse(text, encoding)
        if ENCODING in vmx:
            vmx[ENCODING] = "UTF-8"
        return vmx

    @classmethod
    def parse(cls, text: str, encoding: str = "UTF-8") -> Vmx:
        """Read the text of a ``.vmx``; `encoding` is that of escaped bytes beyond ASCII.

        Raises `VmxError` for errors that VMware refuses, too: a line without ``=``, an open quote, a duplicate name;
        and for a NUL, at which VMware would cut a value off.
        """
        if len(text) > LARGEST:
            raise VmxError(f"it has more than {LARGEST} characters")
        vmx = cls()
        lines = _LINE_END.split(text)
        if len(lines) > MOST_LINES:
            raise VmxError(f"it has more than {MOST_LINES} lines")
        if not lines[-1]:
            del lines[-1]
        for number, line in enumerate(lines, 1):
            if _COMMENT.fullmatch(line):
                continue
            found = _LINE.fullmatch(line)
            if found is None:
                raise VmxError(f'line {number} is not of the form name = "value": {line[:80]!a}')
            name, quoted, word = found.groups()
            if name in vmx:
                raise VmxError(f"line {number} has {name[:80]!a}, which an earlier line has already")
            try:
                vmx[name] = _unescape(quoted if quoted is not None else word, encoding)
            except VmxError as error:
                raise VmxError(f"line {number}: {error}") from error
        return vmx

    def render(self) -> str:
        """Return the text of the file. Values are escaped, so that none can add a line."""

        def escape(found: re.Match[str]) -> str:
            return "".join(f"|{byte:02X}" for byte in found[0].encode())

        return "".join(f'{name} = "{_TO_ESCAPE.sub(escape, value)}"\n' for name, value in self._entries.values())

    def encode(self) -> bytes:
        """Return the content of the file in UTF-8, with a line that names this encoding."""
        if ENCODING not in self:
            self._entries = {ENCODING: (ENCODING, "")} | self._entries
        self[ENCODING] = "UTF-8"
        return self.render().encode()

    def boolean(self, name: str, default: bool = False) -> bool:
        """Return a boolean: ``TRUE``, ``yes``, ``on`` and numbers other than 0 are true, in any case."""
        value = self.get(name)
        if value is None or not value.strip():
            return default
        word = value.strip().lower()
        return word in ("true", "yes", "on", "t", "y") or (word.isdecimal() and int(word[:20]) != 0)

    def cores_per_socket(self, vcpus: int) -> int:
        """Return the cores per socket; 0 if unset, or if `vcpus` is not a multiple of them."""
        text = self.get("cpuid.coresPerSocket", "").strip()
        cores = int(text) if text.isascii() and text.isdigit() and len(text) < 5 else 0
        return cores if cores and vcpus % cores == 0 else 0

    @property
    def is_encrypted(self) -> bool:
        """Return True if the ``.vmx`` or the whole VM is encrypted: the plain rest is not reliable."""
        return "encryption.keySafe" in self or "encryption.data" in self

    # The mapping

    def __getitem__(self, name: str) -> str:
        return self._entries[name.lower()][1]

    def __setitem__(self, name: str, value: str) -> None:
        key = name.lower()
        if key not in self._entries:
            if not _NAME.fullmatch(name) or not name.isprintable():
                raise VmxError(f"{name[:80]!a} cannot be a name")
            if len(self._entries) >= _MOST_WRITTEN:
                raise VmxError(f"it has more than {_MOST_WRITTEN} lines")
        if "\0" in value:
            raise VmxError(f"the value of {name[:80]!a} has a NUL")
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise VmxError(f"the value of {name[:80]!a} is not text: {error}") from error
        self._entries[key] = self._entries.get(key, (name, ""))[0], value

    def __delitem__(self, name: str) -> None:
        del self._entries[name.lower()]

    def __iter__(self) -> Iterator[str]:
        return iter([name for name, _ in self._entries.values()])

    def __len__(self) -> int:
        return len(self._entries)


def _unescape(text: str, encoding: str) -> str:
    def undo(found: re.Match[str]) -> str:
        data = bytes.fromhex(found[0].replace("|", ""))
        try:
            return data.decode(encoding)
        except (LookupError, UnicodeError) as error:
            raise VmxError(f"{found[0][:30]} is no text in {encoding}") from error

    return _ESCAPED.sub(undo, text) if "|" in text else text


# The drives
#
# All readers of a ``.vmx`` get its drives here. ESXi adds a floppy drive of the console's machine to every VM
# ("vmware-null-remote-floppy"), and Workstation a CD-ROM drive of the host: these have no image, and neither has a
# drive that is not connected when the VM starts. Pure.


DISK, CDROM, FLOPPY, OTHER = "disk", "cdrom", "floppy", "other"

DRIVE_NAME = re.compile(
    r"(?:(scsi|sata|nvme|ide)(0|[1-9][0-9]?):|(floppy))(0|[1-9][0-9]{0,2})", re.IGNORECASE | re.ASCII
)
"""The name of a drive; the part after its dot is a property of it."""

_DISKS = ("", "disk", "plaindisk", "nvme", *(f"{kind}-harddisk" for kind in ("scsi", "ata", "ide", "sata", "nvme")))
_HOST_CDROMS = ("cdrom-raw", "atapi-cdrom", "scsi-cdrom")
_NO_FILE = ("", "auto detect", "emptybackingstring", "vmware-null-remote-floppy")


class Drive(NamedTuple):
    """A drive that is present."""

    kind: str
    """The kind: `DISK`, `CDROM`, `FLOPPY`, or `OTHER` for anything else, such as a disk of the host."""
    bus: str
    controller: int
    unit: int
    file: str
    no_image: str = ""
    """The reason why there is no usable image, in words; empty if `file` is one."""
    of_host: bool = False
    """True if it is a device of the host, by its name there, that is connected when the VM starts."""

    @property
    def place(self) -> str:
        """Return its name in VMware, such as ``scsi0:0`` or ``floppy0``."""
        return f"floppy{self.unit}" if self.bus == FLOPPY else f"{self.bus}{self.controller}:{self.unit}"


def drives(vmx: Vmx) -> list[Drive]:
    """Return the drives that are present, sorted by kind of controller, then by the numbers of controller and unit."""
    found = {}
    for name in vmx:
        match = DRIVE_NAME.fullmatch(name.partition(".")[0])
        # A floppy drive is present by default.
        if match and vmx.boolean(f"{match[0]}.present", default=bool(match[3])):
            drive = _drive(vmx, match)
            found[drive.place] = drive
    return sorted(found.values(), key=lambda drive: (drive.bus, drive.controller, drive.unit))


def _drive(vmx: Vmx, match: re.Match[str]) -> Drive:
    name = match[0]
    file = vmx.get(f"{name}.fileName", "").strip()
    bus, controller, unit = (match[1] or match[3]).lower(), int(match[2] or 0), int(match[4])
    word = vmx.get(f"{name}.{'fileType' if bus == FLOPPY else 'deviceType'}", "").strip().lower()
    if bus == FLOPPY:
        kind, of_host = FLOPPY, word != "file"
    elif word == "cdrom-image" or (not word and file.lower().endswith(".iso")):
        kind, of_host = CDROM, False
    elif word in _HOST_CDROMS:
        kind, of_host = CDROM, True
    else:
        kind, of_host = (DISK, False) if word in _DISKS else (OTHER, True)
    no_image = ""
    if kind in (CDROM, FLOPPY):
        if vmx.boolean(f"{name}.clientDevice"):
            no_image = "a drive of the machine with the console"
        elif file.lower() in _NO_FILE or vmx.boolean(f"{name}.autodetect"):
            no_image = "a drive without an image"
        elif not vmx.boolean(f"{name}.startConnected", default=True):
            no_image = "not connected when the VM starts"
    connected = of_host and not no_image
    return Drive(kind, bus, controller, unit, file, no_image or ("a device of the host" if of_host else ""), connected)
