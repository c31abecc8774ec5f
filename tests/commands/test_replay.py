"""Recorded conversations, played to servers: what is the same is, and what differs is found."""

import io
import os
import subprocess
import sys
from collections import deque
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.client import Client
from tests.commands.support import absent
from tests.peer import DAEMON, DEADLINE, VMGAHP, Peer, environment
from tests.protocol.recordings import STARTER, TRANSCRIPTS
from vmgahp.commands.replay import Difference, Replay, adapted, alike
from vmgahp.protocol import transcript
from vmgahp.protocol.client import ProtocolError
from vmgahp.protocol.requests import Requests

JOB = r"""
< $VMGahpVersion 0.0.1 May 1 2007 Condor\ VMGAHP $
> CLASSAD
< S
> VM_WORKING_DIR = "/scratch"
> JobVMType = "simulated"
> JobVMMemory = 64
> ClusterId = 7
> ProcId = 3
> User = "alice@lab"
> CLASSAD_END
< S
> CONDOR_VM_START 1 simulated
< S
< R
> RESULTS
< S 1
< 1 0 1
> CONDOR_VM_STATUS 2 1
< S
> CONDOR_VM_GETPID 3 1
< S
> CONDOR_VM_SUSPEND 4 1
< S
< R
> RESULTS
< S 3
< 2 0 STATUS=Running CPUUTILIZATION=0.500000 CPUTIME=0.500000 MEMORY=65536 MAXMEMORY=65536
< 3 0 4711
< 4 0 NULL
> CONDOR_VM_STATUS 5 1
< S
< R
> RESULTS
< S 1
< 5 0 STATUS=Suspended
> QUIT
< S
exit 0
"""


class Script(Client):
    """A server that has its answers ready for each line that it gets."""

    def __init__(self, text: str) -> None:
        self.requests = Requests()
        self.process = SimpleNamespace(stdin=io.BytesIO())  # type: ignore[assignment]
        self.sent: list[bytes] = []
        self._answers: list[deque[str]] = [deque()]
        for line in transcript.parse(text).lines:
            if line.mark == ">":
                self._answers.append(deque())
            else:
                self._answers[-1].append(line.text)
        self._ready = self._answers.pop(0)

    def write(self, data: bytes, timeout: float = 0.0) -> None:
        self.sent.append(data)
        if self._answers:
            self._ready += self._answers.pop(0)

    def read_line(self, timeout: float = 0.0) -> str:
        if not self._ready:
            raise ProtocolError
        return self._ready.popleft()


def play(text: str, server: str) -> list[Difference]:
    return Replay(transcript.parse(text), Script(server), timeout=5).run()


# ---- the rules --------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [JOB, *(path.read_text() for path in sorted(TRANSCRIPTS.iterdir()))])
def test_the_same_answers_are_no_difference(text: str) -> None:
    server = Script(text)
    assert Replay(transcript.parse(text), server, timeout=5).run() == []
    assert b"".join(server.sent) == b"".join(line.data for line in transcript.parse(text).lines if line.mark == ">")
    assert server.process.stdin
    assert server.process.stdin.closed


def test_the_difference_is_shown_with_its_request() -> None:
    [difference] = play(JOB, JOB.replace("5 0 STATUS=Suspended", "5 0 \x1b[1mSTATUS"))
    assert difference.show() == ("CONDOR_VM_STATUS 5 1:\n- 5 0 STATUS=Suspended\n+ 5 0 \\x1b[1mSTATUS")


def test_a_missing_answer_is_found_and_ends_the_play() -> None:
    recorded = transcript.parse(JOB)
    server = Script(JOB.replace("> CONDOR_VM_GETPID 3 1\n< S\n", "> CONDOR_VM_GETPID 3 1\n"))
    player = Replay(recorded, server, timeout=5)
    [difference] = player.run()
    assert (difference.recorded, difference.said) == ("S", None)
    assert player.unplayed == len([line for line in recorded.lines if line.number > 22])


SUSPEND = "> CONDOR_VM_SUSPEND 4 1\n< S\n"
THREE = (
    "< S 3\n< 2 0 STATUS=Running CPUUTILIZATION=0.500000 CPUTIME=0.500000 MEMORY=65536 MAXMEMORY=65536\n"
    "< 3 0 4711\n< 4 0 NULL\n"
)


