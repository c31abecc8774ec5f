"""The settings: one table of all that this daemon reads, and the sources of their values.

In a pool they come from HTCondor's own configuration, read by HTCondor's own tool, so that everything its files
can do works here too. Without HTCondor they come from a file of ``NAME = value`` lines. `load` defines the
order; `SETTINGS` is the only list of names, and ``config/vmgahp.conf.example`` is made from it.
"""

import os
from collections.abc import Iterable, Mapping, Sequence

from vmgahp.config.table import BY_NAME, SETTINGS, SHARE_DIRS, Setting, of_share_dirs, setting_of
from vmgahp.errors import MachineFault

__all__ = ["BY_NAME", "SETTINGS", "Setting", "Settings", "load"]

TRUE_WORDS = ("true", "1", "yes", "t")
FALSE_WORDS = ("false", "0", "no", "f")
LONGEST_TIME = 1 << 21
"""The most seconds of a setting: poll(2) cannot wait for 2**31 ms."""
NETWORKING_TYPES = ("nat", "bridge", "user")


class Settings:
    """The values of all settings, kept as text and converted by the getters.

    A getter raises `MachineFault`, which names the setting, the value, its source and a valid value, if the
    text is not of the setting's kind; KeyError if `SETTINGS` has no such name.
    """

    __slots__ = ("_values", "_where", "warnings")

    def __init__(
        self,
        values: Mapping[str, str] | None = None,
        where: Mapping[str, str] | str = "given",
        warnings: Iterable[str] = (),
    ) -> None:
        self._values: dict[str, str] = {}
        self._where: dict[str, str] = {}
        self.warnings = list(warnings)
        for name, value in (values or {}).items():
            setting = setting_of(name.upper())
            if value.strip():  # to HTCondor an empty value is not set
                self._values[setting.name] = value.strip()
                self._where[setting.name] = where if isinstance(where, str) else where[name]

    @property
    def given(self) -> Mapping[str, str]:
        """The values that are set."""
        return self._values

    def where(self, name: str) -> str:
        """Return the source of a setting's value; ``default`` if it is not set."""
        return self._where.get(setting_of(name).name, "default")

    def locate(self, where: Mapping[str, str]) -> None:
        """Replace the sources of values by more exact ones, such as the line of a file."""
        self._where.update({name: place for name, place in where.items() if name in self._where})

    def string(self, name: str) -> str:
        """Return a setting as text, without surrounding quotes (arguments and expressions keep theirs)."""
        setting = setting_of(name)
        value = self._values.get(name, setting.default)
        # As delete_quotation_marks in HTCondor's vm_univ_utils.cpp.
        if setting.kind not in ("arguments", "expression"):
            value = value.strip("\"'").strip()
        return value

    def strings(self, name: str) -> list[str]:
        """Return the words of a list, separated by commas or spaces."""
        return self.string(name).replace(",", " ").split()

    def integer(self, name: str) -> int:
        """Return a setting as a non-negative integer; it may be a ClassAd expression, such as ``4 * 1024``."""
        text = self.string(name)
        digits = text[1:] if text[:1] in "+-" else text
        if digits.isascii() and digits.isdigit():
            # The ClassAd engine turns a number that is too large for it into 0.
            value: object = int(text) if len(digits) < 19 else None
        else:
            value = self._evaluate(name, text)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 2**63:
            raise self._bad(name, "a whole number that is not negative")
        return min(int(value), LONGEST_TIME) if setting_of(name).unit == "seconds" else int(value)

    def boolean(self, name: str) -> bool:
        """Return a setting as a boolean; it may be a ClassAd expression."""
        text = self.string(name)
        if text.lower() in TRUE_WORDS:
            return True
        if text.lower() in FALSE_WORDS:
            return False
        value = self._evaluate(name, text)
        if not isinstance(value, bool | int | float):
            raise self._bad(name, "true or false")
        return bool(value)

    def size(self, name: str) -> int:
        """Return a size in bytes, from HTCondor's syntax for the sizes of logs: ``4096``, ``10 Mb``, ``1 GiB``.

        That syntax also has times, such as ``7 days``, to rotate by age; these do not work for logs that
        several processes write, and the default is used instead (with a sentence in `warnings`). See
        ``dprintf_parse_log_size`` in HTCondor's ``src/condor_utils/dprintf_config.cpp``.
        """
        text = self.string(name)
        digits = len(text) - len(text.lstrip("0123456789"))
        unit = text[digits:].strip()
        if not digits or digits > 18 or not (unit.isascii() and (unit.isalpha() or not unit)):
            raise self._bad(name, "a size such as 10 Mb")
        power: int = _UNITS.get(unit.lower(), -1) if unit != "m" else -1
        if power < 0:
            if unit[0].lower() not in "shdwm":
                raise self._bad(name, "a size such as 10 Mb")
            default = BY_NAME[name].default
            warning = f"{name} = {text} ({self.where(name)}) is a time, not a size; {default} is taken instead."
            if warning not in self.warnings:
                self.warnings.append(warning)
            return Settings({name: default}).size(name)
        return int(text[:digits]) << 10 * power

    def call_timeout(self) -> float:
        """Return the seconds that one call of an outside program may take: a tenth of VM_GAHP_REQ_TIMEOUT."""
        return max(1.0, self.integer("VM_GAHP_REQ_TIMEOUT") / 10)

    def networking_types(self, kinds: Sequence[str] = NETWORKING_TYPES, own_bridge: bool = False) -> list[str]:
        """Return the kinds of network that jobs may have, in the administrator's order; none without VM_NETWORKING.

        As in the C++ daemon, bridge needs VM_NETWORKING_BRIDGE_INTERFACE, but not for a hypervisor that has a
        bridge of its own (`own_bridge`); user needs VM_ALLOW_HOST_LOOPBACK, since libvirt cannot make slirp or passt
        block the host's loopback. Words that are not among the `kinds` are left out.
        """
        if not self.boolean("VM_NETWORKING"):
            return []
        usable = {
            "nat": True,
            "bridge": own_bridge or self.string("VM_NETWORKING_BRIDGE_INTERFACE"),
            "user": self.boolean("VM_ALLOW_HOST_LOOPBACK"),
        }
        found = [word.strip("\"'").lower() for word in self.strings("VM_NETWORKING_TYPE")]
        return [kind for kind in dict.fromkeys(found) if kind in kinds and usable[kind]]

    def xml_script(self) -> str:
        """Return LIBVIRT_XML_SCRIPT, or an empty string if it is not set or is HTCondor's own awk script."""
        path = self.string("LIBVIRT_XML_SCRIPT")
        directory, name = os.path.split(os.path.normpath(path)) if path else ("", "")
        libexec = self.string("LIBEXEC")
        if name == "libvirt_simple_script.awk" and (not libexec or directory == os.path.normpath(libexec)):
            return ""
        return path

    def _bad(self, name: str, wanted: str) -> MachineFault:
        hint = f"set {name} to {wanted}, or remove it for the default, {setting_of(name).default or 'none'}."
        return MachineFault(f"{name} = {self.string(name)} ({self.where(name)}) is not {wanted}.", hint)

    def _evaluate(self, name: str, text: str) -> object:
        try:
            import classad2
        except ImportError as error:
            problem = f"{name} = {text} ({self.where(name)}) needs HTCondor's ClassAd module, which is missing."
            hint = f"write the value itself in {name}, or install the Python package htcondor."
            raise MachineFault(problem, hint) from error
        try:
            value: object = classad2.ExprTree(text).eval()
        except Exception:  # noqa: BLE001 - classad2's exceptions have no common base class
            return None
        # The values undefined and error are members of an IntEnum, and would pass for the numbers 2 and 1.
        return None if isinstance(value, classad2.Value) else value


_UNITS = {"": 0, "b": 0, "byte": 0, "bytes": 0} | {
    letter + rest: power for power, letter in enumerate("kmgt", 1) for rest in ("", "b", "ib", "bytes")
}


def load(environ: Mapping[str, str]) -> Settings:
    """Read the settings from the source that `vmgahp.config.sources.read` finds. Raises `MachineFault`."""
    from vmgahp.config import sources

    values, where, warnings = sources.read(tuple(BY_NAME), environ)
    if named := of_share_dirs(values.get(SHARE_DIRS, "")):
        of_each, places, _ = sources.read(named, environ)
        values, where = {**values, **of_each}, {**where, **places}
    return Settings(values, where, warnings)
