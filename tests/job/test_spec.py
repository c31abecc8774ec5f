"""The job ad with HTCondor's rules, and what a job may ask for: every refusal holds the job and explains."""

import errno
import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.job.support import found as found_spec
from tests.job.support import refusal, spec
from tests.jobs import Files, ad, hurry_the_engine
from vmgahp import errors
from vmgahp.config import Settings
from vmgahp.errors import ClientFault, JobFault, MachineFault
from vmgahp.host.job_user import Identity
from vmgahp.job import ad as job_ad
from vmgahp.job import engine
from vmgahp.job.ad import JobAd, literal, quote
from vmgahp.job.disks import Disk, DiskRequest, entries
from vmgahp.job.spec import JobSpec
from vmgahp.job.vm_spec import VmSpec

names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_.]{0,20}", fullmatch=True)
plain_text = st.text(st.characters(exclude_categories=["Cc", "Cs", "Zl", "Zp"]))


# --- lines


@pytest.mark.parametrize(
    ("line", "pair"),
    [
        ("A = 1", ("A", "1")),
        ("  A=1  ", ("A", "1")),
        ('Args = "a = b"', ("Args", '"a = b"')),
        ("VM_GAHP.x_1 = undefined", ("VM_GAHP.x_1", "undefined")),
        *((line, None) for line in ("", "A", "A =", "A = ", "= 1", "1A = 1", ".A = 1", "A-B = 1", "A B = 1", "Ä = 1")),
        *((line, None) for line in ("A² = 1", "A = 1\0", "A = 1\nB = 2", "A = 1\rB")),
    ],
)
def test_parse_line(line, pair):
    assert JobAd.parse_line(line) == pair


@given(names, plain_text)
def test_a_string_survives_being_written_and_read(name, text):
    assert JobAd([JobAd.parse_line(f"{name} = {quote(text)}")]).string(name.upper()) == text


# --- values


def test_lookups_convert_as_htcondors_and_strings_are_old_classads():
    values = {"T": "true", "F": "FALSE", "I": "-3", "R": "2.9", "S": '"text"', "U": "undefined", "E": "error"}
    found = JobAd(values.items())
    assert [found.integer(name) for name in "TFIRSUE"] == [1, 0, -3, 2, None, None, None]
    assert [found.boolean(name) for name in "TFIRSUE"] == [True, False, True, True, None, None, None]
    assert [found.string(name) for name in "TFIRSUE"] == [None, None, None, None, "text", None, None]
    assert type(found.integer("T")) is int
    assert found.string("none") is None
    assert found.expression("none") is None
    assert literal(r'"C:\new\"quoted\" end\"') == 'C:\\new"quoted" end\\'
    assert literal(r'"\\"') == r"\\"
    assert literal('""') == ""
    for text in ('"', '"a', '"a"b"', '"a" + "b"', r'"a\""b"'):
        assert literal(text) is job_ad._NOT_LITERAL


def test_the_last_value_counts_but_for_the_working_directory():
    assert JobAd([("Foo", "1"), ("FOO", "2")]).integer("fOO") == 2
    assert JobAd([("VM_WORKING_DIR", '"/real"'), ("vm_working_dir", '"/etc"')]).working_dir() == "/real"


EXPRESSIONS = [
    *("0", "-0", "007", "0x1F", "1K", "5.", ".5", "1.5E2", "1.5e+2", "-1.5", "--1", "+7", "1_0", "2 * 3", "- 5"),
    *("99999999999999999999", "true", "TRUE", "t", "undefined", "ERROR", "T || F", "{1, 2}", "[a = 1]"),
    *('"a"', r'"a\nb"', r'"a\"b"', r'"a\"', r'"\\"', '"é"', "'A'", 'strcat("a", "b")', "A", "MY.A", "my.B", "Nope"),
    *("TARGET.A", 'real("INF")', "1.0 / 0", 'ifThenElse(A > 3, "yes", "no")', "X", "Loop"),
]


