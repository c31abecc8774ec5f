"""The console without a terminal: what is typed becomes lines, what is answered becomes words.

The other side is the server's own session, without a process.
"""

import os
import stat
from collections import deque
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document

from tests.commands.support import absent
from vmgahp import errors, lifecycle
from vmgahp.commands import console
from vmgahp.commands.console import conversation, terminal
from vmgahp.commands.console.conversation import CLUSTER_BASE, COMMANDS, FAILED, WRONG_REQUEST, Ad, explain
from vmgahp.commands.files import ask_condor_q
from vmgahp.errors import ClientFault
from vmgahp.metrics import Status
from vmgahp.protocol import requests, session, wire
from vmgahp.protocol.client import ProtocolError
from vmgahp.protocol.session import Call

AD = """\
ClusterId = 12
ProcId = 0
User = "alice@example.org"
JobVMType = "kvm"
JobVMMemory = 64
VMPARAM_vm_Disk = "disk.img:vda:w:raw"
ClaimId = "<127.0.0.1:9618>#1#2#topsecret"
VM_WORKING_DIR = "/elsewhere"
"""


def prepared(text: str = AD, *, vm_type: str = "", serves: str = "kvm") -> Ad:
    return conversation.prepare_ad(text, "/scratch", vm_type=vm_type, serves=serves, number=3)


class Server:
    """A server's session with drivers that answer when they are allowed to, behind the interface of a client."""

    def __init__(self, _command: object, _environ: object, _cwd: object, heard: Callable[[str, str], None]) -> None:
        self.requests = requests.Requests()
        self.session = session.Session("kvm", lambda text: heard("!", text), lambda _: None)
        self.works = True
        self.fault: errors.Fault | None = None
        self.sent: list[str] = []
        self.ended = False
        self.process = SimpleNamespace(returncode=0)
        self._lines = deque([wire.GREETING.decode()])
        self._calls: list[Call] = []

    def send(self, line: str) -> None:
        self.sent.append(line)
        self.session.receive(line.encode("utf-8", "surrogateescape") + b"\r\n", monotonic())
        if self.session.quitting:
            self.session.goodbye()
        self._carry()

    def say(self, line: str) -> None:
        self._lines.append(line)

    def _carry(self) -> None:
        self._calls += self.session.take_calls()
        self._lines += self.session.take_output().decode().splitlines()

    def pump(self, _timeout: float = 0.0) -> bool:
        if not (self.works and self._calls):
            return False
        call = self._calls.pop(0)
        outcome: Status | int | errors.Fault | None = self.fault
        if outcome is None and call.operation == lifecycle.STATUS:
            outcome = Status(call.state, cpu_seconds=3.4, vcpus=1, memory_kib=65536, max_memory_kib=65536)
        elif outcome is None and call.operation == lifecycle.GETPID:
            outcome = 4711
        self.session.finished(call, outcome, monotonic())
        self._carry()
        return True

    def next_line(self) -> str | None:
        return self._lines.popleft() if self._lines else None

    def read_line(self, timeout: float = 0.0) -> str:
        if not self._lines:
            raise ProtocolError(f"no line from the server in {timeout:g} s")
        return self._lines.popleft()


class Rig:
    """A conversation, and the server's session at the other end."""

    def __init__(self, *, person: bool = False) -> None:
        self.shown: list[str] = []
        environ = {"VMGAHP_VMTYPE": "kvm", "VMGAHP_WORKING_DIR": "/scratch"}
        self.talk = conversation.Conversation([], environ, person=person, show=self._show)
        assert isinstance(self.talk.client, Server)
        self.server = self.talk.client
        self.talk.greet()

    def _show(self, _kind: str, text: str) -> None:
        self.shown.append(text)

    def type(self, line: str) -> str:
        """Type a line: what was shown since."""
        before = len(self.shown)
        self.talk.typed(line)
        return "\n".join(self.shown[before:])

    def turn(self) -> str:
        """Let the drivers work while nothing is typed: what was shown since."""
        before = len(self.shown)
        self.talk.turn()
        while self.server.pump():
            self.talk.turn()
        return "\n".join(self.shown[before:])


