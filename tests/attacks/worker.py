"""Attacks a machine of its own, inside of a namespace: ``python -m tests.attacks.worker DIRECTORY``.

A line of JSON on standard input is the name of a surface, of a row and of a mode; the answer is an outcome.
"""

import json
import sys
import time
import traceback
from pathlib import Path

from tests.attacks.ground import Ground
from tests.attacks.site import Site
from tests.attacks.support import Mode, Outcome, rows


def attack(ground: Ground, surface: str, name: str, mode: str) -> Outcome:
    """Try one row in one mode, and judge what came of it."""
    began = time.monotonic()
    lost = ""
    [row] = [row for row in rows(surface) if row.name == name]
    site = Site(ground, row, Mode[mode])
    try:
        row.act(site, *row.arguments)
        site.judge()
    except Exception:  # noqa: BLE001 - the harness has to say what it saw, whatever that was
        site.breach(f"the attack did not come to its end: {traceback.format_exc()}")
    try:
        site.close()
    except Exception:  # noqa: BLE001 - libvirt's, of a libvirtd that is gone, or of what cannot be cleaned away
        lost = traceback.format_exc()
        site.breach(f"the machine can be attacked no more: {lost}")
    return Outcome(site.breaches, site.told, time.monotonic() - began, lost)


def main() -> None:
    """Answer line by line, until there are no more."""
    answers = sys.stdout
    sys.stdout = sys.stderr
    ground = Ground(Path(sys.argv[1]))
    for line in sys.stdin:
        print(json.dumps(attack(ground, *json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
