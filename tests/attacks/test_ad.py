"""Attacks by the job ad: every attribute with every kind of value, the policy, the VM type, and the ad's size."""

from collections.abc import Iterable
from xml.etree import ElementTree as etree

import pytest

from tests import jobs
from tests.attacks.ground import SECRET
from tests.attacks.site import DISK, Site
from tests.attacks.support import NO_QEMU, Attack, Battleground, Mode, Must, Who, each, stopped
from vmgahp.job.attributes import ATTRIBUTES
from vmgahp.job.options import NAMES

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
"""What an attribute may be."""

FEW = ("-1", "undefined", "[a = 1]", '"../x"', f'"{LONG}"', '"\x1b[2J\u2028"', "random()", "ClaimId")
"""Some of these, and one of the next, for what a job of this type has no use of."""

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

READ = tuple(dict.fromkeys(row.name for row in ATTRIBUTES if not row.types or "kvm" in row.types))
OF_THE_SCHEDD = ("User", "ClusterId", "ProcId")
"""Of these the VM's name is made."""
OTHERS = (
    *(row.name for row in ATTRIBUTES if row.name not in READ),
    *("Owner", "VM_WORKING_DIR", "VMPARAM_VM_NAME", "JobVMId", "Iwd", "Cmd"),
    *("TransferInput", "TransferIntermediate", "MY", "TARGET", "ClaimId", "Arguments", "Requirements", "ToE"),
    *(f"VM_ATTR_{name}" for name in NAMES),
    *(f"VM_kvm_ATTR_{name}" for name in ("Share", "Firmware", "TPM")),
    *("VMPARAM_vm_Unknown", "VM_ATTR_", "VM_kvm_ATTR_", "VM_simulated_ATTR_Share", "Simulated_Fault"),
)
"""Attributes that are no row of the table, but read, or look as if."""

TYPES = (
    *('"simulated"', '"any"', '"libvirt"', '"qemu"', '"script"', '"test"', '"nonsense"', '"lxc"', '" kvm"', '"kvm "'),
    *('"xen"', '"vmware"', '"vsphere"', '""', "undefined", "1", "error", "{}", 'strcat("q", "emu")'),
    'ifThenElse(random(2) == 0, "kvm", "qemu")',
    'ifThenElse(random(2) == 0, "simulated", "any")',
)

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

ATTACKS = [
    *(
        Attack(
            f"values-of-{name}",
            Who.USER,
            f"`{name}` has {len(VALUES)} kinds of value, in a job whose disk is missing",
            Must.HOLD,
            "values",
            (name,),
            modes=NO_QEMU,
            times=len(VALUES),
            daily=name in ("JobVMType", "JobVMMemory", "VMPARAM_vm_Disk"),
        )
        for name in (*READ, *OF_THE_SCHEDD)
    ),
    *(
        Attack(
            f"values-of-{name}",
            Who.USER,
            f"`{name}` has {len(FEW)} kinds of value, in a job whose disk is missing",
            Must.HOLD,
            "few_values",
            (name,),
            modes=NO_QEMU,
            times=len(FEW),
        )
        for name in OTHERS
    ),
    *(
        Attack(
            f"leak-by-{name}",
            Who.USER,
            f"`{name}` spells a private attribute out, in {len(LEAKS)} ways",
            Must.HOLD,
            "leaks",
            (name,),
            modes=NO_QEMU,
            times=len(LEAKS),
            daily=name == "VMPARAM_vm_Firmware",
        )
        for name in (*READ, "User", "VM_ATTR_Firmware", "VMPARAM_vm_Unknown")
    ),
    Attack(
        "vm-type",
        Who.USER,
        f"`vm_type` is one of {len(TYPES)} that are not the machine's",
        Must.HOLD,
        "types",
        modes=NO_QEMU,
        times=len(TYPES),
        daily=True,
    ),
    Attack(
        "policy-memory",
        Who.USER,
        f"a guest with more memory than `{POLICY}` of the machine allows, in {len(EVASIONS)} ways",
        Must.SURVIVE,
        "policy",
        modes=(Mode.LIBVIRT,),
        times=len(EVASIONS),
        daily=True,
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
        Attack(name, Who.SUBMIT, done, Must.SURVIVE, "large", (name,), modes=NO_QEMU, daily=name == "exponential")
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
        Must.HOLD,
        "cpus",
        modes=(Mode.LIBVIRT,),
        times=8,
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


def each_held(site: Site, name: str, values: Iterable[str], *more: str) -> None:
    """START with each value of an attribute has to hold the job, in a sentence without a secret."""
    missing = {} if name == "VMPARAM_vm_Disk" else {"VMPARAM_vm_Disk": '"missing.img:hda:w:raw"'}
    for value in values:
        before = len(site.breaches)
        site.start(*more, f"{name} = {value}", **missing)
        said = site.explanation()
        if SECRET in said or SECRET.upper() in said:
            site.breach("vm_error.txt has a secret")
        if site.vm:
            site.breach("it runs")
            site.ask("STOP")
            site.vm = ""
        if len(site.breaches) > before:
            site.breaches[-1] += f" [{name} = {value[:80]}]"


def values(site: Site, name: str) -> None:
    each_held(site, name, VALUES)


def few_values(site: Site, name: str) -> None:
    each_held(site, name, FEW)


def leaks(site: Site, name: str) -> None:
    each_held(site, name, LEAKS, *INDIRECT)


def types(site: Site) -> None:
    site.guest()
    for value in TYPES:
        before = len(site.breaches)
        site.start(JobVMType=value)
        if site.vm:
            if "random" in value or value in ('" kvm"', '"kvm "'):
                site.answered = ["1"]
            else:
                site.breach("it is served")
            site.ask("STOP")
            site.vm = ""
            site.answered = ["1"]
        if len(site.breaches) > before:
            site.breaches[-1] += f" [{value}]"


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
            lines = [f"{name} = {evil}" for name in READ if name not in ("JobVMType", "JobVMMemory")]
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
    for count, topology in (
        (255, "cores=85,threads=3"),
        (256, "cores=256"),
        (255, "sockets=255"),
        (254, "cores=127,threads=2"),
        (2147483647, ""),
        (240, "sockets=4,cores=60"),
        (4, "sockets=4,cores=4,threads=4"),
        (4, "cores=0"),
    ):
        more = [f'VMPARAM_vm_Topology = "{topology}"'] if topology else []
        site.start(*more, JobVM_VCPUS=count)
        if site.vm:
            site.ask("STOP")
            site.vm = ""
            site.answered = ["1"]


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
