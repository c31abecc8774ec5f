"""Processes of this machine, as tests look at them, and the test's own."""

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

_COLLAPSE = 25
"""MADV_COLLAPSE, of Linux 6.1 and later."""

_HUGE = 2 << 20


def descriptors() -> Iterator[Path]:
    """The open descriptors of all processes. Path.glob() would fail at one that ends just then."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            yield from [process / "fd" / name for name in os.listdir(process / "fd")]


def gather_pages() -> None:
    """Move this process's own memory into huge pages, where the kernel does that, so that its forks are cheap.

    Much of what is tested forks, to act as the job's user, of a server of ten megabytes. A worker of pytest has four
    hundred, whose hundred thousand pages the kernel copies entry by entry at each fork: a third of all that the tests
    computed. In huge pages they are a few hundred entries.
    """
    madvise = ctypes.CDLL(None).madvise
    with open("/proc/self/maps") as file:
        lines = file.read().splitlines()
    for place, mode, *of_file in (line.split(maxsplit=5) for line in lines):
        begin, end = (int(address, 16) for address in place.split("-"))
        first = -(-begin // _HUGE) * _HUGE
        length = end // _HUGE * _HUGE - first
        if mode == "rw-p" and of_file[3:] in ([], ["[heap]"]) and length > 0:
            madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), _COLLAPSE)