def test_values_are_those_of_htcondors_engine():
    import classad2

    others = 'A = 5\nB = A + 1\nS = "s"\nLoop = (Loop2)\nLoop2 = Loop\n'
    pairs = [JobAd.parse_line(line) for line in others.splitlines()]
    asked = {f"X{number}": f"X{number}" if text == "X" else text for number, text in enumerate(EXPRESSIONS)}
    found = JobAd([*pairs, *asked.items()])
    for name, expression in asked.items():
        try:
            value = classad2.parseOne(f"{others}{name} = {expression}\n").eval(name)
        except Exception:  # noqa: BLE001 - classad2 raises several kinds
            value = None
        if isinstance(value, classad2.Value):
            value = None
        assert found.string(name) == (value if isinstance(value, str) else None), expression
        finite = isinstance(value, int | float) and abs(value) < 2**63
        assert found.integer(name) == (int(value) if finite else None), expression
        assert found.boolean(name) == (bool(value) if isinstance(value, int | float) else None), expression


@given(st.text(st.sampled_from('"\\a1.-+eE (){}[]=;'), min_size=1))
def test_what_is_read_here_is_what_htcondors_engine_reads(text):
    import classad2

    expression = text.strip()
    value = literal(expression)
    if expression and value is not job_ad._NOT_LITERAL:
        assert classad2.parseOne(f"X = {expression}\n").eval("X") == value


def test_every_attribute_has_one_value_and_a_bad_one_hides_no_other():
    chance = ad(A="random(1000000000)", B="random(1000000000)", C="time()")
    first = [chance.integer(name) for name in "ABC"]
    assert [chance.integer(name) for name in "ABC"] == first
    assert [chance.values()[name] for name in "ABC"] == first
    assert chance.lines()[0] == f"A = {first[0]}"
    found = JobAd([("A", "5"), ("Bad", "((("), ("B", "A + 1"), ("C", '"x" + )'), ("D", "B + 1")])
    assert found.integer("D") == 7
    assert found.integer("Bad") is None


BREAKS_THE_ENGINE = {
    "a sum that overflows its stack": "1" + " + 1" * 300_000,
    "a selection that overflows its stack": "a" + ".b" * 300_000,
}


@pytest.mark.parametrize("expression", BREAKS_THE_ENGINE.values(), ids=BREAKS_THE_ENGINE.keys())
def test_what_brings_the_engine_down_holds_the_job_and_nothing_else(monkeypatch, expression):
    hurry_the_engine(monkeypatch)
    wanted = ad(X=expression)
    with pytest.raises(JobFault, match="cannot be evaluated"):
        wanted.integer("X")
    assert wanted.integer("JobVMMemory") == 512, "what is no expression is read all the same"


OVERTAKEN_ENGINE = """\
import os, resource, sys
from vmgahp.job import engine
restrict = engine.restrict
def become(*user, **limits):
    restrict(*user, **limits)
    {}
engine.restrict = become
sys.exit(engine.main(sys.argv[2:]))
"""


def test_what_befalls_the_engine_as_the_jobs_user_is_not_the_machines_fault(monkeypatch):
    """That user's other processes may limit it, from its first moment on."""

    def befall(then):
        monkeypatch.setattr(engine, "RUN_MODULE", ("-I", "-c", OVERTAKEN_ENGINE.format(then)))
        return ad(X="1 + 1").integer("X")

    assert befall("resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))") == 2
    with pytest.raises(JobFault, match="cannot be evaluated"):
        befall("os.close(0)")


def test_an_expression_that_never_ends_has_no_value(monkeypatch):
    """HTCondor 25 gives it up by itself; with 23.9 the limit of the engine ends it."""
    hurry_the_engine(monkeypatch)
    sums = "; ".join(f"x{number} = x{number - 1} + x{number - 1}" for number in range(1, 60))
    wanted = ad(X=f"[x0 = 1; {sums}].x59")
    try:
        value = wanted.integer("X")
    except JobFault:
        value = None
    assert value is None
    assert wanted.integer("JobVMMemory") == 512


