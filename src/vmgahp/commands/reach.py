"""``vmgahp ssh``, ``view`` and ``attach``: access to the guest of a job from the submit machine."""

import argparse
import codecs
import contextlib
import ipaddress
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import unicodedata
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import IO, NamedTuple, TextIO

from vmgahp.commands.arguments import UsageError, tell, whole
from vmgahp.commands.files import ask_condor_q, complaint, job_id, no_ad, pairs_of
from vmgahp.errors import ClientFault
from vmgahp.host import packages, wait
from vmgahp.host.run import run, which
from vmgahp.job.ad import UNIVERSE, JobAd
from vmgahp.text import escape

TO_NODE = "condor_ssh_to_job"
NODE_DEADLINE = 120.0
"""The deadline in seconds for the connection; a starter that is busy with a START or a checkpoint delays it."""

LARGEST_FILE = 1 << 16

_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]{0,252}", re.ASCII)
_SINFUL = re.compile(r"[<=+](\[[0-9a-fA-F:.-]+\]|[0-9.]+)[:-][0-9]+")
"""An address of an HTCondor daemon: ``<192.0.2.1:9618?addrs=192.0.2.1-9618+[2001-db8--1]-9618&…>``."""
_WAY = re.compile(r"([0-9]{1,5})=\[?([0-9a-fA-F.:]{2,45})\]?:([0-9]{1,5})", re.ASCII)

HELD = 5
SSH_PORT = 22
port = whole(65535, "no port: write a number")
CONSOLE = "vm_console.log"
_NODE_HINT = "the job's machine needs openssh-server, ssh-keygen and ENABLE_SSH_TO_JOB."

_USERS = {name: name for name in ("debian", "ubuntu", "fedora", "rocky", "almalinux", "alpine", "opensuse", "arch")}
_USERS |= {"centos": "cloud-user", "rhel": "cloud-user"}
"""The users that publishers' cloud images make, by a word in the image's name."""

_KEY = re.compile(r"ssh-ed25519 AAAAC3NzaC1lZDI1NTE5[A-Za-z0-9+/]{48}={0,2}", re.ASCII)
"""A host key, as cloud-init prints it on the console."""

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class Way(NamedTuple):
    """A port of a machine that is forwarded to one of a guest."""

    address: Address
    port: int
    host: str
    """The machine's name, if the ad has it."""
    machine: Collection[Address]
    """The addresses of the machine's startd. The job can name any other one, which is then the machine's to reach."""
    identity: str
    """The name of the guest in ssh's known hosts."""

    @property
    def reached(self) -> str:
        """The host to connect to from elsewhere; empty if that is for a process on the machine."""
        if self.address.is_unspecified:
            return self.host
        return str(self.address) if self.address in self.machine and not self.address.is_loopback else ""


def running(job: str) -> dict[str, str]:
    """Read the attributes of a VM job that runs, by names in lower case. Raises `ClientFault` for any other job."""
    pairs = pairs_of(ask_condor_q(job))
    ad = JobAd(pairs)
    if ad.integer("JobUniverse") not in (None, UNIVERSE):
        raise no_ad(f"job {job} is not a VM job", f"name one: condor_q -constraint 'JobUniverse == {UNIVERSE}'")
    if ad.integer("JobStatus") == HELD:
        reason = escape(ad.string("HoldReason") or "")[:300].rstrip(".")
        raise no_ad(f"job {job} is held: {reason}", f"correct what is said there, then condor_release {job}")
    if not ad.string("RemoteHost"):
        raise no_ad(f"job {job} does not run", f"wait until it does; condor_q -better-analyze {job} says why it waits.")
    return {name.lower(): value for name, value in pairs}


