"""The program that a job's guest runs (``VMPARAM_vm_Run``), as the job describes it.

The guest finds it, its settings and inputs on a drive (`vmgahp.drivers.libvirt.program.drive`), and reports by a port.
"""

import os
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import vmgahp
from vmgahp import errors
from vmgahp.config import Settings
from vmgahp.errors import JobFault, MachineFault
from vmgahp.job.ad import JobAd
from vmgahp.job.attributes import OPTION_PREFIX, Options
from vmgahp.job.disks import DiskRequest, made_drive
from vmgahp.job.scratch_files import ON_THEIR_OWN, is_reserved
from vmgahp.text import has_control, shown

# The environment that a job asks for, in both forms in which HTCondor writes it into an ad.
#
# (``Env::MergeFrom`` in HTCondor's ``src/condor_utils/env.cpp``.) ``Environment`` has ``NAME=value`` separated by
# blanks; single quotes protect blanks, and two quotes inside of them are one. ``Env``, of old schedds, has no quotes,
# and is separated by semicolons, or by ``EnvDelim``. If an ad has both, the first counts.

ATTRIBUTE, OLD, OLD_DELIMITER = "Environment", "Env", "EnvDelim"

_BLANKS = " \t\n\r"
_PIECE = re.compile(r"[ \t\n\r]++|[^ \t\n\r']++|'[^']*+(?:''[^']*+)*+'|'")
"""A pattern for blanks, plain text, quoted text, and an unclosed quote."""


def read_environment(ad: JobAd) -> dict[str, str]:
    """Return the values by name; if a name occurs twice, the last one counts. Raises `JobFault`."""
    said = ad.string(ATTRIBUTE)
    if said is not None:
        name, entries = ATTRIBUTE, _split(said)
    else:
        name, said = OLD, ad.string(OLD) or ""
        entries = [entry.lstrip() for entry in said.split((ad.string(OLD_DELIMITER) or ";")[0])]
    pairs = [entry.partition("=") for entry in entries or () if entry]
    if entries is None or not all(variable and equals for variable, equals, _ in pairs):
        problem = f"{name} = {shown(said)}: that is not of the form NAME=value NAME='value with blanks'."
        raise JobFault(errors.MISMATCHED, problem, "correct environment in the submit file.")
    return {variable: value for variable, _, value in pairs}


def _split(text: str) -> list[str] | None:
    """Split the newer form into its entries; return None if a quote is not closed."""
    found: list[str] = []
    is_open = False
    for piece in _PIECE.findall(text):
        if piece == "'":
            return None
        if piece[0] in _BLANKS:
            is_open = False
            continue
        if not is_open:
            found.append("")
        is_open = True
        found[-1] += piece[1:-1].replace("''", "'") if piece[0] == "'" else piece
    return found


CLOUD_INIT, READY = "cloud-init", "ready"
BOOTS = (CLOUD_INIT, READY)

DRIVE_FILE = "vm_run.tar"
"""The drive with the program in the scratch directory; it is made from the files there, and not transferred back."""
RECORD = "vm_run.json"
"""The list of the files that came with the job, in the same directory. It is transferred with a checkpoint."""

STDOUT, STDERR = "vm_stdout", "vm_stderr"
"""The files of the program's output and errors in the scratch directory, if the job names none."""
NOWHERE = "/dev/null"

LONGEST = 100_000
"""The most bytes of the command line, and of the environment: a Linux guest accepts 131072 for one argument."""
LONGEST_TIME = 10**8
"""The most seconds: three years."""
MOST_NAMES = 1000

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


class Run(NamedTuple):
    """The program for the guest, and how it is run."""

    command: str
    inputs: tuple[str, ...] | None
    """The names in the scratch directory; None for all that came with the job."""
    outputs: tuple[str, ...] | None
    """The names and patterns in the working directory; None for all new and changed files."""
    as_root: bool
    time_limit: int
    """The seconds that it may run; 0 for no limit."""
    boot_timeout: int
    """The seconds that the guest may take until it is ready for the program, and as many until that has started."""
    boot: str
    """The part of the guest that starts it: cloud-init, or an agent of the image."""
    environment: tuple[tuple[str, str], ...]
    stdout: str
    """The file in the scratch directory for the program's output; it may be the same as `stderr`."""
    stderr: str
    job: str
    """The job's name in the pool: the same at every start of the job, and unique."""
    when: int
    """The timestamp of everything on the drive, in seconds since 1970: the same at every start of the job."""
    beside: tuple[str, ...] = ()
    """The files that HTCondor writes where the outputs go: no output can have such a name."""
    waits: bool = False
    """True for a guest of no job, which is saved when it has booted (`vmgahp.drivers.libvirt.program.warm`)."""


