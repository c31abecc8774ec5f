"""Text for people: printable, without secrets, not too long; and the known word nearest to another."""

from collections.abc import Iterable

PRIVATE_ATTRIBUTES = frozenset(
    ("capability", "childclaimids", "claimid", "claimidlist", "claimids", "pairedclaimid", "transferkey")
)
"""The names of attributes that are secrets, in lower case: ``ClassAdPrivateAttrs`` of HTCondor's
``src/condor_utils/compat_classad.cpp``, and the slot's ``PairedClaimId``."""

PRIVATE_PREFIX = "_condor_priv"
"""The prefix of attribute names that are secrets (``ClassAdAttributeIsPrivateV2``, same file)."""

MAC = r"(?!00:00:00:00:00:00)[0-9a-f][02468ace](?::[0-9a-f]{2}){5}"
"""The form of a NIC's MAC address: unicast, not zero, in lower case."""

NO_XML = "[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]"
"""A character that XML does not allow, although the libraries that write XML here accept it (3 ms to compile)."""

_ENVIRONMENT = ("environment", "env")
_HIDDEN_IN_LOGS = (*sorted(PRIVATE_ATTRIBUTES), PRIVATE_PREFIX, *_ENVIRONMENT)

_HIDDEN_VALUE = (
    rf"(?i)(?<!\w)(?:((?:(?:{'|'.join(PRIVATE_ATTRIBUTES)}|{PRIVATE_PREFIX}[\w.]*+)(?!\w)[ \t\"']*[=:]"
    rf"|(?:{'|'.join(_ENVIRONMENT)})(?!\w)[ \t\"']*=)[ \t]*)"
    # Up to the closing quote that is not escaped by a backslash, or to the end of the line.
    r'(?:"(?:[^"\n]|(?<=\\)"(?=[^\n]))*+"|[^\n]*)'
    # A long name without a value is matched as a whole: it may fill the line, with such a name at every dot.
    rf"|{PRIVATE_PREFIX}[\w.]*+)"
)
_CLAIM_ID = r"(>#\d*#\d*#)[^ \t\r\n\",']*"


def is_private(name: str) -> bool:
    """Return True if an attribute's value is a secret, which must reach neither a log nor a script."""
    name = name.lower()
    return name in PRIVATE_ATTRIBUTES or name.startswith(PRIVATE_PREFIX)


def is_hidden(name: str) -> bool:
    """Return True if an attribute's value is kept out of logs: secrets, and the job's environment."""
    return is_private(name) or name.lower() in _HIDDEN_IN_LOGS


def redact(text: str) -> str:
    """Hide the values of secret attributes and the secret ends of claim ids in `text`.

    The value after ``Name =`` or ``Name:`` is hidden for the private attributes and for the job's environment, up to
    the closing quote or to the end of the line. In a claim id, ``<address>#time#number#secret``, everything after the
    number is hidden, as in HTCondor's own public form of it.
    """
    lower = text.lower()
    if ">#" in text or any(name in lower for name in _HIDDEN_IN_LOGS):
        import re  # late: the server's first lines, before its first reply, never need it

        hidden = re.sub(_HIDDEN_VALUE, lambda found: f"{found[1]}<hidden>" if found[1] else found[0], text)
        return re.sub(_CLAIM_ID, r"\1...", hidden)
    return text


def escape(text: str) -> str:
    """Return `text` as one printable line: control and other unprintable characters become ``\\n``, ``\\x1b`` …"""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def has_control(text: str) -> bool:
    """Return True if `text` has a control character, a line separator or a lone surrogate."""
    return not text.isprintable() and any(
        c < " " or "\x7f" <= c <= "\x9f" or "\u2028" <= c <= "\u2029" or "\ud800" <= c <= "\udfff" for c in text
    )


def not_for_xml(text: str) -> str:
    """Return the first character of `text` that XML does not allow; empty if there is none."""
    if text.replace("\n", "").isprintable():
        return ""
    import re

    found = re.search(NO_XML, text)
    return found[0] if found else ""


def nearest(word: str, known: Iterable[str], likeness: float = 0.6) -> str:
    """Return the known word most similar to `word`; empty if none reaches `likeness` (1 is equal)."""
    from difflib import get_close_matches  # late, as above: rarely needed

    return next(iter(get_close_matches(word, known, 1, likeness)), "")


def shown(value: str | None) -> str:
    """Format a value of the job's for people: quoted, escaped, not too long."""
    if value is None:
        return "undefined"
    return ascii(value) if len(value) <= 200 else ascii(value[:200]) + "..."
