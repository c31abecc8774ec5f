"""One run of ``vmgahp run``: its inputs checked, its job made, written or submitted.

A program's words pass through a submit file, where ``$(`` begins a macro, an ad, whose strings have no line breaks
and in which the schedd expands ``$$(``, and ``/bin/sh -c`` of the guest. They are quoted for the shell in such a way
that the others find nothing to expand. With `macros`, ``$(Process)`` and the like are left to HTCondor.

As an input, a link to a directory or an unreadable file would hold the job when it is about to start, and a FIFO
would block HTCondor's transfer forever.
"""

import argparse
import os
import re
import stat
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress

from vmgahp.commands.arguments import NotDone, print_json
from vmgahp.commands.files import open_regular, query_machines
from vmgahp.commands.submit import conversion, images
from vmgahp.commands.submit.conversion import attribute_line, command_line
from vmgahp.commands.submit.machine import Guest
from vmgahp.commands.submit.report import SubmitError, Summary, os_errors_as, printable, simple_name
from vmgahp.images import CATALOG
from vmgahp.images.formats import HEADER, looks_like, not_a_disk
from vmgahp.job.attributes import ARM, OPTION_PREFIX
from vmgahp.job.run import CLOUD_INIT, guest_file
from vmgahp.job.scratch_files import is_reserved
from vmgahp.job.vm_spec import LEAST_MEMORY_MIB

MACRO = re.compile(r"(\$\([A-Za-z][A-Za-z0-9_.]*\))")
_PLAIN = re.compile(r"[A-Za-z0-9_@%+:,./-]+", re.ASCII)
_KEPT = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789 _@+:,./=-")

Variables = Sequence[tuple[str, str]]


def shell_line(
    words: Sequence[str], variables: Variables = (), *, macros: bool = False, executable: bool = True
) -> str:
    """Make a command line that runs the words unchanged, with these variables, once the program is `executable`."""
    made: list[str] = []
    given = [f"{name}={_word(value, made, macros)}" for name, value in variables]
    quoted = [_word(word, made, macros) for word in words]
    begin = [] if executable else ["chmod", "+x", quoted[0], "&&"]
    return "".join(f"{one}; " for one in made) + " ".join([*begin, *given, *quoted])


def environment(variables: Variables) -> str:
    """Format the value of the command ``environment``, in the syntax with quotes around it."""
    quoted = (f"{name}='" + value.replace("'", "''") + "'" for name, value in variables)
    return '"' + " ".join(quoted).replace('"', '""') + '"'


def is_for_environment(value: str) -> bool:
    """Return True if the command ``environment`` can have a value; others must be set on the command line."""
    return value.isprintable() and "$$" not in value and "$(dollar)" not in value.lower()


def _word(text: str, made: list[str], macros: bool) -> str:
    """Quote a word for the shell; characters that a line cannot have go through a shell variable, added to `made`."""
    if _PLAIN.fullmatch(text):
        return text
    if text.isprintable():
        return "'" + _each(text, macros, lambda part: re.sub(r"\$(?=[$(\[])", "$''", part.replace("'", "'\\''"))) + "'"
    name = f"_vmgahp_{len(made)}"
    # The dot keeps line breaks at the end, which the shell strips from the output of a command.
    made.append(f"{name}=`printf '{_each(text, macros, _octal)}.'`")
    return f'"${{{name}%.}}"'


def _each(text: str, macros: bool, quote: Callable[[str], str]) -> str:
    parts = MACRO.split(text) if macros else [text]
    return "".join(part if number % 2 else quote(part) for number, part in enumerate(parts))


def _octal(text: str) -> str:
    return "".join(chr(byte) if byte in _KEPT else f"\\{byte:03o}" for byte in os.fsencode(text))


def listed_inputs(options: argparse.Namespace, names: set[str], summary: Summary) -> Iterator[str]:
    """Yield the entries of the job's list of input files; add their names there to `names`. Raises `SubmitError`."""
    for text in options.input:
        if "://" in text:
            name, entry = _of_url(text)
        else:
            # With a trailing slash HTCondor would send the content of a directory instead of the directory.
            entry = os.path.abspath(text)
            name = os.path.basename(entry)
        if not name:
            raise SubmitError(f"--input {text!a} has no name.", "name what is in it.")
        if is_reserved(name):
            raise SubmitError(f"--input {text!a}: {name} is a name of HTCondor's or of the server's.", "rename it.")
        if name in names:
            problem = f"--input {text!a}: two files of the job are called {name}."
            raise SubmitError(problem, "rename one, or put them in directories.")
        names.add(name)
        if not options.macros and MACRO.search(entry):
            raise SubmitError(f"--input {text!a} has a macro of HTCondor's.", "say --macros, or rename it.")
        if "://" not in entry and not (options.macros and MACRO.search(entry)):  # HTCondor knows what macros stand for
            require_inputs(f"--input {text!a}", entry)
            if os.path.isdir(entry):
                _require_whole(f"--input {text!a}", entry, summary)
        yield _below(entry, options)


