"""The daemon's log, in HTCondor's format and at the place that HTCondor's settings name.

A line is ``MM/DD/YY HH:MM:SS (pid:N) text``, as dprintf writes it (``_format_global_header`` in HTCondor's
``src/condor_utils/dprintf.cpp``) when ``D_PID`` is on. Here it is always on, because every server of a machine writes
to the same file. With ``-t`` a line has no header at all, as from the C++ daemon: condor_starter puts its own before
each line that it finds in the pipe.

Logging must never endanger the VM: it never raises and never blocks. On a full disk, a vanished directory or a full
pipe lines are lost, and later lines are tried again. Text of the job in a message is hostile: control characters are
escaped, and secrets are hidden (`redact`).
"""

import os
import time
from _thread import RLock
from stat import S_ISREG

from vmgahp.text import escape, redact

TYPE_CHECKING = False
if TYPE_CHECKING:
    import select
    from typing import Protocol

    class LogSettings(Protocol):
        """The part of `vmgahp.config.Settings` that the log uses; the two modules do not import each other."""

        def string(self, name: str) -> str: ...
        def size(self, name: str) -> int: ...


LONGEST_LINE = 8192
_PIPE_LINE = 4096
"""PIPE_BUF: the number of bytes that a pipe takes in one atomic write."""
_KEPT_LINES = 500


def wants_debug(flags: str) -> bool:
    """Tell whether a ``VM_GAHP_DEBUG`` value turns the debug level on.

    Flags are separated by spaces, commas or bars and may carry ``:level`` or a ``-`` that turns them off. The flags
    ``D_FULLDEBUG``, ``D_ALL:2``, ``D_ANY:2`` and ``D_ALWAYS:2`` turn it on, the last flag wins, and unknown flags are
    ignored (``_condor_parse_merge_debug_flags`` in HTCondor's ``src/condor_utils/dprintf_common.cpp``).
    """
    debug = False
    for flag in flags.upper().replace("|", " ").replace(",", " ").split():
        level = 0 if flag[0] == "-" else 1
        name, colon, number = flag.lstrip("+-").partition(":")
        if colon and number[:1].isdigit():
            level = int(number[0])
        if name == "D_FULLDEBUG":
            debug = level > 0
        elif name in ("D_ALWAYS", "D_ALL", "D_ANY") and (level > 1 or level == 0):
            debug = level > 1
    return debug