@pytest.fixture(autouse=True)
def _ads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ads of the test's own, a session in place of a process, and no wait for what a log may still say."""

    def read(path: str) -> str:
        if path == "missing":
            raise ClientFault("", "missing cannot be read.", "write one")
        return AD

    monkeypatch.setattr(conversation, "read_ad_file", read)
    monkeypatch.setattr("vmgahp.commands.console.conversation.ask_condor_q", lambda job: f'{AD}Job = "{job}"\n')
    monkeypatch.setattr("vmgahp.commands.console.conversation.Client", Server)


@pytest.fixture
def rig() -> Rig:
    return Rig()


# ---- a VM's life


def test_the_life_of_a_vm_in_short_forms(rig: Rig) -> None:
    assert "#1 START: VM 1 runs   (" in rig.type("start job.ad")
    assert absent(rig.type("status"), "#2 STATUS of VM 1: Running ", "CPUTIME=3.4", "MEMORY=65536") == []
    assert "#3 GETPID of VM 1: process 4711" in rig.type("pid")
    assert "#4 SUSPEND of VM 1: done" in rig.type("suspend")
    assert "#5 STATUS of VM 1: Suspended" in rig.type("status 1")
    assert "VM 1" in rig.type("vms")
    for command in ("resume", "soft-suspend", "resume", "checkpoint", "stop"):
        assert "of VM 1: done" in rig.type(command)
    assert "no VM" in rig.type("vms")
    assert rig.talk.status == 0
    sent = [line for line in rig.server.sent if line.startswith("CONDOR_VM_")]
    assert [line.split()[1] for line in sent] == [str(n + 1) for n in range(len(sent))]


def test_without_asynchronous_mode_results_are_fetched_only_while_somebody_waits() -> None:
    rig = Rig(person=True)
    rig.type("ASYNC_MODE_OFF")
    rig.type("start job.ad")
    assert rig.turn() == ""
    assert rig.talk.requests.pending
    assert "#1 START: VM 1 runs" in rig.type("wait")
    assert rig.server.sent[-1] == "RESULTS"


def test_the_job_ad_goes_out_whole_and_is_shown_in_one_line(rig: Rig) -> None:
    said = rig.type("start job.ad")
    begin, end = rig.server.sent.index("CLASSAD"), rig.server.sent.index("CLASSAD_END")
    attributes = rig.server.sent[begin + 1 : end]
    assert {'VM_WORKING_DIR = "/scratch"', "JobVMMemory = 64"} <= set(attributes)
    assert f"> ({len(attributes)} attributes of alice_example.org_" in said
    assert "JobVMMemory" not in said


def test_a_failed_start_says_why_and_what_becomes_of_the_job(rig: Rig) -> None:
    rig.server.fault = errors.JobFault(errors.BAD_IMAGE, "It is damaged.\x1b[2J", "mend it.")
    said = rig.type("start job.ad").splitlines()
    at = next(number for number, line in enumerate(said) if line.startswith("#1 START failed"))
    assert said[at].startswith("#1 START failed: It is damaged.\\x1b[2J Hint: mend it. (job's owner)   (")
    assert said[at + 1].startswith("  VMGAHP_ERR_BAD_IMAGE: A disk image is damaged")
    assert "puts the job on hold" in said[at + 2]
    rig.server.fault = errors.MachineFault("No room.")
    assert "takes the whole machine out" in rig.type("start job.ad")
    rig.server.fault = errors.Fault("NULL", "Nobody knows.")  # as HTCondor's own server answers
    assert "takes the whole machine out" in rig.type("start job.ad")
    assert rig.talk.status == FAILED


def test_a_start_whose_ad_is_refused_is_not_sent(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rig.server.session, "receive", lambda *_: rig.server.say("E"))
    assert "CLASSAD was refused" in rig.type("start job.ad")
    assert rig.server.sent == ["CLASSAD"]


# ---- which VM


