"""The sources of the settings' values: HTCondor, or a file of ``NAME = value`` lines.

HTCondor's configuration is a language with conditions, includes and templates, so HTCondor's own tool
reads it: ``condor_config_val -subsystem VM_GAHP NAME NAME …`` answers in 5 ms with one value a line on
standard output, and prints ``Not defined: NAME`` to standard error for each name that has none or an empty
one. With ``-dump -verbose`` it lists all names: a line ``NAME = value`` as the value is written, and below it
``# at:`` with the file and the line, in which ``<Default>`` stands for a default of HTCondor's own.

A file of our own, for machines without HTCondor, has comments, continued lines and ``$(NAME)``, as
``config.cpp`` in HTCondor's ``src/condor_utils`` has them. HTCondor's Python module could read it too, but
takes 150 ms and 20 MiB, ends the process at a malformed line, knows no line numbers, and adds the defaults of
an HTCondor that is not there (``EXECUTE = /execute``).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress

from vmgahp.errors import MachineFault
from vmgahp.host.run import run

Answer = tuple[dict[str, str], dict[str, str], list[str]]
"""The values by name, the source of each, and sentences for the log."""

SUBSYSTEM = "VM_GAHP"
"""The subsystem name of condor_vm-gahp: ``VM_GAHP.NAME`` is a value of NAME for this daemon alone."""

HTCONDOR, ENVIRONMENT = "HTCondor's configuration", "the environment"
"""The sources of values for which no file and line are known."""

_TOOL = "condor_config_val"
_AT = " # at: "
_NOT_DEFINED = "Not defined: "
NO_CONFIGURATION = "Neither the environment variable CONDOR_CONFIG"
"""The beginning of condor_config_val's message that HTCondor is installed and has no configuration."""

_UPPER = {letter: letter - 32 for letter in range(ord("a"), ord("z") + 1)}
"""A table for upper case that changes ASCII only: some other letters become two, which would move places in a text."""

DEADLINE = 10.0
"""The timeout of HTCondor's tool in seconds: usually it takes 5 ms, but it looks up the name of the machine."""
LONGEST_VALUE = 1 << 16
"""The most characters of a value in which each $(NAME) has been replaced."""
LONGEST_CONFIGURATION = 1 << 20


class Unanswered(MachineFault):
    """A timeout of HTCondor's tool."""


class Entry:
    """A name with its prefix and a value, neither expanded; `is_default` is true for HTCondor's default."""

    __slots__ = ("is_default", "name", "value", "where")

    def __init__(self, name: str, value: str, where: str, is_default: bool = False) -> None:
        self.name, self.value, self.where, self.is_default = name, value, where, is_default


class Entries:
    """The entries of a configuration: HTCondor's, which has a site's own names too, or a file of this daemon's."""

    def __init__(self, entries: list[Entry], of_htcondor: bool = False) -> None:
        self.all = entries
        self.of_htcondor = of_htcondor

    def where(self) -> dict[str, str]:
        """Return the source of each setting's value, by its plain name."""
        set_here = {entry.name: entry.where for entry in self.all if not entry.is_default and entry.value}
        places = {name: place for name, place in set_here.items() if "." not in name}
        for name, place in set_here.items():
            if name.startswith(f"{SUBSYSTEM}."):
                places[name.removeprefix(f"{SUBSYSTEM}.")] = place
        for entry in self.all:
            if entry.is_default and entry.value:
                places.setdefault(entry.name, "HTCondor's default")
        return places


def read(names: Sequence[str], environ: Mapping[str, str]) -> Answer:
    """Read the values of `names` from the first of these that exists:

    the file that VMGAHP_CONFIG names; HTCondor's configuration, by condor_config_val or else by its Python module;
    ``~/.config/vmgahp/vmgahp.conf``; ``/etc/vmgahp.conf``; nothing. In each case ``_CONDOR_<NAME>`` and
    ``_CONDOR_VM_GAHP.<NAME>`` of the environment, in upper or lower case, override it. Raises `MachineFault` for a
    source that exists and cannot be read.
    """
    if not environ.get("VMGAHP_CONFIG"):
        tool = find_tool(environ)
        answer = _from_tool(tool, names, environ) if tool else _from_bindings(names, environ)
        if answer is not None:
            return answer
    table, origin = _own_tables(environ)
    values, where = {}, {}
    for name in names:
        key = f"{SUBSYSTEM}.{name}" if table.get(f"{SUBSYSTEM}.{name}") else name
        if key in table:
            values[name] = expand(table[key], table, f"{key} ({origin[key]})")
            where[name] = origin[key]
    return values, where, []


