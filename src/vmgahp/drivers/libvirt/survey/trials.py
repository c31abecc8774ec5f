"""The trial of QEMU and passt, started without libvirt to see that they work.

libvirt's capabilities show how QEMU was built. Whether a CPU model makes QEMU abort on this machine, or passt may
make namespaces here, shows only when they are run.
"""

import contextlib
import os
import shutil
import socket
import tempfile
from time import monotonic

from vmgahp import errors
from vmgahp.findings import Late
from vmgahp.host import kvm
from vmgahp.host.job_user import Identity
from vmgahp.host.run import run, which
from vmgahp.job.attributes import NINEP

_CPU_OF_MODE = {"host-passthrough": "host", "maximum": "max"}
"""QEMU's names for libvirt's CPU modes; libvirt works out host-model, for which the default CPU is tried."""
_QMP = b'{"execute": "qmp_capabilities"}\n{"execute": "quit"}\n'
"""The input that ends QEMU once it is up (QEMU's ``docs/interop/qmp-spec.rst``)."""


def start_qemu(path: str, accel: str, mode: str, machine: str, slirp: bool, identity: Identity, end: float) -> None:
    """Start QEMU with stopped CPUs and no devices, read its greeting, and let it quit.

    `accel` is a domain type, kvm or qemu. Raises `errors.MachineFault` if it does not start, and `Late` if it has not
    when the monotonic clock shows `end`.
    """
    command = [path, "-S", "-nodefaults", "-no-user-config", "-display", "none", "-m", "64"]
    command += ["-machine", f"{machine or 'none'},accel={'kvm' if accel == 'kvm' else 'tcg'}"]
    if cpu := _CPU_OF_MODE.get(mode):
        command += ["-cpu", cpu]
    if slirp:
        command += ["-netdev", "user,id=n0", "-device", "virtio-net-pci,netdev=n0,romfile="]
    command += ["-qmp", "stdio"]
    status, out, err = _run(command, _QMP, identity, end, [kvm.DEVICE] if accel == "kvm" else [])
    if status is None:
        raise Late(f"{path} was not up after {_patience(end)}.", "see what it waits for.")
    if status != 0 or b'"QMP"' not in out:
        said = _last_line(err) or f"it ended with status {status}"
        raise errors.MachineFault(
            f"{path} does not start with {accel} and the CPU mode {mode}: {said}.",
            "set VM_CPU_MODE to a mode that works here, or see why QEMU cannot have this one.",
        )


def require_share(kind: str, path: str, identity: Identity, end: float) -> None:
    """Check that QEMU can share a directory by `kind`; Enterprise Linux's has no 9p. Raises `errors.MachineFault`."""
    device = "virtio-9p-pci" if kind == NINEP else "vhost-user-fs-pci"
    status, _out, err = _run([path, "-device", f"{device},help"], b"", identity, end, [])
    if status != 0:
        raise errors.MachineFault(
            f"{path} shares no directories by {kind}: {_last_line(err) or 'it did not answer'}.",
            f"set VM_SHARE_SCRATCH to another, or have a QEMU that is built with {device}.",
        )


def start_passt(identity: Identity, end: float) -> None:
    """Start passt as the job's user, as libvirt does, and end it by a connection (``--one-off``).

    The command exits when its background process has taken over. It reports that it listens before it makes its
    namespaces, which may fail. Raises `errors.MachineFault` if it is missing or has not started when the monotonic
    clock shows `end`.
    """
    path = which("passt")
    if path is None:
        raise errors.MachineFault("passt is not installed.", "install passt.")
    directory = tempfile.mkdtemp(prefix="vmgahp-")
    try:
        if identity.switching:
            os.chown(directory, identity.uid, identity.gid)
        listener = os.path.join(directory, "socket")
        status, _out, err = _run([path, "--one-off", "--socket", listener], b"", identity, end, [])
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as client:
            client.settimeout(max(0.05, end - monotonic()))
            client.connect(listener)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    if status is None:
        raise errors.MachineFault(f"passt did not listen within {_patience(end)}.", "see what it waits for.")
    if status != 0:
        raise errors.MachineFault(
            f"passt does not start: {_last_line(err) or f'it ended with status {status}'}.",
            "see whether this machine allows user namespaces (sysctl user.max_user_namespaces).",
        )


def _run(
    command: list[str], stdin: bytes, identity: Identity, end: float, devices: list[str]
) -> tuple[int | None, bytes, bytes]:
    """Run a command as the job's user with the groups of `devices`; the status is None on a timeout."""
    groups = [os.stat(device).st_gid for device in devices if os.path.exists(device)]
    try:
        done = run(command, deadline=max(0.05, end - monotonic()), stdin=stdin, user=identity, groups=groups)
    except OSError as error:
        raise errors.MachineFault(
            f"{command[0]} cannot be run: {error.strerror}.", "see that it is installed and whole."
        ) from error
    return done.status, done.out, done.err


def _patience(end: float) -> str:
    return f"the {max(0.0, end - monotonic()):.1f} s that were left" if end > monotonic() else "its deadline"


def _last_line(err: bytes) -> str:
    lines = [line.strip() for line in err.decode("utf-8", "replace").splitlines() if line.strip()]
    return lines[-1][:300].rstrip(".") if lines else ""
