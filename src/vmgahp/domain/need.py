"""The memory that a VM's QEMU needs beside that of its guest.

The need was measured (docs/explanation/memory.md); the limit is higher, as a VM that reaches its limit is killed.
"""

from vmgahp.host import proc

LARGEST_TB_CACHE_MIB = 1024
"""The default size of QEMU's cache for code that TCG has translated; an eighth of the memory if that is less."""

_QEMU, _TCG, _A_CPU = 128, 64, 8
"""The MiB for QEMU itself, for TCG beside its cache, and for each CPU."""
DEVICES = {"graphics": 32, "disk": 40, "interface": 48, "tpm": 16, "hostdev": 64}
"""The MiB for each device; a disk has a cache of 32, and an interface may have passt, which is in the VM's cgroup."""


def usual_need_mib(domain_type: str, cache_mib: int) -> int:
    """Return the MiB that QEMU may need beside its guest's memory, for one CPU, 1 GiB, a display and a disk."""
    return need_mib(domain_type, 1024, 1, DEVICES["graphics"] + DEVICES["disk"], cache_mib or usual_cache_mib())


def need_mib(domain_type: str, guest: int, cpus: int, devices: int, cache: int) -> int:
    """Return the MiB that QEMU may need; the guest's memory, the need of its devices and TCG's cache are in MiB."""
    need = _QEMU + cpus * _A_CPU + devices + guest // 256  # its page tables
    return need + _TCG + cache * 5 // 4 if domain_type == "qemu" else need


def usual_cache_mib() -> int:
    """Return the MiB to which TCG's cache may grow by default."""
    return min(LARGEST_TB_CACHE_MIB, proc.physical_memory_mib() // 8)