@pytest.mark.parametrize(
    ("old", "new", "recorded", "said"),
    [
        ("5 0 STATUS=Suspended", "5 0 STATUS=Stopped", "5 0 STATUS=Suspended", "5 0 STATUS=Stopped"),
        ("4 0 NULL", "4 1 VMGAHP_ERR_INTERNAL", "4 0 NULL", "4 1 VMGAHP_ERR_INTERNAL"),
        ("< S 1\n< 5 0 STATUS=Suspended\n", "< S 0\n", "5 0 STATUS=Suspended", None),
        ("< S 1\n< 5 ", "< S 2\n< 3 0 0\n< 5 ", None, "3 0 0"),
        *((where, f"{where}< E\n", None, "E") for where in ("> CLASSAD\n< S\n", SUSPEND, "> QUIT\n< S\n")),
    ],
)
def test_what_differs_is_found(old: str, new: str, recorded: str | None, said: str | None) -> None:
    """An answer or a result that is another one, missing or too many."""
    [difference] = play(JOB, JOB.replace(old, new))
    assert (difference.recorded, difference.said) == (recorded, said)


STOPS = "< hello\n> CONDOR_VM_STOP 1 1\n< S\n> CONDOR_VM_STOP 2 1\n< S\n< R\n> RESULTS\n< S 1\n< 1 0 NULL\n"


@pytest.mark.parametrize(
    ("recorded", "server"),
    [
        pytest.param(
            JOB,
            JOB.replace(
                THREE,
                "< S 2\n< 4 0 NULL\n< 3 0 12\n< R\n> RESULTS\n"
                "< S 1\n< 2 0 STATUS=Running CPUUTILIZATION=0.1 CPUTIME=0.2 MEMORY=1 MAXMEMORY=65536\n",
            ),
            id="results come later and in another order: RESULTS is sent until all that is recorded has come",
        ),
        pytest.param(
            f"{STOPS}< R\n> RESULTS\n< S 1\n< 2 0 NULL\n",
            "< hello\n> A\n< S\n> B\n< S\n< R\n> RESULTS\n< S 2\n< 2 0 NULL\n< 1 0 NULL\n> RESULTS\n< S 0\n",
            id="a result that comes early is kept for its place",
        ),
        pytest.param(
            JOB, JOB.replace("< R\n> RESULTS\n< S 1\n< 5", "> RESULTS\n< S 1\n< 5"), id="an R that does not come"
        ),
        pytest.param(STOPS, STOPS.replace("< S 1\n", "< S 2\n< 2 0 NULL\n"), id="a result that nobody fetched then"),
        pytest.param(
            "< hello\n> RESULTS\n> VERSION\n< S 0\n> COMMANDS\n< S $VMGahpVersion 1 $\n< S VERSION\n> QUIT\n< S\n",
            "< hello\n> RESULTS\n< S 0\n> VERSION\n< S $VMGahpVersion 2 $\n> COMMANDS\n< S VERSION\n> QUIT\n< S\n",
            id="a client that does not wait for answers: what is owed still is not too much",
        ),
    ],
)
def test_what_is_no_difference(recorded: str, server: str) -> None:
    assert play(recorded, server) == []


def test_what_varies_is_not_compared() -> None:
    status = "2 0 MAC=52:54:00:00:00:01 IP=10.0.0.1 STATUS=Running CPUTIME=1 MAXMEMORY=65536"
    assert alike(status, "STATUS") == alike("2 0 STATUS=Running CPUTIME=2 MAXMEMORY=65536", "STATUS")
    assert alike(status, "STATUS") != alike("2 0 STATUS=Running CPUTIME=2 MAXMEMORY=65537", "STATUS")
    assert alike(status, "STATUS") != alike("2 0 STATUS=Running MAXMEMORY=65536", "STATUS")
    assert alike("3 0 17", "GETPID") == alike("3 0 18", "GETPID") != alike("3 0 0", "GETPID")
    assert alike("3 1 17", "GETPID") != alike("3 1 18", "GETPID")
    assert alike("3 0 17", "START") != alike("3 0 18", "START")
    assert alike("S $VMGahpVersion 1 $") == alike("S $VMGahpVersion 2 $") != alike("E $VMGahpVersion 1 $")


def test_answers_belong_to_requests_also_where_the_client_did_not_wait() -> None:
    early = "< hello\n> CONDOR_VM_STATUS 1 1\n> RESULTS\n< R\n< S\n< S 1\n< 1 0 X\n> QUIT\n< S\n"
    [difference] = play(early, early.replace("1 0 X", "1 0 Y"))
    assert difference.show() == "CONDOR_VM_STATUS 1 1:\n- 1 0 X\n+ 1 0 Y"


