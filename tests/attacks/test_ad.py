"""Attacks by the job ad: values of each kind, private attributes, the policy, the VM type, and the ad's size."""

from collections.abc import Callable
from xml.etree import ElementTree as etree

from tests import jobs
from tests.attacks.ground import SECRET
from tests.attacks.site import DISK, Site
from tests.attacks.support import Mode, Must, Who, attack, each
from vmgahp.job.attributes import ATTRIBUTES

LONG = "a" * 5000
# fmt: off
VALUES = (
    "0", "-1", "64", "256", "2147483648", "9223372036854775808", "1e308", "0.5", 'real("NaN")', 'real("INF")', "1/0",
    "true", "undefined", "error", '""', '" "', "{1, {2}}", "[a = [b = 1]]", "MY", "missing", '"x"', f'"{LONG}"', '"-h"',
    '".."', '"../../../../etc/shadow"', '"/etc/shadow"', '"<x a=\\"1\\"/>"', '"$(id)`id`; %s%n"', '",,,:::"',
    '"\u202e\u2028"', '"\x1b[2J\x07\x7f"', '"a\tb"', '"json:{}"', '"nbd://127.0.0.1/x"', '"simulated"', '" kvm"',
    '"\\"', '"\\\\\\""', "random()", "time()", "ifThenElse(isUndefined(ClaimId), 64, 96)", "TARGET.JobVMMemory",
    'eval("JobVMMemory")', "[JobVMMemory = 1].JobVMMemory", 'split("a b")', "interval(1e300)",
)
# fmt: on
"""The values of an attribute."""

VALUES_OF = ("JobVMMemory", "VMPARAM_vm_Disk", "VMPARAM_vm_User_Data", "User")
"""An attribute of each kind: a number, a list of files, a file that is opened, a name that becomes others.

No value of any other is the machine's fault either: that needs no guest (`tests/job/test_any_value.py`).
"""

# fmt: off
LEAKS = (
    "ClaimId", "MY.ClaimId", "TransferKey", "_condor_privSecret", 'strcat("a", ClaimId)', 'eval("ClaimId")',
    'eval(strcat("Claim", "Id"))', "[x = ClaimId].x", "{ClaimId}[0]", "ifThenElse(true, ClaimId, 1)",
    "substr(ClaimId, 0)", "toUpper(ClaimIds)", 'regexps("(.*)", ClaimId, "\\1")', "string(MY)", "string([a = ClaimId])",
    'join(",", {ClaimId, TransferKey})', "debug(ClaimId)", "unparse(ClaimId)", "indirect",
)
# fmt: on
"""Ways to spell a private attribute out."""

INDIRECT = ("indirect = second", "second = third", "third = ClaimId")

TOLD = ("User", "VMPARAM_vm_Unknown")
"""The attributes that show what they are: by the VM's name and a value in a message, and by an expression in one."""

TYPES = (
    *('"simulated"', '"any"', '"libvirt"', '"qemu"', '"script"', '"test"', '"nonsense"', '"lxc"'),
    *('"xen"', '"vmware"', '"vsphere"', '""', "undefined", "1", "error", "{}", 'strcat("q", "emu")'),
    *(f'"{LONG}"', '"\x1b[2J"', 'ifThenElse(random(2) == 0, "simulated", "any")'),
)
OF_THE_MACHINE = {'" kvm"': Must.RUN, '"kvm "': Must.RUN, 'ifThenElse(random(2) == 0, "kvm", "qemu")': Must.SURVIVE}
"""The machine's own, spelled in another way."""

POLICY = "JobVMMemory <= 64"
EVASIONS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("ifThenElse(isUndefined(ClaimId), 64, 96)", ()), ("ifThenElse(isUndefined(TransferKey), 64, 96)", ()),
    ("ifThenElse(isUndefined(MY.ClaimId), 64, 96)", ()), ("ifThenElse(isUndefined(TARGET.ClusterId), 96, 64)", ()),
    ("ifThenElse(isUndefined(TARGET.ClusterId), 64, 96)", ()), ("ifThenElse(time() % 2 == 0, 64, 96)", ()),
    ("64 + random(2) * 32", ()), ("random(128)", ()), ("96", ("MY = [JobVMMemory = 1]",)),
    ("96", ("TARGET = [JobVMMemory = 1]",)), ("96", ("jobvmmemory = 1", "JOBVMMEMORY = 96")),
    ("undefined", ("RequestMemory = 96",)), ('"96"', ()), ("96.9", ()), ("-1", ()),
)  # fmt: skip
"""Values of JobVMMemory under `POLICY`, and what else is in the ad."""

