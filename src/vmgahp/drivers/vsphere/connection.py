"""The connection to the vSphere server: login, reconnection, and the faults of its errors.

The type of a server's fault decides: its words depend on the server's language.

The password is read from its file for every login and kept nowhere. Root, who runs jobs, and HTCondor's own user, as
whom the startd probes, must be able to read the file, and no other user.

A VM lives on while its server's services restart or a session expires, so neither says anything about the VM: what may
be done twice is retried for `VsphereConnection.deadline` seconds. Properties are read with RetrievePropertiesEx only:
pyvmomi would fetch each on its own when it is touched, and there an expired session is not an exception but an entry in
the answer's list of missing properties.
"""

from __future__ import annotations

import os
import pwd
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import partial
from http.client import HTTPException, HTTPSConnection
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit
from xml.parsers.expat import ExpatError

from pyVmomi import SoapStubAdapter, vim, vmodl

from vmgahp import errors
from vmgahp.config import Settings
from vmgahp.drivers.fault_rules import Rule
from vmgahp.errors import ClientFault, Fault, HypervisorFault, JobFault, MachineFault
from vmgahp.host import wait

_machine = partial(Rule, "", MachineFault, errors.CRITICAL)
_hypervisor = partial(Rule, "", HypervisorFault, errors.INTERNAL)
_job, _client = partial(Rule, "", JobFault), partial(Rule, "", ClientFault)

RULES: dict[type, Rule] = {
    vim.fault.InvalidLogin: _machine("check VSPHERE_USER, and the password in VSPHERE_PASSWORD_FILE."),
    vim.fault.NotAuthenticated: _hypervisor("find out what ends the sessions on the server."),
    vim.fault.NoPermission: _machine("give the role of VSPHERE_USER the privilege that the message names."),
    vim.fault.RestrictedVersion: _machine("use a license that lets programs change something; a free ESXi has none."),
    vmodl.fault.NotEnoughLicenses: _machine("check the licenses of the server."),
    vim.fault.NoDiskSpace: _machine("free disk space on the datastore of VSPHERE_DATASTORE."),
    vim.fault.InsufficientResourcesFault: _machine("give VSPHERE_RESOURCE_POOL more, or VMs less (VM_MEMORY)."),
    vim.fault.InvalidDatastore: _machine("mount the datastore of VSPHERE_DATASTORE on all hosts that run VMs."),
    vim.fault.InvalidDiskFormat: _job(errors.BAD_IMAGE, "check the job's disks with qemu-img info."),
    vim.fault.UnsupportedVmxLocation: _machine("name another VSPHERE_DATASTORE."),
    vim.fault.CannotAccessVmComponent: _hypervisor("see that the hosts reach the datastore."),
    vim.fault.UnsupportedGuest: _job(errors.MISMATCHED, "name another guestOS in the job's .vmx."),
    vim.fault.MemorySizeNotSupported: _job(errors.NO_MEMORY_PARAM, "ask for another vm_memory."),
    vim.fault.NumVirtualCpusIncompatible: _job(errors.MISMATCHED, "ask for fewer CPUs (vm_vcpus)."),
    vim.fault.VmConfigFault: _job(errors.MISMATCHED, "change virtualHW.version or devices to what this server has."),
    vim.fault.FileFault: _hypervisor("check the datastore, what has the file open, and the server's log (hostd.log)."),
    vmodl.fault.HostCommunication: _hypervisor("connect the host to its vCenter again, or take it out of the pool."),
    vim.fault.MemorySnapshotOnIndependentDisk: _client(errors.VM_NO_SUPPORT_CHECKPOINT),
    vim.fault.ToolsUnavailable: _client(errors.VM_INVALID_OPERATION),
    vim.fault.InvalidPowerState: _client(errors.VM_INVALID_OPERATION),
    vmodl.fault.ManagedObjectNotFound: _client(errors.VM_NOT_FOUND),
    vmodl.MethodFault: _hypervisor("read the server's log (hostd.log, vpxd.log)."),
}
"""The fault for each type of error; the first row that matches applies, as vSphere's types inherit from one another."""

_KEYS_OF_THE_MACHINE = ("outofspace", "nospace", "memsched", "notenoughmem", "insufficient")
"""The parts of messages' keys by which a fault about a VM's configuration is an error of the server after all."""

_DETAILS = ("privilegeId", "property", "invalidProperty", "file", "datastore", "name", "existingState")


class ServerLost(HypervisorFault):
    """A loss of the server, or of a task, during an operation whose outcome is unknown."""


