"""The administrator's policy: stages, requirements and the MAC hook, with real programs and real stylesheets."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock
from xml.etree import ElementTree

import pytest

from tests import REPOSITORY
from tests.jobs import hurry_the_engine
from tests.lab.programs import a_program
from vmgahp import hooks
from vmgahp.config import Settings
from vmgahp.errors import MISMATCHED, JobFault, MachineFault
from vmgahp.hooks import policy, stylesheet
from vmgahp.hooks.policy import choose_mac, release_mac
from vmgahp.job import engine
from vmgahp.job.ad import JobAd
from vmgahp.job.policy_view import PolicyView

EXAMPLES = REPOSITORY / "config" / "policy"

AD = {
    "JobVMMemory": "1024", "Owner": '"alice"', "VM_WORKING_DIR": '"/scratch"', "JobVM_MACADDR": '"52:54:00:00:00:07"',
    "WantsHelp": "true", "Twice": "2 * JobVMMemory", "ClaimId": '"<1.2.3.4:9618>#1#2#verysecret"',
    "Sneaky": 'strcat("x", ClaimId)', "Nothing": "undefined",
}  # fmt: skip
XML = """<domain type="qemu">
  <name>alice_lab_1.0</name>
  <uuid>c7a5fdbd-cdaf-9455-926a-d65c16db1809</uuid>
  <description>/scratch</description>
  <memory unit="MiB">1024</memory>
  <devices>
    <interface type="network">
      <mac address="52:54:00:00:00:07"/><source network="default"/><model type="virtio"/>
    </interface>
    <graphics type="vnc" passwd="hunter22" listen="127.0.0.1"/>
  </devices>
