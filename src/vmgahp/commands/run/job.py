"""The job of a program: the command line converted to a `Guest` for the writer of submit files."""

import argparse
import os
import re
from collections.abc import Iterator

from vmgahp.commands.files import open_regular
from vmgahp.commands.run import inputs, words
from vmgahp.commands.submit import disk
from vmgahp.commands.submit.lines import attribute, command
from vmgahp.commands.submit.machine import Guest, simple_name
from vmgahp.commands.submit.submit_file import PREFIX
from vmgahp.commands.submit.summary import SubmitError, Summary
from vmgahp.images import CATALOG
from vmgahp.images.formats import HEADER, looks_like, not_a_disk

HOME = "vm_outputs/"
"""The files that are transferred back: everything that the server puts there. A missing name would hold the job."""

MEMORY_MIB = 1024
"""The guest's memory if neither the command line nor the catalog requires more."""

SLACK_MIB = 64
"""The MiB beside the disk and the inputs: consoles, the program's output, the tables of an image."""

MOST_STARTS = 3
"""The maximum number of starts of a job whose daemon seems to have been killed; without Chirp its ad cannot tell that
from a signal to the program."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


def machine(options: argparse.Namespace, summary: Summary) -> Guest:
    """Make the VM with the program in it. Raises `SubmitError`."""
    _require_image(options.image)
    said, options.file = options.memory, [options.image]
    made = disk.machine(options, summary)
    if not said:
        options.memory = max(options.memory, MEMORY_MIB)
        summary.advise(f"The guest has {options.memory} MiB of memory; --memory says otherwise.")
    [root] = made.disks
    if root.format == "iso":
        raise SubmitError(f"--image {options.image}: it is a CD-ROM.", "name the image of a disk.")
    made.name = simple_name(options.name or _called(options), "run")
    names = {root.name or os.path.basename(root.path)} - {""}
    made.inputs = list(inputs.listed(options, names, summary))
    made.lines = [attribute(f"{PREFIX}Run", _line(options), macros=options.macros)]
    if options.output is not None:
        made.lines.append(attribute(f"{PREFIX}Run_Outputs", _outputs(options), macros=options.macros))
    if options.as_root:
        made.options["Run_As_Root"] = True
    if options.time_limit:
        made.options["Run_Time_Limit"] = options.time_limit
    if options.boot_timeout:
        made.options["Run_Boot_Timeout"] = options.boot_timeout
    if options.boot != "cloud-init":
        made.options["Run_Boot"] = options.boot
    if options.disk:
        made.options["Disk_Size"] = options.disk
        made.lines.append(command("request_disk", f"{_room(options)}MB"))
    if options.user_data:
        _add_user_data(options, made, names)
    if plain := [pair for pair in _variables(options) if words.is_for_environment(pair[1])]:
        made.lines.append(command("environment", words.environment(plain), macros=options.macros))
    made.lines += _ways_home(made, options)
    made.number = options.queue
    return made


def _require_image(image: str) -> None:
    """Make sure that it is an image of the machines, or a file that is a disk. Raises `SubmitError`."""
    if "://" in image or image.lower().startswith(f"{CATALOG}:"):
        return
    try:
        with open_regular(image) as file:
            header = file.read(HEADER)
    except OSError as error:
        problem = f"--image {image!a} cannot be opened ({error.strerror or error})."
        raise SubmitError(problem, f"name a file that is here, {CATALOG}:NAME of the machines, or a URL.") from error
    if not header or (not_a_disk(header) == "a text" and not looks_like(header)):
        problem = f"--image {image!a} is no disk: it is empty, or a text."
        raise SubmitError(problem, "name the image of a disk; the program comes after --.")


def _ways_home(made: Guest, options: argparse.Namespace) -> Iterator[str]:
    """Yield the lines about the output of the job, and when it is transferred."""
    if options.queue > 1:
        yield command("initialdir", f"{made.name}.$(Process)", macros=True)
    # condor_submit accepts no output and error for a VM; the attributes have the same effect.
    for name, file in (("Out", "out"), ("Err", "err")):
        yield attribute(name, f"{made.name}.{file}")
        yield attribute(f"Stream{name}", False)
        yield attribute(f"Transfer{name}", True)
    yield command("transfer_output_files", HOME)
    if options.checkpoint:
        yield command("vm_checkpoint", "true")
        yield command("when_to_transfer_output", "ON_EXIT_OR_EVICT")
    if options.retries:
        yield command("max_retries", str(options.retries))
        yield command("on_exit_remove", "False")  # except for the retries that max_retries adds
    else:
        # A program that was ended by a signal is done; a killed daemon is run again, a limited number of times.
        over = f"ExitBySignal == False || ChirpVMExitSignal isnt undefined || NumJobStarts >= {MOST_STARTS}"
        yield command("on_exit_remove", over)
    if options.queue > 1:
        yield command("log", os.path.abspath(f"{made.name}.log"))


def _room(options: argparse.Namespace) -> int:
    """Compute the MiB of the scratch directory: the disk, and the inputs twice, as files and on the guest's drive."""
    disk_mib = int(options.disk[:-1]) * {"M": 1, "G": 1024, "T": 1024**2}[options.disk[-1]]
    files = (
        os.path.join(directory, name)
        for path in options.input
        for directory, _, names in [*os.walk(path), ("", [], [path])]
        for name in names
    )
    return disk_mib + (2 * sum(os.path.getsize(file) for file in files if os.path.isfile(file)) >> 20) + SLACK_MIB


