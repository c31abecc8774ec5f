"""The objects on the server: where a job's VM goes, VMs with tags of ours, files of a datastore.

Objects are found by the names in the settings, which may be empty where there is only one. The tags are extraConfig of
a VM, under names that a guest cannot reach (it may change those that begin with ``guestinfo.``). Execute machines share
servers and folders, so every tag has the host of the VM, and a VM of another host is never touched.

Files go by the server's HTTPS file service, which cannot resume an upload: one that breaks off is started again. A
download continues where it was, if the server does ranges. Whole blocks of zeros are left as holes.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
import time
import uuid as uuids
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple
from urllib.parse import quote, unquote, urlencode

from pyVmomi import vim, vmodl

from vmgahp import errors
from vmgahp.config import Settings
from vmgahp.drivers.base import progress
from vmgahp.drivers.surveyor import Logger
from vmgahp.drivers.vsphere.connection import RETRY_INTERVAL, Gone, VsphereConnection

MIB = 1 << 20
DEEPEST = 10
"""The levels of folders that are searched for data centers and compute resources."""

Found = list[tuple["vim.ManagedObject", str]]

_CHOOSE = "set {} to one that is there, which VSPHERE_USER may see."


class Placement(NamedTuple):
    """The place of a job's VM."""

    datacenter: vim.Datacenter
    datacenter_path: str
    """The data center's path for the file server: names with slashes between them."""
    datastore: vim.Datastore
    datastore_name: str
    pool: vim.ResourcePool
    folder: vim.Folder


