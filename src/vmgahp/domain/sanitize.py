"""The job's libvirt XML: opened as the job's user and rebuilt from the allowed parts.

The result is made anew, element by element, from the names and the forms for jobs of `vmgahp.domain.model`; anything
else is refused. Names of host resources have no such form: no path but those that `vmgahp.domain.job_xml` checks
(disks, a kernel and its initrd), no device, no program, no network but those that this machine offers to every job. The
whole list is in ``tests/domain/golden/allowed.txt``. Nothing of the file itself is passed on: no entity, no namespace,
no comment; and no part of `ROWS`.

``virsh dumpxml`` and virt-manager write more about a VM than its author requested. A row states the form of such a
part, and why it is not a request to this machine. It is dropped whatever its value: none of it is interpreted or passed
on. A part that differs from its row is refused, like everything else that is in no list.
"""

import os
import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple
from xml.etree import ElementTree as etree

from vmgahp import errors
from vmgahp.domain.model import DEVICES, DOMAIN, NUMBER, WORD, Element, row
from vmgahp.errors import JobFault
from vmgahp.host.job_user import Identity
from vmgahp.job.attributes import LIBVIRT_XML as ATTRIBUTE
from vmgahp.text import shown

_ANY = r"(?s).*"
_LOOPBACK = r"127\.0\.0\.1|::1|localhost"
_PTY = r"/dev/pts/[0-9]+|/dev/ptmx"
_LIBVIRTS = r"(?:/run|/var/lib|/run/user/[0-9]+|/(?:home/)?[^/]+/\.(?:config|cache))/libvirt/qemu(?:/run)?"
"""The directories in which libvirt keeps the sockets of its VMs, the system's and a user's."""

_DISK = DEVICES["disk"]

_TEXT = row(text=_ANY)
_ALIAS = row({"name": _ANY})
_PLACE = {"address": _DISK.children["address"], "boot": _DISK.children["boot"], "alias": _ALIAS}


def _chain() -> Element:
    """Make the shape of a backing store with 16 below it, as many as a chain may have; the last one is empty."""
    file, store = row({"file": _ANY, "index": NUMBER}), row()
    for _ in range(16):
        parts = {"format": row({"type": WORD}), "source": file, "backingStore": store}
        store = row({"type": r"file", "index": NUMBER}, parts)
    return store


_DRIVE = row(
    {"type": r"file|block", "device": r"cdrom|floppy"},
    _PLACE
    | {name: _DISK.children[name] for name in ("driver", "readonly")}
    # With libvirt 12 it has a source that has only a number.
    | {
        "source": row({"index": NUMBER}),
        "target": row({**_DISK.children["target"].attributes, "tray": r"open|closed"}),
        "backingStore": row(),
    },
)

_SPICE = row(
    {"type": r"spice", "port": r"-1|[0-9]{1,5}", "tlsPort": r"-1|[0-9]{1,5}", "autoport": r"yes", "listen": _LOOPBACK}
    | {"keymap": WORD, "defaultMode": r"any|secure|insecure"},
    {"listen": row({"type": r"address|none", "address": _LOOPBACK}), "gl": row({"enable": r"no"})}
    | {name: row({"compression": WORD}) for name in ("image", "jpeg", "zlib", "playback")}
    | {"streaming": row({"mode": WORD}), "mouse": row({"mode": WORD})}
    | {"clipboard": row({"copypaste": r"yes|no"}), "filetransfer": row({"enable": r"yes|no"})},
)

_SOUND = _PLACE | {"codec": row({"type": WORD}), "audio": row({"id": NUMBER})}


class HostMade(NamedTuple):
    """The form of a part that is dropped, and the reason why it is not a request."""

    looks: Element | str | None
    """The form: of an element its permitted content, of an attribute its pattern; None for an element with any
    content."""
    why: str
    given: Callable[[etree.Element, etree.Element], bool] = lambda element, parent: True
    """A condition on the element, or on the one with the attribute, and its parent."""


def _says(*names: str) -> Callable[[etree.Element, etree.Element], bool]:
    return lambda element, parent: all(name in element.attrib for name in names)


def _below(name: str, value: str) -> Callable[[etree.Element, etree.Element], bool]:
    return lambda element, parent: parent.get(name) == value


def _has_formats(store: etree.Element, disk: etree.Element) -> bool:
    """Check that each backing file has a format: libvirt writes both, as found in an image or requested."""
    files = [each for each in store.iter("backingStore") if each.find("source") is not None]
    return all(each.find("format") is not None for each in files)


def _of_any_port(graphics: etree.Element, devices: etree.Element) -> bool:
    ports = {graphics.get("port", "-1"), graphics.get("tlsPort", "-1")}
    return "type" in graphics.attrib and (graphics.get("autoport") == "yes" or ports == {"-1"})


