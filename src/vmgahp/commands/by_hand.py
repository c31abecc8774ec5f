"""``vmgahp serve``, ``probe``, ``kill`` and ``version``: the modes of the daemon, by hand."""

import argparse
import atexit
import os
import select
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

import vmgahp
from vmgahp import GREETING, PROTOCOL, config, errors
from vmgahp.commands.arguments import FINDINGS, UsageError, add_json, add_type, print_json, tell
from vmgahp.job.engine import NOBODY


def serve_arguments(command: argparse.ArgumentParser) -> None:
    """Serve the GAHP protocol on standard input and output, as condor_starter gets it. Without root the VMs run under
    your own libvirt (qemu:///session)."""
    add_type(command)
    command.add_argument("--dir", default=".", metavar="DIR", help="the scratch directory of the job (default: here)")
    command.set_defaults(run=_serve)
    tell(
        command,
        examples=[("vmgahp serve --dir /tmp/scratch", "serve one VM, whose files are in that directory")],
        statuses={
            0: "QUIT, the end of its input, or a signal such as Control-C ended it. After a guest has ended QUIT "
            "returns its exit code.",
            130: "",
        },
    )


def probe_arguments(command: argparse.ArgumentParser) -> None:
    """Run the probe of the startd and print the attributes that it would publish. The reason why a machine is not
    VM-capable goes to standard error."""
    add_type(command, "")
    add_json(command, "print everything that was looked at, with the reasons, as one JSON object")
    command.set_defaults(run=_probe)
    tell(
        command,
        examples=[
            ("vmgahp probe", "what this machine would advertise for VMs of its type, VM_TYPE"),
            ("vmgahp probe --type xen --json", "the same of Xen, with each reason, for a program"),
        ],
        statuses={0: "VMs are possible here.", 1: "None is; the reason is on standard error."},
        keys={
            "vm_type": "the type",
            "seconds": "how long the probe took",
            "capable": "whether VMs of this type are possible here",
            "attributes": "each attribute that the startd would publish, and its value",
            **FINDINGS,
        },
    )


def kill_arguments(command: argparse.ArgumentParser) -> None:
    """Destroy the VM of a job that is gone. A VM that does not exist is a success."""
    add_type(command, "")
    text = "the VM's name, <User with @ as _>_<ClusterId>.<ProcId>, such as alice_example.org_12.0; for the types "
    text += "vmrun, vmware, script and any the job's scratch directory"
    command.add_argument("name", metavar="NAME", help=text)
    command.set_defaults(run=_kill)
    tell(command, examples=[("vmgahp kill alice_example.org_12.0", "destroy what is left of the VM of that job")])


def version_arguments(command: argparse.ArgumentParser) -> None:
    """Print the version. vmgahp --version does the same."""
    add_json(command)
    command.set_defaults(run=_version)
    tell(
        command,
        keys={
            "version": "the version of this package",
            "protocol": "that of the VM GAHP protocol",
            "python": "that of the Python it runs with",
            "location": "the directory of its modules",
        },
    )


def version_line() -> str:
    """Return the version, as a line for people."""
    return f"vmgahp {vmgahp.__version__} (VM GAHP protocol {PROTOCOL})"


def _serve(options: argparse.Namespace) -> int:
    from vmgahp.daemon.server import serve

    environ = dict(os.environ)
    if os.getuid() == 0 and not environ.get("VMGAHP_USER_UID"):
        raise UsageError("as root, VMGAHP_USER_UID in the environment must name the uid of the job's user.")
    vm_type, directory = options.type, os.path.abspath(options.dir)
    environ["VMGAHP_VMTYPE"] = environ["_CONDOR_VM_TYPE"] = vm_type
    environ["VMGAHP_WORKING_DIR"] = directory
    os.write(1, GREETING + b"\n")
    return serve(vm_type, directory, environ, to_stderr=True)


def _probe(options: argparse.Namespace) -> int:
    from vmgahp.daemon import probe

    return apart(lambda: probe.run(_type(options), _environment(), to_stderr=True, as_json=options.json))


def _kill(options: argparse.Namespace) -> int:
    from vmgahp.daemon.kill import kill

    if not options.name.strip():
        raise UsageError("the name is empty, as of a variable that is not set: nothing was looked for.")
    return kill(_type(options), options.name, "", _environment(), to_stderr=True)


def _environment() -> dict[str, str]:
    """Return the environment with a user for commands that run no job: as root the variable must be set."""
    environ = dict(os.environ)
    if os.getuid() == 0:
        environ.setdefault("VMGAHP_USER_UID", str(NOBODY))
    return environ


def _type(options: argparse.Namespace) -> str:
    """Return the VM type of the options, or else that of the machine, which is kvm by default."""
    found = options.type
    with suppress(errors.Fault):  # what is asked for reports it
        found = found or config.load(os.environ).string("VM_TYPE")
    return str(found or "kvm").lower()


def _version(options: argparse.Namespace) -> int:
    if not options.json:
        sys.stdout.write(version_line() + "\n")
        return 0
    import platform

    about = {"version": vmgahp.__version__, "protocol": PROTOCOL, "python": platform.python_version()}
    print_json(about | {"location": os.path.dirname(vmgahp.__file__)})
    return 0


def apart(work: Callable[[], int]) -> int:
    """Run `work`, which prints and returns the exit status, in a child process; wait only for its result.

    A thread that waits for a FUSE server that has read the request and does not answer cannot be killed, and its
    process neither exits nor closes its output. If the caller has other threads, or another standard output than the
    process, the work is done in this process.
    """
    if threading.active_count() > 1 or sys.stdout is not sys.__stdout__:
        return work()
    _flush()
    hearing, telling = os.pipe()
    child = os.fork()
    if not child:
        os.close(hearing)
        status = work()  # its exceptions reach the caller, as in this process
        _flush()
        atexit._run_exitfuncs()  # kills programs that are still running
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nowhere, stream)
        os.write(telling, bytes([status]))
        os._exit(status)
    os.close(telling)
    told = os.read(hearing, 1)
    os.close(hearing)
    if told:
        with open(os.pidfd_open(child), "rb") as ended:
            if select.select([ended], [], [], 1.0)[0]:
                os.waitpid(child, 0)
        return told[0]
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return code if code >= 0 else 128 - code


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
