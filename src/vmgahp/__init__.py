"""condor_vm-gahp: the daemon that runs HTCondor's VM universe jobs on libvirt."""

__version__ = "0.1.0"
