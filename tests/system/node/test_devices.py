"""Devices of the node that HTCondor assigns to jobs: their guests have them, no others, and the node has them back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.lab import linux_guest
from tests.lab.node import PORTS, Node, NodeJob
from tests.system.node.steps import TIME, assert_confined, settle

pytestmark = pytest.mark.node

RESOURCE, SETTINGS = "drive", {"VM_DEVICES": "drive"}
MARK, REPLY = "the node's disk", "written by a guest"
WORDS = f"request_{RESOURCE} = 1\nvm_memory = {linux_guest.MEMORY_MIB}\n"
NVME, ETHERNET = "0x010802", "0x020000"
_LOOK = f"""{linux_guest.BEGIN}
for device in /sys/bus/pci/devices/*; do echo "has $(cat "$device/class")"; done
for second in 1 2 3 4 5 6 7 8 9 10; do [ -b /dev/nvme0n1 ] || sleep 1; done
echo "read $(head -n 1 /dev/nvme0n1)"
echo '{REPLY}' | dd of=/dev/nvme0n1 conv=fsync 2>/dev/null
echo written
"""


class Assigned:
    """The node with a disk drive for jobs, and a network card that is for nobody."""

    def __init__(self, node: Node, place: Path) -> None:
        self.node = node
        self.image = place / "drive.raw"
        self.image.write_bytes(f"{MARK}\n".encode().ljust(1 << 20, b"\0"))
        node.add_disk("drive", self.image)
        self.address = node.plug(PORTS[0], "nvme", drive="drive", serial="seven")
        self.other = node.plug(PORTS[1], "e1000e")
        node.write("/etc/condor/config.d/20-drive.config", f"MACHINE_RESOURCE_{RESOURCE} = {self.address}\n".encode())

    def submit(self, name: str, last: str) -> NodeJob:
        """Submit a job whose guest uses the drive, and does `last` then."""

        def files(home: Path) -> None:
            linux_guest.make_disk(home / "guest.img", f"{_LOOK}{last}\n", modules=linux_guest.NVME)

        return self.node.submit(name, files, WORDS)

    def is_back(self) -> bool:
        return self.node.driver(self.address) == "nvme"


@pytest.fixture(scope="module")
def assigned(node: Node, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Assigned]:
    if reason := linux_guest.why_no_disk():
        pytest.skip(reason)
    made = Assigned(node, tmp_path_factory.mktemp("drive"))
    node.set_up("--network", "none", settings=SETTINGS)
    yield made
    node.run("rm", "/etc/condor/config.d/20-drive.config")


def test_it_is_offered(assigned: Assigned) -> None:
    ad = assigned.node.wait_for_offer()
    assert ad.get("VM_kvm_ATTR_devices") == RESOURCE


def test_a_guest_uses_what_is_assigned_and_has_nothing_else(assigned: Assigned) -> None:
    job = assigned.submit("used", "poweroff -f")
    assert_confined(assigned.node, job)
    job.wait_for_event("terminated", TIME)
    lines = job.file("vm_console.log").splitlines()
    assert f"read {MARK}" in lines
    assert "written" in lines
    assert lines.count(f"has {NVME}") == 1
    assert f"has {ETHERNET}" not in lines
    assert assigned.image.read_bytes().startswith(REPLY.encode())
    assigned.node.wait_until("the node to have it back", assigned.is_back, TIME)
    assert assigned.node.denied() == []


@pytest.mark.parametrize("killed", ["condor_vm-gahp -f", "qemu-system-x86_64 -name", "libvirtd"])
def test_whatever_dies_the_node_has_it_back(assigned: Assigned, killed: str) -> None:
    node = assigned.node
    job = assigned.submit(f"killed-{killed.split()[0]}", "while :; do sleep 60; done")
    settle(node, job)  # a starter whose server dies in a START takes the machine out of service
    assert node.driver(assigned.address) == "vfio-pci"
    node.run("pkill", "-KILL", "-f", killed)
    job.command("condor_rm")
    node.wait_until("its QEMU to go", lambda: not job.confinement(), TIME)
    node.wait_until("the node to have it back", assigned.is_back, TIME)
