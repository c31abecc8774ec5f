"""The records that stand in for typing's, against those; `signal` is the same module below."""

import pickle
import typing

import pytest

from vmgahp.host.light import NamedTuple


class Ours(NamedTuple):
    """A row."""

    name: str
    """What it is called."""
    size: int = 0
    words: tuple[str, ...] = ("a",)

    @property
    def long(self) -> bool:
        return self.size > 10

    def grown(self) -> "Ours":
        return self._replace(size=self.size + 1)

    @classmethod
    def empty(cls) -> "Ours":
        return cls("")


class Theirs(typing.NamedTuple):
    """A row."""

    name: str
    size: int = 0
    words: tuple[str, ...] = ("a",)


class Child(Ours):
    """A record is a class like any other to those below it."""


@pytest.mark.parametrize("arguments", [("x",), ("x", 11), ("x", 3, ("b", "c"))])
def test_they_are_the_same(arguments: tuple[typing.Any, ...]) -> None:
    ours, theirs = Ours(*arguments), Theirs(*arguments)
    assert ours == theirs
    assert repr(ours) == repr(theirs).replace("Theirs", "Ours")
    assert (Ours._fields, Ours._field_defaults) == (Theirs._fields, Theirs._field_defaults)
    assert Ours.__annotations__ == Theirs.__annotations__
    assert ours._asdict() == theirs._asdict()
    assert (Ours.__name__, Ours.__module__, Ours.__doc__) == ("Ours", __name__, "A row.")
    assert pickle.loads(pickle.dumps(ours)) == ours  # noqa: S301
    match ours:
        case Ours(name, size=size):
            assert (name, size) == (ours.name, ours.size)


def test_what_a_class_has_besides_fields() -> None:
    assert Ours("x", 11).long
    assert Ours("x").grown() == ("x", 1, ("a",))
    assert Ours.empty().name == ""
    assert (Child("y").name, type(Child("y")._replace(name="z"))) == ("y", Child)


@pytest.mark.parametrize("arguments", [(), ("x", 1, (), 4)])
def test_what_cannot_be_made(arguments: tuple[typing.Any, ...]) -> None:
    with pytest.raises(TypeError):
        Ours(*arguments)
    with pytest.raises(AttributeError):
        Ours("x").name = "y"  # type: ignore[misc]
