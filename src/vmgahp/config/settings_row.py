"""What a row of the tables of settings says."""

SERVER, STARTD, STARTER, PLUGIN = "this daemon", "startd", "starter", "image plugin"
"""Who may read a setting."""


class Setting:
    """One setting.

    `kind` is string, integer, bool, path, list, arguments, expression or size; `default` is written as in a
    file; `ours` tells our own settings from HTCondor's; `example` is the value in the example file, where it is
    to be set. `readers` are those of `SERVER`, `STARTD`, `STARTER`, `PLUGIN` who read it. Where `words` are given,
    the value (of a list, each of its words) is one of them, in any case; `least` is the least whole number.
    """

    __slots__ = ("default", "example", "kind", "least", "meaning", "name", "ours", "readers", "unit", "words")

    def __init__(
        self,
        name: str,
        kind: str,
        default: str,
        meaning: str,
        unit: str = "",
        ours: bool = False,
        example: str = "",
        readers: "tuple[str, ...]" = (SERVER,),
        words: "tuple[str, ...]" = (),
        least: int = 0,
    ) -> None:
        self.name = name
        self.kind = kind
        self.default = default
        self.meaning = meaning
        self.unit = unit
        self.ours = ours
        self.example = example
        self.readers = readers
        self.words = words
        self.least = least


def ours(
    name: str,
    kind: str,
    default: str,
    meaning: str,
    unit: str = "",
    readers: "tuple[str, ...]" = (SERVER,),
    words: "tuple[str, ...]" = (),
    least: int = 0,
) -> Setting:
    """A setting that HTCondor has not."""
    return Setting(name, kind, default, meaning, unit, True, "", readers, words, least)
