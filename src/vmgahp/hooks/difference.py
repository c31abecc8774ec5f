"""What a policy changed in a domain: a diff of the XML, without its secrets."""

from difflib import unified_diff
from xml.etree import ElementTree as etree

HIDDEN = "***"
_SECRET_ATTRIBUTES = ("passwd", "password")

CONTEXT = 1
"""Unchanged lines around a change."""
MOST_LINES = 200


def between(before: str, after: str) -> list[str]:
    """The lines of a unified diff, none where the two say the same.

    The order of attributes, indentation and white space around texts do not count. Raises
    `ElementTree.ParseError` for what is not XML.
    """
    if _lines(before, hide=False) == _lines(after, hide=False):
        return []
    lines = list(unified_diff(_lines(before), _lines(after), lineterm="", n=CONTEXT))[2:]
    if not lines:
        return [f"(only what is hidden here as {HIDDEN})"]
    if len(lines) > MOST_LINES:
        lines = [*lines[:MOST_LINES], f"({len(lines) - MOST_LINES} more lines)"]
    return lines


def _lines(xml: str, *, hide: bool = True) -> list[str]:
    domain = etree.fromstring(etree.canonicalize(xml, strip_text=True, with_comments=True))
    if hide:
        for element in domain.iter():
            for name in _SECRET_ATTRIBUTES:
                if name in element.attrib:
                    element.set(name, HIDDEN)
    etree.indent(domain)
    return etree.tostring(domain, encoding="unicode").splitlines()
