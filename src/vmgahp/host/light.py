"""Light substitutes for parts of signal, typing and contextlib, without the modules that those import.

signal makes enumerations of its numbers, typing imports re, contextlib functools, and that collections: together two
MiB of the memory of each server, and some milliseconds before its first reply. `vmgahp.host.threads` does the same
for threading.
"""

__all__ = ["NamedTuple", "contextmanager", "nullcontext", "signal", "suppress"]

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from contextlib import contextmanager, nullcontext, suppress
else:
    import _signal as signal

    def contextmanager(function):
        """Turn a function that yields once into one that returns a context."""

        def made(*arguments, **named):
            return _Context(function(*arguments, **named))

        made.__name__, made.__qualname__ = function.__name__, function.__qualname__
        made.__module__, made.__doc__ = function.__module__, function.__doc__
        made.__wrapped__ = function
        return made

    class _Context:
        __slots__ = ("_function",)

        def __init__(self, function):
            self._function = function

        def __enter__(self):
            return next(self._function)

        def __exit__(self, kind, error, trace):
            if kind is None:
                for _ in self._function:
                    raise RuntimeError("it yields a second time")
                return False
            try:
                self._function.throw(error)
            except StopIteration as end:
                return end is not error  # the function has handled the error
            except BaseException as raised:
                if raised is error or (isinstance(error, StopIteration) and raised.__cause__ is error):
                    error.__traceback__ = trace
                    return False
                raise
            raise RuntimeError("it yields a second time")

    class suppress:
        """A context that suppresses the given exceptions."""

        __slots__ = ("_kinds",)

        def __init__(self, *kinds):
            self._kinds = kinds

        def __enter__(self):
            return None

        def __exit__(self, kind, error, trace):
            return kind is not None and issubclass(kind, self._kinds)

    class nullcontext:
        """A context that returns its value and does nothing."""

        __slots__ = ("_value",)

        def __init__(self, value=None):
            self._value = value

        def __enter__(self):
            return self._value

        def __exit__(self, kind, error, trace):
            return False


if TYPE_CHECKING:
    from typing import NamedTuple as NamedTuple
else:
    from _collections import _tuplegetter

    class _Anything:
        """A stand-in for every name in an annotation, since only the fields' own names are needed."""

        def __getattr__(self, _name):
            return self

        def __or__(self, _other):
            return self

        __ror__ = __getitem__ = __call__ = __or__

    class _Names(dict):
        def __missing__(self, _name):
            return _Anything()

    def _fields(body):
        """Return the names that a class's body annotates. Python 3.14 keeps annotations as a function, and their names
        need not exist when the class is made, so it is called with other globals, as annotationlib does (PEP 749)."""
        annotate = body.get("__annotate__") or body.get("__annotate_func__")
        if annotate is None:
            return tuple(body.get("__annotations__", ()))
        return tuple(type(annotate)(annotate.__code__, _Names(), closure=annotate.__closure__)(2))

    class _Kind(type):
        def __new__(cls, name, bases, body):
            if bases and bases[0].__name__ == "NamedTuple":
                fields = _fields(body)
                given = {field: body.pop(field) for field in fields if field in body}
                body |= {field: _tuplegetter(place, "") for place, field in enumerate(fields)}
                body |= {"__slots__": (), "__match_args__": fields, "_fields": fields, "_field_defaults": given}
            return super().__new__(cls, name, bases, body)

    class NamedTuple(tuple, metaclass=_Kind):
        """The base of a tuple class whose annotations are its fields, the last ones with defaults."""

        __slots__ = ()

        def __new__(cls, *values, **named):
            fields = cls._fields
            if len(values) != len(fields) or named:
                left = fields[len(values) :]
                if len(values) > len(fields) or not named.keys() <= set(left):
                    raise TypeError(f"{cls.__name__} has other fields: {', '.join(fields)}")
                rest = cls._field_defaults | named
                if missing := [field for field in left if field not in rest]:
                    raise TypeError(f"{cls.__name__} has no {', '.join(missing)}")
                values = (*values, *(rest[field] for field in left))
            return tuple.__new__(cls, values)

        @classmethod
        def _make(cls, values):
            return cls(*values)

        def _replace(self, **changes):
            return type(self)(**(self._asdict() | changes))

        def _asdict(self):
            return dict(zip(self._fields, self, strict=True))

        def __repr__(self):
            return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self._asdict().items())})"

        def __getnewargs__(self):
            return tuple(self)
