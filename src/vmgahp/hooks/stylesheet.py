"""One stylesheet of VM_POLICY, in a process of its own: ``python -I -m vmgahp.hooks.stylesheet FILE``.

For its caller this is a program like any other of the policy: XML in, XML out, the exit status 1 and the reason on
standard output if a ``<xsl:message terminate="yes">`` rejects the job.

The stylesheet can read no file, no network and no other stylesheet, and cannot write. The attributes of the job ad are
available as parameters of the same names, all of them strings, if the stylesheet declares them at its top.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable

from lxml import etree

from vmgahp.hooks import AD_VARIABLE, LONGEST_OUTPUT, REJECTED
from vmgahp.host.system_calls import restrict
from vmgahp.text import NO_XML

BROKEN = 2

MOST_MEMORY, MOST_SECONDS = 1 << 30, 3600
"""The limits of the address space, in bytes, and of the CPU time; its caller has a deadline as well."""

_XSL = "{http://www.w3.org/1999/XSL/Transform}"


def main(path: str) -> int:
    """Transform standard input and return the exit status."""
    restrict(None, memory=MOST_MEMORY, cpu_seconds=MOST_SECONDS, file_bytes=LONGEST_OUTPUT)
    # The mark distinguishes a rejection from an error, because libxslt reports both in the same way.
    mark = os.urandom(12).hex()
    messages: list[str] = []
    read = path
    try:
        parser = _parser()
        with open(path, "rb") as file:
            sheet = etree.fromstring(file.read(), parser)
        if sheet.getroottree().docinfo.doctype:  # type: ignore[union-attr]
            raise ValueError("it has a document type, which may name files")
        _mark_rejections(sheet, mark)
        everything = etree.XSLTAccessControl.DENY_ALL  # type: ignore[attr-defined]
        transform = etree.XSLT(sheet, access_control=everything)
        read = "the domain"
        domain = etree.fromstring(sys.stdin.buffer.read(), parser)
        try:
            made = transform(domain, **_parameters(sheet))  # type: ignore[arg-type]
        finally:
            messages = [entry.message or "" for entry in transform.error_log]  # type: ignore[attr-defined]
    except Exception as error:  # noqa: BLE001 - any exception means that the stylesheet does not work
        rejections = [text.removeprefix(mark) for text in messages if text.startswith(mark)]
        _tell(text for text in messages if not text.startswith(mark))
        if rejections:
            os.write(1, (rejections[0].strip() or "it gives no reason").encode())
            return REJECTED
        _tell([f"{type(error).__name__}: {error}".replace("<string>", read)])
        return BROKEN
    _tell(messages)
    with open(1, "wb", closefd=False) as output:
        output.write(bytes(made))
    return 0


def _mark_rejections(sheet: etree._Element, mark: str) -> None:
    """Put the mark before every message that ends the transformation."""
    for message in sheet.iter(f"{_XSL}message"):
        if message.get("terminate") == "yes":
            first = etree.Element(f"{_XSL}text")
            first.text, first.tail, message.text = mark, message.text, None
            message.insert(0, first)


def _parser() -> etree.XMLParser:
    class Refuse(etree.Resolver):
        """A resolver that refuses xsl:import and xsl:include, which are read before any access control applies."""

        def resolve(  # type: ignore[override]
            self, system_url: str, public_id: str, context: object
        ) -> None:
            raise ValueError(f"it wants to read {system_url}, and a stylesheet of the policy reads no other file")

    parser = etree.XMLParser(resolve_entities=False, no_network=True, load_dtd=False)
    parser.resolvers.add(Refuse())
    return parser


def _parameters(sheet: etree._Element) -> dict[str, etree._XSLTQuotedStringParam]:
    """Return the parameters that the stylesheet declares and the job ad has, whatever their case.

    A character that XML does not allow becomes ``?``, because the job must not be able to break the stylesheet.
    """
    if not (path := os.environ.get(AD_VARIABLE, "")):
        return {}
    with open(path, encoding="utf-8") as file:
        job: dict[str, object] = {name.lower(): value for name, value in json.load(file).items()}
    found = {}
    for parameter in sheet.iterchildren(f"{_XSL}param"):
        name = parameter.get("name", "")
        value = job.get(name.lower())
        if value is not None:
            text = str(value).lower() if isinstance(value, bool) else str(value)
            found[name] = etree.XSLT.strparam(re.sub(NO_XML, "?", text))
    return found


def _tell(lines: Iterable[str]) -> None:
    for line in lines:
        sys.stderr.write(" ".join(line.split()) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
