"""VM type any: a job gets the first hypervisor of this machine that works and can run it.

`driver` chooses, `surveys` says which types work here, `compatibility` what of a job each can run, `disks` reads the
job's disks, `conversion` converts them, `vmx_writer` describes them to VMware, `choice` is kept for a restart.
"""

from vmgahp.drivers.any.driver import AnyDriver

__all__ = ["AnyDriver"]