class Inventory(NamedTuple):
    """The objects that the settings name; not cached, since an administrator may move them."""

    connection: VsphereConnection
    settings: Settings

    def place(self) -> Placement:
        """Find the place. Raises `errors.MachineFault` for an object that is missing or ambiguous."""
        datacenter, path = self.datacenter()
        datastore, name = self.datastore(datacenter)
        return Placement(datacenter, path, datastore, name, self.pool(path), self.folder(path))

    def datacenter(self) -> tuple[vim.Datacenter, str]:
        root = self.connection.call(lambda content: content.rootFolder, "looking for data centers")
        return self._choose("VSPHERE_DATACENTER", "data center", self._beneath(root, vim.Datacenter))

    def datastore(self, datacenter: vim.Datacenter) -> tuple[vim.Datastore, str]:
        return self._choose("VSPHERE_DATASTORE", "datastore", self._named(datacenter, "datastore"))

    def pool(self, datacenter_path: str) -> vim.ResourcePool:
        """Find VSPHERE_RESOURCE_POOL: ``host or cluster``, or ``host or cluster/pool/pool…``."""
        setting, hosts = "VSPHERE_RESOURCE_POOL", f"{datacenter_path}/host"
        computers = self._beneath(self._at(hosts, vim.Folder, setting, "folder of hosts"), vim.ComputeResource)
        wanted = self.settings.string(setting).strip("/")
        # The longest path first, for a folder may have the name of a host.
        for _, computer in sorted(computers, key=lambda one: -len(one[1])):
            for prefix in (computer, computer.rpartition("/")[2]):
                if f"{wanted}/".startswith(f"{prefix}/"):
                    below = wanted[len(prefix) :].strip("/").removeprefix("Resources").strip("/")
                    path = f"{hosts}/{computer}/Resources/{below}"
                    return self._at(path, vim.ResourcePool, setting, "resource pool")
        _, computer = self._choose(setting, "host or cluster", computers)
        return self._at(f"{hosts}/{computer}/Resources", vim.ResourcePool, setting, "resource pool")

    def folder(self, datacenter_path: str) -> vim.Folder:
        """Find VSPHERE_FOLDER, a path below the data center's VMs; their root folder if it is empty."""
        path = f"{datacenter_path}/vm/{self.settings.string('VSPHERE_FOLDER').strip('/')}"
        return self._at(path, vim.Folder, "VSPHERE_FOLDER", "folder")

    def network(self, datacenter: vim.Datacenter, kind: str) -> vim.vm.device.VirtualDevice.BackingInfo:
        """Return the connection of a NIC of this networking type, by VSPHERE_NETWORK_MAP."""
        name = network_map(self.settings).get(kind)
        if name is None:
            text = self.settings.string("VSPHERE_NETWORK_MAP")
            problem = f"VSPHERE_NETWORK_MAP = {text} has no {kind}, which VM_NETWORKING_TYPE offers."
            raise errors.MachineFault(problem, f'add "{kind} = NAME OF THE NETWORK" to it.')
        ref, _ = self._choose("VSPHERE_NETWORK_MAP", "network", self._named(datacenter, "network"), name)
        nic = vim.vm.device.VirtualEthernetCard
        if isinstance(ref, vim.dvs.DistributedVirtualPortgroup):
            group = self.connection.properties(ref, "key", "config.distributedVirtualSwitch")
            switch = self.connection.get(group["config.distributedVirtualSwitch"], "uuid")
            port = vim.dvs.PortConnection(switchUuid=switch, portgroupKey=group["key"])
            return nic.DistributedVirtualPortBackingInfo(port=port)
        if isinstance(ref, vim.OpaqueNetwork):
            found = self.connection.get(ref, "summary")
            kind, number = found.opaqueNetworkType, found.opaqueNetworkId
            return nic.OpaqueNetworkBackingInfo(opaqueNetworkId=number, opaqueNetworkType=kind)
        return nic.NetworkBackingInfo(deviceName=name, network=ref)

    # The search

    def _named(self, ref: vim.ManagedObject, path: str) -> Found:
        found = self.connection.of_each(dict.fromkeys(self.connection.get(ref, path) or ()), "name")
        # The server shows the characters %, / and \ of a name as %25, %2f and %5c.
        return [(child, unquote(str(properties.get("name", "")))) for child, properties in found]

    def _beneath(self, folder: vim.Folder, kind: type) -> Found:
        answer, level = [], [(folder, "")]
        for _ in range(DEEPEST):
            children = [(path, *one) for ref, path in level for one in self._named(ref, "childEntity")]
            found = [(child, f"{path}/{name}".lstrip("/")) for path, child, name in children]
            answer += [one for one in found if isinstance(one[0], kind)]
            level = [one for one in found if isinstance(one[0], vim.Folder)]
        return answer

    def _at(self, path: str, kind: type, setting: str, what: str) -> vim.ManagedObject:
        path = path.rstrip("/")
        found = self.connection.call(lambda all_: all_.searchIndex.FindByInventoryPath(path), f"looking for {path}")
        if not isinstance(found, kind):
            problem = f"{setting} names {path}, and the server has no such {what}."
            raise errors.MachineFault(problem, _CHOOSE.format(setting))
        return found

    def _choose(self, setting: str, what: str, found: Found, wanted: str = "") -> tuple[vim.ManagedObject, str]:
        """Return the object that is wanted, or that the setting names, or the only one."""
        wanted = wanted or self.settings.string(setting).strip("/")
        for one in found:
            if wanted in (one[1], one[1].rpartition("/")[2]):
                return one
        if len(found) == 1 and not wanted:
            return found[0]
        there = f": {', '.join(path for _, path in found[:20])}" if found else ""
        said = f"names {wanted}, and the server has no such" if wanted else "is empty, and there is not exactly one"
        raise errors.MachineFault(f"{setting} {said} {what}{there}.", _CHOOSE.format(setting))


def network_map(settings: Settings) -> dict[str, str]:
    """Read VSPHERE_NETWORK_MAP: ``nat = VM Network, bridge = Lab``. Raises `errors.MachineFault`."""
    answer = {}
    text = settings.string("VSPHERE_NETWORK_MAP")
    for entry in filter(str.strip, text.split(",")):
        kind, _, name = entry.partition("=")
        if not name.strip() or not kind.strip().isalpha():
            problem = f"VSPHERE_NETWORK_MAP = {text} is not a list of TYPE = NETWORK."
            raise errors.MachineFault(problem, "write it as in: nat = VM Network, bridge = Lab network.")
        answer[kind.strip().lower()] = name.strip()
    return answer


