"""Whether Docker and podman run containers here, seen by one that ran (VM_PROBE_DOCKER).

As HTCondor's own test of Docker does it, the container is to end with 37. Its image is made here, of one program of
twelve bytes of code, and comes from no registry. That takes longer than a startd waits for a probe: a process of its
own runs it, for which the probe waits as long as it may, and writes down what it saw for the next ones, as
`vmgahp.host.proof` has it.
"""

import os
import sys
from time import monotonic

from vmgahp import errors, findings
from vmgahp.drivers.base import Value
from vmgahp.findings import OFF, OK, UNKNOWN, Finding
from vmgahp.host import proof
from vmgahp.host.job_user import Identity
from vmgahp.host.light import NamedTuple
from vmgahp.host.run import run, which

SETTING = "VM_PROBE_DOCKER"
DOCKER, PODMAN = "docker", "podman"
CHECK = "containers"

STATUS = 37
"""What a container that ran ends with."""

DEADLINE = 20.0
"""Seconds for each command of theirs, as HTCondor gives them."""

_PROGRAMS = {
    # exit(37) by the number of the machine in ELF: mov eax, 60; mov edi, 37; syscall, and the like.
    "x86_64": (62, "amd64", bytes.fromhex("b83c000000bf250000000f05")),
    "aarch64": (183, "arm64", bytes.fromhex("a80b80d2a00480d2010000d4")),
}

_STORAGE = ("--storage-driver=vfs", "--storage-opt=vfs.ignore_chown_errors=true", "--events-backend=none")
_LIMIT = 1024
_CONFINED = ("--rm", "--network", "none", "--pull", "never", "--cap-drop", "all")


class Seen(NamedTuple):
    """What came of one program."""

    program: str
    version: str
    """The first line that it says of itself."""
    reason: str | None
    """Why no container runs, empty where one did; None where that is not known yet."""


def look(identity: Identity, end: float) -> tuple[Seen, ...]:
    """Both programs, those that are installed; answers before the monotonic clock shows `end`."""
    begun = [(name, path, _begin(name, path, identity)) for name in (DOCKER, PODMAN) if (path := which(name))]
    return tuple(Seen(name, _version(path, end), _await(begun_as, end)) for name, path, begun_as in begun)


