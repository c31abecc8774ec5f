"""The rows of `vmgahp.domain.model`: elements, their content, and the side of each attribute."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Flag, auto
from typing import NamedTuple

ON = r"on|off"


class Side(Flag):
    """The side to which an attribute or an element belongs."""

    GUEST = auto()
    """The guest's side: what the guest sees, and how the hypervisor serves it."""
    HOST = auto()
    """The host's side: the host resources that it uses, or its view from the host; it must be exactly as requested."""
    IDENTITY = auto()
    """An attribute that distinguishes the element from others of its kind."""


class Attribute(NamedTuple):
    """An attribute of an element."""

    job: str = ""
    """The form in which a job's own XML may have it; empty if it may not."""
    side: Side = Side.GUEST
    filled: str = ""
    """The form in which libvirt fills it in if a description leaves it open; empty if libvirt does not."""
    default: str = ""
    """The value of a distinguishing attribute that is absent."""


class Element(NamedTuple):
    """A row: an element, and its permitted content."""

    attributes: Mapping[str, Attribute]
    children: Mapping[str, Element]
    text: str | None = None
    """The form of its text in a job's own XML, and in what libvirt fills in; None if it has no text."""
    most: int = 1
    """The maximum number within its parent in a job's own XML."""
    side: Side = Side.GUEST
    job: bool = True
    """True if a job's own XML may have it."""
    added: Mapping[str, str] | None = None
    """The attributes that identify a device which libvirt adds to any VM by itself; None if it adds none."""
    saved: tuple[str, ...] | None = None
    """The attributes, filled in, by which such a device is taken over from a saved VM; None if it is not."""

    def filled(self) -> dict[str, str]:
        """Return the forms of the attributes that libvirt fills in, without those that identify the device."""
        attributes = self.attributes.items()
        return {name: each.filled for name, each in attributes if each.filled and Side.IDENTITY not in each.side}


def row(
    attributes: Mapping[str, Attribute | str] | None = None,
    children: Mapping[str, Element] | None = None,
    **more: object,
) -> Element:
    """Make a row; an attribute given as a form is on the guest's side, and a job's XML may have it in that form."""
    made = {name: Attribute(each) if isinstance(each, str) else each for name, each in (attributes or {}).items()}
    return Element(made, children or {}, **more)  # type: ignore[arg-type]


def text(form: str, most: int = 1, **attributes: str) -> Element:
    return row(attributes, text=form, most=most)


def filled(form: str, job: str | None = None) -> Attribute:
    """Make an attribute that the guest sees and libvirt fills in; a job may use the same form, or another."""
    return Attribute(form if job is None else job, filled=form)


def both(form: str, job: str | None = None) -> Attribute:
    """Make such an attribute that is on the host's side as well: it must be as requested."""
    return Attribute(form if job is None else job, Side.GUEST | Side.HOST, form)


def host(job: str = "") -> Attribute:
    return Attribute(job, Side.HOST)


def known(job: str = "", filled: str = "", default: str = "") -> Attribute:
    return Attribute(job, Side.IDENTITY, filled, default)


def switch(*names: str, **attributes: str) -> dict[str, Element]:
    """Make elements that are a switch by their presence, or by an attribute."""
    return {name: row({"state": ON, **attributes}) for name in names}


def end(attributes: Mapping[str, Attribute | str] | None = None, text: str | None = None, job: bool = True) -> Element:
    """Make the row of the host's end of a device."""
    return row(attributes, text=text, side=Side.HOST, job=job)
