"""A stranger's text, as it can be shown or written."""

import sys

import pytest
from lxml import etree

from vmgahp.text import not_for_xml


def test_what_cannot_be_in_xml_is_found_and_nothing_else_is() -> None:
    """lxml, which refuses to write it, is asked."""
    allowed, refused = [], []
    for character in map(chr, range(sys.maxunicode + 1)):
        (refused if not_for_xml(character) else allowed).append(character)
    etree.Element("a").text = "".join(allowed)
    for character in refused:
        assert not_for_xml(f"a\n{character}b") == character
        with pytest.raises(ValueError):  # noqa: PT011 - of two kinds, for a surrogate has no encoding
            etree.Element("a").text = character
