"""A check that Docker and podman run containers here, by running one (VM_PROBE_DOCKER).

As in HTCondor's own test of Docker, the container must exit with 37. Its image is empty, without any registry: it
runs this machine's own shell, from directories that are mounted read-only. This takes longer than a startd waits for a
probe, so a separate process does it; the probe waits for that until its deadline, and the next probes get the cached
result from `vmgahp.host.proof`.
"""

from __future__ import annotations

import os
import resource
import select
import shutil
import subprocess
import sys
import tempfile
from time import monotonic
from typing import NamedTuple

from vmgahp import errors, findings
from vmgahp.drivers.base import Value
from vmgahp.findings import OFF, OK, UNKNOWN, Finding
from vmgahp.host import proof
from vmgahp.host.job_user import Identity
from vmgahp.host.run import run, which

SETTING = "VM_PROBE_DOCKER"
DOCKER, PODMAN = "docker", "podman"
CHECK = "containers"

STATUS = 37
"""The exit status of a container that ran."""
DEADLINE = 20.0
"""The timeout of each command in seconds, as in HTCondor."""

EMPTY = bytes(10240)
"""A tar archive without files."""
OF_THE_MACHINE = ("/bin", "/lib", "/lib64", "/usr")
"""The directories of the shell and its libraries."""

_STORAGE = ("--storage-driver=vfs", "--storage-opt=vfs.ignore_chown_errors=true", "--events-backend=none")
_CONFINED = (
    *("--rm", "--network", "none", "--pull", "never", "--cap-drop", "all", "--security-opt", "label=disable"),
    *(f"--volume={path}:{path}:ro" for path in OF_THE_MACHINE if os.path.isdir(path)),
)
_LIMIT = 1024


class Seen(NamedTuple):
    """The result for one program."""

    program: str
    version: str
    """The first line of its version."""
    reason: str | None
    """The reason why no container runs, empty on success; None if it is not known yet."""


def look(identity: Identity, end: float) -> tuple[Seen, ...]:
    """Try the programs that are installed; return before the monotonic clock shows `end`."""
    begun = [(name, path, _begin(name, path, identity)) for name in (DOCKER, PODMAN) if (path := which(name))]
    return tuple(Seen(name, _version(path, end), _await(result, end)) for name, path, result in begun)


def judge(outcome: object) -> tuple[dict[str, Value], list[Finding]]:
    """Return the machine's attributes and findings for the result of `look`.

    An attribute is true or missing: a false HasDocker would override the startd's own result.
    """
    if isinstance(outcome, errors.Fault):
        return {}, [findings.judge(CHECK, SETTING, outcome, "", OFF)]
    assert isinstance(outcome, tuple)
    attributes: dict[str, Value] = {}
    found = []
    for seen in outcome:
        if seen.reason is None:
            said = f"{seen.program} had run no container when the probe had to answer; the next one is told."
            found.append(Finding(CHECK, UNKNOWN, seen.program, said))
        elif seen.reason:
            hint = f"run {seen.program} info as that user, or set {SETTING} = False."
            found.append(Finding(CHECK, OFF, seen.program, f"{seen.program} runs no container: {seen.reason}", hint))
        else:
            found.append(Finding(CHECK, OK, seen.program, f"a container ran by {seen.version}"))
            attributes |= {"HasDocker": True, "DockerVersion": seen.version} if seen.program == DOCKER else {}
            attributes |= {"HasPodman": True} if seen.program == PODMAN else {}
    if not outcome:
        found.append(Finding(CHECK, OFF, SETTING, "neither docker nor podman is installed", f"set {SETTING} = False."))
    return attributes, found


def _begin(name: str, path: str, identity: Identity) -> str | subprocess.Popen[bytes]:
    """Return the cached result, or start a process that makes the check and outlives this one."""
    if found := proof.recall(name, _stands_on(name, path, identity)):
        return found.reason
    keeps = "" if proof.LookAnew.depth else "keep"
    words = [sys.executable, "-I", "-m", __name__, name, path, str(identity.uid), str(identity.gid), keeps]
    null = subprocess.DEVNULL
    try:
        return subprocess.Popen(words, stdin=null, stdout=subprocess.PIPE, stderr=null, start_new_session=True)
    except OSError as error:
        return f"no process can be started: {error.strerror}"