def way_of_job(job: str, attributes: Mapping[str, str], port: int) -> Way:
    """Find the forwarded port of a job's guest in its ad, or else in its file on the machine. Raises `ClientFault`."""
    ad = JobAd([*attributes.items()])
    host = (ad.string("RemoteHost") or "").rpartition("@")[2]
    ways = _of_text(ad.string("ChirpVMSSH") or "")
    if not ways and not [name for name in attributes if name.endswith("_ssh") and attributes[name].lower() != "false"]:
        hint = "submit it with vm_networking = true, +VMPARAM_vm_SSH = true and requirements = VM_kvm_ATTR_ssh."
        raise no_ad(f"job {job} does not ask for ssh", hint)
    ways = ways or _of_file(job)
    if port not in ways:
        hint = f'submit it with +VMPARAM_vm_SSH = "{port}"; its machine opens ports where VM_SSH_PORTS has some free.'
        raise no_ad(f"no port of its machine leads to port {port} of the guest of job {job}", hint)
    identity = re.sub(r"[^A-Za-z0-9._-]", "-", ad.string("GlobalJobId") or job)[:200]
    machine = []
    for each in _SINFUL.findall(ad.string("StartdIpAddr") or ""):
        with contextlib.suppress(ValueError):
            machine.append(_address(each.strip("[]")))
    return Way(*ways[port], host if _HOST.fullmatch(host) else "", machine, f"vm-{identity}")


def host_key(job: str) -> str:
    """Read the guest's host key in its console's log, as cloud-init has printed it; empty if it is not there."""
    command = on_node(job, "grep", "-a", "-A9", "BEGIN.SSH.HOST.KEY.KEYS", CONSOLE)
    with contextlib.suppress(OSError):
        done = run(command, deadline=30.0, environ=os.environ, directory="", longest=LARGEST_FILE)
        return str(["", *_KEY.findall(done.out.decode("utf-8", "replace"))][-1])
    return ""


def ssh(way: Way, job: str, login: str, words: Sequence[str], *, by_node: bool, key: str = "") -> list[str]:
    """Make the command line of ssh for the guest; `key` is its host key, if known. Raises `ClientFault`."""
    command = ["ssh", "-o", f"HostKeyAlias={way.identity}", "-o", "CheckHostIP=no"]
    if key:  # that of this start of the guest: an earlier one had another
        command += ["-o", f"KnownHostsCommand=/bin/echo {way.identity} {key}", "-o", "StrictHostKeyChecking=yes"]
        command += ["-o", "UserKnownHostsFile=/dev/null", "-o", "HostKeyAlgorithms=ssh-ed25519"]
    host = way.reached
    if by_node or not host:
        host = "127.0.0.1" if way.address.is_unspecified else str(way.address)
        inside = f"[{host}]" if ":" in host else host
        command += ["-o", f"ProxyCommand={TO_NODE} -ssh 'ssh -W {inside}:{way.port}' {job_id(job)}"]
    if login.startswith("-"):
        raise no_ad(f"{login} is no name of a user", "say it as -l USER.")
    command += ["-p", str(way.port), *(["-l", login] if login else [])]
    return [*command, "--", host, *(words[1:] if words[:1] == ["--"] else words)]


def on_node(job: str, *words: str) -> list[str]:
    """Make the command line that runs a command in the job's scratch directory. Raises `ClientFault`."""
    return [TO_NODE, job_id(job), *words]


def read_file(job: str, name: str) -> object:
    """Read a file of the job's scratch directory as JSON. Raises `ClientFault`, or OSError without the program."""
    command = on_node(job, "cat", name)
    done = run(command, deadline=NODE_DEADLINE, environ=os.environ, directory="", longest=LARGEST_FILE)
    lines = [line for line in done.out.decode("utf-8", "replace").splitlines() if line.startswith("{")]
    try:
        return json.loads(lines[-1])
    except (ValueError, IndexError, RecursionError) as error:
        said = f": {complaint(done)}" if done.complaints else ""
        hint = _NODE_HINT if "ssh" in said else f"try {TO_NODE} {job} cat {name}"
        raise no_ad(f"{name} of job {job} cannot be read{said}", hint) from error


