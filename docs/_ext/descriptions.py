"""What a search engine, or a link that somebody sends, says of a page: its first paragraph."""

from html import escape
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

LONGEST = 200


def describe(document: nodes.document) -> str:
    """The first paragraph of a page in plain text, cut at a word; empty where a page has none."""
    paragraph = next((p for p in document.findall(nodes.paragraph) if isinstance(p.parent, nodes.section)), None)
    text = " ".join(paragraph.astext().split()) if paragraph else ""
    return text if len(text) <= LONGEST else text[:LONGEST].rpartition(" ")[0] + " …"


def _add(app: Sphinx, page: str, template: str, context: dict[str, Any], document: nodes.document | None) -> None:
    if document is not None and (text := describe(document)):
        context["metatags"] = context.get("metatags", "") + f'<meta name="description" content="{escape(text)}">\n'


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("html-page-context", _add)
    return {"parallel_read_safe": True}