TAG_PREFIX = "vmgahp."

RUNS, SAVED = "runs", "saved"
"""The values of `Tag.state`: a server of this daemon serves the VM; it is a checkpoint and waits for its job."""

LONGEST_NAME = 80

_OURS = re.compile(r".+-[0-9a-f]{8}", re.DOTALL)


class Tag(NamedTuple):
    """The tags of a VM of ours."""

    id: str
    name: str
    """The VM's name with HTCondor, `JobAd.vm_name`."""
    job: str
    """The job's GlobalJobId if the starter sends it, else the name."""
    directory: str
    """The job's scratch directory; empty for a checkpoint."""
    host: str
    """The execute host that serves it (`this_host`); empty for a checkpoint."""
    state: str
    checkpoint: str = ""
    """The name of the snapshot that is the job's last checkpoint; empty if there is none."""
    expires: str = "0"
    """The server's time after which the checkpoint of a missing job may be destroyed, in seconds; 0 for never."""

    def has_expired(self, now: Callable[[], float]) -> bool:
        return self.state == SAVED and self.expires.isdecimal() and 0 < int(self.expires[:20]) < now()

    def options(self) -> list[vim.option.OptionValue]:
        return [vim.option.OptionValue(key=TAG_PREFIX + key, value=value) for key, value in self._asdict().items()]

    def annotation(self) -> str:
        """Return the note for people who look at the VM in vSphere."""
        where = f"on {os.uname().nodename}, in {self.directory}" if self.directory else "waits as a checkpoint"
        return f"HTCondor job {self.name} ({self.job}), {where}. Looked after by vmgahp; do not change."

    @classmethod
    def read(cls, options: Any) -> Tag | None:
        """Read a VM's extraConfig; None for a VM that is not ours. The last value of a duplicate key counts."""
        all_ = {str(option.key): str(option.value or "") for option in options or ()}
        values = {name: all_.get(TAG_PREFIX + name, "") for name in cls._fields}
        return cls(**values) if all(values[name] for name in ("id", "name", "job", "state")) else None


def entity_name(name: str, uuid: str) -> str:
    """Return the VM's name with vSphere: the job's, without characters special to paths or datastores, and unique."""
    plain = re.sub(r"[^A-Za-z0-9_.@+-]", "_", name).lstrip(".-")
    return f"{plain[: LONGEST_NAME - 9] or 'job'}-{uuid[:8]}"


def this_host() -> str:
    """Return a name that tells this execute host from others: with a digest of its machine-id, which is not public."""
    machine, name = "", os.uname().nodename
    with suppress(OSError, UnicodeDecodeError):
        machine = Path("/etc/machine-id").read_text(encoding="ascii").strip()
    return f"{name} {hashlib.sha256(f'vmgahp {name} {machine}'.encode()).hexdigest()[:16]}"


ON, OFF, SUSPENDED = "poweredOn", "poweredOff", "suspended"

_TASKS = {ON: "PowerOnVM_Task", OFF: "PowerOffVM_Task", SUSPENDED: "SuspendVM_Task"}

SNAPSHOT = re.compile(r"vmgahp-[0-9a-f]{32}", re.ASCII)


