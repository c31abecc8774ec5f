"""LIBVIRT_XML_SCRIPT: the administrator's own program that makes the domain XML from the job ad.

It is called as HTCondor's condor_vm-gahp calls it, so that a script written for that one works here
(``VirshType::CreateVirshConfigFile`` in ``src/condor_vm-gahp/xen_type.linux.cpp`` and ``systemCommand`` in
``vmgahp_common.cpp``): as root, with the arguments of LIBVIRT_XML_SCRIPT_ARGS, the job ad on stdin in lines
``Name = expression`` without its private attributes, some lines of the server's own after it (`extra_lines`),
then an empty line; the XML is read from stdout, and stderr goes to the log.

What is stricter here: the working directory is ``/`` and not the job's scratch directory, the environment
is what HTCondor's tools need and no more, there is a deadline, and a script that somebody else than root
could have written is not run as root.
"""

from vmgahp import log
from vmgahp.errors import MachineFault

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

SETTING = "LIBVIRT_XML_SCRIPT"
ARGUMENTS_SETTING = "LIBVIRT_XML_SCRIPT_ARGS"

LONGEST_XML = 4 << 20
"""Bytes that a script may print. A domain is some KiB; libvirt itself takes 4 MiB in one message."""
LONGEST_STDERR = 64 << 10
"""Bytes of stderr that are kept; the rest is read and dropped."""

_SPACE = " \t\n\r"


def run(
    script: str,
    arguments: str,
    ad_lines: "Iterable[str]",
    deadline: float,
    log_line: "Callable[[str], None]",
    environ: "Mapping[str, str] | None" = None,
) -> str:
    """Run the script and return its XML.

    `arguments` is LIBVIRT_XML_SCRIPT_ARGS as it is set, `ad_lines` the lines for stdin without newlines,
    those of `extra_lines` included; private attributes are left out here. `deadline` is in seconds; then
    the script and its process group are killed. Each line of the script's stderr goes to `log_line`, after
    secrets in it are hidden. `environ` is the server's environment, by default that of this process.

    Raises `MachineFault`, naming the setting and what to do, when the script may not or cannot be run, when
    it fails, prints nothing, or prints what cannot be a domain.
    """
    import os

    words = parse_arguments(arguments)
    require_trustworthy(script)
    lines = [line for line in ad_lines if not log.is_private(line.partition("=")[0].strip())]
    # A value with an end of line in it must not become an attribute of its own.
    text = "".join(line.replace("\n", " ") + "\n" for line in (*lines, ""))
    output, errors, status = _converse(
        [script, *words],
        text.encode("utf-8", "surrogateescape"),
        deadline,
        _environment(os.environ if environ is None else environ),
    )
    said = [line for line in errors.decode(errors="replace").splitlines() if line.strip()]
    for line in said:
        log_line(f"{SETTING}: {log.redact(line)}")
    last = f" Its last words: {log.redact(said[-1].strip())[:200]}" if said else ""
    by_hand = "run it by hand as root with a job ad on stdin, and see the server's log."
    if status is None:
        raise MachineFault(f"{SETTING} ({script}) did not end within {deadline:g} s.{last}", by_hand)
    if len(output) > LONGEST_XML:
        raise MachineFault(f"{SETTING} ({script}) printed more than {LONGEST_XML >> 20} MiB.{last}", by_hand)
    if status != 0:
        how = f"exit status {status}" if status > 0 else f"signal {-status}"
        raise MachineFault(f"{SETTING} ({script}) failed with {how}.{last}", by_hand)
    try:
        xml = output.decode()
    except UnicodeDecodeError as error:
        raise MachineFault(f"{SETTING} ({script}) printed what is not UTF-8: {error}.", by_hand) from error
    if not xml.strip():
        raise MachineFault(f"{SETTING} ({script}) printed no XML.{last}", by_hand)
    if "\0" in xml:
        raise MachineFault(f"{SETTING} ({script}) printed a NUL, which no XML may hold.", by_hand)
    return join_lines(xml)


