"""The console without a terminal: what is typed becomes lines, what is answered becomes words.

The other side is the server's own session, which is as pure.
"""

import os
import re
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.commands.support import absent
from vmgahp import errors, lifecycle
from vmgahp.commands.console import commands, job_ad, launch, prompt, render
from vmgahp.commands.console.conversation import FAILED, PATIENCE, WRONG, Conversation, Typed
from vmgahp.commands.console.repl import Interpreter
from vmgahp.commands.queue import ask_condor_q
from vmgahp.errors import ClientFault
from vmgahp.metrics import Status
from vmgahp.protocol import error_words, session, wire
from vmgahp.protocol.calls import Call

AD = """\
ClusterId = 12
ProcId = 0
User = "alice@example.org"
JobVMType = "kvm"
JobVMMemory = 64
VMPARAM_vm_Disk = "disk.img:vda:w:raw"
Iwd = "/home/alice/my vm"
TransferInput = "other.txt,images/disk.img"
ClaimId = "<127.0.0.1:9618>#1#2#topsecret"
VM_WORKING_DIR = "/elsewhere"
"""


def prepared(text: str = AD, *, vm_type: str = "", serves: str = "kvm") -> job_ad.Ad:
    return job_ad.prepare(
        text, "/scratch", vm_type=vm_type, serves=serves, user="bob@console", cluster=2000000007, proc=3
    )


class World(launch.Place):
    """What the interpreter asks of the world."""

    def __init__(self) -> None:
        self.text = AD
        self.left = ""

    def ad_of_file(self, path: str, vm_type: str) -> job_ad.Ad:
        if path == "missing":
            raise ClientFault("", "missing cannot be read.", "write one")
        return prepared(self.text, vm_type=vm_type)

    def ad_of_job(self, job: str, vm_type: str) -> job_ad.Ad:
        return prepared(f'{self.text}Job = "{job}"\n', vm_type=vm_type)

    def explanation(self) -> str:
        return self.left


class Rig:
    """A console, and the server's session at the other end. Drivers answer when they are let."""

    def __init__(
        self, *, asks: bool = False, patient: bool = True, server: type[session.Session] = session.Session
    ) -> None:
        self.now = 100.0
        self.world = World()
        self.interpreter = Interpreter(self.world, self.now, asks=asks, patient=patient)
        self.conversation = self.interpreter.conversation
        self.server = server("kvm", self.conversation.logged, lambda _: None)
        self.sent: list[str] = []
        self.shown: list[render.Shown] = []
        self.calls: list[Call] = []
        self.fault: errors.Fault | None = None
        self.conversation.received(wire.GREETING.decode(), self.now)
        self.step()

    def step(self) -> None:
        """Carry lines to and fro until nobody has anything to say."""
        while lines := self.conversation.take_sends():
            for line in lines:
                self.sent.append(line)
                self.server.receive(line.encode("utf-8", "surrogateescape") + b"\r\n", self.now)
            self.now += 0.25
            self.carry()
        self.shown += self.conversation.take_shown()

    def carry(self) -> None:
        self.calls += self.server.take_calls()
        if self.server.quitting:
            self.server.goodbye()
        for line in self.server.take_output().splitlines():
            self.conversation.received(line.decode(), self.now)

    def work(self) -> None:
        """The drivers do what was asked."""
        while self.calls:
            call = self.calls.pop(0)
            outcome: Status | int | errors.Fault | None = self.fault
            if outcome is None and call.operation == lifecycle.STATUS:
                outcome = Status(call.state, cpu_seconds=3.4, vcpus=1, memory_kib=65536, max_memory_kib=65536)
            elif outcome is None and call.operation == lifecycle.GETPID:
                outcome = 4711
            self.now += 2.0
            self.server.finished(call, outcome, self.now)
            self.carry()
            self.step()

    def type(self, line: str, *, work: bool = True) -> str:
        """Type a line: what was shown since."""
        before = len(self.shown)
        self.interpreter.typed(line, self.now)
        self.step()
        if work:
            self.work()
            self.conversation.tell_all()
            self.step()
        return "\n".join(line.text for line in self.shown[before:])


