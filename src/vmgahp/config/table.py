"""Every setting that this daemon reads, in one table: name, kind, default, meaning, who reads it.

Add one here, and regenerate ``config/vmgahp.conf.example`` (`vmgahp.config.example`); what a kind of value
may look like is in `vmgahp.config`. HTCondor's settings for VMs that only its own daemons read are in
`vmgahp.config.htcondor`.
"""

from vmgahp.config.settings_row import PLUGIN, SERVER, STARTD, STARTER, Setting
from vmgahp.config.settings_row import ours as _ours

_NETWORKS = ("nat", "bridge", "user")
_IMAGE_FORMATS = ("raw", "sparse", "zstd", "lzop", "gzip", "bzip2", "xz")


SETTINGS = (
    Setting(
        "VM_TYPE",
        "string",
        "",
        "The VM type that this machine offers, such as kvm; any for all of VM_ANY_TYPES.",
        example="kvm",
        readers=(STARTD, SERVER),
    ),
    Setting(
        "VM_MEMORY", "integer", "0", "Memory of this machine for all VMs; must be set.", "MiB", example="1024"
    ),
    Setting("VM_NETWORKING", "bool", "false", "Whether VMs may have a network.", readers=(STARTD, SERVER)),
    Setting(
        "VM_NETWORKING_TYPE",
        "list",
        "",
        "The kinds of network on offer: nat, bridge, user.",
        words=_NETWORKS,
    ),
    Setting(
        "VM_NETWORKING_DEFAULT_TYPE",
        "string",
        "",
        "The kind for a job that names none; empty: user where it is on offer, else nat.",
        words=_NETWORKS,
    ),
    Setting("VM_NETWORKING_BRIDGE_INTERFACE", "string", "", "The bridge for networks of type bridge."),
    Setting("VM_HARDWARE_VT", "bool", "false", "Whether to advertise hardware virtualisation to jobs."),
    Setting(
        "XEN_BOOTLOADER",
        "path",
        "",
        "The program that takes the kernel out of a Xen job's disk (xen_kernel = included), such as "
        "/usr/lib/xen-4.17/bin/pygrub; it reads the job's disk as root. Empty: such jobs are held.",
    ),
    Setting(
        "XEN_ALLOW_HARDWARE_VT_SUSPEND",
        "bool",
        "false",
        "Whether Xen jobs with xen_kernel = vmx may be suspended to disk and checkpointed.",
    ),
    Setting(
        "LIBVIRT_XML_SCRIPT",
        "path",
        "",
        "A program, run as root, that reads the job ad on standard input and writes the domain XML. Empty, "
        "or HTCondor's own libvirt_simple_script.awk: the daemon builds the XML itself.",
    ),
    Setting("LIBVIRT_XML_SCRIPT_ARGS", "arguments", "", "Arguments for LIBVIRT_XML_SCRIPT."),
    Setting(
        "VM_GAHP_LOG",
        "path",
        "",
        "The log file, by its full path; empty or /dev/null: no log.",
        readers=(STARTD, STARTER, SERVER),
    ),
    Setting("VM_GAHP_DEBUG", "string", "", "What to log; D_FULLDEBUG adds the details."),
    Setting(
        "DEFAULT_DEBUG",
        "string",
        "",
        "Stands in for VM_GAHP_DEBUG where that is not set.",
        readers=(STARTD, STARTER, SERVER),
    ),
    Setting("ALL_DEBUG", "string", "", "Added to VM_GAHP_DEBUG.", readers=(STARTD, STARTER, SERVER)),
    Setting(
        "MAX_VM_GAHP_LOG", "size", "10 Mb", "The log is renamed to .old when it grows to this; 0: never."
    ),
    Setting(
        "VM_GAHP_REQ_TIMEOUT",
        "integer",
        "300",
        "How long condor_starter waits for an answer.",
        "seconds",
        readers=(STARTER, SERVER),
        least=1,
    ),
    Setting(
        "VM_SOFT_SUSPEND",
        "bool",
        "false",
        "Whether condor_starter suspends a VM by pausing it in RAM.",
        readers=(STARTER,),
    ),
    Setting(
        "VMWARE_NETWORKING_TYPE",
        "string",
        "",
        "VMware's own word for the network of its VMs (ethernet0.connectionType), such as nat, bridged or "
        "hostonly; empty: nat or bridged, as the job asks.",
    ),
    Setting(
        "VMWARE_NAT_NETWORKING_TYPE", "string", "", "The same, for jobs whose network is of the type nat."
    ),
    Setting(
        "VMWARE_BRIDGE_NETWORKING_TYPE",
        "string",
        "",
        "The same, for jobs whose network is of the type bridge.",
    ),
    Setting(
        "VMWARE_LOCAL_SETTINGS_FILE",
        "path",
        "",
        'A file of lines name = "value" that every VMware VM of this machine gets in its .vmx.',
    ),
    Setting(
        "EXECUTE",
        "path",
        "",
        "The directory that has the jobs' scratch directories.",
        readers=(STARTD, STARTER, SERVER),
    ),
    Setting("LOG", "path", "", "HTCondor's log directory.", readers=(STARTD, STARTER, SERVER)),
    Setting(
        "LIBEXEC",
        "path",
        "",
        "HTCondor's directory of helper programs.",
        readers=(STARTD, STARTER, SERVER),
    ),
    _ours(
        "VM_ALLOW_EMULATION",
        "bool",
        "false",
        "Whether to run jobs of type kvm by emulation (TCG, many times slower) where KVM does not work.",
    ),
    _ours(
        "VM_LIBVIRT_URI",
        "string",
        "",
        "The libvirt connection; empty: qemu:///system as root, qemu:///session otherwise.",
    ),
    _ours(
        "VM_LIBVIRT_DOMAIN_TYPE",
        "string",
        "",
        "The domain type of VMs of type libvirt, as the libvirt of VM_LIBVIRT_URI names it, such as kvm, qemu, "
        "xen, lxc or test; empty: KVM, or TCG as VM_ALLOW_EMULATION says.",
    ),
    _ours(
        "VM_ALLOW_LIBVIRT_XML",
        "bool",
        "true",
        "Whether jobs may bring libvirt XML of their own, of which they may say what docs/reference/job-xml.md lists.",
    ),
    _ours(
        "VM_STOP_TIMEOUT", "integer", "30", "How long a guest may take to shut down when asked to.", "seconds"
    ),
    _ours("VM_NAT_NETWORK", "string", "default", "The libvirt network for VMs with networking of type nat."),
    _ours(
        "VM_CPU_MODE",
        "string",
        "",
        "libvirt's CPU mode; empty: host-passthrough for KVM, maximum for TCG.",
        words=("custom", "host-model", "host-passthrough", "maximum"),
    ),
    _ours("VM_CONSOLE_LOG", "bool", "true", "Whether the serial console goes to vm_console.log and home."),
    _ours(
        "VM_SCREENSHOT",
        "bool",
        "true",
        "Whether what a guest with a display shows when it fails goes home as vm_screenshot.png.",
    ),
    _ours("VM_CONSOLE_LOG_MAX", "size", "16 Mb", "How much of the serial console is kept."),
    _ours(
        "VM_METRICS_INTERVAL",
        "integer",
        "60",
        "How often what a VM uses goes to vm_metrics.jsonl and home with the job; 0: there is no such file.",
        "seconds",
    ),
    _ours("VM_METRICS_MAX", "size", "16 Mb", "How large vm_metrics.jsonl may become."),
    _ours("VM_RUN_AS_JOB_USER", "bool", "true", "Whether QEMU runs with the job user's uid and gid."),
    _ours(
        "VM_REPORT_PID",
        "bool",
        "true",
        "Whether HTCondor is told which process runs the guest. It then measures QEMU's memory, which is more "
        "than the guest's.",
    ),
    _ours(
        "VM_SUSPEND_IMAGE_FORMAT",
        "string",
        "",
        "How libvirt writes the memory of a suspended VM: raw, sparse, zstd, lzop, gzip and so on, where its "
        "version (11.2 and later) can be told; empty: as /etc/libvirt/qemu.conf says.",
        words=_IMAGE_FORMATS,
    ),
    _ours(
        "VM_CHECKPOINT_IMAGE_FORMAT",
        "string",
        "",
        "The same for a checkpoint. HTCondor's file transfer fills the holes of a sparse file; a compressed "
        "format such as zstd travels better.",
        words=_IMAGE_FORMATS,
    ),
    _ours(
        "VM_SUSPEND_BYPASS_CACHE",
        "bool",
        "false",
        "Whether the memory of a suspended VM is written past the page cache, which spares the cache. A "
        "checkpoint is read again at once for its checksum and always goes through the cache.",
    ),
    _ours(
        "VM_POLICY",
        "list",
        "",
        "Stylesheets (*.xsl, *.xslt) and programs, run as root, through which the domain XML of every job that "
        "libvirt runs goes in this order; each may change it or reject the job.",
    ),
    _ours(
        "VM_POLICY_REQUIREMENTS",
        "expression",
        "",
        "A ClassAd expression over the job ad; a job for which it is not true is put on hold.",
    ),
    _ours(
        "VM_POLICY_TIMEOUT",
        "integer",
        "30",
        "How long each stage of VM_POLICY, and VM_MAC_HOOK, may take.",
        "seconds",
        least=1,
    ),
    _ours(
        "VM_MAC_HOOK",
        "path",
        "",
        "A program, run as root, that is given the job ad and may print a MAC address for the network card of a "
        "VM that libvirt runs.",
    ),
    _ours(
        "VM_MAC_HOOK_ALWAYS",
        "bool",
        "false",
        "Whether VM_MAC_HOOK is also asked where the job names a MAC address itself.",
    ),
    _ours(
        "VM_SHARE_SCRATCH",
        "string",
        "none",
        "How a guest may mount a directory of its job's, where the job asks for it: none or 9p. It takes "
        "VM_RUN_AS_JOB_USER, so that the guest can reach no more than its user can.",
        words=("none", "9p"),
    ),
    _ours(
        "VM_CATALOG",
        "path",
        "",
        "A TOML file with the images of this machine that jobs may name as catalog:<name> in vm_disk, as "
        "docs/how-to/images.md says; empty: none.",
    ),
    _ours(
        "VM_IMAGE_DIRS",
        "list",
        "",
        "Directories of this machine whose disk images jobs may put overlays on, by the file transfer plugin "
        "vmgahp-image-plugin; empty: none.",
        readers=(PLUGIN,),
    ),
    _ours(
        "VM_ANY_TYPES",
        "list",
        "",
        "For VM type any: the VM types of this machine, the preferred first, such as kvm, vmrun. Empty: the VM_TYPE "
        "where that is one, else all whose needs are here, of kvm, xen, vmrun, vsphere and script.",
    ),
    _ours(
        "VM_ANY_CONVERT",
        "bool",
        "true",
        "For VM type any: whether disk images are converted where no VM type can use them as they are.",
    ),
    _ours(
        "VM_HYPERVISOR",
        "string",
        "",
        "For VM type script: the name of the hypervisor that VM_SCRIPT drives, such as virtualbox.",
    ),
    _ours(
        "VM_SCRIPT",
        "path",
        "",
        "For VM type script: the program that drives the hypervisor, as docs/how-to/script-drivers.md says.",
    ),
    _ours(
        "VM_SCRIPT_USER",
        "string",
        "job",
        "Who runs VM_SCRIPT: job for the job's user, condor, root, or the name of a user of this machine.",
    ),
    _ours(
        "VM_SCRIPT_TIMEOUT",
        "integer",
        "30",
        "How long VM_SCRIPT may take to answer a question; what starts, saves or restores a VM may take "
        "VM_GAHP_REQ_TIMEOUT.",
        "seconds",
        least=1,
    ),
    _ours(
        "VM_SCRIPT_LIMITS",
        "list",
        "core=0",
        "Limits on VM_SCRIPT and on all that it starts, VMs too, as name=number with the names of prlimit.",
    ),
    _ours("VMWARE_VMRUN", "path", "", "VMware's vmrun; empty: the one on the PATH."),
    _ours(
        "VMWARE_PRODUCT",
        "string",
        "",
        "The VMware product that vmrun drives: ws, player or fusion; empty: the first of them that answers.",
        words=("ws", "player", "fusion"),
    ),
    _ours(
        "VMWARE_TIMEOUT",
        "integer",
        "30",
        "How long vmrun may take to answer a question; what moves a guest's memory may take VM_GAHP_REQ_TIMEOUT.",
        "seconds",
        least=1,
    ),
    _ours(
        "VSPHERE_HOST", "string", "", "The ESXi host or vCenter for VM type vsphere, with :port if not 443."
    ),
    _ours("VSPHERE_USER", "string", "", "The account there for this machine's jobs."),
    _ours(
        "VSPHERE_PASSWORD_FILE",
        "path",
        "",
        "The file whose first line is the account's password. It belongs to HTCondor's user, with the mode 0600.",
    ),
    _ours(
        "VSPHERE_TLS_PIN",
        "path",
        "",
        "A PEM file with the server's own certificate: that one is accepted and no other. Empty: one that an "
        "authority vouches for whom this machine trusts.",
    ),
    _ours(
        "VSPHERE_TLS_VERIFY",
        "bool",
        "true",
        "Whether the server must prove who it is, where VSPHERE_TLS_PIN is empty. Without that whoever answers "
        "in its place gets the password.",
    ),
    _ours("VSPHERE_DATACENTER", "string", "", "The data centre for VMs; empty: the only one."),
    _ours("VSPHERE_DATASTORE", "string", "", "The datastore for VMs and their disks; empty: the only one."),
    _ours(
        "VSPHERE_RESOURCE_POOL",
        "string",
        "",
        "The host or cluster that runs VMs, or a pool of it, as in cluster/pool; empty: the only host or cluster.",
    ),
    _ours("VSPHERE_FOLDER", "string", "", "The folder for VMs; empty: that of all VMs of the data centre."),
    _ours(
        "VSPHERE_NETWORK_MAP",
        "string",
        "nat = VM Network, bridge = VM Network",
        "The network of the server for each kind of network in VM_NETWORKING_TYPE.",
    ),
    _ours(
        "VSPHERE_RECONNECT_TIMEOUT",
        "integer",
        "60",
        "How long the daemon goes on trying to reach a vSphere server that is away, such as one that restarts.",
        "seconds",
    ),
    _ours(
        "VSPHERE_TASK_TIMEOUT",
        "integer",
        "240",
        "How long the server may take for one task, such as to start a VM; less than VM_GAHP_REQ_TIMEOUT.",
        "seconds",
        least=1,
    ),
    _ours(
        "VSPHERE_CHECKPOINT_DAYS",
        "integer",
        "7",
        "How long the server keeps a checkpoint whose job does not come back; 0: for ever.",
        "days",
    ),
)
BY_NAME = {setting.name: setting for setting in SETTINGS}