def test_without_the_engine_all_but_expressions_can_be_read(monkeypatch):
    def refuse(*_arguments):
        raise engine.NoEngine("HTCondor's ClassAd module is not on this machine")

    monkeypatch.setattr(engine, "_ask", refuse)
    found = ad(RequestMemory="MY.JobVMMemory", Again="requestmemory")
    assert found.integer("Again") == 512
    assert found.vm_name() == "alice_example.org_17.0"
    with pytest.raises(JobFault, match="ClassAd module"):
        ad(X="1 + 1").integer("X")
    # Most jobs have a few expressions that nothing here needs.
    found = JobAd([("A", "1"), ("Requirements", "TARGET.Memory > 1")])
    assert found.lines() == ["A = 1", "Requirements = undefined"]
    assert found.values() == {"A": 1, "Requirements": None}


def test_the_engine_that_was_brought_down_is_not_asked_again(monkeypatch):
    asked = []

    def fail(*arguments):
        asked.append(arguments)
        raise engine.Failed("it fails")

    monkeypatch.setattr(engine, "_ask", fail)
    found = JobAd([("A", "1 + 1"), ("B", "2 + 2")])
    for look in (found.values, found.lines, lambda: found.integer("A"), lambda: found.integer("B")):
        with pytest.raises(JobFault, match="it fails"):
            look()
    assert len(asked) == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
