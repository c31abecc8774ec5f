"""The client's side of the protocol: lines in; replies, results, deadlines and meanings out. Pure.

The error words are HTCondor's (``src/condor_vm-gahp/vmgahp_error_codes.h``, and those of VMware from before HTCondor
10.2); some of them are sent by HTCondor's own server only. The words that hold a job are in `errors.HOLD_CODES`,
which decides what condor_starter does with the job and with the machine (`fate`).

Each line that is sent is a `Request`, which keeps its own state. Each line of the server goes through
`Requests.received`, which classifies it and finds the request that it belongs to. The callers own the pipes: they
send the lines (`vmgahp.protocol.client`), explain them (the console) or compare them with others (replay).
"""

from collections import deque
from enum import Enum, auto
from typing import NamedTuple

from vmgahp import errors, lifecycle
from vmgahp.protocol import wire
from vmgahp.protocol.session import REQUEST_TIMEOUT, START_EXTRA

WORDS: dict[str, str] = {
    "JOBCLASSAD_NO_VM_MEMORY_PARAM": "The job has no memory size for its VM, or one that this machine does not "
    "allow (VM_MEMORY).",
    "JOBCLASSAD_XEN_NO_KERNEL_PARAM": "The job does not say which kernel its Xen guest boots (xen_kernel).",
    "JOBCLASSAD_MISMATCHED_HARDWARE_VT": "The job asks for something that this machine does not grant: hardware "
    "virtualization, a kind of network, a device.",
    "JOBCLASSAD_XEN_KERNEL_NOT_FOUND": "The kernel of the job's Xen guest is missing or unreadable.",
    "JOBCLASSAD_XEN_INITRD_NOT_FOUND": "The initial RAM disk of the job's Xen guest is missing or unreadable.",
    "JOBCLASSAD_XEN_NO_ROOT_DEVICE_PARAM": "The job brings a kernel and does not say which disk is its root "
    "(xen_root).",
    "JOBCLASSAD_XEN_NO_DISK_PARAM": "The job names no disk for its Xen guest (vm_disk).",
    "JOBCLASSAD_XEN_INVALID_DISK_PARAM": "The vm_disk of the job has the wrong form, or its image is missing.",
    "JOBCLASSAD_XEN_MISMATCHED_CHECKPOINT": "The files of the job's checkpoint do not belong together.",
    "JOBCLASSAD_KVM_NO_DISK_PARAM": "The job names no disk (vm_disk).",
    "JOBCLASSAD_KVM_INVALID_DISK_PARAM": "The vm_disk of the job has the wrong form, or one of its images is "
    "missing, unreadable or in use.",
    "JOBCLASSAD_KVM_MISMATCHED_CHECKPOINT": "The files of the job's checkpoint do not belong together.",
    "BAD_IMAGE": "A disk image is damaged, or does not have the format that the job gives.",
    "NO_JOBCLASSAD_INFO": "No job ad was sent before the START, or one without VM_WORKING_DIR, JobVMType or the "
    "attributes that name the VM.",
    "NO_SUPPORTED_VM_TYPE": "The server serves another VM type than the requested one.",
    "VM_NOT_FOUND": "There is no VM with this id: it was never started, or it was stopped, or its guest is gone.",
    "VM_INVALID_OPERATION": "This is not possible in the state that the VM is in.",
    "VM_NO_SUPPORT_SUSPEND": "VMs of this kind cannot be suspended.",
    "VM_NO_SUPPORT_CHECKPOINT": "VMs of this kind cannot be checkpointed, or the job does not ask for checkpoints.",
    "INTERNAL": "The hypervisor or the server failed, and neither the job nor a setting is known to be the cause.",
    "CRITICAL": "Something on this machine keeps VMs from running: settings, libvirt, QEMU, disk space, permissions.",
    "VM_NOT_ENOUGH_MEMORY": "The machine has not enough free memory for the VM.",
    "VM_CANNOT_CREATE_CKPT_FILES": "The memory of a VM, or the files of its checkpoint, could not be written.",
    "VM_INVALID_SUSPEND_FILE": "The saved memory of a suspended VM is missing or invalid.",
    "XEN_INVALID_GUEST_KERNEL": "Xen rejects the guest's kernel.",
    "XEN_VBD_CONNECT_ERROR": "Xen could not connect a disk of the guest.",
    "XEN_CONFIG_FILE_ERROR": "Xen rejects the description of the guest.",
    "JOBCLASSAD_TOO_MUCH_MEMORY_REQUEST": "The job asks for more memory than this machine gives to VMs.",
    "JOBCLASSAD_MISMATCHED_NETWORKING": "The job wants a network, and this machine offers none (VM_NETWORKING).",
    "JOBCLASSAD_MISMATCHED_NETWORKING_TYPE": "The job wants a kind of network that this machine does not offer "
    "(VM_NETWORKING_TYPE).",
    "JOBCLASSAD_XEN_NO_CDROM_DEVICE": "The job wants a CD-ROM drive and no disk of it is one.",
    "JOBCLASSAD_KVM_NO_CDROM_DEVICE": "The job wants a CD-ROM drive and no disk of it is one.",
    "CANNOT_CREATE_ISO_FILE": "The CD-ROM image of the job's input could not be written.",
    "CANNOT_READ_CDROM_FILE": "The CD-ROM image of the job cannot be read.",
    "CANNOT_CREATE_ARG_FILE": "The file with the job's arguments could not be written.",
    "JOBCLASSAD_NO_VMWARE_DIR_PARAM": "The job does not say where its VMware files are (vmware_dir).",
    "JOBCLASSAD_NO_VMWARE_VMX_PARAM": "The job does not name its .vmx file.",
    "JOBCLASSAD_NO_VMWARE_VMDK_PARAM": "The job does not name its .vmdk files.",
    "JOBCLASSAD_VMWARE_VMX_NOT_FOUND": "The job's .vmx file is missing.",
    "JOBCLASSAD_VMWARE_VMX_ERROR": "The job's .vmx file cannot be read.",
}
"""The meaning of each word; the key has no ``VMGAHP_ERR_``."""

