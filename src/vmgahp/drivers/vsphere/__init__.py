"""The VM type vsphere: jobs for VMware on an ESXi host or a vCenter, through the vSphere API.

`connection` and `credentials` reach the server, `inventory` finds its objects, `datastore` moves files; `hardware`,
`disks` and `config_spec` describe a job's VM, `transport` carries it there and back, `vm` has the operations on one,
`annotations` mark its owner, and `faults` classifies errors.
"""

from vmgahp.drivers.vsphere.driver import VsphereDriver

__all__ = ["VsphereDriver"]