@pytest.mark.parametrize("user", [None, Identity(54321, 54321)])
def test_the_engine_is_told_whose_rights_it_gets(monkeypatch, scratch, user):
    program = scratch / "python"
    program.write_text("#!/bin/sh\nread -r _; echo [$4, $5]\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    assert engine._ask({}, user) == ([54321, 54321] if user else [engine.NOBODY, engine.NOBODY])


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_the_engine_has_given_up_its_rights_before_it_reads():
    """With all its code, which the job's user may not be able to read; so nothing more is loaded then."""
    words = [sys.executable, "-I", "-m", "vmgahp.job.engine", "54321", "54321", str(os.getpid())]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        place = Path(f"/proc/{process.pid}")
        end = time.monotonic() + 30
        # Its uid is the last thing that it changes.
        while not re.search(r"^Uid:(\t54321){4}$", (place / "status").read_text(), re.MULTILINE):
            assert time.monotonic() < end
            time.sleep(0.01)
        status = (place / "status").read_text()
        assert re.search(r"^Gid:(\t54321){4}$", status, re.MULTILINE)
        assert re.search(r"^Groups:\s*$", status, re.MULTILINE)
        assert re.search(r"^CapEff:\t0+$", status, re.MULTILINE)
        seen = (place / "limits").read_text()
        assert re.search(rf"^Max cpu time +{engine.CPU_SECONDS} ", seen, re.MULTILINE)
        assert re.search(rf"^Max address space +{engine.MOST_MEMORY} ", seen, re.MULTILINE)
        assert re.search(r"^Max file size +0 ", seen, re.MULTILINE)
        answer, _ = process.communicate(json.dumps({"ad": [("A", "1+1")], "wanted": ["A"]}).encode())
        assert json.loads(answer) == {"A": 2}


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_resolver_that_does_not_answer_is_not_asked_for_this_machines_name():
    """HTCondor's module asks for it, and again for a minute, so the process has a name that needs no resolver."""
    name = socket.gethostname()
    script = (
        "import socket, sys\n"
        "from vmgahp.job import engine\n"
        "sys.modules['classad2'] = None  # which would look it up\n"
        "assert engine.main([]) != 0\n"
        "socket.inet_aton(socket.gethostname())\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
    assert socket.gethostname() == name


PRIVATE = ("ClaimId", "ClaimIdList", "CAPABILITY", "TransferKey", "ChildClaimIds", "PairedClaimId", "_condor_privX")
WAYS = {
    "plainly": "{}", "by MY": "MY.{}", "by TARGET": "TARGET.{}", "in a list": "{{{}}}[0]", "in an ad": "[a = {}].a",
    "from an ad": "[a = parent.{}].a", "as what stands in a text": 'eval("{0:.3s}" + substr("{0}", 3))',
    "unparsed": "unparse({})", "joined": 'strcat("x", {})',
    "chosen": 'ifThenElse(isUndefined({}), "free", "secret-71")', "by another attribute": "Other",
}  # fmt: skip


@pytest.mark.parametrize("private", PRIVATE)
def test_no_expression_reaches_a_private_attribute(private):
    """All ways at once, since each of them takes an engine."""
    ways = {f"Way{number}": way.format(private) for number, way in enumerate(WAYS.values())}
    found = ad(**{private: '"secret-71"'}, Other=f"({private})", **ways)
    assert found.string(private) is None
    assert [name for name in ways if "secret-71" in str(found.value(name))] == []
    assert "secret-71" not in repr((found.values(), found.lines(), found.expression("Way0")))
    assert found.judge(f'{private} =?= "secret-71" || MY.{private} =!= undefined') is False


def test_no_attribute_stands_for_an_ad():
    scopes = ("MY", "TARGET", "PARENT", "Self", "toplevel", "Root", "my.JobVMMemory")
    found = ad(**dict.fromkeys(scopes, "[JobVMMemory = 1]"), X="MY.JobVMMemory + 0")
    assert found.integer("X") == 512
    assert found.judge("MY.JobVMMemory <= 64 || JobVMMemory <= 64 || TARGET.JobVMMemory <= 64") is False


# --- the ad as a whole


def test_lines_are_sorted_without_secrets_and_the_name_is_htcondors():
    mine = ("VMPARAM_VM_NAME", '"mine"')
    found = JobAd([("b", "1 + 1"), ("ClaimId", '"secret"'), ("A", '"x\\"y"'), ("_condor_privX", "1"), mine])
    assert found.lines({"VMPARAM_VM_NAME": 'it"s', "Z": "a\nB = 1"}) == [
        *('A = "x\\"y"', "b = 2", 'VMPARAM_VM_NAME = "it\\"s"', 'Z = "a?B = 1"')
    ]
    assert found.string("VMPARAM_VM_NAME") == "mine"
    assert ad(User='"a@b@c"', ClusterId="5", ProcId="3").vm_name() == "a_b_c_5.3"


@pytest.mark.parametrize("missing", ["User", "ClusterId", "ProcId"])
def test_without_a_name_the_client_is_to_blame(missing):
    with pytest.raises(ClientFault, match=missing):
        ad(**{missing: None}).vm_name()


@pytest.mark.parametrize("user", ["../../etc/x", "a/b", "a\tb", "a\x1b", "é" * 101, "x" * 200])
def test_a_name_that_libvirt_could_trip_over_is_refused(user):
    with pytest.raises(JobFault, match="User"):
        ad(User=f'"{user}"').vm_name()


@pytest.mark.parametrize("path", [None, '""', '"relative"', "5", '"/a\tb"'])
def test_the_working_directory_must_be_a_full_path(path):
    with pytest.raises(ClientFault, match="VM_WORKING_DIR"):
        ad(VM_WORKING_DIR=path).working_dir()


# --- what a job gets


def test_the_least_that_a_job_can_say_and_its_switches():
    assert spec() == JobSpec(
        VmSpec(
            name="alice_example.org_17.0", vm_type="kvm", working_dir="/scratch", memory_mib=512, vcpus=1, nics=(),
            checkpoint=False, no_output_vm=False,
        ),
        disks=(), vnc=False, requests=(DiskRequest("disk.img:vda:w", "disk.img", "vda", "", True, "raw", "disk"),),
    )  # fmt: skip
    assert spec().vm.networking is False
    found = spec(JobVMVNCConsole="true", JobVMCheckpoint="TRUE", VMPARAM_No_Output_VM="1")
    assert (found.vnc, found.vm.checkpoint, found.vm.no_output_vm) == (True, True, True)


def test_reading_an_ad_opens_nothing(monkeypatch):
    def refuse(*arguments, **named):
        raise AssertionError(f"{arguments} {named}")

    everything = {
        "VMPARAM_vm_Disk": '"disk.img:vda:w, catalog:debian:vdb:w, /shared/x.qcow2:vdc:r:qcow2"',
        "VMPARAM_vm_Data_Disk": '"vdd:1G"',
        "VMPARAM_vm_Data_Files": '"in.csv, params"',
        "VMPARAM_vm_User_Data": '"user-data"',
        "JobVMNetworking": "true",
        "JobVMCheckpoint": "true",
    }
    spec(**everything)  # loads what it needs
    for name in ("open", "stat", "lstat", "listdir", "scandir", "access", "fork", "readlink"):
        monkeypatch.setattr(os, name, refuse)
    monkeypatch.setattr("builtins.open", refuse)
    assert [request.device for request in spec(**everything).requests] == [f"vd{letter}" for letter in "abcdef"]


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({}, "memory_mib", 512),
        ({"JobVMMemory": "1024"}, "memory_mib", 1024),
        ({"JobVMMemory": None, "RequestMemory": "700"}, "memory_mib", 700),
        ({"JobVMMemory": '"512"', "RequestMemory": "700"}, "memory_mib", 700),
        ({"JobVMMemory": "undefined", "RequestMemory": "700.9"}, "memory_mib", 700),
        ({"JobVMMemory": "1"}, "memory_mib", 32),
        ({"JobVM_VCPUS": "2", "RequestCpus": "3"}, "vcpus", 2),
        ({"JobVM_VCPUS": "0"}, "vcpus", 1),
    ],
)
def test_memory_and_vcpus(changes, field, value):
    assert getattr(spec(**changes).vm, field) == value


