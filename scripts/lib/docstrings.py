"""The number of docstrings in src that begin with a word that no verb or noun is: it only falls.

Run by scripts/check, by the standard library alone. The exit status is 1 if there are more than `LEFT`, or if there are
fewer: then lower `LEFT`.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

LEFT = 0
"""The number at the last commit."""
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
    """Count them, and name the first ones where there are too many."""
    found = [
        f"{path.relative_to(SOURCES.parent)}:{line}: {text.splitlines()[0]}"
        for path in sorted(SOURCES.rglob("*.py"))
        for line, text in docstrings(path)
        if FIRST.match(text)
    ]
    if len(found) == LEFT:
        return 0
    if len(found) < LEFT:
        print(f"{len(found)} docstrings are left that begin with What, Whether and the like: set LEFT in {__file__}.")
        return 1
    print(f"{len(found)} docstrings begin with What, Whether and the like, and {LEFT} were left. Some of them:")
    print(*found[:20], sep="\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