def extra_lines(
    ad_lines: "Iterable[str]",
    *,
    bootloader: str = "",
    initrd: str = "",
    bridge_interface: str = "",
    networking_type: str = "",
) -> list[str]:
    """The lines that the server adds to the ad for the script, in the order of condor_vm-gahp.

    ``VMPARAM_Xen_Bootloader`` always, and empty for other hypervisors; ``VMPARAM_Xen_Initrd`` and
    ``JobVMNetworkingType`` where the ad has none, ``VMPARAM_Bridge_Interface`` where there is one.
    `networking_type` is the type that the job gets, or "" when it gets no network.
    """
    there = {line.partition("=")[0].strip().lower() for line in ad_lines}
    added = [("VMPARAM_Xen_Bootloader", bootloader)]
    if "vmparam_xen_initrd" not in there:
        added.append(("VMPARAM_Xen_Initrd", initrd))
    if bridge_interface:
        added.append(("VMPARAM_Bridge_Interface", bridge_interface))
    if "jobvmnetworkingtype" not in there:
        added.append(("JobVMNetworkingType", networking_type))
    return [f"{name} = {_quoted(value)}" for name, value in added]


def _quoted(value: str) -> str:
    """A string literal of the ClassAd language."""
    for plain, escaped in (("\\", "\\\\"), ('"', '\\"'), ("\n", "\\n"), ("\r", "\\r")):
        value = value.replace(plain, escaped)
    return f'"{value}"'


def parse_arguments(text: str) -> list[str]:
    """Split LIBVIRT_XML_SCRIPT_ARGS as HTCondor splits arguments.

    Either plain words between white space, or, when the whole begins with a double quote, the quoted
    form: up to the closing double quote, with two of them for one, words between white space, in which
    single quotes group, with two of them for one inside (``ArgList::AppendArgsV1RawOrV2Quoted`` in
    ``src/condor_utils/condor_arglist.cpp``). Raises `MachineFault` when a quote is not closed.
    """
    if not text.lstrip(_SPACE + "\v\f").startswith('"'):
        return _split(text, quotes=False)
    raw = ""
    rest = text.lstrip(_SPACE + "\v\f")[1:]
    while True:
        before, quote, rest = rest.partition('"')
        raw += before
        if not quote:
            raise _bad_arguments(text, "its double quote is not closed")
        if not rest.startswith('"'):
            break
        raw += '"'
        rest = rest[1:]
    if rest.strip(_SPACE + "\v\f"):
        raise _bad_arguments(text, f"{rest.strip()!r} follows the closing double quote")
    return _split(raw, quotes=True)


def _split(text: str, *, quotes: bool) -> list[str]:
    """Words between white space; with `quotes`, single quotes group."""
    words: list[str] = []
    word: str | None = None
    at = 0
    while at < len(text):
        character = text[at]
        at += 1
        if character in _SPACE:
            if word is not None:
                words.append(word)
            word = None
            continue
        word = word or ""
        if character != "'" or not quotes:
            word += character
            continue
        while True:
            end = text.find("'", at)
            if end < 0:
                raise _bad_arguments(text, f"the single quote before {text[at:]!r} is not closed")
            word += text[at:end]
            at = end + 1
            if text[at : at + 1] != "'":
                break
            word += "'"
            at += 1
    if word is not None:
        words.append(word)
    return words


def _bad_arguments(text: str, why: str) -> MachineFault:
    return MachineFault(
        f"{ARGUMENTS_SETTING} = {text} cannot be read: {why}.",
        "quote it as in the submit command 'arguments', or without any quotes.",
    )


