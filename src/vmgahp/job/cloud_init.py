"""The drive with the instructions for cloud-init at a guest's first boot.

The NoCloud data source takes any drive with the label ``cidata`` that has the files ``user-data`` and ``meta-data``,
and perhaps ``network-config`` (https://cloudinit.readthedocs.io/en/latest/reference/datasources/nocloud.html).
cloud-init does most of its work once for each instance-id, so that must stay the same when the job's VM is restored;
and since the drive is one of the VM's disks, a restored VM must find it unchanged to the byte. So its content depends
neither on the machine nor on the time.

User data often has passwords in it. Only the job's user can read the drive, and only the guest's root its files; it is
removed with the VM, and no message has any of its content.
"""

import base64
import hashlib
import json
import os
import re
import sys
import zlib
from collections.abc import Sequence
from contextlib import ExitStack
from typing import NamedTuple

from vmgahp.errors import MachineFault
from vmgahp.host import packages
from vmgahp.host.job_user import Identity
from vmgahp.host.run import run
from vmgahp.host.system_calls import Opened, restrict
from vmgahp.images import iso
from vmgahp.job.ad import JobAd
from vmgahp.job.attributes import Options, refusal
from vmgahp.job.run import guest_file
from vmgahp.job.vm_spec import Nic
from vmgahp.text import has_control

SEED_FILE = "vm_cidata.iso"
LABEL = "cidata"
LARGEST = 1 << 20
"""The most bytes of each of the files; clouds allow some 16 or 64 KiB."""

FILES = ("User_Data", "Meta_Data", "Network_Config")
"""The options that name the files, in the order of the fields of `Seed`."""

_MIME = (b"content-type:", b"mime-version:", b"from ")
_CLOUD_INIT = (
    *(b"#cloud-config", b"#cloud-boothook", b"#include", b"#part-handler", b"#!", b"## template: jinja"),
    *_MIME,
)
"""The beginnings of user data for cloud-init, in lower case; the last three are a MIME message's. See
https://cloudinit.readthedocs.io/en/latest/explanation/format.html."""
_CLOUDBASE = (b"#ps1", b"rem cmd", b"<powershell", b"<script")
"""The beginnings of user data for cloudbase-init, which does the same on Windows."""
_GZIP = b"\x1f\x8b"
_SCRIPT = 'text/x-shellscript\nContent-Disposition: attachment; filename="zz-vmgahp-run"'

FOR_CLOUD_INIT, FOR_ANY = "cloud-init", "any"

DEADLINE = 30.0
MEMORY = 1 << 30
CPU_SECONDS = 10
"""The limits of the process that reads YAML, in seconds, bytes and seconds."""
_LARGE = 64 << 10
"""The bytes of a file above which PyYAML's own loader would take seconds."""
_CLOUD_CONFIG = re.compile(rb"\s*#cloud-config(?!-)", re.IGNORECASE)
_NO_INSTANCE, _NO_YAML, _NO_MAPPING, _NO_COMMAND = 3, 4, 5, 6
"""The exit statuses of that process, besides 0 and Python's own 1."""


class Seed(NamedTuple):
    """The names of the files in the scratch directory from which the drive is made; empty for a missing file."""

    user_data: str
    meta_data: str
    network_config: str
    instance: str
    """The instance-id, if the job has no meta-data."""
    host_name: str
    said: tuple[str, ...] = ()
    """The job's own text for each of the files, for messages."""
    is_checked: bool = True
    """True if the user data must be cloud-init's."""
    begins: bool = False
    """True if cloud-init starts the guest's program, after all its other tasks."""


