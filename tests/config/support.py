"""HTCondor's tool as the tests of settings have it, and the types of their fixtures."""

from collections.abc import Callable
from pathlib import Path

Tool = Callable[[str], dict[str, str]]
Write = Callable[[str], Path]
Program = Callable[..., tuple[int, str, str]]

CONDOR = """
import sys
values = {values!r}
if "-dump" in sys.argv:
    for name, value in values.items():
        print(f"{{name}} = {{value}}\\n # at: /etc/condor/config.d/50-vm, line 9")
    sys.exit()
assert sys.argv[1:3] == ["-subsystem", "VM_GAHP"]
for name in sys.argv[3:]:
    if name in values:
        print(values[name])
    else:
        print("Not defined: " + name, file=sys.stderr)
sys.exit(1)
"""
"""A program that has `values`: it lists them, or answers those that it is asked for."""