class VsphereVm(NamedTuple):
    """A VM by its reference; methods raise `errors.Fault`, and `Gone` if it does not exist (any more)."""

    connection: VsphereConnection
    ref: vim.VirtualMachine

    def power_state(self) -> str:
        """Return the power state: `ON`, `OFF` or `SUSPENDED`."""
        return str(self.connection.get(self.ref, "runtime.powerState"))

    def power(self, wanted: str, doing: str) -> None:
        """Power on (or resume), power off at once (without the memory of a suspended VM), or suspend."""
        if self.power_state() == wanted:
            return
        begin = getattr(self.ref, _TASKS[wanted])
        try:
            self.connection.task(lambda _content: begin(), doing, lambda: self.power_state() == wanted or None)
        except errors.Fault as fault:
            if isinstance(fault.__cause__, vmodl.fault.ManagedObjectNotFound):
                raise Gone(self.ref) from fault
            # The guest may have powered itself off just now.
            if not isinstance(fault.__cause__, vim.fault.InvalidPowerState) or self.power_state() != wanted:
                raise

    def ask_to_shut_down(self) -> bool:
        """Ask the guest to shut down; return False if no VMware Tools run in it."""
        seen = self.connection.properties(self.ref, "guest.toolsRunningStatus", "runtime.powerState")
        if seen.get("runtime.powerState") != ON or seen.get("guest.toolsRunningStatus") != "guestToolsRunning":
            return False
        self.connection.once(lambda _content: self.ref.ShutdownGuest(), "asking the guest to shut down")
        return True

    def retag(self, tag: Tag) -> None:
        spec = vim.vm.ConfigSpec(extraConfig=tag.options(), annotation=tag.annotation())
        self.connection.task(lambda _content: self.ref.ReconfigVM_Task(spec), f"tagging {tag.name}")

    def snapshots(self) -> dict[str, vim.vm.Snapshot]:
        info = self.connection.get(self.ref, "snapshot")
        answer = {}
        trees = list(info.rootSnapshotList) if info is not None else []
        while trees:
            tree = trees.pop()
            answer[str(tree.name)] = tree.snapshot
            trees += tree.childSnapshotList or ()
        return answer

    def take_snapshot(self, name: str) -> str:
        """Take a snapshot of a running guest with its memory, and return its name."""
        snapshot = f"vmgahp-{uuids.uuid4().hex}"
        about = f"checkpoint of {name}, {time.strftime('%Y-%m-%d %H:%M:%S %z')}"
        self.connection.task(
            lambda _content: self.ref.CreateSnapshot_Task(snapshot, about, memory=True, quiesce=False),
            f"taking a checkpoint of {name}",
            lambda: snapshot in self.snapshots() or None,
        )
        return snapshot

    def go_back_to(self, snapshot: str, name: str) -> None:
        """Restore the guest from a snapshot."""
        found = self.snapshots().get(snapshot)
        if found is None:
            problem = f"The checkpoint of {name} is not on the server any more: it has no snapshot {snapshot}."
            raise errors.HypervisorFault(problem, "see who has removed it.")
        self.connection.task(lambda _content: found.RevertToSnapshot_Task(), f"going back to the checkpoint of {name}")
        # The server powers on a VM that was on when its snapshot with memory was taken; others are powered on here.
        self.power(ON, f"restarting {name} from its checkpoint")

    def forget_snapshots(self, kept: str, log: Logger) -> None:
        """Remove our snapshots but for the `kept` one; errors are logged."""
        try:
            for name, snapshot in self.snapshots().items():
                if name != kept and SNAPSHOT.fullmatch(name):
                    remove = partial(snapshot.RemoveSnapshot_Task, removeChildren=False)
                    self.connection.task(lambda _content: remove(), "removing an older checkpoint")  # noqa: B023
        except errors.Fault as fault:
            log(f"an older checkpoint stays on the server for now: {fault.problem}")

    def destroy(self, datacenter: vim.Datacenter) -> None:
        """Power the VM off and remove it with all files in its directory; one that is already gone is success."""
        directory = ""
        try:
            directory = directory_of(self.connection.get(self.ref, "config.files.vmPathName"))
            self.power(OFF, "powering a VM off")
            # If it was removed, reading its state raises `Gone`.
            self.connection.task(
                lambda _content: self.ref.Destroy_Task(), "removing a VM", lambda: self.power_state() and None
            )
        except errors.Fault as fault:
            if not (isinstance(fault, Gone) or isinstance(fault.__cause__, vmodl.fault.ManagedObjectNotFound)):
                raise
        # The server does not count an uploaded file as the VM's before it is attached.
        if directory:
            try:
                self.connection.task(
                    lambda content: content.fileManager.DeleteDatastoreFile_Task(directory, datacenter),
                    f"removing {directory}",
                )
            except errors.Fault as fault:
                if not isinstance(fault.__cause__, vim.fault.FileNotFound):
                    raise


