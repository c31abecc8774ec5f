"""The connection to the vSphere server: opened when needed, and again when it was lost.

A VM lives on while its server's services restart or a session expires, so neither says anything about the
VM: what may be done twice is done again, for as long as `VsphereConnection.deadline`. Properties are read with
RetrievePropertiesEx only. pyvmomi would fetch each on its own when it is touched, and a session that has
expired is not an exception there but stands in the answer's list of what is missing.
"""

import ssl
import threading
import time
from collections.abc import Callable, Iterable
from http.client import HTTPException
from typing import Any, TypeVar
from xml.parsers.expat import ExpatError

from pyVmomi import SoapStubAdapter, vim, vmodl

from vmgahp import errors
from vmgahp.config import Settings
from vmgahp.drivers.vsphere import faults
from vmgahp.drivers.vsphere.credentials import Access, read_password, tls_context
from vmgahp.drivers.vsphere.faults import ServerLost

Properties = dict[str, Any]


Result = TypeVar("Result")

API = "vim.version.version11"
"""vSphere 6.5's, which every later server speaks too."""

LONGEST_CALL, SHORTEST_CALL = 20.0, 2.0
"""Seconds without an answer after which one attempt at a call counts as failed: as many as there are for all
attempts, but within these."""

LOGOUT_TIMEOUT = 3.0

RETRY_INTERVAL = 0.5
SLOWEST_POLL = 1.0

_AWAY = (OSError, HTTPException, ExpatError)
"""What a server that restarts, is killed or hangs does to a call. Expat meets half an answer."""


class Gone(errors.ClientFault):
    """The object is not there (any more)."""

    def __init__(self, what: str) -> None:
        super().__init__(errors.VM_NOT_FOUND, f"vSphere knows no {what}.")


