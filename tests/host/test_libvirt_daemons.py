"""Which of libvirt's daemons a machine has, by its programs and its sockets."""

import socket
from pathlib import Path

import pytest

from vmgahp.host import libvirt_daemons


def machine(root: Path, *paths: str) -> str:
    """A machine of empty files; a short name is that of a program, or of a socket."""
    for path in paths:
        place = root / ("run/libvirt" if path.endswith("-sock") else "usr/sbin") / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.touch()
    return str(root)


@pytest.mark.parametrize(
    ("there", "of_qemu", "of_networks"),
    [
        ((), "libvirtd", "libvirtd"),
        (("libvirtd", "libvirt-sock"), "libvirtd", "libvirtd"),
        (("virtqemud", "virtqemud-sock"), "virtqemud", "virtnetworkd"),
        (("virtqemud", "virtproxyd", "libvirt-sock"), "virtqemud", "virtnetworkd"),
        (("libvirtd", "virtqemud"), "virtqemud", "virtnetworkd"),
        (("libvirtd", "virtqemud", "libvirt-sock"), "libvirtd", "libvirtd"),
        (("libvirtd", "virtqemud", "libvirt-sock", "virtqemud-sock"), "virtqemud", "virtnetworkd"),
    ],
)
def test_the_daemons_that_clients_reach(tmp_path: Path, there: tuple[str, ...], of_qemu: str, of_networks: str) -> None:
    root = machine(tmp_path, *there)
    assert libvirt_daemons.of_qemu(root) == of_qemu
    assert libvirt_daemons.of_networks(root) == of_networks


def test_a_daemon_is_woken_and_nobody_waits_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By that systemd starts one; here nobody ever answers."""
    machine(tmp_path, "virtqemud")
    (tmp_path / "run/libvirt").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)  # a socket's path is short
    with socket.socket(socket.AF_UNIX) as listener:
        listener.settimeout(30)
        listener.bind("run/libvirt/virtqemud-sock")
        listener.listen(1)
        libvirt_daemons.wake(".")
        listener.accept()[0].close()
    libvirt_daemons.wake(".")  # where nobody listens, nobody is woken
