"""Calls of vmrun, the faults of its errors, and VMware's processes on this machine.

vmrun prints its errors on standard output, as ``Error: …``, with exit status 255 or, in some versions, 0; on standard
error it may complain about libraries though all is well. Each call has a deadline and runs as the job's user, with
whose rights VMware then uses the job's files.

A process's owner chooses its name and arguments, so it counts only if its owner is the VM's.
"""

import os
import pwd
import re
import shutil
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from vmgahp import errors
from vmgahp.config import Settings
from vmgahp.drivers.fault_rules import Rule, classify
from vmgahp.drivers.surveyor import Logger
from vmgahp.errors import ClientFault, HypervisorFault, JobFault, MachineFault
from vmgahp.host import proc, wait
from vmgahp.host.guardian import SAFE_PATH
from vmgahp.host.job_user import Identity
from vmgahp.host.run import Finished, run
from vmgahp.host.system_calls import Opened

GRACE = 0.5
"""Seconds for the rest of the output after vmrun has exited. A VM that it started may hold the pipe open."""

LONGEST_OUTPUT = 64 << 10
"""The most bytes of output. Processes of the user can add to it, and a path of megabytes takes hours to resolve."""

PRODUCTS = {"ws": "Workstation", "player": "Player", "fusion": "Fusion"}
"""The values of vmrun's flag -T, the most able first, and the products' names."""


class VmrunError(Exception):
    """A call that failed; `message` is vmrun's own, `hint` is empty unless the machine is to blame."""

    def __init__(self, command: str, message: str, hint: str = "") -> None:
        super().__init__(f"vmrun {command}: {message}")
        self.message = message
        self.hint = hint


class Hanging(VmrunError):
    """A call that did not end in time, and was killed."""

    def __init__(self, command: str, seconds: float) -> None:
        hint = "see what VMware hangs on (its log is vmware.log beside the .vmx), or restart its services."
        super().__init__(command, f"vmrun does not answer within {seconds:.0f} s", hint)


class Tool:
    """The vmrun of one machine, for one user and one home directory.

    The user may have no home, and the files that VMware keeps in one, such as the list of its VMs, must not be shared
    with other jobs of the same user: so `home` is the scratch directory.
    """

    def __init__(self, path: str, product: str, identity: Identity, home: str, log: Logger) -> None:
        self.path = path
        self.product = product
        self.identity = identity
        self.home = home
        self._log = log
        self._complained = False

    def run(self, command: str, *arguments: str, seconds: float) -> str:
        """Run a command, and return its output. Raises `VmrunError`, and `Hanging` on a timeout."""
        flags = ["-T", self.product] if self.product else []
        done = self.call([*flags, command, *arguments], command, seconds)
        output = text_of(done.out)
        _, error, told = f"\n{output}".partition("\nError:")
        if error:
            raise VmrunError(command, " ".join(told.split()) or "an error without a word")
        if done.status != 0:
            told = " ".join((output or text_of(done.err)).split())[-500:]
            raise VmrunError(command, told or f"exit status {done.status}, and not a word")
        return output

    def call(self, words: list[str], command: str, seconds: float) -> Finished:
        """Run vmrun with these words. Raises `VmrunError` if it cannot be started, and `Hanging`."""
        argv = [self.path, *words]
        try:
            environ, user = self._environment(), self.identity
            done = run(argv, deadline=seconds, environ=environ, user=user, grace=GRACE, longest=LONGEST_OUTPUT)
        except OSError as error:
            problem = f"{self.path} cannot be started as uid {self.identity.uid} ({error.strerror})"
            hint = "set VMWARE_VMRUN to vmrun's full path, and see that the jobs' users may execute it."
            raise VmrunError(command, problem, hint) from error
        if done.status is None:
            raise Hanging(command, seconds)
        if done.complaints and not self._complained:
            self._complained = True  # some versions say the same at every call
            self._log(f"vmrun {command} says on standard error: {' '.join(done.complaints)[:500]!a}")
        return done

    def running(self, seconds: float) -> set[str]:
        """Return the paths of the VMs that run, without links. Raises the same as `run`."""
        lines = self.run("list", seconds=seconds).splitlines()
        return {os.path.realpath(line) for line in lines if line.startswith("/") and line.endswith(".vmx")}

    def end(self, vmx: str, seconds: float) -> bool:
        """Kill a VM of the user; return True if there was one. Raises `errors.MachineFault` if it runs on."""
        process = find_process(vmx, self.identity.uid)
        problem: VmrunError | None = None
        try:
            self.run("stop", vmx, "hard", seconds=seconds)
        except VmrunError as error:
            problem = error
        process = process or find_process(vmx, self.identity.uid)
        was_there = problem is None or not is_not_running(problem)
        if process is None:
            if problem is not None and was_there:
                raise from_vmrun(problem, f"stopping {vmx}", [vmx]) from problem
            return was_there
        if (problem is None or not was_there) and wait_for_end(process, PROCESS_WAIT):
            return True
        self._log(f"vmrun has not stopped {vmx}{f' ({problem})' if problem else ''}: killing process {process.pid}")
        try:
            reason = "" if wait_for_end(process, KILL_WAIT, kill=True) else "and does not end though it was killed"
        except OSError as error:
            reason = f"and cannot be killed: {error.strerror}"
        if reason:
            hint = "kill it by hand; if it does not end, its file system may hang."
            fault = errors.MachineFault(f"Process {process.pid} runs {vmx} {reason}.", hint)
            # Its user can keep a killed process, by a tracer or a file system: `explain` finds whose fault it is.
            raise fault from problem or VmrunError("stop", reason)
        return True

    def find_product(self, settings: Settings, seconds: float) -> None:
        """Determine the product: VMWARE_PRODUCT, or the first that answers. Raises as `run`, `errors.MachineFault`."""
        if named := settings.string("VMWARE_PRODUCT").lower():
            if named not in PRODUCTS:
                where = settings.where("VMWARE_PRODUCT")
                problem = f"VMWARE_PRODUCT = {named} ({where}) is none of {', '.join(PRODUCTS)}."
                hint = "set VMWARE_PRODUCT to the product that is installed, or remove it."
                raise errors.MachineFault(problem, hint)
            self.product = named
            return
        said: list[str] = []
        end = time.monotonic() + seconds
        for product in PRODUCTS:
            self.product = product
            try:
                self.run("list", seconds=max(0.1, end - time.monotonic()))
                return
            except VmrunError as error:
                if error.hint:
                    raise
                said.append(f"-T {product}: {error.message}")
        hint = "install VMware Workstation or Player, and see that vmrun list works as a job's user."
        raise errors.MachineFault(f"{self.path} answers for no VMware product ({'; '.join(said)}).", hint)

    def _environment(self) -> dict[str, str]:
        """Return the environment of vmrun, without the daemon's variables, in English, which is parsed here."""
        try:
            name = pwd.getpwuid(self.identity.uid).pw_name
        except KeyError:
            name = str(self.identity.uid)
        return {"PATH": SAFE_PATH, "HOME": self.home, "USER": name, "LOGNAME": name, "LC_ALL": "C"}


