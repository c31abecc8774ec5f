"""From argv to a mode: the daemon's ``-M 0|1|3|4`` as HTCondor calls it, and the command-line tools.

The daemon's road to the greeting is paved by hand: argparse alone costs more than all that is needed here.
"""

import os
import sys

from vmgahp import GREETING

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence
    from typing import NoReturn

PROBE, SERVE_IO, SERVE, KILL = 0, 1, 3, 4

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
    """What the daemon was told on its command line."""

    __slots__ = ("local_name", "match", "mode", "to_stderr", "uuid", "version", "vm_type")

    def __init__(self, argv: "Sequence[str]") -> None:
        self.mode = -1
        self.to_stderr = self.version = False
        self.vm_type = self.match = self.uuid = ""
        words = iter(argv[1:])
        for word in words:
            if word == "-M":
                self._mode(next(words, ""))
                break
            self._daemon_core(word, words)
        if self.version:
            return
        if self.mode in (PROBE, KILL):
            for word in words:
                value = next(words, "")
                for option, name in (("vmtype", "vm_type"), ("match", "match"), ("uuid", "uuid")):
                    if word and option.startswith(word) and value:
                        setattr(self, name, value)
                        break
                else:
                    raise _UsageError(f"unknown or empty option: {word}")
            if not self.vm_type or (self.mode == KILL and not self.match):
                raise _UsageError("vmtype is missing" if not self.vm_type else "match is missing")
            self.vm_type = self.vm_type.lower()
        elif self.mode not in (SERVE_IO, SERVE):
            raise _UsageError("a mode is missing: -M 0, 1, 3 or 4")

    def _mode(self, word: str) -> None:
        if not word.isdigit() or int(word) not in (PROBE, SERVE_IO, SERVE, KILL):
            raise _UsageError(f"unknown mode: {word}")
        self.mode = int(word)

    def _daemon_core(self, word: str, words: "object") -> None:
        """Options of every HTCondor daemon, any of which an administrator may have put in a wrapper."""
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
    """The program ``condor_vm-gahp``; returns the exit status."""
    _keep_absolute_places()
    try:
        arguments = _Arguments(argv)
    except _UsageError as error:
        _say(f"condor_vm-gahp: {error}\n{USAGE}")
        return 1
    if arguments.version:
        return _version()
    if arguments.mode == PROBE:
        from vmgahp.daemon import probe

        _end_at_once(probe.run(arguments.vm_type, environ, to_stderr=arguments.to_stderr))
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
    # The greeting goes out before the server is even imported: the client reads it first of all.
    try:
        os.write(1, GREETING + b"\n")
    except OSError:
        return 0
    from vmgahp.daemon.server import serve

    return serve(environ["VMGAHP_VMTYPE"], environ["VMGAHP_WORKING_DIR"], environ, to_stderr=to_stderr)


def _end_at_once(status: int) -> "NoReturn":
    """End this process without taking to pieces what was loaded; what was to be printed has been."""
    import atexit

    atexit._run_exitfuncs()  # programs that still run are killed
    os._exit(status)


