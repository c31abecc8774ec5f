"""VMware's vSphere, an ESXi host or a vCenter, through pyvmomi. `driver` starts VMs, `machine` is one of them,
`connection` is the way to the server and `access` what it takes to be let in, `store` moves files, `disks` and
`describe` say what the server is told of a job, `tags` whose a VM is, `faults` whose fault an error is."""

from vmgahp.drivers.vsphere.driver import VsphereDriver

__all__ = ["VsphereDriver"]