def _below(path: str, options: argparse.Namespace) -> str:
    """Shorten a path to a relative one, if the submit file is in this directory and the path below it."""
    if "://" in path or options.queue > 1 or os.path.dirname(options.submit_file):
        return path
    relative = os.path.relpath(path)
    outside = relative.split("/")[0] in (".", "..")
    return path if outside or relative != relative.strip() else relative  # the list ignores blanks at the ends


def _of_url(text: str) -> tuple[str, str]:
    name = os.path.basename(re.split(r"[?#]", text)[0])
    if not name or re.search(r"[\s,\"'\\]", text) or not text.isprintable():
        raise SubmitError(f"--input {text!a} is no URL of a file.", "write %20 for a blank and its like.")
    return name, text


def require_inputs(what: str, path: str) -> None:
    """Check that a file or directory can be transferred with the job. Raises `SubmitError`."""
    said = f"{what}: {path!a}"
    if re.search(r"[,\"'\\<>|*?;]", path) or not path.isprintable() or path != path.strip() or "$$" in path:
        raise SubmitError(f"{said} has characters that a list of HTCondor's cannot have.", "rename it.")
    with os_errors_as(f"{said} cannot be found", "name a file of this machine."):
        _require_usable(said, path)


def _require_usable(said: str, path: str) -> None:
    """Check that it is a file or a directory that can be read. Raises `SubmitError`, OSError."""
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise SubmitError(f"{said} is neither a file nor a directory.", "copy what is in it into a file.")
    if not os.access(path, os.R_OK | (os.X_OK if stat.S_ISDIR(mode) else 0)):
        raise SubmitError(f"{said} cannot be read by you.", "see its mode, and who owns it.")


def _require_whole(what: str, path: str, summary: Summary) -> None:
    """Check that everything in a directory can be transferred with the job. Raises `SubmitError`."""
    for directory, directories, files in os.walk(path):
        for name in (*directories, *files):
            inside = os.path.join(directory, name)
            said = f"{what}: {inside!a}"
            if name in directories and os.path.islink(inside):
                raise SubmitError(f"{said} is a link to a directory: HTCondor does not send it.", "copy what it has.")
            try:
                _require_usable(said, inside)
            except OSError:
                summary.advise(f"{said} leads nowhere, and does not go with the job.")


def _input_of(word: str, options: argparse.Namespace) -> str:
    """Return the path here of the input that a word of the command line names in the guest, empty for none."""
    first, *below = os.path.normpath(word).split("/")
    for path in options.input:
        if "://" not in path and os.path.basename(os.path.abspath(path)) == first:
            return os.path.join(os.path.abspath(path), *below)
    return ""


def is_executable(options: argparse.Namespace, summary: Summary) -> bool:
    """Return False if the program is an input without the x bit, which the guest must set."""
    program = options.words[0]
    path = _input_of(program, options) if "/" in program and not program.startswith("/") else ""
    if not os.path.isfile(path) or os.stat(path).st_mode & stat.S_IXUSR:
        return True
    summary.advise(f"{program} is not executable here: the guest sets its x bit before it starts it.")
    return False


_SYSTEM = ("/usr/", "/bin/", "/sbin/", "/lib", "/etc/", "/opt/", "/dev/", "/proc/", "/sys/")
"""The directories whose files a guest may have as well."""


