"""The daemon, which asks at every point of a VM's life whether it may go on: ``launcher.py SOCKET ARGUMENT…``.

It is condor_vm-gahp and nothing else, but for two things:
`vmgahp.drivers.managed.reached` asks whoever listens at the socket, and waits for an answer or for the end of the
connection; and what waits for a hypervisor that does not answer waits less long, so that a day has room for hundreds of
faults.
"""

import importlib
import socket
import sys

SHORTER = {
    ("vmgahp.drivers.libvirt.link.connection", "KEEPALIVE_INTERVAL"): 1,
    ("vmgahp.drivers.libvirt.link.connection", "KEEPALIVE_COUNT"): 4,
    ("vmgahp.drivers.libvirt.link.connection", "RECONNECT_DEADLINE"): 5.0,
    ("vmgahp.drivers.libvirt.life.machine", "CALL_SECONDS"): 13.0,
    ("vmgahp.drivers.managed", "OVERRULE_SECONDS"): 12.0,
    ("vmgahp.daemon.server", "DESTROY_DEADLINE"): 15.0,
    ("vmgahp.protocol.session", "START_EXTRA"): 5.0,
    ("vmgahp.drivers.managed", "LEAST_LONG_SECONDS"): 10,
}
"""Module, constant: seconds, or what libvirt counts. libvirt itself takes ten to destroy a QEMU that hangs."""


def ask(path: str, point: str) -> None:
    """Say that a life has come to this point, and wait for leave."""
    try:
        with socket.socket(socket.AF_UNIX) as asked:
            asked.connect(path)
            asked.sendall(point.encode() + b"\n")
            asked.recv(1)
    except OSError as error:
        print(f"{point} passes unheld: {error}", file=sys.stderr)


def main(path: str, arguments: list[str]) -> int:
    """Run the daemon; its exit status."""
    for (module, name), value in SHORTER.items():
        setattr(importlib.import_module(module), name, value)
    managed = importlib.import_module("vmgahp.drivers.managed")
    managed.reached = lambda point: ask(path, point)  # type: ignore[attr-defined]
    from vmgahp import cli

    return cli.daemon(["condor_vm-gahp", *arguments])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
