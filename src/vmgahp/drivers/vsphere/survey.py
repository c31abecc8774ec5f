"""Whether jobs can run on the vSphere server, and what they get there."""

from collections.abc import Callable
from time import monotonic
from typing import NamedTuple

from pyVmomi import vim

from vmgahp import errors, findings
from vmgahp.config import Settings
from vmgahp.drivers.base import Survey, Value
from vmgahp.drivers.vsphere import annotations, faults
from vmgahp.drivers.vsphere.connection import VsphereConnection
from vmgahp.drivers.vsphere.inventory import Inventory, network_map
from vmgahp.findings import OFF, OK, Finding
from vmgahp.job.vmware import NETWORKING_TYPES

GIB = 1 << 30
MIB = 1 << 20
LEAST_ROOM = GIB
"""Free bytes below which no job's disks would fit into the datastore."""

OBJECT_STORES = {"vsan": "vSAN", "vvol": "vVols"}
"""Kinds of datastores whose disks are objects of the storage, by the server's word for them in lower case."""


class _Server(NamedTuple):
    """What the server says of itself."""

    name: str
    version: str
    product: str
    datacenter: "vim.Datacenter"
    datacenter_path: str


class VsphereSurveyor(NamedTuple):
    """Looks at one server for one execute machine."""

    vm_type: str
    settings: Settings
    connection: VsphereConnection
    inventory: Inventory

    def survey(self, end: float) -> Survey:
        """The login first, then all that needs it side by side; see `vmgahp.drivers.base.Driver.survey`."""
        left = max(0.5, end - monotonic())
        self.connection.deadline = left / 2
        self.connection.timeout = max(0.5, left / 2)
        found: list[Finding] = []
        server = findings.side_by_side({"vsphere": self._ask}, monotonic() + left * 0.6)["vsphere"]
        where = self.settings.string("VSPHERE_HOST") or "VSPHERE_HOST"
        found.append(findings.judge("vsphere", f"the vSphere server {where}", server, lambda: _says(server)))
        if not isinstance(server, _Server):
            return Survey(found)
        found.append(self._tls())
        wanted = self.settings.networking_types(NETWORKING_TYPES, own_bridge=True)
        datacenter = server.datacenter
        checks: dict[str, Callable[[], object]] = {
            "datastore": lambda: self._datastore(datacenter),
            "resource pool": lambda: self._pool(datacenter),
            "folder": lambda: self._folder(datacenter),
        }
        for kind in wanted:
            checks[f"network {kind}"] = lambda kind=kind: self.inventory.network(datacenter, kind)  # type: ignore[misc]
        outcomes = findings.side_by_side(checks, end)
        for name in ("datastore", "resource pool", "folder"):
            setting = "VSPHERE_" + name.upper().replace(" ", "_")
            outcome = outcomes[name]
            found.append(findings.judge(name, f"the {name} of {setting}", outcome, str(outcome)))
        networking = []
        for kind in wanted:
            finding = findings.judge(
                f"network {kind}",
                f"the network of {kind} in VSPHERE_NETWORK_MAP",
                outcomes[f"network {kind}"],
                lambda kind=kind: f"{network_map(self.settings)[kind]} is there",  # type: ignore[misc]
                OFF,
            )
            found.append(finding)
            if finding.verdict == OK:
                networking.append(kind)
        return Survey(
            found,
            attributes=self._attributes(server, networking),
            networking=networking,
            hypervisors=[self.vm_type],
            vm_types=[self.vm_type],
        )

    # The checks

    def _ask(self) -> _Server:
        with faults.explained("asking the server who it is"):
            about = self.connection.call(lambda content: content.about)
        datacenter, path = self.inventory.datacenter()
        return _Server(str(about.fullName), str(about.version), str(about.apiType), datacenter, path)

    def _tls(self) -> Finding:
        looked_at = "how the server proves who it is"
        if self.settings.string("VSPHERE_TLS_PIN"):
            return Finding("tls", OK, looked_at, "by its own certificate, in VSPHERE_TLS_PIN")
        if self.settings.boolean("VSPHERE_TLS_VERIFY"):
            return Finding("tls", OK, looked_at, "by an authority that this machine trusts")
        return Finding(
            "tls",
            OFF,
            looked_at,
            "VSPHERE_TLS_VERIFY is off: whoever answers in the server's place gets the password.",
            "save the server's certificate as the file of VSPHERE_TLS_PIN.",
        )

    def _datastore(self, datacenter: "vim.Datacenter") -> str:
        ref, name = self.inventory.datastore(datacenter)
        with faults.explained("looking at the datastore"):
            seen = self.connection.properties(ref, "summary.accessible", "summary.freeSpace", "summary.type")
        if seen.get("summary.accessible") is False:
            raise errors.MachineFault(f"The server cannot reach its datastore {name}.", "look at the server's storage.")
        free = seen.get("summary.freeSpace")
        if isinstance(free, int) and free < LEAST_ROOM:
            raise errors.MachineFault(
                f"The datastore {name} has room for {free // MIB} MiB, too little for any job's disks.",
                "free disk space on it.",
            )
        room = f"{name} has room for {free // MIB if isinstance(free, int) else 'unknown'} MiB"
        kind = OBJECT_STORES.get(str(seen.get("summary.type")).lower())
        # Whether an ESXi host runs a disk's file there was never seen; VMware's own disks there are none.
        return f"{room}; it is {kind}, whose disks are no files, and was never tried" if kind else room

    def _pool(self, datacenter: "vim.Datacenter") -> str:
        ref = self.inventory.pool(datacenter)
        path = "runtime.memory.unreservedForVm"
        with faults.explained("looking at the resource pool"):
            seen = self.connection.properties(ref, "name", path)
        memory, free = self.settings.integer("VM_MEMORY"), seen.get(path)
        if not isinstance(free, int) or not free:
            return f"{seen.get('name')} is there"
        note = "" if free // MIB >= memory else f", less than VM_MEMORY = {memory} MiB"
        return f"{seen.get('name')} has {free // MIB} MiB that is not reserved{note}"

    def _folder(self, datacenter: "vim.Datacenter") -> str:
        folder = self.inventory.folder(datacenter)
        there = annotations.find(self.connection, folder)
        here = sum(1 for one in there if one.tag.host == annotations.this_host())
        saved = sum(1 for one in there if one.tag.state == annotations.SAVED)
        return f"it has {len(there)} VMs of jobs, {here} of this machine and {saved} checkpoints"

    # What is made of them

    def _attributes(self, server: _Server, networking: list[str]) -> dict[str, Value]:
        return {
            "product": server.name,
            "version": server.version,
            "kind": "vcenter" if server.product == "VirtualCenter" else "esxi",
            "suspend": True,
            "soft_suspend": False,
            "checkpoint": True,
            "snapshot": True,
            "networking": ",".join(networking),
        }


def _says(server: object) -> str:
    assert isinstance(server, _Server)
    return f"{server.name} lets us in, and has the data center {server.datacenter_path}"


__all__ = ["VsphereSurveyor"]