@pytest.fixture
def rig() -> Rig:
    return Rig()


# ---- a VM's life


def test_the_life_of_a_vm_in_short_forms(rig: Rig) -> None:
    assert "#1 START: VM 1 runs   (2.50 s)" in rig.type("start job.ad")
    parts = ("#2 STATUS of VM 1: running, CPU ", "3.40 s of CPU time, 64 MiB of 64 MiB memory")
    assert absent(rig.type("status"), *parts) == []
    assert "#3 GETPID of VM 1: process 4711" in rig.type("pid")
    assert "#4 SUSPEND of VM 1: done" in rig.type("suspend")
    assert "VM 1: Suspended" in rig.type("vms")
    assert "suspended, its memory saved to a file" in rig.type("status")
    rig.type("resume")
    rig.type("soft-suspend 1")
    assert "VM 1: SoftSuspended" in rig.type("vms")
    rig.type("resume")
    assert rig.conversation.vms == {1: lifecycle.RUNNING}
    rig.type("checkpoint")
    rig.type("stop")
    assert "No VM was started here" in rig.type("vms")
    assert rig.conversation.status == 0
    requests = [line for line in rig.sent if line.startswith("CONDOR_VM_")]
    assert [line.split()[1] for line in requests] == [str(n + 1) for n in range(len(requests))]


def test_results_are_fetched_when_r_comes() -> None:
    rig = Rig(patient=False)
    rig.type("start job.ad", work=False)
    assert rig.sent[-1] == "CONDOR_VM_START 1 kvm"
    rig.work()
    assert (rig.sent[-1], rig.conversation.requests.pending) == ("RESULTS", {})


def test_without_asynchronous_mode_results_are_fetched_only_while_somebody_waits() -> None:
    rig = Rig(patient=False)
    rig.type("async off")
    rig.type("start job.ad")
    assert "RESULTS" not in rig.sent
    assert rig.conversation.requests.pending
    rig.type("wait")
    assert not rig.conversation.settled()
    due = rig.conversation.next_deadline()
    assert due is not None
    rig.conversation.tick(due)
    rig.step()
    assert (rig.sent[-1], rig.conversation.settled()) == ("RESULTS", True)
    assert rig.conversation.vms == {1: lifecycle.RUNNING}


def test_requests_are_sent_in_step() -> None:
    """As the real client does: a request goes out when the one before it was answered."""
    conversation = Conversation(0.0, lambda: "")
    conversation.push([Typed("VERSION"), Typed("COMMANDS")], 0.0)
    assert conversation.take_sends() == [], "nothing before the greeting"
    conversation.received("$VMGahpVersion 0.0.1 $", 0.1)
    assert conversation.take_sends() == ["VERSION"]
    conversation.received("R", 0.2)
    assert conversation.take_sends() == []
    conversation.received("S x", 0.3)
    assert conversation.take_sends() == ["RESULTS"]
    conversation.received("S 2", 0.4)
    conversation.received("7 0 NULL", 0.5)
    assert conversation.take_sends() == []
    conversation.received("8 0 NULL", 0.6)
    assert conversation.take_sends() == ["COMMANDS"]


def test_the_job_ad_goes_out_whole_and_is_shown_in_one_line(rig: Rig) -> None:
    said = rig.type("start job.ad")
    begin, end = rig.sent.index("CLASSAD"), rig.sent.index("CLASSAD_END")
    assert tuple(rig.sent[begin + 1 : end]) == prepared().lines
    assert f"({len(prepared().lines)} attributes of alice_example.org_2000000007.3)" in said
    assert "JobVMMemory" not in said


