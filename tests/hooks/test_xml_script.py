"""LIBVIRT_XML_SCRIPT is called as HTCondor's own server calls it, and trusted no further than it may be."""

import os
from unittest import mock
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vmgahp.errors import JobFault, MachineFault
from vmgahp.findings import OFF, OK
from vmgahp.hooks import xml_script
from vmgahp.hooks.xml_script import extra_lines, inspect, join_lines, judge, parse_arguments, require_trustworthy, run

AD = ['VM_WORKING_DIR = "/scratch"', "JobVMMemory = 512", 'VMPARAM_VM_NAME = "alice_1.0"']
SECRETS = ['ClaimId = "<1.2.3.4:9618>#1#2#secret"', 'transferkey = "secret"', '_condor_privX = "secret"']


@pytest.fixture
def script(place):
    def write(body, name="script", mode=0o755, interpreter="#!/bin/sh"):
        path = place / name
        path.write_text(f"{interpreter}\n{body}\n")
        path.chmod(mode)
        return str(path)

    return write


def call(script, arguments="", lines=AD, deadline=20.0, environ=None):
    said = []
    with mock.patch.dict(os.environ, environ or {}, clear=environ is not None):
        xml = run(script, arguments, lines, deadline, said.append)
    return xml, said


# How it is called.


def test_the_ad_is_on_stdin_and_the_xml_on_stdout(script):
    program = script(
        """
        /^VMPARAM_VM_NAME = / { gsub(/"/, "", $3); name = $3 }
        /^JobVMMemory = / { memory = $3 * 1024 }
        END { print "<domain type='qemu'>"; print "  <name>" name "</name>"
              print "  <memory>" memory "</memory>"; print "</domain>" }
        """,
        interpreter="#!/usr/bin/awk -f",
    )
    xml, said = call(program)
    domain = ElementTree.fromstring(xml)
    assert (domain.findtext("name"), domain.findtext("memory"), said) == ("alice_1.0", "524288", [])


@pytest.mark.parametrize(
    ("lines", "stdin"),
    [
        (AD, "\n".join([*AD, "\n"]).encode()),
        ([*AD, *SECRETS], "\n".join([*AD, "\n"]).encode()),
        (['Args = "x\nVMPARAM_VM_NAME = other"'], b'Args = "x VMPARAM_VM_NAME = other"\n\n'),
        (['Owner = "\udcff\xe9"'], b'Owner = "\xff\xc3\xa9"\n\n'),
    ],
    ids=["lines-then-an-empty-one", "no-private-attributes", "no-forged-attribute", "bytes-as-they-came"],
)
def test_what_is_on_stdin(script, place, lines, stdin):
    call(script(f"cat >{place}/stdin; echo '<domain/>'"), lines=lines)
    assert (place / "stdin").read_bytes() == stdin


def test_long_ads_and_answers_and_children_are_not_waited_for(script):
    program = script("echo '<domain><!--'; cat; echo '--></domain>'")
    lines = [f"Attribute{number} = {'x' * 1000}" for number in range(2000)]
    xml, _ = call(program, lines=lines)
    assert ElementTree.fromstring(xml).tag == "domain"
    assert len(xml) > 2_000_000
    assert call(script("sleep 100 >/dev/null 2>&1 </dev/null & echo '<domain/>'; kill $!"))[0] == "<domain/>"


