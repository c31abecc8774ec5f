"""The VM type any: a job gets the first hypervisor of this machine that works and can run it.

`driver` chooses, `compatibility` tells what each type can run of a job, `images` reads the job's disks and converts
them, `choice` is kept for a restart.
"""

from vmgahp.drivers.any.driver import AnyDriver

__all__ = ["AnyDriver"]
