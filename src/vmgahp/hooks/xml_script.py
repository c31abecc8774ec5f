"""LIBVIRT_XML_SCRIPT: the administrator's own program that makes the domain XML from the job ad.

It is called as HTCondor's condor_vm-gahp calls it, so that a script written for that one works here
(``VirshType::CreateVirshConfigFile`` in ``src/condor_vm-gahp/xen_type.linux.cpp`` and ``systemCommand`` in
``vmgahp_common.cpp``): as root, with the arguments of LIBVIRT_XML_SCRIPT_ARGS, the job ad on stdin in lines ``Name =
value`` without its private attributes, some lines of the server's own after it (`extra_lines`), then an empty line; the
XML is read from stdout, and stderr goes to the log.

Some things are stricter here: the working directory is ``/`` and not the job's scratch directory, the environment has
only what HTCondor's tools need, there is a deadline, and a script that others than root could have written is not run.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterable
from xml.etree import ElementTree as etree

from vmgahp import findings, hooks
from vmgahp.errors import MISMATCHED, JobFault, MachineFault
from vmgahp.findings import Finding
from vmgahp.host import trust
from vmgahp.host.run import condor_environment
from vmgahp.text import is_private, redact, shown

SETTING = "LIBVIRT_XML_SCRIPT"
ARGUMENTS_SETTING = "LIBVIRT_XML_SCRIPT_ARGS"

LONGEST_XML = 4 << 20
"""The maximum number of bytes that a script may print. A domain has some KiB; libvirt accepts 4 MiB in one message."""

_OR = "or unset it for the built-in XML"
_MARKS = frozenset("<&'\"")
_MARKUP = (
    r"<[/?!]?[A-Za-z_][\w.-]*|<!(?:--|\[)"  # elements, comments and sections
    r"|&(?!amp;)#?\w+;"  # characters under another name
    r"|['\"]\s*[A-Za-z_][\w.:-]*\s*=\s*['\"][^'\"]{0,40}"  # attributes
)
"""The forms of markup: text without any of them cannot become more than text."""
_MOST_MARKUP = 10_000
"""The most markup of a job: all of the XML is searched for each piece of it."""
_SPACE = " \t\n\r"
_BLANK = _SPACE + "\v\f"
_WORD = f"(?:'(?:[^']|'')*+'|[^{_SPACE}'])+"
"""A word of quoted arguments, whose groups are in single quotes."""
_PART = re.compile(
    r"<!--.*?(?:-->|\Z)|<!\[CDATA\[.*?(?:\]\]>|\Z)"  # comments and sections
    r"|(?P<tag><(?:\"[^\"]*+\"?|'[^']*+'?|[^>\"']++)*+)"
    r"|[^<]++",
    re.DOTALL,
)

PLAIN_MEMORY = 64
"""The memory of the plain job, in MiB."""
PLAIN_DISK = "disk.img"


def plain(directory: str, name: str, vm_type: str) -> list[str]:
    """Make the ad of a plain job, to which no script can object; `vm_type` is a line of its own."""
    return [
        *(f"VM_WORKING_DIR = {_quoted(directory)}", vm_type, f"JobVMMemory = {PLAIN_MEMORY}"),
        *("JobVM_VCPUS = 1", f"RequestMemory = {PLAIN_MEMORY}", "RequestCpus = 1", 'User = "plain"', 'Owner = "plain"'),
        *("ClusterId = 1", "ProcId = 0", f'VMPARAM_vm_Disk = "{PLAIN_DISK}:vda:w"', "JobVMNetworking = FALSE"),
        *('VMPARAM_Xen_Kernel = "included"', f"VMPARAM_VM_NAME = {_quoted(name)}", 'VMPARAM_Xen_Bootloader = ""'),
        *('VMPARAM_Xen_Initrd = ""', 'JobVMNetworkingType = ""', "JobVMVNCConsole = FALSE", "JobVMCheckpoint = FALSE"),
    ]


def run(
    script: str,
    arguments: str,
    ad_lines: Iterable[str],
    deadline: float,
    log_line: Callable[[str], None],
    name: str = "",
) -> str:
    """Run the script and return its XML, whose domain must have the `name`, if any.

    `arguments` is LIBVIRT_XML_SCRIPT_ARGS as it is set, `ad_lines` the lines for stdin without newlines, those of
    `extra_lines` included; private attributes are left out here. `deadline` is in seconds; then the script and its
    process group are killed. Each line of the script's stderr goes to `log_line`, after secrets in it are hidden.
    Raises `MachineFault`, naming the setting and what to do, if the script may not or cannot be run, fails, prints
    nothing, or prints something other than a domain; but `JobFault` if it works for a plain job.
    """
    words, ad_lines = parse_arguments(arguments), list(ad_lines)
    vm_type = next((line for line in ad_lines if line.startswith("JobVMType")), 'JobVMType = "kvm"')
    require_trustworthy(script)

    def made(lines: Iterable[str], name: str) -> str:
        return _run([script, *words], lines, deadline, log_line, name)

    again, label = plain("/scratch", "plain_1.0", vm_type), f"{SETTING} ({script})"
    xml = hooks.for_job(label, lambda: made(ad_lines, name), lambda: made(again, name and "plain_1.0"))
    _require_no_markup(ad_lines, xml)
    return xml


def _require_no_markup(ad_lines: Iterable[str], xml: str) -> None:
    """Make sure that no text of the job has become an element or an attribute. Raises `JobFault`.

    The markup of a job's attribute appears literally in the XML only if the script has inserted it without escaping.
    """
    lower, left = xml.lower(), _MOST_MARKUP
    for line in ad_lines:
        name, _, said = line.partition("=")
        if is_private(name.strip()) or not _MARKS.intersection(said):
            continue
        pieces = re.findall(_MARKUP, said.replace('\\"', '"'))
        if (left := left - len(pieces)) < 0:
            problem = f"{name.strip()} has XML in it, and the job has more than {_MOST_MARKUP} pieces of such text."
            raise JobFault(MISMATCHED, problem, "write plain names and values.")
        for piece in pieces:
            if piece.lower() in lower:
                where = f"{name.strip()} has XML in it, and the description of the VM would have it, too"
                raise JobFault(MISMATCHED, f"{where}: {shown(piece)}.", "write plain names and values.")


def _run(argv: list[str], ad_lines: Iterable[str], deadline: float, log_line: Callable[[str], None], name: str) -> str:
    script = argv[0]
    # The last of two lines with one name counts: that is the server's line, which the job must not override.
    by_name: dict[str, str] = {}
    for line in ad_lines:
        key = line.partition("=")[0].strip().lower()
        by_name.pop(key, None)
        by_name[key] = line
    lines = [line for key, line in by_name.items() if not is_private(key)]
    # A value with a newline must not become an attribute of its own.
    text = "".join(line.replace("\n", " ") + "\n" for line in (*lines, ""))
    label = f"{SETTING} ({script})"
    by_hand = "run it by hand as root with a job ad on stdin, and see the server's log."
    output, status, last = hooks.converse(
        label,
        argv,
        deadline=deadline,
        log_line=log_line,
        hint=by_hand,
        stdin=text.encode("utf-8", "surrogateescape"),
        environ=condor_environment(os.environ),
        longest=LONGEST_XML,
        log_label=SETTING,
    )
    xml = hooks.text_of(label, output, status, last, by_hand)
    if not xml.strip():
        raise MachineFault(f"{label} printed no XML.{last}", by_hand)
    if "\0" in xml:
        raise MachineFault(f"{label} printed a NUL, which no XML may hold.", by_hand)
    made = join_lines(xml)
    try:
        domain = etree.fromstring(made)  # noqa: S314 - libvirt parses the same text, and as much of it
    except etree.ParseError as error:
        what = f"{error}" if xml.lstrip().startswith("<") else shown(redact(xml.strip())[:200])
        raise MachineFault(f"{label} printed what is not XML: {what}.{last}", by_hand) from error
    if name and domain.findtext("name") != name:
        other = f"{label} printed the XML of {shown(domain.tag)}, and not of a domain."
        renamed = f"{label} named the domain {shown(domain.findtext('name'))}."
        hint = f"let it use VMPARAM_VM_NAME, here {name}: the startd looks for the VM under that name."
        raise MachineFault(renamed if domain.tag == "domain" else other, hint)
    return made


def extra_lines(
    ad_lines: Iterable[str], *, bootloader: str = "", bridge_interface: str = "", networking_type: str = ""
) -> list[str]:
    """Return the lines that the server adds to the ad for the script, in the order of condor_vm-gahp.

    ``VMPARAM_Xen_Bootloader`` is always there, and empty for other hypervisors; an empty ``VMPARAM_Xen_Initrd`` and
    ``JobVMNetworkingType`` are added if the ad has none, ``VMPARAM_Bridge_Interface`` if there is one or the job has
    one. `networking_type` is the type that the job gets, or "" when it gets no network.
    """
    there = {line.partition("=")[0].strip().lower() for line in ad_lines}
    added = [("VMPARAM_Xen_Bootloader", bootloader)]
    if "vmparam_xen_initrd" not in there:
        added.append(("VMPARAM_Xen_Initrd", ""))
    if bridge_interface or "vmparam_bridge_interface" in there:
        added.append(("VMPARAM_Bridge_Interface", bridge_interface))
    if "jobvmnetworkingtype" not in there:
        added.append(("JobVMNetworkingType", networking_type))
    return [f"{name} = {_quoted(value)}" for name, value in added]


def _quoted(value: str) -> str:
    """Quote a string as a literal of the ClassAd language."""
    for plain, escaped in (("\\", "\\\\"), ('"', '\\"'), ("\n", "\\n"), ("\r", "\\r")):
        value = value.replace(plain, escaped)
    return f'"{value}"'


def parse_arguments(text: str) -> list[str]:
    """Split LIBVIRT_XML_SCRIPT_ARGS as HTCondor splits arguments.

    They are either plain words between white space, or, if the whole begins with a double quote, in the quoted form,
    which ends at the closing double quote (two of them stand for one). It has words between white space, in which
    single quotes group (two of them stand for one inside) (``ArgList::AppendArgsV1RawOrV2Quoted`` in
    ``src/condor_utils/condor_arglist.cpp``). Raises `MachineFault` if a quote is not closed.
    """
    if not text.lstrip(_BLANK).startswith('"'):
        return re.findall(f"[^{_SPACE}]+", text)
    quoted = re.match(f'[{_BLANK}]*"((?:[^"]|"")*+)"', text)
    if quoted is None:
        raise _bad_arguments(text, "its double quote is not closed")
    if rest := text[quoted.end() :].strip(_BLANK):
        raise _bad_arguments(text, f"{rest!r} follows the closing double quote")
    raw = quoted[1].replace('""', '"')
    lone = re.sub(_WORD, lambda word: " " * len(word[0]), raw).find("'")
    if lone >= 0:
        raise _bad_arguments(text, f"the single quote before {raw[lone + 1 :]!r} is not closed")
    return [re.sub("'((?:[^']|'')*)'", lambda of: of[1].replace("''", "'"), word) for word in re.findall(_WORD, raw)]


def _bad_arguments(text: str, why: str) -> MachineFault:
    hint = "quote it as in the submit command 'arguments', or without any quotes."
    return MachineFault(f"{ARGUMENTS_SETTING} = {text} cannot be read: {why}.", hint)


def require_trustworthy(script: str) -> None:
    """Make sure that only root, or the caller, can have written the script. Raises `MachineFault`."""
    trust.require_trustworthy(script, SETTING, _OR)


def inspect(script: str, arguments: str) -> str:
    """Check the script without running it; return its interpreter, if it has one. Raises `MachineFault`."""
    parse_arguments(arguments)
    path, _, rest = script.partition(" ")
    if rest and not os.path.lexists(script) and os.path.lexists(path):
        hint = f"set {SETTING} = {path} and {ARGUMENTS_SETTING} = {rest}."
        raise MachineFault(f"{SETTING} = {script} has arguments, and there is no file of that name.", hint)
    require_trustworthy(script)
    try:
        with open(script, "rb") as file:
            first = file.read(256).partition(b"\n")[0]
    except PermissionError:
        return ""  # programs can be run without being readable
    except OSError as error:
        raise MachineFault(f"{SETTING} = {script} cannot be read: {error.strerror}.", f"look at it, {_OR}.") from error
    interpreter = _interpreter(first.decode(errors="surrogateescape"))
    if interpreter is None:
        return ""
    if not os.access(interpreter, os.X_OK):
        line = shown(first.decode(errors="replace"))
        problem = f"{SETTING} = {script} cannot be run: it begins with {line}, and no such interpreter is there."
        hint = f"install it, or correct the first line (such as #!/bin/sh, with no carriage return), {_OR}."
        raise MachineFault(problem, hint)
    return interpreter


def judge(script: str, arguments: str, *, blind: bool) -> Finding:
    """Make the finding of `inspect`; a failure is unknown if the caller is `blind`: not the user to run the script."""
    subject = f"{SETTING}: the file, its interpreter, and who can write to them"
    try:
        interpreter = inspect(script, arguments)
        weak = trust.changeable_by_others(interpreter) if interpreter and os.geteuid() == 0 else ""
    except MachineFault as fault:
        return findings.judge("script", subject, fault, "", findings.UNKNOWN if blind else findings.BAD)
    if weak:
        seen = f"{script} is run by {interpreter}, and others than root can change {weak}: they become root by it."
        return findings.Finding("script", findings.OFF, subject, seen, "let the script name an interpreter of root's.")
    return findings.Finding("script", findings.OK, subject, f"{script} is there, and what runs it")


def _interpreter(line: str) -> str | None:
    """Find the interpreter of a script by its first line; empty if it has none, None for a binary program."""
    if not line.startswith("#!"):
        return "" if line.isascii() and line.isprintable() else None
    program, *words = list(filter(None, line[2:].replace("\t", " ").split(" "))) or [""]
    if os.path.basename(program) != "env" or not os.path.exists(program):
        return program
    name = next((word for word in words if not word.startswith("-") and "=" not in word), "")
    return shutil.which(name, path=condor_environment(os.environ)["PATH"]) or ""


def join_lines(text: str) -> str:
    """Join the script's lines into one text, as condor_vm-gahp does, but without joining two words.

    That server drops all line endings. So a ``<name>`` on lines of its own is clean there, and the same script must
    give the same name here; but an element whose attributes are on lines of their own without indentation is broken
    there. So line endings are dropped in text, in comments and inside quotes, and kept between the attributes of a tag.
    """

    def join(part: re.Match[str]) -> str:
        if part["tag"] is None:
            return re.sub("\r?\n", "", part[0])
        ends = r"\"[^\"]*+\"?|'[^']*+'?|\r?\n"
        return re.sub(ends, lambda end: re.sub("\r?\n", "", end[0]) or "\n", part[0])

    return _PART.sub(join, text)