def _secure(loader: etree.Element, system: etree.Element) -> bool:
    """Return True if a firmware that starts only signed systems is requested explicitly, too."""
    feature = "firmware/feature[@name='secure-boot'][@enabled='yes']"
    return loader.get("secure") != "yes" or system.find(feature) is not None


_TERMINAL = "`/dev/pts/0` and the like, a generated pseudo terminal"
_SCREEN = "SPICE or sound for an interactive user; jobs have VNC and no sound"

ROWS: Mapping[str, HostMade] = {
    "/domain/@id": HostMade(NUMBER, "the ID of a running VM"),
    "/domain/metadata": HostMade(None, "data of management programs, which libvirt does not read"),
    "/domain/genid": HostMade(_TEXT, "each start of a job gets a new generation ID"),
    "/domain/resource": HostMade(
        row({}, {"partition": row(text=r"/machine")}), "`/machine`, libvirt's default partition"
    ),
    "/domain/vcpus": HostMade(
        row({}, {"vcpu": row({"id": NUMBER, "enabled": r"yes", "hotpluggable": r"yes|no", "order": NUMBER})}),
        "a list of all CPUs, all enabled",
    ),
    "/domain/seclabel": HostMade(
        row({"type": r"dynamic", "model": WORD, "relabel": r"yes"}, {"label": _TEXT, "imagelabel": _TEXT}),
        "a dynamic label, generated by libvirt",
        _says("type"),
    ),
    "/domain/os/type/@arch": HostMade(
        r"i686", "i686, which x86_64 machines run too", lambda element, parent: os.uname().machine == "x86_64"
    ),
    "/domain/os/smbios": HostMade(row({"mode": r"emulate"}), "`emulate`, the default"),
    "/domain/os/loader": HostMade(
        row(
            {"readonly": r"yes|no", "type": r"pflash|rom", "secure": r"yes|no", "stateless": r"no", "format": WORD},
            text=_ANY,
        ),
        "the firmware file that libvirt chose for `<os firmware='efi'>`; the machine chooses its own",
        lambda loader, system: "firmware" in system.attrib and _secure(loader, system),
    ),
    "/domain/os/nvram": HostMade(
        row(
            {"template": _ANY, "templateFormat": WORD, "format": WORD, "type": r"file"},
            {"source": row({"file": _ANY, "index": NUMBER})},
            text=_ANY,
        ),
        "the firmware's variables, created with the VM for `<os firmware='efi'>`",
        _below("firmware", "efi"),
    ),
    "/domain/os/varstore": HostMade(
        row({"template": _ANY, "path": _ANY}),
        "the firmware's variables, created with the VM for `<os firmware='efi'>`",
        _below("firmware", "efi"),
    ),
    "/domain/devices/emulator": HostMade(_TEXT, "the hypervisor program, which the machine chooses"),
    "/domain/devices/*/alias": HostMade(_ALIAS, "a device name for the hypervisor's monitor"),
    "/domain/devices/disk": HostMade(_DRIVE, "an empty drive", _says("device")),
    "/domain/devices/disk/backingStore": HostMade(
        _chain(), "backing files, which are read from the image", _has_formats
    ),
    "/domain/devices/disk/source/@index": HostMade(NUMBER, "an index for the hypervisor's monitor"),
    "/domain/devices/disk/target/@tray": HostMade(r"open|closed", "the state of the drive's tray"),
    "/domain/devices/interface/target": HostMade(
        row({"dev": r"vnet[0-9]+"}), "`vnet0` and the like, a generated tap device"
    ),
    "/domain/devices/interface/source/@portid": HostMade(r"[0-9a-fA-F-]{32,36}", "a generated port"),
    "/domain/devices/interface/source/@bridge": HostMade(
        WORD, "the bridge of the network that is named too", lambda source, parent: "network" in source.attrib
    ),
    "/domain/devices/interface/backend": HostMade(
        row({"type": r"passt"}), "passt, the default for user networking", _below("type", "user")
    ),
    "/domain/devices/serial/source": HostMade(row({"path": _PTY}), _TERMINAL, _below("type", "pty")),
    "/domain/devices/console/source": HostMade(row({"path": _PTY}), _TERMINAL, _below("type", "pty")),
    "/domain/devices/console/@tty": HostMade(_PTY, _TERMINAL),
    "/domain/devices/channel/source": HostMade(
        row({"mode": r"bind", "path": _LIBVIRTS + r"/channel(?:/target)?(?:/(?!\.\.?/)[^/]+){1,2}"}),
        "a socket generated by libvirt",
        _below("type", "unix"),
    ),
    "/domain/devices/channel/target/@state": HostMade(r"connected|disconnected", "the state at that time"),
    "/domain/devices/channel": HostMade(
        row(
            {"type": r"spicevmc|spiceport|qemu-vdagent"},
            _PLACE
            | {
                "target": row({"type": r"virtio", "name": WORD, "state": WORD}),
                "source": row({"channel": WORD}, {name: _SPICE.children[name] for name in ("clipboard", "mouse")}),
            },
        ),
        _SCREEN,
        _says("type"),
    ),
    "/domain/devices/graphics": HostMade(_SPICE, _SCREEN, _of_any_port),
    "/domain/devices/graphics/@port": HostMade(
        r"[0-9]{1,5}", "a generated port", lambda graphics, parent: graphics.get("autoport") == "yes"
    ),
    "/domain/devices/graphics/@keymap": HostMade(WORD, "the keyboard layout of an interactive user"),
    "/domain/devices/graphics/audio": HostMade(row({"id": NUMBER}), _SCREEN),
    "/domain/devices/redirdev": HostMade(row({"bus": r"usb", "type": r"spicevmc"}, _PLACE), _SCREEN, _says("type")),
    "/domain/redirfilter": HostMade(None, _SCREEN),
    "/domain/devices/redirfilter": HostMade(None, _SCREEN),
    "/domain/devices/smartcard": HostMade(
        row({"mode": r"passthrough", "type": r"spicevmc"}, _PLACE), _SCREEN, _says("mode", "type")
    ),
    "/domain/devices/sound": HostMade(
        row({"model": WORD, "multichannel": r"yes|no", "streams": NUMBER}, _SOUND), _SCREEN
    ),
    "/domain/devices/audio": HostMade(row({"id": NUMBER, "type": r"spice"}), _SCREEN, _says("type")),
    "/domain/devices/video/model/@device": HostMade(WORD, "QEMU's name for the model (libvirt 12)"),
    "/domain/devices/video/model/acceleration": HostMade(row({"accel2d": r"no", "accel3d": r"no"}), "none"),
    "/domain/devices/tpm/backend/profile": HostMade(row({"name": WORD}), "the profile of the emulated TPM"),
}
"""The rows by path in the domain; a star stands for any device."""


