"""A client and a hypervisor around one session."""

from tests import jobs
from vmgahp import errors
from vmgahp.metrics import Status
from vmgahp.protocol import session
from vmgahp.protocol.session import Call

AD = jobs.lines("/scratch", ProcId=3)


class Client:
    """A client and a hypervisor around one session: sends lines, reads lines, ends calls."""

    def __init__(self, vm_type: str = "kvm") -> None:
        self.logged: list[str] = []
        self.now = 1000.0
        self.session = session.Session(vm_type, self.logged.append, self.logged.append)
        self.calls: list[Call] = []

    def send(self, *lines: str) -> list[str]:
        """Send lines and return what is written back at once."""
        for line in lines:
            self.session.receive(line.encode() + b"\r\n", self.now)
        return self.read()

    def read(self) -> list[str]:
        calls = self.session.take_calls()
        assert self.session.vms or not calls, "without a VM nothing begins"
        self.calls += calls
        return self.session.take_output().decode().split("\n")[:-1]

    def end(self, outcome: Status | int | errors.Fault | None = None) -> list[str]:
        """End the oldest call."""
        self.session.finished(self.calls.pop(0), outcome, self.now)
        return self.read()

    def look(self, vm_id: int = 1) -> None:
        self.session.look(vm_id, self.now)
        self.read()

    def run(self, operation: str, request_id: int, outcome: Status | int | errors.Fault | None) -> list[str]:
        """Return what the client fetches after a request of VM 1 that was carried out."""
        self.send(f"CONDOR_VM_{operation} {request_id} 1")
        self.end(outcome)
        return self.results()

    def results(self) -> list[str]:
        first, *lines = [line for line in self.send("RESULTS") if line != "R"]
        assert first == f"S {len(lines)}"
        return lines

    def start(self, request_id: int = 1) -> None:
        vm_type = self.session.vm_type
        assert self.send("CLASSAD") == ["S"]
        assert self.send(*AD, f'JobVMType = "{vm_type}"') == []
        assert self.send("CLASSAD_END") == ["S"]
        assert self.send(f"CONDOR_VM_START {request_id} {vm_type}") == ["S"]

    def started(self) -> None:
        self.start()
        self.end()
        assert self.results() == ["1 0 1"]