def text_of(data: bytes) -> str:
    """Decode the output of vmrun, with the line ends of Unix."""
    return data.decode("utf-8", "surrogateescape").replace("\r\n", "\n").replace("\r", "\n")


def find_tool(settings: Settings) -> str:
    """Return the path of vmrun: VMWARE_VMRUN, or the one on the daemon's PATH. Raises `errors.MachineFault`."""
    named = settings.string("VMWARE_VMRUN")
    path = shutil.which(named or "vmrun", path=f"{os.environ.get('PATH', '')}:{SAFE_PATH}")
    if path is None or not os.path.isabs(path):
        problem = f"There is no vmrun here ({f'VMWARE_VMRUN = {named}' if named else 'nor is VMWARE_VMRUN set'})."
        hint = "install VMware Workstation or Player, or set VMWARE_VMRUN to the full path of vmrun."
        raise errors.MachineFault(problem, hint)
    return path


_NOT_RUNNING = (
    r"virtual machine is not powered on|virtual machine needs to be powered on"
    r"|Cannot open VM: .*virtual machine cannot be found|is not running"
)

# fmt: off
RULES = (
    Rule("VM is off", ClientFault, errors.VM_NOT_FOUND, message=_NOT_RUNNING),
    Rule("product", MachineFault, errors.CRITICAL, "set VMWARE_PRODUCT to ws, player or fusion, as installed.",
        r"specified version was not found|service provider was not found|is not installed"),
    Rule("disk space", MachineFault, errors.CRITICAL, "free disk space on the file system of EXECUTE.",
        r"disk is full|[Nn]o space left|[Ii]nsufficient disk space|There is not enough space"),
    Rule("memory", MachineFault, errors.CRITICAL, "give VMs less memory (VM_MEMORY), or the machine more.",
        r"[Nn]ot enough (physical )?memory|[Oo]ut of memory|[Cc]annot allocate memory|[Mm]emory allocation"),
    Rule("kernel modules", MachineFault, errors.CRITICAL,
        "build and load VMware's kernel modules: vmware-modconfig --console --install-all.",
        r"/dev/vmmon|vmmon|vmnet|[Kk]ernel modules?"),
    Rule("license", MachineFault, errors.CRITICAL, "renew the license of the VMware product.",
        r"[Ll]icen[sc]e|evaluation (period|version)|expired"),
    Rule("virtualization", MachineFault, errors.CRITICAL, "turn hardware virtualization on in this machine's firmware.",
        r"VT-x|AMD-V|[Vv]irtualized Intel|does not support (long mode|64-bit|hardware virtualization)"),
    Rule("disk format", JobFault, errors.BAD_IMAGE,
        "open the virtual machine in VMware, repair it, and send all of its files.",
        r"[Cc]annot open (one of )?the disks?|depends on|parent (virtual )?disk|not a virtual disk"
        r"|[Dd]isk (is )?(corrupt|invalid)|content ID|[Ff]ailed to open disk|is of an unsupported version"),
    Rule("configuration", JobFault, errors.BAD_IMAGE,
        "open the virtual machine in VMware, repair it, and send the .vmx that it writes.",
        r"[Cc]annot read the virtual machine configuration|[Cc]onfiguration file|[Dd]ictionary problem"
        r"|[Hh]ardware version|virtualHW|[Ii]nvalid (value|configuration)|[Cc]onfigured .* guest"),
    Rule("disk access", JobFault, errors.INVALID_DISK_PARAM,
        "send all files of the disks, let the job's user read and write them, and end other VMs that use them.",
        r"file is already in use|already (in use|locked)|write-protected|access rights|[Ii]nsufficient permission"
        r"|[Pp]ermission denied|file was not found|file access error|No such file"),
    Rule("MAC address", JobFault, errors.MISMATCHED, "remove vm_macaddr.", "MAC address"),
    Rule("CPUs", JobFault, errors.MISMATCHED, "ask for fewer CPUs (vm_vcpus).", "[Vv]irtual (CPU|processor)|numvcpus"),
    Rule("anything else", HypervisorFault, errors.INTERNAL, "read vmware.log in the job's scratch directory."),
)
# fmt: on
"""The rules in their order; the job's come last, because these sentences name few files, and those are cut out."""