def judge(outcome: object) -> tuple[dict[str, Value], list[Finding]]:
    """The machine's attributes, of which none is ever false, and findings, by what `look` came to.

    What the startd has seen itself stands where nothing is printed: a false HasDocker here would take its place.
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


def _begin(name: str, path: str, identity: Identity) -> "str | tuple[int, int]":
    """What is known already, or a process that finds out: its descriptor to read from, and its id."""
    if found := proof.recall(name, _stands_on(name, path, identity)):
        return found.reason
    keeps = "" if proof.LookAnew.depth else "keep"
    ours, theirs = os.pipe2(os.O_CLOEXEC)
    try:
        actions = [(os.POSIX_SPAWN_OPEN, number, "/dev/null", os.O_RDWR, 0) for number in (0, 2)]
        pid = os.posix_spawn(
            sys.executable,
            [sys.executable, "-I", "-m", __name__, name, path, str(identity.uid), str(identity.gid), keeps],
            os.environ,
            file_actions=[*actions, (os.POSIX_SPAWN_DUP2, theirs, 1)],
            setsid=True,
        )
    except OSError as error:
        os.close(ours)
        return f"no process can be started: {error.strerror}"
    finally:
        os.close(theirs)
    return ours, pid


def _await(begun: "str | tuple[int, int]", end: float) -> str | None:
    if isinstance(begun, str):
        return begun
    from select import POLLIN, poll

    reader, _ = begun
    waits = poll()
    waits.register(reader, POLLIN)
    try:
        if not waits.poll(max(end - monotonic(), 0) * 1000):
            return None
        said = os.read(reader, 4096).decode("utf-8", "replace")
    finally:
        os.close(reader)
    word, _, reason = said.partition(" ")
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


def image(directory: str, tag: str) -> str:
    """Make the image in a directory, as ``docker save`` writes one; the path of the file. Raises OSError."""
    import io
    import json
    import tarfile
    from hashlib import sha256

    number, architecture, code = _PROGRAMS[os.uname().machine]
    base, head = 0x400000, 120
    program = b"\x7fELF\2\1\1" + bytes(9)
    fields: tuple[tuple[int, int], ...] = (
        (2, 2),
        (number, 2),
        (1, 4),
        (base + head, 8),
        (64, 8),
        (0, 8),
        (0, 4),
        (64, 2),
        (56, 2),
        (1, 2),
        (64, 2),
    )
    fields += ((0, 2), (0, 2), (1, 4), (5, 4), (0, 8), (base, 8), (base, 8), *((head + len(code), 8),) * 2, (4096, 8))
    program += b"".join(value.to_bytes(size, "little") for value, size in fields) + code

    def packed(files: dict[str, bytes], mode: int) -> bytes:
        into = io.BytesIO()
        with tarfile.open(fileobj=into, mode="w") as archive:
            for name, data in files.items():
                member = tarfile.TarInfo(name)
                member.size, member.mode = len(data), mode
                archive.addfile(member, io.BytesIO(data))
        return into.getvalue()

    layer = packed({f"exit_{STATUS}": program}, 0o755)
    config = {
        "architecture": architecture,
        "os": "linux",
        "config": {"Cmd": [f"/exit_{STATUS}"]},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{sha256(layer).hexdigest()}"]},
    }
    manifest = [{"Config": "config.json", "RepoTags": [tag], "Layers": ["layer.tar"]}]
    texts = {"config.json": config, "manifest.json": manifest}
    files = {name: json.dumps(text).encode() for name, text in texts.items()} | {"layer.tar": layer}
    path = os.path.join(directory, "image.tar")
    with open(path, "wb") as file:
        file.write(packed(files, 0o644))
    return path


def trouble(name: str, path: str, identity: Identity) -> str:
    """Run a container: why there is none, empty where it ran. Raises nothing."""
    import shutil
    import tempfile

    if os.uname().machine not in _PROGRAMS:
        return f"there is no image for {os.uname().machine}"
    room = ""
    try:
        # A short path: podman takes no runroot of more than 50 characters.
        room = tempfile.mkdtemp(prefix="vmgahp-", dir="/var/tmp")
        tag = f"localhost/vmgahp-probe:{os.path.basename(room)[7:].lower()}"
        archive = image(room, tag)
        if name == PODMAN and identity.switching:
            for each in (archive, room):  # once the room is that user's, any name in it may be a link
                os.chown(each, identity.uid, identity.gid)
        return _run(name, path, identity, room, tag)
    except OSError as error:
        return f"{error.filename or path}: {error.strerror}"
    finally:
        if room:
            shutil.rmtree(room, ignore_errors=True)


def _run(name: str, path: str, identity: Identity, room: str, tag: str) -> str:
    """Load the image, run it, forget it. Raises OSError."""
    import resource

    environ = {**os.environ, "HOME": room, "XDG_RUNTIME_DIR": room}
    command, options, user = [path], list(_CONFINED), None
    if name == PODMAN:
        user = identity
        command += ["--root", f"{room}/root", "--runroot", f"{room}/run", *_STORAGE]
        options += ["--cgroups=disabled", "--cgroup-manager=cgroupfs", "--log-driver", "none"]
        options += ["--security-opt", "no-new-privileges"]
        # It would raise them, which not everybody may.
        for limit, number in (("nofile", resource.RLIMIT_NOFILE), ("nproc", resource.RLIMIT_NPROC)):
            hard = resource.getrlimit(number)[1]
            least = _LIMIT if hard == resource.RLIM_INFINITY else min(hard, _LIMIT)
            options.append(f"--ulimit={limit}={least}:{least}")

    def said(*words: str) -> tuple[int | None, str]:
        done = run([*command, *words], deadline=DEADLINE, environ=environ, user=user)
        return done.status, (done.complaints or ["it says nothing"])[-1][:300]

    status, words = said("load", "-i", f"{room}/image.tar")
    if status != 0:
        return words if status is not None else f"it loads no image within {DEADLINE:.0f} s"
    try:
        status, words = said("run", *options, tag, f"/exit_{STATUS}")
        if status == STATUS:
            return ""
        return words if status is not None else f"a container had not ended after {DEADLINE:.0f} s"
    finally:
        said("rmi", "--force", tag)
        if name == PODMAN:
            said("system", "migrate")  # ends the process that keeps its user namespace


def main(arguments: "list[str]") -> None:
    """Try one program, write down what came of it, and tell whoever waits."""
    name, path, uid, gid, keeps = arguments
    identity = Identity(int(uid), int(gid))
    stands_on = _stands_on(name, path, identity)
    reason = " ".join(trouble(name, path, identity).split())
    if keeps:
        proof.keep(name, stands_on, reason)
    try:
        os.write(1, f"seen {reason}".encode()[:4096])
    except OSError:
        pass  # the probe had to answer without it


if __name__ == "__main__":
    main(sys.argv[1:])