def require_trustworthy(script: str) -> None:
    """Make sure that the script is a program that only root, or the caller, can have written.

    That goes for the file and for every directory and link on the way to it: whoever may write to one of
    them could put another program in its place. A directory with the sticky bit, such as ``/tmp``, protects
    what is in it. Raises `MachineFault`.
    """
    import os
    from stat import S_ISDIR, S_ISREG, S_ISVTX

    cure = f"give {SETTING} an executable that belongs to root, in directories that only root may write to"

    def refuse(problem: str) -> MachineFault:
        return MachineFault(f"{SETTING} = {script} {problem}.", f"{cure}; or unset it for the built-in XML.")

    if not script.startswith("/"):
        raise refuse("is not an absolute path")
    trusted = {0, os.geteuid()}
    try:
        way = _way(script)
        for path in way[:-1]:
            there = os.lstat(path)
            if there.st_uid not in trusted:
                raise refuse(f"is reached by {path}, which belongs to user id {there.st_uid}")
            if S_ISDIR(there.st_mode) and there.st_mode & 0o022 and not there.st_mode & S_ISVTX:
                raise refuse(f"is reached by {path}, to which others may write")
        file = os.lstat(way[-1])
        if not S_ISREG(file.st_mode):
            raise refuse("is not a regular file")
        if file.st_uid not in trusted:
            raise refuse(f"belongs to user id {file.st_uid}")
        if file.st_mode & 0o022:
            raise refuse(f"may be written to by others (mode {file.st_mode & 0o7777:04o})")
        if not os.access(way[-1], os.X_OK, effective_ids=os.access in os.supports_effective_ids):
            raise refuse("may not be executed by this server")
    except OSError as error:
        raise refuse(f"cannot be used: {error.strerror}") from error


def _way(path: str) -> list[str]:
    """Every directory and link that the kernel passes on its way to `path`, and at last the file itself."""
    import errno
    import os

    passed = ["/"]
    here = "/"
    links = 0
    names = path.split("/")
    while names:
        name = names.pop(0)
        if name in ("", "."):
            continue
        if name == "..":
            here = os.path.dirname(here)
            continue
        there = os.path.join(here, name)
        passed.append(there)
        try:
            target = os.readlink(there)
        except OSError as error:
            if error.errno != errno.EINVAL:  # which says that it is no link
                raise
            here = there
            continue
        links += 1
        if links > 40:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        names[:0] = target.split("/")
        if target.startswith("/"):
            here = "/"
    return [*passed, here]


def join_lines(text: str) -> str:
    """The script's lines as one text, as condor_vm-gahp joins them, but never two words into one.

    That server drops every line's end. So a ``<name>`` on lines of its own is clean with it, and the same
    script must give the same name here; but an element whose attributes are on lines of their own without
    indentation is broken by it. So the ends of lines are dropped in text, in comments and inside quotes,
    and kept between the attributes of a tag.
    """
    joined: list[str] = []
    until = ""  # what ends the part that we are in: "" in text, ">" in a tag, or a quote, "-->", "]]>"
    after = ""  # what we are in once that part has ended
    at = 0
    while at < len(text):
        if text[at] in "\r\n" and (text[at] == "\n" or text[at : at + 2] == "\r\n"):
            if until == ">":
                joined.append("\n")
            at += 1 if text[at] == "\n" else 2
            continue
        opened = ""
        if not until:
            for opening, closing in (("<!--", "-->"), ("<![CDATA[", "]]>"), ("<", ">")):
                if text.startswith(opening, at):
                    opened, until, after = opening, closing, ""
                    break
        elif text.startswith(until, at):
            opened, until, after = until, after, ""
        elif until == ">" and text[at] in "\"'":
            opened, until, after = text[at], text[at], ">"
        joined.append(opened or text[at])
        at += len(opened) or 1
    return "".join(joined)