def test_where_and_with_what_it_runs(script, place):
    program = script(f"pwd >{place}/cwd; env >{place}/env; echo '<domain/>'")
    environ = {
        "PATH": os.environ["PATH"], "CONDOR_CONFIG": "/etc/condor/condor_config", "_CONDOR_VM_TYPE": "kvm",
        "_CONDOR_ANCESTOR_1": "1:2:3", "CONDOR_PRIVATE_INHERIT": "SessionKey:secret", "LD_PRELOAD": "/scratch/evil.so",
    }  # fmt: skip
    call(program, environ=environ)
    assert (place / "cwd").read_text() == "/\n"
    found = dict(line.split("=", 1) for line in (place / "env").read_text().splitlines())
    assert found["CONDOR_CONFIG"] == "/etc/condor/condor_config"
    assert found["_CONDOR_VM_TYPE"] == "kvm"
    assert not {"_CONDOR_ANCESTOR_1", "CONDOR_PRIVATE_INHERIT", "LD_PRELOAD"} & set(found)
    program = script(f'printf "%s\\n" "$0" "$@" >{place}/argv; echo "<domain/>"')
    call(program, "one  two\t$(touch${IFS}pwned) `id` \\ * ;")
    assert (place / "argv").read_text().split("\n")[:-1] == [
        program, "one", "two", "$(touch${IFS}pwned)", "`id`", "\\", "*", ";",
    ]  # fmt: skip


def test_what_it_is_told_and_says_has_no_secrets(script):
    program = script("""
        echo 'which firmware?' >&2; echo >&2
        echo 'ClaimId = "<1.2.3.4:9618>#1#2#secret"' >&2; printf 'odd \\377 end' >&2
        echo '<domain/>'""")
    xml, said = call(program)
    assert xml == "<domain/>"
    assert len(said) == 3
    assert said[0] == "LIBVIRT_XML_SCRIPT: which firmware?"
    assert "secret" not in "".join(said)
    # The bootloader runs as root, and the bridge is the machine's network.
    job = ['VMPARAM_Xen_Bootloader = "/scratch/x"', 'vmparam_bridge_interface = "br-private"', "A = 1"]
    _, said = call(script("cat >&2; echo '<domain/>'"), lines=[*job, *extra_lines(job)])
    told = "".join(said)
    assert "/scratch/x" not in told
    assert "br-private" not in told
    assert 'VMPARAM_Bridge_Interface = ""' in told


# What a job may not say by it.

BELIEVES = """sed -n 's/^Said = "\\(.*\\)"$/\\1/p' | sed 's/\\\\"/"/g' >{0}/said
              echo "<domain><disk><source file='$(cat {0}/said)' format=\\"raw\\"/></disk></domain>" """


@pytest.mark.parametrize(
    "said",
    [
        "x'/></disk><hostdev mode='subsystem'/><disk><source file='y",
        *("x'/></disk><HOSTDEV/><disk><source file='y", "x'/><!-- ' -->", "x' startupPolicy = 'optional"),
        *("&#46;&#46;/&#46;&#46;/etc/shadow", "&lt;x"),
    ],
)
def test_nothing_that_a_job_says_becomes_a_part_of_the_description(script, place, said):
    with pytest.raises(JobFault, match="Said has XML in it"):
        call(script(BELIEVES.format(place)), lines=[*AD, f'Said = "{said}"'])


def test_a_job_has_only_as_much_markup_as_can_be_looked_for(script):
    with pytest.raises(JobFault, match="Said has XML in it"):
        call(script("cat >/dev/null; echo '<domain/>'"), lines=[*AD, f'Said = "{"<b " * 10_001}"'])


@pytest.mark.parametrize(
    "said", ["disk.img", "a < b && c", "it's", "<10.0.0.1:9618?addrs=10.0.0.1-9618&alias=x>", "A='b c' D='e'", "&amp;"]
)
def test_what_a_job_says_otherwise_is_its_own_business(script, place, said):
    program = script("cat >/dev/null; echo \"<domain><disk><source file='x' name='e'/></disk>&amp;</domain>\"")
    assert call(program, lines=[*AD, f'Environment = "{said}"'])[0].startswith("<domain>")


# How it fails.


