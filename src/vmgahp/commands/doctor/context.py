"""The shared parts of the doctor's checks: settings, users, and calls with a deadline."""

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from time import monotonic
from typing import NamedTuple

from vmgahp import config, errors
from vmgahp.commands.arguments import for_root
from vmgahp.config import sources
from vmgahp.findings import BAD, OFF, OK, UNKNOWN, Finding, NotKnown, side_by_side
from vmgahp.host.job_user import Identity
from vmgahp.host.run import run

MORE_SETTINGS = ("VM_GAHP_SERVER", "VM_RECHECK_INTERVAL", "STARTD_ADDRESS_FILE", "CONDOR_IDS")
"""The settings of HTCondor that only the doctor reads."""

SETTINGS_FILES = (".config/vmgahp/vmgahp.conf", "/etc/vmgahp.conf")
"""The paths of the settings on a machine without HTCondor (`vmgahp.config.sources.read`)."""

NOBODY = 65534

AS_ROOT = f"run {for_root('doctor')} as root."

LOOK_DEADLINE = 25.0
"""The deadline in seconds for one check; each program that it runs has a shorter one, but a file system has none."""

_NO_SHELL_NEEDED = "/usr/bin:/bin:/usr/sbin:/sbin:/usr/local/bin"


class User(NamedTuple):
    """A user of this machine."""

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]


class Check(NamedTuple):
    """A check in progress; each of its methods makes the finding that ends it."""

    name: str
    looked_at: str

    def ok(self, seen: str, hint: str = "") -> Finding:
        return Finding(self.name, OK, self.looked_at, seen, hint)

    def off(self, seen: str, hint: str = "") -> Finding:
        return Finding(self.name, OFF, self.looked_at, seen, hint)

    def bad(self, seen: str, hint: str = "") -> Finding:
        return Finding(self.name, BAD, self.looked_at, seen, hint)

    def unknown(self, seen: str, hint: str = "") -> Finding:
        return Finding(self.name, UNKNOWN, self.looked_at, seen, hint)


def look(
    name: str, looked_at: str, body: Callable[..., Finding | list[Finding] | None], *arguments: object
) -> list[Finding]:
    """Run a check and return its findings: an unknown one if a check that it depends on is unknown, or on timeout."""

    def made() -> list[Finding]:
        try:
            found = body(*arguments)
        except NotKnown as unknown:
            return [Finding(name, UNKNOWN, looked_at, str(unknown), because=unknown.because)]
        return found if isinstance(found, list) else [found] if found else []

    outcome = in_time(name, made)
    if isinstance(outcome, errors.Fault):
        return [Finding(name, UNKNOWN, looked_at, outcome.problem, outcome.hint)]
    assert isinstance(outcome, list)
    return outcome


def in_time(name: str, work: Callable[[], object], seconds: float | None = None) -> object:
    """Run `work` and return its result, or the fault that it raised, or `findings.Late`."""
    return side_by_side({name: work}, monotonic() + (seconds or LOOK_DEADLINE))[name]


class Known(config.Settings):
    """Settings with unknown values, which could not be read: the getters raise `NotKnown` for these."""

    __slots__ = ("_unknown", "_why")

    def __init__(self, good: config.Settings, unknown: Collection[str], why: str) -> None:
        super().__init__(*good.given(), good.warnings)
        self._unknown, self._why = unknown, why

    def string(self, name: str) -> str:
        self._require(name)
        return super().string(name)

    def where(self, name: str) -> str:
        self._require(name)
        return super().where(name)

    def _require(self, name: str) -> None:
        if name in self._unknown:
            raise NotKnown("settings", self._why.format(name=name))


class Completed(NamedTuple):
    """The result of a program."""

    status: int | None
    """The exit status; None if it was killed at its deadline."""
    out: str
    err: str

    @property
    def complaint(self) -> str:
        """The last line on standard error, for people."""
        from vmgahp.text import escape, redact

        lines = [line.strip() for line in self.err.splitlines() if line.strip()]
        return escape(redact(lines[-1]))[:1000].rstrip(".") if lines else ""