def wanted(options: Options, ad: JobAd, settings: Settings) -> Run:
    """Read and check the job's options about the program. Raises `JobFault`."""
    command = options.string("Run")
    if not command:
        raise options.refused("Run", "it names no program", 'write +VMPARAM_vm_Run = "python3 fit.py".')
    if len(command.encode(errors="replace")) > LONGEST or "\0" in command:
        problem = f"it is longer than {LONGEST} bytes, or no text"
        raise options.refused("Run", problem, "put it into a script, and transfer that.")
    environment = read_environment(ad)
    for name in environment:
        if not _NAME.fullmatch(name):
            problem = f"the guest's shell takes no variable of the name {name[:100]!a} (environment, getenv)"
            hint = "leave it out of environment; getenv can name the variables that are wanted."
            raise options.refused("Run", problem, hint)
    if sum(len(name) + len(value.encode(errors="replace")) for name, value in environment.items()) > LONGEST:
        raise options.refused("Run", f"the environment has more than {LONGEST} bytes", "leave out what is not needed.")
    boot = (options.string("Run_Boot") or CLOUD_INIT).lower()
    if boot not in BOOTS:
        raise options.refused("Run_Boot", "there is no such way to begin", f"write one of {', '.join(BOOTS)}.")
    stdout, stderr = _file(options, ad, "Out", STDOUT), _file(options, ad, "Err", STDERR)
    return Run(
        command=command,
        inputs=_inputs(options),
        outputs=_names(options, "Run_Outputs"),
        as_root=options.boolean("Run_As_Root"),
        time_limit=options.integer("Run_Time_Limit", LONGEST_TIME),
        boot_timeout=options.integer("Run_Boot_Timeout", LONGEST_TIME) or settings.integer("VM_RUN_BOOT_TIMEOUT"),
        boot=boot,
        environment=tuple(sorted(environment.items())),
        stdout=stdout,
        stderr=stderr,
        beside=(stdout, stderr, (ad.string("UserLog") or "").removeprefix(f"{ad.string('OrigIwd')}/")),
        job=ad.string("GlobalJobId") or ad.vm_name(),
        when=max(ad.integer("QDate") or 0, 0),
    )


def drive(disks: Sequence[DiskRequest]) -> DiskRequest:
    """Return a request for the drive with the program, after the job's `disks`. Raises `JobFault`."""
    for disk in disks:
        if is_reserved(disk.file) and not disk.made:
            problem = f"VMPARAM_vm_Disk: {disk.file[:100]!a} is a name of HTCondor's or of the server's."
            raise JobFault(errors.INVALID_DISK_PARAM, problem, "give the image another name.")
    return made_drive(disks, DRIVE_FILE, OPTION_PREFIX + "Run")


def guest_file(name: str) -> bytes:
    """Read one of the files that run in guests. Raises `MachineFault`."""
    path = os.path.join(os.path.dirname(vmgahp.__file__), "guest", name)
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        problem = f"{path}, which guests are given, cannot be read: {error.strerror}."
        raise MachineFault(problem, "install vmgahp anew.") from error


def _names(options: Options, option: str) -> tuple[str, ...] | None:
    """Split an option into plain relative names, separated by commas; return None if it is unset."""
    if not options.has(option):
        return None
    names = tuple(dict.fromkeys(name.strip().rstrip("/") for name in options.string(option).split(",") if name.strip()))
    for name in names:
        if has_control(name) or any(part in ("", ".", "..") for part in name.split("/")):
            hint = "write names such as results/fit.csv, with commas between them, without a leading slash, . and .. ."
            raise options.refused(option, f"{name[:100]!a} is not a plain relative name", hint)
    if len(names) > MOST_NAMES:
        raise options.refused(option, f"these are {len(names)} names", f"name {MOST_NAMES} at most, or a directory.")
    return names


def _inputs(options: Options) -> tuple[str, ...] | None:
    """Read the names of the inputs: none may lie below another one, with which it would be packed again."""
    names = _names(options, "Run_Inputs")
    for above, name in pairwise(sorted(f"{name}/" for name in names or ())):
        if name.startswith(above):
            problem = f"{name[:-1][:100]!a} lies below {above[:-1][:100]!a}, and would come twice"
            raise options.refused("Run_Inputs", problem, "leave it out: a directory comes with all that is in it.")
    return names


def _file(options: Options, ad: JobAd, attribute: str, default: str) -> str:
    """Return the name of the file in the scratch directory for the program's output or errors."""
    name = ad.string(attribute) or NOWHERE
    if name == NOWHERE:
        return default
    ours = is_reserved(name) and name not in (STDOUT, STDERR, *ON_THEIR_OWN)
    if ours or "/" in name or name in (".", "..") or has_control(name):
        hint = f'write +{attribute} = "fit.txt", +Stream{attribute} = false and +Transfer{attribute} = true.'
        raise options.refused("Run", f"what the program prints cannot be written to {attribute} = {name[:100]!a}", hint)
    return name