def test_memory_cpus_and_hardware_that_a_job_does_not_get():
    refusal(errors.NO_MEMORY_PARAM, "JobVMMemory", "RequestMemory", JobVMMemory=None)
    refusal(errors.NO_MEMORY_PARAM, "JobVMMemory = 1025", "1024", JobVMMemory="1025")
    refusal(errors.NO_MEMORY_PARAM, "RequestMemory = 0", JobVMMemory=None, RequestMemory="0")
    refusal(errors.NO_MEMORY_PARAM, "JobVMMemory = -5", JobVMMemory="-5")
    with pytest.raises(MachineFault, match="VM_MEMORY"):
        spec(Settings())
    refusal(errors.MISMATCHED, "JobVM_VCPUS = 5000", JobVM_VCPUS="5000")
    refusal(errors.MISMATCHED, "JobVMHardwareVT", "VM_HARDWARE_VT", JobVMHardwareVT="true")
    settings = Settings({"VM_MEMORY": "1024", "VM_HARDWARE_VT": "true"})
    spec(settings, JobVMHardwareVT="true")


# --- the network


def network(types="nat, user", default="", **values):
    given_values = {"VM_MEMORY": "1024", "VM_NETWORKING": "true", "VM_NETWORKING_TYPE": types}
    return Settings({**given_values, "VM_ALLOW_HOST_LOOPBACK": "true", "VM_NETWORKING_DEFAULT_TYPE": default, **values})


@pytest.mark.parametrize(
    ("settings", "wanted", "kind"),
    [
        (network(), '"nat"', "nat"),
        (network(), '" NAT "', "nat"),
        *((network(), text, "user") for text in (None, '""')),
        (network(default='"Nat"'), None, "nat"),
        (network("nat", default="bridge"), None, "nat"),
        (network("bridge", VM_NETWORKING_BRIDGE_INTERFACE="br0"), None, "bridge"),
    ],
)
def test_networking_type(settings, wanted, kind):
    found = spec(settings, JobVMNetworking="true", JobVMNetworkingType=wanted)
    assert (found.vm.networking, found.vm.networking_type) == (True, kind)


def test_a_network_that_is_not_on_offer_holds_the_job_and_a_mac_without_one_does_not_matter():
    option = {"JobVMNetworking": "true"}
    refusal(errors.MISMATCHED, "VM_NETWORKING", settings=Settings({"VM_MEMORY": "1024"}), **option)
    kind = {**option, "JobVMNetworkingType": '"bridge"'}
    refusal(errors.MISMATCHED, "JobVMNetworkingType", "bridge", "nat, user", **kind)
    refusal(errors.MISMATCHED, settings=network("bridge"), **option)
    kind["JobVMNetworkingType"] = '"user"'
    refusal(errors.MISMATCHED, "JobVMNetworkingType", settings=network(VM_ALLOW_HOST_LOOPBACK="false"), **kind)
    assert spec(JobVM_MACADDR='"nonsense"').macs == ()