def name_firmware(domain: etree.Element) -> None:
    """Request UEFI explicitly for a VM whose firmware libvirt prints, while it runs, only as the paths of two files."""
    system = domain.find("os")
    if system is None or "firmware" in system.attrib or system.find("nvram") is None:
        return
    if system.find("loader[@type='pflash'][@readonly='yes']") is not None:
        system.set("firmware", "efi")


_NUMBER = re.compile(r"\[[0-9]+\]")
_DEVICE = re.compile(r"^/domain/devices/[^/]+/")


def _is_dropped(place: str, element: etree.Element, parent: etree.Element) -> bool:
    """Return True if the element, or the attribute that ends its place, may be dropped."""
    made = ROWS.get(place) or ROWS.get(_DEVICE.sub("/domain/devices/*/", place))
    if made is None or not made.given(element, parent):
        return False
    if isinstance(made.looks, str):
        return re.fullmatch(made.looks, element.get(place.rpartition("@")[2], ""), re.ASCII) is not None
    return made.looks is None or _fits(element, made.looks)


def _fits(element: etree.Element, shape: Element) -> bool:
    texts = [element.text, *(child.tail for child in element)]
    text = "".join(filter(None, texts)).strip()
    return (
        all(shape.form(name) and re.fullmatch(shape.form(name), value, re.ASCII) for name, value in element.items())
        and re.fullmatch(shape.text or "", text, re.ASCII) is not None
        and all(child.tag in shape.children and _fits(child, shape.children[child.tag]) for child in element)
    )


LARGEST = 256 << 10
"""The maximum number of bytes of a file; virsh dumpxml writes twenty thousand for a large VM."""

_MOST_OF_DEVICES, _MOST = 1024, 8
"""The maximum number of times that one kind of part is dropped: libvirt never writes more, and checking takes time."""

_FIRMWARE = "firmware is chosen by <os firmware='efi'>, without a path"
_DECLARATION = re.compile(r"""\s*<\?xml\s+version\s*=\s*["']1\.[01]["'][^?<>]*\?>""")


class Sanitized(NamedTuple):
    """The result of sanitizing a file."""

    domain: etree.Element
    dropped: tuple[str, ...]
    """The dropped parts of the file in words, each kind once."""


def refused(name: str, problem: str, hint: str = "") -> JobFault:
    """Make the fault for a file `name`; `problem` is a sentence without its end that begins with the place in it."""
    hint = hint or "take it out of the file; docs/reference/job-xml.md has the list of what a job's XML may say."
    return JobFault(errors.MISMATCHED, f"{ATTRIBUTE} = {shown(name)}: {problem}.", hint)


