"""The drive that tells a guest's cloud-init what to do at its first boot.

The NoCloud data source takes any drive with the label ``cidata`` that has the files ``user-data`` and
``meta-data``, and perhaps ``network-config``
(https://cloudinit.readthedocs.io/en/latest/reference/datasources/nocloud.html). cloud-init does most of its work
once for each instance-id, so that must be the same whenever the job's VM runs on; and since the drive is one of the
VM's disks, a VM that is restored must find it byte for byte as it was. So nothing is in it that another
machine or another hour would change.

User data often has passwords in it. The drive is for the job's user alone, its files are for the guest's root, it
goes when the VM does, and no word of its content is in any message.
"""

import json
import os
import re
from collections.abc import Sequence

from vmgahp import errors
from vmgahp.errors import JobFault
from vmgahp.host.job_user import Identity
from vmgahp.host.light import NamedTuple
from vmgahp.images import iso
from vmgahp.job.ad import JobAd
from vmgahp.job.disks import DiskRequest, free_device
from vmgahp.job.options import META_DATA, NETWORK_CONFIG, USER_DATA, Options
from vmgahp.text import has_control

SEED_FILE = "vm_cidata.iso"
LABEL = "cidata"
LARGEST = 1 << 20
"""Bytes of each of the files; clouds allow some 16 or 64 KiB."""

_FILES = (USER_DATA, META_DATA, NETWORK_CONFIG)
"""The options that name the files, in the order of the fields of `Seed`."""

_CLOUD_INIT = (
    *(b"#cloud-config", b"#cloud-boothook", b"#include", b"#part-handler", b"#!", b"## template: jinja"),
    *(b"content-type:", b"mime-version:", b"from "),
)
"""What user data for cloud-init begins with, in lower case; the last three are a MIME message's. See
https://cloudinit.readthedocs.io/en/latest/explanation/format.html."""
_CLOUDBASE = (b"#ps1", b"rem cmd", b"<powershell", b"<script")
"""And for cloudbase-init, which does the same on Windows."""
_GZIP = b"\x1f\x8b"

_INSTANCE_ID = re.compile(rb"""^[^\S\n]*+(?:[{,][^\S\n]*+)?["']?instance-id["']?\s*+:\s*+\S""", re.MULTILINE)
"""Blanks are passed once: a file that has nothing else would keep this process busy for hours."""


class Seed(NamedTuple):
    """The files of the scratch directory that the drive is made of, by name; empty for one that the job has not."""

    user_data: str
    meta_data: str
    network_config: str
    instance: str
    """The instance-id, where the job brings no meta-data."""
    host_name: str
    said: tuple[str, ...] = ()
    """How the job names each of the files, for sentences to people."""


def wanted(options: Options, ad: JobAd) -> Seed | None:
    """What the job wants to tell cloud-init; None for nothing. Raises `JobFault`."""
    names = {option: options.string(option) for option in _FILES}
    if not names[USER_DATA]:
        for option in (META_DATA, NETWORK_CONFIG):
            if names[option]:
                raise options.refused(
                    option,
                    f"it is of no use without {options.attribute(USER_DATA)}",
                    f"set {options.attribute(USER_DATA)} too; a file with the one line #cloud-config will do.",
                )
        return None
    for option, path in names.items():
        # condor_submit leaves paths of the submit machine as they are.
        name = names[option] = os.path.basename(path)
        if path and (not name or name == SEED_FILE or has_control(name)):
            raise options.refused(
                option,
                "it is not a name of a file for it",
                'write the name of a transferred file, such as "user-data".',
            )
    name = ad.vm_name()
    return Seed(
        user_data=names[USER_DATA],
        meta_data=names[META_DATA],
        network_config=names[NETWORK_CONFIG],
        instance=ad.string("GlobalJobId") or name,
        host_name=_host_name(name),
        said=tuple(options.shown(option) for option in _FILES),
    )


