"""The settings: the table, the four sources, and that a wrong value is named with its hint."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import REPOSITORY
from tests.config.support import CONDOR
from vmgahp.config import SETTINGS, Settings, load, sources
from vmgahp.config.check import ELSEWHERE
from vmgahp.config.table import Setting
from vmgahp.errors import MachineFault
from vmgahp.host.run import run

EXAMPLE = REPOSITORY / "config" / "vmgahp.conf.example"


@pytest.fixture
def from_text(given_file):
    """Load a file of settings with some environment."""
    return lambda text, **environ: load({"VMGAHP_CONFIG": str(given_file(text)), **environ})


def own_file(home, text):
    path = home / ".config" / "vmgahp" / "vmgahp.conf"
    path.parent.mkdir(parents=True)
    path.write_text(text)


def make_tool(path):
    """An executable file in a directory of its own."""
    path.parent.mkdir()
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


# --- the table and the getters


def test_the_rows_of_the_table():
    columns = {*Setting.__annotations__, "name", "kind", "default", "meaning"}
    for row in (*SETTINGS, *ELSEWHERE):
        assert vars(row).keys() <= columns
        assert row.name == row.name.upper()
    settings = Settings()
    getters = {
        "string": settings.string, "path": settings.string, "arguments": settings.string, "expression": settings.string,
        "integer": settings.integer, "bool": settings.boolean, "size": settings.size, "list": settings.strings,
    }  # fmt: skip
    for setting in SETTINGS:
        getters[setting.kind](setting.name)
        assert settings.where(setting.name) == "default"
        assert setting.meaning.endswith(".")
    assert settings.warnings == []
    with pytest.raises(KeyError):
        Settings().string("VM_MEMROY")
    with pytest.raises(KeyError):
        Settings({"VM_MEMROY": "1"})


def test_the_example_file_is_made_from_the_table_and_right(from_text):
    command = [sys.executable, REPOSITORY / "docs" / "_ext" / "example_file.py"]
    assert EXAMPLE.read_text() == subprocess.run(command, capture_output=True, text=True, check=True).stdout
    settings = from_text(EXAMPLE.read_text())
    assert settings.integer("VM_MEMORY") > 0
    assert settings.string("VM_TYPE") == "kvm"
    assert settings.warnings == []
    everything = from_text(EXAMPLE.read_text().replace("\n#", "\n").replace("\n ", "\n# "))
    for setting in SETTINGS:
        if not setting.example:
            assert everything.string(setting.name) == Settings().string(setting.name)


def test_quotes_and_empty_values_do_not_count():
    settings = Settings({"VM_NETWORKING_TYPE": ' "nat, user" ', "LIBVIRT_XML_SCRIPT_ARGS": "\"a 'b c'\""})
    assert settings.strings("VM_NETWORKING_TYPE") == ["nat", "user"]
    assert settings.string("LIBVIRT_XML_SCRIPT_ARGS") == "\"a 'b c'\""
    settings = Settings({"VM_STOP_TIMEOUT": "  "})
    assert settings.integer("VM_STOP_TIMEOUT") == 30
    assert settings.where("VM_STOP_TIMEOUT") == "default"


@pytest.mark.parametrize(
    ("text", "value"),
    [*((yes, True) for yes in ("true", "TRUE", "1", "yes")), *((no, False) for no in ("false", "False", "0", "no"))],
)
def test_true_and_false(text, value):
    assert Settings({"VM_REPORT_PID": text}).boolean("VM_REPORT_PID") is value
    assert Settings({"VM_NETWORKING": text}).boolean("VM_NETWORKING") is value


def test_expressions_are_htcondors(monkeypatch):
    settings = Settings({"VM_MEMORY": "3 * 1024 + 0.5", "VM_NETWORKING": "2 > 1 && !false"})
    assert settings.integer("VM_MEMORY") == 3072
    assert settings.boolean("VM_NETWORKING") is True
    monkeypatch.setitem(sys.modules, "classad2", None)
    assert Settings({"VM_MEMORY": "1024"}).integer("VM_MEMORY") == 1024
    with pytest.raises(MachineFault, match="ClassAd module") as caught:
        Settings({"VM_MEMORY": "4 * 1024"}).integer("VM_MEMORY")
    assert "htcondor" in caught.value.hint


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        *(
            ("integer", "VM_MEMORY", text)
            for text in ("lots", "-1", "undefined", "error", "true", "1024 MB", "9" * 30, "9" * 5000, "²", "1e300")
        ),
        *(("boolean", "VM_NETWORKING", text) for text in ("maybe", "error", "undefined", "(((")),
        *(("size", "MAX_VM_GAHP_LOG", text) for text in ("big", "10 quux", "-1", "10 M b")),
    ],
    ids=lambda text: text[:20],
)
def test_a_wrong_value_is_named_with_where_it_is_and_what_to_write(kind, name, value):
    settings = Settings({name: value}, where="/etc/x.conf, line 7")
    with pytest.raises(MachineFault) as caught:
        getattr(settings, kind)(name)
    for part in (name, value, "/etc/x.conf, line 7"):
        assert part in caught.value.problem
    assert name in caught.value.hint


@pytest.mark.parametrize(
    ("text", "size"),
    [
        *(("0", 0), ("4096", 4096), ("7 bytes", 7), ("2k", 2048), ("1 GiB", 1 << 30), ("3 Tb", 3 << 40)),
        *((ten, 10 << 20) for ten in ("10 Mb", "10MB", "10 M")),
    ],
)
def test_sizes(text, size):
    assert Settings({"MAX_VM_GAHP_LOG": text}).size("MAX_VM_GAHP_LOG") == size


@pytest.mark.parametrize("text", ["7 days", "1 d", "10 m", "10 min", "3600 s", "2 weeks", "1 hour"])
def test_a_time_where_a_size_belongs_is_tolerated_with_a_warning(text):
    settings = Settings({"MAX_VM_GAHP_LOG": text})
    assert [settings.size("MAX_VM_GAHP_LOG") for _ in range(2)] == [10 << 20] * 2
    [warning] = settings.warnings
    assert text in warning


def test_what_settings_come_to():
    values = {"VM_NETWORKING": "true", "VM_NETWORKING_TYPE": '"NAT, bridge user,carrier-pigeon nat"'}
    values["VM_ALLOW_HOST_LOOPBACK"] = "true"
    assert Settings(values).networking_types() == ["nat", "user"]
    del values["VM_ALLOW_HOST_LOOPBACK"]
    assert Settings(values).networking_types() == ["nat"], "a guest of type user reaches this machine's loopback"
    values |= {"VM_NETWORKING_BRIDGE_INTERFACE": "br0", "VM_ALLOW_HOST_LOOPBACK": "true"}
    assert Settings(values).networking_types() == ["nat", "bridge", "user"]
    values["VM_NETWORKING"] = "false"
    assert Settings(values).networking_types() == []
    assert Settings({"VM_NETWORKING": "true"}).networking_types() == []
    own = "/usr/libexec/condor/libvirt_simple_script.awk"
    assert Settings().xml_script() == ""
    assert Settings({"LIBVIRT_XML_SCRIPT": own}).xml_script() == ""
    assert Settings({"LIBVIRT_XML_SCRIPT": own, "LIBEXEC": "/usr/libexec/condor/"}).xml_script() == ""
    copy = "/etc/condor/libvirt_simple_script.awk"
    assert Settings({"LIBVIRT_XML_SCRIPT": copy, "LIBEXEC": "/usr/libexec/condor"}).xml_script() == copy
    assert Settings({"LIBVIRT_XML_SCRIPT": "/opt/x", "LIBEXEC": "/opt"}).xml_script() == "/opt/x"
    assert Settings().call_timeout() == 30
    assert Settings({"VM_GAHP_REQ_TIMEOUT": "200"}).call_timeout() == 20
    assert Settings({"VM_GAHP_REQ_TIMEOUT": "3"}).call_timeout() == 1
    for_ever = Settings({"VM_GAHP_REQ_TIMEOUT": "99999999", "VM_STOP_TIMEOUT": "99999999"})
    assert run(["true"], deadline=for_ever.call_timeout()).status == 0
    assert run(["true"], deadline=for_ever.integer("VM_STOP_TIMEOUT")).status == 0


# --- a file


def test_a_file(from_text, tmp_path):
    settings = from_text(
        """
        # a comment \\
        VM_TYPE = kvm
        vm_memory=1024
        LOG = /var/log/vm
        VM_GAHP_LOG = $(LOG)/$(VM_TYPE:none)/Log$(NOTHING).$(NOTHING:x)
        VM_NETWORKING_TYPE = nat, \\
          # in the middle
             user
        VM_LIBVIRT_URI = a=b # no comment
        VM_NAT_NETWORK = $(VM_NAT_NETWORK)one
        VM_NAT_NETWORK = $(VM_NAT_NETWORK)-two
        VM_NETWORKING_BRIDGE_INTERFACE = a
        VM_NETWORKING_BRIDGE_INTERFACE = \N{LATIN SMALL LETTER SHARP S}$(VM_NETWORKING_BRIDGE_INTERFACE)
        VM_CPU_MODE = $(DOLLAR)(VM_TYPE) $$(VM_TYPE) $(VM_TYPE
        VM_STOP_TIMEOUT =
        """
    )
    assert settings.string("VM_TYPE") == "kvm"
    assert settings.integer("VM_MEMORY") == 1024
    assert settings.where("VM_MEMORY") == f"{tmp_path}/vmgahp.conf, line 4"
    assert settings.string("VM_GAHP_LOG") == "/var/log/vm/kvm/Log.x"
    assert settings.strings("VM_NETWORKING_TYPE") == ["nat", "user"]
    assert settings.string("VM_LIBVIRT_URI") == "a=b # no comment"
    assert settings.string("VM_NAT_NETWORK") == "one-two"
    assert settings.string("VM_NETWORKING_BRIDGE_INTERFACE") == "\N{LATIN SMALL LETTER SHARP S}a"
    assert settings.string("VM_CPU_MODE") == "$(VM_TYPE) $$(VM_TYPE) $(VM_TYPE"
    assert settings.integer("VM_STOP_TIMEOUT") == 30
    assert settings.warnings == []


def test_the_environment_overrides_a_file(from_text):
    text = "VM_TYPE = kvm\nVM_MEMORY = 1\nVM_GAHP.VM_CPU_MODE = sub\nVM_NAT_NETWORK = $(VM_TYPE)net\n"
    environ = {
        "_CONDOR_VM_TYPE": "qemu", "_condor_vm_gahp.vm_memory": "2", "_CONDOR_VM_MEMORY": "3",
        "_CONDOR_VM_CPU_MODE": "plain", "_CONDOR_VM_GAHP_VM_STOP_TIMEOUT": "5",
    }  # fmt: skip
    settings = from_text(text, **environ)
    assert settings.string("VM_TYPE") == "qemu"
    assert settings.string("VM_NAT_NETWORK") == "qemunet"
    assert settings.integer("VM_MEMORY") == 2
    # The subsystem's own value counts before the plain one wherever it was set, as with condor_config_val.
    assert settings.string("VM_CPU_MODE") == "sub"
    assert settings.integer("VM_STOP_TIMEOUT") == 30
    assert settings.where("VM_TYPE") == "the environment"


@pytest.mark.parametrize("line", ["VM_TYPE kvm", "= 5", "VM-TYPE = 1", "5A = 1", "use ROLE : Execute", "if true"])
def test_a_line_that_is_no_setting_is_named(from_text, line):
    with pytest.raises(MachineFault, match=r"vmgahp.conf, line 2") as caught:
        from_text(f"\n{line}\n")
    assert line in caught.value.problem


DOUBLING = [f"A{number + 1} = $(A{number})$(A{number})" for number in range(25)]


@pytest.mark.parametrize(
    ("said", "lines"),
    [
        ("refers to itself", ["VM_TYPE = $(VM_CPU_MODE)", "VM_CPU_MODE = $(VM_TYPE)"]),
        ("refers to itself", ["A=$(B)", "B=$(A)", "VM_TYPE=$(A)"]),
        ("has more than 65536 characters", ["VM_TYPE = kvm", *["VM_TYPE = $(VM_TYPE)$(VM_TYPE)"] * 25]),
        ("has more than 65536 characters", ["A0 = kvm", *DOUBLING, "VM_TYPE = $(A25)"]),
    ],
    ids=["a circle", "a circle of others", "a value that doubles", "a value that others double"],
)
def test_a_value_without_end_is_named_before_it_fills_the_memory(from_text, said, lines):
    with pytest.raises(MachineFault, match=said):
        from_text("\n".join(lines))


def test_a_file_that_is_not_there_or_not_safe(tmp_path, given_file):
    for path, said in ((str(tmp_path / "none"), "cannot be read"), ("vmgahp.conf", "not a full path")):
        with pytest.raises(MachineFault, match=said):
            load({"VMGAHP_CONFIG": path})
    path = given_file("VM_TYPE = kvm\n")
    path.chmod(0o666)
    with pytest.raises(MachineFault, match="changed by others"):
        load({"VMGAHP_CONFIG": str(path)})
    if os.geteuid() == 0:
        path.chmod(0o644)
        os.chown(path, 54321, 54321)
        with pytest.raises(MachineFault, match="changed by others"):
            load({"VMGAHP_CONFIG": str(path)})


def test_without_any_source_the_files_of_the_house_then_the_defaults(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "find_tool", lambda _: "")
    monkeypatch.setattr(sources, "_from_bindings", lambda *_: None)
    exists = os.path.exists
    monkeypatch.setattr(os.path, "exists", lambda path: path != "/etc/vmgahp.conf" and exists(path))
    environ = {"HOME": str(tmp_path), "_CONDOR_VM_CPU_MODE": "x"}
    settings = load(environ)
    assert settings.where("VM_TYPE") == "default"
    assert settings.string("VM_CPU_MODE") == "x"
    own_file(tmp_path, "VM_TYPE = qemu\n")
    settings = load(environ)
    assert settings.string("VM_TYPE") == "qemu"
    assert settings.string("VM_CPU_MODE") == "x"


# --- HTCondor


def test_htcondors_tool_is_asked_once_and_gets_the_environment(tool):
    values = {"VM_TYPE": "kvm", "VM_MEMORY": "1024", "VM_GAHP_LOG": "/var/log/condor/VMGahpLog"}
    environ = tool(f'open(sys.argv[0] + ".calls", "a").write("x")\n{CONDOR.format(values=values)}')
    settings = load({**environ, "_CONDOR_VM_TYPE": "kvm"})
    assert {name: settings.string(name) for name in values} == values
    wanted = {"VM_MEMORY": "HTCondor's configuration", "VM_TYPE": "the environment", "VM_STOP_TIMEOUT": "default"}
    assert {name: settings.where(name) for name in wanted} == wanted
    assert Path(environ["PATH"].split(":")[1], "condor_config_val.calls").read_text() == "x"
    environ = tool(
        'print(os.environ["_CONDOR_VM_TYPE"]) ; [print("Not defined: " + n, file=sys.stderr) '
        'for n in sys.argv[3:] if n != "VM_TYPE"]'
    )
    assert load({**environ, "_CONDOR_VM_TYPE": "qemu"}).string("VM_TYPE") == "qemu"


@pytest.mark.parametrize("value", ["one\ntwo", "\n", "one\n\ntwo\n"])
def test_a_value_of_several_lines_does_not_shift_the_others(tool, value):
    values = {"VM_TYPE": "kvm", "VM_LIBVIRT_URI": value, "VM_MEMORY": "7"}
    settings = load(tool(CONDOR.format(values=values)))
    assert settings.string("VM_TYPE") == "kvm"
    assert settings.integer("VM_MEMORY") == 7
    assert settings.string("VM_LIBVIRT_URI") == value.strip()


def test_a_broken_configuration_is_a_fault(tool):
    message = "Configuration Error Line 16 while reading global config source /etc/condor/condor_config"
    with pytest.raises(MachineFault, match="Line 16") as caught:
        load(tool(f"sys.exit({message!r})"))
    assert "condor_config_val" in caught.value.hint
    with pytest.raises(MachineFault, match="it wrote nothing"):
        load(tool("sys.exit(3)"))
    with pytest.raises(MachineFault, match="more than a configuration has"):
        load(tool('while True: print("x" * 10000)'))


def test_an_htcondor_without_a_configuration_does_not_count(tool, tmp_path):
    environ = tool('sys.exit("\\nNeither the environment variable CONDOR_CONFIG,\\n/etc/condor/, nor ...")')
    own_file(tmp_path, "VM_TYPE = qemu\n")
    assert load(environ).string("VM_TYPE") == "qemu"
    if os.geteuid() == 0:  # the home of a job's user, which starters since 24.12 name, has no settings of root's
        os.chown(tmp_path, 54321, 54321)
        assert load(environ).string("VM_TYPE") != "qemu"


def test_a_tool_that_hangs_is_killed(tool, monkeypatch, tmp_path):
    monkeypatch.setattr(sources, "DEADLINE", 0.3)
    environ = tool(f'open("{tmp_path}/pid", "w").write(str(os.getpid()))\nwhile True: time.sleep(60)')
    with pytest.raises(MachineFault, match="did not answer"):
        load(environ)
    if (tmp_path / "pid").exists() and (tmp_path / "pid").read_text():
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / "pid").read_text()), 0)


def test_no_descriptor_is_left_open(tool):
    environ = tool(CONDOR.format(values={}))
    load(environ)
    before = len(os.listdir("/proc/self/fd"))
    load(environ)
    assert len(os.listdir("/proc/self/fd")) == before


def test_where_the_tool_is_found(tmp_path, monkeypatch):
    path = make_tool(tmp_path / "relative" / "condor_config_val")
    (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    for entry in ("", ".", "relative", "relative:", "./relative"):
        assert os.path.isabs(sources.find_tool({"PATH": entry}) or "/none")
        assert tmp_path not in Path(sources.find_tool({"PATH": entry}) or "/none").parents
    assert sources.find_tool({"PATH": str(path.parent)}) == str(path)
    path = make_tool(tmp_path / "bin" / "condor_config_val")
    environ = {"PATH": "", "CONDOR_CONFIG": str(tmp_path / "etc" / "condor_config")}
    assert sources.find_tool(environ) == str(path)


def test_htcondors_python_module_where_its_tool_is_missing(monkeypatch):
    monkeypatch.setattr(sources, "find_tool", lambda _: "")
    values = {"VM_TYPE": "kvm", "VM_MEMORY": "9", "VM_GAHP.VM_MEMORY": "10", "VM_NETWORKING": True, "LOG": ""}
    monkeypatch.setitem(sys.modules, "htcondor2", SimpleNamespace(param=values))
    settings = load({"CONDOR_CONFIG": "/somewhere"})
    assert settings.string("VM_TYPE") == "kvm"
    assert settings.integer("VM_MEMORY") == 10
    assert settings.boolean("VM_NETWORKING") is True
    assert settings.where("LOG") == "default"
    monkeypatch.setitem(sys.modules, "htcondor2", None)
    with pytest.raises(MachineFault, match="CONDOR_CONFIG = /somewhere"):
        load({"CONDOR_CONFIG": "/somewhere"})
