"""Files to and from the server's datastores, by its HTTPS file service.

The service knows no second half of an upload, so one that breaks off begins anew. A download continues where
it was, if the server does ranges. Whole blocks of zeros are not written but left as holes.
"""

import json
import os
import threading
import time
from collections.abc import Callable
from http.client import HTTPException, HTTPResponse, HTTPSConnection
from urllib.parse import quote, urlencode

from vmgahp import errors
from vmgahp.drivers.vsphere import faults
from vmgahp.drivers.vsphere.connection import RETRY_INTERVAL, VsphereConnection
from vmgahp.drivers.vsphere.inventory import Placement

CHUNK = 1 << 20
TRIES = 4
"""How often a file is tried before the transfer counts as failed; each try may first wait for the server."""

PATIENCE = 3
"""How much longer than a call the next piece of a file may take: a datastore writes while others wait."""

MIB = 1 << 20
_STEP = 10
"""Percent of a file after which its progress is logged."""
_SIZE = "size"


class Aborted(errors.HypervisorFault):
    """Somebody no longer wants the transfer."""

    def __init__(self) -> None:
        super().__init__("The transfer was given up, because its VM is to be destroyed.")


class _Short(Exception):
    """A transfer ended before its end."""


class Progress:
    """Says in the log the progress of a transfer: at its beginning, at each tenth, at its end with the speed."""

    def __init__(self, what: str, size: int, log: Callable[[str], None]) -> None:
        self._what = what
        self._size = size
        self._log = log
        self._said = 0
        self._began = time.monotonic()
        log(f"{what}: {_mib(size)} to go")

    def at(self, done: int) -> None:
        percent = done * 100 // self._size if self._size else 100
        if percent // _STEP > self._said // _STEP and done < self._size:
            self._said = percent
            self._log(f"{self._what}: {percent} %, {_mib(done)} of {_mib(self._size)}")

    def ended(self) -> None:
        seconds = time.monotonic() - self._began
        speed = f", {self._size / MIB / seconds:.1f} MiB/s" if seconds > 0 else ""
        self._log(f"{self._what}: done, {_mib(self._size)} in {seconds:.1f} s{speed}")


