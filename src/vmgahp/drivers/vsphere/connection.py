"""The connection to the vSphere server: opened when needed, and again when it was lost.

A VM lives on while its server's services restart or a session expires, so neither says anything about the VM: what may
be done twice is retried for `VsphereConnection.deadline` seconds. Properties are read with RetrievePropertiesEx only.
pyvmomi would fetch each on its own when it is touched, and a session that has expired is not an exception there but
stands in the answer's list of what is missing.
"""

import ssl
import threading
import time
from collections.abc import Callable, Iterable
from http.client import HTTPException, HTTPSConnection
from typing import Any, TypeVar
from xml.parsers.expat import ExpatError

from pyVmomi import SoapStubAdapter, vim, vmodl

from vmgahp import errors
from vmgahp.config import Settings
from vmgahp.drivers.vsphere import faults
from vmgahp.drivers.vsphere.credentials import Access, read_password, tls_context
from vmgahp.drivers.vsphere.faults import Gone, ServerLost

Properties = dict[str, Any]
Result = TypeVar("Result")
Call = Callable[["vim.ServiceInstanceContent"], Result]
"""A call of the server, which is given its service content."""

API = "vim.version.version11"
"""The API of vSphere 6.5, which every later server speaks too."""

LONGEST_CALL, SHORTEST_CALL = 20.0, 2.0
"""Seconds without an answer after which one attempt at a call has failed.

It is the time for all attempts, but within these limits.
"""

PATIENCE = 3
"""The factor by which the next piece of a file may take longer than a call: a datastore writes while others wait."""

LOGOUT_TIMEOUT = 3.0
RETRY_INTERVAL = 0.5
SLOWEST_POLL = 1.0

_AWAY = (OSError, HTTPException, ExpatError)
"""The errors of a call to a server that restarts, is killed or hangs. Expat fails on half an answer."""


