"""What a starter is told by chirp, and who is not spoken to."""

import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.jobs import own
from tests.lab.starter import ANY, FakeStarter, elsewhere
from vmgahp.host.job_user import Identity
from vmgahp.job import chirp, published
from vmgahp.job.ad import JobAd
from vmgahp.job.published import NAMES, JobUpdates, expression

SECONDS = 30.0


def updates_of(**values: published.Value) -> JobUpdates:
    updates = JobUpdates()
    for name in NAMES:
        if name.attribute in values:
            updates.publish(name, values[name.attribute])
    return updates


def tell(updates: JobUpdates, scratch: Path, user: Identity, seconds: float = SECONDS) -> str:
    return chirp.tell(updates, str(scratch), user, seconds)


def test_what_is_new_is_told_once(scratch: Path, user: Identity, starter: FakeStarter) -> None:
    updates = updates_of(ChirpVMState="Running", ChirpVMMemory=1234, ChirpVMCPU=1.5)
    assert tell(updates, scratch, user) == ""
    assert starter.ad() == {"ChirpVMState": '"Running"', "ChirpVMMemory": "1234", "ChirpVMCPU": "1.5"}
    updates.publish(published.STATE, "Running")
    updates.publish(published.MEMORY, 1235)
    assert updates.unsaid() == [(published.MEMORY, 1235)]
    tell(updates, scratch, user)
    assert starter.told[3:] == [["set_job_attr_delayed", "ChirpVMMemory", "1235"]]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_it_is_the_jobs_user_who_connects(scratch: Path, user: Identity, monkeypatch: pytest.MonkeyPatch) -> None:
    owners: list[int] = []
    ask = chirp.Starter.ask

    def asked(self: chirp.Starter, *words: str) -> int:
        owners.append(os.fstat(self._socket.fileno()).st_uid)
        return ask(self, *words)

    monkeypatch.setattr(chirp.Starter, "ask", asked)
    with FakeStarter(scratch):
        tell(updates_of(ChirpVMState="Running"), scratch, user)
    assert set(owners) == {user.uid}


def test_the_environment_names_its_file(scratch: Path, user: Identity, monkeypatch: pytest.MonkeyPatch) -> None:
    config = elsewhere(scratch) / ".chirp.config"
    monkeypatch.setenv("_CONDOR_SCRATCH_DIR", str(scratch))
    monkeypatch.setenv("_CONDOR_CHIRP_CONFIG", str(config))
    with FakeStarter(scratch, config=config) as starter:
        assert tell(updates_of(ChirpVMState="Running"), scratch, user) == ""
    assert starter.ad() == {"ChirpVMState": '"Running"'}


def test_what_is_refused_is_said_once_and_not_again(scratch: Path, user: Identity, starter: FakeStarter) -> None:
    starter.allowed = ()
    updates = updates_of(ChirpVMState="Running", ChirpVMMemory=1)
    assert tell(updates, scratch, user) == "the starter does not take ChirpVMState into the job ad"
    assert not updates.unsaid()


def test_a_line_goes_to_the_jobs_log_where_the_job_may(scratch: Path, user: Identity, starter: FakeStarter) -> None:
    updates = updates_of(ChirpVMVNC="127.0.0.1:5900")
    assert tell(updates, scratch, user) == chirp.NO_LINES
    starter.allowed = ANY
    updates.say("a line of\nits own")
    assert tell(updates, scratch, user) == ""
    assert starter.log()[-1] == "a line of?its own"
    assert starter.log()[0] == "The VM's display is at 127.0.0.1:5900 of its machine"


def test_a_line_is_said_again_to_a_starter_that_has_not_heard_it(
    scratch: Path, user: Identity, starter: FakeStarter
) -> None:
    starter.allowed = ANY
    updates, answer = JobUpdates(), starter.answer
    updates.say("the first")
    updates.say("the second")
    starter.answer = b"no\n"
    with pytest.raises(chirp.Unheard):
        tell(updates, scratch, user)
    starter.answer = answer
    assert tell(updates, scratch, user) == ""
    assert starter.log()[-2:] == ["the first", "the second"]


