"""A program that becomes virtiofsd for one directory of one guest, confined, as the job's user.

It gets a listening socket, and a pipe to which it writes ``ok`` or the reason of a failure. Then it waits, with a
timeout, for QEMU to connect; until then it ends with the thread that started it. It loads its code before it becomes
the job's user, who may not be allowed to read it. virtiofsd runs in a user namespace in which the job's user is the
only user, whatever ids the guest uses. It can make no symbolic links, devices, FIFOs or sockets, which HTCondor and
later readers of the directory would follow, and no set-user-id programs. A read-only directory is mounted read-only,
and not only declared so.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
import sys

from vmgahp.host.system_calls import become

PATIENCE = 120.0
"""The seconds for QEMU to connect: libvirt waits thirty of them for its monitor."""

OF_QEMU = "/usr/lib/qemu/virtiofsd"
"""The path of the virtiofsd of QEMU up to 7.2, the only one in Debian 12: it has other options than its successor."""

_NEW_USER, _NEW_MOUNTS = 0x10000000, 0x00020000
_BIND, _RECURSIVE, _PRIVATE = 4096, 16384, 1 << 18
_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE, _READ_ONLY = 442, -100, 0x8000, 1
_ALLOW, _ERROR, _MASKED_EQUAL = 0x7FFF0000, 0x00050000, 7

REFUSED = "symlink", "symlinkat", "mknod", "mknodat", "io_uring_setup", "openat2"
"""The system calls that fail; a filter cannot see the mode in the structure that openat2 gets."""
PRETENDED = "setresuid", "setresgid", "setgroups"
"""The calls that do nothing and report success: there is one user."""
MODES = {"open": 2, "creat": 1, "chmod": 1, "fchmod": 1, "openat": 3, "fchmodat": 2, "fchmodat2": 2}
"""The calls that fail for a mode with set-user-id or set-group-id, and the index of the mode."""
_NEWER = {"io_uring_setup": 425, "openat2": 437, "fchmodat2": 452}
"""The numbers of calls that an older libseccomp may not know, the same on all architectures."""


class _Condition(ctypes.Structure):
    """A condition on an argument of a system call (``struct scmp_arg_cmp`` of libseccomp)."""

    _fields_ = (
        ("index", ctypes.c_uint),
        ("comparison", ctypes.c_int),
        ("mask", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
    )


def main(arguments: list[str]) -> None:
    """Serve, never return. `arguments`: two descriptors, uid, gid, parent, ro or rw, directory, room and path."""
    *numbers, mode, directory, room, program = arguments
    listener, status, *user = map(int, numbers)
    try:
        libc, seccomp = ctypes.CDLL(None, use_errno=True), ctypes.CDLL("libseccomp.so.2")
        if os.geteuid() == 0:
            become(*user)
        os.close(os.open(directory, os.O_RDONLY | os.O_DIRECTORY))
        _shut_in(libc, directory, writable=mode == "rw")
        restrict(seccomp)
    except OSError as error:
        os.write(status, f"{error.filename or ''}\n{error.strerror or error}".encode()[:4096])
        os._exit(1)
    os.write(status, b"ok")
    os.close(status)
    waits = select.poll()
    waits.register(listener, select.POLLIN)
    if not waits.poll(PATIENCE * 1000):
        os._exit(1)
    libc.prctl(1, 0, 0, 0, 0)  # PR_SET_PDEATHSIG: from here on it lives as long as QEMU
    os.set_inheritable(listener, True)
    words = [f"{room}/virtiofsd", f"--fd={listener}"]  # `runtime_dir.remove` finds it by this name
    if program == OF_QEMU:
        words += ["-f", "-o", f"source={directory}", "-o", "sandbox=namespace", "-o", "cache=auto"]
    else:
        words += ["--shared-dir", directory, "--sandbox", "namespace", "--cache", "auto"]
        words += ["--readonly"] if mode == "ro" else []
    os.execv(program, words)  # noqa: S606 - no shell is wanted


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


def restrict(seccomp: ctypes.CDLL) -> None:
    """Refuse the system calls that make what nobody may find in a shared directory. Raises OSError."""
    seccomp.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(seccomp.seccomp_init(ctypes.c_uint32(_ALLOW)))

    def check(result: int, name: str) -> None:
        if result < 0:
            raise OSError(-result, os.strerror(-result), f"a filter of system calls (seccomp), {name}")

    def answer(name: str, error: int, *conditions: _Condition) -> None:
        number = seccomp.seccomp_syscall_resolve_name(name.encode())
        number = _NEWER.get(name, number) if number == -1 else number
        action, array = ctypes.c_uint32(_ERROR | error), (_Condition * len(conditions))(*conditions)
        check(seccomp.seccomp_rule_add_array(context, action, number, len(conditions), array), name)

    for name in REFUSED:
        answer(name, errno.EPERM)
    for name in PRETENDED:
        answer(name, 0)
    for name, index in MODES.items():
        for bit in (0o4000, 0o2000):
            answer(name, errno.EPERM, _Condition(index, _MASKED_EQUAL, bit, bit))
    check(seccomp.seccomp_load(context), "load")


def _call(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)


if __name__ == "__main__":
    main(sys.argv[1:])