def _line(options: argparse.Namespace) -> str:
    others = [pair for pair in _variables(options) if not words.is_for_environment(pair[1])]
    return words.shell_line(options.words, others, macros=options.macros)


def _called(options: argparse.Namespace) -> str:
    """Choose the job's name: a word that is an input, such as a script, or else the program."""
    names = {os.path.basename(path.rstrip("/")) for path in options.input}
    program: str = options.words[0]
    if not program:
        raise SubmitError("behind -- there is an empty word in the place of a program.", "name one, such as -- date.")
    word = next((word for word in options.words if os.path.basename(word) in names), program)
    return os.path.splitext(os.path.basename(word.rstrip("/")))[0]


def _variables(options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    for text in options.env:
        name, equals, value = text.partition("=")
        if not _NAME.fullmatch(name):
            raise SubmitError(f"--env {text!a}: {name!a} is no name of a variable.", "write NAME=VALUE.")
        if not equals and name not in os.environ:
            raise SubmitError(f"--env {name}: there is no such variable here.", f"write --env {name}=VALUE.")
        yield name, value if equals else os.environ[name]


def _outputs(options: argparse.Namespace) -> str:
    """Return the list of output files for the job ad. Raises `SubmitError`."""
    names = []
    for text in filter(None, options.output):
        name = os.path.normpath(text)
        if name.startswith("/") or name.split("/")[0] in (".", ".."):
            problem = "it is not in the directory in which the program is started"
            raise SubmitError(f"--output {text!a}: {problem}.", "name what is in it, or have the program write there.")
        macro = not options.macros and words.MACRO.search(name)
        if "," in name or macro or not name.isprintable() or name != name.strip() or name.endswith("\\"):
            raise SubmitError(f"--output {text!a} cannot be in a list of names.", "write a pattern for it, with ?.")
        names.append(name)
    return ", ".join(names)


def _add_user_data(options: argparse.Namespace, made: Guest, names: set[str]) -> None:
    path = os.path.abspath(options.user_data)
    inputs.require(f"--user-data {options.user_data!a}", path)
    name = os.path.basename(path)
    if name in names:
        raise SubmitError(f"--user-data {options.user_data!a}: two files of the job are called {name}.", "rename one.")
    made.files.append(path)
    made.options["User_Data"] = name