def fault(*arguments, **options):
    with pytest.raises(MachineFault) as caught:
        call(*arguments, **options)
    assert "LIBVIRT_XML_SCRIPT" in caught.value.problem
    assert caught.value.hint
    return caught.value.problem


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ("echo '<domain/>'; echo 'no such bridge' >&2; exit 3", ["exit status 3", "no such bridge"]),
        *(("kill -9 $$", ["signal 9"]), ("true", ["no XML"]), ("echo", ["no XML"]), ("printf '  \\n\\n'", ["no XML"])),
        pytest.param("yes '<domain/>'", ["more than 4 MiB"], id="stopped long before the deadline"),
        ("printf '<domain>\\377</domain>'", ["UTF-8"]),
        ("printf '<domain>\\000</domain>'", ["NUL"]),
    ],
)
def test_a_script_that_fails_or_says_nothing_of_use(script, body, named):
    problem = fault(script(body))
    assert [words for words in named if words not in problem] == []


def test_a_script_that_hangs_or_cannot_be_called_or_says_more_than_the_limit(script, place, monkeypatch):
    assert "did not end within 1 s" in fault(script("sleep 1000"), deadline=1.0)
    path = place / "garbage"
    path.write_bytes(b"\x7fELF garbage")
    path.chmod(0o755)
    fault(str(path))
    assert "LIBVIRT_XML_SCRIPT_ARGS" in fault(script("echo '<domain/>'"), '"one')
    monkeypatch.setattr(xml_script, "LONGEST_XML", 9)
    assert call(script("printf '<domain/>'"))[0] == "<domain/>"
    assert "more than" in fault(script("printf '<domain />'"))


# Whom it trusts.


def refused(path):
    with pytest.raises(MachineFault) as caught:
        require_trustworthy(str(path))
    assert caught.value.problem.startswith(f"LIBVIRT_XML_SCRIPT = {path} ")
    assert "belongs to root" in caught.value.hint
    return caught.value.problem


def test_a_directory_that_others_may_write_is_not_trusted(script, place):
    require_trustworthy(script("true"))
    program = script("true")
    place.chmod(0o777)
    assert f"{place}, to which others may write" in refused(program)
    place.chmod(0o1777)
    require_trustworthy(program)


@pytest.mark.parametrize("mode", [0o775, 0o757, 0o777])
def test_a_script_that_others_may_write_is_not_run(script, place, mode):
    assert "written to by others" in fault(script(f"touch {place}/ran; echo '<domain/>'", mode=mode))
    assert not (place / "ran").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_script_of_somebody_else_is_not_run(script, place):
    program = script("true")
    os.chown(program, 12345, 0)
    assert "belongs to user id 12345" in refused(program)
    os.chown(program, 0, 0)
    os.chown(place, 12345, 0)
    assert f"{place}, which belongs to user id 12345" in refused(program)


@pytest.mark.parametrize(
    ("first", "interpreter"),
    [("#! /bin/sh -e", "/bin/sh"), ("#!/usr/bin/env -S LANG=C sh -eu", "/sh"), ("\x7fELF", None)],
)
def test_a_script_that_can_run_is_there(script, first, interpreter):
    program = script("exit 1", interpreter=first)
    found = inspect(program, "-v '")
    assert found.endswith(interpreter) if interpreter else found == ""
    assert judge(program, "", blind=False).verdict == OK


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_an_interpreter_that_others_can_change_is_told(script, place):
    """Whoever can write to it runs what he likes as root, and more pools than one have that."""
    interpreter = place / "python"
    interpreter.symlink_to("/bin/sh")
    program = script("exit", interpreter=f"#!{interpreter}")
    os.lchown(interpreter, 12345, 0)
    found = judge(program, "", blind=False)
    assert found.verdict == OFF
    assert f"others than root can change {interpreter}" in found.seen


@pytest.mark.parametrize(
    ("first", "said"),
    [
        ("#!/nonexistent/python4", "'#!/nonexistent/python4'"), ("#!/bin/sh\r", "'#!/bin/sh\\r'"),
        ("#!/usr/bin/env nonexistent-python", "nonexistent-python"), ("#!", "'#!'"), ("echo '<domain/>'", "echo"),
    ],
)  # fmt: skip
def test_a_script_that_nothing_runs_is_told_before_a_job_finds_out(script, first, said):
    with pytest.raises(MachineFault, match=r"cannot be run.*no such interpreter") as caught:
        inspect(script("exit", interpreter=first), "")
    assert said in caught.value.problem
    assert "#!/bin/sh" in caught.value.hint


