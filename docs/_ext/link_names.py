"""The first mention of a setting or a job attribute on a page leads to its place in the reference."""

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx

from vmgahp.config.htcondor import ELSEWHERE
from vmgahp.config.table import SETTINGS
from vmgahp.job.attributes import ATTRIBUTES

KINDS = {row.name: "job-attribute" for row in ATTRIBUTES} | {
    setting.name: "confval" for setting in (*SETTINGS, *ELSEWHERE)
}
"""Name -> the kind of object that the reference describes it as."""

OWN_PAGES = ("reference/settings", "reference/job-attributes")


def _link(app: Sphinx, document: nodes.document) -> None:
    page = app.env.current_document.docname
    if page in OWN_PAGES or page.startswith("man/"):
        return
    seen: set[str] = set()
    for literal in list(document.findall(nodes.literal)):
        name = literal.astext().partition(" =")[0].lstrip("+")
        linked = isinstance(literal.parent, nodes.reference | nodes.title | addnodes.pending_xref)
        if name not in KINDS or name in seen or linked:
            continue
        seen.add(name)
        link = addnodes.pending_xref(
            "", refdomain="std", reftype=KINDS[name], reftarget=name, refdoc=page, refexplicit=True
        )
        literal.replace_self(link)
        link += literal


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("doctree-read", _link)
    return {"parallel_read_safe": True}
