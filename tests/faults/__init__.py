"""Daemon, libvirtd, QEMU and disk fail at every step of a VM's life; what was lost is written down."""
