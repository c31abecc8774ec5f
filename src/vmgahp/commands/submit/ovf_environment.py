"""The settings of the software in an OVF package, on a CD-ROM as the standard defines it."""

import argparse
import os
from typing import Any

from lxml import etree

from vmgahp.commands.files import write_anew
from vmgahp.commands.submit.images import free
from vmgahp.commands.submit.machine import Guest
from vmgahp.commands.submit.ovf_envelope import is_section
from vmgahp.commands.submit.summary import SubmitError, Summary
from vmgahp.commands.submit.xml_input import Account, child, children, get
from vmgahp.job.options import DATA_FILES

FILE = "ovf-env.xml"
"""The name of the file that programs in the guest read in the root of a CD-ROM (DSP0243, 9.5 and 10.2)."""
_NAMESPACE = "http://schemas.dmtf.org/ovf/environment/1"


def environment(
    system: etree._Element,
    hardware: etree._Element,
    account: Account,
    made: Guest,
    summary: Summary,
    options: argparse.Namespace,
) -> None:
    """Write the settings into a file that goes with the job, if the package requires them on a CD-ROM.

    Raises `SubmitError`.
    """
    ways = get(hardware, "transport").split()
    account.take(hardware, "transport")
    sections = [each for each in system if is_section(each, "ProductSection") and child(each, "Property") is not None]
    values: dict[str, str] = {}
    for section in sections if ways else ():
        account.take_all(section)
        if "iso" in ways:
            values |= _values(section, options.configuration)
        else:
            what, why = f"settings that the guest gets by {' '.join(ways)}", "jobs have them on a CD-ROM only (iso)"
            summary.lose(account.place(section), what, why)
    for said in options.property:
        key, equals, value = said.partition("=")
        if not equals or key not in values:
            raise SubmitError(
                f"--property {said!a} is no KEY=VALUE with a setting of the package.",
                f"its settings are: {', '.join(sorted(values)) or 'none'}.",
            )
        values[key] = value
    if not values:
        return
    target = os.path.join(options.dir, FILE)
    free(target, summary, force=options.force)
    try:
        write_anew(target, _document(get(system, "id"), values))
    except (OSError, ValueError) as error:  # a control character, which XML does not allow
        raise SubmitError(f"{target} cannot be written ({error}).") from error
    summary.made.append(target)
    made.files.append(target)
    made.options[DATA_FILES] = FILE
    made.places[DATA_FILES] = account.place(sections[0])
    if unset := [key for key, value in values.items() if not value]:
        summary.advise(f"Settings of the package without a value: {', '.join(unset)}; --property {unset[0]}=VALUE.")


def _values(section: etree._Element, configuration: str) -> dict[str, str]:
    """Return the settings of one section by their full names, with their values in a configuration."""
    found = {}
    for each in children(section, "Property"):
        key = ".".join(filter(None, (get(section, "class"), get(each, "key"), get(section, "instance"))))
        value = get(each, "value")
        for other in children(each, "Value"):
            if configuration and get(other, "configuration") == configuration:
                value = get(other, "value")
        found[key] = value
    return found


def _document(name: str, values: dict[str, str]) -> bytes:
    def own(word: str) -> str:
        return f"{{{_NAMESPACE}}}{word}"

    spaces: Any = {None: _NAMESPACE, "oe": _NAMESPACE}  # the usual prefixes, for guests that search it with grep
    root = etree.Element(own("Environment"), {own("id"): name}, spaces)
    etree.SubElement(etree.SubElement(root, own("PlatformSection")), own("Kind")).text = "HTCondor"
    settings = etree.SubElement(root, own("PropertySection"))
    for key, value in values.items():
        etree.SubElement(settings, own("Property"), {own("key"): key, own("value"): value})
    return etree.tostring(root, xml_declaration=True, encoding="UTF-8")