def test_what_a_server_left_about_a_failed_start_is_shown_with_what_becomes_of_the_job(rig: Rig) -> None:
    rig.fault = errors.JobFault(errors.BAD_IMAGE, "It is damaged.", "fix it.")
    rig.world.left = "BAD_IMAGE: It is damaged.\x1b[2J Hint: mend it.\n"
    said = rig.type("start job.ad").splitlines()
    at = next(number for number, line in enumerate(said) if line.startswith("#1 START failed"))
    assert said[at].startswith("#1 START failed: BAD_IMAGE: It is damaged.\\x1b[2J Hint: mend it.   (")
    assert said[at + 1].startswith("  VMGAHP_ERR_BAD_IMAGE: A disk image is damaged")
    assert "puts the job on hold" in said[at + 2]
    rig.world.left = ""
    assert "#2 START failed: It is damaged. Hint: fix it. (job's owner)   (" in rig.type("start job.ad")
    rig.fault = errors.MachineFault("No room.")
    assert "takes the whole machine out" in rig.type("start job.ad")
    rig.fault = errors.Fault("NULL", "Nobody knows.")  # as HTCondor's own server answers
    assert "takes the whole machine out" in rig.type("start job.ad")
    assert rig.conversation.status == 1


def test_a_start_whose_ad_is_refused_is_not_sent() -> None:
    rig = Rig(server=Deaf)
    assert "CLASSAD was refused" in rig.type("start job.ad")
    assert rig.sent == ["CLASSAD"]
    assert rig.conversation.settled(), "nobody waits for the result of a START that was never sent"


class Deaf(session.Session):
    """A server that refuses everything."""

    def receive(self, data: bytes, now: float) -> None:
        self._output += b"E\n"


class Other(session.Session):
    """A server that says in its own way why it refuses everything."""

    def receive(self, data: bytes, now: float) -> None:
        self._log(f"11/22/26 12:00:00 Cannot do {data.decode().strip()}")
        self._log("11/22/26 12:00:00 waiting")
        self._output += b"E\n"


# ---- which VM


def test_a_vm_is_meant_where_there_is_but_one() -> None:
    rig = Rig(patient=False)
    rig.type("start job.ad", work=False)
    assert "has not started yet" in rig.type("status", work=False)
    rig.work()
    rig.type("start job.ad")
    assert "Which VM? There are 1, 2." in rig.type("stop")
    rig.type("stop 2")
    rig.type("stop")
    assert rig.conversation.vms == {}
    assert "STATUS of VM 9: stopped" in rig.type("status 9")


# ---- raw lines


@pytest.mark.parametrize("line", ["VERSION", " VERSION", "CONDOR_VM_STATUS 12  1", "BOGUS x", "condor_vm_status 5 1"])
def test_lines_of_the_protocol_go_out_as_they_are(line: str, rig: Rig) -> None:
    rig.type(line)
    assert rig.sent[0] == line


def test_a_raw_request_is_followed_too(rig: Rig) -> None:
    rig.type("CLASSAD")
    assert rig.interpreter.prompt == "classad> "
    for line in prepared().lines:
        rig.type(line)
    rig.type("CLASSAD_END")
    assert rig.interpreter.prompt == "vmgahp> "
    assert "#40 START: VM 1 runs" in rig.type("CONDOR_VM_START 40 kvm")
    assert "#41 STATUS of VM 1" in rig.type("status")


@pytest.mark.parametrize(
    ("line", "said", "status"),
    [
        ("BOGUS", "BOGUS was refused: an unknown command of 5 bytes", FAILED),
        ("statsu", "There is no command statsu: did you mean status?", WRONG),
        ("status", "No VM was started here", WRONG),
        ("stop x", "x is not the number of a VM", WRONG),
        ("stop 1 2", "stop takes the number of one VM", WRONG),
        ("stop 7", "#1 STOP of VM 7 failed: VMGAHP_ERR_VM_NOT_FOUND: ", FAILED),
        ("start", "start takes", WRONG),
        ("start a b c", "start takes", WRONG),
        ("start missing", "missing cannot be read. Hint: write one.", FAILED),
        ("wait x", "wait takes", WRONG),
        ("log x", "log takes", WRONG),
        ("wire", "wire is on or off", WRONG),
        ("async 1", "async is on or off", WRONG),
        ("version 1", "version takes nothing after it", WRONG),
        ("help BADIMAGE", "Did you mean BAD_IMAGE?", WRONG),
    ],
)
def test_an_error_is_explained_and_is_the_exit_status(line: str, said: str, status: int, rig: Rig) -> None:
    assert said in rig.type(line)
    assert rig.conversation.status == status
    rig.type("version")
    assert rig.conversation.status == status


