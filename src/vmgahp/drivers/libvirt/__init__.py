"""libvirt: KVM, plain QEMU, and what else libvirt knows. `driver` starts VMs, `machine` is one of them,
`connection` is the way to the daemon, `faults` says whose fault an error of libvirt is."""

from vmgahp.drivers.libvirt.driver import LibvirtDriver

__all__ = ["LibvirtDriver"]
