"""The part of libvirt's C library that this package uses, under libvirt-python's names.

Each server holds this for as long as its VM lives, and libvirt-python's own module has three hundred kilobytes of
classes and constants of which a tenth is used. The C module below it (``libvirtmod``) does the work: it lets other
threads run during a call, answers None or -1 if a call failed, keeps the error for each thread by itself, and
delivers an event by calling the connection that asked for it. A function that an older libvirt lacks is an
AttributeError when it is called, as it is there.
"""

import libvirtmod

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_ERRORS = """
    OK INTERNAL_ERROR NO_MEMORY NO_SUPPORT UNKNOWN_HOST NO_CONNECT INVALID_CONN INVALID_DOMAIN INVALID_ARG
    OPERATION_FAILED GET_FAILED POST_FAILED HTTP_ERROR SEXPR_SERIAL NO_XEN XEN_CALL OS_TYPE NO_KERNEL NO_ROOT NO_SOURCE
    NO_TARGET NO_NAME NO_OS NO_DEVICE NO_XENSTORE DRIVER_FULL CALL_FAILED XML_ERROR DOM_EXIST OPERATION_DENIED
    OPEN_FAILED READ_FAILED PARSE_FAILED CONF_SYNTAX WRITE_FAILED XML_DETAIL INVALID_NETWORK NETWORK_EXIST SYSTEM_ERROR
    RPC GNUTLS_ERROR - NO_DOMAIN NO_NETWORK INVALID_MAC AUTH_FAILED INVALID_STORAGE_POOL INVALID_STORAGE_VOL -
    NO_STORAGE_POOL NO_STORAGE_VOL - INVALID_NODE_DEVICE NO_NODE_DEVICE NO_SECURITY_MODEL OPERATION_INVALID -
    NO_INTERFACE INVALID_INTERFACE MULTIPLE_INTERFACES - INVALID_NWFILTER NO_NWFILTER BUILD_FIREWALL - INVALID_SECRET
    NO_SECRET CONFIG_UNSUPPORTED OPERATION_TIMEOUT MIGRATE_PERSIST_FAILED HOOK_SCRIPT_FAILED INVALID_DOMAIN_SNAPSHOT
    NO_DOMAIN_SNAPSHOT INVALID_STREAM ARGUMENT_UNSUPPORTED STORAGE_PROBE_FAILED STORAGE_POOL_BUILT SNAPSHOT_REVERT_RISKY
    OPERATION_ABORTED AUTH_CANCELLED NO_DOMAIN_METADATA MIGRATE_UNSAFE OVERFLOW BLOCK_COPY_ACTIVE OPERATION_UNSUPPORTED
    SSH AGENT_UNRESPONSIVE RESOURCE_BUSY ACCESS_DENIED DBUS_SERVICE STORAGE_VOL_EXIST CPU_INCOMPATIBLE
    XML_INVALID_SCHEMA MIGRATE_FINISH_OK AUTH_UNAVAILABLE NO_SERVER NO_CLIENT AGENT_UNSYNCED LIBSSH DEVICE_MISSING
    INVALID_NWFILTER_BINDING NO_NWFILTER_BINDING INVALID_DOMAIN_CHECKPOINT NO_DOMAIN_CHECKPOINT NO_DOMAIN_BACKUP
    INVALID_NETWORK_PORT NETWORK_PORT_EXIST NO_NETWORK_PORT NO_HOSTNAME CHECKPOINT_INCONSISTENT MULTIPLE_DOMAINS
    NO_NETWORK_METADATA AGENT_COMMAND_TIMEOUT AGENT_COMMAND_FAILED INVALID_ENCR_KEY_SECRET
"""
CODES = {name: number for number, name in enumerate(_ERRORS.split()) if name != "-"}
"""The numbers of ``VIR_ERR_`` (virErrorNumber) by name, in libvirt's order; a - for each that is only ever a warning.
"""

ORIGINS = {"RPC": 7, "QEMU": 10, "REMOTE": 13}
"""The numbers of ``VIR_FROM_`` (virErrorDomain) that affect the classification of an error."""

