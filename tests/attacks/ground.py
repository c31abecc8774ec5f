"""A machine to attack: its canaries, which nobody may touch, and the services that nobody may call."""

import contextlib
import ctypes
import grp
import os
import pwd
import select
import socket
import struct
import threading
from pathlib import Path

from tests.conftest import JOB_UID
from tests.faults.host import Host
from tests.lab.guest import make_guest
from tests.lab.processes import descriptors

STRANGER_UID = JOB_UID + 1
"""Another user of the machine."""

CANARIES = Path("/run/canary")
SOCKET = "/run/canary.socket"

SECRET = "unguessable-0d6f1c9a77e24b5f"
"""What the private attributes of every job have in them."""
MARK = b"precious-5b1e0c2f9d4a4d33"
"""What the canaries have in them."""

_WATCHED = 0x2 | 0x4 | 0x8 | 0x20 | 0x400 | 0x800
"""IN_MODIFY, IN_ATTRIB, IN_CLOSE_WRITE, IN_OPEN, IN_DELETE_SELF, IN_MOVE_SELF of inotify(7)."""
_EVENT = struct.Struct("iIII")
_NAMES = {0x2: "written to", 0x4: "given away", 0x20: "opened", 0x400: "removed", 0x800: "moved"}


class Ground(Host):
    """All that is not one job's."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        # An administrator of a machine whose QEMUs run as the jobs' users lets them pass.
        os.chmod("/var/lib/libvirt/qemu", 0o751)
        self.execute = Path("/run/execute")
        self.execute.mkdir()
        self.number = 0
        self.calls: list[str] = []
        """The connections that services of the machine's have seen."""
        self.port = self._listen(socket.AF_INET, ("127.0.0.1", 0)).getsockname()[1]
        self._listen(socket.AF_UNIX, SOCKET)
        os.chmod(SOCKET, 0o777)
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._inotify = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        self._watches: dict[int, str] = {}
        self._states: dict[str, tuple[int, ...]] = {}
        self.plant()

    def plant(self) -> None:
        """Have all canaries as they should be, and watch them."""
        CANARIES.mkdir(exist_ok=True)
        group = grp.getgrnam("libvirt-qemu").gr_gid
        for name, uid, gid, mode in (
            ("root", 0, 0, 0o600),
            ("libvirt", pwd.getpwnam("libvirt-qemu").pw_uid, group, 0o660),
            ("group", 0, group, 0o660),
            ("other", STRANGER_UID, STRANGER_UID, 0o600),
        ):
            path = CANARIES / name
            path.unlink(missing_ok=True)
            make_guest(path)
            with open(path, "r+b") as file:
                file.seek(4096)
                file.write(MARK)
            os.chown(path, uid, gid)
            path.chmod(mode)
            self._watches[self._libc.inotify_add_watch(self._inotify, os.fsencode(path), _WATCHED)] = name
        self._states = self._look()
        self.touched()

    @staticmethod
    def _look() -> dict[str, tuple[int, ...]]:
        found = {}
        for path in CANARIES.iterdir():
            status = path.lstat()
            found[path.name] = (status.st_ino, status.st_uid, status.st_gid, status.st_mode, status.st_mtime_ns)
        return found

    def touched(self) -> list[str]:
        """What was done to the canaries since it was asked for the last time."""
        found = {f"{name}: changed" for name, state in self._states.items() if self._look().get(name) != state}
        while select.select([self._inotify], [], [], 0)[0]:
            data = os.read(self._inotify, 65536)
            while data:
                watch, mask, _, length = _EVENT.unpack_from(data)
                data = data[_EVENT.size + length :]
                what = [word for bit, word in _NAMES.items() if mask & bit]
                if watch in self._watches and what:
                    found.add(f"{self._watches[watch]}: {' and '.join(what)}")
        for descriptor in descriptors():
            with contextlib.suppress(OSError):
                target = os.readlink(descriptor)
                if target.startswith(f"{CANARIES}/"):
                    found.add(f"{target} is held by {descriptor}")
        return sorted(found)

    def _listen(self, family: int, address: object) -> socket.socket:
        listener = socket.socket(family)
        listener.bind(address)
        listener.listen(16)

        def accept() -> None:
            while True:
                with listener.accept()[0]:
                    self.calls.append(str(address))

        threading.Thread(target=accept, daemon=True).start()
        return listener
