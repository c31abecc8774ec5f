"""Where jobs' VMs live on the server: the objects that the settings name, found by their names.

On an ESXi host there is one of most of them, and the settings may be empty. Where there are several, nobody
guesses: the fault lists their names.
"""

from collections.abc import Sequence
from typing import NamedTuple
from urllib.parse import unquote

from pyVmomi import vim

from vmgahp import errors
from vmgahp.config import Settings
from vmgahp.drivers.vsphere import faults
from vmgahp.drivers.vsphere.connection import VsphereConnection

DEEPEST = 10
"""Folders within folders that are looked into for data centers and compute resources."""


class Placement(NamedTuple):
    """Where a job's VM goes."""

    datacenter: "vim.Datacenter"
    datacenter_path: str
    """As the file server wants it: names with slashes between them."""
    datastore: "vim.Datastore"
    datastore_name: str
    pool: "vim.ResourcePool"
    folder: "vim.Folder"


class Inventory(NamedTuple):
    """Finds the objects of the settings; nothing is remembered, for an administrator may move them."""

    connection: VsphereConnection
    settings: Settings

    def place(self) -> Placement:
        """All of it. Raises `errors.MachineFault` for what is not there or not the only one."""
        datacenter, path = self.datacenter()
        datastore, name = self.datastore(datacenter)
        return Placement(datacenter, path, datastore, name, self.pool(datacenter), self.folder(datacenter))

    def datacenter(self) -> "tuple[vim.Datacenter, str]":
        """VSPHERE_DATACENTER, and its path."""
        root = self.connection.call(lambda content: content.rootFolder)
        found = self._beneath(root, vim.Datacenter)
        return self._choose("VSPHERE_DATACENTER", "data center", found)

    def datastore(self, datacenter: "vim.Datacenter") -> "tuple[vim.Datastore, str]":
        """VSPHERE_DATASTORE, and its name."""
        found = self._named(self._refs(datacenter, "datastore"))
        return self._choose("VSPHERE_DATASTORE", "datastore", found)

    def pool(self, datacenter: "vim.Datacenter") -> "vim.ResourcePool":
        """VSPHERE_RESOURCE_POOL: ``host or cluster``, or ``host or cluster/pool/pool…``."""
        computers = self._beneath(self._ref(datacenter, "hostFolder"), vim.ComputeResource)
        wanted = self.settings.string("VSPHERE_RESOURCE_POOL").strip("/")
        if not wanted:
            computer, _ = self._choose("VSPHERE_RESOURCE_POOL", "host or cluster", computers)
            return self._ref(computer, "resourcePool")
        for ref, path in sorted(computers, key=lambda one: -len(one[1])):
            for prefix in (path, path.rpartition("/")[2]):
                if wanted == prefix or wanted.startswith(f"{prefix}/"):
                    pool = self._ref(ref, "resourcePool")
                    rest = wanted[len(prefix) :].strip("/").removeprefix("Resources").strip("/")
                    return self._walk(pool, rest, "resourcePool", "VSPHERE_RESOURCE_POOL", "resource pool")
        raise _missing("VSPHERE_RESOURCE_POOL", wanted, "host or cluster", [path for _, path in computers])

    def folder(self, datacenter: "vim.Datacenter") -> "vim.Folder":
        """VSPHERE_FOLDER, a path below the data center's VMs; all of them where it is empty."""
        top = self._ref(datacenter, "vmFolder")
        wanted = self.settings.string("VSPHERE_FOLDER").strip("/")
        return self._walk(top, wanted, "childEntity", "VSPHERE_FOLDER", "folder")

    def network(self, datacenter: "vim.Datacenter", kind: str) -> "vim.vm.device.VirtualDevice.BackingInfo":
        """What a NIC of this networking type is connected to, by VSPHERE_NETWORK_MAP."""
        name = network_map(self.settings).get(kind)
        if name is None:
            raise errors.MachineFault(
                f"VSPHERE_NETWORK_MAP = {self.settings.string('VSPHERE_NETWORK_MAP')} has no {kind}, which "
                "VM_NETWORKING_TYPE offers.",
                f'add "{kind} = NAME OF THE NETWORK" to it.',
            )
        found = self._named(dict.fromkeys(self._refs(datacenter, "network")))
        ref, _ = _pick("VSPHERE_NETWORK_MAP", name, "network", found)
        return self._backing(ref, name)

    # How things are found

    def _backing(self, ref: "vim.Network", name: str) -> "vim.vm.device.VirtualDevice.BackingInfo":
        nic = vim.vm.device.VirtualEthernetCard
        if isinstance(ref, vim.dvs.DistributedVirtualPortgroup):
            group = self.connection.properties(ref, "key", "config.distributedVirtualSwitch")
            switch = self.connection.properties(group["config.distributedVirtualSwitch"], "uuid")
            port = vim.dvs.PortConnection(switchUuid=switch["uuid"], portgroupKey=group["key"])
            return nic.DistributedVirtualPortBackingInfo(port=port)
        if isinstance(ref, vim.OpaqueNetwork):
            summary = self.connection.properties(ref, "summary")["summary"]
            return nic.OpaqueNetworkBackingInfo(
                opaqueNetworkId=summary.opaqueNetworkId, opaqueNetworkType=summary.opaqueNetworkType
            )
        return nic.NetworkBackingInfo(deviceName=name, network=ref)

    def _refs(self, ref: "vim.ManagedObject", path: str) -> "list[vim.ManagedObject]":
        with faults.explained(f"reading {path} of {ref}"):
            return list(self.connection.properties(ref, path).get(path) or ())

    def _ref(self, ref: "vim.ManagedObject", path: str) -> "vim.ManagedObject":
        with faults.explained(f"reading {path} of {ref}"):
            found = self.connection.properties(ref, path).get(path)
        if found is None:
            raise errors.MachineFault(
                f"The vSphere server does not show {path} of {ref}.", "give VSPHERE_USER the right to see it."
            )
        return found

    def _named(
        self, refs: "Sequence[vim.ManagedObject] | dict[vim.ManagedObject, None]"
    ) -> "list[tuple[vim.ManagedObject, str]]":
        with faults.explained("looking around on the server"):
            found = self.connection.of_each(list(refs), "name")
        # Of a name's special characters the server shows %, / and \ as %25, %2f and %5c.
        return [(ref, unquote(str(properties.get("name", "")))) for ref, properties in found]

    def _beneath(self, folder: "vim.Folder", kind: type) -> "list[tuple[vim.ManagedObject, str]]":
        """The objects of a kind below a folder, with their paths."""
        answer, level = [], [(folder, "")]
        for _ in range(DEEPEST):
            below = []
            for ref, path in level:
                for child, name in self._named(self._refs(ref, "childEntity")):
                    place = f"{path}/{name}".lstrip("/")
                    if isinstance(child, kind):
                        answer.append((child, place))
                    elif isinstance(child, vim.Folder):
                        below.append((child, place))
            level = below
            if not level:
                break
        return answer

    def _walk(self, ref: "vim.ManagedObject", path: str, children: str, setting: str, what: str) -> "vim.ManagedObject":
        for step in path.split("/") if path else ():
            found = self._named(self._refs(ref, children))
            ref, _ = _pick(
                setting, step, what, [(child, name) for child, name in found if isinstance(child, type(ref))]
            )
        return ref

    def _choose(
        self, setting: str, what: str, found: "list[tuple[vim.ManagedObject, str]]"
    ) -> "tuple[vim.ManagedObject, str]":
        """The one that a setting names, or the only one."""
        wanted = self.settings.string(setting).strip("/")
        if wanted:
            return _pick(setting, wanted, what, found)
        if len(found) == 1:
            return found[0]
        raise errors.MachineFault(
            f"{setting} is not set, and the server has {len(found) or 'no'} {what}s{_list(found)}.",
            f"set {setting} to the {what} for jobs." if found else "see what VSPHERE_USER may see there.",
        )


