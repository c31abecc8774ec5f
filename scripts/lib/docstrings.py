"""The docstrings in src that begin with a word that no verb or noun is.

Run by scripts/check, by the standard library alone. The exit status is 1 if there are any.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

FIRST = re.compile(r"(What|Whether|Of|Those|Who|Where|That|None|Nobody)\b")
SOURCES = Path(__file__).resolve().parents[2] / "src"


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each docstring of a module, those of attributes too."""
    for node in ast.walk(ast.parse(path.read_text())):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            match statement:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield statement.lineno, text


def main() -> int:
    """Name the first ones, and count them."""
    found = [
        f"{path.relative_to(SOURCES.parent)}:{line}: {text.splitlines()[0]}"
        for path in sorted(SOURCES.rglob("*.py"))
        for line, text in docstrings(path)
        if FIRST.match(text)
    ]
    if found:
        print(f"{len(found)} docstrings begin with What, Whether and the like. Some of them:", *found[:20], sep="\n")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
