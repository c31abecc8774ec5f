"""Every name that the configuration sets, and where: for people and for the probe, not for the server.

HTCondor's tool tells it with ``-dump -verbose``: a line ``NAME = value`` as the value is written, and beneath
it ``# at:`` with the file and the line, in which ``<Default>`` stands for a default of HTCondor's own.
"""

from typing import NamedTuple

from vmgahp.config import sources
from vmgahp.config.sources import ENVIRONMENT, HTCONDOR, SUBSYSTEM
from vmgahp.errors import MachineFault
from vmgahp.host.run import run

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

_AT = " # at: "
_PLACES = {"<Environment>": ENVIRONMENT}


class Entry(NamedTuple):
    """A name with a value."""

    name: str
    """In upper case, with whatever stands before it, as in ``STARTER.VM_STATUS_INTERVAL``."""
    value: str
    """As it is written, with ``$(NAME)`` in it."""
    where: str
    """The file and the line, for people."""
    is_default: bool = False
    """It was set nowhere: HTCondor's own default."""


class Entries:
    """What the configuration sets; empty where there is none."""

    def __init__(self, entries: "list[Entry]", of_htcondor: bool = False) -> None:
        self.all = entries
        self.of_htcondor = of_htcondor
        """Whether HTCondor has them, with which a site's own names are; else a file of this daemon's."""

    def where(self) -> dict[str, str]:
        """Where each setting's value comes from: its plain name to the place."""
        set_here = {entry.name: entry.where for entry in self.all if not entry.is_default and entry.value}
        places = {name: place for name, place in set_here.items() if "." not in name}
        for name, place in set_here.items():
            if name.startswith(f"{SUBSYSTEM}."):
                places[name.removeprefix(f"{SUBSYSTEM}.")] = place
        for entry in self.all:
            if entry.is_default and entry.value:
                places.setdefault(entry.name, "HTCondor's default")
        return places


def read(environ: "Mapping[str, str]") -> Entries:
    """All of it, from where `vmgahp.config.sources.read` reads the settings.

    Raises `MachineFault` for a source that is there and cannot be read.
    """
    path = environ.get("VMGAHP_CONFIG", "")
    if not path:
        tool = sources.find_tool(environ)
        found = _from_tool(tool, environ) if tool else None
        if found is not None:
            return Entries(found, of_htcondor=True)
        path = sources.own_file(environ)
    text = sources.read_file(path) if path else ""
    table, origin = sources.tables(text, path, environ)
    return Entries([Entry(name, value, origin[name]) for name, value in table.items()])


def _from_tool(tool: str, environ: "Mapping[str, str]") -> "list[Entry] | None":
    out, err = run([tool, "-subsystem", SUBSYSTEM, "-dump", "-verbose"], environ)
    if sources.NO_CONFIGURATION in err:
        return None
    if not out:
        raise MachineFault(
            f"HTCondor's configuration cannot be listed: {tool} says: {' '.join(err.split())[:500]}.",
            f"run {tool} -dump and mend what it complains of.",
        )
    return parse(out)


def parse(text: str) -> list[Entry]:
    """The entries in what ``condor_config_val -dump -verbose`` writes (without ``-verbose``: and no places)."""
    found: list[Entry] = []
    for line in text.splitlines():
        if line.startswith(_AT) and found:
            place = line.removeprefix(_AT).strip()
            is_default = place in ("<Default>", "<Detected>")
            found[-1] = found[-1]._replace(where=_PLACES.get(place, place), is_default=is_default)
        elif line.startswith("   ") and found:  # a value of several lines: NAME @=end, lines, @end
            found[-1] = found[-1]._replace(value=f"{found[-1].value} {line.strip()}".strip())
        elif line[:1] not in ("", " ", "#", "@", "="):
            name, equals, value = line.partition("=")
            if equals:
                lines = name.endswith(" @")
                name = name.removesuffix("@").strip().upper()
                found.append(Entry(name, "" if lines else value.strip(), HTCONDOR))
    return found
