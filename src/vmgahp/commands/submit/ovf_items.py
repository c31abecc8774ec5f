"""The items of an OVF's virtual hardware, whichever of the standard's three kinds they are of."""

from vmgahp.commands.submit.summary import Report, SubmitError
from vmgahp.commands.submit.xml_input import Account, children, get, local, text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from lxml import etree

_KINDS = "Item", "StorageItem", "EthernetPortItem"
_UNITS = {"byte": 1, "bytes": 1, "kb": 1 << 10, "mb": 1 << 20, "gb": 1 << 30}
_UNITS |= {"kilobytes": 1 << 10, "megabytes": 1 << 20, "gigabytes": 1 << 30, "kilobyte": 1 << 10}
_UNITS |= {"megabyte": 1 << 20, "gigabyte": 1 << 30}

_PLAIN = "ResourceType", "InstanceID", "InstanceId", "Caption", "Description", "ElementName", "Type", "Device"
"""What every item has, and nothing is lost with."""


class Item:
    """One item, with what it says by local names."""

    def __init__(self, element: "etree._Element", account: Account) -> None:
        self._element = element
        self._account = account
        self._values: dict[str, str] = {}
        for child in element:
            self._values.setdefault(local(child.tag).lower(), text(child))
        self.place = account.place(element)
        self.type = self.number("ResourceType")
        self.instance = self.first("InstanceID")
        self.device = self.first("Type").lower()
        account.take(element)
        self.use(*_PLAIN)

    @property
    def summary(self) -> str:
        """What it calls itself."""
        words = [self.first(name) for name in ("ElementName", "Caption", "ResourceSubType", "Description")]
        kind = next(filter(None, words), "an item")
        return f"{kind} (resource type {self.first('ResourceType')})"

    def first(self, name: str) -> str:
        """The first value of that name, empty for none."""
        return self._values.get(name.lower(), "")

    def number(self, name: str) -> int:
        """The same as a whole number that makes sense, 0 for none."""
        value = self.first(name).partition(".")[0]
        return int(value) if value.isascii() and value.isdigit() and len(value) < 16 else 0

    def use(self, *names: str) -> None:
        """Say that these have been dealt with."""
        wanted = [name.lower() for name in names]
        for child in self._element:
            if local(child.tag).lower() in wanted:
                self._account.take(child)

    def done(self) -> None:
        """Say that all of it has been dealt with."""
        self._account.take_all(self._element)


def items(hardware: "etree._Element", account: Account, configuration: str) -> list[Item]:
    """The items of a section that belong to one configuration (see `choose`), in the section's order."""
    found = []
    for element in hardware:
        if local(element.tag) in _KINDS:
            belongs = get(element, "configuration").split()
            if not belongs or configuration in belongs:
                account.take(element, "configuration")
                found.append(Item(element, account))
            else:
                account.take_all(element)
    return found


def choose(root: "etree._Element", account: Account, wanted: str, report: Report) -> str:
    """The configuration that is to be run, of those that the package offers; empty for none.

    Raises `SubmitError` for one that is not there.
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
    report.carry(f"the package's configuration {chosen}, of {', '.join(names)} (--configuration)")
    return chosen


def amount(unit: str) -> int:
    """Bytes of a unit such as ``byte * 2^20`` or ``MegaBytes``; 0 for what is none."""
    words = unit.lower().replace(" ", "")
    base, star, power = words.partition("*")
    if not star:
        return _UNITS.get(base, 0)
    number, _, exponent = power.partition("^")
    if (
        base not in ("byte", "bytes")
        or number not in ("2", "10")
        or not exponent.isdigit()
        or int(exponent) > 60
    ):
        return 0
    return int(int(number) ** int(exponent))