def network_map(settings: Settings) -> dict[str, str]:
    """VSPHERE_NETWORK_MAP: ``nat = VM Network, bridge = Lab`` as a mapping. Raises `errors.MachineFault`."""
    answer = {}
    text = settings.string("VSPHERE_NETWORK_MAP")
    for entry in text.split(","):
        kind, equals, name = entry.partition("=")
        if not entry.strip():
            continue
        if not equals or not name.strip() or not kind.strip().isalpha():
            raise errors.MachineFault(
                f"VSPHERE_NETWORK_MAP = {text} is not a list of TYPE = NETWORK.",
                "write it as in: nat = VM Network, bridge = Lab network.",
            )
        answer[kind.strip().lower()] = name.strip()
    return answer


def _pick(
    setting: str, wanted: str, what: str, found: "list[tuple[vim.ManagedObject, str]]"
) -> "tuple[vim.ManagedObject, str]":
    for ref, path in found:
        if wanted in (path, path.rpartition("/")[2]):
            return ref, path
    raise _missing(setting, wanted, what, [path for _, path in found])


def _missing(setting: str, wanted: str, what: str, there: list[str]) -> errors.MachineFault:
    return errors.MachineFault(
        f"{setting} names {wanted}, and the server has no such {what}{_list([(None, path) for path in there])}.",
        f"name one that is there in {setting}, or see what VSPHERE_USER may see.",
    )


def _list(found: Sequence[tuple[object, str]]) -> str:
    names = [path for _, path in found]
    return f": {', '.join(names[:20])}" if names else ""
