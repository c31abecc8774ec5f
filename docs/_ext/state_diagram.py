"""Mermaid state diagrams drawn by Graphviz while the documents are built.

Mermaid itself is a program for browsers that a page would fetch from somewhere. The diagrams here need so little
of it (one transition a line) that Graphviz draws them as well, into an SVG in the color of the text.
"""

import re
import subprocess

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.util.docutils import SphinxDirective

_TRANSITION = re.compile(r"(\S+) --> (\S+?)(?:: (.+))?")
_BEGIN, _END = "begin", "end"
_HEAD = """digraph {
    bgcolor=transparent; rankdir=TB; nodesep=0.35; ranksep=0.5;
    node [shape=box style=rounded fontname="sans-serif" fontsize=14];
    edge [fontname="sans-serif" fontsize=12 arrowsize=0.7];
"""


def to_dot(mermaid: str) -> str:
    """Translate a Mermaid ``stateDiagram-v2`` to Graphviz; transitions between the same states share an arrow.

    Raises ValueError for a line that is no transition: a picture that left it out would lie.
    """
    lines = [line.strip() for line in mermaid.splitlines() if line.strip()]
    if not lines or lines[0] != "stateDiagram-v2":
        raise ValueError("not a stateDiagram-v2")
    arrows: dict[tuple[str, str], list[str]] = {}
    for line in lines[1:]:
        found = _TRANSITION.fullmatch(line)
        if found is None:
            raise ValueError(f"not a transition: {line}")
        source, target, label = found.groups()
        ends = (_BEGIN if source == "[*]" else source, _END if target == "[*]" else target)
        arrows.setdefault(ends, []).append(label or "")
    text = _HEAD
    for name, shape in ((_BEGIN, "circle"), (_END, "doublecircle")):
        if any(name in ends for ends in arrows):
            text += f'    {name} [label="" shape={shape} width=0.14 style=filled fillcolor=black];\n'
    for (source, target), labels in arrows.items():
        label = r"\n".join(label.replace('"', r"\"") for label in labels)
        text += f'    "{source}" -> "{target}" [label=" {label} "];\n'
    return text + "}\n"


def draw(mermaid: str) -> str:
    """Draw the diagram as an SVG element for HTML."""
    dot = subprocess.run(
        ["dot", "-Tsvg"], input=to_dot(mermaid), capture_output=True, text=True, check=True, timeout=60
    ).stdout
    # Graphviz draws in black, and says nothing of the color of a text that is.
    svg = dot[dot.index("<svg") :].replace('="black"', '="currentColor"')
    return svg.replace("<text ", '<text fill="currentColor" ')


class Mermaid(SphinxDirective):
    """The directive ``mermaid``, and the code fence of that name."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        try:
            svg = draw("\n".join(self.content))
        except FileNotFoundError as error:
            raise ExtensionError("Graphviz is not installed: scripts/docs installs it") from error
        except (ValueError, subprocess.SubprocessError) as error:
            raise self.error(f"the diagram cannot be drawn: {error}") from error
        return [nodes.raw("", f'<div class="diagram">{svg}</div>', format="html")]


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("mermaid", Mermaid)
    return {"parallel_read_safe": True}
