"""A job's own libvirt XML (``--as-is``): the file without what no job may say.

What may be said is the list by which the execute machine reads the file (`vmgahp.domain.job_xml.allow_list`), and
its reader has the last word here too: nobody waits for a match to hear of a refusal.
"""

import os
import re
from collections.abc import Callable, Collection

from lxml import etree

from vmgahp.commands.submit.machine import Guest
from vmgahp.commands.submit.summary import SubmitError, Summary
from vmgahp.commands.submit.xml_input import Account, local
from vmgahp.domain.job_xml import ATTRIBUTE
from vmgahp.domain.job_xml.allow_list import DOMAIN, NEVER, Allowed
from vmgahp.domain.job_xml.sanitize import sanitized
from vmgahp.errors import JobFault

_DECISIVE = "type", "name", "dev", "device", "mode", "model", "bus"
"""Attributes without which an element would mean something else."""


def bring(
    root: etree._Element,
    left_out: Collection[etree._Element],
    made: Guest,
    summary: Summary,
    settled: Callable[[str, etree._Element], str],
    directory: str,
    *,
    force: bool,
) -> None:
    """Write the trimmed file, and let the job have it. Raises `SubmitError`.

    `left_out` are devices that jobs cannot have, which the summary has already; `settled` is as for
    `Account.tell`.
    """
    from vmgahp.commands.files import write_anew
    from vmgahp.commands.submit.images import free

    account = Account(root)
    trimmed = _Trimmer(account, set(left_out), summary, settled).trim(root, DOMAIN, "/domain")
    for source in trimmed.findall("devices/interface/source"):
        parent = source.getparent()
        assert parent is not None
        parent.remove(source)
        summary.settle("/domain/devices/interface/source", "jobs get the machine's own network of that kind")
    etree.indent(trimmed)
    data = etree.tostring(trimmed, encoding="utf-8", xml_declaration=True) + b"\n"
    name = f"{made.name}.xml"
    try:
        sanitized(data.decode(), name)
    except JobFault as fault:
        raise SubmitError(f"The execute machine would refuse it: {fault.problem}", fault.hint) from fault
    path = os.path.join(directory, name)
    free(path, force)
    try:
        write_anew(path, data)
    except OSError as error:
        raise SubmitError(f"{path} cannot be written ({error.strerror}).") from error
    summary.made.append(path)
    made.attributes[ATTRIBUTE] = name
    made.files.append(path)
    # The rest the file says itself; the ad names the disks and grants the amounts.
    made.options.pop("Topology", None)
    made.nics = made.nics[:1]
    for nic in made.nics:
        nic.mac, nic.model, nic.link_up = "", "virtio", True
    summary.advise(f"{path} goes with the job. The machine must take such jobs (VM_ALLOW_LIBVIRT_XML).")


class _Trimmer:
    """Makes a copy with what is allowed; the rest goes to the summary."""

    def __init__(
        self,
        account: Account,
        left_out: set[etree._Element],
        summary: Summary,
        settled: Callable[[str, etree._Element], str],
    ) -> None:
        self._account = account
        self._left_out = left_out
        self._summary = summary
        self._settled = settled

    def trim(self, element: etree._Element, allowed: Allowed, path: str) -> etree._Element:
        made = etree.Element(local(element.tag))
        for key, value in element.items():
            form = allowed.attributes.get(str(key))
            if form is not None and re.fullmatch(form, str(value), re.ASCII):
                made.set(key, value)
            else:
                self._tell(f"{path}/@{local(key)}", f"/@{local(key)}", element, f"{value!s}: not for jobs to say")
        if allowed.text is not None:
            made.text = (element.text or "").strip()
        counts: dict[str, int] = {}
        for child in element:
            tag = str(child.tag)
            below = allowed.children.get(tag)
            counts[tag] = counts.get(tag, 0) + 1
            if child in self._left_out:
                continue
            if below is None or counts[tag] > below.most or not _keeps(child, below):
                reason = NEVER.get(local(tag), "a job cannot say this")
                self._tell(f"{path}/{local(tag)}", "", child, f"{local(tag)}: {reason}")
            else:
                made.append(self.trim(child, below, f"{path}/{local(tag)}"))
        return made

    def _tell(self, path: str, suffix: str, element: etree._Element, what: str) -> None:
        tell = self._summary.settle if self._settled(path, element) else self._summary.lose
        tell(self._account.place(element) + suffix, what)


def _keeps(element: etree._Element, allowed: Allowed) -> bool:
    """Whether what is left of an element would still mean the same."""
    text = (element.text or "").strip()
    if allowed.text is not None and not re.fullmatch(allowed.text, text, re.ASCII):
        return False
    for name in _DECISIVE:
        value, form = element.get(name), allowed.attributes.get(name)
        if value is not None and form is not None and not re.fullmatch(form, value, re.ASCII):
            return False
    return True
