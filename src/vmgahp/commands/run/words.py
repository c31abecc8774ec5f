"""A program's words and variables, quoted so that the guest's shell gets them byte for byte.

They pass through a submit file, where ``$(`` begins a macro, an ad, whose strings have no line breaks and in which the
schedd expands ``$$(``, and ``/bin/sh -c`` of the guest. They are quoted for the shell in such a way that the others
find nothing to expand. With `macros`, ``$(Process)`` and the like are left to HTCondor.
"""

import os
import re
from collections.abc import Callable, Sequence

MACRO = re.compile(r"(\$\([A-Za-z][A-Za-z0-9_.]*\))")
_PLAIN = re.compile(r"[A-Za-z0-9_@%+:,./-]+", re.ASCII)
_TO_HTCONDOR = re.compile(r"\$(?=[$(\[])")
_KEPT = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789 _@+:,./=-")

Variables = Sequence[tuple[str, str]]


def shell_line(words: Sequence[str], variables: Variables = (), *, macros: bool = False) -> str:
    """Make a command line that runs the words unchanged, with these variables in the program's environment."""
    made: list[str] = []
    given = [f"{name}={_word(value, made, macros)}" for name, value in variables]
    line = " ".join([*given, *(_word(word, made, macros) for word in words)])
    return "".join(f"{one}; " for one in made) + line


def environment(variables: Variables) -> str:
    """Format the value of the command ``environment``, in the syntax with quotes around it."""
    quoted = (f"{name}='" + value.replace("'", "''") + "'" for name, value in variables)
    return '"' + " ".join(quoted).replace('"', '""') + '"'


def is_for_environment(value: str) -> bool:
    """Return True if the command ``environment`` can have a value; others must be set on the command line."""
    return value.isprintable() and "$$" not in value and "$(dollar)" not in value.lower()


def _word(text: str, made: list[str], macros: bool) -> str:
    """Quote a word for the shell; characters that a line cannot have go through a shell variable, added to `made`."""
    if _PLAIN.fullmatch(text):
        return text
    if text.isprintable():
        return "'" + _each(text, macros, lambda part: _TO_HTCONDOR.sub("$''", part.replace("'", "'\\''"))) + "'"
    name = f"_vmgahp_{len(made)}"
    # The dot keeps line breaks at the end, which the shell strips from the output of a command.
    made.append(f"{name}=`printf '{_each(text, macros, _octal)}.'`")
    return f'"${{{name}%.}}"'


def _each(text: str, macros: bool, quote: Callable[[str], str]) -> str:
    parts = MACRO.split(text) if macros else [text]
    return "".join(part if number % 2 else quote(part) for number, part in enumerate(parts))


def _octal(text: str) -> str:
    return "".join(chr(byte) if byte in _KEPT else f"\\{byte:03o}" for byte in os.fsencode(text))