def _await(begun: str | subprocess.Popen[bytes], end: float) -> str | None:
    if isinstance(begun, str):
        return begun
    assert begun.stdout is not None
    with begun.stdout as reader:
        if not select.select([reader], [], [], max(0.0, end - monotonic()))[0]:
            return None
        word, _, reason = os.read(reader.fileno(), 4096).decode("utf-8", "replace").partition(" ")
    return reason.strip() if word == "seen" else "the process that tries it has ended"


def _version(path: str, end: float) -> str:
    try:
        said = run([path, "-v"], deadline=max(0.1, min(2.0, end - monotonic()))).out.decode("utf-8", "replace")
    except OSError:
        return os.path.basename(path)
    lines = said.strip().splitlines()
    return "".join(letter for letter in lines[0][:100] if letter.isprintable()) if lines else os.path.basename(path)


def _stands_on(name: str, path: str, identity: Identity) -> str:
    who = f"{identity.uid}:{identity.gid}" if name == PODMAN else str(os.geteuid())
    return f"{proof.machine()}\n{proof.program(path)}\nasked {who}"


def trouble(name: str, path: str, identity: Identity) -> str:
    """Run a container; return the reason of a failure, empty if it ran."""
    room = ""
    try:
        # A short path: podman takes no runroot of more than 50 characters.
        room = tempfile.mkdtemp(prefix="vmgahp-", dir="/var/tmp")
        if name == PODMAN and identity.switching:
            os.chown(room, identity.uid, identity.gid)
        return _run(name, path, identity, room)
    except OSError as error:
        return f"{error.filename or path}: {error.strerror}"
    finally:
        if room:
            shutil.rmtree(room, ignore_errors=True)


def _run(name: str, path: str, identity: Identity, room: str) -> str:
    """Make the image, run it, remove it. Raises OSError."""
    environ = {**os.environ, "HOME": room, "XDG_RUNTIME_DIR": room}
    tag = f"localhost/vmgahp-probe:{os.path.basename(room)[7:].lower()}"
    command, options, user = [path], list(_CONFINED), None
    if name == PODMAN:
        user = identity
        command += ["--root", f"{room}/root", "--runroot", f"{room}/run", *_STORAGE]
        options += ["--cgroups=disabled", "--cgroup-manager=cgroupfs", "--log-driver", "none"]
        options += ["--security-opt", "no-new-privileges"]
        # By default podman raises the limits, which not every user may.
        for limit, number in (("nofile", resource.RLIMIT_NOFILE), ("nproc", resource.RLIMIT_NPROC)):
            hard = resource.getrlimit(number)[1]
            least = _LIMIT if hard == resource.RLIM_INFINITY else min(hard, _LIMIT)
            options.append(f"--ulimit={limit}={least}:{least}")

    def said(*words: str) -> tuple[int | None, str]:
        done = run([*command, *words], deadline=DEADLINE, environ=environ, user=user, stdin=EMPTY)
        return done.status, (done.complaints or ["it says nothing"])[-1][:300]

    status, words = said("import", "-", tag)
    if status != 0:
        return words if status is not None else f"it made no image within {DEADLINE:.0f} s"
    try:
        status, words = said("run", *options, tag, "/bin/sh", "-c", f"exit {STATUS}")
        if status == STATUS:
            return ""
        return words if status is not None else f"a container had not ended after {DEADLINE:.0f} s"
    finally:
        said("rmi", "--force", tag)
        if name == PODMAN:
            said("system", "migrate")  # ends the process that keeps its user namespace


def main(arguments: list[str]) -> None:
    """Try one program, keep the result, and print it for the probe."""
    name, path, uid, gid, keeps = arguments
    identity = Identity(int(uid), int(gid))
    stands_on = _stands_on(name, path, identity)
    reason = " ".join(trouble(name, path, identity).split())
    if keeps:
        proof.keep(name, stands_on, reason)
    try:
        os.write(1, f"seen {reason}".encode()[:4096])
    except OSError:
        pass  # the probe has answered without the result


if __name__ == "__main__":
    main(sys.argv[1:])
