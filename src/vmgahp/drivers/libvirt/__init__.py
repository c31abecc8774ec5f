"""The driver for libvirt: KVM, plain QEMU, and the other hypervisors that libvirt knows.

`driver` starts VMs, `machine` is one of them, `connection` connects to the daemon, and `faults` classifies errors of
libvirt.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from vmgahp.drivers.libvirt.driver import LibvirtDriver

__all__ = ["LibvirtDriver"]


def __getattr__(name: str) -> object:
    """Import the driver on first use: a server needs little of this package once its VM runs."""
    if name != "LibvirtDriver":
        raise AttributeError(name)
    from vmgahp.drivers.libvirt.driver import LibvirtDriver

    return LibvirtDriver
