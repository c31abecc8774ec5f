"""The job's libvirt XML: opened as the job's user and rebuilt from what is allowed.

What comes out is made anew, element by element, out of names and values that the list of `allowed` has. Nothing
of the file itself is handed on: no entity, no namespace, no comment.
"""

import os
import re
from xml.etree import ElementTree as etree

from vmgahp import errors
from vmgahp.domain.job_xml import ATTRIBUTE
from vmgahp.domain.job_xml.allow_list import DOMAIN, NEVER, Allowed
from vmgahp.errors import JobFault
from vmgahp.host.job_user import Identity
from vmgahp.text import shown

LARGEST = 256 << 10
"""Bytes of a file; what virsh dumpxml shows of a large VM has twenty thousand."""

_DECLARATION = re.compile(r"""\s*<\?xml\s+version\s*=\s*["']1\.[01]["'][^?<>]*\?>""")


def refused(name: str, problem: str, hint: str = "") -> JobFault:
    """The fault for a file `name`; `problem` is a sentence without its end that begins with the place in it."""
    return JobFault(
        errors.MISMATCHED,
        f"{ATTRIBUTE} = {shown(name)}: {problem}.",
        hint or "take it out of the file; docs/reference/job-xml.md has the list of what a job's XML may say.",
    )


def read(name: str, directory: str, identity: Identity) -> str:
    """The text of the file in the scratch directory.

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


def sanitized(text: str, name: str) -> etree.Element:
    """The domain that the text describes, with nothing in it but what is allowed. Raises `JobFault`."""
    declaration = _DECLARATION.match(text)
    if declaration:  # what it says of the encoding is no longer true
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
    return _take(root, DOMAIN, "/domain", name)


def _take(element: etree.Element, allowed: Allowed, path: str, name: str) -> etree.Element:
    """A new element with what `element` has, all of it allowed. Raises `JobFault`."""
    made = etree.Element(element.tag)
    for attribute, value in element.items():
        form = allowed.attributes.get(attribute)
        at = f"{path}/@{_shown(attribute)} = {shown(value)}"
        if form is None:
            raise refused(name, f"{at} is not for jobs to say{_why(attribute)}")
        if not re.fullmatch(form, value, re.ASCII):
            raise refused(name, f"{at} is not among the values that a job may give")
        made.set(attribute, value)
    texts = [element.text, *(child.tail for child in element)]
    text = "".join(filter(None, texts)).strip()
    if allowed.text is None and text:
        raise refused(name, f"{path} has the text {shown(text)}, and it has none in libvirt's format")
    if allowed.text is not None:
        if not re.fullmatch(allowed.text, text, re.ASCII):
            raise refused(name, f"{path} = {shown(text)} is not among the values that a job may give")
        made.text = text
    counts: dict[str, int] = {}
    for child in element:
        tag = str(child.tag)
        below = allowed.children.get(tag)
        counts[tag] = counts.get(tag, 0) + 1
        if below is None:
            raise refused(name, f"{path}/{_shown(tag)} is not for jobs to say{_why(tag)}")
        if counts[tag] > below.most:
            raise refused(name, f"{path}/{tag} comes more than {below.most} times")
        number = f"[{counts[tag]}]" if below.most > 1 else ""
        made.append(_take(child, below, f"{path}/{tag}{number}", name))
    return made


def _why(tag: str) -> str:
    reason = NEVER.get(tag.rpartition("}")[2])
    return f": {reason}" if reason else ""


def _shown(tag: str) -> str:
    """A name as it is shown to people: not too long, without control characters."""
    return ascii(tag)[1:-1][:120]
