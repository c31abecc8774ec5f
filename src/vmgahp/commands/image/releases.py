"""Cloud images by the name of a release: the URL of each, and how it is verified."""

import os
import tomllib
from typing import NamedTuple

from vmgahp.commands.image import NotDone
from vmgahp.commands.image.fetch import Sums
from vmgahp.host.trust import require_trustworthy
from vmgahp.images.catalog import tables

TABLE = "cloud-images.toml"
"""The name of the table beside this module, and of the administrator's beside the catalog."""

_WORDS = ("image", "sums", "algorithm", "signature", "key", "format", "description")
_NEEDED = ("image", "sums", "algorithm", "format")


class Release(NamedTuple):
    """A cloud image that is known by its name."""

    image: str
    """The URL of the image."""
    sums: Sums
    format: str
    description: str
    min_memory: int
    """The least memory of a guest, in MiB."""


def known(directory: str) -> dict[str, Release]:
    """Return all releases; the administrator's own table overrides ours. Raises `NotDone`, `errors.MachineFault`."""
    found: dict[str, Release] = {}
    own = os.path.join(directory, TABLE)
    places = [os.path.join(os.path.dirname(__file__), TABLE)]
    if os.path.lexists(own):
        require_trustworthy(own, TABLE, "remove it", executable=False)
        places.append(own)
    for place in places:
        try:
            with open(place, "rb") as file:
                found |= {name: _release(place, name, table) for name, table in tables(tomllib.load(file))}
        except (OSError, ValueError, RecursionError) as error:
            raise NotDone(f"{place} is no table of cloud images: {error}.") from error
    return found


def _release(place: str, name: str, table: dict[str, object]) -> Release:
    memory = table.get("min_memory", 0)
    words = {key: table.get(key, "") for key in _WORDS}
    wrong = [key for key in table if key not in (*_WORDS, "min_memory")]
    wrong += [key for key, value in words.items() if not isinstance(value, str) or (key in _NEEDED and not value)]
    if not isinstance(memory, int) or words["algorithm"] not in ("sha256", "sha512"):
        wrong.append("min_memory" if not isinstance(memory, int) else "algorithm")
    if wrong:
        raise NotDone(f"{place}: [{name}] has no {wrong[0]} that it can have, or should have none.")
    text = {key: str(value) for key, value in words.items()}
    sums = Sums(text["sums"], text["algorithm"], text["signature"], text["key"])
    return Release(text["image"], sums, text["format"], text["description"], int(str(memory)))
