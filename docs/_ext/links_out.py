"""Rewrite links to files outside of the documents: files can be downloaded, directories are only named.

In a web view of the source tree such links work as they are.
"""

import os
import re

from sphinx.application import Sphinx

_LINK = re.compile(r"\[([^\]\n]+)\]\(((?:\.\./)+[^)\s#]+)\)")


def rewrite(text: str, directory: str, root: str) -> str:
    """Rewrite the links of a page in `directory` that lead out of the documents below `root`."""

    def replace(found: re.Match[str]) -> str:
        label, target = found.groups()
        path = os.path.normpath(os.path.join(directory, target))
        # Sphinx copies plain files beside the page by itself, and complains of what does not exist.
        a_file = os.path.isfile(path) and not path.endswith(".md")
        if path.startswith(root + os.sep) or a_file or not os.path.exists(path):
            return found.group()
        name = os.path.relpath(path, os.path.dirname(root))
        return f"`{name}`" if name.startswith(label.strip("`")) else f"{label} (`{name}` in the source)"

    return _LINK.sub(replace, text)


def _source_read(app: Sphinx, name: str, source: list[str]) -> None:
    page = app.env.doc2path(name)
    source[0] = rewrite(source[0], os.path.dirname(str(page)), str(app.srcdir))


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", _source_read)
    return {"parallel_read_safe": True}
