"""What can go wrong, and who must act: the client, the job's user, the administrator, the hypervisor.

condor_starter decides the fate of the job *and* of the machine by the one word that a failed START
answers (``VMProc::StartJob`` in HTCondor's ``src/condor_starter.V6.1/vm_proc.cpp``): thirteen words put
the job on hold, every other word takes the whole machine out of the VM universe until somebody repairs
it. So a fault is raised by whom it blames, and the class makes sure that the word agrees: a `JobFault`
can only carry a code that holds the job, a `MachineFault` never does.

An OSError blames nobody by itself: whose it is, `is_machines` says.
"""

import errno

PREFIX = "VMGAHP_ERR_"

HOLD_CODES = tuple(
    PREFIX + word
    for word in (
        "JOBCLASSAD_NO_VM_MEMORY_PARAM",
        "JOBCLASSAD_XEN_NO_KERNEL_PARAM",
        "JOBCLASSAD_MISMATCHED_HARDWARE_VT",
        "JOBCLASSAD_XEN_KERNEL_NOT_FOUND",
        "JOBCLASSAD_XEN_INITRD_NOT_FOUND",
        "JOBCLASSAD_XEN_NO_ROOT_DEVICE_PARAM",
        "JOBCLASSAD_XEN_NO_DISK_PARAM",
        "JOBCLASSAD_XEN_INVALID_DISK_PARAM",
        "JOBCLASSAD_XEN_MISMATCHED_CHECKPOINT",
        "JOBCLASSAD_KVM_NO_DISK_PARAM",
        "JOBCLASSAD_KVM_INVALID_DISK_PARAM",
        "JOBCLASSAD_KVM_MISMATCHED_CHECKPOINT",
        "BAD_IMAGE",
    )
)
"""The words that hold the job, in the order of condor_starter's list: the index is the hold subcode."""

NO_MEMORY_PARAM = PREFIX + "JOBCLASSAD_NO_VM_MEMORY_PARAM"
MISMATCHED = PREFIX + "JOBCLASSAD_MISMATCHED_HARDWARE_VT"
"""For a request of the job that this machine refuses and that has no hold code of its own."""
NO_DISK_PARAM = PREFIX + "JOBCLASSAD_KVM_NO_DISK_PARAM"
INVALID_DISK_PARAM = PREFIX + "JOBCLASSAD_KVM_INVALID_DISK_PARAM"
MISMATCHED_CHECKPOINT = PREFIX + "JOBCLASSAD_KVM_MISMATCHED_CHECKPOINT"
BAD_IMAGE = PREFIX + "BAD_IMAGE"
XEN_NO_KERNEL = PREFIX + "JOBCLASSAD_XEN_NO_KERNEL_PARAM"
XEN_KERNEL_NOT_FOUND = PREFIX + "JOBCLASSAD_XEN_KERNEL_NOT_FOUND"
XEN_INITRD_NOT_FOUND = PREFIX + "JOBCLASSAD_XEN_INITRD_NOT_FOUND"
XEN_NO_ROOT = PREFIX + "JOBCLASSAD_XEN_NO_ROOT_DEVICE_PARAM"

NO_JOBCLASSAD_INFO = PREFIX + "NO_JOBCLASSAD_INFO"
NO_SUPPORTED_VM_TYPE = PREFIX + "NO_SUPPORTED_VM_TYPE"
VM_NOT_FOUND = PREFIX + "VM_NOT_FOUND"
VM_INVALID_OPERATION = PREFIX + "VM_INVALID_OPERATION"
VM_NO_SUPPORT_SUSPEND = PREFIX + "VM_NO_SUPPORT_SUSPEND"
VM_NO_SUPPORT_CHECKPOINT = PREFIX + "VM_NO_SUPPORT_CHECKPOINT"
INTERNAL = PREFIX + "INTERNAL"
CRITICAL = PREFIX + "CRITICAL"