VIR_ERR_INTERNAL_ERROR = CODES["INTERNAL_ERROR"]
VIR_ERR_NO_SUPPORT = CODES["NO_SUPPORT"]
VIR_ERR_NO_CONNECT = CODES["NO_CONNECT"]
VIR_ERR_INVALID_ARG = CODES["INVALID_ARG"]
VIR_ERR_NO_DOMAIN = CODES["NO_DOMAIN"]
VIR_ERR_CONFIG_UNSUPPORTED = CODES["CONFIG_UNSUPPORTED"]
VIR_FROM_QEMU = ORIGINS["QEMU"]

VIR_CONNECT_LIST_DOMAINS_ACTIVE = 1
VIR_CONNECT_LIST_DOMAINS_PERSISTENT = 4
VIR_CONNECT_LIST_DOMAINS_TRANSIENT = 8
VIR_CONNECT_GET_ALL_DOMAINS_STATS_NOWAIT = 1 << 29

VIR_DOMAIN_NOSTATE = 0
VIR_DOMAIN_RUNNING = 1
VIR_DOMAIN_BLOCKED = 2
VIR_DOMAIN_PAUSED = 3
VIR_DOMAIN_SHUTDOWN = 4
VIR_DOMAIN_SHUTOFF = 5
VIR_DOMAIN_CRASHED = 6
VIR_DOMAIN_PMSUSPENDED = 7
VIR_DOMAIN_PAUSED_IOERROR = 5

VIR_DOMAIN_EVENT_ID_LIFECYCLE = 0
VIR_DOMAIN_EVENT_ID_AGENT_LIFECYCLE = 18
VIR_CONNECT_DOMAIN_EVENT_AGENT_LIFECYCLE_STATE_CONNECTED = 1
VIR_DOMAIN_EVENT_STARTED = 2
VIR_DOMAIN_EVENT_SUSPENDED = 3
VIR_DOMAIN_EVENT_SUSPENDED_PAUSED = 0
VIR_DOMAIN_EVENT_SUSPENDED_IOERROR = 2
VIR_DOMAIN_EVENT_SUSPENDED_WATCHDOG = 3
VIR_DOMAIN_EVENT_RESUMED = 4
VIR_DOMAIN_EVENT_RESUMED_UNPAUSED = 0
VIR_DOMAIN_EVENT_STOPPED = 5
VIR_DOMAIN_EVENT_STOPPED_SHUTDOWN = 0
VIR_DOMAIN_EVENT_STOPPED_DESTROYED = 1
VIR_DOMAIN_EVENT_STOPPED_CRASHED = 2
VIR_DOMAIN_EVENT_STOPPED_MIGRATED = 3
VIR_DOMAIN_EVENT_STOPPED_SAVED = 4
VIR_DOMAIN_EVENT_STOPPED_FAILED = 5
VIR_DOMAIN_EVENT_SHUTDOWN = 6
VIR_DOMAIN_EVENT_CRASHED = 8
VIR_DOMAIN_EVENT_CRASHED_PANICKED = 0

VIR_DOMAIN_AFFECT_LIVE = 1
VIR_DOMAIN_START_PAUSED = 1
VIR_DOMAIN_START_AUTODESTROY = 2
VIR_DOMAIN_UNDEFINE_KEEP_NVRAM = 8
VIR_DOMAIN_XML_SECURE = 1
VIR_DOMAIN_XML_MIGRATABLE = 8
VIR_DOMAIN_METADATA_DESCRIPTION = 0
VIR_DOMAIN_METADATA_ELEMENT = 2
VIR_DOMAIN_FD_ASSOCIATE_SECLABEL_RESTORE = 1
VIR_DOMAIN_DISK_ERROR_NO_SPACE = 2
VIR_DOMAIN_INTERFACE_ADDRESSES_SRC_LEASE = 0
VIR_DOMAIN_INTERFACE_ADDRESSES_SRC_AGENT = 1
VIR_DOMAIN_INTERFACE_ADDRESSES_SRC_ARP = 2
VIR_DOMAIN_SHUTDOWN_ACPI_POWER_BTN = 1
VIR_DOMAIN_SHUTDOWN_GUEST_AGENT = 2

VIR_NETWORK_UPDATE_COMMAND_DELETE = 2
VIR_NETWORK_UPDATE_COMMAND_ADD_LAST = 3
_IP_DHCP_HOST = 4
_AFFECT_LIVE = 1

VIR_DOMAIN_JOB_NONE = 0
VIR_DOMAIN_SAVE_BYPASS_CACHE = 1
VIR_DOMAIN_SAVE_PAUSED = 4
if libvirtmod.virGetVersion() >= 11_002_000:  # an older one rejects it
    VIR_DOMAIN_SAVE_PARAM_IMAGE_FORMAT = "image_format"