SYNONYMS = ("VM_ATTR_Share = true", "VM_kvm_ATTR_Share = true", "vmparam_VM_share = true", "vm_attr_SHARE = 1")

CPUS = {
    "255 cores=85,threads=3": Must.SURVIVE, "255 sockets=255": Must.SURVIVE, "240 sockets=4,cores=60": Must.RUN,
    "256 cores=256": Must.HOLD, "2147483647": Must.HOLD, "4 sockets=4,cores=4,threads=4": Must.HOLD,
    "4 cores=0": Must.HOLD,
}  # fmt: skip
"""Numbers of CPUs and their topology; what the first two come to is QEMU's to say."""


EVIL = 'regexp("^(([a-z])+.)+[A-Z]([a-z])+$", "' + "a" * 60 + '")'

LARGE: dict[str, Callable[[], list[str]]] = {
    "many-attributes": lambda: [f"A{number} = A{number + 1}" for number in range(100_000)],
    "long-value": lambda: [f'JobVMNetworkingType = "{"x" * (4 << 20)}"'],
    "long-name": lambda: [f"{'x' * 100_000} = 1"],
    "deep-parentheses": lambda: [f"JobVMMemory = {'(' * 20_000}1{')' * 20_000}"],
    "deep-lists": lambda: [f"JobVMMemory = {'{' * 20_000}1{'}' * 20_000}"],
    "deep-ads": lambda: [f"JobVMMemory = {'[a = ' * 5000}1{']' * 5000}"],
    "self-reference": lambda: ["JobVMMemory = JobVMMemory + 1", "JobVM_VCPUS = MY.JobVM_VCPUS", "User = User"],
    "circle": lambda: [*(f"C{number} = C{(number + 1) % 100} + 1" for number in range(100)), "JobVMMemory = C0"],
    "exponential": lambda: [
        *(f"E{number} = E{number + 1} + E{number + 1}" for number in range(60)),
        *("E60 = 1", "JobVMMemory = E0", "JobVM_VCPUS = E0", "VMPARAM_vm_Firmware = E0"),
    ],
    "evil-regexp": lambda: [
        f"{row.name} = {EVIL}" for row in ATTRIBUTES if row.name not in ("JobVMType", "JobVMMemory")
    ],
    "garbage": lambda: [
        *("", "=", "= 1", "a", 'b = "', "c = \x00", "\x01\x02", "1d = 1", "e e = 1", "CLASSAD", "f = (", '"g" = 1'),
        *('"g" = 1', "\\", "h = \\", "]", "[", "i = [", "j := 1", "\udcff\udcfe = 1", "k = \udcff"),
    ],
    "injection": lambda: [
        'JobVMNetworkingType = "nat\\\\\r CONDOR_VM_START 99 kvm"',
        'VMPARAM_vm_Firmware = "x\\nR\\r\\nS 1"',
        'VMPARAM_vm_Arch = "\\\\r\\\\nQUIT"',
    ],
}
"""Ads that are too long, too deep, endless, or none: name -> what makes the lines."""


def attempt(site: Site, must: Must, *more: str, **changes: object) -> None:
    """START, which has to come to this and to tell no secret, and STOP."""
    with site.naming(", ".join((*more, *(f"{name} = {value}" for name, value in changes.items())))):
        site.start(*more, **changes)
        site.require(must)
        if SECRET.lower() in site.explanation().lower():
            site.breach("vm_error.txt has a secret")
        if site.vm:
            site.look_for_secrets()
        site.stop()


@attack(Who.USER, Must.SURVIVE, Mode.LIBVIRT, times=len(VALUES), cases={name: (name,) for name in VALUES_OF})
def values(site: Site, name: str) -> None:
    """Give an attribute each kind of value, in a job that runs without them."""
    site.guest()
    refused = 0
    for value in VALUES:
        attempt(site, Must.SURVIVE, f"{name} = {value}")
        refused += name in site.explanation()
    if not refused:
        site.breach(f"nobody reads {name}")


@attack(Who.USER, Must.SURVIVE, Mode.LIBVIRT, times=len(LEAKS) * len(TOLD))
def leaks(site: Site) -> None:
    """Spell a private attribute out in another one."""
    site.guest()
    for name in TOLD:
        for value in LEAKS:
            attempt(site, Must.SURVIVE, *INDIRECT, f"{name} = {value}")


