"""A stranger's text made safe to show: printable, without secrets, not too long."""

PRIVATE_ATTRIBUTES = frozenset(
    ("capability", "childclaimids", "claimid", "claimidlist", "claimids", "pairedclaimid", "transferkey")
)
"""Attributes that are secrets, lower-cased: ``ClassAdPrivateAttrs`` of HTCondor's
``src/condor_utils/compat_classad.cpp``, and the slot's ``PairedClaimId``."""


PRIVATE_PREFIX = "_condor_priv"
"""Every attribute whose name starts so is a secret (``ClassAdAttributeIsPrivateV2``, same file)."""


_HIDDEN_IN_LOGS = (*sorted(PRIVATE_ATTRIBUTES), PRIVATE_PREFIX, "environment", "env")


_HIDDEN = "<hidden>"


def is_private(name: str) -> bool:
    """Whether an attribute's value is a secret that may reach neither a log nor a script."""
    name = name.lower()
    return name in PRIVATE_ATTRIBUTES or name.startswith(PRIVATE_PREFIX)


def is_hidden(name: str) -> bool:
    """Whether what an attribute says is kept out of logs: secrets, and the job's environment."""
    return is_private(name) or name.lower() in _HIDDEN_IN_LOGS


def redact(text: str) -> str:
    """`text` with the values of secret attributes and the secret ends of claim ids hidden.

    Hides what follows ``Name =`` or ``Name:`` for the private attributes and for the job's environment,
    up to the closing quote or to the end of the line, and in a claim id, ``<address>#time#number#secret``,
    everything after the number, as HTCondor's own public form of it does.
    """
    if "=" in text or ":" in text:
        for name in _HIDDEN_IN_LOGS:
            text = _hide_value(text, name)
    start = text.find(">#")
    while start >= 0:
        end = start + 2
        for _ in range(2):
            while end < len(text) and text[end].isdigit():
                end += 1
            if end >= len(text) or text[end] != "#":
                break
            end += 1
        else:
            stop = end
            while stop < len(text) and text[stop] not in " \t\r\n\",'":
                stop += 1
            text = text[:end] + "..." + text[stop:]
        start = text.find(">#", end)
    return text


def _hide_value(text: str, name: str) -> str:
    lower = text.lower()
    if len(lower) != len(text):  # some letters change their length; positions would not match
        text = lower
    start = lower.find(name)
    while start >= 0:
        end = start + len(name)
        if name == PRIVATE_PREFIX:
            while end < len(text) and (text[end].isalnum() or text[end] in "_."):
                end += 1
        whole = (start == 0 or not (text[start - 1].isalnum() or text[start - 1] == "_")) and (
            end == len(text) or not (text[end].isalnum() or text[end] == "_")
        )
        value = end
        while value < len(text) and text[value] in " \t\"'":
            value += 1
        marks = "=" if name.startswith("env") else "=:"
        if whole and value < len(text) and text[value] in marks:
            value += 1
            while value < len(text) and text[value] in " \t":
                value += 1
            stop = text.find("\n", value)
            if stop < 0:
                stop = len(text)
            if text[value:stop][:1] == '"':
                quote = text.find('"', value + 1, stop)
                while quote > 0 and text[quote - 1] == "\\" and quote + 1 < stop:
                    quote = text.find('"', quote + 1, stop)
                stop = stop if quote < 0 else quote + 1
            text = text[:value] + _HIDDEN + text[stop:]
            lower = text.lower()
            end = value + len(_HIDDEN)
        start = lower.find(name, end)
    return text


def escape(text: str) -> str:
    """`text` as one printable line: control and other unprintable characters become ``\\n``, ``\\x1b`` …"""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def has_control(text: str) -> bool:
    """Whether there is a control character, a line separator or a lone surrogate in `text`."""
    return not text.isprintable() and any(
        c < " " or "\x7f" <= c <= "\x9f" or "\u2028" <= c <= "\u2029" or "\ud800" <= c <= "\udfff"
        for c in text
    )


def shown(value: str | None) -> str:
    """A value of the job's as it is shown to people: quoted, escaped, not too long."""
    if value is None:
        return "undefined"
    return ascii(value) if len(value) <= 200 else ascii(value[:200]) + "..."
