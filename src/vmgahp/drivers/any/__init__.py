"""VM type any: a job gets the first hypervisor of this machine that works and can run it.

`driver` chooses, `compatibility` says what of a job each type can run, `images` reads the job's disks and converts
them, `choice` is kept for a restart.
"""

from vmgahp.drivers.any.driver import AnyDriver

__all__ = ["AnyDriver"]