def test_a_line_whose_answer_is_always_late_does_not_keep_the_rest_from_the_job_ad(scratch, user, starter) -> None:
    starter.allowed = ANY
    updates, answer = updates_of(), starter.answer
    for line in ("the first", "the second"):
        updates.say(line)
    starter.answer = b"no\n"
    for _ in range(2):
        with pytest.raises(chirp.Unheard):
            tell(updates, scratch, user)
    assert tell(updates, scratch, user) == ""
    starter.answer = answer
    updates.say("the third")
    assert tell(updates, scratch, user) == ""
    assert starter.log()[-1] == "the third"


def test_a_line_after_one_that_was_refused_is_said_again_as_any_other(scratch, user, starter) -> None:
    updates, answer = updates_of(), starter.answer
    updates.say("refused")
    assert tell(updates, scratch, user) == chirp.NO_LINES
    starter.allowed, starter.answer = ANY, b"no\n"
    updates.say("taken")
    with pytest.raises(chirp.Unheard):
        tell(updates, scratch, user)
    starter.answer = answer
    assert tell(updates, scratch, user) == ""
    assert starter.log()[-2:] == ["taken", "taken"]


def test_a_vm_fills_no_log(scratch: Path, user: Identity) -> None:
    updates = JobUpdates()
    for number in range(1000):
        updates.publish(published.ADDRESSES, f"10.0.0.{number}")
    with FakeStarter(scratch, ANY) as starter:
        tell(updates, scratch, user)
    assert len(starter.log()) == published.MOST_LINES
    assert starter.ad() == {"ChirpVMAddresses": '"10.0.0.999"'}


# The file, which is in the job's hands


def configured(scratch: Path, text: bytes) -> None:
    path = scratch / ".chirp.config"
    path.write_bytes(text)
    own(scratch, path)


@pytest.mark.parametrize(
    "text",
    [
        *(b"10.0.0.1 80 abc\n", b"127.evil.example 80 abc\n", b"localhost 80 abc\n", b"127.0.0 80 abc\n", b""),
        *(b"127.0.0.1 80\n", b"127.0.0.1 80 abc def\n", b"127.0.0.1 80 " + b"x" * 5000 + b"\n", b"127.0.0.999 8 a\n"),
        *(b"127.0.0.1 80 abc\n10.0.0.1 80 abc\n", b"\x00\xff", b"::2 80 abc\n", b"127.0.0.1 0 abc\n"),
        *(b"127.0.0.1 65536 abc\n", b"127.0.0.1 80 a\\nb\n", b"0127.0.0.1 80 abc\n", "127.0.0.1 8٣ abc\n".encode()),
    ],
)
def test_nobody_but_the_starter_of_this_machine_is_spoken_to(scratch: Path, user: Identity, text: bytes) -> None:
    configured(scratch, text)
    with pytest.raises(chirp.Unheard, match="is not as a starter writes it"):
        tell(updates_of(ChirpVMState="Running"), scratch, user)


def test_a_loopback_address_is_the_starters() -> None:
    assert chirp.parse(b"127.255.0.1 65535 a\n") == ("127.255.0.1", 65535, "a")
    assert chirp.parse(b"::1 1 a") == ("::1", 1, "a")


def test_without_a_starter_that_is_said(scratch: Path, user: Identity) -> None:
    with pytest.raises(chirp.Unheard) as error:
        tell(JobUpdates(), scratch, user)
    assert str(error.value) == chirp.missing(str(scratch)) == f"{chirp.NO_STARTER}: there is no {scratch}/.chirp.config"
    with FakeStarter(scratch):
        assert chirp.missing(str(scratch)) == ""


@pytest.mark.parametrize(
    "make", [lambda path: path.symlink_to("other"), os.mkdir, os.mkfifo], ids=["link", "directory", "fifo"]
)
def test_no_link_is_followed_to_the_file(scratch: Path, user: Identity, make: Callable[[Path], None]) -> None:
    (scratch / "other").write_text("127.0.0.1 80 abc\n")
    make(scratch / ".chirp.config")
    own(scratch)
    with pytest.raises(chirp.Unheard):
        tell(JobUpdates(), scratch, user)


# A starter that is none


@pytest.mark.parametrize("answer", [b"0" * 5000, b"no\n", b"\n", b"0\n0\n", b"-\n", "٣\n".encode(), b"\xff\n"])
def test_an_answer_is_a_short_number(scratch: Path, user: Identity, starter: FakeStarter, answer: bytes) -> None:
    starter.answer = answer
    updates = updates_of(ChirpVMState="Running")
    with pytest.raises(chirp.Unheard, match="does not answer by a number"):
        tell(updates, scratch, user)
    assert updates.unsaid()


