"""The devices of a machine, in a sysfs of the tests' own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lab.sysfs import DISK, GPU, GPU_SOUND, LONE, NETWORK, PARTS, VGPU, Sysfs
from vmgahp.errors import MachineFault
from vmgahp.host import pci


@pytest.fixture
def sysfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sysfs:
    return Sysfs(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("0000:3b:00.0", "0000:3b:00.0"),
        ("00000000:3B:00.0", "0000:3b:00.0"),
        ("3B:00.1", "0000:3b:00.1"),
        (VGPU.upper(), VGPU),
        ("GPU-c4a646d7", ""),
        ("0000:3b:00.8", ""),
        ("0000:3b:20.0", ""),
        ("../3b:00.0", ""),
        ("10000", ""),
    ],
)
def test_addresses(text: str, address: str) -> None:
    assert pci.address_of(text) == address


def test_a_card_is_given_with_all_of_its_functions(sysfs: Sysfs) -> None:
    sysfs.add(GPU, "0x030000", group=[GPU, GPU_SOUND, "0000:00:01.0"], driver="nvidia")
    sysfs.add(GPU_SOUND, "0x040300", group=[GPU, GPU_SOUND, "0000:00:01.0"])
    sysfs.add("0000:00:01.0", "0x060400", group=[])
    found = pci.whole([pci.look(GPU)])
    assert [device.address for device in found] == [GPU, GPU_SOUND]
    for device in found:
        pci.require_free(device)


def test_a_group_with_a_strangers_device_is_not_divided(sysfs: Sysfs) -> None:
    for address in (GPU, LONE):
        sysfs.add(address, "0x030000", group=[GPU, LONE])
    with pytest.raises(MachineFault, match=f"{GPU} shares its IOMMU group with {LONE}"):
        pci.whole([pci.look(GPU)])
    assert len(pci.whole([pci.look(GPU), pci.look(LONE)])) == 2


@pytest.mark.parametrize(
    ("tables", "why"), [([], "firmware offers no IOMMU"), (["DMAR"], "kernel does not use the IOMMU")]
)
def test_without_groups_the_first_reason_is_told(sysfs: Sysfs, tables: list[str], why: str) -> None:
    sysfs.add(LONE, "0x00ff00", group=None)
    for table in tables:
        sysfs.write(f"firmware/acpi/tables/{table}", "")
    with pytest.raises(MachineFault, match=why):
        pci.look(LONE)


@pytest.mark.parametrize("address", [LONE, VGPU])
def test_a_device_that_is_not_there(sysfs: Sysfs, address: str) -> None:
    with pytest.raises(MachineFault, match=address):
        pci.look(address)


def test_a_bridge_is_given_to_nobody(sysfs: Sysfs) -> None:
    sysfs.add(LONE, "0x060400", group=[LONE])
    with pytest.raises(MachineFault, match="bridge"):
        pci.look(LONE)


def test_a_network_card_that_is_up_is_the_machines(sysfs: Sysfs) -> None:
    sysfs.add(NETWORK, "0x020000", group=[NETWORK], driver="e1000e")
    sysfs.interface(NETWORK, "eth7", flags="0x1002")
    pci.require_free(pci.look(NETWORK))
    sysfs.interface(NETWORK, "eth7", flags="0x1003")
    with pytest.raises(MachineFault, match="eth7 is up"):
        pci.require_free(pci.look(NETWORK))


def test_a_disk_that_is_in_use_is_the_machines(sysfs: Sysfs) -> None:
    sysfs.add(DISK, "0x010802", group=[DISK], driver="nvme")
    sysfs.disk(DISK, "nvme7n1")
    partition = sysfs.disk(DISK, "nvme7n1p1")
    pci.require_free(pci.look(DISK))
    sysfs.busy.add(partition)
    with pytest.raises(MachineFault, match=r"nvme7n1p1 is in use.*Device or resource busy"):
        pci.require_free(pci.look(DISK))
    sysfs.busy.clear()
    partition.unlink()
    with pytest.raises(MachineFault, match=r"nvme7n1p1 is in use.*No such file"):
        pci.require_free(pci.look(DISK))


def test_the_display_that_has_booted_is_the_machines(sysfs: Sysfs) -> None:
    sysfs.add(GPU, "0x030000", group=[GPU], driver="i915", boot_vga="1")
    with pytest.raises(MachineFault, match="booted with this display"):
        pci.require_free(pci.look(GPU))
    sysfs.add(LONE, "0x030200", group=[LONE], driver="nvidia")
    assert pci.displays() == [LONE]


def test_what_vfio_has_already_is_free(sysfs: Sysfs) -> None:
    sysfs.add(GPU, "0x030000", group=[GPU], driver="vfio-pci", boot_vga="1")
    pci.require_free(pci.look(GPU))


def test_a_part_of_a_gpu(sysfs: Sysfs) -> None:
    sysfs.write(f"bus/mdev/devices/{VGPU}/{PARTS}", "")
    assert [device.address for device in pci.whole([pci.look(VGPU)])] == [VGPU]
    pci.require_free(pci.look(VGPU))