def read(name: str, directory: str, identity: Identity) -> str:
    """Read the text of the file in the scratch directory, UTF-8 of limited size. Raises `JobFault`."""
    base = os.path.basename(name)
    try:
        data = identity.read_scratch(directory, base, LARGEST + 1)
    except OSError as error:
        problem = f"{shown(base)} in the job's scratch directory cannot be opened: {error.strerror}"
        raise refused(name, problem, "add the file to transfer_input_files; it is a regular file, no link.") from error
    if len(data) > LARGEST:
        raise refused(name, f"it has more than {LARGEST >> 10} KiB", "keep to what the VM needs.")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise refused(name, f"it is not UTF-8 ({error.reason})", "save it as UTF-8.") from error


def sanitized(text: str, name: str) -> Sanitized:
    """Make the domain that the text describes. Raises `JobFault`."""
    declaration = _DECLARATION.match(text)
    if declaration:  # its encoding is no longer true
        text = text[declaration.end() :]
    for mark, what in (("<!DOCTYPE", "a document type"), ("<!ENTITY", "an entity"), ("<?", "an instruction")):
        if mark.lower() in text.lower():
            raise refused(name, f"it has {what} ({mark})")
    try:
        root = etree.fromstring(text)
    except (etree.ParseError, ValueError, RecursionError) as error:
        raise refused(name, f"it is not XML: {error}", "see what xmllint or virt-xml-validate say of it.") from error
    if root.tag != "domain":
        raise refused(name, f"it begins with {_shown(root.tag)}, and a VM is a <domain>")
    name_firmware(root)
    reader = _Reader(name)
    domain = reader.take(root, DOMAIN, "/domain")
    dropped = (f"{what} ({number} times)" if number > 1 else what for what, number in reader.dropped.items())
    return Sanitized(domain, tuple(dropped))


class _Reader:
    def __init__(self, name: str) -> None:
        self.name = name
        self.dropped: Counter[str] = Counter()

    def take(self, element: etree.Element, row: Element, path: str) -> etree.Element:
        """Make a new element with the content of `element`, all of it allowed. Raises `JobFault`."""
        made = etree.Element(element.tag)
        for attribute, value in element.items():
            place = f"{path}/@{attribute}"
            if self._drops(place, element, element):
                continue
            form = row.form(attribute)
            at = f"{path}/@{_shown(attribute)} = {shown(value)}"
            if not form:
                raise refused(self.name, f"{at} is not for jobs to say")
            if not re.fullmatch(form, value, re.ASCII):
                raise self._unlisted(at, form)
            made.set(attribute, value)
        made.text = self._text(element, row, path)
        counts: Counter[str] = Counter()
        taken: Counter[str] = Counter()
        for child in element:
            tag = str(child.tag)
            below = row.child(tag)
            counts[tag] += 1
            at = f"{path}/{_shown(tag)}"
            if self._drops(at, child, element):
                continue
            taken[tag] += 1
            if below is None:
                why = f": {_FIRMWARE}" if tag in ("loader", "nvram") else ""
                raise refused(self.name, f"{at} is not for jobs to say{why}")
            if taken[tag] > below.most:
                raise refused(self.name, f"{at} comes more than {below.most} times")
            number = f"[{counts[tag]}]" if below.most > 1 else ""
            made.append(self.take(child, below, at + number))
        return made

    def _text(self, element: etree.Element, row: Element, path: str) -> str | None:
        texts = [element.text, *(child.tail for child in element)]
        text = "".join(filter(None, texts)).strip()
        if row.text is None:
            if text:
                raise refused(self.name, f"{path} has the text {shown(text)}, and it has none in libvirt's format")
            return None
        if not re.fullmatch(row.text, text, re.ASCII):
            raise self._unlisted(f"{path} = {shown(text)}", row.text)
        return text

    def _unlisted(self, at: str, form: str) -> JobFault:
        values = f" ({form.replace('|', ', ')})" if re.fullmatch(r"[A-Za-z0-9_|-]+", form) else ""
        return refused(self.name, f"{at} is not among the values that a job may give{values}")

    def _drops(self, path: str, element: etree.Element, parent: etree.Element) -> bool:
        """Return True if the part is dropped because it only describes the former machine, and count it."""
        place = _NUMBER.sub("", path)
        what = place.removeprefix("/domain/")
        most = _MOST_OF_DEVICES if what.startswith("devices/") else _MOST
        if self.dropped[what] >= most or not _is_dropped(place, element, parent):
            return False
        self.dropped[what] += 1
        return True


def _shown(tag: str) -> str:
    """Format a name for people: not too long, without control characters."""
    return ascii(tag)[1:-1][:120]
