"""A program's words and variables, such that the guest's shell has them byte for byte.

On their way are a submit file, where ``$(`` begins a macro, an ad, whose strings have no line breaks and in which the
schedd expands ``$$(``, and ``/bin/sh -c`` of the guest. They are quoted for the last in such a way that the others find
nothing in them. With `macros`, ``$(Process)`` and its like are HTCondor's.
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
    """A command line that runs the words as they are, with these variables in the program's environment."""
    made: list[str] = []
    given = [f"{name}={_word(value, made, macros)}" for name, value in variables]
    line = " ".join([*given, *(_word(word, made, macros) for word in words)])
    return "".join(f"{one}; " for one in made) + line


def environment(variables: Variables) -> str:
    """The value of the command ``environment``, in the syntax with quotes around it."""
    quoted = (f"{name}='" + value.replace("'", "''") + "'" for name, value in variables)
    return '"' + " ".join(quoted).replace('"', '""') + '"'


def is_for_environment(value: str) -> bool:
    """Whether the command ``environment`` can have a value; the others are the command line's."""
    return value.isprintable() and "$$" not in value and "$(dollar)" not in value.lower()


def _word(text: str, made: list[str], macros: bool) -> str:
    """A word as the shell reads it; what a line cannot have is a variable of the shell that is `made` before."""
    if _PLAIN.fullmatch(text):
        return text
    if text.isprintable():
        return "'" + _each(text, macros, lambda part: _TO_HTCONDOR.sub("$''", part.replace("'", "'\\''"))) + "'"
    name = f"_vmgahp_{len(made)}"
    # The dot keeps line breaks at the end, which the shell takes away from what a command prints.
    made.append(f"{name}=`printf '{_each(text, macros, _octal)}.'`")
    return f'"${{{name}%.}}"'


def _each(text: str, macros: bool, quote: Callable[[str], str]) -> str:
    parts = MACRO.split(text) if macros else [text]
    return "".join(part if number % 2 else quote(part) for number, part in enumerate(parts))


def _octal(text: str) -> str:
    return "".join(chr(byte) if byte in _KEPT else f"\\{byte:03o}" for byte in os.fsencode(text))
