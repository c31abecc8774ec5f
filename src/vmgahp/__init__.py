"""condor_vm-gahp: the daemon that runs HTCondor's VM universe jobs on libvirt."""

__version__ = "0+checkout"
"""In a package the version that packaging/version.py told when it was built; a clone in use has no one version."""

GREETING = b"$VMGahpVersion 0.0.1 May 1 2007 Condor\\ VMGAHP $"
"""What the server says first, and the answer to VERSION: the client compares nothing but the leading
``$``, and what it does not know it cannot trip over, so the reference's own text stands."""