@pytest.mark.parametrize(
    ("given_mac", "mac"),
    [
        ("52:54:00:12:34:56", "52:54:00:12:34:56"), ("52-54-00-AB-cd-EF", "52:54:00:ab:cd:ef"),
        (" 2:0:0:0:0:1 ", "02:00:00:00:00:01"), ("", ""),
    ],
)  # fmt: skip
def test_mac(given_mac, mac):
    assert spec(JobVMNetworking="true", JobVM_MACADDR=f'"{given_mac}"').vm.nics[0].mac == mac


@pytest.mark.parametrize(
    "mac",
    [
        *("52:54:00:12:34", "52:54:00:12:34:56:78", "52:54:00:12:34:5g", "525400123456", "00:00:00:00:00:00"),
        *("01:00:5e:00:00:01", "ff:ff:ff:ff:ff:ff", "52:54-00:12:34:56", "52:54:00:12:34:56'/><hostdev"),
        "٥٢:54:0:0:0:0",
    ],
)
def test_a_wrong_mac_holds_the_job(mac):
    refusal(errors.MISMATCHED, "JobVM_MACADDR", JobVMNetworking="true", JobVM_MACADDR=f'"{mac}"')


# --- the disks


def disks(text, files=None):
    return found_spec(files=files, VMPARAM_vm_Disk=quote(text)).disks


def test_disks_of_all_kinds_and_fifty_of_them():
    files = Files(["a.img", "boot.iso", "f.img", "disc"], ["/shared/isolated/b.qcow2"])
    text = "a.img:VDA:w, /submit/dir/boot.iso : hdc : w,/shared/isolated/b.qcow2:sda2:R:QCOW2,"
    text += "f.img:fda:rw:,disc:sdb:r:iso,"
    assert disks(text, files) == (
        Disk("/scratch/a.img", "vda", "", True, "raw", True, "disk"),
        Disk("/scratch/boot.iso", "hdc", "", False, "raw", True, "cdrom"),
        Disk("/shared/isolated/b.qcow2", "sda", "2", False, "qcow2", False, "disk"),
        Disk("/scratch/f.img", "fda", "", True, "raw", True, "floppy"),
        Disk("/scratch/disc", "sdb", "", False, "raw", True, "cdrom"),
    )
    assert ("/scratch", "a.img", os.O_RDWR) in files.asked
    assert ("/scratch", "boot.iso", os.O_RDONLY) in files.asked
    assert ("/shared/isolated/b.qcow2", False) in files.asked
    letters = "abcdefghijklmnopqrstuvwxyz"
    text = ",".join(f"disk.img:vd{one}{two}:r" for one in ("", "a") for two in letters)
    assert len(disks(text)) == 52


@pytest.mark.parametrize(
    ("text", "fields", "of_catalog", "well_formed"),
    [
        (" a.img : vda : w ", ("a.img", "vda", "w"), False, True),
        ("a.img:vda:w:", ("a.img", "vda", "w"), False, True),
        ("a.img:vda:w:qcow2", ("a.img", "vda", "w", "qcow2"), False, True),
        ("a.img:vda", ("a.img", "vda"), False, False),
        ("a.img::w", ("a.img", "", "w"), False, False),
        ("catalog:debian:vda:w", ("catalog", "debian", "vda", "w"), True, True),
        ("catalog:debian:vda:", ("catalog", "debian", "vda", ""), True, False),
        ("catalog:vda:w:qcow2", ("catalog", "vda", "w", "qcow2"), False, True),
        ("catalog:vda:w", ("catalog", "vda", "w"), False, True),
    ],
)
def test_every_reader_takes_an_entry_apart_in_the_same_way(text, fields, of_catalog, well_formed):
    [entry] = entries(f" ,{text},, ")
    assert (entry.text, entry.fields) == (text.strip(), fields)
    assert (entry.is_of_catalog, entry.is_well_formed) == (of_catalog, well_formed)


