"""The configuration of Sphinx: the pages, tables made from the code, and the man pages.

Nothing is fetched while it builds. `scripts/docs` builds all of it; a warning is a failure.
"""

import runpy
import sys
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "_ext"))
sys.path.insert(0, str(HERE.parent / "src"))

from sphinx.application import Sphinx  # noqa: E402

import command_line  # noqa: E402

project = "vmgahp"
author = "The vmgahp developers"
copyright = "The vmgahp developers, Apache-2.0"
version = release = runpy.run_path(str(HERE.parent / "packaging/version.py"))["version"]()

extensions = ["myst_parser", "command_line"]
extensions += ["blocks", "descriptions", "from_code", "htcondor_manual", "link_names", "links_out", "state_diagram"]
if find_spec("sphinx_copybutton"):  # who builds a package has man pages made, which need no buttons
    extensions.append("sphinx_copybutton")
exclude_patterns = ["_build", "_ext"]

myst_enable_extensions = ["colon_fence", "deflist"]
# GitHub draws such a fence by itself; here the extension state_diagram does.
myst_fence_as_directive = ["mermaid"]
myst_heading_anchors = 3
nitpicky = True
smartquotes = False  # --option must remain what one types

html_theme = "furo"
html_title = "vmgahp"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False
html_search_scorer = str(HERE / "_static/scorer.js")
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#8a3a12", "color-brand-content": "#8a3a12"},
    "dark_css_variables": {"color-brand-primary": "#f0a070", "color-brand-content": "#f0a070"},
}
highlight_language = "text"

# What a program answers has no button. Of a session with prompts only the commands are copied.
copybutton_selector = ", ".join(
    f"div.highlight-{kind} pre" for kind in ("sh", "ini", "console", "python", "toml", "yaml")
)
copybutton_prompt_text = "$ "
copybutton_line_continuation_character = "\\"
copybutton_here_doc_delimiter = "END"
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "a11y-high-contrast-dark"

man_pages = [
    ("man/condor_vm-gahp", "condor_vm-gahp", "runs the VM jobs of HTCondor", author, 1),
    ("man/vmgahp", "vmgahp", "command-line tool for virtual machines as HTCondor jobs", author, 1),
    ("man/vmgahp-image-plugin", "vmgahp-image-plugin", "disks of VM jobs as overlays of images", author, 1),
    *((document, name, text, author, 1) for document, name, text in command_line.man_pages()),
]


def setup(app: Sphinx) -> None:
    # Beside the name it would be wider than a phone.
    app.connect("html-page-context", lambda *args: args[3].update(copyright=f"{copyright}. Version {version}"))