def _keep_absolute_places() -> None:
    """No program or library is looked for in the working directory: it is a job's, and its files a stranger's.

    An empty or relative entry of these variables stands for it. What the loader took for this process itself is
    for the probe to say, which HTCondor starts elsewhere with the same environment.
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


# fmt: off
COMMANDS = (
    ("serve", "vmgahp.cli:serve_arguments", "speak the GAHP protocol on standard input and output"),
    ("probe", "vmgahp.cli:probe_arguments", "print what this machine would advertise, or why it would not"),
    ("doctor", "vmgahp.commands.doctor:add_arguments",
        "say why condor_status -vm is empty, or a VM job stays idle, on this machine"),
    ("config", "vmgahp.commands.config:add_arguments",
        "print the settings as they count here, and where each comes from"),
    ("kill", "vmgahp.cli:kill_arguments", "destroy a leftover VM by its name"),
    ("run", "vmgahp.commands.run:add_arguments",
        "run a program in a virtual machine as a job: its files, its output and its exit code"),
    ("submit", "vmgahp.commands.submit:add_arguments",
        "write a submit file for a VM that exists: libvirt XML, OVF, .vmx, a Vagrant box, a disk"),
    ("image", "vmgahp.commands.image:add_arguments", "keep the images that jobs name in the catalog, and make some"),
    ("report", "vmgahp.commands.report:add_arguments",
        "make a page of what a VM used and what happened to it"),
    ("top", "vmgahp.commands.top:add_arguments", "show the VMs of this machine, live"),
    ("ssh", "vmgahp.commands.reach:add_ssh", "get into the guest of a job by ssh"),
    ("view", "vmgahp.commands.reach:add_view", "show the display of a job's guest"),
    ("attach", "vmgahp.commands.reach:add_attach", "follow the serial console of a job's guest"),
    ("console", "vmgahp.commands.console:add_arguments",
        "talk to a daemon by hand: job ads, requests, results in words"),
    ("record", "vmgahp.commands.record:add_arguments", "run a server and write its conversation into a file"),
    ("replay", "vmgahp.commands.replay:add_arguments",
        "play a recorded conversation to a server, and show the differences"),
    ("version", "vmgahp.cli:version_arguments", "print the version"),
)
# fmt: on
"""Word, ``module:function`` that adds the arguments and what to run, help."""


def main(argv: "Sequence[str]") -> int:
    """The program ``vmgahp``; returns the exit status."""
    _keep_absolute_places()
    os.environ.setdefault("VMGAHP_SIMULATED", "1")  # no HTCondor calls this one
    options = main_parser(argv[1] if len(argv) > 1 else "-").parse_args(argv[1:])
    try:
        status: int = options.run(options)
    except KeyboardInterrupt:
        return 130
    return status


def main_parser(chosen: str = "") -> "argparse.ArgumentParser":
    """The command line of ``vmgahp``, with the arguments of the chosen command, or of all for the manual page."""
    import argparse
    from importlib import import_module

    parser = argparse.ArgumentParser(
        prog="vmgahp",
        description="Virtual machines as HTCondor jobs. HTCondor itself starts condor_vm-gahp (VM_GAHP_SERVER); "
        "this is the command-line tool beside it.",
    )
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    for word, place, text in COMMANDS:
        command = commands.add_parser(word, help=text)
        if chosen in (word, ""):
            module, _, function = place.partition(":")
            getattr(import_module(module), function)(command)
    return parser


def serve_arguments(command: "argparse.ArgumentParser") -> None:
    """The arguments of ``vmgahp serve``."""
    command.description = (
        "Serve the GAHP protocol on standard input and output, as condor_starter gets it. "
        "Without root the VMs run under your own libvirt (qemu:///session)."
    )
    _add_type(command)
    command.add_argument("--dir", default=".", help="the scratch directory of the job (default: here)")
    command.set_defaults(run=_serve_by_hand)


def probe_arguments(command: "argparse.ArgumentParser") -> None:
    """The arguments of ``vmgahp probe``."""
    command.description = (
        "Run the probe of the startd and print the attributes that it would publish. The reason "
        "why a machine is not VM-capable goes to standard error, with exit status 1."
    )
    _add_type(command)
    command.add_argument(
        "--json", action="store_true", help="print everything that was looked at, with the reasons, as JSON"
    )
    command.set_defaults(run=_probe_by_hand)


def kill_arguments(command: "argparse.ArgumentParser") -> None:
    """The arguments of ``vmgahp kill``."""
    command.description = "Destroy the VM of a job that is gone. A VM that does not exist is a success."
    _add_type(command)
    command.add_argument("name", help="<User with @ as _>_<ClusterId>.<ProcId>, such as alice_example.org_12.0")
    command.set_defaults(run=_kill_by_hand)


def version_arguments(command: "argparse.ArgumentParser") -> None:
    """``vmgahp version`` has none."""
    command.set_defaults(run=lambda _options: _version())


def _add_type(command: "argparse.ArgumentParser") -> None:
    command.add_argument(
        "--type", default="kvm", metavar="VM_TYPE", help="kvm or qemu, or the type of a driver (default: kvm)"
    )


def _serve_by_hand(options: "argparse.Namespace") -> int:
    environ = dict(os.environ)
    environ["VMGAHP_VMTYPE"] = environ["_CONDOR_VM_TYPE"] = options.type
    environ["VMGAHP_WORKING_DIR"] = os.path.abspath(options.dir)
    return _serve(environ, to_stderr=True)


def _probe_by_hand(options: "argparse.Namespace") -> int:
    from vmgahp.daemon import probe

    return probe.run(options.type.lower(), _with_user(), to_stderr=True, as_json=options.json)


def _kill_by_hand(options: "argparse.Namespace") -> int:
    from vmgahp.daemon.kill import kill

    return kill(options.type.lower(), options.name, "", _with_user(), to_stderr=True)


def _with_user() -> dict[str, str]:
    """The environment, with a user for the modes that run no job: as root somebody must be named."""
    environ = dict(os.environ)
    if os.getuid() == 0:
        environ.setdefault("VMGAHP_USER_UID", "65534")
    return environ


def _version() -> int:
    from vmgahp import __version__

    sys.stdout.write(f"vmgahp {__version__} (VM GAHP protocol 0.0.1)\n")
    return 0