VIR_DOMAIN_STATS_STATE = 1
VIR_DOMAIN_STATS_CPU_TOTAL = 2
VIR_DOMAIN_STATS_BALLOON = 4
VIR_DOMAIN_STATS_VCPU = 8
VIR_DOMAIN_STATS_INTERFACE = 16
VIR_DOMAIN_STATS_BLOCK = 32


class libvirtError(Exception):
    """The error of libvirt for a call of this thread that has just failed."""

    def __init__(self, otherwise: str) -> None:
        self.err: Any = libvirtmod.virGetLastError()
        super().__init__(otherwise if self.err is None else self.err[2])

    def get_error_code(self) -> "int | None":
        """Return the code: one of `CODES`, or one of a later libvirt."""
        return None if self.err is None else self.err[0]

    def get_error_domain(self) -> "int | None":
        """Return the part of libvirt that reports the error."""
        return None if self.err is None else self.err[1]

    def get_error_message(self) -> "str | None":
        """Return the complete message."""
        return None if self.err is None else self.err[2]


def _some(name: str, *arguments: object) -> "Any":
    """Call a function that returns None if it failed; raise libvirtError then."""
    answer = getattr(libvirtmod, name)(*arguments)
    if answer is None:
        raise libvirtError(f"{name}() failed")
    return answer


def _done(name: str, *arguments: object) -> "Any":
    """Call a function that returns -1 if it failed; raise libvirtError then."""
    answer = getattr(libvirtmod, name)(*arguments)
    if answer == -1:
        raise libvirtError(f"{name}() failed")
    return answer


def registerErrorHandler(handler: "Callable[[object, object], None]", context: object) -> None:
    """Have every error passed to `handler`, as ``f(context, error)``, instead of printed to standard error."""
    libvirtmod.virRegisterErrorHandler(handler, context)


def virEventRegisterDefaultImpl() -> None:
    """Register libvirt's own event loop, before the first connection."""
    _done("virEventRegisterDefaultImpl")


def virEventRunDefaultImpl() -> None:
    """Run one iteration of that loop, which waits for an event."""
    _done("virEventRunDefaultImpl")


def open(uri: str) -> "virConnect":
    """Connect to a hypervisor's daemon."""
    return virConnect(_some("virConnectOpen", uri))


def openReadOnly(uri: str) -> "virConnect":
    """Connect to a hypervisor's daemon for queries only."""
    return virConnect(_some("virConnectOpenReadOnly", uri))


class _Owned:
    """A reference to an object of the library's, freed with this object; it keeps its connection."""

    __slots__ = ("_conn", "_o")
    _free = ""

    def __init__(self, connection: "virConnect", pointer: object) -> None:
        self._conn = connection
        self._o = pointer

    def __del__(self) -> None:
        getattr(libvirtmod, self._free)(self._o)