class VsphereConnection:
    """One session with the server of the settings, shared by all machines of a driver; safe from any thread."""

    def __init__(self, settings: Settings, log: Callable[[str], None]) -> None:
        self.deadline = float(settings.integer("VSPHERE_RECONNECT_TIMEOUT"))
        """Seconds for which a call tries to reach the server."""
        self._task_deadline = float(settings.timeout(80, "VSPHERE_TASK_TIMEOUT"))
        self.timeout = max(SHORTEST_CALL, min(LONGEST_CALL, self.deadline))
        self._settings = settings
        self._log = log
        self._lock = threading.Lock()
        self._stub: SoapStubAdapter | None = None
        self._content: vim.ServiceInstanceContent | None = None
        self._session = 0
        """How often we have logged in; tells whether somebody else has already logged in again."""
        self._logged_in = False
        self._closed = False
        self.access: Access | None = None
        """Where we are logged in, once we are."""
        self.tls: ssl.SSLContext | None = None

    def call(self, function: "Callable[[vim.ServiceInstanceContent], Result]") -> Result:
        """Call `function` with the server's service content, and again when the server or the session went away.

        Only for what may be done twice. Raises `vmodl.MethodFault` for what the server answers, and
        `errors.MachineFault` when it cannot be reached or does not let us in.
        """
        end = time.monotonic() + self.deadline
        renewed = False
        waiting = threading.Event()
        while True:
            content, session = self._open(end)
            try:
                return function(content)
            except vim.fault.NotAuthenticated:
                if renewed:
                    raise
                renewed = True
                self._expired(session)
            except _AWAY as error:
                if time.monotonic() >= end or isinstance(error, ssl.SSLCertVerificationError):
                    raise faults.unreachable(str(self.access), error) from error
                self._log(f"the vSphere server did not answer, asking again: {error or type(error).__name__}")
                waiting.wait(RETRY_INTERVAL)

    def once(self, function: "Callable[[vim.ServiceInstanceContent], Result]", doing: str) -> Result:
        """Call `function` once: for what must not be done twice, such as to create a VM.

        Raises as `call`, and `ServerLost` where the server went away in the middle.
        """
        # First something harmless: a pooled connection may be dead and the session expired.
        self.call(lambda content: self._instance().CurrentTime())
        content, _ = self._open(time.monotonic() + self.deadline)
        try:
            return function(content)
        except _AWAY as error:
            raise ServerLost(
                f"The vSphere server went away while {doing}: {error or type(error).__name__}.",
                "see why the server went away.",
            ) from error

    def task(self, begin: "Callable[[vim.ServiceInstanceContent], vim.Task]", doing: str) -> object:
        """Begin a task, wait for its end, and return its result.

        Raises `errors.Fault` for all that can go wrong; `ServerLost` where it is unknown whether it was done.
        """
        with faults.explained(doing):
            return self._wait(self.once(begin, doing), doing)

    def retried_task(
        self,
        begin: "Callable[[vim.ServiceInstanceContent], vim.Task]",
        doing: str,
        done: Callable[[], object] = lambda: None,
    ) -> object:
        """`task`, once more where the server went away in the middle, unless it was `done`.

        `done` returns the result of what was carried out, None where nothing was.
        """
        for last in (False, True):
            try:
                return self.task(begin, doing)
            except ServerLost:
                found = done()
                if found is None and last:
                    raise
                if found is not None:
                    return found
        raise AssertionError

    def _wait(self, task: "vim.Task", doing: str) -> object:
        """The result of a task. Raises `vmodl.MethodFault` for its error, and as `task`."""
        end = time.monotonic() + self._task_deadline
        pause = 0.02
        waiting = threading.Event()
        while True:
            try:
                seen = self.properties(task, "info.state", "info.error", "info.result")
            except Gone as gone:
                raise ServerLost(
                    f"The vSphere server was {doing}, and has forgotten the task.", "see why it was restarted."
                ) from gone
            if seen.get("info.state") == vim.TaskInfo.State.success:
                return seen.get("info.result")
            if seen.get("info.state") == vim.TaskInfo.State.error:
                error = seen.get("info.error")
                raise error if isinstance(error, Exception) else vmodl.MethodFault(msg=str(error))
            if time.monotonic() >= end:
                self._cancel(task)
                raise errors.HypervisorFault(
                    f"vSphere has not ended {doing} within {self._task_deadline:.0f} s.",
                    "look at the tasks of the server, and why they take so long.",
                )
            waiting.wait(pause)
            pause = min(pause * 1.5, SLOWEST_POLL)

    def properties(self, ref: "vim.ManagedObject", *paths: str) -> Properties:
        """Some properties of an object, those that are set. Raises `Gone`, and as `call`."""
        found = self.call(lambda content: _retrieve(content, [ref], paths))
        if not found:
            raise Gone(str(ref).strip("'"))
        return found[0][1]

    def of_each(self, refs: "Iterable[vim.ManagedObject]", *paths: str) -> "list[tuple[vim.ManagedObject, Properties]]":
        """Some properties of several objects; what no longer exists is left out. Raises as `call`."""
        objects = list(refs)
        return self.call(lambda content: _retrieve(content, objects, paths)) if objects else []

    def cookie(self) -> str:
        """The session's cookie, for the transfer of files. It is a secret. Raises as `call`."""
        self.call(lambda content: self._instance().CurrentTime())
        assert self._stub is not None
        return str(self._stub.cookie).partition(";")[0]

    def renew(self) -> None:
        """The file server did not know our session: log in again before the next call."""
        self._expired(self._session)

    def close(self) -> None:
        """Log out; the server has few sessions to give. A server that does not answer is not waited for long."""
        with self._lock:
            self._closed = True
            content, self._content = self._content, None
        if content is not None and self._logged_in and self._stub is not None:
            self._stub.DropConnections()
            self._stub.schemeArgs["timeout"] = min(self.timeout, LOGOUT_TIMEOUT)
            try:
                content.sessionManager.Logout()
            except (vmodl.MethodFault, *_AWAY) as error:
                self._log(f"could not log out of vSphere: {type(error).__name__}")
        if self._stub is not None:
            self._stub.DropConnections()

    # How we get in

    def _open(self, end: float) -> "tuple[vim.ServiceInstanceContent, int]":
        waiting = threading.Event()
        while True:
            with self._lock:
                if self._closed:
                    raise errors.HypervisorFault("The connection to vSphere is closed: the server is ending.")
                if self._content is not None and self._logged_in:
                    return self._content, self._session
                try:
                    self._log_in()
                    continue
                except _AWAY as error:
                    refused = error
            if time.monotonic() >= end or isinstance(refused, ssl.SSLCertVerificationError):
                raise faults.unreachable(str(self.access), refused) from refused
            waiting.wait(RETRY_INTERVAL)

    def _log_in(self) -> None:
        if self._stub is None:
            self.access = Access.from_settings(self._settings)
            self.tls = tls_context(self._settings)
            self._stub = SoapStubAdapter(
                self.access.host, self.access.port, version=API, sslContext=self.tls, httpConnectionTimeout=self.timeout
            )
        assert self.access is not None
        password = read_password(self.access.password_file, self.access.log_directory)
        with faults.explained(f"logging in at {self.access} as {self.access.user}"):
            if self._content is None:
                self._content = self._instance().RetrieveContent()
            try:
                self._content.sessionManager.Login(self.access.user, password, None)
            except vim.fault.InvalidLogin:
                # A server may take a login within a living session for a bad one.
                self._stub.SetSessionId(None)
                self._content.sessionManager.Login(self.access.user, password, None)
        self._session += 1
        self._logged_in = True
        if self._session > 1:
            self._log("logged in at the vSphere server again")

    def _instance(self) -> "vim.ServiceInstance":
        return vim.ServiceInstance("ServiceInstance", self._stub)

    def _expired(self, session: int) -> None:
        with self._lock:
            if self._session == session:
                self._logged_in = False

    def _cancel(self, task: "vim.Task") -> None:
        try:
            self.call(lambda _content: task.CancelTask())
        except (vmodl.MethodFault, errors.Fault) as error:
            self._log(f"a task that takes too long cannot be canceled: {type(error).__name__}")


def _retrieve(
    content: "vim.ServiceInstanceContent", refs: "list[vim.ManagedObject]", paths: tuple[str, ...]
) -> "list[tuple[vim.ManagedObject, Properties]]":
    """RetrievePropertiesEx, page by page; raises NotAuthenticated where that is why something is missing."""
    query = vmodl.query.PropertyCollector
    collector = content.propertyCollector
    spec = query.FilterSpec(
        propSet=[query.PropertySpec(type=kind, pathSet=list(paths)) for kind in {type(ref) for ref in refs}],
        objectSet=[query.ObjectSpec(obj=ref) for ref in refs],
    )
    try:
        page = collector.RetrievePropertiesEx([spec], query.RetrieveOptions())
    except vmodl.fault.ManagedObjectNotFound:
        if len(refs) == 1:
            return []
        return [found for ref in refs for found in _retrieve(content, [ref], paths)]
    objects = []
    while page is not None:
        objects += page.objects
        page = collector.ContinueRetrievePropertiesEx(page.token) if page.token else None
    answer = []
    for found in objects:
        for missing in found.missingSet or ():
            if isinstance(missing.fault, vim.fault.NoPermission):  # NotAuthenticated is one of these
                raise missing.fault
        answer.append((found.obj, {one.name: one.val for one in found.propSet or ()}))
    return answer