@attack(Who.USER, Must.SURVIVE, Mode.LIBVIRT, times=len(TYPES) + len(OF_THE_MACHINE))
def types(site: Site) -> None:
    """Ask by `vm_type` for one that is not the machine's, or for the machine's in another spelling."""
    site.guest()
    for value in TYPES:
        attempt(site, Must.HOLD, JobVMType=value)
    for value, must in OF_THE_MACHINE.items():
        attempt(site, must, JobVMType=value)


@attack(Who.USER, Must.SURVIVE, Mode.LIBVIRT, times=len(EVASIONS))
def policy(site: Site) -> None:
    """Ask for a guest with more memory than `POLICY` of the machine allows."""
    site.settings = {"VM_POLICY_REQUIREMENTS": POLICY}
    site.guest()
    for value, more in EVASIONS:
        site.start(*more, JobVMMemory=value)
        if site.vm:
            memory = int(etree.fromstring(site.live()).findtext("memory") or "0") // 1024
            if memory > 64:
                site.breach(f"{memory} MiB are there by JobVMMemory = {value} and {more}")
            site.stop()


@attack(Who.USER, Must.HOLD, Mode.JOB, times=len(SYNONYMS), daily=True)
def synonyms(site: Site) -> None:
    """Ask by a synonym for an option that the machine's policy forbids by its usual name."""
    site.settings = {"VM_POLICY_REQUIREMENTS": "VMPARAM_vm_Share =!= true", "VM_SHARE_SCRATCH": "9p"}
    site.guest()
    for line in SYNONYMS:
        site.start(line, JobVMCheckpoint="false")
        if site.vm:
            site.breach(f"it shares its directory by {line}")
            site.stop()


@attack(Who.SUBMIT, Must.RUN, Mode.LIBVIRT)
def own_private(site: Site) -> None:
    """Have private attributes of the job's own, in another case, before and after the starter's."""
    site.guest()
    site.start("CLAIMID = 1", "claimid = ClaimId", "_CONDOR_PRIVx = 2", "x = CLAIMID")


@attack(Who.SUBMIT, Must.SURVIVE, Mode.NONE, cases={name: (name,) for name in LARGE})
def large(site: Site, name: str) -> None:
    """Send an ad that is too long, too deep, endless, or none."""
    site.start(*LARGE[name](), VMPARAM_vm_Disk='"missing.img:hda:w:raw"')
    site.start(VMPARAM_vm_Disk='"missing.img:hda:w:raw"')


@attack(Who.USER, Must.HOLD, Mode.NONE, times=3)
def disks(site: Site) -> None:
    """Have 25, 301 and 10,000 entries in `vm_disk`."""
    site.guest()
    for number in (25, 301, 10_000):
        entries = ",".join(f"guest.img:vd{chr(97 + i % 26)}{chr(97 + i // 26 % 26)}:w:raw" for i in range(number))
        site.start(VMPARAM_vm_Disk=f'"{entries}"')
        if site.vm:
            site.breach(f"a guest has {number} times the same disk")


@attack(Who.USER, Must.SURVIVE, Mode.LIBVIRT, times=len(CPUS))
def cpus(site: Site) -> None:
    """Ask for 255 CPUs and more, with topologies that QEMU may not have, on a disk that is there."""
    site.guest()
    for asked, must in CPUS.items():
        count, _, topology = asked.partition(" ")
        attempt(site, must, *([f'VMPARAM_vm_Topology = "{topology}"'] if topology else []), JobVM_VCPUS=count)


@attack(Who.USER, Must.SURVIVE, Mode.LIBVIRT, times=5)
def devices(site: Site) -> None:
    """Ask for hundreds of NICs, and for empty disks without end."""
    site.settings = dict(jobs.NETWORKS)
    site.guest()
    for more in (
        'VMPARAM_vm_NICs = "' + ",".join(["user"] * 400) + '"',
        'VMPARAM_vm_NICs = "' + ",".join(["user"] * 31) + '"',
        'VMPARAM_vm_Data_Disk = "' + ",".join(f"vd{chr(98 + number)}:1M" for number in range(24)) + '"',
        'VMPARAM_vm_Data_Disk = "vdb:8388608T"',
        'VMPARAM_vm_Data_Disk = "sdz:1M,hdd:1M,vdb:1M,sdb:1M,sdc:1M,sdd:1M,sde:1M,sdf:1M,sdg:1M,sdh:1M"',
    ):
        site.start(more, VMPARAM_vm_Disk=DISK)
        site.stop()


test_nothing_comes_of_it = each(__name__)
