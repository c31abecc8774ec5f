"""Describe each page to search engines and link previews by its first paragraph."""

from html import escape
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

LONGEST = 200


def describe(document: nodes.document) -> str:
    """Return the first paragraph of a page in plain text, cut at a word; empty without a paragraph."""
    paragraph = next((p for p in document.findall(nodes.paragraph) if isinstance(p.parent, nodes.section)), None)
    text = " ".join(paragraph.astext().split()) if paragraph else ""
    return text if len(text) <= LONGEST else text[:LONGEST].rpartition(" ")[0] + " …"


def _add(app: Sphinx, page: str, template: str, context: dict[str, Any], document: nodes.document | None) -> None:
    if document is not None and (text := describe(document)):
        context["metatags"] = context.get("metatags", "") + f'<meta name="description" content="{escape(text)}">\n'


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("html-page-context", _add)
    return {"parallel_read_safe": True}