class VsphereConnection:
    """One session with the server of the settings, shared by all machines of a driver; thread-safe."""

    def __init__(self, settings: Settings, log: Callable[[str], None]) -> None:
        client = settings.integer("VM_GAHP_REQ_TIMEOUT")
        self.deadline = max(1.0, client * 0.2)
        """Seconds for which a call tries to reach the server."""
        self._task_deadline = max(1.0, client * 0.8)
        self.timeout = max(SHORTEST_CALL, min(LONGEST_CALL, self.deadline))
        self._settings = settings
        self._log = log
        self._lock = threading.Lock()
        self._stub: SoapStubAdapter | None = None
        self._content: vim.ServiceInstanceContent | None = None
        self._logged_in = False
        self._closed = False
        self.access: Access | None = None
        """The server and the account after the login; None before."""
        self._tls: ssl.SSLContext | None = None

    def call(self, function: Call[Result], doing: str) -> Result:
        """Call `function`, and again when the server or the session went away.

        Only for what may be done twice. Raises `errors.Fault`: for what the server answers, and when it cannot be
        reached or does not let us in.
        """
        end = time.monotonic() + self.deadline
        renewed = said = False
        with faults.explained(doing):
            while True:
                try:
                    return function(self._open())
                except vim.fault.NotAuthenticated:
                    if renewed:
                        raise
                    renewed = True
                    self.renew()
                except _AWAY as error:
                    if time.monotonic() >= end or isinstance(error, ssl.SSLCertVerificationError):
                        raise faults.unreachable(str(self.access), error) from error
                    if not said:
                        self._log(f"the vSphere server did not answer, asking again: {error or type(error).__name__}")
                    said = True
                    time.sleep(RETRY_INTERVAL)

    def once(self, function: Call[Result], doing: str) -> Result:
        """Call `function` once: for what must not be done twice, such as to create a VM.

        Raises the same as `call`, and `ServerLost` if the server went away during the call.
        """
        content = self._wake()  # a pooled connection may be dead and the session expired
        try:
            with faults.explained(doing):
                return function(content)
        except _AWAY as error:
            raise ServerLost(
                f"The vSphere server went away while {doing}: {error or type(error).__name__}.",
                "see why the server went away.",
            ) from error

    def task(self, begin: "Call[vim.Task]", doing: str, done: Callable[[], object] = lambda: None) -> Any:
        """Begin a task, wait for its end, and return its result; retry once if the server went away meanwhile.

        `done` returns the result of a task that was carried out all the same, None if it was not. Raises
        `errors.Fault`; `ServerLost` if the outcome is unknown.
        """
        for last in (False, True):
            try:
                return self._wait(self.once(begin, doing), doing)
            except ServerLost:
                if (found := done()) is not None:
                    return found
                if last:
                    raise
        raise AssertionError

    def _wait(self, task: "vim.Task", doing: str) -> object:
        """Return the result of a task. Raises the same as `task`."""
        end, pause = time.monotonic() + self._task_deadline, 0.02
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
                with faults.explained(doing):
                    raise error if isinstance(error, vmodl.MethodFault) else vmodl.MethodFault(msg=str(error))
            if time.monotonic() >= end:
                try:
                    self.call(lambda _content: task.CancelTask(), "canceling a task")
                except errors.Fault as fault:
                    self._log(f"a task that takes too long cannot be canceled: {fault.problem}")
                raise errors.HypervisorFault(
                    f"vSphere has not ended {doing} within {self._task_deadline:g} s.",
                    "look at the tasks of the server, and why they take so long.",
                )
            time.sleep(pause)
            pause = min(pause * 1.5, SLOWEST_POLL)

    def properties(self, ref: "vim.ManagedObject", *paths: str) -> Properties:
        """Read some properties of an object, those that are set. Raises `Gone`, and the same as `call`."""
        found = self.of_each([ref], *paths)
        if not found:
            raise Gone(ref)
        return found[0][1]

    def get(self, ref: "vim.ManagedObject", path: str) -> Any:
        """Read one property; None if it is not set. Raises the same as `properties`."""
        return self.properties(ref, path).get(path)

    def of_each(self, refs: "Iterable[vim.ManagedObject]", *paths: str) -> "list[tuple[vim.ManagedObject, Properties]]":
        """Read some properties of several objects, except those that no longer exist. Raises the same as `call`."""
        objects = list(refs)
        doing = f"reading {', '.join(paths)} of {str(objects[0]) if len(objects) == 1 else 'several objects'}"
        return self.call(lambda content: _retrieve(content, objects, paths), doing) if objects else []

    def https(self) -> tuple[HTTPSConnection, dict[str, str]]:
        """Open a connection to the server's file service, with the header of the session, a secret.

        The server is called first, which tests that it is there, and logs in. Raises the same as `call`.
        """
        self._wake()
        assert self.access is not None
        assert self._stub is not None
        connection = HTTPSConnection(
            self.access.host, self.access.port, timeout=self.timeout * PATIENCE, context=self._tls
        )
        return connection, {"Cookie": str(self._stub.cookie).partition(";")[0]}

    def renew(self) -> None:
        """Log in again before the next call: the server did not know our session."""
        self._logged_in = False

    def close(self) -> None:
        """Log out, since the number of the server's sessions is limited.

        A server that does not answer is not waited for long.
        """
        with self._lock:
            self._closed = True
            if self._stub is None:
                return
            self._stub.DropConnections()
            self._stub.schemeArgs["timeout"] = min(self.timeout, LOGOUT_TIMEOUT)
            try:
                if self._logged_in and self._content is not None:
                    self._content.sessionManager.Logout()
            except (vmodl.MethodFault, *_AWAY) as error:
                self._log(f"could not log out of vSphere: {type(error).__name__}")
            self._stub.DropConnections()

    # The login

    def _wake(self) -> "vim.ServiceInstanceContent":
        """Test the session by a harmless call, and return the service content. Raises the same as `call`."""

        def ask(content: "vim.ServiceInstanceContent") -> "vim.ServiceInstanceContent":
            self._instance().CurrentTime()
            return content

        return self.call(ask, "asking the server for the time")

    def _open(self) -> "vim.ServiceInstanceContent":
        """Log in if needed, and return the service content. Raises `errors.Fault`, `_AWAY`."""
        with self._lock:
            if self._closed:
                raise errors.HypervisorFault("The connection to vSphere is closed: the server is ending.")
            if not self._logged_in:
                self._log_in()
            return self._content

    def _log_in(self) -> None:
        if self._stub is None:
            self.access = Access.from_settings(self._settings)
            self._tls = tls_context(self._settings)
            host, port = self.access.host, self.access.port
            self._stub = SoapStubAdapter(
                host, port, version=API, sslContext=self._tls, httpConnectionTimeout=self.timeout
            )
        assert self.access is not None
        password = read_password(self._settings)
        with faults.explained(f"logging in at {self.access} as {self.access.user}"):
            if self._content is None:
                self._content = self._instance().RetrieveContent()
            else:
                self._log("logging in at the vSphere server again")
            try:
                self._content.sessionManager.Login(self.access.user, password, None)
            except vim.fault.InvalidLogin:
                # A server may reject a login within a live session as a bad one.
                self._stub.SetSessionId(None)
                self._content.sessionManager.Login(self.access.user, password, None)
        self._logged_in = True

    def _instance(self) -> "vim.ServiceInstance":
        return vim.ServiceInstance("ServiceInstance", self._stub)


def _retrieve(
    content: "vim.ServiceInstanceContent", refs: "list[vim.ManagedObject]", paths: tuple[str, ...]
) -> "list[tuple[vim.ManagedObject, Properties]]":
    """Call RetrievePropertiesEx, page by page; raises NotAuthenticated if something is missing for that reason."""
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