</domain>"""

SHEET = """<xsl:stylesheet version="1.0" xmlns:xsl="http://www.w3.org/1999/XSL/Transform"
    xmlns:exsl="http://exslt.org/common" extension-element-prefixes="exsl">{}</xsl:stylesheet>"""
COPY = """<xsl:template match="@* | node()">
    <xsl:copy><xsl:apply-templates select="@* | node()"/></xsl:copy></xsl:template>"""


def at(match: str, body: str) -> str:
    """A template of a stylesheet."""
    return f'<xsl:template match="{match}">{body}</xsl:template>'


def memory(body: str) -> str:
    """One that puts something else in the place of the amount of memory."""
    return at("memory/text()", body)


Write = Callable[..., str]


@pytest.fixture
def write(place: Path) -> Write:
    """Write a stage: a shell script, or a stylesheet that copies all but what it is told to do."""

    def write(body: str, name: str = "stage") -> str:
        path = place / name
        if name.endswith(policy.STYLESHEETS):
            path.write_text(SHEET.format(body + COPY))
        else:
            a_program(path, body)
        return str(path)

    return write


def ad(**more: str) -> JobAd:
    return JobAd((AD | more).items())


class Applied:
    def __init__(self, *stages: str, job: JobAd | None = None, xml: str = XML, dry: bool = False, timeout: int = 30):
        self.log: list[str] = []
        self.debug: list[str] = []
        values = {"VM_POLICY": ", ".join(stages), "VM_GAHP_REQ_TIMEOUT": str(10 * timeout)}
        made = policy.Policy(PolicyView(job or ad(), Settings(values)), self.log.append, self.debug.append, dry=dry)
        self.xml, _ = made.apply(xml)
        self.said = "\n".join(self.log)


def rejected(*stages: str, **options: object) -> str:
    with pytest.raises(JobFault) as caught:
        Applied(*stages, **options)  # type: ignore[arg-type]
    assert caught.value.code == MISMATCHED
    assert stages[-1] in caught.value.hint
    return caught.value.problem


def broken(*stages: str, **options: object) -> str:
    with pytest.raises(MachineFault) as caught:
        Applied(*stages, **options)  # type: ignore[arg-type]
    assert "VM_POLICY" in caught.value.problem
    assert stages[-1] in caught.value.problem
    assert caught.value.hint
    return caught.value.problem


# The pipeline


def test_stages_run_in_order_and_each_sees_what_the_one_before_it_made(write: Write) -> None:
    assert Applied().xml is XML
    assert policy.inspect(Settings()) == ""
    first = write(memory("600"), "first.xsl")
    second = write("exec sed s/600/601/", "second")
    third = write(memory('<xsl:value-of select=". - 100"/>'), "third.xslt")
    assert ">501<" in Applied(first, second, third).xml
    assert ">600<" in Applied(second, first).xml


def test_a_change_is_logged_as_a_diff_and_none_for_those_who_want_all(write: Write) -> None:
    change, keep = write(memory("512"), "change.xsl"), write("exec cat", "keep")
    done = Applied(keep, change)
    assert done.log == [
        f"VM_POLICY, stage 2 ({change}) changes the domain:",
        "VM_POLICY, stage 2: @@ -4,3 +4,3 @@",
        "VM_POLICY, stage 2:    <description>/scratch</description>",
        'VM_POLICY, stage 2: -  <memory unit="MiB">1024</memory>',
        'VM_POLICY, stage 2: +  <memory unit="MiB">512</memory>',
        "VM_POLICY, stage 2:    <devices>",
    ]
    assert done.debug == [f"VM_POLICY, stage 1 ({keep}) changes nothing"]


def test_what_is_no_change_of_the_domain(write: Write) -> None:
    done = Applied(write("tr -s ' \\n' ' ' | sed 's/>1024</> 1024 </'", "joins"))
    assert done.xml is XML
    assert done.log == []
    stage = write('echo \'<?xml version="1.0" encoding="UTF-8"?>\'; sed s/1024/512/')
    assert Applied(stage).xml.startswith("<domain")
    assert Applied(write(memory("7"), "s.xsl")).xml.startswith("<domain")


def test_a_diff_has_no_secrets_and_is_cut(write: Write) -> None:
    done = Applied(write("exec sed -e s/hunter22/hunter23/ -e s/127.0.0.1/127.0.0.2/"))
    assert "127.0.0.2" in done.said
    assert "hunter" not in done.said
    assert "***" in done.said
    done = Applied(write("exec sed s/hunter22/hunter23/"))
    assert "hunter23" in done.xml
    assert "hidden here" in done.said
    assert "hunter" not in done.said
    many = '/<devices>/ {print; for (i = 0; i < 999; i++) print "<x n=\\"" i "\\"/>"; next} 1'
    done = Applied(write(f"exec awk '{many}'"))
    assert len(done.log) < policy.MOST_LINES + 5
    assert "more lines" in done.log[-1]


def test_a_rejection_has_the_stages_own_words_on_one_line_of_some_length(write: Write, place: Path) -> None:
    no = write("echo 'no VMs on Sundays'; exit 1", "no")
    after = write(f"touch {place}/ran; cat", "after")
    with pytest.raises(JobFault, match=r"rejects the job: no VMs on Sundays\.$"):
        Applied(no, after)
    assert not (place / "ran").exists()
    problem = rejected(write("printf 'no\\033[31m\\n\\tway\\000'; head -c 3000 /dev/zero | tr '\\0' 'x'; exit 1"))
    assert "no\\x1b[31m way\\x00xxx" in problem
    assert problem.isprintable()
    assert len(problem) < hooks.LONGEST_REASON + 100


@pytest.mark.parametrize(
    ("body", "named"),
    [
        *((body, "") for body in ("exit 1", "echo >&2 oops; exit 1", "echo '<domain>'; exit 1", "exit 2")),
        *((body, "") for body in ("echo no; exit 3", "kill -9 $$", "exec python3 -c 'raise ValueError(1)'")),
        ("true", "not XML"),
        ("echo '<domain>'", "not XML"),
        ("echo '<!DOCTYPE domain><domain/>'", "document type"),
        ("echo '<volume/>'", "'volume'"),
        ("exec sed s/alice_lab/bob_lab/", "name"),
        ("exec sed s/c7a5fdbd/c7a5fdbe/", "uuid"),
        ("exec sed s/.scratch/elsewhere/", "description"),
        ("exec sed 's/>alice_lab_1.0</> alice_lab_1.0 </'", "name"),
        ("exec sed '/<uuid>/d'", "uuid"),
        ("exec sed 's,<uuid>,<uuid>x</uuid><uuid>,'", "uuid"),
    ],
)
def test_a_stage_that_fails_or_prints_no_such_domain_is_the_machines_fault(write: Write, body: str, named: str) -> None:
    assert named in broken(write(body))


def test_a_stage_that_never_ends_or_is_another_persons_is_not_used(write: Write, place: Path) -> None:
    assert "did not end within 1 s" in broken(write("exec sleep 100"), timeout=1)
    body = '<xsl:for-each select="//node() | //@*">' * 9 + "</xsl:for-each>" * 9
    assert "did not end within 2 s" in broken(write(memory(body), "s.xsl"), timeout=2)
    for name in ("stage", "stage.xsl"):
        stage = write("", name)
        os.chmod(stage, 0o777)
        assert "written to by others" in broken(stage)
        os.chmod(stage, 0o755)
        if os.geteuid() == 0:
            os.chown(stage, 12345, 0)
            assert "belongs to user id 12345" in broken(stage)
    assert "No such file" in broken(f"{place}/none.xsl")
    assert "absolute" in broken("stage")


def test_what_a_program_is_told(write: Write, place: Path) -> None:
    stage = write(f'cat "$VMGAHP_JOB_AD" >{place}/ad; env >{place}/env; pwd >{place}/cwd; exec cat')
    Applied(stage, dry=True)
    told = json.loads((place / "ad").read_text())
    assert (told["JobVMMemory"], told["Owner"], told["Twice"]) == (1024, "alice", 2048)
    assert told["WantsHelp"] is True
    assert told["Nothing"] is None
    assert told["Sneaky"] is None, "evaluated without the secrets"
    assert "verysecret" not in (place / "ad").read_text()
    assert "ClaimId" not in told
    environ = dict(line.split("=", 1) for line in (place / "env").read_text().splitlines())
    assert (environ["VMGAHP_VM_NAME"], environ["VMGAHP_DRY_RUN"]) == ("alice_lab_1.0", "1")
    assert (place / "cwd").read_text() == "/\n"
    Applied(stage)
    assert "VMGAHP_DRY_RUN" not in (place / "env").read_text()


def test_stderr_is_for_the_log_without_secrets(write: Write) -> None:
    done = Applied(write("echo 'ClaimId = \"<1>#2#verysecret\"' >&2; echo 'looking at it' >&2; exec cat"))
    assert "looking at it" in done.said
    assert "verysecret" not in done.said


def test_nothing_is_left_open(write: Write) -> None:
    stages = write("exec cat", "one"), write("", "two.xsl")
    before = os.listdir("/proc/self/fd")
    Applied(*stages)
    broken(write("exit 3"))
    assert os.listdir("/proc/self/fd") == before


# Stylesheets


def test_a_stylesheet_gets_the_jobs_attributes_and_may_reject(write: Write) -> None:
    names = ("Owner", "jobvmmemory", "WantsHelp", "Nothing", "Unheard")
    body = "".join(f'<xsl:param name="{name}" select="\'default\'"/>' for name in names)
    shown = "|".join(f'<xsl:value-of select="${name}"/>' for name in names)
    sheet = write(f'{body}<xsl:template match="graphics"><title>{shown}</title></xsl:template>', "s.xsl")
    assert "<title>alice|1024|true|default|default</title>" in Applied(sheet).xml
    looking, no = "<xsl:message>looking</xsl:message>", '<xsl:message terminate="yes">{}</xsl:message>'
    body = at("memory", looking + no)
    reason = 'only <xsl:value-of select="../name"/>. <b>May</b>,\n no more'
    assert "rejects the job: only alice_lab_1.0. May, no more." in rejected(write(body.format(reason), "s.xsl"))
    assert "gives no reason" in rejected(write(body.format(""), "s.xsl"))
    assert "looking" in Applied(write(at("memory", looking + '<xsl:copy-of select="."/>'), "s.xsl")).said


@pytest.mark.parametrize("value", ["' or 1", "\"' b", "<a>&amp;", "concat('a', 'b')", "\x01", "\ud800", "é\U0001f600"])
def test_a_value_of_the_job_is_never_xpath_and_never_breaks_a_stylesheet(write: Write, value: str) -> None:
    shown = at("graphics", '<title><xsl:value-of select="$Owner"/></title>')
    sheet = write(f'<xsl:param name="Owner"/>{shown}', "s.xsl")
    escaped = value.replace('"', '\\"')
    made = Applied(sheet, job=ad(Owner=f'"{escaped}"')).xml
    expected = "".join("?" if c < " " or "\ud800" <= c <= "\udfff" else c for c in value)
    assert ElementTree.fromstring(made).findtext("devices/title") == expected


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (at("memory", '<xsl:value-of select="document(\'/etc/hostname\')"/>'), "denied"),
        (at("memory", '<xsl:value-of select="document(\'http://127.0.0.1:9/\')"/>'), "denied"),
        (at("memory", '<exsl:document href="{place}/made"><a/></exsl:document>'), "denied"),
        ('<xsl:include href="{place}/other.xsl"/>', "other.xsl"),
        ('<xsl:import href="file://{place}/other.xsl"/>', "other.xsl"),
        (at("memory", '<xsl:value-of select="nonsense("/>'), "XSLT"),
        (at("memory", '<xsl:call-template name="none"/>'), "none"),
        # an error after a message is no rejection
        (at("memory", '<xsl:message>fine</xsl:message><xsl:value-of select="none:none()"/>'), ""),
        ('<xsl:template match="/">no XML</xsl:template>', "not XML"),
        ('<xsl:template match="memory" name="t"><xsl:call-template name="t"/></xsl:template>', ""),
        ("</xsl:nonsense>", "s.xsl, line"),
    ],
)  # fmt: skip
def test_a_stylesheet_that_errs_or_reaches_out_is_refused(write: Write, place: Path, body: str, named: str) -> None:
    (place / "other.xsl").write_text(SHEET.format(""))
    assert named in broken(write(body.format(place=place), "s.xsl"))
    assert not (place / "made").exists()


def test_a_stylesheet_without_entities_and_with_little_memory(place: Path, write: Write) -> None:
    (place / "secret").write_text("verysecret")
    sheet = place / "s.xsl"
    sheet.write_text(f'<!DOCTYPE x [<!ENTITY e SYSTEM "file://{place}/secret">]>' + SHEET.format(COPY + memory("&e;")))
    assert "document type" in broken(str(sheet))
    again = """<xsl:call-template name="d"><xsl:with-param name="s" select="{}"/></xsl:call-template>"""
    double = f'<xsl:template name="d"><xsl:param name="s"/>{again.format("concat($s, $s)")}</xsl:template>'
    broken(write(double + memory(again.format("'xxxxxxxx'")), "s.xsl"))
    assert stylesheet.MOST_MEMORY <= 1 << 30


# VM_POLICY_REQUIREMENTS


def requires(expression: str, **more: str) -> None:
    policy.require(PolicyView(ad(**more), Settings({"VM_POLICY_REQUIREMENTS": expression})))


@pytest.mark.parametrize(
    "expression",
    ["JobVMMemory <= 1024", "TARGET.JobVMMemory <= 1024 && MY.Owner == \"alice\"", "1", "0.5", "WantsHelp",
     "regexp(\"^al\", owner)", 'Owner == "alice"', "Twice == 2048", "ClaimId is undefined", "Sneaky =!= \"x\""],
)  # fmt: skip
def test_a_job_that_meets_the_requirements(expression: str) -> None:
    requires(expression)


@pytest.mark.parametrize(
    "expression",
    ["JobVMMemory < 1024", "TARGET.JobVMMemory < 1024", "false", "0", "undefined", "Nothing", "NotThere > 5",
     "Owner < 5", "Owner", "{1}", "error"],
)  # fmt: skip
def test_a_job_that_does_not(expression: str) -> None:
    with pytest.raises(JobFault) as caught:
        requires(expression)
    assert caught.value.code == MISMATCHED
    assert expression in caught.value.problem
    assert "VM_POLICY_REQUIREMENTS" in caught.value.problem


def test_what_the_job_has_is_said_and_it_cannot_break_the_requirements() -> None:
    with pytest.raises(JobFault, match="The job has JobVMMemory = '1024', Owner = 'alice'"):
        requires('JobVMMemory < 10 && owner != "bob"')
    with pytest.raises(JobFault) as caught:
        requires("ClaimId == Sneaky")
    assert "verysecret" not in caught.value.render()
    # The result of an expression is the job's doing, so that no job takes a machine out of service.
    for value in ("error", '"x"', "{1, 2}", "[a = 1]", "JobVMMemory", "undefined"):
        with pytest.raises(JobFault):
            requires("JobVMMemory <= 10", JobVMMemory=value)
    policy.require(PolicyView(ad(), Settings()))


@pytest.mark.parametrize("expression", ["(((", "a b", "JobVMMemory <="])
def test_requirements_that_are_no_expression_are_the_machines_fault(expression: str) -> None:
    with pytest.raises(MachineFault, match="VM_POLICY_REQUIREMENTS"):
        requires(expression)


@pytest.mark.parametrize("expression", ['real("INF")', 'real("NaN")', "1e400"])
def test_numbers_that_json_does_not_know(expression: str) -> None:
    json.dumps(ad(X=expression).values(), allow_nan=False)


# VM_MAC_HOOK


def asked(hook: str, given: str = "", saved: str = "", *, vm: str = "alice_lab_1.0", dry: bool = False) -> str:
    return choose_mac(PolicyView(ad(), Settings({"VM_MAC_HOOK": hook})), vm, given, saved, [].append, dry=dry)[0]


def test_a_hook_gives_an_address_or_rejects(write: Write, place: Path) -> None:
    notes = f'printf "%s\\n" "$@" >{place}/argv; cat >{place}/stdin; echo "$VMGAHP_VM_NAME" >{place}/name'
    hook = write(f"{notes}\necho 52:54:00:AB:cd:01")
    assert asked(hook) == "52:54:00:ab:cd:01"
    assert (place / "argv").read_text() == "0\n\n"
    assert json.loads((place / "stdin").read_text())["Owner"] == "alice"
    assert "verysecret" not in (place / "stdin").read_text()
    assert (place / "name").read_text() == "alice_lab_1.0\n"
    asked(hook, saved="52:54:00:00:00:09")
    assert (place / "argv").read_text() == "0\n52:54:00:00:00:09\n"
    with pytest.raises(JobFault, match="no address is left"):
        asked(write("echo no address is left; exit 1"))
    for body in ("exit 1", "echo no; exit 2"):
        with pytest.raises(MachineFault, match="VM_MAC_HOOK"):
            asked(write(body))
    hook = write("echo 52:54:00:00:00:02")
    os.chmod(hook, 0o777)
    with pytest.raises(MachineFault, match=r"VM_MAC_HOOK = .* written to by others"):
        asked(hook)


def test_a_hook_may_say_nothing_and_is_not_asked_for_the_jobs_own_address(write: Write, place: Path) -> None:
    hook = write(f"touch {place}/ran; echo 52:54:00:00:00:02")
    given = "52:54:00:00:00:01"
    assert asked(hook, given) == given
    assert not (place / "ran").exists()
    assert asked(write("true")) == ""


@pytest.mark.parametrize(
    "answer",
    [
        *("52:54:00:00:00:01 10.0.0", "52:54:00:00:00:01 127.0.0.1", "52:54:00:00:00:01 10.0.0.7/33"),
        *("52:54:00:00:00:01 10.0.0.7 x", "52:54:00:00:00:01 10.0.0.7 10.0.0.1 10.0.0.2 10.0.0.3", "10.0.0.7"),
        *(*("nonsense", "01:00:5e:00:00:01", "00:00:00:00:00:00"), "52:54:00:00:00:01 52:54:00:00:00:02"),
    ],
)
def test_an_answer_that_is_no_address_of_a_card(write: Write, answer: str) -> None:
    with pytest.raises(MachineFault, match="VM_MAC_HOOK"):
        asked(write(f"echo '{answer}'"))


@pytest.mark.parametrize("more", ["10.0.0.7", "10.0.0.7/24 10.0.0.1 10.0.0.2", "fd00::7/64"])
def test_a_hook_may_give_the_guests_address_too_and_has_it_back(write: Write, place: Path, more: str) -> None:
    hook = write(f'echo "$VMGAHP_VM_NAME $*" >>{place}/argv; [ "$3" ] || echo 52:54:00:AB:cd:01 {more}')
    said = choose_mac(PolicyView(ad(), Settings({"VM_MAC_HOOK": hook})), "vm", "", "", [].append, nic=1)
    assert said == ("52:54:00:ab:cd:01", more)
    release_mac(hook, "vm", 1, said[0], 5.0, [].append)
    assert (place / "argv").read_text() == "vm 1 \nvm 1 52:54:00:ab:cd:01 release\n"


# The examples


def example(place: Path, name: str, old: str = "", new: str = "") -> str:
    text = (EXAMPLES / name).read_text()
    assert old in text
    path = place / name
    path.write_text(text.replace(old, new) if old else text)
    path.chmod(0o755)
    return str(path)


def test_every_example_is_in_their_table_and_a_program_where_it_is_to_be() -> None:
    names = {path.name for path in EXAMPLES.iterdir()} - {"README.md"}
    table = (EXAMPLES / "README.md").read_text()
    assert [name for name in names if f"`{name}`" not in table] == []
    for path in EXAMPLES.iterdir():
        is_program = path.suffix not in (".md", ".xsl")
        assert os.access(path, os.X_OK) == is_program, path


def test_the_example_stages(place: Path) -> None:
    stage = example(place, "cap-memory.xsl")
    assert '<memory unit="MiB">512</memory>' in Applied(stage).xml
    less = XML.replace("1024", "100")
    assert Applied(stage, xml=less).xml == less
    assert "not given in MiB" in rejected(stage, xml=XML.replace("MiB", "GiB"))
    stage = example(place, "forbid-macs.xsl")
    assert Applied(stage).xml is XML
    problem = rejected(stage, xml=XML.replace("52:54:00:00:00:07", "52:54:00:00:00:02"))
    assert "vm_macaddr = 52:54:00:00:00:02 belongs to a machine of this site" in problem
    made = Applied(example(place, "force-bridge.xsl")).xml
    assert '<interface type="bridge"><source bridge="br-jobs"/><mac address="52:54:00:00:00:07"/>' in made
    assert 'network="default"' not in made
    stage = example(place, "add-watchdog.xsl")
    made = Applied(stage).xml
    assert made.count("<watchdog ") == 1
    assert Applied(stage, xml=made).xml == made
    stage = example(place, "owners-of-disks")
    disk = "<devices><disk type='file'><source file='{}'/></disk>"
    for good in ("/scratch/a.img", "/srv/vm/alice/a.img"):
        Applied(stage, xml=XML.replace("<devices>", disk.format(good)))
    for bad in ("/srv/vm/bob/a.img", "/srv/vm/alice/../bob/a.img", "/srv/vm/alicea/a.img", "/etc/shadow"):
        assert "may have disks" in rejected(stage, xml=XML.replace("<devices>", disk.format(bad)))


def test_example_mac_broker_whose_file_no_name_of_a_vm_breaks(place: Path) -> None:
    addresses = place / "macs"
    addresses.write_text("52:54:00:10:00:01\n52:54:00:10:00:02\n")
    hook = example(place, "mac-broker", "/etc/vmgahp/macs", str(addresses))
    addresses.chmod(0o640)
    with pytest.raises(MachineFault, match="chmod 600"):
        asked(hook, vm="a")
    addresses.chmod(0o600)
    assert asked(hook, vm="a", dry=True) == asked(hook, vm="a") == asked(hook, vm="a") == "52:54:00:10:00:01"
    assert asked(hook, vm="b") == "52:54:00:10:00:02"
    with pytest.raises(JobFault, match="are taken"):
        asked(hook, vm="c")
    lines = addresses.read_text().splitlines()
    assert [line.split()[1] for line in lines] == ["a", "b"]
    addresses.write_text(f"{lines[0]}\n52:54:00:10:00:02 b 1000000000\n")
    assert asked(hook, vm="c") == "52:54:00:10:00:02", "b has not been here for long"
    addresses.write_text("52:54:00:10:00:01\n52:54:00:10:00:02\n52:54:00:10:00:03\n")
    addresses.chmod(0o600)
    hook = example(place, "mac-broker", "/etc/vmgahp/macs", str(addresses))
    for name, address in (("a b", 1), ("a\n52:54:00:10:00:02 c", 2), ("b\udcff", 3), ("a b", 1)):
        assert asked(hook, vm=name) == f"52:54:00:10:00:0{address}"
    assert len(addresses.read_text().splitlines()) == 3


# What the doctor asks


def test_a_policy_is_looked_at_without_a_job(write: Write, place: Path) -> None:
    first, second = write("", "first.xsl"), write("exec cat", "second")
    good = {"VM_POLICY": f"{first} {second}", "VM_POLICY_REQUIREMENTS": "JobVMMemory < 5", "VM_MAC_HOOK": second}
    assert policy.inspect(Settings(good)) == (
        "VM_POLICY_REQUIREMENTS is an expression; the 2 stages of VM_POLICY are there; VM_MAC_HOOK is there"
    )
    for name, value in (
        ("VM_POLICY", f"{second}, {place}/none.xsl"),
        ("VM_POLICY_REQUIREMENTS", "((("),
        ("VM_MAC_HOOK", first),
    ):
        with pytest.raises(MachineFault, match=name):
            policy.inspect(Settings(good | {name: value}))


def test_a_machine_that_cannot_evaluate_its_requirements_is_at_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_ask", Mock(side_effect=engine.NoEngine("it is not on this machine")))
    with pytest.raises(MachineFault, match="ClassAd module") as caught:
        requires("true")
    assert "htcondor" in caught.value.hint


@pytest.mark.parametrize("python", ["/bin/false", "/nonexistent"])
def test_a_python_that_cannot_run_the_engine_holds_no_job(monkeypatch: pytest.MonkeyPatch, python: str) -> None:
    monkeypatch.setattr(sys, "executable", python)
    with pytest.raises(MachineFault, match="ClassAd engine"):
        requires("true")


def test_a_job_that_brings_the_requirements_down_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry_the_engine(monkeypatch)
    with pytest.raises(JobFault, match="eval"):
        requires("eval(Sum) > 1", Sum=f'"{"1" + " + 1" * 300_000}"')  # it overflows the engine's stack


@pytest.mark.parametrize(
    "body",
    [
        'x=$(cat); case $x in *evil*) exit 3; esac; echo "$x"',
        'tee /dev/stderr 2>"$0.xml" | sed "s/evil/</"',
        "grep -q evil $VMGAHP_JOB_AD && kill -SEGV $$; cat",
        "if grep -q evil $VMGAHP_JOB_AD; then sleep 60; fi; cat",
    ],
)
def test_a_stage_that_fails_for_one_job_and_not_for_a_plain_one_holds_that_job(write: Write, body: str) -> None:
    stage = write(body)
    assert Applied(stage).xml == XML
    job = ad(Owner='"evil"')
    said = rejected(stage, job=job, xml=XML.replace('model type="virtio"', 'model type="evil"'), timeout=3)
    assert "works for a plain job" in said


def test_a_mac_hook_that_fails_twice_for_one_job_and_not_for_a_plain_one_holds_that_job(write: Write) -> None:
    settings = Settings({"VM_MAC_HOOK": write('if grep -q evil; then exit 7; fi; echo "$2"')})
    assert choose_mac(PolicyView(ad(), settings), "vm", "", "", [].append) == ("", "")
    with pytest.raises(JobFault, match="works for a plain job"):
        choose_mac(PolicyView(ad(Owner='"evil"'), settings), "vm", "", "", [].append)
    once = Settings({"VM_MAC_HOOK": write('cat >/dev/null; [ -e "$0.ran" ] || { touch "$0.ran"; exit 7; }', "once")})
    assert choose_mac(PolicyView(ad(), once), "vm", "", "", [].append) == ("", "")
