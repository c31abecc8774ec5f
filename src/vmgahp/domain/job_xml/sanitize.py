"""The job's libvirt XML: opened as the job's user and rebuilt from the allowed parts.

The result is made anew, element by element, from the names and the forms for jobs of `vmgahp.domain.model`; anything
else is refused. Names of host resources have no such form: no path but those that `vmgahp.domain.job_xml` checks
(disks, a kernel and its initrd), no device, no program, no network but those that this machine offers to every job. The
whole list is in ``tests/domain/golden/allowed.txt``. Nothing of the file itself is passed on: no entity, no namespace,
no comment; and no part that is `host_made`.
"""

import os
import re
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple
from xml.etree import ElementTree as etree

from vmgahp import errors
from vmgahp.domain.job_xml import ATTRIBUTE, host_made
from vmgahp.domain.model import DOMAIN, Element
from vmgahp.errors import JobFault
from vmgahp.host.job_user import Identity
from vmgahp.text import shown

LARGEST = 256 << 10
"""The maximum number of bytes of a file; virsh dumpxml writes twenty thousand for a large VM."""

_MOST_OF_DEVICES, _MOST = 1024, 8
"""The maximum number of times that one kind of part is dropped: libvirt never writes more, and checking takes time."""

_REASONS = {
    "devices of the host belong to no job": ("hostdev",),
    "devices of the host or of its users belong to no job": ("redirdev", "smartcard"),
    "directories of the host belong to no job": ("filesystem",),
    "memory of the host belongs to no job": ("shmem",),
    "which program runs the VM is the machine's to say": ("emulator",),
    "options of the hypervisor's own command line are not for jobs": ("commandline", "override"),
    "the machine decides as which user the VM runs": ("seclabel",),
    "firmware is chosen by <os firmware='efi'>, without a path": ("loader", "nvram"),
    "the backing file of an image is found in the image": ("backingStore",),
    "secrets of this machine's libvirt are not for jobs": ("encryption", "auth"),
    "the machine's networks are the administrator's": ("filterref", "virtualport"),
    "scripts run on the host": ("script",),
    "the machine's CPUs are the administrator's": ("cpuset", "cputune"),
    "let it be the number of CPUs that the guest begins with": ("current",),
    "a job's memory does not grow; /domain/memory is all of it": ("maxMemory",),
    "the machine's partitions are the administrator's": ("resource",),
    "what a VM may use of the machine is the administrator's to say": ("memtune", "blkiotune", "iotune", "bandwidth"),
    "a job's display has a one-time password": ("passwd",),
    "the machine's memory nodes are the administrator's": ("numatune",),
    "how memory is backed is the administrator's to say": ("memoryBacking",),
}
NEVER = {name: reason for reason, names in _REASONS.items() for name in names}
"""The reasons why some elements and attributes are not allowed; a general reason applies to all others."""

_DEVICES = "/domain/devices"
_PORT = "a job's serial port is a pty, which goes to vm_console.log"
VALUES = {
    "/domain/os/type/@arch": "jobs have x86_64 and aarch64",
    "/domain/os/type/@machine": "jobs have the machines pc, q35 and virt",
    f"{_DEVICES}/disk/@type": "a job's disks are files, which come with it or which its user can open",
    f"{_DEVICES}/disk/@device": "a job's disks are files, none of them a unit of the host's",
    f"{_DEVICES}/interface/@type": "jobs get the machine's networks: network, bridge or user",
    f"{_DEVICES}/graphics/@type": "a job's display is VNC on loopback",
    f"{_DEVICES}/serial/@type": _PORT,
    f"{_DEVICES}/console/@type": _PORT,
    f"{_DEVICES}/channel/@type": "a job's channels are sockets of libvirt's own, to the guest's agent",
    f"{_DEVICES}/tpm/backend/@type": "a job's TPM is emulated; the host's belongs to no job",
    f"{_DEVICES}/input/@type": "a job has no input devices of the host",
}
"""The reasons why some values are refused, by the path of their element or attribute."""

_NUMBER = re.compile(r"\[[0-9]+\]")
_DECLARATION = re.compile(r"""\s*<\?xml\s+version\s*=\s*["']1\.[01]["'][^?<>]*\?>""")


class Sanitized(NamedTuple):
    """The result of sanitizing a file."""

    domain: etree.Element
    """The domain, with only the allowed content."""
    dropped: tuple[str, ...]
    """The dropped parts of the file in words, each kind once."""


def refused(name: str, problem: str, hint: str = "") -> JobFault:
    """Make the fault for a file `name`; `problem` is a sentence without its end that begins with the place in it."""
    return JobFault(
        errors.MISMATCHED,
        f"{ATTRIBUTE} = {shown(name)}: {problem}.",
        hint or "take it out of the file; docs/reference/job-xml.md has the list of what a job's XML may say.",
    )


def read(name: str, directory: str, identity: Identity) -> str:
    """Read the text of the file in the scratch directory.

    Raises `JobFault` for a file that cannot be opened, that is too long, or that is not UTF-8.
    """
    base = os.path.basename(name)
    try:
        data = identity.read_scratch(directory, base, LARGEST + 1)
    except OSError as error:
        raise refused(
            name,
            f"{shown(base)} in the job's scratch directory cannot be opened: {error.strerror}",
            "add the file to transfer_input_files; it is a regular file, no link.",
        ) from error
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
    host_made.name_firmware(root)
    reader = _Reader(name)
    domain = reader.take(root, DOMAIN, "/domain")
    return Sanitized(
        domain, tuple(f"{what} ({number} times)" if number > 1 else what for what, number in reader.dropped.items())
    )


class _Reader:
    """A reader of one file."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.dropped: Counter[str] = Counter()

    def take(self, element: etree.Element, row: Element, path: str) -> etree.Element:
        """Make a new element with the content of `element`, all of it allowed. Raises `JobFault`."""
        made = etree.Element(element.tag)
        for attribute, value in element.items():
            place = f"{path}/@{attribute}"
            if self._drops(place, element, None):
                continue
            form = row.form(attribute)
            at = f"{path}/@{_shown(attribute)} = {shown(value)}"
            if not form:
                raise refused(self.name, f"{at} is not for jobs to say{_why(NEVER, attribute)}")
            if not re.fullmatch(form, value, re.ASCII):
                reason = _why(VALUES, _NUMBER.sub("", place))
                raise refused(self.name, f"{at} is not among the values that a job may give{reason}")
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
                raise refused(self.name, f"{at} is not for jobs to say{_why(NEVER, tag.rpartition('}')[2])}")
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
            raise refused(self.name, f"{path} = {shown(text)} is not among the values that a job may give")
        return text

    def _drops(self, path: str, element: etree.Element, parent: etree.Element | None) -> bool:
        """Return True if the part is dropped because it only describes the former machine, and count it."""
        what = _NUMBER.sub("", path).removeprefix("/domain/")
        if self.dropped[what] >= (_MOST_OF_DEVICES if what.startswith("devices/") else _MOST):
            return False
        if not host_made.why(path, element, parent):
            return False
        self.dropped[what] += 1
        return True


def _why(reasons: Mapping[str, str], of: str) -> str:
    return f": {reasons[of]}" if of in reasons else ""


def _shown(tag: str) -> str:
    """Format a name for people: not too long, without control characters."""
    return ascii(tag)[1:-1][:120]
