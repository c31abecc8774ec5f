"""The driver for hypervisors that a program of the administrator's controls."""

from vmgahp.drivers.script.driver import ScriptDriver

__all__ = ["ScriptDriver"]
