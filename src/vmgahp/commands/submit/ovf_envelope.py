"""The parts of an OVF envelope: its items, its disks and files, its configurations.

DMTF's DSP0243 defines the elements, CIM's resource types (DSP1041) the numbers of items. Names are looked up without
their namespaces, because two versions of the standard, oVirt's variant and items of three kinds use the same ones.
"""

from typing import NamedTuple

from lxml import etree

from vmgahp.commands.submit.package import Reference
from vmgahp.commands.submit.summary import SubmitError, Summary
from vmgahp.commands.submit.xml_input import Account, child, children, get, local, text

_KINDS = "Item", "StorageItem", "EthernetPortItem"
_UNITS = {"byte": 1, "bytes": 1} | {
    unit: 1 << power
    for letter, word, power in (("k", "kilo", 10), ("m", "mega", 20), ("g", "giga", 30), ("t", "tera", 40))
    for unit in (f"{letter}b", f"{letter}ib", f"{word}byte", f"{word}bytes")
}
_LARGEST = 1 << 60

_FORMATS = (("vmdk", "vmdk"), ("qcow2", "qcow2"), ("vdi", "vdi"), ("vhdx", "vhdx"), ("vhd", "vpc"), ("vpc", "vpc"))

_PLAIN = "ResourceType", "InstanceID", "InstanceId", "Caption", "Description", "ElementName", "Type", "Device"
"""The elements that every item has."""


class Item:
    """One item, with its elements by local names."""

    def __init__(self, element: etree._Element, account: Account) -> None:
        self.element = element
        self._account = account
        self._values: dict[str, str] = {}
        for part in element:
            self._values.setdefault(local(part.tag).lower(), text(part))
        self.place = account.place(element)
        self.type = self.number("ResourceType")
        self.instance = self.first("InstanceID")
        self.device = self.first("Type").lower()
        self.subtype = self.first("ResourceSubType").lower()
        account.take(element)
        self.use(*_PLAIN)

    @property
    def summary(self) -> str:
        """The item's description of itself."""
        words = [self.first(name) for name in ("ElementName", "Caption", "ResourceSubType", "Description")]
        kind = next(filter(None, words), "an item")
        return f"{kind} (resource type {self.first('ResourceType')})"

    def first(self, name: str) -> str:
        """Return the first value of that name, empty for none."""
        return self._values.get(name.lower(), "")

    def number(self, name: str) -> int:
        """Return an element as a plausible whole number, 0 for none."""
        return digits(self.first(name).partition(".")[0])

    def use(self, *names: str) -> None:
        """Mark elements as handled."""
        for part in children(self.element, *names):
            self._account.take_all(part)

    def done(self) -> None:
        """Mark the whole item as handled."""
        self._account.take_all(self.element)


class PackageDrive(NamedTuple):
    """One disk of the package, or the medium of a drive."""

    file: Reference | None
    """The file; None for an empty disk."""
    format: str
    """The format according to the package; empty for none."""
    capacity: int
    """The capacity in bytes, 0 if unknown."""
    element: etree._Element


def drives(root: etree._Element, account: Account) -> dict[str, PackageDrive]:
    """Read the package's disks and files by the names that items use: diskId, file id, path. Raises `SubmitError`."""
    files: dict[str, Reference] = {}
    found: dict[str, PackageDrive] = {}
    properties = [element for element in root.iter() if local(element.tag) == "Property"]
    values = {f"${{{get(element, 'key')}}}": get(element, "value") for element in reversed(properties)}
    references = child(root, "References")
    for element in () if references is None else children(account.take(references), "File"):
        account.take(element, "id", "href", "size", "compression", "chunkSize", "description")
        compression, size = get(element, "compression").lower(), digits(get(element, "size"))
        file = Reference(get(element, "href"), compression, bool(get(element, "chunkSize")), size)
        files[get(element, "id")] = files[file.href] = file
        found["file:" + get(element, "id")] = PackageDrive(file, "", 0, element)
    for section in root.iter():
        if is_section(section, "DiskSection"):
            account.take(section, "type")
            for element in children(section, "Disk"):
                account.take_all(element)
                reference = get(element, "fileRef")
                unit = amount(get(element, "capacityAllocationUnits") or "byte")
                said = get(element, "capacity")
                capacity = digits(values.get(said, said)) * unit
                drive = PackageDrive(files.get(reference), _format(element), capacity, element)
                found["disk:" + get(element, "diskId")] = drive
                if reference:
                    found[reference] = drive
    return found


def _format(disk: etree._Element) -> str:
    volume = get(disk, "volume-format").upper()
    if volume in ("COW", "RAW"):
        return {"COW": "qcow2", "RAW": "raw"}[volume]
    url = get(disk, "format").lower()
    return next((form for word, form in _FORMATS if word in url), "")


def is_section(element: etree._Element, name: str) -> bool:
    """Return True for a section of that name, which is a type in older versions."""
    return local(element.tag) == name or (local(element.tag) == "Section" and name in get(element, "type"))


def items(hardware: etree._Element, account: Account, configuration: str) -> list[Item]:
    """List the items of a section that belong to one configuration (see `choose`), in the section's order."""
    found = []
    for element in children(hardware, *_KINDS):
        belongs = get(element, "configuration").split()
        # Items with limits for choices are not devices.
        if (belongs and configuration not in belongs) or get(element, "bound").lower() in ("min", "max"):
            account.take_all(element)
        else:
            account.take(element, "configuration", "bound")
            found.append(Item(element, account))
    return found


def choose(root: etree._Element, account: Account, wanted: str, summary: Summary) -> str:
    """Choose the configuration to run, of those that the package offers; empty for none.

    Raises `SubmitError` for a missing one.
    """
    offered = [
        element
        for section in root.iter()
        if local(section.tag) == "DeploymentOptionSection" or "DeploymentOption" in get(section, "type")
        for element in children(section, "Configuration")
    ]
    default = next((element for element in offered if get(element, "default") in ("true", "1")), None)
    names = [get(element, "id") for element in offered]
    if wanted and wanted not in names:
        raise SubmitError(
            f"The package has no configuration {wanted!a}.", f"choose one of: {', '.join(names) or 'none'}."
        )
    if not offered:
        return ""
    chosen = wanted or get(offered[0] if default is None else default, "id")
    for element in offered:
        account.take_all(element)
    summary.carry("", "the package's configuration", f"{chosen}, of {', '.join(names)} (--configuration)")
    return chosen


def amount(unit: str) -> int:
    """Parse a unit such as ``byte * 2^20`` or ``MegaBytes`` to bytes; 0 for an invalid one."""
    base, *factors = unit.lower().replace(" ", "").split("*")
    product = _UNITS.get(base, 0)
    for factor in factors:
        number, power, exponent = factor.partition("^")
        # An exponent of nine digits in an untrusted file would take hours to compute.
        if base not in ("byte", "bytes") or len(exponent) > 2 or (power and not digits(exponent)):
            return 0
        product *= digits(number) ** (digits(exponent) if power else 1)
        if not 0 < product <= _LARGEST:
            return 0
    return product


def digits(value: str) -> int:
    """Parse a plausible whole number, 0 for any other text."""
    return int(value) if value.isascii() and value.isdigit() and len(value) < 17 else 0