def test_the_servers_own_sentence_is_waited_for_a_moment() -> None:
    """Its log may begin after its first answers: the words of the protocol alone stand in for it then."""
    for logged in (True, False):
        conversation = Conversation(0.0, lambda: "")
        conversation.received("$VMGahpVersion 0.0.1 $", 0.0)
        conversation.push([Typed("CONDOR_VM_STOP 1 x")], 1.0)
        conversation.received("E", 2.0)
        assert not conversation.settled()
        assert conversation.next_deadline() == 2.0 + PATIENCE
        if logged:
            conversation.logged("refused STOP: the VM id is not a number")
        else:
            conversation.tick(2.0 + PATIENCE)
        assert conversation.settled()
        said = conversation.take_shown()[-1].text
        assert said.startswith(
            "CONDOR_VM_STOP was refused: the VM id" if logged else "CONDOR_VM_STOP was refused: an unkn"
        )


def test_a_sentence_of_an_earlier_failure_is_not_taken_for_that_of_a_later_one(rig: Rig) -> None:
    rig.type("start job.ad")
    rig.fault = errors.HypervisorFault("The disk is full.")
    assert "#2 SUSPEND of VM 1 failed: The disk is full." in rig.type("suspend")
    assert "#3 STOP of VM 7 failed: VMGAHP_ERR_VM_NOT_FOUND: There" in rig.type("stop 7")
    rig.conversation.logged("11/22/26 12:00:00 libvirt: Cannot allocate memory")
    assert "#4 STOP of VM 7 failed: VMGAHP_ERR_VM_NOT_FOUND: There" in rig.type("stop 7")


def test_the_log_of_another_server_is_quoted_too() -> None:
    rig = Rig(server=Other)
    said = rig.type("BOGUS")
    assert "BOGUS was refused: 11/22/26 12:00:00 Cannot do BOGUS" in said


def test_a_result_that_never_comes_is_waited_for_as_long_as_the_starter_waits(rig: Rig) -> None:
    rig.type("start job.ad", work=False)
    assert not rig.conversation.settled()
    due = rig.conversation.requests.pending[1].sent + session.REQUEST_TIMEOUT + session.START_EXTRA
    assert rig.conversation.next_deadline() == due
    rig.conversation.tick(due)
    rig.step()
    assert "condor_starter would give up now" in rig.shown[-1].text
    assert (rig.conversation.settled(), rig.conversation.next_deadline()) == (True, None)


# ---- the end


def test_quit_is_asked_once_where_somebody_can_be_asked_and_a_vm_would_be_lost() -> None:
    rig = Rig(asks=True, patient=False)
    rig.type("start job.ad")
    assert "VM 1 would be destroyed" in rig.type("quit")
    rig.type("vms")
    assert "VM 1 would be destroyed" in rig.type("quit"), "something else was typed in between"
    rig.type("quit")
    assert (rig.sent[-1], rig.conversation.quitting) == ("QUIT", True)


@pytest.mark.parametrize("answer", ["y", "yes", "quit", ""])
def test_the_answer_to_that_question(answer: str) -> None:
    rig = Rig(asks=True, patient=False)
    rig.type("start job.ad", work=False)
    assert "what #1 START starts would be destroyed" in rig.type("QUIT", work=False)
    rig.type(answer)
    rig.type("quit")
    assert rig.conversation.quitting


