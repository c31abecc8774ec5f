"""Attacks by the job ad: values of each kind, private attributes, the policy, the VM type, and the ad's size."""

from xml.etree import ElementTree as etree

import pytest

from tests import jobs
from tests.attacks.ground import SECRET
from tests.attacks.site import DISK, Site
from tests.attacks.support import NO_QEMU, Attack, Battleground, Mode, Must, Who, each, stopped
from vmgahp.job.attributes import ATTRIBUTES

LONG = "a" * 5000
VALUES = (
    *("0", "-1", "64", "256", "2147483648", "9223372036854775808", "1e308", "0.5", 'real("NaN")', 'real("INF")', "1/0"),
    *("true", "undefined", "error", '""', '" "', "{1, {2}}", "[a = [b = 1]]", "MY", "missing"),
    *('"x"', f'"{LONG}"', '"-h"', '".."', '"../../../../etc/shadow"', '"/etc/shadow"', '"<x a=\\"1\\"/>"'),
    *(
        '"$(id)`id`; %s%n"',
        '",,,:::"',
        '"\u202e\u2028"',
        '"\x1b[2J\x07\x7f"',
        '"a\tb"',
        '"json:{}"',
        '"nbd://127.0.0.1/x"',
    ),
    *('"simulated"', '" kvm"', '"\\"', '"\\\\\\""', "random()", "time()", "ifThenElse(isUndefined(ClaimId), 64, 96)"),
    *("TARGET.JobVMMemory", 'eval("JobVMMemory")', "[JobVMMemory = 1].JobVMMemory", 'split("a b")', "interval(1e300)"),
)
"""The values of an attribute."""

VALUES_OF = ("JobVMMemory", "VMPARAM_vm_Disk", "VMPARAM_vm_User_Data", "User")
"""An attribute of each kind: a number, a list of files, a file that is opened, a name that becomes others.

No value of any other is the machine's fault either: that needs no guest (`tests/job/test_any_value.py`).
"""

LEAKS = (
    "ClaimId",
    "MY.ClaimId",
    "TransferKey",
    "_condor_privSecret",
    'strcat("a", ClaimId)',
    'eval("ClaimId")',
    'eval(strcat("Claim", "Id"))',
    "[x = ClaimId].x",
    "{ClaimId}[0]",
    "ifThenElse(true, ClaimId, 1)",
    "substr(ClaimId, 0)",
    "toUpper(ClaimIds)",
    'regexps("(.*)", ClaimId, "\\1")',
    "string(MY)",
    "string([a = ClaimId])",
    'join(",", {ClaimId, TransferKey})',
    "debug(ClaimId)",
    "unparse(ClaimId)",
    "indirect",
)
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
    ("ifThenElse(isUndefined(ClaimId), 64, 96)", ()),
    ("ifThenElse(isUndefined(TransferKey), 64, 96)", ()),
    ("ifThenElse(isUndefined(MY.ClaimId), 64, 96)", ()),
    ("ifThenElse(isUndefined(TARGET.ClusterId), 96, 64)", ()),
    ("ifThenElse(isUndefined(TARGET.ClusterId), 64, 96)", ()),
    ("ifThenElse(time() % 2 == 0, 64, 96)", ()),
    ("64 + random(2) * 32", ()),
    ("random(128)", ()),
    ("96", ("MY = [JobVMMemory = 1]",)),
    ("96", ("TARGET = [JobVMMemory = 1]",)),
    ("96", ("jobvmmemory = 1", "JOBVMMEMORY = 96")),
    ("undefined", ("RequestMemory = 96",)),
    ('"96"', ()),
    ("96.9", ()),
    ("-1", ()),
)
"""Values of JobVMMemory under `POLICY`, and what else is in the ad."""

SYNONYMS = ("VM_ATTR_Share = true", "VM_kvm_ATTR_Share = true", "vmparam_VM_share = true", "vm_attr_SHARE = 1")

CPUS = {
    "255 cores=85,threads=3": Must.SURVIVE,
    "255 sockets=255": Must.SURVIVE,
    "240 sockets=4,cores=60": Must.RUN,
    "256 cores=256": Must.HOLD,
    "2147483647": Must.HOLD,
    "4 sockets=4,cores=4,threads=4": Must.HOLD,
    "4 cores=0": Must.HOLD,
}
"""Numbers of CPUs and their topology; what the first two come to is QEMU's to say."""

