"""The driver for VMware's desktop products (Workstation, Player, Fusion), by vmrun."""

from vmgahp.drivers.vmrun.driver import VmrunDriver

__all__ = ["VmrunDriver"]