class Tagged(NamedTuple):
    """A VM of ours on the server."""

    vm: VsphereVm
    tag: Tag


def find_tagged(connection: VsphereConnection, folder: vim.Folder) -> list[Tagged]:
    """Find all VMs of ours in the folder, other hosts' included. Raises `errors.Fault`."""
    children = connection.get(folder, "childEntity") or ()
    named = connection.of_each([ref for ref in children if isinstance(ref, vim.VirtualMachine)], "name")
    # extraConfig is long, so it is asked for only where the name may be one of ours.
    likely = [ref for ref, found in named if _OURS.fullmatch(str(found.get("name", "")))]
    read = connection.of_each(likely, "config.extraConfig")
    tags = [(ref, Tag.read(found.get("config.extraConfig"))) for ref, found in read]
    return [Tagged(VsphereVm(connection, ref), tag) for ref, tag in tags if tag is not None]


def directory_of(path: str | None) -> str:
    """Return ``[datastore] directory`` of ``[datastore] directory/name.vmx``; empty without a directory."""
    directory, slash, name = (path or "").rpartition("/")
    return directory if slash and name.endswith(".vmx") and not directory.endswith("] ") else ""


CHUNK = 1 << 20
TRIES = 4
"""The number of tries in a row without progress before the transfer of a file has failed; each may first wait for the
server."""


