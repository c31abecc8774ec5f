"""Whether jobs can run by vmrun here, and what they get."""

import os
import re
import tempfile
from time import monotonic
from typing import NamedTuple

from vmgahp import errors, findings
from vmgahp.config import Settings
from vmgahp.drivers.base import Logger, Survey
from vmgahp.drivers.vmrun import faults, tool
from vmgahp.drivers.vmrun.tool import Tool, VmrunError, find_product
from vmgahp.findings import OFF, OK, UNKNOWN, Finding
from vmgahp.host.job_user import Identity
from vmgahp.job.vmware import NETWORKING_TYPES
from vmgahp.vm_types import VMRUN

INSTALLED = "/etc/vmware"
"""Where a VMware product on Linux keeps its settings."""

DEVICES = "/dev"
"""Where the kernel modules show themselves: vmmon, without which no VM runs, and a vmnet for each network."""

NETWORKS = {"bridge": "vmnet0", "nat": "vmnet8"}
"""The networks that VMware makes by default."""

_NAMES = {"ws": "Workstation", "player": "Player", "fusion": "Fusion"}
_VERSION = re.compile(r"vmrun version ([0-9.]+)")

_TRIAL = '.encoding = "UTF-8"\nconfig.version = "8"\nvirtualHW.version = "10"\nguestOS = "other"\n'


class VmrunSurveyor(NamedTuple):
    """Looks at one machine."""

    vm_type: str
    settings: Settings
    identity: Identity
    log: Logger

    def survey(self, end: float) -> Survey:
        """All checks; see `vmgahp.drivers.base.Driver.survey`."""
        found: list[Finding] = []
        try:
            path = tool.find(self.settings)
        except errors.MachineFault as fault:
            return Survey([findings.judge("vmrun", "the vmrun of VMWARE_VMRUN or the PATH", fault, "")])
        with tempfile.TemporaryDirectory(prefix="vmgahp-vmrun-", ignore_cleanup_errors=True) as home:
            if self.identity.switching:
                os.chown(home, self.identity.uid, self.identity.gid)
            vmrun = Tool(path, "", self.identity, home, self.log)
            looked_at = f"{path} list, as uid {self.identity.uid}"
            try:
                vmrun.product = find_product(vmrun, self.settings, self._left(end))
                vmrun.run("list", seconds=self._left(end))
                version = self._version(vmrun, end)
            except errors.Fault as fault:
                return Survey([findings.judge("vmrun", looked_at, fault, "")])
            except VmrunError as error:
                asking = faults.from_vmrun(error, "asking which VMs run")
                return Survey([findings.judge("vmrun", looked_at, asking, "")])
            name = _NAMES[vmrun.product]
            found.append(Finding("vmrun", OK, looked_at, f"vmrun {version or '?'} answers for VMware {name}"))
            snapshot = self._try_snapshots(vmrun, home, end, found)
        self._look_at_modules(found)
        networking = self._look_at_networks(found)
        return Survey(
            found,
            attributes={
                "version": version,
                "product": vmrun.product,
                "snapshot": snapshot,
                "suspend": True,
                "soft_suspend": vmrun.product != "player",
                "checkpoint": True,
                "networking": ",".join(networking),
            },
            networking=networking,
            hypervisors=["vmware"],
            vm_types=list(dict.fromkeys((self.vm_type, *VMRUN))),
        )

    @staticmethod
    def _left(end: float) -> float:
        return max(0.1, end - monotonic())

    def _version(self, vmrun: Tool, end: float) -> str:
        """What vmrun says of itself where it is asked for nothing."""
        _, output, _ = vmrun.call([], "without a command", self._left(end))
        told = _VERSION.search(output)
        return told[1] if told else ""

    def _try_snapshots(self, vmrun: Tool, home: str, end: float, found: list[Finding]) -> bool:
        """Whether this product makes snapshots: a VM that does not run is asked for those that it has."""
        looked_at = "vmrun listSnapshots, for a virtual machine that was made to be asked"
        trial = os.path.join(home, "trial.vmx")
        with open(trial, "w") as file:
            file.write(_TRIAL)
        if self.identity.switching:
            os.chown(trial, self.identity.uid, self.identity.gid)
        try:
            output = vmrun.run("listSnapshots", os.path.realpath(trial), seconds=self._left(end))
        except VmrunError as error:
            hint = "use VMware Workstation, or send only jobs with vmware_snapshot_disk = False here."
            if faults.is_not_supported(error):
                seen = f"VMware {_NAMES[vmrun.product]} makes no snapshots: jobs with snapshot disks do not run here."
                found.append(Finding("snapshots", OFF, looked_at, seen, hint))
            else:
                seen = f"It could not be found out whether there are snapshots: {error.message}."
                found.append(Finding("snapshots", OFF, looked_at, seen, hint))
            return False
        works = output.lstrip().startswith("Total snapshots:")
        if works:
            found.append(Finding("snapshots", OK, looked_at, "this product makes snapshots"))
        else:
            seen = f"The answer is unknown: {output.strip()[:100]!a}."
            found.append(Finding("snapshots", OFF, looked_at, seen, "see what vmrun listSnapshots says."))
        return works

    def _look_at_modules(self, found: list[Finding]) -> None:
        device = os.path.join(DEVICES, "vmmon")
        if os.path.exists(device):
            found.append(Finding("vmmon", OK, device, "VMware's kernel module is loaded"))
        elif os.path.isdir(INSTALLED):
            hint = "build and load it: vmware-modconfig --console --install-all."
            found.append(Finding("vmmon", findings.BAD, device, "VMware's kernel module is not loaded.", hint))
        else:
            seen = f"There is neither {device} nor {INSTALLED}: this VMware is not one of Linux."
            found.append(Finding("vmmon", UNKNOWN, device, seen))

    def _look_at_networks(self, found: list[Finding]) -> list[str]:
        offered = []
        for kind in self.settings.networking_types(NETWORKING_TYPES, own_bridge=True):
            device = os.path.join(DEVICES, NETWORKS[kind])
            if os.path.exists(device):
                found.append(Finding(f"network {kind}", OK, device, "VMware's network is there"))
                offered.append(kind)
            else:
                hint = "vmware-networks --start"
                found.append(Finding(f"network {kind}", OFF, device, "VMware's network is not there.", hint))
        return offered