def test_the_number_may_be_left_out_while_there_is_one_vm() -> None:
    rig = Rig(person=True)
    rig.type("start job.ad")
    assert "There is no VM yet: start one, wait" in rig.type("status")
    rig.turn()
    rig.type("start job.ad")
    rig.turn()
    assert "There are 1, 2: " in rig.type("stop")
    rig.type("stop 2")
    rig.turn()
    rig.type("stop")
    rig.turn()
    assert rig.talk.vms == []
    rig.type("status 9")
    assert "STATUS of VM 9: Stopped" in rig.turn()


# ---- raw lines


@pytest.mark.parametrize("line", ["VERSION", " VERSION", "CONDOR_VM_STATUS 12  1", "BOGUS x"])
def test_lines_of_the_protocol_go_out_as_they_are(line: str, rig: Rig) -> None:
    rig.type(line)
    assert rig.server.sent[0] == line


def test_a_raw_request_is_followed_too() -> None:
    rig = Rig(person=True)
    rig.type("CLASSAD")
    assert rig.talk.prompt == "classad> "
    for line in prepared().lines:
        rig.type(line)
    rig.type("CLASSAD_END")
    assert rig.talk.prompt == "vmgahp> "
    rig.type("CONDOR_VM_START 40 kvm")
    assert "#40 START: VM 1 runs" in rig.turn()
    rig.type("status")
    assert "#41 STATUS of VM 1" in rig.turn()


def test_a_line_that_no_request_waits_for_is_shown(rig: Rig) -> None:
    rig.server.say("Surprise\x1b[2J")
    rig.talk.turn()
    assert rig.shown[-2:] == ["< Surprise\\x1b[2J", "No request waits for this line."]
    rig.server.say("S 1")
    rig.server.say("77 0 NULL")
    rig.talk.requests.sent(requests.Request("RESULTS"))
    rig.talk.turn()
    assert rig.shown[-2:] == ["< 77 0 NULL", "No request waits for this line."]


@pytest.mark.parametrize(
    ("line", "said", "status"),
    [
        ("BOGUS", "BOGUS was refused: an unknown command of 5 bytes", FAILED),
        ("CONDOR_VM_STOP 1 x", "CONDOR_VM_STOP was refused: the VM id is not a number", FAILED),
        ("statsu", "There is no command statsu; did you mean status?", WRONG_REQUEST),
        ("condor_vm_status 1 1", "did you mean CONDOR_VM_STATUS?", WRONG_REQUEST),
        ("status", "There is no VM yet", WRONG_REQUEST),
        ("stop x", "x is not the number of a VM. There is no VM yet: ", WRONG_REQUEST),
        ("stop 1 2", "stop takes [VM]. See: help stop", WRONG_REQUEST),
        ("stop 7", "#1 STOP of VM 7 failed: VMGAHP_ERR_VM_NOT_FOUND: ", FAILED),
        ("start", "start takes AD [TYPE]  or  job ID [TYPE]", WRONG_REQUEST),
        ("start missing", "missing cannot be read. Hint: write one", FAILED),
        ("wait x", "wait takes [REQUEST]", WRONG_REQUEST),
        ("help BADIMAGE", "There is no help about BADIMAGE; did you mean BAD_IMAGE?", WRONG_REQUEST),
    ],
)
def test_an_error_names_the_cure_and_is_the_exit_status(line: str, said: str, status: int, rig: Rig) -> None:
    assert said in rig.type(line)
    assert rig.talk.status == status
    rig.type("VERSION")
    assert rig.talk.status == status


def test_a_sentence_of_an_earlier_failure_is_not_taken_for_that_of_a_later_one(rig: Rig) -> None:
    rig.type("start job.ad")
    rig.server.fault = errors.HypervisorFault("The disk is full.")
    assert "#2 SUSPEND of VM 1 failed: The disk is full." in rig.type("suspend")
    assert "#3 STOP of VM 7 failed: VMGAHP_ERR_VM_NOT_FOUND: There" in rig.type("stop 7")
    assert "The disk is full." in rig.type("log")


def test_a_missing_result_is_waited_for_as_long_as_the_starter_waits(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "REQUEST_TIMEOUT", 0.0)
    monkeypatch.setattr(requests, "START_EXTRA", 0.0)
    rig.server.works = False
    assert "condor_starter would give up now" in rig.type("start job.ad")