def test_arguments_are_told_from_the_name_of_the_script(script):
    program = script("exit")
    with pytest.raises(MachineFault, match="has arguments") as caught:
        inspect(f"{program} -v --fast", "")
    assert f"LIBVIRT_XML_SCRIPT = {program} and LIBVIRT_XML_SCRIPT_ARGS = -v --fast" in caught.value.hint
    with pytest.raises(MachineFault, match="is not closed"):
        inspect(program, '"')


def test_a_script_that_will_not_be_run_is_told_before_a_job_finds_out(script):
    program = script("exit", mode=0o777)
    with pytest.raises(MachineFault, match=f"LIBVIRT_XML_SCRIPT = {program} ") as caught:
        inspect(program, "")
    assert "or unset it" in caught.value.hint


def test_links_are_followed_and_judged(script, place):
    program = script("true")
    common = place / "common"
    common.mkdir()
    common.chmod(0o777)
    (common / "link").symlink_to(program)
    (place / "way").symlink_to("common/../common/link")
    assert f"{common}, to which others may write" in refused(place / "way")
    common.chmod(0o755)
    require_trustworthy(str(place / "way"))
    if os.geteuid() == 0:
        os.lchown(common / "link", 12345, 0)
        common.chmod(0o1777)
        assert f"{common}/link, which belongs to user id 12345" in refused(place / "way")
    (place / "round").symlink_to(place / "round")
    assert "symbolic links" in refused(place / "round")


def test_what_cannot_be_a_script(script, place):
    assert "absolute" in refused("script")
    assert "absolute" in refused("")
    assert "No such file" in refused(place / "none")
    assert "Not a directory" in refused(f"{script('true')}/x")
    assert "regular file" in refused(place)
    assert "executed" in refused(script("true", mode=0o644))


# Arguments, as condor_arglist.cpp splits them.


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", []),
        ("   ", []),
        ("one two", ["one", "two"]),
        (" one\ttwo\nthree\r ", ["one", "two", "three"]),
        ("it's 'a b'", ["it's", "'a", "b'"]),
        ('a "b c"', ["a", '"b', 'c"']),
        ('""', []),
        ('  "one two"  ', ["one", "two"]),
        ("\"one 'two and three' four\"", ["one", "two and three", "four"]),
        ("\"it''s 'it''s' ''\"", ["its", "it's", ""]),
        ("\"a'b c'd\"", ["ab cd"]),
        ('"say ""hello"""', ["say", '"hello"']),
        ('"\'say ""hello\'\'""\'"', ['say "hello\'"']),
    ],
)
def test_arguments(text, words):
    assert parse_arguments(text) == words


@pytest.mark.parametrize("text", ['"one', '"one" two', '"', '"\'one"', '"""', "\"a ''' b\""])
def test_arguments_with_a_bad_quote(text):
    with pytest.raises(MachineFault, match="LIBVIRT_XML_SCRIPT_ARGS"):
        parse_arguments(text)


# The lines that the server adds.


def test_the_lines_that_are_added():
    assert extra_lines(AD) == ['VMPARAM_Xen_Bootloader = ""', 'VMPARAM_Xen_Initrd = ""', 'JobVMNetworkingType = ""']
    values = {"bootloader": "/usr/bin/pygrub", "bridge_interface": "br0"}
    assert extra_lines(AD, networking_type="nat", **values) == [
        'VMPARAM_Xen_Bootloader = "/usr/bin/pygrub"', 'VMPARAM_Xen_Initrd = ""',
        'VMPARAM_Bridge_Interface = "br0"', 'JobVMNetworkingType = "nat"',
    ]  # fmt: skip
    ad = ['vmparam_xen_initrd = "mine"', 'JOBVMNETWORKINGTYPE="bridge"']
    assert extra_lines(ad, networking_type="nat") == ['VMPARAM_Xen_Bootloader = ""']
    # The C++ server looks for the name anywhere in the text of the ad.
    assert len(extra_lines(['Args = "JobVMNetworkingType VMPARAM_Xen_Initrd"'])) == 3
    assert extra_lines([], bridge_interface='br"0\\\n')[2] == r'VMPARAM_Bridge_Interface = "br\"0\\\n"'


