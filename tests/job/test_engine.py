"""The process of HTCondor's ClassAd engine."""

import os
import socket
import subprocess
import sys

import pytest


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_resolver_that_does_not_answer_is_not_asked_for_this_machines_name() -> None:
    """HTCondor's module asks for it, and again for a minute, so the process has a name that needs no resolver."""
    name = socket.gethostname()
    script = (
        "import socket, sys\n"
        "from vmgahp.job import engine\n"
        "sys.modules['classad2'] = None  # which would look it up\n"
        "assert engine.main([]) != 0\n"
        "socket.inet_aton(socket.gethostname())\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
    assert socket.gethostname() == name