class Gone(ClientFault):
    """The error for an object that does not exist (any more)."""

    def __init__(self, what: object) -> None:
        name = str(what).strip("'")
        super().__init__(errors.VM_NOT_FOUND, f"vSphere knows no {name}.")


def from_vsphere(error: Exception, doing: str) -> Fault:
    """Return the fault for an error of vSphere met while `doing` something ("starting alice_lab_7.0")."""
    rule = next(rule for kind, rule in RULES.items() if isinstance(error, kind))
    fault = rule.make(f"vSphere failed while {doing}: {describe(error)}.")
    keys = [getattr(message, "key", "") or "" for message in getattr(error, "faultMessage", None) or ()]
    if isinstance(fault, JobFault) and any(word in key.lower() for key in keys for word in _KEYS_OF_THE_MACHINE):
        return MachineFault(fault.problem, fault.hint)
    return fault


def describe(error: Exception) -> str:
    """Describe a fault in one line: its type, its subject, the server's message."""
    kind = type(error).__name__.rpartition(".")[2]
    told = [f"{name} {value!s}" for name in _DETAILS if (value := getattr(error, name, None))]
    said = str(getattr(error, "msg", "") or "").strip().rstrip(".")
    more = (getattr(message, "message", "") or "" for message in getattr(error, "faultMessage", None) or ())
    parts = [kind, *told, *([said] if said and said != kind else []), *(text.rstrip(".") for text in more if text)]
    return " ".join(", ".join(parts).split())[:1000]


def unreachable(where: str, error: Exception) -> MachineFault:
    if isinstance(error, ssl.SSLCertVerificationError):
        problem = f"The certificate of the vSphere server {where} is not accepted: {error.verify_message or error}."
        hint = "save the server's own certificate as the file of VSPHERE_TLS_PIN, or install its authority's."
        return MachineFault(problem, hint)
    problem = f"The vSphere server {where} (VSPHERE_HOST) cannot be reached: {error or type(error).__name__}."
    return MachineFault(problem, "see that it runs and that this machine gets through to it.")


@contextmanager
def explained(doing: str) -> Iterator[None]:
    try:
        yield
    except vmodl.MethodFault as error:
        raise from_vsphere(error, doing) from error


LONGEST_PASSWORD = 4096
HTTPS = 443


class Access(NamedTuple):
    """The server and the account, as the settings name them."""

    host: str
    """A name or an address, without the brackets of IPv6."""
    port: int
    user: str

    @classmethod
    def from_settings(cls, settings: Settings) -> Access:
        """Read the settings. Raises `MachineFault` for a missing setting or an invalid address."""
        text = _needed(settings, "VSPHERE_HOST", "the name of the ESXi host or vCenter")
        is_ipv6 = text.count(":") > 1 and not text.startswith("[")
        try:
            found = urlsplit(f"//[{text}]" if is_ipv6 else f"//{text}")
            host, port = found.hostname, found.port
        except ValueError:
            host = port = None
        if not host or found.netloc != found.geturl()[2:] or port == 0:
            problem = f"VSPHERE_HOST = {text} ({settings.where('VSPHERE_HOST')}) is not a server."
            raise MachineFault(problem, "set VSPHERE_HOST to a host name, with :port where that is not 443.")
        return cls(host, port or HTTPS, _needed(settings, "VSPHERE_USER", "the account for this machine's jobs"))

    def __str__(self) -> str:
        return self.host if self.port == HTTPS else f"{self.host}:{self.port}"


def _needed(settings: Settings, name: str, what: str) -> str:
    value = settings.string(name)
    if not value:
        raise MachineFault(f"{name} is not set, and vSphere cannot be used without it.", f"set {name} to {what}.")
    return value


def _full_path(name: str, path: str) -> str:
    if not path.startswith("/"):  # the current directory is the job's
        raise MachineFault(f"{name} = {path} is not a full path.", "name the file by its full path.")
    return path


def read_password(settings: Settings) -> str:
    """Read the password: the first line of its file. Raises `MachineFault`, whose text never has any of it."""
    path = _full_path("VSPHERE_PASSWORD_FILE", _needed(settings, "VSPHERE_PASSWORD_FILE", "a file with the password"))
    said, mend = f"VSPHERE_PASSWORD_FILE = {path}", f"chown condor: {path}; chmod 0600 {path}"
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC), "rb") as file:
            found, data = os.fstat(file.fileno()), file.read(LONGEST_PASSWORD + 1)
    except OSError as error:
        raise MachineFault(f"{said} cannot be read by uid {os.geteuid()}: {error.strerror}.", f"{mend}.") from error
    if found.st_mode & 0o077 or found.st_uid not in _owners(settings.string("LOG")):
        seen = f"has the mode {found.st_mode & 0o7777:04o} and belongs to uid {found.st_uid}"
        problem = f"{said} {seen}: others than root and HTCondor's user may use it."
        raise MachineFault(problem, f"{mend}; and change the password: somebody may have read it.")
    try:
        password = data.decode().partition("\n")[0].removesuffix("\r")
    except UnicodeDecodeError:
        password = ""
    if not password or len(data) > LONGEST_PASSWORD:
        problem = f"{said} has no password in its first line, or is no such file at all."
        raise MachineFault(problem, "write the password into its first line, as UTF-8.")
    return password


