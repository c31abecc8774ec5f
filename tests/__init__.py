"""The tests, by the streets of ``src/vmgahp``; `tests.lab` has the real parts, `tests.system` the pool and Xen."""

from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
