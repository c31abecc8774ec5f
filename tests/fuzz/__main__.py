"""``python -m tests.fuzz``: the fuzzer's command line; see ``scripts/fuzz``.

Each target has a process of its own, so that one that breaks, or never comes back, ends no other.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

from tests import REPOSITORY
from tests.fuzz import engines
from tests.fuzz.target import Target

PLACE = REPOSITORY / "build/fuzz"
"""What runs leave: what they said, what inputs they found worth keeping, and what broke something."""

GRACE = 3000.0
"""Seconds that a process has, beside its time, to load its code and to try the corpus: others may go before it."""


def _load() -> dict[str, Target]:
    from tests.fuzz.targets import TARGETS

    return TARGETS


def main() -> int:
    """The exit status: 0 where nothing broke."""
    parser = argparse.ArgumentParser(prog="scripts/fuzz", description="Fuzz what reads bytes of strangers.")
    parser.add_argument("targets", nargs="*", metavar="TARGET", help="all of them where none is named")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each target (60)")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="targets at once")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the first inputs; printed")
    parser.add_argument("--engine", choices=("atheris", "hypothesis"), help="atheris where it is installed")
    parser.add_argument("--list", action="store_true", help="only name the targets")
    parser.add_argument("--input", type=Path, metavar="FILE", help="try this input alone")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.engine = options.engine or ("atheris" if find_spec("atheris") else "hypothesis")
    targets = engines.instrumented(_load) if options.here and options.engine == "atheris" else _load()
    unknown = [name for name in options.targets if name not in targets]
    if unknown:
        parser.error(f"there is no target {unknown[0]}; there are {', '.join(targets)}")
    chosen = [targets[name] for name in options.targets or targets]
    if options.list:
        for target in chosen:
            print(f"{target.name:22} {(target.function.__doc__ or '').splitlines()[0]}")
        return 0
    if options.input:
        for target in chosen:
            target.run(options.input.read_bytes())
        return 0
    if options.here:
        return _fuzz(chosen[0], options)
    return _run_all(chosen, options)


def _fuzz(target: Target, options: argparse.Namespace) -> int:
    """One target in this process."""
    place = PLACE / target.name
    place.mkdir(parents=True, exist_ok=True)
    if options.engine == "atheris":
        engines.by_atheris(target, options.seconds, options.seed, place)
    else:
        print(f"stat::number_of_executed_units: {engines.by_hypothesis(target, options.seconds, options.seed, place)}")
    return 0


class _Run:
    """The process of one target."""

    def __init__(self, target: Target, options: argparse.Namespace) -> None:
        self.target = target
        self._place = PLACE / target.name
        self._place.mkdir(parents=True, exist_ok=True)
        self._before = set(self._place.iterdir())
        self._end = time.monotonic() + options.seconds + GRACE
        self._log = self._place / "log"
        words = [*("--seconds", str(options.seconds), "--seed", str(options.seed), "--engine", options.engine)]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.fuzz", "--here", target.name, *words],
                cwd=REPOSITORY,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,
            )

    def is_over(self) -> bool:
        """Whether it has ended; one whose time is over is killed."""
        if self.process.poll() is None and time.monotonic() > self._end:
            self.kill()
        return self.process.poll() is not None

    def kill(self) -> None:
        """End it and what it started."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def tell(self) -> bool:
        """Say what came of it; whether nothing broke."""
        said = self._log.read_text("utf-8", "replace")
        numbers = [line.split()[-1] for line in said.splitlines() if line.startswith("stat::number_of_executed_units")]
        good = self.process.returncode == 0
        print(
            f"{self.target.name:22} {numbers[-1] if numbers else '?':>9} inputs  {'ok' if good else 'BROKEN'}",
            flush=True,
        )
        if not good:
            print(f"    exit status {self.process.returncode}; the end of {self._log}:")
            print("".join(f"    | {line[:300]}\n" for line in said.splitlines()[-40:]), end="")
            for path in sorted(set(self._place.iterdir()) - self._before):
                if path.is_file() and path.name.partition("-")[0] in ("crash", "timeout", "oom", "leak"):
                    kept = f"tests/fuzz/corpus/{self.target.name}/"
                    print(f"    To see it again: scripts/fuzz {self.target.name} --input {path}")
                    print(f"    Once it is mended, keep it in {kept}.")
        return good


def _run_all(chosen: list[Target], options: argparse.Namespace) -> int:
    """Every target, some at once."""
    print(
        f"Fuzzing {len(chosen)} targets with {options.engine}, {options.seconds:g} s each, --seed {options.seed}",
        flush=True,
    )
    waiting, running, broken = list(chosen), [], []
    try:
        while waiting or running:
            while waiting and len(running) < max(1, options.jobs):
                running.append(_Run(waiting.pop(0), options))
            time.sleep(0.2)
            for run in [run for run in running if run.is_over()]:
                running.remove(run)
                if not run.tell():
                    broken.append(run.target.name)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it may come twice, to this process and to its group
        for run in running:
            run.kill()
    print(f"fuzzed {len(chosen)} targets: {'BROKEN: ' + ', '.join(broken) if broken else 'nothing broke'}")
    return 1 if broken else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
