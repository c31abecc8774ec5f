"""The shared parts of the doctor's checks: settings, users, and calls with a deadline."""

import os
import pwd
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import NamedTuple, TypeVar, cast

from vmgahp import config, errors
from vmgahp.commands.arguments import for_root
from vmgahp.config import sources
from vmgahp.config.table import setting_of
from vmgahp.daemon.probe import Probe, Resolver
from vmgahp.findings import BAD, OFF, OK, UNKNOWN, Finding, row_of, side_by_side
from vmgahp.host.job_user import Identity
from vmgahp.host.run import Finished, run
from vmgahp.job.engine import NOBODY

MORE_SETTINGS = (
    *("VM_GAHP_SERVER", "VM_RECHECK_INTERVAL", "STARTD_ADDRESS_FILE", "CONDOR_IDS"),
    *("NUM_CPUS", "VM_MAX_NUMBER"),
)
"""The settings of HTCondor that only the doctor reads."""

AS_ROOT = f"run {for_root('doctor')} as root."

LOOK_DEADLINE = 25.0
"""The deadline in seconds for one check; each program that it runs has a shorter one, but a file system has none."""


class User(NamedTuple):
    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]

    @classmethod
    def of(cls, uid: int, gid: int) -> "User":
        """Look up a user with all groups that the group database gives."""
        try:
            name = pwd.getpwuid(uid).pw_name
        except KeyError:
            return cls(f"uid {uid}", uid, gid, (gid,))
        return cls(name, uid, gid, tuple(os.getgrouplist(name, gid)))


class Check(NamedTuple):
    """A check in progress; each of its methods makes the finding that ends it."""

    name: str
    subject: str

    def ok(self, seen: str, hint: str = "") -> Finding:
        return Finding(self.name, OK, self.subject, seen, hint)

    def off(self, seen: str, hint: str = "") -> Finding:
        return Finding(self.name, OFF, self.subject, seen, hint)

    def bad(self, seen: str, hint: str = "") -> Finding:
        return Finding(self.name, BAD, self.subject, seen, hint)

    def unknown(self, seen: str, hint: str = "") -> Finding:
        return Finding(self.name, UNKNOWN, self.subject, seen, hint)

    def for_root(self, seen: str) -> Finding:
        """Make the finding of a check that only root can make."""
        return self.unknown(seen, AS_ROOT)._replace(because="root")


Result = TypeVar("Result")

Body = Callable[["Context"], Finding | list[Finding] | None]


def look(name: str, body: Body, context: "Context") -> list[Finding]:
    """Run a check and return its findings, an unknown one on timeout."""
    outcome = in_time(name, lambda: body(context))
    if isinstance(outcome, errors.Fault):
        return [Check(name, row_of(name).section).unknown(outcome.problem, outcome.hint)]
    return [outcome] if isinstance(outcome, Finding) else outcome or []


def in_time(name: str, work: Callable[[], Result], seconds: float | None = None) -> Result | errors.Fault:
    """Run `work` and return its result, or the fault that it raised, or `findings.Late`."""
    return cast("Result", side_by_side({name: work}, monotonic() + (seconds or LOOK_DEADLINE))[name])