class Store:
    """The file service, for the datastore of one `Placement`."""

    def __init__(self, connection: VsphereConnection, place: Placement, log: Logger) -> None:
        self._connection = connection
        self._place = place
        self._log = log
        self.aborted = threading.Event()
        """A flag that cancels transfers; each ends at its next piece."""

    def upload(self, descriptor: int, name: str, target: str, end: float) -> int:
        """Upload the job's `name` by `end` (monotonic), and return its size. Raises `errors.Fault`."""
        size = os.fstat(descriptor).st_size
        tell = progress(f"uploading {name} ({size / MIB:.1f} MiB)", self._log)

        def pieces() -> Iterator[bytes]:
            done = 0
            while done < size:
                self._require_wanted()
                if time.monotonic() > end:
                    # A start that takes longer than condor_starter waits would take this machine out of service.
                    problem = f"{name}: only {done // MIB} of {size // MIB} MiB were uploaded in the time of a start."
                    hint = "use smaller disks, or have VM_GAHP_REQ_TIMEOUT raised on the machines that run such jobs."
                    raise errors.JobFault(errors.INVALID_DISK_PARAM, problem, hint)
                data = os.pread(descriptor, min(CHUNK, size - done), done)
                if not data:
                    problem = f"{name} became shorter while it was uploaded."
                    hint = "do not write to the job's disks while the job starts."
                    raise errors.JobFault(errors.BAD_IMAGE, problem, hint)
                yield data
                done += len(data)
                tell(done * 100 / size)

        self._put(pieces, size, name, target)
        return size

    def upload_bytes(self, data: bytes, target: str) -> None:
        """Write a small file. Raises the same as `upload`."""
        self._put(lambda: [data], len(data), os.path.basename(target), target)

    def download(self, source: str, name: str, file: BinaryIO, missing_is_fine: bool = False) -> int | None:
        """Fetch a file of the datastore into an empty open one, to the disk; return its size, None if it is missing."""
        doing = f"downloading {name}"
        done, size, tell = 0, -1, None

        def receive(response: HTTPResponse) -> None:
            nonlocal done, size, tell
            if response.status != 206:
                done = 0
                file.truncate(0)
            if response.length is None or size not in (-1, done + response.length):
                raise HTTPException("the file on the server has another length now, or none")
            size = done + response.length
            tell = tell or progress(f"{doing} ({size / MIB:.1f} MiB)", self._log)
            while done < size:
                self._require_wanted()
                data = response.read(min(CHUNK, size - done))
                if not data:
                    raise HTTPException("the connection ended")
                _write(file, data, done)
                done += len(data)
                tell(done * 100 / size)

        try:
            self._transfer(
                "GET",
                source,
                doing,
                lambda: {"Range": f"bytes={done}-"} if done else {},
                receive=receive,
                position=lambda: done,
            )
        except FileNotFoundError as error:
            if missing_is_fine:
                return None
            path = f"[{self._place.datastore_name}] {source}"
            raise errors.HypervisorFault(f"{path} is not there any more.", "see who has removed it.") from error
        file.truncate(size)
        os.fsync(file.fileno())
        return size

    def _require_wanted(self) -> None:
        if self.aborted.is_set():
            raise errors.HypervisorFault("The transfer was canceled, because its VM is to be destroyed.")

    def _put(self, pieces: Callable[[], Iterable[bytes]], size: int, name: str, target: str) -> None:
        headers = {"Content-Length": str(size), "Content-Type": "application/octet-stream"}
        self._transfer("PUT", target, f"uploading {name}", lambda: headers, pieces)

    def _transfer(
        self,
        method: str,
        path: str,
        doing: str,
        headers: Callable[[], dict[str, str]],
        body: Callable[[], Iterable[bytes] | None] = lambda: None,
        receive: Callable[[HTTPResponse], None] = lambda _response: None,
        position: Callable[[], int] = lambda: 0,
    ) -> None:
        """Request a file until that succeeds, which takes more tries while `position` in it grows.

        Raises `errors.Fault`, and FileNotFoundError if it does not exist.
        """
        query = urlencode({"dcPath": self._place.datacenter_path, "dsName": self._place.datastore_name})
        left, furthest = TRIES, 0
        while True:
            connection, cookie = self._connection.https()
            try:
                connection.request(method, f"/folder/{quote(path)}?{query}", body(), headers() | cookie)
                receive(_checked(connection.getresponse(), path))
                return
            except FileNotFoundError:
                raise
            except (OSError, HTTPException) as error:
                if isinstance(error, PermissionError):
                    self._connection.renew()
                seen = str(error) or type(error).__name__
                if position() > furthest:
                    left, furthest = TRIES, position()
                left -= 1
                if left == 0:
                    problem = f"vSphere failed while {doing}, {TRIES} times over: {seen}."
                    hint = "see why the server's file service breaks off, and whether the datastore has room."
                    raise errors.HypervisorFault(problem, hint) from error
                self._log(f"{doing} broke off, once more: {seen}")
            finally:
                connection.close()
            self.aborted.wait(RETRY_INTERVAL)


def _checked(response: HTTPResponse, path: str) -> HTTPResponse:
    """Return an answer; raises FileNotFoundError, PermissionError for a session, OSError for another error."""
    if response.status < 300:
        return response
    if response.status == 404:
        raise FileNotFoundError(path)
    answer = f"the server answers {response.status} {response.reason}"
    if response.status in (401, 403):
        raise PermissionError(answer)
    raise OSError(f"{answer} {response.read(300)!r}")


def _write(file: BinaryIO, data: bytes, position: int) -> None:
    if not any(memoryview(data)[:64]) and not data.strip(b"\0"):
        return  # a hole
    try:
        file.seek(position)
        file.write(data)
    except OSError as error:
        problem = f"A downloaded disk cannot be written: {error.strerror}."
        raise errors.MachineFault(problem, "free disk space on the file system of EXECUTE.") from error