def warn_of_words(options: argparse.Namespace, summary: Summary) -> None:
    """Report words that will fail in the guest: files that do not go with the job, and scripts with CRLF."""
    names = {os.path.basename(re.split(r"[?#]", path.rstrip("/"))[0]) for path in options.input}
    scripts = dict.fromkeys(map(os.path.abspath, options.input), False)
    if options.user_data:
        scripts[os.path.abspath(options.user_data)] = True
    for number, word in enumerate(options.words):
        said = word.partition("=")[2] if word.startswith("-") else word
        if options.macros and MACRO.search(said):
            continue
        if said.startswith("/"):
            if os.path.isfile(said) and not said.startswith(_SYSTEM):
                name = os.path.basename(said)
                summary.advise(f"{said} is a path of this machine: say --input {said}, and write ./{name} for it.")
            continue
        first = os.path.normpath(said).split("/")[0] if said else "."
        if number == 0 and "/" not in said:
            if said not in names and os.path.isfile(said):
                how = f"say --input {said}, and write ./{said} for it"
                summary.advise(f"{said} is a file here, and the guest looks for it in its PATH: {how}.")
            elif said in names:
                summary.advise(f"{said} is looked for in the guest's PATH: write ./{said} for the input of that name.")
        elif path := _input_of(said, options):
            scripts[path] = scripts.get(path, False) or number == 0
        elif first not in (*names, ".") and os.path.isfile(said):
            summary.advise(f"{said} is a file here and no input, so the guest will not have it: say --input {said}.")
    for path, is_program in scripts.items():
        line = b""
        with suppress(OSError), open_regular(path) as file:
            line = file.readline(256)
        if line.startswith(b"#!") and line.endswith(b"\r\n") and (is_program or b"sh" in line):
            mend = f"sed -i 's/\\r$//' {os.path.basename(path)}"
            summary.advise(f"{path} has line ends of Windows (CRLF), with which no shell runs it: {mend} mends it.")
        if line.startswith(b"\xef\xbb\xbf#!"):
            summary.advise(f"{path} has a byte order mark before its #!, by which no interpreter is found: remove it.")
        elif is_program and (why := _foreign(line)) and not any("vm_Arch" in added for added in options.append):
            summary.advise(f"{path} is a program for {why}, which no Linux on x86_64 runs.")


def _foreign(header: bytes) -> str:
    """Name the system or machine of a program that is not for Linux on x86_64; empty for any other file."""
    if header.startswith(b"\x7fELF") and len(header) >= 20:
        machine = int.from_bytes(header[18:20], "little")
        return "" if machine in (3, 62) else {183: ARM}.get(machine, f"another machine (ELF {machine})")
    return "Windows" if header.startswith(b"MZ") else "macOS" if header.startswith(b"\xcf\xfa\xed\xfe") else ""


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
    made = images.machine(options, summary)
    if not said:
        options.memory = max(options.memory, MEMORY_MIB)
        summary.advise(f"The guest has {options.memory} MiB of memory; --memory says otherwise.")
    [root] = made.disks
    if root.format == "iso":
        raise SubmitError(f"--image {options.image}: it is a CD-ROM.", "name the image of a disk.")
    made.lines = [command_line("request_memory", f"{max(options.memory, LEAST_MEMORY_MIB)}MB")]
    made.name = simple_name(options.name, _called(options), "run")
    names = {root.name or os.path.basename(root.path)} - {""}
    made.inputs = list(listed_inputs(options, names, summary))
    for name in (f"{made.name}.{end}" for end in ("log", "out", "err")):
        taken = {os.path.basename(path) for path in (*options.input, options.user_data or "")}
        if name in taken.union(map(os.path.normpath, options.output or ())):
            problem = f"{name} is a file of the job's, and would be written by HTCondor."
            raise SubmitError(problem, "say --name for another name of the job.")
    warn_of_words(options, summary)
    others = [pair for pair in _variables(options) if not is_for_environment(pair[1])]
    line = shell_line(options.words, others, macros=options.macros, executable=is_executable(options, summary))
    made.lines.append(attribute_line(f"{OPTION_PREFIX}Run", line, macros=options.macros))
    if options.output is not None:
        made.lines.append(attribute_line(f"{OPTION_PREFIX}Run_Outputs", _outputs(options), macros=options.macros))
    given = {"Run_As_Root": options.as_root, "Run_Time_Limit": options.time_limit, "Disk_Size": options.disk}
    given |= {"Run_Boot_Timeout": options.boot_timeout, "Run_Boot": options.boot if options.boot != CLOUD_INIT else ""}
    made.options |= {name: value for name, value in given.items() if value}
    if options.disk:
        made.lines.append(command_line("request_disk", f"{_room(options)}MB"))
    if options.user_data:
        _add_user_data(options, made, names)
    if plain := [pair for pair in _variables(options) if is_for_environment(pair[1])]:
        made.lines.append(command_line("environment", environment(plain), macros=options.macros))
    made.lines += _ways_home(made, options)
    made.number = options.queue
    return made


def _require_image(image: str) -> None:
    """Make sure that it is an image of the machines, or a file that is a disk. Raises `SubmitError`."""
    if "://" in image or image.lower().startswith(f"{CATALOG}:"):
        return
    hint = f"name a file that is here, {CATALOG}:NAME of the machines, or a URL."
    with os_errors_as(f"--image {image!a} cannot be opened", hint), open_regular(image) as file:
        header = file.read(HEADER)
    if not header or (not_a_disk(header) == "a text" and not looks_like(header)):
        problem = f"--image {image!a} is no disk: it is empty, or a text."
        raise SubmitError(problem, "name the image of a disk; the program comes after --.")


