"""Threads that do not outlive this process, and the fault where none can be started."""

import threading
from collections.abc import Callable

from vmgahp.errors import MachineFault


def start(name: str, run: Callable[..., object], *arguments: object) -> threading.Thread:
    """A thread that runs. Raises `MachineFault` where this machine has none left, as by a limit on processes."""
    thread = threading.Thread(target=run, args=arguments, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise MachineFault(
            f"The machine is out of resources: there is no thread for {name} ({error}).",
            "look at the limits on processes: of HTCondor's user, of its control group, of this machine.",
        ) from error
    return thread
