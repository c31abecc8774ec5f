"""The faults, and who must act: the client, the job's owner, the administrator, the hypervisor.

condor_starter decides the fate of the job *and* of the machine by the one word that a failed START answers
(``VMProc::StartJob`` in HTCondor's ``src/condor_starter.V6.1/vm_proc.cpp``): thirteen words put the job on hold, every
other word takes the whole machine out of the VM universe until it is repaired. So the class of a fault says who is to
blame, and makes the word agree: a `JobFault` can only carry a code that holds the job, a `MachineFault` never does.

An OSError alone does not say who is to blame. For one below the scratch directory `vmgahp.host.job_user` finds out.
"""

from __future__ import annotations

import errno

PREFIX = "VMGAHP_ERR_"

NO_MEMORY_PARAM = PREFIX + "JOBCLASSAD_NO_VM_MEMORY_PARAM"
MISMATCHED = PREFIX + "JOBCLASSAD_MISMATCHED_HARDWARE_VT"
"""The code for a request of the job that this machine refuses and that has no hold code of its own."""
NO_DISK_PARAM = PREFIX + "JOBCLASSAD_KVM_NO_DISK_PARAM"
INVALID_DISK_PARAM = PREFIX + "JOBCLASSAD_KVM_INVALID_DISK_PARAM"
MISMATCHED_CHECKPOINT = PREFIX + "JOBCLASSAD_KVM_MISMATCHED_CHECKPOINT"
BAD_IMAGE = PREFIX + "BAD_IMAGE"
XEN_NO_KERNEL = PREFIX + "JOBCLASSAD_XEN_NO_KERNEL_PARAM"
XEN_KERNEL_NOT_FOUND = PREFIX + "JOBCLASSAD_XEN_KERNEL_NOT_FOUND"
XEN_INITRD_NOT_FOUND = PREFIX + "JOBCLASSAD_XEN_INITRD_NOT_FOUND"
XEN_NO_ROOT = PREFIX + "JOBCLASSAD_XEN_NO_ROOT_DEVICE_PARAM"

HOLD_CODES = (
    *(NO_MEMORY_PARAM, XEN_NO_KERNEL, MISMATCHED, XEN_KERNEL_NOT_FOUND, XEN_INITRD_NOT_FOUND, XEN_NO_ROOT),
    *(PREFIX + "JOBCLASSAD_XEN_" + word for word in ("NO_DISK_PARAM", "INVALID_DISK_PARAM", "MISMATCHED_CHECKPOINT")),
    *(NO_DISK_PARAM, INVALID_DISK_PARAM, MISMATCHED_CHECKPOINT, BAD_IMAGE),
)
"""The words that hold the job, in the order of condor_starter's list: the index is the hold subcode."""

NO_JOBCLASSAD_INFO = PREFIX + "NO_JOBCLASSAD_INFO"
NO_SUPPORTED_VM_TYPE = PREFIX + "NO_SUPPORTED_VM_TYPE"
VM_NOT_FOUND = PREFIX + "VM_NOT_FOUND"
VM_INVALID_OPERATION = PREFIX + "VM_INVALID_OPERATION"
VM_NO_SUPPORT_SUSPEND = PREFIX + "VM_NO_SUPPORT_SUSPEND"
VM_NO_SUPPORT_CHECKPOINT = PREFIX + "VM_NO_SUPPORT_CHECKPOINT"
INTERNAL = PREFIX + "INTERNAL"
CRITICAL = PREFIX + "CRITICAL"
CANNOT_SAVE = PREFIX + "VM_CANNOT_CREATE_CKPT_FILES"
INVALID_SUSPEND_FILE = PREFIX + "VM_INVALID_SUSPEND_FILE"


class Fault(Exception):
    """A failure, with the protocol's word for the client and sentences for people.

    `code` is the ``VMGAHP_ERR_`` word of the protocol, `problem` describes the failure (it names the attribute and its
    value where one is at fault), `hint` is what the reader can do about it.
    """

    blames = "nobody"

    def __init__(self, code: str, problem: str, hint: str = "") -> None:
        super().__init__(problem)
        self.code = code
        self.problem = problem
        self.hint = hint

    @property
    def sentence(self) -> str:
        """The problem and the hint, as one text."""
        return f"{self.problem} Hint: {self.hint}" if self.hint else self.problem

    def render(self) -> str:
        """Format the fault for people: the code, the problem, the hint, and in brackets who is to blame."""
        return f"{self.code}: {self.sentence} ({self.blames})"


class ClientFault(Fault):
    """A request of the client that makes no sense in the VM's state, such as to resume a VM that is gone."""

    blames = "client"


class JobFault(Fault):
    """A fault that the job's owner must repair; the job is held and the machine stays in service."""

    blames = "job's owner"

    def __init__(self, code: str, problem: str, hint: str = "", attribute: str = "") -> None:
        if code not in HOLD_CODES:
            raise ValueError(f"{code} does not hold the job: it would take the whole machine out of service")
        super().__init__(code, f"{attribute}: {problem}" if attribute else problem, hint)
        self._rest = problem

    def of(self, attribute: str) -> JobFault:
        """Return the same fault for another attribute of the job."""
        return JobFault(self.code, self._rest, self.hint, attribute)


class MachineFault(Fault):
    """A fault that the administrator of this machine must repair; the starter takes it out of the VM universe."""

    blames = "administrator"

    def __init__(self, problem: str, hint: str = "", code: str = CRITICAL) -> None:
        if code in HOLD_CODES:
            raise ValueError(f"{code} would hold the job for a fault of the machine")
        super().__init__(code, problem, hint)


class HypervisorFault(MachineFault):
    """A failure of the hypervisor that neither the job nor the settings have caused."""

    blames = "hypervisor's administrator"

    def __init__(self, problem: str, hint: str = "", code: str = INTERNAL) -> None:
        super().__init__(problem, hint, code)


_PERHAPS_THE_MACHINES = (
    *(errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EINTR, errno.ENOBUFS),
    *(errno.ENOSPC, errno.EROFS, errno.EIO, errno.ENXIO, errno.ENODEV, errno.ENOLCK, errno.EUCLEAN),
    *(errno.ESTALE, errno.ETIMEDOUT, errno.EREMOTEIO, errno.ENOTCONN, errno.ESHUTDOWN, errno.ECONNREFUSED),
    *(errno.ECONNRESET, errno.ECONNABORTED, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH),
)


def is_perhaps_the_machines(error: OSError) -> bool:
    """Return True if this machine may be at fault: it lacks something, or a file system is full, damaged or away.

    It may still be the job's, which may have a file system of its own: `vmgahp.host.job_user` finds out. Every other
    errno is the job's: EISDIR, ENOTDIR, ELOOP, ENAMETOOLONG, EINVAL and the like are about a name or a file of the
    job's, and EDQUOT is about the quota of its user, which protects the other users.
    """
    return error.errno in _PERHAPS_THE_MACHINES