NOTHING = "NULL"
"""The word of a result without words. As the word of a failure it means that the server does not know the reason."""


def short(word: str) -> str:
    """Return a word without its prefix, in upper case: the key of `WORDS`."""
    return word.upper().removeprefix(errors.PREFIX)


def meaning(word: str) -> str:
    """Return the sentence for a word, with or without its prefix; empty for an unknown word."""
    if word == NOTHING:
        return "The server does not say why."
    return WORDS.get(short(word), "")


def holds(word: str) -> bool:
    """Return True if the word, as the answer to a START, holds the job instead of taking the machine out of service."""
    return errors.PREFIX + short(word) in errors.HOLD_CODES


def fate(word: str) -> str:
    """Describe what condor_starter does when a START is answered with the word."""
    if holds(word):
        return "As the answer to a START it puts the job on hold; the machine stays in service."
    return "As the answer to a START it takes the whole machine out of the VM universe until it is repaired."


PREFIX = "CONDOR_VM_"

READY = "R"
GREETING = "$VMGahpVersion "

GREETING_DEADLINE = 30.0  # seconds

REPLY_DEADLINE = 60.0
"""The seconds that it has for a reply; the reply to QUIT comes when the VMs are gone."""

MOST_RESULTS = 1 << 20
"""The most result lines of one RESULTS; a larger number is taken for an error."""


class RequestState(Enum):
    """The state of a request."""

    NEW = auto()
    SENT = auto()
    REFUSED = auto()
    """A state in which the reply is not S. This is final."""
    ACCEPTED = auto()
    """A state in which a request with a request id waits for its result. For any other request this is final."""
    OVERDUE = auto()
    """A state in which the result is later than condor_starter would wait for it."""
    FINISHED = auto()


class Request:
    """One line for the server, and its state and answer."""

    def __init__(self, line: str) -> None:
        self.line = line
        self.state = RequestState.NEW
        self.sent = 0.0
        self.reply: str | None = None
        self.result: list[str] = []
        words = [word.decode("utf-8", "replace") for word in wire.split(line.encode("utf-8", "surrogateescape"))]
        self.command = words[0].upper()
        self.operation = ""
        """The command without `PREFIX`, of a request that has a request id and one more word."""
        self.argument = ""
        self.number: int | None = None
        if len(words) == 3 and self.command.startswith(PREFIX) and (number := digits(words[1])) is not None:
            self.operation, self.number, self.argument = self.command.removeprefix(PREFIX), number, words[2]

    def __str__(self) -> str:
        vm = digits(self.argument)
        return f"#{self.number} {self.operation}" + ("" if vm is None else f" of VM {vm}")

    def words(self) -> list[str]:
        """Return the words of the reply after the S or E."""
        return wire.words(self.reply or "")[1:]

    def deadline(self) -> float:
        """Return the time at which condor_starter gives up on the result."""
        return self.sent + REQUEST_TIMEOUT + (START_EXTRA if self.operation == lifecycle.START else 0.0)