def _ways_home(made: Guest, options: argparse.Namespace) -> Iterator[str]:
    """Yield the lines about the output of the job, and when it is transferred."""
    if options.queue > 1:
        yield command_line("initialdir", f"{made.name}.$(Process)", macros=True)
    # condor_submit accepts no output and error for a VM; the attributes have the same effect.
    for name, file in (("Out", "out"), ("Err", "err")):
        yield attribute_line(name, f"{made.name}.{file}")
        yield attribute_line(f"Stream{name}", False)
        yield attribute_line(f"Transfer{name}", True)
    yield command_line("transfer_output_files", HOME)
    if options.checkpoint:
        yield command_line("vm_checkpoint", "true")
        yield command_line("when_to_transfer_output", "ON_EXIT_OR_EVICT")
    if options.retries:
        yield command_line("max_retries", str(options.retries))
        yield command_line("on_exit_remove", "False")  # except for the retries that max_retries adds
    else:
        # A program that was ended by a signal is done; a killed daemon is run again, a limited number of times.
        over = f"ExitBySignal == False || ChirpVMExitSignal isnt undefined || NumJobStarts >= {MOST_STARTS}"
        yield command_line("on_exit_remove", over)
    if options.queue > 1:
        yield command_line("log", os.path.abspath(f"{made.name}.log"))


def _room(options: argparse.Namespace) -> int:
    """Compute the MiB of the scratch directory: the disk, and the inputs twice, as files and on the guest's drive."""
    disk_mib = int(options.disk[:-1]) * {"M": 1, "G": 1024, "T": 1024**2}[options.disk[-1]]
    places = (place for path in options.input for place in [*os.walk(path), ("", [], [path])])
    files = (os.path.join(directory, name) for directory, _, names in places for name in names)
    return disk_mib + (2 * sum(os.path.getsize(file) for file in files if os.path.isfile(file)) >> 20) + SLACK_MIB


def _called(options: argparse.Namespace) -> str:
    """Choose the job's name: a word that is an input, such as a script, or else the program."""
    names = {os.path.basename(path.rstrip("/")) for path in options.input}
    program: str = options.words[0]
    if not program:
        raise SubmitError("after -- there is an empty word in the place of a program.", "name one, such as -- date.")
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
        macro = not options.macros and MACRO.search(name)
        if "," in name or macro or not name.isprintable() or name != name.strip() or name.endswith("\\"):
            raise SubmitError(f"--output {text!a} cannot be in a list of names.", "write a pattern for it, with ?.")
        names.append(name)
    return ", ".join(names)


def _add_user_data(options: argparse.Namespace, made: Guest, names: set[str]) -> None:
    path = os.path.abspath(options.user_data)
    require_inputs(f"--user-data {options.user_data!a}", path)
    name = os.path.basename(path)
    if name in names:
        raise SubmitError(f"--user-data {options.user_data!a}: two files of the job are called {name}.", "rename one.")
    made.files.append(path)
    made.options["User_Data"] = name


COST = "The job takes some 10 s beside its guest, and 45 s at least: condor_starter sleeps for 30 s after each start.\n"


def run(options: argparse.Namespace) -> int:
    """Write the submit file, or print it, and submit; return the exit status. Raises `SubmitError`."""
    summary, problem = Summary(), None
    came = dict.fromkeys(("submit_file", "log", "job", "text", "problem", "hint"), "")
    try:
        options.dir = os.path.abspath(options.dir or ".")
        made = conversion.read(options, summary)
        conversion.bring_images(options, made, summary)
        text = conversion.written(options, made, summary)
        if options.dry_run:
            came["text"] = text
            summary.unmake()  # an image was unpacked or converted, to look at it
        else:
            if options.submit and not options.force:
                _require_machine(options, made, summary)
            came |= {"submit_file": _written(options, made, text, summary), "log": conversion.commands_of(text)["log"]}
            if options.submit:
                came["job"] = _submit(made, text, came["submit_file"])
    except BaseException as error:
        summary.unmake()
        if not isinstance(error, SubmitError):
            raise
        problem = error
        came |= {"problem": error.problem, "hint": error.hint}
    if options.json:
        print_json({**came, "notes": summary.notes})
    else:
        _tell(options, came, summary, problem)
    return 1 if problem else 0