def test_a_pipe_is_not_asked(rig: Rig) -> None:
    rig.type("start job.ad")
    assert rig.interpreter.end_of_input(rig.now)
    rig.step()
    assert rig.sent[-1] == "QUIT"
    assert any("VM 1 will be destroyed" in line.text for line in rig.shown)


def test_control_d_ends_a_job_ad_first() -> None:
    rig = Rig(asks=True, patient=False)
    rig.type("CLASSAD")
    rig.type("A = 1")
    assert not rig.interpreter.end_of_input(rig.now)
    rig.step()
    assert (rig.sent[-1], rig.conversation.quitting) == ("CLASSAD_END", False)
    assert rig.interpreter.end_of_input(rig.now)


def test_what_is_waited_for_can_be_interrupted() -> None:
    rig = Rig(patient=False)
    rig.type("start job.ad", work=False)
    rig.type("wait 1", work=False)
    assert not rig.conversation.settled()
    rig.interpreter.interrupted()
    assert rig.conversation.settled()


# ---- decoding


@given(st.text(max_size=300) | st.binary(max_size=300).map(lambda data: data.decode("utf-8", "surrogateescape")))
def test_nothing_that_a_server_says_reaches_the_terminal_raw(line: str) -> None:
    """Before the greeting, as a reply, as the number of results and as a result: shown, and never acted upon."""
    for prefix in ("", "S ", "S 1\n", "1 0 ", "1 1 ", "1 0 STATUS=", "R\n"):
        rig = Rig(patient=False)
        rig.conversation.push([Typed("RESULTS"), Typed("CONDOR_VM_STATUS 1 1")], rig.now)
        for part in (prefix + line).split("\n"):
            rig.conversation.received(part, rig.now)
        rig.conversation.logged(line)
        rig.conversation.live_log = True
        rig.conversation.logged(line)
        shown = [part.text for part in rig.conversation.take_shown()]
        assert all(text.isprintable() for text in shown), shown


@given(st.lists(st.text(max_size=30), max_size=8))
def test_any_figures_of_a_status_are_shown(words: list[str]) -> None:
    assert render.status(words).isprintable()
    assert render.status([f"CPUTIME={word}" for word in words] + [f"MEMORY={word}" for word in words]).isprintable()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("STATUS=Running CPUUTILIZATION=0.031 CPUTIME=1.25", "running, CPU 3 %, 1.25 s of CPU time"),
        ("IP=10.0.0.7 MAC=52:54:00:1:2:3 STATUS=Stopped", "stopped, IP 10.0.0.7, MAC 52:54:00:1:2:3"),
        ("STATUS=Running MEMORY=65537 MAXMEMORY=x", "running, 64.0 MiB of x memory"),
        ("STATUS=Odd CPUTIME=nan CPUUTILIZATION=1e999", "Odd, CPU 1e999, CPU time nan"),
        ("NULL", "no state was said, NULL"),
    ],
)
def test_the_figures_of_a_status(words: str, said: str) -> None:
    assert render.status(words.split()) == said


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.0004, "0.4 ms"), (0.0123, "12 ms"), (0.9999, "1.00 s"), (31.437, "31.44 s"), (420.2, "420 s")],
)
def test_times(seconds: float, said: str) -> None:
    assert render.duration(seconds) == said


# ---- job ads


def test_an_ad_is_made_fit_to_be_started_here() -> None:
    made = prepared()
    assert made.lines[:4] == (
        'VM_WORKING_DIR = "/scratch"',
        'JobVMType = "kvm"',
        "ClusterId = 2000000007",
        "ProcId = 3",
    )
    assert 'User = "alice@example.org"' in made.lines
    assert not any("topsecret" in line or "/elsewhere" in line for line in made.lines)
    assert made.name == "alice_example.org_2000000007.3", "no name of a real job: a START would destroy its VM"
    assert "Secrets were left out: ClaimId." in made.notes


