"""The exit code of a guest's work, as the guest says it, and the file for the job's owner.

To HTCondor every VM that has powered off ended with 0, for a VM has no exit code. So the guest says one, in a line
of its serial console or on a virtio port that the job asked for (``VMPARAM_vm_Exit_Port``), and it is sent back in
``vm_exit.json`` and, where the job can be reached by chirp, into the job ad.

What a guest says is a stranger's word: of a limited piece of it a number from 0 to 255 is believed, and nothing else.
"""

import os

from vmgahp.host.job_user import Identity
from vmgahp.host.light import NamedTuple
from vmgahp.host.run import run

EXIT_FILE = "vm_exit.json"
PORT = "org.vmgahp.exit"
"""The port's name; in a Linux guest it is ``/dev/virtio-ports/org.vmgahp.exit``."""
MARKER = "vmgahp-exit-code:"
"""What begins the line of the console; the number follows."""

PORT_BYTES = 4096
"""What is kept of all that the guest writes to the port."""
CONSOLE_BYTES = 64 << 10
"""How much of the console's end is looked at: a guest says a good deal when it shuts down."""

CHIRP_CONFIG = ".chirp.config"
"""Where the starter writes how it can be reached by chirp, in the scratch directory (``IOProxy::init`` in
HTCondor's ``src/condor_starter.V6.1/io_proxy.cpp``)."""
CHIRP_SECONDS = 5.0
"""For each attribute; the starter has 27 s for the STATUS that brings the end to light."""
ATTRIBUTE = "VMExitCode"
"""Set at once, in a job with ``+WantIOProxy = true`` or ``+WantRemoteUpdates = true``."""
DELAYED_ATTRIBUTE = "ChirpVMExitCode"
"""Set with the starter's next update, in every job: the names of such attributes begin with Chirp."""
DELAYED_REASON = "ChirpVMExitReason"
"""Set likewise: why the VM was ended as a failure."""
LONGEST_EVENT = 127
"""Characters that an event of this kind in the job's log has (``GenericEvent`` in HTCondor's
``src/condor_utils/condor_event.h``)."""

# What is looked for with `re`, which a server is to load at its VM's end and not before.
_LINE = rb"(?:^|[\r\n])[ \t]*" + MARKER.encode() + rb"[ \t]*([0-9]{1,3})[ \t]*(?=[\r\n]|$)"
_STARTER = rb"(?:127(?:\.[0-9]{1,3}){3}|::1) [0-9]{1,5} [A-Za-z0-9]{1,100}\s*"
"""Its address, port and password for this job."""
_NUMBER = rb"\s*([0-9]{1,3})\s*"


class Ending(NamedTuple):
    """One VM's end."""

    how: str
    """One of those below."""
    exit_code: int | None
    source: str
    """``port`` or ``console``; empty where the guest said nothing."""
    began: float
    """When it was started, or restarted from a checkpoint, on this machine: seconds since 1970."""
    ended: float
    reason: str
    """Why it was ended as a failure; empty where it was not."""
    cpu_seconds: float | None
    """What it is known to have used; None where it was never looked at."""


POWERED_OFF = "powered off"
"""The guest did so by itself."""
POWERED_OFF_WHEN_ASKED = "powered off when asked"
"""HTCondor wanted the VM to end, and the guest heard it."""
DESTROYED = "destroyed"
"""HTCondor wanted the VM to end, and it was ended."""
CRASHED = "crashed"
"""The guest panicked, or its hypervisor's process ended without its doing."""
DESTROYED_BY_OTHERS = "destroyed by somebody else"
DISK_ERROR = "disk error"
"""An error of a disk has kept the guest from running for too long (VM_IO_ERROR_TIMEOUT)."""
GONE = "gone"
"""It ended by itself; the hypervisor does not say how."""

BY_ITSELF = (POWERED_OFF, CRASHED, DISK_ERROR, GONE)
"""The job is over, and not told to be."""


def from_console(end: bytes) -> int | None:
    """The exit code that the end of a console says, by the last line that says one; None for none."""
    import re

    said = [int(number) for number in re.findall(_LINE, end[-CONSOLE_BYTES:])]
    return next((number for number in reversed(said) if number <= 255), None)