def _owners(log_directory: str) -> set[int]:
    """Return the users that may own the password file: root, this one, and HTCondor's, who owns its log directory."""
    owners = {0, os.geteuid()}
    with suppress(ValueError):
        owners.add(int(os.environ.get("CONDOR_IDS", "").partition(".")[0]))
    with suppress(KeyError):
        owners.add(pwd.getpwnam("condor").pw_uid)
    with suppress(OSError):
        owners.add(os.stat(log_directory).st_uid)
    return owners


def tls_context(settings: Settings) -> ssl.SSLContext:
    """Return the TLS context that verifies the server: by VSPHERE_TLS_PIN, else by this machine's CAs.

    With VSPHERE_TLS_VERIFY off the server is not verified. Raises `MachineFault` for a pin that cannot be used.
    pyvmomi's own pinning by thumbprint accepts a wrong certificate if that verifies otherwise (9.1.1.0), and it
    trusts every server on this machine.
    """
    pin = settings.string("VSPHERE_TLS_PIN")
    try:
        context = ssl.create_default_context(cafile=_full_path("VSPHERE_TLS_PIN", pin) if pin else None)
    except OSError as error:  # SSLError is one
        hint = "save the server's certificate there: openssl s_client -connect HOST:443 </dev/null | openssl x509."
        raise MachineFault(f"VSPHERE_TLS_PIN = {pin} cannot be used: {error.strerror}.", hint) from error
    if pin:
        # The pinned certificate is trusted by itself, regardless of its issuer and its name.
        context.check_hostname = False
        context.verify_flags = ssl.VERIFY_X509_PARTIAL_CHAIN
    elif not settings.boolean("VSPHERE_TLS_VERIFY"):
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


Properties = dict[str, Any]
Result = TypeVar("Result")
Call = Callable[["vim.ServiceInstanceContent"], Result]
"""A call of the server, which is given its service content."""

API = "vim.version.version11"
"""The API of vSphere 6.5, which every later server speaks too."""

LONGEST_CALL, SHORTEST_CALL = 20.0, 2.0
"""The limits of the seconds without an answer after which an attempt at a call has failed, else those of the call."""

PATIENCE = 3
"""The factor by which the next piece of a file may take longer than a call: a datastore writes while others wait."""