def test_a_missing_disk_is_named_with_where_it_is_looked_for(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "images/disk.img").touch()
    (note,) = [note for note in prepared(AD.replace("/home/alice/my vm", str(tmp_path))).notes if "disk" in note]
    assert note.endswith(f"cp {tmp_path}/images/disk.img /scratch/")
    (note,) = [note for note in prepared().notes if "disk" in note]
    assert note.endswith("put it into /scratch/"), "its source is not on this machine"
    for disk in ("/full/path.img:vda:w", "catalog:debian:vda:w"):
        assert not [note for note in prepared(AD.replace("disk.img:vda:w:raw", disk)).notes if "disk" in note.lower()]


def test_the_first_ad_of_several_counts() -> None:
    made = prepared('-- Schedd: here\n# mine\nA = 1\nJobVMType = "kvm"\nbroken\n\nA = 2\n')
    assert absent(made.lines, "A = 1", "A = 2", 'User = "bob@console"') == ["A = 2"]
    assert any(note.startswith("1 lines of it were skipped") for note in made.notes)


def test_an_ad_in_brackets() -> None:
    made = prepared('[ JobVMType = "KVM"; JobVMMemory = 64 * 2;\n Args = "a \\"b\\""; Flag = true ]')
    assert made.vm_type == "kvm"
    assert absent(made.lines, "JobVMMemory = 64 * 2", 'Args = "a \\"b\\""', "Flag = true") == []


@pytest.mark.parametrize("text", ["", "\n\n", "no ad at all", "[", "[]", "[ x = ; ]", "\0\0=\0"])
def test_what_is_no_ad_is_refused(text: str) -> None:
    with pytest.raises(ClientFault):
        prepared(text)


@given(st.text(max_size=200))
def test_any_text_is_an_ad_or_refused(text: str) -> None:
    try:
        made = prepared(text, vm_type="kvm")
    except ClientFault:
        return
    assert all("\n" not in line and "\0" not in line for line in made.lines)


def test_the_type_can_be_chosen_and_a_wrong_one_is_noticed() -> None:
    made = prepared(vm_type="QEMU", serves="qemu")
    assert (made.vm_type, 'JobVMType = "qemu"' in made.lines) == ("qemu", True)
    (note,) = [note for note in prepared(serves="xen").notes if "xen" in note]
    assert "will be refused" in note


def test_job_takes_the_ad_of_a_job(rig: Rig) -> None:
    rig.type("start job 12.0")
    assert 'Job = "12.0"' in rig.sent


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


def test_the_ad_that_was_sent_can_be_looked_at(rig: Rig) -> None:
    assert "No job ad was sent yet" in rig.type("ad")
    rig.world.text += 'Env = "TOKEN=abc"\n'
    rig.type("start job.ad")
    assert absent(rig.type("ad"), "JobVMMemory = 64", "TOKEN=abc") == ["TOKEN=abc"]


# ---- secrets


def test_secrets_that_are_typed_are_neither_shown_nor_kept(rig: Rig) -> None:
    rig.type("CLASSAD")
    assert "topsecret" not in rig.type('ClaimId = "<127.0.0.1:9618>#1#2#topsecret"')
    assert not rig.interpreter.memorable("A = 1"), "a line of a job ad"
    rig.type("CLASSAD_END")
    assert rig.interpreter.memorable("status")
    assert not rig.interpreter.memorable('ClaimId = "x"')
    rig.conversation.logged('ClaimId = "<127.0.0.1:9618>#1#2#topsecret"')
    assert "topsecret" not in rig.type("log")


# ---- help


