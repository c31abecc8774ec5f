"""The run of a hypervisor script: which program, as which user, with which limits, and for how long.

The script is trusted as the administrator's other programs are (`vmgahp.host.trust`), and mostly runs with less
rights than the server: as the job's user, who owns the files that it works on.
"""

import os
import pwd

from vmgahp import errors
from vmgahp.config import Settings
from vmgahp.drivers.base import Logger
from vmgahp.drivers.script import protocol
from vmgahp.drivers.script.protocol import Answer, Malformed, ScriptRequest
from vmgahp.hooks.program import clean, converse
from vmgahp.host import trust
from vmgahp.host.job_user import Identity
from vmgahp.host.run import condor_environment
from vmgahp.job.ad import JobAd

HYPERVISOR, SETTING, USER, LIMITS = "VM_HYPERVISOR", "VM_SCRIPT", "VM_SCRIPT_USER", "VM_SCRIPT_LIMITS"
JOB, CONDOR, ROOT = "job", "condor", "root"

REQUEST_VARIABLE = "VMGAHP_REQUEST"

KNOWN_LIMITS = (
    "as", "core", "cpu", "data", "fsize", "locks", "memlock", "msgqueue", "nice", "nofile", "nproc", "rss",
    "rtprio", "rttime", "sigpending", "stack",
)  # fmt: skip
"""The resources that can be limited, by prlimit's names."""

_NOT_EXECUTABLE = (126, 127)
_BY_HAND = "run it by hand with this action (docs/how-to/script-drivers.md says how), and see the server's log."


class Program:
    """The script of the settings, for one user. Raises `errors.MachineFault` if it may not be run at all."""

    def __init__(self, settings: Settings, user: Identity, log_line: Logger) -> None:
        self.hypervisor = hypervisor(settings)
        self.path = settings.string(SETTING)
        self.user = user
        self._limits = limits(settings)
        self._log = log_line
        if not self.path:
            raise errors.MachineFault(
                f"{HYPERVISOR} = {self.hypervisor}, and {SETTING} is not set: there is no script to drive it.",
                f"set {SETTING} to the full path of the hypervisor's script.",
            )
        trust.require_trustworthy(self.path, SETTING, "or offer another VM_TYPE")

    def call(self, request: ScriptRequest, ad: JobAd | None, seconds: float) -> Answer:
        """Run the script once and parse its answer.

        Raises `errors.MachineFault` if it cannot be run, does not end within `seconds`, or gives an invalid answer.
        """
        label = f"{SETTING} ({self.path}), {request.action}"
        output, status, last = converse(
            label,
            [self.path, request.action],
            deadline=seconds,
            log_line=self._log,
            hint=_BY_HAND,
            stdin=protocol.ad_text(ad),
            environ=self._environment() | request.environment(),
            given=(REQUEST_VARIABLE, request.document(ad)),
            longest=protocol.LONGEST_ANSWER,
            user=self.user,
            limits=self._limits,
        )
        if status in _NOT_EXECUTABLE:
            raise errors.MachineFault(
                f"{label} cannot be executed as uid {self.user.uid} (exit status {status}).{last}",
                f"see that this user may execute it, and its interpreter; {USER} says who runs it.",
            )
        try:
            answer = protocol.decode(request.action, output, status)
        except Malformed as error:
            raise errors.MachineFault(
                f"{label} gave no answer: {clean(str(error))[: protocol.LONGEST_TEXT]}.{last}", _BY_HAND
            ) from error
        return answer._replace(reason=clean(answer.reason)[: protocol.LONGEST_TEXT])

    def _environment(self) -> dict[str, str]:
        """Return the environment of the script; for another user than this server's, without the server's settings."""
        environ = condor_environment(os.environ)
        if self.user.switching:
            environ = {name: value for name, value in environ.items() if not name.upper().startswith("_CONDOR_")}

        try:
            entry = pwd.getpwuid(self.user.uid)
            name, home = entry.pw_name, entry.pw_dir
        except KeyError:
            name, home = str(self.user.uid), "/"
        return environ | {"HOME": home, "USER": name, "LOGNAME": name, "LC_ALL": "C.UTF-8"}


def hypervisor(settings: Settings) -> str:
    """Return VM_HYPERVISOR, which becomes part of attributes' names. Raises `errors.MachineFault` if it is invalid."""
    name = settings.string(HYPERVISOR)
    plain = name.replace("_", "a")
    if not (plain.isascii() and plain.isalnum() and not plain[0].isdigit() and len(plain) <= 32):
        raise errors.MachineFault(
            f"{HYPERVISOR} = {name or 'not set'} is not a name of a hypervisor.",
            f"set {HYPERVISOR} to a name of letters, digits and underscores, such as virtualbox.",
        )
    return name


def limits(settings: Settings) -> list[str]:
    """Return VM_SCRIPT_LIMITS as options of prlimit. Raises `errors.MachineFault` if they are invalid."""
    found = []
    for word in settings.strings(LIMITS):
        name, _, value = word.lower().partition("=")
        if name not in KNOWN_LIMITS or not (value == "unlimited" or (value.isascii() and value.isdigit())):
            raise errors.MachineFault(
                f"{LIMITS}, entry {word!a}, is not a limit.",
                f"write name=number or name=unlimited; the names are {', '.join(KNOWN_LIMITS)}.",
            )
        found.append(f"--{name}={value}")
    return found


def user_for(settings: Settings, job: Identity) -> Identity:
    """Return the user who runs the script for a job of the user `job`, by VM_SCRIPT_USER.

    Raises `errors.MachineFault` if there is no such user, or if this server cannot become that user.
    """
    found = named_user(settings, job)
    if os.geteuid() not in (0, found.uid):
        raise errors.MachineFault(
            f"{USER} = {settings.string(USER)}, and this server, which is not root, cannot run anything as that user.",
            f"start HTCondor as root, or set {USER} to {JOB}.",
        )
    return found


def named_user(settings: Settings, job: Identity) -> Identity:
    """Return the user that VM_SCRIPT_USER names, even if this server cannot become that user.

    Raises `errors.MachineFault` if there is no such user.
    """
    word = settings.string(USER)
    if word == JOB:
        return job
    if word == ROOT:
        return Identity(0, 0)
    if word == CONDOR and "." in os.environ.get("CONDOR_IDS", ""):
        uid, _, gid = os.environ["CONDOR_IDS"].partition(".")
        if not (uid.isdecimal() and gid.isdecimal()):
            raise errors.MachineFault(f"CONDOR_IDS = {uid}.{gid} are no ids.", "set it to two numbers, uid.gid.")
        return Identity(int(uid), int(gid))

    try:
        entry = pwd.getpwnam(word)
    except KeyError:
        raise errors.MachineFault(
            f"{USER} = {word} ({settings.where(USER)}), and this machine knows no such user.",
            f"set {USER} to {JOB}, {CONDOR}, {ROOT}, or the name of a user of this machine.",
        ) from None
    return Identity(entry.pw_uid, entry.pw_gid)
