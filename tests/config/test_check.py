"""What is found wrong with settings, whom it stops, and which right name or word is told."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.config.support import CONDOR, Program, Tool, Write
from tests.peer import VMGAHP, daemon, environment
from vmgahp import config, vm_types
from vmgahp.cli import PROBE
from vmgahp.config import SETTINGS, Settings, sources
from vmgahp.config import check as settings_check
from vmgahp.config.check import ELSEWHERE, ELSEWHERE_BY_NAME, RETIRED
from vmgahp.config.sources import Entries, Entry
from vmgahp.config.table import PLUGIN, SERVER, STARTD, STARTER
from vmgahp.errors import MachineFault
from vmgahp.findings import BAD, OFF, Finding

DUMP = """\
# Configuration from machine: lab

EXECUTE = $(LOCAL_DIR)/execute
 # at: <Default>
 # expanded: /var/lib/condor/execute
 # default: $(LOCAL_DIR)/execute
VM_GAHP_CONFIG =
 # at: <Default>
 # expanded:
VM_LINES @=end
   first
   VM_MEMROY = 5
@end
 # at: /etc/condor/condor_config, line 18
 # expanded:
 #     first
 #     VM_MEMROY = 5
vm_type = kvm
 # at: /etc/condor/config.d/50-vm.config, line 3
 # expanded: kvm
VM_GAHP.VM_MEMORY = 64
 # at: <Environment>
 # expanded: 64
VM_MEMORY = 32
 # at: /etc/condor/condor_config, line 2
 # expanded: 32
