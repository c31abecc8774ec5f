"""The daemon under test, behind its launcher, and its client."""

import os
import subprocess
import sys
import time
from pathlib import Path

from tests.client import Client
from tests.faults.points import Points
from tests.peer import environment
from vmgahp.cli import SERVE
from vmgahp.protocol.client import ProtocolError
from vmgahp.protocol.requests import Kind, Received, Request, RequestState

LAUNCHER = Path(__file__).with_name("launcher.py")

REQUEST_TIMEOUT = 60
"""VM_GAHP_REQ_TIMEOUT: the daemon answers a quarter earlier, whatever happens (`vmgahp.protocol.session`)."""

ANSWER = 90.0
"""Seconds for an answer, on a machine that is busy: a request without one is unanswered."""

SETTINGS = {
    "VM_STOP_TIMEOUT": 1, "VM_GAHP_REQ_TIMEOUT": REQUEST_TIMEOUT, "VM_METRICS_INTERVAL": 2, "VM_ALLOW_EMULATION": True,
}  # fmt: skip


class Daemon(Client):
    """Started as condor_starter does, in a scratch directory."""

    def __init__(self, scratch: Path, vm_type: str, **settings: object) -> None:
        self.points = Points(scratch.parent / f"{scratch.name}.points")
        self.log = scratch.parent / f"{scratch.name}.log"
        self.unasked: list[str] = []
        """Result lines that answer no request, or one for the second time."""
        environ = environment(vm_type, scratch, **(SETTINGS | settings))
        argv = [sys.executable, "-P", str(LAUNCHER), str(self.points.path), "-f", "-t", "-M", str(SERVE)]
        with open(self.log, "ab") as log:
            super().__init__(argv, environ, scratch, log=log)
        self.greeting()

    def receive(self, timeout: float = ANSWER) -> Received:
        """The next line; a result that nobody waits for is noted."""
        received = super().receive(timeout)
        if received.kind is Kind.RESULT and received.request is None:
            self.unasked.append(received.line)
        return received

    def begin(self, operation: str, argument: object) -> Request:
        """Send a request that has to be accepted; its result is for `answer`."""
        request = self.requests.new(operation, argument)
        self._ask(request, accepted=True)
        return request

    def take(self, timeout: float = 0.0) -> None:
        """Fetch what results there are within `timeout` seconds."""
        end = time.monotonic() + timeout
        while True:
            # What came with the reply to something else is here already, and nothing announces it again.
            while (line := self.next_line()) is not None:
                self.requests.received(line)
            if self.requests.ready:
                self._ask(Request("RESULTS"), accepted=True)
                while self.requests.results_left:
                    self.receive()
                return
            if self.ended or not self.pump(max(0.0, end - time.monotonic())):
                return

    def answer(self, request: Request, timeout: float = ANSWER) -> list[str]:
        """The words of a request's result; none where it does not come."""
        end = time.monotonic() + timeout
        while request.state is not RequestState.FINISHED and not self.ended and time.monotonic() < end:
            self.take(1.0)
        return request.result

    def alive(self) -> bool:
        return self.process.poll() is None

    def exit_status(self, timeout: float) -> int | None:
        """Wait for its end; None where it does not come, and 0 where it says last that its status is its guest's."""
        try:
            status = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None
        said = f"the server ends with the guest's exit code {status}"
        return 0 if status and self.said().rstrip().endswith(said) else status

    def send_quietly(self, line: str) -> None:
        """Send a line whose reply nobody waits for here, such as QUIT."""
        try:
            self.send(line)
        except ProtocolError:
            return

    def discard(self) -> None:
        """Have it gone, by force, with its pipes."""
        if self.alive():
            self.process.kill()
            self.process.wait()
        self._close()
        self.points.close()

    def said(self) -> str:
        """The end of its log."""
        with open(self.log, "rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - 6000))
            return log.read().decode("utf-8", "replace")
