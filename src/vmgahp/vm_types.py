"""The VM types: the hypervisor and the driver of each, and how HTCondor itself treats it."""

from __future__ import annotations


class VmType:
    """A row of `ROWS`.

    `family` is the hypervisor, empty for a type that may be any of several; `driver` is ``module:class``. With
    a type that is `htcondors` (one that HTCondor's own server has)

    - every server takes it for a well-formed word of START, whether or not it serves the type;
    - the startd probes as root, and any other type as its own user (``VMUniverseMgr::testVMGahp`` in HTCondor's
      ``src/condor_startd.V6/vmuniverse_mgr.cpp``);
    - the startd gives the kill mode the VM's name, for any other type the job's scratch directory;
    - the starter makes no periodic checkpoints (``VMProc::Ckpt`` in ``src/condor_starter.V6.1/vm_proc.cpp``):
      after a checkpoint the VM is always stopped.
    """

    __slots__ = ("driver", "family", "htcondors", "name")

    def __init__(self, name: str, family: str, driver: str, *, htcondors: bool = False) -> None:
        self.name = name
        self.family = family
        self.driver = "vmgahp.drivers." + driver
        self.htcondors = htcondors


ANY = "any"
"""The type of machines, and of jobs, that accept any hypervisor."""

ROWS = (
    VmType(ANY, "", "any:AnyDriver"),
    VmType("xen", "xen", "libvirt.xen:XenDriver", htcondors=True),
    VmType("kvm", "qemu", "libvirt.driver:LibvirtDriver", htcondors=True),
    VmType("libvirt", "qemu", "libvirt.driver:LibvirtDriver"),
    VmType("qemu", "qemu", "libvirt.driver:LibvirtDriver"),
    VmType("vmware", "vmrun", "vmrun:VmrunDriver"),
    VmType("vmrun", "vmrun", "vmrun:VmrunDriver"),
    VmType("vsphere", "vsphere", "vsphere:VsphereDriver"),
    VmType("script", "script", "script:ScriptDriver"),
)
"""The rows of all types with a driver of this package; a driver of another package has the type of its own name."""


def of(*families: str) -> tuple[str, ...]:
    """Return the types of some families, in the order of the table."""
    return tuple(row.name for row in ROWS if row.family in families)


SIMULATED = "simulated"
"""The type of a hypervisor in memory, for tests: a machine has it only if `SIMULATED_SWITCH` is in the daemon's
environment, and HTCondor never sets that."""
SIMULATED_SWITCH = "VMGAHP_SIMULATED"

DRIVERS = {row.name: row.driver for row in ROWS}
HTCONDORS = tuple(row.name for row in ROWS if row.htcondors)

QEMU, XEN, VMRUN, VSPHERE, SCRIPT = of("qemu"), of("xen"), of("vmrun"), of("vsphere"), of("script")
SURVEYORS = dict.fromkeys(QEMU, "vmgahp.drivers.libvirt.survey:LibvirtSurveyor")
"""The classes that survey a machine for a type without the rest of its driver, which a probe has no time to import."""
LIBVIRT = (*QEMU, *XEN)
"""The types whose VMs libvirt runs. Only those of QEMU have KVM, and a process with a user of its own."""
VMWARE = (*VMRUN, *VSPHERE)
