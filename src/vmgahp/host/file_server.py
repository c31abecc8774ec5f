"""A program that becomes virtiofsd for one directory of one guest, confined, as the job's user.

It gets a listening socket, and a pipe to which it writes ``ok`` or the reason of a failure. Then it waits, with a
timeout, for QEMU to connect. It loads its code before it becomes the job's user, who may not be allowed to read it.
virtiofsd runs in a user namespace in which the job's user is the only user, whatever ids the guest uses. It can make
no symbolic links, devices, FIFOs or sockets, which HTCondor and later readers of the directory would follow, and no
set-user-id programs. A read-only directory is mounted read-only, and not only declared so.
"""

from __future__ import annotations

import ctypes
import os
import select
import sys

_Modes = tuple[tuple[int, int], ...]

PATIENCE = 120.0
"""The seconds for QEMU to connect: libvirt waits thirty of them for its monitor."""

RUST, C = "rust", "C"
"""The two implementations of virtiofsd: that of its own project, and that of QEMU up to 7.2."""

_NEW_USER, _NEW_MOUNTS = 0x10000000, 0x00020000
_BIND, _RECURSIVE, _PRIVATE = 4096, 16384, 1 << 18
_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE, _READ_ONLY = 442, -100, 0x8000, 1
_NO_NEW_PRIVILEGES, _SECCOMP, _FILTER = 38, 22, 2
_ALLOW, _ERROR = 0x7FFF0000, 0x00050000
_EPERM = 1


class _Calls:
    """The numbers of system calls on one architecture."""

    def __init__(self, audit: int, refused: tuple[int, ...], pretended: tuple[int, ...], modes: _Modes) -> None:
        self.audit = audit
        """The architecture's AUDIT_ARCH."""
        self.refused = refused
        """The calls that fail: symlink, symlinkat, mknod, mknodat, io_uring_setup, openat2 (its mode is hidden)."""
        self.pretended = pretended
        """The calls that do nothing and report success: setresuid, setresgid, setgroups."""
        self.modes = modes
        """The calls with a mode, and its index: open, creat, chmod, fchmod, openat, fchmodat, fchmodat2."""


CALLS = {
    "x86_64": _Calls(
        0xC000003E,
        (88, 266, 133, 259, 425, 437),
        (117, 119, 116),
        ((2, 2), (85, 1), (90, 1), (91, 1), (257, 3), (268, 2), (452, 2)),
    ),
    "aarch64": _Calls(0xC00000B7, (36, 33, 425, 437), (147, 149, 159), ((52, 1), (56, 3), (53, 2), (452, 2))),
}
_SET_ID = 0o6000
_X32 = 0x40000000


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def main(arguments: list[str]) -> None:
    """Serve, never return. `arguments`: two descriptors, uid, gid, ro or rw, the directory, its room, kind and path."""
    *numbers, mode, directory, room, kind, program = arguments
    listener, status, uid, gid = map(int, numbers)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        _become(uid, gid)
        os.close(os.open(directory, os.O_RDONLY | os.O_DIRECTORY))
        _shut_in(libc, directory, writable=mode == "rw")
        _filter(libc)
    except OSError as error:
        os.write(status, f"{error.filename or ''}\n{error.strerror}".encode()[:4096])
        os._exit(1)
    os.write(status, b"ok")
    os.close(status)
    waits = select.poll()
    waits.register(listener, select.POLLIN)
    if not waits.poll(PATIENCE * 1000):
        os._exit(1)
    os.set_inheritable(listener, True)
    words = [f"{room}/virtiofsd", f"--fd={listener}"]  # `beside.over` finds it by this name
    if kind == C:
        words += ["-f", "-o", f"source={directory}", "-o", "sandbox=namespace", "-o", "cache=auto"]
    else:
        words += ["--shared-dir", directory, "--sandbox", "namespace", "--cache", "auto"]
        words += ["--readonly"] if mode == "ro" else []
    os.execv(program, words)  # noqa: S606 - no shell is wanted


def _become(uid: int, gid: int) -> None:
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)


def _shut_in(libc: ctypes.CDLL, directory: str, *, writable: bool) -> None:
    uid, gid = os.geteuid(), os.getegid()
    # After a change of user the files in /proc belong to root until PR_SET_DUMPABLE is set.
    _call(libc.prctl(4, 1, 0, 0, 0), "prctl")
    _call(libc.unshare(_NEW_USER | _NEW_MOUNTS), "a user namespace of its own (unshare)")
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    _call(libc.mount(None, b"/", None, _PRIVATE | _RECURSIVE, None), "mount")
    if not writable:
        path = os.fsencode(directory)
        _call(libc.mount(path, path, None, _BIND | _RECURSIVE, None), directory)
        wanted = (ctypes.c_uint64 * 4)(_READ_ONLY)
        done = libc.syscall(_MOUNT_SETATTR, _AT_FDCWD, path, _AT_RECURSIVE, ctypes.byref(wanted), 32)
        _call(done, f"{directory} without writing (mount_setattr)")


def _filter(libc: ctypes.CDLL) -> None:
    machine = os.uname().machine
    if machine not in CALLS:
        raise OSError(38, os.strerror(38), f"a filter of system calls for {machine}")
    calls = CALLS[machine]
    no = (0x06, 0, 0, _ERROR | _EPERM)
    code = [(0x20, 0, 0, 4), (0x15, 1, 0, calls.audit), no, (0x20, 0, 0, 0), (0x35, 0, 1, _X32), no]
    for number in calls.refused:
        code += [(0x15, 0, 1, number), no]
    for number in calls.pretended:
        code += [(0x15, 0, 1, number), (0x06, 0, 0, _ERROR)]
    for number, place in calls.modes:
        code += [(0x15, 0, 4, number), (0x20, 0, 0, 16 + 8 * place), (0x45, 0, 1, _SET_ID), no, (0x20, 0, 0, 0)]
    code.append((0x06, 0, 0, _ALLOW))
    text = b"".join(
        one.to_bytes(2, sys.byteorder) + bytes((yes, no)) + value.to_bytes(4, sys.byteorder)
        for one, yes, no, value in code
    )
    program = _Program(len(code), text)
    _call(libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0), "prctl")
    _call(libc.prctl(_SECCOMP, _FILTER, ctypes.byref(program), 0, 0), "a filter of system calls (seccomp)")


def _call(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)


if __name__ == "__main__":
    main(sys.argv[1:])