def test_a_recording_for_another_place() -> None:
    changed = adapted(transcript.parse(JOB), {"vm_working_dir": '"/there"', "New": "1"}, "kvm").texts(">")
    assert absent(changed, 'vm_working_dir = "/there"', 'JobVMType = "kvm"', "CONDOR_VM_START 1 kvm") == []
    assert changed.index("New = 1") == changed.index("CLASSAD_END") - 1
    assert len(changed) == len(transcript.parse(JOB).texts(">")) + 1
    assert transcript.parse(JOB).texts("<") == adapted(transcript.parse(JOB), {}, "kvm").texts("<")


# ---- the command ------------------------------------------------------------------------------------


def vmgahp(*words: object, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # type: ignore[call-overload,no-any-return]
        [*VMGAHP, *map(str, words)], capture_output=True, text=True, timeout=DEADLINE, check=False, **options
    )


def test_a_job_is_played_to_the_daemon(scratch: Path, tmp_path: Path) -> None:
    (tmp_path / "job.txt").write_text(JOB)
    options = ["--set", f'VM_WORKING_DIR="{scratch}"', tmp_path / "job.txt", "--", *DAEMON, "-f", "-M", "3"]
    environ = environment("simulated", scratch, VM_REPORT_PID=True)
    done = vmgahp("replay", *options, env=environ)
    assert (done.returncode, done.stdout) == (0, "")
    (tmp_path / "job.txt").write_text(JOB.replace("STATUS=Suspended", "STATUS=Stopped").replace("exit 0", "exit 1"))
    done = vmgahp("replay", *options, env=environ)
    found = "CONDOR_VM_STATUS 5 1:\n- 5 0 STATUS=Stopped\n+ 5 0 STATUS=Suspended\n"
    assert (done.returncode, done.stdout) == (1, f"{found}the server's end:\n- exit 1\n+ exit 0\n")


LIFECYCLE = [
    ("STATUS 5", "5 0 STATUS=Suspended", "5 0 STATUS=SoftSuspended", "the kinds of suspension have names"),
    ("STATUS 11", "11 0 STATUS=Stopped", "11 0 STATUS=Suspended", "a suspended VM is not Stopped, which ends its job"),
    ("SUSPEND 12", "12 1 VMGAHP_ERR_VM_INVALID_OPERATION", "12 0 NULL", "what is already so succeeds"),
    ("RESUME 14", "14 1 VMGAHP_ERR_VM_INVALID_OPERATION", "14 0 NULL", "a suspended VM runs again"),
    ("STATUS 15", "15 0 STATUS=Stopped", "15 0 STATUS=Running", "a suspended VM runs again"),
    ("CHECKPOINT 16", "16 1 VMGAHP_ERR_VM_INVALID_OPERATION", "16 0 NULL", "it still runs, so it has a checkpoint"),
    ("STATUS 17", "17 0 STATUS=Stopped", "17 0 STATUS=Running", "a periodic checkpoint does not end it"),
    ("CHECKPOINT 18", "18 1 VMGAHP_ERR_VM_INVALID_OPERATION", "18 0 NULL", "it still runs"),
    ("RESUME 19", "19 1 VMGAHP_ERR_VM_INVALID_OPERATION", "19 0 NULL", "what is already so succeeds"),
]
"""All that this server answers otherwise than HTCondor's in the life of a VM, and why."""


def test_the_life_of_a_vm_differs_from_the_references_where_it_should(scratch: Path) -> None:
    life = transcript.load(str(TRANSCRIPTS / "lifecycle.txt"))
    recorded = adapted(life, {"VM_WORKING_DIR": f'"{scratch}"'}, "simulated")
    with Peer(environment("simulated", scratch)) as peer:
        *found, quitting = Replay(recorded, peer).run()
    assert (quitting.request, quitting.said) == ("QUIT", "S"), "QUIT is answered, as in the other recording"
    assert len(found) == len(LIFECYCLE)
    for difference, (request, recorded_line, said, _why) in zip(found, LIFECYCLE, strict=True):
        assert (difference.request, difference.recorded) == (f"CONDOR_VM_{request} 1", recorded_line)
        assert difference.said is not None
        assert alike(difference.said, request.split(" ")[0]).startswith(said)