class Fault(Exception):
    """Something went wrong, with the word for the client and the sentences for people.

    `code` is the ``VMGAHP_ERR_`` word of the protocol, `problem` says what was seen (it names the
    attribute and its value where one is at fault), `hint` what somebody can do about it.
    """

    blames = "nobody"

    def __init__(self, code: str, problem: str, hint: str = "") -> None:
        super().__init__(problem)
        self.code = code
        self.problem = problem
        self.hint = hint

    @property
    def sentence(self) -> str:
        """What was seen, and what to do."""
        return f"{self.problem} Hint: {self.hint}" if self.hint else self.problem

    def render(self) -> str:
        """The one way in which a fault is shown to people: what was seen, what to do, and in brackets by whom."""
        return f"{self.code}: {self.sentence} ({self.blames})"


class ClientFault(Fault):
    """The client asked for what makes no sense now, such as to resume a VM that is gone."""

    blames = "client"


class JobFault(Fault):
    """The job's user must change something; the job is held and the machine stays in service."""

    blames = "job's owner"

    def __init__(self, code: str, problem: str, hint: str = "", attribute: str = "") -> None:
        if code not in HOLD_CODES:
            raise ValueError(f"{code} does not hold the job: it would take the whole machine out of service")
        super().__init__(code, f"{attribute}: {problem}" if attribute else problem, hint)
        self._rest = problem

    def of(self, attribute: str) -> "JobFault":
        """The same fault of another attribute of the job than the one it was raised for."""
        return JobFault(self.code, self._rest, self.hint, attribute)


class MachineFault(Fault):
    """The administrator of this machine must act; the starter takes it out of the VM universe."""

    blames = "administrator"

    def __init__(self, problem: str, hint: str = "", code: str = CRITICAL) -> None:
        if code in HOLD_CODES:
            raise ValueError(f"{code} would hold the job for a fault of the machine")
        super().__init__(code, problem, hint)


class HypervisorFault(MachineFault):
    """The hypervisor failed in a way that is neither the job's doing nor the settings'."""

    blames = "hypervisor's administrator"

    def __init__(self, problem: str, hint: str = "", code: str = INTERNAL) -> None:
        super().__init__(problem, hint, code)


_OF_THIS_PROCESS = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EINTR, errno.ENOBUFS))
"""This machine has run out of what a system call needs, whatever file was asked for."""

_OF_A_FILE_SYSTEM = frozenset(
    (
        *(errno.ENOSPC, errno.EROFS, errno.EIO, errno.ENXIO, errno.ENODEV, errno.ENOLCK, errno.EUCLEAN),
        *(errno.ESTALE, errno.ETIMEDOUT, errno.EREMOTEIO, errno.ENOTCONN, errno.ESHUTDOWN, errno.ECONNREFUSED),
        *(errno.ECONNRESET, errno.ECONNABORTED, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH),
    )
)
"""A file system is full, read-only, damaged, or its server is away. Every other errno is the job's: ENOENT, EACCES,
EPERM, EISDIR, ENOTDIR, ELOOP, ENAMETOOLONG, EINVAL and their like say what the job has named or left there, and EDQUOT
that its user has had enough: a quota is there so that one user harms no others, as a machine taken out of service
would."""


def is_machines(error: OSError, *, in_scratch: bool = True) -> bool:
    """Whether the machine is to blame for an error about a file of the job's, and not the job.

    HTCondor has made the scratch directory, so its file system is the machine's. With `in_scratch` false the job has
    named a full path, and with it a file system: one that fails there is the job's, or any job could take the machine
    out of service by naming a dead one. Only what this process itself lacks is the machine's then too.
    """
    return error.errno in _OF_THIS_PROCESS or (in_scratch and error.errno in _OF_A_FILE_SYSTEM)


def unwritable(name: str, error: OSError, *, is_there: bool = False) -> Fault:
    """Whose fault it is that a file of ours cannot be written in the scratch directory, which HTCondor has made.

    A job can bring a directory of that name, or where it `is_there` a file that forbids its owner to write to it, and
    must not take the machine out of service by it.
    """
    problem = f"{name} cannot be written in the job's scratch directory ({error.strerror})."
    closed = error.errno == errno.ENOENT or (error.errno == errno.EACCES and not is_there)
    if is_machines(error) or closed:
        return MachineFault(problem, "see that the job's user can write there: check the file system of EXECUTE.")
    return JobFault(MISMATCHED, problem, "see that nothing else of the job's has this name.")
