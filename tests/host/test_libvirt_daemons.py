"""Which of libvirt's daemons a machine has, by its programs and its sockets."""

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
def test_the_daemons_that_libvirts_clients_reach_are_named(
    tmp_path: Path, there: tuple[str, ...], of_qemu: str, of_networks: str
) -> None:
    root = machine(tmp_path, *there)
    assert libvirt_daemons.of_qemu(root) == of_qemu
    assert libvirt_daemons.of_networks(root) == of_networks
