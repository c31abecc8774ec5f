"""The server that the console talks to: its command, its environment and its working directory."""

import os
import pwd
import shutil
import stat
import sys
import tempfile
from collections.abc import Mapping, Sequence

from vmgahp.commands.console.job_ad import CLUSTER_BASE, Ad, prepare, read_file
from vmgahp.commands.queue import ask_condor_q
from vmgahp.errors import ClientFault

NOBODY = 65534

EXPLANATION = "vm_error.txt"
"""The file in the working directory in which our daemon says why a START failed."""

LONGEST_EXPLANATION = 8192
"""Bytes of it that are read."""


def own_command() -> list[str]:
    """The daemon of this package, as a starter calls it, with its log on standard error."""
    return [sys.executable, "-I", "-m", "vmgahp", "-f", "-t", "-M", "3"]


def resolved(command: Sequence[str]) -> list[str]:
    """A command whose program is meant from here, and not from the working directory, which is the job's user's."""
    return [os.path.abspath(command[0]) if "/" in command[0] else command[0], *command[1:]]


class Place:
    """A working directory, the job's scratch directory for the server, and the world as the interpreter sees it.

    A directory that was not there before is made and, with what is in it, removed by `close`.
    """

    def __init__(self, vm_type: str, path: str = "") -> None:
        self.vm_type = vm_type.lower()
        self._fresh = ""
        self._starts = 0
        if path:
            self.path = os.path.realpath(path)
            if not os.path.isdir(self.path):
                raise OSError(f"{path} is no directory")
        else:
            self._fresh = tempfile.mkdtemp(prefix="vmgahp-console-")
            # QEMU runs as a user of its own and has to get to the disks.
            os.chmod(self._fresh, 0o755)  # noqa: S103 - to pass through, no more
            self.path = os.path.join(self._fresh, "scratch")
            os.mkdir(self.path, 0o755)
        self.user = self._job_user()
        if self._fresh and self.user:
            os.chown(self.path, *self.user)
        self._seen = self._explanation_stamp()

    def _job_user(self) -> tuple[int, int] | None:
        """Whose the job is where root starts it: the directory's owner, the user behind sudo, or nobody."""
        if os.geteuid() != 0:
            return None
        found = os.stat(self.path)
        if found.st_uid:
            return found.st_uid, found.st_gid or found.st_uid
        uid, gid = os.environ.get("SUDO_UID", ""), os.environ.get("SUDO_GID", "")
        if uid.isdigit() and gid.isdigit() and int(uid) and int(gid):
            return int(uid), int(gid)
        return NOBODY, NOBODY

    def environment(self, environ: Mapping[str, str], settings: Sequence[str]) -> dict[str, str]:
        """What a starter would put into the server's environment, and settings of the form NAME=VALUE."""
        found = {name: value for name, value in environ.items() if not name.startswith("VMGAHP_USER_")}
        found |= {"VMGAHP_VMTYPE": self.vm_type, "_CONDOR_VM_TYPE": self.vm_type, "VMGAHP_WORKING_DIR": self.path}
        if self.user:
            found |= {"VMGAHP_USER_UID": str(self.user[0]), "VMGAHP_USER_GID": str(self.user[1])}
        for setting in settings:
            name, _, value = setting.partition("=")
            found[f"_CONDOR_{name.strip()}"] = value.strip()
        return found

    def close(self) -> str:
        """Remove a directory that was made; where files were left that could not be removed, its path."""
        if not self._fresh:
            return ""
        shutil.rmtree(self._fresh, ignore_errors=True)
        return self._fresh if os.path.lexists(self._fresh) else ""

    @property
    def is_fresh(self) -> bool:
        """Whether `close` removes it."""
        return bool(self._fresh)

    # What the interpreter asks

    def ad_of_file(self, path: str, vm_type: str) -> Ad:
        return self._prepare(read_file(path), vm_type)

    def ad_of_job(self, job: str, vm_type: str) -> Ad:
        return self._prepare(ask_condor_q(job), vm_type)

    def _prepare(self, text: str, vm_type: str) -> Ad:
        ad = prepare(
            text,
            self.path,
            vm_type=vm_type,
            serves=self.vm_type,
            user=f"{_user_name()}@console",
            cluster=CLUSTER_BASE + os.getpid(),
            proc=self._starts,
        )
        self._starts += 1
        return ad

    def explanation(self) -> str:
        """What is in `EXPLANATION`, where that has changed since it was last looked at."""
        seen, self._seen = self._seen, self._explanation_stamp()
        if self._seen in (None, seen):
            return ""
        try:
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
            with open(os.open(os.path.join(self.path, EXPLANATION), flags), "rb") as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    return ""
                return file.read(LONGEST_EXPLANATION).decode("utf-8", "backslashreplace")
        except OSError:
            return ""

    def _explanation_stamp(self) -> tuple[int, int] | None:
        try:
            found = os.lstat(os.path.join(self.path, EXPLANATION))
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns


def _user_name() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def checked_setting(text: str) -> str:
    """A setting of the form NAME=VALUE. Raises `ClientFault`."""
    name, equals, _ = text.partition("=")
    if not equals or not name.strip().replace("_", "a").replace(".", "a").isalnum():
        raise ClientFault("", f"{text!r} is not a setting.", "write NAME=VALUE")
    return text
