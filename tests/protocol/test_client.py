"""The client's side of the protocol: what each line is, when it is late, and the client against a scripted server."""

import os
import select
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.client import Client
from vmgahp.protocol import requests, session, wire
from vmgahp.protocol.client import ProtocolError
from vmgahp.protocol.requests import Kind, Request, Requests, RequestState

SCRIPT = r"""
import sys
for answer in open(sys.argv[1]):
    waits, line = answer.rstrip("\n").split(" ", 1)
    for _ in range(int(waits)):
        sys.stdin.readline()
    print(line.replace("~", "\n"), flush=True)
sys.stdin.read()
"""


def serve(directory: Path, *answers: str) -> Client:
    """A server that reads N lines, then answers, for each "N answer"."""
    (directory / "answers").write_text("".join(answer + "\n" for answer in answers))
    return Client([sys.executable, "-c", SCRIPT, str(directory / "answers")])


def python(code: str) -> Client:
    return Client([sys.executable, "-c", code])


def test_words_are_split_at_unescaped_spaces() -> None:
    line = r"S $VMGahpVersion Condor\ VMGAHP a\\b"
    assert wire.words(line) == ["S", "$VMGahpVersion", "Condor VMGAHP", r"a\b"]


def test_a_result_is_waited_for_and_others_are_kept(tmp_path: Path) -> None:
    greeting, status = "0 $VMGahpVersion 0.0.1 May 1 2007 Condor\\ VMGAHP $", "1 S 1~2 0 STATUS=Running CPUTIME=1"
    with serve(tmp_path, greeting, "1 S", "4 S", "1 S~R", "1 S 1~1 0 7", "1 R~S~R", status) as client:
        client.greeting()
        client.send_ad("A = 1", "B = 2", "C = 3")
        assert client.call("START", "kvm") == "7"
        # An R that comes before the reply is kept in mind.
        assert client.run("STATUS", "7") == ["0", "STATUS=Running", "CPUTIME=1"]
        assert client.finish() == ""
        assert client.process.returncode == 0
    with serve(tmp_path, "1 S", "1 S~R", "1 S 2~1 0 one~2 0 two") as client:
        client.ask("CONDOR_VM_STATUS 1 1")
        first = client.requests.pending[1]
        assert client.run("STATUS", 2) == ["0", "two"]
        assert first.result == ["0", "one"]


@pytest.mark.parametrize(
    ("answers", "error"),
    [
        (("1 S~R", "1 S 1~1 1 VMGAHP_ERR_INTERNAL"), r"START failed: VMGAHP_ERR_INTERNAL$"),
        (("1 E",), "answered 'E'"),
        (("1 S~S", "1 S 0"), "it was no R: 'S'"),
    ],
    ids=["a failure carries the word", "a refusal", "a server that speaks without being asked"],
)
def test_what_is_no_success_is_an_error(tmp_path: Path, answers: tuple[str, ...], error: str) -> None:
    with serve(tmp_path, *answers) as client, pytest.raises(ProtocolError, match=error):
        client.call("START", "kvm")


def test_silence_is_an_error_with_what_the_server_said_of_itself() -> None:
    with python("import os; os.write(2, b'I am stuck'); os.close(2); os.read(0, 1)") as client:
        while len(client.descriptors()) == 2:
            client.pump(60)
        with pytest.raises(ProtocolError, match=r"no line(?s:.)*I am stuck"):
            client.read_line(timeout=0.1)


@pytest.mark.parametrize(
    ("code", "act", "error"),
    [
        ("import sys; sys.exit('no such machine')", Client.greeting, r"exit 1(?s:.)*no such machine"),
        ("print('220 hello')", Client.greeting, "not a greeting"),
        ("input(); print('S', flush=True); input(); exit(3)", Client.quit, "exit status is 1"),
        ("import time; time.sleep(600)", lambda client: client.write(b"\n" * (4 << 20), 0.1), "read nothing in 0.1 s"),
    ],
    ids=["ends at once", "another greeting", "a bad end", "reads nothing"],
)
def test_a_server_that_does_not_do_its_part_is_an_error(code: str, act: Callable[[Client], object], error: str) -> None:
    with python(code) as client, pytest.raises(ProtocolError, match=error):
        act(client)


def test_much_on_any_stream_holds_up_nobody() -> None:
    code = "import sys; sys.stderr.write('x' * 999999); print('$VMGahpVersion $', flush=True); sys.stdin.read()"
    with python(code) as client:
        client.greeting()
        assert len(client.finish()) == 999999
    # A server that stops to read until its answers are read holds up nobody for ever.
    with python("for _ in range(49999): print('S ' + input().strip(), flush=True)") as client:
        client.write(b"0123456789\r\n" * 49999)
        assert {client.read_line() for _ in range(49999)} == {"S 0123456789"}