def directories(environ: Mapping[str, str]) -> list[str]:
    """List the directories of HTCondor's configuration files, in the order of reading. Raises as `read`."""
    values, _, _ = read(("LOCAL_CONFIG_DIR",), environ)
    return values.get("LOCAL_CONFIG_DIR", "").replace(",", " ").split()


def entries(environ: Mapping[str, str]) -> Entries:
    """List every name that is set, and where, from the source that `read` uses. Raises `MachineFault`."""
    if not environ.get("VMGAHP_CONFIG"):
        tool = find_tool(environ)
        out, err = ask_tool([tool, "-subsystem", SUBSYSTEM, "-dump", "-verbose"], environ) if tool else ("", "")
        if tool and NO_CONFIGURATION not in err:
            if not out:
                problem = f"HTCondor's configuration cannot be listed: {tool} says: {' '.join(err.split())[:500]}."
                raise MachineFault(problem, f"run {tool} -dump and correct what it complains of.")
            return Entries(parse(out), of_htcondor=True)
    table, origin = _own_tables(environ)
    return Entries([Entry(name, value, origin[name]) for name, value in table.items()])


def parse(text: str) -> list[Entry]:
    """Parse the output of ``condor_config_val -dump -verbose`` (or of ``-dump``, which has no places)."""
    found: list[Entry] = []
    for line in text.splitlines():
        if line.startswith(_AT) and found:
            place = line.removeprefix(_AT).strip()
            found[-1].is_default = place in ("<Default>", "<Detected>")
            found[-1].where = ENVIRONMENT if place == "<Environment>" else place
        elif line.startswith("   ") and found:  # a value of several lines: NAME @=end, lines, @end
            found[-1].value = f"{found[-1].value} {line.strip()}".strip()
        elif line[:1] not in ("", " ", "#", "@", "="):
            name, equals, value = line.partition("=")
            if equals:
                lines = name.endswith(" @")
                found.append(Entry(name.removesuffix("@").strip().upper(), "" if lines else value.strip(), HTCONDOR))
    return found


def own_file(environ: Mapping[str, str]) -> str:
    """Return the path of the settings file of a machine without HTCondor; empty if there is none."""
    home = environ.get("HOME", "")
    own = os.path.join(home, ".config/vmgahp/vmgahp.conf")
    # Starters since 24.12 give the server, which is root, the home of the job's user.
    if os.path.isabs(own) and os.path.exists(own) and os.stat(home).st_uid == os.geteuid():
        return own
    return "/etc/vmgahp.conf" if os.path.exists("/etc/vmgahp.conf") else ""


