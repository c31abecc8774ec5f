"""The command line of the daemon, as HTCondor calls it: ``-M 0|1|3|4`` selects a mode.

It is parsed by hand, because importing argparse alone takes longer than everything else up to the greeting.
"""

import os
import sys

from vmgahp import GREETING

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import NoReturn

PROBE, SERVE_IO, SERVE, KILL = 0, 1, 3, 4

INTERRUPTED = 130
"""The exit status after Control-C, as of a shell."""

USAGE = """\
usage: condor_vm-gahp -f [-t] -M 0 vmtype <vmtype>                   probe this machine
       condor_vm-gahp -f [-t] -M 3                                   serve one job (mode 1 is the same)
       condor_vm-gahp -f [-t] -M 4 vmtype <vmtype> match <string>    destroy a leftover VM
  -f  stay in the foreground (always so)      -t  log to standard error
HTCondor starts this program by itself (VM_GAHP_SERVER). Serving needs VMGAHP_VMTYPE and VMGAHP_WORKING_DIR
in the environment and, as root, VMGAHP_USER_UID and VMGAHP_USER_GID. By hand use vmgahp: see vmgahp --help.
"""

_FLAGS = ("foreground", "termlog", "background", "dynamic", "quiet", "http")
_FLAGS_WITH_VALUE = ("config", "local-name", "logfile", "log", "pidfile", "port", "runfor", "sock", "kill")


class _UsageError(Exception):
    pass


class _Arguments:
    def __init__(self, argv: "Sequence[str]") -> None:
        self.mode = -1
        self.to_stderr = self.version = False
        self.vm_type = self.match = self.uuid = ""
        words = iter(argv[1:])
        for word in words:
            if word == "-M":
                mode = next(words, "")
                if not mode.isdigit() or int(mode) not in (PROBE, SERVE_IO, SERVE, KILL):
                    raise _UsageError(f"unknown mode: {mode}")
                self.mode = int(mode)
                break
            self._daemon_core(word, words)
        if self.version:
            return
        if self.mode in (PROBE, KILL):
            for word in words:
                value, places = next(words, ""), {"vmtype": "vm_type", "match": "match", "uuid": "uuid"}
                option = next((option for option in places if word and option.startswith(word)), "")
                if not (option and value):
                    raise _UsageError(f"unknown or empty option: {word}")
                setattr(self, places[option], value)
            if not self.vm_type or (self.mode == KILL and not self.match):
                raise _UsageError("vmtype is missing" if not self.vm_type else "match is missing")
            self.vm_type = self.vm_type.lower()
        elif self.mode < 0:
            raise _UsageError("a mode is missing: -M 0, 1, 3 or 4")

    def _daemon_core(self, word: str, words: "object") -> None:
        """Parse an option that every HTCondor daemon has; an administrator's wrapper may pass any of them."""
        option = word.lstrip("-")
        if not word.startswith("-") or not option:
            raise _UsageError(f"unknown option: {word}")
        if "version".startswith(option):
            self.version = True
        elif any(flag.startswith(option) for flag in _FLAGS):
            self.to_stderr |= "termlog".startswith(option)
        elif any(flag.startswith(option) for flag in _FLAGS_WITH_VALUE):
            if not next(words, ""):  # type: ignore[call-overload]
                raise _UsageError(f"{word} needs a value")
        else:
            raise _UsageError(f"unknown option: {word}")


def daemon(argv: "Sequence[str]", environ: "Mapping[str, str]" = os.environ) -> int:
    """Run the program ``condor_vm-gahp`` and return its exit status."""
    _keep_absolute_places()
    if list(argv[1:]) in (["-h"], ["-help"], ["--help"]):
        sys.stdout.write(USAGE)
        return 0
    try:
        arguments = _Arguments(argv)
    except _UsageError as error:
        _say(f"condor_vm-gahp: {error}\n{USAGE}")
        return 1
    if arguments.version:
        from vmgahp.commands.by_hand import version_line

        sys.stdout.write(version_line() + "\n")
        return 0
    if arguments.mode == PROBE:
        try:
            from vmgahp.daemon import probe

            status = probe.run(arguments.vm_type, environ, to_stderr=arguments.to_stderr)
        except KeyboardInterrupt:
            status = INTERRUPTED
        _end_at_once(status)
    if arguments.mode == KILL:
        from vmgahp.daemon.kill import kill

        return kill(arguments.vm_type, arguments.match, arguments.uuid, environ, to_stderr=arguments.to_stderr)
    return _serve(environ, to_stderr=arguments.to_stderr)


def _serve(environ: "Mapping[str, str]", *, to_stderr: bool) -> int:
    for name in ("VMGAHP_VMTYPE", "VMGAHP_WORKING_DIR"):
        if name not in environ:
            _say(f"condor_vm-gahp: {name} is not set in the environment: condor_starter sets it\n")
            return 1
    if os.getuid() == 0 and not environ.get("VMGAHP_USER_UID"):
        _say("condor_vm-gahp: as root, VMGAHP_USER_UID must name the uid of the job's user\n")
        return 1
    # The client reads the greeting first, so it is sent before the server is imported.
    try:
        os.write(1, GREETING + b"\n")
    except OSError:
        return 0
    from vmgahp.daemon.server import serve

    status = serve(environ["VMGAHP_VMTYPE"], environ["VMGAHP_WORKING_DIR"], environ, to_stderr=to_stderr)
    return _end_at_once(status)  # a thread may still wait for settings on a file system that does not answer


def _end_at_once(status: int) -> "NoReturn":
    """End this process without freeing what it has loaded; call it after all output has been written."""
    import atexit

    atexit._run_exitfuncs()  # kills programs that are still running
    os._exit(status)


def _keep_absolute_places() -> None:
    """Remove empty and relative entries from PATH and LD_LIBRARY_PATH.

    Such an entry means the working directory, which belongs to the job: its files must be neither run nor loaded. The
    dynamic loader has already used the old value for this process itself. The probe reports that, because HTCondor
    starts it in another directory with the same environment.
    """
    for name in ("PATH", "LD_LIBRARY_PATH"):
        if name in os.environ:
            entries = os.environ.pop(name).split(":")
            if absolute := ":".join([entry for entry in entries if entry.startswith("/")]):
                os.environ[name] = absolute


def _say(text: str) -> None:
    try:
        os.write(2, text.encode())
    except OSError:
        pass


def main(argv: "Sequence[str]") -> int:
    """Run the program ``vmgahp`` and return its exit status."""
    _keep_absolute_places()
    os.environ.setdefault("VMGAHP_SIMULATED", "1")  # HTCondor never calls this program
    import signal

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as below nohup
            signal.signal(number, signal.default_int_handler)  # all clean-up is done then
    try:
        from vmgahp.commands import tool

        return tool.run(argv)
    except KeyboardInterrupt:
        return INTERRUPTED
