"""A client of the starter's chirp server, which adds to the job ad and the job's event log.

The protocol is HTCondor's (``src/condor_starter.V6.1/io_proxy_handler.cpp``): each request is a line, and so is its
answer. The starter writes its address and a password to a file of the job's user, who can change it. So that file is
read, and the connection made, as that user; only loopback addresses are accepted; an answer is one short number; and
there is one deadline for all of it. The job itself could set the same attributes.

The starter blocks until it has read a whole line: a line is sent whole or not at all.
"""

import os
import socket
from contextlib import closing
from time import monotonic

from vmgahp.errors import Fault
from vmgahp.host import starter, system_calls
from vmgahp.host.job_user import Identity
from vmgahp.job.published import AT_ONCE, LONGEST_LINE, JobUpdates, expression, printable

LONGEST_FILE = 200
LONGEST_PASSWORD = 100
LONGEST_ANSWER = 20
MOST_PORT = 65535

NO_STARTER = "the job ad gets nothing of this VM, for no starter can be reached by chirp"
NO_LINES = "the job's log gets no lines: the job has neither +WantRemoteUpdates = true nor +WantIOProxy = true"

END_SECONDS = 15.0
"""The timeout of the reports at a VM's end, in seconds; the starter allows 27 s for the STATUS that detects the end."""


class Unheard(Exception):
    """A starter that cannot be reached, or that gives an invalid answer."""


class Starter:
    """An authenticated connection to a starter, until `close`."""

    def __init__(self, directory: str, identity: Identity, seconds: float) -> None:
        """Connect to the starter of the VM with that scratch directory. Raises `Unheard`."""

        self._end = monotonic() + seconds
        with identity.at_hand():
            address, port, password = read(directory, identity)
            try:
                descriptor = identity.run(system_calls.connect_loopback, address, port)
            except (OSError, Fault) as error:
                raise Unheard(f"{NO_STARTER}: {error}") from error
        self._socket = socket.socket(fileno=descriptor)
        try:
            if self.ask(f"cookie {password}") != 0:
                raise Unheard("the starter does not take the password that it has written")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._socket.close()

    def ask(self, *words: str) -> int:
        """Send a line and return the number that answers it. Raises `Unheard`."""
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
    """Return the reason if clearly no starter can be reached, without opening a file."""
    path = starter.places(directory).chirp_config
    try:
        os.lstat(path)
    except FileNotFoundError:
        return f"{NO_STARTER}: there is no {path}"
    except OSError:
        pass  # the job's user may have access
    return ""


def read(directory: str, identity: Identity) -> tuple[str, int, str]:
    """Read the address, the port and the password of the starter from its file. Raises `Unheard`."""
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
    """Parse a starter's file: ``127.0.0.1 34567 abcdefgh``; return None for anything else."""
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
    """Escape `text` as one word of a line."""
    for letter in "\\ \t\r\n":
        text = text.replace(letter, "\\" + letter)
    return text


def tell(updates: JobUpdates, directory: str, identity: Identity, seconds: float) -> str:
    """Send the VM's updates, without refused attributes; return a message for the log. Raises `Unheard`."""
    with closing(Starter(directory, identity, seconds)) as listener:
        return _tell(updates, listener)


def tell_end(updates: JobUpdates, directory: str, identity: Identity, code: int | None) -> str:
    """Send all updates for the last time, after the exit code, which is set at once. Raises nothing."""
    # A round that is running ends after its current attribute.
    is_our_turn = updates.turn.acquire(True, END_SECONDS / 2)
    try:
        with closing(Starter(directory, identity, END_SECONDS)) as listener:
            listener.ask("set_job_attr", AT_ONCE, expression(code))
            problem = _tell(updates, listener, last=True)
    except Unheard as error:
        problem = str(error)
    finally:
        if is_our_turn:
            updates.turn.release()
    return problem if updates.is_new(problem) else ""


def _tell(updates: JobUpdates, listener: Starter, *, last: bool = False) -> str:
    refused = ""
    for name, _ in updates.unsaid():
        if updates.over and not last:
            return ""  # `tell_end` sends the final values
        value = updates.value(name)
        if listener.ask("set_job_attr_delayed", name.attribute, escaped(expression(value))) != 0:
            refused = refused or f"the starter does not take {name.attribute} into the job ad"
        updates.said(name, value)
    while line := updates.next_line():
        text = printable(line).encode()[:LONGEST_LINE].decode(errors="ignore")
        if listener.ask("ulog", escaped(text)) < 0:
            updates.drop_lines()
            return refused or NO_LINES
        updates.line_said(line)
    return refused
