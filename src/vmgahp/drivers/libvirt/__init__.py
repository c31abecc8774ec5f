"""The driver for libvirt: KVM, plain QEMU, and the other hypervisors that libvirt knows.

`driver` starts VMs, `machine` is one of them, `connection` connects to the daemon, and `faults` classifies errors of
libvirt.
"""
