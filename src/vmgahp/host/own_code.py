"""The code that a server was started with, whatever is installed meanwhile.

A VM runs for weeks, and upgrades come. A server loads much of its code when it is first needed, and its helpers are
interpreters of their own: what they would find then is of another version, or gone. So a wheel has all of the package
once more in `ARCHIVE`, which a server holds open from its start. An upgrade puts another file in its place, a removal
none, and the old one stays for as long as it is open. From then on the server and its helpers load what was in it,
unpacked once for all servers that hold the same. A clone has no archive, and its servers load what is there.
"""

import os
import sys
from _thread import RLock

import vmgahp

ARCHIVE = "_code.zip"
"""Beside the package's modules. ``packaging/hatch_build.py`` writes it."""

SECONDS = 60.0
"""To unpack it."""

_package = os.path.dirname(vmgahp.__file__)
_held = -1
_was: "os.stat_result | None" = None
_place = ""
"""Of the code that was unpacked: a helper that runs from there starts its own from there."""
if sys.flags.isolated and sys.path[0] == os.path.dirname(_package):
    _place = sys.path[0]
_lock = RLock()
_unpacks = False


def interpreter() -> tuple[str, ...]:
    """What runs a module of this package, whose name is the next word, in a process of its own."""
    look()
    return (sys.executable, "-I", _place or "-m")


def hold() -> None:
    """Hold on to the code as it is now. Raises nothing."""
    global _held, _was
    try:
        _held = os.open(f"{_package}/{ARCHIVE}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return
    # What unpacks it, which nobody can look for then.
    from vmgahp.host import run, runtime_dir  # noqa: F401

    _was = os.fstat(_held)
    sys.meta_path.insert(0, _Look)


class _Look:
    """Looks before each module that is loaded, and finds none."""

    @staticmethod
    def find_spec(name: str, _path: object = None, _target: object = None) -> None:
        if name.startswith("vmgahp."):
            look()


def look() -> None:
    """See whether another version is installed by now, and if so load from what is held. Raises nothing."""
    global _held, _unpacks
    if _was is None or _held < 0:
        return
    try:
        now = os.stat(f"{_package}/{ARCHIVE}")
    except OSError:
        pass  # it was removed
    else:
        if (now.st_dev, now.st_ino) == (_was.st_dev, _was.st_ino):
            return
    with _lock:
        if _held < 0 or _unpacks:  # what is loaded to unpack it is looked for no second time; other threads wait
            return
        _unpacks = True
        try:
            _load_from(_unpacked(_held, _was))
        except OSError:
            pass  # there may be room the next time
        else:
            os.close(_held)
            _held = -1
        finally:
            _unpacks = False


def _unpacked(held: int, was: os.stat_result) -> str:
    """A directory with what is in the archive. Raises OSError."""
    from shutil import rmtree

    from vmgahp.host import runtime_dir
    from vmgahp.host.run import FIRST_PASSED, run

    place = runtime_dir.shared(f"code-{vmgahp.__version__}-{was.st_size}-{was.st_mtime_ns}")
    if runtime_dir.is_private(place):
        return place
    room = f"{place}.{os.getpid()}-{runtime_dir.owner()}"  # a server and its helpers may do it at once
    os.mkdir(room, 0o700)
    unzip = (sys.executable, "-I", "-m", "zipfile", "-e", f"/proc/self/fd/{FIRST_PASSED}", room)
    done = run(unzip, deadline=SECONDS, pass_fds=[held], umask=0o022)
    if done.status != 0:
        rmtree(room, ignore_errors=True)
        raise OSError(f"{ARCHIVE} cannot be unpacked")
    os.chmod(room, 0o755)  # noqa: S103 - helpers of the job's user read it
    try:
        os.rename(room, place)
    except OSError:
        if not runtime_dir.is_private(place):  # somebody else has made what has its name
            return room
        rmtree(room, ignore_errors=True)  # another process was faster
    return place


def _load_from(place: str) -> None:
    global _package, _place
    _place = place
    before, _package = _package, f"{place}/vmgahp"
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "vmgahp" and hasattr(module, "__path__"):
            # The very list by which modules below it are found.
            module.__path__[:] = [_package + path.removeprefix(before) for path in module.__path__]
            module.__file__ = f"{module.__path__[0]}/__init__.py"
