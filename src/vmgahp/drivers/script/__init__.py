"""Hypervisors that a program of the administrator's drives: `driver` starts VMs, `machine` is one of them,
`protocol` is what the program is told and what it may answer, `program` runs it, `wish` reads the job,
`checkpoints` knows what a checkpoint consists of, `survey` finds out what works."""

from vmgahp.drivers.script.driver import ScriptDriver

__all__ = ["ScriptDriver"]
