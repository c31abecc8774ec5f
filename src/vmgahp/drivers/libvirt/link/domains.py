"""The domains of this machine: their owner, their end, and the process and the log of their QEMU.

A VM has the name that the startd knows, of its user, cluster and process. Two schedds may give one user the same; the
later one's VM then gets a name derived from it, and does not end the first one's guest.
"""

import os
import re
import signal
from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple
from xml.etree import ElementTree as etree

import libvirt

from vmgahp import errors
from vmgahp.drivers.libvirt.link import faults
from vmgahp.drivers.libvirt.link.connection import LibvirtConnection
from vmgahp.drivers.surveyor import Logger
from vmgahp.host import proc, system_logs, wait
from vmgahp.host.runtime_dir import is_claimed
from vmgahp.host.starter import is_one_job

LOOK = "vmgahp-look-"
"""The beginning of the names of plain guests (`vmgahp.drivers.libvirt.start.second_look`)."""
OWN_HEX = 8
"""The number of digits appended to the name of a VM whose own is taken."""


class NamedDomain(NamedTuple):
    """An existing domain."""

    name: str
    uuid: str
    directory: str  # the scratch directory of its job; empty if it has none
    is_strange: bool  # defined, and not by this package

    def is_left_over(self, working_dir: str) -> bool:
        """Return True if it belongs to the job of that directory, or to a server that is gone."""
        return os.path.normpath(self.directory) == os.path.normpath(working_dir) or not is_claimed(self.uuid)


def new_uuid() -> str:
    """Return a random UUID from the kernel."""
    with open("/proc/sys/kernel/random/uuid") as file:
        return file.read().strip()


def find(connection: libvirt.virConnect, name: str, uuid: str) -> libvirt.virDomain:
    """Return the domain that has both the name and the UUID.

    A checkpoint contains its UUID, and a forged one could have that of another's VM: a domain must never be selected
    by its UUID alone. Raises `libvirt.libvirtError`, in particular `faults.NoDomain`.
    """
    domain = connection.lookupByUUIDString(uuid)
    if domain.name() != name:
        raise faults.NoDomain(f"no domain has the name {name} and the UUID {uuid}")
    return domain


def free_name(connection: LibvirtConnection, name: str, working_dir: str, log: Logger) -> str:
    """Return `name`, or one derived from it if a VM of another job has that and runs. Raises `errors.Fault`."""
    taken = [each for each in _called(connection, name) if each.name == name and not each.is_left_over(working_dir)]
    if not taken:
        return name
    own = f"{name}_{new_uuid()[:OWN_HEX]}"
    log(f"a VM of another job is called {name}, and runs: this one is {own}")
    return own


def clear(connection: LibvirtConnection, name: str, working_dir: str, log: Logger) -> None:
    """Destroy the domains of the job's earlier servers, and of servers that are gone. Raises `errors.Fault`."""
    for left in _called(connection, name):
        if not left.is_left_over(working_dir):
            continue
        if left.is_strange:
            problem = f"A domain called {left.name} is defined in libvirt, and jobs' domains never are."
            raise errors.MachineFault(problem, f"see whose it is; then virsh undefine {left.name}.")
        log(f"{left.name} still runs from an earlier start: destroying it")
        try:
            connection.call(lambda opened: end(find(opened, left.name, left.uuid)))  # noqa: B023 - called here
        except libvirt.libvirtError as error:
            if not faults.is_no_domain(error):
                raise faults.from_libvirt(error, f"clearing a leftover {left.name}") from error


def sweep(connection: LibvirtConnection, log: Logger) -> None:
    """Remove the persistent domains of servers that are gone, unless their job has a directory. Raises nothing."""

    def remove(opened: libvirt.virConnect) -> None:
        for domain in opened.listAllDomains(libvirt.VIR_CONNECT_LIST_DOMAINS_PERSISTENT):
            if is_strange(domain) or is_claimed(domain.UUIDString()):
                continue  # a running job's directory may be a file system that never answers
            if domain.name().startswith(LOOK) or not os.path.isdir(_directory(domain)):
                log(f"{domain.name()} was left defined: removing it")
                end(domain)

    try:
        connection.call(remove)
    except (libvirt.libvirtError, errors.MachineFault) as error:
        log(f"clearing what others have left: {error}")