def test_every_command_has_help_and_every_word_that_it_names_a_meaning() -> None:
    overview = "\n".join(line.text for line in commands.overview())
    for command in commands.PROTOCOL:
        assert command.word in overview
        text = "\n".join(line.text for line in commands.about(command.word))
        for word in command.errors:
            assert f"{word}: {error_words.WORDS[word]}" in text
    for own in commands.OWN:
        assert own.word in overview
        assert commands.about(own.word)[0].text.startswith(own.word)
    assert [command.word for command in commands.PROTOCOL] == list(session.COMMANDS)
    assert {own.operation for own in commands.OWN} - {""} == set(lifecycle.OPERATIONS) - {lifecycle.START}


def test_every_error_word_of_the_daemon_is_explained() -> None:
    words = {
        value
        for name, value in vars(errors).items()
        if name.isupper() and isinstance(value, str) and value.startswith(errors.PREFIX) and value != errors.PREFIX
    }
    for word in words | set(errors.HOLD_CODES):
        assert error_words.meaning(word), word
        text = "\n".join(line.text for line in commands.about(word))
        assert error_words.meaning(word) in text
        assert ("on hold" in text) == (word in errors.HOLD_CODES)


# ---- completion


def candidates(line: str, rig: Rig | None = None) -> list[str]:
    return [found.text for found in commands.complete(line, (rig or Rig()).conversation)]


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("sta", "start status"),
        ("CONDOR_VM_ST", "CONDOR_VM_START CONDOR_VM_STOP CONDOR_VM_STATUS"),
        ("help BAD", "BAD_IMAGE"),
        ("help VMGAHP_ERR_B", "VMGAHP_ERR_BAD_IMAGE"),
        ("async o", "on off"),
        ("log o", "on off"),
        ("version x", ""),
        ("start job 12.0 kv", "kvm"),
        ("start job.ad q", "qemu"),
        ("start job.ad qemu x", ""),
    ],
)
def test_completion_of_words(line: str, found: str) -> None:
    assert candidates(line) == found.split()


def test_completion_of_vms_and_requests() -> None:
    rig = Rig(patient=False)
    rig.type("start job.ad")
    rig.type("start job.ad", work=False)
    lines = ("status ", "wait ", "CONDOR_VM_STATUS ", "CONDOR_VM_STATUS 3 ", "CONDOR_VM_START 3 kv")
    assert [candidates(line, rig) for line in lines] == [["1"], ["2"], ["3"], ["1"], ["kvm"]]


def test_completion_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ads").mkdir()
    for name in ("job.ad", "jobs", ".hidden", "j\x1b[2J", "j with spaces"):
        (tmp_path / name).touch()
    (tmp_path / "ads/one.ad").touch()
    monkeypatch.chdir(tmp_path)
    assert candidates("start j") == ["job", "job.ad", "jobs"]
    assert candidates("start a") == ["ads/"]
    assert candidates("ad ads/") == ["one.ad"]
    assert candidates(f"start {tmp_path}/ads/o") == ["one.ad"]
    assert candidates("ad .h") == [".hidden"]
    assert candidates("ad nowhere/") == []


@given(st.text(max_size=60))
def test_completion_never_fails(line: str) -> None:
    if "/" not in line:
        for found in commands.complete(line, Rig().conversation):
            assert -len(line) <= found.start <= 0


# ---- history


def history(path: object, rig: Rig | None = None) -> "prompt.History":
    return prompt.History(str(path), (rig or Rig()).interpreter)


def kept(path: object) -> list[str]:
    """The lines of a history, the oldest first."""
    return list(history(path).load_history_strings())[::-1]


def test_the_history_is_the_users_alone(tmp_path: Path) -> None:
    file = prompt.history_path({"XDG_STATE_HOME": str(tmp_path / "state")})
    assert file == str(tmp_path / "state/vmgahp/console_history")
    typed = history(file)
    for line in ("status", "status", "stop 1", "bad\x1b[2J", "x" * 600, "two\nlines", 'ClaimId = "x"'):
        typed.append_string(line)
    assert stat.S_IMODE(os.stat(file).st_mode) == 0o600
    assert kept(file) == ["status", "stop 1"]


