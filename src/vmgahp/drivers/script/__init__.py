"""Hypervisors that are driven by a program of the administrator's."""

from vmgahp.drivers.script.driver import ScriptDriver

__all__ = ["ScriptDriver"]
