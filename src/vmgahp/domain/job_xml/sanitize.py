"""The job's libvirt XML: opened as the job's user and rebuilt from the allowed parts.

The result is made anew, element by element, from names and values in `allow_list`. Nothing of the file itself is passed
on: no entity, no namespace, no comment; and no part that is `host_made`.
"""

import os
import re
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple
from xml.etree import ElementTree as etree

from vmgahp import errors
from vmgahp.domain.job_xml import ATTRIBUTE, host_made
from vmgahp.domain.job_xml.allow_list import DOMAIN, NEVER, VALUES, Allowed
from vmgahp.errors import JobFault
from vmgahp.host.job_user import Identity
from vmgahp.text import shown

LARGEST = 256 << 10
"""The maximum number of bytes of a file; virsh dumpxml writes twenty thousand for a large VM."""

_MOST_OF_DEVICES, _MOST = 1024, 8
"""The maximum number of times that one kind of part is dropped: libvirt never writes more, and checking takes time."""

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

    def take(self, element: etree.Element, allowed: Allowed, path: str) -> etree.Element:
        """Make a new element with the content of `element`, all of it allowed. Raises `JobFault`."""
        made = etree.Element(element.tag)
        for attribute, value in element.items():
            place = f"{path}/@{attribute}"
            if self._drops(place, element, None):
                continue
            form = allowed.attributes.get(attribute)
            at = f"{path}/@{_shown(attribute)} = {shown(value)}"
            if form is None:
                raise refused(self.name, f"{at} is not for jobs to say{_why(NEVER, attribute)}")
            if not re.fullmatch(form, value, re.ASCII):
                reason = _why(VALUES, _NUMBER.sub("", place))
                raise refused(self.name, f"{at} is not among the values that a job may give{reason}")
            made.set(attribute, value)
        made.text = self._text(element, allowed, path)
        counts: Counter[str] = Counter()
        taken: Counter[str] = Counter()
        for child in element:
            tag = str(child.tag)
            below = allowed.children.get(tag)
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

    def _text(self, element: etree.Element, allowed: Allowed, path: str) -> str | None:
        texts = [element.text, *(child.tail for child in element)]
        text = "".join(filter(None, texts)).strip()
        if allowed.text is None:
            if text:
                raise refused(self.name, f"{path} has the text {shown(text)}, and it has none in libvirt's format")
            return None
        if not re.fullmatch(allowed.text, text, re.ASCII):
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
