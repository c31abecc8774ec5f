"""The entry point of `python -m vmgahp`: the daemon, as its guardian starts it again in kill mode."""

import sys

from vmgahp.cli import daemon

sys.exit(daemon(sys.argv))