def from_port(written: bytes) -> int | None:
    """The exit code that the guest has written to its port: the last line that is a number; None for none."""
    import re

    for line in reversed(written[:PORT_BYTES].splitlines()):
        found = re.fullmatch(_NUMBER, line)
        if found and int(found[1]) <= 255:
            return int(found[1])
    return None


def render(ending: Ending) -> bytes:
    """The content of ``vm_exit.json``."""
    import json
    from datetime import UTC, datetime

    def time(seconds: float) -> str:
        return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")

    content = {
        "exit_code": ending.exit_code,
        "source": ending.source or None,
        "ended_by": ending.how,
        "reason": ending.reason or None,
        "started": time(ending.began),
        "ended": time(ending.ended),
        "cpu_seconds": None if ending.cpu_seconds is None else round(ending.cpu_seconds, 2),
    }
    return json.dumps(content, indent=1).encode() + b"\n"


def tail_of(identity: Identity, directory: str, name: str, start: int = 0) -> bytes:
    """The end of a file of the scratch directory, as the job's user sees it, from the offset `start` on at most.

    Empty where there is no such file or it cannot be read.
    """
    from vmgahp.errors import Fault

    try:
        descriptor = identity.open_scratch(directory, name, os.O_RDONLY)
    except (OSError, Fault):
        return b""
    try:
        size = os.fstat(descriptor).st_size
        start = max(start, size - CONSOLE_BYTES)
        return os.pread(descriptor, max(0, size - start), start)
    except OSError:
        return b""
    finally:
        os.close(descriptor)


# The job ad


def tell_starter(code: int | None, directory: str, libexec: str, identity: Identity, reason: str = "") -> str:
    """Put the exit code into the job ad, and why the VM was ended as a failure, also into the job's log.

    Where there is no code, or no reason, none of an earlier run remains.

    By HTCondor's own condor_chirp, in LIBEXEC, as the job's user: it is of the starter's own release, and on every
    machine that has a starter. Returns what the log should know, empty for nothing. Raises nothing: a job does not
    depend on it.
    """
    import json
    import re

    config = tail_of(identity, directory, CHIRP_CONFIG)
    if not config:
        return ""  # the administrator or the job does without chirp
    if not re.fullmatch(_STARTER, config):
        # It is in the job's hands. Nobody is spoken to on a job's behalf but the starter, which is on this machine.
        return f"{CHIRP_CONFIG} is not as a starter writes it: the job ad does not get the exit code"
    program = os.path.join(libexec, "condor_chirp") if libexec else ""
    if not program or not os.access(program, os.X_OK):
        return f"{program or 'condor_chirp'} is not there: the job ad does not get the exit code"
    value = "undefined" if code is None else str(code)
    told = [
        ["set_job_attr", ATTRIBUTE, value],
        ["set_job_attr_delayed", DELAYED_ATTRIBUTE, value],
        ["set_job_attr_delayed", DELAYED_REASON, json.dumps(reason) if reason else "undefined"],
    ]
    if reason:
        told.append(["ulog", reason[:LONGEST_EVENT]])
    problems = [_run([program, *words], directory, identity) for words in told]
    # The first and the last need a job that wants them, the others an administrator who has not forbidden them.
    return "" if not all(problems) else f"the job ad does not get the exit code: {problems[-1]}"


def _run(words: list[str], directory: str, identity: Identity) -> str:
    """Run condor_chirp; why it failed, or empty."""
    environ = {"PATH": os.defpath, "_CONDOR_CHIRP_CONFIG": os.path.join(directory, CHIRP_CONFIG)}
    try:
        done = run(words, deadline=CHIRP_SECONDS, environ=environ, user=identity, groups=[])
    except OSError as error:
        return str(error)
    if done.status is None:
        return f"condor_chirp timed out after {CHIRP_SECONDS:g} s"
    if done.status == 0:
        return ""
    return done.complaints[-1].strip()[:200] if done.complaints else f"condor_chirp ended with {done.status}"
