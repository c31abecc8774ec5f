"""The memory that a VM's QEMU needs beside that of its guest, by the domain that libvirt has made.

The need was measured (docs/explanation/memory.md); the limit here is higher, because a VM that reaches its limit is
killed.
"""

from __future__ import annotations

import os
from xml.etree import ElementTree as etree

LARGEST_TB_CACHE_MIB = 1024
"""The default size of QEMU's cache for code that TCG has translated; an eighth of the memory if that is less."""

_QEMU, _TCG, _A_CPU, _A_FIRMWARE = 128, 64, 8, 64
"""The MiB for QEMU itself, for TCG beside its cache, for each CPU, and for a firmware."""
_DEVICES = {"graphics": 32, "disk": 40, "interface": 48, "tpm": 16}
"""The MiB for each device; a disk has a cache of 32, and passt, which libvirt starts for an interface, is in the VM's
cgroup."""


def usual_need_mib(domain_type: str, cache_mib: int) -> int:
    """Return the MiB that QEMU may need beside its guest's memory, for one CPU, 1 GiB, a display and a disk."""
    return _need(domain_type, 1024, 1, _DEVICES["graphics"] + _DEVICES["disk"], cache_mib or _tcgs_own_mib())


def need_mib(domain: etree.Element) -> int:
    """Return the MiB that the QEMU of a live domain may need beside its guest's memory."""
    devices = sum(len(domain.findall(f"devices/{tag}")) * each for tag, each in _DEVICES.items())
    if domain.find("os/loader") is not None:
        devices += _A_FIRMWARE
    cpus = int(domain.findtext("vcpu") or 1)
    return _need(domain.get("type", ""), _mib(domain, "memory"), cpus, devices, tb_cache_mib(domain))


def tb_cache_mib(domain: etree.Element) -> int:
    """Return the MiB to which TCG's cache may grow."""
    return _mib(domain, "features/tcg/tb-cache") or _tcgs_own_mib()


def limit_mib(domain: etree.Element) -> int:
    """Return the limit for QEMU and its guest together, in MiB; 0 for a domain whose devices were not measured."""
    if any(domain.find(f"devices/{tag}") is not None for tag in ("hostdev", "memory", "shmem")):
        return 0
    return _mib(domain, "memory") + need_mib(domain)


def _need(domain_type: str, guest: int, cpus: int, devices: int, cache: int) -> int:
    need = _QEMU + cpus * _A_CPU + devices + guest // 256  # its page tables
    return need + _TCG + cache * 5 // 4 if domain_type == "qemu" else need


def _tcgs_own_mib() -> int:
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20
    return min(LARGEST_TB_CACHE_MIB, whole // 8)


def _mib(domain: etree.Element, path: str) -> int:
    from vmgahp.domain import compare  # of no use to a probe

    return compare.memory(domain.find(path)) >> 20
