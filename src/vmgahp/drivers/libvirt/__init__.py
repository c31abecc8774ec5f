"""libvirt: KVM, plain QEMU, and what else libvirt knows. `driver` starts VMs, `machine` is one of them,
`connection` is the way to the daemon, `faults` says whose fault an error of libvirt is."""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from vmgahp.drivers.libvirt.driver import LibvirtDriver

__all__ = ["LibvirtDriver"]


def __getattr__(name: str) -> object:
    """The driver, when somebody asks for it: a server does without most of this package once its VM runs."""
    if name != "LibvirtDriver":
        raise AttributeError(name)
    from vmgahp.drivers.libvirt.driver import LibvirtDriver

    return LibvirtDriver
