"""The devices of this machine that a VM can have, as sysfs shows them: PCI devices and mediated ones.

What a name means is in the kernel's ``Documentation/ABI/testing/sysfs-bus-pci``, ``sysfs-bus-vfio-mdev`` and
``sysfs-kernel-iommu_groups``.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Collection, Iterator
from contextlib import suppress
from typing import NamedTuple

from vmgahp.errors import MachineFault

SYSFS, DEV = "/sys", "/dev"
ACPI_TABLES = ("DMAR", "IVRS")
"""The tables by which a firmware describes its IOMMU: Intel's and AMD's."""

_PCI = re.compile(r"(?:([0-9a-f]{1,4}|0000[0-9a-f]{4}):)?([0-9a-f]{2}:[01][0-9a-f]\.[0-7])", re.ASCII | re.IGNORECASE)
_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.ASCII | re.IGNORECASE)
_BRIDGE, _DISPLAY = "0x0604", "0x03"
_VFIO = "vfio-pci"
_UP = 1
"""The flag of an interface that is up (``linux/if.h``)."""


def address_of(text: str) -> str:
    """Return a PCI address in sysfs's form, or the UUID of a mediated device; empty for any other text.

    condor_gpu_discovery writes addresses with four or eight digits of a domain, as CUDA and NVML do.
    """
    if found := _PCI.fullmatch(text.strip()):
        return f"{(found[1] or '')[-4:]:0>4}:{found[2]}".lower()
    return text.strip().lower() if _UUID.fullmatch(text.strip()) else ""


def is_mediated(address: str) -> bool:
    """Tell if an address is that of a mediated device, such as a part of a GPU (vGPU)."""
    return "." not in address


class PciDevice(NamedTuple):
    """A device of this machine."""

    address: str
    group: tuple[str, ...] = ()
    """The addresses of the PCI devices in its IOMMU group that are no bridges; empty for a mediated device."""

    def __str__(self) -> str:
        return self.address


def look(address: str) -> PciDevice:
    """Find a device. Raises `MachineFault` if it is not there, or is one that no VM can have."""
    if is_mediated(address):
        if not os.path.isdir(f"{SYSFS}/bus/mdev/devices/{address}"):
            raise MachineFault(f"This machine has no mediated device {address}.", "make it anew (mdevctl start).")
        return PciDevice(address)
    if not os.path.isdir(_place(address)):
        raise MachineFault(f"This machine has no PCI device {address}.", "see lspci -D.")
    if _read(address, "class").startswith(_BRIDGE):
        raise MachineFault(f"The PCI device {address} is a bridge, which no VM can have.", "name what is behind it.")
    try:
        members = sorted(os.listdir(f"{_place(address)}/iommu_group/devices"))
    except OSError:
        raise MachineFault(f"The PCI device {address} is in no IOMMU group: {why_no_iommu()}", HINT) from None
    return PciDevice(address, tuple(each for each in members if not _read(each, "class").startswith(_BRIDGE)))


HINT = "the section on devices of the machine in docs/how-to/devices.md has what is needed, in its order."


def why_no_iommu() -> str:
    """Return the reason why there are no IOMMU groups, as a sentence; empty if there are some."""
    with suppress(OSError):
        if os.listdir(f"{SYSFS}/kernel/iommu_groups"):
            return ""
    if not any(os.path.exists(f"{SYSFS}/firmware/acpi/tables/{table}") for table in ACPI_TABLES):
        return "the firmware offers no IOMMU (switch VT-d or AMD-Vi on in the BIOS)."
    return "the kernel does not use the IOMMU (put intel_iommu=on or amd_iommu=on on its command line)."


def whole(devices: Collection[PciDevice]) -> list[PciDevice]:
    """Return the devices and what belongs to them: the other functions of the same cards in their IOMMU groups.

    Raises `MachineFault` if a group has a device that is not to be given away, because the groups are the units that
    hardware can keep apart.
    """
    given = {device.address for device in devices}
    found = list(devices)
    for device in devices:
        cards = {address.rpartition(".")[0] for address in given if not is_mediated(address)}
        for other in device.group:
            if other in given:
                continue
            if other.rpartition(".")[0] not in cards:
                problem = f"{device} shares its IOMMU group with {other}, which is not assigned to the same job."
                raise MachineFault(problem, "give both as one resource, or put the card into another slot.")
            given.add(other)
            found.append(look(other))
    return found


def require_free(device: PciDevice) -> None:
    """Make sure that the machine itself does not use a device. Raises `MachineFault`."""
    if is_mediated(device.address) or _driver(device.address) in ("", _VFIO):
        return
    if use := next(_uses(device.address), ""):
        raise MachineFault(f"The machine itself uses {device}: {use}.", f"end that, or bind the device to {_VFIO}.")


def is_up(interface: str) -> bool:
    """Tell if a network interface, by its directory in sysfs, is up. Raises OSError."""
    with open(f"{interface}/flags") as file:
        return bool(int(file.read(), 16) & _UP)


def displays() -> list[str]:
    """List the GPUs of this machine: its display controllers but the one that it has booted with."""
    with suppress(OSError):
        listed = sorted(os.listdir(f"{SYSFS}/bus/pci/devices"))
        return [each for each in listed if _read(each, "class").startswith(_DISPLAY) and _read(each, "boot_vga") != "1"]
    return []


def _uses(address: str) -> Iterator[str]:
    if _read(address, "class").startswith(_DISPLAY) and _read(address, "boot_vga") == "1":
        yield "it has booted with this display"
    here = os.path.join(os.path.realpath(_place(address)), "")
    for name in _below("net", here):
        if is_up(f"{SYSFS}/class/net/{name}"):
            yield f"its network interface {name} is up"
    for name in _below("block", here):
        # A block device that is mounted, or a part of another one, is held exclusively (open(2)).
        try:
            os.close(os.open(f"{DEV}/{name.replace('!', '/')}", os.O_RDONLY | os.O_EXCL | os.O_CLOEXEC))
        except OSError as error:
            if error.errno != errno.ENOMEDIUM:
                yield f"its disk {name} is in use, or not to be seen ({error.strerror})"


def _below(kind: str, here: str) -> list[str]:
    """List the network interfaces or block devices of a device, and of what is attached to it."""
    place = f"{SYSFS}/class/{kind}"
    return [name for name in sorted(os.listdir(place)) if os.path.realpath(f"{place}/{name}").startswith(here)]


def _driver(address: str) -> str:
    with suppress(OSError):
        return os.path.basename(os.readlink(f"{_place(address)}/driver"))
    return ""


def _place(address: str) -> str:
    return f"{SYSFS}/bus/pci/devices/{address}"


def _read(address: str, name: str) -> str:
    with suppress(OSError), open(f"{_place(address)}/{name}") as file:
        return file.read().strip()
    return ""
