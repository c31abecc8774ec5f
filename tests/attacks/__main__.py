"""Try attacks: ``python -m tests.attacks``, as root.

--only WORDS  the rows that have these words in their surface and name
--mode MODE   only with QEMU as this user: job, libvirt or none
"""

import argparse
import sys
import tempfile

from tests.attacks.support import SURFACES, Battleground, Mode, rows


def main() -> int:
    """Say what came of each; the exit status is 1 where one was not stopped."""
    parser = argparse.ArgumentParser(prog="python -m tests.attacks")
    parser.add_argument("--only", default="", metavar="WORDS", help="the rows with these words in surface and name")
    modes = [mode.name.lower() for mode in Mode]
    parser.add_argument("--mode", choices=modes, default="", help="only with QEMU as this user")
    options = parser.parse_args()
    chosen = [
        (surface, row, mode)
        for surface in SURFACES
        for row in rows(surface)
        for mode in row.modes
        if options.only in f"{surface} {row.name}" and options.mode in ("", mode.name.lower())
    ]
    if not chosen:
        parser.error(f"no row has the words of --only {options.only}")
    breached = False
    with tempfile.TemporaryDirectory(prefix="vmgahp-attacks.") as directory, Battleground(directory) as ground:
        for surface, row, mode in chosen:
            outcome = ground.attack(surface, row.name, mode.name)
            word = "BREACHED" if outcome.breaches else "stopped"
            print(f"{word:8} {outcome.seconds:5.1f} s  {surface}: {row.name}, {mode}")
            print("         | " + "\n".join(outcome.told).replace("\n", "\n         | "), flush=True)
            breached |= bool(outcome.breaches)
    return int(breached)


if __name__ == "__main__":
    sys.exit(main())