# ---- the end


def test_quit_is_asked_once_where_somebody_can_be_asked_and_a_vm_would_be_lost() -> None:
    rig = Rig(person=True)
    rig.type("start job.ad")
    assert "the VM of #1 START would be destroyed" in rig.type("QUIT")
    rig.turn()
    rig.type("vms")
    assert "VM 1 would be destroyed" in rig.type("quit"), "something else was typed in between"
    rig.type("quit")
    assert (rig.server.sent[-1], rig.talk.over) == ("QUIT", True)


def test_a_pipe_is_not_asked_and_its_end_waits_for_results(rig: Rig) -> None:
    rig.type("start job.ad")
    rig.type("CONDOR_VM_SUSPEND 5 1")
    rig.talk.end_of_input()
    assert rig.server.sent[-1] == "QUIT"
    assert absent(rig.shown, "VM 1 will be destroyed.") == []
    assert any("#5 SUSPEND of VM 1: done" in line for line in rig.shown)


def test_control_d_ends_a_job_ad_first() -> None:
    rig = Rig(person=True)
    rig.type("CLASSAD")
    rig.type("A = 1")
    rig.talk.end_of_input()
    assert (rig.server.sent[-1], rig.talk.over) == ("CLASSAD_END", False)
    rig.talk.end_of_input()
    assert rig.talk.over


