"""Connections to a guest from the submit machine: the forwarded port, and the program to use."""

import contextlib
import json
import os
import re
import socket
from collections.abc import Sequence
from typing import NamedTuple

from vmgahp.commands.queue import ask_condor_q, job_id
from vmgahp.errors import NO_JOBCLASSAD_INFO, ClientFault
from vmgahp.host.run import run
from vmgahp.job.ad import JobAd
from vmgahp.text import escape

TO_NODE = "condor_ssh_to_job"
NODE_DEADLINE = 120.0
"""The deadline in seconds for the connection to the machine; a starter that is busy with a START or a checkpoint delays
it."""

LARGEST_FILE = 1 << 16

_ANY = ("0.0.0.0", "::")  # noqa: S104 - the addresses on which a machine listens
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]{0,252}", re.ASCII)
_WAY = re.compile(r"([0-9]{1,5})=\[?([0-9a-fA-F.:]{2,45})\]?:([0-9]{1,5})", re.ASCII)


class Way(NamedTuple):
    """A port of a machine that is forwarded to one of a guest."""

    address: str
    port: int
    host: str
    """The machine's name, if the ad has it."""
    identity: str
    """The name of the guest in ssh's known hosts."""

    @property
    def reached(self) -> str:
        """The host to connect to from elsewhere; empty if only processes on the machine can connect."""
        if self.address in _ANY:
            return self.host
        return "" if self.address.startswith("127.") or self.address == "::1" else self.address


def of_job(job: str, port: int) -> Way:
    """Find the forwarded port of a job's guest in its ad, or else in its file on the machine. Raises `ClientFault`."""
    lines = ask_condor_q(job).strip().partition("\n\n")[0].split("\n")
    ad = JobAd([pair for line in lines if (pair := JobAd.parse_line(line.strip("\r")))])
    host = (ad.string("RemoteHost") or "").rpartition("@")[2]
    if not host:
        raise _none(f"job {job} runs nowhere", "wait until it does: condor_q says so.")
    ways = _of_text(ad.string("ChirpVMSSH") or "") or _of_file(job)
    if port not in ways:
        hint = "give it +VMPARAM_vm_SSH = true, or a list of ports, and a machine that opens some (VM_kvm_ATTR_ssh)."
        raise _none(f"no port of its machine leads to port {port} of the guest of job {job}", hint)
    identity = re.sub(r"[^A-Za-z0-9._-]", "-", ad.string("GlobalJobId") or job)[:200]
    return Way(*ways[port], host if _HOST.fullmatch(host) else "", f"vm-{identity}")


def ssh(way: Way, job: str, login: str, words: Sequence[str], *, by_node: bool) -> list[str]:
    """Make the command line of ssh for the guest. Raises `ClientFault`."""
    command = ["ssh", "-o", f"HostKeyAlias={way.identity}", "-o", "CheckHostIP=no"]
    host = way.reached
    if by_node or not host:
        host = "127.0.0.1" if way.address in _ANY else way.address
        inside = f"[{host}]" if ":" in host else host
        command += ["-o", f"ProxyCommand={TO_NODE} -ssh 'ssh -W {inside}:{way.port}' {job_id(job)}"]
    if login.startswith("-"):
        raise _none(f"{login} is no name of a user", "say it as -l USER.")
    command += ["-p", str(way.port), *(["-l", login] if login else [])]
    return [*command, "--", host, *(words[1:] if words[:1] == ["--"] else words)]


def on_node(job: str, *words: str) -> list[str]:
    """Make the command line that runs a command in the job's scratch directory. Raises `ClientFault`."""
    return [TO_NODE, job_id(job), *words]


def read_file(job: str, name: str) -> object:
    """Read a file of the job's scratch directory as JSON. Raises `ClientFault`."""
    try:
        done = run(
            on_node(job, "cat", name), deadline=NODE_DEADLINE, environ=os.environ, directory="", longest=LARGEST_FILE
        )
    except OSError as error:
        raise _none(f"{TO_NODE} cannot be run: {error.strerror}", "run this where HTCondor is.") from error
    lines = [line for line in done.out.decode("utf-8", "replace").splitlines() if line.startswith("{")]
    try:
        return json.loads(lines[-1])
    except (ValueError, IndexError, RecursionError) as error:
        said = f": {escape(done.complaints[-1][:300])}" if done.complaints else ""
        raise _none(f"{name} of job {job} cannot be read{said}", f"try {TO_NODE} {job} cat {name}") from error


def become(command: list[str]) -> int:
    """Replace this process by a program. Raises `ClientFault` if it is missing."""
    try:
        os.execvp(command[0], command)  # noqa: S606 - no shell
    except OSError as error:
        hint = f"install it, or see that {command[0]} is in PATH."
        raise _none(f"{command[0]} cannot be run: {error.strerror}", hint) from error


def _of_text(text: str) -> dict[int, tuple[str, int]]:
    found: dict[int, tuple[str, int]] = {}
    for each in filter(None, map(_WAY.fullmatch, text[:1000].split())):
        with contextlib.suppress(ValueError, OSError):
            found |= [_checked(*each.groups())]
    return found


def _of_file(job: str) -> dict[int, tuple[str, int]]:
    said = read_file(job, "vm_access.json")
    ways = said.get("ssh") if isinstance(said, dict) else None
    try:
        rows = [(each["guest_port"], each["address"], each["port"]) for each in ways]  # type: ignore[union-attr]
        return dict(_checked(*map(str, row)) for row in rows)
    except (TypeError, KeyError, ValueError, OSError) as error:
        raise _none(f"vm_access.json of job {job} does not say where the way in is", "see what is in it.") from error


def _checked(guests: str, address: str, ours: str) -> tuple[int, tuple[str, int]]:
    """Parse one forwarded port. Raises ValueError or OSError for an invalid port or address."""
    socket.inet_pton(socket.AF_INET6 if ":" in address else socket.AF_INET, address)
    port = int(ours)
    if not 0 < port < 1 << 16:
        raise ValueError(ours)
    return int(guests), (address, port)


def _none(problem: str, hint: str) -> ClientFault:
    return ClientFault(NO_JOBCLASSAD_INFO, f"{problem}.", hint)
