"""The environment that a job asks for, in both forms in which HTCondor writes it into an ad.

(``Env::MergeFrom`` in HTCondor's ``src/condor_utils/env.cpp``.) ``Environment`` has ``NAME=value`` separated by blanks;
single quotes protect blanks, and two quotes inside of them are one. ``Env``, of old schedds, has no quotes, and is
separated by semicolons, or by ``EnvDelim``. If an ad has both, the first counts.
"""

import re

from vmgahp import errors
from vmgahp.errors import JobFault
from vmgahp.job.ad import JobAd
from vmgahp.text import shown

ATTRIBUTE, OLD, OLD_DELIMITER = "Environment", "Env", "EnvDelim"

_BLANKS = " \t\n\r"
_PIECE = re.compile(r"[ \t\n\r]++|[^ \t\n\r']++|'[^']*+(?:''[^']*+)*+'|'")
"""A pattern for blanks, plain text, quoted text, and an unclosed quote."""


def read(ad: JobAd) -> dict[str, str]:
    """Return the values by name; if a name occurs twice, the last one counts. Raises `JobFault`."""
    said = ad.string(ATTRIBUTE)
    if said is not None:
        name, entries = ATTRIBUTE, _split(said)
    else:
        name, said = OLD, ad.string(OLD) or ""
        entries = [entry.lstrip() for entry in said.split((ad.string(OLD_DELIMITER) or ";")[0])]
    pairs = [entry.partition("=") for entry in entries or () if entry]
    if entries is None or not all(variable and equals for variable, equals, _ in pairs):
        raise JobFault(
            errors.MISMATCHED,
            f"{name} = {shown(said)}: that is not of the form NAME=value NAME='value with blanks'.",
            "correct environment in the submit file.",
        )
    return {variable: value for variable, _, value in pairs}


def _split(text: str) -> list[str] | None:
    """Split the newer form into its entries; return None if a quote is not closed."""
    found: list[str] = []
    is_open = False
    for piece in _PIECE.findall(text):
        if piece == "'":
            return None
        if piece[0] in _BLANKS:
            is_open = False
            continue
        if not is_open:
            found.append("")
        is_open = True
        found[-1] += piece[1:-1].replace("''", "'") if piece[0] == "'" else piece
    return found
