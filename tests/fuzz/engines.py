"""Who thinks up the inputs: atheris, which sees what of the code an input reaches, or hypothesis, which only guesses.

Both begin with the corpus. A seed makes hypothesis' inputs the same again; an input that breaks something is kept in
a file, which is all that it takes to see it again.
"""

import hashlib
import re
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import hypothesis
from hypothesis import strategies

from tests.fuzz.target import CORPUS, NUMBERS, ODD, Target

LONGEST = 64 << 10
"""Bytes of an input."""

_EXAMPLES = 1000
"""Of one round of hypothesis."""

_TOKEN = re.compile(rb"[A-Za-z0-9_.-]+")
_CHANGES = 14
"""Kinds of them; the last seven are one."""


def _change(data: bytes, other: bytes, changes: list[tuple[int, int, int, bytes]]) -> bytes:
    """An input made of a sample, and of `other` ones, by what is done at some places."""
    made = bytearray(data)
    for how, at, size, word in changes:
        place = at % (len(made) + 1)
        if how == 0:
            made[place:place] = word
        elif how == 1:
            made[place : place + len(word)] = word
        elif how == 2:
            del made[place : place + size % 64]
        elif how == 3 and made:
            made[place % len(made)] ^= 1 << size % 8
        elif how == 4:
            piece = made[place : place + size % 256]
            often = 1 + size % 3 if size % 16 else LONGEST // (len(piece) + 1)  # what is quadratic shows in the long
            made[place:place] = piece * often
        elif how == 5:
            start = size % (len(other) + 1)
            made[place:] = other[start:]
        elif how == 6:
            end = made.find(b"\n", place)
            made[place : end if end >= 0 else len(made)] = word
        elif how >= 7:  # most of what is read has words and numbers in it
            found = _TOKEN.search(made, place)
            if found and found[0].isdigit() and size % 2:
                word = NUMBERS[size // 2 % len(NUMBERS)]
            if found:
                made[found.start() : found.end()] = word
    return bytes(made[:LONGEST])


def inputs(target: Target) -> strategies.SearchStrategy[bytes]:
    """Samples with changes: words put in, bits turned, pieces cut out, repeated, or taken from another sample."""
    samples = [path.read_bytes() for path in target.samples()]
    words = strategies.sampled_from(ODD) | strategies.sampled_from(target.words()) | strategies.binary(max_size=8)
    numbers = strategies.integers(0, LONGEST)
    change = strategies.tuples(strategies.integers(0, _CHANGES - 1), numbers, numbers, words)
    sample = strategies.sampled_from(samples)
    return strategies.builds(_change, sample, sample, strategies.lists(change, max_size=8))


def once(target: Target, examples: int) -> None:
    """A few inputs, always the same."""
    settings = hypothesis.settings(max_examples=examples, deadline=None, database=None, derandomize=True)
    settings(hypothesis.given(inputs(target))(target.run))()


def by_hypothesis(target: Target, seconds: float, seed: int, place: Path) -> int:
    """Rounds until the time is over; how many inputs were tried. Raises what an input has raised."""
    end = time.monotonic() + seconds
    tried = 0
    broken = b""

    def run(data: bytes) -> None:
        nonlocal tried, broken
        if time.monotonic() < end:
            tried += 1
            broken = data
            target.run(data)

    settings = hypothesis.settings(
        max_examples=_EXAMPLES,
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=(hypothesis.Phase.generate, hypothesis.Phase.shrink),
    )
    while time.monotonic() < end:
        print(f"round with --seed {seed}", flush=True)
        try:
            hypothesis.seed(seed)(settings(hypothesis.given(inputs(target))(run)))()
        except BaseException:
            (place / f"crash-{hashlib.sha256(broken).hexdigest()[:16]}").write_bytes(broken)
            raise
        seed += 1
    return tried


def by_atheris(target: Target, seconds: float, seed: int, place: Path) -> None:
    """Runs until the time is over, and ends the process: libFuzzer counts, and keeps what breaks something."""
    import atheris

    found = place / "corpus"
    found.mkdir(exist_ok=True)
    words = place / "words"
    with words.open("w") as file:
        for word in filter(None, (*ODD, *target.words())):
            quoted = "".join(f"\\x{byte:02x}" for byte in word[:60])
            file.write(f'"{quoted}"\n')
    options = [
        f"-max_total_time={seconds:.0f}",
        f"-seed={seed}",
        f"-dict={words}",
        f"-artifact_prefix={place}/",
        f"-max_len={LONGEST}",
        *("-timeout=300", "-rss_limit_mb=2048", "-print_final_stats=1", "-verbosity=0"),
    ]
    samples, known = [path.read_bytes() for path in target.samples()], target.words()

    def mutate(data: bytes, longest: int, seed: int) -> bytes:
        random = Random(seed)
        if random.random() < 0.7:
            return bytes(atheris.Mutate(data, longest))
        numbers = [(random.randrange(_CHANGES), random.randrange(LONGEST), random.randrange(LONGEST)) for _ in range(4)]
        changes = [
            (*three, random.choice(random.choice((ODD, known)))) for three in numbers[: random.choice((1, 1, 2, 4))]
        ]
        return _change(data, random.choice(samples), changes)[:longest]

    words_of_libfuzzer = ["fuzz", *options, str(found), str(CORPUS / target.name)]
    atheris.Setup(words_of_libfuzzer, target.run, custom_mutator=mutate)
    atheris.Fuzz()


def instrumented(load: Callable[[], dict[str, Target]]) -> dict[str, Target]:
    """The targets, loaded such that atheris sees what they reach."""
    import atheris

    with atheris.instrument_imports(include=["vmgahp"], enable_loader_override=False):
        return load()