class virConnect:
    """A connection, which is closed with its last reference at the latest; domains and callbacks hold references."""

    def __init__(self, pointer: object) -> None:
        self._o: object = pointer

    def __del__(self) -> None:
        if self._o is not None:
            libvirtmod.virConnectClose(self._o)

    def close(self) -> int:
        """Give up this reference. Returns the number of references that the library still counts."""
        pointer, self._o = self._o, None
        return int(_done("virConnectClose", pointer))

    def isAlive(self) -> int:
        return int(_done("virConnectIsAlive", self._o))

    def setKeepAlive(self, interval: int, count: int) -> None:
        _done("virConnectSetKeepAlive", self._o, interval, count)

    def getType(self) -> str:
        return str(_some("virConnectGetType", self._o))

    def getVersion(self) -> int:
        return int(_done("virConnectGetVersion", self._o))

    def getLibVersion(self) -> int:
        return int(_done("virConnectGetLibVersion", self._o))

    def getCapabilities(self) -> str:
        return str(_some("virConnectGetCapabilities", self._o))

    def getDomainCapabilities(
        self,
        emulator: str | None = None,
        arch: str | None = None,
        machine: str | None = None,
        domain_type: str | None = None,
        flags: int = 0,
    ) -> str:
        return str(_some("virConnectGetDomainCapabilities", self._o, emulator, arch, machine, domain_type, flags))

    def domainXMLToNative(self, to: str, xml: str, flags: int = 0) -> str:
        return str(_some("virConnectDomainXMLToNative", self._o, to, xml, flags))

    def createXML(self, xml: str, flags: int = 0) -> "virDomain":
        return virDomain(self, _some("virDomainCreateXML", self._o, xml, flags))

    def defineXML(self, xml: str) -> "virDomain":
        return virDomain(self, _some("virDomainDefineXML", self._o, xml))

    def restoreFlags(self, path: str, xml: str | None = None, flags: int = 0) -> None:
        _done("virDomainRestoreFlags", self._o, path, xml, flags)

    def lookupByUUIDString(self, uuid: str) -> "virDomain":
        return virDomain(self, _some("virDomainLookupByUUIDString", self._o, uuid))

    def listAllDomains(self, flags: int = 0) -> "list[virDomain]":
        return [virDomain(self, pointer) for pointer in _some("virConnectListAllDomains", self._o, flags)]

    def domainListGetStats(
        self, domains: "list[virDomain]", wanted: int = 0, flags: int = 0
    ) -> "list[tuple[virDomain, dict[str, object]]]":
        pointers = [domain._o for domain in domains]
        answers = _some("virDomainListGetStats", self._o, pointers, wanted, flags)
        return [(virDomain(self, pointer), figures) for pointer, figures in answers]

    def networkLookupByName(self, name: str) -> "virNetwork":
        return virNetwork(self, _some("virNetworkLookupByName", self._o, name))

    def newStream(self, flags: int = 0) -> "virStream":
        return virStream(self, _some("virStreamNew", self._o, flags))

    def domainEventRegisterAny(
        self, domain: "virDomain | None", event: int, callback: "Callable[..., None]", opaque: object
    ) -> int:
        """Have `callback` called as ``f(connection, domain, event, detail, opaque)``, until it is deregistered."""
        row = {"conn": self, "cb": callback, "opaque": opaque}
        pointer = None if domain is None else domain._o
        return int(_done("virConnectDomainEventRegisterAny", self._o, pointer, event, row))

    def domainEventDeregisterAny(self, number: int) -> None:
        _done("virConnectDomainEventDeregisterAny", self._o, number)

    def _dispatchDomainEventLifecycleCallback(
        self, pointer: object, event: int, detail: int, row: "dict[str, Any]"
    ) -> int:
        row["cb"](self, virDomain(self, pointer), event, detail, row["opaque"])
        return 0

    def _dispatchDomainEventAgentLifecycleCallback(
        self, pointer: object, state: int, reason: int, row: "dict[str, Any]"
    ) -> int:
        return self._dispatchDomainEventLifecycleCallback(pointer, state, reason, row)