class Context:
    """The facts about one machine that the checks share.

    `root` is put before the paths of the system (``/sys``, ``/proc``, ``/run``, ``/dev`` and so on), for tests that
    simulate a machine with files.
    """

    def __init__(self, environ: Mapping[str, str], vm_type: str = "", root: str = "") -> None:
        self.environ = dict(environ)
        self.root = root
        self.is_root = os.geteuid() == 0
        self.notes: list[str] = []
        """The lines that drivers would have written to the log, which the doctor keeps unchanged."""
        self.faults: list[errors.Fault] = []
        """The faults because of which the settings could not be read."""
        self.tool = sources.find_tool(environ)
        """The path of condor_config_val, or empty."""
        self.bad_names: set[str] = set()
        self.unread = False
        """True if the settings could not be read at all: unset ones are then unknown."""
        self.waited = False
        """True if HTCondor's tool did not print them in time."""
        self.loaded = config.Settings()
        """The settings as they were read."""
        self._usable = self._load()
        unknown, why = self.bad_names, "{name} is set to what is no value for it."
        if self.unread:
            unknown, why = set(config.BY_NAME), "{name} is not known, for the settings cannot be read."
        self.settings: config.Settings = Known(self._usable, unknown, why)
        """The settings; the getters raise `NotKnown` for the unknown ones."""
        self._more = self._load_more()
        self.vm_type = (vm_type or self._usable.string("VM_TYPE") or "kvm").lower()
        if self.is_root:
            self.environ.setdefault("VMGAHP_USER_UID", str(self.condor.uid if self.condor else NOBODY))

    @property
    def usable(self) -> config.Settings:
        """The settings with the default in place of each invalid value; raises `NotKnown` if they could not be read.

        They are for a probe, which only uses the valid ones.
        """
        if self.unread:
            raise NotKnown("settings", "The settings that say what to look at cannot be read.")
        return self._usable

    def more(self, name: str) -> str:
        """Return one of `MORE_SETTINGS`, empty if it is not set; raises `NotKnown`."""
        if self._more is None:
            raise NotKnown("settings", f"{name} is not known, for the settings cannot be read.")
        return self._more.get(name, "")

    @property
    def own_settings(self) -> bool:
        """True if a file of our own has the settings, for use without HTCondor."""
        if self.environ.get("VMGAHP_CONFIG"):
            return True
        home = self.environ.get("HOME", "/")
        return not self.tool and any(os.path.exists(os.path.join(home, name)) for name in SETTINGS_FILES)

    @property
    def blind(self) -> bool:
        """True if an HTCondor runs jobs as root here, and this user lacks the rights to check that."""
        return not self.is_root and bool(self.tool) and not self.own_settings and not self._is_personal

    @property
    def _is_personal(self) -> bool:
        """True if this user has started HTCondor: if root has, its logs belong to the user condor."""
        address = (self._more or {}).get("STARTD_ADDRESS_FILE", "")
        try:
            mine = os.stat(os.path.dirname(address)).st_uid == os.geteuid()
        except OSError:
            return False
        return mine and (self.condor is None or self.condor.uid != os.geteuid())

    @property
    def condor(self) -> User | None:
        """The user of HTCondor's daemons, according to CONDOR_IDS or the name condor."""
        import pwd

        uid, _, gid = (self._more or {}).get("CONDOR_IDS", "").partition(".")
        if uid.isdecimal() and gid.isdecimal():
            return User("condor", int(uid), int(gid), (int(gid),))
        try:
            entry = pwd.getpwnam("condor")
        except KeyError:
            return None
        return User("condor", entry.pw_uid, entry.pw_gid, tuple(os.getgrouplist("condor", entry.pw_gid)))

    def path(self, path: str) -> str:
        """Return a path of the system, below `root`."""
        return self.root + path

    def read(self, path: str) -> str:
        """Read the beginning of a small file of the system; empty if it is missing or must not be read."""
        try:
            with open(self.path(path), encoding="utf-8", errors="replace") as file:
                return file.read(1 << 16)
        except OSError:
            return ""

    def program(self, name: str) -> str:
        """Find a program of HTCondor beside condor_config_val; return its full path, or empty."""
        path = os.path.join(os.path.dirname(self.tool), name) if self.tool else ""
        return path if path and os.access(path, os.X_OK) else ""

    def _load(self) -> config.Settings:
        try:
            loaded = config.load(self.environ)
        except errors.Fault as fault:
            self.faults.append(fault)
            self.unread = True
            self.waited = isinstance(fault, sources.Unanswered)
            return config.Settings()
        self.loaded = loaded
        kinds = {"integer": loaded.integer, "bool": loaded.boolean, "size": loaded.size}
        good, where = {}, {}
        for setting in config.SETTINGS:
            try:
                kinds.get(setting.kind, loaded.string)(setting.name)
            except errors.Fault:
                self.bad_names.add(setting.name)
                continue
            if loaded.where(setting.name) != "default":
                good[setting.name] = loaded.string(setting.name)
                where[setting.name] = loaded.where(setting.name)
        return config.Settings(good, where, loaded.warnings)

    def _load_more(self) -> dict[str, str] | None:
        if self.unread:
            return None
        try:
            values, _, _ = sources.read(MORE_SETTINGS, self.environ)
        except errors.Fault as fault:
            self.faults.append(fault)
            return None
        return {name: value.strip().strip("\"'") for name, value in values.items() if value.strip()}