class Log:
    """A log with two levels of messages, to a file, to standard error, or nowhere; safe to use from every thread.

    The last 500 lines are kept until `open` says where they go: the greeting is sent before the settings are read.
    """

    __slots__ = ("_debug", "_dropped", "_fd", "_inode", "_kept", "_limit", "_lock", "_path", "_poll", "_torn")

    def __init__(self) -> None:
        self._lock = RLock()  # not Lock: a signal handler may log while its own thread is logging
        self._kept: list[tuple[float, bool, str]] | None = []
        self._debug = True
        self._path = ""
        self._fd = -1
        self._inode = (0, 0)
        self._limit = 0
        self._poll: select.poll | None = None
        self._dropped = 0
        self._torn = False

    def always(self, text: str) -> None:
        """Log a message that an administrator needs in every case (``D_ALWAYS``)."""
        self._add(False, text)

    def debug(self, text: str) -> None:
        """Log a message that helps to find a fault (``D_FULLDEBUG``)."""
        if self._debug:
            self._add(True, text)

    def open(self, settings: "LogSettings", to_stderr: bool = False) -> None:
        """Choose where all lines go, those that were kept first: standard error, or the file VM_GAHP_LOG.

        With an empty or relative name (the current directory is the job's), ``/dev/null``, or anything but a regular
        file the lines go nowhere. Raises `vmgahp.errors.MachineFault` only for settings that do not parse.
        """
        flags = settings.string("VM_GAHP_DEBUG") or settings.string("DEFAULT_DEBUG")
        debug = wants_debug(f"{settings.string('ALL_DEBUG')} {flags}")
        path = "" if to_stderr else settings.string("VM_GAHP_LOG")
        limit = settings.size("MAX_VM_GAHP_LOG")
        with self._lock:
            self._forget_file()
            self._debug = debug
            self._path = path if path.startswith("/") and path != os.devnull else ""
            self._limit = limit
            self._poll = None
            if to_stderr:
                from select import POLLOUT, poll

                self._poll = poll()
                self._poll.register(2, POLLOUT)
            kept, self._kept = self._kept, None
            for when, is_debug, text in kept or ():
                if debug or not is_debug:
                    self._write(when, text)

    def tell_stderr(self, text: str) -> None:
        """Write the message that ends a mode which people run by hand to standard error as well; raises nothing."""
        if self._poll is None:
            try:
                os.write(2, (escape(redact(text)) + "\n").encode("utf-8", "backslashreplace"))
            except OSError:
                pass

    def close(self) -> None:
        """Close the file; later lines are discarded."""
        with self._lock:
            self._forget_file()
            self._kept = None
            self._path = ""
            self._poll = None

    def _add(self, is_debug: bool, text: str) -> None:
        try:
            text = escape(redact(text))
            if len(text) > LONGEST_LINE:
                text = text[:LONGEST_LINE] + "..."
            with self._lock:
                if self._kept is not None:
                    if len(self._kept) >= _KEPT_LINES:
                        del self._kept[0]
                    self._kept.append((time.time(), is_debug, text))
                else:
                    self._write(time.time(), text)
        except Exception:  # noqa: BLE001 - logging must never fail, whatever was passed in
            self._dropped += 1

    def _write(self, when: float, text: str) -> None:
        if self._dropped:
            text = f"({self._dropped} lines were lost before this one) {text}"
        try:
            if self._poll is not None:
                line = text.encode("utf-8", "backslashreplace")[: _PIPE_LINE - 1] + b"\n"
                # If poll reports a pipe as writable, PIPE_BUF bytes can be written without blocking.
                if not self._poll.poll(0):
                    raise BlockingIOError
                os.write(2, line)
            elif self._path:
                self._follow_file()
                header = time.strftime("%m/%d/%y %H:%M:%S ", time.localtime(when)) + f"(pid:{os.getpid()}) "
                line = (header + text + "\n").encode("utf-8", "backslashreplace")
                if self._torn:  # the last line was cut off, as on a full disk
                    line = b"\n" + line
                self._torn = os.write(self._fd, line) < len(line)
            self._dropped = 0
        except OSError:
            self._dropped += 1

    def _follow_file(self) -> None:
        """Open the file unless it is open, rotate it when it is full, and reopen it when another server rotated it.

        All servers of a machine write the same file, each line with one append. The server that finds it full locks
        ``.lock`` and, if the name still is that of its file, renames it to ``.old``; the others notice that the name
        now belongs to another file. Raises OSError.
        """
        for _ in range(3):
            if self._fd < 0:
                self._open_file()
            try:
                found = os.stat(self._path, follow_symlinks=False)
            except FileNotFoundError:
                self._forget_file()
                continue
            if (found.st_dev, found.st_ino) != self._inode:
                self._forget_file()
                continue
            if self._limit <= 0 or found.st_size < self._limit or not self._rotate():
                return
        if self._fd < 0:
            self._open_file()

    def _open_file(self) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
        try:
            fd, created = os.open(self._path, flags | os.O_CREAT | os.O_EXCL, 0o644), True
        except FileExistsError:
            fd, created = os.open(self._path, flags), False
        try:
            found = os.fstat(fd)
            if not S_ISREG(found.st_mode):
                raise OSError(f"{self._path} is not a regular file")
            if created and os.geteuid() == 0:
                # HTCondor's own daemons write as the user condor, who owns its log directory.
                owner = os.stat(os.path.dirname(self._path))
                os.fchown(fd, owner.st_uid, owner.st_gid)
        except OSError:
            os.close(fd)
            raise
        self._fd = fd
        self._inode = (found.st_dev, found.st_ino)

    def _rotate(self) -> bool:
        """Rename the full file to ``.old``; return False if another server holds the lock, or if it fails."""
        import fcntl

        try:
            # A file of its own: whoever can read the log could hold a lock on it for ever.
            lock = os.open(f"{self._path}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                found = os.stat(self._path, follow_symlinks=False)
                if (found.st_dev, found.st_ino) == self._inode:
                    os.rename(self._path, self._path + ".old")
            finally:
                os.close(lock)
        except OSError:
            return False
        self._forget_file()
        return True

    def _forget_file(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1