@pytest.mark.parametrize("value", ['""', '" "', '","', '" , "', None, "5"])
def test_no_disk_holds_the_job(value):
    refusal(errors.NO_DISK_PARAM, "VMPARAM_vm_Disk", VMPARAM_vm_Disk=value)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        *((text, "form") for text in ("disk.img", "disk.img:vda", "disk.img:vda:w:raw:x", "disk.img::w", ":vda:w")),
        *((f"disk.img:{device}:w", f"'{device}' is not a") for device in ("sdaaa", "vda123", "fdc", "hde", "hdaa")),
        *(("disk.img:vd'/>:w", "vd"), ("disk.img:vda:w:vhdx", "vhdx")),
        *((f"disk.img:vda:{permission}", f"'{permission}'") for permission in ("s", "sw", "wss", "x")),
        *(("disk.img:vda:w:raw'/>", "raw"), ("none.img:vda:w", "transfer"), ("/shared/none.img:vda:w", "No such file")),
        *((text, "twice") for text in ("disk.img:vda:w,disk.img:VDA:r", "disk.img:sda1:w,disk.img:sda2:w")),
        *(("a\x1bb:vda:w", "control"), ("none.img:vda:w", "is not in the job's scratch directory")),
        *((text, "scratch") for text in ("sub/none.img:vda:w", "../x:vda:w", "..:vda:w")),
        ("/:vda:w", ""),
    ],
)
def test_a_wrong_disk_holds_the_job(text, part):
    fault = refusal(errors.INVALID_DISK_PARAM, "VMPARAM_vm_Disk", files=Files(), VMPARAM_vm_Disk=f'"{text}"')
    assert part in fault.problem + fault.hint


@pytest.mark.parametrize("number", [errno.EACCES, errno.ELOOP, errno.EPERM])
def test_a_disk_in_the_scratch_directory_that_does_not_open_is_not_looked_for_elsewhere(number):
    files = Files(bad={"disk.img": number}, shared=["/shared/disk.img"])
    disk = '"/shared/disk.img:vda:r"'
    refusal(errors.INVALID_DISK_PARAM, os.strerror(number), files=files, VMPARAM_vm_Disk=disk)


def test_a_directory_of_that_name_or_a_hung_file_system_is_no_image():
    files = Files(bad={"disk.img": errno.EISDIR}, shared=["/shared/disk.img"])
    assert disks("/shared/disk.img:vda:r", files)[0].transferred is False
    files = Files()

    def hang(*_):
        raise MachineFault("A file system did not answer.")

    files.open_scratch = hang
    with pytest.raises(MachineFault):
        disks("disk.img:vda:w", files)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_with_real_files_as_the_jobs_user(scratch, user):
    for name, uid, mode in (("mine", user.uid, 0o600), ("roots", 0, 0o600), ("readable", 0, 0o644)):
        path = scratch / name
        path.write_bytes(b"x")
        path.chmod(mode)
        os.chown(path, uid, uid)
    (scratch / "link").symlink_to("/etc/shadow")
    place = quote(str(scratch))
    found = found_spec(files=user, VM_WORKING_DIR=place, VMPARAM_vm_Disk='"mine:vda:w,readable:vdb:r"')
    assert [disk.path for disk in found.disks] == [f"{scratch}/mine", f"{scratch}/readable"]
    for text in ("roots:vda:r", "readable:vda:w", "link:vda:r", "/etc/shadow:vda:r", "/dev/zero:vda:r"):
        refusal(errors.INVALID_DISK_PARAM, files=user, VM_WORKING_DIR=place, VMPARAM_vm_Disk=f'"{text}"')


def test_more_disks_than_a_vm_can_have_are_refused_before_any_is_opened() -> None:
    disks = ",".join(f"d.img:vd{first}{second}:r" for first in "abc" for second in "abcdefghijklmnopqrstuvwxyz")
    with pytest.raises(JobFault, match=r"name 78 disks; a VM has 64 files at most"):
        spec(VMPARAM_vm_Disk=f'"{disks}"')
