"""The points of a life from outside of the daemon: which were reached, and one at which it is held."""

import socket
import threading
from pathlib import Path


class Points:
    """Listens to one daemon's launcher. Every point is let through but the one that is held."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.trace: list[str] = []
        """The points in the order in which they were reached."""
        self.came = threading.Event()
        """The life has come to the point that is held."""
        self._updates = threading.Condition()
        self._point = ""
        self._held: socket.socket | None = None
        path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(16)
        threading.Thread(target=self._listen, daemon=True).start()

    def hold(self, point: str) -> None:
        """Stop the life at this point, the next time that it comes there."""
        with self._updates:
            self._point = point
            self.came.clear()

    def release(self) -> None:
        """Let the life go on, and stop it nowhere else."""
        with self._updates:
            self._point = ""
            held, self._held = self._held, None
        if held is not None:
            held.close()

    def wait_for(self, point: str, seconds: float) -> bool:
        """Wait until a point was reached, held or not."""
        with self._updates:
            return self._updates.wait_for(lambda: point in self.trace, seconds)

    def is_left(self) -> bool:
        """Look whether the process that was held is gone; True where none is held."""
        with self._updates:
            try:
                return self._held is None or not self._held.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            except BlockingIOError:
                return False

    def close(self) -> None:
        self.release()
        self._listener.close()
        self.path.unlink(missing_ok=True)

    def _listen(self) -> None:
        while True:
            try:
                asking = self._listener.accept()[0]
                point = asking.makefile().readline().strip()
            except (OSError, ValueError):
                return
            with self._updates:
                self.trace.append(point)
                held = point == self._point
                if held:
                    self._point, self._held = "", asking
                self._updates.notify_all()
            if held:
                self.came.set()
            else:
                asking.close()
