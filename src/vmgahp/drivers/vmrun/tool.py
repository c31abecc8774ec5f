"""One call of vmrun: its user, its deadline and its result.

vmrun prints its errors on standard output, as ``Error: …``, with exit status 255 or, in some versions, 0; on standard
error it may complain about libraries though all is well. Any call may hang, so each has a deadline. It runs as the
job's user: what VMware does with the job's files it does with that user's rights.
"""

import os
import pwd
import shutil
import time

from vmgahp import errors
from vmgahp.config import Settings
from vmgahp.drivers.base import Logger
from vmgahp.host.job_user import Identity
from vmgahp.host.run import SAFE_PATH, Finished, run

GRACE = 0.5
"""Seconds for the rest of the output after vmrun has exited. A VM that it started may hold the pipe open."""

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
        try:
            done = run(
                [self.path, *words], deadline=seconds, environ=self._environment(), user=self.identity, grace=GRACE
            )
        except OSError as error:
            raise VmrunError(
                command,
                f"{self.path} cannot be started as uid {self.identity.uid} ({error.strerror})",
                "set VMWARE_VMRUN to vmrun's full path, and see that the jobs' users may execute it.",
            ) from error
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

    def find_product(self, settings: Settings, seconds: float) -> None:
        """Determine the product: VMWARE_PRODUCT, or the first that answers.

        Raises the same as `run`, `errors.MachineFault`.
        """
        named = settings.string("VMWARE_PRODUCT").lower()
        if named:
            if named not in PRODUCTS:
                raise errors.MachineFault(
                    f"VMWARE_PRODUCT = {named} ({settings.where('VMWARE_PRODUCT')}) is none of {', '.join(PRODUCTS)}.",
                    "set VMWARE_PRODUCT to the product that is installed, or remove it.",
                )
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
        raise errors.MachineFault(
            f"{self.path} answers for no VMware product ({'; '.join(said)}).",
            "install VMware Workstation or Player, and see that vmrun list works as a job's user.",
        )

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


def find(settings: Settings) -> str:
    """Return the path of vmrun: VMWARE_VMRUN, or the one on the daemon's PATH. Raises `errors.MachineFault`."""
    named = settings.string("VMWARE_VMRUN")
    path = shutil.which(named or "vmrun", path=f"{os.environ.get('PATH', '')}:{SAFE_PATH}")
    if path is None or not os.path.isabs(path):
        raise errors.MachineFault(
            f"There is no vmrun here ({f'VMWARE_VMRUN = {named}' if named else 'nor is VMWARE_VMRUN set'}).",
            "install VMware Workstation or Player, or set VMWARE_VMRUN to the full path of vmrun.",
        )
    return path