def test_what_a_real_starter_says_is_answered_as_it_was(scratch: Path) -> None:
    """The guest of the recorded job ended by itself, which the second STATUS saw."""
    attributes = {"VM_WORKING_DIR": f'"{scratch}"', "Simulated_Lifetime": "2"}
    recorded = adapted(transcript.load(str(STARTER)), attributes, "simulated")
    with Peer(environment("simulated", scratch)) as peer:
        [types] = Replay(recorded, peer).run()
        peer.finish()
        assert peer.process.returncode == recorded.exit_status == 0
    assert (types.recorded, types.said) == ("S xen kvm", "S xen kvm simulated")


def test_a_server_that_dies_is_told_with_what_was_left(tmp_path: Path) -> None:
    (tmp_path / "job.txt").write_text(JOB)
    done = vmgahp("replay", tmp_path / "job.txt", "--", sys.executable, "-c", "print('$VMGahpVersion 1 $')")
    assert done.returncode == 1
    assert absent(done.stdout, "CLASSAD:\n- S\n", "The server said no more: 34 lines") == []


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["{missing}", "--", "true"], "No such file"),
        (["{file}", "--", "/nonexistent"], "/nonexistent: No such file"),
        (["{file}"], "COMMAND"),
        (["--set", "A", "{file}", "--", "true"], "NAME=VALUE"),
        (["{bad}", "--", "true"], "line 1"),
    ],
)
def test_what_cannot_be_tried_is_no_difference(tmp_path: Path, words: list[str], problem: str) -> None:
    (tmp_path / "file").write_text(JOB)
    (tmp_path / "bad").write_text(">A\n")
    names = {name: tmp_path / name for name in ("file", "bad", "missing")}
    done = vmgahp("replay", *(word.format(**names) for word in words))
    assert (done.returncode, problem in done.stderr) == (2, True), done.stderr


@pytest.mark.parametrize(
    ("made", "problem"),
    [
        (b"root:x:0:0:root:/root:/bin/bash\n", "line 1: 'root:x:0:0:root:/root:/bin/bash' is not a line"),
        (b"# 2026-11-20T16:45:12Z pid 7: /nonexistent\n# it cannot be started\n", "has no line of a conversation"),
        (b"\x7fELF\x02\x01\x01\0\xff\n\0\n", "line 1: '\\x7fELF"),
        (b"< hello\n> QUIT\n< S\nexit 0\n< hello\n", "line 5 comes after the server's exit"),
        (b"< hello\n> CLASSAD\n< S\n> VM_WORKI", "is cut off in its last line"),
    ],
)
def test_what_is_no_transcript_is_refused_and_nothing_is_started(tmp_path: Path, made: bytes, problem: str) -> None:
    (tmp_path / "file").write_bytes(made)
    done = vmgahp("replay", tmp_path / "file", "--", "touch", tmp_path / "started")
    assert (done.returncode, done.stdout) == (2, "")
    assert problem in done.stderr
    assert f"vmgahp replay: {tmp_path}/file" in done.stderr
    assert "Hint: " in done.stderr
    assert not (tmp_path / "started").exists()


def test_a_recording_that_has_no_end_is_played_with_a_word_on_that(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("< hello\n")
    done = vmgahp("replay", tmp_path / "file", "--", "echo", "hello")
    assert (done.returncode, done.stdout) == (0, "")
    assert "does not say how the server ended" in done.stderr


def test_our_server_says_what_the_references_recording_says(scratch: Path) -> None:
    words = [TRANSCRIPTS / "protocol.txt", "--", *DAEMON, "-f", "-M", "3"]
    done = vmgahp("replay", *words, env=environment("kvm", scratch))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


HOSTILE = "\x1b[2J\x1b]0;x\x07\x9b2J\u202e\x7f"


def test_what_a_server_logs_is_shown_and_never_acted_upon(tmp_path: Path) -> None:
    (tmp_path / "job.txt").write_text("> VERSION\n< S\n")
    secret = 'ClaimId = "<1.2.3.4:5>#1#2#SECRET"'
    code = f"import sys; print({HOSTILE + secret!r}, file=sys.stderr, flush=True); print('S'); input()"
    options = {"env": {**os.environ, "PYTHONIOENCODING": "utf-8"}}
    done = vmgahp("replay", tmp_path / "job.txt", "--", sys.executable, "-c", code, **options)
    assert "\\x1b[2J" in done.stderr
    assert done.stderr.replace("\n", "").isprintable()
    assert "SECRET" not in done.stderr
    code = "import os\nwhile True: os.write(2, b'x' * 4096 + b'\\n')"
    words = ["--timeout", "1", tmp_path / "job.txt", "--", sys.executable, "-c", code]
    assert vmgahp("replay", *words).returncode == 1, "one that logs without end is not waited for"
