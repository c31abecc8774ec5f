"""Rows of `vmgahp.domain.model`: elements, what may be in each, whose an attribute is."""

from collections.abc import Mapping
from enum import Flag, auto

from vmgahp.host.light import NamedTuple

ON = r"on|off"


class Side(Flag):
    """Whose an attribute or an element is."""

    GUEST = auto()
    """What the guest sees, and how the hypervisor serves it."""
    HOST = auto()
    """What of the host it reaches, or what the host sees of it: it must be there as it was asked for."""
    IDENTITY = auto()
    """What tells it from another of its kind."""


class Attribute(NamedTuple):
    """An attribute of an element."""

    job: str = ""
    """The form in which a job's own XML may have it; empty: in none."""
    side: Side = Side.GUEST
    filled: str = ""
    """The form in which libvirt fills it in where a description leaves it open; empty: it does not."""
    default: str = ""
    """What it is where nothing is said, of what tells devices apart."""


class Element(NamedTuple):
    """A row: an element, and what may be in it."""

    attributes: Mapping[str, Attribute]
    children: "Mapping[str, Element]"
    text: str | None = None
    """The form of its text in a job's own XML, and in what libvirt fills in; None: it has none."""
    most: int = 1
    """How often it may come within its parent in a job's own XML."""
    side: Side = Side.GUEST
    job: bool = True
    """Whether a job's own XML may have it."""
    added: Mapping[str, str] | None = None
    """By which attributes a device is known that libvirt adds to any VM by itself; None: it adds none."""
    saved: tuple[str, ...] | None = None
    """The attributes, filled in, by which such a device is taken over of a saved VM; None: it is not."""
    new: tuple[str, ...] | None = None
    """The forms of what tells those devices from others of the kind that this package gives to VMs now, and an
    earlier release gave to none; None: there are none."""

    def filled(self) -> dict[str, str]:
        """What libvirt fills in of a device that is known already, by form."""
        attributes = self.attributes.items()
        return {name: each.filled for name, each in attributes if each.filled and Side.IDENTITY not in each.side}


def row(
    attributes: Mapping[str, Attribute | str] | None = None,
    children: Mapping[str, Element] | None = None,
    **more: object,
) -> Element:
    """A row; an attribute that is no more than a form is the guest's, and a job may say it so."""
    made = {name: Attribute(each) if isinstance(each, str) else each for name, each in (attributes or {}).items()}
    return Element(made, children or {}, **more)  # type: ignore[arg-type]


def text(form: str, most: int = 1, **attributes: str) -> Element:
    return row(attributes, text=form, most=most)


def filled(form: str, job: str | None = None) -> Attribute:
    """What the guest sees and libvirt fills in; a job may say it in the same form, or in another."""
    return Attribute(form if job is None else job, filled=form)


def both(form: str, job: str | None = None) -> Attribute:
    """The same, of what the host has to do with too: it must be as it was asked for."""
    return Attribute(form if job is None else job, Side.GUEST | Side.HOST, form)


def host(job: str = "") -> Attribute:
    return Attribute(job, Side.HOST)


def known(job: str = "", filled: str = "", default: str = "") -> Attribute:
    return Attribute(job, Side.IDENTITY, filled, default)


def switch(*names: str, **attributes: str) -> dict[str, Element]:
    """Elements that are there or not, or say so in an attribute."""
    return {name: row({"state": ON, **attributes}) for name in names}


def end(attributes: Mapping[str, Attribute | str] | None = None, text: str | None = None, job: bool = True) -> Element:
    """The end of a device that is on the host."""
    return row(attributes, text=text, side=Side.HOST, job=job)