def follow(command: list[str]) -> int:
    """Print a program's output without control characters that a guest could use; return its status. Raises OSError."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        # Whatever else is of the job's user there can write to both.
        complaints = wait.start_thread("complaints", _print, child.stderr, sys.stderr)
        _print(child.stdout, sys.stdout)
        complaints.join()
    if child.returncode > 0:
        sys.stderr.write(f"{TO_NODE} ended with status {child.returncode}. Hint: {_NODE_HINT}\n")
    return child.returncode


def _print(pipe: IO[bytes] | None, stream: TextIO) -> None:
    assert pipe is not None
    text = codecs.getincrementaldecoder("utf-8")("replace")
    while data := os.read(pipe.fileno(), 1 << 16):
        shown = (c for c in text.decode(data) if c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cf"))
        stream.write("".join(shown))
        stream.flush()


def _of_text(text: str) -> dict[int, tuple[Address, int]]:
    found: dict[int, tuple[Address, int]] = {}
    for each in filter(None, map(_WAY.fullmatch, text[:1000].split())):
        with contextlib.suppress(ValueError):
            found |= [_checked(*each.groups())]
    return found


def _of_file(job: str) -> dict[int, tuple[Address, int]]:
    said = read_file(job, "vm_access.json")
    ways = said.get("ssh") if isinstance(said, dict) else None
    try:
        rows = [(each["guest_port"], each["address"], each["port"]) for each in ways]  # type: ignore[union-attr]
        return dict(_checked(*map(str, row)) for row in rows)
    except (TypeError, KeyError, ValueError) as error:
        raise no_ad(f"vm_access.json of job {job} does not say where the way in is", "see what is in it.") from error


def _checked(guests: str, address: str, ours: str) -> tuple[int, tuple[Address, int]]:
    """Parse one forwarded port. Raises ValueError for an invalid port or address."""
    port = int(ours)
    if not 0 < port < 1 << 16:
        raise ValueError(ours)
    return int(guests), (_address(address), port)


def _address(text: str) -> Address:
    """Parse an address; an IPv4 address in one of IPv6 (``::ffff:127.0.0.1``) is the former. Raises ValueError."""
    address = ipaddress.ip_address(text if "." in text else text.replace("-", ":"))
    if getattr(address, "scope_id", None):  # any text, which would get into a command line
        raise ValueError(text)
    return getattr(address, "ipv4_mapped", None) or address


def show_display(job: str) -> int:
    """Show the display until the viewer is closed; return the exit status. Raises `ClientFault`, OSError."""
    if running(job).get("jobvmvncconsole", "false").lower() == "false":
        raise no_ad(f"job {job} has no display", "submit it with vm_vnc = true; vmgahp attach shows its console.")
    port, password = _where(job)
    viewer = next((name for name in ("remote-viewer", "vncviewer") if which(name)), "")
    with _tunnel(job, port) as here, tempfile.TemporaryDirectory(prefix="vmgahp-") as directory:
        if viewer == "remote-viewer":
            path = f"{directory}/display.vv"
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(f"[virt-viewer]\ntype=vnc\nhost=127.0.0.1\nport={here}\npassword={password}\n")
            return subprocess.run([viewer, path], check=False).returncode
        if viewer:
            told = dict(os.environ, VNC_PASSWORD=password)
            return subprocess.run([viewer, f"127.0.0.1::{here}"], env=told, check=False).returncode
        where = f"The display is at 127.0.0.1:{here} here, with the password {password}, until you press Enter."
        sys.stdout.write(where + "\n")
        sys.stdout.flush()
        sys.stdin.readline()
        return 0


def _where(job: str) -> tuple[int, str]:
    match read_file(job, "vm_vnc.json"):
        case {"port": int(port), "password": str(password)} if 0 < port < 1 << 16 and password.isprintable():
            return port, password
    raise no_ad(f"vm_vnc.json of job {job} names no display", "see what is in it.")


@contextlib.contextmanager
def _tunnel(job: str, port: int) -> Iterator[int]:
    """Open a tunnel and yield its port on this machine's loopback address. Raises `ClientFault`, OSError."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        here = int(free.getsockname()[1])
    through = f"ssh -N -o ExitOnForwardFailure=yes -L 127.0.0.1:{here}:127.0.0.1:{port}"
    command = [TO_NODE, "-ssh", through, job_id(job)]
    tunnel = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        begun = wait.until(lambda: tunnel.poll() is not None or _is_ours(here), NODE_DEADLINE, 0.1)
        if not begun or tunnel.poll() is not None:
            raise no_ad(f"{TO_NODE} has made no way to the display", "see what it has said above.")
        yield here
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(tunnel.pid, 15)
        try:
            tunnel.wait(5.0)
        except subprocess.TimeoutExpired:
            os.killpg(tunnel.pid, 9)
            tunnel.wait()


