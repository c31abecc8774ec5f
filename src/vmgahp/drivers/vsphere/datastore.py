"""The datacenter, datastore and networks for jobs' VMs, and files to and from datastores.

Objects are found by the names in the settings; files go by the server's HTTPS file service.

On an ESXi host most of them exist once, and the settings may be empty. If there are several and none is named, the
fault lists their names.

The service cannot resume an upload, so one that breaks off is started again. A download continues where it was, if
the server does ranges. Whole blocks of zeros are not written but left as holes.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from http.client import HTTPException, HTTPResponse
from typing import BinaryIO, NamedTuple
from urllib.parse import quote, unquote, urlencode

from pyVmomi import vim

from vmgahp import errors
from vmgahp.config import Settings
from vmgahp.drivers.base import Logger
from vmgahp.drivers.vsphere.connection import RETRY_INTERVAL, VsphereConnection

DEEPEST = 10
"""The levels of folders that are searched for data centers and compute resources."""

Found = list[tuple["vim.ManagedObject", str]]
"""The objects, each with its name or its path."""


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
    """The objects of the settings; not cached, since an administrator may move them."""

    connection: VsphereConnection
    settings: Settings

    def place(self) -> Placement:
        """Find the place. Raises `errors.MachineFault` for an object that is missing or ambiguous."""
        datacenter, path = self.datacenter()
        datastore, name = self.datastore(datacenter)
        return Placement(datacenter, path, datastore, name, self.pool(path), self.folder(path))

    def datacenter(self) -> tuple[vim.Datacenter, str]:
        """Find VSPHERE_DATACENTER, and its path."""
        root = self.connection.call(lambda content: content.rootFolder, "looking for data centers")
        return self._choose("VSPHERE_DATACENTER", "data center", self._beneath(root, vim.Datacenter))

    def datastore(self, datacenter: vim.Datacenter) -> tuple[vim.Datastore, str]:
        """Find VSPHERE_DATASTORE, and its name."""
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
            raise errors.MachineFault(
                f"VSPHERE_NETWORK_MAP = {self.settings.string('VSPHERE_NETWORK_MAP')} has no {kind}, which "
                "VM_NETWORKING_TYPE offers.",
                f'add "{kind} = NAME OF THE NETWORK" to it.',
            )
        ref, _ = self._choose("VSPHERE_NETWORK_MAP", "network", self._named(datacenter, "network"), name)
        nic = vim.vm.device.VirtualEthernetCard
        if isinstance(ref, vim.dvs.DistributedVirtualPortgroup):
            group = self.connection.properties(ref, "key", "config.distributedVirtualSwitch")
            switch = self.connection.get(group["config.distributedVirtualSwitch"], "uuid")
            port = vim.dvs.PortConnection(switchUuid=switch, portgroupKey=group["key"])
            return nic.DistributedVirtualPortBackingInfo(port=port)
        if isinstance(ref, vim.OpaqueNetwork):
            summary = self.connection.get(ref, "summary")
            return nic.OpaqueNetworkBackingInfo(
                opaqueNetworkId=summary.opaqueNetworkId, opaqueNetworkType=summary.opaqueNetworkType
            )
        return nic.NetworkBackingInfo(deviceName=name, network=ref)

    # The search

    def _named(self, ref: vim.ManagedObject, path: str) -> Found:
        """Return the objects of a property of `ref`, with their names."""
        found = self.connection.of_each(dict.fromkeys(self.connection.get(ref, path) or ()), "name")
        # The server shows the characters %, / and \ of a name as %25, %2f and %5c.
        return [(child, unquote(str(properties.get("name", "")))) for child, properties in found]

    def _beneath(self, folder: vim.Folder, kind: type) -> Found:
        """Return the objects of a kind below a folder, with their paths."""
        answer, level = [], [(folder, "")]
        for _ in range(DEEPEST):
            found = [
                (child, f"{path}/{name}".lstrip("/"))
                for ref, path in level
                for child, name in self._named(ref, "childEntity")
            ]
            answer += [one for one in found if isinstance(one[0], kind)]
            level = [one for one in found if isinstance(one[0], vim.Folder)]
        return answer

    def _at(self, path: str, kind: type, setting: str, what: str) -> vim.ManagedObject:
        """Return the object of a kind at a path of the inventory."""
        path = path.rstrip("/")
        found = self.connection.call(
            lambda content: content.searchIndex.FindByInventoryPath(path), f"looking for {path}"
        )
        if not isinstance(found, kind):
            raise errors.MachineFault(
                f"{setting} names {path}, and the server has no such {what}.",
                f"set {setting} to one that is there, which VSPHERE_USER may see.",
            )
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
        raise errors.MachineFault(
            f"{setting} {said} {what}{there}.", f"set {setting} to one that is there, which VSPHERE_USER may see."
        )


def network_map(settings: Settings) -> dict[str, str]:
    """Read VSPHERE_NETWORK_MAP: ``nat = VM Network, bridge = Lab``. Raises `errors.MachineFault`."""
    answer = {}
    text = settings.string("VSPHERE_NETWORK_MAP")
    for entry in filter(str.strip, text.split(",")):
        kind, _, name = entry.partition("=")
        if not name.strip() or not kind.strip().isalpha():
            raise errors.MachineFault(
                f"VSPHERE_NETWORK_MAP = {text} is not a list of TYPE = NETWORK.",
                "write it as in: nat = VM Network, bridge = Lab network.",
            )
        answer[kind.strip().lower()] = name.strip()
    return answer


CHUNK = 1 << 20
TRIES = 4
"""The number of tries before the transfer of a file has failed; each try may first wait for the server."""

MIB = 1 << 20
_STEP = 10
"""The per cent of a file after which its progress is logged."""


class Aborted(errors.HypervisorFault):
    """The error of a transfer that was cancelled."""

    def __init__(self) -> None:
        super().__init__("The transfer was given up, because its VM is to be destroyed.")


def _progress(what: str, size: int, log: Logger) -> Callable[[int], None]:
    """Return a function that logs the progress of a transfer: at each tenth, and at its end."""
    began, said = time.monotonic(), 0
    log(f"{what}: {_mib(size)} to go")

    def tell(done: int) -> None:
        nonlocal said
        if done == size:
            log(f"{what}: done, {_mib(size)} in {time.monotonic() - began:.1f} s")
        elif done * 100 // size >= said + _STEP:
            said = done * 100 // size // _STEP * _STEP
            log(f"{what}: {said} %, {_mib(done)} of {_mib(size)}")

    return tell


class Store:
    """The file service, for the datastore of one `Placement`."""

    def __init__(self, connection: VsphereConnection, place: Placement, log: Logger) -> None:
        self._connection = connection
        self._place = place
        self._log = log
        self.aborted = threading.Event()
        """A flag that cancels transfers; each ends at its next piece."""

    def upload(self, descriptor: int, name: str, target: str, end: float) -> int:
        """Upload an open file, the job's `name`, to `target`, a path in the datastore; returns its size.

        `end` is the monotonic time by which it must be there. Raises `errors.JobFault` for a file that is too large for
        that or changes meanwhile, `Aborted`, and `errors.MachineFault`.
        """
        size = os.fstat(descriptor).st_size
        tell = _progress(f"uploading {name}", size, self._log)

        def pieces() -> Iterator[bytes]:
            done = 0
            while done < size:
                self._require_wanted()
                if time.monotonic() > end:
                    # A start that takes longer than condor_starter waits would take this machine out of service.
                    raise errors.JobFault(
                        errors.INVALID_DISK_PARAM,
                        f"{name}: only {_mib(done)} of {_mib(size)} were uploaded in the time of a start.",
                        "use smaller disks, or have VM_GAHP_REQ_TIMEOUT raised on the machines that run such jobs.",
                    )
                data = os.pread(descriptor, min(CHUNK, size - done), done)
                if not data:
                    raise errors.JobFault(
                        errors.BAD_IMAGE,
                        f"{name} became shorter while it was uploaded.",
                        "do not write to the job's disks while the job starts.",
                    )
                yield data
                done += len(data)
                tell(done)

        self._put(pieces, size, name, target)
        return size

    def upload_bytes(self, data: bytes, target: str) -> None:
        """Write a small file. Raises the same as `upload`."""
        self._put(lambda: [data], len(data), os.path.basename(target), target)

    def download(self, source: str, name: str, file: BinaryIO, missing_is_fine: bool = False) -> int | None:
        """Fetch a file of the datastore into an open one, which is empty and the job's `name`; returns its size.

        None where there is no such file and that is fine. The data are on the disk when this returns. Raises `Aborted`
        and `errors.MachineFault`.
        """
        done, size, tell = 0, -1, None

        def rest() -> dict[str, str]:
            return {"Range": f"bytes={done}-"} if done else {}

        def receive(response: HTTPResponse) -> None:
            nonlocal done, size, tell
            if response.status != 206:
                done = 0
                file.truncate(0)
            if response.length is None or size not in (-1, done + response.length):
                raise HTTPException("the file on the server has another length now, or none")
            size = done + response.length
            tell = tell or _progress(f"downloading {name}", size, self._log)
            while done < size:
                self._require_wanted()
                data = response.read(min(CHUNK, size - done))
                if not data:
                    raise HTTPException("the connection ended")
                _write(file, data, done)
                done += len(data)
                tell(done)

        try:
            self._transfer("GET", source, f"downloading {name}", rest, receive=receive)
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
            raise Aborted

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
    ) -> None:
        """Request a file until that succeeds. Raises `errors.Fault`, and FileNotFoundError if it does not exist."""
        query = urlencode({"dcPath": self._place.datacenter_path, "dsName": self._place.datastore_name})
        for left in reversed(range(TRIES)):
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
                if left == 0:
                    raise errors.HypervisorFault(
                        f"vSphere failed while {doing}, {TRIES} times over: {error or type(error).__name__}.",
                        "see why the server's file service breaks off, and whether the datastore has room.",
                    ) from error
                self._log(f"{doing} broke off, once more: {error or type(error).__name__}")
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
        raise errors.MachineFault(
            f"A downloaded disk cannot be written: {error.strerror}.", "free disk space on the file system of EXECUTE."
        ) from error


def _mib(size: int) -> str:
    return f"{size / MIB:.1f} MiB" if size >= MIB // 10 else f"{size} bytes"
