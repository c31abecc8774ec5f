"""condor_vm-gahp: the daemon that runs HTCondor's VM universe jobs on libvirt."""

__version__ = "0+checkout"
"""The package's version, which packaging/version.py writes at build time; a clone has no version of its own."""

PROTOCOL = "0.0.1"
"""The version of the GAHP protocol, which the startd publishes as VM_GAHP_VERSION."""

GREETING = b"$VMGahpVersion 0.0.1 May 1 2007 Condor\\ VMGAHP $"
"""The greeting of the server, which is also the answer to VERSION. The client checks only the leading ``$`` and might
not parse a different text, so this is the text of HTCondor's own server."""
