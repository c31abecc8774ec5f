"""VMware's desktop products (Workstation, Player, Fusion) by vmrun: `driver` starts VMs, `machine` is one of
them, `tool` calls vmrun, `faults` says whose fault its errors are, `processes` finds VMware's processes,
`working_copy` makes the ``.vmx`` that is run, `vmdk` looks into disks, `checkpoints` knows what a checkpoint
consists of, `survey` finds out what works."""

from vmgahp.drivers.vmrun.driver import VmrunDriver

__all__ = ["VmrunDriver"]