class Store:
    """The file service, for the datastore of one `Placement`."""

    def __init__(self, connection: VsphereConnection, place: Placement, log: Callable[[str], None]) -> None:
        self._connection = connection
        self._place = place
        self._log = log
        self.aborted = threading.Event()
        """Set when no transfer is wanted any more; it ends at its next piece."""

    def path(self, *parts: str) -> str:
        """A file as vSphere's own calls name it: ``[datastore] directory/file``."""
        return f"[{self._place.datastore_name}] {'/'.join(parts)}"

    def upload(self, descriptor: int, name: str, target: str, end: float) -> int:
        """Upload an open file, the job's `name`, to `target`, a path in the datastore; returns its size.

        `end` is the monotonic time by which it must be there. Raises `errors.JobFault` for a file that is too
        large for that or changes meanwhile, `Aborted`, and `errors.MachineFault`.
        """
        size = os.fstat(descriptor).st_size
        progress = Progress(f"uploading {name}", size, self._log)

        def attempt(connection: HTTPSConnection) -> None:
            self._send(connection, descriptor, name, target, size, end, progress)

        self._attempts(attempt, f"uploading {name}")
        progress.ended()
        return size

    def upload_bytes(self, data: bytes, target: str) -> None:
        """Write a small file. Raises as `upload`."""

        def attempt(connection: HTTPSConnection) -> None:
            connection.request("PUT", self._url(target), data, self._headers(len(data)))
            _check(connection.getresponse(), target)

        self._attempts(attempt, f"uploading {os.path.basename(target)}")

    def download(self, source: str, name: str, descriptor: int, missing_is_fine: bool = False) -> int | None:
        """Fetch a file of the datastore into an open one, which is empty and the job's `name`; returns its size.

        None where there is no such file and that is fine. What is written is on the disk when this returns.
        Raises `Aborted` and `errors.MachineFault`.
        """
        state: dict[str, object] = {"done": 0}

        def attempt(connection: HTTPSConnection) -> None:
            self._receive(connection, source, name, descriptor, state)

        try:
            self._attempts(attempt, f"downloading {name}")
        except FileNotFoundError as error:
            if missing_is_fine:
                return None
            raise errors.HypervisorFault(
                f"{self.path(source)} is not on the datastore any more.", "see who has removed it."
            ) from error
        size = int(str(state[_SIZE]))
        os.ftruncate(descriptor, size)
        os.fsync(descriptor)
        progress = state["progress"]
        assert isinstance(progress, Progress)
        progress.ended()
        return size

    # One attempt

    def _send(
        self,
        connection: HTTPSConnection,
        descriptor: int,
        name: str,
        target: str,
        size: int,
        end: float,
        progress: Progress,
    ) -> None:
        connection.putrequest("PUT", self._url(target))
        for header, value in self._headers(size).items():
            connection.putheader(header, value)
        connection.endheaders()
        done = 0
        while done < size:
            if self.aborted.is_set():
                raise Aborted
            if time.monotonic() > end:
                raise _too_slow(name, done, size)
            data = os.pread(descriptor, min(CHUNK, size - done), done)
            if not data:
                raise errors.JobFault(
                    errors.BAD_IMAGE,
                    f"{name} became shorter while it was uploaded.",
                    "do not write to the job's disks while the job starts.",
                )
            connection.send(data)
            done += len(data)
            progress.at(done)
        _check(connection.getresponse(), target)

    def _receive(
        self, connection: HTTPSConnection, source: str, name: str, descriptor: int, state: dict[str, object]
    ) -> None:
        done = int(str(state["done"]))
        headers = self._headers(None)
        if done:
            headers["Range"] = f"bytes={done}-"
        connection.request("GET", self._url(source), headers=headers)
        response = connection.getresponse()
        if response.status == 416 and done == state.get(_SIZE):
            return
        _check(response, source)
        if response.status != 206:
            done = 0
            os.ftruncate(descriptor, 0)
        length = response.getheader("Content-Length")
        if length is None or not (length.isdecimal() and len(length) < 19):
            raise _Short("the server does not say how long the file is")
        size = done + int(length)
        if state.setdefault(_SIZE, size) != size:
            raise _Short("the file on the server has another length now")
        progress = state.setdefault("progress", None) or Progress(f"downloading {name}", size, self._log)
        state["progress"] = progress
        assert isinstance(progress, Progress)
        while done < size:
            if self.aborted.is_set():
                raise Aborted
            data = response.read(min(CHUNK, size - done))
            if not data:
                raise _Short("the connection ended")
            _write(descriptor, data, done)
            done += len(data)
            state["done"] = done
            progress.at(done)

    # Around the attempts

    def _attempts(self, attempt: Callable[[HTTPSConnection], None], doing: str) -> None:
        waiting = self.aborted
        for left in reversed(range(TRIES)):
            connection = None
            try:
                connection = self._connect()
                attempt(connection)
                return
            except FileNotFoundError:
                raise
            except PermissionError as error:
                self._connection.renew()
                trouble: Exception = error
            except (OSError, HTTPException, _Short) as error:
                trouble = error
            finally:
                if connection is not None:
                    connection.close()
            if left == 0:
                raise errors.HypervisorFault(
                    f"vSphere failed while {doing}, {TRIES} times over: {trouble or type(trouble).__name__}.",
                    "see why the server's file service breaks off, and whether the datastore has room.",
                ) from trouble
            self._log(f"{doing} broke off, once more: {trouble or type(trouble).__name__}")
            waiting.wait(RETRY_INTERVAL)

    def _connect(self) -> HTTPSConnection:
        with faults.explained("asking for a file"):
            self._connection.cookie()  # which finds out whether the server is there, and logs in
        access, tls = self._connection.access, self._connection.tls
        assert access is not None
        return HTTPSConnection(access.host, access.port, timeout=self._connection.timeout * PATIENCE, context=tls)

    def _headers(self, size: int | None) -> dict[str, str]:
        headers = {"Cookie": self._connection.cookie()}
        if size is not None:
            headers |= {"Content-Length": str(size), "Content-Type": "application/octet-stream"}
        return headers

    def _url(self, target: str) -> str:
        query = urlencode({"dcPath": self._place.datacenter_path, "dsName": self._place.datastore_name})
        return f"/folder/{quote(target)}?{query}"


def _check(response: HTTPResponse, target: str) -> None:
    """Raise for an error: FileNotFoundError, PermissionError for a session, OSError otherwise."""
    if response.status in (200, 201, 204, 206):
        return
    said = response.read(300).decode("ascii", "replace")
    if response.status == 404:
        raise FileNotFoundError(target)
    if response.status in (401, 403):
        raise PermissionError(f"the server answers {response.status} {response.reason}")
    raise OSError(f"the server answers {response.status} {response.reason} {json.dumps(said)}")


def _write(descriptor: int, data: bytes, position: int) -> None:
    if not any(memoryview(data)[:64]) and not data.strip(b"\0"):
        return  # a hole
    try:
        view = memoryview(data)
        while view:
            written = os.pwrite(descriptor, view, position)
            view = view[written:]
            position += written
    except OSError as error:
        raise errors.MachineFault(
            f"A downloaded disk cannot be written: {error.strerror}.", "free disk space on the file system of EXECUTE."
        ) from error


def _too_slow(name: str, done: int, size: int) -> errors.JobFault:
    """A start that takes longer than condor_starter waits would take this machine out of service."""
    return errors.JobFault(
        errors.INVALID_DISK_PARAM,
        f"{name}: only {_mib(done)} of {_mib(size)} were uploaded in the time of a start.",
        "use smaller disks, or have VM_GAHP_REQ_TIMEOUT raised on the machines that run such jobs.",
    )


def _mib(size: int) -> str:
    return f"{size / MIB:.1f} MiB" if size >= MIB // 10 else f"{size} bytes"
