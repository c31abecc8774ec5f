"""Untrusted XML files: read within limits, with an account of the parts that were used."""

from collections import Counter
from collections.abc import Iterator, Mapping

from lxml import etree

from vmgahp.commands.submit.report import SubmitError, Summary

LARGEST = 4 << 20
"""The maximum number of bytes of a file; the longest descriptors have a license agreement of some hundred thousand."""

MOST, MOST_ATTRIBUTES = 50_000, 500
"""The maximum elements, and attributes of one element: lxml needs quadratic time to list these. It limits the depth."""


def read(data: bytes, name: str) -> etree._Element:
    """Parse the file and return its root, without comments. Raises `SubmitError`."""
    if len(data) > LARGEST:
        raise SubmitError(f"{name} has more than {LARGEST >> 20} MiB.", "see whether it is the right file.")
    if b"<!DOCTYPE" in data or b"<!ENTITY" in data:
        raise SubmitError(f"{name} has a document type or entities, and is not read.", "remove them.")
    parser = etree.XMLParser(
        resolve_entities=False, no_network=True, load_dtd=False, huge_tree=False, remove_comments=True, remove_pis=True
    )
    try:
        root = etree.fromstring(data.lstrip(), parser)
    except (etree.XMLSyntaxError, ValueError) as error:
        problem = getattr(error, "msg", None) or error  # without the position, whose file has no name
        raise SubmitError(f"{name} is not XML: {problem}.", "see what xmllint says of it.") from error
    if root.getroottree().docinfo.internalDTD is not None:  # in UTF-16, for example
        raise SubmitError(f"{name} has a document type, and is not read.", "remove it.")
    for number, element in enumerate(root.iter()):
        if number >= MOST or not isinstance(element.tag, str) or len(element.attrib) > MOST_ATTRIBUTES:
            raise SubmitError(f"{name} is too large, or has entities.", "see whether it is the right file.")
    return root


def local(name: object) -> str:
    """Return the name of an element or attribute without its namespace, about which exporters disagree."""
    return str(name).rpartition("}")[2]


def get(element: etree._Element | None, name: str) -> str:
    """Return an attribute by its local name in any case, empty if it, or the element, is missing."""
    for key, value in element.items() if element is not None else ():
        if local(key).lower() == name.lower():
            return str(value).strip()
    return ""


def children(element: etree._Element | None, *names: str) -> Iterator[etree._Element]:
    """Yield the children with these local names, in any case; all if no name is given."""
    wanted = [name.lower() for name in names]
    inner = () if element is None else element
    return (child for child in inner if not wanted or local(child.tag).lower() in wanted)


def child(element: etree._Element | None, name: str) -> etree._Element | None:
    """Return the first child with a local name."""
    return next(children(element, name), None)


def text(element: etree._Element | None) -> str:
    """Return the text of an element, empty for none."""
    return "" if element is None else (element.text or "").strip()


def remove(element: etree._Element) -> None:
    """Remove an element, which is not the root, from its tree."""
    parent = element.getparent()
    assert parent is not None
    parent.remove(element)


class Account:
    """A record of the elements and attributes of a tree that have been handled, so that the others can be reported."""

    def __init__(self, root: etree._Element) -> None:
        self.root = root
        self._keep = list(root.iter())  # holding the objects keeps lxml from making others for the same elements
        self._taken: dict[etree._Element, set[str] | None] = {}
        self.whole: set[etree._Element] = set()
        """The elements that were given to `take_all`."""
        self._numbers: dict[etree._Element, str] = {}
        """Element with siblings of the same name -> its number among them."""
        for element in self._keep:
            of_tag = Counter(twin.tag for twin in element)
            counts: Counter[object] = Counter()
            for twin in element:
                counts[twin.tag] += 1
                if of_tag[twin.tag] > 1:
                    self._numbers[twin] = f"[{counts[twin.tag]}]"

    def take(self, element: etree._Element | None, *attributes: str) -> None:
        """Mark an element as handled, with these of its attributes (more with each call)."""
        if element is not None and (known := self._taken.setdefault(element, set())) is not None:
            known.update(name.lower() for name in attributes)

    def get(self, element: etree._Element | None, name: str) -> str:
        """Return an attribute, as `get` does, and mark it as handled."""
        self.take(element, name)
        return get(element, name)

    def text(self, element: etree._Element | None) -> str:
        """Return the text of an element, and mark the element as handled."""
        self.take(element)
        return text(element)

    def child(self, element: etree._Element | None, name: str) -> etree._Element | None:
        """Return the first child with a local name, and mark it as handled."""
        found = child(element, name)
        self.take(found)
        return found

    def take_all(self, element: etree._Element) -> None:
        """Mark an element as handled, with everything in it."""
        self.whole.add(element)
        for inner in element.iter():
            self._taken[inner] = None

    def place(self, element: etree._Element | None) -> str:
        """Return the line and the path of an element; empty for none."""
        if element is None:
            return ""
        walk = reversed([element, *element.iterancestors()])
        words = (local(one.tag) + self._numbers.get(one, "") for one in walk)
        return f"line {element.sourceline}, /{'/'.join(words)}"

    def tell(self, summary: Summary, missed: Mapping[str, str] | None = None) -> None:
        """Report everything that has not been handled: the topmost element of it, each attribute by itself.

        `missed` has the reasons why a guest would miss an element, by its path below the root.
        """

        def walk(element: etree._Element, path: str) -> None:
            if not any(inner in self._taken for inner in element.iter()):
                reason = (missed or {}).get(path, "")
                (summary.lose if reason else summary.skip)(self.place(element), in_words(element), reason)
                return
            known = self._taken.get(element, set())
            for key, value in element.items():
                name = local(key)
                if known is not None and name.lower() not in known:
                    summary.skip(f"{self.place(element)}/@{name}", f"{local(element.tag)} {name}={value!s}")
            for inner in element:
                walk(inner, f"{path}/{local(inner.tag)}".lstrip("/"))

        walk(self.root, "")


def in_words(element: etree._Element) -> str:
    """Describe an element in a few words."""
    words = [f"{local(key)}={value!s}" for key, value in element.items()]
    if text(element):
        words.append(text(element))
    if len(element):
        words.append("with " + ", ".join(dict.fromkeys(local(inner.tag) for inner in element)))
    return f"{local(element.tag)} {'; '.join(words)}"[:200].strip()