def wanted(options: Options, ad: JobAd, begins: bool = False) -> Seed | None:
    """Read the job's options for cloud-init; return None if there are none. Raises `JobFault`."""
    names = {option: options.string(option) for option in FILES}
    if not names["User_Data"] and not begins:
        for option in ("Meta_Data", "Network_Config"):
            if names[option]:
                needed = options.attribute("User_Data")
                hint = f"set {needed} too; a file with the one line #cloud-config will do."
                raise options.refused(option, f"it is of no use without {needed}", hint)
        return None
    for option, path in names.items():
        # condor_submit does not change paths of the submit machine.
        name = names[option] = os.path.basename(path)
        if path and (not name or name == SEED_FILE or has_control(name)):
            problem = "it is not a name of a file for it"
            raise options.refused(option, problem, 'write the name of a transferred file, such as "user-data".')
    form = options.string("User_Data_Format").lower() or FOR_CLOUD_INIT
    if form not in (FOR_CLOUD_INIT, FOR_ANY):
        raise options.refused("User_Data_Format", "there is no such format", f"write {FOR_CLOUD_INIT} or {FOR_ANY}.")
    if begins and form == FOR_ANY:
        problem = "the program of the job is started by cloud-init, which must understand its user data"
        hint = f"leave it out, or set {options.attribute('Run_Boot')} to ready for an image that has the agent."
        raise options.refused("User_Data_Format", problem, hint)
    name = ad.vm_name()
    return Seed(
        user_data=names["User_Data"],
        meta_data=names["Meta_Data"],
        network_config=names["Network_Config"],
        instance=ad.string("GlobalJobId") or name,
        host_name=host_name(name),
        said=tuple(options.shown(option) for option in FILES),
        is_checked=form == FOR_CLOUD_INIT,
        begins=begins,
    )