class virDomain(_Owned):
    """A domain of a connection, which may be gone."""

    __slots__ = ()
    _free = "virDomainFree"

    def connect(self) -> virConnect:
        return self._conn

    def ID(self) -> int:
        return int(libvirtmod.virDomainGetID(self._o))

    def name(self) -> str:
        return str(libvirtmod.virDomainGetName(self._o))

    def UUIDString(self) -> str:
        return str(_some("virDomainGetUUIDString", self._o))

    def XMLDesc(self, flags: int = 0) -> str:
        return str(_some("virDomainGetXMLDesc", self._o, flags))

    def metadata(self, kind: int, uri: str | None, flags: int = 0) -> str:
        return str(_some("virDomainGetMetadata", self._o, kind, uri, flags))

    def info(self) -> "list[int]":
        return list(_some("virDomainGetInfo", self._o))

    def state(self, flags: int = 0) -> "list[int]":
        return list(_some("virDomainGetState", self._o, flags))

    def isActive(self) -> int:
        return int(_done("virDomainIsActive", self._o))

    def isPersistent(self) -> int:
        return int(_done("virDomainIsPersistent", self._o))

    def jobInfo(self) -> "list[int]":
        return list(_some("virDomainGetJobInfo", self._o))

    def diskErrors(self, flags: int = 0) -> "dict[str, int]":
        return dict(_some("virDomainGetDiskErrors", self._o, flags))

    def blockStats(self, path: str) -> "tuple[int, ...]":
        return tuple(_some("virDomainBlockStats", self._o, path))

    def interfaceStats(self, path: str) -> "tuple[int, ...]":
        return tuple(_some("virDomainInterfaceStats", self._o, path))

    def agentSetResponseTimeout(self, seconds: int, flags: int = 0) -> None:
        _done("virDomainAgentSetResponseTimeout", self._o, seconds, flags)

    def setTime(self, time: "dict[str, int]", flags: int = 0) -> None:
        _done("virDomainSetTime", self._o, time, flags)

    def interfaceAddresses(self, source: int, flags: int = 0) -> "dict[str, Any]":
        return dict(_some("virDomainInterfaceAddresses", self._o, source, flags))

    def screenshot(self, stream: "virStream", screen: int, flags: int = 0) -> str:
        return str(_some("virDomainScreenshot", self._o, stream._o, screen, flags))

    def FDAssociate(self, name: str, files: "list[int]", flags: int = 0) -> None:
        _done("virDomainFDAssociate", self._o, name, files, flags)

    def createWithFlags(self, flags: int = 0) -> None:
        _done("virDomainCreateWithFlags", self._o, flags)

    def setSchedulerParametersFlags(self, parameters: "dict[str, int]", flags: int = 0) -> None:
        _done("virDomainSetSchedulerParametersFlags", self._o, parameters, flags)

    def setInterfaceParameters(self, device: str, parameters: "dict[str, int]", flags: int = 0) -> None:
        _done("virDomainSetInterfaceParameters", self._o, device, parameters, flags)

    def setMemoryParameters(self, parameters: "dict[str, int]", flags: int = 0) -> None:
        _done("virDomainSetMemoryParameters", self._o, parameters, flags)

    def setBlockIoTune(self, disk: str, parameters: "dict[str, int | str]", flags: int = 0) -> None:
        _done("virDomainSetBlockIoTune", self._o, disk, parameters, flags)

    def pinEmulator(self, cores: "tuple[bool, ...]", flags: int = 0) -> None:
        _done("virDomainPinEmulator", self._o, cores, flags)

    def pinVcpuFlags(self, vcpu: int, cores: "tuple[bool, ...]", flags: int = 0) -> None:
        _done("virDomainPinVcpuFlags", self._o, vcpu, cores, flags)

    def suspend(self) -> None:
        _done("virDomainSuspend", self._o)

    def resume(self) -> None:
        _done("virDomainResume", self._o)

    def shutdownFlags(self, flags: int) -> None:
        _done("virDomainShutdownFlags", self._o, flags)

    def destroy(self) -> None:
        _done("virDomainDestroy", self._o)

    def monitor(self, command: str) -> str:
        """Return the answer of QEMU's human monitor to a command; libvirt marks the domain as tainted by it."""
        import libvirtmod_qemu  # a library of its own, for the few VMs that need it

        answer = libvirtmod_qemu.virDomainQemuMonitorCommand(self._o, command, 1)
        if answer is None:
            raise libvirtError("virDomainQemuMonitorCommand() failed")
        return str(answer)

    def undefineFlags(self, flags: int = 0) -> None:
        _done("virDomainUndefineFlags", self._o, flags)

    def save(self, path: str) -> None:
        _done("virDomainSave", self._o, path)

    def saveFlags(self, path: str, xml: str | None = None, flags: int = 0) -> None:
        _done("virDomainSaveFlags", self._o, path, xml, flags)

    def saveParams(self, parameters: "dict[str, object]", flags: int = 0) -> None:
        _done("virDomainSaveParams", self._o, parameters, flags)


class virNetwork(_Owned):
    """A libvirt network."""

    __slots__ = ()
    _free = "virNetworkFree"

    def isActive(self) -> int:
        return int(_done("virNetworkIsActive", self._o))

    def XMLDesc(self, flags: int = 0) -> str:
        return str(_some("virNetworkGetXMLDesc", self._o, flags))

    def update(self, command: int, host: str) -> None:
        """Change the hosts of its DHCP, for as long as it is active."""
        _done("virNetworkUpdate", self._o, command, _IP_DHCP_HOST, -1, host, _AFFECT_LIVE)


class virStream(_Owned):
    """A stream of bytes that comes with the answer to a call."""

    __slots__ = ()
    _free = "virStreamFree"

    def recv(self, most: int) -> bytes:
        return bytes(_some("virStreamRecv", self._o, most))

    def finish(self) -> None:
        _done("virStreamFinish", self._o)

    def abort(self) -> None:
        _done("virStreamAbort", self._o)
