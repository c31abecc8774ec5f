"""The libvirt that serves the jobs of a VM type, and a connection to it."""

from __future__ import annotations

import os
from collections.abc import Callable

from vmgahp.config import Settings
from vmgahp.drivers.libvirt.connection import LibvirtConnection

SYSTEM_URI, SESSION_URI = "qemu:///system", "qemu:///session"


def connection_for(settings: Settings, log: Callable[[str], None], usual: str = "") -> LibvirtConnection:
    """Return a connection for VM_LIBVIRT_URI, or else `usual`, by default this user's QEMU. It is not opened yet."""
    uri = settings.string("VM_LIBVIRT_URI") or usual or (SYSTEM_URI if os.getuid() == 0 else SESSION_URI)
    read_only = uri == SESSION_URI and _probing_for_a_startd()
    return LibvirtConnection(SYSTEM_URI if read_only else uri, log, read_only=read_only)


def _probing_for_a_startd() -> bool:
    """Return True if root's startd runs this as its own user.

    It does so for the probe of every VM type but kvm and xen (``VMUniverseMgr::testVMGahp`` in HTCondor's
    ``src/condor_startd.V6/vmuniverse_mgr.cpp``), although the jobs will run as root.
    """
    try:
        with open(f"/proc/{os.getppid()}/comm") as file:
            return os.getuid() != 0 and file.read().strip() == "condor_startd"
    except OSError:
        return False
