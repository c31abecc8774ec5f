"""Devices of the node that HTCondor assigns to jobs: their guests have them, no others, and the node has them back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from tests.lab import linux_guest
from tests.lab.node import PORTS, Node, NodeJob
from tests.system.node.steps import TIME, assert_confined, settle

pytestmark = pytest.mark.node

DEVICES = {"drive": "0x1b36 0x0010", "card": "0x1af4 0x1041", "board": "0x1234 0x11e8"}
"""Resources of the node, with the PCI device's vendor and model: an NVMe disk, a network card, QEMU's edu board."""
SETTINGS = {"VM_DEVICES": ",".join(DEVICES)}
MARK, REPLY = "the node's disk", "written by a guest"
CONFIG = "/etc/condor/config.d/20-devices.config"
_LIST = f"""{linux_guest.BEGIN}
for device in /sys/bus/pci/devices/*; do echo "has $(cat "$device/vendor") $(cat "$device/device")"; done
"""
_USE_DRIVE = f"""{_LIST}
for second in 1 2 3 4 5 6 7 8 9 10; do [ -b /dev/nvme0n1 ] || sleep 1; done
echo "read $(head -n 1 /dev/nvme0n1)"
echo '{REPLY}' | dd of=/dev/nvme0n1 conv=fsync 2>/dev/null
echo written
"""
# The board answers a word with its complement (docs/specs/edu.rst of QEMU), and the network beyond the card a ping.
_USE_CARD_AND_BOARD = f"""{_LIST}
for device in /sys/bus/pci/devices/*; do
    [ "$(cat "$device/device")" = 0x11e8 ] || continue
    echo 1 >"$device/enable"
    read -r begin _ <"$device/resource"
    devmem $((begin + 4)) 32 0x12345678
    echo "the board says $(devmem $((begin + 4)) 32)"
done
for second in 1 2 3 4 5 6 7 8 9 10; do [ -e /sys/class/net/eth0 ] || sleep 1; done
ip address add 10.0.9.15/24 dev eth0
ip link set eth0 up
ping -c 1 -w 20 10.0.9.2 >/dev/null && echo "the card's network answers"
"""


class Assigned:
    """The node with devices for jobs: a disk drive, a network card, and a board without a driver."""

    def __init__(self, node: Node, place: Path) -> None:
        self.node = node
        self.image = place / "drive.raw"
        self.image.write_bytes(f"{MARK}\n".encode().ljust(1 << 20, b"\0"))
        node.add_disk("drive", self.image)
        node.add_network("beyond", "10.0.9.0/24")
        card = {"netdev": "beyond", "romfile": "", "iommu_platform": True, "disable-legacy": "on"}
        plugs: list[tuple[str, dict[str, object]]]
        plugs = [("nvme", {"drive": "drive", "serial": "seven"}), ("virtio-net-pci", {**card}), ("edu", {})]
        self.addresses = {
            name: node.plug(port, driver, **words)
            for name, port, (driver, words) in zip(DEVICES, PORTS, plugs, strict=True)
        }
        self._usual = self.drivers()  # there is none for the board
        lines = (f"MACHINE_RESOURCE_{name} = {address}\n" for name, address in self.addresses.items())
        node.write(CONFIG, "".join(lines).encode())

    def submit(self, name: str, resources: Sequence[str], script: str, modules: Sequence[str]) -> NodeJob:
        """Submit a job that asks for resources, whose guest does what `script` says."""

        def files(home: Path) -> None:
            linux_guest.make_disk(home / "guest.img", script, modules=modules)

        words = "".join(f"request_{resource} = 1\n" for resource in resources)
        return self.node.submit(name, files, f"{words}vm_memory = {linux_guest.MEMORY_MIB}\n")

    def drivers(self) -> list[str]:
        return [self.node.driver(address) for address in self.addresses.values()]

    def are_back(self) -> bool:
        return self.drivers() == self._usual


@pytest.fixture(scope="module")
def assigned(node: Node, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Assigned]:
    if reason := linux_guest.why_no_disk():
        pytest.skip(reason)
    made = Assigned(node, tmp_path_factory.mktemp("drive"))
    assert made.drivers()[0] == "nvme"
    node.set_up("--network", "none", settings=SETTINGS)
    yield made
    node.run("rm", CONFIG)


def test_they_are_offered(assigned: Assigned) -> None:
    ad = assigned.node.wait_for_offer()
    assert sorted(ad["VM_kvm_ATTR_devices"].split(",")) == sorted(DEVICES)


def ended(assigned: Assigned, job: NodeJob, *resources: str) -> list[str]:
    """Wait for the end of a job; the lines of its console, whose guest had those devices and none of the others."""
    assert_confined(assigned.node, job)
    job.wait_for_event("terminated", 2 * TIME)
    lines = job.file("vm_console.log").splitlines()
    assert {name: lines.count(f"has {kind}") for name, kind in DEVICES.items()} == {
        name: int(name in resources) for name in DEVICES
    }
    assigned.node.wait_until("the node to have them back", assigned.are_back, TIME)
    assert assigned.node.denied() == []
    return lines


def test_a_guest_uses_the_drive_that_is_assigned_and_has_nothing_else(assigned: Assigned) -> None:
    job = assigned.submit("drive", ["drive"], f"{_USE_DRIVE}poweroff -f\n", linux_guest.NVME)
    lines = ended(assigned, job, "drive")
    assert f"read {MARK}" in lines
    assert "written" in lines
    assert assigned.image.read_bytes().startswith(REPLY.encode())


def test_a_guest_uses_a_card_and_a_board(assigned: Assigned) -> None:
    job = assigned.submit("both", ["card", "board"], f"{_USE_CARD_AND_BOARD}poweroff -f\n", ())
    lines = ended(assigned, job, "card", "board")
    assert "the board says 0xEDCBA987" in lines
    assert "the card's network answers" in lines


@pytest.mark.parametrize("killed", ["condor_vm-gahp -f", "qemu-system-x86_64 -name", "libvirtd"])
def test_whatever_dies_the_node_has_them_back(assigned: Assigned, killed: str) -> None:
    node = assigned.node
    script = f"{_LIST}while :; do sleep 60; done\n"
    job = assigned.submit(f"killed-{killed.split()[0]}", ["drive"], script, ())
    settle(node, job)  # a starter whose server dies in a START takes the machine out of service
    assert assigned.drivers()[0] == "vfio-pci"
    node.run("pkill", "-KILL", "-f", killed)
    job.command("condor_rm")
    node.wait_until("its QEMU to go", lambda: not job.confinement(), TIME)
    node.wait_until("the node to have them back", assigned.are_back, TIME)
