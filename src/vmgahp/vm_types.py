"""The VM types: the hypervisor behind each, the driver for it, and what HTCondor itself does with it."""


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
"""The type of machines, and of jobs, that leave open which hypervisor runs a VM."""

ROWS = (
    VmType(ANY, "", "any:AnyDriver"),
    VmType("xen", "xen", "libvirt.xen:XenDriver", htcondors=True),
    VmType("kvm", "qemu", "libvirt:LibvirtDriver", htcondors=True),
    VmType("libvirt", "qemu", "libvirt:LibvirtDriver"),
    VmType("qemu", "qemu", "libvirt:LibvirtDriver"),
    VmType("vmware", "vmrun", "vmrun:VmrunDriver"),
    VmType("vmrun", "vmrun", "vmrun:VmrunDriver"),
    VmType("vsphere", "vsphere", "vsphere:VsphereDriver"),
    VmType("script", "script", "script:ScriptDriver"),
)
"""Every type with a driver of this package; a driver of another package brings the type that its name is."""


def of(*families: str) -> "tuple[str, ...]":
    """The types of some families, in the order of the table."""
    return tuple(row.name for row in ROWS if row.family in families)


SIMULATED = "simulated"
"""A hypervisor in memory, for tests: no machine has it but where `SIMULATED_SWITCH`, which HTCondor never sets, is in
the daemon's environment."""
SIMULATED_SWITCH = "VMGAHP_SIMULATED"

DRIVERS = {row.name: row.driver for row in ROWS}
SERVED = dict.fromkeys(of("qemu"), "vmgahp.drivers.libvirt.served:ServedDriver")
"""Type -> the driver of a server, where that is another one: it leaves to helpers what is done but once."""
HTCONDORS = tuple(row.name for row in ROWS if row.htcondors)

QEMU, XEN, VMRUN, VSPHERE, SCRIPT = of("qemu"), of("xen"), of("vmrun"), of("vsphere"), of("script")
SURVEYORS = dict.fromkeys(QEMU, "vmgahp.drivers.libvirt.survey:LibvirtSurveyor")
"""Of the types whose drivers have a part that looks at a machine without the rest: ``module:class``."""
KILLERS = dict.fromkeys(QEMU, "vmgahp.drivers.libvirt.kill:LibvirtKiller")
"""The same of a part that kills a VM."""
LIBVIRT = (*QEMU, *XEN)
"""Types whose VMs libvirt runs. Only QEMU's have KVM, and a process with a user of its own."""
VMWARE = (*VMRUN, *VSPHERE)