class Context:
    """The facts about one machine that the checks share.

    `root` is put before the paths of the system (``/proc`` and its like), for tests that simulate a machine with files.
    """

    def __init__(self, environ: Mapping[str, str], vm_type: str = "", root: str = "") -> None:
        self.resolver = Resolver()
        self.environ = dict(environ)
        self.root = root
        self.is_root = os.geteuid() == 0
        self.notes: list[str] = []
        """The lines that drivers would have written to the log, which the doctor keeps unchanged."""
        self.found: list[Finding] = []
        self.fault: errors.Fault | None = None
        """The fault because of which the settings could not be read."""
        self.tool = sources.find_tool(environ)
        """The path of condor_config_val, or empty."""
        self.bad_names: set[str] = set()
        """The settings with an invalid value."""
        self.loaded = self.settings = config.Settings()
        """The settings as they were read, and with the default in place of each invalid value."""
        self.more = dict.fromkeys(MORE_SETTINGS, "")
        """The `MORE_SETTINGS`; empty if not set."""
        try:
            self._load()
        except errors.Fault as fault:
            self.fault = fault
        self.vm_type = (vm_type or self.settings.string("VM_TYPE") or "kvm").lower()
        self.probe = Probe(self.vm_type)
        """The result of the startd's probe, run in this process."""
        self.libvirt_answers = False
        self.qemu_user: User | None = None
        """The user as which libvirt runs QEMU by default; None if it does not say."""
        if self.is_root:
            self.environ.setdefault("VMGAHP_USER_UID", str(self.condor.uid if self.condor else NOBODY))

    @property
    def own_settings(self) -> bool:
        """True if a file of our own has the settings, for use without HTCondor."""
        return bool(self.environ.get("VMGAHP_CONFIG") or (not self.tool and sources.own_file(self.environ)))

    @property
    def blind(self) -> bool:
        """True if an HTCondor runs jobs as root here, and this user lacks the rights to check that."""
        return not self.is_root and bool(self.tool) and not self.own_settings and not self._is_personal

    @property
    def _is_personal(self) -> bool:
        """True if this user has started HTCondor: if root has, its logs belong to the user condor."""
        with suppress(OSError):
            owner = os.stat(os.path.dirname(self.more["STARTD_ADDRESS_FILE"])).st_uid
            return owner == os.geteuid() and (self.condor is None or self.condor.uid != owner)
        return False

    @property
    def condor(self) -> User | None:
        """The user of HTCondor's daemons, according to CONDOR_IDS or the name condor."""
        uid, _, gid = self.more["CONDOR_IDS"].partition(".")
        if uid.isdecimal() and gid.isdecimal():
            return User("condor", int(uid), int(gid), (int(gid),))
        with suppress(KeyError):
            return User.of(*pwd.getpwnam("condor")[2:4])
        return None

    def read(self, path: str) -> str:
        """Read the beginning of a small file of the system; empty if it is missing or must not be read."""
        with suppress(OSError), open(self.root + path, encoding="utf-8", errors="replace") as file:
            return file.read(1 << 16)
        return ""

    def _load(self) -> None:
        """Read the settings. Raises `errors.Fault`."""
        self.loaded = loaded = config.load(self.environ)
        kinds = {"integer": loaded.integer, "bool": loaded.boolean, "size": loaded.size}
        good = {}
        for name in loaded.given:
            try:
                kinds.get(setting_of(name).kind, loaded.string)(name)
            except errors.Fault:
                self.bad_names.add(name)
            else:
                good[name] = loaded.string(name)
        self.settings = config.Settings(good, {name: loaded.where(name) for name in good}, loaded.warnings)
        values, _, _ = sources.read(MORE_SETTINGS, self.environ)
        self.more |= {name: value.strip().strip("\"'") for name, value in values.items()}


def ask(
    command: Sequence[str], seconds: float, environ: Mapping[str, str] | None = None, who: User | None = None
) -> Finished:
    """Run a program, as `who` if this is root; one that cannot be run has status 127 and the reason as its error."""
    user, groups = (Identity(who.uid, who.gid), who.groups) if who else (None, None)
    try:
        return run(command, deadline=seconds, environ=environ, user=user, groups=groups)
    except OSError as error:
        return Finished(127, b"", f"{command[0]} cannot be run: {error.strerror}".encode())


def first_closed(who: User, paths: Sequence[str], flag: str = "-x") -> str | None:
    """Return the first path that a user may not use (``-x``, ``-r``, ``-w``), empty if all are accessible.

    The kernel decides, for a process of that user, so that access lists and everything else count. None if that cannot
    be tested, because only root can become another user.
    """
    if os.geteuid() not in (0, who.uid):
        return None
    script = f'for f do test -e "$f" && test {flag} "$f" || {{ printf "%s" "$f"; exit 1; }}; done'
    said = ask(["/bin/sh", "-c", script, "sh", *paths], 10.0, who=who)
    return {0: "", 1: said.out.decode("utf-8", "replace")}.get(-1 if said.status is None else said.status)


def may_look(path: str) -> bool:
    """Return True if this user can tell that a path exists or not."""
    try:
        os.stat(path)
    except OSError as error:
        return not isinstance(error, PermissionError)
    return True


def down_to(path: str) -> list[str]:
    """Return a directory and all above it, from the top, with symbolic links resolved."""
    found = Path(os.path.realpath(path))
    return [*map(str, reversed(found.parents)), str(found)]
