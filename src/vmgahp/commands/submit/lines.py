"""Lines of a submit file, written and parsed.

A line is one command, ``$`` begins a macro anywhere, a backslash at the end joins lines, and an attribute (``+Name =
"text"``) is a ClassAd expression. Text that would not be read back unchanged is refused.
"""

import re

from vmgahp.commands.submit.summary import SubmitError

_COMMAND = re.compile(r"[A-Za-z_+][\w.+-]*\s*=", re.ASCII)
_MACRO = re.compile(r"\$\(([^()]*)\)")
_DOLLAR = re.compile(r"\$")
_NO_MACRO = re.compile(r"\$(?!\([A-Za-z][A-Za-z0-9_.]*\))")

_LONGEST = 1 << 20
"""The maximum number of characters of an expanded value: macros can grow without limit."""


def command(name: str, text: str, *, macros: bool = False) -> str:
    """Write ``name = text`` as one line, from which condor_submit reads exactly `text`. Raises `SubmitError`.

    With `macros`, ``$(Process)`` and the like are left as macros.
    """
    # These two are always expanded once more, $$ when the job is matched with a machine.
    unwritable = "$$" in text or "$(dollar)" in text.lower()
    if unwritable or text != text.strip() or not text or text.endswith("\\") or not text.isprintable():
        raise SubmitError(f"{name}: {text!a} cannot be written into a submit file.", "give it another name.")
    return f"{name} = {(_NO_MACRO if macros else _DOLLAR).sub('$(DOLLAR)', text)}"


def attribute(name: str, value: str | bool | int, *, macros: bool = False) -> str:
    """Write ``+name = value`` as one line, a string in quotes. Raises `SubmitError`."""
    if isinstance(value, bool):
        return f"+{name} = {str(value).lower()}"
    if isinstance(value, int):
        return f"+{name} = {value}"
    if value.endswith("\\"):
        raise SubmitError(f"{name}: {value!a} ends with a backslash.", "give it another name.")
    # In this syntax a backslash escapes a quote except for the last one, and is literal before anything else.
    quoted = value.replace('"', '\\"')
    return command(f"+{name}", f'"{quoted}"', macros=macros)


def is_command(line: str) -> bool:
    """Return True if a line sets one command or attribute, and does nothing else."""
    return bool(_COMMAND.match(line)) and line.isprintable() and not line.endswith("\\")


def commands(text: str) -> dict[str, str]:
    """Parse the value that each line sets; of several lines with one name the last counts, as in condor_submit.

    A command is in lower case, and an attribute is ``MY.`` and its name as it was first written.
    """
    known: dict[str, str] = {}
    attributes: dict[str, str] = {}
    for line in text.splitlines():
        if is_command(line):
            name, _, value = line.partition("=")
            name = re.sub(r"\A(\+|my\.)", "MY.", name.strip(), flags=re.IGNORECASE)
            if name.startswith("MY."):
                attributes.setdefault(name.lower(), name)
            known[name.lower()] = value.strip()
    return {attributes.get(name, name): _expanded(value, known) for name, value in known.items()}


def _expanded(value: str, known: dict[str, str]) -> str:
    """Replace the macros of a value by the values of the file itself."""

    def one(found: re.Match[str]) -> str:
        name, _, otherwise = found[1].partition(":")
        name = name.strip().lower()
        numbers = {"dollar": "\0", "cluster": "1", "clusterid": "1", "process": "0", "procid": "0"}
        return numbers.get(name) or known.get(name, otherwise)

    for _ in range(10):  # a macro may contain another one, or itself
        value, number = _MACRO.subn(one, value)
        if not number or len(value) > _LONGEST:
            break
    return value.replace("\0", "$")
