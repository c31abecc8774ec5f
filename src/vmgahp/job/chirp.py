"""Speaks with the starter by chirp, which puts into the job ad and the job's log what it is told.

The protocol is HTCondor's (``src/condor_starter.V6.1/io_proxy_handler.cpp``): a line is asked, a line is answered. The
starter writes where it listens, and a password, to a file of the job's user, who can change it. So that file is read,
and the connection made, as that user; nobody is spoken to but a loopback address; an answer is one short number; and
all of it has one deadline. What is told is what the job could say itself.

The starter reads each line to its end before it does anything else: a line is sent whole or not at all.
"""

import os
from time import monotonic

from vmgahp.errors import Fault
from vmgahp.host import starter, system_calls
from vmgahp.host.job_user import Identity
from vmgahp.job.published import AT_ONCE, LONGEST_LINE, News, expression, printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from _socket import socket

LONGEST_FILE = 200
LONGEST_PASSWORD = 100
LONGEST_ANSWER = 20
MOST_PORT = 65535

NO_STARTER = "the job ad gets nothing of this VM, for no starter can be reached by chirp"
NO_LINES = "the job's log gets no lines: the job has neither +WantRemoteUpdates = true nor +WantIOProxy = true"

END_SECONDS = 15.0
"""For all that is said at a VM's end; the starter has 27 s for the STATUS that brings it to light."""


class Unheard(Exception):
    """The starter is not reached, or does not answer as one does."""


class Starter:
    """A starter that has let us in, until `close`."""

    def __init__(self, directory: str, identity: Identity, seconds: float) -> None:
        """Of the VM with that scratch directory. Raises `Unheard`."""
        import _socket

        self._end = monotonic() + seconds
        with identity.at_hand():
            address, port, password = read(directory, identity)
            try:
                descriptor = identity.run(system_calls.connect_loopback, address, port)
            except (OSError, Fault) as error:
                raise Unheard(f"{NO_STARTER}: {error}") from error
        self._socket: socket = _socket.socket(fileno=descriptor)
        try:
            if self.ask(f"cookie {password}") != 0:
                raise Unheard("the starter does not take the password that it has written")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._socket.close()

    def ask(self, *words: str) -> int:
        """The number that answers a line. Raises `Unheard`."""
        line = " ".join(words).encode() + b"\n"
        answer = b""
        try:
            self._socket.settimeout(self._left())
            if self._socket.send(line) < len(line):
                raise Unheard("the starter does not read")
            while b"\n" not in answer:
                self._socket.settimeout(self._left())
                if not (more := self._socket.recv(LONGEST_ANSWER + 1 - len(answer))):
                    raise Unheard("the starter has hung up")
                answer += more
                if len(answer) > LONGEST_ANSWER:
                    raise Unheard("the starter does not answer by a number")
        except TimeoutError:
            raise Unheard("the starter has not answered in time") from None
        except OSError as error:
            raise Unheard(f"the starter cannot be heard: {error.strerror}") from error
        number = answer[:-1].removeprefix(b"-")
        if not (number.isdigit() and answer.endswith(b"\n")):
            raise Unheard("the starter does not answer by a number")
        return int(answer)

    def _left(self) -> float:
        if (left := self._end - monotonic()) <= 0:
            raise TimeoutError
        return left


def missing(directory: str) -> str:
    """Why no starter can be reached, where that is plain: nothing is opened for it."""
    path = starter.places(directory).chirp_config
    try:
        os.lstat(path)
    except FileNotFoundError:
        return f"{NO_STARTER}: there is no {path}"
    except OSError:
        pass  # the job's user may see it
    return ""


def read(directory: str, identity: Identity) -> tuple[str, int, str]:
    """The address, the port and the password of the starter, as its file says. Raises `Unheard`."""
    path = starter.places(directory).chirp_config
    where, _, name = path.rpartition("/")
    try:
        written = identity.read_scratch(where, name, LONGEST_FILE)
    except FileNotFoundError:
        raise Unheard(f"{NO_STARTER}: there is no {path}") from None
    except (OSError, Fault) as error:
        raise Unheard(f"{NO_STARTER}: {path}: {error}") from error
    if (found := parse(written)) is None:
        raise Unheard(f"{NO_STARTER}: {path} is not as a starter writes it")
    return found


def parse(written: bytes) -> tuple[str, int, str] | None:
    """What a starter has written: ``127.0.0.1 34567 abcdefgh``; None for anything else."""
    if not written.isascii() or len(words := written.decode().rstrip("\r\n").split(" ")) != 3:
        return None
    address, port, password = words
    parts = address.split(".")
    is_v4 = len(parts) == 4 and parts[0] == "127" and all(part.isdigit() and len(part) <= 3 for part in parts)
    if not (is_v4 and all(int(part) <= 255 for part in parts)) and address != "::1":
        return None
    if not (port.isdigit() and len(port) <= 5 and 0 < int(port) <= MOST_PORT):
        return None
    return (address, int(port), password) if password.isalnum() and len(password) <= LONGEST_PASSWORD else None


def escaped(text: str) -> str:
    """`text` as one word of a line."""
    for letter in "\\ \t\r\n":
        text = text.replace(letter, "\\" + letter)
    return text


def tell(news: News, directory: str, identity: Identity, seconds: float) -> str:
    """Say all that is new of the VM with that scratch directory. Raises `Unheard`.

    Returns what the log should know, empty for nothing. What was refused is not said again.
    """
    listener = Starter(directory, identity, seconds)
    try:
        return _tell(news, listener)
    finally:
        listener.close()


def tell_end(news: News, directory: str, identity: Identity, code: int | None) -> str:
    """As `tell`, for the last time; the exit code is an attribute of a name of its own in jobs that may set any.

    Raises nothing: a job does not depend on it.
    """
    # A round that is under way ends with what it has just said.
    is_our_turn = news.turn.acquire(True, END_SECONDS / 2)
    try:
        listener = Starter(directory, identity, END_SECONDS)
        try:
            listener.ask("set_job_attr", AT_ONCE, expression(code))
            problem = _tell(news, listener, last=True)
        finally:
            listener.close()
    except Unheard as error:
        problem = str(error)
    finally:
        if is_our_turn:
            news.turn.release()
    return problem if news.is_new(problem) else ""


def _tell(news: News, listener: Starter, *, last: bool = False) -> str:
    refused = ""
    for name, _ in news.unsaid():
        if news.over and not last:
            return ""  # somebody else says what is true now
        value = news.value(name)
        if listener.ask("set_job_attr_delayed", name.attribute, escaped(expression(value))) != 0:
            refused = refused or f"the starter does not take {name.attribute} into the job ad"
        news.said(name, value)
    for line in news.take_lines():
        text = printable(line).encode()[:LONGEST_LINE].decode(errors="ignore")
        if listener.ask("ulog", escaped(text)) < 0:
            return refused or NO_LINES
    return refused
