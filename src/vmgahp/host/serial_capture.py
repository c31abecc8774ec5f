"""The guest's serial console, kept for the job's owner.

The hypervisor's own ways do not suffice: with a file, virtlogd opens a path inside the job's scratch
directory as root, following links, and leaves a file that root owns; with a pseudo-terminal, QEMU drops
output without a reader. So QEMU connects to a Unix socket of ours (``<serial type='unix'>`` with
``mode='connect'``), and a thread writes the output to a file that was opened as the job's user.

A guest's output is not trusted: the bytes are never decoded, at most `limit` of them are written, and the
rest is read and dropped, so that a flood neither fills the disk nor blocks the guest.

The sockets are outside the scratch directory, whose path may be too long and whose owner could replace them.
"""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from queue import SimpleQueue
from stat import S_ISREG
from time import monotonic

from vmgahp.errors import MachineFault
from vmgahp.host import runtime_dir, wait

CUT = b"\n[the console's output continues, but no more of it is kept: it has reached its limit of %d bytes]\n"
"""The line after the last byte that is kept; it does not count towards the limit."""

CHUNK = 65536
PAUSE = 0.001
"""The most bytes of one read, and the seconds after it: the rate at which a guest can occupy this process."""
TAIL = 65536
"""The most bytes of the end of the output that a capture keeps in memory, including those over the limit."""
CLOSE_SECONDS = 1.0
CLOSE_BYTES = 1 << 20
"""The limits, in bytes and seconds, of reading what is left in the socket when a capture is closed."""


class ConsoleCapture:
    """A listener on a socket that writes the output of its client to a file, until it is closed.

    One connection is served at a time, and after it the next, as after a VM was saved and is restored.
    """

    chunk, pause = CHUNK, PAUSE

    def __init__(
        self,
        path: str,
        open_output: Callable[[], int],
        limit: int,
        on_error: Callable[[str], None],
        *,
        owner: tuple[int, int] | None = None,
    ) -> None:
        """Listen on `path`, a name in a directory from `runtime_dir` that this capture will remove.

        `open_output` returns a descriptor open for appending, which the capture closes; its faults are passed
        on. The file never gets longer than `limit` bytes, including its earlier content. The callback `on_error`
        gets one sentence when output is lost, in the capture's own thread, and must not raise. `owner` is the
        uid and gid whose processes may connect, by default the caller's; libvirt itself gives the socket to
        QEMU's user. Raises `MachineFault` if the socket cannot be made.
        """
        self.path = path
        self.limit = limit
        self.left: Callable[[], float] = lambda: limit
        """A function that returns the bytes that may still be written, where several files share a limit."""
        self.is_cut = False
        """True if output was dropped because of the limit."""
        self._on_error = on_error
        self._noted: set[str] = set()
        self._lock = threading.Lock()
        self._closed = False
        self._buffer = memoryview(bytearray(self.chunk))
        self._tail = bytearray()
        with ExitStack() as undo:
            undo.callback(self._remove)
            if len(os.fsencode(path)) >= runtime_dir.LONGEST_PATH:
                most = runtime_dir.LONGEST_PATH - 1
                problem = f"The path of the console's socket is longer than {most} bytes: {path}."
                raise MachineFault(problem, "set XDG_RUNTIME_DIR or TMPDIR to a shorter path.")
            try:
                self._output = open_output()
                undo.callback(os.close, self._output)
                self._start(owner, undo)
            except OSError as error:
                hint = "look at the directory's permissions and the limits on processes and open files."
                raise MachineFault(f"The console's socket {path} cannot be made: {error}.", hint) from error
            undo.pop_all()

    def _start(self, owner: tuple[int, int] | None, undo: ExitStack) -> None:
        self.written = 0
        """The number of bytes in the file, as counted by this capture."""
        with suppress(OSError):  # of a file system of the job's, where the writes fail and are reported
            before = os.fstat(self._output)
            self.written = before.st_size if S_ISREG(before.st_mode) else 0
        self.is_cut = self.written > self.limit
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        undo.callback(os.close, self._wake)
        self._listener = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        self._listener.setblocking(False)
        runtime_dir.listen(self._listener, self.path, owner or (os.geteuid(), os.getegid()))
        self._thread = wait.start_thread(f"console {self.path}", self._run)

    def file(self) -> int:
        """Return a new descriptor of the file. Raises OSError."""
        return os.dup(self._output)

    def empty(self) -> None:
        """Truncate the file, to keep only new output. Raises OSError."""
        os.ftruncate(self._output, 0)
        self.written, self.is_cut = 0, False

    def tail(self) -> bytes:
        """Return the last `TAIL` bytes at most of all output; call it after `close`."""
        return bytes(self._tail[-TAIL:])

    def close(self) -> None:
        """Keep what is left in the socket, for two seconds, and remove all but the file; may be repeated."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        os.eventfd_write(self._wake, 1)
        self._thread.join(CLOSE_SECONDS + 1)
        if self._thread.is_alive():
            self._note("stuck", "The console's file does not take what is written to it; the end is lost.")
        else:
            os.close(self._wake)
        self._remove()

    def _remove(self) -> None:
        """Remove the socket and its directory, to which no other user may write."""
        for remove, path in ((os.unlink, self.path), (os.rmdir, os.path.dirname(self.path))):
            with suppress(OSError):  # it was removed already, or other files are in it
                remove(path)

    def _run(self) -> None:
        try:
            self._last_words(self._serve())
        finally:
            self._listener.close()
            with suppress(OSError):  # of a file system of the job's
                os.close(self._output)

    def _serve(self) -> socket.socket | None:
        """Read connections until `close`; return the one that is open then."""
        connection: socket.socket | None = None
        while True:
            poll = select.poll()
            poll.register(self._wake, select.POLLIN)
            poll.register(self._listener if connection is None else connection, select.POLLIN)
            if any(number == self._wake for number, _ in poll.poll()):
                return connection
            try:
                if connection is None:
                    connection = self._accept()
                elif self._receive(connection) == 0:
                    connection.close()
                    connection = None
                else:  # the guest waits as well when its port is full
                    wait.ready(self._wake, self.pause)
            except BlockingIOError:
                continue
            except OSError as error:
                self._note("accept", f"Nobody can connect to the console's socket now: {error.strerror}.")
                # For example out of descriptors. The listener stays readable, so wait a second, or for `close`.
                poll.unregister(self._listener)
                poll.poll(1000)

    def _last_words(self, connection: socket.socket | None) -> None:
        """Read what is left, in this connection and in those not accepted yet."""
        end = monotonic() + CLOSE_SECONDS
        taken = 0
        try:
            while taken < CLOSE_BYTES and monotonic() < end:
                if connection is None:
                    connection = self._accept()
                got = self._receive(connection)
                taken += got
                if got == 0:
                    connection.close()
                    connection = None
        except OSError:
            pass  # nothing is left
        finally:
            if connection is not None:
                connection.close()

    def _accept(self) -> socket.socket:
        connection, _ = self._listener.accept()
        connection.setblocking(False)
        return connection

    def _receive(self, connection: socket.socket) -> int:
        """Read one chunk and keep it; return 0 at the connection's end. Raises BlockingIOError if there is no data."""
        try:
            got = connection.recv_into(self._buffer)
        except BlockingIOError:
            raise
        except OSError:
            return 0  # such as a reset: the client is gone
        if got:
            self._tail += self._buffer[:got]
            if len(self._tail) > 2 * TAIL:  # not for each of many small chunks
                del self._tail[:-TAIL]
        if got and not self.is_cut:
            self._keep(self._buffer[:got])
        return got

    def _keep(self, chunk: memoryview) -> None:
        room = int(max(min(self.limit - self.written, self.left()), 0))
        self._write(chunk[:room])
        if len(chunk) > room:
            self.is_cut = True
            self._write(memoryview(CUT % self.written))
            self._note("limit", f"The guest printed more than {self.written} bytes; no more of it is kept.")

    def _write(self, piece: memoryview) -> None:
        """Write, or drop output that cannot be written: a full disk may have room again later."""
        try:
            while piece:
                done = os.write(self._output, piece)
                self.written += done
                piece = piece[done:]
        except OSError as error:
            self._note("write", f"Console output is lost, it cannot be written: {error.strerror}.")

    def _note(self, what: str, text: str) -> None:
        if what not in self._noted:
            self._noted.add(what)
            self._on_error(text)