def test_the_history_does_not_grow_for_ever(tmp_path: Path) -> None:
    file = tmp_path / "console_history"
    lines = [f"line {n}" for n in range(prompt.LARGEST_HISTORY // 8)]
    file.write_text("".join(f"+{line}\n\n" for line in lines))
    file.chmod(0o644)
    left = kept(file)
    assert file.stat().st_size <= prompt.LARGEST_HISTORY // 2
    assert left == lines[-len(left) :]
    assert len(left) > 1000
    history(file).append_string("one more")
    assert kept(file) == [*left, "one more"]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_no_history_where_others_could_put_something(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious\n")
    (tmp_path / "console_history").symlink_to(victim)
    history(tmp_path / "console_history").append_string("status")
    assert victim.read_text() == "precious\n"
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    history(open_to_all / "console_history").append_string("status")
    assert not any(open_to_all.iterdir())
    history("").append_string("status")
    history("/dev/full").append_string("status")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_root_leaves_the_home_of_another_alone(tmp_path: Path) -> None:
    os.chown(tmp_path, 54321, 54321)
    history(tmp_path / "console_history").append_string("status")
    assert not any(tmp_path.iterdir())


def test_where_the_history_is() -> None:
    assert prompt.history_path({"HOME": "/home/a"}) == "/home/a/.local/state/vmgahp/console_history"
    assert prompt.history_path({"HOME": "/home/a", "XDG_STATE_HOME": "relative"}).startswith("/home/a/")
    assert prompt.history_path({}) == ""


# ---- the place


def test_a_fresh_working_directory_is_as_a_starter_makes_it_and_goes_away() -> None:
    place = launch.Place("KVM")
    environ = place.environment({"PATH": "/bin", "VMGAHP_USER_UID": "0"}, ["VM_MEMORY=1024", "A = b=c"])
    made = {"VMGAHP_VMTYPE": "kvm", "VMGAHP_WORKING_DIR": place.path, "_CONDOR_VM_MEMORY": "1024", "_CONDOR_A": "b=c"}
    assert {name: environ[name] for name in made} == made
    found = os.stat(place.path)
    assert stat.S_IMODE(found.st_mode) == 0o755
    assert environ.get("VMGAHP_USER_UID") == (str(found.st_uid) if os.geteuid() == 0 else None)
    assert environ.get("VMGAHP_USER_UID") != "0"
    outer = os.path.dirname(place.path)
    assert place.close() == ""
    assert not os.path.exists(outer)


def test_a_given_working_directory_stays(tmp_path: Path) -> None:
    place = launch.Place("kvm", str(tmp_path))
    (tmp_path / "vm_error.txt").write_text("BAD_IMAGE: ...\n")
    assert place.explanation() == "BAD_IMAGE: ...\n"
    assert place.explanation() == "", "it was seen already"
    (tmp_path / "vm_error.txt").unlink()
    (tmp_path / "vm_error.txt").symlink_to("/etc/passwd")
    assert place.explanation() == "", "the directory is the job's user's, and a link may lead anywhere"
    assert place.close() == ""
    assert tmp_path.is_dir()
    with pytest.raises(OSError, match="no directory"):
        launch.Place("kvm", str(tmp_path / "nowhere"))


def test_the_names_of_vms_are_never_those_of_jobs() -> None:
    place = launch.Place("kvm")
    try:
        assert job_ad.CLUSTER_BASE + 4194304 < 2**31, "the largest process id there is"
        first, second = place._prepare(AD, ""), place._prepare(AD, "")
        assert re.fullmatch(r"alice_example\.org_20\d{8}\.0", first.name)
        assert second.name == first.name.removesuffix("0") + "1"
    finally:
        place.close()


def test_settings_on_the_command_line() -> None:
    assert launch.checked_setting("VM_MEMORY = 1") == "VM_MEMORY = 1"
    for wrong in ("VM_MEMORY", "=1", "A B=1", "$(X)=1"):
        with pytest.raises(ClientFault):
            launch.checked_setting(wrong)