def _environment(environ: "Mapping[str, str]") -> dict[str, str]:
    """What a script of the administrator's may need: programs, and HTCondor's configuration."""
    kept = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/"}
    for name, value in environ.items():
        upper = name.upper()
        if name in ("PATH", "CONDOR_CONFIG", "CONDOR_IDS", "LD_LIBRARY_PATH") or (
            upper.startswith("_CONDOR_") and not upper.startswith("_CONDOR_ANCESTOR_")
        ):
            kept[name] = value
    return kept


def _converse(
    argv: list[str], stdin: bytes, deadline: float, environ: dict[str, str]
) -> tuple[bytes, bytes, int | None]:
    """Start the program in ``/``, write its stdin and read the rest, all at once.

    Returns stdout (one byte over the limit at most), stderr (cut) and the exit status, negative for a
    signal, None when the deadline killed it.
    """
    import os
    import select
    import signal
    from time import monotonic

    end = monotonic() + deadline
    descriptors: set[int] = set()

    def close(descriptor: int) -> None:
        descriptors.discard(descriptor)
        os.close(descriptor)

    try:
        pipes = []
        for _ in range(3):
            pipes.append(os.pipe2(os.O_CLOEXEC))
            descriptors.update(pipes[-1])
        (their_in, our_in), (our_out, their_out), (our_err, their_err) = pipes
        # A shell, because posix_spawn cannot change the directory; it replaces itself by the script.
        pid = os.posix_spawn(
            "/bin/sh",
            ["sh", "-c", 'cd / && exec "$@"', "sh", *argv],
            environ,
            file_actions=[
                (os.POSIX_SPAWN_DUP2, their_in, 0),
                (os.POSIX_SPAWN_DUP2, their_out, 1),
                (os.POSIX_SPAWN_DUP2, their_err, 2),
            ],
            setsid=True,
            setsigmask=[],
            setsigdef=set(signal.valid_signals()) - {signal.SIGKILL, signal.SIGSTOP},
        )
    except OSError as error:
        for descriptor in list(descriptors):
            close(descriptor)
        raise MachineFault(
            f"{SETTING} ({argv[0]}) cannot be started: {error.strerror}.",
            "look at the limits on processes and open files.",
        ) from error
    status: int | None = None
    output, errors = bytearray(), bytearray()
    try:
        for theirs in (their_in, their_out, their_err):
            close(theirs)
        pidfd = os.pidfd_open(pid)
        descriptors.add(pidfd)
        os.set_blocking(our_in, False)
        poll = select.poll()
        poll.register(our_in, select.POLLOUT)
        for reading in (our_out, our_err, pidfd):
            poll.register(reading, select.POLLIN)
        waiting = {our_in, our_out, our_err, pidfd}
        while waiting - {our_in}:
            ready = poll.poll(max(end - monotonic(), 0) * 1000)
            if not ready or monotonic() >= end:
                break
            for descriptor, _ in ready:
                finished = True
                if descriptor == our_in:
                    try:
                        stdin = stdin[os.write(our_in, stdin[:65536]) :]
                        finished = not stdin
                    except BlockingIOError:
                        finished = False
                    except OSError:
                        pass  # a script need not read it all
                elif descriptor != pidfd:
                    chunk = os.read(descriptor, 65536)
                    finished = not chunk
                    if descriptor == our_out:
                        output += chunk
                    else:
                        errors += chunk[: LONGEST_STDERR - len(errors)]
                if finished:
                    poll.unregister(descriptor)
                    waiting.discard(descriptor)
                    if descriptor == our_in:
                        close(our_in)
            if len(output) > LONGEST_XML:
                status = -signal.SIGKILL
                break
        else:
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            return bytes(output), bytes(errors), status
        os.killpg(pid, signal.SIGKILL)
        last = select.poll()
        last.register(pidfd, select.POLLIN)
        if last.poll(1000):  # else it hangs in the kernel, and is left to it
            os.waitpid(pid, 0)
        return bytes(output), bytes(errors), status
    finally:
        for descriptor in list(descriptors):
            close(descriptor)