# A port by which a guest and its server exchange short lines.
#
# A guest's input is not trusted: it is limited, and anything but lines of plain text is dropped.

LONGEST_LINE = 512
MOST_LINES = 1000
"""The most lines of a guest; repetitions of the last line do not count."""
MOST_WAITING = 10_000


class LinePort(ConsoleCapture):
    """A listener like a capture, which puts the lines into the queue `lines` and not into a file."""

    chunk, pause = 2 * LONGEST_LINE, 0.02  # each line costs more than its bytes

    def __init__(self, path: str, on_error: Callable[[str], None], *, owner: tuple[int, int] | None = None) -> None:
        self.lines: SimpleQueue[str | None] = SimpleQueue()
        """The queue of lines; other code may put None into it to wake the reader."""
        self._left = MOST_LINES
        self._rest = b""
        self._is_too_long = False
        """True while the rest of a line that is too long is dropped."""
        self._last = ""
        self._connection: socket.socket | None = None
        super().__init__(path, partial(os.open, os.devnull, os.O_WRONLY | os.O_CLOEXEC), 0, on_error, owner=owner)

    def say(self, line: str) -> None:
        """Send a line to the guest, if it is connected; the guest asks again for a lost line that it needs."""
        if (connection := self._connection) is not None:
            with suppress(OSError):
                connection.send(line.encode() + b"\n")

    def _accept(self) -> socket.socket:
        self._connection = super()._accept()
        return self._connection

    def _keep(self, chunk: memoryview) -> None:
        *lines, self._rest = (self._rest + bytes(chunk)).split(b"\n")
        for line in lines:
            if not self._is_too_long and len(line) <= LONGEST_LINE:
                self._hear(line)
            self._is_too_long = False
        if len(self._rest) > LONGEST_LINE:
            self._rest, self._is_too_long = b"", True

    def _hear(self, line: bytes) -> None:
        said = line.decode("ascii", "replace").strip()
        if said != self._last:
            self._left -= 1
            self._last = said
        if self._left < 0:
            self.is_cut = True
            self._note("limit", f"The guest has said more than {MOST_LINES} lines; no more of them is heard.")
        elif said and said.isprintable() and self.lines.qsize() < MOST_WAITING:
            self.lines.put(said)
