"""A check that Docker and podman run containers here, by running one (VM_PROBE_DOCKER).

As in HTCondor's own test of Docker, the container must exit with 37. Its image is empty, without any registry: it
runs this machine's own shell, from directories that are mounted read-only.
"""

from __future__ import annotations

import os
import resource
import tempfile
from functools import partial
from time import monotonic

from vmgahp import errors, findings
from vmgahp.drivers.surveyor import Value
from vmgahp.findings import OFF, OK, UNKNOWN, Finding, Late
from vmgahp.host.job_user import Identity
from vmgahp.host.run import Finished, run, which

SETTING = "VM_PROBE_DOCKER"
DOCKER, PODMAN = "docker", "podman"
CHECK = "containers"

STATUS = 37
"""The exit status of a container that ran."""
CLEANUP = 0.5
"""The seconds that each command which removes something may take beyond the deadline."""
OF_THE_MACHINE = ("/bin", "/lib", "/lib64", "/usr")
"""The directories of the shell and its libraries."""

_STORAGE = ("--storage-driver=vfs", "--storage-opt=vfs.ignore_chown_errors=true", "--events-backend=none")
_CONFINED = (
    *("--rm", "--network", "none", "--pull", "never", "--cap-drop", "all", "--security-opt", "label=disable"),
    *(f"--volume={path}:{path}:ro" for path in OF_THE_MACHINE if os.path.isdir(path)),
)
_LIMIT = 1024


def look(identity: Identity, end: float) -> dict[str, object]:
    """Try the programs that are installed; return the version of each that works before `end`, or a fault."""
    tries = {name: partial(version, name, path, identity, end) for name in (DOCKER, PODMAN) if (path := which(name))}
    return findings.side_by_side(tries, end)


def judge(outcome: object) -> tuple[dict[str, Value], list[Finding]]:
    """Return attributes and findings for the outcome of `look`; a false HasDocker would overrule the startd's own."""
    if isinstance(outcome, errors.Fault):
        return {}, [findings.judge(CHECK, SETTING, outcome, "", OFF)]
    assert isinstance(outcome, dict)
    attributes: dict[str, Value] = {}
    found = []
    for name, seen in outcome.items():
        if isinstance(seen, errors.Fault):
            found.append(findings.judge(CHECK, name, seen, "", UNKNOWN if isinstance(seen, Late) else OFF))
            continue
        found.append(Finding(CHECK, OK, name, f"a container ran by {seen}"))
        attributes |= {"HasDocker": True, "DockerVersion": seen} if name == DOCKER else {"HasPodman": True}
    if not outcome:
        found.append(Finding(CHECK, OFF, SETTING, "neither docker nor podman is installed", f"set {SETTING} = False."))
    return attributes, found


def version(name: str, path: str, identity: Identity, end: float) -> str:
    """Run a container and return the program's version. Raises `errors.MachineFault`, which is `Late` at `end`."""
    try:
        # A short path: podman takes no runroot of more than 50 characters.
        with tempfile.TemporaryDirectory(prefix="vmgahp-", dir="/var/tmp", ignore_cleanup_errors=True) as directory:
            if name == PODMAN and identity.switching:
                os.chown(directory, identity.uid, identity.gid)
            reason = _run(name, path, identity, directory, end)
        said = run([path, "-v"], deadline=max(CLEANUP, end - monotonic())).out.decode("utf-8", "replace").strip()
    except OSError as error:
        reason = f"{error.filename or path}: {error.strerror}"
    if reason:
        hint = f"run {name} info as that user, or set {SETTING} = False."
        raise errors.MachineFault(f"{name} runs no container: {reason.rstrip('.')}.", hint)
    return "".join(letter for letter in said.partition("\n")[0][:100] if letter.isprintable()) or name


def _run(name: str, path: str, identity: Identity, directory: str, end: float) -> str:
    """Make the image, run it, remove it; return the reason of a failure. Raises OSError and `Late`."""
    environ = {**os.environ, "HOME": directory, "XDG_RUNTIME_DIR": directory}
    tag = f"localhost/vmgahp-probe:{os.path.basename(directory)[7:].lower()}"
    command, options, user = [path], list(_CONFINED), None
    if name == PODMAN:
        user = identity
        command += ["--root", f"{directory}/root", "--runroot", f"{directory}/run", *_STORAGE]
        options += ["--cgroups=disabled", "--cgroup-manager=cgroupfs", "--log-driver", "none"]
        options += ["--security-opt", "no-new-privileges"]
        # By default podman raises the limits, which not every user may.
        for limit, number in (("nofile", resource.RLIMIT_NOFILE), ("nproc", resource.RLIMIT_NPROC)):
            hard = resource.getrlimit(number)[1]
            least = _LIMIT if hard == resource.RLIM_INFINITY else min(hard, _LIMIT)
            options.append(f"--ulimit={limit}={least}:{least}")

    def ask(*words: str, least: float = 0.05) -> Finished:
        seconds = max(least, end - monotonic())
        return run([*command, *words], deadline=seconds, environ=environ, user=user, stdin=bytes(10240))

    def reason(done: Finished) -> str:
        if done.status is None:
            raise Late(f"{name} had run no container by the deadline.", f"see what {name} waits for.")
        return (done.complaints or ["it says nothing"])[-1][:300]

    made = ask("import", "-", tag)
    if made.status != 0:
        return reason(made)
    try:
        ran = ask("run", *options, tag, "/bin/sh", "-c", f"exit {STATUS}")
        return "" if ran.status == STATUS else reason(ran)
    finally:
        ask("rmi", "--force", tag, least=CLEANUP)
        if name == PODMAN:
            ask("system", "migrate", least=CLEANUP)  # ends the process that keeps its user namespace
