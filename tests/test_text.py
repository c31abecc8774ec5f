"""A stranger's text, as it can be shown or written."""

import re
import sys

from vmgahp.text import NO_XML, not_for_xml


def test_what_cannot_be_in_xml_is_found_and_nothing_else_is() -> None:
    for number in range(sys.maxunicode + 1):
        character = chr(number)
        assert not_for_xml(f"a\n{character}b") == (character if re.match(NO_XML, character) else "")
