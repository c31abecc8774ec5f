"""The survey of a machine for vmrun: whether jobs can run, and what they get."""

import os
import re
import tempfile
from time import monotonic
from typing import NamedTuple

from vmgahp import errors, findings
from vmgahp.config import Settings
from vmgahp.drivers.base import Logger, Survey
from vmgahp.drivers.vmrun import faults, tool
from vmgahp.drivers.vmrun.tool import PRODUCTS, Tool
from vmgahp.findings import BAD, OFF, OK, UNKNOWN, Finding
from vmgahp.host.job_user import Identity
from vmgahp.job.vmware import NETWORKING_TYPES
from vmgahp.vm_types import VMRUN

INSTALLED = "/etc/vmware"
"""The directory with the settings of a VMware product on Linux."""

DEVICES = "/dev"
"""The directory with the devices of the kernel modules: vmmon, which every VM needs, and a vmnet for each network."""

NETWORKS = {"bridge": "vmnet0", "nat": "vmnet8"}
"""The networks that VMware makes by default."""

_VERSION = re.compile(r"vmrun version ([0-9.]+)")


class VmrunSurveyor(NamedTuple):
    """The surveyor of one machine."""

    vm_type: str
    settings: Settings
    identity: Identity
    log: Logger

    def survey(self, end: float) -> Survey:
        """Make all checks; see `vmgahp.drivers.base.Driver.survey`."""
        checked = "the vmrun of VMWARE_VMRUN or the PATH"
        try:
            path = tool.find(self.settings)
            checked = f"{path} list, as uid {self.identity.uid}"
            with tempfile.TemporaryDirectory(prefix="vmgahp-vmrun-", ignore_cleanup_errors=True) as home:
                if self.identity.switching:
                    os.chown(home, self.identity.uid, self.identity.gid)
                product, version = self._ask(Tool(path, "", self.identity, home, self.log), end)
        except errors.Fault as fault:
            return Survey([findings.judge("vmrun", checked, fault, "")])
        name = PRODUCTS[product]
        found = [Finding("vmrun", OK, checked, f"vmrun {version or '?'} answers for VMware {name}")]
        able = product != "player"  # which has neither snapshots nor a pause
        if able:
            found.append(Finding("snapshots", OK, f"VMware {name}", "this product makes snapshots"))
        else:
            seen = f"VMware {name} makes no snapshots: jobs with snapshot disks do not run here."
            hint = "use VMware Workstation, or send only jobs with vmware_snapshot_disk = False here."
            found.append(Finding("snapshots", OFF, f"VMware {name}", seen, hint))
        found.append(_kernel_module())
        networking = []
        for kind in self.settings.networking_types(NETWORKING_TYPES, own_bridge=True):
            device = os.path.join(DEVICES, NETWORKS[kind])
            if os.path.exists(device):
                networking.append(kind)
                found.append(Finding(f"network {kind}", OK, device, "VMware's network is there"))
            else:
                seen, hint = "VMware's network is not there.", "vmware-networks --start"
                found.append(Finding(f"network {kind}", OFF, device, seen, hint))
        return Survey(
            found,
            attributes={
                "version": version,
                "product": product,
                "snapshot": able,
                "suspend": True,
                "soft_suspend": able,
                "checkpoint": True,
                "networking": ",".join(networking),
            },
            networking=networking,
            hypervisors=["vmware"],
            vm_types=list(dict.fromkeys((self.vm_type, *VMRUN))),
        )

    def _ask(self, vmrun: Tool, end: float) -> tuple[str, str]:
        """Return the product, which answers, and vmrun's version. Raises `errors.Fault`."""

        def left() -> float:
            return max(0.1, end - monotonic())

        with faults.explained("asking which VMs run"):
            vmrun.find_product(self.settings, left())
            vmrun.running(left())
            # Without a command it prints its version and its usage.
            told = _VERSION.search(tool.text_of(vmrun.call([], "without a command", left()).out))
        return vmrun.product, told[1] if told else ""


def _kernel_module() -> Finding:
    device = os.path.join(DEVICES, "vmmon")
    if os.path.exists(device):
        return Finding("vmmon", OK, device, "VMware's kernel module is loaded")
    if os.path.isdir(INSTALLED):
        hint = "build and load it: vmware-modconfig --console --install-all."
        return Finding("vmmon", BAD, device, "VMware's kernel module is not loaded.", hint)
    seen = f"There is neither {device} nor {INSTALLED}: this VMware is not one of Linux."
    return Finding("vmmon", UNKNOWN, device, seen)
