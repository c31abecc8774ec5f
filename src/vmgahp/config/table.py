"""The table of all settings that this daemon reads.

Add one here, and print ``config/vmgahp.conf.example`` again (``docs/_ext/example_file.py``); the syntax of each kind of
value is in `vmgahp.config`. HTCondor's settings for VMs that only its own daemons read are in `vmgahp.config.check`.
"""

from __future__ import annotations

from collections.abc import Callable

from vmgahp.vm_types import LIBVIRT, QEMU, SCRIPT, VMRUN, VSPHERE, XEN

SHARE_DIRS, SHARE_DIR, CONDITION = "VM_SHARE_DIRS", "VM_SHARE_DIR_", "_IF"
"""The setting that names shared directories, the prefix of each directory's settings, the suffix of its condition."""

SERVER, STARTD, STARTER, PLUGIN = "this daemon", "startd", "starter", "image plugin"


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

# fmt: off
SETTINGS = (
    _htcondor("VM_TYPE", "string", "",
        "The VM type that this machine offers, such as kvm; any for all of VM_ANY_TYPES.",
        example="kvm", readers=(STARTD, SERVER)),
    _htcondor("VM_MEMORY", "integer", "0",
        "The memory of this machine for all VMs together; must be set.", unit="MiB", example="1024"),
    _htcondor("VM_NETWORKING", "bool", "false", "True to let VMs have a network.", readers=(STARTD, SERVER)),
    _htcondor("VM_NETWORKING_TYPE", "list", "", "The kinds of network on offer: nat, bridge, user.", words=_NETWORKS),
    _htcondor("VM_NETWORKING_DEFAULT_TYPE", "string", "",
        "The kind for a job that names none; empty: user where it is on offer, else nat.", words=_NETWORKS),
    _htcondor("VM_NETWORKING_BRIDGE_INTERFACE", "string", "", "The bridge for networks of type bridge."),
    _htcondor("VM_HARDWARE_VT", "bool", "false", "True to advertise hardware virtualization to jobs."),
    _htcondor("XEN_BOOTLOADER", "path", "",
        "The program that extracts the kernel from a Xen job's disk (xen_kernel = included), such as "
        "/usr/lib/xen-4.17/bin/pygrub; it reads the job's disk as root. Empty: such jobs are held.", types=XEN),
    _htcondor("XEN_ALLOW_HARDWARE_VT_SUSPEND", "bool", "false",
        "True to suspend to disk and checkpoint Xen jobs with xen_kernel = vmx.", types=XEN),
    _htcondor("LIBVIRT_XML_SCRIPT", "path", "",
        "A program, run as root, that reads the job ad on standard input and writes the domain XML. Empty, "
        "or HTCondor's own libvirt_simple_script.awk: the daemon builds the XML itself.", types=LIBVIRT),
    _htcondor("LIBVIRT_XML_SCRIPT_ARGS", "arguments", "", "Arguments for LIBVIRT_XML_SCRIPT.", types=LIBVIRT),
    _htcondor("VM_GAHP_LOG", "path", "", "The log file, by its full path; empty or /dev/null: no log.", readers=_ALL),
    _htcondor("VM_GAHP_DEBUG", "string", "", "The kinds of messages to log; D_FULLDEBUG adds details."),
    _htcondor("DEFAULT_DEBUG", "string", "", "The default of VM_GAHP_DEBUG.", readers=_ALL),
    _htcondor("ALL_DEBUG", "string", "", "Words that are added to VM_GAHP_DEBUG.", readers=_ALL),
    _htcondor("MAX_VM_GAHP_LOG", "size", "10 Mb", "The size at which the log is renamed to .old; 0: never."),
    _htcondor("VM_GAHP_REQ_TIMEOUT", "integer", "300",
        "How long condor_starter waits for a result.", unit="seconds", readers=(STARTER, SERVER), least=1),
    _htcondor("VM_SOFT_SUSPEND", "bool", "false", "True to suspend a VM by pausing it in RAM.", readers=(STARTER,)),
    _htcondor("VMWARE_NETWORKING_TYPE", "string", "",
        "VMware's name for the network of its VMs (ethernet0.connectionType), such as nat, bridged or "
        "hostonly; empty: nat or bridged, as the job asks.", types=VMRUN),
    _htcondor("VMWARE_NAT_NETWORKING_TYPE", "string", "", "The same for jobs with a network of type nat.", types=VMRUN),
    _htcondor("VMWARE_BRIDGE_NETWORKING_TYPE", "string", "",
        "The same for jobs with a network of type bridge.", types=VMRUN),
    _htcondor("VMWARE_LOCAL_SETTINGS_FILE", "path", "",
        'A file of lines name = "value" that every VMware VM of this machine gets in its .vmx.', types=VMRUN),
    _htcondor("EXECUTE", "path", "", "The directory that has the jobs' scratch directories.", readers=_ALL),
    _htcondor("RESERVED_DISK", "integer", "0",
        "The space to keep free in the file system of EXECUTE: a guest whose disk grows into it is paused as if the "
        "disk were full. 0: 64 MiB, or a 64th of a small file system.",
        unit="MiB", readers=(STARTD, SERVER), types=QEMU),
    _htcondor("LOG", "path", "", "HTCondor's log directory.", readers=_ALL),
    _htcondor("LIBEXEC", "path", "", "HTCondor's directory of helper programs.", readers=_ALL),
    Setting("VM_ALLOW_EMULATION", "bool", "false",
        "True to emulate (TCG, many times slower) jobs of type kvm where KVM does not work.", types=QEMU),
    Setting("VM_LIBVIRT_URI", "string", "",
        "The libvirt connection; empty: qemu:///system as root, qemu:///session otherwise.", types=LIBVIRT),
    Setting("VM_LIBVIRT_DOMAIN_TYPE", "string", "",
        "The domain type of VMs of type libvirt, as the libvirt of VM_LIBVIRT_URI names it, such as kvm, "
        "qemu, xen, lxc or test; empty: KVM, or TCG as VM_ALLOW_EMULATION says.", types=LIBVIRT),
    Setting("VM_ALLOW_LIBVIRT_XML", "bool", "true",
        "True to accept jobs with libvirt XML of their own, limited to the elements in "
        "docs/reference/job-xml.md."),
    Setting("VM_STOP_TIMEOUT", "integer", "30", "How long a guest may take to shut down.", unit="seconds"),
    Setting("VM_END_EARLY", "bool", "true",
        "True to end a job soon after its guest has ended; false to wait until condor_starter asks for the status, "
        "every VM_STATUS_INTERVAL seconds."),
    Setting("VM_IO_ERROR_TIMEOUT", "integer", "600",
        "How long to retry a guest that was paused by a disk error, such as a full file system, before its job "
        "fails; 0: for ever.", unit="seconds", types=QEMU),
    Setting("VM_RUN_BOOT_TIMEOUT", "integer", "600",
        "The timeout for the guest of a job with VMPARAM_vm_Run to get ready, and again for its program to start.",
        unit="seconds", types=QEMU),
    Setting("VM_DISK_LIMIT", "bool", "true",
        "True to end a VM whose disks in the scratch directory use more space than the job's request_disk.",
        types=QEMU),
    Setting("VM_DISK_BANDWIDTH", "size", "0",
        "The bytes a second that all disks of a VM may read and write together, such as 100 Mb; 0: no limit.",
        types=QEMU),
    Setting("VM_NETWORK_BANDWIDTH", "size", "0",
        "The bytes a second that each NIC of a VM may receive, and the same to send; 0: no limit. It does not apply "
        "to user networking.", types=QEMU),
    Setting("VM_NAT_NETWORK", "string", "default", "The libvirt network for VMs with networking of type nat."),
    Setting("VM_ALLOW_HOST_LOOPBACK", "bool", "false",
        "True to offer networking of type user, by which a guest reaches all services of this machine, those on the "
        "loopback address included."),
    Setting("VM_CPU_MODE", "string", "",
        "libvirt's CPU mode; empty: host-passthrough for KVM, maximum for TCG.",
        words=("custom", "host-model", "host-passthrough", "maximum"), types=QEMU, fatal=True),
    Setting("VM_OVERCOMMIT", "bool", "false",
        "True to run VMs with more CPUs or memory than the job's slot; otherwise the job is held."),
    Setting("VM_CPU_QUOTA", "bool", "false",
        "True to limit a VM to the CPU time of its slot's CPUs; otherwise it shares the machine by that weight and may "
        "use idle CPUs.", types=QEMU),
    Setting("VM_CPU_AFFINITY", "bool", "true",
        "True to pin a VM to the cores that HTCondor assigns to its slot (ASSIGN_CPU_AFFINITY).", types=QEMU),
    Setting("VM_MEMORY_LIMIT", "bool", "true",
        "True to end QEMU when it uses much more memory than its guest has plus the usual overhead.", types=QEMU),
    Setting("VM_TB_CACHE", "integer", "256",
        "The memory that QEMU may use for translated guest code when it emulates (TCG); 0: QEMU's own default, 1024 or "
        "an eighth of the machine's memory.", unit="MiB", types=QEMU),
    Setting("VM_HUGEPAGES", "bool", "false",
        "True to put a guest's memory into huge pages if enough of them are free.", types=QEMU),
    Setting("VM_CONSOLE_LOG_MAX", "size", "16 Mb",
        "The size of vm_console.log, the serial console that is transferred back with the job; 0: no such file."),
    Setting("VM_GUEST_AGENT", "bool", "true",
        "True to give VMs a port for QEMU's guest agent. With an agent in the guest the VM's addresses are known, it "
        "powers off cleanly, and its clock is right after a suspend.", types=QEMU),
    Setting("VM_METRICS_INTERVAL", "integer", "60",
        "How often to record the use of a VM in vm_metrics.jsonl, which is transferred back with the job; 0: no such "
        "file.", unit="seconds"),
    Setting("VM_RUN_AS_JOB_USER", "bool", "false",
        "True to run QEMU with the job user's uid and gid instead of as libvirt's user. A job that shares a directory "
        "by 9p, or has an image on a file system without leases, always runs so."),
    Setting("VM_REPORT_PID", "bool", "false",
        "True to report the process that runs the guest. HTCondor then takes that process's address space for the "
        "job's memory, and a personal pool older than HTCondor 25.11 cannot resume a suspended job."),
    Setting("VM_REPORT_ADDRESS", "bool", "false",
        "True to report the guest's MAC and IP addresses in STATUS. A personal pool older than HTCondor 25.11 then "
        "cannot resume a suspended job."),
    Setting("VM_MEMORY_IMAGE_FORMAT", "string", "",
        "The format of the memory of a VM that is suspended or checkpointed; empty: as /etc/libvirt/qemu.conf "
        "says, and else raw, or sparse for a suspended VM without vm_checkpoint where libvirt (11.2 and later) and "
        "QEMU can. An earlier libvirt cannot be told: it writes what qemu.conf says.",
        words=("raw", "sparse", "zstd", "lzop", "gzip", "bzip2", "xz"), types=LIBVIRT),
    Setting("VM_POLICY", "list", "",
        "Stylesheets (*.xsl, *.xslt) and programs, run as root in this order on the domain XML of every job "
        "under libvirt; each may change it or reject the job.", types=LIBVIRT),
    Setting("VM_POLICY_REQUIREMENTS", "expression", "",
        "A ClassAd expression over the job ad; a job is held unless it is true."),
    Setting("VM_MAC_HOOK", "path", "",
        "A program, run as root, that reads the job ad and may print a MAC address for a NIC of a VM under "
        "libvirt, and an IP address for the guest.", types=LIBVIRT),
    Setting("VM_SHARE_SCRATCH", "string", "none",
        "The way to mount a directory of the job in the guest, for jobs that ask for it: none, 9p or virtiofs. QEMU "
        "or virtiofsd opens it as the job's user.", words=("none", "9p", "virtiofs"), types=QEMU),
    Setting(SHARE_DIRS, "list", "",
        "The names of directories of this machine that jobs may ask to mount. "
        "VM_SHARE_DIR_<name> is the full path, with :rw for writing and :9p for 9p instead of virtiofs; "
        "VM_SHARE_DIR_<name>_IF is a ClassAd expression over the job ad that limits it to some jobs.", types=QEMU),
    Setting("VM_SSH_PORTS", "list", "",
        "The TCP ports of this machine to forward to guests of jobs with VMPARAM_vm_SSH, such as 22000-22999. "
        "Empty: none.", types=QEMU),
    Setting("VM_SSH_ADDRESS", "string", "127.0.0.1",
        "The address of this machine on which those ports are open; 0.0.0.0: all addresses. The default allows "
        "connections from this machine only, such as by condor_ssh_to_job.", types=QEMU, needs=("VM_SSH_PORTS",)),
    Setting("VM_DEVICES", "list", "",
        "The resources of HTCondor whose devices jobs' VMs get when they request them, such as GPUs, or the name of a "
        "MACHINE_RESOURCE_<name> that lists PCI addresses or mediated devices (docs/how-to/devices.md).", types=QEMU),
    Setting("VM_PROBE_DOCKER", "bool", "false",
        "True to let the probe run a container by Docker and podman and publish the result (HasDocker, DockerVersion, "
        "HasPodman)."),
    Setting("VM_CATALOG", "path", "",
        "A TOML file of the images that jobs may name as catalog:<name> in vm_disk (docs/how-to/images.md); "
        "empty: none."),
    Setting("VM_WARM_DIR", "path", "/var/lib/vmgahp/warm",
        "The directory of the guests that have booted, from which jobs with a program go on (vmgahp image warm).",
        types=QEMU),
    Setting("VM_WARM_IMAGES", "list", "",
        "The images of the catalog, or *, of which this machine boots such guests by itself: at the second job of the "
        "same size, by systemd-run, where twice the guest's memory is available.", types=QEMU),
    Setting("VM_WARM_MAX", "size", "20 Gb",
        "The size of all of them, above which vmgahp image warm removes the least used.", types=QEMU),
    Setting("VM_IMAGE_DIRS", "list", "",
        "The directories whose disk images the file transfer plugin vmgahp-image-plugin may use as bases of "
        "overlays; empty: none.", readers=(PLUGIN,)),
    Setting("VM_ANY_TYPES", "list", "",
        "For VM type any: the VM types of this machine, the preferred first, such as kvm, vmrun. Empty: "
        "the VM_TYPE if that is one, else all of kvm, xen, vmrun, vsphere and script whose requirements are met."),
    Setting("VM_ANY_CONVERT", "bool", "true",
        "For VM type any: true to convert disk images that no VM type can use as they are."),
    _script("VM_HYPERVISOR", "string", "",
        "For VM type script: the name of the hypervisor that VM_SCRIPT drives, such as virtualbox."),
    _script("VM_SCRIPT", "path", "",
        "For VM type script: the program that drives the hypervisor (docs/how-to/script-drivers.md)."),
    _script("VM_SCRIPT_USER", "string", "job",
        "The user that runs VM_SCRIPT: job for the job's user, condor, root, or the name of a user of this machine."),
    _script("VM_SCRIPT_LIMITS", "list", "core=0",
        "The limits of VM_SCRIPT and of everything that it starts, VMs included, as name=number with prlimit's names."),
    Setting("VMWARE_VMRUN", "path", "", "VMware's vmrun; empty: the one on the PATH.", types=VMRUN),
    Setting("VMWARE_PRODUCT", "string", "",
        "The VMware product that vmrun drives: ws, player or fusion; empty: the first of them that "
        "answers.", words=("ws", "player", "fusion"), types=VMRUN, fatal=True),
    _vsphere("VSPHERE_HOST", "string", "", "The ESXi host or vCenter for VM type vsphere, with :port if not 443."),
    _vsphere("VSPHERE_USER", "string", "", "The account there for this machine's jobs."),
    _vsphere("VSPHERE_PASSWORD_FILE", "path", "",
        "The file whose first line is the account's password. It belongs to HTCondor's user, with the mode "
        "0600."),
    _vsphere("VSPHERE_TLS_PIN", "path", "",
        "A PEM file with the server's own certificate, the only one to accept. Empty: certificates of the "
        "authorities that this machine trusts."),
    _vsphere("VSPHERE_TLS_VERIFY", "bool", "true",
        "True to verify the server's certificate if VSPHERE_TLS_PIN is empty. Without verification an impostor "
        "gets the password."),
    _vsphere("VSPHERE_DATACENTER", "string", "", "The data center for VMs; empty: the only one."),
    _vsphere("VSPHERE_DATASTORE", "string", "", "The datastore for VMs and their disks; empty: the only one."),
    _vsphere("VSPHERE_RESOURCE_POOL", "string", "",
        "The host or cluster that runs VMs, or a pool of it, as in cluster/pool; empty: the only host or "
        "cluster."),
    _vsphere("VSPHERE_FOLDER", "string", "", "The folder for VMs; empty: the root folder of the data center's VMs."),
    _vsphere("VSPHERE_NETWORK_MAP", "string", "nat = VM Network, bridge = VM Network",
        "The server's network for each kind of network in VM_NETWORKING_TYPE."),
    _vsphere("VSPHERE_CHECKPOINT_DAYS", "integer", "7",
        "How long to keep a checkpoint on the server if its job does not come back; 0: for ever.", unit="days"),
)
# fmt: on

BY_NAME = {setting.name: setting for setting in SETTINGS}


def setting_of(name: str) -> Setting:
    """Return the row of a setting; for a directory of VM_SHARE_DIRS make one with the administrator's name in it."""
    if name in BY_NAME or not name.startswith(SHARE_DIR):
        return BY_NAME[name]
    if name.endswith(CONDITION):
        return Setting(name, "expression", "", "The jobs that may mount the directory.", types=QEMU)
    return Setting(name, "path", "", "A directory of VM_SHARE_DIRS.", types=QEMU)


def of_share_dirs(names: str) -> list[str]:
    """Return the settings' names of the directories that VM_SHARE_DIRS lists."""
    words = names.strip("\"'").replace(",", " ").upper().split()
    plain = [word for word in dict.fromkeys(words) if word.isascii() and word.replace("_", "a").isalnum()]
    return [f"{SHARE_DIR}{name}{rest}" for name in plain for rest in ("", CONDITION)]