def require_free_mac(
    connection: libvirt.virConnect, mac: str, log: Logger, started_before: int | None = None, origin: str = ""
) -> None:
    """Check that no running VM has the MAC address `mac`: libvirt accepts duplicates, which break both networks.

    With the id of a domain, `started_before`, only domains started before it count, so that of two simultaneous
    starts just the later one is refused. Raises `errors.JobFault`, or `errors.MachineFault` if the address comes from
    a setting, the `origin`; and `libvirt.libvirtError`.
    """
    for domain in connection.listAllDomains(libvirt.VIR_CONNECT_LIST_DOMAINS_ACTIVE):
        try:
            number, text = domain.ID(), domain.XMLDesc()
        except libvirt.libvirtError as error:
            if faults.is_no_domain(error):
                continue  # it has ended meanwhile
            raise
        if number < 0 or (started_before is not None and number >= started_before) or mac not in text.lower():
            continue
        macs = etree.fromstring(text).iterfind("devices/interface/mac")
        if any(element.get("address", "").lower() == mac for element in macs):
            log(f"{mac} is the MAC address of {domain.name()}")
            if origin:
                problem = f"{mac}, which is of {origin}, is the address of another VM that runs on this machine."
                raise errors.MachineFault(problem, "let it give each VM an address of its own.")
            problem = f"JobVM_MACADDR = {mac} is the address of another VM that runs on this machine."
            hint = "leave vm_macaddr out, or give each job an address of its own."
            raise errors.JobFault(errors.MISMATCHED, problem, hint)


def mark(domain: etree.Element) -> None:
    """Mark the XML of a domain as that of a job."""
    metadata = domain.find("metadata")
    if metadata is None:
        metadata = etree.SubElement(domain, "metadata")
    if metadata.find(f"{{{MARK}}}job") is None:
        etree.SubElement(metadata, f"{{{MARK}}}job")


def matching(connection: libvirt.virConnect, match: str, uuid: str) -> libvirt.virDomain | None:
    """Return the domain to kill: by its name, or by the scratch directory of its job.

    The startd names that directory for every VM type but kvm and xen, or the directory in which the starter has made
    it (``VMUniverseMgr::killVM`` in HTCondor's ``condor_startd.V6/vmuniverse_mgr.cpp``). Raises `libvirt.libvirtError`.
    """
    found = [find(connection, match, uuid)] if uuid else connection.listAllDomains()
    if match.startswith("/") and not uuid:
        found = [each for each in found if is_one_job(_directory(each), match)]
    elif not uuid:
        # The startd cannot tell two VMs of one name apart; a server that lives ends its own.
        found = [each for each in found if _is_called(each.name(), match)]
        if len(found) > 1:
            found = [each for each in found if not is_claimed(each.UUIDString())]
    return next((each for each in found if not is_strange(each)), None)


def _called(connection: LibvirtConnection, name: str) -> list[NamedDomain]:
    def look(opened: libvirt.virConnect) -> list[NamedDomain]:
        named = [domain for domain in opened.listAllDomains() if _is_called(domain.name(), name)]
        return [NamedDomain(each.name(), each.UUIDString(), _directory(each), is_strange(each)) for each in named]

    return connection.ask(look, f"looking for a leftover {name}")


def _directory(domain: libvirt.virDomain) -> str:
    try:
        return str(domain.metadata(libvirt.VIR_DOMAIN_METADATA_DESCRIPTION, None))
    except libvirt.libvirtError:
        return ""  # the domain has none, or went away


def _is_called(name: str, match: str) -> bool:
    """Return True if a domain has this name, or one derived from it."""
    own = name.removeprefix(f"{match}_")
    return name == match or (own != name and len(own) == OWN_HEX and set(own) <= set("0123456789abcdef"))


# The end of a domain, and the mark of those of jobs


MARK = "urn:vmgahp:job"
"""The namespace of an element that tells a job's domain, left persistent by a crash, from an administrator's."""


def undefine(domain: libvirt.virDomain) -> None:
    """Make libvirt forget a domain when it stops, or at once if it does not run. Raises `libvirt.libvirtError`."""
    # `capabilities.forget_firmware` removes that file by its name.
    domain.undefineFlags(libvirt.VIR_DOMAIN_UNDEFINE_KEEP_NVRAM)


def end(domain: libvirt.virDomain) -> None:
    """Destroy a job's domain and its definition. Raises `libvirt.libvirtError`."""
    was_defined = is_persistent(domain) and not is_strange(domain)
    if was_defined:
        try:
            undefine(domain)
        except libvirt.libvirtError:
            if is_persistent(domain):
                raise
    try:
        domain.destroy()
    except libvirt.libvirtError as error:
        if not (was_defined and faults.is_no_domain(error)):
            raise


def is_persistent(domain: libvirt.virDomain) -> bool:
    try:
        return bool(domain.isPersistent())
    except libvirt.libvirtError:
        return False  # the domain went away


