"""libvirt's daemons on this machine: libvirtd for everything, or virtqemud, virtnetworkd and others.

Enterprise Linux 9, Fedora and SUSE have one for each of libvirt's drivers. A client connects to virtqemud there, which
forwards calls about networks to virtnetworkd, and waits for the answer.
"""

import os
import socket

ALL, QEMU, NETWORKS = "libvirtd", "virtqemud", "virtnetworkd"

_PROGRAM_DIRECTORIES = ("/usr/sbin", "/usr/bin", "/sbin", "/usr/local/sbin")


def is_installed(name: str, root: str = "") -> bool:
    """Tell whether this machine has the daemon; `root` is put before all paths, for tests."""
    return any(os.path.exists(f"{root}{directory}/{name}") for directory in _PROGRAM_DIRECTORIES)


def socket_of(name: str) -> str:
    """Return the path at which a daemon listens."""
    return f"/run/libvirt/{'libvirt' if name == ALL else name}-sock"


def of_qemu(root: str = "") -> str:
    """Name the daemon that runs QEMU here; libvirtd if none is installed.

    If both are, libvirt's clients use the socket of virtqemud if it exists, and else that of libvirtd
    (``remoteGetUNIXSocket`` in libvirt's ``src/remote/remote_sockets.c``).
    """
    if not is_installed(QEMU, root):
        return ALL
    takes_all = os.path.exists(root + socket_of(ALL)) and not os.path.exists(root + socket_of(QEMU))
    return ALL if takes_all and is_installed(ALL, root) else QEMU


def of_networks(root: str = "") -> str:
    """Name the daemon that has libvirt's networks here."""
    return NETWORKS if of_qemu(root) == QEMU else ALL


def wake(root: str = "") -> None:
    """Have systemd start the daemons that are started for their first client, without waiting for them."""
    for name in {of_qemu(root), of_networks(root)}:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as client:
            client.connect_ex(root + socket_of(name))
