"""The names of the firmwares, architectures and shares that a VM may have."""

BIOS, UEFI, UEFI_SECURE = "bios", "uefi", "uefi-secure"
FIRMWARES = (BIOS, UEFI, UEFI_SECURE)

X86, ARM = "x86_64", "aarch64"
ARCHES = {X86: X86, "amd64": X86, ARM: ARM, "arm64": ARM}
"""The architectures of guests, by all their names."""

UTC, LOCAL_TIME = "utc", "localtime"
CLOCKS = (UTC, LOCAL_TIME)
"""The times that the hardware clock of a guest can have."""

NO_SHARE, NINEP, VIRTIOFS = "none", "9p", "virtiofs"
SHARES = (NO_SHARE, NINEP, VIRTIOFS)
"""The values of VM_SHARE_SCRATCH."""
