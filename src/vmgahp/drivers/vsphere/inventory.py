"""The places of jobs' VMs on the server: the objects that the settings name, found by their names.

On an ESXi host most of them exist once, and the settings may be empty. If there are several and none is named, the
fault lists their names.
"""

from typing import NamedTuple
from urllib.parse import unquote

from pyVmomi import vim

from vmgahp import errors
from vmgahp.config import Settings
from vmgahp.drivers.vsphere.connection import VsphereConnection

DEEPEST = 10
"""The levels of folders that are searched for data centers and compute resources."""

Found = list[tuple["vim.ManagedObject", str]]
"""The objects, each with its name or its path."""


class Placement(NamedTuple):
    """The place of a job's VM."""

    datacenter: "vim.Datacenter"
    datacenter_path: str
    """The data center's path for the file server: names with slashes between them."""
    datastore: "vim.Datastore"
    datastore_name: str
    pool: "vim.ResourcePool"
    folder: "vim.Folder"


class Inventory(NamedTuple):
    """The objects of the settings; not cached, since an administrator may move them."""

    connection: VsphereConnection
    settings: Settings

    def place(self) -> Placement:
        """Find the place. Raises `errors.MachineFault` for an object that is missing or ambiguous."""
        datacenter, path = self.datacenter()
        datastore, name = self.datastore(datacenter)
        return Placement(datacenter, path, datastore, name, self.pool(path), self.folder(path))

    def datacenter(self) -> "tuple[vim.Datacenter, str]":
        """Find VSPHERE_DATACENTER, and its path."""
        root = self.connection.call(lambda content: content.rootFolder, "looking for data centers")
        return self._choose("VSPHERE_DATACENTER", "data center", self._beneath(root, vim.Datacenter))

    def datastore(self, datacenter: "vim.Datacenter") -> "tuple[vim.Datastore, str]":
        """Find VSPHERE_DATASTORE, and its name."""
        return self._choose("VSPHERE_DATASTORE", "datastore", self._named(datacenter, "datastore"))

    def pool(self, datacenter_path: str) -> "vim.ResourcePool":
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

    def folder(self, datacenter_path: str) -> "vim.Folder":
        """Find VSPHERE_FOLDER, a path below the data center's VMs; their root folder if it is empty."""
        path = f"{datacenter_path}/vm/{self.settings.string('VSPHERE_FOLDER').strip('/')}"
        return self._at(path, vim.Folder, "VSPHERE_FOLDER", "folder")

    def network(self, datacenter: "vim.Datacenter", kind: str) -> "vim.vm.device.VirtualDevice.BackingInfo":
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

    def _named(self, ref: "vim.ManagedObject", path: str) -> Found:
        """Return the objects of a property of `ref`, with their names."""
        found = self.connection.of_each(dict.fromkeys(self.connection.get(ref, path) or ()), "name")
        # The server shows the characters %, / and \ of a name as %25, %2f and %5c.
        return [(child, unquote(str(properties.get("name", "")))) for child, properties in found]

    def _beneath(self, folder: "vim.Folder", kind: type) -> Found:
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

    def _at(self, path: str, kind: type, setting: str, what: str) -> "vim.ManagedObject":
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

    def _choose(self, setting: str, what: str, found: Found, wanted: str = "") -> "tuple[vim.ManagedObject, str]":
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