def _tell(options: argparse.Namespace, came: Mapping[str, str], summary: Summary, problem: SubmitError | None) -> None:
    """Print what came of it, for a person. Raises the problem, if there is one."""
    say = sys.stderr.write
    for note in summary.notes:
        say(f"Note: {printable(note)}\n")
    if output := printable(came["submit_file"]):
        say(f"Written: {output}\n{COST}")
    if problem:
        raise problem
    if options.dry_run:
        sys.stdout.write(came["text"] + "".join(f"{line}\n" for line in _user_data(options) if options.verbose))
    elif not options.submit:
        say(f"Submit it by: condor_submit {output}\n")
    else:
        job = came["job"]
        first = job if "." in job else f"{job}.0"
        sys.stdout.write(f"{job}\n")
        say(
            f"condor_tail -f {first}    what the program prints\n"
            f"condor_wait {came['log']}    until it has ended\n"
            f"condor_history {job} -af ExitCode    its exit code then\n"
            f"condor_q -hold {job}    why it is held, if it is\n"
        )


def _user_data(options: argparse.Namespace) -> Iterator[str]:
    """Yield the guest's cloud-init data, as comments after the submit file."""
    parts = []
    if options.user_data:
        with open_regular(options.user_data) as file:
            parts.append((f"cloud-init's user data: {options.user_data}", file.read(1 << 20)))
    if options.boot == CLOUD_INIT:
        then = "cloud-init's user data" if not parts else "behind them, in one message"
        parts.append((f"{then}: what begins the program", guest_file("agent")))
    for what, data in parts:
        yield from ("", f"# {printable(what)}", "#")
        yield from (f"# {printable(line)}".rstrip() for line in data.decode("utf-8", "replace").splitlines())


def _written(options: argparse.Namespace, made: Guest, text: str, summary: Summary) -> str:
    output: str = options.submit_file or f"{made.name}.sub"
    summary.sources |= {os.path.realpath(path) for path in (*made.files, *made.inputs, *(d.path for d in made.disks))}
    images.free(output, summary, force=options.force)
    for process in range(made.number if made.number > 1 else 0):
        problem = f"--queue {made.number}: the directory {made.name}.{process} cannot be made"
        with os_errors_as(problem, "say --name for another one."):
            os.makedirs(f"{made.name}.{process}", exist_ok=True)
    conversion.write_out(text, output)
    summary.made.clear()  # from now on the submit file refers to these files
    return output


def _require_machine(options: argparse.Namespace, made: Guest, summary: Summary) -> None:
    """Ask the collector if a machine of the pool has the image and the memory. Raises `SubmitError` if none has."""
    vm_type = (options.type or "kvm").lower()
    asked = ["VM_Type", "VM_Images", "TotalMemory", "VM_Memory"]
    try:
        found = query_machines("HasVM =?= true", asked)
    except NotDone as error:  # the schedd may still take the job
        summary.advise(str(error))
        return
    machines = [ad for ad in found if str(ad.get("VM_Type")).lower() == vm_type]
    if not machines:
        summary.advise(f"No machine of the pool offers VMs of type {vm_type} now (condor_status -vm): the job waits.")
        return
    hint = "or submit it all the same by --force."
    names = {name for ad in machines for name in str(ad.get("VM_Images", "")).split(",")} - {""}
    for image in (disk.image for disk in made.disks if disk.image not in ("", *names)):
        problem = f"No machine of the pool has the image {image}; they have: {', '.join(sorted(names)) or 'none'}."
        raise SubmitError(problem, f"name one of these, {hint}")
    # VM_Memory is what is free now.
    whole, free = ([ad[name] for ad in machines if isinstance(ad.get(name), int)] for name in asked[2:])
    if whole and options.memory > max(whole):
        problem = f"No machine of the pool has {options.memory} MiB of memory; the largest has {max(whole)} MiB."
        raise SubmitError(problem, f"say a smaller --memory, {hint}")
    if free and options.memory > max(free):
        summary.advise(f"No machine has {options.memory} MiB for VMs free now, but {max(free)} MiB: the job may wait.")


def _submit(made: Guest, text: str, output: str) -> str:
    """Submit through HTCondor's own bindings; return the job's id. Raises `SubmitError`."""
    hint = f"see condor_q; or, where HTCondor is: condor_submit {output}"
    try:
        import htcondor2
    except ImportError as error:
        raise SubmitError(f"HTCondor's Python bindings are not here ({error}).", hint) from error
    try:
        cluster = htcondor2.Schedd().submit(htcondor2.Submit(text)).cluster()
    except Exception as error:  # theirs, of any kind
        raise SubmitError(f"HTCondor does not take the job: {' '.join(str(error).split())}", hint) from error
    return str(cluster) if made.number > 1 else f"{cluster}.0"
