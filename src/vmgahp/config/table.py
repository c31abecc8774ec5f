"""The table of all settings that this daemon reads.

Add one here, and print ``config/vmgahp.conf.example`` again (``docs/_ext/example_file.py``); the syntax of each kind of
value is in `vmgahp.config`. HTCondor's settings for VMs that only its own daemons read are in
`vmgahp.config.check`.
"""

from __future__ import annotations

from collections.abc import Callable

from vmgahp.vm_types import LIBVIRT, QEMU, SCRIPT, VMRUN, VSPHERE, XEN

SHARE_DIRS, SHARE_DIR, CONDITION = "VM_SHARE_DIRS", "VM_SHARE_DIR_", "_IF"
"""The setting that names shared directories, the prefix of each directory's settings, the suffix of its condition."""

SERVER, STARTD, STARTER, PLUGIN = "this daemon", "startd", "starter", "image plugin"
"""The readers that a setting may have."""


class Setting:
    """A row of the table: a name, a kind of value, a default as written in a file, a meaning; then its columns.

    The kind is string, integer, bool, path, list, arguments, expression or size.
    """

    unit: str = ""
    ours: bool = True
    """True if it is this daemon's own setting, and not HTCondor's."""
    example: str = ""
    """The value in the example file, for a setting that must be set."""
    readers: tuple[str, ...] = (SERVER,)
    words: tuple[str, ...] = ()
    """The valid values, in upper or lower case; each word of a list must be one of them."""
    least: int = 0
    """The smallest valid number."""
    types: tuple[str, ...] = ()
    """The VM types whose drivers read it; empty: all."""
    needs: tuple[str, ...] = ()
    """The settings of which one must be set before anything reads this one."""
    fatal: bool = False
    """True if an unknown word fails every job; otherwise the default is used."""

    def __init__(self, name: str, kind: str, default: str, meaning: str, **columns: object) -> None:
        self.name, self.kind, self.default, self.meaning = name, kind, default, meaning
        vars(self).update(columns)


def _rows(**shared: object) -> Callable[..., Setting]:
    """Return a constructor of rows that share these columns; functools.partial would be imported for this alone."""
    return lambda *row, **columns: Setting(*row, **(shared | columns))  # type: ignore[arg-type]


_htcondor, _script, _vsphere = _rows(ours=False), _rows(types=SCRIPT), _rows(types=VSPHERE)

_ALL = (STARTD, STARTER, SERVER)
_NETWORKS = ("nat", "bridge", "user")
_IMAGE_FORMATS = ("raw", "sparse", "zstd", "lzop", "gzip", "bzip2", "xz")

