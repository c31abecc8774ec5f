"""The question to libvirtd before each test that has the mark ``libvirt``: does it still answer?"""

import os
import threading
import time
from collections.abc import Callable

URI = "qemu:///system" if os.getuid() == 0 else "qemu:///session"
PATIENCE = 60.0
"""Seconds for an answer that a busy machine gives in one, and for a libvirtd that died to be started again."""
AGAIN = 0.2
"""Seconds between two tries to connect."""


class Watch:
    """A libvirtd that answered once in this process, and must from then on.

    One that never did may not be installed: tests skip by themselves there. Whoever finds that it is gone, or that it
    hangs, has waited for it; the tests that follow do not.
    """

    def __init__(self, ask: Callable[[], object], patience: float = PATIENCE) -> None:
        """`ask` connects and waits for an answer; it raises what says why there is none."""
        self._ask = ask
        self._patience = patience
        self._asking: threading.Thread | None = None
        self._error = ""
        """The last question's outcome; empty after an answer."""
        self._is_known = False
        self._is_lost = False

    def trouble(self) -> str:
        """What is wrong with it, and empty where it answers."""
        end = time.monotonic() + (0 if self._is_lost else self._patience)
        while (trouble := self._outcome(end)) and self._is_known and time.monotonic() < end:
            time.sleep(AGAIN)
        self._is_known |= not trouble
        self._is_lost = bool(trouble)
        return trouble if self._is_known else ""

    def _outcome(self, end: float) -> str:
        """The outcome of one question, of the one before where that has no answer yet."""
        if self._asking is None:
            self._asking = threading.Thread(target=self._run, daemon=True)
            self._asking.start()
        self._asking.join(max(AGAIN, end - time.monotonic()))
        if self._asking.is_alive():
            return "it accepts connections and does not answer"
        self._asking = None
        return self._error

    def _run(self) -> None:
        try:
            self._ask()
            self._error = ""
        except Exception as error:  # noqa: BLE001 - the test says it
            self._error = str(error)


def connect() -> None:
    """Open a connection to libvirt, and close it."""
    import libvirt

    libvirt.registerErrorHandler(lambda _context, _error: None, None)
    libvirt.open(URI).close()