LOGOUT_TIMEOUT = 3.0
RETRY_INTERVAL = 0.5
TASK_POLL = 0.2

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
        self._tls: ssl.SSLContext | None = None

    def call(self, function: Call[Result], doing: str) -> Result:
        """Call `function`, again after the loss of the server or the session. Raises `errors.Fault`."""
        end = time.monotonic() + self.deadline
        renewed = said = False
        with explained(doing):
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
                        raise unreachable(str(self.access), error) from error
                    if not said:
                        self._log(f"the vSphere server did not answer, asking again: {error or type(error).__name__}")
                    said = True
                    time.sleep(RETRY_INTERVAL)

    def once(self, function: Call[Result], doing: str) -> Result:
        """Call `function` only once, such as to create a VM. Raises as `call`, and `ServerLost`."""
        content = self._wake()  # a pooled connection may be dead and the session expired
        try:
            with explained(doing):
                return function(content)
        except _AWAY as error:
            problem = f"The vSphere server went away while {doing}: {error or type(error).__name__}."
            raise ServerLost(problem, "see why the server went away.") from error

    def task(self, begin: Call[vim.Task], doing: str, done: Callable[[], object] = lambda: None) -> Any:
        """Return a task's result, begun once more after a loss of the server unless `done` has it. Raises `Fault`."""
        for last in (False, True):
            try:
                return self._wait(self.once(begin, doing), doing)
            except ServerLost:
                if (found := done()) is not None:
                    return found
                if last:
                    raise
        raise AssertionError

    def _wait(self, task: vim.Task, doing: str) -> object:
        state = vim.TaskInfo.State

        def ended() -> Properties | None:
            try:
                seen = self.properties(task, "info.state", "info.error", "info.result")
            except Gone as gone:
                problem = f"The vSphere server was {doing}, and has forgotten the task."
                raise ServerLost(problem, "see why it was restarted.") from gone
            return seen if seen.get("info.state") in (state.success, state.error) else None

        seen = wait.until(ended, self._task_deadline, TASK_POLL)
        if seen is None:
            try:
                self.call(lambda _content: task.CancelTask(), "canceling a task")
            except Fault as fault:
                self._log(f"a task that takes too long cannot be canceled: {fault.problem}")
            problem = f"vSphere has not ended {doing} within {self._task_deadline:g} s."
            raise HypervisorFault(problem, "look at the tasks of the server, and why they take so long.")
        if seen["info.state"] == state.error:
            error = seen.get("info.error")
            with explained(doing):
                raise error if isinstance(error, vmodl.MethodFault) else vmodl.MethodFault(msg=str(error))
        return seen.get("info.result")

    def properties(self, ref: vim.ManagedObject, *paths: str) -> Properties:
        """Read some properties of an object, those that are set. Raises `Gone`, and the same as `call`."""
        found = self.of_each([ref], *paths)
        if not found:
            raise Gone(ref)
        return found[0][1]

    def get(self, ref: vim.ManagedObject, path: str) -> Any:
        """Read one property; None if it is not set. Raises the same as `properties`."""
        return self.properties(ref, path).get(path)

    def of_each(self, refs: Iterable[vim.ManagedObject], *paths: str) -> list[tuple[vim.ManagedObject, Properties]]:
        """Read some properties of several objects, except those that no longer exist. Raises the same as `call`."""
        objects = list(refs)
        doing = f"reading {', '.join(paths)} of {str(objects[0]) if len(objects) == 1 else 'several objects'}"
        return self.call(lambda content: _retrieve(content, objects, paths), doing) if objects else []

    def https(self) -> tuple[HTTPSConnection, dict[str, str]]:
        """Open a connection to the file service, after a call that logs in; return the secret header, too."""
        self._wake()
        assert self.access is not None
        assert self._stub is not None
        host, port, timeout = self.access.host, self.access.port, self.timeout * PATIENCE
        connection = HTTPSConnection(host, port, timeout=timeout, context=self._tls)
        return connection, {"Cookie": str(self._stub.cookie).partition(";")[0]}

    def renew(self) -> None:
        """Log in again before the next call, because the server did not know the session."""
        self._logged_in = False

    def close(self) -> None:
        """Log out, since the number of the server's sessions is limited; errors are logged."""
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

    def now(self) -> float:
        """Return the server's time in seconds since 1970, the one clock of all hosts. Raises the same as `call`."""

        def ask(_content: object) -> datetime:
            seen: datetime = vim.ServiceInstance("ServiceInstance", self._stub).CurrentTime()
            return seen

        return self.call(ask, "asking the server for the time").timestamp()

    def _wake(self) -> vim.ServiceInstanceContent:
        """Test the session by a harmless call, and return the service content. Raises the same as `call`."""
        self.now()
        return self._content

    def _open(self) -> vim.ServiceInstanceContent:
        """Log in if needed, and return the service content. Raises `errors.Fault`, `_AWAY`."""
        with self._lock:
            if self._closed:
                raise HypervisorFault("The connection to vSphere is closed: the server is ending.")
            if not self._logged_in:
                self._log_in()
            return self._content

    def _log_in(self) -> None:
        if self._stub is None:
            self.access = Access.from_settings(self._settings)
            self._tls = tls_context(self._settings)
            how = {"version": API, "sslContext": self._tls, "httpConnectionTimeout": self.timeout}
            self._stub = SoapStubAdapter(self.access.host, self.access.port, **how)
        assert self.access is not None
        password = read_password(self._settings)
        with explained(f"logging in at {self.access} as {self.access.user}"):
            if self._content is None:
                self._content = vim.ServiceInstance("ServiceInstance", self._stub).RetrieveContent()
            else:
                self._log("logging in at the vSphere server again")
            try:
                self._content.sessionManager.Login(self.access.user, password, None)
            except vim.fault.InvalidLogin:
                # A server may reject a login within a live session as a bad one.
                self._stub.SetSessionId(None)
                self._content.sessionManager.Login(self.access.user, password, None)
        self._logged_in = True


def _retrieve(
    content: vim.ServiceInstanceContent, refs: list[vim.ManagedObject], paths: tuple[str, ...]
) -> list[tuple[vim.ManagedObject, Properties]]:
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