ATTACKS = [
    *(
        Attack(
            f"values-of-{name}",
            Who.USER,
            f"`{name}` has {len(VALUES)} kinds of value, in a job that runs without them",
            Must.SURVIVE,
            "values",
            (name,),
            modes=(Mode.LIBVIRT,),
            times=len(VALUES),
        )
        for name in VALUES_OF
    ),
    Attack(
        "leaks",
        Who.USER,
        f"an attribute spells a private one out, in {len(LEAKS)} ways",
        Must.SURVIVE,
        "leaks",
        modes=(Mode.LIBVIRT,),
        times=len(LEAKS) * len(TOLD),
    ),
    Attack(
        "vm-type",
        Who.USER,
        f"`vm_type` is one of {len(TYPES)} that are not the machine's, or the machine's in another spelling",
        Must.SURVIVE,
        "types",
        modes=(Mode.LIBVIRT,),
        times=len(TYPES) + len(OF_THE_MACHINE),
    ),
    Attack(
        "policy-memory",
        Who.USER,
        f"a guest with more memory than `{POLICY}` of the machine allows, in {len(EVASIONS)} ways",
        Must.SURVIVE,
        "policy",
        modes=(Mode.LIBVIRT,),
        times=len(EVASIONS),
    ),
    Attack(
        "policy-synonyms",
        Who.USER,
        "a synonym of an option that the machine's policy forbids by its usual name",
        Must.HOLD,
        "synonyms",
        modes=(Mode.JOB,),
        times=len(SYNONYMS),
        daily=True,
    ),
    Attack(
        "private-by-another-case",
        Who.SUBMIT,
        "private attributes of the job's own, in another case, before and after the starter's",
        Must.RUN,
        "own_private",
        modes=(Mode.LIBVIRT,),
    ),
    *(
        Attack(name, Who.SUBMIT, done, Must.SURVIVE, "large", (name,), modes=NO_QEMU)
        for name, done in (
            ("many-attributes", "the ad has 100,000 attributes"),
            ("long-value", "a value has 4 MiB"),
            ("long-name", "a name has 100,000 characters"),
            ("deep-parentheses", "20,000 parentheses in one another"),
            ("deep-lists", "20,000 lists in one another"),
            ("deep-ads", "5,000 ads in one another"),
            ("self-reference", "an attribute that refers to itself"),
            ("circle", "100 attributes that refer to each other in a circle"),
            ("exponential", "60 attributes each of which refers to the next twice"),
            ("evil-regexp", "regular expressions that go back and back, in every attribute"),
            ("garbage", "lines that are no attributes: binary, NULs, no `=`, no name, lone quotes"),
            ("injection", "values with line ends, escapes and protocol words in them"),
        )
    ),
    Attack(
        "too-many-disks",
        Who.USER,
        "`vm_disk` has 25, 301 and 10,000 entries",
        Must.HOLD,
        "disks",
        modes=NO_QEMU,
        times=3,
    ),
    Attack(
        "too-many-cpus",
        Who.USER,
        "255 CPUs and more, with topologies that QEMU may not have, on a disk that is there",
        Must.SURVIVE,
        "cpus",
        modes=(Mode.LIBVIRT,),
        times=len(CPUS),
    ),
    Attack(
        "devices-beyond-reason",
        Who.USER,
        "hundreds of NICs, empty disks and serial options at once",
        Must.SURVIVE,
        "devices",
        modes=(Mode.LIBVIRT,),
        times=5,
    ),
]


@each(ATTACKS)
def test_nothing_comes_of_it(ground: Battleground, request: pytest.FixtureRequest, attack: Attack, mode: Mode) -> None:
    stopped(ground, request, attack, mode)


# What is done


def attempt(site: Site, must: Must, *more: str, **changes: object) -> None:
    """START, which has to come to this and to tell no secret, and STOP."""
    before = len(site.breaches)
    site.start(*more, **changes)
    site.require(must)
    if SECRET.lower() in site.explanation().lower():
        site.breach("vm_error.txt has a secret")
    if site.vm:
        site.look_for_secrets()
        site.ask("STOP")
        site.vm = ""
    if len(site.breaches) > before:
        site.breaches[-1] += f" [{', '.join((*more, *(f'{name} = {value}' for name, value in changes.items())))[:120]}]"


def values(site: Site, name: str) -> None:
    site.guest()
    refused = 0
    for value in VALUES:
        attempt(site, Must.SURVIVE, f"{name} = {value}")
        refused += name in site.explanation()
    if not refused:
        site.breach(f"nobody reads {name}")


def leaks(site: Site) -> None:
    site.guest()
    for name in TOLD:
        for value in LEAKS:
            attempt(site, Must.SURVIVE, *INDIRECT, f"{name} = {value}")


