"""The client's side of the protocol without a server: what each line is, and when it is late."""

import pytest

from vmgahp.protocol import requests, session
from vmgahp.protocol.requests import Kind, Request, Requests, RequestState


def test_every_line_of_the_server_is_one_thing() -> None:
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


def test_lines_of_a_job_ad_are_not_answered() -> None:
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


@pytest.mark.parametrize(
    ("reply", "count"), [("S 3", 3), ("S", None), ("S x", None), ("E 3", None), ("S 9999999", None)]
)
def test_how_many_results_follow(reply: str, count: int | None) -> None:
    assert requests.result_count(reply) == count


def test_no_answer_comes_to_an_end() -> None:
    asked = Requests(0.0)
    assert asked.next_deadline() == requests.GREETING_DEADLINE
    assert "greeting" in asked.broken(requests.GREETING_DEADLINE)
    asked.received("$VMGahpVersion $")
    asked.sent(Request("VERSION"), 2.0)
    due = asked.next_deadline()
    assert due == 2.0 + requests.REPLY_DEADLINE
    assert not asked.broken(due - 0.1)
    assert "VERSION" in asked.broken(due)


@pytest.mark.parametrize(("operation", "extra"), [("START", session.START_EXTRA), ("STATUS", 0.0)])
def test_a_result_is_late_when_the_starter_would_give_up(operation: str, extra: float) -> None:
    asked = Requests(0.0)
    asked.received("$VMGahpVersion $")
    request = asked.new(operation, 1)
    asked.sent(request, 5.0)
    asked.received("S")
    due = asked.next_deadline()
    assert due == 5.0 + session.REQUEST_TIMEOUT + extra
    assert asked.overdue(due - 0.1) == []
    assert asked.overdue(due) == [request]
    assert asked.overdue(due) == [], "it is told once"
    assert asked.next_deadline() is None
    asked.sent(Request("RESULTS"))
    for line in ("S 1", "1 0 NULL"):
        asked.received(line)
    assert request.state is RequestState.FINISHED, "a late result is a result"
