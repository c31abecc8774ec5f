"""The code that a server was started with, kept across upgrades of the package.

A VM may run for weeks, during which the package is upgraded. A server loads much of its code when it is first needed,
and its helpers are new interpreters: they would find another version, or none. So a wheel has a copy of the package in
`ARCHIVE`, which a server holds open from its start. An upgrade replaces that file, and a removal deletes it, but the
old one exists for as long as it is open. From then on the server and its helpers load its content, which is unpacked
once for all servers that hold the same. A clone has no archive, and its servers load the current files.
"""

import os
import sys
from _thread import RLock

import vmgahp

ARCHIVE = "_code.zip"
"""The archive's name, in the directory of the package's modules. ``packaging/hatch_build.py`` writes it."""

SECONDS = 60.0
"""The timeout for unpacking it, in seconds."""

_package = os.path.dirname(vmgahp.__file__)
_held = -1
_was: "os.stat_result | None" = None
_place = ""
"""The directory of the unpacked code, which a helper that runs from it passes on to its own helpers."""
if sys.flags.isolated and sys.path[0] == os.path.dirname(_package):
    _place = sys.path[0]
_lock = RLock()
_unpacks = False


def interpreter() -> tuple[str, ...]:
    """Return the command that runs a module of this package in a new process; the module's name is the next word."""
    look()
    return (sys.executable, "-I", _place or "-m")


def hold() -> None:
    """Keep the present code available. Raises nothing."""
    global _held, _was
    try:
        _held = os.open(f"{_package}/{ARCHIVE}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return
    # The modules that unpack it, which cannot be found later.
    from vmgahp.host import run, runtime_dir  # noqa: F401

    _was = os.fstat(_held)
    sys.meta_path.insert(0, _Look)


class _Look:
    """An import hook that calls `look` before each module of ours, and finds no module itself."""

    @staticmethod
    def find_spec(name: str, _path: object = None, _target: object = None) -> None:
        if name.startswith("vmgahp."):
            look()


def look() -> None:
    """Load from the archive if another version is installed by now. Raises nothing."""
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
        if _held < 0 or _unpacks:  # the imports of the unpacking call this again; other threads wait
            return
        _unpacks = True
        try:
            _load_from(_unpacked(_held, _was))
        except OSError:
            pass  # retried at the next import: there may be room then
        else:
            os.close(_held)
            _held = -1
        finally:
            _unpacks = False


def _unpacked(held: int, was: os.stat_result) -> str:
    """Unpack the archive unless it is done, and return the directory. Raises OSError."""
    from shutil import rmtree

    from vmgahp.host import runtime_dir
    from vmgahp.host.run import FIRST_PASSED, run

    place = runtime_dir.shared(f"code-{vmgahp.__version__}-{was.st_size}-{was.st_mtime_ns}")
    if runtime_dir.is_private(place):
        return place
    room = f"{place}.{os.getpid()}-{runtime_dir.owner()}"  # a server and its helpers may unpack at the same time
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
        if not runtime_dir.is_private(place):  # another user has taken the name
            return room
        rmtree(room, ignore_errors=True)  # another process was faster
    return place


def _load_from(place: str) -> None:
    global _package, _place
    _place = place
    before, _package = _package, f"{place}/vmgahp"
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "vmgahp" and hasattr(module, "__path__"):
            # Change the list in place: imports below the package use this object.
            module.__path__[:] = [_package + path.removeprefix(before) for path in module.__path__]
            module.__file__ = f"{module.__path__[0]}/__init__.py"