def is_strange(domain: libvirt.virDomain) -> bool:
    if not is_persistent(domain):
        return False
    try:
        domain.metadata(libvirt.VIR_DOMAIN_METADATA_ELEMENT, MARK)
    except libvirt.libvirtError as error:
        return not faults.is_no_domain(error)
    return False


# The process of QEMU, found without libvirtd, which may hang or be gone


PID_FILES = "{run}/libvirt/qemu/{name}.pid", "{run}/libvirt/qemu/run/{name}.pid"
"""The files in which libvirt's QEMU driver notes the pid of a domain: the system's daemon, then a user's own."""
KILL_WAIT = 10.0
"""Seconds to wait for a killed QEMU to exit; it has to free the guest's memory, and to wait for disks."""


def is_qemu(domain_type: str) -> bool:
    """Return True if domains of a type are run by QEMU."""
    return domain_type in ("", "kvm", "qemu")


def noted(name: str) -> Iterator[int]:
    """Yield the pids that libvirt has noted for the domain of that name; other processes may have them by now."""
    runs = ("/run", os.environ.get("XDG_RUNTIME_DIR"), f"/run/user/{os.getuid()}", os.path.expanduser("~/.cache"))
    for run, pattern in product(filter(None, runs), PID_FILES):
        try:
            with open(pattern.format(run=run, name=name)) as file:
                pid = int(file.read(32))
        except (OSError, ValueError):
            continue
        if pid > 0:
            yield pid


def is_qemu_of(pid: int, name: str, uuid: str) -> bool:
    """Return True if the process is the QEMU of both the name and the UUID, for the reason in `find`."""
    try:
        program = os.path.basename(os.readlink(f"/proc/{pid}/exe")).removesuffix(" (deleted)")
    except OSError:
        return False
    # Its beginning will do: libvirt puts the name first, and the UUID not far behind.
    words = os.fsdecode(proc.command_line(pid)).split("\0")
    if not program.startswith("qemu") or _option(words, "-uuid") != uuid:
        return False
    return f"{_option(words, '-name')},".startswith(f"guest={name.replace(',', ',,')},")


def _option(words: list[str], name: str) -> str:
    """Return the first value of an option; values that a job asks for come later."""
    return words[words.index(name) + 1] if name in words[:-1] else ""


def kill(name: str, uuid: str, seconds: float = KILL_WAIT) -> bool:
    """Kill the QEMU of a VM, by a pidfd, and wait; return False if it is not found, or has not ended in time."""
    for pid in noted(name):
        try:
            descriptor = os.pidfd_open(pid)
        except (OSError, OverflowError):
            continue  # there is no such process
        try:
            if is_qemu_of(pid, name, uuid):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                return wait.ready(descriptor, seconds)
        except ProcessLookupError:
            return True  # it ended during the check
        except PermissionError:
            continue  # another user's
        finally:
            os.close(descriptor)
    return False


# QEMU's log


PATIENCE = 2.0
"""Seconds to wait for the log; it is usually there at once."""
LOOKED_AT = 1 << 16
"""The number of bytes to read at the end of the log."""
_SILENT = re.compile(r"(unexpectedly closed the monitor( \(vm='.*'\))?|exited while connecting to monitor)(: *)?$")
_LOG_START = re.compile(rb"^[0-9-]+ [0-9:.]+\+0000: starting up ", re.MULTILINE)
_WORDS = re.compile(rb"^[0-9-]+T[0-9:.]+Z qemu[^ :]*: (.*)$", re.MULTILINE)


def says_nothing(message: str) -> bool:
    """Return True if an error of libvirt says that QEMU has ended, without the reason."""
    return _SILENT.search(message.rstrip()) is not None


def last_words(name: str, uuid: str, directories: Sequence[str] = ()) -> str:
    """Return QEMU's message at the last start under this name, if that was of `uuid`; empty if unknown."""
    # The system's libvirtd has one directory for its logs, and a user's own has another.
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    places = directories or ["/var/log/libvirt/qemu" if os.getuid() == 0 else f"{cache}/libvirt/qemu/log"]

    def attempt() -> str:
        found = (_search_log(os.path.join(directory, f"{name}.log"), uuid.encode()) for directory in places)
        return next(filter(None, found), "")

    return wait.until(attempt, PATIENCE, 0.05)


def _search_log(path: str, uuid: bytes) -> str:
    text = system_logs.tail(path, LOOKED_AT)
    starts = [found.start() for found in _LOG_START.finditer(text)]
    last = text[starts[-1] :] if starts else text
    if uuid not in last:
        return ""
    said = [words.decode("utf-8", "replace").strip() for words in _WORDS.findall(last)]
    return "qemu: " + said[-1] if said else ""
