"""TCP ports for what tests and labs start."""

import random
import socket
from contextlib import suppress


def free_port() -> int:
    """A port that nobody has, and that no connection comes by: those begin at 32768 (``ip_local_port_range``)."""
    while True:
        port = random.randrange(10000, 32768)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
