"""The survey of a vSphere server: whether jobs can run on it, and what they get there."""

from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import NamedTuple

from pyVmomi import vim

from vmgahp import errors, findings
from vmgahp.config import Settings
from vmgahp.drivers.base import Survey
from vmgahp.drivers.vsphere import annotations
from vmgahp.drivers.vsphere.connection import VsphereConnection
from vmgahp.drivers.vsphere.inventory import Inventory, network_map
from vmgahp.drivers.vsphere.vm import find
from vmgahp.findings import BAD, OFF, OK, Finding
from vmgahp.job.vmware import NETWORKING_TYPES

MIB = 1 << 20
LEAST_ROOM = 1 << 30
"""The free bytes below which no job's disks would fit into the datastore."""

OBJECT_STORES = {"vsan": "vSAN", "vvol": "vVols"}
"""The kinds of datastores whose disks are objects of the storage, by the server's word in lower case."""


class VsphereSurveyor(NamedTuple):
    """The surveyor of one server for one execute machine."""

    vm_type: str
    settings: Settings
    connection: VsphereConnection
    inventory: Inventory

    def survey(self, end: float) -> Survey:
        """Log in, then run the checks that need it in parallel; see `vmgahp.drivers.base.Driver.survey`."""
        left = max(0.5, end - monotonic())
        self.connection.deadline = self.connection.timeout = left / 2
        where = self.settings.string("VSPHERE_HOST") or "VSPHERE_HOST"
        checked = f"the vSphere server {where}"
        asked = findings.side_by_side({"vsphere": self._ask}, monotonic() + left * 0.6)["vsphere"]
        if not isinstance(asked, tuple):
            return Survey([findings.judge("vsphere", checked, asked, "")])
        about, datacenter, path = asked
        said = f"{about.fullName} lets us in, and has the data center {path}"
        found = [Finding("vsphere", OK, checked, said), self._tls()]
        wanted = self.settings.networking_types(NETWORKING_TYPES, own_bridge=True)
        networks = {f"network {kind}": kind for kind in wanted}
        checks: dict[str, Callable[[], object]] = {
            "datastore": lambda: self._datastore(datacenter),
            "resource pool": lambda: self._pool(path),
            "folder": lambda: self._folder(path),
        }
        checks |= {name: partial(self._network, datacenter, kind) for name, kind in networks.items()}
        for name, outcome in findings.side_by_side(checks, end).items():
            setting = "NETWORK_MAP" if name in networks else name.upper().replace(" ", "_")
            trouble = OFF if name in networks else BAD
            found.append(findings.judge(name, f"the {name} of VSPHERE_{setting}", outcome, str(outcome), trouble))
        networking = [networks[one.check] for one in found if one.check in networks and one.verdict == OK]
        return Survey(
            found,
            attributes={
                "product": str(about.fullName),
                "version": str(about.version),
                "kind": "vcenter" if about.apiType == "VirtualCenter" else "esxi",
                "suspend": True,
                "soft_suspend": False,
                "checkpoint": True,
                "snapshot": True,
                "networking": ",".join(networking),
            },
            networking=networking,
            hypervisors=[self.vm_type],
            vm_types=[self.vm_type],
        )

    # The checks

    def _ask(self) -> "tuple[vim.AboutInfo, vim.Datacenter, str]":
        about = self.connection.call(lambda content: content.about, "asking the server who it is")
        return about, *self.inventory.datacenter()

    def _tls(self) -> Finding:
        checked = "how the server proves who it is"
        if self.settings.string("VSPHERE_TLS_PIN"):
            return Finding("tls", OK, checked, "by its own certificate, in VSPHERE_TLS_PIN")
        if self.settings.boolean("VSPHERE_TLS_VERIFY"):
            return Finding("tls", OK, checked, "by an authority that this machine trusts")
        seen = "VSPHERE_TLS_VERIFY is off: whoever answers in the server's place gets the password."
        return Finding("tls", OFF, checked, seen, "save the server's certificate as the file of VSPHERE_TLS_PIN.")

    def _datastore(self, datacenter: "vim.Datacenter") -> str:
        ref, name = self.inventory.datastore(datacenter)
        seen = self.connection.properties(ref, "summary.accessible", "summary.freeSpace", "summary.type")
        free = seen.get("summary.freeSpace")
        if seen.get("summary.accessible") is False:
            raise errors.MachineFault(f"The server cannot reach its datastore {name}.", "look at the server's storage.")
        if free is not None and free < LEAST_ROOM:
            raise errors.MachineFault(
                f"The datastore {name} has room for {free // MIB} MiB, too little for any job's disks.",
                "free disk space on it.",
            )
        room = f"{name} has room for {'unknown' if free is None else free // MIB} MiB"
        kind = OBJECT_STORES.get(str(seen.get("summary.type")).lower())
        # Not tested: whether an ESXi host runs a disk's file there, where VMware's own disks are not files.
        return f"{room}; it is {kind}, whose disks are no files, and was never tried" if kind else room

    def _pool(self, path: str) -> str:
        unreserved = "runtime.memory.unreservedForVm"
        seen = self.connection.properties(self.inventory.pool(path), "name", unreserved)
        memory, free = self.settings.integer("VM_MEMORY"), (seen.get(unreserved) or 0) // MIB
        if not free:
            return f"{seen.get('name')} is there"
        note = "" if free >= memory else f", less than VM_MEMORY = {memory} MiB"
        return f"{seen.get('name')} has {free} MiB that is not reserved{note}"

    def _folder(self, path: str) -> str:
        there = [tag for _, tag in find(self.connection, self.inventory.folder(path))]
        here = sum(tag.host == annotations.this_host() for tag in there)
        saved = sum(tag.state == annotations.SAVED for tag in there)
        return f"it has {len(there)} VMs of jobs, {here} of this machine and {saved} checkpoints"

    def _network(self, datacenter: "vim.Datacenter", kind: str) -> str:
        self.inventory.network(datacenter, kind)
        return f"{network_map(self.settings)[kind]} is there"
