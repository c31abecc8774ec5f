"""What a server holds for its VM's life of signal and typing, without what those modules bring along.

signal makes enumerations of its numbers, so that enum is loaded before the first reply; typing brings re. Together
they are more than a MiB of the memory of each server.
"""

import sys

__all__ = ["NamedTuple", "signal"]

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
else:
    import _signal as signal

if TYPE_CHECKING or sys.version_info >= (3, 14):  # whose classes keep their annotations otherwise
    from typing import NamedTuple as NamedTuple
else:

    class _Kind(type):
        def __new__(cls, name, bases, body):
            if not bases:
                return super().__new__(cls, name, bases, body)
            from collections import namedtuple  # here, for a server needs signals before its first reply

            fields = body.get("__annotations__", {})
            given = [body.pop(field) for field in fields if field in body]
            made = namedtuple(name, fields, defaults=given, module=body["__module__"])
            for key, value in body.items():
                setattr(made, key, value)
            return made

    class NamedTuple(metaclass=_Kind):
        """The base of a class whose annotations are its fields, the last ones with defaults."""