# ---- what is shown


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(max_size=300) | st.binary(max_size=300).map(lambda data: data.decode("utf-8", "surrogateescape")))
def test_nothing_that_a_server_says_reaches_the_terminal_raw(monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    """As a reply, as the number of results, as a result and in its log: shown, and never acted upon."""
    monkeypatch.setattr("vmgahp.commands.console.conversation.PATIENCE", 0.0)
    for prefix in ("", "S ", "E ", "S 1\n", "1 0 ", "1 1 ", "1 0 STATUS=", "R\n"):
        rig = Rig(person=True)
        rig.talk.requests.sent(requests.Request("RESULTS"))
        rig.talk.requests.pending[1] = requests.Request("CONDOR_VM_STATUS 1 1")
        for part in (prefix + line).split("\n"):
            rig.server.say(part)
        rig.talk._heard("!", line)
        rig.talk.turn()
        rig.type("log")
        assert all(text.isprintable() for text in rig.shown), rig.shown


# ---- job ads


def test_an_ad_is_made_fit_to_be_started_here() -> None:
    made = prepared()
    number = CLUSTER_BASE + os.getpid()
    assert made.lines[:4] == ['VM_WORKING_DIR = "/scratch"', 'JobVMType = "kvm"', f"ClusterId = {number}", "ProcId = 3"]
    assert 'User = "alice@example.org"' in made.lines
    assert not any("topsecret" in line or "/elsewhere" in line for line in made.lines)
    assert made.name == f"alice_example.org_{number}.3", "a job's own name would destroy the VM of the job"
    assert CLUSTER_BASE + 4194304 < 2**31, "the largest process id there is"
    assert "Secrets were left out: ClaimId." in made.notes


def test_the_first_ad_of_several_counts() -> None:
    made = prepared('-- Schedd: here\n# mine\nA = 1\nJobVMType = "kvm"\nbroken\nB = 1\n\nA = 2\n')
    assert absent(made.lines, "A = 1", "B = 1", "A = 2", f'User = "{os.getuid()}@console"') == ["A = 2"]


@pytest.mark.parametrize("text", ["", "no ad at all", "\0\0=\0"])
def test_what_is_no_ad_is_refused(text: str) -> None:
    with pytest.raises(ClientFault):
        prepared(text)


def test_the_type_can_be_chosen_and_a_wrong_one_is_noticed() -> None:
    made = prepared(vm_type="QEMU", serves="qemu")
    assert (made.vm_type, 'JobVMType = "qemu"' in made.lines) == ("qemu", True)
    (note,) = [note for note in prepared(serves="xen").notes if "xen" in note]
    assert "will be refused" in note


@pytest.mark.parametrize("job", ["-help", "12.0;x", "", "a"])
def test_only_a_job_id_is_given_to_condor_q(job: str) -> None:
    with pytest.raises(ClientFault, match="not a job id"):
        ask_condor_q(job)


def test_condor_q_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "condor_q"
    tool.write_text('#!/bin/sh\n[ "$*" = "-l 12.0" ] || { echo "no $*" >&2; exit 1; }\necho A = 1\n')
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(ClientFault, match="condor_q"):
        ask_condor_q("12.0")
    tool.chmod(0o755)
    assert ask_condor_q("12.0") == "A = 1\n"
    with pytest.raises(ClientFault, match="no -l 7"):
        ask_condor_q("7")


def test_what_would_be_sent_can_be_looked_at_and_job_takes_the_ad_of_a_job(rig: Rig) -> None:
    said = rig.type("ad job.ad").replace("topsecret", "")
    assert absent(said, "JobVMMemory = 64", "Secrets were left out", 'VM_WORKING_DIR = "/scratch"') == []
    assert rig.server.sent == []
    rig.type("start job 12.0")
    assert 'Job = "12.0"' in rig.server.sent


# ---- secrets


def test_secrets_that_are_typed_are_not_shown(rig: Rig) -> None:
    rig.type("CLASSAD")
    assert "topsecret" not in rig.type('ClaimId = "<127.0.0.1:9618>#1#2#topsecret"')
    rig.type("CLASSAD_END")
    rig.talk._heard("!", 'ClaimId = "<127.0.0.1:9618>#1#2#topsecret"')
    assert "topsecret" not in rig.type("log")


# ---- help


def test_every_command_has_help() -> None:
    assert all(explain(word)[0] in explain() for word in COMMANDS)
    assert all(explain(command) for command in session.COMMANDS)
    operations = [row.operation for row in COMMANDS.values() if row.operation]
    assert sorted(operations) == sorted(lifecycle.OPERATIONS)


def test_every_error_word_of_the_daemon_is_explained() -> None:
    known = {
        value
        for name, value in vars(errors).items()
        if name.isupper() and isinstance(value, str) and value.startswith(errors.PREFIX) and value != errors.PREFIX
    }
    for word in known | set(errors.HOLD_CODES):
        text = "\n".join(explain(word))
        assert requests.meaning(word), word
        assert requests.meaning(word) in text
        assert ("on hold" in text) == (word in errors.HOLD_CODES)


# ---- completion


def candidates(line: str, rig: Rig) -> list[str]:
    found = terminal.completer(rig.talk).get_completions(Document(line), CompleteEvent())
    return [line[len(line) + each.start_position :] + each.text[-each.start_position :] for each in found]


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("sta", "start status"), ("CONDOR_VM_ST", "CONDOR_VM_START CONDOR_VM_STATUS CONDOR_VM_STOP"),
        ("help BAD", "BAD_IMAGE"), ("version x", ""),
    ],
)  # fmt: skip
def test_completion_of_words(line: str, found: str, rig: Rig) -> None:
    assert sorted(candidates(line, rig)) == found.split()


def test_completion_of_vms_and_requests() -> None:
    rig = Rig(person=True)
    rig.type("start job.ad")
    rig.turn()
    rig.type("start job.ad")
    assert [candidates(line, rig) for line in ("status ", "wait ")] == [["1"], ["2"]]


# ---- the server's surroundings


def test_a_fresh_working_directory_is_as_a_starter_makes_it_and_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VMGAHP_USER_UID", "0")
    with console._working_directory("") as path:
        environ = console._environment("kvm", path, {"A": "b=c"})
        made = {"VMGAHP_VMTYPE": "kvm", "VMGAHP_WORKING_DIR": path, "_CONDOR_VM_TYPE": "kvm", "_CONDOR_A": "b=c"}
        assert {name: environ[name] for name in made} == made
        found = os.stat(path)
        assert stat.S_IMODE(found.st_mode) == 0o755
        assert environ.get("VMGAHP_USER_UID") == (str(found.st_uid) if os.geteuid() == 0 else None)
        assert environ.get("VMGAHP_USER_UID") != "0"
    assert not os.path.exists(os.path.dirname(path))