def test_one_that_never_answers_is_not_waited_for(scratch: Path, user: Identity, starter: FakeStarter) -> None:
    starter.answer = b""
    with pytest.raises(chirp.Unheard, match="has not answered in time"):
        tell(updates_of(ChirpVMState="Running"), scratch, user, 0.2)


def test_one_that_takes_nobody_up_or_is_gone_is_not_waited_for(scratch: Path, user: Identity) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        address = listener.getsockname()
        with socket.create_connection(address):  # no more are kept waiting
            configured(scratch, f"127.0.0.1 {address[1]} abc\n".encode())
            with pytest.raises(chirp.Unheard, match="has not answered in time"):
                tell(updates_of(ChirpVMState="Running"), scratch, user, 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    configured(scratch, f"127.0.0.1 {port} abc\n".encode())
    with pytest.raises(chirp.Unheard, match="refused"):
        tell(updates_of(ChirpVMState="Running"), scratch, user)


def test_nothing_is_told_one_that_knows_another_password(scratch: Path, user: Identity, starter: FakeStarter) -> None:
    path = scratch / ".chirp.config"
    path.write_text(path.read_text().replace("abcdefghij", "guessed"))
    with pytest.raises(chirp.Unheard, match="does not take the password"):
        tell(updates_of(ChirpVMState="Running"), scratch, user)
    assert starter.told == []


def test_a_round_that_the_end_overtakes_says_nothing_more(scratch, user, starter, monkeypatch):
    updates = updates_of(ChirpVMState="Running", ChirpVMMemory=1)
    ask = chirp.Starter.ask
    ends: list[threading.Thread] = []

    def end() -> None:
        updates.is_over()
        updates.publish(published.STATE, "Stopped")
        chirp.tell_end(updates, str(scratch), user, 3)

    def asked(self: chirp.Starter, *words: str) -> int:
        if words[-1] == '"Running"':
            ends.append(threading.Thread(target=end))
            ends[0].start()
            while not updates.over:
                time.sleep(0.001)
        return ask(self, *words)

    monkeypatch.setattr(chirp.Starter, "ask", asked)
    with updates.turn:
        assert tell(updates, scratch, user) == ""
    ends[0].join(SECONDS)
    assert [words[-1] for words in starter.told] == ['"Running"', "3", '"Stopped"', "1"]


def test_the_end_raises_nothing_and_says_each_problem_once(scratch: Path, user: Identity) -> None:
    updates = JobUpdates()
    assert "no starter can be reached" in chirp.tell_end(updates, str(scratch), user, 3)
    assert chirp.tell_end(updates, str(scratch), user, 3) == ""


# Words


def test_all_names_are_for_delayed_updates_and_differ() -> None:
    assert all(name.attribute.startswith("ChirpVM") for name in NAMES)
    assert len({name.attribute.lower() for name in NAMES}) == len(NAMES) < 90, "a starter takes 100 of a job"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((None, "undefined"), (True, "true"), (7, "7"), (0.5, "0.5"), ("plain", '"plain"')),
        *(('a "b" \\', '"a \\"b\\" \\\\"'), ("Grüße ☃", '"Grüße ☃"'), ("\x1b[31mred\n", '"?[31mred?"')),
        ("\u2028\u202e", '"??"'),
    ],
)
def test_a_value_is_an_expression_on_one_line(value: published.Value, text: str) -> None:
    assert expression(value) == text


def test_what_an_earlier_run_has_left_and_what_is_over_is_undefined() -> None:
    ad = JobAd([("chirpvmvnc", '"127.0.0.1:5900"'), ("ChirpVMOfAnother", "1"), ("ClusterId", "1")])
    updates = updates_of(ChirpVMState="Running")
    updates.forget(ad.names("ChirpVM"))
    assert updates.unsaid() == [(published.STATE, "Running"), (published.VNC, None)]
    updates = updates_of(ChirpVMState="Running", ChirpVMSSH="127.0.0.1:2200", ChirpVMMemoryPeak=7)
    updates.is_over()
    assert dict(updates.unsaid()) == {published.STATE: "Running", published.SSH: None, published.MEMORY_PEAK: 7}
