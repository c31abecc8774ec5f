"""A client that waits for what it asks for, as condor_starter does."""

from __future__ import annotations

import time

from vmgahp.protocol import client
from vmgahp.protocol.client import DEADLINE, ProtocolError
from vmgahp.protocol.requests import Kind, Request, RequestState


class Client(client.Client):
    """A server process and the conversation with it, request by request."""

    def greeting(self, timeout: float = DEADLINE) -> str:
        """Wait for the greeting, the line before any request."""
        line = self.receive(timeout).line
        if not self.requests.greeted:
            raise ProtocolError(f"this is not a greeting: {line!r}")
        return line

    def ask(self, line: str, timeout: float = DEADLINE) -> str:
        """Send a request, and wait for its reply line."""
        return self._ask(Request(line), timeout)

    def run(self, operation: str, argument: object, timeout: float = DEADLINE) -> list[str]:
        """Send a request such as STATUS, wait for its result and return its words after the request id."""
        end = time.monotonic() + timeout
        request = self.requests.new(operation, argument)
        self._ask(request, timeout, accepted=True)
        while request.state is not RequestState.FINISHED:
            self.wait_for_r(max(0.0, end - time.monotonic()))
            self._ask(Request("RESULTS"), timeout, accepted=True)
            while self.requests.results_left:
                self.receive(timeout)
        return request.result

    def call(self, operation: str, argument: object, timeout: float = DEADLINE) -> str:
        """Run a request as `run` does and return the words of its result. Raises `ProtocolError` if it failed."""
        success, *words = self.run(operation, argument, timeout)
        if success != "0":
            raise ProtocolError(f"{operation} failed: {' '.join(words)}")
        return " ".join(words)

    def send_ad(self, *lines: str) -> None:
        """Send a job ad as a CLASSAD block, of which only the first and last line are answered."""
        self._ask(Request("CLASSAD"), accepted=True)
        for line in lines:
            self.send(line)
        self._ask(Request("CLASSAD_END"), accepted=True)

    def wait_for_r(self, timeout: float = DEADLINE) -> None:
        """Wait for the R that announces results, unless it has come already."""
        while not self.requests.ready:
            received = self.receive(timeout)
            if received.kind is not Kind.READY:
                raise ProtocolError(f"the server spoke without being asked, and it was no R: {received.line!r}")

    def _ask(self, request: Request, timeout: float = DEADLINE, *, accepted: bool = False) -> str:
        end = time.monotonic() + timeout
        self.send(request.line)
        self.requests.sent(request)
        while request.reply is None:
            self.receive(max(0.0, end - time.monotonic()))
        if accepted and request.state is RequestState.REFUSED:
            raise ProtocolError(f"{request.line!r} was answered {request.reply!r}")
        return request.reply

    def quit(self, timeout: float = DEADLINE, status: int = 0) -> str:
        """Send QUIT, wait for the exit status `status` (the guest's exit code), and return the log as `errors` does."""
        self._ask(Request("QUIT"), accepted=True)
        log = self.finish(timeout)
        if self.process.returncode != status:
            raise ProtocolError(f"the server's exit status is {self.process.returncode}{self._last_words()}")
        return log

    def end_by(self, number: int, timeout: float = DEADLINE) -> str:
        """Send a signal to the server process alone, wait for its exit and return its log as `errors` does."""
        self.process.send_signal(number)
        return self._end(timeout)