def look(seed: Seed, working_dir: str, identity: Identity) -> None:
    """Make sure that the files are there, and such that cloud-init takes them. Raises `JobFault`."""
    for said, option, name in zip(seed.said, _FILES, seed[:3], strict=True):
        if not name:
            continue
        data = _read(said, name, working_dir, identity)
        if option == USER_DATA:
            _check_user_data(said, data)
        elif option == META_DATA and not _INSTANCE_ID.search(data):
            raise _refused(
                said,
                "the file has no instance-id, without which cloud-init takes every boot for the same VM's",
                "add a line such as instance-id: run-7, or leave the attribute out: then both are made.",
            )


def drive(disks: Sequence[DiskRequest]) -> DiskRequest:
    """The drive with the seed, behind the job's `disks`. Raises `JobFault`."""
    device = free_device(disks)
    if device:
        return DiskRequest("", SEED_FILE, device, "", False, "raw", "cdrom", made=True)
    raise JobFault(
        errors.INVALID_DISK_PARAM,
        f"VMPARAM_vm_Disk leaves no device for a drive, and VMPARAM_vm_{USER_DATA} needs one.",
        "use fewer disks.",
    )


def write(seed: Seed, working_dir: str, identity: Identity) -> None:
    """Make the drive, anew where there is one. Raises `JobFault` and `MachineFault`."""
    opened: list[int] = []
    try:
        contents: dict[str, bytes | int] = {"meta-data": _meta_data(seed)}
        for name, file in (
            ("user-data", seed.user_data),
            ("meta-data", seed.meta_data),
            ("network-config", seed.network_config),
        ):
            if file:
                opened.append(identity.open_scratch(working_dir, file, os.O_RDONLY))
                contents[name] = opened[-1]
        iso.write(working_dir, SEED_FILE, LABEL, contents, identity, most_bytes=3 * LARGEST, secret=True)
    except OSError as error:
        raise JobFault(
            errors.MISMATCHED,
            f"VMPARAM_vm_{USER_DATA} = {seed.user_data!a}: it or a companion cannot be opened any more: "
            f"{error.strerror}.",
            "see who has changed the job's scratch directory.",
        ) from error
    except iso.Unfit as unfit:
        raise JobFault(
            errors.MISMATCHED,
            f"VMPARAM_vm_{USER_DATA} = {seed.user_data!a}: of it and its companions no drive can be made: {unfit}.",
            f"send files of {LARGEST} bytes at most.",
        ) from unfit
    finally:
        for descriptor in opened:
            os.close(descriptor)


def _read(said: str, name: str, working_dir: str, identity: Identity) -> bytes:
    try:
        data = identity.read_scratch(working_dir, name, LARGEST + 1)
    except OSError as error:
        raise _refused(
            said,
            f"{name!a} in the job's scratch directory cannot be opened: {error.strerror}",
            "add it to transfer_input_files: a regular file, no link, that its owner may read.",
        ) from error
    if len(data) > LARGEST:
        raise _refused(said, f"the file has more than {LARGEST} bytes", "send what is large on a disk of its own.")
    return data


def _check_user_data(said: str, data: bytes) -> None:
    """By its first line cloud-init knows what user data is, and what it does not know it drops."""
    start = data[:64].lstrip().lower()
    if not start:
        problem = "the file is empty"
    elif start.startswith((*_CLOUD_INIT, *_CLOUDBASE, _GZIP)):
        return
    elif start.startswith((b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")):
        problem = "the file begins with a byte order mark, which hides its first line from cloud-init"
    else:
        problem = "cloud-init does not recognize its first line"
    raise _refused(
        said,
        problem,
        "let the file begin with #cloud-config, or with #! and an interpreter, or be a MIME message of such parts.",
    )


def _refused(said: str, problem: str, hint: str) -> JobFault:
    return JobFault(errors.MISMATCHED, f"{said}: {problem}.", hint)


def _meta_data(seed: Seed) -> bytes:
    """YAML, in which a JSON text is a text."""
    return (f"instance-id: {json.dumps(seed.instance)}\nlocal-hostname: {json.dumps(seed.host_name)}\n").encode()


def _host_name(name: str) -> str:
    """The VM's name as a host can be called (RFC 1123)."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:63].strip("-") or "vm"