# Contributing configuration file(s):
#	/etc/condor/condor_config
"""


def verdicts(found: list[Finding]) -> list[str]:
    return [finding.verdict for finding in found]


def entries(*lines: str, of_htcondor: bool = True) -> Entries:
    pairs = (line.partition("=") for line in lines)
    return Entries([Entry(n.strip(), v.strip(), "/etc/x, line 1") for n, _, v in pairs], of_htcondor)


# What the configuration sets


def test_what_htcondors_tool_lists(tool: Tool) -> None:
    found = sources.parse(DUMP)
    names = "EXECUTE VM_GAHP_CONFIG VM_LINES VM_TYPE VM_GAHP.VM_MEMORY VM_MEMORY"
    assert [entry.name for entry in found] == names.split()
    assert (found[2].value, found[2].where) == ("first VM_MEMROY = 5", "/etc/condor/condor_config, line 18")
    assert [entry.is_default for entry in found] == [True, True, False, False, False, False]
    where = Entries(found, of_htcondor=True).where()
    assert where["VM_TYPE"] == "/etc/condor/config.d/50-vm.config, line 3"
    assert where["VM_MEMORY"] == "the environment", "the daemon's own value counts before the plain one"
    assert where["EXECUTE"] == "HTCondor's default"
    assert "VM_GAHP_CONFIG" not in where
    with pytest.raises(MachineFault, match="Line 16"):
        sources.entries(tool("sys.exit('Configuration Error Line 16')"))


# Values


@pytest.mark.parametrize(
    ("name", "value", "vm_type", "verdict", "seen", "hint"),
    [
        ("VM_STOP_TIMEOUT", "soon", "kvm", BAD, "VM_STOP_TIMEOUT = soon", "whole number"),
        ("VM_NETWORKING", "ture", "kvm", BAD, "VM_NETWORKING = ture", "did you mean true?"),
        ("MAX_VM_GAHP_LOG", "big", "kvm", BAD, "MAX_VM_GAHP_LOG = big", "10 Mb"),
        *(
            ("VSPHERE_CHECKPOINT_DAYS", "long", vm_type, verdict, "VSPHERE_CHECKPOINT_DAYS = long", "whole number")
            for vm_type, verdict in (("kvm", OFF), ("vsphere", BAD), ("any", BAD), ("kvm,vsphere", BAD))
        ),
        ("VM_MEMORY", "1024  # MiB", "kvm", BAD, "VM_MEMORY = 1024  # MiB", "on a line of its own"),
        ("VMWARE_VMRUN", "/usr/bin/vmrun # or so", "kvm", OFF, "has a # in it", "on a line of its own"),
        *(
            ("VM_CPU_MODE", "host-modle", vm_type, verdict, "VM_CPU_MODE = host-modle", "mean host-model?")
            for vm_type, verdict in (("kvm", BAD), ("vmrun", OFF), ("xen", OFF))
        ),
        ("MAX_VM_GAHP_LOG", "7 days", "kvm", OFF, "MAX_VM_GAHP_LOG = 7 days", "see what it is about"),
        ("VM_SHARE_SCRATCH", "p9", "kvm", OFF, "VM_SHARE_SCRATCH = p9", "use none, 9p or virtiofs"),
        ("VM_GAHP_REQ_TIMEOUT", "0", "kvm", OFF, "is less than 1", "set it to 1 or more"),
        ("VM_MEMORY_IMAGE_FORMAT", "zst", "kvm", OFF, "VM_MEMORY_IMAGE_FORMAT = zst", "mean zstd?"),
    ],
)
def test_an_invalid_value(name: str, value: str, vm_type: str, verdict: str, seen: str, hint: str) -> None:
    [found] = settings_check.check(Settings({name: value}, "/etc/x, line 7"), vm_type)
    assert found.verdict == verdict
    assert seen in found.seen
    assert "/etc/x, line 7" in found.seen
    assert hint in found.hint


def test_a_setting_that_another_one_brings_into_play() -> None:
    assert not settings_check.is_read("VM_SSH_ADDRESS", Settings(), "kvm")
    assert settings_check.is_read("VM_SSH_ADDRESS", Settings({"VM_SSH_PORTS": "22000-22099"}), "kvm")
    script = Settings({"VM_CPU_MODE": "x", "LIBVIRT_XML_SCRIPT": "/opt/script"})
    assert verdicts(settings_check.values(script, "kvm")) == [OFF]
    settings = Settings({"VM_SOFT_SUSPEND": "x", "VM_STOP_TIMEOUT": "x", "VSPHERE_TLS_VERIFY": "x"})
    assert verdicts(settings_check.check(settings, "kvm")) == [BAD, OFF, OFF]
    settings = Settings({"VM_NETWORKING": "true", "VM_NETWORKING_TYPE": "bridge"})
    assert settings_check.networking(settings, "vmrun") is None


def test_the_defaults_and_every_word_of_the_table_are_right() -> None:
    alive = {*config.BY_NAME, *ELSEWHERE_BY_NAME}
    assert not alive & set(RETIRED)
    assert not set(config.BY_NAME) & set(ELSEWHERE_BY_NAME)
    for setting in (*SETTINGS, *ELSEWHERE):
        assert setting.readers
        assert set(setting.readers) <= {SERVER, STARTD, STARTER, PLUGIN}
    everything = Settings({setting.name: setting.default for setting in SETTINGS})
    for vm_type in vm_types.DRIVERS:
        assert settings_check.check(everything, vm_type) == []
        assert settings_check.networking(everything, vm_type) is None
    for setting in SETTINGS:
        for word in setting.words:
            assert settings_check.values(Settings({setting.name: word.upper()}), "kvm") == [], setting.name


@pytest.mark.parametrize(
    ("values", "seen", "hint"),
    [
        ({}, "names no kind", "VM_NETWORKING_TYPE = nat"),
        ({"VM_NETWORKING_TYPE": "nat brigde"}, "brigde, which is no kind", "did you mean bridge?"),
        ({"VM_NETWORKING_TYPE": "bridge"}, "VM_NETWORKING_BRIDGE_INTERFACE is not set", "br0"),
        ({"VM_NETWORKING_TYPE": "nat, user"}, "loopback address (VM_ALLOW_HOST_LOOPBACK)", "use nat, or set"),
        ({"VM_NETWORKING_TYPE": "nat", "VM_NETWORKING_DEFAULT_TYPE": "user"}, "does not offer", "one of nat"),
    ],
)
def test_networks(values: dict[str, str], seen: str, hint: str) -> None:
    found = settings_check.networking(Settings({"VM_NETWORKING": "true", **values}), "kvm")
    assert (found.check, found.verdict) == ("VM_NETWORKING", OFF)
    assert seen in found.seen
    assert hint in found.hint
    assert settings_check.networking(Settings({"VM_NETWORKING": "false", **values}), "kvm") is None


# Names


def test_a_misspelled_name() -> None:
    lines = ["VM_MEMROY = 1", "VM_MY_DIRECTORY = /srv", "VM_GAHP_LOG = $(VM_MY_DIRECTORY)/log", "MY_OWN = 1"]
    found = settings_check.names(entries(*lines, "VM_GAHP.VM_TPYE = kvm", "VM_QUITE_ELSE = 1", of_htcondor=False))
    assert [finding.seen for finding in found] == [
        "VM_MEMROY (/etc/x, line 1) is not a setting of this daemon; did you mean VM_MEMORY?",
        "VM_GAHP.VM_TPYE (/etc/x, line 1) is not a setting of this daemon; did you mean VM_TYPE?",
        "VM_QUITE_ELSE (/etc/x, line 1) is not a setting of this daemon.",
    ]
    assert verdicts(found) == [OFF, OFF, OFF]
    for name, right in (
        ("VSPHERE_PASWORD_FILE", "VSPHERE_PASSWORD_FILE"),
        ("VMWARE_VMRUM", "VMWARE_VMRUN"),
        ("XEN_BOOT_LOADER", "XEN_BOOTLOADER"),
        ("LIBVIRT_XML_SCRIPTS", "LIBVIRT_XML_SCRIPT"),
        ("MAX_VMGAHP_LOG", "MAX_VM_GAHP_LOG"),
        ("VM_STATUS_INTERVALL", "VM_STATUS_INTERVAL"),
        ("VM_EMULATION", "VM_ALLOW_EMULATION"),
    ):
        [found] = settings_check.names(entries(f"{name} = x"))
        assert f"did you mean {right}?" in found.seen


def test_names_of_the_site_or_of_htcondor_are_no_misspellings() -> None:
    assert settings_check.names(entries("VM_OWN_THING = 1", "VM_RACK = 7", "XEN_FARM = a", "MY_VM_MEMROY = 1")) == []
    lines = ["VM_MEMROY = 7", "STARTD_ATTRS = $(STARTD_ATTRS), VM_MEMROY"]
    assert settings_check.names(entries(*lines)) == [], "it is named elsewhere, so somebody wants it so"
    [found] = settings_check.names(entries(lines[0]))
    assert "did you mean VM_MEMORY?" in found.seen
    assert settings_check.names(entries("VM_SHARE_DIR_REF = /srv", "VM_SHARE_DIR_R_IF = true")) == []
    # Such as one that a later HTCondor brings: its default tells that it knows the name.
    known = Entry("VM_MEMORYS", "", "<Default>", is_default=True)
    assert settings_check.names(Entries([known, Entry("VM_MEMORYS", "5", "x")], of_htcondor=True)) == []


@pytest.mark.parametrize("name", RETIRED)
def test_what_htcondor_no_longer_reads(name: str) -> None:
    [found] = settings_check.names(entries(f"{name} = 5"))
    assert found.verdict == OFF
    assert f"HTCondor no longer reads {name}" in found.seen
    assert found.hint.startswith("take it out.")
    assert settings_check.names(entries(f"{name} =")) == [], "it says nothing"
    default = Entry(name, "0", "<Default>", is_default=True)
    assert settings_check.names(Entries([default], of_htcondor=True)) == [], "nobody has set it"


def test_a_setting_that_its_daemon_does_not_take() -> None:
    [found] = settings_check.names(entries("STARTER.VM_LIBVIRT_URI = qemu:///session"))
    assert "for the starter alone, and VM_LIBVIRT_URI is read by: this daemon" in found.seen
    assert found.hint == "write VM_LIBVIRT_URI without STARTER."
    assert settings_check.names(entries("STARTER.VM_STATUS_INTERVAL = 60", "VM_GAHP.VM_MEMORY = 5")) == []
    [found] = settings_check.elsewhere(entries("VM_STATUS_INTERVAL = 5"))
    assert (found.verdict, "less than 30" in found.seen) == (OFF, True)
    assert settings_check.elsewhere(entries("VM_STATUS_INTERVAL = 30")) == []


# Where it is shown


def test_the_probe_tells_people_and_never_the_startd(scratch: Path) -> None:
    log = scratch / "log"
    environ = environment("simulated", scratch, VM_MEMROY=5, VM_GAHP_LOG=log)
    command = [*VMGAHP, "probe", "--type", "simulated", "--json"]
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    document = json.loads(ended.stdout)
    assert document["capable"] is True
    [found] = [finding for finding in document["findings"] if finding["check"] == "settings"]
    assert found["verdict"] == "off"
    assert "did you mean VM_MEMORY?" in found["seen"]
    ended = daemon(environ, PROBE, "vmtype", "simulated")
    assert ended.returncode == 0
    assert 'VM_Type = "simulated"' in ended.stdout
    assert "MEMROY" not in ended.stdout
    assert "settings: VM_MEMROY (the environment) is not a setting" in log.read_text()


def test_the_probe_names_a_line_of_htcondors(tool: Tool, monkeypatch: pytest.MonkeyPatch, vmgahp: Program) -> None:
    values = {"VM_TYPE": "simulated", "VM_MEMORY": "64", "VM_SHARE_SCRATCH": "p9"}
    monkeypatch.setenv("PATH", tool(CONDOR.format(values=values))["PATH"] + ":/usr/bin:/bin")
    monkeypatch.delenv("VMGAHP_CONFIG", raising=False)
    _, out, _ = vmgahp("probe", "--type", "simulated", "--json")
    [found] = [one for one in json.loads(out)["findings"] if one["check"] == "settings"]
    assert found["verdict"] == "off"
    assert found["seen"].startswith("VM_SHARE_SCRATCH = p9 (/etc/condor/config.d/50-vm, line 9)")


def test_the_probe_names_every_setting_that_keeps_jobs_from_running(given_file: Write, vmgahp: Program) -> None:
    given_file("VM_MEMORY = lots\nVM_STOP_TIMEOUT = soon\nVSPHERE_CHECKPOINT_DAYS = x\n")
    status, out, _ = vmgahp("probe", "--type", "simulated", "--json")
    found = [one for one in json.loads(out)["findings"] if one["check"] != "host name"]
    assert (status, [finding["verdict"] for finding in found]) == (1, ["bad", "bad", "off"])
    assert "line 2" in found[1]["seen"]


# vmgahp config


def test_all_settings_in_a_pipe(given_file: Write, vmgahp: Program) -> None:
    path = given_file("VM_MEMORY = 64\nVM_MEMROY = 5\nVM_TYPE = simulated\n")
    status, out, err = vmgahp("config")
    assert status == 0
    assert f"VM_MEMORY = 64\n # from: {path}, line 1\n" in out
    assert "VM_STOP_TIMEOUT = 30\n # from: default\n" in out
    assert "VM_STATUS_INTERVAL = 60\n # from: default\n" in out
    assert "did you mean VM_MEMORY?" in " ".join(err.split())
    assert "VM_MEMROY" not in out
    for setting in (*SETTINGS, *ELSEWHERE):
        assert f"\n{setting.name} =" in f"\n{out}"
    printed = sources.logical_lines(out.replace("\n #", "\n#"), "x")
    settings = Settings({name: value for _, name, value in printed if name in config.BY_NAME})
    assert settings.integer("VM_MEMORY") == 64, "what is printed is a file of settings again"


def test_some_settings_and_what_is_set(given_file: Write, vmgahp: Program) -> None:
    given_file("VM_MEMORY = 64\nVM_TYPE = simulated\nVM_MEMROY = 5\n")
    status, out, err = vmgahp("config", "vm_memory", "VM_MEMROY", "VMWARE_PERL", "VM_POLICY*")
    names = [line.partition(" =")[0] for line in out.splitlines() if not line.startswith(" #")]
    assert (status, names) == (2, ["VM_MEMORY", "VM_POLICY", "VM_POLICY_REQUIREMENTS"])
    assert "VM_MEMROY is not a setting; did you mean VM_MEMORY?" in err
    assert "VMWARE_PERL: neither HTCondor nor this daemon reads it" in err
    given_file("VM_MEMORY = 64\nVM_TYPE = simulated\nVSPHERE_HOST = esx\n")
    status, out, _ = vmgahp("config", "--changed", "--json")
    shown = {one["name"]: one for one in json.loads(out)["settings"]}
    assert (status, list(shown)) == (0, ["VM_TYPE", "VM_MEMORY", "VSPHERE_HOST"])
    memory = {"value": "64", "default": "0", "type": "integer", "unit": "MiB", "read_by": ["this daemon"]}
    assert {name: shown["VM_MEMORY"][name] for name in memory} == memory
    _, out, _ = vmgahp("config", "--changed", "--verbose")
    assert " # integer, MiB; default: 0\n # read by: this daemon\n # The memory of this machine" in out


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("VM_MEMORY = lots\nVM_TYPE = simulated\n", "VM_MEMORY = lots"),
        ("VM_MEMORY = 64\nVM_TYPE = kmv\n", "did you mean kvm?"),
        ("VM_MEMORY lots\n", "line 1"),
    ],
)
def test_settings_that_keep_jobs_from_running(given_file: Write, vmgahp: Program, text: str, said: str) -> None:
    given_file(text)
    status, _, err = vmgahp("config")
    assert status == 1
    assert said in err


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("LIBVIRT_XML_SCRIPT_ARGS", "--password=hunter2 -v", "--password=... -v"),
        ("LIBVIRT_XML_SCRIPT_ARGS", "--token hunter2", "--token ..."),
        ("LIBVIRT_XML_SCRIPT_ARGS", "ClaimId=hunter2", "ClaimId="),
        ("VM_LIBVIRT_URI", "qemu+tls://me:hunter2@there/system", "qemu+tls://me:...@there/system"),
        ("VSPHERE_PASSWORD_FILE", "/etc/condor/password", "/etc/condor/password"),
        ("VM_IMAGE_DIRS", "/srv/token /srv/key:1", "/srv/token /srv/key:1"),
    ],
)
def test_no_secret_is_shown(name: str, value: str, shown: str, given_file: Write, vmgahp: Program) -> None:
    given_file(f"{name} = {value}\n")
    for words in ([name], [name, "--json"], [name, "--verbose"], []):
        _, out, err = vmgahp("config", *words)
        assert "hunter2" not in out + err
        assert shown in out


def test_on_a_terminal_it_is_a_table(given_file: Write) -> None:
    given_file("VM_MEMORY = 64\nVM_TYPE = simulated\nVM_MEMROY = 1\n")
    code = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"
    environ = os.environ | {"COLUMNS": "140", "NO_COLOR": "1", "TERM": "xterm"}
    command = [sys.executable, "-c", code, *VMGAHP, "config", "--changed"]
    ended = subprocess.run(command, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout
    lines = ended.stdout.replace("\x1b[1m", "").replace("\x1b[0m", "").splitlines()
    assert lines[0].split() == ["Setting", "Value", "From", "Meaning"]
    memory = next(line for line in lines if line.startswith("VM_MEMORY"))
    assert memory.index("64 (default 0)") == lines[0].index("Value")
    assert "The memory of this machine for all VMs together." in memory
    assert "did you mean VM_MEMORY?" in " ".join(ended.stdout.split())