class Kind(Enum):
    """The kind of a line of the server."""

    GREETING = auto()
    """A line before any request, even if it is not a valid greeting."""
    READY = auto()
    REPLY = auto()
    RESULT = auto()
    UNASKED = auto()


class Received(NamedTuple):
    """A line of the server, with its kind and its request."""

    kind: Kind
    line: str
    request: Request | None = None


class Requests:
    """All requests to one server. `now` is the time in seconds on any clock."""

    def __init__(self) -> None:
        self.greeted = False
        self.ready = False
        """True if an R has come since the last RESULTS."""
        self.asynchronous = True
        """True if the server announces results with R."""
        self.last_id = 0
        self.unanswered: deque[Request] = deque()
        self.pending: dict[int, Request] = {}
        self.results_left = 0
        """The number of result lines that still belong to the last RESULTS."""
        self._in_ad = False

    def new(self, operation: str, argument: object) -> Request:
        """Make a request with a fresh request id, without sending it."""
        self.last_id += 1
        return Request(f"{PREFIX}{operation} {self.last_id} {argument}")

    def sent(self, request: Request, now: float = 0.0) -> bool:
        """Note that a line is sent now; return True if it will be answered, which the lines of a job ad are not."""
        request.sent = now
        if self._in_ad and request.line.upper() != "CLASSAD_END":
            return False
        self._in_ad = request.command == "CLASSAD"
        request.state = RequestState.SENT
        self.last_id = max(self.last_id, request.number or 0)
        self.unanswered.append(request)
        return True

    def received(self, line: str) -> Received:
        """Take in a line of the server."""
        if line == READY:
            self.ready = True
            return Received(Kind.READY, line)
        if self.results_left:
            self.results_left -= 1
            return Received(Kind.RESULT, line, self._result(line))
        if self.unanswered:
            request = self.unanswered.popleft()
            self._reply(request, line)
            return Received(Kind.REPLY, line, request)
        if self.greeted:
            return Received(Kind.UNASKED, line)
        self.greeted = line.startswith(GREETING)
        return Received(Kind.GREETING, line)

    def _reply(self, request: Request, line: str) -> None:
        request.reply = line
        if wire.words(line)[0] != "S":
            request.state = RequestState.REFUSED
            if request.command == "CLASSAD":
                self._in_ad = False
            return
        request.state = RequestState.ACCEPTED
        if request.number is not None:
            self.pending[request.number] = request
        elif request.command == "RESULTS":
            self.ready, self.results_left = False, result_count(line) or 0
        elif request.command in ("ASYNC_MODE_ON", "ASYNC_MODE_OFF"):
            self.ready, self.asynchronous = False, request.command == "ASYNC_MODE_ON"

    def _result(self, line: str) -> Request | None:
        number, *words = wire.words(line)
        request = self.pending.pop(digits(number) or 0, None) if words[:1] in (["0"], ["1"]) else None
        if request is not None:
            request.state, request.result = RequestState.FINISHED, words
        return request

    def overdue(self, now: float) -> list[Request]:
        """Mark the requests that condor_starter would give up now as overdue, and return each of them once."""
        waiting = [request for request in self.pending.values() if request.state is RequestState.ACCEPTED]
        late = [request for request in waiting if now >= request.deadline()]
        for request in late:
            request.state = RequestState.OVERDUE
        return late


def digits(word: str) -> int | None:
    """Parse a word of a few ASCII digits; return None for any other."""
    return int(word) if word.isascii() and word.isdigit() and len(word) <= 18 else None


def result_count(reply: str) -> int | None:
    """Return the number of results that the reply to RESULTS announces; None if it is not a valid reply."""
    accepted, *words = wire.words(reply)
    count = digits(words[0]) if accepted == "S" and len(words) == 1 else None
    return None if count is None or count > MOST_RESULTS else count
