"""One call of vmrun: who it runs as, how long it may take, and what came of it.

vmrun prints its errors on standard output, as ``Error: …``, with exit status 255 or, in some versions, 0; on
standard error it may complain about libraries though all is well. Any call may hang, so each has a
deadline. It runs as the job's user: what VMware does with the job's files it does with that user's rights.
"""

import os
import time
from collections.abc import Mapping

from vmgahp import errors
from vmgahp.config import Settings
from vmgahp.drivers.base import Logger
from vmgahp.host.job_user import Identity
from vmgahp.host.run import SAFE_PATH, run

LARGEST_OUTPUT = 1 << 20
"""Bytes that are kept of what a call prints; a list of a thousand VMs has some 100,000."""

MOST_COMPLAINTS = 20
"""Different texts on standard error that are logged for one VM."""

GRACE = 0.5
"""Seconds for the rest of the output once vmrun has ended. A VM that it started may hold the pipe open."""

HANGING_HINT = "see what VMware hangs on (its log is vmware.log beside the .vmx), or restart its services."

PRODUCTS = ("ws", "player", "fusion")
"""What vmrun's flag -T knows today, the most able first."""

_OTHER_LINE_ENDS = ("\r\n", "\r")


class VmrunError(Exception):
    """vmrun said ``Error:``, or ended with a status that says so; `message` is its own word."""

    def __init__(self, command: str, message: str) -> None:
        super().__init__(f"vmrun {command}: {message}")
        self.command = command
        self.message = message


class Hanging(VmrunError):
    """vmrun did not end in time and was killed."""


class Tool:
    """vmrun, for one user and one home directory."""

    def __init__(self, path: str, product: str, identity: Identity, home: str, log: Logger) -> None:
        self.path = path
        self.product = product
        self.identity = identity
        self.home = home
        self._log = log
        self._complained: set[str] = set()

    def run(self, command: str, *arguments: str, seconds: float) -> str:
        """What the command prints, without its noise.

        Raises `VmrunError`, `Hanging` after so many `seconds`, and `errors.MachineFault` where vmrun cannot be
        started at all.
        """
        flags = ["-T", self.product] if self.product else []
        status, output, noise = self.call([*flags, command, *arguments], command, seconds)
        lines = output.splitlines()
        for number, line in enumerate(lines):
            if line.startswith("Error:"):
                told = " ".join([line.removeprefix("Error:"), *lines[number + 1 :]])
                raise VmrunError(command, " ".join(told.split()) or "an error without a word")
        if status != 0:
            told = " ".join((output or noise).split())[-500:]
            raise VmrunError(command, told or f"exit status {status}, and not a word")
        return output

    def call(self, words: list[str], command: str, seconds: float) -> tuple[int, str, str]:
        """The exit status and what was printed on standard output and standard error."""
        try:
            done = run(
                [self.path, *words],
                deadline=seconds,
                environ=self.environment(),
                user=self.identity,
                until=_cut,
                grace=GRACE,
            )
        except OSError as error:
            raise errors.MachineFault(
                f"{self.path} cannot be started as uid {self.identity.uid}: {error.strerror}.",
                "set VMWARE_VMRUN to vmrun's full path, and see that the jobs' users may execute it.",
            ) from error
        if done.status is None:
            raise Hanging(command, f"no answer within {seconds:.0f} s")
        output, noise = _text(done.out), _text(done.err)
        complaint = " ".join(noise.split())[:500]
        if complaint and complaint not in self._complained and len(self._complained) < MOST_COMPLAINTS:
            self._complained.add(complaint)  # some versions say the same at every call
            self._log(f"vmrun {command} says on standard error: {complaint!a}")
        return done.status, output, noise

    def environment(self) -> dict[str, str]:
        """What vmrun needs, and nothing of the daemon's own; its language is English, which is understood here."""
        name = str(self.identity.uid)
        try:
            import pwd

            name = pwd.getpwuid(self.identity.uid).pw_name
        except KeyError:
            pass
        return {"PATH": SAFE_PATH, "HOME": self.home, "USER": name, "LOGNAME": name, "LC_ALL": "C"}


def _cut(output: bytearray, _noise: bytearray) -> bool:
    """Keep the beginning of what is printed without an end."""
    del output[LARGEST_OUTPUT:]
    return False


def _text(data: bytes) -> str:
    text = data.decode("utf-8", "surrogateescape")
    for line_end in _OTHER_LINE_ENDS:
        text = text.replace(line_end, "\n")
    return text


def find(settings: Settings, environ: Mapping[str, str] = os.environ) -> str:
    """The path of vmrun: VMWARE_VMRUN, or the one on the daemon's PATH. Raises `errors.MachineFault`."""
    import shutil

    named = settings.string("VMWARE_VMRUN")
    search = environ.get("PATH", "") + ":" + SAFE_PATH
    path = shutil.which(named or "vmrun", path=search)
    if path is None or not os.path.isabs(path):
        raise errors.MachineFault(
            f"There is no vmrun here ({f'VMWARE_VMRUN = {named}' if named else 'nor is VMWARE_VMRUN set'}).",
            "install VMware Workstation or Player, or set VMWARE_VMRUN to the full path of vmrun.",
        )
    return path


def find_product(vmrun: Tool, settings: Settings, seconds: float) -> str:
    """What -T has to say: VMWARE_PRODUCT, or the first product that answers. Raises `errors.Fault`."""
    named = settings.string("VMWARE_PRODUCT").lower()
    if named:
        if named not in PRODUCTS:
            raise errors.MachineFault(
                f"VMWARE_PRODUCT = {named} ({settings.where('VMWARE_PRODUCT')}) is none of {', '.join(PRODUCTS)}.",
                "set VMWARE_PRODUCT to the product that is installed, or remove it.",
            )
        return named
    said: list[str] = []
    end = time.monotonic() + seconds
    for product in PRODUCTS:
        try:
            Tool(vmrun.path, product, vmrun.identity, vmrun.home, _quiet).run(
                "list", seconds=max(0.1, end - time.monotonic())
            )
        except Hanging as error:
            raise errors.MachineFault(
                f"vmrun does not answer when it is asked which VMware product is installed ({error.message}).",
                HANGING_HINT,
            ) from error
        except VmrunError as error:
            said.append(f"-T {product}: {error.message}")
        else:
            return product
    raise errors.MachineFault(
        f"{vmrun.path} answers for no VMware product ({'; '.join(said)}).",
        "install VMware Workstation or Player, and see that vmrun list works as a job's user.",
    )


def _quiet(_text: str) -> None:
    """What a product that is not there complains about is of no interest."""


def running(output: str) -> list[str]:
    """The paths that ``vmrun list`` printed."""
    lines = output.splitlines()
    return [line for line in lines if line.startswith("/") and line.endswith(".vmx")]