def who_is(name: str, uid: int, gid: int) -> User:
    """Look up a user with all groups that the group database gives."""
    import pwd

    try:
        groups = os.getgrouplist(pwd.getpwuid(uid).pw_name, gid)
    except (KeyError, OSError):
        groups = [gid]
    return User(name, uid, gid, tuple(groups))


def ask(
    command: Sequence[str], seconds: float, environ: Mapping[str, str] | None = None, who: User | None = None
) -> Completed:
    """Run a program to its end, or for so many seconds; as another user if `who` is given and this is root.

    A program that cannot be run has status 127 and the reason as its error.
    """
    try:
        done = run(
            command,
            deadline=seconds,
            environ={"PATH": _NO_SHELL_NEEDED} if environ is None else environ,
            user=Identity(who.uid, who.gid) if who is not None else None,
            groups=who.groups if who is not None else None,
        )
    except OSError as error:
        return Completed(127, "", f"{command[0]} cannot be run: {error.strerror}")
    if done.status is None:
        return Completed(None, "", "")
    return Completed(done.status, done.out.decode("utf-8", "replace"), done.err.decode("utf-8", "replace"))


_CLOSED = 'for f do test -e "$f" && test {flags} "$f" || {{ printf "%s" "$f"; exit 1; }}; done'


def first_closed(who: User, paths: Sequence[str], flag: str = "-x") -> str | None:
    """Return the first path that a user may not use (``-x``, ``-r``, ``-w``), empty if all are accessible.

    The kernel decides, for a process of that user, so that access lists and everything else count. None if that cannot
    be tested, because only root can become another user.
    """
    if os.geteuid() not in (0, who.uid):
        return None
    said = ask(["/bin/sh", "-c", _CLOSED.format(flags=flag), "sh", *paths], 10.0, who=who)
    if said.status == 1:
        return said.out
    return "" if said.status == 0 else None


def may_look(path: str) -> bool:
    """Return True if this user can tell that a path exists or not."""
    try:
        os.stat(path)
    except PermissionError:
        return False
    except OSError:
        pass
    return True


def down_to(path: str) -> list[str]:
    """Return a directory and all above it, from the top, with symbolic links resolved."""
    path = os.path.realpath(path)
    found = [path]
    while path != "/":
        path = os.path.dirname(path)
        found.append(path)
    return found[::-1]