def overrides(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the settings of the environment: upper-cased ``NAME`` or ``VM_GAHP.NAME`` to its value."""
    prefix = "_CONDOR_"
    return {
        name[len(prefix) :].upper(): value for name, value in environ.items() if name[: len(prefix)].upper() == prefix
    }


def find_tool(environ: Mapping[str, str]) -> str:
    """Find the path of condor_config_val; return an empty string if there is none.

    The search goes through the directory of the HTCondor daemon that started this one, PATH, the place beside the
    configuration's directory as in an unpacked tarball, and the usual directories. Relative entries of PATH are
    ignored: the current directory is the job's.
    """
    directories = []
    with suppress(OSError):
        parent, daemon = os.path.split(os.readlink(f"/proc/{os.getppid()}/exe"))
        if daemon.startswith("condor_"):
            directories += [os.path.join(os.path.dirname(parent), "bin"), parent]
    directories += environ.get("PATH", "").split(":")
    root = os.path.dirname(os.path.dirname(environ.get("CONDOR_CONFIG", "")))
    directories += [os.path.join(root, "bin"), "/usr/bin", "/usr/sbin", "/usr/local/bin"]
    for directory in directories:
        path = os.path.join(directory, _TOOL)
        if os.path.isabs(path) and os.access(path, os.X_OK) and os.path.isfile(path):
            return path
    return ""


def _from_tool(tool: str, names: Sequence[str], environ: Mapping[str, str]) -> Answer | None:
    """Ask condor_config_val; return None if HTCondor is installed and has no configuration."""
    answer = _ask([tool, "-subsystem", SUBSYSTEM], names, environ)
    if answer is None:
        return None
    found, err = answer
    set_there = {name.removeprefix(f"{SUBSYSTEM}.") for name in overrides(environ)}
    where = {name: ENVIRONMENT if name in set_there else HTCONDOR for name in found}
    warnings = [line for line in err.splitlines() if line.strip() and not line.startswith(_NOT_DEFINED)]
    return found, where, warnings[:20]


def ask_tool(command: Sequence[str], environ: Mapping[str, str]) -> tuple[str, str]:
    """Run HTCondor's tool and return its standard output and standard error. Raises `MachineFault`."""
    reinstall = "repair or reinstall HTCondor."
    try:
        done = run(command, deadline=DEADLINE, environ=environ, directory="", longest=LONGEST_CONFIGURATION)
    except OSError as error:
        raise MachineFault(f"{command[0]} cannot be run: {error.strerror}.", reinstall) from error
    if done.status is None:
        problem = f"{command[0]} did not answer within {DEADLINE:.0f} seconds and was killed."
        raise Unanswered(problem, f"run {' '.join(command[:4])} by hand and see what it waits for.")
    if len(done.out) > LONGEST_CONFIGURATION:
        raise MachineFault(f"{command[0]} wrote more than a configuration has and was killed.", reinstall)
    return done.out.decode("utf-8", "surrogateescape"), done.err.decode("utf-8", "surrogateescape")


def _ask(command: list[str], names: Sequence[str], environ: Mapping[str, str]) -> tuple[dict[str, str], str] | None:
    out, err = ask_tool([*command, *names], environ)
    found = _pair(names, out, err)
    if found is not None:
        return found, err
    if NO_CONFIGURATION in err:
        return None
    if not out and _NOT_DEFINED not in err:
        problem = " ".join(err.split())[:500].rstrip(".") or "it wrote nothing"
        problem = f"HTCondor's configuration cannot be read: {command[0]} says: {problem}."
        raise MachineFault(problem, f"run {command[0]} VM_TYPE and correct what it complains of.")
    if len(names) == 1:
        return {names[0]: out.removesuffix("\n")}, err
    # One of the values has more than one line: bisect the names until it is alone.
    middle = len(names) // 2
    first = _ask(command, names[:middle], environ)
    second = _ask(command, names[middle:], environ)
    if first is None or second is None:
        return None
    return {**first[0], **second[0]}, first[1] + second[1]


def _pair(names: Sequence[str], out: str, err: str) -> dict[str, str] | None:
    """Pair each line of output with its name; return None if their numbers differ."""
    missing = {line[len(_NOT_DEFINED) :] for line in err.splitlines() if line.startswith(_NOT_DEFINED)}
    asked = [name for name in names if name not in missing]
    lines = out.split("\n")[:-1]
    if len(lines) != len(asked) or len(asked) + len(missing) != len(names):
        return None
    return dict(zip(asked, lines, strict=True))


def _from_bindings(names: Sequence[str], environ: Mapping[str, str]) -> Answer | None:
    path = environ.get("CONDOR_CONFIG", "")
    if not path and not os.path.exists("/etc/condor/condor_config"):
        return None
    try:
        import htcondor2
    except ImportError as error:
        if not path:
            return None
        problem = f"CONDOR_CONFIG = {path}, but there is neither {_TOOL} nor HTCondor's Python module to read it."
        hint = f"put {_TOOL} on PATH, install the Python package htcondor, or unset CONDOR_CONFIG."
        raise MachineFault(problem, hint) from error
    found = {}
    for name in names:
        value = htcondor2.param.get(f"{SUBSYSTEM}.{name}", htcondor2.param.get(name))
        if value is not None and str(value):
            found[name] = str(value)
    return found, dict.fromkeys(found, HTCONDOR), []


def read_file(path: str) -> str:
    """Read a file of settings. Raises `MachineFault` if others than its reader could change it."""
    if not os.path.isabs(path):
        raise MachineFault(f"VMGAHP_CONFIG = {path} is not a full path.", "set it to one that begins with /.")
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            found = os.fstat(file.fileno())
            text = file.read(LONGEST_CONFIGURATION)
    except OSError as error:
        raise MachineFault(f"{path} cannot be read: {error.strerror}.", "make it readable or remove it.") from error
    if found.st_uid not in (0, os.geteuid()) or found.st_mode & 0o002:
        problem = f"{path} can be changed by others than its reader, and it names programs to run."
        raise MachineFault(problem, f"chown it to root or to the user who runs the daemon, and chmod o-w {path}.")
    return text


def _own_tables(environ: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    path = environ.get("VMGAHP_CONFIG") or own_file(environ)
    return tables(read_file(path) if path else "", path, environ)


def tables(text: str, path: str, environ: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the unexpanded values that a file and the environment set, and the last place that set each name."""
    table: dict[str, str] = {}
    origin: dict[str, str] = {}
    for number, name, value in logical_lines(text, path):
        upper, so_far, done = value.translate(_UPPER), "", 0
        while (own := upper.find(f"$({name})", done)) >= 0:  # the value that the name had before
            so_far += value[done:own] + table.get(name, "")
            done = own + len(name) + 3
            _require_short(so_far, f"{name} ({path}, line {number})")
        table[name] = so_far + value[done:]
        origin[name] = f"{path}, line {number}"
    set_there = overrides(environ)
    table.update(set_there)
    origin.update(dict.fromkeys(set_there, ENVIRONMENT))
    return table, origin


def logical_lines(text: str, path: str) -> list[tuple[int, str, str]]:
    """Return the ``NAME = value`` lines of a file, continued ones joined: line number, upper-cased name, value.

    Raises `MachineFault`, with the file and the line, for a malformed line.
    """
    found = []
    joined, start = "", 0
    for number, line in enumerate([*text.split("\n"), ""], 1):
        line = line.strip()
        if line.startswith("#"):
            continue
        start = start or number
        joined += line
        if joined.endswith("\\"):
            joined = joined[:-1]
            continue
        name, equals, value = joined.partition("=")
        name = name.strip()
        if joined.strip():
            plain = name.replace("_", "a").replace(".", "a")
            if not equals or not (plain.isascii() and plain.isalnum()) or name[0].isdigit():
                problem = f"{path}, line {start}: {joined.strip()[:100]!r} is not of the form NAME = value."
                raise MachineFault(problem, "correct the line, or put # before it.")
            found.append((start, name.upper(), value.strip()))
        joined, start = "", 0
    return found


def expand(value: str, table: Mapping[str, str], what: str, depth: int = 0) -> str:
    """Replace each ``$(NAME)`` and ``$(NAME:default)`` in `value` by its value in `table`.

    A name that is not set is empty, ``$(DOLLAR)`` is a dollar sign, ``$$(NAME)`` is left unchanged. Raises
    `MachineFault` for a value that contains itself; `what` names the setting in that message.
    """
    if depth > 30:
        raise MachineFault(f"{what} refers to itself.", "take the circle of $(NAME) out of the settings.")
    result, position = "", 0
    while (start := value.find("$(", position)) >= 0:
        end = _closing(value, start + 2)
        if end < 0:
            break
        result += value[position:start]
        position = end + 1
        name, _, default = value[start + 2 : end].partition(":")
        name = name.strip().upper()
        if start > 0 and value[start - 1] == "$":
            result += value[start:position]
        elif name == "DOLLAR":
            result += "$"
        else:
            found = table.get(f"{SUBSYSTEM}.{name}") or table.get(name) or default
            result += expand(found, table, what, depth + 1)
            _require_short(result, what)
    return result + value[position:]


def _require_short(value: str, what: str) -> None:
    """Raise `MachineFault` for a value whose nested $(NAME) would fill the memory."""
    if len(value) > LONGEST_VALUE:
        problem = f"{what} has more than {LONGEST_VALUE} characters with each $(NAME) replaced."
        raise MachineFault(problem, "take out the $(NAME) that stands in it many times.")


def _closing(value: str, position: int) -> int:
    depth = 1
    for index in range(position, len(value)):
        depth += {"(": 1, ")": -1}.get(value[index], 0)
        if depth == 0:
            return index
    return -1