def _is_ours(port: int) -> bool:
    """Return True if a process of this user listens at the loopback port. Another user can take it before the tunnel
    does, and would get the display's password.
    """
    address = int.from_bytes(socket.inet_aton("127.0.0.1"), sys.byteorder)
    with open("/proc/net/tcp", encoding="ascii") as table:
        rows = [line.split() for line in table]
    listening = [f"{address:08X}:{port:04X}", "0A", str(os.geteuid())]
    return any([row[1], row[3], row[7]] == listening for row in rows)


def add_ssh(command: argparse.ArgumentParser) -> None:
    """Run ssh to the guest of a job that has +VMPARAM_vm_SSH, by the port that its machine has opened for it. Where
    only who is on that machine reaches the port, condor_ssh_to_job leads there."""
    _add_job(
        command,
        ("vmgahp ssh 12.0", "a shell in the guest of that job"),
        ("vmgahp ssh -l root 12.0 uptime", "one command there, as root"),
    )
    add = command.add_argument
    words = add("words", nargs=argparse.REMAINDER, metavar="COMMAND", help="what to run there; none: a shell")
    words.required = False  # otherwise argparse reports it as missing if JOB is
    add("-l", "--login", default="", metavar="USER", help="the guest's user (default: a cloud image's own, else ssh's)")
    add("-p", "--port", type=port, default=SSH_PORT, metavar="PORT", help="the guest's port (default: 22)")
    add("--by-node", action="store_true", help="go by condor_ssh_to_job, also where the port can be reached from here")
    command.set_defaults(run=_ssh)


def add_view(command: argparse.ArgumentParser) -> None:
    """Show the display of a job with vm_vnc = true: condor_ssh_to_job leads to it, and remote-viewer or vncviewer shows
    it. The password is the one of vm_vnc.json."""
    _add_job(command, ("vmgahp view 12.0", "the display of that job"))
    command.set_defaults(run=lambda options: show_display(options.job))


def add_attach(command: argparse.ArgumentParser) -> None:
    """Show what the guest of a job has written to its serial console, and what it goes on writing, by
    condor_ssh_to_job, without control characters. Nothing that is typed gets to the guest."""
    _add_job(command, ("vmgahp attach 12.0", "its console, until Control-C"))
    command.set_defaults(run=_attach)


def _add_job(command: argparse.ArgumentParser, *examples: tuple[str, str]) -> None:
    command.add_argument("job", type=job, metavar="JOB", help="the job's id, such as 12.0")
    statuses = {0: "The program that was run says so.", 1: "There is no way to the guest; or that program's own."}
    tell(command, examples=examples, statuses=statuses)


def job(text: str) -> str:
    try:
        return job_id(text)
    except ClientFault as fault:
        raise UsageError(f"{text!a} is no job id: write it as 12.0") from fault


def _attach(options: argparse.Namespace) -> int:
    running(options.job)
    return follow(on_node(options.job, "tail", "-n", "+1", "-F", CONSOLE))


def _ssh(options: argparse.Namespace) -> int:
    attributes = running(options.job)
    way = way_of_job(options.job, attributes, options.port)
    disks = " ".join(value for name, value in attributes.items() if name.endswith("_disk")).lower()
    users = (user for name, user in _USERS.items() if re.search(rf"\b{name}\b", disks))
    login = options.login or next(users, "")
    key = host_key(options.job) if options.port == SSH_PORT else ""
    command = ssh(way, options.job, login, options.words, by_node=options.by_node, key=key)
    try:
        os.execvp(command[0], command)  # noqa: S606 - no shell
    except OSError as error:
        hint = packages.of_system("openssh-client", "openssh-clients")
        raise no_ad(f"{command[0]} cannot be run: {error.strerror}", hint) from error