def host_name(name: str) -> str:
    """Make the host name of a guest (RFC 1123) of the name of its VM."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:63].strip("-") or "vm"


def look(seed: Seed, working_dir: str, identity: Identity) -> None:
    """Make sure that the files exist, and that cloud-init accepts them. Raises `JobFault`."""
    all_said = dict(zip(FILES, seed.said, strict=True))
    yaml_files: dict[str, bytes] = {}
    for (option, said), name in zip(all_said.items(), seed[:3], strict=True):
        if not name:
            continue
        data = _read(said, name, working_dir, identity)
        if option == "User_Data":
            if seed.is_checked or not data:
                _check_user_data(said, data)
            if seed.begins:
                multipart(said, data, b"")
        if option != "User_Data" or (seed.is_checked and _CLOUD_CONFIG.match(data)):
            yaml_files[option] = data
    if yaml_files:
        _check_yaml(all_said, yaml_files, identity)


def write(seed: Seed, working_dir: str, identity: Identity, network: bytes = b"") -> None:
    """Write or replace the drive, with `network` if the job configures none. Raises `JobFault`, `MachineFault`."""
    # JSON strings are valid YAML.
    made = f"instance-id: {json.dumps(seed.instance)}\nlocal-hostname: {json.dumps(seed.host_name)}\n"
    contents: dict[str, bytes | int] = {"meta-data": made.encode()}
    if network:
        contents["network-config"] = network
    try:
        with ExitStack() as opened:
            for name, file in zip(("user-data", "meta-data", "network-config"), seed[:3], strict=True):
                if file:
                    contents[name] = opened.enter_context(Opened(identity.open_scratch(working_dir, file, os.O_RDONLY)))
            if seed.begins:
                program = guest_file("agent")
                if seed.user_data:
                    data = _read(seed.said[0], seed.user_data, working_dir, identity)
                    program = multipart(seed.said[0], data, program)
                contents["user-data"] = program
            iso.write(working_dir, SEED_FILE, LABEL, contents, identity, most_bytes=5 * LARGEST, secret=True)
    except OSError as error:
        problem = f"it or a companion cannot be opened any more: {error.strerror}"
        hint = "see who has changed the job's scratch directory."
        raise refusal(f"VMPARAM_vm_User_Data = {seed.user_data!a}", problem, hint) from error
    except iso.Unfit as unfit:
        problem = f"no drive can be made of it and its companions: {unfit}"
        hint = f"send files of {LARGEST} bytes at most."
        raise refusal(f"VMPARAM_vm_User_Data = {seed.user_data!a}", problem, hint) from unfit


def network_config(nics: Sequence[Nic]) -> bytes:
    """Return the network configuration: the administrator's addresses for NICs that have one, DHCP for the others.

    (https://cloudinit.readthedocs.io/en/latest/reference/network-config-format-v2.html; a JSON text is YAML.)
    """
    ethernets: dict[str, object] = {}
    for number, nic in enumerate(nics):
        address, router, resolver, *_ = [*nic.address.split(), "", "", ""]
        made: dict[str, object] = {"match": {"macaddress": nic.mac}}
        if "/" not in address:
            made["dhcp4"] = True
        else:
            made |= {"dhcp4": False, "addresses": [address]}
            made |= {"routes": [{"to": "::/0" if ":" in router else "0.0.0.0/0", "via": router}]} if router else {}
            made |= {"nameservers": {"addresses": [resolver]}} if resolver else {}
        if nic.mac:
            ethernets[f"nic{number}"] = made
    return (json.dumps({"version": 2, "ethernets": ethernets}) + "\n").encode()


def multipart(said: str, data: bytes, program: bytes) -> bytes:
    """Combine the job's user data with a program that cloud-init runs after it. Raises `JobFault`.

    A MIME message becomes a part of another as it is; the kind of any other part is detected by cloud-init. It runs
    programs in the order of their names, including its own program for `runcmd`.
    """
    if data.startswith(_GZIP):
        try:
            data = zlib.decompressobj(wbits=31).decompress(data, LARGEST + 1)
        except zlib.error as error:
            raise refusal(said, f"it cannot be unpacked ({error})", "compress it by gzip, or not at all.") from error
        if len(data) > LARGEST:
            raise refusal(said, f"it has more than {LARGEST} bytes", "send what is large on a disk of its own.")
    start = data[:64].lstrip().lower()
    if start.startswith(_CLOUDBASE):
        problem = "it is for Windows, and a program is run by a shell of Linux or of a BSD"
        raise refusal(said, problem, "leave it or the program out.")
    if start.startswith(b"from "):
        data = data.lstrip().partition(b"\n")[2]
    first = data if start.startswith(_MIME) else _part("text/plain", data)
    boundary = b"vmgahp-" + hashlib.sha256(data).hexdigest().encode()
    parts = b"".join(b"--%b\n%b\n" % (boundary, part) for part in (first, _part(_SCRIPT, program)))
    head = b'Content-Type: multipart/mixed; boundary="%b"\nMIME-Version: 1.0\n\n' % boundary
    return head + parts + b"--%b--\n" % boundary


def _part(kind: str, data: bytes) -> bytes:
    return f"Content-Type: {kind}\nContent-Transfer-Encoding: base64\n\n".encode() + base64.encodebytes(data)


def _read(said: str, name: str, working_dir: str, identity: Identity) -> bytes:
    try:
        data = identity.read_scratch(working_dir, name, LARGEST + 1)
    except OSError as error:
        problem = f"{name!a} in the job's scratch directory cannot be opened: {error.strerror}"
        hint = "add it to transfer_input_files: a regular file, no link, that its owner may read."
        raise refusal(said, problem, hint) from error
    if len(data) > LARGEST:
        raise refusal(said, f"the file has more than {LARGEST} bytes", "send what is large on a disk of its own.")
    return data


def _check_user_data(said: str, data: bytes) -> None:
    """Make sure that cloud-init recognizes user data by its first line: it drops any other. Raises `JobFault`."""
    start = data[:64].lstrip().lower()
    if not start:
        problem = "the file is empty"
    elif start.startswith((*_CLOUD_INIT, *_CLOUDBASE, _GZIP)):
        return
    elif start.startswith((b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")):
        problem = "the file begins with a byte order mark, which hides its first line from cloud-init"
    else:
        problem = "cloud-init does not recognize its first line, and would drop the file"
    starts = "with #cloud-config, or with #! and an interpreter, or be a MIME message of such parts"
    other = f'where another program of the guest reads it, add +VMPARAM_vm_User_Data_Format = "{FOR_ANY}"'
    raise refusal(said, problem, f"let the file begin {starts}; or, {other}.")


def _check_yaml(said: dict[str, str], files: dict[str, bytes], identity: Identity) -> None:
    """Check files as cloud-init reads them, as the job's user, by option. Raises `JobFault`, `MachineFault`."""
    texts = {option: data.decode("latin-1") for option, data in files.items()}
    done = run(
        [sys.executable, "-I", "-m", "vmgahp.job.cloud_init"],
        deadline=DEADLINE,
        stdin=json.dumps({"user": identity.becoming(), "files": texts}).encode(),
        environ={"PATH": os.defpath},
        becomes=identity,
    )
    words = done.complaints or ["it said nothing"]
    if done.status == 0:
        return
    if words[-1].startswith("ModuleNotFoundError") and "Meta_Data" in files:
        problem = "cloud-init's meta-data cannot be read: PyYAML is not installed here."
        raise MachineFault(problem, f"{packages.of_python('PyYAML', '6.0')}.")
    option, _, place = words[-1].partition(" ")
    option = option if option in files else next(iter(files))
    is_judged = done.status in (_NO_INSTANCE, _NO_YAML, _NO_MAPPING, _NO_COMMAND)
    if option != "Meta_Data" and not is_judged:
        return  # cloud-init, which has no such limits, may read it
    hint = "write lines such as instance-id: run-7, or JSON, whose names have quotes."
    if done.status == _NO_INSTANCE:
        problem = "the file has no instance-id, without which cloud-init takes every boot for the same VM's"
        hint = "add a line such as instance-id: run-7, or leave the attribute out: then both are made."
    elif not is_judged:  # it was killed by its limits, or crashed in the parser
        problem = "the file cannot be read as YAML"
    elif done.status == _NO_COMMAND:
        problem = f"one of its commands is a name with a value ({place}), and cloud-init would run none of them"
    else:
        problem = f"the file is not YAML ({place})" if done.status == _NO_YAML else "the file has no names with values"
        problem += ", and cloud-init would drop all of it" if option != "Meta_Data" else ""
    if option != "Meta_Data":
        hint = "indent its lines by blanks, no tabs, and quote a text that has a colon and a blank in it."
    raise refusal(said[option], problem, hint)


# The process that reads YAML


def judge(option: str, data: bytes) -> tuple[int, str]:
    """Parse a file; return the exit status, and the place of an error that the status reports."""
    import yaml  # no other process needs it

    fast = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        if option != "Meta_Data":
            # Only the slow loader refuses exactly the tabs at which that of cloud-init ends.
            node = yaml.compose(data, fast if len(data) > _LARGE else yaml.SafeLoader)
            if not isinstance(node, yaml.MappingNode):
                return (0 if node is None and option == "User_Data" else _NO_MAPPING), ""
            # cloud-init's handlers of these end at a mapping ("Unable to shellify type dict").
            commands = [value.value for name, value in node.value if name.value in ("bootcmd", "runcmd")]
            wrong = [each for listed in commands for each in listed if isinstance(each, yaml.MappingNode)]
            return (_NO_COMMAND, f"line {wrong[0].start_mark.line + 1}") if wrong else (0, "")
        found = yaml.load(data, fast)  # noqa: S506 - a safe loader
    # PyYAML lets errors of its own code through, such as for !!timestamp x.
    except (yaml.YAMLError, ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        return _NO_YAML, f"line {mark.line + 1}" if mark else type(error).__name__
    instance = found.get("instance-id") if isinstance(found, dict) else None
    return (_NO_INSTANCE, "") if instance in (None, "") else (0, "")


def _main() -> int:
    """Read the user and the files from standard input; the exit status tells what is wrong with one of them."""
    judge("Meta_Data", b"a: [1]")  # loads all code: the job's user may not be allowed to read this installation
    plan = json.loads(sys.stdin.buffer.read())
    restrict(plan["user"], memory=MEMORY, cpu_seconds=CPU_SECONDS, file_bytes=0)
    for option, text in plan["files"].items():
        print(option, file=sys.stderr, flush=True)  # noqa: T201 - for a parser that crashes
        status, place = judge(option, text.encode("latin-1"))
        if status:
            print(option, place, file=sys.stderr)  # noqa: T201
            return status
    return 0


if __name__ == "__main__":
    sys.exit(_main())
