"""Classify the blocks of a page: shell commands, HTCondor's settings, a submit file, or plain text.

A reader copies a whole block into one place, so that a block is of one kind, and no remark in it is taken for an
argument. Blocks that say no language get theirs here, those with commands and files a button that copies them.
"""

import re
from collections.abc import Iterator

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util import logging

SHELL, SETTINGS, SUBMIT, SESSION, OTHER = "sh", "settings", "submit", "console", "text"

LEXERS = {SETTINGS: "ini", SUBMIT: "ini"}
"""Kind -> its lexer, if that has another name."""

PROGRAMS = """
ansible ansible-playbook apt-get ausearch cat chmod chown conda cp curl dnf dpkg echo editor exec git grep grub-mkrescue
install jq mkdir mount openssl pip pipx printf python3 qemu-img restorecon rpm rpmbuild scripts/build-deb semanage
semodule seq setsebool sh sudo systemctl touch uv virsh vmgahp yum
"""
"""The first words of shell lines on these pages, besides paths and HTCondor's own commands."""

UNBROKEN = 24
"""The length up to which a name or option is never wrapped: a browser would break `--disk` after its dashes."""

_SETTING = re.compile(r"[A-Z][A-Za-z0-9_.]*\s+\+?=\s|use [A-Z]+ *:|include\b")
_SUBMIT = re.compile(r"\+\w+\s*=|[a-z][a-z_]*\s*=\s|queue\b")
_ENVIRONMENT = re.compile(r"(?:\w+=\S* )+(?:… )?")
_HERE = re.compile(r"<<-?\s*['\"]?(\w+)")
_PROSE = re.compile(r"\S {3,}[^\s#|&>-]")

_log = logging.getLogger(__name__)


def lines(text: str) -> Iterator[str]:
    """Yield the lines that show a kind, with continuations joined, without blanks, comments and here documents."""
    end = ""
    for line in re.sub(r"\s*\\\n\s*", " ", text).splitlines():
        if end:
            end = "" if line == end else end
        elif line.strip() and not line.lstrip().startswith("#"):
            end = here[1] if (here := _HERE.search(line)) else ""
            yield line


def kind_of_line(line: str) -> str:
    """Return the kind of one line."""
    if line.startswith("$ "):
        return SESSION
    if _SETTING.match(line):
        return SETTINGS
    if _SUBMIT.match(line):
        return SUBMIT
    word = _ENVIRONMENT.sub("", line, count=1).partition(" ")[0]
    path = re.fullmatch(r"[./~]*/?[\w.+-]+(?:/[\w.+-]+)+", word) is not None
    return SHELL if path or word in PROGRAMS.split() or word.startswith("condor_") else OTHER


def kind_of(text: str) -> str:
    """Return the kind of a block. Raises ValueError with a sentence for one that mixes kinds."""
    if text.startswith(("#!", "#cloud-config")):
        return SHELL if text.startswith("#!/bin/sh") else OTHER
    kinds = [kind_of_line(line) for line in lines(text)]
    if not kinds or kinds[0] == SESSION:
        return kinds[0] if kinds else OTHER
    mixed = {SHELL, SETTINGS, SUBMIT} & set(kinds)
    if len(mixed) > 1:
        raise ValueError(f"a block of {' and '.join(sorted(mixed))}: one for each place that it is copied to")
    if mixed == {SHELL}:
        if OTHER in kinds:
            raise ValueError("a block of commands and what they say: begin the commands with `$ `")
        for line in lines(text):
            if _PROSE.search(line):
                raise ValueError(f"a remark that a shell takes for arguments, put # before it: {line}")
    return OTHER if OTHER in kinds else kinds[0]


def _label(app: Sphinx, document: nodes.document) -> None:
    for literal in document.findall(nodes.literal):
        if len(literal.astext()) <= UNBROKEN:
            literal["classes"].append("unbroken")
    for block in document.findall(nodes.literal_block):
        try:
            kind = kind_of(block.astext())
        except ValueError as error:
            if block.get("language") in ("none", SHELL):
                _log.warning("%s", error, location=block)
            continue
        if block.get("language") == "none":
            block["language"] = LEXERS.get(kind, kind)
        if kind in LEXERS and block["language"] == "ini":
            block["classes"].append(kind)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("doctree-read", _label)
    return {"parallel_read_safe": True}
