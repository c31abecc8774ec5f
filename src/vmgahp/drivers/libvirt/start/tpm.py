"""A software TPM for one guest: swtpm as the job's user, on a socket that this process makes for it.

libvirt can start swtpm too, but as a user of its own (tss), with a socket in a directory that only that group and
libvirt's own QEMU user enter (``qemuTPMEmulatorPrepareHost`` in its ``src/qemu/qemu_tpm.c``): a QEMU that runs as the
job's user cannot connect to it. The TPM is empty when the guest boots, without the certificates of a manufacturer, and
its state goes with swtpm, which ends with its QEMU; a restored guest gets another one, and brings the TPM's
state in its memory image.
"""

from __future__ import annotations

import os
import socket
import subprocess
from contextlib import suppress
from xml.etree import ElementTree as etree

from vmgahp import errors
from vmgahp.drivers.surveyor import Logger
from vmgahp.host import run, runtime_dir
from vmgahp.host.job_user import Identity
from vmgahp.host.run import which
from vmgahp.host.system_calls import Opened

PROGRAM = "swtpm"
OF_LIBVIRT = (PROGRAM, "swtpm_setup", "swtpm_ioctl")
"""The programs that libvirt requires for any TPM (``virTPMHasSwtpm`` in its ``src/util/virtpm.c``)."""
PACKAGES = "swtpm swtpm-tools"
NO_ANSWER_HINT = f"see what keeps {PROGRAM} from running, AppArmor or SELinux for one (journalctl -k)."

TRIAL_WAIT = 5.0
"""Seconds for swtpm to answer at a start; it takes 5 ms."""
_REQUESTS = b"\0\0\0\1", b"\0\0\0\2" + bytes(4)
"""The first requests of QEMU to swtpm: its capabilities, and to make its TPM (``include/swtpm/tpm_ioctl.h``)."""


def is_offered(capabilities: etree.Element) -> bool:
    """Return True if libvirt accepts a TPM that it does not run itself, by its domain capabilities."""
    backends = capabilities.iterfind("devices/tpm[@supported='yes']/enum[@name='backendModel']/value")
    return any(backend.text == "external" for backend in backends)


def why_none(offered: bool | None) -> str:
    """Return why a guest can have no TPM, empty if it can; `offered` is of `is_offered`, None if that is unknown."""
    missing = [program for program in OF_LIBVIRT if which(program) is None]
    if PROGRAM in missing or (missing and not offered):
        return f"{', '.join(missing)} not installed"
    if offered is False:
        return f"libvirt does not find {', '.join(OF_LIBVIRT)}, or its QEMU has no TPM (virsh domcapabilities)"
    return ""


def trouble(identity: Identity, seconds: float) -> str:
    """Send QEMU's first requests to a trial swtpm; return the error, empty if it answers. Raises nothing."""
    directory, said = "", b""
    try:
        directory = runtime_dir.runtime_dir()
        process = _run(identity, directory, identity.uid, identity.gid, subprocess.PIPE)
        try:
            wrong = ask(directory, seconds)
        except OSError as error:
            wrong = error.strerror or str(error)
        process.kill()
        said = process.communicate(timeout=runtime_dir.END_WAIT)[1]
    except errors.Fault as fault:
        return fault.problem.removesuffix(".")
    except (OSError, subprocess.TimeoutExpired) as error:
        wrong = str(error)
    finally:
        if directory:
            runtime_dir.remove(directory)
    first = said.decode("utf-8", "replace").strip().split("\n")[0]
    return f"{PROGRAM} does not answer: {first[:300].rstrip('.') or wrong}" if wrong else ""


def ask(directory: str, seconds: float) -> str:
    with socket.socket(socket.AF_UNIX) as control:
        control.settimeout(max(0.05, seconds))
        control.connect(socket_in(directory))
        for request in _REQUESTS:
            control.sendall(request)
            answer = control.recv(64)
            if not answer:
                return "it has ended"
    return f"it makes no TPM (error {answer.hex()})" if any(answer) else ""


def socket_in(directory: str) -> str:
    return f"{directory}/tpm"


def begin(identity: Identity, log: Logger, directory: str, uid: int, gid: int) -> None:
    """Run swtpm for a QEMU that is about to start, as this user and group. Raises `errors.MachineFault`."""
    runtime_dir.end_program(directory)
    process = _run(identity, directory, uid, gid, subprocess.DEVNULL)
    try:
        runtime_dir.remember(process, directory)
    except OSError as error:
        log(f"{PROGRAM} ends with its QEMU and not before: {error}")


def _run(identity: Identity, directory: str, uid: int, gid: int, stderr: int) -> subprocess.Popen[bytes]:
    """Start swtpm with a socket that is this user's; a new TPM is an empty file. Raises `errors.MachineFault`."""
    # Only swtpm keeps the listener: if it ends, QEMU gets an error at once instead of waiting for an answer. The state
    # is in memory, that of its control group: with a file in /run the job's user could take all that /run has.
    with socket.socket(socket.AF_UNIX) as listener, Opened(os.memfd_create("tpm")) as state:
        try:
            runtime_dir.listen(listener, socket_in(directory), (uid, gid))
            with suppress(FileNotFoundError):
                os.unlink(_state(directory))
            os.symlink(f"/proc/self/fd/{state}", _state(directory))
            if os.geteuid() == 0:
                os.fchown(state, identity.uid, identity.gid)
        except OSError as error:
            problem = f"No socket can be made for the TPM in {directory}: {error.strerror}."
            raise errors.MachineFault(problem, "see that /run has room.") from error
        descriptor = listener.fileno()
        command = [PROGRAM, "socket", "--tpm2", "--terminate"]
        command += ["--ctrl", f"type=unixio,fd={descriptor}"]
        command += ["--tpmstate", f"backend-uri=file://{_state(directory)}"]
        try:
            # It may outlive the thread that starts it.
            process = run.begin(command, identity, (), stderr=stderr, pass_fds=(descriptor, state))
        except OSError as error:
            problem = f"{PROGRAM}, the software TPM, cannot be run: {error.strerror}."
            raise errors.MachineFault(problem, "see that it is installed and whole.") from error
        # swtpm opens or creates it. Of a name that the kernel has not looked up, AppArmor logs that as denied.
        with suppress(OSError):
            os.lstat(f"/proc/{process.pid}/fd/{state}")
        return process


def _state(directory: str) -> str:
    return f"{directory}/state"
