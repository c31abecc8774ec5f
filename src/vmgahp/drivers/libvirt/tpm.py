"""A software TPM for one guest: swtpm as the job's user, on a socket that this process makes for it.

libvirt can start swtpm too, but as a user of its own and for its own user of QEMU: a QEMU that runs as the job's
user cannot reach that socket (libvirt 9.0). The TPM is empty when the guest boots, without the certificates of a
manufacturer, and what it keeps ends with the VM. swtpm ends with its QEMU; a restored guest gets another one,
and brings the TPM's state in its memory image.
"""

import os

from vmgahp import errors
from vmgahp.host.job_user import Identity
from vmgahp.host.runtime_dir import runtime_dir

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    import subprocess

PROGRAM = "swtpm"

END_WAIT = 5.0
"""Seconds for swtpm to end when it is told to; then it is killed."""


class Tpm:
    """The TPM of one VM. `start` it before each QEMU that uses it, and `close` it when the VM is gone."""

    def __init__(self, identity: Identity, owner: tuple[int, int]) -> None:
        """`owner` is the user and group of the QEMU that connects. Raises `errors.MachineFault`."""
        self._identity = identity
        self._owner = owner
        self._process: subprocess.Popen[bytes] | None = None
        self._directory = runtime_dir()
        self.path = f"{self._directory}/tpm"
        self._state = f"{self._directory}/state"
        try:
            os.close(os.open(self._state, os.O_CREAT | os.O_EXCL, 0o600))
            if os.geteuid() == 0:
                os.chown(self._state, identity.uid, identity.gid)
        except OSError as error:
            self.close()
            raise self._no_room(error) from error

    def start(self) -> None:
        """Run swtpm for a QEMU that is about to start. Raises `errors.MachineFault`."""
        import socket
        import subprocess

        self._end()
        # Only swtpm keeps it: where that ends, QEMU hears so at once and does not wait for an answer.
        with socket.socket(socket.AF_UNIX) as listener:
            try:
                self._listen(listener)
            except OSError as error:
                raise self._no_room(error) from error
            descriptor = listener.fileno()
            command = [PROGRAM, "socket", "--tpm2", "--terminate"]
            command += ["--ctrl", f"type=unixio,fd={descriptor}"]
            command += ["--tpmstate", f"backend-uri=file://{self._state}"]
            try:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    cwd="/",
                    pass_fds=(descriptor,),
                    **self._identity.of_process(groups=[]),
                )
            except OSError as error:
                raise errors.MachineFault(
                    f"{PROGRAM}, the software TPM, cannot be run: {error.strerror}.",
                    "see that it is installed and whole.",
                ) from error

    def close(self) -> None:
        """End swtpm and forget what it kept. Raises nothing."""
        self._end()
        for name in (self.path, self._state):
            try:
                os.unlink(name)
            except OSError:
                pass
        try:
            os.rmdir(self._directory)
        except OSError:
            pass

    def _listen(self, listener: "socket.socket") -> None:
        try:
            os.unlink(self.path)
        except FileNotFoundError:
            pass
        listener.bind(self.path)
        # Nobody can connect before listen().
        os.chmod(self.path, 0o600)
        if os.geteuid() == 0:
            os.chown(self.path, *self._owner)
        listener.listen(1)

    def _no_room(self, error: OSError) -> errors.MachineFault:
        return errors.MachineFault(
            f"No socket can be made for the TPM in {self._directory}: {error.strerror}.", "see that /run has room."
        )

    def _end(self) -> None:
        import subprocess

        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(END_WAIT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None
