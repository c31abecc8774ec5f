"""Link the first mention of a setting, a job attribute or an error word on a page to the reference."""

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx

from vmgahp import errors
from vmgahp.config.check import ELSEWHERE
from vmgahp.config.table import SETTINGS
from vmgahp.job.attributes import ATTRIBUTES
from vmgahp.protocol import requests

PLACES = (
    {row.name: ("job-attribute", row.name) for row in ATTRIBUTES}
    | {setting.name: ("confval", setting.name) for setting in (*SETTINGS, *ELSEWHERE)}
    | {name: ("error-word", errors.PREFIX + word) for word in requests.WORDS for name in (word, errors.PREFIX + word)}
)
"""A name on a page -> the kind of object in the reference, and its name there."""

OWN_PAGES = ("reference/settings", "reference/job-attributes", "reference/errors")


def _link(app: Sphinx, document: nodes.document) -> None:
    page = app.env.current_document.docname
    if page in OWN_PAGES or page.startswith("man/"):
        return
    seen: set[str] = set()
    for literal in list(document.findall(nodes.literal)):
        name = literal.astext().partition(" =")[0].lstrip("+")
        linked = isinstance(literal.parent, nodes.reference | nodes.title | addnodes.pending_xref)
        kind, target = PLACES.get(name, ("", ""))
        if not kind or target in seen or linked:
            continue
        seen.add(target)
        link = addnodes.pending_xref("", refdomain="std", reftype=kind, reftarget=target, refdoc=page, refexplicit=True)
        literal.replace_self(link)
        link += literal


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("doctree-read", _link)
    return {"parallel_read_safe": True}