def test_how_a_server_ends() -> None:
    with python("pass") as client:
        client.process.wait()
        with pytest.raises(ProtocolError, match="no longer reads"):
            client.send("VERSION")
    with python("print('up', flush=True); input()") as client:
        client.read_line()
        client.end_by(signal.SIGTERM)
        assert client.process.returncode == -signal.SIGTERM
    with python("import os, time; os.read(0, 1); time.sleep(600)") as client:
        with pytest.raises(ProtocolError, match="did not exit"):
            client.finish(timeout=0.1)
        assert client.process.returncode == -signal.SIGKILL


def test_lines_are_heard_and_go_to_a_log_of_ones_own(tmp_path: Path) -> None:
    heard: list[tuple[str, str]] = []
    code = "import sys; sys.stderr.write('log\\n'); sys.stderr.flush(); print(input()[::-1]); print('R')"
    with Client([sys.executable, "-c", code], heard=lambda mark, line: heard.append((mark, line))) as client:
        client.ask("ab\udcff")
        client.finish()
    assert sorted(heard) == sorted([(">", "ab\udcff"), ("!", "log"), ("<", "\udcffba"), ("<", "R")])
    assert heard.index((">", "ab\udcff")) < heard.index(("<", "\udcffba")) < heard.index(("<", "R"))
    with (tmp_path / "log").open("wb") as log, Client([sys.executable, "-c", "exit('so it ends')"], log=log) as client:
        assert client.finish() == ""
    assert (tmp_path / "log").read_text() == "so it ends\n"


def test_the_server_ends_with_all_that_it_has_started() -> None:
    code = "import subprocess; p = subprocess.Popen(['sleep', '600']); print(p.pid, flush=True); input()"
    with python(code) as client:
        child = os.pidfd_open(int(client.read_line()))
    assert select.select([child], [], [], 60)[0], "the child has ended"
    os.close(child)


def test_every_line_of_the_server_is_one_thing_and_lines_of_a_job_ad_are_not_answered() -> None:
    asked = Requests()
    assert asked.received("$VMGahpVersion 1 $").kind is Kind.GREETING
    assert asked.received("E").kind is Kind.UNASKED
    start, fetch = asked.new("START", "kvm"), Request("RESULTS")
    assert start.line == "CONDOR_VM_START 1 kvm"
    assert asked.sent(start)
    assert asked.sent(fetch)
    assert start.state is RequestState.SENT
    assert asked.received("R").kind is Kind.READY
    assert asked.ready
    assert asked.received("S").request is start
    assert (start.state, asked.pending) == (RequestState.ACCEPTED, {1: start})
    assert asked.received("S 2").request is fetch
    assert not asked.ready
    assert asked.received("9 0 NULL").request is None, "nobody waits for it"
    assert asked.received("1 1 VMGAHP_ERR_INTERNAL").request is start
    assert (start.state, start.result) == (RequestState.FINISHED, ["1", "VMGAHP_ERR_INTERNAL"])
    assert asked.received("1 0 1").kind is Kind.UNASKED
    asked = Requests()
    answered = [asked.sent(Request(line)) for line in ("CLASSAD", "QUIT", "A = 1", "classad_end", "QUIT")]
    assert answered == [True, False, False, True, True]
    asked = Requests()
    asked.sent(Request("CLASSAD"))
    asked.received("E")
    assert asked.sent(Request("QUIT")), "a CLASSAD that was refused begins no job ad"


@pytest.mark.parametrize("line", ["CONDOR_VM_STATUS x 1", "CONDOR_VM_STATUS 1", "STATUS 1 1", "", "A 1 2 3"])
def test_only_a_request_with_an_id_has_a_result(line: str) -> None:
    asked = Requests()
    asked.sent(Request(line))
    asked.received("S")
    assert asked.pending == {}


@pytest.mark.parametrize("line", ["", "1", "x 0 1", "-1 0 1", "1 2 x", "S 1", f"{'9' * 40} 0 1"])
def test_what_is_no_result_is_none(line: str) -> None:
    asked = Requests()
    for request in (asked.new("STATUS", 1), Request("RESULTS")):
        asked.sent(request)
    for said in ("S", "S 1"):
        asked.received(said)
    assert asked.received(line).request is None
    assert list(asked.pending) == [1]


@pytest.mark.parametrize(("reply", "count"), [("S 3", 3), ("S", None), ("E 3", None), ("S 9999999", None)])
def test_how_many_results_follow(reply: str, count: int | None) -> None:
    assert requests.result_count(reply) == count


@pytest.mark.parametrize(("operation", "extra"), [("START", session.START_EXTRA), ("STATUS", 0.0)])
def test_a_result_is_late_when_the_starter_would_give_up(operation: str, extra: float) -> None:
    asked = Requests()
    asked.received("$VMGahpVersion $")
    request = asked.new(operation, 1)
    asked.sent(request, 5.0)
    asked.received("S")
    due = request.deadline()
    assert due == 5.0 + session.REQUEST_TIMEOUT + extra
    assert asked.overdue(due - 0.1) == []
    assert asked.overdue(due) == [request]
    assert asked.overdue(due) == [], "it is told once"
    asked.sent(Request("RESULTS"))
    for line in ("S 1", "1 0 NULL"):
        asked.received(line)
    assert request.state is RequestState.FINISHED, "a late result is a result"