# fmt: off
SETTINGS = (
    _htcondor("VM_TYPE", "string", "",
        "The VM type that this machine offers, such as kvm; any for all of VM_ANY_TYPES.",
        example="kvm", readers=(STARTD, SERVER)),
    _htcondor("VM_MEMORY", "integer", "0",
        "Memory of this machine for all VMs; must be set.", unit="MiB", example="1024"),
    _htcondor("VM_NETWORKING", "bool", "false", "Whether VMs may have a network.", readers=(STARTD, SERVER)),
    _htcondor("VM_NETWORKING_TYPE", "list", "",
        "The kinds of network on offer: nat, bridge, user.", words=_NETWORKS),
    _htcondor("VM_NETWORKING_DEFAULT_TYPE", "string", "",
        "The kind for a job that names none; empty: user where it is on offer, else nat.", words=_NETWORKS),
    _htcondor("VM_NETWORKING_BRIDGE_INTERFACE", "string", "", "The bridge for networks of type bridge."),
    _htcondor("VM_HARDWARE_VT", "bool", "false", "Whether to advertise hardware virtualization to jobs."),
    _htcondor("XEN_BOOTLOADER", "path", "",
        "The program that takes the kernel out of a Xen job's disk (xen_kernel = included), such as "
        "/usr/lib/xen-4.17/bin/pygrub; it reads the job's disk as root. Empty: such jobs are held.",
        types=XEN),
    _htcondor("XEN_ALLOW_HARDWARE_VT_SUSPEND", "bool", "false",
        "Whether Xen jobs with xen_kernel = vmx may be suspended to disk and checkpointed.", types=XEN),
    _htcondor("LIBVIRT_XML_SCRIPT", "path", "",
        "A program, run as root, that reads the job ad on standard input and writes the domain XML. Empty, "
        "or HTCondor's own libvirt_simple_script.awk: the daemon builds the XML itself.", types=LIBVIRT),
    _htcondor("LIBVIRT_XML_SCRIPT_ARGS", "arguments", "", "Arguments for LIBVIRT_XML_SCRIPT.", types=LIBVIRT),
    _htcondor("VM_GAHP_LOG", "path", "",
        "The log file, by its full path; empty or /dev/null: no log.", readers=_ALL),
    _htcondor("VM_GAHP_DEBUG", "string", "", "What to log; D_FULLDEBUG adds the details."),
    _htcondor("DEFAULT_DEBUG", "string", "",
        "Stands in for VM_GAHP_DEBUG where that is not set.", readers=_ALL),
    _htcondor("ALL_DEBUG", "string", "", "Added to VM_GAHP_DEBUG.", readers=_ALL),
    _htcondor("MAX_VM_GAHP_LOG", "size", "10 Mb",
        "The log is renamed to .old when it grows to this; 0: never."),
    _htcondor("VM_GAHP_REQ_TIMEOUT", "integer", "300",
        "How long condor_starter waits for an answer.", unit="seconds", readers=(STARTER, SERVER), least=1),
    _htcondor("VM_SOFT_SUSPEND", "bool", "false",
        "Whether condor_starter suspends a VM by pausing it in RAM.", readers=(STARTER,)),
    _htcondor("VMWARE_NETWORKING_TYPE", "string", "",
        "VMware's own word for the network of its VMs (ethernet0.connectionType), such as nat, bridged or "
        "hostonly; empty: nat or bridged, as the job asks.", types=VMRUN),
    _htcondor("VMWARE_NAT_NETWORKING_TYPE", "string", "",
        "The same, for jobs whose network is of the type nat.", types=VMRUN),
    _htcondor("VMWARE_BRIDGE_NETWORKING_TYPE", "string", "",
        "The same, for jobs whose network is of the type bridge.", types=VMRUN),
    _htcondor("VMWARE_LOCAL_SETTINGS_FILE", "path", "",
        'A file of lines name = "value" that every VMware VM of this machine gets in its .vmx.', types=VMRUN),
    _htcondor("EXECUTE", "path", "", "The directory that has the jobs' scratch directories.", readers=_ALL),
    _htcondor("RESERVED_DISK", "integer", "0",
        "What is kept free of the file system of EXECUTE: a guest whose disk grows into it is paused as if there "
        "were no space left. 0: 64 MiB, or a 64th of a small file system.",
        unit="MiB", readers=(STARTD, SERVER), types=QEMU),
    _htcondor("LOG", "path", "", "HTCondor's log directory.", readers=_ALL),
    _htcondor("LIBEXEC", "path", "", "HTCondor's directory of helper programs.", readers=_ALL),
    Setting("VM_ALLOW_EMULATION", "bool", "false",
        "Whether to run jobs of type kvm by emulation (TCG, many times slower) where KVM does not work.",
        types=QEMU),
    Setting("VM_LIBVIRT_URI", "string", "",
        "The libvirt connection; empty: qemu:///system as root, qemu:///session otherwise.", types=LIBVIRT),
    Setting("VM_LIBVIRT_DOMAIN_TYPE", "string", "",
        "The domain type of VMs of type libvirt, as the libvirt of VM_LIBVIRT_URI names it, such as kvm, "
        "qemu, xen, lxc or test; empty: KVM, or TCG as VM_ALLOW_EMULATION says.", types=LIBVIRT),
    Setting("VM_ALLOW_LIBVIRT_XML", "bool", "true",
        "Whether jobs may bring libvirt XML of their own, of which they may say what "
        "docs/reference/job-xml.md lists."),
    Setting("VM_STOP_TIMEOUT", "integer", "30",
        "How long a guest may take to shut down when asked to.", unit="seconds"),
    Setting("VM_IO_ERROR_TIMEOUT", "integer", "600",
        "How long a guest that an error of a disk has paused, such as a full file system, is tried again before "
        "its job ends as a failure; 0: for ever.", unit="seconds", types=QEMU),
    Setting("VM_RUN_BOOT_TIMEOUT", "integer", "600",
        "How long the guest of a job with VMPARAM_vm_Run may run until it is ready for the program, and as long until "
        "that has started.", unit="seconds", types=QEMU),
    Setting("VM_DISK_LIMIT", "bool", "true",
        "Whether a VM ends whose disks in the scratch directory occupy more than its job has asked for with "
        "request_disk.", types=QEMU),
    Setting("VM_DISK_BANDWIDTH", "size", "0",
        "How much all disks of one VM may read and write in a second, such as 100 Mb; 0: as much as they can.",
        types=QEMU),
    Setting("VM_NETWORK_BANDWIDTH", "size", "0",
        "How much each NIC of a VM may receive in a second, and how much it may send; 0: any. User networking "
        "has no such limit.", types=QEMU),
    Setting("VM_NAT_NETWORK", "string", "default",
        "The libvirt network for VMs with networking of type nat."),
    Setting("VM_ALLOW_HOST_LOOPBACK", "bool", "false",
        "Whether jobs may have networking of type user, by which a guest reaches whatever listens on this machine, "
        "also where that is its loopback address."),
    Setting("VM_CPU_MODE", "string", "",
        "libvirt's CPU mode; empty: host-passthrough for KVM, maximum for TCG.",
        words=("custom", "host-model", "host-passthrough", "maximum"), types=QEMU, fatal=True),
    Setting("VM_OVERCOMMIT", "bool", "false",
        "Whether a VM may have more CPUs or memory than its job's slot has; otherwise the job is held."),
    Setting("VM_CPU_QUOTA", "bool", "false",
        "Whether a VM gets no more time of the processor than its slot's CPUs have; otherwise its weight among the "
        "others is that of its CPUs, and it may use what is idle.", types=QEMU),
    Setting("VM_CPU_AFFINITY", "bool", "true",
        "Whether a VM is kept to the cores that HTCondor gives to its slot, where ASSIGN_CPU_AFFINITY has it give any.",
        types=QEMU),
    Setting("VM_MEMORY_LIMIT", "bool", "true",
        "Whether QEMU is ended when it takes much more memory than its guest has and it was seen to need beside.",
        types=QEMU),
    Setting("VM_TB_CACHE", "integer", "256",
        "How much memory QEMU may take, where it emulates (TCG), for the code of the guest that it has translated; 0: "
        "QEMU's own choice, 1024 or an eighth of the machine's.", unit="MiB", types=QEMU),
    Setting("VM_HUGEPAGES", "bool", "false",
        "Whether a guest's memory is in huge pages, where as many are free as it takes; otherwise it is in usual ones.",
        types=QEMU),
    Setting("VM_CONSOLE_LOG_MAX", "size", "16 Mb",
        "How much of the serial console is kept in vm_console.log, which is transferred back with the job; 0: none."),
    Setting("VM_GUEST_AGENT", "bool", "true",
        "Whether VMs have a port for QEMU's guest agent. By one that runs in its guest the VM's addresses are known, "
        "it powers off cleanly, and its clock is right after a suspend.", types=QEMU),
    Setting("VM_METRICS_INTERVAL", "integer", "60",
        "How often what a VM uses goes to vm_metrics.jsonl and home with the job; 0: there is no such "
        "file.", unit="seconds"),
    Setting("VM_RUN_AS_JOB_USER", "bool", "false",
        "Whether QEMU runs with the job user's uid and gid, and not as libvirt's own user. It always does "
        "for a job that shares a directory (VM_SHARE_SCRATCH)."),
    Setting("VM_REPORT_PID", "bool", "false",
        "Whether HTCondor is told which process runs the guest. It then takes that process's address space for the "
        "job's memory, and a personal pool older than HTCondor 25.11 cannot resume a suspended job."),
    Setting("VM_REPORT_ADDRESS", "bool", "false",
        "Whether a STATUS says the guest's MAC and IP addresses, of which HTCondor makes next to nothing. A personal "
        "pool older than HTCondor 25.11 cannot resume a suspended job then."),
    Setting("VM_MEMORY_IMAGE_FORMAT", "string", "",
        "The format of the memory of a VM that is suspended or checkpointed; empty: as /etc/libvirt/qemu.conf "
        "says, and else raw, or sparse for a suspended VM without vm_checkpoint where libvirt (11.2 and later) and "
        "QEMU can. An earlier libvirt cannot be told: it writes what qemu.conf says.",
        words=_IMAGE_FORMATS, types=LIBVIRT),
    Setting("VM_POLICY", "list", "",
        "Stylesheets (*.xsl, *.xslt) and programs, run as root, through which the domain XML of every job "
        "that libvirt runs goes in this order; each may change it or reject the job.", types=LIBVIRT),
    Setting("VM_POLICY_REQUIREMENTS", "expression", "",
        "A ClassAd expression over the job ad; a job for which it is not true is put on hold."),
    Setting("VM_MAC_HOOK", "path", "",
        "A program, run as root, that is given the job ad and may print a MAC address for the NIC "
        "of a VM that libvirt runs, and the IP address that the guest is to have.", types=LIBVIRT),
    Setting("VM_SHARE_SCRATCH", "string", "none",
        "How a guest may mount a directory of its job's, where the job asks for it: none, 9p or virtiofs. Its QEMU, "
        "or virtiofsd, works on it as the job's user, so that the guest can reach no more than its user can.",
        words=("none", "9p", "virtiofs"), types=QEMU),
    Setting(SHARE_DIRS, "list", "",
        "Names of directories of this machine that guests may mount, where their jobs ask for them. "
        "VM_SHARE_DIR_<name> is its full path, with :rw for writing and :9p for 9p in place of virtiofs; "
        "VM_SHARE_DIR_<name>_IF is a ClassAd expression over the job ad, without which any job may have it.",
        types=QEMU),
    Setting("VM_SSH_PORTS", "list", "",
        "The TCP ports of this machine, such as 22000-22999, by which guests may be reached whose jobs ask for that "
        "(VMPARAM_vm_SSH). Empty: no guest is.", types=QEMU),
    Setting("VM_SSH_ADDRESS", "string", "127.0.0.1",
        "The address of this machine on which those ports are open; 0.0.0.0: on all that it has. By the default only "
        "who is on this machine reaches them, as by condor_ssh_to_job.", types=QEMU, needs=("VM_SSH_PORTS",)),
    Setting("VM_PROBE_DOCKER", "bool", "false",
        "Whether the probe says that Docker and podman run containers here, by one that ran (HasDocker, "
        "DockerVersion, HasPodman)."),
    Setting("VM_CATALOG", "path", "",
        "A TOML file with the images of this machine that jobs may name as catalog:<name> in vm_disk, as "
        "docs/how-to/images.md says; empty: none."),
    Setting("VM_IMAGE_DIRS", "list", "",
        "Directories of this machine whose disk images jobs may put overlays on, by the file transfer "
        "plugin vmgahp-image-plugin; empty: none.", readers=(PLUGIN,)),
    Setting("VM_ANY_TYPES", "list", "",
        "For VM type any: the VM types of this machine, the preferred first, such as kvm, vmrun. Empty: "
        "the VM_TYPE where that is one, else all whose needs are here, of kvm, xen, vmrun, vsphere and "
        "script."),
    Setting("VM_ANY_CONVERT", "bool", "true",
        "For VM type any: whether disk images are converted where no VM type can use them as they are."),
    _script("VM_HYPERVISOR", "string", "",
        "For VM type script: the name of the hypervisor that VM_SCRIPT drives, such as virtualbox."),
    _script("VM_SCRIPT", "path", "",
        "For VM type script: the program that drives the hypervisor, as docs/how-to/script-drivers.md "
        "says."),
    _script("VM_SCRIPT_USER", "string", "job",
        "Who runs VM_SCRIPT: job for the job's user, condor, root, or the name of a user of this machine."),
    _script("VM_SCRIPT_LIMITS", "list", "core=0",
        "Limits on VM_SCRIPT and on all that it starts, VMs too, as name=number with the names of prlimit."),
    Setting("VMWARE_VMRUN", "path", "", "VMware's vmrun; empty: the one on the PATH.", types=VMRUN),
    Setting("VMWARE_PRODUCT", "string", "",
        "The VMware product that vmrun drives: ws, player or fusion; empty: the first of them that "
        "answers.", words=("ws", "player", "fusion"), types=VMRUN, fatal=True),
    _vsphere("VSPHERE_HOST", "string", "",
        "The ESXi host or vCenter for VM type vsphere, with :port if not 443."),
    _vsphere("VSPHERE_USER", "string", "", "The account there for this machine's jobs."),
    _vsphere("VSPHERE_PASSWORD_FILE", "path", "",
        "The file whose first line is the account's password. It belongs to HTCondor's user, with the mode "
        "0600."),
    _vsphere("VSPHERE_TLS_PIN", "path", "",
        "A PEM file with the server's own certificate: that one is accepted and no other. Empty: one that "
        "an authority vouches for whom this machine trusts."),
    _vsphere("VSPHERE_TLS_VERIFY", "bool", "true",
        "Whether the server must prove who it is, where VSPHERE_TLS_PIN is empty. Otherwise whoever "
        "answers in its place gets the password."),
    _vsphere("VSPHERE_DATACENTER", "string", "", "The data center for VMs; empty: the only one."),
    _vsphere("VSPHERE_DATASTORE", "string", "",
        "The datastore for VMs and their disks; empty: the only one."),
    _vsphere("VSPHERE_RESOURCE_POOL", "string", "",
        "The host or cluster that runs VMs, or a pool of it, as in cluster/pool; empty: the only host or "
        "cluster."),
    _vsphere("VSPHERE_FOLDER", "string", "",
        "The folder for VMs; empty: that of all VMs of the data center."),
    _vsphere("VSPHERE_NETWORK_MAP", "string", "nat = VM Network, bridge = VM Network",
        "The network of the server for each kind of network in VM_NETWORKING_TYPE."),
    _vsphere("VSPHERE_CHECKPOINT_DAYS", "integer", "7",
        "How long the server keeps a checkpoint whose job does not come back; 0: for ever.", unit="days"),
)
# fmt: on

BY_NAME = {setting.name: setting for setting in SETTINGS}


def setting_of(name: str) -> Setting:
    """Return the row of a setting; for a directory of VM_SHARE_DIRS make one with the administrator's name in it."""
    if name in BY_NAME or not name.startswith(SHARE_DIR):
        return BY_NAME[name]
    if name.endswith(CONDITION):
        return Setting(name, "expression", "", "Which jobs may have the directory.", types=QEMU)
    return Setting(name, "path", "", "A directory of VM_SHARE_DIRS.", types=QEMU)


def of_share_dirs(names: str) -> list[str]:
    """Return the settings' names of the directories that VM_SHARE_DIRS lists."""
    words = names.strip("\"'").replace(",", " ").upper().split()
    plain = [word for word in dict.fromkeys(words) if word.isascii() and word.replace("_", "a").isalnum()]
    return [f"{SHARE_DIR}{name}{rest}" for name in plain for rest in ("", CONDITION)]