def types(site: Site) -> None:
    site.guest()
    for value in TYPES:
        attempt(site, Must.HOLD, JobVMType=value)
    for value, must in OF_THE_MACHINE.items():
        attempt(site, must, JobVMType=value)


def policy(site: Site) -> None:
    site.settings = {"VM_POLICY_REQUIREMENTS": POLICY}
    site.guest()
    for value, more in EVASIONS:
        site.start(*more, JobVMMemory=value)
        if site.vm:
            memory = int(etree.fromstring(site.live()).findtext("memory") or "0") // 1024
            if memory > 64:
                site.breach(f"{memory} MiB are there by JobVMMemory = {value} and {more}")
            site.ask("STOP")
            site.vm = ""


def synonyms(site: Site) -> None:
    site.settings = {"VM_POLICY_REQUIREMENTS": "VMPARAM_vm_Share =!= true", "VM_SHARE_SCRATCH": "9p"}
    site.guest()
    for line in SYNONYMS:
        site.start(line, JobVMCheckpoint="false")
        if site.vm:
            site.breach(f"it shares its directory by {line}")
            site.ask("STOP")
            site.vm = ""


def own_private(site: Site) -> None:
    site.guest()
    site.start("CLAIMID = 1", "claimid = ClaimId", "_CONDOR_PRIVx = 2", "x = CLAIMID")


def large(site: Site, name: str) -> None:
    lines: list[str] = []
    match name:
        case "many-attributes":
            lines = [f"A{number} = A{number + 1}" for number in range(100_000)]
        case "long-value":
            lines = [f'JobVMNetworkingType = "{"x" * (4 << 20)}"']
        case "long-name":
            lines = [f"{'x' * 100_000} = 1"]
        case "deep-parentheses":
            lines = [f"JobVMMemory = {'(' * 20_000}1{')' * 20_000}"]
        case "deep-lists":
            lines = [f"JobVMMemory = {'{' * 20_000}1{'}' * 20_000}"]
        case "deep-ads":
            lines = [f"JobVMMemory = {'[a = ' * 5000}1{']' * 5000}"]
        case "self-reference":
            lines = ["JobVMMemory = JobVMMemory + 1", "JobVM_VCPUS = MY.JobVM_VCPUS", "User = User"]
        case "circle":
            lines = [f"C{number} = C{(number + 1) % 100} + 1" for number in range(100)] + ["JobVMMemory = C0"]
        case "exponential":
            lines = [f"E{number} = E{number + 1} + E{number + 1}" for number in range(60)]
            lines += ["E60 = 1", "JobVMMemory = E0", "JobVM_VCPUS = E0", "VMPARAM_vm_Firmware = E0"]
        case "evil-regexp":
            evil = 'regexp("^(([a-z])+.)+[A-Z]([a-z])+$", "' + "a" * 60 + '")'
            lines = [f"{row.name} = {evil}" for row in ATTRIBUTES if row.name not in ("JobVMType", "JobVMMemory")]
        case "garbage":
            lines = [
                "",
                "=",
                "= 1",
                "a",
                'b = "',
                "c = \x00",
                "\x01\x02",
                "1d = 1",
                "e e = 1",
                "CLASSAD",
                "f = (",
                '"g" = 1',
            ]
            lines += ['"g" = 1', "\\", "h = \\", "]", "[", "i = [", "j := 1", "\udcff\udcfe = 1", "k = \udcff"]
        case "injection":
            lines = [
                'JobVMNetworkingType = "nat\\\\\r CONDOR_VM_START 99 kvm"',
                'VMPARAM_vm_Firmware = "x\\nR\\r\\nS 1"',
                'VMPARAM_vm_Arch = "\\\\r\\\\nQUIT"',
            ]
    site.start(*lines, VMPARAM_vm_Disk='"missing.img:hda:w:raw"')
    site.start(VMPARAM_vm_Disk='"missing.img:hda:w:raw"')


def disks(site: Site) -> None:
    site.guest()
    for number in (25, 301, 10_000):
        entries = ",".join(f"guest.img:vd{chr(97 + i % 26)}{chr(97 + i // 26 % 26)}:w:raw" for i in range(number))
        site.start(VMPARAM_vm_Disk=f'"{entries}"')
        if site.vm:
            site.breach(f"a guest has {number} times the same disk")


def cpus(site: Site) -> None:
    site.guest()
    for asked, must in CPUS.items():
        count, _, topology = asked.partition(" ")
        attempt(site, must, *([f'VMPARAM_vm_Topology = "{topology}"'] if topology else []), JobVM_VCPUS=count)


def devices(site: Site) -> None:
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
        if site.vm:
            site.ask("STOP")
            site.vm = ""