# How its lines become one text.


@pytest.mark.parametrize(
    ("printed", "joined"),
    [
        ("<domain>\n  <name>\nvm\n</name>\r\n</domain>\n", "<domain>  <name>vm</name></domain>"),
        ("<disk\ntype='file'\r\ndevice='disk'>\n</disk>", "<disk\ntype='file'\ndevice='disk'></disk>"),
        ("<a b='x\ny>'\nc=\"it's\n\"/>", "<a b='xy>'\nc=\"it's\"/>"),
        ("<!-- it's\n <b\n> -->\n<a\nb='c'/>", "<!-- it's <b> --><a\nb='c'/>"),
        ("<a><![CDATA[<b\n'c]]>\n</a>", "<a><![CDATA[<b'c]]></a>"),
        ("<?xml version='1.0'\nencoding='UTF-8'?>\n<a/>", "<?xml version='1.0'\nencoding='UTF-8'?><a/>"),
        ("no end of line", "no end of line"),
        ("<a>it's\n'fine'\n</a>", "<a>it's'fine'</a>"),
    ],
)
def test_joining(printed, joined):
    assert join_lines(printed) == joined


@given(st.text("<>!-[]CDAT'\"ab \n\r/="))
def test_joining_changes_nothing_but_ends_of_lines(text):
    def without(text):
        return text.replace("\r\n", "").replace("\n", "")

    assert without(join_lines(text)).replace("\r", "") == without(text).replace("\r", "")


NAIVE = """
/^VMPARAM_VM_NAME/ { sub(/^[^"]*"/, ""); sub(/"$/, ""); name = $0 }
/^VMPARAM_vm_Disk/ { sub(/^[^"]*"/, ""); sub(/"$/, ""); disk = $0 }
END { if (disk ~ /^fail/) exit 3; if (disk ~ /^hang/) while (1) { }
      print "<domain><name>" name "</name><source file='" disk "'/></domain>" }
"""
"""A script that puts what it reads into XML as it is."""


@pytest.mark.parametrize("disk", ["a<b.img:vda:w", "it's.img:vda:w", "fail.img:vda:w", "hang.img:vda:w"])
def test_a_script_that_fails_for_one_job_and_not_for_a_plain_one_holds_that_job(script, disk):
    naive = script(NAIVE, interpreter="#!/usr/bin/awk -f")
    assert "disk.img" in call(naive, lines=[*AD, 'VMPARAM_vm_Disk = "disk.img:vda:w"'])[0]
    with pytest.raises(JobFault, match="works for a plain job") as caught:
        call(naive, lines=[*AD, f'VMPARAM_vm_Disk = "{disk}"'], deadline=2)
    assert "LIBVIRT_XML_SCRIPT" in caught.value.hint


@pytest.mark.parametrize(
    ("printed", "said"),
    [
        ("Unknown VM type: qemu", "not XML: 'Unknown VM type: qemu'"),
        ("<domain><a></domain>", "mismatched tag: line 1"),
        ("<network><name>n</name></network>", "the XML of 'network', and not of a domain"),
        ("<domain><name>n</name></domain>", "named the domain 'n'"),
    ],
)
def test_what_it_printed_in_the_place_of_a_domain_is_shown(script, printed, said):
    with pytest.raises(MachineFault) as caught:
        run(script(f"cat >/dev/null; echo '{printed}'"), "", AD, 20.0, print, "alice_1.0")
    assert said in caught.value.problem
