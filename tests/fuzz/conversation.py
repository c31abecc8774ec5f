"""Targets: both sides of the protocol, and recordings of it."""

from contextlib import suppress

from tests.fuzz.target import target
from vmgahp import errors
from vmgahp.commands import replay
from vmgahp.lifecycle import GETPID, RUNNING, STATUS
from vmgahp.metrics import Status
from vmgahp.protocol import transcript, wire
from vmgahp.protocol.requests import Kind, Request, Requests, RequestState, digits, result_count
from vmgahp.protocol.session import Session
from vmgahp.text import escape, has_control, redact, shown


def _outcome(number: int, operation: str) -> Status | int | errors.Fault | None:
    if number % 3 == 0:
        return errors.HypervisorFault("nothing came of it.")
    return Status(RUNNING, 1.5, memory_kib=4) if operation == STATUS else 42 if operation == GETPID else None


def _answers(output: bytes) -> int:
    """How many replies stand in what a session writes: without each R, and each result."""
    lines = output.split(b"\n")[:-1]
    number = results = 0
    for line in lines:
        assert len(line) < wire.MAX_REPLY
        if results:
            results -= 1
        elif line != b"R":
            assert line[:1] in (b"S", b"E"), line
            number += 1
            results = result_count(line.decode()) or 0
    assert results == 0
    return number


@target
def session(data: bytes) -> None:
    """Any bytes, however they are cut, get one reply for each request, and the same replies."""
    size, data = (data[0] % 61 + 1, data[1:]) if data else (1, data)
    whole, cut = (Session("kvm", lambda _line: None, lambda _line: None) for _ in range(2))
    lines, reader = [], wire.LineReader()
    reader.receive(data)
    while (line := reader.next_line()) is not None:
        lines.append(line)
    in_ad, expected = False, 0
    for line in lines:
        words = wire.split(line)
        if in_ad:
            in_ad = line.upper() != b"CLASSAD_END"
            expected += not in_ad
        else:
            expected += 1
            in_ad = [word.upper() for word in words] == [b"CLASSAD"]
            if [word.upper() for word in words] == [b"QUIT"]:
                expected -= 1  # whoever carries it out says goodbye
                break
    whole.receive(data, 1.0)
    for start in range(0, len(data), size):
        cut.receive(data[start : start + size], 1.0)
    written = whole.take_output()
    assert written == cut.take_output()
    assert _answers(written) == expected
    for number in range(8):
        for call in whole.take_calls():
            whole.finished(call, _outcome(number + len(data), call.operation), 2.0)
        whole.receive(b"CLASSAD_END\nRESULTS\n", 3.0)
        _answers(whole.take_output())
    whole.expire(1e6)
    whole.next_deadline()


@target
def client(data: bytes) -> None:
    """Whatever a server says, each line is one thing, and only what was asked is answered."""
    requests = Requests()
    waiting = 0
    for number, raw in enumerate(data.split(b"\n")):
        line = raw.decode("utf-8", "surrogateescape")
        if line[:1] == ">":
            request = Request(line[1:])
            answered = requests.sent(request, float(number))
            waiting += answered
            str(request)
            continue
        received = requests.received(line)
        if received.kind is Kind.REPLY:
            waiting -= 1
            assert received.request is not None
            assert received.request.state in (RequestState.REFUSED, RequestState.ACCEPTED)
            received.request.words()
        assert waiting == len(requests.unanswered) >= 0
        assert requests.results_left >= 0
        requests.overdue(float(number))
        replay.alike(line, "STATUS")
        replay.alike(line, "GETPID")
    words = [word.decode("utf-8", "replace").replace("\0", "?") for word in data.split(b"\xff")]
    reply = wire.reply(*words)
    assert len(reply) <= wire.MAX_REPLY
    assert reply.endswith(b"\n")
    if words[0] and sum(2 * len(word.encode()) + 1 for word in words) < wire.MAX_REPLY:
        assert wire.words(reply[:-1].decode()) == words
    for word in words:
        number_of = digits(word)
        assert number_of is None or number_of >= 0


@target
def recording(data: bytes) -> None:
    """A transcript is read or refused; what is read is written such that it reads the same."""
    text = data.decode("utf-8", "surrogateescape")
    with suppress(transcript.TranscriptError):
        read = transcript.parse(text)
        again = transcript.parse("".join(transcript.written(line.mark, line.data) for line in read.lines))
        assert again.lines == read.lines
        assert replay.adapted(read, {"JobVMMemory": "64"}, "kvm").texts("<") == read.texts("<")
    reader = wire.LineReader()
    reader.receive(data)
    lines = [*iter(reader.next_raw, None), reader.rest()]
    assert wire.TOO_LONG in lines or b"".join(lines) == data


@target
def log_text(data: bytes) -> None:
    """What goes to a log is one printable line, and has no secret of the ad in it."""
    text = data.decode("utf-8", "surrogateescape")
    line = escape(redact(text))
    assert line.isprintable()
    assert not has_control(line)
    assert len(shown(text)) < 2500
    secret = text.replace("\n", "").replace('"', '\\"').rstrip("\\")
    if len(secret) > 8 and secret not in redact('a = 1, ClaimId = "" and = 2'):  # which is no secret
        assert secret not in redact(f'a = 1, ClaimId = "{secret}" and = 2')
    transcript.redacted(data)
