"""The driver for libvirt: KVM, plain QEMU, Xen, and the other hypervisors that libvirt knows.

`driver` is the story of a START. Below it are rooms, each of which imports only those after it: `program` (a job's
program in its guest) and `survey` (the probe), `life` (a VM from its start to its end), `start` (from a job to a
domain), `link` (libvirt). `xen` is the same driver for guests of libxl.
"""