def is_not_running(error: VmrunError) -> bool:
    """Tell if the VM does not run (any more)."""
    return re.search(_NOT_RUNNING, error.message) is not None


def is_not_supported(error: VmrunError) -> bool:
    """Tell if this product does not have the command, as Player has no snapshots."""
    return "operation is not supported" in error.message


def from_vmrun(error: VmrunError, doing: str, job_values: Iterable[str] = ()) -> errors.Fault:
    """Return the fault for an error of vmrun while `doing` something; `job_values` are as in `fault_rules.classify`."""
    problem = f"vmrun failed while {doing}: {error.message.rstrip('.')}."
    if error.hint:
        return MachineFault(problem, error.hint)
    if is_not_running(error):  # regardless of the job's values
        return RULES[0].make(problem)
    return classify(RULES, error.message, job_values).make(problem)


@contextmanager
def explained(doing: str, job_values: Iterable[str] = ()) -> Iterator[None]:
    """Turn errors of vmrun into faults, as `from_vmrun` does."""
    try:
        yield
    except VmrunError as error:
        raise from_vmrun(error, doing, job_values) from error


PROCESS_NAME = "vmware-vmx"
"""The beginning of the processes' names; a debugging build is vmware-vmx-debug."""

KILL_WAIT = 10.0
"""Seconds within which a killed process must be gone."""

PROCESS_WAIT = 5.0
"""Seconds within which the process of a VM that vmrun has stopped must be gone."""


class Process(NamedTuple):
    """One VM that runs."""

    pid: int
    uid: int
    """The real user id, whatever rights the process has."""
    vmx: str
    """The full path of its ``.vmx``, without links."""


def running_processes(uid: int | None = None) -> list[Process]:
    """List the VMs of all users, or of one."""
    found = (_process(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return [process for process in found if process is not None and uid in (None, process.uid)]


def find_process(vmx: str, uid: int | None = None) -> Process | None:
    """Return the process that runs the VM `vmx`, of the user `uid` if that is given."""
    return next((process for process in running_processes(uid) if process.vmx == vmx), None)


def is_still(process: Process) -> bool:
    """Tell if that process runs that VM now."""
    return _process(process.pid) == process


def wait_for_end(process: Process, seconds: float, *, kill: bool = False) -> bool:
    """Wait for the exit of that process, killed first if `kill` is set; True if it is gone. Raises OSError."""
    try:
        with Opened(os.pidfd_open(process.pid)) as descriptor:
            if not is_still(process):
                return True
            if kill:
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            return wait.ready(descriptor, seconds)
    except ProcessLookupError:
        return True


def _process(pid: int) -> Process | None:
    if not proc.name(pid).startswith(PROCESS_NAME):
        return None
    uid = proc.uid(pid)
    for argument in reversed(proc.command_line(pid).split(b"\0")):
        if uid is not None and argument.startswith(b"/") and argument.endswith(b".vmx"):
            return Process(pid, uid, os.fsdecode(argument))
    return None
