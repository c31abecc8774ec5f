"""Try every fault: ``python -m tests.faults``, as root.

--machines N      namespaces side by side
--only WORDS      the cases that have these words in them: an operation, a point, a fault
--random SECONDS  random sequences as well, for so long on each machine
--seed N          of the first of them
--write           put the tables into docs/explanation/reliability.md
"""

import argparse
import sys
import time

from tests.faults import matrix
from tests.faults.cases import Verdict, all_cases


def heard(verdict: Verdict) -> None:
    """Say what came of one."""
    print(matrix.in_words(verdict), flush=True)


def main() -> int:
    """Try all; the exit status is 1 where anything was lost."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults")
    parser.add_argument("--machines", type=int, default=matrix.MACHINES)
    parser.add_argument("--only", default="")
    parser.add_argument("--random", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    if not any(options.only in str(case) for case in all_cases()):
        parser.error(f"--only {options.only!r}: no case has these words in it, such as: {all_cases()[0]}")
    began = time.monotonic()
    found = matrix.try_matrix(options.machines, options.only, heard)
    seconds = time.monotonic() - began
    stories = []
    if options.random:
        stories = matrix.try_random(options.machines, options.seed, options.random, heard)
    text = matrix.tables(found, stories, seconds)
    print(text)
    if options.write:
        matrix.write_page(text)
    return int(any(verdict.lost for verdict in [*found, *stories]))


if __name__ == "__main__":
    sys.exit(main())
