"""VM type any: a job that does not mind which hypervisor it gets. `driver` takes the first that will do, `offers` says
which this machine has and has proved, `suits` what of a job each can do, `disks` reads the job's disks and says of
what format they are, `conversion` makes them what a hypervisor can use, `vmware` describes them to VMware, `memo`
remembers the choice for a restart."""

from vmgahp.drivers.any.driver import AnyDriver

__all__ = ["AnyDriver"]
